"""Measurements between two log lines: loss, figures of the steps, waiting times, accuracies, memory."""

from __future__ import annotations

import math
import resource
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from packtool.batch.batch import Batch, TreeBatch
from packtool.launch.world import all_gather_objects
from packtool.planning.mixture import Counts, added
from packtool.simulate.hardware import peak_tflops
from packtool.train.model.loss import TargetLosses
from packtool.train.prepare.figures import StepFigures

T = TypeVar("T")

_ALL_CHANNELS = "all of them"
_NUM_SUMS = 4  # per channel, from ``add_losses``
_GIB = 2**30


class Meter:
    """Accumulates this rank's measurements without waiting for its device; ranks exchange them for a log line only.

    Args:
        by_channel: report losses and accuracies of each channel.

    Attributes:
        sources: counts of each mixture source over all steps so far.
    """

    def __init__(self, *, by_channel: bool) -> None:
        self._by_channel = by_channel
        self.sources: Counts = {}
        self._reset()
        self._since = self._log_began = time.perf_counter()

    def _reset(self) -> None:
        self._figures = StepFigures()
        self._num_steps = 0
        self._data_wait = self._log_wait = 0.0
        self._num_computed, self._num_padding = 0, 0
        self._sums: list[tuple[tuple[str | None, ...], Tensor]] = []
        self._balances: list[Tensor] = []

    def timed(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items, and count the time spent waiting for them."""
        iterator = iter(items)
        while True:
            begin = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self._data_wait += time.perf_counter() - begin
            yield item

    def begin_log(self) -> None:
        """Note that a log line may follow, for which the host waits for the device."""
        self._log_began = time.perf_counter()

    def end_log(self) -> None:
        """Note that the line is written; the next one reports how long that took."""
        self._log_wait += time.perf_counter() - self._since

    def exclude(self, seconds: float) -> None:
        """Do not count time that was spent on something else."""
        self._since += seconds

    def add_step(self, figures: StepFigures) -> None:
        """Add the figures of a complete step."""
        self._figures += figures
        self.sources = added([self.sources, figures.sources])
        self._num_steps += 1

    def add_balance(self, balance: Tensor) -> None:
        """Add this rank's part of a step's load-balancing loss, 0-d."""
        self._balances.append(balance)

    @torch.no_grad()
    def add_losses(self, losses: TargetLosses, batch: Batch) -> None:
        """Add the targets of a micro-batch, summed by document (of a tree: by channel) or over all of them.

        The four sums are losses, targets, correct predictions, and the deviations of loss weights from 1.
        """
        self._num_computed += batch.input_ids.numel()
        self._num_padding += batch.num_padding
        values = losses.losses.detach()
        num_samples = batch.target_counts.sum(dim=0) if isinstance(batch, TreeBatch) else 1
        deviations = torch.zeros_like(values) if losses.weights is None else losses.weights - num_samples
        rows = torch.stack((values, torch.ones_like(values), losses.correct.to(values.dtype), deviations.abs()))
        if isinstance(batch, TreeBatch):
            # A target of a shared prefix counts for each sample that has it, in the sample's channel.
            sums = (rows[:, None] * batch.target_counts).sum(dim=2)
        elif self._by_channel:
            sums = rows.new_zeros(len(rows), len(batch.channels))
            sums.index_add_(1, batch.documents_of(losses.positions), rows)
        else:
            sums = rows
        if self._by_channel:
            self._sums.append((batch.channels, sums))
        else:
            self._sums.append(((_ALL_CHANNELS,), sums.sum(dim=1, keepdim=True)))

    def logged(self, loss: float, accelerator: Any, *, copying: float | None) -> dict[str, float]:
        """Return the log line of all steps since the last one; every rank must call this at the same step.

        Args:
            loss: the Trainer's mean over steps of what ``training_step`` returned.
            copying: seconds that the device has waited for copies; None where nothing is copied.

        Returns:
            ``loss`` (mean over target tokens), ``objective`` if loss weights make the minimized loss differ from it,
            and the other figures.
        """
        figures, now = self._figures, time.perf_counter()
        seconds, self._since = now - self._since, now
        elapsed = max(seconds, 1e-9)
        mean = loss * self._num_steps / figures.units if figures.units else math.nan
        means = self._target_means(accelerator.num_processes)
        line = {"loss": means.pop("loss"), "objective": mean} if "loss" in means else {"loss": mean}
        line |= figures.logged() | means
        line |= {
            "seconds": seconds,
            "target_tokens_per_second": figures.target_tokens / elapsed,
            "tokens_per_second": figures.tokens / elapsed,
            "data_wait": self._data_wait / elapsed,
            "log_wait": (self._log_wait + now - self._log_began) / elapsed,
            "memory_gib": memory_gib(accelerator.device),
        }
        if copying is not None:
            line["copy_wait"] = copying / elapsed
        if self._balances:
            mine = float(torch.stack(self._balances).sum()) / self._num_steps
            line["router_balance"] = sum(all_gather_objects(mine, accelerator.num_processes))
        if self._num_padding:
            line["padding"] = self._num_padding / self._num_computed
        peak = peak_tflops(torch.cuda.get_device_name()) if accelerator.device.type == "cuda" else None
        if peak is not None and figures.flops:
            possible = seconds * peak * 1e12 * accelerator.num_processes
            line |= {"mfu": figures.flops / possible, "hfu": figures.hardware_flops / possible}
        self._reset()
        return line

    def _target_means(self, num_processes: int) -> dict[str, float]:
        """Return means over the targets of all ranks: accuracies, channel losses, and the loss if weights vary."""
        mine: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * _NUM_SUMS)
        for channels, sums in self._sums:
            for channel, column in zip(channels, sums.T.tolist(), strict=True):
                name = "none" if channel is None else channel
                mine[name] = [a + b for a, b in zip(mine[name], column, strict=True)]
        ranks = all_gather_objects(dict(mine), num_processes)
        by_name = {
            name: list(map(sum, zip(*(rank[name] for rank in ranks if name in rank), strict=True)))
            for name in sorted({name for rank in ranks for name in rank})
        }
        loss, count, correct, deviation = map(sum, zip([0.0] * _NUM_SUMS, *by_name.values(), strict=True))
        line = {"token_accuracy": correct / count} if count else {}
        if count and deviation:
            line["loss"] = loss / count
        if self._by_channel:
            for name, (loss, count, correct, _) in by_name.items():
                if count:
                    line |= {f"loss_{name}": loss / count, f"token_accuracy_{name}": correct / count}
        return line


def memory_gib(device: torch.device) -> float:
    """Return this process's peak memory so far: of its GPU, or of the machine for a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB
