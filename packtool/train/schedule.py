"""All optimizer steps of a run, across its epochs, and the micro-batches of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from packtool.batch.batch import Batch
from packtool.batch.dataset import PlannedMicroBatches, SampleReader, load_micro_batches
from packtool.batch.spec import InputSpec
from packtool.plan.epoch import EpochPlan
from packtool.train.world import World


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


@dataclass(frozen=True)
class TrainingStep:
    """What one rank does in one optimizer step.

    Args:
        target_tokens: over all ranks and micro-batches.
        num_micro_batches: of this rank, the same on every rank.
        micro_batches: read as they are needed, so that one at a time is held.
    """

    target_tokens: int
    num_micro_batches: int
    micro_batches: Iterator[Batch]


class StepLoader:
    """The training steps of one rank from ``start`` on: what transformers' Trainer takes for its dataloader.

    Its length is that of the whole run, for the Trainer computes epochs from it; what was trained before ``start`` is
    not read again.

    Args:
        schedule: of the run.
        reader: of the samples that its plans number.
        spec: the model that they are collated for.
        world: this rank.
        packing: False pads.
        start: first step.
        num_workers: processes that make micro-batches ahead of time.
        pin_memory: for a GPU.
    """

    def __init__(
        self,
        schedule: Schedule,
        reader: SampleReader,
        spec: InputSpec,
        world: World,
        *,
        packing: bool,
        start: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.schedule = schedule
        self.reader = reader
        self.spec = spec
        self.world = world
        self.packing = packing
        self.start = start
        self.num_workers = num_workers
        self.pin_memory = pin_memory

    def __len__(self) -> int:
        return self.schedule.num_steps

    def __iter__(self) -> Iterator[TrainingStep]:
        step = self.start
        while step < self.schedule.num_steps:
            epoch, first = self.schedule.locate(step)
            plan = self.schedule.plan_of(epoch)
            assert plan.steps.num_steps == self.schedule.steps_per_epoch, "epochs must have equally many steps"
            batches = self._micro_batches(plan, first)
            last = min(plan.steps.num_steps, first + self.schedule.num_steps - step)
            for step_in_epoch in range(first, last):
                num = plan.steps.num_micro_batches(step_in_epoch)
                yield TrainingStep(plan.steps.target_tokens(step_in_epoch), num, islice(batches, num))
            step += last - first

    def _micro_batches(self, plan: EpochPlan, first_step: int) -> Iterator[Batch]:
        dataset = PlannedMicroBatches(self.reader, plan, rank=self.world.rank, spec=self.spec, packing=self.packing)
        return load_micro_batches(
            dataset,
            start=int(dataset.first[first_step]),
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
        )
