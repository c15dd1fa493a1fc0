"""Figures of an epoch's plan: packs, steps, balance, Skrull's devices, and the growth of the batch by packing."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from packtool.planning.cost import CostModel
from packtool.planning.options import PlanOptions, SkrullOptions
from packtool.planning.pack_plan import Costs, Int64Array, IntArray, PackPlan
from packtool.planning.skrull import SHARDED
from packtool.planning.steps import StepPlan, imbalance
from packtool.planning.towers import TowerWork, shared_tower_costs


@dataclass(frozen=True)
class BalanceFigures:
    """Work of the slowest rank divided by the mean rank's, 1 or more, of each step, (S,): 1 is even.

    ``steps_before`` is for packs assigned to ranks in turn; ``flops`` are of all packs, forward and backward.
    """

    steps_before: Costs = field(compare=False)
    steps: Costs = field(compare=False)
    flops: float

    @property
    def mean(self) -> float:
        return float(self.steps.mean())

    def figures(self) -> dict[str, float]:
        """Return mean and worst step, if packs were assigned in turn and as planned, by their names in JSON."""
        return {
            "mean_before": float(self.steps_before.mean()),
            "worst_before": float(self.steps_before.max()),
            "mean": self.mean,
            "worst": float(self.steps.max()),
        }


@dataclass(frozen=True, kw_only=True)
class SkrullFigures:
    """Figures of Skrull's placement: each sample is local to one device of a data-parallel rank, or sharded over all.

    Args:
        num_micro_batches: micro-batches with samples, over all data-parallel ranks.
        num_padded_tokens: of all samples, and of the padding of sharded ones.
        num_local_tokens: of samples that are local to a rank.
        mean_imbalance, worst_imbalance: over all steps, of the busiest device's work divided by the mean device's.
    """

    options: SkrullOptions
    num_micro_batches: int
    num_padded_tokens: int
    num_local_tokens: int
    mean_imbalance: float
    worst_imbalance: float

    @classmethod
    def of(
        cls,
        samples: PackPlan,
        steps: StepPlan,
        placement: Int64Array,
        options: SkrullOptions,
        flops: Costs,
        towers: TowerWork | None,
    ) -> SkrullFigures:
        """Compute the figures of samples that Skrull has assigned to devices.

        Args:
            samples: packs of one sample each; ``steps.order`` are their numbers.
            placement: device of each sample in ``steps.order``, or ``SHARDED``, (N,).
            flops: of each sample, (N,), in the order of ``samples``.
            towers: of all samples of the cache.
        """
        sample_towers = None if towers is None else towers.select(samples.samples)
        costs = device_costs(steps, placement, flops, options.sequence_parallel_size, sample_towers)
        device_imbalance = imbalance(costs)  # of each step
        is_local = placement != SHARDED
        local_lengths = samples.lengths[steps.order[is_local]]
        padded_lengths = computed_tokens(samples, steps, placement, options.alignment)
        return cls(
            options=options,
            num_micro_batches=int(np.count_nonzero(steps.micro_batch_sizes() > 0)),
            num_padded_tokens=int(padded_lengths.sum()),
            num_local_tokens=int(local_lengths.sum(dtype=np.int64)),
            mean_imbalance=float(device_imbalance.mean()),
            worst_imbalance=float(device_imbalance.max()),
        )

    @property
    def bucket_fill(self) -> float:
        """Tokens with padding divided by the capacity of all micro-batches with samples, 0 to 1."""
        capacity = self.options.bucket_size * self.options.sequence_parallel_size
        return self.num_padded_tokens / (self.num_micro_batches * capacity)

    def figures(self, num_tokens: int) -> dict[str, Any]:
        """Return all figures of an epoch of ``num_tokens`` tokens, by their names in JSON."""
        return {
            "bucket_size": self.options.bucket_size,
            "sequence_parallel_size": self.options.sequence_parallel_size,
            "hardware": self.options.step_time.device,
            "micro_batches": self.num_micro_batches,
            "bucket_fill": self.bucket_fill,
            "local_tokens": self.num_local_tokens,
            "sharded_tokens": num_tokens - self.num_local_tokens,
            "device_balance": {"mean": self.mean_imbalance, "worst": self.worst_imbalance},
        }


@dataclass(frozen=True, kw_only=True)
class PlanSummary:
    """Figures of a plan.

    Args:
        num_filtered: samples longer than ``max_length``, left out; of a saved plan those that it lacks.
        num_distinct, num_samples: samples in the plan; repeated ones count once, or each time.
        num_tokens: of the samples in the plan; tokens of shared prefixes count once.
        num_target_tokens: labels that carry loss among them.
        longest: tokens of the longest sample in the plan, including its shared prefix.
        num_packs: packs; without packing, padded rows; with Skrull the packs before they are divided into samples.
        fill: true tokens divided by all tokens, 0 to 1. With packing, by ``num_packs * packing_length``; without, by
            the tokens of padded batches. Dynamic batches have no padding; with Skrull only sharded samples have some.
        efficient_attn_ratio: attention within samples divided by attention over whole packs: sum of len^2 over sum of
            squared pack sizes, 0 to 1.
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
        """Samples of the cache that a mixture may draw, but does not in this epoch."""
        return self.num_cached - self.num_distinct - self.num_filtered

    @property
    def samples_per_pack(self) -> float:
        return self.num_samples / self.num_packs

    @property
    def samples_per_step(self) -> float:
        return self.num_samples / self.num_steps

    @property
    def targets_per_sample(self) -> float:
        return self.num_target_tokens / self.num_samples

    @property
    def batch_growth(self) -> float:
        """Mean samples of a step divided by those of a full step without packing."""
        return self.samples_per_step / self.options.samples_per_unpacked_step


def pack_costs(packs: PackPlan, cost: CostModel, target_tokens: IntArray, towers: TowerWork | None = None) -> Costs:
    """Compute the FLOPs of each pack, (K,); ``target_tokens`` (N,) and ``towers`` are by cache position."""
    tower_flops = packs.sums_per_pack(towers.flops[packs.samples]) if towers is not None else 0
    logits = target_tokens if towers is None or towers.logits is None else towers.logits
    targets = packs.sums_per_pack(logits[packs.samples])
    windows = np.zeros(packs.num_packs, np.int64)
    if cost.per_window:  # the model has layers with windows
        windows = packs.sums_per_pack(cost.window_squares(packs.full_lengths, packs.shared_tokens))
    attention = cost.attention_of(packs.sum_squares_per_pack(), windows)
    return cost(packs.tokens_per_pack(), attention, targets, tower_flops)


def computed_tokens(single_samples: PackPlan, steps: StepPlan, placement: Int64Array, alignment: int) -> Int64Array:
    """Compute the tokens of each sample (N,) placed by Skrull, with the padding of sharded ones."""
    tokens = single_samples.lengths.astype(np.int64)
    sharded = steps.order[placement == SHARDED]
    tokens[sharded] = -(-tokens[sharded] // alignment) * alignment
    return tokens


def device_costs(
    steps: StepPlan, placement: Int64Array, flops: Costs, sequence_parallel_size: int, towers: TowerWork | None = None
) -> Costs:
    """Sum the FLOPs of each device in each step, (steps, devices); a rank has ``sequence_parallel_size`` devices.

    Args:
        steps: assigns N samples to ranks, as packs of one sample each.
        placement: for each sample in ``steps.order``, the device of its rank that computes it, or ``SHARDED`` if all
            of them share it, (N,).
        flops: of each sample, (N,), ``towers`` included.
        towers: work for images and sounds, of which one device computes all of an image.
    """
    # One row for each rank-step (one rank in one step).
    costs = np.zeros((steps.num_steps * steps.world_size, sequence_parallel_size))
    rank_steps = steps.rank_step_of_micro_batch[steps.micro_batch_of]  # of each sample in ``steps.order``, (N,)
    is_sharded = placement == SHARDED
    is_local = ~is_sharded
    np.add.at(costs, (rank_steps[is_local], placement[is_local]), flops[steps.order[is_local]])

    evenly_shared = flops if towers is None else flops - towers.flops
    shared_costs = np.zeros(len(costs))
    np.add.at(shared_costs, rank_steps[is_sharded], evenly_shared[steps.order[is_sharded]])
    costs += shared_costs[:, None] / sequence_parallel_size
    if towers is not None:
        costs += shared_tower_costs(steps, placement, towers, sequence_parallel_size)

    num_devices = steps.world_size * sequence_parallel_size  # those of a rank are adjacent
    return costs.reshape(steps.num_steps, num_devices)


def padded_fill(packs: PackPlan, steps: StepPlan) -> float:
    """Divide the true tokens by all tokens if each row is padded to the longest of its micro-batch."""
    sizes = steps.micro_batch_sizes()
    used = sizes > 0
    longest = np.maximum.reduceat(packs.tokens_per_pack()[steps.order], steps.micro_batch_offsets[:-1][used])
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
    """Compute the figures of an epoch's plan.

    Args:
        packs: with at least one sample; ``packs.samples`` are positions in the cache.
        num_cached: samples of the cache; those that are in no pack count as filtered.
        fill: share of tokens that are not padding, 0 to 1.
    """
    is_planned = np.zeros(num_cached, np.bool_)
    is_planned[packs.samples] = True
    num_distinct = int(np.count_nonzero(is_planned))  # a sample may occur several times
    # The work of attention within samples, and of attention over all tokens of a pack.
    sample_squares = float(packs.sum_squares_per_pack().sum())
    pack_squares = float(np.square(packs.tokens_per_pack().astype(np.float64)).sum())
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
        num_steps_without_packing=math.ceil(packs.num_samples / options.samples_per_unpacked_step),
        num_empty_micro_batches=steps.num_empty_micro_batches,
        efficient_attn_ratio=sample_squares / pack_squares,
        balance=balance,
        skrull=skrull,
    )


MIN_GROWTH_FOR_ADVICE = 1.25
"""Growth of the batch from which the learning rate is worth a line: by a rule, 12 % higher."""


def batch_sentence(summary: PlanSummary, *, knows_targets: bool = True) -> str:
    """Compare the mean batch with that of unpacked training, and name the option that keeps the latter."""
    options, num_plain = summary.options, summary.options.samples_per_unpacked_step
    factors = options.per_device_train_batch_size, options.gradient_accumulation_steps, options.world_size
    remedy = f"--samples-per-step {num_plain}" if options.skrull is None else "--packing false"
    packed = f"{summary.samples_per_step:,.1f} samples"
    plain = f"{num_plain:,}"
    if knows_targets:
        packed += f" and {summary.samples_per_step * summary.targets_per_sample:,.0f} target tokens"
        plain += f" and {num_plain * summary.targets_per_sample:,.0f}"
    product = f"(batch size x accumulation x ranks: {' x '.join(map(str, factors))})"
    return f"a step has {packed} on average; without packing {product} it has {plain}: {remedy} keeps that batch"


def learning_rate_advice(growth: float, optim: str = "") -> str:
    """Advise how to scale a learning rate tuned for the unpacked batch if packing multiplies the batch by ``growth``.

    Adam: with the square root of the growth (Malladi, Lyu, Panigrahi, Arora 2022, "On the SDEs and Scaling Rules
    for Adaptive Gradient Algorithms", arXiv:2205.10287). SGD: in proportion (Goyal et al. 2017, "Accurate, Large
    Minibatch SGD: Training ImageNet in 1 Hour", arXiv:1706.02677). Other or unknown optimizers get both rules.
    """
    adam = f"{math.sqrt(growth):.1f} with Adam (square root: Malladi et al. 2022)"
    sgd = f"{growth:.1f} with SGD (linear: Goyal et al. 2017)"
    rules = [adam] if "adam" in optim else [sgd] if optim == "sgd" else [adam, sgd]
    return f"{growth:.1f} times the batch: multiply a learning rate tuned without packing by up to {', '.join(rules)}"


def fixed_batch_clause(summary: PlanSummary, steps: StepPlan) -> str:
    """Describe the steps of ``--samples-per-step``, as the end of a sentence."""
    per_rank = np.diff(steps.step_offsets) // steps.world_size
    fewest, most = int(per_rank.min()), int(per_rank.max())
    number = f"{most:,}" if fewest == most else f"{fewest:,} to {most:,}"
    micro_batches = f"{number} micro-batch{'es' if most > 1 else ''} a rank"
    samples = f"{summary.options.samples_per_unpacked_step:,} samples"
    return f"each has the {samples} that it has without packing (--samples-per-step), in {micro_batches}"
