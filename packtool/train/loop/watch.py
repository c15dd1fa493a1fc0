"""What all ranks must agree on before each update: whether one was told to stop, whether a number is none."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from packtool.config.train import OnNan
from packtool.errors import DivergedError, StoppedError
from packtool.launch.exchange import all_gather_objects
from packtool.launch.world import World
from packtool.progress import Progress
from packtool.train.loop.finite import StepNumbers
from packtool.train.loop.stopping import StopSignals

_MOST_TOLD = 10


Names = Callable[[list[int]], Iterable[str]]


@dataclass(frozen=True)
class _Asked:
    """What is to be known of a step once the device has come to its end.

    Args:
        step: how many were done before it.
        numbers: of the step.
        names: of the samples of its micro-batches.
        answer: the largest signal and the largest "is bad" of all ranks; waits for these two alone.
    """

    step: int
    numbers: StepNumbers
    names: Names
    answer: Callable[[], list[int]]


class StepWatch(TrainerCallback):
    """Asks once a step, with one exchange of two numbers, and acts alike on every rank.

    The host does not wait for the answer. It is read before the next update, when it has long been there, and before
    anything comes of the step: a log line, an evaluation, a checkpoint, the end. A step that is bad may have changed
    the weights by then, of which nothing is kept; where it must not (``skip``), the answer is waited for at once.

    Must come before ``CheckpointCallback``, which looks whether a checkpoint is due.

    Args:
        signals: that this process was sent.
        names: gives what names the samples of this rank's micro-batches in the step that was given last, by numbers of
            micro-batches in the step.
        on_nan: ``stop``, ``skip`` or ``go-on``.
        world: this process among the others.
        progress: told of what is found.

    Attributes:
        numbers: of the step, which the Trainer adds.
        stopped_by: number of the signal that ends the run, 0 for none.
        left_out: steps, 0-based, that changed no weight, since somebody last asked.
        num_bad: steps whose loss or gradient was none.
        last_good: the last step before weights took up such a number; None as long as they have not.
        is_evaluated: whether an evaluation follows a step; by default none does.
    """

    def __init__(
        self,
        signals: StopSignals,
        names: Callable[[], Names],
        *,
        on_nan: OnNan,
        world: World,
        progress: Progress,
    ) -> None:
        self.signals, self.names = signals, names
        self.numbers = StepNumbers()
        self.on_nan, self.world, self.progress = on_nan, world, progress
        self.stopped_by = 0
        self.num_bad = 0
        self.left_out: list[int] = []
        self.last_good: int | None = None
        self.is_evaluated: Callable[[TrainerState], bool] = lambda _: False
        self._asked: _Asked | None = None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A step is next."""
        self.numbers.begin()

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Gradients are there, weights are still the old ones.

        Raises:
            DivergedError: as ``settle``.
        """
        self.settle()
        bad = self.numbers.bad(args.device)
        found = torch.stack([torch.full_like(bad, self.signals.received), bad])
        if self.world.size > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX)
        self._asked = _Asked(state.global_step, copy.copy(self.numbers), self.names(), read_later(found))
        if self.on_nan == "skip" and self.settle():
            assert model is not None
            # Without gradients an optimizer changes nothing: neither weights nor its moments.
            model.zero_grad(set_to_none=True)

    def settle(self) -> bool:
        """Read what was asked of the last step, if that was not done yet, and act on it: every rank at the same place.

        Returns:
            whether its loss or gradient was none.

        Raises:
            DivergedError: on every rank, naming the samples.
        """
        if self._asked is None:
            return False
        asked, self._asked = self._asked, None
        stopped_by, is_bad = asked.answer()
        self.stopped_by = self.stopped_by or stopped_by
        if is_bad:
            self._meet_bad(asked)
        return bool(is_bad)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """The step is done on every rank, or will be."""
        wanted = control.should_log or control.should_save or control.should_training_stop
        if self.stopped_by or wanted or self.is_evaluated(state):
            self.settle()
        if self.stopped_by and state.global_step < state.max_steps:
            name = signal.Signals(self.stopped_by).name
            self.progress.note(f"{name}: step {state.global_step:,} is done, a checkpoint is saved, and that is all")
            control.should_save = control.should_training_stop = control.should_log = True
        return control

    def raise_if_stopped(self, step: int, num_steps: int, checkpoint: str) -> None:
        """End the process with the code of the signal that ended the run before its last step.

        Raises:
            StoppedError: with a message on the first rank.
        """
        if not self.stopped_by or step >= num_steps:
            return
        name = signal.Signals(self.stopped_by).name
        told = f"stopped by {name} after step {step:,} of {num_steps:,}; {checkpoint} is complete"
        remedy = "The same command with --resume-from-checkpoint true goes on from there."
        if not self.world.is_first:
            raise StoppedError("", None, self.stopped_by)
        raise StoppedError(told, remedy, self.stopped_by)

    def _meet_bad(self, asked: _Asked) -> None:
        step = asked.step
        self.num_bad += 1
        if self.on_nan != "stop" and self.num_bad > _MOST_TOLD:
            lines: list[str] = []  # a line a step would drown the rest
        else:
            lines = self._where(asked)
        told = "\n".join([f"the loss or the gradient of step {step + 1:,} is infinite or not a number", *lines])
        if self.on_nan == "stop":
            raise DivergedError(
                told,
                f"Checkpoints are those of step {step:,} and before. Look at these rows; --learning-rate, "
                "--warmup-ratio and --max-grad-norm help where rows are sound; --on-nan skip leaves such a step out.",
            )
        if self.on_nan == "skip":
            self.left_out.append(step)
        elif self.last_good is None:
            self.last_good = step
        if lines:
            what = "left out" if self.on_nan == "skip" else "taken all the same"
            self.progress.note(f"{told}\n  this step is {what} (--on-nan {self.on_nan})")

    def _where(self, asked: _Asked) -> list[str]:
        """The micro-batches of all ranks whose loss is bad; where the gradient alone is, all of the step."""
        found = self._gathered(list(asked.names(asked.numbers.bad_micro_batches())))
        return found or self._gathered(list(asked.names(list(range(asked.numbers.num_micro_batches)))))

    def _gathered(self, mine: list[str]) -> list[str]:
        return [line for lines in all_gather_objects(mine, self.world.size) for line in lines]


def read_later(numbers: Tensor) -> Callable[[], list[int]]:
    """Send whole numbers, of any shape (N,), on their way to the host.

    Returns:
        what waits for them, and for nothing that the device was given later.
    """
    if not numbers.is_cuda:
        return numbers.tolist
    on_host = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
    event: Any = torch.cuda.Event
    there = event()
    there.record()

    def read() -> list[int]:
        there.synchronize()
        return on_host.tolist()

    return read
