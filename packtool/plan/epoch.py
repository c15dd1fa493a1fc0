"""The whole plan of an epoch, from the cache's lengths to its steps: what training starts from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.errors import DataError
from packtool.packing_options import Balance, PackingAlgorithm
from packtool.plan.balance import imbalance
from packtool.plan.cost import CostModel
from packtool.plan.dynamic import rearrange
from packtool.plan.pack_plan import with_packs_in_order
from packtool.plan.packing import PackOptions, PackPlan, pack, pack_singletons
from packtool.plan.shuffle import seeded_order
from packtool.plan.steps import StepPlan, plan_steps, step_plan

_WINDOW_STEPS = 50
_SAVED_ORDER = 4  # a stream of random numbers, see ``plan.packing``


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What decides a plan, besides lengths, seed and epoch.

    Args:
        max_length: longer samples are left out and counted.
        packing_length: tokens that a pack may hold.
        packing: False makes every sample a pack of its own, for padded batches.
        packing_num_proc: processes that pack windows; the plan is the same for any number.
        packing_algorithm, packing_window, packing_batch_size, look_ahead, max_samples_per_pack,
            max_media_tokens_per_pack, shuffle: how samples are packed, see ``packing.PackOptions``.
        world_size: data-parallel ranks, W.
        gradient_accumulation_steps: micro-batches of a step on each rank, G.
        packs_per_micro_batch: packs (or padded rows) of a micro-batch, B: ``--per-device-train-batch-size``.
        balance: how packs are dealt to ranks, see ``plan_steps``.
        cost: what a pack costs to train; needed for balancing, and for figures.
        group_by_length: without packing, rows of about one length share a batch.
        dynamic_batch_tokens: without packing, micro-batches by tokens instead of by count, see ``dynamic``.
        dynamic_max_batch_size: most samples of such a micro-batch.
    """

    max_length: int
    packing_length: int
    packing: bool = True
    packing_num_proc: int = 1
    world_size: int = 1
    gradient_accumulation_steps: int = 1
    packs_per_micro_batch: int = 1
    balance: Balance = "none"
    cost: CostModel | None = None
    group_by_length: bool = False
    dynamic_batch_tokens: int | None = None
    dynamic_max_batch_size: int | None = None
    packing_algorithm: PackingAlgorithm = "best_fit"
    packing_window: int | None = None
    packing_batch_size: int = 1000
    look_ahead: int = 64
    max_samples_per_pack: int | None = None
    max_media_tokens_per_pack: int | None = None
    shuffle: bool = True

    @property
    def pack_options(self) -> PackOptions:
        """The part that decides which samples share a pack."""
        return PackOptions(
            capacity=self.packing_length,
            algorithm=self.packing_algorithm,
            window=self.packing_window,
            num_proc=self.packing_num_proc,
            batch_size=self.packing_batch_size,
            look_ahead=self.look_ahead,
            max_samples=self.max_samples_per_pack,
            max_media_tokens=self.max_media_tokens_per_pack,
            shuffle=self.shuffle,
        )

    @property
    def packs_per_step(self) -> int:
        """Packs (or padded rows) of a full optimizer step over all ranks, W * G * B."""
        return self.world_size * self.gradient_accumulation_steps * self.packs_per_micro_batch


@dataclass(frozen=True)
class BalanceFigures:
    """Work of the slowest rank over the mean rank's, in the mean and the worst step: 1 is even.

    Args:
        mean_before, worst_before: if packs went round the ranks like cards.
        mean, worst: as dealt.
        flops: of all packs, forward and backward.
    """

    mean_before: float
    worst_before: float
    mean: float
    worst: float
    flops: float


@dataclass(frozen=True, kw_only=True)
class PlanSummary:
    """What is worth printing before an epoch starts.

    Args:
        num_cached: samples in the cache.
        num_filtered: those longer than ``max_length``, left out.
        num_samples: those in the plan, one length each.
        num_tokens: tokens of the samples in the plan.
        num_target_tokens: labels that carry loss among them.
        longest: tokens of the longest sample in the plan.
        packing: as in ``PlanOptions``.
        max_length, packing_length, packing_num_proc: as in ``PlanOptions``.
        num_packs: packs; without packing, padded rows.
        lower_bound: packs of ``packing_length`` that the tokens need at least.
        fill: true tokens over all tokens computed, 0 to 1. With packing over ``num_packs * packing_length``; without,
            over the batches, each padded to its longest row.
        num_steps: optimizer steps.
        num_steps_without_packing: steps if each pack were one sample: ceil(num_samples / (B * G * W)).
        num_empty_micro_batches: micro-batches of the last step that carry no sample.
        efficient_attn_ratio: attention that packed samples need over what the packs would need as one text each:
            sum of len^2 over sum of squared pack sizes, 0 to 1.
        balance: how even the ranks' work is, None if nobody said what a pack costs.
    """

    num_cached: int
    num_filtered: int
    num_samples: int
    num_tokens: int
    num_target_tokens: int
    longest: int
    packing: bool
    max_length: int
    packing_length: int
    packing_num_proc: int
    num_packs: int
    lower_bound: int
    fill: float
    num_steps: int
    num_steps_without_packing: int
    num_empty_micro_batches: int
    efficient_attn_ratio: float
    balance: BalanceFigures | None

    @property
    def samples_per_pack(self) -> float:
        """Mean."""
        return self.num_samples / self.num_packs


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """Packs, steps and figures of an epoch; ``packs.samples`` are positions in the cache."""

    packs: PackPlan
    steps: StepPlan
    summary: PlanSummary

    @cached_property
    def fingerprint(self) -> str:
        """sha256 in hex over packs and steps: ranks whose fingerprints are equal will train the same epoch."""
        return hashlib.sha256(f"{self.packs.fingerprint} {self.steps.fingerprint}".encode()).hexdigest()

    def samples(self, step: int, rank: int, micro_batch: int) -> tuple[npt.NDArray[np.int64], ...]:
        """Cache positions of the samples of each pack of a micro-batch."""
        return tuple(self.packs.pack(int(pack)) for pack in self.steps.packs(step, rank, micro_batch))


