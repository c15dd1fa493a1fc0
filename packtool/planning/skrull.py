"""Skrull: assignment of the sequences of an optimizer step to ranks and micro-batches, each local to a rank or sharded.

Xu et al. 2025, "Skrull: Towards Efficient Long Context Fine-tuning through Dynamic Data Scheduling"
(arXiv 2505.19609). Where N ranks share each micro-batch (sequence parallelism), every sequence is either *local* to
one of them or *sharded* over all. A rank holds at most C tokens at a time (the bucket)::

    lengths 20 2 1 3 5, N = 2, C = 16       rank 0   [1][5] [half of 20]
                                            rank 1   [2][3] [half of 20]

Assignment is deterministic; ties go to the earlier sequence and the lower rank. ``docs/how-it-works.md`` explains the
steps and the differences from the paper. Placements are compared by estimated time (``cost.StepTime``), so no
data-parallel rank is slower than with all its sequences sharded.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise, takewhile
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from packtool.planning.cost import NO_LOAD, Load, StepTime
from packtool.planning.options import PlanOptions, SkrullOptions
from packtool.planning.pack_plan import Costs, IntArray, PackPlan
from packtool.planning.steps import StepAssignment, assign_to_lightest, check_counts, divide_evenly

SHARDED = -1
"""Placement of a sequence that all sequence parallel ranks share."""


class PlacedMicroBatch(NamedTuple):
    """Sequences that the N ranks of a micro-batch compute at once.

    ``samples`` are positions in the step's lengths, the shortest first; ``placement`` is the rank that each is
    local to, or ``SHARDED``.
    """

    samples: list[int]
    placement: list[int]
    seconds: float


def assign_skrull(packs: PackPlan, flops: Costs, options: PlanOptions) -> StepAssignment:
    """Assign each sample of ``packs`` to a rank and micro-batch; a step has the samples of its packs.

    Ranks with fewer micro-batches than others of their step get empty ones. ``flops``, (S,), are of ``packs.samples``.
    """
    assert options.skrull is not None
    options.skrull.check(packs.lengths)
    num_ranks = options.world_size
    steps: list[list[PlacedMicroBatch]] = []
    step_starts = packs.offsets[:-1][:: options.packs_per_step].tolist()  # the first sample of each step's first pack
    for start, stop in pairwise([*step_starts, packs.num_samples]):
        rank_batches = schedule_step(packs.lengths[start:stop], flops[start:stop], options.skrull, num_ranks=num_ranks)
        steps.append(_fill_up_with_empty(rank_batches))
    return _join_steps(steps, step_starts)


def _fill_up_with_empty(rank_batches: list[list[PlacedMicroBatch]]) -> list[PlacedMicroBatch]:
    """List the micro-batches of all ranks, one rank after the other, with as many for each by adding empty ones."""
    max_per_rank = max(map(len, rank_batches))
    empty = PlacedMicroBatch([], [], 0.0)
    padded = [batches + [empty] * (max_per_rank - len(batches)) for batches in rank_batches]
    return list(chain.from_iterable(padded))


def _join_steps(steps: list[list[PlacedMicroBatch]], step_starts: list[int]) -> StepAssignment:
    """Join the micro-batches of all steps, whose samples are counted from the first one of their step."""
    batches = list(chain.from_iterable(steps))
    order: list[int] = []
    for start, step in zip(step_starts, steps, strict=True):
        order += [start + sample for batch in step for sample in batch.samples]
    return StepAssignment(
        order=np.array(order, np.int64),
        micro_batch_sizes=np.array([len(batch.samples) for batch in batches], np.int64),
        micro_batches_per_step=np.array(list(map(len, steps)), np.int64),
        placement=np.array([place for batch in batches for place in batch.placement], np.int64),
    )


def schedule_step(
    lengths: IntArray, flops: npt.NDArray[np.floating[Any]], options: SkrullOptions, *, num_ranks: int
) -> list[list[PlacedMicroBatch]]:
    """Assign the sequences of an optimizer step, of ``lengths`` and ``flops`` (n,), to micro-batches of each rank."""
    group_size, alignment = options.sequence_parallel_size, options.alignment
    check_counts(num_ranks=num_ranks, sequence_parallel_size=group_size, alignment=alignment)
    options.check(lengths)
    step = _Step.of(np.asarray(lengths), np.asarray(flops, dtype=np.float64), options)
    # Data-parallel ranks get about equal work, counted as if no sequence were sharded.
    local_work = [load.flops for load in step.local_loads]
    heaviest_first = sorted(range(len(local_work)), key=lambda i: -local_work[i])
    sequences_of_ranks = assign_to_lightest(heaviest_first, local_work, num_ranks)
    return [step.schedule_rank(sequences) for sequences in sequences_of_ranks]


@dataclass(frozen=True)
class _Step:
    """The sequences of a step; plain lists, which are faster than arrays for a few ranks.

    Space on a rank is counted in units of 1/N token. A local sequence takes N units per token on its rank; a sharded
    one takes one unit per token on each rank.
    """

    sizes: list[int]  # tokens
    padded_sizes: list[int]  # tokens, if sharded
    local_loads: list[Load]  # work of each sequence on one rank
    sharded_loads: list[Load]  # work of each sequence if sharded, summed over the ranks
    group_size: int  # N, the sequence parallel ranks that share a micro-batch
    capacity: int  # C N: tokens of a micro-batch, and units of each of its ranks
    step_time: StepTime

    @classmethod
    def of(cls, lengths: IntArray, flops: Costs, options: SkrullOptions) -> _Step:
        group_size, alignment, step_time = options.sequence_parallel_size, options.alignment, options.step_time
        padded_lengths = -(-lengths // alignment) * alignment  # rounded up
        return cls(
            sizes=lengths.tolist(),
            padded_sizes=padded_lengths.tolist(),
            local_loads=step_time.loads(lengths, flops),
            sharded_loads=step_time.loads(padded_lengths, flops, group_size),
            group_size=group_size,
            capacity=options.bucket_size * group_size,
            step_time=step_time,
        )

    def local_units(self, sequence: int) -> int:
        """Return the space that a local sequence takes on its rank."""
        return self.sizes[sequence] * self.group_size

    def seconds(self, rank_loads: list[Load], sharded: Load, sharded_tokens: int) -> float:
        """Estimate the time of a micro-batch from the local work of each rank and the sharded work of all."""
        return self.step_time.micro_batch(rank_loads, sharded, sharded_tokens, self.group_size)

    def schedule_rank(self, sequences: list[int]) -> list[PlacedMicroBatch]:
        """Place a data-parallel rank's sequences in micro-batches, in the fastest of several ways; most work first."""
        if not sequences:
            return []
        ascending = sorted(sequences, key=lambda i: (self.sizes[i], i))
        fewest = self._fewest_micro_batches(ascending, self._place)
        assert fewest is not None, "each sequence fits alone"
        candidates = [fewest]
        if self.group_size > 1:
            all_sharded = self._fewest_micro_batches(ascending, self._shard_all)
            only_long_sharded = self._shard_long(ascending, len(fewest))
            candidates += [batches for batches in (all_sharded, only_long_sharded) if batches is not None]
        fastest = min(candidates, key=lambda batches: sum(batch.seconds for batch in batches))
        return sorted(fastest, key=self._work_of, reverse=True)

    def _work_of(self, batch: PlacedMicroBatch) -> float:
        return math.fsum(self.local_loads[i].flops for i in batch.samples)

    def _fewest_micro_batches(
        self, ascending: list[int], place: Callable[[list[int]], PlacedMicroBatch | None]
    ) -> list[PlacedMicroBatch] | None:
        """Divide into the fewest micro-batches that ``place`` can place; None if even single sequences do not fit."""
        min_batches = -(-sum(self.sizes[i] for i in ascending) // self.capacity)
        for num in range(min_batches, len(ascending) + 1):
            for division in self._divisions(ascending, num):
                # Mostly the first fails, which is the fullest; the others need not be placed then.
                placed = [batch for batch in takewhile(bool, map(place, division)) if batch]
                if len(placed) == num:
                    return placed
        return None

    def _divisions(self, ascending: list[int], num: int) -> Iterator[list[list[int]]]:
        """Divide into ``num`` micro-batches: as in the paper, each of short and long ones; then evenly by tokens."""
        yield [ascending[first::num] for first in range(num)]
        yield [batch[::-1] for batch in assign_to_lightest(reversed(ascending), self.padded_sizes, num)]

    def _shard_long(self, ascending: list[int], min_batches: int) -> list[PlacedMicroBatch] | None:
        """Shard only long sequences, in ``min_batches`` to twice as many micro-batches; None if they do not fit."""
        for num_batches in range(min_batches, 2 * min_batches + 1):
            batches = self._divide_with_short_local(ascending, num_batches)
            if batches is not None:
                return batches
        return None

    def _divide_with_short_local(self, ascending: list[int], num_batches: int) -> list[PlacedMicroBatch] | None:
        """Make sequences that fit into a rank's bucket local, and shard the others; None if they do not fit."""
        bucket_size = self.capacity // self.group_size
        short = [i for i in ascending if self.sizes[i] <= bucket_size]
        long = [i for i in ascending if self.sizes[i] > bucket_size]
        batches = self._place_short(short, num_batches, bucket_size)
        if batches is None:
            return None
        for sequence in reversed(long):
            emptiest = max(batches, key=lambda batch: sum(batch.free))
            emptiest.shard(sequence)
        if not all(batch.fits() for batch in batches):
            return None
        return [batch.best_placement() for batch in batches if batch.placement]

    def _place_short(self, short: list[int], num_batches: int, bucket_size: int) -> list[_PartialPlacement] | None:
        """Divide sequences evenly among all ranks of ``num_batches`` micro-batches; None if they do not fit."""
        short_sizes = [self.sizes[i] for i in short]
        short_work = [self.local_loads[i].flops for i in short]
        # One bucket for each rank of each micro-batch, with indices into ``short``.
        buckets = divide_evenly(short_sizes, short_work, num_batches * self.group_size, bucket_size)
        if buckets is None:
            return None
        batches = [_PartialPlacement(self) for _ in range(num_batches)]
        for number, bucket in enumerate(buckets):
            batch_index, rank = divmod(number, self.group_size)
            for index in bucket:
                batches[batch_index].place_locally(short[index], rank)
        return batches

    def _shard_all(self, ascending: list[int]) -> PlacedMicroBatch | None:
        tokens = sum(self.padded_sizes[i] for i in ascending)
        if tokens > self.capacity:
            return None
        work = Load.sum(self.sharded_loads[i] for i in ascending)
        return PlacedMicroBatch(ascending, [SHARDED] * len(ascending), self.seconds([NO_LOAD], work, tokens))

    def _place(self, ascending: list[int]) -> PlacedMicroBatch | None:
        """Make each sequence local or sharded; None if they do not fit into one micro-batch."""
        batch = _PartialPlacement(self)
        placed = batch.best_placement() if all(map(batch.add, ascending)) else None
        if self.group_size == 1:
            return placed
        max_seconds = math.inf if placed is None else placed.seconds
        return self.shard_longest(ascending, max_seconds) or placed

    def shard_longest(self, ascending: list[int], max_seconds: float) -> PlacedMicroBatch | None:
        """Place a micro-batch by sharding its longest sequences over all ranks, as many of them as is fastest.

        The other sequences are local, each to one rank: longest first, to the rank with the least work so far (LPT).

        Args:
            ascending: the sequences of the micro-batch, the shortest first.

        Returns:
            None if no placement that fits takes less than ``max_seconds``.
        """
        longest_first = ascending[::-1]
        fastest = None
        for num_sharded, sums in enumerate(self._sums_when_sharded(longest_first)):
            sharded_tokens, sharded_load, local_load = sums
            # Tokens and the mean work only grow when more sequences are sharded.
            if sharded_tokens > self.capacity or self._mean_seconds(local_load, sharded_load) >= max_seconds:
                break
            local_sequences = longest_first[num_sharded:]
            if self._min_seconds(local_sequences, local_load, sharded_load, sharded_tokens) >= max_seconds:
                continue
            assigned = self.assign_local(local_sequences, self.capacity - sharded_tokens)
            if assigned is None:
                continue
            local_ranks, rank_loads = assigned
            seconds = self.seconds(rank_loads, sharded_load, sharded_tokens)
            if seconds < max_seconds:
                max_seconds = seconds
                placement = [SHARDED] * num_sharded + local_ranks  # the longest sequence first
                fastest = PlacedMicroBatch(ascending, placement[::-1], seconds)
        return fastest

    def _sums_when_sharded(self, sequences: list[int]) -> Iterator[tuple[int, Load, Load]]:
        """Yield tokens and work of the first 0, 1, ... sequences, if sharded, and the work of the others, if local."""
        all_local = Load.sum(self.local_loads[i] for i in sequences)
        sharded_tokens = accumulate((self.padded_sizes[i] for i in sequences), initial=0)
        sharded_loads = accumulate((self.sharded_loads[i] for i in sequences), Load.plus, initial=NO_LOAD)
        local_loads = accumulate((self.local_loads[i] for i in sequences), Load.minus, initial=all_local)
        return zip(sharded_tokens, sharded_loads, local_loads, strict=True)

    def _mean_seconds(self, local: Load, sharded: Load) -> float:
        """Return the mean seconds of computation of a rank, without exchanges."""
        mean_flops = local.flops / self.group_size + sharded.flops / self.group_size
        return mean_flops / self.step_time.flops_per_second

    def _min_seconds(self, descending: list[int], local: Load, sharded: Load, sharded_tokens: int) -> float:
        """Bound the time from below for ``descending`` local sequences, of work ``local``, and sharded ones."""
        # Some rank has the longest local sequence, and some rank at least the mean work.
        longest_local = self.local_loads[descending[0]] if descending else NO_LOAD
        mean_local = Load(local.flops / self.group_size, local.attention / self.group_size)
        return self.seconds([longest_local, mean_local], sharded, sharded_tokens)

    def assign_local(self, descending: list[int], free_units: int) -> tuple[list[int], list[Load]] | None:
        """Return the rank of each local sequence, and the work of each rank; None if the sequences do not fit."""
        free_of_rank, loads = [free_units] * self.group_size, [NO_LOAD] * self.group_size
        lightest = [(0.0, rank) for rank in range(self.group_size)]
        ranks = []
        for sequence in descending:
            rank = lightest[0][1]
            free_of_rank[rank] -= self.local_units(sequence)
            if free_of_rank[rank] < 0:
                return None
            loads[rank] = loads[rank].plus(self.local_loads[sequence])
            heapq.heapreplace(lightest, (loads[rank].flops, rank))
            ranks.append(rank)
        return ranks, loads


class _PartialPlacement:
    """Placement of a micro-batch's sequences on its ranks, while it is built."""

    def __init__(self, step: _Step) -> None:
        self.step = step
        self.free = [step.capacity] * step.group_size  # units of each rank; below 0 where sequences do not fit
        self.loads = [NO_LOAD] * step.group_size  # of each rank's local sequences
        self.local: list[list[int]] = [[] for _ in range(step.group_size)]  # each rank's sequences, longest last
        self.placement: dict[int, int] = {}  # rank of each sequence, or ``SHARDED``
        self.sharded, self.sharded_tokens = NO_LOAD, 0

    def fits(self) -> bool:
        return min(self.free) >= 0

    def seconds(self) -> float:
        return self.step.seconds(self.loads, self.sharded, self.sharded_tokens)

    def add(self, sequence: int) -> bool:
        """Place a sequence that is no shorter than those placed before; return False if it fits nowhere."""
        while not self._place_if_fits(sequence):
            # Make space: the longest local sequence of the fullest rank takes less of it when sharded.
            fullest_rank = self.free.index(min(self.free))
            if self.step.group_size == 1 or not self.local[fullest_rank]:
                return False
            self._shard_longest_of(fullest_rank)
        return True

    def _place_if_fits(self, sequence: int) -> bool:
        """Place a sequence on the rank with the least work or the most space, or shard it; False if it does not fit."""
        if not self.fits():
            return False
        lightest_rank = self.loads.index(min(self.loads))
        emptiest_rank = self.free.index(max(self.free))
        for rank in (lightest_rank, emptiest_rank):
            if self.free[rank] >= self.step.local_units(sequence):
                self.place_locally(sequence, rank)
                return True
        if self.step.group_size > 1 and min(self.free) >= self.step.padded_sizes[sequence]:
            self.shard(sequence)
            return True
        return False

    def best_placement(self) -> PlacedMicroBatch:
        """Return this placement, which must fit, or a faster one with more sharded sequences.

        Sequences that are local to one rank are sharded over all ranks one by one: the longest of the busiest rank
        each time, until that no longer helps. Changes this object, which must not be used afterwards.
        """
        best = self._micro_batch()
        if self.step.group_size == 1:
            return best
        failures_since_best = 0
        while failures_since_best < self.step.group_size:
            busiest_rank = self.loads.index(max(self.loads))
            if not self.local[busiest_rank]:
                break
            self._shard_longest_of(busiest_rank)
            if self.fits() and self.seconds() < best.seconds:
                best = self._micro_batch()
                failures_since_best = 0
            else:
                failures_since_best += 1
        return best

    def _micro_batch(self) -> PlacedMicroBatch:
        """Return the sequences placed so far, the shortest first."""
        ascending = sorted(self.placement, key=lambda i: (self.step.sizes[i], i))
        return PlacedMicroBatch(ascending, [self.placement[i] for i in ascending], self.seconds())

    def place_locally(self, sequence: int, rank: int) -> None:
        self.free[rank] -= self.step.local_units(sequence)
        self.loads[rank] = self.loads[rank].plus(self.step.local_loads[sequence])
        self.local[rank].append(sequence)
        self.placement[sequence] = rank

    def shard(self, sequence: int) -> None:
        padded = self.step.padded_sizes[sequence]
        self.free = [free - padded for free in self.free]
        self.sharded = self.sharded.plus(self.step.sharded_loads[sequence])
        self.sharded_tokens += padded
        self.placement[sequence] = SHARDED

    def _shard_longest_of(self, rank: int) -> None:
        """Shard the longest local sequence of a rank."""
        sequence = self.local[rank].pop()
        self.free[rank] += self.step.local_units(sequence)
        # Added up again: a difference of floats would leave a rest on an empty rank.
        self.loads[rank] = Load.sum(self.step.local_loads[i] for i in self.local[rank])
        self.shard(sequence)
