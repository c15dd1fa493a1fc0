"""Assignment of packs to optimizer steps, ranks and micro-batches, so that the slowest rank finishes early.

Balancing is a number-partitioning problem. Packs are assigned longest first (LPT: Graham 1969, "Bounds on
multiprocessing timing anomalies"), equally many to every rank: in each round every rank takes one pack, the rank with
the least work so far the heaviest. Afterwards the heaviest and the lightest rank swap a pair of packs while that helps.
All steps are processed at once, so that millions of packs take seconds.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.errors import ConfigError
from packtool.planning.options import PlanOptions
from packtool.planning.pack_plan import Costs, Int64Array, IntArray, PackPlan, digest_arrays, invert_order, to_offsets
from packtool.planning.tree_parts import TreeParts


@dataclass(frozen=True, eq=False)
class StepAssignment:
    """Assignment of K packs (or single samples) to micro-batches: the result of every assigner.

    Args:
        order: int64 (K,), the packs, micro-batch by micro-batch, laid out as in ``StepPlan``.
        micro_batch_sizes: int64 (C,), packs in each micro-batch of each rank.
        micro_batches_per_step: int64 (S,), a multiple of the ranks.
        placement: with Skrull, int64 (K,), in the order of ``order``: ``skrull.SHARDED``, or the sequence parallel rank
            that the sample is local to.
    """

    order: Int64Array
    micro_batch_sizes: Int64Array
    micro_batches_per_step: Int64Array
    placement: Int64Array | None = None

    @property
    def inverse(self) -> Int64Array:
        """int64 (K,): position in ``order`` of each pack; ``values[inverse]`` restores the order of results."""
        return invert_order(self.order)


@dataclass(frozen=True, eq=False)
class StepPlan:
    """K packs assigned to S optimizer steps, W data-parallel ranks and micro-batches.

    C counts the micro-batches of all ranks in all steps. Those of a step are consecutive, those of rank 0 first::

        step 0: rank 0 [micro 0, micro 1, ...], rank 1 [micro 0, micro 1, ...], ...; step 1: ...

    A micro-batch may have no packs: the rank then runs one with zero loss, so that all ranks do the same collectives.

    Args:
        order: int64 (K,), the packs, micro-batch by micro-batch.
        micro_batch_offsets: int64 (C + 1,), first position in ``order`` of each micro-batch, and K.
        step_offsets: int64 (S + 1,), first micro-batch of each step, and C.
        target_tokens_per_step: int64 (S,), labels that carry loss, over all ranks and micro-batches.
    """

    world_size: int
    order: Int64Array
    micro_batch_offsets: Int64Array
    step_offsets: Int64Array
    target_tokens_per_step: Int64Array

    @classmethod
    def of(cls, packs: PackPlan, target_tokens: IntArray, assignment: StepAssignment, world_size: int) -> StepPlan:
        """Build the plan of an assignment of ``packs``; ``target_tokens``, (N,), are labels by sample number."""
        micro_batch_offsets = to_offsets(assignment.micro_batch_sizes)
        step_offsets = to_offsets(assignment.micro_batches_per_step)
        targets_per_pack = packs.sums_per_pack(target_tokens[packs.samples])
        targets_per_step = _sums_between(targets_per_pack[assignment.order], micro_batch_offsets[step_offsets])
        return cls(world_size, assignment.order, micro_batch_offsets, step_offsets, targets_per_step)

    @property
    def num_steps(self) -> int:
        return len(self.step_offsets) - 1

    @property
    def num_packs(self) -> int:
        return len(self.order)

    @property
    def num_empty_micro_batches(self) -> int:
        """Micro-batches without packs: in the last step or, where micro-batches are made by tokens, in any step."""
        return int(np.count_nonzero(self.micro_batch_sizes() == 0))

    @property
    def num_micro_batches_of_all_ranks(self) -> int:
        return len(self.micro_batch_offsets) - 1

    @property
    def micro_batch_of(self) -> Int64Array:
        """int64 (K,): the micro-batch of each pack in ``order``."""
        return np.repeat(np.arange(self.num_micro_batches_of_all_ranks), self.micro_batch_sizes())

    @property
    def rank_step_of_micro_batch(self) -> Int64Array:
        """int64 (C,): the rank-step (one rank in one step) of each micro-batch, numbered step * W + rank."""
        steps, ranks, _ = self._locate_micro_batches()
        return steps * self.world_size + ranks

    def micro_batch_sizes(self) -> Int64Array:
        """Count the packs in each micro-batch; int64 (C,)."""
        return self.micro_batch_offsets[1:] - self.micro_batch_offsets[:-1]

    def num_micro_batches(self, step: int) -> int:
        """Return the number of micro-batches of a step, the same on every rank."""
        _check_index("step", step, self.num_steps)
        return int(self.step_offsets[step + 1] - self.step_offsets[step]) // self.world_size

    def packs(self, step: int, rank: int, micro_batch: int) -> Int64Array:
        """Return the packs (n,) of one micro-batch of one rank, often one, possibly none; a view, not a copy."""
        return self.order[self.micro_batch_slice(step, rank, micro_batch)]

    def micro_batch_slice(self, step: int, rank: int, micro_batch: int) -> slice:
        """Return the slice of ``order`` with the packs of one micro-batch of one rank."""
        num_micro_batches = self.num_micro_batches(step)
        _check_index("rank", rank, self.world_size)
        _check_index("micro-batch", micro_batch, num_micro_batches)
        index = self.step_offsets[step] + rank * num_micro_batches + micro_batch
        return slice(int(self.micro_batch_offsets[index]), int(self.micro_batch_offsets[index + 1]))

    def _locate_micro_batches(self) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return each micro-batch's step, its rank, and its index on that rank in that step; (C,) each."""
        per_step = np.diff(self.step_offsets)
        steps = np.repeat(np.arange(self.num_steps), per_step)
        index_in_step = np.arange(len(steps)) - self.step_offsets[steps]
        per_rank = np.maximum(per_step // self.world_size, 1)[steps]
        return steps, index_in_step // per_rank, index_in_step % per_rank

    def locations(self) -> npt.NDArray[np.int32]:
        """Return the step, rank and micro-batch of each pack; int32 (K, 3)."""
        micro_batch_locations = np.stack(self._locate_micro_batches(), axis=1)
        locations = np.empty((self.num_packs, 3), np.int32)
        locations[self.order] = np.repeat(micro_batch_locations, self.micro_batch_sizes(), axis=0)
        return locations

    def target_tokens(self, step: int) -> int:
        """Return the labels of a step that carry loss, over all ranks: the divisor of its loss."""
        _check_index("step", step, self.num_steps)
        return int(self.target_tokens_per_step[step])

    def sums_per_step(self, per_pack: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Sum values of packs, (K,), over each step; (S,)."""
        return _sums_between(per_pack[self.order], self.micro_batch_offsets[self.step_offsets])

    def on_any_rank(self, is_selected: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Flag the micro-batches in which any rank has a selected pack; ``is_selected`` is bool (K,).

        Returns bool (C / W,): micro-batches that all ranks run at the same time count as one.
        """
        num_selected = _sums_between(is_selected[self.order], self.micro_batch_offsets)
        first = self.step_offsets // self.world_size
        steps, _, micro_batches = self._locate_micro_batches()
        return np.bincount(first[steps] + micro_batches, weights=num_selected, minlength=int(first[-1])) > 0

    @property
    def rank_bounds(self) -> Int64Array:
        """int64 (S, W + 1): the first micro-batch of each rank in each step, and the one after the last rank's."""
        per_rank = np.diff(self.step_offsets) // self.world_size
        bounds = self.step_offsets[:-1, None] + per_rank[:, None] * np.arange(self.world_size + 1)
        return bounds.astype(np.int64, copy=False)

    def rank_costs(self, costs: Costs) -> Costs:
        """Sum the costs (K,) of packs by step and rank; (steps, ranks)."""
        return _sums_between(costs[self.order], self.micro_batch_offsets[self.rank_bounds])

    def micro_batch_sums(self, per_pack: npt.NDArray[Any]) -> Costs:
        """Sum values of packs, (K,), over each micro-batch; (C,)."""
        return _sums_between(per_pack[self.order], self.micro_batch_offsets).astype(np.float64)

    def rank_sums(self, per_micro_batch: npt.NDArray[Any]) -> Costs:
        """Sum values of micro-batches, (C,), by step and rank; (steps, ranks)."""
        return _sums_between(per_micro_batch, self.rank_bounds).astype(np.float64)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 in hex over all fields."""
        digest = hashlib.sha256(f"packtool step plan 1, world size {self.world_size}\n".encode())
        offsets = self.micro_batch_offsets, self.step_offsets
        return digest_arrays(digest, self.order, *offsets, self.target_tokens_per_step)


def _sums_between(values: npt.NDArray[Any], bounds: Int64Array) -> npt.NDArray[Any]:
    """Sum ``values`` (n,) from each bound to the next along the last axis of ``bounds`` (..., k + 1); (..., k)."""
    before = np.concatenate((np.zeros(1, values.dtype), np.cumsum(values)))
    return np.diff(before[bounds], axis=-1)


def _check_index(name: str, index: int, num: int) -> None:
    # Negative numbers would silently mean another step.
    if not 0 <= index < num:
        raise IndexError(f"{name} {index} of {num}")


def assign_balanced(
    packs: PackPlan,
    costs: Costs | None,
    options: PlanOptions,
    tree_parts: TreeParts | None = None,
    num_packs: int | None = None,
) -> StepAssignment:
    """Assign the packs of an epoch to optimizer steps, ranks and micro-batches.

    A step takes the next ``options.packs_per_step`` packs. Without balancing, they are assigned to the ranks in turn;
    ``within-step`` gives the ranks equal work; ``window`` also exchanges packs between steps near each other. The last
    step takes the remaining packs, in as few micro-batches as its ranks need.

    Args:
        costs: work of each pack, (K,), needed for balancing.
        tree_parts: packs of one prefix tree, which must be in one step, or in different ones.
        num_packs: plan no more steps than for this many packs.
    """
    world_size, accumulation = options.world_size, options.gradient_accumulation_steps
    packs_per_micro_batch = options.per_device_train_batch_size
    check_counts(
        world_size=world_size, gradient_accumulation_steps=accumulation, packs_per_micro_batch=packs_per_micro_batch
    )
    if options.balance == "none":
        costs = None
    else:
        assert costs is not None, "balancing needs the costs of packs"
    order = _order_for_steps(packs.num_packs, costs, options, tree_parts)
    num_full_steps = _num_full_steps(packs.num_packs, num_packs, options.packs_per_step)
    num_in_full_steps = num_full_steps * options.packs_per_step
    full_order = _sort_full_steps_by_rank(order[:num_in_full_steps], costs, options)
    last_order, last_sizes = _assign_last_step(order[num_in_full_steps:], world_size, packs_per_micro_batch, costs)

    micro_batches_per_step = [world_size * accumulation] * num_full_steps
    full_sizes = np.full(sum(micro_batches_per_step), packs_per_micro_batch, dtype=np.int64)
    if len(last_order):
        micro_batches_per_step.append(len(last_sizes))
    return StepAssignment(
        order=np.concatenate((full_order, last_order)),
        micro_batch_sizes=np.append(full_sizes, last_sizes),
        micro_batches_per_step=np.array(micro_batches_per_step, dtype=np.int64),
    )


def _num_full_steps(num_packs: int, max_packs: int | None, packs_per_step: int) -> int:
    if max_packs is not None and num_packs > max_packs:
        return math.ceil(max_packs / packs_per_step) - 1  # the last step takes all further packs
    return num_packs // packs_per_step


def check_counts(**counts: int) -> None:
    """Check that numbers of ranks, packs or tokens are 1 or more."""
    problems = [f"{name} is {count}; it must be 1 or more." for name, count in counts.items() if count < 1]
    if problems:
        raise ConfigError.from_problems(problems)


def _order_for_steps(
    num_packs: int, costs: Costs | None, options: PlanOptions, tree_parts: TreeParts | None
) -> Int64Array:
    """Return the order in which steps take the packs, int64 (K,), after ``window`` balancing and placing tree parts."""
    order = np.arange(num_packs, dtype=np.int64)
    if costs is not None and options.balance == "window":
        num_in_full_steps = num_packs // options.packs_per_step * options.packs_per_step
        full_steps = order[:num_in_full_steps].reshape(-1, options.packs_per_step)
        order[:num_in_full_steps] = group_alike(full_steps, costs, options.world_size).reshape(-1)
    return order if tree_parts is None else tree_parts.reorder(order, options.packs_per_step)


def _sort_full_steps_by_rank(packs: Int64Array, costs: Costs | None, options: PlanOptions) -> Int64Array:
    """Sort the packs of full steps, (n,), within each step: first those of rank 0, then those of rank 1.

    ``costs``: work of all packs, (K,); if None, each step's packs go to the ranks in turn.
    """
    if costs is None:
        rounds = packs.reshape(-1, options.packs_per_step // options.world_size, options.world_size)
        return rounds.transpose(0, 2, 1).reshape(-1)
    steps = packs.reshape(-1, options.packs_per_step)
    rank_packs = assign_evenly(costs[steps], options.world_size)  # columns of ``steps``
    return np.take_along_axis(steps, rank_packs.reshape(steps.shape), axis=1).reshape(-1)


def _assign_last_step(
    packs: Int64Array, world_size: int, packs_per_micro_batch: int, costs: Costs | None
) -> tuple[Int64Array, Int64Array]:
    """Divide the packs of the last, smaller step, (n,), among the ranks, and those of a rank into micro-batches.

    All ranks get the same number of micro-batches, so some of these may be empty.

    Args:
        costs: work of all packs of the epoch, by pack number; None assigns packs to ranks in turn.

    Returns:
        The packs, rank by rank, (n,), and the number of packs in each micro-batch, rank by rank.
    """
    if not len(packs):
        return packs, np.zeros(0, np.int64)
    micro_batches_per_rank = math.ceil(len(packs) / (world_size * packs_per_micro_batch))
    if costs is None:
        packs_of_ranks = [packs[rank::world_size] for rank in range(world_size)]
    else:
        packs_of_ranks = _divide_by_cost(packs, costs[packs], world_size)
    micro_batch_sizes: list[int] = []
    for rank_packs in packs_of_ranks:
        micro_batches = np.array_split(rank_packs, micro_batches_per_rank)
        micro_batch_sizes += map(len, micro_batches)
    return np.concatenate(packs_of_ranks), np.array(micro_batch_sizes, dtype=np.int64)


def _divide_by_cost(packs: Int64Array, costs: Costs, num_ranks: int) -> list[Int64Array]:
    """Divide packs, (n,), of ``costs``, (n,), among ranks; some may get fewer than others."""
    # ``assign_evenly`` needs equally many for each rank: add packs without work, which have the indices from n on.
    num_added = math.ceil(len(packs) / num_ranks) * num_ranks - len(packs)
    costs_of_step = np.append(costs, np.zeros(num_added))
    (indices_of_ranks,) = assign_evenly(costs_of_step[np.newaxis], num_ranks)  # of a single step
    return [packs[indices[indices < len(packs)]] for indices in indices_of_ranks]


_MAX_SWAPS = 16
_WINDOW_STEPS = 8
_PACKS_AT_ONCE = 1 << 20  # bounds the temporaries of the swaps


def assign_evenly(costs: Costs, num_ranks: int) -> Int64Array:
    """Assign each step's packs to ranks, equally many to each, by their costs, (steps, packs of a step).

    Returns int64 (steps, ranks, packs of a rank): the columns of ``costs`` of each step and rank, the heaviest first.
    """
    num_steps, num_packs = costs.shape
    assert num_packs % num_ranks == 0, "every rank of a step has equally many packs"
    assigned = np.empty((num_steps, num_ranks, num_packs // num_ranks), dtype=np.int64)
    steps_at_once = max(1, _PACKS_AT_ONCE // max(num_packs, 1))
    for start in range(0, num_steps, steps_at_once):
        step_costs = costs[start : start + steps_at_once]
        assigned[start : start + steps_at_once] = _assign_steps_evenly(step_costs, num_ranks)
    return assigned


def _assign_steps_evenly(costs: Costs, num_ranks: int) -> Int64Array:
    """Assign packs to ranks, all steps at once; arguments and result as for ``assign_evenly``."""
    rank_packs = _assign_in_rounds(costs, num_ranks)
    if rank_packs.shape[2] <= 1 or num_ranks == 1:
        return rank_packs
    pack_costs = costs[np.arange(len(costs))[:, None, None], rank_packs]
    _even_out_by_swaps(pack_costs, rank_packs)  # in place
    # The heaviest pack of each rank first: micro-batches that run at the same time then have similar work, too.
    return np.take_along_axis(rank_packs, np.argsort(-pack_costs, axis=2, kind="stable"), axis=2)


def _assign_in_rounds(costs: Costs, num_ranks: int) -> Int64Array:
    """Give each rank one of the heaviest packs left in each round: the rank with the least work gets the heaviest."""
    num_steps, num_packs = costs.shape
    packs_per_rank = num_packs // num_ranks
    rank_packs = np.empty((num_steps, num_ranks, packs_per_rank), dtype=np.int64)
    rank_work = np.zeros((num_steps, num_ranks))
    steps = np.arange(num_steps)[:, None]
    heaviest_first = np.argsort(-costs, axis=1, kind="stable").reshape(num_steps, packs_per_rank, num_ranks)
    for round_index in range(packs_per_rank):
        packs = heaviest_first[:, round_index]  # (steps, ranks)
        lightest_ranks_first = np.argsort(rank_work, axis=1, kind="stable")
        rank_packs[steps, lightest_ranks_first, round_index] = packs
        rank_work[steps, lightest_ranks_first] += costs[steps, packs]
    return rank_packs


def _even_out_by_swaps(costs: Costs, rank_packs: Int64Array) -> None:
    """Swap packs of the heaviest and the lightest rank of each step, while that helps, at most ``_MAX_SWAPS`` times.

    Changes ``rank_packs`` and their ``costs``, (steps, ranks, packs of a rank), in place.
    """
    steps = np.arange(len(rank_packs))  # (s,), those where the last swap helped
    for _ in range(_MAX_SWAPS):
        is_better, heavy_packs, light_packs = _find_swaps(costs[steps])
        if not is_better.any():
            return
        steps = steps[is_better]
        # Indices of one pack of each step.
        heavy = steps, *heavy_packs[:, is_better]
        light = steps, *light_packs[:, is_better]
        # Indexing with arrays copies, so both sides can be assigned at once.
        rank_packs[heavy], rank_packs[light] = rank_packs[light], rank_packs[heavy]
        costs[heavy], costs[light] = costs[light], costs[heavy]


def _find_swaps(costs: Costs) -> tuple[npt.NDArray[np.bool_], Int64Array, Int64Array]:
    """Find the packs of the heaviest and the lightest rank whose swap evens these out best, in each of s steps.

    Returns whether the swap helps, (s,), and rank and index of either pack, (2, s). ``costs`` are (s, ranks, packs).
    """
    steps = np.arange(len(costs))
    loads = costs.sum(axis=2)
    heavy_rank, light_rank = loads.argmax(axis=1), loads.argmin(axis=1)
    gap = loads.max(axis=1) - loads.min(axis=1)
    gaps_after = _gaps_after_swap(costs[steps, heavy_rank], costs[steps, light_rank], gap)
    heavy_pack, light_pack = np.divmod(gaps_after.argmin(axis=1), costs.shape[2])
    is_better = gaps_after.min(axis=1) < gap * (1 - 1e-9)  # by more than rounding errors
    return is_better, np.stack((heavy_rank, heavy_pack)), np.stack((light_rank, light_pack))


def _gaps_after_swap(heavy_costs: Costs, light_costs: Costs, gap: Costs) -> Costs:
    """Compute the gap of work between two ranks after swapping a pack of each, for all pairs: (steps, n * n).

    The costs, (steps, n), are of the n packs of the heavy and of the light rank; ``gap``, (steps,), is the gap now.
    """
    # A swap that moves work d from the heavy to the light rank leaves a gap of |gap - 2 d|.
    moved_work = heavy_costs[:, :, None] - light_costs[:, None, :]
    return np.abs(gap[:, None, None] - 2 * moved_work).reshape(len(gap), -1)


def group_alike(packs: Int64Array, costs: Costs, num_ranks: int) -> Int64Array:
    """Exchange packs (S, n) of full steps between steps near each other, so that those processed at once are alike.

    The packs of a window of 8 steps are sorted by ``costs``, (K,), and divided into rounds of one pack a rank; each
    step takes rounds from the whole range.
    """
    grouped = packs.copy()
    num_steps, packs_per_step = packs.shape
    for start in range(0, num_steps, _WINDOW_STEPS):
        window = packs[start : start + _WINDOW_STEPS].reshape(-1)
        num_window_steps = len(window) // packs_per_step
        heaviest_first = window[np.argsort(-costs[window], kind="stable")]
        rounds = heaviest_first.reshape(packs_per_step // num_ranks, num_window_steps, num_ranks)
        steps = rounds.transpose(1, 0, 2).reshape(num_window_steps, packs_per_step)
        grouped[start : start + num_window_steps] = steps[np.argsort(steps.min(axis=1), kind="stable")]
    return grouped


def assign_to_lightest(items: Iterable[int], weights: Sequence[float], num_groups: int) -> list[list[int]]:
    """Assign items, indices into ``weights``, one after the other to the group with the least weight so far."""
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
    """Divide items into groups of about equal work, whose sizes add up to at most ``capacity``.

    The items, which are indices into ``sizes`` and ``work``, are placed one after the other, the heaviest first. Each
    goes to the group with the least work that has enough space. None if an item fits in no group.

    Returns:
        The items of each group, the lightest first. The group with the most work comes first; groups may be empty.
    """
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    free = [capacity] * num_groups
    lightest_groups = [(0.0, group) for group in range(num_groups)]  # a heap of work and number of each group
    heaviest_first = sorted(range(len(work)), key=lambda i: (-work[i], -i))
    for item in heaviest_first:
        too_full = []
        if lightest_groups and free[lightest_groups[0][1]] < sizes[item]:  # seldom: the call takes time
            too_full = _pop_groups_without_space(lightest_groups, free, sizes[item])
        if not lightest_groups:
            return None  # no group has enough space
        group_work, group = lightest_groups[0]
        groups[group].append(item)
        free[group] -= sizes[item]
        heapq.heapreplace(lightest_groups, (group_work + work[item], group))
        for entry in too_full:
            heapq.heappush(lightest_groups, entry)
    groups_by_work = sorted(lightest_groups, key=lambda entry: (-entry[0], entry[1]))
    return [groups[group][::-1] for _, group in groups_by_work]


def _pop_groups_without_space(
    lightest_groups: list[tuple[float, int]], free: list[int], size: int
) -> list[tuple[float, int]]:
    """Pop groups off the heap until its first one has space for ``size``, or it is empty; return those popped."""
    popped = []
    while lightest_groups:
        _, lightest = lightest_groups[0]
        if free[lightest] >= size:
            break
        popped.append(heapq.heappop(lightest_groups))
    return popped


def imbalance(rank_costs: Costs) -> Costs:
    """Divide the slowest rank's work by the mean, (steps,), from (steps, ranks): 1 for a step without work."""
    mean = rank_costs.mean(axis=1)
    return np.divide(rank_costs.max(axis=1), mean, out=np.ones(len(mean)), where=mean > 0)
