"""What is measured between two log lines: loss, figures of the steps, time spent, accuracies, memory."""

from __future__ import annotations

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
from packtool.train.model.loss import TargetLosses, mean_loss
from packtool.train.prepare.figures import StepFigures

T = TypeVar("T")

_EVERYTHING = "all of them"
_NUM_SUMS = 4  # that ``see`` keeps of each channel
_GIB = 2**30


class Meter:
    """Adds up what this rank sees, without waiting for its device; ranks are asked when a line is due.

    Args:
        by_channel: tell losses and accuracies of each channel.

    Attributes:
        sources: what all steps so far had of each source of a mixture.
    """

    def __init__(self, *, by_channel: bool) -> None:
        self._by_channel = by_channel
        self.sources: Counts = {}
        self._begin()
        self._since = self._log_began = time.perf_counter()

    def _begin(self) -> None:
        self._figures = StepFigures()
        self._num_steps = 0
        self._waited = self._logging = 0.0
        self._num_run, self._num_padding = 0, 0
        self._seen: list[tuple[tuple[str | None, ...], Tensor]] = []
        self._balances: list[Tensor] = []

    def waited_for(self, items: Iterable[T]) -> Iterator[T]:
        """The same items, with the time counted that they let this rank wait."""
        iterator = iter(items)
        while True:
            begin = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self._waited += time.perf_counter() - begin
            yield item

    def begin_log(self) -> None:
        """A line may be due, for which the device is waited for."""
        self._log_began = time.perf_counter()

    def end_log(self) -> None:
        """The line that ``logged`` made is written; the next one tells how long that took."""
        self._logging += time.perf_counter() - self._since

    def leave_out(self, seconds: float) -> None:
        """Time that was spent on something else."""
        self._since += seconds

    def add(self, figures: StepFigures) -> None:
        """A step is done."""
        self._figures += figures
        self.sources = added([self.sources, figures.sources])
        self._num_steps += 1

    def run_over(self, batch: Batch) -> None:
        """A micro-batch is computed, with the padding that compiled layers want."""
        self._num_run += batch.input_ids.numel()
        self._num_padding += batch.num_padding

    def see_balance(self, balance: Tensor) -> None:
        """Keep what this rank adds to the balance of a step's experts, 0-d."""
        self._balances.append(balance)

    @torch.no_grad()
    def see(self, found: TargetLosses, batch: Batch) -> None:
        """Keep sums over the targets of a micro-batch, by document (of a tree by channel) or over all of them.

        The sums are losses, targets, correct predictions, and how far loss weights differ from 1.
        """
        losses, weights = found.losses.detach(), batch.loss_weights
        num_samples = batch.target_counts.sum(dim=0) if isinstance(batch, TreeBatch) else 1
        excess = torch.zeros_like(losses) if weights is None else weights.flatten()[found.positions] - num_samples
        rows = torch.stack((losses, torch.ones_like(losses), found.correct.to(losses.dtype), excess.abs()))
        if isinstance(batch, TreeBatch):
            # A target of a shared prefix is one of each channel whose samples have it, as often as they do.
            sums = (rows[:, None] * batch.target_counts).sum(dim=2)
        elif self._by_channel:
            sums = rows.new_zeros(len(rows), len(batch.channels))
            sums.index_add_(1, batch.documents_of(found.positions), rows)
        else:
            sums = rows
        if self._by_channel:
            self._seen.append((batch.channels, sums))
        else:
            self._seen.append(((_EVERYTHING,), sums.sum(dim=1, keepdim=True)))

    def logged(self, loss: float, accelerator: Any, *, copying: float | None) -> dict[str, float]:
        """The line of all steps since the last one.

        Every rank must call this at the same step.

        Args:
            loss: the Trainer's mean over steps of what ``training_step`` returned.
            copying: seconds that the device has waited for copies; None where nothing is copied.

        Returns:
            ``loss`` (mean over target tokens), ``objective`` where loss weights make the minimized loss another one,
            and the other figures.
        """
        figures, now = self._figures, time.perf_counter()
        seconds, self._since = now - self._since, now
        line: dict[str, float] = {"loss": mean_loss(loss * self._num_steps, figures.units)}
        means = self._target_means(accelerator.num_processes)
        if "loss" in means:
            line = {"loss": means.pop("loss"), "objective": line["loss"]}
        line |= figures.logged() | means
        line |= {
            "seconds": seconds,
            "target_tokens_per_second": figures.target_tokens / max(seconds, 1e-9),
            "tokens_per_second": figures.tokens / max(seconds, 1e-9),
            "data_wait": self._waited / max(seconds, 1e-9),
            "log_wait": (self._logging + now - self._log_began) / max(seconds, 1e-9),
            "memory_gib": memory_gib(accelerator.device),
        }
        if copying is not None:
            line["copy_wait"] = copying / max(seconds, 1e-9)
        if self._balances:
            mine = float(torch.stack(self._balances).sum()) / self._num_steps
            line["router_balance"] = sum(all_gather_objects(mine, accelerator.num_processes))
        if self._num_padding:
            line["padding"] = self._num_padding / self._num_run
        peak = peak_tflops(torch.cuda.get_device_name()) if accelerator.device.type == "cuda" else None
        if peak is not None and figures.flops:
            possible = seconds * peak * 1e12 * accelerator.num_processes
            line |= {"mfu": figures.flops / possible, "hfu": figures.hardware_flops / possible}
        self._begin()
        return line

    def _target_means(self, num_processes: int) -> dict[str, float]:
        """Means over the target tokens of all ranks: accuracies, channel losses, and the loss where it has weights."""
        mine: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * _NUM_SUMS)
        for channels, sums in self._seen:
            for channel, column in zip(channels, sums.T.tolist(), strict=True):
                name = "none" if channel is None else channel
                mine[name] = [a + b for a, b in zip(mine[name], column, strict=True)]
        found = all_gather_objects(dict(mine), num_processes)
        by_name: dict[str, list[float]] = {}
        for name in sorted({name for each in found for name in each}):
            parts = [each[name] for each in found if name in each]
            by_name[name] = [sum(column) for column in zip(*parts, strict=True)]
        loss, count, correct, excess = (
            sum(column) for column in zip([0.0] * _NUM_SUMS, *by_name.values(), strict=True)
        )
        line = {"token_accuracy": correct / count} if count else {}
        if count and excess:
            line["loss"] = loss / count
        if self._by_channel:
            for name, (loss, count, correct, _) in by_name.items():
                if count:
                    line |= {f"loss_{name}": loss / count, f"token_accuracy_{name}": correct / count}
        return line


def memory_gib(device: torch.device) -> float:
    """The most that this process has held so far: of its GPU, or of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB
