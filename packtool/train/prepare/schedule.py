"""All optimizer steps of a run, numbered through its epochs; no torch, so that plans are checked in a second."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
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
    """

    step: int
    epoch: int
    plan: EpochPlan | None

    @property
    def num_steps(self) -> int:
        """Steps of the epoch from there on."""
        return 0 if self.plan is None else self.plan.steps.num_steps


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
        self.first = plan_of(0)
        self.steps_per_epoch = self.first.steps.num_steps
        self._rest, self._targets_of = rest, targets_of
        if rest is None:
            self.plan_of = plan_of
            self.num_steps = max_steps or math.ceil(num_epochs * self.steps_per_epoch)
            return
        self.plan_of = lambda epoch: rest.plan if epoch == rest.epoch and rest.plan is not None else plan_of(epoch)
        # The same share of the epochs, in steps of another size.
        share = min(num_epochs - rest.epoch, 1.0)
        left = math.ceil(max(share * self.steps_per_epoch - (self.steps_per_epoch - rest.num_steps), 0))
        later = math.ceil(max(num_epochs - rest.epoch - 1, 0.0) * self.steps_per_epoch)
        self.num_steps = max_steps or rest.step + left + later

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
            is_rest = self._rest is not None and epoch == self._rest.epoch
            num_steps = self._rest.num_steps if self._rest is not None and is_rest else self.steps_per_epoch
            last = min(num_steps, first + self.num_steps - step)
            # Only an epoch that is not trained whole must be looked at closely.
            if (first, last) == (0, self.steps_per_epoch) and not is_rest:
                total += whole if targets_of is None else targets_of(epoch)
            else:
                total += int(self.plan_of(epoch).steps.target_tokens_per_step[first:last].sum())
            step += last - first
        return total

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
