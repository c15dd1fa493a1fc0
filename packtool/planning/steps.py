"""Which pack goes to which rank, in which micro-batch of which optimizer step."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.config.packing import Balance
from packtool.errors import ConfigError
from packtool.planning.balance import Costs, assign_evenly, group_alike
from packtool.planning.options import PlanOptions
from packtool.planning.pack_plan import Int64Array, PackPlan, digest_arrays, invert_order, to_offsets
from packtool.planning.tree_parts import TreeParts


@dataclass(frozen=True, eq=False)
class Assignment:
    """Which of K packs (or single samples) are in which micro-batch: the result of every assigner.

    Args:
        order: int64 (K,), the packs, micro-batch by micro-batch, laid out as in ``StepPlan``.
        cell_sizes: int64 (C,), packs in each micro-batch of each rank.
        cells_per_step: int64 (S,), a multiple of the ranks.
        places: with Skrull, int64 (K,), by position in ``order``: ``skrull.SHARDED``, or the sequence parallel rank
            that the sample is local to.
    """

    order: Int64Array
    cell_sizes: Int64Array
    cells_per_step: Int64Array
    places: Int64Array | None = None

    @property
    def inverse(self) -> Int64Array:
        """int64 (K,): where in ``order`` each pack is; ``values[inverse]`` brings results back to their order."""
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
    def of(
        cls, packs: PackPlan, target_tokens: npt.NDArray[np.integer[Any]], assignment: Assignment, world_size: int
    ) -> StepPlan:
        """Add up each step's target tokens.

        Args:
            packs: that are assigned.
            target_tokens: by sample number as in ``packs.samples``: labels that carry loss.
            world_size: data-parallel ranks, W.
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
        """Cells without a pack; only in the last step, or where tokens decide how many a step has at the end of any."""
        return int(np.count_nonzero(self.cell_sizes() == 0))

    def cell_sizes(self) -> Int64Array:
        """Packs in each cell; int64 (C,)."""
        return self.cell_offsets[1:] - self.cell_offsets[:-1]

    def num_micro_batches(self, step: int) -> int:
        """Micro-batches of a step, the same number on every rank."""
        self._check("step", step, self.num_steps)
        return int(self.step_offsets[step + 1] - self.step_offsets[step]) // self.world_size

    def packs(self, step: int, rank: int, micro_batch: int) -> Int64Array:
        """Packs of one micro-batch of one rank, often one, possibly none; a view, not a copy."""
        return self.order[self.cell(step, rank, micro_batch)]

    def cell(self, step: int, rank: int, micro_batch: int) -> slice:
        """Where in ``order`` the packs of one micro-batch of one rank are."""
        num_micro_batches = self.num_micro_batches(step)
        self._check("rank", rank, self.world_size)
        self._check("micro-batch", micro_batch, num_micro_batches)
        cell = self.step_offsets[step] + rank * num_micro_batches + micro_batch
        return slice(int(self.cell_offsets[cell]), int(self.cell_offsets[cell + 1]))

    def places(self) -> npt.NDArray[np.int32]:
        """Where each pack is trained, int32 (K, 3): step, rank, and micro-batch of the rank in the step."""
        sizes = np.diff(self.step_offsets)
        steps = np.repeat(np.arange(self.num_steps), sizes)
        ranks, micro_batches = np.divmod(
            np.arange(len(steps)) - self.step_offsets[steps], np.maximum(sizes // self.world_size, 1)[steps]
        )
        found = np.empty((self.num_packs, 3), np.int32)
        cells = np.stack((steps, ranks, micro_batches), axis=1)
        found[self.order] = np.repeat(cells, self.cell_sizes(), axis=0)
        return found

    def target_tokens(self, step: int) -> int:
        """Labels that carry loss in a step, over all ranks: the loss is divided by it, and no rank need ask another."""
        self._check("step", step, self.num_steps)
        return int(self.target_tokens_per_step[step])

    def sums_per_step(self, per_pack: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Sum over the packs of each step, (S,), of numbers (K,) of the packs."""
        before = np.concatenate((np.zeros(1, per_pack.dtype), np.cumsum(per_pack[self.order])))
        return np.diff(before[self.cell_offsets[self.step_offsets]])

    def on_any_rank(self, is_in: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Whether some rank has one of certain packs, for each micro-batch of the epoch as the ranks count them, (M,).

        Args:
            is_in: (K,), which packs these are.
        """
        counts = np.diff(np.concatenate(([0], np.cumsum(is_in[self.order])))[self.cell_offsets])
        first = self.step_offsets // self.world_size
        steps = np.repeat(np.arange(self.num_steps), np.diff(self.step_offsets))
        # The cells of a step are rank by rank, of each rank in order.
        place = (np.arange(len(counts)) - self.step_offsets[steps]) % np.diff(first)[steps]
        return np.bincount(first[steps] + place, weights=counts, minlength=int(first[-1])) > 0

    @property
    def rank_bounds(self) -> Int64Array:
        """int64 (S, W + 1): the first cell of each rank in each step, and the one behind the last rank's."""
        cells = (self.step_offsets[1:] - self.step_offsets[:-1]) // self.world_size
        bounds = self.step_offsets[:-1, None] + cells[:, None] * np.arange(self.world_size + 1)
        return bounds.astype(np.int64, copy=False)

    def rank_costs(self, costs: Costs) -> Costs:
        """Work of each rank in each step, (S, W), from ``costs`` (K,) of the packs."""
        sums = np.concatenate(([0.0], np.cumsum(costs[self.order])))
        return np.diff(sums[self.cell_offsets[self.rank_bounds]], axis=1)

    def cell_sums(self, per_pack: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Sum over the packs of each cell, (C,), of numbers (K,) of the packs."""
        return np.diff(np.concatenate(([0.0], np.cumsum(per_pack[self.order])))[self.cell_offsets])

    def rank_sums(self, per_cell: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Sum over the cells of each rank in each step, (S, W), of numbers (C,) of the cells."""
        return np.diff(np.concatenate(([0.0], np.cumsum(per_cell)))[self.rank_bounds], axis=1)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 in hex over everything in the plan."""
        digest = hashlib.sha256(f"packtool step plan 1, world size {self.world_size}\n".encode())
        return digest_arrays(digest, self.order, self.cell_offsets, self.step_offsets, self.target_tokens_per_step)

    @staticmethod
    def _check(name: str, index: int, num: int) -> None:
        # Negative numbers would silently mean another step.
        if not 0 <= index < num:
            raise IndexError(f"{name} {index} of {num}")


def assign_balanced(
    packs: PackPlan, costs: Costs | None, options: PlanOptions, parts: TreeParts | None = None
) -> Assignment:
    """Assign the packs of an epoch to optimizer steps, ranks and micro-batches.

    A step takes the next W * G * B packs, whose order the packer drew from the seed. Without balancing they are
    assigned in turn: pack ``i`` of a step to rank ``i % W``; ``within-step`` assigns them so that the ranks have equal
    work; ``window`` also exchanges packs between steps that lie near each other. The last step takes what is left,
    however little: it has as few micro-batches as its ranks need, the packs of a rank spread evenly over them. Where a
    rank still has none, the micro-batch is empty. There are fewer than W empty ones in an epoch, and no pack is left
    out or used twice.

    Price: O(K), and O(K log K) with balancing. But for ``window``, the packs of a step depend on W * G * B only.

    Args:
        packs: K of them.
        costs: (K,), work of each pack; needed for balancing.
        options: W is ``world_size``, G ``gradient_accumulation_steps``, B ``per_device_train_batch_size``; ``balance``.
        parts: of trees that are in several packs, which change places with others for it; see ``tree_parts``.

    Raises:
        ConfigError: a count is not positive.
    """
    world_size, num_per_cell = options.world_size, options.per_device_train_batch_size
    _check_positive(
        world_size=world_size,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        packs_per_micro_batch=num_per_cell,
    )
    assert costs is not None or options.balance == "none", "balancing needs to know what packs cost"
    num_cells, per_step = world_size * options.gradient_accumulation_steps, options.packs_per_step
    num_full_steps = packs.num_packs // per_step
    full, rest = np.split(np.arange(packs.num_packs, dtype=np.int64), [num_full_steps * per_step])
    full = full.reshape(num_full_steps, per_step)
    if costs is not None and options.balance == "window":
        full = group_alike(full, costs, world_size)
    full, rest = _with_parts(full, rest, parts)
    left, left_sizes = _assign_rest(rest, world_size, num_per_cell, costs, options.balance)
    return Assignment(
        np.concatenate((_assign(full, world_size, costs, options.balance).reshape(-1), left)),
        np.append(np.full(num_full_steps * num_cells, num_per_cell, dtype=np.int64), left_sizes),
        np.append(np.full(num_full_steps, num_cells, dtype=np.int64), [len(left_sizes)] * bool(len(rest))),
    )


def _with_parts(full: Int64Array, rest: Int64Array, parts: TreeParts | None) -> tuple[Int64Array, Int64Array]:
    """The packs of full steps (S, n) and of the last, smaller one with the parts of trees where they are to be."""
    if parts is None:
        return full, rest
    placed = parts.reorder(np.concatenate((full.reshape(-1), rest)), full.shape[1])
    return placed[: full.size].reshape(full.shape), placed[full.size :]


def _assign(packs: Int64Array, world_size: int, costs: Costs | None, balance: Balance) -> Int64Array:
    """Packs (S, n) of full steps assigned to ranks: (S, W, n / W)."""
    num_steps, num_packs = packs.shape
    if costs is None or balance == "none":
        # Each rank's packs are a column of the step's table of (n / W, W).
        return packs.reshape(num_steps, num_packs // world_size, world_size).transpose(0, 2, 1)
    rank_packs = assign_evenly(costs[packs], world_size)
    return np.take_along_axis(packs, rank_packs.reshape(packs.shape), axis=1).reshape(rank_packs.shape)


def _assign_rest(
    packs: Int64Array, world_size: int, packs_per_micro_batch: int, costs: Costs | None, balance: Balance
) -> tuple[Int64Array, Int64Array]:
    """The packs of the last, smaller step in the order of its cells, and the cells' sizes."""
    most_per_rank = -(-len(packs) // world_size)
    num_micro_batches = -(-most_per_rank // packs_per_micro_batch)
    rank_packs = [packs[rank::world_size] for rank in range(world_size)]
    if costs is not None and balance != "none" and len(packs):
        # Places that stay empty are packs without work.
        filled = np.append(costs[packs], np.zeros(most_per_rank * world_size - len(packs)))
        places = assign_evenly(filled[None], world_size)[0]
        rank_packs = [packs[columns[columns < len(packs)]] for columns in places]
    sizes = [
        len(packs_of_rank) // num_micro_batches + (micro < len(packs_of_rank) % num_micro_batches)
        for packs_of_rank in rank_packs
        for micro in range(num_micro_batches)
    ]
    return np.concatenate(rank_packs), np.array(sizes, dtype=np.int64)


def _check_positive(**counts: int) -> None:
    problems = [f"{name} is {count}; it must be 1 or more." for name, count in counts.items() if count < 1]
    if problems:
        raise ConfigError.from_problems(problems)
