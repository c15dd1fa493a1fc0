"""Assignment of the packs of a step to ranks so that the slowest rank finishes as early as possible.

Optimal assignment is a number-partitioning problem. Packs are assigned longest first (LPT: Graham 1969, "Bounds on
multiprocessing timing anomalies"), equally many to every rank: in each round every rank takes one pack, the rank with
the least work so far the heaviest. Afterwards the heaviest and the lightest rank swap a pair of packs while that helps.
All steps are processed at once, so that millions of packs take seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import numpy as np

from packtool.planning.pack_plan import Costs, Int64Array

_MAX_SWAPS = 16
_WINDOW_STEPS = 8
_PACKS_AT_ONCE = 1 << 20  # bounds the temporaries of the swaps


def assign_evenly(costs: Costs, num_ranks: int) -> Int64Array:
    """Assign each step's packs to ranks, equally many to each.

    Ties go to the lower rank and the earlier pack, so that every machine assigns alike.

    Cost: O(K log K) for K packs, and at most 16 swaps a step of O((n / W)^2) for its n packs and W ranks.

    Args:
        costs: (S, n), of the packs of S steps; n is a multiple of ``num_ranks``.
        num_ranks: W.

    Returns:
        int64 (S, W, n / W): the columns of ``costs`` of each step and rank, the heaviest first.
    """
    num_steps, num_packs = costs.shape
    per_rank, rest = divmod(num_packs, num_ranks)
    assert rest == 0, "every rank of a step has equally many packs"
    assigned = np.empty((num_steps, num_ranks, per_rank), dtype=np.int64)
    chunk = max(1, _PACKS_AT_ONCE // max(num_packs, 1))
    for start in range(0, num_steps, chunk):
        part = costs[start : start + chunk]
        rank_packs = _assign_in_rounds(part, num_ranks, per_rank)
        if per_rank > 1 and num_ranks > 1:
            pack_costs = np.take_along_axis(part, rank_packs.reshape(part.shape), axis=1).reshape(rank_packs.shape)
            _swap(pack_costs, rank_packs)
            # By falling cost: micro-batches that run at the same time are then alike, too.
            order = np.argsort(-pack_costs, axis=2, kind="stable")
            rank_packs = np.take_along_axis(rank_packs, order, axis=2)
        assigned[start : start + chunk] = rank_packs
    return assigned


def _assign_in_rounds(costs: Costs, num_ranks: int, per_rank: int) -> Int64Array:
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
    """Let the heaviest and the lightest rank of each step swap the best pair of packs; changes both (S, W, n / W)."""
    active = np.arange(len(rank_packs))
    for _ in range(_MAX_SWAPS):
        loads = costs[active].sum(axis=2)
        heavy, light = loads.argmax(axis=1), loads.argmin(axis=1)
        rows = np.arange(len(active))
        gap = loads[rows, heavy] - loads[rows, light]
        # Moving d from the heavy to the light rank leaves a gap of |gap - 2 d|: the best d is half of it.
        moved = costs[active, heavy][:, :, None] - costs[active, light][:, None, :]
        left = np.abs(gap[:, None, None] - 2 * moved).reshape(len(active), -1)
        best = left.argmin(axis=1)
        helps = left[rows, best] < gap * (1 - 1e-9)
        active, best, heavy, light = active[helps], best[helps], heavy[helps], light[helps]
        if not len(active):
            return
        give, take = np.divmod(best, rank_packs.shape[2])
        for array in (rank_packs, costs):
            swapped = array[active, heavy, give].copy()
            array[active, heavy, give] = array[active, light, take]
            array[active, light, take] = swapped


def group_alike(packs: Int64Array, costs: Costs, num_ranks: int) -> Int64Array:
    """Exchange packs between steps near each other, so that those processed at the same time are alike.

    The packs of a window of 8 steps are sorted by cost and divided into rounds of one pack a rank; each step takes
    rounds from the whole range. The order of the window's steps depends on the packs' numbers, which are random.

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


def share_out(items: Iterable[int], weights: Sequence[float], num_groups: int) -> list[list[int]]:
    """Assign items, one after the other, to the group with the least weight so far; ties go to the lower group.

    Args:
        items: indices into ``weights``; the heaviest first is LPT.
    """
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    loads: list[tuple[float, int]] = [(0, group) for group in range(num_groups)]
    for item in items:
        load, group = loads[0]
        groups[group].append(item)
        heapq.heapreplace(loads, (load + weights[item], group))
    return groups


def divide_evenly(
    sizes: Sequence[int], work: Sequence[float], num_groups: int, capacity: int
) -> list[list[int]] | None:
    """Divide items into groups of limited size and about equal work; None where an item fits in no group.

    The heaviest item first, each to the group with the least work that has room. Ties go to the later item and the
    lower group. Groups are in the order of falling work, the items of a group of ascending work.

    Args:
        sizes: (n,), of the items.
        work: (n,), of each.
        num_groups: some may stay empty.
        capacity: maximum size of each group.
    """
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    room, lightest = [capacity] * num_groups, [(0.0, number) for number in range(num_groups)]
    for item in sorted(range(len(work)), key=lambda i: (-work[i], -i)):
        full = []
        while lightest and room[lightest[0][1]] < sizes[item]:
            full.append(heapq.heappop(lightest))
        if not lightest:
            return None
        load, number = lightest[0]
        groups[number].append(item)
        room[number] -= sizes[item]
        heapq.heapreplace(lightest, (load + work[item], number))
        for other in full:
            heapq.heappush(lightest, other)
    return [groups[number][::-1] for _, number in sorted(lightest, key=lambda entry: (-entry[0], entry[1]))]


def imbalance(rank_costs: Costs) -> Costs:
    """Work of the slowest rank divided by the mean rank's, (S,), from (S, W): 1 or more, 1 for a step without work."""
    mean = rank_costs.mean(axis=1)
    ratio: Costs = np.divide(rank_costs.max(axis=1), mean, out=np.ones(len(mean)), where=mean > 0)
    return ratio
