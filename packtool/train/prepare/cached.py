"""A run on caches, decided before torch is imported: the same on every rank, without communication."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool import storage
from packtool.attention.parallel.axes import Axes
from packtool.batch.micro_batch import MicroBatch, PlannedEpoch, Tower
from packtool.cache.reader import CacheReader
from packtool.cache.views import ChosenTargets
from packtool.config.train import TrainConfig
from packtool.constants import LEAST_SHARED, VAL_SPLIT
from packtool.encode.encoded import EncodedSample
from packtool.launch.world import World
from packtool.planning.epoch import EpochPlan
from packtool.planning.ledger import Ledger
from packtool.planning.mixture import share_figures
from packtool.planning.pack_plan import with_packs_in_order
from packtool.train.prepare.costs import RunCosts, sample_costs
from packtool.train.prepare.data_change import ChangedData
from packtool.train.prepare.evaluation import plan_of_samples, shared_of_evaluation
from packtool.train.prepare.figures import RankTokens, SampleFigures, StepFigures, figures_of_steps
from packtool.train.prepare.heaviest import heaviest_tokens, seen_media, share_media
from packtool.train.prepare.history import Segment, options_kept
from packtool.train.prepare.inputs import BatchShape, Inputs
from packtool.train.prepare.mixtures import counts_in, mixture_lines
from packtool.train.prepare.opening import open_to_train
from packtool.train.prepare.place import with_resumed_version
from packtool.train.prepare.prepared import NumberExchange, PreparedRun, RankStep, ResumePoint, Steps, Validation
from packtool.train.prepare.record import RunRecord
from packtool.train.prepare.result import TrainResult, schedule_lines
from packtool.train.prepare.resume import resume
from packtool.train.prepare.sequence_parallel import axes_of, with_shares
from packtool.train.prepare.shared_prefixes import first_pair
from packtool.train.prepare.timeline import Timeline, TrainedStage


@dataclass(frozen=True, kw_only=True, eq=False)
class CachedRun(PreparedRun):
    """A run on the samples of caches: all of its steps are known.

    Args:
        inputs: of its plans.
        figures: of all samples; of those that share prefixes, what each adds.
        ledger: what was trained before.
        changed: what became of the data that its checkpoint had; None where they are the same.
    """

    timeline: Timeline
    inputs: Inputs
    figures: SampleFigures
    ledger: Ledger
    changed: ChangedData | None = None

    @property
    def reader(self) -> CacheReader:
        """The reader of all caches."""
        return self.inputs.of_run[2]

    @property
    def tells_channels(self) -> bool:
        """See ``PreparedRun``; of a mixture its sources."""
        return self.inputs.mixture is not None or super().tells_channels

    def expected(self) -> TrainResult:
        """See ``PreparedRun``."""
        timeline, summary = self.timeline, self.timeline.first.summary
        mixture = self.inputs.mixture
        return TrainResult(
            num_samples=summary.num_samples,
            filtered=summary.num_filtered,
            num_repeats=summary.num_samples - summary.num_distinct,
            not_drawn=summary.num_not_drawn,
            num_packs=summary.num_packs,
            samples_per_pack=summary.samples_per_pack,
            fill=summary.fill,
            packing=summary.options.packing,
            max_length=summary.options.max_length,
            packing_length=summary.options.packing_length,
            steps=timeline.num_steps,
            steps_without_packing=timeline.num_steps_without_packing(),
            num_empty_micro_batches=timeline.num_empty_micro_batches(),
            num_processes=self.world.size,
            target_tokens=timeline.target_tokens_from(self.start),
            output_dir=self.config.output_dir,
            resumed_from=self.resume_point.checkpoint,
            sources={} if mixture is None else share_figures(counts_in(self.timeline.first, mixture)),
            stages=timeline.figures(),
        )

    def lines(self, expected: TrainResult) -> Iterator[str]:
        """See ``PreparedRun``."""
        if self.inputs.stages:
            yield f"a curriculum of {len(self.timeline.stages)} stages, of which the first is planned so:"
        yield from schedule_lines(self.config, self.timeline, expected)
        if self.inputs.stages:
            yield from self.timeline.lines()
        elif self.inputs.mixture is not None:
            yield from mixture_lines(self.inputs.mixture, self.timeline.first)
        if self.inputs.shared is not None:
            cost = RunCosts.of(self.config, self.files.config).model
            first = self.state.assignments[0][1:] if self.state.assignments else self.state.assignment
            steps = self.timeline.first.summary.num_steps
            yield self.inputs.shared.line(cost, steps, self.inputs.unshared_summary(first).num_steps)

    def media_tokens(self) -> float:
        """See ``PreparedRun``; those of the epoch that comes next."""
        plan = self.timeline.stretch(self.start).plan
        return float(self.figures.media_tokens[plan.packs.samples].sum()) / max(len(plan.steps.cell_sizes()), 1)

    @property
    def kinds_of_steps(self) -> Sequence[tuple[TrainConfig, Axes]]:
        """See ``PreparedRun``."""
        ways = {self.world.sequence_parallel_size: self.axes, **self.ways}
        return [
            (
                dataclasses.replace(with_shares(self.config, size), packing_length=stage.inputs.options.packing_length),
                ways.get(size, Axes()),
            )
            for stage in self._stages
            for size in (stage.inputs.sequence_parallel_size,)
        ] or super().kinds_of_steps

    @property
    def _stages(self) -> list[TrainedStage]:
        """The stages that are still to be trained; none of a run without."""
        return [stage for stage in self.timeline.stages if stage.stop > self.start] if self.inputs.stages else []

    def heaviest(self, kind: int = 0) -> tuple[RankTokens, ...]:
        """See ``PreparedRun``; those of the epoch that comes next, in this stage or another."""
        stages, model = self._stages, self.files.config
        config, axes = self.kinds_of_steps[kind]
        step = max(self.start, stages[kind].first) if stages else self.start
        plan, shares = self.timeline.stretch(step).plan, None
        size = axes.ring_size * axes.ulysses_size
        if size > 1:
            shares = share_media(seen_media(self.reader.index, model), model, plan, size)
        return heaviest_tokens(config, plan, model, self.figures.media_tokens, self.figures.audio_tokens, shares)

    def first_samples(self, most: int) -> list[EncodedSample]:
        """See ``PreparedRun``; the shortest ones of the first micro-batch, in its order, or two that share a prefix."""
        stretch = self.timeline.stretch(self.start)
        plan, step = stretch.plan, self.start - stretch.first
        if self.inputs.shared is not None:
            pair = first_pair(with_packs_in_order(plan.packs, plan.steps.packs(step, self.world.data.rank, 0)))
            if pair is not None:
                return [self.reader.sample(int(position)) for position in pair]
        packs = plan.samples(step, self.world.data.rank, 0)
        positions = [int(position) for pack in packs for position in pack]
        lengths = self.reader.index.length
        shortest = sorted(positions, key=lambda position: int(lengths[position]))[:most]
        return [self.reader.sample(position) for position in positions if position in shortest]

    @property
    def read(self) -> Callable[[Any], EncodedSample]:
        """See ``PreparedRun``; micro-batches have positions in the caches."""
        return self.inputs.samples.sample

    def names(self, micro_batch: MicroBatch) -> list[str]:
        """See ``PreparedRun``."""
        samples = [(position, self.read(position)) for position in micro_batch.samples]
        return [f"row {sample.row} of {sample.source} (sample {position})" for position, sample in samples]

    def words(self, micro_batch: MicroBatch) -> str:
        """``packs of samples [3 17] [4]``: numbers are positions in the caches, one after the other."""
        return "packs of samples " + " ".join(f"[{' '.join(map(str, pack))}]" for pack in micro_batch.packs)

    def planned_epoch(self, plan: EpochPlan, epoch: int) -> PlannedEpoch:
        """The micro-batches of all ranks in an epoch with this plan."""
        again, shared_by = self._read_again(epoch), self.world.size // plan.steps.world_size if self.ways else None
        brings: dict[Tower, Any] = {"vision": self.figures.is_seen, "sound": self.figures.is_heard}
        return PlannedEpoch(plan, brings, again, shared_by)

    def _read_again(self, epoch: int) -> npt.NDArray[np.bool_] | None:
        """Which samples the next epoch has, too, for a media cache; None where that is all, or nobody looks."""
        if self.config.media_cache is None or self.inputs.mixture is None or self.inputs.stages:
            return None
        if self.timeline.locate(self.timeline.num_steps - 1)[0] <= epoch:
            return None
        return (self.inputs.wanted_of(epoch + 1) > 0) | (self.inputs.wanted_of(epoch) > 1)

    def record(self) -> RunRecord:
        """See ``PreparedRun``."""
        return RunRecord(self.ledger, self.timeline, self._segment, self.resume_point.checkpoint)

    def _segment(self) -> Segment:
        """What the run's history keeps of it."""
        sizes = np.diff(self.reader.offsets).tolist()
        found = zip(self.reader.directories, self.reader.manifests, sizes, strict=True)
        state = self.state
        return Segment(
            first=self.start,
            num_steps=self.timeline.num_steps,
            config=options_kept(self.config),
            caches=tuple((storage.absolute(name), manifest.fingerprint, num) for name, manifest, num in found),
            assignments=state.assignments or ((0, *state.assignment),),
            changed_at=None if self.ledger.change is None else self.ledger.change.step,
            plan=state.plan,
            steps=state.steps,
        )

    def stage_line(self, step: int) -> str | None:
        """See ``PreparedRun``."""
        return self.timeline.stage_line(step) if self.inputs.stages else None

    def steps(self, exchange: NumberExchange) -> Steps:
        """See ``PreparedRun``; the plan knows all, and ranks need not tell each other anything."""
        return _PlannedSteps(self)


