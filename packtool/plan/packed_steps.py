"""Steps that have the samples of unpacked training: each is packed by itself, see ``--samples-per-step``.

    order of the epoch   3 7 2 1 | 4 4 3 3 | 5 2       lengths; 4 samples a step, packs of 8, two ranks
    step 0               rank 0 [7]    rank 1 [3 2 1]
    step 1               rank 0 [4 3]  rank 1 [4 3]
    step 2               rank 0 [5]    rank 1 [2]

The order is that of ``--packing false``, so a step's samples are those of the unpacked run with the same seed: loss and
gradient, a mean over the target tokens of the step, are the same in exact arithmetic, and so are all weights behind it.
What packing may still choose is who computes which sample together with which: few micro-batches, and ranks of equal
work. Every rank has as many micro-batches in a step as the others; some may be empty.

Price: a step's last micro-batches are less full than packs that may take any sample, the more so the fewer tokens a
step has for each rank. No tokens are computed for what is free in them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.plan.balance import Costs
from packtool.plan.budgets import check_media_tokens
from packtool.plan.dynamic import Limit, rearrange_by_work
from packtool.plan.options import PlanOptions
from packtool.plan.pack_plan import PackPlan, offsets_of
from packtool.plan.steps import StepPlan, step_plan


def pack_each_step(
    drawn: PackPlan,
    target_tokens: npt.NDArray[np.integer[Any]],
    options: PlanOptions,
    *,
    costs: Costs | None = None,
    media_tokens: npt.NDArray[np.integer[Any]] | None = None,
) -> tuple[PackPlan, StepPlan]:
    """Packs of an epoch and the steps that train them; how, is told by ``dynamic.rearrange_by_work``.

    Args:
        drawn: the N samples of the epoch, one each, in its order.
        target_tokens: by sample number as in ``drawn.samples``: labels that carry loss.
        options: ``samples_per_step``, ``world_size``, and what a pack may hold besides ``drawn.capacity``.
        costs: (N,), work of each sample; its tokens where nobody knows.
        media_tokens: by sample number; needed with ``max_media_tokens_per_pack``.

    Raises:
        ConfigError, DataError: samples that are over a budget of a pack.
    """
    assert options.samples_per_step is not None, "asked before"
    limits = [Limit(drawn.lengths, drawn.capacity)]
    most, media = options.max_media_tokens_per_pack, None if media_tokens is None else media_tokens[drawn.samples]
    media = check_media_tokens(media, drawn.lengths, most, drawn.capacity)
    if media is not None and most is not None:
        limits.append(Limit(media, most))
    batches = rearrange_by_work(
        drawn.lengths.astype(np.float64) if costs is None else costs,
        limits,
        samples_per_step=options.samples_per_step,
        num_ranks=options.world_size,
        max_samples=options.max_samples_per_pack,
    )
    is_used = batches.cell_sizes > 0
    offsets = offsets_of(batches.cell_sizes[is_used])
    packs = PackPlan(drawn.samples[batches.order], offsets, drawn.lengths[batches.order], drawn.capacity)
    steps = step_plan(
        packs,
        target_tokens,
        world_size=options.world_size,
        order=np.arange(packs.num_packs, dtype=np.int64),
        cell_sizes=is_used.astype(np.int64),
        cells_per_step=batches.cells_per_step,
    )
    return packs, steps


def costs_in_turn(costs: Costs, samples_per_step: int, num_ranks: int) -> Costs:
    """Work of each rank in each step, (S, W), if the samples of a step went to the ranks in turn.

    Args:
        costs: (N,), of the samples in the order of the epoch.
    """
    step, place = np.divmod(np.arange(len(costs)), samples_per_step)
    num_steps = -(-len(costs) // samples_per_step)
    of_ranks = np.zeros((num_steps, num_ranks))
    np.add.at(of_ranks, (step, place % num_ranks), costs)
    return of_ranks
