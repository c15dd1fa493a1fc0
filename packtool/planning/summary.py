"""Figures of an epoch's plan: packs, steps, balance, Skrull's devices, and how packing changes the batch size."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.planning.balance import Costs, imbalance
from packtool.planning.cost import CostModel
from packtool.planning.options import PlanOptions, SkrullOptions
from packtool.planning.pack_plan import Int64Array, PackPlan
from packtool.planning.skrull import SHARDED
from packtool.planning.steps import StepPlan
from packtool.planning.towers import TowerWork, shared_tower_costs


@dataclass(frozen=True)
class BalanceFigures:
    """Work of the slowest rank over the mean rank's, 1 or more, of each step: 1 is even.

    Args:
        steps_before: (S,), if packs were assigned to ranks in turn.
        steps: (S,), as planned.
        flops: of all packs, forward and backward.
    """

    steps_before: Costs = field(compare=False)
    steps: Costs = field(compare=False)
    flops: float

    @property
    def mean_before(self) -> float:
        """Mean over the steps, if packs were assigned in turn."""
        return float(self.steps_before.mean())

    @property
    def worst_before(self) -> float:
        """The worst step's, if packs were assigned in turn."""
        return float(self.steps_before.max())

    @property
    def mean(self) -> float:
        """Mean over the steps."""
        return float(self.steps.mean())

    @property
    def worst(self) -> float:
        """The worst step's."""
        return float(self.steps.max())


@dataclass(frozen=True, kw_only=True)
class SkrullFigures:
    """What Skrull made of an epoch.

    Args:
        options: of the schedule.
        num_micro_batches: that carry samples, over all data-parallel ranks.
        num_tokens: of all samples, and of the padding of sharded ones.
        num_local_tokens: of samples that are local to a rank.
        mean, worst: work of the busiest device over the mean device's, in the mean and the worst step. Several devices
            are a data-parallel rank, so this is no less than ``BalanceFigures`` tells of ranks.
    """

    options: SkrullOptions
    num_micro_batches: int
    num_tokens: int
    num_local_tokens: int
    mean: float
    worst: float

    @classmethod
    def of(
        cls,
        singles: PackPlan,
        steps: StepPlan,
        places: Int64Array,
        options: SkrullOptions,
        flops: Costs,
        towers: TowerWork | None,
    ) -> SkrullFigures:
        """Figures of samples that Skrull assigned, from FLOPs (N,) of each and the part of them that is of towers."""
        uneven = imbalance(device_costs(steps, places, flops, options.sequence_parallel_size, towers))
        local = steps.order[places != SHARDED]
        return cls(
            options=options,
            num_micro_batches=int(np.count_nonzero(steps.cell_sizes())),
            num_tokens=int(computed_tokens(singles, steps, places, options.alignment).sum()),
            num_local_tokens=int(singles.lengths[local].sum(dtype=np.int64)),
            mean=float(uneven.mean()),
            worst=float(uneven.max()),
        )

    @property
    def bucket_fill(self) -> float:
        """Tokens over the room of all micro-batches that carry samples, 0 to 1."""
        return self.num_tokens / (
            self.num_micro_batches * self.options.bucket_size * self.options.sequence_parallel_size
        )

    def figures(self, num_tokens: int) -> dict[str, Any]:
        """All figures by name, as JSON has them, of an epoch of so many tokens."""
        return {
            "bucket_size": self.options.bucket_size,
            "sequence_parallel_size": self.options.sequence_parallel_size,
            "hardware": self.options.times.device,
            "micro_batches": self.num_micro_batches,
            "bucket_fill": self.bucket_fill,
            "local_tokens": self.num_local_tokens,
            "sharded_tokens": num_tokens - self.num_local_tokens,
            "device_balance": {"mean": self.mean, "worst": self.worst},
        }


