"""The steps of a run with stages: one schedule behind the other, and what each stage has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from packtool.plan.epoch import EpochPlan
from packtool.plan.mixture import Mixture, by_name, counts_of_samples, counts_of_steps, share_figures
from packtool.plan.options import PlanOptions
from packtool.plan.pack_plan import Int64Array
from packtool.train.prepare.mixtures import source_lines
from packtool.train.prepare.planner import Planner
from packtool.train.prepare.schedule import PlannedSchedule


@dataclass(frozen=True, eq=False)
class EpochStretch:
    """Steps of one epoch.

    Args:
        first, stop: steps of its plan; the second is not trained any more.
    """

    schedule: PlannedSchedule
    epoch: int
    first: int
    stop: int

    @property
    def plan(self) -> EpochPlan:
        """What the epoch has, as far as it was assigned at once."""
        return self.schedule.plan_of(self.epoch)

    @property
    def is_whole(self) -> bool:
        """Whether it is an epoch of the stage's mixture, and neither a part of it nor planned anew."""
        schedule = self.schedule
        return not schedule.is_rest(self.epoch) and (self.first, self.stop) == (0, schedule.steps_per_epoch)


@dataclass(frozen=True, eq=False)
class StagePart:
    """A stage as it is trained, or what is left of it.

    Args:
        number: of the stage, 0-based.
        epoch: that it begins with.
        first: step, 0-based.
        schedules: of its steps, numbered as in the run, each behind the step from which it was assigned.
        planner: of its epochs.
        sequence_parallel_size: processes that share each of its packs.
    """

    number: int
    epoch: int
    first: int
    schedules: tuple[tuple[int, PlannedSchedule], ...]
    planner: Planner
    sequence_parallel_size: int

    @property
    def schedule(self) -> PlannedSchedule:
        """The schedule of its last steps, from where packs were assigned last."""
        return self.schedules[-1][1]

    @property
    def stop(self) -> int:
        """Steps of the run that are done when it ends."""
        return self.schedule.num_steps

    @property
    def epoch_of_its_own(self) -> tuple[EpochPlan, Mixture, PlanOptions]:
        """The plan of a whole epoch of its mixture, that, and the options that it is planned with."""
        plan = self.schedule.first
        return plan, self.mixture, replace(self.planner.options, world_size=plan.steps.world_size)

    def stretches(self) -> Iterator[EpochStretch]:
        """Its epochs, one behind the other."""
        stops = [*(first for first, _ in self.schedules[1:]), self.stop]
        for (step, schedule), stop in zip(self.schedules, stops, strict=True):
            while step < stop:
                epoch, done = schedule.locate(step)
                end = min(schedule.epoch_end(step), stop)
                yield EpochStretch(schedule, epoch, done, done + end - step)
                step = end

    @property
    def mixture(self) -> Mixture:
        """What its whole epochs have."""
        assert self.planner.mixture is not None, "stages have recipes"
        return self.planner.mixture

    def samples(self) -> Iterator[Int64Array]:
        """The samples of each of its epochs that are trained, positions in the caches (M,), in no order."""
        for each in self.stretches():
            yield self.mixture.drawn(each.epoch) if each.is_whole else each.plan.samples_of(each.first, each.stop)

    def trained(self) -> Int64Array:
        """How often it trains each sample of the caches, (N,)."""
        counts = np.zeros(len(self.planner.index.length), np.int64)
        for samples in self.samples():
            counts += np.bincount(samples, minlength=len(counts))
        return counts

    def counts(self) -> Int64Array:
        """Samples, tokens and target tokens that it has of each source, int64 (S, 3)."""
        nothing = np.zeros((len(self.mixture.names), 3), np.int64)
        return sum((counts_of_samples(samples, self.mixture) for samples in self.samples()), nothing)

    def figures(self) -> dict[str, Any]:
        """What it is, and has of each source, by name."""
        options = self.planner.options
        shares = share_figures(by_name(self.counts(), self.mixture))
        sources = {name: each for name, each in shares.items() if each["num_samples"]}
        trained, filtered = self.trained(), self.mixture.num_filtered
        num_distinct = int(np.count_nonzero(trained))
        return {
            "first_step": self.first + 1,
            "last_step": self.stop,
            "packing_length": options.packing_length if options.packing else None,
            "sequence_parallel_size": self.sequence_parallel_size,
            "max_length": options.max_length,
            "samples": sum(each["num_samples"] for each in sources.values()),
            "num_samples_in_caches": len(trained),
            "num_distinct_samples": num_distinct,
            "not_drawn": len(trained) - num_distinct - filtered,
            "filtered": filtered,
            "sources": sources,
        }


