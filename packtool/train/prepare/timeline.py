"""All optimizer steps of a run, numbered from 0: a timeline of stages, of sections, of stretches of one epoch each.

A run without stages is one stage. A section is what is assigned to the same ranks: resuming with another number of
processes, or with other data, begins a new one with a plan of what is left of the epoch. Stages of a curriculum:

    until: 30%    | 30% of --max-steps, or of --num-train-epochs: 0.3 epochs of the first stage's mixture
    stage 1       | part of an epoch   epoch 0
    stage 2       | part of an epoch   epoch 1      from what was trained least often before
                  | whole epochs       epochs 2, 3  drawn as ever

Every stage begins a new epoch, for seeds and for the ledger: nothing comes again in an epoch until all of it has come.
What a stage has beside whole epochs comes first, so that all that is drawn is trained, and what was trained in the
stages before comes last: a part of an epoch is a mixture of its own (``Mixture.part``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from packtool.planning.epoch import EpochPlan
from packtool.planning.ledger import DataChange, joined_counts
from packtool.planning.mixture import Mixture, by_name, counts_of_samples, counts_of_steps, share_figures
from packtool.planning.pack_plan import Int64Array
from packtool.train.prepare.inputs import BatchShape, Inputs
from packtool.train.prepare.mixtures import source_lines


@dataclass(frozen=True)
class OpenTimeline:
    """The steps of a run whose samples nobody has counted: in no epochs.

    Args:
        num_steps: at most.
    """

    num_steps: int

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the whole run, because nobody knows where an epoch ends."""
        return self.num_steps

    def locate(self, step: int) -> tuple[int, int]:
        """Epoch and step within it."""
        return 0, step

    def epochs(self, step: int) -> float:
        """What part of the run is done after so many steps."""
        return step / self.num_steps


@dataclass(frozen=True, eq=False)
class EpochStretch:
    """Consecutive steps that the plan of one epoch has.

    Args:
        section: that it belongs to.
        epoch: whose seeds its plan has.
        first: step of the run that is step 0 of its plan.
        stop: step of the run behind its last one.
    """

    section: Section
    epoch: int
    first: int
    stop: int

    @property
    def plan(self) -> EpochPlan:
        """What the epoch has, as far as it was assigned at once."""
        return self.section.plan_of(self.epoch)

    @property
    def is_part(self) -> bool:
        """Whether its plan is that of a part of an epoch."""
        return self.section.part is not None and self.epoch == self.section.epoch

    @property
    def is_whole(self) -> bool:
        """Whether it has all steps of an epoch."""
        return not self.is_part and self.stop - self.first == self.section.steps_per_epoch

    @property
    def typical_plan(self) -> EpochPlan:
        """Its plan; of a whole epoch, which has other samples in the same shares, the first one's."""
        return self.section.whole if self.is_whole else self.plan

    def samples(self) -> Int64Array:
        """Cache positions of what it trains, int64 (M,), in no order."""
        mixture = self.section.inputs.mixture
        if self.is_whole and mixture is not None:
            return mixture.drawn(self.epoch)
        return self.plan.samples_of(0, self.stop - self.first)

    def target_tokens_from(self, start: int) -> int:
        """Labels that carry loss in its steps from ``start`` on, a step of the run."""
        if self.is_whole and start <= self.first:
            inputs = self.section.inputs
            if inputs.mixture is not None:
                return int(inputs.targets[inputs.mixture.drawn(self.epoch)].sum())
            return int(self.section.whole.steps.target_tokens_per_step.sum())  # every epoch has the same samples
        per_step = self.plan.steps.target_tokens_per_step
        return int(per_step[max(start - self.first, 0) : self.stop - self.first].sum())


