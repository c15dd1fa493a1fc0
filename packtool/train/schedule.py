"""All optimizer steps of a run, numbered through its epochs; no torch, so that plans are checked in a second."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from packtool.plan.epoch import EpochPlan


class Schedule:
    """The steps of a run, numbered through from 0.

    Args:
        plan_of: the plan of an epoch; all epochs have as many steps.
        num_epochs: may have a fraction.
        max_steps: fewer or more steps than the epochs have; None for as many.
    """

    def __init__(self, plan_of: Callable[[int], EpochPlan], *, num_epochs: float, max_steps: int | None) -> None:
        # A plan of millions of samples is tens of megabytes: keep the current one and the first, which is asked again.
        self.plan_of = lru_cache(maxsize=2)(plan_of)
        self.steps_per_epoch = self.plan_of(0).steps.num_steps
        self.num_steps = max_steps or math.ceil(num_epochs * self.steps_per_epoch)

    def locate(self, step: int) -> tuple[int, int]:
        """Epoch and step within it."""
        return divmod(step, self.steps_per_epoch)

    def target_tokens(self, step: int) -> int:
        """Labels that carry loss in a step, over all ranks."""
        epoch, step_in_epoch = self.locate(step)
        return self.plan_of(epoch).steps.target_tokens(step_in_epoch)

    def sum_of_target_tokens(self, start: int) -> int:
        """Labels that carry loss in all steps from ``start`` on."""
        return self._targets_before(self.num_steps) - self._targets_before(start)

    def _targets_before(self, step: int) -> int:
        """Every epoch has the same samples, so only the epoch that ``step`` lies in must be looked at closely."""
        epoch, step_in_epoch = self.locate(step)
        total = epoch * int(self.plan_of(0).steps.target_tokens_per_step.sum())
        if step_in_epoch:
            total += int(self.plan_of(epoch).steps.target_tokens_per_step[:step_in_epoch].sum())
        return total

    def num_empty_micro_batches(self) -> int:
        """Micro-batches without samples in the whole run, over all ranks; they lie in the last steps of epochs."""
        num_whole_epochs, _ = self.locate(self.num_steps)
        return num_whole_epochs * self.plan_of(0).steps.num_empty_micro_batches