class StagedSchedule(PlannedSchedule):
    """The steps of a run with stages.

    Args:
        parts: one behind the other, up to the last; those that were trained before the data changed are not there.
    """

    def __init__(self, parts: Sequence[StagePart]) -> None:
        self.parts = tuple(parts)
        at, schedule = self.parts[0].schedules[-1]
        self.first = schedule.plan_of(schedule.locate(at)[0])
        self.steps_per_epoch = self.first.steps.num_steps
        self.num_steps = self.parts[-1].stop

    def part_of(self, step: int) -> StagePart:
        """The part that a step lies in."""
        return next((part for part in self.parts if step < part.stop), self.parts[-1])

    def plan_of(self, epoch: int) -> EpochPlan:
        """The plan of an epoch, which the parts remember."""
        part = next(part for part in reversed(self.parts) if part.epoch <= epoch or part is self.parts[0])
        return part.schedule.plan_of(epoch)

    def locate(self, step: int) -> tuple[int, int]:
        """Epoch and step within it."""
        return self.part_of(step).schedule.locate(step)

    def epoch_end(self, step: int) -> int:
        """See ``PlannedSchedule``."""
        part = self.part_of(step)
        end = part.schedule.epoch_end(step)
        return end if part is self.parts[-1] else min(end, part.stop)

    def stage_of(self, step: int) -> tuple[int, int]:
        """See ``PlannedSchedule``."""
        part = self.part_of(step)
        return part.number, part.epoch

    def epochs(self, step: int) -> float:
        """How many epochs are begun and done after so many steps; a part of one counts as one."""
        epoch, done = self.locate(step)
        return epoch + done / max(self.epoch_end(step) - step + done, 1)

    def sum_of_target_tokens(self, start: int) -> int:
        """See ``PlannedSchedule``."""
        parts = (part for part in self.parts if part.stop > start)
        return sum(part.schedule.sum_of_target_tokens(max(start, part.first)) for part in parts)

    def num_empty_micro_batches(self) -> int:
        """See ``PlannedSchedule``."""
        return round(sum(self._sums(lambda plan: plan.steps.num_empty_micro_batches)))

    def num_steps_without_packing(self) -> int:
        """See ``PlannedSchedule``."""
        return math.ceil(sum(self._sums(lambda plan: plan.summary.num_steps_without_packing)))

    def slowest_flops(self) -> float:
        """FLOPs of all steps if every rank had as many as the slowest of its step; plans must know costs."""

        def of_epoch(plan: EpochPlan) -> float:
            assert plan.summary.balance is not None, "costs are known"
            return plan.summary.balance.flops * plan.summary.balance.mean

        return sum(self._sums(of_epoch))

    def _sums(self, number: Callable[[EpochPlan], float]) -> Iterator[float]:
        """A number of each epoch's plan, in the share of its steps that is trained."""
        for part in self.parts:
            for each in part.stretches():
                plan = each.schedule.first if each.is_whole else each.plan
                yield number(plan) * (each.stop - each.first) / max(plan.steps.num_steps, 1)

    def counts_of_steps(self) -> Int64Array:
        """Samples, tokens and target tokens of each source in each step of the run, int64 (T, S, 3).

        Of whole epochs of a stage the first one stands for all: their samples are drawn anew, in the same shares.
        """
        found = []
        for part in self.parts:
            for each in part.stretches():
                plan = each.schedule.first if each.is_whole else each.plan
                found.append(counts_of_steps(plan.packs, plan.steps, part.mixture)[each.first : each.stop])
        return np.concatenate(found)

    def figures(self) -> list[dict[str, Any]]:
        """What each stage is and has, by name, as JSON has it."""
        last = self.parts[-1].number + 1
        return [{"stage": part.number + 1, "stages": last, **part.figures()} for part in self.parts]

    def lines(self) -> Iterator[str]:
        """What each stage has, for the log of a run."""
        for figures in self.figures():
            yield f"{stage_title(figures)}: {figures['samples']:,} samples"
            if left_out := figures["filtered"]:
                why = f"of more than {figures['max_length']:,} tokens, or outside what their source takes"
                yield f"  {left_out:,} samples of its sources are left out: {why}"
            yield from source_lines(figures["sources"])

    def beginning(self, step: int) -> str | None:
        """What is to be said when so many steps are done: that a stage begins."""
        for figures in self.figures() if any(part.first == step for part in self.parts) else ():
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
