"""Skrull for a whole epoch: the samples of every step taken out of their packs and assigned to ranks anew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.plan.balance import Costs
from packtool.plan.pack_plan import Int64Array, PackPlan, with_each_alone
from packtool.plan.skrull import SHARDED, PlacedMicroBatch, check_buckets, schedule_step
from packtool.plan.step_time import StepTime
from packtool.plan.steps import StepPlan, step_plan
from packtool.plan.towers import TowerWork, shared_tower_costs


@dataclass(frozen=True, kw_only=True)
class SkrullOptions:
    """How Skrull assigns samples, see ``skrull.schedule_step``.

    Args:
        bucket_size: tokens that a rank may hold in a micro-batch, C.
        sequence_parallel_size: ranks that share a micro-batch, N.
        alignment: sharded sequences are padded to a multiple of it.
        times: of devices and links, by which placements are compared.
    """

    bucket_size: int
    sequence_parallel_size: int = 1
    alignment: int = 1
    times: StepTime = StepTime()


@dataclass(frozen=True, eq=False)
class SkrullSteps:
    """N samples assigned to S steps, W data-parallel ranks and their micro-batches.

    Args:
        singles: every sample as a pack of its own, in the order of the packs that they were taken from: the same
            however they are assigned.
        steps: of ``singles``. The ranks of a step have equally many cells: those that need fewer have empty ones, last.
        places: int64 (N,), by position in ``steps.order``: ``SHARDED``, or the rank of N that the sample is local to.
    """

    singles: PackPlan
    steps: StepPlan
    places: Int64Array


def assign_skrull(
    packs: PackPlan,
    target_tokens: npt.NDArray[np.integer[Any]],
    flops: Costs,
    options: SkrullOptions,
    *,
    packs_per_step: int,
    num_ranks: int,
) -> SkrullSteps:
    """Assign the samples of an epoch to ranks: a step has those of its ``packs_per_step`` packs, as without Skrull.

    Price: some 10 us a sample, see ``skrull``; steps do not know of one another.

    Args:
        packs: of the epoch.
        target_tokens: by sample number as in ``packs.samples``: labels that carry loss.
        flops: (N,), of the samples in the order of ``packs.samples``.
        options: of Skrull.
        packs_per_step: W * G * B.
        num_ranks: data-parallel ranks, W.

    Raises:
        ConfigError: a count is not positive, or samples are too long for the buckets.
    """
    check_buckets(
        packs.lengths,
        sequence_parallel_size=options.sequence_parallel_size,
        bucket_size=options.bucket_size,
        alignment=options.alignment,
    )
    bounds = packs.offsets[np.minimum(np.arange(0, packs.num_packs + packs_per_step, packs_per_step), packs.num_packs)]
    order, places = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    cell_sizes: list[int] = []
    cells_per_step: list[int] = []
    for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        ranks = schedule_step(
            packs.lengths[first:last],
            flops[first:last],
            num_ranks=num_ranks,
            sequence_parallel_size=options.sequence_parallel_size,
            bucket_size=options.bucket_size,
            alignment=options.alignment,
            times=options.times,
        )
        num_cells = max(map(len, ranks))
        for micro_batches in ranks:
            order += [batch.samples + first for batch in micro_batches]
            places += [batch.places for batch in micro_batches]
            cell_sizes += _sizes(micro_batches, num_cells)
        cells_per_step.append(num_cells * num_ranks)
    singles = with_each_alone(packs)
    steps = step_plan(
        singles,
        target_tokens,
        world_size=num_ranks,
        order=np.concatenate(order),
        cell_sizes=np.array(cell_sizes, dtype=np.int64),
        cells_per_step=np.array(cells_per_step, dtype=np.int64),
    )
    return SkrullSteps(singles, steps, np.concatenate(places))


def _sizes(micro_batches: list[PlacedMicroBatch], num_cells: int) -> list[int]:
    return [len(batch.samples) for batch in micro_batches] + [0] * (num_cells - len(micro_batches))


def computed_tokens(assigned: SkrullSteps, alignment: int) -> Int64Array:
    """Tokens that the model runs over for each sample of ``singles``, the padding of sharded ones included; (N,)."""
    tokens = assigned.singles.lengths.astype(np.int64)
    sharded = assigned.steps.order[assigned.places == SHARDED]
    tokens[sharded] = -(-tokens[sharded] // alignment) * alignment
    return tokens


def device_costs(
    assigned: SkrullSteps, flops: Costs, sequence_parallel_size: int, towers: TowerWork | None = None
) -> Costs:
    """FLOPs of every device in every step, (S, W N), from ``flops`` (N,) of ``singles``.

    Args:
        towers: what of them is work of towers, which goes to whoever looks at a picture; None for nothing.
    """
    steps, places = assigned.steps, assigned.places
    num_groups = steps.num_steps * steps.world_size
    # The samples of a step lie rank by rank, so each group of devices has a run of ``order``.
    cells = (steps.step_offsets[1:] - steps.step_offsets[:-1]) // steps.world_size
    first = (steps.step_offsets[:-1, None] + cells[:, None] * np.arange(steps.world_size)).reshape(-1)
    bounds = np.append(steps.cell_offsets[first], len(steps.order))
    group = np.repeat(np.arange(num_groups), np.diff(bounds))
    work = flops[steps.order]
    is_local = places != SHARDED
    local = np.bincount(
        group[is_local] * sequence_parallel_size + places[is_local], work[is_local], num_groups * sequence_parallel_size
    )
    if towers is not None:
        work = np.where(is_local, work, work - towers.flops[steps.order])
    shared = np.bincount(group[~is_local], work[~is_local], num_groups) / sequence_parallel_size
    found = local.reshape(num_groups, sequence_parallel_size) + shared[:, None]
    if towers is not None:
        found += shared_tower_costs(steps, places, towers, sequence_parallel_size)
    return found.reshape(steps.num_steps, steps.world_size * sequence_parallel_size)
