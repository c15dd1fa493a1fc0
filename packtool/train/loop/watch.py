"""What all ranks must agree on before each update: whether one was told to stop, whether a number is none."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from packtool.config.train import OnNan
from packtool.errors import DivergedError, StoppedError
from packtool.launch.exchange import all_gather_objects
from packtool.launch.world import World
from packtool.progress import Progress
from packtool.train.loop.finite import StepNumbers
from packtool.train.loop.stopping import StopSignals

_MOST_TOLD = 10


class StepWatch(TrainerCallback):
    """Asks once a step, with one exchange of two numbers, and acts alike on every rank.

    Must come before ``CheckpointCallback``, which looks whether a checkpoint is due.

    Args:
        signals: that this process was sent.
        names: of the samples of this rank's micro-batches, by numbers of micro-batches in the step.
        on_nan: ``stop``, ``skip`` or ``go-on``.
        world: this process among the others.
        progress: told of what is found.

    Attributes:
        numbers: of the step, which the Trainer adds.
        stopped_by: number of the signal that ends the run, 0 for none.
        left_out: steps, 0-based, that changed no weight, since somebody last asked.
        num_bad: steps whose loss or gradient was none.
        last_good: the last step before weights took up such a number; None as long as they have not.
    """

    def __init__(
        self,
        signals: StopSignals,
        names: Callable[[list[int]], Iterable[str]],
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
            DivergedError: on every rank, naming the samples.
        """
        bad = self.numbers.bad(args.device)
        found = torch.stack([torch.full_like(bad, self.signals.received), bad])
        if self.world.size > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX)
        # The only time in a step that the host waits for the device.
        self.stopped_by, is_bad = found.tolist()
        if is_bad:
            self._meet_bad(state.global_step, model)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """The step is done on every rank."""
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

    def _meet_bad(self, step: int, model: nn.Module | None) -> None:
        self.num_bad += 1
        if self.on_nan != "stop" and self.num_bad > _MOST_TOLD:
            lines: list[str] = []  # a line a step would drown the rest
        else:
            lines = self._where()
        told = "\n".join([f"the loss or the gradient of step {step + 1:,} is infinite or not a number", *lines])
        if self.on_nan == "stop":
            raise DivergedError(
                told,
                f"Weights and checkpoints are those of step {step:,} and before. Look at these rows; --learning-rate, "
                "--warmup-ratio and --max-grad-norm help where rows are sound; --on-nan skip leaves such a step out.",
            )
        if self.on_nan == "skip":
            assert model is not None
            # Without gradients an optimizer changes nothing: neither weights nor its moments.
            model.zero_grad(set_to_none=True)
            self.left_out.append(step)
        elif self.last_good is None:
            self.last_good = step
        if lines:
            what = "left out" if self.on_nan == "skip" else "taken all the same"
            self.progress.note(f"{told}\n  this step is {what} (--on-nan {self.on_nan})")

    def _where(self) -> list[str]:
        """The micro-batches of all ranks whose loss is bad; where the gradient alone is, all of the step."""
        bad = self.numbers.bad_micro_batches()
        found = self._gathered(list(self.names(bad)))
        return found or self._gathered(list(self.names(list(range(self.numbers.num_micro_batches)))))

    def _gathered(self, mine: list[str]) -> list[str]:
        return [line for lines in all_gather_objects(mine, self.world.size) for line in lines]