@dataclass(frozen=True, kw_only=True)
class PlanSummary:
    """What is worth printing before an epoch starts.

    Args:
        num_cached: samples in the cache.
        num_filtered: those longer than ``max_length``, left out; of a saved plan those that it lacks.
        num_distinct: those in the plan, a repeated one once.
        num_samples: those in the plan, a repeated one each time.
        num_tokens: tokens of the samples in the plan; those of shared prefixes count once.
        num_target_tokens: labels that carry loss among them.
        longest: tokens of the longest sample in the plan, with what it shares.
        options: that the plan was made with.
        num_packs: packs; without packing, padded rows; with Skrull those whose samples were assigned anew.
        lower_bound: packs of ``packing_length`` that the tokens need at least.
        fill: true tokens over all tokens computed, 0 to 1. With packing over ``num_packs * packing_length``; without,
            over the batches, each padded to its longest row. Dynamic batches have no padding, and with Skrull only
            sharded samples have some.
        num_steps: optimizer steps.
        num_steps_without_packing: steps if each pack were one sample.
        num_empty_micro_batches: micro-batches that carry no sample: of the last step, or with Skrull or
            ``samples_per_step`` of any.
        efficient_attn_ratio: attention that packed samples need over what the packs would need as one text each:
            sum of len^2 over sum of squared pack sizes, 0 to 1.
        balance: how even the ranks' work is, None if nobody said what a pack costs.
        skrull: what Skrull made of it, None without.
    """

    num_cached: int
    num_filtered: int
    num_distinct: int
    num_samples: int
    num_tokens: int
    num_target_tokens: int
    longest: int
    options: PlanOptions
    num_packs: int
    lower_bound: int
    fill: float
    num_steps: int
    num_steps_without_packing: int
    num_empty_micro_batches: int
    efficient_attn_ratio: float
    balance: BalanceFigures | None
    skrull: SkrullFigures | None = None

    @property
    def num_not_drawn(self) -> int:
        """Samples of the cache that a mixture may take, and does not in this epoch."""
        return self.num_cached - self.num_distinct - self.num_filtered

    @property
    def samples_per_pack(self) -> float:
        """The mean number of samples a pack."""
        return self.num_samples / self.num_packs


def pack_costs(
    packs: PackPlan,
    cost: CostModel,
    target_tokens: npt.NDArray[np.integer[Any]],
    towers: TowerWork | None = None,
) -> npt.NDArray[np.float64]:
    """FLOPs of each pack, (K,); ``target_tokens`` and ``towers`` by cache position."""
    seen = packs.sums_per_pack(towers.flops[packs.samples]) if towers is not None else 0
    of_logits = target_tokens if towers is None or towers.logits is None else towers.logits
    targets = packs.sums_per_pack(of_logits[packs.samples])
    windows = packs.sums_per_pack(cost.seen_in_windows(packs.full_lengths, packs.shared))
    attention = cost.attention_of(packs.sum_squares_per_pack(), windows)
    return cost(packs.tokens_per_pack(), attention, targets, seen)


