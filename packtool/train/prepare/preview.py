"""A whole schedule looked at before it is paid for: what ``packtool plan`` finds out. No torch, no weights."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool import storage
from packtool.cache.local import LocalCopies
from packtool.cache.plan_file import PlanInfo, SavedPlan, write_plan
from packtool.cache.reader import CacheReader
from packtool.config.plan import PlanConfig
from packtool.encode.model_files import ModelFiles
from packtool.plan.cost import MODEL_PRESETS
from packtool.plan.epoch import EpochPlan, plan_epoch, plan_mixture
from packtool.plan.mixture import Mixture, by_name, counts_of_steps, share_figures
from packtool.plan.options import PlanOptions
from packtool.plan.pack_plan import Int64Array
from packtool.plan.summary import BatchGrowth, PlanSummary, own_steps_line, padded_fill
from packtool.plan.towers import TowerWork
from packtool.plan.tree_parts import TreeParts
from packtool.simulate.run import read_hardware, read_lengths
from packtool.train.prepare.costs import tower_work, with_model
from packtool.train.prepare.mixtures import mixture_in, named_sources
from packtool.train.prepare.planner import plan_options
from packtool.train.prepare.shared_prefixes import SharedPrefixes, shared_in_packs
from packtool.train.prepare.staged import staged_schedule
from packtool.train.prepare.staged_schedule import StagedSchedule
from packtool.train.prepare.targets import planned_targets


@dataclass(frozen=True)
class PlainBatches:
    """What packing is compared with: rows in batches, each padded to the longest of its batch.

    Args:
        rows: of a batch: about as many as packs in its place hold samples.
        steps: optimizer steps of an epoch.
        tokens: that the model computes, padding included.
        padding: share of them that is padding.
    """

    rows: int
    steps: int
    tokens: int
    padding: float


@dataclass(frozen=True, eq=False)
class Preview:
    """A plan and everything around it.

    Args:
        plan: of the first epoch.
        options: that it was made with.
        seconds: that planning took.
        lengths, target_tokens: of all samples.
        towers: what their media cost, or what each adds to the prefix that it shares.
        shared: the prefixes that are computed once; None where all samples are computed whole.
        unshared: why nothing is shared that could be, or None.
        whole: figures of the plan that shares nothing; ``plan``'s own where it shares nothing.
        reader: of the caches, None for a file of lengths.
        cost_source: whose config.json told the costs.
        num_epochs: times that every sample is seen.
        sequence_parallel_size: processes that share each pack.
        plain: what the same samples would be without packing, in batches of as many rows as packs of whole ones hold.
        mixture: what an epoch takes of the caches; None for every sample once. Of a run with stages, the first stage.
        staged: the steps of all stages; ``plan`` is an epoch of the first. None without stages.
    """

    plan: EpochPlan
    options: PlanOptions
    seconds: float
    lengths: npt.NDArray[np.integer[Any]]
    target_tokens: npt.NDArray[np.integer[Any]]
    towers: TowerWork | None
    shared: SharedPrefixes | None
    unshared: str | None
    whole: PlanSummary
    reader: CacheReader | None
    cost_source: str
    num_epochs: float
    sequence_parallel_size: int
    plain: PlainBatches
    mixture: Mixture | None
    staged: StagedSchedule | None = None

    @property
    def first(self) -> EpochPlan:
        """The epoch that is trained first: of a run with stages, its part of the first one."""
        return self.plan if self.staged is None else self.staged.first

    def figures(self, tflops: float | None = None, mfu: float = 0.4) -> dict[str, Any]:
        """All figures by name, as JSON has them."""
        summary, packs = self.plan.summary, self.plan.whole_packs
        assert summary.balance is not None, "a preview knows costs"
        balance, batch = summary.balance, BatchGrowth.of(summary)
        over = summary.num_packs / summary.lower_bound - 1 if summary.lower_bound else 0.0
        found: dict[str, Any] = {
            "samples": summary.num_samples,
            "num_samples_in_caches": summary.num_cached,
            "num_distinct_samples": summary.num_distinct,
            "not_drawn": summary.num_not_drawn,
            "filtered": summary.num_filtered,
            "tokens": summary.num_tokens,
            "target_tokens": summary.num_target_tokens,
            "packs": summary.num_packs,
            "capacity": packs.capacity,
            "samples_per_pack": summary.samples_per_pack,
            "fill": summary.fill,
            "waste_tokens": summary.num_packs * packs.capacity - summary.num_tokens if _trains_packs(summary) else None,
            "lower_bound": summary.lower_bound,
            "over_lower_bound": over,
            "plan_seconds": round(self.seconds, 4),
            "steps_per_epoch": summary.num_steps,
            "steps_without_packing": summary.num_steps_without_packing,
            "samples_per_step": batch.num_samples,
            "target_tokens_per_step": batch.num_targets,
            "samples_per_step_without_packing": batch.num_plain,
            "target_tokens_per_step_without_packing": batch.num_plain_targets,
            "padding_of_plain_batches": self.plain.padding,
            "rows_of_plain_batches": self.plain.rows,
            "steps_of_plain_batches": self.plain.steps,
            "tokens_of_plain_batches": self.plain.tokens,
            "empty_micro_batches": summary.num_empty_micro_batches,
            "efficient_attn_ratio": summary.efficient_attn_ratio,
            "balance": {
                "mean_before": balance.mean_before,
                "worst_before": balance.worst_before,
                "mean": balance.mean,
                "worst": balance.worst,
            },
            "skrull": None if summary.skrull is None else summary.skrull.figures(summary.num_tokens),
            "shared_prefixes": self._shared_figures(),
            "sources": self.source_figures,
            "stages": None if self.staged is None else self.staged.figures(),
            "flops_per_epoch": balance.flops,
            "cost_model": self.cost_source,
            "plan_fingerprint": self.plan.fingerprint,
            "cache_fingerprint": self.reader.fingerprint if self.reader is not None else None,
        }
        if tflops is not None:
            # Ranks wait for the slowest of each step.
            mean = balance.mean if summary.skrull is None else summary.skrull.mean
            flops = balance.flops * mean * self.num_epochs if self.staged is None else self.staged.slowest_flops()
            slowest = flops / self.options.world_size / self.sequence_parallel_size
            found["hours"] = slowest / (tflops * 1e12 * mfu) / 3600
        return found

    @cached_property
    def counts_of_steps(self) -> Int64Array | None:
        """Samples, tokens and target tokens of each source in each step, int64 (T, S, 3); None without a mixture."""
        if self.mixture is None:
            return None
        return counts_of_steps(self.plan.packs, self.plan.steps, self.mixture)

    @property
    def source_figures(self) -> dict[str, dict[str, Any]] | None:
        """What the epoch has of each source, by name; None without a mixture."""
        if self.mixture is None or self.counts_of_steps is None:
            return None
        return share_figures(by_name(self.counts_of_steps.sum(axis=0), self.mixture))

    @property
    def batch_line(self) -> str | None:
        """A sentence about what packs make of the batch; None where it is no larger than without packing."""
        summary, options, batch = self.plan.summary, self.options, BatchGrowth.of(self.plan.summary)
        if options.samples_per_step is not None:
            return f"{summary.num_steps:,} steps, as without packing: {own_steps_line(summary, self.plan.steps)}"
        if not options.packing or not batch.is_large:
            return None
        factors = (options.per_device_train_batch_size, options.gradient_accumulation_steps, options.world_size)
        keeps = "--packing false" if options.skrull is not None else f"--samples-per-step {batch.num_plain}"
        both = batch.sentence(" x ".join(map(str, factors)), knows_targets=self.reader is not None)
        return f"{both}: {keeps} keeps that batch; {batch.advice()}"

    @cached_property
    def parts(self) -> TreeParts | None:
        """Those of trees that were cut; None without."""
        return TreeParts.of(self.plan.packs, None if self.shared is None else self.shared.trees)

    @property
    def shared_line(self) -> str | None:
        """A sentence about prefixes that are shared, or that could be; None if there are none."""
        if self.shared is None:
            return self.unshared
        assert self.options.cost is not None, "a preview knows costs"
        return self.shared.line(self.options.cost, self.plan.summary.num_steps, self.whole.num_steps)

    def _shared_figures(self) -> dict[str, Any] | None:
        """What shared prefixes save; None if there are none."""
        if self.shared is None:
            return None
        assert self.options.cost is not None, "a preview knows costs"
        sizes = np.diff(self.shared.trees.offsets)
        sizes = sizes[sizes > 1]
        return {
            "num_trees": len(sizes),
            "samples_per_tree": float(sizes.mean()),
            "largest_tree": int(sizes.max()),
            **({} if self.parts is None else self.parts.figures(self.plan.steps.places()[:, 0])),
            "tokens_without": self.shared.num_whole_tokens,
            "tokens_saved": self.shared.trees.num_shared_tokens,
            "token_share_saved": self.shared.saved,
            "tower_work_share_saved": self.shared.tower_work_saved(self.options.cost),
            "packs_without": self.whole.num_packs,
            "steps_without": self.whole.num_steps,
        }


def preview(config: PlanConfig, packing_length: int | None = None) -> Preview:
    """Plan the first epoch.

    Args:
        packing_length: instead of ``config.packing_length``, for a sweep.

    Raises:
        ConfigError, DataError, MismatchError: as for training.
    """
    directories, recipe = named_sources(config)
    reader = CacheReader.open(directories, copies=LocalCopies.of(config)) if directories else None
    lengths: npt.NDArray[np.integer[Any]]
    targets: npt.NDArray[np.integer[Any]]
    if reader is not None:
        lengths, targets = reader.index.length, planned_targets(reader, recipe, config.model)
        media: npt.NDArray[np.integer[Any]] | None = reader.index.media_tokens
        longest = max(manifest.max_length for manifest in reader.manifests)
    else:
        lengths = read_lengths(str(config.lengths))
        targets, media = lengths, None
        longest = packing_length or config.packing_length or int(lengths.max(initial=1))
    model_config, cost_source = _model(config, reader)
    options = _options(config, packing_length, longest, model_config)
    assert options.cost is not None
    towers = tower_work(options.cost, reader.index) if reader is not None else None
    # mypy knows no calls that give an argument of a partial anew.
    plan_with: Any = partial(plan_epoch, lengths, targets, options, seed=config.seed, media_tokens=media, towers=towers)
    mixture: Mixture | None = None
    begin = time.perf_counter()
    shared, unshared = shared_in_packs(config, options, model_config, reader) if reader is not None else (None, None)
    staged = staged_schedule(config, options, reader, targets, towers, recipe)
    if shared is not None:
        towers = shared.towers(options.cost, targets)
        plan = plan_with(media_tokens=shared.media_tokens, towers=towers, trees=shared.trees)
    elif staged is not None:
        plan, mixture, options = staged.parts[0].epoch_of_its_own
    else:
        mixture = mixture_in(recipe, reader, targets, max_length=options.max_length, seed=config.seed)
        mixed: Any = partial(plan_mixture, options=options, seed=config.seed, media_tokens=media, towers=towers)
        plan = plan_with() if mixture is None else mixed(mixture)
    seconds = time.perf_counter() - begin
    whole = plan.summary if shared is None else plan_with().summary
    return Preview(
        plan=plan,
        options=options,
        seconds=seconds,
        lengths=lengths,
        target_tokens=targets,
        towers=towers,
        shared=shared,
        unshared=unshared,
        whole=whole,
        reader=reader,
        cost_source=cost_source,
        num_epochs=config.max_steps / plan.steps.num_steps if config.max_steps else config.num_train_epochs,
        sequence_parallel_size=staged.parts[0].sequence_parallel_size if staged else config.sequence_parallel_ranks,
        plain=_plain_batches(whole, options, lengths, targets, config.seed, mixture),
        mixture=mixture,
        staged=staged,
    )


def _options(config: PlanConfig, packing_length: int | None, longest: int, model: Mapping[str, Any]) -> PlanOptions:
    """What decides the plan.

    Args:
        packing_length: of a sweep.
        longest: samples that there may be.
        model: its ``config.json``.
    """
    room = packing_length or config.packing_length
    max_length = min(config.max_length or longest, room or longest)
    if packing_length is None and config.max_length is not None:
        max_length = config.max_length  # as training has it: what is there and longer than a pack is told
    options = plan_options(
        config, max_length=max_length, world_size=config.world_size // config.sequence_parallel_ranks
    )
    options = with_model(options, model, config, read_hardware(config.hardware), config.sequence_parallel_type)
    return dataclasses.replace(options, packing_length=room or max_length)


def _plain_batches(
    whole: PlanSummary,
    options: PlanOptions,
    lengths: npt.NDArray[np.integer[Any]],
    targets: npt.NDArray[np.integer[Any]],
    seed: int,
    mixture: Mixture | None,
) -> PlainBatches:
    rows = dataclasses.replace(options, packing=False, cost=None, balance="none", packing_algorithm="best_fit")
    # As many rows a batch as packs hold samples: what else fits into the same memory, more or less.
    each = max(round(whole.samples_per_pack), 1) * options.per_device_train_batch_size
    rows = dataclasses.replace(
        rows,
        max_samples_per_pack=None,
        max_media_tokens_per_pack=None,
        per_device_train_batch_size=each,
        group_by_length=False,
        dynamic_batch_tokens=None,
        dynamic_max_batch_size=None,
        samples_per_step=None,
        skrull=None,
    )
    if mixture is None:
        padded = plan_epoch(lengths, targets, rows, seed=seed)
    else:
        padded = plan_mixture(mixture, rows, seed=seed)
    fill = padded_fill(padded.packs, padded.steps)
    return PlainBatches(each, padded.summary.num_steps, round(padded.packs.num_tokens / fill), 1 - fill)


def save_plan(found: Preview, config: PlanConfig) -> None:
    """Write the packs for ``packtool train --plan``, and the steps of the first epoch for whoever looks at them.

    Raises:
        StorageError: if the file cannot be written.
    """
    assert config.save is not None, "asked for"
    assert found.reader is not None, "checked with the settings"
    # A file keeps packs, and not what else epochs of a mixture would draw.
    packs, trained = dataclasses.replace(found.plan.whole_packs, mixture=""), found.plan.packs
    info = PlanInfo(
        capacity=packs.capacity,
        max_length=found.options.max_length,
        seed=config.seed,
        cache=found.reader.fingerprint,
        plan=packs.fingerprint,
        num_cached=len(found.reader),
        parts="" if found.parts is None else found.parts.wanted,
    )
    # Skrull trains a pack's samples one by one, in the packs' order.
    places = np.repeat(found.plan.steps.places(), np.diff(trained.offsets), axis=0)
    write_plan(config.save, SavedPlan(info, packs.samples, packs.offsets, packs.lengths, packs.shared, places))


def _trains_packs(summary: PlanSummary) -> bool:
    """Whether packs are trained as they are, with what is free in them."""
    return summary.packing and summary.skrull is None


def _model(config: PlanConfig, reader: CacheReader | None) -> tuple[Mapping[str, Any], str]:
    """The ``config.json`` that tells what packs cost, and whose it is."""
    model = config.model
    if model is None and reader is not None:
        model = str(reader.manifests[0].identity.spec["model"])
        if not storage.exists(storage.join(model, "config.json")):
            model = None
    if model is None:
        return MODEL_PRESETS["8b"], "a dense model of 8 billion weights (--model names another)"
    return ModelFiles.load(model).config, model