def plan_epoch(
    lengths: npt.NDArray[np.integer[Any]],
    target_tokens: npt.NDArray[np.integer[Any]],
    options: PlanOptions,
    *,
    seed: int,
    epoch: int = 0,
    media_tokens: npt.NDArray[np.integer[Any]] | None = None,
) -> EpochPlan:
    """Filter, pack and deal: a pure function, the same on every rank and machine.

    The number of packs and steps depends on lengths, options and seed; every epoch has as many as the first.

    Args:
        lengths: (N,), tokens of each sample of the cache.
        target_tokens: (N,), labels of each that carry loss.
        options: see ``PlanOptions``.
        seed: of the run.
        epoch: 0-based; every epoch has new companions and a new order.
        media_tokens: (N,), of each sample; None when it has none.

    Raises:
        ConfigError: an option is not positive, or options contradict each other.
        DataError: no sample is left, or some are longer than a pack.
    """
    assert len(lengths) == len(target_tokens)
    kept = np.flatnonzero(lengths <= options.max_length).astype(np.int64)
    if len(kept) == 0:
        raise DataError(
            f"No sample is left to train on: the cache holds {len(lengths):,}, "
            f"and all are longer than --max-length {options.max_length}."
            if len(lengths)
            else "No sample is left to train on: the cache is empty.",
            "Raise --max-length, or export other rows.",
        )
    if len(kept) == len(lengths):
        packs = _pack(lengths, media_tokens, options, seed, epoch)
    else:
        kept_media = None if media_tokens is None else media_tokens[kept]
        packs = _pack(lengths[kept], kept_media, options, seed, epoch)
        packs = PackPlan(kept[packs.samples], packs.offsets, packs.lengths, packs.capacity)
    return deal_packs(packs, target_tokens, options, media_tokens=media_tokens)


def deal_packs(
    packs: PackPlan,
    target_tokens: npt.NDArray[np.integer[Any]],
    options: PlanOptions,
    *,
    media_tokens: npt.NDArray[np.integer[Any]] | None = None,
) -> EpochPlan:
    """The second half of ``plan_epoch``: steps and figures for packs that are there already."""
    costs = pack_costs(packs, options.cost, target_tokens, media_tokens) if options.cost is not None else None
    steps = _steps(packs, target_tokens, options, costs)
    return EpochPlan(packs, steps, _summarize(packs, steps, options, num_cached=len(target_tokens), costs=costs))


def reordered(packs: PackPlan, *, seed: int, epoch: int) -> PackPlan:
    """The same packs in another order, as a saved plan is trained in its later epochs; epoch 0 leaves it."""
    if epoch == 0:
        return packs
    return with_packs_in_order(packs, seeded_order(packs.num_packs, seed=seed, epoch=epoch, stream=_SAVED_ORDER))


def pack_costs(
    packs: PackPlan,
    cost: CostModel,
    target_tokens: npt.NDArray[np.integer[Any]],
    media_tokens: npt.NDArray[np.integer[Any]] | None = None,
) -> npt.NDArray[np.float64]:
    """FLOPs of each pack, (K,); ``target_tokens`` and ``media_tokens`` by cache position."""
    media = packs.sums_per_pack(media_tokens[packs.samples]) if media_tokens is not None else 0
    targets = packs.sums_per_pack(target_tokens[packs.samples])
    return cost(packs.tokens_per_pack(), packs.sum_squares_per_pack(), media, targets)


