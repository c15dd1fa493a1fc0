"""Plan of an epoch, from the lengths of a cache to its steps: the entry point of training."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from packtool.errors import DataError
from packtool.planning.dynamic import assign_by_tokens, assign_samples
from packtool.planning.mixture import Mixture
from packtool.planning.mixture_packing import order_mixture_packs, pack_mixture
from packtool.planning.options import PlanOptions
from packtool.planning.pack_plan import (
    Costs,
    Int64Array,
    IntArray,
    PackPlan,
    digest_arrays,
    select_packs,
    split_into_samples,
    split_to_count,
    to_offsets,
)
from packtool.planning.packing import pack, pack_singletons, pack_trees, share_drawn_prefixes, share_prefixes_in_steps
from packtool.planning.prefix_trees import DrawnPrefixes, PrefixTrees
from packtool.planning.shuffle import RandomStream, seeded_order
from packtool.planning.skrull import assign_skrull
from packtool.planning.steps import StepAssignment, StepPlan, assign_balanced, imbalance
from packtool.planning.summary import BalanceFigures, PlanSummary, SkrullFigures, pack_costs, padded_fill, summarize
from packtool.planning.towers import TowerWork
from packtool.planning.tree_parts import TreeParts

_WINDOW_STEPS = 50


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """Packs, steps and figures of an epoch.

    Args:
        packs: assigned by ``steps``; ``packs.samples`` are positions in the cache. With Skrull each is one sample.
        rank_independent_packs: packs that are the same for any number of ranks: ``packs``; with Skrull, the packs whose
            samples share a step; with ``samples_per_step``, the samples one by one in the order of the steps.
        placement: as in ``StepAssignment``; None without Skrull.
    """

    packs: PackPlan
    steps: StepPlan
    summary: PlanSummary
    rank_independent_packs: PackPlan
    placement: Int64Array | None = None

    @property
    def packs_fingerprint(self) -> str:
        """sha256 in hex over packs, or over Skrull's samples; the same for any number of ranks."""
        return (self.rank_independent_packs if self.placement is None else self.packs).fingerprint

    @property
    def full_packs(self) -> PackPlan:
        """Packs before Skrull divides them into samples."""
        return self.packs if self.placement is None else self.rank_independent_packs

    @cached_property
    def fingerprint(self) -> str:
        """sha256 in hex over packs, steps and placement: ranks with equal fingerprints train the same epoch."""
        digest = hashlib.sha256(f"{self.packs.fingerprint} {self.steps.fingerprint}".encode())
        if self.placement is None:
            return digest.hexdigest()
        return digest_arrays(digest, self.placement, self.rank_independent_packs.offsets)

    def placement_of(self, step: int, rank: int, micro_batch: int) -> Int64Array | None:
        """Return the placement (n,) of a micro-batch's samples, in the order of ``samples``; None without Skrull."""
        return None if self.placement is None else self.placement[self.steps.micro_batch_slice(step, rank, micro_batch)]

    def packs_from(self, step: int, *, keeps_steps: bool = False) -> PackPlan:
        """Return the ``full_packs`` trained from a step on, in the packer's order; ``keeps_steps``: that of steps."""
        steps = self.steps
        remaining = steps.order[steps.micro_batch_offsets[steps.step_offsets[step]] :]
        if self.placement is not None:
            # A step has whole packs, so the packs of the samples left are left whole.
            remaining = np.unique(np.searchsorted(self.rank_independent_packs.offsets, remaining, side="right") - 1)
        if not keeps_steps or self.placement is not None:
            return select_packs(self.full_packs, np.sort(remaining))
        packs_per_step = np.diff(steps.micro_batch_offsets[steps.step_offsets[step:]])
        step_of_pack = np.repeat(np.arange(len(packs_per_step)), packs_per_step)
        return select_packs(self.full_packs, remaining[np.lexsort((remaining, step_of_pack))])

    def samples_of(self, first: int, stop: int) -> Int64Array:
        """Return the cache positions (n,) of all samples of the steps from ``first`` to ``stop`` - 1."""
        steps = self.steps
        start, end = steps.micro_batch_offsets[steps.step_offsets[[first, stop]]]
        return select_packs(self.packs, steps.order[start:end]).samples

    def samples(self, step: int, rank: int, micro_batch: int) -> tuple[Int64Array, ...]:
        """Return the cache positions (n,) of the samples of each pack of a micro-batch."""
        return tuple(self.packs.pack(int(pack)) for pack in self.steps.packs(step, rank, micro_batch))


