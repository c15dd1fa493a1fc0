"""The whole plan of an epoch, from the cache's lengths to its steps: what training starts from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.errors import DataError
from packtool.plan.balance import imbalance
from packtool.plan.dynamic import costs_in_turn, pack_each_step, rearrange
from packtool.plan.even import even_order, pack_evenly
from packtool.plan.mixture import Mixture
from packtool.plan.options import PlanOptions
from packtool.plan.pack_plan import Int64Array, PackPlan, digest_arrays, with_each_alone, with_packs_in_order
from packtool.plan.packing import pack, pack_singletons, pack_trees
from packtool.plan.prefix_trees import PrefixTrees
from packtool.plan.shuffle import RandomStream, seeded_order
from packtool.plan.skrull_steps import assign_skrull
from packtool.plan.steps import StepPlan, plan_steps, step_plan
from packtool.plan.summary import BalanceFigures, PlanSummary, SkrullFigures, pack_costs, padded_fill, summarize
from packtool.plan.towers import TowerWork
from packtool.plan.tree_parts import TreeParts

_WINDOW_STEPS = 50


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """Packs, steps and figures of an epoch.

    Args:
        packs: what ``steps`` assigns; ``packs.samples`` are positions in the cache. With Skrull each is one sample.
        steps: which is trained when and where.
        summary: figures.
        places: with Skrull, int64 (K,), by position in ``steps.order``: ``skrull.SHARDED``, or the sequence parallel
            rank that the sample is local to.
        whole: with Skrull, the packs whose samples ``packs`` has one by one, in the same order: they say which
            samples share a step, whoever trains it.
        drawn: with ``samples_per_step``, the samples one by one in the order in which steps take them.
    """

    packs: PackPlan
    steps: StepPlan
    summary: PlanSummary
    places: Int64Array | None = None
    whole: PackPlan | None = None
    drawn: PackPlan | None = None

    @property
    def lasting_fingerprint(self) -> str:
        """sha256 in hex over what stays the same however many ranks there are."""
        return (self.drawn or self.packs).fingerprint

    @property
    def whole_packs(self) -> PackPlan:
        """The packs as they were packed: assigned to ranks whole, or by Skrull one sample at a time."""
        return self.packs if self.whole is None else self.whole

    @cached_property
    def fingerprint(self) -> str:
        """sha256 in hex over packs, steps and places: ranks whose fingerprints are equal will train the same epoch."""
        digest = hashlib.sha256(f"{self.packs.fingerprint} {self.steps.fingerprint}".encode())
        if self.places is None:
            return digest.hexdigest()
        return digest_arrays(digest, self.places, self.whole_packs.offsets)

    def places_of(self, step: int, rank: int, micro_batch: int) -> Int64Array | None:
        """Places of the samples of a micro-batch, in the order of ``samples``; a view. None without Skrull."""
        return None if self.places is None else self.places[self.steps.cell(step, rank, micro_batch)]

    def packs_from(self, step: int) -> PackPlan:
        """The whole packs that a step and those after it train: every sample that was not trained before, once."""
        steps = self.steps
        left = np.sort(steps.order[steps.cell_offsets[steps.step_offsets[step]] :])
        if self.whole is None:
            return with_packs_in_order(self.packs, left)
        # A step has whole packs, so those that any sample left comes from are left whole.
        packs = np.unique(np.searchsorted(self.whole.offsets, left, side="right") - 1)
        return with_packs_in_order(self.whole, packs)

    def samples_of(self, first: int, stop: int) -> Int64Array:
        """Cache positions of all samples of the steps from ``first`` up to but not ``stop``, over all ranks."""
        steps = self.steps
        start, end = steps.cell_offsets[steps.step_offsets[[first, stop]]]
        return with_packs_in_order(self.packs, steps.order[start:end]).samples

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
    towers: TowerWork | None = None,
    trees: PrefixTrees | None = None,
    wanted: Int64Array | None = None,
) -> EpochPlan:
    """Filter, pack and assign to steps and ranks: a pure function, the same on every rank and machine.

    The number of packs and steps depends on lengths, options and seed; every epoch has as many as the first.

    Args:
        lengths: (N,), tokens of each sample of the cache.
        target_tokens: (N,), labels of each that carry loss.
        options: see ``PlanOptions``.
        seed: of the run.
        epoch: 0-based; every epoch has new companions and a new order.
        media_tokens: (N,), of each sample; None when it has none.
        towers: what its pictures and sounds cost beside ``options.cost``; None for nothing.
        trees: samples that share prefixes, of ``options.max_length`` at most, of which each group is in one pack;
            ``media_tokens`` and ``towers`` are then what each sample adds to its group.
        wanted: int64 (M,), rising: the samples of an epoch of which a part is trained already, which are also those of
            ``trees``; None for all.

    Raises:
        ConfigError: an option is not positive, or options contradict each other.
        DataError: no sample is left, or some are longer than a pack.
    """
    assert len(lengths) == len(target_tokens)
    kept = np.flatnonzero(lengths <= options.max_length).astype(np.int64)
    if wanted is not None:
        kept = wanted[lengths[wanted] <= options.max_length]
    if len(kept) == 0:
        raise DataError(
            f"No sample is left to train on: the cache holds {len(lengths):,}, "
            f"and all are longer than {options.max_length:,} tokens (--max-length, or --packing-length)."
            if len(lengths)
            else "No sample is left to train on: the cache is empty.",
            "Raise it, or export other rows.",
        )
    if trees is not None:
        assert options.packing, "rows that are padded share nothing"
        capacity = options.packing_length
        packs = pack_trees(trees, lengths, capacity, options, seed=seed, epoch=epoch, media_tokens=media_tokens)
    elif wanted is None and len(kept) == len(lengths):
        packs = _pack(lengths, media_tokens, options, seed, epoch)
    else:
        kept_media = None if media_tokens is None else media_tokens[kept]
        packs = _pack(lengths[kept], kept_media, options, seed, epoch)
        packs = PackPlan(kept[packs.samples], packs.offsets, packs.lengths, packs.capacity)
    packs = _grouped(packs, options)
    return assign_packs(packs, target_tokens, options, media_tokens=media_tokens, towers=towers, trees=trees)


def plan_mixture(
    mixture: Mixture,
    options: PlanOptions,
    *,
    seed: int,
    epoch: int = 0,
    media_tokens: npt.NDArray[np.integer[Any]] | None = None,
    towers: TowerWork | None = None,
) -> EpochPlan:
    """The plan of an epoch of a mixture: its places are packed, and then filled with samples, which share nothing.

    Args:
        mixture: what the epoch takes of the samples, ``options.max_length`` tokens at most.
        options, seed, epoch, media_tokens, towers: as for ``plan_epoch``; (N,), N being all samples of the caches.

    Raises:
        ConfigError, DataError: as ``plan_epoch``.
    """
    places, samples = mixture.places, mixture.drawn(epoch)
    is_even = options.shuffle and not (options.packing and options.packing_algorithm == "sequential")
    is_one_source = max(mixture.counts) == mixture.num_drawn
    if is_even and options.packing and options.samples_per_step is None and not is_one_source:
        packed, taken = pack_evenly(places, options, seed=seed, epoch=epoch)
        samples = samples[taken]
    else:
        packed = _pack(places.lengths, places.media_tokens, options, seed, epoch)
    samples = samples[packed.samples]
    lengths = mixture.lengths[samples].astype(np.int32, copy=False)
    packs = PackPlan(samples, packed.offsets, lengths, packed.capacity, mixture=mixture.fingerprint)
    if is_even:
        of, amounts = mixture.source_of(samples), mixture.amounts(samples)
        order = even_order(packs, of, amounts, seed=seed, epoch=epoch)
        packs = with_packs_in_order(packs, order)
    packs, targets = _grouped(packs, options), mixture.target_tokens
    plan = assign_packs(packs, targets, options, media_tokens=media_tokens, towers=towers)
    return replace(plan, summary=replace(plan.summary, num_filtered=mixture.num_filtered))


def assign_packs(
    packs: PackPlan,
    target_tokens: npt.NDArray[np.integer[Any]],
    options: PlanOptions,
    *,
    media_tokens: npt.NDArray[np.integer[Any]] | None = None,
    towers: TowerWork | None = None,
    trees: PrefixTrees | None = None,
) -> EpochPlan:
    """The second half of ``plan_epoch``: steps and figures for packs that are there already.

    With ``samples_per_step`` the packs say in which order steps take their samples, and are made anew: what a plan has
    left of an epoch gives its steps the samples that they had.

    Args:
        packs: of samples by their position in the cache.
        target_tokens: (N,), labels of each sample of the cache that carry loss.
        options, media_tokens, towers, trees: as for ``plan_epoch``.

    Raises:
        ConfigError: an option is not positive, or samples are too long for Skrull's buckets.
        DataError: with ``samples_per_step``, samples that are over a budget of a pack.
    """
    if options.samples_per_step is not None:
        return _assign_samples(with_each_alone(packs), target_tokens, options, media_tokens, towers)
    if options.skrull is not None:
        return _assign_skrull(packs, target_tokens, options, towers)
    costs = pack_costs(packs, options.cost, target_tokens, towers) if options.cost is not None else None
    parts = TreeParts.of(packs, trees)
    steps = _steps(packs, target_tokens, options, costs, parts)
    balance = None
    if costs is not None:
        after = imbalance(steps.rank_costs(costs))
        is_assigned = options.balance != "none" and options.dynamic_batch_tokens is None
        before = _imbalance_in_turn(packs, target_tokens, options, costs, parts) if is_assigned else after
        balance = BalanceFigures.of(before, after, float(costs.sum()))
    fill = _fill(packs, steps, options)
    return EpochPlan(
        packs, steps, summarize(packs, steps, options, num_cached=len(target_tokens), fill=fill, balance=balance)
    )


def _assign_skrull(
    packs: PackPlan,
    target_tokens: npt.NDArray[np.integer[Any]],
    options: PlanOptions,
    towers: TowerWork | None,
) -> EpochPlan:
    assert options.skrull is not None
    assert options.cost is not None, "Skrull needs to know what samples cost"
    each = with_each_alone(packs)
    flops = pack_costs(each, options.cost, target_tokens, towers)
    assigned = assign_skrull(
        packs,
        target_tokens,
        flops,
        options.skrull,
        packs_per_step=options.packs_per_step,
        num_ranks=options.world_size,
    )
    costs = pack_costs(packs, options.cost, target_tokens, towers)
    before = _imbalance_in_turn(packs, target_tokens, options, costs)
    figures = SkrullFigures.of(assigned, options.skrull, flops, None if towers is None else towers.of(each.samples))
    summary = summarize(
        packs,
        assigned.steps,
        options,
        num_cached=len(target_tokens),
        fill=packs.num_tokens / max(figures.num_tokens, 1),
        balance=BalanceFigures.of(before, imbalance(assigned.steps.rank_costs(flops)), float(flops.sum())),
        skrull=figures,
    )
    return EpochPlan(assigned.singles, assigned.steps, summary, assigned.places, packs)


def _assign_samples(
    drawn: PackPlan,
    target_tokens: npt.NDArray[np.integer[Any]],
    options: PlanOptions,
    media_tokens: npt.NDArray[np.integer[Any]] | None,
    towers: TowerWork | None,
) -> EpochPlan:
    """What ``assign_packs`` returns with ``samples_per_step``; ``drawn``: one sample each, in the epoch's order."""
    assert options.samples_per_step is not None, "asked before"
    costs = pack_costs(drawn, options.cost, target_tokens, towers) if options.cost is not None else None
    packs, steps = pack_each_step(drawn, target_tokens, options, costs=costs, media_tokens=media_tokens)
    balance = None
    if costs is not None:
        before = imbalance(costs_in_turn(costs, options.samples_per_step, options.world_size))
        assert options.cost is not None, "it told the costs"
        after = imbalance(steps.rank_costs(pack_costs(packs, options.cost, target_tokens, towers)))
        balance = BalanceFigures.of(before, after, float(costs.sum()))
    summary = summarize(packs, steps, options, num_cached=len(target_tokens), fill=packs.fill, balance=balance)
    return EpochPlan(packs, steps, summary, drawn=drawn)


