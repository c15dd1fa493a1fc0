"""Log lines: measuring the steps between two lines, showing figures on the terminal, and writing ``metrics.jsonl``."""

from __future__ import annotations

import json
import math
import os
import resource
import shlex
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from packtool.batch.batch import Batch, TreeTargets
from packtool.batch.media_cache import MediaReads
from packtool.cache.evaluation_file import plain_json
from packtool.config.settings import load_json
from packtool.launch.world import all_gather_objects
from packtool.planning.mixture import Counts, added
from packtool.progress import Progress
from packtool.simulate.hardware import peak_tflops
from packtool.train.model.loss import TargetLosses
from packtool.train.prepare.figures import StepFigures
from packtool.train.prepare.output_dir import METRICS_NAME
from packtool.train.prepare.run import Run
from packtool.train.prepare.sample_losses import stream_key
from packtool.train.prepare.workers import WaitingNote, cores_of_a_rank, workers_of

T = TypeVar("T")

_ALL_CHANNELS = "all of them"
_GIB = 2**30
_VAL_LOSS = "val loss"
_CHANNEL_LOSSES = "loss by channel"
_MAX_CHANNELS = 8  # whose losses are shown
_WAITS = ("data_wait", "copy_wait", "log_wait")


class _TargetSums(NamedTuple):
    """Sums over targets; ``weight_deviation``: of how much each loss weight differs from 1."""

    loss: float
    targets: float
    correct: float
    weight_deviation: float


_zero_sums = partial(np.zeros, len(_TargetSums._fields))


