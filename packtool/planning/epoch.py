"""The whole plan of an epoch, from the cache's lengths to its steps: what training starts from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.errors import DataError
from packtool.planning.balance import Costs, imbalance
from packtool.planning.dynamic import assign_samples, costs_in_turn, rearrange
from packtool.planning.even import even_order, pack_evenly
from packtool.planning.mixture import Mixture
from packtool.planning.options import PlanOptions
from packtool.planning.pack_plan import (
    Int64Array,
    PackPlan,
    build_plan,
    digest_arrays,
    select_packs,
    split_into_samples,
)
from packtool.planning.packing import pack, pack_singletons, pack_trees
from packtool.planning.prefix_trees import PrefixTrees
from packtool.planning.shuffle import RandomStream, seeded_order
from packtool.planning.skrull import assign_skrull
from packtool.planning.steps import Assignment, StepPlan, assign_balanced
from packtool.planning.summary import BalanceFigures, PlanSummary, SkrullFigures, pack_costs, padded_fill, summarize
from packtool.planning.towers import TowerWork
from packtool.planning.tree_parts import TreeParts

_WINDOW_STEPS = 50


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """Packs, steps and figures of an epoch.

    Args:
        packs: that ``steps`` assigns; ``packs.samples`` are positions in the cache. With Skrull each is one sample.
        steps: which is trained when and where.
        summary: figures.
        lasting: the same for any number of ranks: ``packs``; with Skrull, the packs whose samples ``packs`` has one by
            one, in the same order, which say who shares a step; with ``samples_per_step``, the samples one by one in
            the order in which steps take them.
        places: with Skrull, int64 (K,), by position in ``steps.order``, see ``Assignment``.
    """

    packs: PackPlan
    steps: StepPlan
    summary: PlanSummary
    lasting: PackPlan
    places: Int64Array | None = None

    @property
    def lasting_fingerprint(self) -> str:
        """sha256 in hex over what stays the same however many ranks there are."""
        return (self.lasting if self.places is None else self.packs).fingerprint

    @property
    def whole_packs(self) -> PackPlan:
        """The packs as they were packed: also where Skrull assigns them one sample at a time."""
        return self.packs if self.places is None else self.lasting

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
        if self.places is not None:
            # A step has whole packs, so those that any sample left comes from are left whole.
            left = np.unique(np.searchsorted(self.lasting.offsets, left, side="right") - 1)
        return select_packs(self.whole_packs, left)

    def samples_of(self, first: int, stop: int) -> Int64Array:
        """Cache positions of all samples of the steps from ``first`` up to but not ``stop``, over all ranks."""
        steps = self.steps
        start, end = steps.cell_offsets[steps.step_offsets[[first, stop]]]
        return select_packs(self.packs, steps.order[start:end]).samples

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
        packs = select_packs(packs, order)
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
    by_sample = options.samples_per_step is not None or options.skrull is not None
    units = split_into_samples(packs) if by_sample else packs

    def pack_cost(packs: PackPlan) -> Costs:
        assert options.cost is not None
        return pack_costs(packs, options.cost, target_tokens, towers)

    costs = None if options.cost is None else pack_cost(units)
    parts = TreeParts.of(packs, trees)
    trained, assignment = _assign(packs, units, costs, options, media_tokens, parts)
    steps = StepPlan.of(trained, target_tokens, assignment, options.world_size)
    places, fill, balance, skrull = assignment.places, _fill(trained, steps, options), None, None
    if costs is not None:
        after = imbalance(steps.rank_costs(costs if trained is units else pack_cost(trained)))
        before = after
        if options.samples_per_step is not None:
            before = imbalance(costs_in_turn(costs, options.samples_per_step, options.world_size))
        elif options.skrull is not None or (options.balance != "none" and options.dynamic_batch_tokens is None):
            costs_of_packs = costs if packs is units else pack_cost(packs)
            before = _imbalance_in_turn(packs, costs_of_packs, target_tokens, options, parts)
        balance = BalanceFigures(before, after, float(costs.sum()))
    if places is not None and options.skrull is not None and costs is not None:
        work = None if towers is None else towers.of(units.samples)
        skrull = SkrullFigures.of(units, steps, places, options.skrull, costs, work)
        fill = packs.num_tokens / max(skrull.num_tokens, 1)
    whole, num_cached = trained if places is None else packs, len(target_tokens)
    summary = summarize(whole, steps, options, num_cached=num_cached, fill=fill, balance=balance, skrull=skrull)
    lasting = units if options.samples_per_step is not None else packs
    return EpochPlan(trained, steps, summary, lasting, places)


def _imbalance_in_turn(
    packs: PackPlan,
    costs: Costs,
    target_tokens: npt.NDArray[np.integer[Any]],
    options: PlanOptions,
    parts: TreeParts | None,
) -> Costs:
    """Slowest over mean work of every step, (S,), if packs were assigned to ranks in turn."""
    in_turn = assign_balanced(packs, None, replace(options, balance="none"), parts)
    return imbalance(StepPlan.of(packs, target_tokens, in_turn, options.world_size).rank_costs(costs))


def _assign(
    packs: PackPlan,
    units: PackPlan,
    costs: Costs | None,
    options: PlanOptions,
    media_tokens: npt.NDArray[np.integer[Any]] | None,
    parts: TreeParts | None,
) -> tuple[PackPlan, Assignment]:
    """The packs that are trained, and their assignment by the assigner that the options name.

    Args:
        units: what is assigned: the packs, or their samples one by one.
    """
    if options.samples_per_step is not None:
        return _joined(units, assign_samples(units, costs, options, media_tokens))
    if options.skrull is not None:
        assert costs is not None, "Skrull needs to know what samples cost"
        return units, assign_skrull(packs, costs, options)
    if options.dynamic_batch_tokens is None:
        return units, assign_balanced(units, costs, options, parts)
    return units, rearrange(
        units.tokens_per_pack(),
        samples_per_step=options.packs_per_step,
        num_ranks=options.world_size,
        max_tokens=options.dynamic_batch_tokens,
        max_samples=options.dynamic_max_batch_size,
    )


def _joined(units: PackPlan, assignment: Assignment) -> tuple[PackPlan, Assignment]:
    """The samples of each micro-batch as one pack, and these packs in their micro-batches."""
    is_used = assignment.cell_sizes > 0
    packs = build_plan(assignment.order, assignment.cell_sizes[is_used], units.lengths, units.capacity)
    packs = replace(packs, samples=units.samples[assignment.order])
    order = np.arange(packs.num_packs, dtype=np.int64)
    return packs, Assignment(order, is_used.astype(np.int64), assignment.cells_per_step)


def reordered(packs: PackPlan, *, seed: int, epoch: int) -> PackPlan:
    """The same packs in another order, as a saved plan is trained in its later epochs; epoch 0 leaves it."""
    if epoch == 0:
        return packs
    order = seeded_order(packs.num_packs, seed=seed, epoch=epoch, stream=RandomStream.SAVED_ORDER)
    return select_packs(packs, order)


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
    if options.packing or options.samples_per_step is not None:
        return packs.fill
    # Dynamic batches run without padding.
    return 1.0 if options.dynamic_batch_tokens is not None else padded_fill(packs, steps)
