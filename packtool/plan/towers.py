"""What the towers of a model have to do for each sample, and which of the ranks that share a sequence does it.

A sample that is local to a rank has its pictures looked at there. Those of sharded samples are shared out: the most
work first, each to the rank whose tower has the least so far, local pictures counted (LPT: Graham 1969, "Bounds on
multiprocessing timing anomalies"). Ranks wait for each other behind their towers, where features are exchanged, so it
is tower work alone that is evened out.
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
        num_seen: (N,), its pictures and videos.
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
    sums = list(loads)
    owners = np.zeros(len(weights), np.int64)
    for number in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        owner = min(range(len(sums)), key=lambda rank: (sums[rank], rank))
        owners[number] = owner
        sums[owner] += weights[number]
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
    found = np.zeros((steps.num_steps * steps.world_size, sequence_parallel_size))
    flops, counts = work.flops[steps.order], np.maximum(work.num_seen[steps.order], 1)
    shared = np.flatnonzero((places == SHARDED) & (flops > 0))
    cells = np.searchsorted(steps.cell_offsets, shared, side="right") - 1
    step_of_cell = np.repeat(np.arange(steps.num_steps), np.diff(steps.step_offsets))
    for cell in np.unique(cells).tolist():
        step = int(step_of_cell[cell])
        first, last = (int(steps.step_offsets[i]) for i in (step, step + 1))
        group = step * steps.world_size + (cell - first) * steps.world_size // (last - first)
        here = slice(int(steps.cell_offsets[cell]), int(steps.cell_offsets[cell + 1]))
        is_local = places[here] != SHARDED
        loads = np.bincount(places[here][is_local], flops[here][is_local], sequence_parallel_size)
        members = shared[cells == cell]
        pieces = np.repeat(flops[members] / counts[members], counts[members])
        owners = assign_heaviest_first(pieces.tolist(), loads.tolist())
        found[group] += np.bincount(owners, pieces, sequence_parallel_size)
    return found