class Meter:
    """Measurements of this rank between two log lines, added without waiting for the device.

    Args:
        by_channel: whether losses and accuracies are reported for each channel.

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
        self._num_computed_tokens, self._num_padding_tokens = 0, 0
        # Of each micro-batch: C channels, not all different, and the fields of ``_TargetSums`` of each, (4, C).
        self._sums: list[tuple[tuple[str | None, ...], Tensor]] = []
        self._balances: list[Tensor] = []

    def timed(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items, and measure the time spent waiting for them."""
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
        """Start measuring the time of a log line, for which the host waits for the device."""
        self._log_began = time.perf_counter()

    def end_log(self) -> None:
        """Stop measuring the time of a log line; the next line reports it."""
        self._log_wait += time.perf_counter() - self._since

    def exclude(self, seconds: float) -> None:
        """Exclude time that was spent on something else, such as an evaluation, from the next line."""
        self._since += seconds

    def add_step(self, figures: StepFigures, balance: Tensor | None = None) -> None:
        """Add the figures of a complete step, and this rank's part of the step's load-balancing loss, 0-d."""
        self._figures += figures
        self.sources = added([self.sources, figures.sources])
        self._num_steps += 1
        if balance is not None:
            self._balances.append(balance)

    @torch.no_grad()
    def add_losses(self, losses: TargetLosses, batch: Batch) -> None:
        """Add up the figures of a micro-batch's targets, on the device."""
        self._num_computed_tokens += batch.input_ids.numel()
        self._num_padding_tokens += batch.num_padding
        figures = _target_figures(losses, batch)
        if isinstance(batch, TreeTargets) or self._by_channel:
            figures = _channel_sums(figures, batch, losses.positions)
        if self._by_channel:
            self._sums.append((batch.channels, figures))
        else:
            self._sums.append(((_ALL_CHANNELS,), figures.sum(dim=1, keepdim=True)))

    def take_log_line(
        self,
        loss: float,
        accelerator: Any,
        *,
        copy_seconds: float | None,
        recomputed: tuple[int, int] | None = None,
    ) -> dict[str, float]:
        """Return the figures of all steps since the previous line, by their names in ``metrics.jsonl``, and reset.

        All ranks call this at the same step.

        Args:
            loss: mean over the steps of the sum of weighted losses of all ranks.
            copy_seconds: how long the device waited for copies; None if nothing is copied.
            recomputed: layers that recompute, and all layers, summed over this rank's tokens; None if always the same.
        """
        figures = self._figures
        seconds, log_seconds = self._take_seconds()
        target_means = self._target_means(accelerator.num_processes)
        mean_loss = target_means.pop("loss", None)

        line = self._loss_figures(loss, mean_loss)
        line |= figures.logged()
        line |= target_means
        line |= self._speed_figures(seconds, log_seconds)
        line["memory_gib"] = memory_gib(accelerator.device)
        if copy_seconds is not None:
            line["copy_wait"] = copy_seconds / max(seconds, 1e-9)
        if self._balances:
            line["router_balance"] = self._mean_balance(accelerator.num_processes)
        if self._num_padding_tokens:
            line["padding"] = self._num_padding_tokens / self._num_computed_tokens
        line |= _flops_figures(figures, recomputed, seconds, accelerator)
        self._reset()
        return line

    def _mean_balance(self, num_processes: int) -> float:
        """Return the mean load-balancing loss of the steps; each rank has a part of it, and the parts add up."""
        local_part = float(torch.stack(self._balances).sum()) / self._num_steps
        return sum(all_gather_objects(local_part, num_processes))

    def _take_seconds(self) -> tuple[float, float]:
        """Return the seconds since the previous line, and how many of them log lines took; restart the first."""
        now = time.perf_counter()
        seconds = now - self._since
        self._since = now
        return seconds, self._log_wait + (now - self._log_began)

    def _loss_figures(self, loss: float, mean_loss: float | None) -> dict[str, float]:
        """Return ``loss`` and, if loss weights make the mean over targets differ from it, ``objective``."""
        units = self._figures.units  # targets, or samples with --loss-reduction sample
        objective = loss * self._num_steps / units if units else math.nan
        return {"loss": objective} if mean_loss is None else {"loss": mean_loss, "objective": objective}

    def _speed_figures(self, seconds: float, log_seconds: float) -> dict[str, float]:
        """Return rates and shares of waiting in ``seconds`` of steps, of which the host spent some with log lines."""
        figures = self._figures
        elapsed = max(seconds, 1e-9)
        return {
            "seconds": seconds,
            "target_tokens_per_second": figures.target_tokens / elapsed,
            "tokens_per_second": figures.tokens / elapsed,
            "samples_per_second": figures.samples / elapsed,
            "data_wait": self._data_wait / elapsed,
            "log_wait": log_seconds / elapsed,
        }

    def _target_means(self, num_processes: int) -> dict[str, float]:
        """Return means over the targets of all ranks by name: accuracies, channel losses, the loss if weights vary."""
        sums_by_channel = self._sums_of_all_ranks(num_processes)
        names = sorted(sums_by_channel)  # in one order on all ranks, so that rounding is the same
        total = _TargetSums(*sum((sums_by_channel[name] for name in names), _zero_sums()).tolist())
        means = {}
        if total.targets:
            means["token_accuracy"] = total.correct / total.targets
            if total.weight_deviation:
                means["loss"] = total.loss / total.targets
        if self._by_channel:
            for name in names:
                of_channel = _TargetSums(*sums_by_channel[name].tolist())
                if of_channel.targets:
                    means[f"loss_{name}"] = of_channel.loss / of_channel.targets
                    means[f"token_accuracy_{name}"] = of_channel.correct / of_channel.targets
        return means

    def _sums_of_all_ranks(self, num_processes: int) -> dict[str, Any]:
        """Return the fields of ``_TargetSums`` over all ranks, arrays (4,), by name of the channel."""
        local_sums: defaultdict[str, Any] = defaultdict(_zero_sums)
        for channels, sums in self._sums:
            for channel, channel_sums in zip(channels, sums.T.tolist(), strict=True):
                local_sums["none" if channel is None else channel] += channel_sums
        global_sums: defaultdict[str, Any] = defaultdict(_zero_sums)
        for rank_sums in all_gather_objects(dict(local_sums), num_processes):
            for name, channel_sums in rank_sums.items():
                global_sums[name] += channel_sums
        return global_sums


