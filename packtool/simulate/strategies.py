"""What the planners make of the same sequences, one strategy each, as schedules that can be timed.

Nothing is imitated: sequences are packed by ``pack``, assigned by ``assign_packs`` and placed by ``schedule_step``, as
for training. Strategies that keep to a global batch (plain, context parallel, sorted, Skrull) see the same sequences in
the same steps, sorted batches excepted, which exchange them between steps. Packed strategies fill every rank of a step,
so a step of theirs holds more sequences where these are short; they are compared by tokens a second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from packtool.config.packing import Balance
from packtool.config.simulate import StrategyName, StrategyOptions
from packtool.plan.epoch import assign_packs, group_by_length
from packtool.plan.options import PlanOptions
from packtool.plan.pack_plan import Int32Array, PackPlan, offsets_of, with_packs_in_order
from packtool.plan.packing import pack, pack_singletons
from packtool.plan.shuffle import RandomStream, seeded_order
from packtool.plan.skrull import SHARDED, PlacedMicroBatch, schedule_step
from packtool.plan.steps import StepPlan
from packtool.simulate.cost import Int64Array, Machine, SimulatedSchedule

TITLES: dict[StrategyName, str] = {
    "padded": "padded",
    "packed": "packed",
    "packed-balanced": "packed, balanced",
    "context-parallel": "context parallel for all",
    "sorted": "context parallel, sorted",
    "packed-shared": "context parallel, packed",
    "skrull": "Skrull",
}
"""Every strategy, in the order of the table."""

_Integers = TypeVar("_Integers", Int32Array, Int64Array)


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
        """Tokens that a sharded sequence is padded to a multiple of: two chunks a rank, so that all have equal work."""
        return 2 * self.sequence_parallel_size if self.sequence_parallel_size > 1 else 1

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that any strategy could train."""
        return max(self.bucket_size * self.sequence_parallel_size // self.alignment * self.alignment, self.bucket_size)

    def sequences_wanted(self, typical: Int64Array) -> int:
        """Lengths needed, if all are like the typical ones (tokens), for every strategy to have its full steps."""
        most = self.sequences_per_step
        for num_groups, capacity in (
            (self.machine.world_size, self.packing_length),
            (self.num_groups, self.packing_length * self.sequence_parallel_size),
        ):
            # What is longer than a pack takes one of its own.
            mean = float(np.minimum(typical, capacity).mean())
            num_packs = num_groups * self.packed_micro_batches(mean, num_groups, capacity)
            most = max(most, round(1.05 * num_packs * capacity / mean) + 1)
        return self.num_steps * most

    def packed_micro_batches(self, mean_tokens: float, num_groups: int, capacity: int) -> int:
        """Packs of a step on each of so many ranks: about the tokens of a global batch, but at least one."""
        return max(1, round(mean_tokens * self.sequences_per_step / (num_groups * capacity)))


def schedule(name: StrategyName, lengths: Int32Array, options: SimulateOptions) -> SimulatedSchedule:
    """What a strategy makes of sequences.

    Args:
        lengths: int32 (N,), tokens, in a random order; none longer than ``options.longest``.

    Returns:
        The first steps, at most ``options.num_steps``: full ones, or one that is not if there are no full ones.
    """
    return _STRATEGIES[name](lengths, options)


def _padded(lengths: Int32Array, options: SimulateOptions) -> SimulatedSchedule:
    world_size = options.machine.world_size
    rows = min(options.padded_batch_size, max(1, options.sequences_per_step // world_size))
    micro_batches = max(1, round(options.sequences_per_step / (world_size * rows)))
    return _in_rows(lengths, options, world_size, rows, micro_batches)


def _context_parallel(lengths: Int32Array, options: SimulateOptions, is_sorted: bool = False) -> SimulatedSchedule:
    rows = min(options.shared_batch_size, options.sequences_per_rank)
    micro_batches = max(1, round(options.sequences_per_rank / rows))
    return _in_rows(lengths, options, options.num_groups, rows, micro_batches, is_sorted)


def _sorted(lengths: Int32Array, options: SimulateOptions) -> SimulatedSchedule:
    return _context_parallel(lengths, options, is_sorted=True)


def _in_rows(
    lengths: Int32Array,
    options: SimulateOptions,
    num_groups: int,
    rows: int,
    micro_batches: int,
    is_sorted: bool = False,
) -> SimulatedSchedule:
    """Micro-batches of so many rows in the order in which they come, or sorted."""
    part = lengths[: options.num_steps * num_groups * rows * micro_batches]
    plan_options = _plan_options(options, num_groups, micro_batches, options.longest, "none")
    plan_options = replace(plan_options, per_device_train_batch_size=rows, packing=False)
    packs = pack_singletons(part, options.longest, seed=options.seed, shuffle=False)
    if is_sorted:
        packs = group_by_length(packs, plan_options.packs_per_step)
    return _of_steps(packs, assign_packs(packs, part, plan_options).steps, plan_options, options)


def _packed(lengths: Int32Array, options: SimulateOptions, balance: Balance = "none") -> SimulatedSchedule:
    return _in_packs(lengths, options, options.machine.world_size, options.packing_length, balance)


def _packed_balanced(lengths: Int32Array, options: SimulateOptions) -> SimulatedSchedule:
    return _packed(lengths, options, "window")


def _packed_shared(lengths: Int32Array, options: SimulateOptions) -> SimulatedSchedule:
    return _in_packs(
        lengths, options, options.num_groups, options.packing_length * options.sequence_parallel_size, "window"
    )


def _in_packs(
    lengths: Int32Array, options: SimulateOptions, num_groups: int, capacity: int, balance: Balance
) -> SimulatedSchedule:
    """Packs of sequences; one that is longer than a pack is a pack of its own, and out of memory."""
    if num_groups < options.machine.world_size:
        # Sharded sequences need room for their alignment, too.
        lengths = _aligned(lengths, options.alignment)
    tokens = np.cumsum(np.minimum(lengths, capacity), dtype=np.int64)
    micro_batches = options.packed_micro_batches(float(tokens[-1]) / len(lengths), num_groups, capacity)
    wanted = options.num_steps * num_groups * micro_batches * capacity * 1.02
    part = lengths[: int(np.searchsorted(tokens, wanted)) + 1]
    plan_options = _plan_options(options, num_groups, micro_batches, capacity, balance)
    fitting = np.flatnonzero(part <= capacity).astype(np.int64)
    packs = pack(part[fitting], capacity, plan_options, seed=options.seed)
    packs = PackPlan(fitting[packs.samples], packs.offsets, packs.lengths, capacity)
    longer = np.flatnonzero(part > capacity).astype(np.int64)
    if len(longer):
        samples = np.concatenate((packs.samples, longer))
        sizes = np.append(np.diff(packs.offsets), np.ones(len(longer), dtype=np.int64))
        packs = PackPlan(samples, offsets_of(sizes), part[samples], capacity)
        order = seeded_order(packs.num_packs, seed=options.seed, epoch=0, stream=RandomStream.SIMULATED_LONG_PACKS)
        packs = with_packs_in_order(packs, order)
    return _of_steps(packs, assign_packs(packs, part, plan_options).steps, plan_options, options)


def _plan_options(
    options: SimulateOptions, num_groups: int, micro_batches: int, capacity: int, balance: Balance
) -> PlanOptions:
    return PlanOptions(
        max_length=options.longest,
        packing_length=capacity,
        world_size=num_groups,
        gradient_accumulation_steps=micro_batches,
        balance=balance,
        cost=options.machine.sizes.cost,
    )


def _of_steps(
    packs: PackPlan, steps: StepPlan, plan_options: PlanOptions, options: SimulateOptions
) -> SimulatedSchedule:
    """The first full steps of a plan: packs (or rows) of a micro-batch on one device, or sharded over a group."""
    num_full = packs.num_packs // plan_options.packs_per_step
    num_steps = min(max(num_full, 1), options.num_steps, steps.num_steps)
    num_cells = int(steps.step_offsets[num_steps])
    cell_sizes = steps.cell_sizes()[:num_cells]
    taken = with_packs_in_order(packs, steps.order[: steps.cell_offsets[num_cells]])
    cells = np.repeat(np.repeat(np.arange(num_cells), cell_sizes), np.diff(taken.offsets))
    tokens = taken.lengths.astype(np.int64)
    if not plan_options.packing:
        longest = np.maximum.reduceat(tokens, np.searchsorted(cells, np.unique(cells)))
        tokens = np.repeat(longest, cell_sizes[cell_sizes > 0])
    per_step = np.diff(steps.step_offsets)[:num_steps]
    cell_steps = np.repeat(np.arange(num_steps), per_step)
    in_step = np.arange(num_cells) - steps.step_offsets[cell_steps]
    sequence_parallel_size = options.machine.world_size // plan_options.world_size
    shares = sequence_parallel_size > 1
    return SimulatedSchedule(
        sequence_parallel_size=sequence_parallel_size,
        num_groups=plan_options.world_size,
        num_steps=num_steps,
        samples=taken.samples,
        tokens=_aligned(tokens, options.alignment) if shares else tokens,
        places=np.full(len(tokens), SHARDED if shares else 0, dtype=np.int64),
        cells=cells,
        cell_steps=cell_steps,
        cell_groups=in_step // (per_step[cell_steps] // plan_options.world_size),
    )


def skrull_steps(lengths: Int32Array, options: SimulateOptions) -> list[list[list[PlacedMicroBatch]]]:
    """Skrull's micro-batches, of each step and data-parallel rank; their samples are positions in ``lengths``."""
    per_step = options.sequences_per_step
    found = []
    for step in range(max(1, min(options.num_steps, len(lengths) // per_step))):
        part = lengths[step * per_step : (step + 1) * per_step].astype(np.int64)
        ranks = schedule_step(
            part,
            options.machine.sizes.cost(part, part**2, target_tokens=part),
            num_ranks=options.num_groups,
            sequence_parallel_size=options.sequence_parallel_size,
            bucket_size=options.bucket_size,
            alignment=options.alignment,
            times=options.machine.step_time(options.sequence_parallel_size),
        )
        first = step * per_step
        found.append([[PlacedMicroBatch(batch.samples + first, batch.places) for batch in rank] for rank in ranks])
    return found


def _skrull(lengths: Int32Array, options: SimulateOptions) -> SimulatedSchedule:
    return schedule_of(skrull_steps(lengths, options), lengths, options)


def schedule_of(
    steps: list[list[list[PlacedMicroBatch]]], lengths: Int32Array, options: SimulateOptions
) -> SimulatedSchedule:
    """Micro-batches of each step and data-parallel rank as a schedule."""
    cells = [
        (step, group, batch)
        for step, ranks in enumerate(steps)
        for group, batches in enumerate(ranks)
        for batch in batches
    ]
    nothing = np.zeros(0, dtype=np.int64)
    samples = np.concatenate([nothing, *(batch.samples for _, _, batch in cells)])
    places = np.concatenate([nothing, *(batch.places for _, _, batch in cells)])
    sizes = np.array([len(batch.samples) for _, _, batch in cells], dtype=np.int64)
    tokens: Int64Array = lengths[samples].astype(np.int64)
    return SimulatedSchedule(
        sequence_parallel_size=options.sequence_parallel_size,
        num_groups=options.num_groups,
        num_steps=len(steps),
        samples=samples,
        tokens=np.where(places == SHARDED, _aligned(tokens, options.alignment), tokens),
        places=places,
        cells=np.repeat(np.arange(len(cells)), sizes),
        cell_steps=np.array([step for step, _, _ in cells], dtype=np.int64),
        cell_groups=np.array([group for _, group, _ in cells], dtype=np.int64),
    )


def _aligned(tokens: _Integers, alignment: int) -> _Integers:
    return -(-tokens // alignment) * alignment


_STRATEGIES: dict[StrategyName, Callable[[Int32Array, SimulateOptions], SimulatedSchedule]] = {
    "padded": _padded,
    "packed": _packed,
    "packed-balanced": _packed_balanced,
    "context-parallel": _context_parallel,
    "sorted": _sorted,
    "packed-shared": _packed_shared,
    "skrull": _skrull,
}
