"""Schedules of the same sequences by the planner of each strategy, which can be timed.

Every strategy has equally many sequences in every step, and all except sorted batches the same ones, so that they are
compared at equal global batches. Two are only simulated: packs of equal work (WLB-LLM), and groups of many sizes
(``place_in_groups``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from packtool.config.simulate import StrategyName, StrategyOptions
from packtool.planning.dynamic import assign_by_tokens
from packtool.planning.epoch import group_by_length
from packtool.planning.options import SkrullOptions
from packtool.planning.pack_plan import Costs, Int32Array, Int64Array, IntArray
from packtool.planning.packing import pack_singletons
from packtool.planning.skrull import SHARDED, schedule_step
from packtool.planning.steps import assign_to_lightest, divide_evenly
from packtool.simulate.machine import Machine, SimulatedSchedule, exchange_type_of

_RELATIVE_TIME_LIMITS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, np.inf)
"""Time limits for one sequence that are tried, as multiples of the mean seconds of a device."""


class PlacedBatch(NamedTuple):
    """n sequences on ``num_devices``; ``placement`` (n,): rank or ``SHARDED``; None: all are sharded."""

    first_device: int
    num_devices: int
    samples: Int64Array
    placement: Int64Array | None = None
    step: int = 0


def place_in_groups(
    lengths: IntArray, targets: IntArray, machine: Machine, bucket_size: int
) -> Iterator[list[PlacedBatch]]:
    """Place a step's sequences by dynamic context parallelism: many devices share a long one, few a short one.

    As in Megatron-LM (pull request 2282), FlexSP (Wang et al. 2024, arXiv 2412.01523) and ByteScale (Ge et al. 2025,
    arXiv 2502.21231). A group of level l has 2^l neighboring devices. A sequence gets the smallest group that holds it
    and finishes it within a time limit. Yields the placement for each of several time limits.

    Args:
        lengths: tokens of each sequence, (n,).
        targets: how many of these have a label, (n,).
        bucket_size: tokens that a device holds.
    """
    sizes = _group_sizes(machine.world_size)  # devices of a group, by level
    tokens, seconds = _tokens_and_seconds(lengths, targets, sizes, machine)  # (levels, n) each
    group_capacities = bucket_size * np.array(sizes)
    has_space = tokens <= group_capacities[:, None]
    min_levels = _lowest_level(has_space, default=len(sizes) - 1)  # of each sequence, (n,)
    fastest_levels = seconds.argmin(axis=0)  # for those that no group finishes in time
    mean_device_seconds = seconds[0].sum() / machine.world_size  # without sharing
    previous_levels = None
    for relative_limit in _RELATIVE_TIME_LIMITS:
        is_in_time = seconds <= relative_limit * mean_device_seconds
        levels = np.maximum(min_levels, _lowest_level(is_in_time, default=fastest_levels))
        if previous_levels is None or not np.array_equal(levels, previous_levels):
            yield _place_on_levels(levels, seconds, tokens, sizes, bucket_size, machine.world_size)
        previous_levels = levels


def _tokens_and_seconds(
    lengths: IntArray, targets: IntArray, sizes: list[int], machine: Machine
) -> tuple[Int64Array, npt.NDArray[np.float64]]:
    """Return tokens with padding, and seconds, of each sequence on a group of each size, (levels, n) each."""
    tokens = np.stack([_aligned(lengths.astype(np.int64), alignment_of(size)) for size in sizes])
    seconds = [_seconds_in_group(tokens[level], targets, size, machine) for level, size in enumerate(sizes)]
    return tokens, np.stack(seconds)


def _group_sizes(world_size: int) -> list[int]:
    """Return the powers of two that divide the number of devices, ascending."""
    sizes = [1]
    while world_size % (2 * sizes[-1]) == 0:
        sizes.append(2 * sizes[-1])
    return sizes


def _seconds_in_group(tokens: Int64Array, targets: IntArray, size: int, machine: Machine) -> npt.NDArray[np.float64]:
    """Return the seconds (n,) of each sequence on a group of ``size`` devices, without the cost of a micro-batch."""
    times = machine.step_time(size)
    flops, attention_flops = _work(tokens, targets, size, machine)
    attention_seconds = attention_flops / size / times.flops_per_second
    # Each sequence is timed alone: no attention of other sequences hides its exchanges.
    local_attention_seconds = np.zeros(len(tokens))
    exposed = times.exposed_seconds(tokens.astype(np.float64), local_attention_seconds, attention_seconds)
    return np.asarray(flops / size / times.flops_per_second + exposed)


def _work(tokens: Int64Array, targets: IntArray, size: int, machine: Machine) -> tuple[Costs, Costs]:
    """Return the work (n,) of each sequence on ``size`` devices together, and attention's part of it (``StepTime``)."""
    cost = machine.sizes.cost
    flops = cost(tokens, cost.attention(tokens), targets)
    return machine.step_time(size).work(tokens, flops, size)