class SampleLosses:
    """Sums of this rank's target losses for each sample, kept on the device until they are gathered."""

    def __init__(self) -> None:
        self._steps: list[int] = []  # of each sample, 0-based
        self._samples: list[int] | list[str] = []  # positions in the caches, or ``stream_key``s
        self._sums: list[Tensor] = []  # of each micro-batch: sum of losses, and targets, of each sample, (2, S)

    @torch.no_grad()
    def add(self, step: int, planned_samples: Sequence[Any], losses: TargetLosses, batch: Batch) -> None:
        """Sum this rank's target losses of a micro-batch by sample, without waiting for the device.

        ``planned_samples`` are positions in the caches, or samples of a stream; also skipped ones. A target in a prefix
        that samples share counts for each of them.
        """
        skipped_indices = {sample.index for sample in batch.skipped}
        samples: list[Any] = [sample for index, sample in enumerate(planned_samples) if index not in skipped_indices]
        if samples and not isinstance(samples[0], int):
            samples = [stream_key(sample) for sample in samples]

        target_losses = losses.losses.detach().float()
        # One index in ``samples`` for each entry of ``target_losses``.
        if isinstance(batch, TreeTargets):
            sample_numbers, target_numbers = batch.sample_targets
            target_losses = target_losses[target_numbers]
        else:
            sample_numbers = batch.documents_of(losses.positions)

        loss_and_count = torch.stack((target_losses, torch.ones_like(target_losses)))
        sums = loss_and_count.new_zeros(2, len(samples)).index_add_(1, sample_numbers, loss_and_count)
        self._sums.append(sums)
        self._samples += samples
        self._steps += [step] * len(samples)

    def gather(self, num_processes: int) -> list[npt.NDArray[Any]]:
        """Return steps, samples, sums of losses, and targets, (M,) each, since the last call; all ranks call this."""
        sums = torch.cat(self._sums or [torch.zeros(2, 0)], dim=1)
        columns = np.array(self._steps, np.int64), np.array(self._samples or np.zeros(0, int)), *sums.cpu().numpy()
        self._steps, self._samples, self._sums = [], [], []
        return list(map(np.concatenate, zip(*all_gather_objects(columns, num_processes), strict=True)))


def _target_figures(losses: TargetLosses, batch: Batch) -> Tensor:
    """Return a row for each field of ``_TargetSums``, and a column for each target of a micro-batch, (4, targets)."""
    target_losses = losses.losses.detach()
    # A target in a shared prefix belongs to several samples, and its weight is the sum of their weights.
    num_samples = batch.target_counts.sum(dim=0) if isinstance(batch, TreeTargets) else 1
    deviations = torch.zeros_like(target_losses) if losses.weights is None else losses.weights - num_samples
    is_correct = losses.correct.to(target_losses.dtype)
    return torch.stack((target_losses, torch.ones_like(target_losses), is_correct, deviations.abs()))


def _channel_sums(figures: Tensor, batch: Batch, positions: Tensor) -> Tensor:
    """Sum the figures of targets at ``positions``, (4, targets), for each of the C channels of a batch, (4, C)."""
    if isinstance(batch, TreeTargets):
        # A target in a shared prefix counts for every sample in which it has a label: (4, channels, targets).
        return (figures[:, None, :] * batch.target_counts).sum(dim=2)
    sums = figures.new_zeros(len(figures), len(batch.channels))
    return sums.index_add_(1, batch.documents_of(positions), figures)


def _flops_figures(
    figures: StepFigures, recomputed: tuple[int, int] | None, seconds: float, accelerator: Any
) -> dict[str, float]:
    """Return shares of recomputed layers and FLOPs, and ``_utilization``; ``recomputed`` as in ``take_log_line``."""
    line = {}
    if recomputed is not None:
        counts_of_ranks = all_gather_objects(recomputed, accelerator.num_processes)
        num_recomputed = sum(count for count, _ in counts_of_ranks)
        num_layers = sum(count for _, count in counts_of_ranks)
        line["recomputed_layers"] = num_recomputed / max(num_layers, 1)
        figures = figures.with_recomputed(line["recomputed_layers"])
    if figures.flops:
        line["recomputed_flops"] = figures.hardware_flops / figures.flops - 1
    return line | _utilization(figures, seconds, accelerator)


def _utilization(figures: StepFigures, seconds: float, accelerator: Any) -> dict[str, float]:
    """Return ``mfu`` and ``hfu``, relative to the peak of all GPUs in ``seconds``; empty if the peak is unknown."""
    if accelerator.device.type != "cuda" or not figures.flops:
        return {}
    peak = peak_tflops(torch.cuda.get_device_name())
    if peak is None:
        return {}
    peak_flops = seconds * peak * 1e12 * accelerator.num_processes
    return {"mfu": figures.flops / peak_flops, "hfu": figures.hardware_flops / peak_flops}


