"""The optimizer steps of a run, numbered from 0, and the epoch and plan that each belongs to.

A timeline has stages, a stage has sections, and a section has spans of one epoch each. A run without stages is one
stage. Resuming with another number of ranks, or with other data, starts a new section, with a plan of what is left of
the epoch. Stages of a curriculum:

    until: 30%    | 30% of --max-steps, or of --num-train-epochs: 0.3 epochs of the first stage's mixture
    stage 1       | part of an epoch   epoch 0
    stage 2       | part of an epoch   epoch 1      samples that were trained least often so far
                  | full epochs        epochs 2, 3  drawn as usual

Each stage starts a new epoch, for seeds and for the ledger. The partial epoch of a stage comes first, so that all of
its samples are trained (``Mixture.partial_epoch``).
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from packtool.planning.epoch import EpochPlan
from packtool.planning.ledger import DataChange, concatenate_counts
from packtool.planning.mixture import Mixture, by_name, counts_of_samples, counts_of_steps, share_figures
from packtool.planning.pack_plan import Int64Array
from packtool.train.prepare.caches import source_lines
from packtool.train.prepare.checkpoint import Assignment, BatchShape
from packtool.train.prepare.inputs import Inputs


@dataclass(frozen=True)
class OpenTimeline:
    """The steps of a stream: at most ``num_steps``, without epochs."""

    num_steps: int

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the whole run."""
        return self.num_steps

    def locate(self, step: int) -> tuple[int, int]:
        """Epoch and step within it."""
        return 0, step

    def epochs(self, step: int) -> float:
        """The fraction of the run that is done after ``step`` steps."""
        return step / self.num_steps

    def stage_line(self, step: int) -> str | None:
        """None: a stream has no stages."""
        return None


@dataclass(frozen=True, eq=False)
class EpochSpan:
    """Consecutive steps of an epoch that have the same plan; step ``first_step`` of the run is step 0 of the plan."""

    section: Section
    epoch: int
    first_step: int
    stop_step: int

    @property
    def num_steps(self) -> int:
        return self.stop_step - self.first_step

    @property
    def plan(self) -> EpochPlan:
        """The plan of the epoch, or of what was left of it when its packs were assigned."""
        return self.section.plan_of(self.epoch)

    @property
    def is_partial(self) -> bool:
        """True if it lies in the partial epoch that its section starts with."""
        return self.section.partial_plan is not None and self.epoch == self.section.first_epoch

    @property
    def is_full(self) -> bool:
        """True if it has all steps of a full epoch."""
        return not self.is_partial and self.num_steps == self.section.steps_per_epoch

    @property
    def typical_plan(self) -> EpochPlan:
        """The plan of its epoch; for a full epoch that of the first one, whose counts stand for all of them."""
        return self.section.full if self.is_full else self.plan

    def samples(self) -> Int64Array:
        """Positions in the caches of the samples that it trains, int64 (M,), in no order."""
        mixture = self.section.inputs.mixture
        if self.is_full and mixture is not None:
            return mixture.draw(self.epoch)
        return self.plan.samples_of(0, self.num_steps)

    def target_tokens_from(self, start: int) -> int:
        """Target tokens of its steps from step ``start`` of the run."""
        if self.is_full and start <= self.first_step:
            inputs = self.section.inputs
            if inputs.mixture is not None:
                return int(inputs.targets[inputs.mixture.draw(self.epoch)].sum())
            return int(self.section.full.steps.target_tokens_per_step.sum())  # every epoch has the same samples
        per_step = self.plan.steps.target_tokens_per_step
        return int(per_step[max(start - self.first_step, 0) : self.num_steps].sum())