def plan_epoch(
    lengths: IntArray,
    target_tokens: IntArray,
    options: PlanOptions,
    *,
    seed: int,
    epoch: int = 0,
    media_tokens: IntArray | None = None,
    towers: TowerWork | None = None,
    trees: PrefixTrees | None = None,
    samples: Int64Array | None = None,
) -> EpochPlan:
    """Leave out samples that are too long, pack the others, and assign the packs to steps and ranks.

    Every epoch has as many packs as the first, but with other samples together and in another order.

    Args:
        lengths: tokens of each sample of the cache, (N,).
        target_tokens: how many of these are labels that carry loss, (N,).
        epoch: 0-based.
        media_tokens: of each sample, (N,).
        towers: work of the towers for images and sounds of each sample.
        trees: groups of samples with shared prefixes; each group is in one pack. ``media_tokens`` and ``towers`` are
            then what each sample adds to its group.
        samples: those to plan, int64 (M,), ascending, repeated ones several times; ``trees`` must have exactly these.
            None for all samples.
    """
    assert len(lengths) == len(target_tokens)
    packs = pack_epoch(
        lengths, options, seed=seed, epoch=epoch, media_tokens=media_tokens, trees=trees, samples=samples
    )
    return assign_packs(packs, target_tokens, options, media_tokens=media_tokens, towers=towers, trees=trees)


def pack_epoch(
    lengths: IntArray,
    options: PlanOptions,
    *,
    seed: int,
    epoch: int = 0,
    media_tokens: IntArray | None = None,
    trees: PrefixTrees | None = None,
    samples: Int64Array | None = None,
    prefixes: DrawnPrefixes | None = None,
) -> PackPlan:
    """Leave out samples that are too long, and pack the others; without packing, each is a pack of its own.

    A sample that is left out is in no pack. No sample left is a DataError. Most arguments are as for ``plan_epoch``.

    Args:
        trees: groups of samples that are packed as one; chosen before packing.
        prefixes: in place of ``trees``: prefixes of all samples. Those that samples of one pack have in common (or
            samples of one step, with ``samples_per_step``) are then computed once.
    """
    kept = _kept_samples(lengths, options.max_length, samples)  # called with trees, too: it may raise a DataError
    if trees is not None:
        assert options.packing, "trees are packed"
        capacity = options.packing_length
        return pack_trees(trees, lengths, capacity, options, seed=seed, epoch=epoch, media_tokens=media_tokens)

    kept_media = None if media_tokens is None else media_tokens[kept]
    packs = _pack_samples(lengths[kept], kept_media, options, seed, epoch)
    packs = replace(packs, samples=kept[packs.samples])  # from indices into ``kept`` to positions in the cache
    if not options.packing and options.group_by_length:
        packs = group_by_length(packs, options.packs_per_step)
    if prefixes is None:
        return packs
    if options.samples_per_step is not None:
        return share_prefixes_in_steps(packs, prefixes, options.samples_per_step)
    return share_drawn_prefixes(packs, prefixes, options, seed=seed, epoch=epoch)


def _kept_samples(lengths: IntArray, max_length: int, samples: Int64Array | None) -> Int64Array:
    """Return those of ``samples``, or of all, with at most ``max_length`` tokens, int64 (n,); none is a DataError."""
    fits = lengths <= max_length
    kept = np.flatnonzero(fits).astype(np.int64) if samples is None else samples[fits[samples]]
    if len(kept) > 0:
        return kept
    if len(lengths) == 0:
        problem = "No sample is left to train on: the cache is empty."
    else:
        problem = (
            f"No sample is left to train on: the cache holds {len(lengths):,}, "
            f"and all are longer than {max_length:,} tokens (--max-length, or --packing-length)."
        )
    raise DataError(problem, "Raise the limit, or export other rows.")


def plan_mixture(
    mixture: Mixture,
    options: PlanOptions,
    *,
    seed: int,
    epoch: int = 0,
    media_tokens: IntArray | None = None,
    towers: TowerWork | None = None,
) -> EpochPlan:
    """Plan an epoch of a mixture; ``media_tokens`` and ``towers``, (N,), are of all samples of the caches."""
    packs = pack_drawn(mixture, options, seed=seed, epoch=epoch)
    plan = assign_packs(packs, mixture.target_tokens, options, media_tokens=media_tokens, towers=towers)
    return replace(plan, summary=replace(plan.summary, num_filtered=mixture.num_filtered))


