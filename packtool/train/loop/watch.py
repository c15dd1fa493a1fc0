"""Checks of all ranks before each optimizer update: stop signals, and losses or gradients that are NaN or infinite.

On SIGTERM, SIGUSR1 and Ctrl-C the run finishes the current step and saves a checkpoint; the exit code is 128 + signal.
A rank that receives a signal records it. Before each update, all ranks exchange the maximum of what they recorded; they
read it at the next log line or before the next update, and so stop at the same step.

A second Ctrl-C ends the process at once. A second SIGTERM does not: schedulers send it to launchers and to ranks.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import TrainerControl, TrainerState

from packtool.config.train import OnNan
from packtool.errors import DivergedError, StoppedError
from packtool.launch.world import World, all_gather_objects
from packtool.progress import Progress

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# One Ctrl-C may arrive twice, directly and through the launcher; a person presses it again more slowly.
_SAME_KEY_SECONDS = 0.5
_MAX_SAMPLES = 6
_MAX_WARNINGS = 10


class StopSignals:
    """Recorder of stop signals inside ``with``, where it replaces the handlers of the main thread.

    Args:
        launched: whether a launcher sends SIGTERM to all other processes when the first one ends. After a recorded
            signal these ignore it, so that they end without an error.

    Attributes:
        received: number of the first signal, 0 for none.
    """

    def __init__(self, *, launched: bool = False) -> None:
        self.received = 0
        self._launched = launched
        self._process = os.getpid()
        self._received_at = 0.0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._record) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, previous in self._previous.items():
            ends = bool(self.received) and self._launched and number != signal.SIGINT
            signal.signal(number, signal.SIG_IGN if ends else previous)

    def _record(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: record the first one, and end the process at a second Ctrl-C."""
        if os.getpid() != self._process:
            # A forked data worker inherits this handler until it installs its own (packtool.batch.dataset). Signals to
            # the whole job are for the training process; only SIGTERM ends the worker.
            if number == signal.SIGTERM:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGTERM)
            return
        now = time.monotonic()
        if not self.received:
            self.received, self._received_at = number, now
        elif number == signal.SIGINT and now - self._received_at > _SAME_KEY_SECONDS:
            previous = self._previous[signal.SIGINT]
            if callable(previous):
                previous(number, frame)
            raise KeyboardInterrupt


class _PendingExchange(NamedTuple):
    """Exchange of a step among all ranks whose result is not read yet: stop signal, and 1 if the step is bad."""

    step: int
    losses: list[Tensor]
    sample_names: Callable[[int], Sequence[str]]
    wait_for_result: Callable[[], list[int]]