@dataclass(frozen=True, eq=False)
class Section:
    """Successive epochs whose packs are assigned to the same ranks; the next section or stage decides where they end.

    Args:
        partial_plan: plan of its first epoch, if it trains only a part of that; None for a full epoch.
        max_partial_steps: steps of ``partial_plan`` that are trained; None for all.
    """

    inputs: Inputs
    batch_shape: BatchShape
    first_step: int = 0
    first_epoch: int = 0
    partial_plan: EpochPlan | None = None
    max_partial_steps: int | None = None

    @classmethod
    def after_change(cls, inputs: Inputs, batch_shape: BatchShape, change: DataChange) -> Section:
        """The rest of the epoch in which the data changed, and the epochs after it."""
        remaining = inputs.plan_remaining(change, batch_shape)
        epoch = change.epoch + 1 if remaining is None else change.epoch
        return cls(inputs, batch_shape, change.step, epoch, remaining)

    def reassigned(self, assignment: Assignment) -> Section:
        """The next section, from the step of ``assignment`` on: the untrained packs of its epoch, and later epochs."""
        step, batch_shape = assignment.first_step, assignment.batch_shape
        keeps_steps = self.inputs.config.packs_per_step is not None  # packs stay in their steps for any number of ranks
        span = self.span_at(step)
        packs = span.plan.packs_from(step - span.first_step, keeps_steps=keeps_steps)
        plan = self.inputs.assign(packs, batch_shape, keeps_steps=keeps_steps)
        return Section(self.inputs, batch_shape, step, span.epoch, partial_plan=plan)

    @cached_property
    def full(self) -> EpochPlan:
        """The plan of the first full epoch; all have as many steps."""
        return self.inputs.plan_of(0, self.batch_shape)

    @property
    def steps_per_epoch(self) -> int:
        return self.full.steps.num_steps

    @property
    def num_partial_steps(self) -> int:
        """Steps of the partial epoch that it starts with; 0 if it starts with a full one."""
        num_steps = 0 if self.partial_plan is None else self.partial_plan.steps.num_steps
        return num_steps if self.max_partial_steps is None else min(num_steps, self.max_partial_steps)

    def plan_of(self, epoch: int) -> EpochPlan:
        if self.partial_plan is not None and epoch == self.first_epoch:
            return self.partial_plan
        return self.inputs.plan_of(epoch, self.batch_shape)

    def end(self, stop_epoch: float, max_steps: int | None) -> int:
        """Steps of the run that are done after ``stop_epoch`` epochs of the run, or ``max_steps`` if that is given."""
        if max_steps:
            return max_steps
        num_epochs = stop_epoch - self.first_epoch  # of this section
        if self.partial_plan is None:
            return self.first_step + math.ceil(max(num_epochs, 0.0) * self.steps_per_epoch)
        if num_epochs == 1:
            return self.first_step + self.num_partial_steps  # without planning a full epoch
        # The section has the last steps of its first epoch; the earlier ones were trained before it.
        per_epoch = self.steps_per_epoch
        num_steps_before = per_epoch - self.num_partial_steps
        first_epoch_steps = math.ceil(max(min(num_epochs, 1.0) * per_epoch - num_steps_before, 0))
        return self.first_step + first_epoch_steps + math.ceil(max(num_epochs - 1, 0.0) * per_epoch)

    def span_at(self, step: int) -> EpochSpan:
        """The epoch that a step of the run belongs to."""
        assert step >= self.first_step, "earlier steps were assigned before"
        first_full_step = self.first_step + self.num_partial_steps
        if step < first_full_step:
            return EpochSpan(self, self.first_epoch, self.first_step, first_full_step)
        first_full_epoch = self.first_epoch if self.partial_plan is None else self.first_epoch + 1
        num_full_epochs = (step - first_full_step) // self.steps_per_epoch  # before the epoch of ``step``
        first = first_full_step + num_full_epochs * self.steps_per_epoch
        return EpochSpan(self, first_full_epoch + num_full_epochs, first, first + self.steps_per_epoch)


