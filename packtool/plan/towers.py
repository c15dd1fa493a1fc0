"""What the towers of a model have to do for each sample, and which of the ranks that share a sequence does it.

A sample that is local to a rank has its pictures looked at, and its sounds heard, there. Those of sharded samples are
shared out: the most work first, each to the rank whose towers have the least so far, local media counted (LPT: Graham
1969, "Bounds on multiprocessing timing anomalies"). Ranks wait for each other behind their towers, where features are
exchanged, so it is tower work alone that is evened out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.plan.balance import Costs
from packtool.plan.pack_plan import Int64Array
from packtool.plan.skrull import SHARDED
from packtool.plan.steps import StepPlan


@dataclass(frozen=True, eq=False)
class TowerWork:
    """Work of the towers for each of N samples.

    Args:
        flops: int64 (N,), of all its media: whole numbers add up alike in any order.
        num_seen: (N,), its pictures, videos and sounds.
        logits: int64 (N,), tokens of which logits are made, where prefixes are shared; None is all targets.
    """

    flops: Int64Array
    num_seen: npt.NDArray[np.integer[Any]]
    logits: Int64Array | None = None

    def of(self, samples: Int64Array) -> TowerWork:
        """The work of some samples, in their order."""
        logits = None if self.logits is None else self.logits[samples]
        return TowerWork(self.flops[samples], self.num_seen[samples], logits)


def assign_heaviest_first(weights: Sequence[float], loads: Sequence[float]) -> Int64Array:
    """A rank for each of some things: the heaviest first, each to the rank with the least so far.

    Ties go to the earlier thing and the lower rank.

    Args:
        weights: (n,), of the things.
        loads: (N,), what each rank has already.
    """
    weighed = np.asarray(weights, np.float64)
    return assign_in_groups(weighed, np.zeros(len(weighed), np.int64), np.array([loads], np.float64))


def assign_in_groups(
    weights: npt.NDArray[np.float64], groups: Int64Array, loads: npt.NDArray[np.float64]
) -> Int64Array:
    """``assign_heaviest_first`` for many groups of things and ranks at once, (n,).

    Price: O(n N), in as many rounds as the largest group has things.

    Args:
        weights: (n,), of the things.
        groups: (n,), of each, 0 to G - 1.
        loads: (G, N), what each rank of a group has already.
    """
    sums, owners = loads.copy(), np.zeros(len(weights), np.int64)
    order = np.lexsort((-weights, groups))
    sizes = np.bincount(groups, minlength=len(loads))
    round_of = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    by_round = order[np.argsort(round_of, kind="stable")]
    for things in np.split(by_round, np.cumsum(np.bincount(round_of))[:-1]):
        here = groups[things]
        owners[things] = sums[here].argmin(axis=1)
        sums[here, owners[things]] += weights[things]
    return owners


def shared_tower_costs(steps: StepPlan, places: Int64Array, work: TowerWork, sequence_parallel_size: int) -> Costs:
    """FLOPs of the pictures of sharded samples on each device in each step, (S W, N).

    How large the pictures of one sample are is not known here: they are taken for equal.

    Args:
        steps: of single samples.
        places: (K,), by position in ``steps.order``: ``SHARDED``, or the rank of N that the sample is local to.
        work: of the samples, by their numbers in ``steps.order``.
        sequence_parallel_size: N.
    """
    flops, counts = work.flops[steps.order], np.maximum(work.num_seen[steps.order], 1)
    num_cells = len(steps.cell_offsets) - 1
    cells = np.repeat(np.arange(num_cells), steps.cell_sizes())
    local, shared = np.flatnonzero(places != SHARDED), np.flatnonzero((places == SHARDED) & (flops > 0))
    loads = np.zeros((num_cells, sequence_parallel_size))
    np.add.at(loads, (cells[local], places[local]), flops[local])
    pieces = np.repeat(flops[shared] / counts[shared], counts[shared])
    its_cells = np.repeat(cells[shared], counts[shared])
    owners = assign_in_groups(pieces, its_cells, loads)
    sums = np.bincount(its_cells * sequence_parallel_size + owners, pieces, loads.size).reshape(loads.shape)
    # The cells of a step are rank by rank, of each rank in order.
    first, per_step = steps.step_offsets[:-1], np.diff(steps.step_offsets)
    step = np.repeat(np.arange(steps.num_steps), per_step)
    groups = step * steps.world_size + (np.arange(num_cells) - first[step]) * steps.world_size // per_step[step]
    found = np.zeros((steps.num_steps * steps.world_size, sequence_parallel_size))
    np.add.at(found, groups, sums)
    return found
