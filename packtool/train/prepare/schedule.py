"""All optimizer steps of a run, numbered through its epochs; no torch, so that plans are checked in a second."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from packtool.plan.epoch import EpochPlan
from packtool.plan.pack_plan import PackPlan


class Schedule(Protocol):
    """The optimizer steps of a run, numbered through from 0."""

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which every sample is seen once."""

    def locate(self, step: int) -> tuple[int, int]:
        """Epoch and step within it."""

    def epochs(self, step: int) -> float:
        """How many epochs are done after so many steps."""


@dataclass(frozen=True)
class OpenSchedule:
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
class Rest:
    """What was left of an epoch when a run was resumed with another number of processes, or with other data.

    Args:
        step: the first that is assigned anew.
        epoch: that it lies in.
        plan: the packs that were not trained yet, assigned to the processes there are now; None if there are none.
        most: steps that are trained of it; None for all.
    """

    step: int
    epoch: int
    plan: EpochPlan | None
    most: int | None = None

    @property
    def num_steps(self) -> int:
        """Steps of the epoch from there on."""
        num = 0 if self.plan is None else self.plan.steps.num_steps
        return num if self.most is None else min(num, self.most)


class PlannedSchedule:
    """The steps of a run whose epochs are planned.

    Args:
        plan_of: the plan of an epoch, which remembers the last ones; all epochs have as many steps.
        num_epochs: may have a fraction.
        max_steps: fewer or more steps than the epochs have; None for as many.
        rest: stands for the part of its epoch that was left; earlier steps are not to be asked for.
        targets_of: labels that carry loss in a whole epoch; None where every epoch has the same samples.
    """

    def __init__(
        self,
        plan_of: Callable[[int], EpochPlan],
        *,
        num_epochs: float,
        max_steps: int | None,
        rest: Rest | None = None,
        targets_of: Callable[[int], int] | None = None,
    ) -> None:
        self._whole_of, self._rest, self._targets_of = plan_of, rest, targets_of
        if rest is None:
            self.plan_of = plan_of
            self.num_steps = max_steps or math.ceil(num_epochs * self.steps_per_epoch)
            return
        self.plan_of = lambda epoch: rest.plan if epoch == rest.epoch and rest.plan is not None else plan_of(epoch)
        # The same share of the epochs, in steps of another size.
        self.num_steps = max_steps or rest.step + self._steps_behind(rest, num_epochs - rest.epoch)

    @cached_property
    def first(self) -> EpochPlan:
        """The plan of a whole epoch, made when it is asked for."""
        return self._whole_of(0)

    @cached_property
    def steps_per_epoch(self) -> int:
        """Steps of a whole epoch."""
        return self.first.steps.num_steps

    def _steps_behind(self, rest: Rest, epochs: float) -> int:
        """Steps from ``rest`` on, given how many epochs there are from the beginning of its own."""
        if epochs == 1:
            return rest.num_steps
        each = self.steps_per_epoch
        left = math.ceil(max(min(epochs, 1.0) * each - (each - rest.num_steps), 0))
        return left + math.ceil(max(epochs - 1, 0.0) * each)

    def locate(self, step: int) -> tuple[int, int]:
        """Epoch and step within it."""
        if self._rest is None:
            return divmod(step, self.steps_per_epoch)
        step -= self._rest.step
        assert step >= 0, "steps before the rest were assigned by another schedule"
        num_left = self._rest.num_steps
        if step < num_left:
            return self._rest.epoch, step
        epochs, step_in_epoch = divmod(step - num_left, self.steps_per_epoch)
        return self._rest.epoch + 1 + epochs, step_in_epoch

    def epoch_end(self, step: int) -> int:
        """Steps that are done when the epoch, or its stage, ends that a step, 0-based, lies in."""
        epoch, done = self.locate(step)
        rest = self._rest
        num_steps = rest.num_steps if rest is not None and epoch == rest.epoch else self.steps_per_epoch
        return step - done + num_steps

    def is_rest(self, epoch: int) -> bool:
        """Whether it is the epoch of ``rest``."""
        return self._rest is not None and epoch == self._rest.epoch

    def stage_of(self, step: int) -> tuple[int, int] | None:
        """The 0-based number of the stage that a step lies in, and the epoch that it begins with; None without."""
        return None

    def epochs(self, step: int) -> float:
        """How many epochs are done after so many steps, with the part of the one that is being trained."""
        if self._rest is None:
            return step / self.steps_per_epoch
        epoch, done = self.locate(step)
        if epoch == self._rest.epoch:
            done += max(self.steps_per_epoch - self._rest.num_steps, 0)
        return epoch + done / self.steps_per_epoch

    def target_tokens(self, step: int) -> int:
        """Labels that carry loss in a step, over all ranks."""
        epoch, step_in_epoch = self.locate(step)
        return self.plan_of(epoch).steps.target_tokens(step_in_epoch)

    def sum_of_target_tokens(self, start: int) -> int:
        """Labels that carry loss in all steps from ``start`` on."""
        total, step = 0, start
        targets_of = self._targets_of
        if targets_of is None:
            whole = int(self.first.steps.target_tokens_per_step.sum())
        while step < self.num_steps:
            epoch, first = self.locate(step)
            last = first + min(self.epoch_end(step), self.num_steps) - step
            # Only an epoch that is not trained whole must be looked at closely.
            if (first, last) == (0, self.steps_per_epoch) and not self.is_rest(epoch):
                total += whole if targets_of is None else targets_of(epoch)
            else:
                total += int(self.plan_of(epoch).steps.target_tokens_per_step[first:last].sum())
            step += last - first
        return total

    def num_steps_without_packing(self) -> int:
        """Steps of the run if every sample were a row."""
        return math.ceil(self.num_steps / self.steps_per_epoch * self.first.summary.num_steps_without_packing)

    def num_empty_micro_batches(self) -> int:
        """Micro-batches without samples in all whole epochs, over all ranks, if they have as many as the first.

        They lie in the last steps of epochs. Skrull has some in other steps too, and not quite as many in every epoch.
        """
        num_whole_epochs = self.num_steps // self.steps_per_epoch
        return num_whole_epochs * self.first.steps.num_empty_micro_batches


def rest_of(schedule: PlannedSchedule, step: int, assign: Callable[[PackPlan], EpochPlan]) -> Rest:
    """What a schedule has not trained after so many steps of the epoch that it is in, assigned anew.

    Args:
        assign: packs to the ranks that there are now.
    """
    epoch, done = schedule.locate(step)
    return Rest(step, epoch, assign(schedule.plan_of(epoch).packs_from(done)))
