"""``packtool plan``: the schedule of a run and its figures; needs neither torch nor weights."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.cache.plan_file import SavedPlan, write_plan
from packtool.config.mixture import MixOptions
from packtool.config.plan import PlanConfig
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError
from packtool.launch.world import World
from packtool.planning.epoch import EpochPlan, plan_epoch, plan_mixture
from packtool.planning.layers import count_language, has_formulas
from packtool.planning.mixture import by_name, counts_of_steps, share_figures
from packtool.planning.options import PlanOptions
from packtool.planning.pack_plan import Int64Array
from packtool.planning.summary import (
    MIN_GROWTH_FOR_ADVICE,
    PlanSummary,
    batch_sentence,
    fixed_batch_clause,
    learning_rate_advice,
    padded_fill,
)
from packtool.planning.tree_parts import TreeParts
from packtool.train.prepare.checkpoint import (
    NEWEST,
    Assignment,
    BatchShape,
    find_checkpoint,
    is_checkpoint,
    read_run_state,
    run_directory,
    steps_planned,
)
from packtool.train.prepare.costs import has_known_sizes
from packtool.train.prepare.history import Segment, read_history, train_config_of
from packtool.train.prepare.inputs import Inputs
from packtool.train.prepare.opening import open_to_plan
from packtool.train.prepare.run import Run
from packtool.train.prepare.timeline import Timeline

_MAX_PADDED_SAMPLES = 250_000
"""Samples of padded batches that are planned for comparison; of more, every n-th, because shuffling takes long."""


@dataclass(frozen=True, eq=False)
class Preview:
    """A schedule, planned in ``seconds``, and its figures; ``plan`` is of the first epoch, or of the first stage."""

    inputs: Inputs
    timeline: Timeline
    plan: EpochPlan
    seconds: float

    @property
    def first_inputs(self) -> Inputs:
        """The inputs of ``plan``; with stages, those of the first stage."""
        return self.timeline.stages[0].inputs

    @property
    def options(self) -> PlanOptions:
        return dataclasses.replace(self.first_inputs.options, world_size=self.plan.steps.world_size)

    @property
    def num_epochs(self) -> float:
        config = self.inputs.config
        return config.max_steps / self.plan.steps.num_steps if config.max_steps else config.num_train_epochs

    @property
    def cost_source(self) -> str:
        """The model whose ``config.json`` gives the costs."""
        if self.inputs.files is None:
            return "a dense model of 8 billion weights (--model names another)"
        name = self.inputs.config.model
        if name is None and self.inputs.reader is not None:
            name = self.inputs.reader.manifests[0].identity.spec["model"]
        if not has_known_sizes(self.inputs.files.config):
            return f"a dense model of 8 billion weights, because the config.json of {name} lacks sizes"
        if not (has_formulas(self.inputs.files.config) or count_language(self.inputs.files.config)):
            return f"{name}, by formulas for other models, because transformers cannot run a model of its type"
        return str(name)

    def figures(self, tflops: float | None = None, mfu: float = 0.4) -> dict[str, Any]:
        """Return all figures of the schedule by name, as ``packtool plan --json`` prints them.

        With ``tflops``, the peak TFLOP/s of a GPU, they include the estimated hours of the run. ``mfu`` is the fraction
        of the peak that training reaches (model FLOPs utilization).
        """
        summary = self.plan.summary
        assert summary.balance is not None, "a preview plans with costs"
        skrull_figures = None if summary.skrull is None else summary.skrull.figures(summary.num_tokens)
        cache_fingerprint = None if self.inputs.reader is None else self.inputs.reader.fingerprint
        figures: dict[str, Any] = {
            **self._sample_figures(),
            **self._pack_figures(),
            "plan_seconds": round(self.seconds, 4),
            **self._step_figures(),
            **self._padded_figures(),
            "num_empty_micro_batches": summary.num_empty_micro_batches,
            "efficient_attn_ratio": summary.efficient_attn_ratio,
            "balance": summary.balance.figures(),
            "skrull": skrull_figures,
            "shared_prefixes": self._shared_figures(),
            "sources": self.source_figures,
            "stages": self.timeline.figures() or None,
            "flops_per_epoch": summary.balance.flops,
            "cost_model": self.cost_source,
            "plan_fingerprint": self.plan.fingerprint,
            "cache_fingerprint": cache_fingerprint,
        }
        if tflops is not None:
            flops_per_second = tflops * 1e12 * mfu
            figures["hours"] = self._slowest_flops() / flops_per_second / 3600
        return figures

    def _sample_figures(self) -> dict[str, Any]:
        """Samples and tokens of the first epoch, and samples of the caches that it leaves out."""
        summary = self.plan.summary
        return {
            "num_samples": summary.num_samples,
            "num_samples_in_caches": summary.num_cached,
            "num_distinct_samples": summary.num_distinct,
            "not_drawn": summary.num_not_drawn,
            "filtered": summary.num_filtered,
            "tokens": summary.num_tokens,
            "target_tokens": summary.num_target_tokens,
        }

    def _pack_figures(self) -> dict[str, Any]:
        """Figures of the packs of the first epoch."""
        summary = self.plan.summary
        capacity = self.plan.full_packs.capacity
        waste_tokens = None  # known if packs are computed as planned
        if summary.options.packing and summary.skrull is None:
            waste_tokens = summary.num_packs * capacity - summary.num_tokens
        return {
            "num_packs": summary.num_packs,
            "packing_length": capacity,
            "samples_per_pack": summary.samples_per_pack,
            "fill": summary.fill,
            "waste_tokens": waste_tokens,
            "lower_bound": summary.lower_bound,
            "over_lower_bound": summary.num_packs / summary.lower_bound - 1 if summary.lower_bound else 0.0,
        }

    def _step_figures(self) -> dict[str, Any]:
        """Figures of the steps of the first epoch, with and without packing."""
        summary = self.plan.summary
        num_unpacked = summary.options.samples_per_unpacked_step  # samples of a step without packing
        return {
            "steps_per_epoch": summary.num_steps,
            "steps_without_packing": summary.num_steps_without_packing,
            "samples_per_step": summary.samples_per_step,
            "target_tokens_per_step": summary.samples_per_step * summary.targets_per_sample,
            "samples_per_step_without_packing": num_unpacked,
            "target_tokens_per_step_without_packing": num_unpacked * summary.targets_per_sample,
        }

    def _slowest_flops(self) -> float:
        """FLOPs of one process in the run if it were the slowest in every step, as all processes wait for that."""
        summary = self.plan.summary
        assert summary.balance is not None, "a preview plans with costs"
        if self.inputs.stages:
            flops = self.timeline.slowest_flops()
        else:
            slowest_over_mean = summary.balance.mean if summary.skrull is None else summary.skrull.mean_imbalance
            flops = summary.balance.flops * slowest_over_mean * self.num_epochs
        return flops / self.options.world_size / self.first_inputs.sequence_parallel_size

    @cached_property
    def summary_without_sharing(self) -> PlanSummary:
        """The summary of the first epoch if no prefix were shared."""
        if self.inputs.shared is None:
            return self.plan.summary
        return self.inputs.summary_without_sharing(self.timeline.stages[0].sections[0].batch_shape)

    def _padded_figures(self) -> dict[str, Any]:
        """Figures of plain training on the same samples: padded batches of about the memory of the packs."""
        num_samples, unshared = self.plan.summary.num_samples, self.summary_without_sharing
        samples_per_pack = max(round(unshared.samples_per_pack), 1)
        batch_size = samples_per_pack * self.options.per_device_train_batch_size
        plan = self._padded_plan(batch_size)
        samples_per_step = batch_size * self.options.gradient_accumulation_steps * self.options.world_size
        fill = padded_fill(plan.packs, plan.steps)  # fraction of tokens that are no padding
        num_computed_tokens = round(unshared.num_tokens / fill)
        return {
            "padding_of_plain_batches": 1 - fill,
            "rows_of_plain_batches": batch_size,
            "steps_of_plain_batches": math.ceil(num_samples / samples_per_step),
            "tokens_of_plain_batches": num_computed_tokens,
        }

    def _padded_plan(self, batch_size: int) -> EpochPlan:
        """Plan the first epoch without packing, to compare its padding with that of the packed plan.

        Each batch has ``batch_size`` samples, padded to the length of the longest one. Of very many samples, only every
        n-th one is planned: the fraction of padding stays about the same. An epoch of a mixture of sources is complete.
        """
        padded_options = PlanOptions(
            packing=False,
            shuffle=self.options.shuffle,
            balance="none",
            max_length=self.options.max_length,
            packing_length=self.options.packing_length,
            world_size=self.options.world_size,
            gradient_accumulation_steps=self.options.gradient_accumulation_steps,
            per_device_train_batch_size=batch_size,
        )
        inputs = self.first_inputs
        seed = inputs.config.seed
        if inputs.mixture is not None:
            return plan_mixture(inputs.mixture, padded_options, seed=seed)

        every = math.ceil(self.plan.summary.num_samples / _MAX_PADDED_SAMPLES)  # 1: all samples
        lengths = inputs.lengths[::every]
        target_tokens = inputs.targets[::every]
        return plan_epoch(lengths, target_tokens, padded_options, seed=seed)

    @cached_property
    def counts_of_steps(self) -> Int64Array | None:
        """Samples, tokens and target tokens of each source in each step, int64 (T, S, 3); None without a mixture."""
        mixture = self.first_inputs.mixture
        return None if mixture is None else counts_of_steps(self.plan.packs, self.plan.steps, mixture)

    @property
    def source_figures(self) -> dict[str, dict[str, Any]] | None:
        """Counts and shares of each source in the epoch, by name; None without a mixture."""
        mixture, counts = self.first_inputs.mixture, self.counts_of_steps
        return None if mixture is None or counts is None else share_figures(by_name(counts.sum(axis=0), mixture))

    @property
    def batch_line(self) -> str | None:
        """A sentence on the batch size with packing, and advice; None if it is about that without packing."""
        summary, options = self.plan.summary, self.options
        if options.samples_per_step is not None:
            return f"{summary.num_steps:,} steps, as without packing: {fixed_batch_clause(summary, self.plan.steps)}"
        if not options.packing or summary.batch_growth < MIN_GROWTH_FOR_ADVICE:
            return None
        both = batch_sentence(summary, knows_targets=self.inputs.reader is not None)
        return f"{both}; {learning_rate_advice(summary.batch_growth)}"

    @cached_property
    def divided_trees(self) -> TreeParts | None:
        """Trees of shared prefixes that take several packs; None without such trees."""
        return TreeParts.of(self.plan.packs, None if self.inputs.shared is None else self.inputs.shared.trees)

    @property
    def shared_line(self) -> str | None:
        """A sentence on shared prefixes, or why none are shared; None if there are none to share."""
        shared = self.inputs.shared
        if shared is None:
            return self.inputs.no_sharing_reason
        return shared.line(self.inputs.cost, self.plan.summary.num_steps, self.summary_without_sharing.num_steps)

    def _shared_figures(self) -> dict[str, Any] | None:
        """Return what computing shared prefixes once saves in an epoch, by name; None if no prefixes are shared.

        A tree is a group of samples that share prefixes. A divided tree does not fit into one pack.
        """
        shared = self.inputs.shared
        if shared is None:
            return None
        unshared_summary = self.summary_without_sharing
        tree_sizes = np.diff(shared.trees.offsets)  # in samples
        tree_sizes = tree_sizes[tree_sizes > 1]  # a tree of one sample shares nothing
        divided_tree_figures = {}
        if self.divided_trees is not None:
            step_of_pack = self.plan.steps.locations()[:, 0]
            divided_tree_figures = self.divided_trees.figures(step_of_pack)
        return {
            "num_trees": len(tree_sizes),
            "samples_per_tree": float(tree_sizes.mean()),
            "largest_tree": int(tree_sizes.max()),
            **divided_tree_figures,
            "tokens_without": shared.num_tokens_without_sharing,
            "tokens_saved": shared.trees.num_shared_tokens,
            "token_share_saved": shared.saved,
            "tower_work_share_saved": shared.tower_work_saved(self.inputs.cost),
            "packs_without": unshared_summary.num_packs,
            "steps_without": unshared_summary.num_steps,
        }

    def save(self, path: str) -> None:
        """Write a plan file, from which ``packtool train --plan`` takes its packs.

        The file also has the step, rank and micro-batch of each sample in the first epoch, for other readers.
        """
        reader = self.inputs.reader
        assert reader is not None, "--save needs caches"
        # The fingerprint of packs includes the mixture that draws each epoch. The file has packs of one epoch only.
        packs = dataclasses.replace(self.plan.full_packs, mixture="")
        tree_placement = "" if self.divided_trees is None else self.divided_trees.placement
        plan = SavedPlan(
            samples=packs.samples,
            offsets=packs.offsets,
            lengths=packs.lengths,
            shared_tokens=packs.shared_tokens,
            locations=self._sample_locations(),
            capacity=packs.capacity,
            max_length=self.options.max_length,
            seed=self.inputs.config.seed,
            cache=reader.fingerprint,
            plan=packs.fingerprint,
            num_cached=len(reader),
            parts=tree_placement,
        )
        write_plan(path, plan)

    def _sample_locations(self) -> npt.NDArray[np.int32]:
        """Step, rank and micro-batch of each sample, int32 (M, 3), in the order of ``plan.full_packs``."""
        # With Skrull, ``plan.packs`` are single samples, in the same order.
        samples_per_pack = np.diff(self.plan.packs.offsets)
        return np.repeat(self.plan.steps.locations(), samples_per_pack, axis=0)


def preview(config: PlanConfig, packing_length: int | None = None) -> Preview:
    """Plan the first epoch; with ``--sweep``, ``packing_length`` replaces that of the settings."""
    inputs = open_to_plan(config, packing_length)
    begin = time.perf_counter()
    inputs = inputs.prepared()
    options = inputs.options
    batch_shape = BatchShape.of(config, options.world_size)
    timeline = Timeline.of(inputs, (Assignment.of(0, batch_shape),))
    return Preview(inputs, timeline, timeline.stages[0].sections[0].full, time.perf_counter() - begin)


def resumed_figures(config: PlanConfig) -> dict[str, Any]:
    """Return figures, by name, of the rest of a run if it were resumed now from ``config.resume``; trains nothing.

    The run takes the caches or the recipe of ``config`` if there are any, as with ``--data-change allow``. Steps are
    numbered from 0, but from 1 in ``stages``; ``step`` is the first one after the checkpoint.
    """
    run = _resumed_run(config)
    checkpoint = run.resume_point.checkpoint
    assert checkpoint is not None, "the run resumes from one"
    timeline = run.caches.timeline
    num_steps_done = run.start
    epoch_steps = timeline.span_at(num_steps_done)  # steps of the current epoch
    num_epoch_steps_done = num_steps_done - epoch_steps.first_step
    samples_left = epoch_steps.plan.samples_of(num_epoch_steps_done, epoch_steps.num_steps)
    return {
        "checkpoint": checkpoint,
        "step": num_steps_done,
        "epoch": epoch_steps.epoch,
        "steps_left_in_epoch": epoch_steps.stop_step - num_steps_done,
        "steps_per_epoch": timeline.steps_per_epoch,
        "steps": timeline.num_steps,
        "steps_before": steps_planned(checkpoint),
        "world_size": run.world.data.size,
        "samples_left_in_epoch": len(samples_left),
        "data_changed": bool(run.changes),
        "sources": [dataclasses.asdict(change) for change in run.changes],
        "stages": timeline.figures() or None,
    }


def _resumed_run(config: PlanConfig) -> Run:
    """The run as ``packtool train`` would resume it from the checkpoint or output directory of ``--resume``."""
    assert config.resume is not None, "the command has --resume"
    directory = config.resume.rstrip("/")
    output_dir = run_directory(directory)
    segments = read_history(output_dir)
    checkpoint, _ = find_checkpoint(directory if is_checkpoint(directory) else NEWEST, output_dir)
    assert checkpoint is not None, "a missing checkpoint is an error"
    segment = _segment_before(segments, read_run_state(checkpoint).step)
    train_config = train_config_of(segment.config, segment.version)
    train_config = dataclasses.replace(train_config, output_dir=output_dir, resume_from_checkpoint=checkpoint)
    train_config = _with_new_data(train_config, config)
    num_sharing = train_config.sequence_parallel_ranks  # processes that share a sequence
    num_processes = config.world_size
    if num_processes == 1:  # the default means as many processes as the run had
        num_processes = segment.assignments[-1].world_size * num_sharing
    return Run.of(train_config, World(size=num_processes).shared_by(num_sharing))


def _with_new_data(train_config: TrainConfig, config: PlanConfig) -> TrainConfig:
    """Let a resumed run change its data, to those of ``packtool plan`` if it names any; raise if options conflict."""
    train_config = dataclasses.replace(train_config, data_change="allow")
    if config.cached_dataset or config.mix:
        train_config = dataclasses.replace(train_config, cached_dataset=config.cached_dataset, mix=config.mix)
    if problems := train_config.problems(MixOptions):
        raise ConfigError.from_problems(problems)
    return train_config


def _segment_before(segments: Sequence[Segment], step: int) -> Segment:
    """The segment of a run's history in which the step before ``step`` was trained; the first one for step 0."""
    return next(each for each in reversed(segments) if each.first < step or each is segments[0])