@dataclass(frozen=True, eq=False)
class TrainedStage:
    """A stage as it is trained, or the rest of it; a run without stages is one.

    Args:
        number: of the stage, 0-based.
        sections: one for each time that packs were assigned.
        stop_step: steps of the run that are done when it ends.
    """

    number: int
    first_epoch: int
    sections: tuple[Section, ...]
    stop_step: int

    @classmethod
    def of(
        cls,
        number: int,
        first_epoch: int,
        first_section: Section,
        reassignments: Sequence[Assignment],
        *,
        stop_epoch: float,
        max_steps: int | None,
    ) -> TrainedStage:
        """Make a stage that ends after ``max_steps`` steps of the run or, if None, after ``stop_epoch`` epochs of it.

        ``reassignments``, in order, are steps at which packs are assigned to another number of ranks; each starts a new
        section. Those after the end of the stage are ignored.
        """
        sections = [first_section]
        stop_step = first_section.end(stop_epoch, max_steps)
        for reassignment in reassignments:
            if reassignment.first_step >= stop_step:
                break
            section = sections[-1].reassigned(reassignment)
            sections.append(section)
            stop_step = section.end(stop_epoch, max_steps)  # other ranks may need another number of steps
        return cls(number, first_epoch, tuple(sections), stop_step)

    @property
    def first_step(self) -> int:
        return self.sections[0].first_step

    @property
    def inputs(self) -> Inputs:
        return self.sections[0].inputs

    @property
    def mixture(self) -> Mixture:
        """The mixture of its full epochs."""
        assert self.inputs.mixture is not None, "stages have recipes"
        return self.inputs.mixture

    def span_at(self, step: int) -> EpochSpan:
        """The steps around ``step`` that belong to one epoch and section."""
        number = max(bisect_right(self.sections, step, key=lambda section: section.first_step) - 1, 0)
        span = self.sections[number].span_at(step)
        if number + 1 == len(self.sections):
            return span
        return dataclasses.replace(span, stop_step=min(span.stop_step, self.sections[number + 1].first_step))

    def spans(self, start: int = 0) -> Iterator[EpochSpan]:
        """Its epochs in order, from that of step ``start``."""
        step = max(start, self.first_step)
        while step < self.stop_step:
            span = self.span_at(step)
            yield dataclasses.replace(span, stop_step=min(span.stop_step, self.stop_step))
            step = span.stop_step

    def training_counts(self) -> Int64Array:
        """Training count of each sample of the caches, int64 (N,)."""
        counts = np.zeros(len(self.inputs.lengths), np.int64)
        for span in self.spans():
            counts += np.bincount(span.samples(), minlength=len(counts))
        return counts

    def source_counts(self) -> Int64Array:
        """Its samples, tokens and target tokens of each source, int64 (S, 3)."""
        counts = np.zeros((len(self.mixture.names), 3), np.int64)
        for span in self.spans():
            counts += counts_of_samples(span.samples(), self.mixture)
        return counts

    def figures(self) -> dict[str, Any]:
        """Return the figures of a stage of a run by name, as JSON has them; steps are numbered from 1.

        ``sources`` has the figures of each source of its mixture. Samples that are too long, or that their source
        excludes, are ``filtered``; all others that the stage does not train are ``not_drawn``.
        """
        options = self.inputs.options
        all_sources = share_figures(by_name(self.source_counts(), self.mixture))
        sources = {name: figures for name, figures in all_sources.items() if figures["num_samples"]}
        num_samples = sum(figures["num_samples"] for figures in sources.values())  # with repetitions

        training_counts = self.training_counts()  # of each sample of the caches, (N,)
        num_cached = len(training_counts)
        num_distinct = int(np.count_nonzero(training_counts))
        num_filtered = self.mixture.num_filtered
        return {
            "first_step": self.first_step + 1,
            "last_step": self.stop_step,
            "packing_length": options.packing_length if options.packing else None,
            "sequence_parallel_size": self.inputs.sequence_parallel_size,
            "max_length": options.max_length,
            "samples": num_samples,
            "num_samples_in_caches": num_cached,
            "num_distinct_samples": num_distinct,
            "not_drawn": num_cached - num_distinct - num_filtered,
            "filtered": num_filtered,
            "sources": sources,
        }