def pack_drawn(
    mixture: Mixture,
    options: PlanOptions,
    *,
    seed: int,
    epoch: int = 0,
    prefixes: DrawnPrefixes | None = None,
    min_packs: int = 0,
) -> PackPlan:
    """Pack the samples that an epoch of a mixture draws, and order the packs so that each source is spread evenly.

    Without shuffling, and with the algorithm ``sequential``, sources are not spread. Every epoch has as many packs as
    the first.

    Args:
        prefixes: prefixes of all samples. Those that samples of one pack have in common (or samples of one step, with
            ``samples_per_step``) are computed once. The number of packs then depends on the epoch.
        min_packs: with ``prefixes``, split packs until there are as many, or until each has one sample.
    """
    keeps_order = options.packing and options.packing_algorithm == "sequential"
    spreads_sources = options.shuffle and not keeps_order
    packs = _pack_drawn_samples(mixture, options, seed, epoch, spreads_sources=spreads_sources)
    if prefixes is not None and options.samples_per_step is None:
        packs = share_drawn_prefixes(packs, prefixes, options, seed=seed, epoch=epoch)
        min_packs = min(min_packs, packs.num_samples)
        packs = split_to_count(packs, max(packs.num_packs, min_packs))

    if spreads_sources:
        sources = mixture.source_of(packs.samples)
        amounts = mixture.amounts(packs.samples)
        pack_order = order_mixture_packs(packs, sources, amounts, seed=seed, epoch=epoch)
        packs = select_packs(packs, pack_order)
    if not options.packing and options.group_by_length:
        packs = group_by_length(packs, options.packs_per_step)
    if prefixes is not None and options.samples_per_step is not None:
        packs = share_prefixes_in_steps(packs, prefixes, options.samples_per_step)
    return packs


def _pack_drawn_samples(
    mixture: Mixture, options: PlanOptions, seed: int, epoch: int, *, spreads_sources: bool
) -> PackPlan:
    """Pack a mixture's slots, and fill each with the sample that the epoch draws for it.

    A slot is as long as the longest sample that may fill it, so all epochs have equally many packs.
    """
    slots = mixture.slots
    sample_of_slot = mixture.draw(epoch)
    if spreads_sources and options.packs_before_steps and not mixture.draws_one_source:
        packed_slots, exchange = pack_mixture(slots, options, seed=seed, epoch=epoch)
        sample_of_slot = sample_of_slot[exchange]
    else:
        packed_slots = _pack_samples(slots.lengths, slots.media_tokens, options, seed, epoch)
    samples = sample_of_slot[packed_slots.samples]
    lengths = mixture.lengths[samples].astype(np.int32, copy=False)
    return PackPlan(samples, packed_slots.offsets, lengths, packed_slots.capacity, mixture=mixture.fingerprint)


def assign_packs(
    packs: PackPlan,
    target_tokens: IntArray,
    options: PlanOptions,
    *,
    media_tokens: IntArray | None = None,
    towers: TowerWork | None = None,
    trees: PrefixTrees | None = None,
    keeps_steps: bool = False,
    num_packs: int | None = None,
) -> EpochPlan:
    """Assign existing packs to steps and ranks, and compute the figures of the plan.

    With ``samples_per_step``, steps take the samples in the order of ``packs``, and pack them anew. With Skrull, each
    sample of a step is computed by one device or shared by several.

    Args:
        target_tokens: labels that carry loss, by cache position, (N,).
        trees: groups of samples with shared prefixes; packs of one tree are moved into one step, or apart,
            if their placement requires it; not with ``samples_per_step`` or Skrull.
        keeps_steps: do not move packs to other steps because of ``trees``.
        num_packs: plan no more steps than for this many packs.
    """
    tree_parts = None if keeps_steps else TreeParts.of(packs, trees)
    if options.samples_per_step is not None:
        return _assign_samples_per_step(packs, target_tokens, options, media_tokens, towers)
    if options.skrull is not None:
        return _assign_by_skrull(packs, target_tokens, options, towers, tree_parts)

    costs = None if options.cost is None else pack_costs(packs, options.cost, target_tokens, towers)
    assignment = _assign_given_packs(packs, costs, options, tree_parts, num_packs)
    steps = StepPlan.of(packs, target_tokens, assignment, options.world_size)
    balance = None
    if costs is not None:
        planned = imbalance(steps.rank_costs(costs))
        unbalanced = planned
        if options.balance != "none" and options.dynamic_batch_tokens is None:
            unbalanced = _round_robin_imbalance(packs, target_tokens, costs, options, tree_parts)
        balance = BalanceFigures(steps_before=unbalanced, steps=planned, flops=float(costs.sum()))
    fill = _fill_of(packs, steps, options)
    summary = summarize(packs, steps, options, num_cached=len(target_tokens), fill=fill, balance=balance)
    return EpochPlan(packs, steps, summary, rank_independent_packs=packs)