@dataclass(frozen=True, eq=False)
class Section:
    """Epochs one behind the other whose packs are assigned to the same ranks, without end.

    Args:
        first: step of the run that it begins with.
        epoch: that it begins with.
        part: plan of the part of that epoch that it has; None for all of it.
        max_part_steps: steps of ``part`` that are trained; None for all.
    """

    inputs: Inputs
    assignment: BatchShape
    first: int = 0
    epoch: int = 0
    part: EpochPlan | None = None
    max_part_steps: int | None = None

    @classmethod
    def after_change(cls, inputs: Inputs, assignment: BatchShape, change: DataChange) -> Section:
        """What was left of an epoch when the data changed, and the epochs behind it."""
        left = inputs.plan_left(change, assignment)
        return cls(inputs, assignment, change.step, change.epoch + (left is None), left)

    def resumed(self, step: int, assignment: BatchShape) -> Section:
        """What it has from a step on, assigned to other ranks."""
        stretch = self.stretch(step)
        left = stretch.plan.packs_from(step - stretch.first)
        return Section(self.inputs, assignment, step, stretch.epoch, self.inputs.assign(left, assignment))

    @cached_property
    def whole(self) -> EpochPlan:
        """The plan of a whole epoch; all have as many steps."""
        return self.inputs.plan_of(0, self.assignment)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a whole epoch."""
        return self.whole.steps.num_steps

    @property
    def num_part_steps(self) -> int:
        """Steps of the part of an epoch that it begins with; 0 if it begins with a whole one."""
        num = 0 if self.part is None else self.part.steps.num_steps
        return num if self.max_part_steps is None else min(num, self.max_part_steps)

    def plan_of(self, epoch: int) -> EpochPlan:
        """The plan of one of its epochs."""
        if self.part is not None and epoch == self.epoch:
            return self.part
        return self.inputs.plan_of(epoch, self.assignment)

    def end(self, num_epochs: float, max_steps: int | None) -> int:
        """Steps of the run that are done when it has so many epochs, counted from the run's beginning.

        Args:
            max_steps: that is it where it is given.
        """
        if max_steps:
            return max_steps
        epochs = num_epochs - self.epoch
        if self.part is None:
            return self.first + math.ceil(max(epochs, 0.0) * self.steps_per_epoch)
        if epochs == 1:
            return self.first + self.num_part_steps
        # The same share of the epochs, in steps of another size.
        each = self.steps_per_epoch
        left = math.ceil(max(min(epochs, 1.0) * each - (each - self.num_part_steps), 0))
        return self.first + left + math.ceil(max(epochs - 1, 0.0) * each)

    def stretch(self, step: int) -> EpochStretch:
        """The epoch that a step of the run lies in."""
        assert step >= self.first, "earlier steps were assigned before"
        first = self.first + self.num_part_steps
        if step < first:
            return EpochStretch(self, self.epoch, self.first, first)
        each = self.steps_per_epoch
        number = (step - first) // each
        first += number * each
        return EpochStretch(self, self.epoch + (self.part is not None) + number, first, first + each)


@dataclass(frozen=True, eq=False)
class TrainedStage:
    """A stage as it is trained, or what is left of it; a run without stages is one.

    Args:
        number: of the stage, 0-based.
        epoch: that it begins with.
        sections: of its steps, each from where packs were assigned.
        stop: steps of the run that are done when it ends.
    """

    number: int
    epoch: int
    sections: tuple[Section, ...]
    stop: int

    @classmethod
    def of(
        cls,
        number: int,
        epoch: int,
        section: Section,
        later: Sequence[tuple[int, BatchShape]],
        num_epochs: float,
        max_steps: int | None,
    ) -> TrainedStage:
        """A stage that is assigned anew after some steps.

        Args:
            section: from its first step on.
            later: steps after which other processes go on, and assignments to them.
            num_epochs, max_steps: of the run when it ends.
        """
        sections = [section]
        for step, assignment in later:
            if step >= sections[-1].end(num_epochs, max_steps):
                break
            sections.append(sections[-1].resumed(step, assignment))
        return cls(number, epoch, tuple(sections), sections[-1].end(num_epochs, max_steps))

    @property
    def first(self) -> int:
        """Its first step."""
        return self.sections[0].first

    @property
    def inputs(self) -> Inputs:
        """What its epochs are planned from."""
        return self.sections[0].inputs

    @property
    def mixture(self) -> Mixture:
        """What its whole epochs have."""
        assert self.inputs.mixture is not None, "stages have recipes"
        return self.inputs.mixture

    def stretch(self, step: int) -> EpochStretch:
        """The epoch that a step lies in, as far as it was assigned at once."""
        number = max((n for n, section in enumerate(self.sections) if section.first <= step), default=0)
        stretch = self.sections[number].stretch(step)
        if number + 1 == len(self.sections):
            return stretch
        return dataclasses.replace(stretch, stop=min(stretch.stop, self.sections[number + 1].first))

    def stretches(self, start: int = 0) -> Iterator[EpochStretch]:
        """Its epochs from that of a step on, one behind the other."""
        step = max(start, self.first)
        while step < self.stop:
            stretch = self.stretch(step)
            yield dataclasses.replace(stretch, stop=min(stretch.stop, self.stop))
            step = stretch.stop

    def trained(self) -> Int64Array:
        """How often it trains each sample of the caches, (N,)."""
        counts = np.zeros(len(self.inputs.lengths), np.int64)
        for stretch in self.stretches():
            counts += np.bincount(stretch.samples(), minlength=len(counts))
        return counts

    def counts(self) -> Int64Array:
        """Samples, tokens and target tokens that it has of each source, int64 (S, 3)."""
        nothing = np.zeros((len(self.mixture.names), 3), np.int64)
        return sum((counts_of_samples(stretch.samples(), self.mixture) for stretch in self.stretches()), nothing)

    def figures(self) -> dict[str, Any]:
        """What it is, and has of each source, by name."""
        options = self.inputs.options
        shares = share_figures(by_name(self.counts(), self.mixture))
        sources = {name: each for name, each in shares.items() if each["num_samples"]}
        trained, filtered = self.trained(), self.mixture.num_filtered
        num_distinct = int(np.count_nonzero(trained))
        return {
            "first_step": self.first + 1,
            "last_step": self.stop,
            "packing_length": options.packing_length if options.packing else None,
            "sequence_parallel_size": self.inputs.sequence_parallel_size,
            "max_length": options.max_length,
            "samples": sum(each["num_samples"] for each in sources.values()),
            "num_samples_in_caches": len(trained),
            "num_distinct_samples": num_distinct,
            "not_drawn": len(trained) - num_distinct - filtered,
            "filtered": filtered,
            "sources": sources,
        }


@dataclass(frozen=True, eq=False)
class Timeline:
    """The steps of a run whose epochs are planned.

    Args:
        inputs: of the run.
        stages: one behind the other, up to the last; those that were trained before the data changed are not there.
    """

    inputs: Inputs
    stages: tuple[TrainedStage, ...]

    @classmethod
    def of(
        cls, inputs: Inputs, assignments: Sequence[tuple[int, int, int, int]], change: DataChange | None = None
    ) -> Timeline:
        """The steps of a run, with the rest of an epoch assigned anew wherever the number of processes changed.

        Args:
            assignments: since the data last changed, if they did: the step, and world size, gradient accumulation and
                batch size from there on.
            change: the last change of the data, from which on steps can be asked for; None if there was none.
        """
        if inputs.stages:
            return cls(inputs, tuple(_stages(inputs, assignments, change)))
        (_, *first), *others = assignments
        assignment, config = _assignment(first), inputs.config
        section = Section(inputs, assignment) if change is None else Section.after_change(inputs, assignment, change)
        later = [(step, _assignment(each)) for step, *each in others]
        return cls(inputs, (TrainedStage.of(0, 0, section, later, config.num_train_epochs, config.max_steps),))

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self.stages[-1].stop

    @cached_property
    def first(self) -> EpochPlan:
        """The plan of a whole epoch; with stages of the first, which may be a part of one."""
        section = self.stages[0].sections[-1]
        return section.plan_of(section.epoch) if self.inputs.stages else section.whole

    @cached_property
    def steps_per_epoch(self) -> int:
        """Steps of that epoch."""
        return self.first.steps.num_steps

    def stage(self, step: int) -> TrainedStage:
        """The stage that a step lies in."""
        return next((stage for stage in self.stages if step < stage.stop), self.stages[-1])

    def stage_of(self, step: int) -> tuple[int, int] | None:
        """The 0-based number of the stage that a step lies in, and the epoch that it begins with; None without."""
        stage = self.stage(step)
        return (stage.number, stage.epoch) if self.inputs.stages else None

    def stretch(self, step: int) -> EpochStretch:
        """The epoch that a step lies in, as far as it was assigned at once; also behind the last step."""
        stage = self.stage(step)
        stretch = stage.stretch(step)
        return stretch if stage is self.stages[-1] else dataclasses.replace(stretch, stop=min(stretch.stop, stage.stop))

    def stretches(self, start: int = 0) -> Iterator[EpochStretch]:
        """The epochs from that of a step on, up to the last step."""
        for stage in self.stages:
            yield from stage.stretches(start)

    def locate(self, step: int) -> tuple[int, int]:
        """Epoch and step within its plan."""
        stretch = self.stretch(step)
        return stretch.epoch, step - stretch.first

    def plan_of(self, epoch: int) -> EpochPlan:
        """The plan of an epoch, from where its packs were assigned last."""
        stage = next(stage for stage in reversed(self.stages) if stage.epoch <= epoch or stage is self.stages[0])
        return stage.sections[-1].plan_of(epoch)

    def epochs(self, step: int) -> float:
        """How many epochs are done after so many steps, with the part of the one that is being trained.

        With stages, a part of an epoch counts as one.
        """
        stretch = self.stretch(step)
        done, section = step - stretch.first, stretch.section
        if self.inputs.stages:
            return stretch.epoch + done / max(stretch.stop - stretch.first, 1)
        if section.first == 0 and section.part is None:
            return step / self.steps_per_epoch
        if stretch.is_part:
            done += max(self.steps_per_epoch - section.num_part_steps, 0)
        return stretch.epoch + done / self.steps_per_epoch

    def target_tokens_from(self, start: int) -> int:
        """Labels that carry loss in all steps from ``start`` on, over all ranks."""
        return sum(stretch.target_tokens_from(start) for stretch in self.stretches(start))

    def num_steps_without_packing(self) -> int:
        """Steps of the run if every sample were a row."""
        if self.inputs.stages:
            return math.ceil(sum(self._sums(lambda plan: plan.summary.num_steps_without_packing)))
        return math.ceil(self.num_steps / self.steps_per_epoch * self.first.summary.num_steps_without_packing)

    def num_empty_micro_batches(self) -> int:
        """Micro-batches without samples in all whole epochs, over all ranks, if they have as many as the first.

        They lie in the last steps of epochs. Skrull has some in other steps too, and not quite as many in every epoch.
        """
        if self.inputs.stages:
            return round(sum(self._sums(lambda plan: plan.steps.num_empty_micro_batches)))
        return self.num_steps // self.steps_per_epoch * self.first.steps.num_empty_micro_batches

    def slowest_flops(self) -> float:
        """FLOPs of all steps if every rank had as many as the slowest of its step; plans must know costs."""

        def of_epoch(plan: EpochPlan) -> float:
            assert plan.summary.balance is not None, "costs are known"
            return plan.summary.balance.flops * plan.summary.balance.mean

        return sum(self._sums(of_epoch))

    def _sums(self, number: Callable[[EpochPlan], float]) -> Iterator[float]:
        """A number of each epoch's plan, in the share of its steps that is trained."""
        for stretch in self.stretches():
            plan = stretch.typical_plan
            yield number(plan) * (stretch.stop - stretch.first) / max(plan.steps.num_steps, 1)

    def counts_of_steps(self) -> Int64Array:
        """Samples, tokens and target tokens of each source in each step of the run, int64 (T, S, 3).

        Of whole epochs of a stage the first one stands for all: their samples are drawn anew, in the same shares.
        """
        counts = []
        for stretch in self.stretches():
            plan, mixture = stretch.typical_plan, stretch.section.inputs.mixture
            assert mixture is not None, "asked of mixtures alone"
            counts.append(counts_of_steps(plan.packs, plan.steps, mixture)[: stretch.stop - stretch.first])
        return np.concatenate(counts)

    def figures(self) -> list[dict[str, Any]]:
        """What each stage is and has, by name, as JSON has it; nothing of a run without stages."""
        if not self.inputs.stages:
            return []
        last = self.stages[-1].number + 1
        return [{"stage": stage.number + 1, "stages": last, **stage.figures()} for stage in self.stages]

    def lines(self) -> Iterator[str]:
        """What each stage has, for the log of a run."""
        for figures in self.figures():
            yield f"{stage_title(figures)}: {figures['samples']:,} samples"
            if left_out := figures["filtered"]:
                why = f"of more than {figures['max_length']:,} tokens, or outside what their source takes"
                yield f"  {left_out:,} samples of its sources are left out: {why}"
            yield from source_lines(figures["sources"])

    def stage_line(self, step: int) -> str | None:
        """What is to be said when so many steps are done: that a stage begins."""
        for figures in self.figures() if any(stage.first == step for stage in self.stages) else ():
            if figures["first_step"] == step + 1:
                return stage_title(figures).replace(", ", " begins: ", 1)
        return None


