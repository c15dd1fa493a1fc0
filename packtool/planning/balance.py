"""Packs of a step assigned to ranks so that the slowest rank is done as early as possible.

Optimal assignment is a number-partitioning problem. Packs are laid out longest first (LPT: Graham 1969, "Bounds on
multiprocessing timing anomalies"), with one more rule, that every rank gets equally many: in each round every rank
takes one pack, the rank with the least work so far the heaviest. Afterwards the heaviest and the lightest rank swap a
pair of packs as long as that helps. All steps are worked on at once, so that millions of packs take seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Costs = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

_MOST_SWAPS = 16
_WINDOW_STEPS = 8
# Packs worked on at a time: bounds the temporaries of the swaps.
_PACKS_AT_ONCE = 1 << 20


def assign_evenly(costs: Costs, num_ranks: int) -> Int64Array:
    """Assign each step's packs to ranks, equally many to each.

    Ties go to the lower rank and the earlier pack, so that every machine assigns alike.

    Price: O(K log K) for K packs, and at most 16 swaps a step of O((n / W)^2) for its n packs and W ranks.

    Args:
        costs: (S, n), of the packs of S steps; n is a multiple of ``num_ranks``.
        num_ranks: W.

    Returns:
        int64 (S, W, n / W): for each step and rank the columns of ``costs`` it gets, the heaviest first.
    """
    num_steps, num_packs = costs.shape
    per_rank, rest = divmod(num_packs, num_ranks)
    assert rest == 0, "a step is filled up to equal counts"
    assigned = np.empty((num_steps, num_ranks, per_rank), dtype=np.int64)
    chunk = max(1, _PACKS_AT_ONCE // max(num_packs, 1))
    for start in range(0, num_steps, chunk):
        part = costs[start : start + chunk]
        rank_packs = _rounds(part, num_ranks, per_rank)
        if per_rank > 1 and num_ranks > 1:
            _swap(part, rank_packs)
            rank_packs = _heaviest_first(part, rank_packs)
        assigned[start : start + chunk] = rank_packs
    return assigned


def _rounds(costs: Costs, num_ranks: int, per_rank: int) -> Int64Array:
    falling = np.argsort(-costs, axis=1, kind="stable")
    loads = np.zeros((len(costs), num_ranks))
    rank_packs = np.empty((len(costs), num_ranks, per_rank), dtype=np.int64)
    for i in range(per_rank):
        packs = falling[:, i * num_ranks : (i + 1) * num_ranks]
        lightest = np.argsort(loads, axis=1, kind="stable")
        np.put_along_axis(rank_packs[:, :, i], lightest, packs, axis=1)
        gained = np.take_along_axis(costs, packs, axis=1)
        np.put_along_axis(loads, lightest, np.take_along_axis(loads, lightest, axis=1) + gained, axis=1)
    return rank_packs


def _swap(costs: Costs, rank_packs: Int64Array) -> None:
    """Let the heaviest and the lightest rank of each step exchange the pair of packs that evens them out best."""
    per_rank = rank_packs.shape[2]
    of = np.take_along_axis(costs, rank_packs.reshape(costs.shape), axis=1).reshape(rank_packs.shape)
    active = np.arange(len(rank_packs))
    for _ in range(_MOST_SWAPS):
        loads = of[active].sum(axis=2)
        heavy, light = loads.argmax(axis=1), loads.argmin(axis=1)
        rows = np.arange(len(active))
        gap = loads[rows, heavy] - loads[rows, light]
        # Moving d from the heavy to the light rank leaves a gap of |gap - 2 d|: the best d is half of it.
        moved = of[active, heavy][:, :, None] - of[active, light][:, None, :]
        left = np.abs(gap[:, None, None] - 2 * moved).reshape(len(active), -1)
        best = left.argmin(axis=1)
        helps = left[rows, best] < gap * (1 - 1e-9)
        active, best, heavy, light = active[helps], best[helps], heavy[helps], light[helps]
        if not len(active):
            return
        give, take = np.divmod(best, per_rank)
        for array in (rank_packs, of):
            given = array[active, heavy, give].copy()
            array[active, heavy, give] = array[active, light, take]
            array[active, light, take] = given


def _heaviest_first(costs: Costs, rank_packs: Int64Array) -> Int64Array:
    """Each rank's packs by falling cost: micro-batches that run at the same time are then alike, too."""
    of = np.take_along_axis(costs, rank_packs.reshape(costs.shape), axis=1).reshape(rank_packs.shape)
    return np.take_along_axis(rank_packs, np.argsort(-of, axis=2, kind="stable"), axis=2)