def _steps(
    packs: PackPlan,
    target_tokens: npt.NDArray[np.integer[Any]],
    options: PlanOptions,
    costs: npt.NDArray[np.float64] | None,
) -> StepPlan:
    if options.dynamic_batch_tokens is None:
        return plan_steps(
            packs,
            target_tokens,
            world_size=options.world_size,
            gradient_accumulation_steps=options.gradient_accumulation_steps,
            packs_per_micro_batch=options.packs_per_micro_batch,
            costs=costs,
            balance=options.balance,
        )
    batches = rearrange(
        packs.tokens_per_pack(),
        samples_per_step=options.packs_per_step,
        num_ranks=options.world_size,
        max_tokens=options.dynamic_batch_tokens,
        max_samples=options.dynamic_max_batch_size,
    )
    return step_plan(
        packs,
        target_tokens,
        world_size=options.world_size,
        order=batches.order,
        cell_sizes=batches.cell_sizes,
        cells_per_step=batches.cells_per_step,
    )


def padded_fill(packs: PackPlan, steps: StepPlan) -> float:
    """True tokens over all tokens of batches in which each row is padded to the longest of its micro-batch, 0 to 1."""
    sizes = steps.cell_sizes()
    used = sizes > 0
    longest = np.maximum.reduceat(packs.tokens_per_pack()[steps.order], steps.cell_offsets[:-1][used])
    return packs.num_tokens / int((longest * sizes[used]).sum())


def _pack(
    lengths: npt.NDArray[np.integer[Any]],
    media_tokens: npt.NDArray[np.integer[Any]] | None,
    options: PlanOptions,
    seed: int,
    epoch: int,
) -> PackPlan:
    if options.packing:
        return pack(lengths, options.pack_options, seed=seed, epoch=epoch, media_tokens=media_tokens)
    rows = pack_singletons(lengths, options.packing_length, seed=seed, epoch=epoch, shuffle=options.shuffle)
    return group_by_length(rows, options.packs_per_step) if options.group_by_length else rows


def group_by_length(rows: PackPlan, rows_per_step: int) -> PackPlan:
    """Rows of about one length next to each other, so that batches need less padding.

    The order that the seed drew is cut into windows of 50 steps, each sorted by length, and the steps of a window are
    brought back into the order of their first rows, so that lengths do not rise and fall over the run (transformers'
    ``LengthGroupedSampler`` has them fall within each window).
    """
    order = np.arange(rows.num_samples)
    for start in range(0, len(order), _WINDOW_STEPS * rows_per_step):
        window = order[start : start + _WINDOW_STEPS * rows_per_step]
        falling = window[np.argsort(-rows.lengths[window], kind="stable")]
        num_full = len(falling) // rows_per_step
        full = falling[: num_full * rows_per_step].reshape(num_full, rows_per_step)
        shuffled = full[np.argsort(full.min(axis=1), kind="stable")] if num_full else full
        order[start : start + len(window)] = np.concatenate((shuffled.reshape(-1), falling[full.size :]))
    return PackPlan(rows.samples[order], rows.offsets, rows.lengths[order], rows.capacity)


def _balance(packs: PackPlan, steps: StepPlan, options: PlanOptions, costs: npt.NDArray[np.float64]) -> BalanceFigures:
    after = imbalance(steps.rank_costs(costs))
    before = after
    if options.balance != "none" and options.dynamic_batch_tokens is None:
        cards = _steps(packs, np.zeros(int(packs.samples.max()) + 1, np.int8), replace(options, balance="none"), None)
        before = imbalance(cards.rank_costs(costs))
    return BalanceFigures(
        mean_before=float(before.mean()),
        worst_before=float(before.max()),
        mean=float(after.mean()),
        worst=float(after.max()),
        flops=float(costs.sum()),
    )


def _fill(packs: PackPlan, steps: StepPlan, options: PlanOptions) -> float:
    if options.packing:
        return packs.fill
    # Dynamic batches run without padding.
    return 1.0 if options.dynamic_batch_tokens is not None else padded_fill(packs, steps)


def _summarize(
    packs: PackPlan,
    steps: StepPlan,
    options: PlanOptions,
    num_cached: int,
    costs: npt.NDArray[np.float64] | None,
) -> PlanSummary:
    tokens = packs.tokens_per_pack().astype(np.float64)
    return PlanSummary(
        num_cached=num_cached,
        num_filtered=num_cached - packs.num_samples,
        num_samples=packs.num_samples,
        num_tokens=packs.num_tokens,
        num_target_tokens=int(steps.target_tokens_per_step.sum()),
        longest=int(packs.lengths.max()),
        packing=options.packing,
        max_length=options.max_length,
        packing_length=options.packing_length,
        packing_num_proc=options.packing_num_proc,
        num_packs=packs.num_packs,
        lower_bound=packs.lower_bound,
        fill=_fill(packs, steps, options),
        num_steps=steps.num_steps,
        num_steps_without_packing=-(-packs.num_samples // options.packs_per_step),
        num_empty_micro_batches=steps.num_empty_micro_batches,
        efficient_attn_ratio=float(packs.sum_squares_per_pack().sum()) / float(np.square(tokens).sum()),
        balance=_balance(packs, steps, options, costs) if costs is not None else None,
    )
