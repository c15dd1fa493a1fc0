"""Losses and gradients that are no numbers: found before they reach the weights, and named."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from packtool.cache.chosen import SampleReader
from packtool.train.prepare.cached import PreparedRun
from packtool.train.prepare.streamed import PreparedStream

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
        """Note the losses of the next micro-batch."""
        self._losses.append(loss.detach())

    def see_norm(self, norm: Tensor | float, *, is_scaled: bool) -> None:
        """Note the norm of the gradient over all ranks.

        Args:
            is_scaled: float16's loss scale is being looked for: infinite norms belong to that.
        """
        self._norm = 0.0 if is_scaled else norm

    def is_bad(self) -> bool:
        """Whether one of them is infinite or not a number; waits for the device."""
        norm = torch.as_tensor(self._norm, dtype=torch.float32)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        values = [loss.float().reshape(()) for loss in self._losses]
        device = values[0].device if values else norm.device
        return not bool(torch.isfinite(torch.stack([*values, norm.to(device).reshape(())])).all())

    def bad_micro_batches(self) -> list[int]:
        """0-based numbers of this rank's micro-batches whose loss is bad; none if it is the gradient alone."""
        return [number for number, loss in enumerate(self._losses) if not bool(torch.isfinite(loss))]

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of the step so far."""
        return len(self._losses)


def name_samples(run: PreparedRun | PreparedStream, step: int, micro_batches: list[int]) -> Iterator[str]:
    """Where the samples of some of this rank's micro-batches came from, a line for each micro-batch.

    Args:
        step: 0-based, of the whole run.
    """
    for number in micro_batches:
        told = f"  rank {run.world.rank}, micro-batch {number}"
        if isinstance(run, PreparedStream):
            yield f"{told}: its rows were streamed, and nobody has noted which; a cache would tell"
            continue
        epoch, step_in_epoch = run.schedule.locate(step)
        packs = run.schedule.plan_of(epoch).samples(step_in_epoch, run.world.data.rank, number)
        positions = [int(position) for pack in packs for position in pack]
        named = [_name(run.samples, position) for position in positions[:_MOST_SAMPLES]]
        left = len(positions) - len(named)
        yield f"{told}: {'; '.join(named)}{f'; and {left} more' if left else ''}"


def _name(samples: SampleReader, position: int) -> str:
    sample = samples.sample(position)
    return f"row {sample.row} of {sample.source} (sample {position})"