def memory_gib(device: torch.device) -> float:
    """Return this process's peak memory so far, in GiB: on its GPU, or in the machine's memory for a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB


def heading_lines(run: Run, gpu: str | None) -> Iterator[str]:
    """Yield a table that explains each figure of the log lines; ``gpu`` is the name of this rank's GPU, or None."""
    on_gpu = gpu is not None
    waited_for = "data / copies to the GPU / the log" if on_gpu else "data / the log"
    memory = "on its GPU" if on_gpu else "in the machine"
    meanings: dict[str, str] = {}
    if not run.config.streaming:
        meanings["epoch"] = "passes over the data so far"
    meanings |= {
        "loss": "mean over target tokens, in nats",
        "grad norm": "norm of the gradient of all trained weights, before clipping",
        "lr": "learning rate",
        "tokens/s": "tokens of samples per second, over all processes",
        "samples/s": "samples per second, over all processes",
        "fill": "share of the computed tokens that belong to samples",
        "waiting": f"shares of the time that steps waited for {waited_for}",
        "memory": f"peak memory of this process so far, {memory}, in GiB",
    }
    meanings |= _optional_meanings(run, gpu)
    yield "log lines, each for the steps since the previous line (metrics.jsonl has more figures):"
    width = max(len(name) for name in meanings)
    for name, meaning in meanings.items():
        yield f"  {name:{width}}  {meaning}"


def _optional_meanings(run: Run, gpu: str | None) -> dict[str, str]:
    """Describe the figures that only some runs have, by name; ``gpu`` is the GPU's name, None without one."""
    config = run.config
    meanings = {}
    if run.source.logs_channels:
        meanings[_CHANNEL_LOSSES] = "loss of each channel; in a mixture, of each source"
    if config.media_cache is not None:
        meanings["kept"] = "share of the images and videos of this process that came from the media cache"
    if config.router_aux_loss_coef:
        meanings["balance"] = (
            "load-balancing loss of the experts, before --router-aux-loss-coef; with k experts per token, k is ideal"
        )
    if config.torch_compile:
        meanings["padding"] = "share of this process's computed tokens that pad micro-batches to one of a few lengths"
    if config.plans_recomputation:
        meanings["recomputed"] = "share of the layers that recomputed their activations, over all processes"
    peak = None if gpu is None else peak_tflops(gpu)
    if peak is not None:
        meanings["MFU"] = f"FLOP/s of the model, relative to the GPU's peak of {peak:,.0f} TFLOP/s in 16 bits"
        meanings["HFU"] = "the same, including recomputed activations and logits"
    if run.validation is not None:
        meanings[_VAL_LOSS] = "loss of the val split, on a line of its own"
    return meanings


OBJECTIVE_LINE = (
    "  objective  the minimized loss: sum of weighted losses, divided by the number of target tokens, or with "
    "--loss-reduction sample averaged over samples"
)


def shown_figures(logs: Mapping[str, Any], *, has_epochs: bool) -> dict[str, float | int | str]:
    """Select and format the figures of a line of ``metrics.jsonl`` that the terminal shows; a stream has no epochs."""
    shown: dict[str, float | int | str] = {"epoch": f"{logs['epoch']:.2f}"} if has_epochs else {}
    if "loss" not in logs:  # a line of an evaluation
        return shown | {_VAL_LOSS: round(logs["eval_loss"], 4)}
    # Without targets there is no mean: --on-bad-media skip may skip all samples of a step.
    shown["loss"] = round(float(logs["loss"]), 4) if logs["target_tokens"] else "none"
    if "objective" in logs:
        shown["objective"] = round(float(logs["objective"]), 4)
    if logs.get("grad_norm") is not None:
        shown["grad norm"] = _three_digits(logs["grad_norm"])
    shown["lr"] = _three_digits(logs["learning_rate"])
    return shown | _shown_speed(logs) | _shown_optional_figures(logs)


def _shown_speed(logs: Mapping[str, Any]) -> dict[str, float | int | str]:
    """Format the rates, the fill, the shares of waiting and the memory of a line."""
    return {
        "tokens/s": round(logs["tokens_per_second"]),
        "samples/s": _three_digits(logs["samples_per_second"]),
        "fill": f"{logs['fill']:.1%}",
        "waiting": "/".join(f"{100 * logs[name]:.0f}" for name in _WAITS if name in logs) + "%",
        "memory": f"{logs['memory_gib']:.1f} GiB",
    }


def _three_digits(value: float) -> float:
    """Return a number rounded to three significant digits."""
    return float(f"{value:.3g}")