def _assign_samples_per_step(
    packs: PackPlan,
    target_tokens: IntArray,
    options: PlanOptions,
    media_tokens: IntArray | None,
    towers: TowerWork | None,
) -> EpochPlan:
    """Give each step the next ``samples_per_step`` samples of ``packs``, and make one new pack of each micro-batch.

    The new packs depend on the number of ranks; the samples of each step do not. Arguments as for ``assign_packs``.
    """
    assert options.samples_per_step is not None
    samples = split_into_samples(packs)  # packs of one sample each
    sample_costs = None if options.cost is None else pack_costs(samples, options.cost, target_tokens, towers)
    assignment_of_samples = assign_samples(samples, sample_costs, options, media_tokens)
    new_packs, assignment = _join_micro_batches(samples, assignment_of_samples)
    steps = StepPlan.of(new_packs, target_tokens, assignment, options.world_size)

    balance = None
    if options.cost is not None and sample_costs is not None:
        new_pack_costs = pack_costs(new_packs, options.cost, target_tokens, towers)
        round_robin_costs = _round_robin_rank_costs(sample_costs, options.samples_per_step, options.world_size)
        balance = BalanceFigures(
            steps_before=imbalance(round_robin_costs),
            steps=imbalance(steps.rank_costs(new_pack_costs)),
            flops=float(sample_costs.sum()),
        )
    summary = summarize(new_packs, steps, options, num_cached=len(target_tokens), fill=new_packs.fill, balance=balance)
    return EpochPlan(new_packs, steps, summary, rank_independent_packs=samples)


def _assign_by_skrull(
    packs: PackPlan,
    target_tokens: IntArray,
    options: PlanOptions,
    towers: TowerWork | None,
    tree_parts: TreeParts | None,
) -> EpochPlan:
    """Give each step the samples of its ``packs``, and let Skrull place each sample.

    Skrull lets one device compute a sample, or shards it over several devices. Arguments as for ``assign_packs``;
    ``tree_parts`` only affect the figures of balance.
    """
    assert options.skrull is not None
    assert options.cost is not None, "Skrull needs the costs of samples"
    samples = split_into_samples(packs)  # packs of one sample each
    sample_costs = pack_costs(samples, options.cost, target_tokens, towers)
    assignment = assign_skrull(packs, sample_costs, options)
    placement = assignment.placement
    assert placement is not None
    steps = StepPlan.of(samples, target_tokens, assignment, options.world_size)

    full_pack_costs = pack_costs(packs, options.cost, target_tokens, towers)
    balance = BalanceFigures(
        steps_before=_round_robin_imbalance(packs, target_tokens, full_pack_costs, options, tree_parts),
        steps=imbalance(steps.rank_costs(sample_costs)),
        flops=float(sample_costs.sum()),
    )
    skrull = SkrullFigures.of(samples, steps, placement, options.skrull, sample_costs, towers)
    fill = packs.num_tokens / skrull.num_padded_tokens
    summary = summarize(packs, steps, options, num_cached=len(target_tokens), fill=fill, balance=balance, skrull=skrull)
    return EpochPlan(samples, steps, summary, rank_independent_packs=packs, placement=placement)


def _fill_of(packs: PackPlan, steps: StepPlan, options: PlanOptions) -> float:
    """Return the share of tokens that are not padding in the trained packs, or in padded rows, 0 to 1."""
    if options.packing:
        return packs.fill
    if options.dynamic_batch_tokens is None:
        return padded_fill(packs, steps)
    return 1.0  # dynamic batches have no padding