def group_alike(packs: Int64Array, costs: Costs, num_ranks: int) -> Int64Array:
    """Exchange packs between steps that lie near each other, so that those worked on at the same time are alike.

    The packs of a window of 8 steps are sorted by cost and cut into rounds of one pack a rank; each step takes rounds
    from all over the range. Which step of the window comes first depends on the packs' numbers, which are random.

    Args:
        packs: int64 (S, n), of full steps.
        costs: (K,), of all packs.
        num_ranks: W.

    Returns:
        int64 (S, n).
    """
    grouped = packs.copy()
    num_steps, num_packs = packs.shape
    for start in range(0, num_steps, _WINDOW_STEPS):
        window = packs[start : start + _WINDOW_STEPS].reshape(-1)
        num_here = len(window) // num_packs
        falling = window[np.argsort(-costs[window], kind="stable")]
        rounds = falling.reshape(num_packs // num_ranks, num_here, num_ranks)
        steps = rounds.transpose(1, 0, 2).reshape(num_here, num_packs)
        grouped[start : start + num_here] = steps[np.argsort(steps.min(axis=1), kind="stable")]
    return grouped


def share_out(things: Iterable[int], weights: Sequence[float], num_groups: int) -> list[list[int]]:
    """Give each thing, one after the other, to the group with the least weight so far; ties go to the lower group.

    Args:
        things: indices into ``weights``; the heaviest first is LPT.
    """
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    loads: list[tuple[float, int]] = [(0, group) for group in range(num_groups)]
    for thing in things:
        load, group = loads[0]
        groups[group].append(thing)
        heapq.heapreplace(loads, (load + weights[thing], group))
    return groups


def even_packs(sizes: Sequence[int], work: Sequence[float], num_packs: int, capacity: int) -> list[list[int]] | None:
    """Things in so many packs of about equal work, which come by falling work; None where one has no room in any.

    The heaviest thing first, each to the pack with the least work that has room. Ties go to the later thing and the
    lower pack. Within a pack they come by rising work.

    Args:
        sizes: (n,), room that the things take.
        work: (n,), of each.
        num_packs: that may stay empty.
        capacity: room of each pack.
    """
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    room, lightest = [capacity] * num_packs, [(0.0, number) for number in range(num_packs)]
    for one in sorted(range(len(work)), key=lambda i: (-work[i], -i)):
        full = []
        while lightest and room[lightest[0][1]] < sizes[one]:
            full.append(heapq.heappop(lightest))
        if not lightest:
            return None
        load, number = lightest[0]
        packs[number].append(one)
        room[number] -= sizes[one]
        heapq.heapreplace(lightest, (load + work[one], number))
        for other in full:
            heapq.heappush(lightest, other)
    return [packs[number][::-1] for _, number in sorted(lightest, key=lambda one: (-one[0], one[1]))]


def imbalance(rank_costs: Costs) -> Costs:
    """Work of the slowest rank over the mean rank's, 1 or more, of each step.

    Args:
        rank_costs: (S, W).

    Returns:
        (S,); 1 for a step without work.
    """
    mean = rank_costs.mean(axis=1)
    ratio: npt.NDArray[Any] = np.divide(rank_costs.max(axis=1), mean, out=np.ones(len(mean)), where=mean > 0)
    return ratio
