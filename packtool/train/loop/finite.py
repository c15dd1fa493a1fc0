"""Losses and gradients that are no numbers: found before anything is kept of them, and named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

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
