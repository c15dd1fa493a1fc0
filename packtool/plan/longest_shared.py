"""Placements of a micro-batch in which the longest sequences are sharded and the others lie evenly on the ranks.

What is sharded loses: short chunks are slow, and keys and values have to travel. But whole sequences are uneven: no
rank is done before the longest of them. So the longest are sharded, as many as pay, and the others go to the ranks by
falling work, each to the rank with the least so far (LPT: Graham 1969, "Bounds on multiprocessing timing anomalies").

    lengths 100 9 8 7 6 5 4 on two ranks     rank 0   [9][6][5]  [half of 100]
                                             rank 1   [8][7][4]  [half of 100]
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

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
