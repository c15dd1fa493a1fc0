"""Skrull: the sequences of an optimizer step spread over ranks and micro-batches, each local to a rank or sharded.

Xu et al. 2025, "Skrull: Towards Efficient Long Context Fine-tuning through Dynamic Data Scheduling"
(arXiv 2505.19609). Where N ranks share each micro-batch (sequence parallel), splitting a short sequence over all of
them costs communication and gains nothing. So every sequence of a micro-batch is either *local*, whole on one of
the N ranks, or *sharded* over all, and while keys and values of the sharded ones travel the local ones are computed.
A rank holds at most C tokens at a time (the bucket), since memory grows with tokens while work grows with squares.

    lengths 20 2 1 3 5, N = 2, C = 16       rank 0   [1][5] [half of 20]
                                            rank 1   [2][3] [half of 20]

Three parts, all deterministic:

1. Sequences are assigned to the data-parallel ranks by falling FLOPs, each to the rank with the least so far (the
   paper's GDS). Ties: the earlier sequence first, the lower rank.
2. A rank's sequences, by rising length, are cut into m micro-batches, ``ascending[j::m]``, m being the fewest that the
   tokens need, ceil(sum / (C N)). Where one does not fit, m grows by one. Ties: the earlier sequence first.
3. In a micro-batch (DACP) the sequences come by rising length. Each becomes local to the rank with the least FLOPs, if
   it has room; else to the rank with most room; else it is sharded; else one is *rolled back*: the longest local
   sequence of the fullest rank becomes sharded, and the placing of the new sequence starts over. When the fullest
   rank has none left, all are sharded and the micro-batch is full. Ties: the lower rank, the sequence placed last.

As printed, the algorithm has two errors, corrected here: a roll-back must give the rank its S tokens back and charge
S / N to *every* rank, or buckets seem full that are not; and the loop over m needs its exit when all fit.

Not in the paper:

- Before m grows, m micro-batches are tried that are cut by ``_evenly``: where several sequences are about as long as
  a micro-batch is wide, that can halve their number.
- Beside the paper's placement, those are tried that shard the longest sequences, however many, and lay the others
  evenly on the ranks (``longest_shared``).
- Roll-backs go on while there may be something to win: of the placements met, that with the least planned time is kept
  (``step_time``; attention alone hides what travels, not all local work). Otherwise a single sequence that fits on one
  rank leaves the N - 1 others idle.
- Micro-batches of sequences of like work are tried, too, as many as what fits on a rank needs to stay whole there
  (``_whole``): where sequences are about a bucket long, hardly anything has to travel.
- A data-parallel rank that would be done sooner with all its sequences sharded has them so: none is ever planned
  slower than that.
- Micro-batches run heaviest first, so that those which run at the same time on different ranks are alike.

A heuristic: of all placements of six sequences that nearly fill two buckets, the best is planned 1.0 % faster in the
mean with the links of ``StepTime()``, and 0.7 % with links that are a sixteenth as fast.

Price: O(n log n) for n sequences of a step, and O(n (n + N)) at worst, mostly O(n N), for each m that is tried.

Placements of a micro-batch in which the longest sequences are sharded and the others lie evenly on the ranks.

What is sharded loses: short chunks are slow, and keys and values have to travel. But whole sequences are uneven: no
rank is done before the longest of them. So the longest are sharded, as many as pay, and the others go to the ranks by
falling work, each to the rank with the least so far (LPT: Graham 1969, "Bounds on multiprocessing timing anomalies").

    lengths 100 9 8 7 6 5 4 on two ranks     rank 0   [9][6][5]  [half of 100]
                                             rank 1   [8][7][4]  [half of 100]
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.errors import ConfigError
from packtool.plan.balance import even_packs
from packtool.plan.step_time import NOTHING, Load, StepTime


@dataclass(frozen=True)
class LongestShared:
    """A placement.

    Args:
        num_sharded: how many of the longest sequences are sharded.
        ranks: of the others, by falling length.
        seconds: that the micro-batch takes.
    """

    num_sharded: int
    ranks: list[int]
    seconds: float


@dataclass(frozen=True)
class Falling:
    """The n sequences of a micro-batch by falling length, and the N ranks that share it.

    Args:
        sizes: tokens of each.
        padded: tokens of each if it is sharded.
        local, sharded: work of each, on one rank, and summed over all that share it.
        num_ranks: N.
        room: N-ths of a token that each rank has room for.
    """

    sizes: Sequence[int]
    padded: Sequence[int]
    local: Sequence[Load]
    sharded: Sequence[Load]
    num_ranks: int
    room: int

    def best(self, times: StepTime, limit: float) -> LongestShared | None:
        """The placement that takes least, of those that fit and take less than ``limit`` seconds; None without any.

        Ties go to fewer sharded sequences, and the lower rank. Price: O(n log N) for each number of sharded sequences
        that could be faster than those before it, by the mean work of the ranks and the longest local sequence.
        """
        found = None
        room, work, tokens, left = self.room, NOTHING, 0, Load.sum(self.local)
        for num in range(len(self.sizes) + 1):
            if num:
                room -= self.padded[num - 1]
                work = work.plus(self.sharded[num - 1])
                tokens += self.padded[num - 1]
                done = self.local[num - 1]
                left = Load(max(left.flops - done.flops, 0.0), max(left.attention - done.attention, 0.0))
            if room < 0:
                break
            # Some rank has the longest, and by convexity one waits no less than ranks with even loads would.
            longest = self.local[num] if num < len(self.local) else NOTHING
            even = Load(left.flops / self.num_ranks, left.attention / self.num_ranks)
            if times.computation(even.flops + work.flops / self.num_ranks) >= limit:
                break  # and more so with more of them: sharding makes work, never less
            if times.micro_batch([longest, even], work, tokens, self.num_ranks) >= limit:
                continue
            placed = self._assigned(num, room)
            if placed is None:
                continue
            ranks, loads = placed
            seconds = times.micro_batch(loads, work, tokens, self.num_ranks)
            if seconds < limit:
                found, limit = LongestShared(num, ranks, seconds), seconds
        return found

    def _assigned(self, num_sharded: int, room: int) -> tuple[list[int], list[Load]] | None:
        """Ranks of the local sequences, and the work of each rank; None where one has no room on its rank."""
        rooms, loads = [room] * self.num_ranks, [NOTHING] * self.num_ranks
        lightest = [(0.0, rank) for rank in range(self.num_ranks)]
        ranks = []
        for size, work in zip(self.sizes[num_sharded:], self.local[num_sharded:], strict=True):
            rank = lightest[0][1]
            rooms[rank] -= size * self.num_ranks
            if rooms[rank] < 0:
                return None
            loads[rank] = loads[rank].plus(work)
            heapq.heapreplace(lightest, (loads[rank].flops, rank))
            ranks.append(rank)
        return ranks, loads


Int64Array = npt.NDArray[np.int64]

SHARDED = -1
"""The place of a sequence that all sequence parallel ranks share."""


@dataclass(frozen=True, eq=False)
class PlacedMicroBatch:
    """n sequences that are computed at once by the N ranks that share a micro-batch.

    Args:
        samples: int64 (n,), positions in the step's lengths, by rising length.
        places: int64 (n,), ``SHARDED``, or the sequence parallel rank that the sequence is local to.
    """

    samples: Int64Array
    places: Int64Array


def schedule_step(
    lengths: npt.NDArray[np.integer[Any]],
    flops: npt.NDArray[np.floating[Any]],
    *,
    num_ranks: int,
    sequence_parallel_size: int,
    bucket_size: int,
    alignment: int = 1,
    times: StepTime | None = None,
) -> list[list[PlacedMicroBatch]]:
    """Spread the sequences of an optimizer step; see the module.

    Args:
        lengths: (n,), tokens.
        flops: (n,), of each sequence, forward and backward.
        num_ranks: data-parallel ranks, W.
        sequence_parallel_size: ranks that share a micro-batch, N; with one, everything is local to it.
        bucket_size: tokens that a rank may hold in a micro-batch, C.
        alignment: a sharded sequence is padded to a multiple of it, and takes an N-th of that on every rank.
        times: of devices and links; by default ``StepTime()``.

    Returns:
        The micro-batches of each data-parallel rank, W lists that may differ in length. Each sequence is in one.

    Raises:
        ConfigError: a count is not positive, or a sequence is too long for the buckets even alone and sharded.
    """
    counts = {"num_ranks": num_ranks, "sequence_parallel_size": sequence_parallel_size, "alignment": alignment}
    problems = [f"{name} is {count}; it must be 1 or more." for name, count in counts.items() if count < 1]
    if problems:
        raise ConfigError.from_problems(problems)
    check_buckets(lengths, sequence_parallel_size=sequence_parallel_size, bucket_size=bucket_size, alignment=alignment)
    times = times or StepTime()
    padded = -(-np.asarray(lengths) // alignment) * alignment
    costs = np.asarray(flops, dtype=np.float64)
    step = _Step(
        np.asarray(lengths).tolist(),
        padded.tolist(),
        times.loads(lengths, costs),
        times.loads(padded, costs, sequence_parallel_size),
        sequence_parallel_size,
        bucket_size * sequence_parallel_size,
        times,
    )
    return [step.rank(sequences) for sequences in _assign([load.flops for load in step.local], num_ranks)]


def check_buckets(
    lengths: npt.NDArray[np.integer[Any]], *, sequence_parallel_size: int, bucket_size: int, alignment: int
) -> None:
    """Raise a ConfigError if sequences have no room, whole on one rank or sharded over all.

    Args:
        lengths, sequence_parallel_size, bucket_size, alignment: as for ``schedule_step``.
    """
    if bucket_size < 1:
        raise ConfigError(f"--bucket-size is {bucket_size}; it must be 1 or more.")
    longest = int(np.max(lengths, initial=0))
    most = longest_in_bucket(bucket_size, sequence_parallel_size, alignment)
    if longest <= most:
        return
    num_over = int(np.count_nonzero(np.asarray(lengths) > most))
    needed = -(-longest // alignment) * alignment
    shared = "" if sequence_parallel_size == 1 else f", sharded over {sequence_parallel_size} ranks"
    raise ConfigError(
        f"--bucket-size {bucket_size}: {num_over:,} samples have more than the {most:,} tokens that there is room for"
        f"{shared}; the longest has {longest:,}",
        f"Raise it to {min(longest, -(-needed // sequence_parallel_size))}, let more processes share a micro-batch "
        f"(--sequence-parallel-size), or leave those samples out with --max-length {most}.",
    )


def longest_in_bucket(bucket_size: int, sequence_parallel_size: int, alignment: int) -> int:
    """Tokens of the longest sequence that there is room for."""
    if sequence_parallel_size == 1:
        return bucket_size
    return max(bucket_size, bucket_size * sequence_parallel_size // alignment * alignment)


def _assign(flops: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Sequences for each data-parallel rank."""
    rank_sequences: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0.0, rank) for rank in range(num_ranks)]
    for sequence in sorted(range(len(flops)), key=lambda i: -flops[i]):
        load, rank = loads[0]
        rank_sequences[rank].append(sequence)
        heapq.heapreplace(loads, (load + flops[sequence], rank))
    return rank_sequences


