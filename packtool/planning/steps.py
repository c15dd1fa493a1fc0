"""Assignment of packs to optimizer steps, ranks and micro-batches, so that the slowest rank finishes early.

Balancing is a number-partitioning problem. Packs are assigned longest first (LPT: Graham 1969, "Bounds on
multiprocessing timing anomalies"), equally many to every rank: in each round every rank takes one pack, the rank with
the least work so far the heaviest. Afterwards the heaviest and the lightest rank swap a pair of packs while that helps.
All steps are processed at once, so that millions of packs take seconds.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.errors import ConfigError
from packtool.planning.options import PlanOptions
from packtool.planning.pack_plan import (
    Costs,
    Int64Array,
    IntArray,
    PackPlan,
    digest_arrays,
    invert_order,
    to_offsets,
)
from packtool.planning.tree_parts import TreeParts


@dataclass(frozen=True, eq=False)
class StepAssignment:
    """Assignment of K packs (or single samples) to micro-batches: the result of every assigner.

    Args:
        order: int64 (K,), the packs, micro-batch by micro-batch, laid out as in ``StepPlan``.
        cell_sizes: int64 (C,), packs in each micro-batch of each rank.
        cells_per_step: int64 (S,), a multiple of the ranks.
        placement: with Skrull, int64 (K,), in the order of ``order``: ``skrull.SHARDED``, or the sequence parallel rank
            that the sample is local to.
    """

    order: Int64Array
    cell_sizes: Int64Array
    cells_per_step: Int64Array
    placement: Int64Array | None = None

    @property
    def inverse(self) -> Int64Array:
        """int64 (K,): position in ``order`` of each pack; ``values[inverse]`` restores the order of results."""
        return invert_order(self.order)


@dataclass(frozen=True, eq=False)
class StepPlan:
    """K packs assigned to S optimizer steps, W data-parallel ranks and micro-batches.

    A *cell* is one micro-batch of one rank. The cells of a step follow one another, those of rank 0 first::

        step 0: rank 0 [micro 0, micro 1, ...], rank 1 [micro 0, micro 1, ...], ...; step 1: ...

    A cell may be empty: the rank then runs a micro-batch with zero loss, so that all ranks do the same collectives.

    Args:
        world_size: W.
        order: int64 (K,), the packs, cell by cell.
        cell_offsets: int64 (C + 1,), cell ``c`` holds ``order[cell_offsets[c]:cell_offsets[c + 1]]``.
        step_offsets: int64 (S + 1,), step ``s`` has the cells from ``step_offsets[s]`` to ``step_offsets[s + 1]`` - 1.
        target_tokens_per_step: int64 (S,), labels that carry loss, over all ranks and micro-batches.
    """

    world_size: int
    order: Int64Array
    cell_offsets: Int64Array
    step_offsets: Int64Array
    target_tokens_per_step: Int64Array

    @classmethod
    def of(cls, packs: PackPlan, target_tokens: IntArray, assignment: StepAssignment, world_size: int) -> StepPlan:
        """Build the plan of an assignment of ``packs``, and add up each step's target tokens.

        ``target_tokens``, (N,), are the labels that carry loss, by sample number as in ``packs.samples``.
        """
        cell_offsets, step_offsets = to_offsets(assignment.cell_sizes), to_offsets(assignment.cells_per_step)
        before = to_offsets(packs.sums_per_pack(target_tokens[packs.samples])[assignment.order])
        targets_per_step = np.diff(before[cell_offsets[step_offsets]])
        return cls(world_size, assignment.order, cell_offsets, step_offsets, targets_per_step)

    @property
    def num_steps(self) -> int:
        """The number S of optimizer steps."""
        return len(self.step_offsets) - 1

    @property
    def num_packs(self) -> int:
        """The number K of packs."""
        return len(self.order)

    @property
    def num_empty_micro_batches(self) -> int:
        """Cells without a pack: in the last step, or, where micro-batches are made by tokens, in any step."""
        return int(np.count_nonzero(self.cell_sizes() == 0))

    def cell_sizes(self) -> Int64Array:
        """Count the packs in each cell; int64 (C,)."""
        return self.cell_offsets[1:] - self.cell_offsets[:-1]

    def num_micro_batches(self, step: int) -> int:
        """Return the number of micro-batches of a step, the same on every rank."""
        _check_index("step", step, self.num_steps)
        return int(self.step_offsets[step + 1] - self.step_offsets[step]) // self.world_size

    def packs(self, step: int, rank: int, micro_batch: int) -> Int64Array:
        """Return the packs (n,) of one micro-batch of one rank, often one, possibly none; a view, not a copy."""
        return self.order[self.cell(step, rank, micro_batch)]

    def cell(self, step: int, rank: int, micro_batch: int) -> slice:
        """Return the slice of ``order`` with the packs of one micro-batch of one rank."""
        num_micro_batches = self.num_micro_batches(step)
        _check_index("rank", rank, self.world_size)
        _check_index("micro-batch", micro_batch, num_micro_batches)
        cell = self.step_offsets[step] + rank * num_micro_batches + micro_batch
        return slice(int(self.cell_offsets[cell]), int(self.cell_offsets[cell + 1]))

    def _cell_table(self) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return the step, rank and micro-batch of each cell; (C,) each."""
        sizes = np.diff(self.step_offsets)
        steps = np.repeat(np.arange(self.num_steps), sizes)
        ranks, micro_batches = np.divmod(
            np.arange(len(steps)) - self.step_offsets[steps], np.maximum(sizes // self.world_size, 1)[steps]
        )
        return steps, ranks, micro_batches

    def locations(self) -> npt.NDArray[np.int32]:
        """Return the step, rank and micro-batch of each pack; int32 (K, 3)."""
        locations = np.empty((self.num_packs, 3), np.int32)
        locations[self.order] = np.repeat(np.stack(self._cell_table(), axis=1), self.cell_sizes(), axis=0)
        return locations

    def target_tokens(self, step: int) -> int:
        """Return the labels of a step that carry loss, over all ranks: the divisor of its loss."""
        _check_index("step", step, self.num_steps)
        return int(self.target_tokens_per_step[step])

    def sums_per_step(self, per_pack: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Sum numbers (K,) of packs over each step; (S,)."""
        before = np.concatenate((np.zeros(1, per_pack.dtype), np.cumsum(per_pack[self.order])))
        return np.diff(before[self.cell_offsets[self.step_offsets]])

    def on_any_rank(self, is_in: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Flag each micro-batch of the epoch, bool (M,), in which any rank has a pack of ``is_in``, bool (K,)."""
        counts = np.diff(np.concatenate(([0], np.cumsum(is_in[self.order])))[self.cell_offsets])
        first = self.step_offsets // self.world_size
        steps, _, micro_batches = self._cell_table()
        return np.bincount(first[steps] + micro_batches, weights=counts, minlength=int(first[-1])) > 0

    @property
    def rank_bounds(self) -> Int64Array:
        """int64 (S, W + 1): the first cell of each rank in each step, and the one after the last rank's."""
        cells = (self.step_offsets[1:] - self.step_offsets[:-1]) // self.world_size
        bounds = self.step_offsets[:-1, None] + cells[:, None] * np.arange(self.world_size + 1)
        return bounds.astype(np.int64, copy=False)

    def rank_costs(self, costs: Costs) -> Costs:
        """Sum the costs (K,) of packs by step and rank; (S, W)."""
        sums = np.concatenate(([0.0], np.cumsum(costs[self.order])))
        return np.diff(sums[self.cell_offsets[self.rank_bounds]], axis=1)

    def cell_sums(self, per_pack: npt.NDArray[Any]) -> Costs:
        """Sum numbers (K,) of packs over each cell; (C,)."""
        return np.diff(np.concatenate(([0.0], np.cumsum(per_pack[self.order])))[self.cell_offsets])

    def rank_sums(self, per_cell: npt.NDArray[Any]) -> Costs:
        """Sum numbers (C,) of cells by step and rank; (S, W)."""
        return np.diff(np.concatenate(([0.0], np.cumsum(per_cell)))[self.rank_bounds], axis=1)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 in hex over all fields."""
        digest = hashlib.sha256(f"packtool step plan 1, world size {self.world_size}\n".encode())
        return digest_arrays(digest, self.order, self.cell_offsets, self.step_offsets, self.target_tokens_per_step)


def _check_index(name: str, index: int, num: int) -> None:
    # Negative numbers would silently mean another step.
    if not 0 <= index < num:
        raise IndexError(f"{name} {index} of {num}")


def assign_balanced(
    packs: PackPlan, costs: Costs | None, options: PlanOptions, parts: TreeParts | None = None
) -> StepAssignment:
    """Assign the packs of an epoch to optimizer steps, ranks and micro-batches.

    A step takes the next W * G * B packs (symbols as in ``PlanOptions``), in the packer's random order. Without
    balancing, pack ``i`` of a step is assigned to rank ``i % W``; ``within-step`` gives the ranks equal work;
    ``window`` also exchanges packs between steps near each other. The last step takes the remaining packs: it has as
    few micro-batches as its ranks need, the packs of a rank spread evenly over them. A rank without packs has empty
    micro-batches. Cost: O(K), and O(K log K) with balancing.

    ``costs``, (K,), is the work of each pack, needed for balancing; ``parts`` are trees in several packs, for which
    packs are reordered.
    """
    world_size, num_per_cell = options.world_size, options.per_device_train_batch_size
    counts = {
        "world_size": world_size,
        "gradient_accumulation_steps": options.gradient_accumulation_steps,
        "packs_per_micro_batch": num_per_cell,
    }
    if problems := [f"{name} is {count}; it must be 1 or more." for name, count in counts.items() if count < 1]:
        raise ConfigError.from_problems(problems)
    is_balanced = options.balance != "none"
    assert costs is not None or not is_balanced, "balancing needs the costs of packs"
    num_cells, per_step = world_size * options.gradient_accumulation_steps, options.packs_per_step
    num_full_steps = packs.num_packs // per_step
    order = np.arange(packs.num_packs, dtype=np.int64)
    num_full = num_full_steps * per_step
    if costs is not None and options.balance == "window":
        grouped = group_alike(order[:num_full].reshape(num_full_steps, per_step), costs, world_size)
        order[:num_full] = grouped.reshape(-1)
    if parts is not None:
        order = parts.reorder(order, per_step)
    full, rest = order[:num_full].reshape(num_full_steps, per_step), order[num_full:]
    if costs is None or not is_balanced:
        # Each rank's packs are a column of the step's table of (n / W, W).
        columns = full.reshape(num_full_steps, per_step // world_size, world_size)
        full = columns.transpose(0, 2, 1).reshape(full.shape)
    else:
        rank_packs = assign_evenly(costs[full], world_size)
        full = np.take_along_axis(full, rank_packs.reshape(full.shape), axis=1)
    rest, rest_sizes = _assign_rest(rest, world_size, num_per_cell, costs if is_balanced else None)
    return StepAssignment(
        np.concatenate((full.reshape(-1), rest)),
        np.append(np.full(num_full_steps * num_cells, num_per_cell, dtype=np.int64), rest_sizes),
        np.append(np.full(num_full_steps, num_cells, dtype=np.int64), [len(rest_sizes)] * bool(len(rest))),
    )


def _assign_rest(
    packs: Int64Array, world_size: int, packs_per_micro_batch: int, costs: Costs | None
) -> tuple[Int64Array, Int64Array]:
    """Assign the packs of the last, smaller step; return them in the order of its cells, and the cells' sizes."""
    max_per_rank = -(-len(packs) // world_size)
    num_micro_batches = -(-max_per_rank // packs_per_micro_batch)
    rank_packs = [packs[rank::world_size] for rank in range(world_size)]
    if costs is not None and len(packs):
        # Empty slots count as packs without work.
        filled = np.append(costs[packs], np.zeros(max_per_rank * world_size - len(packs)))
        rank_packs = [packs[slots[slots < len(packs)]] for slots in assign_evenly(filled[None], world_size)[0]]
    sizes = [
        len(own) // num_micro_batches + (micro < len(own) % num_micro_batches)
        for own in rank_packs
        for micro in range(num_micro_batches)
    ]
    return np.concatenate(rank_packs), np.array(sizes, dtype=np.int64)


_MAX_SWAPS = 16
_WINDOW_STEPS = 8
_PACKS_AT_ONCE = 1 << 20  # bounds the temporaries of the swaps


def assign_evenly(costs: Costs, num_ranks: int) -> Int64Array:
    """Assign each step's packs to ranks, equally many to each, by their costs (S, n); n is a multiple of W.

    Ties go to the lower rank and the earlier pack, so the result is the same on every machine. Cost: O(K log K) for K
    packs, and at most 16 swaps a step of O((n / W)^2) for its n packs and W ranks.

    Returns int64 (S, W, n / W): the columns of ``costs`` of each step and rank, the heaviest first.
    """
    num_steps, num_packs = costs.shape
    per_rank, rest = divmod(num_packs, num_ranks)
    assert rest == 0, "every rank of a step has equally many packs"
    assigned = np.empty((num_steps, num_ranks, per_rank), dtype=np.int64)
    steps_at_once = max(1, _PACKS_AT_ONCE // max(num_packs, 1))
    for start in range(0, num_steps, steps_at_once):
        step_costs = costs[start : start + steps_at_once]
        falling, loads = np.argsort(-step_costs, axis=1, kind="stable"), np.zeros((len(step_costs), num_ranks))
        rank_packs = np.empty((len(step_costs), num_ranks, per_rank), dtype=np.int64)
        for number in range(per_rank):
            packs = falling[:, number * num_ranks : (number + 1) * num_ranks]
            lightest = np.argsort(loads, axis=1, kind="stable")
            np.put_along_axis(rank_packs[:, :, number], lightest, packs, axis=1)
            gained = np.take_along_axis(step_costs, packs, axis=1)
            np.put_along_axis(loads, lightest, np.take_along_axis(loads, lightest, axis=1) + gained, axis=1)
        if per_rank > 1 and num_ranks > 1:
            pack_costs = np.take_along_axis(step_costs, rank_packs.reshape(step_costs.shape), axis=1).reshape(
                rank_packs.shape
            )
            _swap(pack_costs, rank_packs)
            # By falling cost: micro-batches that run at the same time are then alike, too.
            rank_packs = np.take_along_axis(rank_packs, np.argsort(-pack_costs, axis=2, kind="stable"), axis=2)
        assigned[start : start + steps_at_once] = rank_packs
    return assigned


def _swap(costs: Costs, rank_packs: Int64Array) -> None:
    """Let the heaviest and the lightest rank of each step swap the best pair of packs; changes both (S, W, n / W)."""
    active = np.arange(len(rank_packs))
    for _ in range(_MAX_SWAPS):
        loads = costs[active].sum(axis=2)
        heavy, light = loads.argmax(axis=1), loads.argmin(axis=1)
        rows = np.arange(len(active))
        gap = loads[rows, heavy] - loads[rows, light]
        # Moving d from the heavy to the light rank leaves a gap of |gap - 2 d|: the best d is half of it.
        moved_cost = costs[active, heavy][:, :, None] - costs[active, light][:, None, :]
        gap_after = np.abs(gap[:, None, None] - 2 * moved_cost).reshape(len(active), -1)
        best = gap_after.argmin(axis=1)
        helps = gap_after[rows, best] < gap * (1 - 1e-9)
        active, best, heavy, light = active[helps], best[helps], heavy[helps], light[helps]
        if not len(active):
            return
        give, take = np.divmod(best, rank_packs.shape[2])
        for array in (rank_packs, costs):
            swapped = array[active, heavy, give].copy()
            array[active, heavy, give] = array[active, light, take]
            array[active, light, take] = swapped


def group_alike(packs: Int64Array, costs: Costs, num_ranks: int) -> Int64Array:
    """Exchange packs (S, n) of full steps between steps near each other, so that those processed at once are alike.

    The packs of a window of 8 steps are sorted by ``costs``, (K,), and divided into rounds of one pack a rank; each
    step takes rounds from the whole range. The order of the window's steps depends on the packs' numbers, which are
    random.
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


def assign_to_lightest(items: Iterable[int], weights: Sequence[float], num_groups: int) -> list[list[int]]:
    """Assign items, indices into ``weights``, one after the other to the group with the least weight so far.

    Ties go to the lower group. With the heaviest item first this is LPT.
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
    """Divide items into groups of at most ``capacity`` and about equal work; None where an item fits in no group.

    The heaviest item first, each to the group with the least work that has enough space. Ties go to the later item and
    the lower group. Groups, some possibly empty, are in the order of falling work, their items of ascending work.
    ``sizes`` and ``work`` are of the items, (n,).
    """
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    free, lightest = [capacity] * num_groups, [(0.0, number) for number in range(num_groups)]
    for item in sorted(range(len(work)), key=lambda i: (-work[i], -i)):
        full = []
        while lightest and free[lightest[0][1]] < sizes[item]:
            full.append(heapq.heappop(lightest))
        if not lightest:
            return None
        load, number = lightest[0]
        groups[number].append(item)
        free[number] -= sizes[item]
        heapq.heapreplace(lightest, (load + work[item], number))
        for other in full:
            heapq.heappush(lightest, other)
    return [groups[number][::-1] for _, number in sorted(lightest, key=lambda entry: (-entry[0], entry[1]))]


def imbalance(rank_costs: Costs) -> Costs:
    """Divide the work of the slowest rank by the mean rank's, (S,), from (S, W): 1 for a step without work."""
    mean = rank_costs.mean(axis=1)
    ratio: Costs = np.divide(rank_costs.max(axis=1), mean, out=np.ones(len(mean)), where=mean > 0)
    return ratio