def _round_robin_imbalance(
    packs: PackPlan, target_tokens: IntArray, costs: Costs, options: PlanOptions, tree_parts: TreeParts | None
) -> Costs:
    """Compute the imbalance of each step, (S,), if packs of these ``costs``, (K,), were assigned to ranks in turn."""
    assignment = assign_balanced(packs, None, replace(options, balance="none"), tree_parts)
    steps = StepPlan.of(packs, target_tokens, assignment, options.world_size)
    return imbalance(steps.rank_costs(costs))


def _assign_given_packs(
    packs: PackPlan,
    costs: Costs | None,
    options: PlanOptions,
    tree_parts: TreeParts | None,
    num_packs: int | None,
) -> StepAssignment:
    """Assign packs, or padded rows as packs of one sample, to steps and ranks; arguments as for ``assign_balanced``."""
    if options.dynamic_batch_tokens is None:
        return assign_balanced(packs, costs, options, tree_parts, num_packs)
    return assign_by_tokens(
        packs.tokens_per_pack(),
        samples_per_step=options.packs_per_step,  # rows: a pack has one sample
        num_ranks=options.world_size,
        max_tokens=options.dynamic_batch_tokens,
        max_samples=options.dynamic_max_batch_size,
    )


def _join_micro_batches(samples: PackPlan, assignment: StepAssignment) -> tuple[PackPlan, StepAssignment]:
    """Make one pack of the samples of each nonempty micro-batch; return the packs and their assignment."""
    has_pack = assignment.micro_batch_sizes > 0
    offsets = to_offsets(assignment.micro_batch_sizes[has_pack])
    order = assignment.order
    shared = None if samples.shared_tokens is None else samples.shared_tokens[order]
    joined = PackPlan(samples.samples[order], offsets, samples.lengths[order], samples.capacity, shared)
    pack_order = np.arange(joined.num_packs, dtype=np.int64)
    return joined, StepAssignment(pack_order, has_pack.astype(np.int64), assignment.micro_batches_per_step)


def _round_robin_rank_costs(costs: Costs, samples_per_step: int, num_ranks: int) -> Costs:
    """Sum the work of ranks, (steps, ranks), if the samples (N,) of each step went to the ranks in turn."""
    step, index_in_step = np.divmod(np.arange(len(costs)), samples_per_step)
    rank_costs = np.zeros((-(-len(costs) // samples_per_step), num_ranks))
    np.add.at(rank_costs, (step, index_in_step % num_ranks), costs)
    return rank_costs


def reorder_saved_packs(packs: PackPlan, *, seed: int, epoch: int) -> PackPlan:
    """Order the packs of a saved plan for an epoch; epoch 0 keeps the order."""
    if epoch == 0:
        return packs
    return select_packs(packs, seeded_order(packs.num_packs, seed=seed, epoch=epoch, stream=RandomStream.SAVED_ORDER))


def _pack_samples(
    lengths: IntArray, media_tokens: IntArray | None, options: PlanOptions, seed: int, epoch: int
) -> PackPlan:
    if options.packs_before_steps:
        return pack(lengths, options.packing_length, options, seed=seed, epoch=epoch, media_tokens=media_tokens)
    return pack_singletons(lengths, options.packing_length, seed=seed, epoch=epoch, shuffle=options.shuffle)


def group_by_length(rows: PackPlan, rows_per_step: int) -> PackPlan:
    """Order N rows, packs of one sample each, so that batches have rows of about one length, and less padding.

    Windows of 50 steps are sorted by length, and their steps brought back into the order of their first rows.
    """
    order, window_size = np.arange(rows.num_samples), _WINDOW_STEPS * rows_per_step
    for start in range(0, len(order), window_size):
        window = order[start : start + window_size]
        longest_first = window[np.argsort(-rows.lengths[window], kind="stable")]
        num_steps = len(window) // rows_per_step
        steps = longest_first[: num_steps * rows_per_step].reshape(num_steps, rows_per_step)
        remaining = longest_first[steps.size :]
        if num_steps:
            steps = steps[np.argsort(steps.min(axis=1), kind="stable")]
        order[start : start + len(window)] = np.concatenate((steps.reshape(-1), remaining))
    return replace(rows, samples=rows.samples[order], lengths=rows.lengths[order])