@dataclass
class _Placed:
    """A micro-batch: its sequences by rising length, the place of each, and how long it takes."""

    sequences: list[int]
    places: list[int]
    seconds: float


@dataclass(frozen=True)
class _Step:
    """The sequences of a step; plain lists, which are faster than arrays for a handful of ranks.

    Args:
        sizes: tokens of each.
        padded: tokens of each if it is sharded.
        local, sharded: work of each, on one rank, and summed over all that share it.
        num_ranks: N, that share a micro-batch.
        room: C N: room is counted in N-ths of a token, so that a sharded sequence takes a whole number of them.
    """

    sizes: list[int]
    padded: list[int]
    local: list[Load]
    sharded: list[Load]
    num_ranks: int
    room: int
    times: StepTime

    def rank(self, sequences: list[int]) -> list[PlacedMicroBatch]:
        """The micro-batches of a data-parallel rank."""
        if not sequences:
            return []
        ascending = sorted(sequences, key=lambda i: (self.sizes[i], i))
        found = self._micro_batches(ascending, self._place)
        assert found is not None, "each sequence has been seen to fit alone"
        if self.num_ranks > 1:
            others = [self._micro_batches(ascending, self._shard), self._whole(ascending, len(found))]
            found = min([found, *filter(None, others)], key=_seconds)
        found.sort(key=lambda placed: -math.fsum(self.local[i].flops for i in placed.sequences))
        return [PlacedMicroBatch(np.array(one.sequences, np.int64), np.array(one.places, np.int64)) for one in found]

    def _micro_batches(
        self, ascending: list[int], place: Callable[[list[int]], _Placed | None]
    ) -> list[_Placed] | None:
        """The fewest micro-batches that ``place`` manages with, or None if one for each sequence is not enough."""
        fewest = -(-sum(self.sizes[i] for i in ascending) // self.room)
        for num in range(fewest, len(ascending) + 1):
            for cut in (_interleaved, self._evenly):
                # What fails is mostly the first, which is the fullest: do not place the others for nothing.
                found = [placed for placed in takewhile(bool, map(place, cut(ascending, num))) if placed]
                if len(found) == num:
                    return found
        return None

    def _evenly(self, ascending: list[int], num: int) -> list[list[int]]:
        """Cut into ``num`` micro-batches: the longest sequence first, each into the emptiest."""
        parts: list[list[int]] = [[] for _ in range(num)]
        loads = [(0, number) for number in range(num)]
        for sequence in reversed(ascending):
            load, number = loads[0]
            parts[number].append(sequence)
            heapq.heapreplace(loads, (load + self.padded[sequence], number))
        return [part[::-1] for part in parts]

    def _whole(self, ascending: list[int], fewest: int) -> list[_Placed] | None:
        """The fewest micro-batches, of at most twice as many, in which all that fits on a rank can be whole."""
        found = (self._whole_in(ascending, num) for num in range(fewest, 2 * fewest + 1))
        return next(filter(None, found), None)

    def _whole_in(self, ascending: list[int], num: int) -> list[_Placed] | None:
        """Buckets of even work, N of about the same in a micro-batch; longer sequences are sharded beside them.

        Each of these goes to the micro-batch with the fewest tokens so far. None where there is no room.
        """
        bucket = self.room // self.num_ranks
        short = [i for i in ascending if self.sizes[i] <= bucket]
        sizes, work = [self.sizes[i] for i in short], [self.local[i].flops for i in short]
        buckets = even_packs(sizes, work, num * self.num_ranks, bucket)
        if buckets is None:
            return None
        benches = [_Bench(self) for _ in range(num)]
        for number, members in enumerate(buckets):
            for member in members:
                benches[number // self.num_ranks].keep(short[member], number % self.num_ranks)
        for sequence in reversed(ascending):
            if self.sizes[sequence] > bucket:
                max(benches, key=lambda bench: sum(bench.room)).shard(sequence)
        if min(min(bench.room) for bench in benches) < 0:
            return None
        return [bench.placed() for bench in benches if bench.place_of]

    def _shard(self, ascending: list[int]) -> _Placed | None:
        """All sequences sharded, or None if they do not fit."""
        tokens = sum(self.padded[i] for i in ascending)
        if tokens > self.room:
            return None
        work = Load.sum(self.sharded[i] for i in ascending)
        seconds = self.times.micro_batch([NOTHING], work, tokens, self.num_ranks)
        return _Placed(ascending, [SHARDED] * len(ascending), seconds)

    def _place(self, ascending: list[int]) -> _Placed | None:
        """Each sequence local or sharded, or None if they do not fit."""
        bench = _Bench(self)
        found = None
        if all(map(bench.add, ascending)):
            found = bench.placed()
        if self.num_ranks == 1:
            return found
        order = ascending[::-1]
        falling = Falling(
            [self.sizes[i] for i in order],
            [self.padded[i] for i in order],
            [self.local[i] for i in order],
            [self.sharded[i] for i in order],
            self.num_ranks,
            self.room,
        )
        even = falling.best(self.times, found.seconds if found is not None else math.inf)
        if even is None:
            return found
        return _Placed(ascending, [*even.ranks[::-1], *[SHARDED] * even.num_sharded], even.seconds)


class _Bench:
    """The ranks of a micro-batch while its sequences are placed.

    Attributes:
        room: of each rank, in N-ths of a token; below 0 only between two roll-backs.
        load: of each rank's local sequences.
        local: local sequences of each rank, by rising length.
    """

    def __init__(self, step: _Step) -> None:
        self.step, self.ranks = step, range(step.num_ranks)
        self.room = [step.room] * step.num_ranks
        self.load = [NOTHING] * step.num_ranks
        self.local: list[list[int]] = [[] for _ in self.ranks]
        self.place_of: dict[int, int] = {}
        self.sharded, self.sharded_tokens = NOTHING, 0

    def seconds(self) -> float:
        """Seconds that the micro-batch takes."""
        return self.step.times.micro_batch(self.load, self.sharded, self.sharded_tokens, self.step.num_ranks)

    def add(self, sequence: int) -> bool:
        """Place a sequence, no shorter than those before it; False if there is no room however these are placed."""
        size = self.step.sizes[sequence] * self.step.num_ranks
        while True:
            if min(self.room) >= 0:
                rank = self.load.index(min(self.load))
                if self.room[rank] < size:
                    rank = self.room.index(max(self.room))
                if self.room[rank] >= size:
                    self.keep(sequence, rank)
                    return True
                if self.step.num_ranks > 1 and min(self.room) >= self.step.padded[sequence]:
                    self.shard(sequence)
                    return True
            fullest = self.room.index(min(self.room))
            if self.step.num_ranks == 1 or not self.local[fullest]:
                return False
            self._roll_back(fullest)

    def placed(self) -> _Placed:
        """The sequences as they lie, or with more of them sharded if that takes less."""
        seconds = self.shard_more()
        ascending = sorted(self.place_of, key=lambda i: (self.step.sizes[i], i))
        return _Placed(ascending, [self.place_of[i] for i in ascending], seconds)

    def shard_more(self) -> float:
        """Roll back on the rank that computes longest while that may win time; the seconds of the best that was met."""
        step, best, rolled_back = self.step, self.seconds(), list[int]()
        places, num_best = dict(self.place_of), 0
        while step.num_ranks > 1:
            busiest = self.load.index(max(self.load))
            # One from every rank without anything won: sharding still more only makes work.
            if not self.local[busiest] or len(rolled_back) - num_best >= step.num_ranks:
                break
            rolled_back.append(self._roll_back(busiest))
            seconds = self.seconds()
            if seconds < best and min(self.room) >= 0:
                best, num_best = seconds, len(rolled_back)
        self.place_of = places | dict.fromkeys(rolled_back[:num_best], SHARDED)
        return best

    def keep(self, sequence: int, rank: int) -> None:
        self.room[rank] -= self.step.sizes[sequence] * self.step.num_ranks
        self.load[rank] = self.load[rank].plus(self.step.local[sequence])
        self.local[rank].append(sequence)
        self.place_of[sequence] = rank

    def shard(self, sequence: int) -> None:
        padded = self.step.padded[sequence]
        self.room = [room - padded for room in self.room]
        self.sharded = self.sharded.plus(self.step.sharded[sequence])
        self.sharded_tokens += padded
        self.place_of[sequence] = SHARDED

    def _roll_back(self, rank: int) -> int:
        """The longest local sequence of a rank becomes sharded: S tokens back, and an N-th of them from every rank."""
        sequence = self.local[rank].pop()
        self.room[rank] += self.step.sizes[sequence] * self.step.num_ranks
        # Added up anew: a difference of floats would leave a rest on a rank that has nothing.
        self.load[rank] = Load.sum(self.step.local[i] for i in self.local[rank])
        self.shard(sequence)
        return sequence


def _interleaved(ascending: list[int], num: int) -> list[list[int]]:
    """Cut into ``num`` micro-batches, as the paper does: each has short and long sequences."""
    return [ascending[first::num] for first in range(num)]


def _seconds(found: list[_Placed]) -> float:
    return sum(placed.seconds for placed in found)