def computed_tokens(singles: PackPlan, steps: StepPlan, places: Int64Array, alignment: int) -> Int64Array:
    """Tokens computed for each sample of Skrull's ``singles``, with the padding of sharded ones; (N,)."""
    tokens = singles.lengths.astype(np.int64)
    sharded = steps.order[places == SHARDED]
    tokens[sharded] = -(-tokens[sharded] // alignment) * alignment
    return tokens


def device_costs(
    steps: StepPlan, places: Int64Array, flops: Costs, sequence_parallel_size: int, towers: TowerWork | None = None
) -> Costs:
    """FLOPs of every device in every step, (S, W N).

    Args:
        steps, places: of single samples, assigned by Skrull.
        flops: (N,), of the samples.
        towers: the part of them that is work of towers, which goes to the rank that computes a picture; None for none.
    """
    num_groups = steps.num_steps * steps.world_size
    # The samples of a step lie rank by rank, so each group of devices has a run of ``order``.
    bounds = np.append(steps.cell_offsets[steps.rank_bounds[:, :-1].reshape(-1)], len(steps.order))
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


def padded_fill(packs: PackPlan, steps: StepPlan) -> float:
    """True tokens over all tokens of batches in which each row is padded to the longest of its micro-batch, 0 to 1."""
    sizes = steps.cell_sizes()
    used = sizes > 0
    longest = np.maximum.reduceat(packs.tokens_per_pack()[steps.order], steps.cell_offsets[:-1][used])
    return packs.num_tokens / int((longest * sizes[used]).sum())


def summarize(
    packs: PackPlan,
    steps: StepPlan,
    options: PlanOptions,
    *,
    num_cached: int,
    fill: float,
    balance: BalanceFigures | None,
    skrull: SkrullFigures | None = None,
) -> PlanSummary:
    """Figures of packs and steps; arguments as in ``PlanSummary``. With Skrull the packs are those taken apart."""
    tokens = packs.tokens_per_pack().astype(np.float64)
    is_taken = np.zeros(num_cached, np.bool_)
    is_taken[packs.samples] = True
    num_distinct = int(np.count_nonzero(is_taken))
    return PlanSummary(
        num_cached=num_cached,
        num_filtered=num_cached - num_distinct,
        num_distinct=num_distinct,
        num_samples=packs.num_samples,
        num_tokens=packs.num_tokens,
        num_target_tokens=int(steps.target_tokens_per_step.sum()),
        longest=int(packs.full_lengths.max()),
        options=options,
        num_packs=packs.num_packs,
        lower_bound=packs.lower_bound,
        fill=fill,
        num_steps=steps.num_steps,
        num_steps_without_packing=-(-packs.num_samples // options.samples_per_plain_step),
        num_empty_micro_batches=steps.num_empty_micro_batches,
        efficient_attn_ratio=float(packs.sum_squares_per_pack().sum()) / float(np.square(tokens).sum()),
        balance=balance,
        skrull=skrull,
    )


_WORTH_ADVICE = 1.25
"""Growth of the batch from which the learning rate is worth a line: by a rule, 12 % higher."""


@dataclass(frozen=True)
class BatchGrowth:
    """Samples and target tokens of a mean step, and of a full step of unpacked training with the same options.

    Args:
        num_samples, num_targets: of packs.
        num_plain: batch size times accumulation times ranks.
        num_plain_targets: labels that carry loss of so many samples.
    """

    num_samples: float
    num_targets: float
    num_plain: int
    num_plain_targets: float

    @classmethod
    def of(cls, summary: PlanSummary) -> BatchGrowth:
        """The growth in a plan."""
        per_sample = summary.num_target_tokens / summary.num_samples
        num_samples, plain = summary.num_samples / summary.num_steps, summary.options.samples_per_plain_step
        return cls(num_samples, num_samples * per_sample, plain, plain * per_sample)

    @property
    def factor(self) -> float:
        """Times that the batch is as large as without packing."""
        return self.num_samples / self.num_plain

    @property
    def is_large(self) -> bool:
        """Whether there is something to say of the learning rate."""
        return self.factor >= _WORTH_ADVICE

    def sentence(self, product: str, *, knows_targets: bool = True) -> str:
        """Both batches.

        Args:
            product: batch size, accumulation and ranks, as in ``1 x 2 x 8``.
            knows_targets: not where lengths are all that is known.
        """
        packed = f"{self.num_samples:,.1f} samples", f"{self.num_targets:,.0f} target tokens"
        plain = f"{self.num_plain:,}", f"{self.num_plain_targets:,.0f}"
        num = 2 if knows_targets else 1
        return (
            f"a step holds {' and '.join(packed[:num])} on average, unpacked (batch size x accumulation x ranks: "
            f"{product}) {' and '.join(plain[:num])}"
        )

    def advice(self, optim: str = "") -> str:
        """How a learning rate that was tuned for the unpacked batch is scaled.

        Adam: with the square root of the growth (Malladi, Lyu, Panigrahi, Arora 2022, "On the SDEs and Scaling Rules
        for Adaptive Gradient Algorithms", arXiv:2205.10287). SGD: in proportion (Goyal et al. 2017, "Accurate, Large
        Minibatch SGD: Training ImageNet in 1 Hour", arXiv:1706.02677). Both hold up to some size of the batch only.

        Args:
            optim: by transformers' name; both rules where it is neither, or not known.
        """
        adam = f"{math.sqrt(self.factor):.1f} times with Adam (square root: Malladi et al. 2022)"
        sgd = f"{self.factor:.1f} times with SGD (linear: Goyal et al. 2017)"
        is_adam, is_sgd = "adam" in optim, optim == "sgd"
        rules = [rule for rule, other in ((adam, is_sgd), (sgd, is_adam)) if not other]
        return f"{self.factor:.1f} times the batch: a learning rate tuned unpacked rises up to {', '.join(rules)}"


def own_steps_line(summary: PlanSummary, steps: StepPlan) -> str:
    """What ``--samples-per-step`` makes of the steps, as the end of a sentence."""
    each = np.diff(steps.step_offsets) // steps.world_size
    fewest, most = int(each.min()), int(each.max())
    number = f"{most:,}" if fewest == most else f"{fewest:,} to {most:,}"
    return (
        f"each has the {summary.options.samples_per_plain_step:,} samples that it has unpacked (--samples-per-step), "
        f"in {number} micro-batch{'es' if most > 1 else ''} a rank"
    )