def _shown_optional_figures(logs: Mapping[str, Any]) -> dict[str, float | int | str]:
    """Format the figures that the lines of only some runs have."""
    shown: dict[str, float | int | str] = {}
    if channel_losses := {name: loss for name, loss in logs.items() if name.startswith("loss_")}:
        shown[_CHANNEL_LOSSES] = _channel_losses_text(channel_losses)
    if "media_cache_hits" in logs:
        shown["kept"] = f"{logs['media_cache_hits']:.0%}"
    if "router_balance" in logs:
        shown["balance"] = round(logs["router_balance"], 4)
    if "padding" in logs:
        shown["padding"] = f"{logs['padding']:.1%}"
    if "recomputed_layers" in logs:
        shown["recomputed"] = f"{logs['recomputed_layers']:.0%}"
    if "mfu" in logs:
        shown["MFU"] = f"{logs['mfu']:.0%}"
        shown["HFU"] = f"{logs['hfu']:.0%}"
    return shown


def _channel_losses_text(losses: Mapping[str, float]) -> str:
    """Return the losses of channels, by the names ``loss_CHANNEL``, as text; of many, the first ``_MAX_CHANNELS``."""
    texts = [f"{name.removeprefix('loss_')} {loss:.4g}" for name, loss in losses.items()]
    num_more = len(texts) - _MAX_CHANNELS
    return ", ".join(texts[:_MAX_CHANNELS]) + (f", {num_more} more in metrics.jsonl" if num_more > 0 else "")


WINDOW = 200
"""Number of previous log lines that a new one is compared with."""
_MIN_LINES = 20
_NUM_SIGMAS = 6.0
_MIN_LOSS_SIGMA = 0.02  # of the median loss, so that outliers are at least 12 % above it
_MIN_LOG_NORM_SIGMA = 0.1  # so that outliers are nearly twice the median norm
_SIGMA_OF_MAD = 1.4826  # standard deviation of a normal distribution whose median absolute deviation is 1
_MAX_SIMILAR, _SIMILAR_SHARE = 2, 0.7


def is_far_above(value: float, previous: Sequence[float], min_sigma: float) -> bool:
    """Return whether a value is an outlier: far above the previous values, and at most two of these are similar.

    Far means six robust standard deviations above the median (Leys et al. 2013, "Detecting outliers"). A previous value
    is similar if it is at least 70 % as far above the median. With fewer than 20 previous values there is no outlier.
    """
    if len(previous) < _MIN_LINES:
        return False
    middle = median(previous)
    sigma = max(_SIGMA_OF_MAD * median(abs(other - middle) for other in previous), min_sigma)
    similar = middle + _SIMILAR_SHARE * (value - middle)
    return value - middle > _NUM_SIGMAS * sigma and sum(other >= similar for other in previous) <= _MAX_SIMILAR


