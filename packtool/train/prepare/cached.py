"""The samples and steps of a run on caches: every rank plans all steps alike, without communication."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.batch.micro_batch import MicroBatch, PlannedEpoch
from packtool.cache.reader import CacheReader
from packtool.config.train import TrainConfig
from packtool.constants import MIN_SHARED
from packtool.encode.encoded import EncodedSample
from packtool.encode.families import MediaLimits
from packtool.encode.model_files import ModelFiles
from packtool.launch.world import World
from packtool.planning.cost import CostModel
from packtool.planning.epoch import EpochPlan
from packtool.planning.mixture import share_figures
from packtool.planning.pack_plan import Costs, select_packs
from packtool.train.prepare.caches import counts_in, source_lines
from packtool.train.prepare.costs import RunCosts, sample_costs
from packtool.train.prepare.figures import (
    RankStep,
    RankTokens,
    SampleFigures,
    Steps,
    figures_of_steps,
    peak_memory_batches,
)
from packtool.train.prepare.inputs import Inputs
from packtool.train.prepare.result import schedule_lines
from packtool.train.prepare.shared_prefixes import SharedPrefixes, first_pair
from packtool.train.prepare.timeline import Timeline, TrainedStage


@dataclass(frozen=True, kw_only=True, eq=False)
class CachedSource(Steps):
    """The samples of caches, and the steps in which one rank trains them, from step ``start`` on.

    ``figures`` are those of all samples; a sample that shares a prefix has the figures that it adds.
    """

    inputs: Inputs
    timeline: Timeline
    world: World
    start: int
    figures: SampleFigures

    @property
    def reader(self) -> CacheReader:
        return self.inputs.for_training.reader

    @property
    def files(self) -> ModelFiles:
        return self.inputs.for_training.files

    @property
    def media_limits(self) -> MediaLimits:
        """Limits that media are loaded with, as at export."""
        return self.reader.manifests[0].identity.media_limits

    @property
    def min_shared(self) -> int | None:
        """Minimum tokens of a prefix that is computed once for several samples; None without shared prefixes."""
        return None if self.inputs.shared is None else MIN_SHARED

    @property
    def logs_channels(self) -> bool:
        """True if losses are logged by channel; the channels of a mixture are its sources."""
        return self.inputs.mixture is not None or self.inputs.for_training.config.enable_channel_loss

    def expected(self) -> dict[str, Any]:
        """Return the fields of a ``TrainResult`` that the plan knows before the first step.

        Numbers of samples and packs are of the first epoch. With a mixture, it may repeat samples, and not draw others.
        """
        first_plan = self.timeline.first_plan
        summary = first_plan.summary
        mixture = self.inputs.mixture
        source_figures = {} if mixture is None else share_figures(counts_in(first_plan, mixture))
        return {
            "num_samples": summary.num_samples,
            "filtered": summary.num_filtered,
            "num_repeats": summary.num_samples - summary.num_distinct,
            "not_drawn": summary.num_not_drawn,
            "num_packs": summary.num_packs,
            "samples_per_pack": summary.samples_per_pack,
            "fill": summary.fill,
            "packing": summary.options.packing,
            "max_length": summary.options.max_length,
            "packing_length": summary.options.packing_length,
            "steps_without_packing": self.timeline.num_steps_without_packing(),
            "num_empty_micro_batches": self.timeline.num_empty_micro_batches(),
            "target_tokens": self.timeline.target_tokens_from(self.start),
            "sources": source_figures,
            "stages": self.timeline.figures(),
        }

    def lines(self, config: TrainConfig) -> Iterator[str]:
        """Describe the schedule, the mixture and shared prefixes."""
        inputs, timeline = self.inputs, self.timeline
        if inputs.stages:
            yield f"a curriculum of {len(timeline.stages)} stages; the plan of the first:"
        yield from schedule_lines(config, timeline, self.world.size)
        if inputs.stages:
            yield from timeline.lines()
        elif (mixture := inputs.mixture) is not None:
            drawn = "drawn again in every epoch" if mixture.resample else "drawn once (--resample false)"
            yield f"mixture: {mixture.num_drawn:,} samples per epoch from {len(mixture.names)} sources, {drawn}:"
            yield from source_lines(share_figures(counts_in(timeline.first_plan, mixture)))
        if inputs.shared is not None:
            unshared = inputs.summary_without_sharing(timeline.stages[0].sections[0].batch_shape)
            cost = RunCosts.of(config, self.files.config).without_recomputation
            yield inputs.shared.line(cost, timeline.first_plan.summary.num_steps, unshared.num_steps)

    def media_tokens(self) -> float:
        """Mean media tokens of a micro-batch in the epoch that is trained next."""
        plan = self.timeline.span_at(self.start).plan
        media = self.inputs.shared_in(plan.packs) or self.reader.index
        return float(media.media_tokens[plan.packs.samples].sum()) / max(len(plan.steps.micro_batch_sizes()), 1)

    @property
    def _stages(self) -> list[TrainedStage]:
        """The stages that are not finished at ``start``; empty for a run without stages."""
        return [stage for stage in self.timeline.stages if stage.stop_step > self.start] if self.inputs.stages else []

    @property
    def step_shapes(self) -> list[tuple[int, int]]:
        """Packing length, and number of ranks that share a sequence, of each stage not finished at ``start``."""
        shapes = [(stage.inputs.options.packing_length, stage.inputs.sequence_parallel_size) for stage in self._stages]
        return shapes or [(self.inputs.options.packing_length, self.world.sequence_parallel_size)]

    def peak_memory_batches(self, config: TrainConfig, number: int) -> tuple[RankTokens, ...]:
        """The micro-batches of a rank that may need most memory, in the next epoch of ``step_shapes[number]``."""
        first_step = self.start
        if self.inputs.stages:
            first_step = max(first_step, self._stages[number].first_step)
        return peak_memory_batches(config, self.timeline.span_at(first_step).plan, self.inputs)

    def first_samples(self, max_samples: int) -> list[EncodedSample]:
        """The shortest samples of the first micro-batch, at most ``max_samples``; or two that share a prefix."""
        span = self.timeline.span_at(self.start)
        plan, step = span.plan, self.start - span.first_step
        if self.inputs.shared is not None:
            pair = first_pair(select_packs(plan.packs, plan.steps.packs(step, self.world.data.rank, 0)))
            if pair is not None:
                return [self.reader.sample(int(position)) for position in pair]
        packs = plan.samples(step, self.world.data.rank, 0)
        positions = [int(position) for pack in packs for position in pack]
        lengths = self.reader.index.length
        shortest = sorted(positions, key=lambda position: int(lengths[position]))[:max_samples]
        return [self.reader.sample(position) for position in positions if position in shortest]

    @property
    def read(self) -> Callable[[Any], EncodedSample]:
        """The function that reads a sample by its position in the caches; can be sent to worker processes."""
        return self.inputs.samples.sample

    def names(self, micro_batch: MicroBatch) -> list[str]:
        """The row, file and position of each sample of a micro-batch, for messages."""
        samples = [(position, self.read(position)) for position in micro_batch.samples]
        return [f"row {sample.row} of {sample.source} (sample {position})" for position, sample in samples]

    def debug_text(self, micro_batch: MicroBatch) -> str:
        """``packs of samples [3 17] [4]``, for ``--debug``: numbers are positions in the caches."""
        return "packs of samples " + " ".join(f"[{' '.join(map(str, pack))}]" for pack in micro_batch.packs)

    def planned_epoch(self, plan: EpochPlan, epoch: int) -> PlannedEpoch:
        """The micro-batches of all ranks in an epoch with this plan, and the media that are read again after it."""
        has_other_sizes = any(
            stage.inputs.sequence_parallel_size != self.world.sequence_parallel_size
            for stage in (self.timeline.stages if self.inputs.stages else ())
        )
        sequence_parallel_size = self.world.size // plan.steps.world_size if has_other_sizes else None
        towers: Mapping[Any, Any] = {"vision": self.figures.has_vision, "sound": self.figures.has_sound}
        inputs, read_again = self.inputs, None  # samples whose media the media cache keeps; None for all
        is_drawn_anew = inputs.mixture is not None and not inputs.stages
        is_last = self.timeline.locate(self.timeline.num_steps - 1)[0] <= epoch
        if inputs.for_training.config.media_cache is not None and is_drawn_anew and not is_last:
            read_again = (inputs.epoch_counts(epoch + 1) > 0) | (inputs.epoch_counts(epoch) > 1)
        return PlannedEpoch(plan, towers, read_again, sequence_parallel_size)

    def rank_steps(self) -> Iterator[RankStep]:
        """Yield the steps of this rank from ``start`` on."""
        is_dynamic = self.inputs.for_training.config.removes_padding and not self.inputs.options.packing
        for span in self.timeline.spans(self.start):
            plan, first = span.plan, max(self.start - span.first_step, 0)
            # With a mixture, what a sample adds to its prefix differs between epochs.
            differs = self.inputs.shared is not None and self.inputs.plans_trees_per_epoch
            samples = sample_figures(self.inputs, self.inputs.shared_in(plan.packs)) if differs else self.figures
            figures = islice(figures_of_steps(plan, samples, is_dynamic=is_dynamic), first, None)
            rank = self.world.shared_by(self.world.size // plan.steps.world_size).data.rank
            steps = zip(self.planned_epoch(plan, span.epoch).steps(rank, first), figures, strict=True)
            for micro_batches, step_figures in islice(steps, span.num_steps - first):
                yield RankStep(micro_batches, lambda figures=step_figures: figures)  # type: ignore[misc]


def sample_figures(inputs: Inputs, shared: SharedPrefixes | None) -> SampleFigures:
    """Return the tokens, FLOPs and media of each of the N samples of the caches; arrays (N,).

    If several samples begin with the same tokens (``shared``), the first of them has the media and FLOPs of these.
    """
    config, files, reader = inputs.for_training
    index = reader.index
    target_tokens = inputs.targets
    run_costs = RunCosts.of(config, files.config)
    media_tokens = index.media_tokens if shared is None else shared.media_tokens

    def flops_of_samples(cost: CostModel) -> Costs:
        if shared is None:
            return sample_costs(cost, index, target_tokens)
        return shared.sample_costs(cost, target_tokens)

    # The loss is averaged over samples with at least one target, or over target tokens.
    loss_units = target_tokens > 0 if config.loss_reduction == "sample" else target_tokens
    return SampleFigures(
        media_tokens,
        loss_units.astype(np.int64),
        flops=flops_of_samples(run_costs.without_recomputation),
        hardware_flops=flops_of_samples(run_costs.with_recomputation),
        has_vision=(index.num_images > 0) | (index.num_videos > 0),
        has_sound=_may_have_sound(reader),
        mixture=inputs.mixture,
    )


def _may_have_sound(reader: CacheReader) -> npt.NDArray[np.bool_]:
    """Mark the samples with sounds, or with videos that may have sound, bool (N,)."""
    index = reader.index
    has_audio = index.num_audios > 0
    # The index does not record which videos have sound, so every video may have.
    audio_limits = reader.manifests[0].identity.media_limits.audio
    if audio_limits is None or not audio_limits.in_video:
        return has_audio
    return has_audio | (index.num_videos > 0)