@dataclass(frozen=True, eq=False)
class Timeline:
    """The steps of a run on caches; ``stages`` are in order, without those that ended before the data changed."""

    inputs: Inputs
    stages: tuple[TrainedStage, ...]

    @classmethod
    def of(cls, inputs: Inputs, assignments: Sequence[Assignment], change: DataChange | None = None) -> Timeline:
        """The timeline of a run from step 0, or from the last change of its data; ``assignments`` start there, too."""
        if inputs.stages:
            return cls(inputs, tuple(_stages(inputs, assignments, change)))
        batch_shape = assignments[0].batch_shape
        first_section = Section(inputs, batch_shape)
        if change is not None:
            first_section = Section.after_change(inputs, batch_shape, change)
        config = inputs.config
        stage = TrainedStage.of(
            0, 0, first_section, assignments[1:], stop_epoch=config.num_train_epochs, max_steps=config.max_steps
        )
        return cls(inputs, (stage,))

    @property
    def num_steps(self) -> int:
        return self.stages[-1].stop_step

    @cached_property
    def first_plan(self) -> EpochPlan:
        """The plan of a full epoch; with stages that of the first epoch, which may be partial."""
        section = self.stages[0].sections[-1]
        return section.plan_of(section.first_epoch) if self.inputs.stages else section.full

    @cached_property
    def steps_per_epoch(self) -> int:
        """Steps of a full epoch; with stages of the first epoch."""
        return self.first_plan.steps.num_steps

    def stage(self, step: int) -> TrainedStage:
        """The stage that a step belongs to."""
        return next((stage for stage in self.stages if step < stage.stop_step), self.stages[-1])

    def stage_of(self, step: int) -> tuple[int, int] | None:
        """The 0-based number of the stage of a step, and the stage's first epoch; None without stages."""
        stage = self.stage(step)
        return (stage.number, stage.first_epoch) if self.inputs.stages else None

    def span_at(self, step: int) -> EpochSpan:
        """The steps around ``step`` that belong to one epoch and section; ``step`` may lie after the last one."""
        stage = self.stage(step)
        span = stage.span_at(step)
        if stage is self.stages[-1]:
            return span
        return dataclasses.replace(span, stop_step=min(span.stop_step, stage.stop_step))

    def spans(self, start: int = 0) -> Iterator[EpochSpan]:
        """The epochs in order, from that of step ``start`` to the last step."""
        for stage in self.stages:
            yield from stage.spans(start)

    def locate(self, step: int) -> tuple[int, int]:
        """The epoch of a step, and its number in the epoch's plan."""
        span = self.span_at(step)
        return span.epoch, step - span.first_step

    def plan_of(self, epoch: int) -> EpochPlan:
        """The plan of an epoch as its packs were last assigned."""
        begun = [stage for stage in self.stages if stage.first_epoch <= epoch]
        stage = begun[-1] if begun else self.stages[0]
        return stage.sections[-1].plan_of(epoch)

    def epochs(self, step: int) -> float:
        """Epochs done after ``step`` steps, as a fraction; the partial epoch of a stage counts as a whole one."""
        span = self.span_at(step)
        epoch_step, section = step - span.first_step, span.section
        if self.inputs.stages:
            return span.epoch + epoch_step / max(span.num_steps, 1)
        if section.first_step == 0 and section.partial_plan is None:
            return step / self.steps_per_epoch
        if span.is_partial:  # earlier steps of the epoch were trained before this section
            epoch_step += max(self.steps_per_epoch - section.num_partial_steps, 0)
        return span.epoch + epoch_step / self.steps_per_epoch

    def target_tokens_from(self, start: int) -> int:
        """Target tokens of all steps from ``start``, over all ranks."""
        return sum(span.target_tokens_from(start) for span in self.spans(start))

    def num_steps_without_packing(self) -> int:
        """Steps of the run with one sample a row."""
        if self.inputs.stages:
            return math.ceil(self._sum_over_epochs(lambda plan: plan.summary.num_steps_without_packing))
        return math.ceil(self.num_steps / self.steps_per_epoch * self.first_plan.summary.num_steps_without_packing)

    def num_empty_micro_batches(self) -> int:
        """Micro-batches without samples, over all ranks and full epochs, if each has as many as the first."""
        if self.inputs.stages:
            return round(self._sum_over_epochs(lambda plan: plan.steps.num_empty_micro_batches))
        return self.num_steps // self.steps_per_epoch * self.first_plan.steps.num_empty_micro_batches

    def slowest_flops(self) -> float:
        """FLOPs of all steps if every rank had as many as the slowest of its step; plans need costs."""

        def slowest_flops_of_epoch(plan: EpochPlan) -> float:
            assert plan.summary.balance is not None, "costs are known"
            return plan.summary.balance.flops * plan.summary.balance.mean

        return self._sum_over_epochs(slowest_flops_of_epoch)

    def _sum_over_epochs(self, figure: Callable[[EpochPlan], float]) -> float:
        """Sum a figure of each epoch's plan, times the fraction of its steps that is trained."""
        trained_figures = []
        for span in self.spans():
            plan = span.typical_plan
            trained_figures.append(figure(plan) * (span.num_steps) / max(plan.steps.num_steps, 1))
        return sum(trained_figures)

    def counts_of_steps(self) -> Int64Array:
        """Samples, tokens and target tokens of each source in each step of the run, int64 (T, S, 3)."""
        counts = []
        for span in self.spans():
            plan, mixture = span.typical_plan, span.section.inputs.mixture
            assert mixture is not None, "a run with a mixture"
            counts.append(counts_of_steps(plan.packs, plan.steps, mixture)[: span.num_steps])
        return np.concatenate(counts)

    def figures(self) -> list[dict[str, Any]]:
        """The figures of each stage, as JSON has them; empty without stages."""
        if not self.inputs.stages:
            return []
        num_stages = self.stages[-1].number + 1
        return [{"stage": stage.number + 1, "stages": num_stages, **stage.figures()} for stage in self.stages]

    def lines(self) -> Iterator[str]:
        """The samples and sources of each stage, for the log."""
        for figures in self.figures():
            yield f"{stage_title(figures)}: {figures['samples']:,} samples"
            if left_out := figures["filtered"]:
                why = f"longer than {figures['max_length']:,} tokens, or excluded by the limits of their source"
                yield f"  {left_out:,} samples of its sources are left out: {why}"
            yield from source_lines(figures["sources"])

    def stage_line(self, step: int) -> str | None:
        """The message that a stage begins after ``step`` steps; None if none does."""
        if all(stage.first_step != step for stage in self.stages):
            return None  # figures take time
        for figures in self.figures():
            if figures["first_step"] == step + 1:
                return stage_title(figures).replace(", ", " begins: ", 1)
        return None