def stage_title(figures: Mapping[str, Any]) -> str:
    """What a stage is: ``stage 2 of 2, steps 91 to 100, packs of 131,072 tokens``."""
    length, size = figures["packing_length"], figures["sequence_parallel_size"]
    packs = f", packs of {length:,} tokens" if length is not None else ""
    shared = f", each on {size} processes" if size > 1 else ""
    steps = f"steps {figures['first_step']:,} to {figures['last_step']:,}"
    return f"stage {figures['stage']} of {figures['stages']}, {steps}{packs}{shared}"


def _assignment(values: Sequence[int]) -> BatchShape:
    world_size, accumulation, batch_size = values
    return world_size, accumulation, batch_size


def _stages(
    inputs: Inputs, assignments: Sequence[tuple[int, int, int, int]], change: DataChange | None
) -> Iterator[TrainedStage]:
    """The stages of a run; arguments as for ``Timeline.of``."""
    step, epoch, number = 0, 0, 0
    trained = np.zeros(len(inputs.lengths), np.int64)
    if change is not None:
        assert change.stage is not None, "a change of a run with stages"
        step, epoch, number = change.step, change.epoch, change.stage[0]
        trained = joined_counts(change.trained)
    while True:
        *_, (_, *now) = (each for each in assignments if each[0] <= step)
        later = [(at, inputs.scaled(number, _assignment(each))) for at, *each in assignments if at > step]
        begun, assignment = epoch, inputs.scaled(number, _assignment(now))
        share, num_epochs = inputs.stage_share(number, step, _assignment(now))
        if change is not None and change.stage is not None:
            begun = change.stage[1]
            section = Section.after_change(inputs.stages[number], assignment, change)
        else:
            section = _first_section(inputs, number, (step, epoch), share, trained, assignment)
        stop = None if inputs.config.max_steps is None else int(inputs.stage_end(number))
        stage = TrainedStage.of(number, begun, section, later, begun + num_epochs, stop)
        yield stage
        number += 1
        if number == len(inputs.stages):
            return
        if stage.stop > step:
            step = stage.stop
            epoch = stage.sections[-1].stretch(step - 1).epoch
        trained, epoch, change = trained + stage.trained(), epoch + 1, None


def _first_section(
    inputs: Inputs, number: int, start: tuple[int, int], share: float, trained: Int64Array, assignment: BatchShape
) -> Section:
    """A stage from its first epoch on, or the part of one that it has: where steps are told, not one too few.

    Args:
        start: its first step, and epoch.
        share: of the epoch, as ``Inputs.stage_share`` has it.
        trained: how often each sample was before, (N,).
    """
    stage = inputs.stages[number]
    assert stage.mixture is not None, "made with one"
    if inputs.config.max_steps is None:
        plan = stage.plan_mixture(stage.mixture.part(share, trained), start[1], assignment)
        return Section(stage, assignment, *start, plan)
    each = stage.plan_of(0, assignment).steps.num_steps
    num_steps = round(share * each)
    while True:
        plan = stage.plan_mixture(stage.mixture.part(share, trained), start[1], assignment)
        if plan.steps.num_steps >= num_steps:
            return Section(stage, assignment, *start, plan, num_steps)
        share += (num_steps - plan.steps.num_steps + 0.5) / each