def _imbalance_in_turn(
    packs: PackPlan,
    target_tokens: npt.NDArray[np.integer[Any]],
    options: PlanOptions,
    costs: npt.NDArray[np.float64],
    parts: TreeParts | None = None,
) -> npt.NDArray[np.float64]:
    """Slowest over mean work of every step if packs were assigned to ranks in turn, (S,)."""
    return imbalance(_steps(packs, target_tokens, replace(options, balance="none"), None, parts).rank_costs(costs))


def reordered(packs: PackPlan, *, seed: int, epoch: int) -> PackPlan:
    """The same packs in another order, as a saved plan is trained in its later epochs; epoch 0 leaves it."""
    if epoch == 0:
        return packs
    order = seeded_order(packs.num_packs, seed=seed, epoch=epoch, stream=RandomStream.SAVED_ORDER)
    return with_packs_in_order(packs, order)


def _steps(
    packs: PackPlan,
    target_tokens: npt.NDArray[np.integer[Any]],
    options: PlanOptions,
    costs: npt.NDArray[np.float64] | None,
    parts: TreeParts | None = None,
) -> StepPlan:
    if options.dynamic_batch_tokens is None:
        return plan_steps(
            packs,
            target_tokens,
            world_size=options.world_size,
            gradient_accumulation_steps=options.gradient_accumulation_steps,
            packs_per_micro_batch=options.per_device_train_batch_size,
            costs=costs,
            balance=options.balance,
            parts=parts,
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


def _pack(
    lengths: npt.NDArray[np.integer[Any]],
    media_tokens: npt.NDArray[np.integer[Any]] | None,
    options: PlanOptions,
    seed: int,
    epoch: int,
) -> PackPlan:
    if options.packing and options.samples_per_step is None:
        return pack(lengths, options.packing_length, options, seed=seed, epoch=epoch, media_tokens=media_tokens)
    return pack_singletons(lengths, options.packing_length, seed=seed, epoch=epoch, shuffle=options.shuffle)


def _grouped(packs: PackPlan, options: PlanOptions) -> PackPlan:
    """The same packs; rows of one sample each as ``group_by_length`` wants them."""
    is_grouped = not options.packing and options.group_by_length
    return group_by_length(packs, options.packs_per_step) if is_grouped else packs


def group_by_length(rows: PackPlan, rows_per_step: int) -> PackPlan:
    """Rows of about one length next to each other, so that batches need less padding.

    The order that the seed drew is cut into windows of 50 steps, each sorted by length, and the steps of a window are
    brought back into the order of their first rows, so that lengths do not rise and fall over the run (transformers'
    ``LengthGroupedSampler`` has them fall within each window).

    Args:
        rows: packs of one sample each, N of them.
        rows_per_step: of all ranks.
    """
    order = np.arange(rows.num_samples)
    for start in range(0, len(order), _WINDOW_STEPS * rows_per_step):
        window = order[start : start + _WINDOW_STEPS * rows_per_step]
        falling = window[np.argsort(-rows.lengths[window], kind="stable")]
        num_full = len(falling) // rows_per_step
        full = falling[: num_full * rows_per_step].reshape(num_full, rows_per_step)
        shuffled = full[np.argsort(full.min(axis=1), kind="stable")] if num_full else full
        order[start : start + len(window)] = np.concatenate((shuffled.reshape(-1), falling[full.size :]))
    return PackPlan(rows.samples[order], rows.offsets, rows.lengths[order], rows.capacity, mixture=rows.mixture)


def _fill(packs: PackPlan, steps: StepPlan, options: PlanOptions) -> float:
    if options.packing:
        return packs.fill
    # Dynamic batches run without padding.
    return 1.0 if options.dynamic_batch_tokens is not None else padded_fill(packs, steps)
