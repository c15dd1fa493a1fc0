"""Micro-batches on their way to the device, beside its computation."""

from __future__ import annotations

from typing import Any

import torch

from packtool.batch.batch import B


class DeviceCopies:
    """Copies micro-batches to a device on a stream of their own.

    On the stream that computes, a copy would wait for everything that was given to the device before. The host is ahead
    of the device, so that a copy of its own stream runs while the micro-batch before is computed, or the optimizer's
    step; the computation waits for the copy alone. It takes page-locked memory, which the dataloader provides on CUDA.
    How long it waited is noted by the device itself, and read when the host has waited for the device anyway.

    Args:
        device: on which the model is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cuda: Any = torch.cuda
        self._stream = cuda.Stream(device) if device.type == "cuda" else None
        self._waits: list[tuple[Any, Any]] = []

    def bring(self, batch: B) -> B:
        """The micro-batch on the device; the current stream may use it at once."""
        if self._stream is None:
            return batch.to(self._device)
        with torch.cuda.stream(self._stream):
            on_device = batch.to(self._device, non_blocking=True)
        current = torch.cuda.current_stream(self._device)
        event: Any = torch.cuda.Event
        begin, end = (event(enable_timing=True) for _ in range(2))
        begin.record(current)
        current.wait_stream(self._stream)
        end.record(current)
        self._waits.append((begin, end))
        # Else the memory could be given to the next copy while the computation still reads it.
        on_device.map(lambda tensor: _recorded(tensor, current))
        return on_device

    def waited(self) -> float | None:
        """Seconds that the computation waited for copies since this was asked last; None where there are none.

        Does not wait for the device: copies that it has not come to are counted the next time.
        """
        if self._stream is None:
            return None
        reached = [pair for pair in self._waits if pair[1].query()]
        self._waits = self._waits[len(reached) :]
        return sum(begin.elapsed_time(end) for begin, end in reached) / 1e3


def _recorded(tensor: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
    tensor.record_stream(stream)
    return tensor