class _PlannedSteps(Steps):
    """What the plan has for one rank."""

    def __init__(self, run: CachedRun) -> None:
        self._run = run

    def drawn(self) -> Iterator[RankStep]:
        """See ``Steps``."""
        run = self._run
        is_dynamic = run.config.removes_padding and not run.timeline.first.summary.options.packing
        for stretch in run.timeline.stretches(run.start):
            plan, first = stretch.plan, max(run.start - stretch.first, 0)
            figures = islice(figures_of_steps(plan, run.figures, is_dynamic=is_dynamic), first, None)
            rank = run.world.shared_by(run.world.size // plan.steps.world_size).data.rank
            steps = zip(run.planned_epoch(plan, stretch.epoch).steps(rank, first), figures, strict=True)
            for micro_batches, step_figures in islice(steps, stretch.stop - stretch.first - first):
                yield RankStep(micro_batches, partial(_unchanged, step_figures))


def _unchanged(figures: StepFigures) -> StepFigures:
    return figures


def prepare_cached(
    config: TrainConfig, world: World, resume_point: ResumePoint | None = None, planned: Inputs | None = None
) -> CachedRun:
    """Check that tokenizer, caches, options and checkpoint fit, and plan; takes a second.

    Args:
        resume_point: where the run begins; by default where the options and the output directory say.
        planned: as for ``open_to_train``.

    Raises:
        ConfigError, DataError, MismatchError: naming what does not fit, and what to do.
    """
    inputs = open_to_train(with_resumed_version(config), planned)
    config, files, reader = inputs.of_run
    resume_point = resume_point or ResumePoint.of(config)
    mine: BatchShape = (world.data.size, config.gradient_accumulation_steps, config.per_device_train_batch_size)
    may_change = config.data_change == "allow"
    resumed = resume(resume_point, inputs.state(mine), world, inputs, may_change=may_change)
    axes = axes_of(config, world, files, inputs.lengths, trained=True)
    stages = resumed.timeline.stages if inputs.stages else ()
    sizes = {stage.inputs.sequence_parallel_size for stage in stages} - {world.sequence_parallel_size}
    unshared = () if inputs.unshared is None else (inputs.unshared,)
    return CachedRun(
        config=config,
        world=world,
        files=files,
        media_limits=reader.manifests[0].identity.media_limits,
        timeline=resumed.timeline,
        state=resumed.state,
        resume_point=resume_point,
        axes=axes,
        ways={
            size: axes_of(with_shares(config, size), world.shared_by(size), files, inputs.lengths, trained=True)
            for size in sorted(sizes)
        },
        notes=(*unshared, *inputs.notes, *resume_point.notes, *resumed.notes),
        least_shared=None if inputs.shared is None else LEAST_SHARED,
        validation=_validation(inputs, world, axes),
        inputs=inputs,
        figures=_figures(inputs, RunCosts.of(config, files.config)),
        ledger=resumed.ledger,
        changed=resumed.changed,
    )


def _figures(inputs: Inputs, costs: RunCosts) -> SampleFigures:
    (config, _, reader), targets, shared = inputs.of_run, inputs.targets, inputs.shared
    each = partial(sample_costs, index=reader.index) if shared is None else shared.sample_costs
    units = targets > 0 if config.loss_reduction == "sample" else targets
    media = reader.index if shared is None else shared
    return SampleFigures(
        targets,
        media.media_tokens,
        media.audio_tokens,
        units.astype(np.int64),
        each(costs.model, target_tokens=targets),
        each(costs.hardware, target_tokens=targets),
        *_media_kinds(reader),
        mixture=inputs.mixture,
    )


def _media_kinds(reader: CacheReader) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Which samples have something to look at, and which to listen to; the index does not tell which videos sound."""
    index, audio = reader.index, reader.manifests[0].identity.media_limits.audio
    has_videos = index.num_videos > 0
    may_sound = has_videos & (audio is not None and audio.in_video)
    return (index.num_images > 0) | has_videos, (index.num_audios > 0) | may_sound


def _validation(inputs: Inputs, world: World, axes: Axes) -> Validation | None:
    (config, files, reader), choices = inputs.of_run, inputs.choices
    if config.eval_strategy == "no":
        return None
    val = CacheReader.open(reader.directories, VAL_SPLIT, reader.copies)
    plan = plan_of_samples(val, world.data, max_tokens=config.max_tokens_per_micro_batch, alignment=axes.multiple)
    shared, _ = shared_of_evaluation(config, files, val, plan)
    if shared is not None:
        plan = dataclasses.replace(plan, trees=shared.trees)
    return Validation(val, ChosenTargets(val, choices) if any(choices) else val, plan)