def stage_title(figures: Mapping[str, Any]) -> str:
    """The title of a stage: ``stage 2 of 2, steps 91 to 100, packs of 131,072 tokens``."""
    length, size = figures["packing_length"], figures["sequence_parallel_size"]
    packs = f", packs of {length:,} tokens" if length is not None else ""
    shared = f", each on {size} processes" if size > 1 else ""
    steps = f"steps {figures['first_step']:,} to {figures['last_step']:,}"
    return f"stage {figures['stage']} of {figures['stages']}, {steps}{packs}{shared}"


class _StageStart(NamedTuple):
    """The point of a run at which a stage starts."""

    number: int  # of the stage, 0-based
    step: int
    epoch: int
    training_counts: Int64Array  # of each sample, before the stage, (N,)


def _stages(inputs: Inputs, assignments: Sequence[Assignment], change: DataChange | None) -> Iterator[TrainedStage]:
    """Yield the stages of a run, each with the plan of its first epoch; after a change, the stages from there on."""
    if change is None:
        start = _StageStart(0, step=0, epoch=0, training_counts=np.zeros(len(inputs.lengths), np.int64))
        stage = _stage(inputs, start, assignments)
    else:
        assert change.stage is not None, "a change of a run with stages"
        number, _ = change.stage
        training_counts = concatenate_counts(change.trained)
        start = _StageStart(number, step=change.step, epoch=change.epoch, training_counts=training_counts)
        stage = _stage_after_change(inputs, start, assignments, change)
    yield stage
    while start.number + 1 < len(inputs.stages):
        start = _next_start(start, stage)
        stage = _stage(inputs, start, assignments)
        yield stage


def _next_start(start: _StageStart, stage: TrainedStage) -> _StageStart:
    """The start of the stage after ``stage``, which starts at ``start``."""
    step, epoch = start.step, start.epoch
    if stage.stop_step > step:  # otherwise the stage has no steps
        step = stage.stop_step
        epoch = stage.sections[-1].span_at(step - 1).epoch
    training_counts = start.training_counts + stage.training_counts()
    return _StageStart(start.number + 1, step, epoch + 1, training_counts)  # every stage starts a new epoch