def _lowest_level(is_possible: npt.NDArray[np.bool_], *, default: int | Int64Array) -> Int64Array:
    """Return the first possible level of each sequence, or else ``default``, (n,); ``is_possible`` is (levels, n)."""
    return np.where(is_possible.any(axis=0), is_possible.argmax(axis=0), default)


def _place_on_levels(
    levels: Int64Array,
    seconds: npt.NDArray[np.float64],
    tokens: Int64Array,
    sizes: list[int],
    bucket_size: int,
    world_size: int,
) -> list[PlacedBatch]:
    """Place sequences on groups of devices, the largest groups first.

    Args:
        levels: of the group that each sequence gets, (n,): a group of level l has ``sizes[l]`` devices.
        seconds, tokens: of each sequence on a group of each level, (levels, n).
        bucket_size: tokens that a device holds.
    """
    device_seconds = np.zeros(world_size)  # until each device is free
    batches: list[PlacedBatch] = []
    for level in reversed(range(len(sizes))):
        group_size = sizes[level]
        samples = np.flatnonzero(levels == level)
        samples_of_groups = _assign_to_groups(samples, seconds[level], group_size, device_seconds)
        for group, group_samples in enumerate(samples_of_groups):
            for batch in _divide_to_fit(group_samples, tokens[level], bucket_size * group_size):
                batches.append(PlacedBatch(first_device=group * group_size, num_devices=group_size, samples=batch))
    return batches