class StepWatch:
    """Exchange of two integers per step among all ranks: a stop signal, and whether the step is bad.

    A step is bad if the loss of a micro-batch or the gradient norm is NaN or infinite. The host reads the result of the
    exchange before the next update, when it has long arrived, or before anything of the step is stored: a log line, an
    evaluation, a checkpoint. Only ``skip`` waits at once, because it must prevent the update.

    Args:
        sample_names: called in a step, returns a function from a micro-batch's number to its samples' names.

    Attributes:
        stopped_by: number of the signal that ends the run, 0 for none.
        skipped_steps: numbers of skipped steps since the last checkpoint, 0-based.
        num_good: number of steps before the first bad update; None while there was no bad update.
    """

    def __init__(
        self,
        signals: StopSignals,
        sample_names: Callable[[], Callable[[int], Sequence[str]]],
        *,
        on_nan: OnNan,
        world: World,
        progress: Progress,
    ) -> None:
        self.signals, self.sample_names = signals, sample_names
        self.on_nan, self.world, self.progress = on_nan, world, progress
        self.stopped_by = 0
        self.num_bad = 0  # bad steps so far
        self.skipped_steps: list[int] = []
        self.num_good: int | None = None

        # Of the current step:
        self._losses: list[Tensor] = []  # of this rank's micro-batches, 0-d each
        self._norm: Tensor | float = 0.0  # of the gradients over all ranks
        # Of the previous step, or of the current one after ``before_update``; None if its result is read.
        self._pending: _PendingExchange | None = None

    def begin_step(self) -> None:
        """Discard the losses and the norm of the previous step."""
        self._losses, self._norm = [], 0.0

    def record_loss(self, loss: Tensor) -> None:
        """Record the loss of this rank's next micro-batch, 0-d."""
        self._losses.append(loss.detach())

    def record_norm(self, norm: Tensor | float, *, is_scaled: bool = False) -> None:
        """Record the gradient norm over all ranks, 0-d; ignore one with float16's loss scaling, which may overflow."""
        self._norm = 0.0 if is_scaled else norm

    def before_update(self, step: int, model: nn.Module, device: torch.device) -> None:
        """Start the exchange of a step (0-based) whose gradients are complete, before its update; all ranks call this.

        With ``skip``, wait for the result, and delete the gradients of a bad step.
        """
        self.check_last_step()
        is_bad = has_nan_or_inf(self._losses, self._norm, device)
        maximum = torch.stack([torch.full_like(is_bad, self.signals.received), is_bad])
        if self.world.size > 1:
            dist.all_reduce(maximum, dist.ReduceOp.MAX)
        self._pending = _PendingExchange(step, self._losses, self.sample_names(), _start_reading(maximum))
        if self.on_nan == "skip" and self.check_last_step():
            # Without gradients an optimizer changes nothing: neither weights nor its moments.
            model.zero_grad(set_to_none=True)

    def check_last_step(self) -> bool:
        """Read the result of the last exchange, unless that is done already, and handle a bad step.

        All ranks call this together. Return whether the step was bad; with ``--on-nan stop``, raise a DivergedError.
        """
        if self._pending is None:
            return False
        exchange = self._pending
        self._pending = None
        stopped_by, is_bad = exchange.wait_for_result()
        self.stopped_by = self.stopped_by or stopped_by
        if is_bad:
            self._handle_bad_step(exchange)
        return bool(is_bad)

    def _handle_bad_step(self, exchange: _PendingExchange) -> None:
        """Stop at a bad step, or record it and warn, by ``--on-nan``; all ranks call this together.

        Only the first ``_MAX_WARNINGS`` bad steps are reported, with the samples of their micro-batches.
        """
        num_steps_before = exchange.step  # steps are 0-based
        self.num_bad += 1
        is_reported = self.on_nan == "stop" or self.num_bad <= _MAX_WARNINGS
        message = f"the loss or the gradient of step {num_steps_before + 1:,} is infinite or not a number"
        sample_lines: list[str] = []
        if is_reported:
            sample_lines = self._bad_sample_lines(exchange.losses, exchange.sample_names)
            message = "\n".join([message, *sample_lines])
        if self.on_nan == "stop":
            raise DivergedError(
                message,
                f"Checkpoints up to step {num_steps_before:,} are unaffected. Check these rows; if they are correct, "
                "try a lower --learning-rate, a higher --warmup-ratio or a lower --max-grad-norm; --on-nan skip skips "
                "such steps.",
            )

        if self.on_nan == "skip":
            self.skipped_steps.append(exchange.step)
        elif self.num_good is None:  # go-on: the update of this step has spoiled the weights
            self.num_good = num_steps_before
        if sample_lines:
            action = "skipped" if self.on_nan == "skip" else "trained nevertheless"
            self.progress.note(f"{message}\n  this step is {action} (--on-nan {self.on_nan})")

    def end_step(self, state: TrainerState, control: TrainerControl, *, will_evaluate: bool) -> None:
        """Settle a step before anything of it is stored; after a stop signal, request a checkpoint and the end."""
        is_stored = control.should_log or control.should_save or control.should_training_stop or will_evaluate
        if self.stopped_by or is_stored:
            self.check_last_step()
        if self.stopped_by and state.global_step < state.max_steps:
            name = signal.Signals(self.stopped_by).name
            self.progress.note(f"{name}: training stops after step {state.global_step:,}, saving a checkpoint")
            control.should_save = control.should_training_stop = control.should_log = True

    def raise_if_stopped(self, step: int, num_steps: int, checkpoint: str) -> None:
        """Raise a StoppedError if a signal ended the run before its last step; only the first rank's has a message."""
        if not self.stopped_by or step >= num_steps:
            return
        if not self.world.is_first:
            raise StoppedError("", None, self.stopped_by)
        name = signal.Signals(self.stopped_by).name
        message = f"stopped by {name} after step {step:,} of {num_steps:,}; {checkpoint} is complete"
        remedy = "Resume with the same command and --resume-from-checkpoint true."
        raise StoppedError(message, remedy, self.stopped_by)

    def _bad_sample_lines(self, losses: Sequence[Tensor], names: Callable[[int], Sequence[str]]) -> list[str]:
        """Return a line per micro-batch with a bad loss, of all ranks; per micro-batch if only the norm is bad."""
        bad = [number for number, loss in enumerate(losses) if not bool(torch.isfinite(loss))]
        for micro_batches in (bad, range(len(losses))):
            lines = []
            for number in micro_batches:
                samples = names(number)
                more = [f"and {len(samples) - _MAX_SAMPLES} more"] if len(samples) > _MAX_SAMPLES else []
                shown = "; ".join([*samples[:_MAX_SAMPLES], *more])
                lines.append(f"  rank {self.world.rank}, micro-batch {number}: {shown}")
            if gathered := [line for rank in all_gather_objects(lines, self.world.size) for line in rank]:
                return gathered
        return []


def has_nan_or_inf(losses: Sequence[Tensor], norm: Tensor | float, device: torch.device) -> Tensor:
    """Return 1 if a loss or the norm is NaN or infinite, else 0: int64 (), computed without waiting for the device."""
    norm_value: Any = norm if isinstance(norm, Tensor) else torch.full((), norm, device=device)
    norm_value = norm_value.full_tensor() if hasattr(norm_value, "full_tensor") else norm_value  # DTensor of FSDP
    values = [value.to(device, torch.float32).reshape(()) for value in (*losses, norm_value)]
    return 1 - torch.stack(values).isfinite().all().long()


def _start_reading(numbers: Tensor) -> Callable[[], list[int]]:
    """Start copying integers (N,) to the host; the returned function waits for them, not for later work."""
    if not numbers.is_cuda:
        return numbers.tolist
    on_host = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
    event: Any = torch.cuda.Event
    copied = event()
    copied.record()

    def read() -> list[int]:
        copied.synchronize()
        return on_host.tolist()

    return read