def _stage(inputs: Inputs, start: _StageStart, assignments: Sequence[Assignment]) -> TrainedStage:
    """The stage that starts at ``start``, where no data has changed since."""
    run_shape = _shape_at(assignments, start.step)
    fraction, num_epochs = inputs.first_epoch_fraction(start.number, start.step, run_shape)
    section = _first_section(inputs, start, fraction, inputs.stage_batch_shape(start.number, run_shape))
    return _assigned_stage(inputs, start, assignments, section, first_epoch=start.epoch, num_epochs=num_epochs)


def _stage_after_change(
    inputs: Inputs, start: _StageStart, assignments: Sequence[Assignment], change: DataChange
) -> TrainedStage:
    """The rest of the stage in which the data changed, from the change on."""
    assert change.stage is not None, "a change of a run with stages"
    number, first_epoch = change.stage  # the stage may have begun before the change
    run_shape = _shape_at(assignments, start.step)
    _, num_epochs = inputs.first_epoch_fraction(number, start.step, run_shape)
    batch_shape = inputs.stage_batch_shape(number, run_shape)
    section = Section.after_change(inputs.stages[number], batch_shape, change)
    return _assigned_stage(inputs, start, assignments, section, first_epoch=first_epoch, num_epochs=num_epochs)


def _shape_at(assignments: Sequence[Assignment], step: int) -> BatchShape:
    """The batch shape of a run at ``step``: that of the last assignment until then."""
    return [each.batch_shape for each in assignments if each.first_step <= step][-1]


def _assigned_stage(
    inputs: Inputs,
    start: _StageStart,
    assignments: Sequence[Assignment],
    first_section: Section,
    *,
    first_epoch: int,
    num_epochs: int,
) -> TrainedStage:
    """Make a stage of a run from its first section, and from the assignments of packs to ranks.

    Args:
        assignments: of the run; those after ``start`` start further sections.
        first_section: the first epochs of the stage; after a change of the data, those that are left.
        first_epoch, num_epochs: of the complete stage; without ``--max-steps``, it ends after them.
    """
    number = start.number
    reassignments = []
    for assignment in assignments:
        if assignment.first_step > start.step:
            batch_shape = inputs.stage_batch_shape(number, assignment.batch_shape)
            reassignments.append(Assignment.of(assignment.first_step, batch_shape))
    stop_epoch = first_epoch + num_epochs
    stop_step = None if inputs.config.max_steps is None else inputs.stage_stop_step(number)
    return TrainedStage.of(
        number, first_epoch, first_section, reassignments, stop_epoch=stop_epoch, max_steps=stop_step
    )


def _first_section(inputs: Inputs, start: _StageStart, fraction: float, batch_shape: BatchShape) -> Section:
    """The first section of a stage: a ``fraction`` of an epoch, in (0, 1], and full epochs after it."""
    stage = inputs.stages[start.number]
    plan = _plan_first_epoch(stage, start, fraction, batch_shape)
    if inputs.config.max_steps is None:
        return Section(stage, batch_shape, start.step, start.epoch, plan)
    steps_per_epoch = stage.plan_of(0, batch_shape).steps.num_steps
    num_steps = round(fraction * steps_per_epoch)
    while plan.steps.num_steps < num_steps:
        # Too few steps would end the run early, so draw more samples: for half a step too many, as counts are rounded.
        num_missing = num_steps - plan.steps.num_steps
        fraction += (num_missing + 0.5) / steps_per_epoch
        plan = _plan_first_epoch(stage, start, fraction, batch_shape)
    return Section(stage, batch_shape, start.step, start.epoch, plan, max_partial_steps=num_steps)


def _plan_first_epoch(stage: Inputs, start: _StageStart, fraction: float, batch_shape: BatchShape) -> EpochPlan:
    """Plan the ``fraction`` of an epoch that a stage trains first, of the least trained samples."""
    assert stage.mixture is not None, "every stage has a mixture"
    mixture = stage.mixture.partial_epoch(fraction, start.training_counts)
    return stage.plan_mixture(mixture, start.epoch, batch_shape)
