"""Skrull: assignment of the sequences of an optimizer step to ranks and micro-batches, each local to a rank or sharded.

Xu et al. 2025, "Skrull: Towards Efficient Long Context Fine-tuning through Dynamic Data Scheduling"
(arXiv 2505.19609). Where N ranks share each micro-batch (sequence parallelism), every sequence is either *local* to
one of them or *sharded* over all. A rank holds at most C tokens at a time (the bucket)::

    lengths 20 2 1 3 5, N = 2, C = 16       rank 0   [1][5] [half of 20]
                                            rank 1   [2][3] [half of 20]

Assignment is deterministic; ties go to the earlier sequence and the lower rank. ``docs/how-it-works.md`` explains the
steps and the differences from the paper. Placements are compared by estimated time (``cost.StepTime``), so no
data-parallel rank is slower than with all its sequences sharded. Micro-batches run heaviest first, so that those which
run at the same time on different ranks are alike.

Cost: O(n log n) for n sequences of a step, and O(n (n + N)) at worst, mostly O(n N), for each number of micro-batches.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from packtool.errors import ConfigError
from packtool.planning.cost import NO_LOAD, Load, StepTime
from packtool.planning.options import PlanOptions, SkrullOptions
from packtool.planning.pack_plan import Costs, IntArray, PackPlan
from packtool.planning.steps import StepAssignment, assign_to_lightest, divide_evenly

SHARDED = -1
"""Placement of a sequence that all sequence parallel ranks share."""


class PlacedMicroBatch(NamedTuple):
    """Sequences that the N ranks of a micro-batch compute at once.

    Args:
        samples: positions in the step's lengths, by ascending length.
        placement: for each sample, ``SHARDED`` or the sequence parallel rank that it is local to.
    """

    samples: list[int]
    placement: list[int]
    seconds: float


def assign_skrull(packs: PackPlan, flops: Costs, options: PlanOptions) -> StepAssignment:
    """Assign the samples of packs to ranks: each step trains those of its ``options.packs_per_step`` packs.

    The result has the N single samples, and their placement. The ranks of a step have equally many micro-batches: empty
    ones are added at the end. ``flops``, (N,), are of the samples in the order of ``packs.samples``. Cost: about 10 us
    a sample.
    """
    assert options.skrull is not None
    options.skrull.check(packs.lengths)
    per_step, num_ranks = options.packs_per_step, options.world_size
    bounds = packs.offsets[np.minimum(np.arange(0, packs.num_packs + per_step, per_step), packs.num_packs)]
    order: list[int] = []
    placement: list[int] = []
    cell_sizes: list[int] = []
    cells_per_step: list[int] = []
    for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        ranks = schedule_step(packs.lengths[first:last], flops[first:last], options.skrull, num_ranks=num_ranks)
        num_cells = max(map(len, ranks))
        for micro_batches in ranks:
            for batch in micro_batches:
                order += [sample + first for sample in batch.samples]
                placement += batch.placement
            cell_sizes += [len(batch.samples) for batch in micro_batches] + [0] * (num_cells - len(micro_batches))
        cells_per_step.append(num_cells * num_ranks)
    return StepAssignment(*(np.array(each, np.int64) for each in (order, cell_sizes, cells_per_step, placement)))


def schedule_step(
    lengths: IntArray, flops: npt.NDArray[np.floating[Any]], options: SkrullOptions, *, num_ranks: int
) -> list[list[PlacedMicroBatch]]:
    """Assign the sequences of an optimizer step, with ``lengths`` in tokens and ``flops`` of each, (n,).

    Returns the micro-batches of each of ``num_ranks`` data-parallel ranks, in lists that may differ in length.
    """
    size, alignment, times = options.sequence_parallel_size, options.alignment, options.times
    counts = {"num_ranks": num_ranks, "sequence_parallel_size": size, "alignment": alignment}
    if problems := [f"{name} is {count}; it must be 1 or more." for name, count in counts.items() if count < 1]:
        raise ConfigError.from_problems(problems)
    options.check(lengths)
    padded = -(-np.asarray(lengths) // alignment) * alignment
    costs = np.asarray(flops, dtype=np.float64)
    step = _Step(
        np.asarray(lengths).tolist(),
        padded.tolist(),
        times.loads(lengths, costs),
        times.loads(padded, costs, size),
        size,
        options.bucket_size * size,
        times,
    )
    work = [load.flops for load in step.local]
    falling = sorted(range(len(work)), key=lambda i: -work[i])
    return [step.schedule_rank(sequences) for sequences in assign_to_lightest(falling, work, num_ranks)]


@dataclass(frozen=True)
class _Step:
    """The sequences of a step; plain lists, which are faster than arrays for a few ranks."""

    sizes: list[int]  # tokens
    padded: list[int]  # tokens of sharded ones
    local: list[Load]  # work on one rank
    sharded: list[Load]  # summed over all ranks that share it
    num_ranks: int  # N, that share a micro-batch
    capacity: int  # C N, in N-ths of a token, so that a sharded sequence takes an integer number of them
    times: StepTime

    def schedule_rank(self, sequences: list[int]) -> list[PlacedMicroBatch]:
        if not sequences:
            return []
        ascending = sorted(sequences, key=lambda i: (self.sizes[i], i))
        best = self._micro_batches(ascending, self._place)
        assert best is not None, "each sequence fits alone"
        if self.num_ranks > 1:
            sharded = self._micro_batches(ascending, self._shard_all)
            # The fewest micro-batches, of at most twice as many, in which all that fits on a rank can be local.
            in_more = (self._all_short_local(ascending, num) for num in range(len(best), 2 * len(best) + 1))
            candidates = filter(None, (best, sharded, next(filter(None, in_more), None)))
            best = min(candidates, key=lambda placed: sum(each.seconds for each in placed))
        return sorted(best, key=lambda placed: -math.fsum(self.local[i].flops for i in placed.samples))

    def _micro_batches(
        self, ascending: list[int], place: Callable[[list[int]], PlacedMicroBatch | None]
    ) -> list[PlacedMicroBatch] | None:
        """Divide into the fewest micro-batches that ``place`` can place; None if even single sequences do not fit."""
        fewest = -(-sum(self.sizes[i] for i in ascending) // self.capacity)
        for num in range(fewest, len(ascending) + 1):
            for parts in self._divisions(ascending, num):
                # Mostly the first fails, which is the fullest; the others need not be placed then.
                placed = [each for each in takewhile(bool, map(place, parts)) if each]
                if len(placed) == num:
                    return placed
        return None

    def _divisions(self, ascending: list[int], num: int) -> Iterator[list[list[int]]]:
        """Divide into ``num`` micro-batches: as in the paper, each of short and long ones; then evenly by tokens."""
        yield [ascending[first::num] for first in range(num)]
        yield [part[::-1] for part in assign_to_lightest(reversed(ascending), self.padded, num)]

    def _all_short_local(self, ascending: list[int], num: int) -> list[PlacedMicroBatch] | None:
        """Fill N buckets of even work per micro-batch, and shard longer sequences; None if they do not fit."""
        bucket = self.capacity // self.num_ranks
        short = [i for i in ascending if self.sizes[i] <= bucket]
        sizes, work = [self.sizes[i] for i in short], [self.local[i].flops for i in short]
        buckets = divide_evenly(sizes, work, num * self.num_ranks, bucket)
        if buckets is None:
            return None
        batches = [_Ranks(self) for _ in range(num)]
        for number, members in enumerate(buckets):
            for member in members:
                batches[number // self.num_ranks].place_locally(short[member], number % self.num_ranks)
        for sequence in reversed(ascending):
            if self.sizes[sequence] > bucket:
                max(batches, key=lambda batch: sum(batch.free)).shard(sequence)
        if min(min(batch.free) for batch in batches) < 0:
            return None
        return [batch.best_placement() for batch in batches if batch.placement]

    def _shard_all(self, ascending: list[int]) -> PlacedMicroBatch | None:
        tokens = sum(self.padded[i] for i in ascending)
        if tokens > self.capacity:
            return None
        work = Load.sum(self.sharded[i] for i in ascending)
        seconds = self.times.micro_batch([NO_LOAD], work, tokens, self.num_ranks)
        return PlacedMicroBatch(ascending, [SHARDED] * len(ascending), seconds)

    def _place(self, ascending: list[int]) -> PlacedMicroBatch | None:
        """Make each sequence local or sharded, or return None if they do not fit."""
        batch = _Ranks(self)
        placed = batch.best_placement() if all(map(batch.add, ascending)) else None
        if self.num_ranks == 1:
            return placed
        return self.shard_longest(ascending, placed.seconds if placed is not None else math.inf) or placed

    def shard_longest(self, ascending: list[int], limit: float) -> PlacedMicroBatch | None:
        """Find the fastest placement that shards the longest sequences, if it takes less than ``limit`` seconds.

        The others go to the ranks by falling work, each to the rank with the least so far (LPT: Graham 1969, "Bounds on
        multiprocessing timing anomalies"). Ties go to fewer sharded sequences, and the lower rank. Cost: O(n log N) for
        each number of sharded sequences whose lower bound is below the best time so far.
        """
        best, falling, num_ranks = None, ascending[::-1], self.num_ranks
        free, sharded_load, tokens, local_load = self.capacity, NO_LOAD, 0, Load.sum(self.local[i] for i in falling)
        for num in range(len(falling) + 1):
            if num:
                sequence = falling[num - 1]
                free -= self.padded[sequence]
                sharded_load = sharded_load.plus(self.sharded[sequence])
                tokens += self.padded[sequence]
                sharded_now = self.local[sequence]
                local_load = Load(
                    max(local_load.flops - sharded_now.flops, 0.0),
                    max(local_load.attention - sharded_now.attention, 0.0),
                )
            if free < 0:
                break
            # Lower bound: some rank has the longest, and by convexity uneven loads take no less than even ones.
            longest = self.local[falling[num]] if num < len(falling) else NO_LOAD
            even = Load(local_load.flops / num_ranks, local_load.attention / num_ranks)
            if (even.flops + sharded_load.flops / num_ranks) / self.times.flops_per_second >= limit:
                break  # and more sharding makes more work
            if self.times.micro_batch([longest, even], sharded_load, tokens, num_ranks) >= limit:
                continue
            placed = self.to_lightest(falling[num:], free)
            if placed is None:
                continue
            ranks, loads = placed
            seconds = self.times.micro_batch(loads, sharded_load, tokens, num_ranks)
            if seconds < limit:
                best, limit = PlacedMicroBatch(ascending, [*ranks[::-1], *[SHARDED] * num], seconds), seconds
        return best

    def to_lightest(self, falling: list[int], free: int) -> tuple[list[int], list[Load]] | None:
        """Assign local sequences to ranks; return them and the work of each rank, or None if they do not fit."""
        free_of_rank, loads = [free] * self.num_ranks, [NO_LOAD] * self.num_ranks
        lightest = [(0.0, rank) for rank in range(self.num_ranks)]
        ranks = []
        for sequence in falling:
            rank = lightest[0][1]
            free_of_rank[rank] -= self.sizes[sequence] * self.num_ranks
            if free_of_rank[rank] < 0:
                return None
            loads[rank] = loads[rank].plus(self.local[sequence])
            heapq.heapreplace(lightest, (loads[rank].flops, rank))
            ranks.append(rank)
        return ranks, loads


class _Ranks:
    """The ranks of a micro-batch while its sequences are placed."""

    def __init__(self, step: _Step) -> None:
        self.step, self.ranks = step, range(step.num_ranks)
        self.free = [step.capacity] * step.num_ranks  # in N-ths of a token; below 0 only between two roll-backs
        self.load = [NO_LOAD] * step.num_ranks
        self.local: list[list[int]] = [[] for _ in self.ranks]  # by ascending length
        self.placement: dict[int, int] = {}
        self.sharded, self.sharded_tokens = NO_LOAD, 0

    def seconds(self) -> float:
        return self.step.times.micro_batch(self.load, self.sharded, self.sharded_tokens, self.step.num_ranks)

    def add(self, sequence: int) -> bool:
        """Place a sequence, no shorter than those before it; return False if it fits nowhere."""
        size = self.step.sizes[sequence] * self.step.num_ranks
        while True:
            if min(self.free) >= 0:
                rank = self.load.index(min(self.load))
                if self.free[rank] < size:
                    rank = self.free.index(max(self.free))
                if self.free[rank] >= size:
                    self.place_locally(sequence, rank)
                    return True
                if self.step.num_ranks > 1 and min(self.free) >= self.step.padded[sequence]:
                    self.shard(sequence)
                    return True
            fullest = self.free.index(min(self.free))
            if self.step.num_ranks == 1 or not self.local[fullest]:
                return False
            self._roll_back(fullest)

    def best_placement(self) -> PlacedMicroBatch:
        """Return the current placement, or a faster one that shards more sequences of the busiest rank, one by one."""
        step, best, rolled_back = self.step, self.seconds(), list[int]()
        placement, num_best = dict(self.placement), 0
        while step.num_ranks > 1:
            busiest = self.load.index(max(self.load))
            # One roll-back for every rank without a gain: more sharding would only make work.
            if not self.local[busiest] or len(rolled_back) - num_best >= step.num_ranks:
                break
            rolled_back.append(self._roll_back(busiest))
            seconds = self.seconds()
            if seconds < best and min(self.free) >= 0:
                best, num_best = seconds, len(rolled_back)
        placement |= dict.fromkeys(rolled_back[:num_best], SHARDED)
        ascending = sorted(placement, key=lambda i: (step.sizes[i], i))
        return PlacedMicroBatch(ascending, [placement[i] for i in ascending], best)

    def place_locally(self, sequence: int, rank: int) -> None:
        self.free[rank] -= self.step.sizes[sequence] * self.step.num_ranks
        self.load[rank] = self.load[rank].plus(self.step.local[sequence])
        self.local[rank].append(sequence)
        self.placement[sequence] = rank

    def shard(self, sequence: int) -> None:
        padded = self.step.padded[sequence]
        self.free = [free - padded for free in self.free]
        self.sharded = self.sharded.plus(self.step.sharded[sequence])
        self.sharded_tokens += padded
        self.placement[sequence] = SHARDED

    def _roll_back(self, rank: int) -> int:
        """Shard the longest local sequence of a rank, which gets S tokens back; every rank loses S / N."""
        sequence = self.local[rank].pop()
        self.free[rank] += self.step.sizes[sequence] * self.step.num_ranks
        # Added up again: a difference of floats would leave a rest on an empty rank.
        self.load[rank] = Load.sum(self.step.local[i] for i in self.local[rank])
        self.shard(sequence)
        return sequence