class Outliers:
    """Detector of log lines whose loss or gradient norm is far above those of the previous lines."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._log_norms: deque[float] = deque(maxlen=WINDOW)  # norms vary by factors

    def add_line(self, logs: Mapping[str, Any]) -> dict[str, float]:
        """Compare a log line with the previous lines, and keep its loss and gradient norm for later comparisons.

        Returns:
            Medians of previous values, only for outliers: ``loss`` if the loss is one, ``grad_norm`` if the norm is
            one. Values that are missing, infinite or NaN, and norms of 0, are neither compared nor kept.
        """
        medians = {}
        loss = logs.get("loss")
        if loss is not None and math.isfinite(loss):
            median_loss = median(self._losses) if self._losses else 0.0
            if is_far_above(loss, self._losses, min_sigma=_MIN_LOSS_SIGMA * abs(median_loss)):
                medians["loss"] = median_loss
            self._losses.append(loss)

        norm = logs.get("grad_norm")
        if norm is not None and math.isfinite(norm) and norm > 0:
            log_norm = math.log(norm)  # because norms vary by factors
            if is_far_above(log_norm, self._log_norms, min_sigma=_MIN_LOG_NORM_SIGMA):
                medians["grad_norm"] = math.exp(median(self._log_norms))
            self._log_norms.append(log_norm)
        return medians


def outlier_warning(step: int, medians: Mapping[str, float], logs: Mapping[str, Any], output_dir: str | None) -> str:
    """Return the warning for a log line with outliers, of which ``Outliers.add_line`` returned the medians.

    ``output_dir`` is quoted for a shell; None for a stream, whose steps cannot be inspected.
    """
    figures = " and ".join(
        f"{name.replace('_', ' ')} {float(logs[name]):.4g} (median of previous lines: {middle:.4g})"
        for name, middle in medians.items()
    )
    hint = "" if output_dir is None else f": packtool inspect {output_dir} --step {step} shows its samples"
    return f"step {step:,} is far above previous steps: {figures}{hint}"


class Report:
    """Log lines of a run, in ``metrics.jsonl`` and on the terminal; only the first rank has one.

    Attributes:
        first_loss, last_loss: loss of the first and the last log line with targets; None before.
    """

    def __init__(self, run: Run, progress: Progress) -> None:
        self.run, self.progress = run, progress
        self.path = os.path.join(run.config.output_dir, METRICS_NAME)
        self.first_loss: float | None = None
        self.last_loss: float | None = None
        self._waiting = WaitingNote(workers_of(run), cores_of_a_rank())
        self._reads = MediaReads()
        self._num_unreported = 0  # finished steps that the progress does not show yet
        self._explains_objective = True
        self._outliers = Outliers()

    def begin(self, num_steps: int) -> None:
        """Describe the figures, start the progress, and delete the lines of steps that are trained again."""
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        for line in heading_lines(self.run, gpu):
            self.progress.note(line)
        self.progress.start("train", num_steps)
        if self.run.start:
            self.progress.advance(self.run.start)
        if os.path.exists(self.path):
            self._truncate_lines(self.run.start)

    def _truncate_lines(self, last_step: int) -> None:
        """Delete the lines after ``last_step`` from the file, and compare later lines with those that stay."""
        with open(self.path, encoding="utf-8") as file:  # its last line may be incomplete
            kept = [line for line in file if line.endswith("\n") and load_json(line)["step"] <= last_step]
        with open(self.path, "w", encoding="utf-8") as file:
            file.writelines(kept)
        for line in kept[-WINDOW:]:
            self._outliers.add_line(load_json(line))

    def end_step(self, *, should_log: bool) -> None:
        """Count a step; without a log line it is shown at once, else together with the figures of its line."""
        self._num_unreported += 1
        if not should_log:
            self.progress.advance(self._num_unreported)
            self._num_unreported = 0

    def write_line(self, step: int, logs: Mapping[str, Any], output_dir: str, reads: MediaReads) -> None:
        """Write and show a log line of training or of an evaluation, and warn about outliers and slow loading.

        Args:
            step: number of steps done.
            logs: figures by their names in ``metrics.jsonl``; ``loss`` is missing in those of an evaluation.
            reads: this rank's reads of the media cache so far.
        """
        is_training_line = "loss" in logs
        line = {"step": step, **logs}
        if is_training_line:
            line |= self._media_cache_figures(reads)
        outlier_medians = self._outliers.add_line(logs)  # empty if nothing is unusual
        if outlier_medians:
            line["unusual"] = list(outlier_medians)
        self._append(line)
        self._show(line)
        if not is_training_line:
            return

        if logs["target_tokens"]:
            self.last_loss = float(logs["loss"])
            if self.first_loss is None:
                self.first_loss = self.last_loss
        if outlier_medians:
            inspected_dir = None if self.run.config.streaming else shlex.quote(output_dir)
            self.progress.note(outlier_warning(step, outlier_medians, logs, inspected_dir))
        waiting_note = self._waiting.add_steps(logs["data_wait"], logs["seconds"])
        if waiting_note is not None:
            self.progress.note(waiting_note)

    def _show(self, line: Mapping[str, Any]) -> None:
        """Show a line on the terminal, and explain ``objective`` where it is first shown."""
        if "objective" in line and self._explains_objective:
            self.progress.note(OBJECTIVE_LINE)
            self._explains_objective = False
        self.progress.line(self._num_unreported, **shown_figures(line, has_epochs=not self.run.config.streaming))
        self._num_unreported = 0

    def _append(self, line: Mapping[str, Any]) -> None:
        """Write a line into the file, where NaN and infinity become None."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(plain_json(line)) + "\n")

    def _media_cache_figures(self, reads: MediaReads) -> dict[str, float]:
        """Return the share of hits since the last line, if the cache was read; warn if it can no longer be written."""
        previous, self._reads = self._reads, reads
        if reads.problem is not None and previous.problem is None:
            self.progress.note(f"--media-cache: training continues without adding to the cache: {reads.problem}")
        new_reads = MediaReads(hits=reads.hits - previous.hits, misses=reads.misses - previous.misses)
        return {"media_cache_hits": new_reads.share} if new_reads.hits + new_reads.misses else {}