def _assign_to_groups(
    samples: Int64Array, seconds: npt.NDArray[np.float64], size: int, device_seconds: npt.NDArray[np.float64]
) -> list[list[int]]:
    """Assign sequences, the slowest first, to the group of ``size`` devices that is free first; return those of each.

    Adds their ``seconds``, (n,), to ``device_seconds``. Before, the devices of a group must be equally busy.
    """
    samples_of_group: list[list[int]] = [[] for _ in range(len(device_seconds) // size)]
    slowest_first = samples[np.argsort(-seconds[samples], kind="stable")]
    for sample in slowest_first.tolist():
        group = int(device_seconds[::size].argmin())
        samples_of_group[group].append(sample)
        device_seconds[group * size : (group + 1) * size] += seconds[sample]
    return samples_of_group


def _divide_to_fit(samples: list[int], tokens: Int64Array, capacity: int) -> list[Int64Array]:
    """Divide a group's sequences into the fewest micro-batches that fit, each sequence going to the emptiest one."""
    sizes = tokens.tolist()
    descending = sorted(samples, key=lambda i: (-sizes[i], i))
    for num in range(min(-(-int(tokens[samples].sum()) // capacity), len(samples)), len(samples) + 1):
        batches = assign_to_lightest(descending, sizes, num)
        if num == len(samples) or max(int(tokens[batch].sum()) for batch in batches) <= capacity:
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
    """Sequences to train, in order: int32 ``lengths`` and int64 ``targets``, the tokens with a label, (N,) each."""

    lengths: Int32Array
    targets: Int64Array

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: slice | Int64Array) -> Sequences:
        return Sequences(self.lengths[index], self.targets[index])


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(StrategyOptions):
    """Declared options of a simulation, and the values derived from them.

    Args:
        sequence_parallel_size: N, ranks that share a micro-batch, in strategies that share; divides the devices.
        bucket_size: tokens that a device may hold at a time; more is out of memory.
        packing_length: tokens of a pack, on each device.
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
        return self.num_groups * self.sequences_per_rank

    @property
    def skrull(self) -> SkrullOptions:
        size = self.sequence_parallel_size
        return SkrullOptions(
            bucket_size=self.bucket_size,
            sequence_parallel_size=size,
            alignment=alignment_of(size),
            step_time=self.machine.step_time(size),
        )

    @property
    def longest_trainable(self) -> int:
        """Tokens of the longest sequence that any strategy could train."""
        return self.skrull.max_length

    @property
    def exchange_type(self) -> str:
        """Exchange of keys and values, or heads, among the devices of a group; "" if nothing is shared."""
        machine, size = self.machine, self.sequence_parallel_size
        if size == 1:
            return ""
        return exchange_type_of(machine.sequence_parallel_type, machine.sizes, machine.hardware, size)


def alignment_of(num_ranks: int) -> int:
    """Return the tokens that a sequence shared by ``num_ranks`` is padded to a multiple of: two equal chunks each."""
    return 2 * num_ranks if num_ranks > 1 else 1


def schedule(name: StrategyName, sequences: Sequences, options: SimulateOptions) -> SimulatedSchedule:
    """Schedule sequences on devices by a strategy, such as "packed": which devices compute which sequences when.

    The schedule has at most ``options.num_steps`` steps: the first full ones, or one partial step if none is full.

    Args:
        sequences: in random order, of at most ``options.longest_trainable`` tokens each.
    """
    per_step = options.sequences_per_step
    num_steps = min(max(len(sequences) // per_step, 1), options.num_steps)
    sequences = sequences[: num_steps * per_step]
    order = np.arange(len(sequences))
    if name == "sorted":
        order = _order_by_length(sequences, options)

    # Devices that share sequences form a group; without sharing, each device is a group.
    num_groups = options.machine.world_size if name in _UNSHARED else options.num_groups
    place_step = _STRATEGIES[name]
    batches: list[PlacedBatch] = []
    for step in range(num_steps):
        step_samples = order[step * per_step : (step + 1) * per_step]
        for batch in place_step(sequences[step_samples], options, num_groups):
            samples = step_samples[batch.samples]  # from numbers in the step to numbers in ``sequences``
            batches.append(batch._replace(step=step, samples=samples))
    return schedule_of(batches, sequences, options, is_padded=name in _PADDED)


def _order_by_length(sequences: Sequences, options: SimulateOptions) -> Int64Array:
    """Order sequences so that those of similar lengths are in the same step."""
    rows = pack_singletons(sequences.lengths, options.longest_trainable, seed=options.seed, shuffle=False)
    return group_by_length(rows, options.sequences_per_step).samples


def _rows(sequences: Sequences, options: SimulateOptions, num_groups: int, max_rows: int) -> Iterator[PlacedBatch]:
    """Yield micro-batches of padded rows, in their order, given to the groups in turn."""
    num_rows = max(1, min(max_rows, options.sequences_per_step // num_groups))
    size = options.machine.world_size // num_groups
    for number, start in enumerate(range(0, len(sequences), num_rows)):
        yield PlacedBatch(number % num_groups * size, size, np.arange(start, min(start + num_rows, len(sequences))))


def _shared_rows(sequences: Sequences, options: SimulateOptions, num_groups: int) -> Iterator[PlacedBatch]:
    return _rows(sequences, options, num_groups, options.shared_batch_size)


def _equal_tokens(sequences: Sequences, options: SimulateOptions, num_groups: int) -> Iterator[PlacedBatch]:
    """Yield packs of a step's sequences as ``--dynamic-batch-tokens`` makes them: few, and about equally full."""
    size = options.machine.world_size // num_groups
    capacity = options.packing_length * size
    # Sequences longer than a pack get one of their own, and are out of memory.
    lengths = np.minimum(_aligned(sequences.lengths, alignment_of(size)), capacity)
    assignment = assign_by_tokens(lengths, samples_per_step=len(sequences), num_ranks=num_groups, max_tokens=capacity)
    packs = np.split(assignment.order, np.cumsum(assignment.micro_batch_sizes)[:-1])
    for number, samples in enumerate(packs):
        yield PlacedBatch(number // (len(packs) // num_groups) * size, size, samples)


def _equal_work(sequences: Sequences, options: SimulateOptions, num_groups: int) -> Iterator[PlacedBatch]:
    """Yield packs of a step's sequences of about equal work, attention included; each group gets equally many packs.

    As in WLB-LLM (Wang et al. 2025, arXiv 2503.17924), but no sequence moves to a later step. The devices of a group
    share each of its packs.
    """
    machine = options.machine
    group_size = machine.world_size // num_groups  # devices
    max_pack_tokens = options.packing_length * group_size
    tokens = _aligned(sequences.lengths.astype(np.int64), alignment_of(group_size))
    work, _ = _work(tokens, sequences.targets, group_size, machine)  # FLOPs of each sequence
    capped_tokens = np.minimum(tokens, max_pack_tokens).tolist()  # a longer sequence gets a pack of its own

    # Use the fewest packs per group in which all sequences fit.
    packs: list[list[int]] | None = None
    packs_per_group = math.ceil(sum(capped_tokens) / (max_pack_tokens * num_groups))
    while packs is None:
        packs = divide_evenly(capped_tokens, work.tolist(), packs_per_group * num_groups, max_pack_tokens)
        packs_per_group += 1

    for number, pack in enumerate(packs):
        group = number % num_groups
        samples = np.array(sorted(pack), np.int64)
        yield PlacedBatch(first_device=group * group_size, num_devices=group_size, samples=samples)


def _skrull(sequences: Sequences, options: SimulateOptions, num_groups: int) -> Iterator[PlacedBatch]:
    size, cost = options.sequence_parallel_size, options.machine.sizes.cost
    lengths = sequences.lengths.astype(np.int64)
    flops = cost(lengths, cost.attention(lengths), target_tokens=sequences.targets)
    for group, micro_batches in enumerate(schedule_step(lengths, flops, options.skrull, num_ranks=num_groups)):
        for batch in micro_batches:
            yield PlacedBatch(group * size, size, np.array(batch.samples), np.array(batch.placement))


def _dynamic_cp(sequences: Sequences, options: SimulateOptions, num_groups: int) -> list[PlacedBatch]:
    def seconds(batches: list[PlacedBatch]) -> float:
        plan = schedule_of(batches, sequences, options)
        return float(options.machine.time(plan, sequences.targets[plan.samples]).step_seconds[0])

    return min(place_in_groups(sequences.lengths, sequences.targets, options.machine, options.bucket_size), key=seconds)


def schedule_of(
    batches: Iterable[PlacedBatch], sequences: Sequences, options: SimulateOptions, *, is_padded: bool = False
) -> SimulatedSchedule:
    """Join micro-batches to a schedule, without those that have no sequences.

    Args:
        batches: ordered by step, at least one of them with sequences; ``samples`` are numbers in ``sequences``.
        is_padded: pad sequences to the longest one of their micro-batch.
    """
    nonempty = [batch for batch in batches if len(batch.samples)]
    # Arrays of the C micro-batches:
    num_sequences = np.array([len(batch.samples) for batch in nonempty], np.int64)
    num_devices = np.array([batch.num_devices for batch in nonempty], np.int64)
    steps = np.array([batch.step for batch in nonempty], np.int64)
    first_devices = np.array([batch.first_device for batch in nonempty], np.int64)
    # Arrays of the K sequences, micro-batch by micro-batch:
    samples = np.concatenate([batch.samples for batch in nonempty]).astype(np.int64)
    placement = np.concatenate([_placement_of(batch) for batch in nonempty])
    micro_batch_of = np.repeat(np.arange(len(nonempty)), num_sequences)
    tokens: Int64Array = sequences.lengths[samples].astype(np.int64)
    if is_padded:
        tokens = _max_of_batches(tokens, num_sequences)[micro_batch_of]
    # Every device gets two equal chunks of a sharded sequence.
    sharded_tokens = _aligned(tokens, alignment=2 * num_devices[micro_batch_of])
    return SimulatedSchedule(
        num_devices=options.machine.world_size,
        num_steps=1 + int(steps.max()),
        samples=samples,
        tokens=np.where(placement == SHARDED, sharded_tokens, tokens),
        placement=placement,
        micro_batch_of=micro_batch_of,
        micro_batch_steps=steps,
        micro_batch_num_devices=num_devices,
        micro_batch_first_device=first_devices,
    )


def _max_of_batches(tokens: Int64Array, num_sequences: Int64Array) -> Int64Array:
    """Return the most tokens of a sequence in each of C micro-batches, (C,), whose sequences are adjacent."""
    first_sequences = np.cumsum(num_sequences) - num_sequences
    return np.maximum.reduceat(tokens, first_sequences)


def _placement_of(batch: PlacedBatch) -> Int64Array:
    """Return the placement of each sequence of a micro-batch; without one, all devices share all sequences."""
    if batch.placement is not None:
        return batch.placement
    if batch.num_devices > 1:
        return np.full(len(batch.samples), SHARDED)
    return np.zeros(len(batch.samples), np.int64)  # the only device


def _aligned(tokens: _Integers, alignment: int | Int64Array) -> _Integers:
    """Round up to a multiple of ``alignment``."""
    return -(-tokens // alignment) * alignment


_PADDED = ("padded", "context-parallel", "sorted")
_UNSHARED = ("padded", "packed", "packed-balanced")
_STRATEGIES: dict[StrategyName, Callable[[Sequences, SimulateOptions, int], Iterable[PlacedBatch]]] = {
    "padded": lambda sequences, options, num_groups: _rows(sequences, options, num_groups, options.padded_batch_size),
    "packed": _equal_tokens,
    "packed-balanced": _equal_work,
    "context-parallel": _shared_rows,
    "sorted": _shared_rows,
    "packed-shared": _equal_tokens,
    "wlb": _equal_work,
    "dynamic-cp": _dynamic_cp,
    "skrull": _skrull,
}
