"""What the planners make of the same sequences, one strategy each, as schedules that can be timed.

Every strategy sees as many sequences in every step, and all but sorted batches the same ones, so that they are compared
at equal global batches. Nothing that packtool trains is imitated: packs are those of ``rearrange``, which
``--dynamic-batch-tokens`` trains, rows are sorted by ``group_by_length``, and Skrull is ``schedule_step``. Two are on
paper only: packs of equal work (WLB-LLM), and groups of many sizes (``place_in_groups``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from packtool.config.simulate import StrategyName, StrategyOptions
from packtool.plan.balance import even_packs, share_out
from packtool.plan.dynamic import rearrange
from packtool.plan.epoch import group_by_length
from packtool.plan.options import SkrullOptions
from packtool.plan.pack_plan import Int32Array
from packtool.plan.packing import pack_singletons
from packtool.plan.skrull import SHARDED, schedule_step
from packtool.simulate.cost import Int64Array, Machine, SimulatedSchedule, way_of

_LIMITS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, np.inf)
"""Times for one sequence that are tried, in units of what a step takes at the least."""


@dataclass(frozen=True, eq=False)
class PlacedBatch:
    """n sequences of a micro-batch.

    Args:
        step: of the micro-batch.
        first_device, num_devices: that share it.
        samples: int64 (n,).
        places: int64 (n,), rank of these devices, or ``SHARDED``.
    """

    step: int
    first_device: int
    num_devices: int
    samples: Int64Array
    places: Int64Array

    @classmethod
    def sharded(cls, step: int, first_device: int, num_devices: int, samples: Int64Array) -> PlacedBatch:
        """A micro-batch of which every device computes a part of every sequence."""
        return cls(step, first_device, num_devices, samples, np.full(len(samples), SHARDED, np.int64))


def place_in_groups(
    lengths: npt.NDArray[np.integer[Any]],
    targets: npt.NDArray[np.integer[Any]],
    machine: Machine,
    bucket_size: int,
) -> Iterator[list[PlacedBatch]]:
    """Dynamic context parallelism on paper: each sequence of step 0 on a group as large as it needs, in several ways.

    What Megatron-LM (pull request 2282), FlexSP (Wang et al. 2024, arXiv 2412.01523) and ByteScale (Ge et al. 2025,
    arXiv 2502.21231) do: of W devices, aligned groups of 1, 2, 4, ... share a sequence, long ones many, short ones one.

        four devices       [    160 by four    ]
                           [40 by two][18][21]
                           [ 9 ][ 11 ]

    Larger groups come first, and those of the next size lie within them, so that devices begin each sequence together
    and none waits but at the end. The sequences of a group are divided into micro-batches of what its devices can hold.
    A sequence gets the smallest group that holds it and is done with it in a given time; several such times are tried.

    A group is of a power of two devices, and begins at a multiple of it; in a micro-batch, samples come by number.

    Args:
        lengths: (n,), tokens; what the largest group cannot hold is placed there all the same.
        targets: (n,), tokens with a label.
        bucket_size: tokens that a device may hold.

    Price: O(n W) for each way.
    """
    sizes = [1 << level for level in range((machine.world_size & -machine.world_size).bit_length())]
    tokens = np.stack([_aligned(lengths.astype(np.int64), 2 * size if size > 1 else 1) for size in sizes])
    seconds = np.stack([_seconds(machine, row, targets, size) for row, size in zip(tokens, sizes, strict=True)])
    held = tokens <= bucket_size * np.array(sizes)[:, None]
    smallest = np.where(held.any(axis=0), held.argmax(axis=0), len(sizes) - 1)
    least = seconds[0].sum() / machine.world_size
    before = None
    for limit in _LIMITS:
        quick = seconds <= limit * least
        levels = np.maximum(smallest, np.where(quick.any(axis=0), quick.argmax(axis=0), seconds.argmin(axis=0)))
        if before is None or (levels != before).any():
            yield _placed(levels, seconds, tokens, sizes, bucket_size, machine.world_size)
        before = levels


def _seconds(
    machine: Machine, tokens: Int64Array, targets: npt.NDArray[np.integer[Any]], size: int
) -> npt.NDArray[np.float64]:
    """Times (n,) of each sequence alone on a group of this size, without what every micro-batch costs besides."""
    times = machine.step_time(size)
    loads = times.loads(tokens, machine.sizes.cost(tokens, machine.sizes.cost.attention(tokens), targets), size)
    busy = np.array([load.flops for load in loads]) / size / times.flops_per_second
    attention = np.array([load.attention for load in loads]) / size / times.flops_per_second
    return busy + times.waited(tokens.astype(np.float64), np.zeros(len(tokens)), attention)


def _placed(
    levels: Int64Array,
    seconds: npt.NDArray[np.float64],
    tokens: Int64Array,
    sizes: list[int],
    bucket_size: int,
    world_size: int,
) -> list[PlacedBatch]:
    """The largest groups first; in each size the longest-running sequence first, to the group with the least so far."""
    loads, found = np.zeros(world_size), list[PlacedBatch]()
    for level in range(len(sizes) - 1, -1, -1):
        size = sizes[level]
        members: list[list[int]] = [[] for _ in range(world_size // size)]
        mine = np.flatnonzero(levels == level)
        for one in mine[np.argsort(-seconds[level, mine], kind="stable")].tolist():
            group = int(loads[::size].argmin())
            members[group].append(one)
            loads[group * size : (group + 1) * size] += seconds[level, one]
        for group, hand in enumerate(members):
            for batch in _micro_batches(hand, tokens[level], bucket_size * size):
                found.append(PlacedBatch.sharded(0, group * size, size, batch))
    return found


def _micro_batches(hand: list[int], tokens: Int64Array, room: int) -> list[Int64Array]:
    """A group's sequences in the fewest micro-batches that the emptiest-first rule manages."""
    sizes = tokens.tolist()
    falling = sorted(hand, key=lambda i: (-sizes[i], i))
    for num in range(min(-(-int(tokens[hand].sum()) // room), len(hand)), len(hand) + 1):
        batches = share_out(falling, sizes, num)
        if num == len(hand) or max(int(tokens[batch].sum()) for batch in batches) <= room:
            return [np.array(sorted(batch), np.int64) for batch in batches]
    return []


TITLES: dict[StrategyName, str] = {
    "padded": "padded",
    "packed": "packed",
    "packed-balanced": "packed, balanced",
    "context-parallel": "context parallel for all",
    "sorted": "context parallel, sorted",
    "packed-shared": "context parallel, packed",
    "wlb": "context parallel, balanced (WLB-LLM)",
    "dynamic-cp": "dynamic context parallel",
    "skrull": "Skrull",
}
"""Every strategy, in the order of the table."""

_Integers = TypeVar("_Integers", Int32Array, Int64Array)


@dataclass(frozen=True, eq=False)
class Sequences:
    """What there is to train, in the order in which it comes.

    Args:
        lengths: int32 (N,), tokens.
        targets: int64 (N,), those with a label.
    """

    lengths: Int32Array
    targets: Int64Array

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, some: slice) -> Sequences:
        return Sequences(self.lengths[some], self.targets[some])


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(StrategyOptions):
    """What is simulated: the options as they were declared, and what they come to.

    Args:
        machine: model and devices.
        sequence_parallel_size: N, ranks that share a micro-batch, where any do; divides the devices.
        bucket_size: C, tokens that a device may hold at a time; more is out of memory.
        packing_length: tokens of a pack, on each device.
        num_steps: to simulate, where there are as many.
    """

    machine: Machine
    sequence_parallel_size: int
    bucket_size: int
    packing_length: int
    num_steps: int = 8

    @property
    def num_groups(self) -> int:
        """Data-parallel ranks of N devices each."""
        return self.machine.world_size // self.sequence_parallel_size

    @property
    def sequences_per_step(self) -> int:
        """Sequences of a global batch."""
        return self.num_groups * self.sequences_per_rank

    @property
    def alignment(self) -> int:
        """Tokens that a sharded sequence is padded to a multiple of, where N devices share it."""
        return alignment_of(self.sequence_parallel_size)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that any strategy could train."""
        return max(self.bucket_size * self.sequence_parallel_size // self.alignment * self.alignment, self.bucket_size)

    @property
    def way(self) -> str:
        """How the devices of a group exchange what they share; nothing where nothing is shared."""
        machine, size = self.machine, self.sequence_parallel_size
        return way_of(machine.way, machine.sizes, machine.hardware, size) if size > 1 else ""

    @property
    def sequences_wanted(self) -> int:
        """How many sequences give every strategy its number of full steps."""
        return self.num_steps * self.sequences_per_step


def alignment_of(num_ranks: int) -> int:
    """Tokens that a sequence which so many ranks share is padded to a multiple of: two chunks each, for equal work."""
    return 2 * num_ranks if num_ranks > 1 else 1


def schedule(name: StrategyName, sequences: Sequences, options: SimulateOptions) -> SimulatedSchedule:
    """What a strategy makes of sequences.

    Args:
        sequences: in a random order; none longer than ``options.longest``.

    Returns:
        The first steps, at most ``options.num_steps``: full ones, or one that is not if there are no full ones.
    """
    num_steps = min(max(len(sequences) // options.sequences_per_step, 1), options.num_steps)
    return _STRATEGIES[name](sequences[: num_steps * options.sequences_per_step], options)


def _padded(sequences: Sequences, options: SimulateOptions) -> SimulatedSchedule:
    return _in_rows(sequences, options, options.machine.world_size, options.padded_batch_size)


def _context_parallel(sequences: Sequences, options: SimulateOptions) -> SimulatedSchedule:
    return _in_rows(sequences, options, options.num_groups, options.shared_batch_size)


def _sorted(sequences: Sequences, options: SimulateOptions) -> SimulatedSchedule:
    rows = pack_singletons(sequences.lengths, options.longest, seed=options.seed, shuffle=False)
    order = group_by_length(rows, options.sequences_per_step).samples
    return _in_rows(sequences, options, options.num_groups, options.shared_batch_size, order)


def _in_rows(
    sequences: Sequences, options: SimulateOptions, num_groups: int, most_rows: int, order: Int64Array | None = None
) -> SimulatedSchedule:
    """Micro-batches of padded rows, in the order in which they come or another one, given to the groups in turn."""
    order = np.arange(len(sequences)) if order is None else order
    rows = max(1, min(most_rows, options.sequences_per_step // num_groups))
    batches = []
    for step, first in enumerate(range(0, len(order), options.sequences_per_step)):
        part = order[first : first + options.sequences_per_step]
        for number, start in enumerate(range(0, len(part), rows)):
            batches.append(_on_group(step, number % num_groups, num_groups, part[start : start + rows], options))
    return schedule_of(batches, sequences, options, is_padded=True)


def _packed(sequences: Sequences, options: SimulateOptions) -> SimulatedSchedule:
    return _of_equal_tokens(sequences, options, options.machine.world_size)


def _packed_shared(sequences: Sequences, options: SimulateOptions) -> SimulatedSchedule:
    return _of_equal_tokens(sequences, options, options.num_groups)


def _of_equal_tokens(sequences: Sequences, options: SimulateOptions, num_groups: int) -> SimulatedSchedule:
    """Packs of a step's sequences, as ``--dynamic-batch-tokens`` makes them: as few as fit, about equally full."""
    num_ranks = options.machine.world_size // num_groups
    capacity = options.packing_length * num_ranks
    # What is longer than a pack gets one of its own, and is out of memory.
    lengths = np.minimum(_aligned(sequences.lengths, alignment_of(num_ranks)), capacity)
    found = rearrange(lengths, samples_per_step=options.sequences_per_step, num_ranks=num_groups, max_tokens=capacity)
    packs = iter(np.split(found.order, np.cumsum(found.cell_sizes)[:-1]))
    batches = []
    for step, num_packs in enumerate(found.cells_per_step.tolist()):
        for number in range(num_packs):
            batches.append(_on_group(step, number // (num_packs // num_groups), num_groups, next(packs), options))
    return schedule_of(batches, sequences, options)


def _packed_balanced(sequences: Sequences, options: SimulateOptions) -> SimulatedSchedule:
    return _of_equal_work(sequences, options, options.machine.world_size)


def _wlb(sequences: Sequences, options: SimulateOptions) -> SimulatedSchedule:
    return _of_equal_work(sequences, options, options.num_groups)


def _of_equal_work(sequences: Sequences, options: SimulateOptions, num_groups: int) -> SimulatedSchedule:
    """Packs of a step's sequences that take equally long, attention and all else together, as many on every rank.

    WLB-LLM (Wang et al. 2025, arXiv 2503.17924) balances packs of several lengths by both, under a limit of tokens, and
    cuts every document by itself, as packtool does. Its queue for outliers, which changes a step's sequences, is left
    out.
    """
    num_ranks = options.machine.world_size // num_groups
    capacity = options.packing_length * num_ranks
    times, cost = options.machine.step_time(num_ranks), options.machine.sizes.cost
    batches = []
    for step, first in enumerate(range(0, len(sequences), options.sequences_per_step)):
        part = sequences[first : first + options.sequences_per_step]
        tokens = _aligned(part.lengths.astype(np.int64), alignment_of(num_ranks))
        loads = times.loads(tokens, cost(tokens, tokens**2, part.targets), num_ranks)
        sizes, work = np.minimum(tokens, capacity).tolist(), [load.flops for load in loads]
        packs: list[list[int]] | None = None
        num_packs = num_groups * -(-sum(sizes) // (capacity * num_groups))
        while packs is None:
            packs = even_packs(sizes, work, num_packs, capacity)
            num_packs += num_groups
        for number, pack in enumerate(packs):
            samples = np.array(sorted(pack), np.int64) + first
            batches.append(_on_group(step, number % num_groups, num_groups, samples, options))
    return schedule_of(batches, sequences, options)


def _skrull(sequences: Sequences, options: SimulateOptions) -> SimulatedSchedule:
    per_step, size = options.sequences_per_step, options.sequence_parallel_size
    cost = options.machine.sizes.cost
    skrull = SkrullOptions(
        bucket_size=options.bucket_size,
        sequence_parallel_size=size,
        alignment=options.alignment,
        times=options.machine.step_time(size),
    )
    batches = []
    for step, first in enumerate(range(0, len(sequences), per_step)):
        part = sequences[first : first + per_step]
        lengths = part.lengths.astype(np.int64)
        ranks = schedule_step(
            lengths,
            cost(lengths, cost.attention(lengths), target_tokens=part.targets),
            skrull,
            num_ranks=options.num_groups,
        )
        for group, micro_batches in enumerate(ranks):
            for batch in micro_batches:
                batches.append(PlacedBatch(step, group * size, size, batch.samples + first, batch.places))
    return schedule_of(batches, sequences, options)


def _dynamic_cp(sequences: Sequences, options: SimulateOptions) -> SimulatedSchedule:
    """Each step's sequences in groups: of several ways to place them, the one that is timed fastest."""
    per_step, machine = options.sequences_per_step, options.machine
    found: list[PlacedBatch] = []
    for step, first in enumerate(range(0, len(sequences), per_step)):
        part = sequences[first : first + per_step]
        best, least = list[PlacedBatch](), np.inf
        for batches in place_in_groups(part.lengths, part.targets, machine, options.bucket_size):
            one = schedule_of(batches, part, options)
            seconds = float(machine.time(one, part.targets[one.samples]).step_seconds[0])
            if seconds < least:
                best, least = batches, seconds
        found += [replace(batch, step=step, samples=batch.samples + first) for batch in best]
    return schedule_of(found, sequences, options)


def _on_group(step: int, group: int, num_groups: int, samples: Int64Array, options: SimulateOptions) -> PlacedBatch:
    """A micro-batch that all devices of a group share."""
    num_ranks = options.machine.world_size // num_groups
    return PlacedBatch.sharded(step, group * num_ranks, num_ranks, samples)


def schedule_of(
    batches: Iterable[PlacedBatch], sequences: Sequences, options: SimulateOptions, *, is_padded: bool = False
) -> SimulatedSchedule:
    """Micro-batches as a schedule, without empty ones; the batches come by step.

    Args:
        is_padded: a micro-batch's sequences are padded to its longest.
    """
    cells = [batch for batch in batches if len(batch.samples)]
    nothing = np.zeros(0, dtype=np.int64)
    samples = np.concatenate([nothing, *(batch.samples for batch in cells)])
    places = np.concatenate([nothing, *(_places_on(batch) for batch in cells)])
    sizes = np.array([len(batch.samples) for batch in cells], dtype=np.int64)
    ranks = np.array([batch.num_devices for batch in cells], dtype=np.int64)
    tokens: Int64Array = sequences.lengths[samples].astype(np.int64)
    if is_padded:
        tokens = np.repeat(np.maximum.reduceat(tokens, np.cumsum(sizes) - sizes), sizes)
    return SimulatedSchedule(
        num_devices=options.machine.world_size,
        num_steps=1 + max(batch.step for batch in cells),
        samples=samples,
        tokens=np.where(places == SHARDED, _aligned(tokens, 2 * np.repeat(ranks, sizes)), tokens),
        places=places,
        cells=np.repeat(np.arange(len(cells)), sizes),
        cell_steps=np.array([batch.step for batch in cells], dtype=np.int64),
        cell_ranks=ranks,
        cell_devices=np.array([batch.first_device for batch in cells], dtype=np.int64),
    )


def _places_on(batch: PlacedBatch) -> Int64Array:
    """Its places; a lone device shares nothing."""
    return batch.places if batch.num_devices > 1 else np.zeros_like(batch.places)


def _aligned(tokens: _Integers, alignment: int | Int64Array) -> _Integers:
    return -(-tokens // alignment) * alignment


_STRATEGIES: dict[StrategyName, Callable[[Sequences, SimulateOptions], SimulatedSchedule]] = {
    "padded": _padded,
    "packed": _packed,
    "packed-balanced": _packed_balanced,
    "context-parallel": _context_parallel,
    "sorted": _sorted,
    "packed-shared": _packed_shared,
    "wlb": _wlb,
    "dynamic-cp": _dynamic_cp,
    "skrull": _skrull,
}
