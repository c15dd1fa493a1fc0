"""What all ranks must agree on before each update: whether one was told to stop, whether a number is none.

Losses and gradients that are no numbers: found before anything is kept of them, and named.

SIGTERM, SIGUSR1 and Ctrl-C: the step is finished, a checkpoint is saved, and the exit code says which it was.

    scheduler ──► launcher ──► every rank     or to one rank alone
                                 │ notes it, works on
              before each update │ all ranks take the largest of what was noted
      with the next log line, or │
          before the next update │ they read it: they agree on the step
                                 ▼
              update, checkpoint, 128 + signal

A second Ctrl-C ends at once. A second SIGTERM does not: schedulers send it to launchers and ranks alike.
"""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from packtool.config.train import OnNan
from packtool.errors import DivergedError, StoppedError
from packtool.launch.world import World, all_gather_objects
from packtool.progress import Progress

_MOST_SAMPLES = 6


class StepNumbers:
    """The losses and the gradient norm of the step that is being computed, on this rank's device."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._norm: Tensor | float = 0.0

    def begin(self) -> None:
        """Forget the step before."""
        self._losses, self._norm = [], 0.0

    def see_loss(self, loss: Tensor) -> None:
        """Note the loss of the next micro-batch, a 0-d tensor."""
        self._losses.append(loss.detach())

    def see_norm(self, norm: Tensor | float, *, is_scaled: bool) -> None:
        """Note the norm of the gradient over all ranks.

        Args:
            norm: 0-d, or a number of the host.
            is_scaled: float16's loss scale is being looked for: infinite norms belong to that.
        """
        self._norm = 0.0 if is_scaled else norm

    def bad(self, device: torch.device) -> Tensor:
        """Whether one of them is infinite or not a number: int64 (), 1 or 0, on a device that nobody waits for."""
        norm: Any = self._norm if isinstance(self._norm, Tensor) else torch.full((), self._norm, device=device)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        values = [value.to(device, torch.float32).reshape(()) for value in (*self._losses, norm)]
        return 1 - torch.stack(values).isfinite().all().long()

    def bad_micro_batches(self) -> list[int]:
        """0-based numbers of this rank's micro-batches whose loss is bad; none if it is the gradient alone."""
        return [number for number, loss in enumerate(self._losses) if not bool(torch.isfinite(loss))]

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of the step so far."""
        return len(self._losses)


def name_samples(names: Callable[[int], Sequence[str]], rank: int, micro_batches: Sequence[int]) -> Iterator[str]:
    """Where the samples of some of this rank's micro-batches came from, a line for each micro-batch.

    Args:
        names: of the samples of a micro-batch of the step.
        rank: of this process.
    """
    for number in micro_batches:
        named = names(number)
        left = len(named) - _MOST_SAMPLES
        more = f"; and {left} more" if left > 0 else ""
        yield f"  rank {rank}, micro-batch {number}: {'; '.join(named[:_MOST_SAMPLES])}{more}"


SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# Ctrl-C may come to this process and, through its launcher, once more; a person is slower.
_SAME_KEY_SECONDS = 0.5


class StopSignals:
    """Notes the signals that ask for an end; inside ``with``, and in the main thread only.

    Args:
        launched: whether a launcher ends all other processes when the first one ends; they then leave in peace.

    Attributes:
        received: number of the first signal, 0 for none.
    """

    def __init__(self, *, launched: bool = False) -> None:
        self.received = 0
        self._launched = launched
        self._process = os.getpid()
        self._at = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            ends = bool(self.received) and self._launched and number != signal.SIGINT
            signal.signal(number, signal.SIG_IGN if ends else before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            self._in_child(number)
            return
        now = time.monotonic()
        if not self.received:
            self.received, self._at = number, now
        elif number == signal.SIGINT and now - self._at > _SAME_KEY_SECONDS:
            before = self._before[signal.SIGINT]
            if callable(before):
                before(number, frame)
            raise KeyboardInterrupt

    def _in_child(self, number: int) -> None:
        """Take a signal in a process that was forked off: what goes to all of a job is for the one that trains.

        Those that load pictures have begun to look after themselves (``packtool.batch.dataset``).
        """
        if number == signal.SIGTERM:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)


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
