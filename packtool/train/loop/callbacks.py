"""Everything around the optimizer step: log file, progress, evaluation, the ledger, and complete checkpoints."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from types import MappingProxyType
from typing import Any

import torch
from accelerate import PartialState
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from packtool.batch.media_cache import MediaReads
from packtool.cache.evaluation_file import plain_json
from packtool.cache.lock import DirectoryLock
from packtool.config.settings import load_json
from packtool.errors import ConfigError
from packtool.launch.world import all_gather_objects
from packtool.progress import Progress
from packtool.simulate.hardware import peak_tflops
from packtool.train.loop.loader import StepLoader
from packtool.train.loop.trainer import PackTrainer
from packtool.train.model.unloaded import add_unloaded
from packtool.train.prepare.checkpoint import (
    PREFIX,
    copy_processor,
    discard_run_state,
    remove_oldest,
    saving,
    write_run_state,
)
from packtool.train.prepare.history import options_kept
from packtool.train.prepare.output_dir import BEST, LAST, METRICS_NAME, best_of, point
from packtool.train.prepare.run import Run
from packtool.train.prepare.timeline import OpenTimeline, Timeline
from packtool.train.prepare.workers import WaitingNote, cores_of_a_rank, workers_of

_VAL_LOSS = "val loss"
_CHANNEL_LOSSES = "loss by channel"
_MAX_CHANNELS = 8  # whose losses are shown
_WAITS = ("data_wait", "copy_wait", "log_wait")


def heading_lines(run: Run, gpu: str | None) -> Iterator[str]:
    """Describe each figure of the log lines and its unit, once, before the first step.

    Args:
        gpu: name of this rank's GPU, None without one.
    """
    waited_for = "data / the log" if gpu is None else "data / copies to the GPU / the log"
    meanings = {} if run.config.streaming else {"epoch": "passes over the data so far"}
    meanings |= {
        "loss": "mean over target tokens, in nats",
        "grad norm": "length of the gradient of all trained weights, before it is clipped",
        "lr": "learning rate",
        "targets/s": "target tokens a second, all processes together",
        "fill": "tokens of samples, of all that are computed",
        "waiting": f"shares of the time that steps waited for {waited_for}",
        "memory": f"the most that this process has held so far of its {'machine' if gpu is None else 'GPU'}, in GiB",
    }
    if run.source.logs_channels:
        meanings[_CHANNEL_LOSSES] = "the loss of each channel; in a mixture, of each source"
    if run.config.media_cache is not None:
        meanings["kept"] = "pictures and videos that were in the media cache, of all that this process loaded"
    if run.config.router_aux_loss_coef:
        meanings["balance"] = "load-balancing loss of the experts, before --router-aux-loss-coef; even routers have k"
    if run.config.torch_compile:
        meanings["padding"] = "tokens that make micro-batches one of a few lengths, of all that this process computes"
    if gpu is not None and (peak := peak_tflops(gpu)) is not None:
        meanings["MFU"] = f"FLOP/s of the model, of the {peak:,.0f} TFLOP/s that the GPU has at its best in 16 bits"
        meanings["HFU"] = "the same with activations and logits that are computed again"
    if run.validation is not None:
        meanings[_VAL_LOSS] = "the loss of the val split, a line of its own"
    yield "log lines, each of the steps since the one before (metrics.jsonl has more):"
    width = max(map(len, meanings))
    yield from (f"  {name:{width}}  {meaning}" for name, meaning in meanings.items())


OBJECTIVE_LINE = (
    "  objective  what training minimizes: losses times their weights, over the number of target tokens, or with "
    "--loss-reduction sample the mean over samples"
)


def shown_figures(logs: Mapping[str, Any], *, has_epochs: bool) -> dict[str, float | int | str]:
    """Return the figures of a log line that the terminal shows, by the names of ``heading_lines``.

    Args:
        logs: a line of ``metrics.jsonl``, from training or an evaluation.
        has_epochs: False for a stream, whose number of rows is unknown.
    """
    shown: dict[str, float | int | str] = {"epoch": f"{logs['epoch']:.2f}"} if has_epochs else {}
    if "loss" not in logs:
        return shown | {_VAL_LOSS: round(logs["eval_loss"], 4)}
    # There is no mean without targets: --on-bad-media skip may leave out all samples of a step.
    shown["loss"] = round(float(logs["loss"]), 4) if logs["target_tokens"] else "none"
    if "objective" in logs:
        shown["objective"] = round(float(logs["objective"]), 4)
    if (norm := logs.get("grad_norm")) is not None:
        shown["grad norm"] = float(f"{norm:.3g}")
    shown |= {
        "lr": float(f"{logs['learning_rate']:.3g}"),
        "targets/s": round(logs["target_tokens_per_second"]),
        "fill": f"{logs['fill']:.1%}",
        "waiting": "/".join(f"{100 * logs[name]:.0f}" for name in _WAITS if name in logs) + "%",
        "memory": f"{logs['memory_gib']:.1f} GiB",
    }
    losses = {name.removeprefix("loss_"): value for name, value in logs.items() if name.startswith("loss_")}
    if losses:
        texts = [f"{name} {value:.4g}" for name, value in list(losses.items())[:_MAX_CHANNELS]]
        num_more = len(losses) - len(texts)
        shown[_CHANNEL_LOSSES] = ", ".join(texts) + (f", {num_more} more in metrics.jsonl" if num_more else "")
    if "media_cache_hits" in logs:
        shown["kept"] = f"{logs['media_cache_hits']:.0%}"
    if "router_balance" in logs:
        shown["balance"] = round(logs["router_balance"], 4)
    if "padding" in logs:
        shown["padding"] = f"{logs['padding']:.1%}"
    if "mfu" in logs:
        shown |= {"MFU": f"{logs['mfu']:.0%}", "HFU": f"{logs['hfu']:.0%}"}
    return shown


WINDOW = 200
"""Log lines that a new one is compared with."""
_MIN_LINES = 20
_SIGMAS = 6.0
_SIGMA_OF_MAD = 1.4826  # standard deviation of a normal distribution whose median absolute deviation is 1
_MAX_SIMILAR, _SIMILAR_SHARE = 2, 0.7


def is_far_above(value: float, before: Sequence[float], min_sigma: float) -> bool:
    """Return whether a number is far above the previous ones, and at most two of these are nearly as large.

    Far means six robust standard deviations above the median (Leys et al. 2013, "Detecting outliers: Do not use
    standard deviation around the mean, use absolute deviation around the median", take three). With three similar
    numbers it is no outlier: a source may be harder than the others, or the run has reached another level. Fewer than
    20 previous numbers are too few to tell.

    Args:
        value: of a log line.
        before: values of the previous lines.
        min_sigma: lower bound of the standard deviation.
    """
    if len(before) < _MIN_LINES:
        return False
    middle = median(before)
    sigma = max(_SIGMA_OF_MAD * median(abs(other - middle) for other in before), min_sigma)
    similar = middle + _SIMILAR_SHARE * (value - middle)
    return value - middle > _SIGMAS * sigma and sum(other >= similar for other in before) <= _MAX_SIMILAR


class Outliers:
    """Finds log lines whose loss or gradient norm is far above those of the previous lines."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._norms: deque[float] = deque(maxlen=WINDOW)

    def of(self, logs: Mapping[str, Any]) -> dict[str, float]:
        """Return the medians of the figures that are far above them in a line, and remember the line.

        Gradient norms vary by factors, so their logarithms are compared. A loss must be at least 12 % above the median,
        and a norm nearly twice the median.
        """
        medians = {}
        loss, norm = logs.get("loss"), logs.get("grad_norm")
        if loss is not None and math.isfinite(loss):
            if is_far_above(loss, self._losses, 0.02 * abs(median(self._losses or [0.0]))):
                medians["loss"] = median(self._losses)
            self._losses.append(loss)
        if norm is not None and math.isfinite(norm) and norm > 0:
            if is_far_above(math.log(norm), self._norms, 0.1):
                medians["grad_norm"] = math.exp(median(self._norms))
            self._norms.append(math.log(norm))
        return medians


def outlier_warning(step: int, medians: Mapping[str, float], logs: Mapping[str, Any], output_dir: str | None) -> str:
    """Return the warning for a log line with outliers; ``output_dir`` is None for a stream."""
    figures = " and ".join(
        f"{name.replace('_', ' ')} {float(logs[name]):.4g} (the last lines: {middle:.4g})"
        for name, middle in medians.items()
    )
    hint = "" if output_dir is None else f": packtool inspect {output_dir} --step {step} shows what it held"
    return f"step {step:,} is far above those before: {figures}{hint}"


class Report:
    """Appends log lines to ``metrics.jsonl`` and shows them; exists on the first rank only.

    Attributes:
        first_loss, last_loss: of the first and the last log line with targets.
    """

    def __init__(self, run: Run, progress: Progress, loader: StepLoader) -> None:
        self.run, self.progress, self.loader = run, progress, loader
        self.path = os.path.join(run.config.output_dir, METRICS_NAME)
        self.first_loss: float | None = None
        self.last_loss: float | None = None
        self._waiting = WaitingNote(workers_of(run), cores_of_a_rank())
        self._reads = MediaReads()
        self._num_unreported = 0  # steps since the last line
        self._explains_objective = True
        self._outliers = Outliers()

    def begin(self, num_steps: int) -> None:
        """Describe the figures, start the progress, and drop lines of steps that are trained again."""
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        for line in heading_lines(self.run, gpu):
            self.progress.note(line)
        self.progress.start("train", num_steps)
        if self.run.start:
            self.progress.advance(self.run.start)
        if os.path.exists(self.path):
            with open(self.path, encoding="utf-8") as file:
                kept = [line for line in file if line.endswith("\n") and load_json(line)["step"] <= self.run.start]
            with open(self.path, "w", encoding="utf-8") as file:
                file.writelines(kept)
            for line in kept[-WINDOW:]:
                self._outliers.of(load_json(line))

    def end_step(self, *, should_log: bool) -> None:
        """Count a step; one without a log line has no figures to show."""
        self._num_unreported += 1
        if not should_log:
            self._show(self.progress.advance)

    def write_line(self, step: int, logs: Mapping[str, Any], output_dir: str) -> None:
        """Write and show a log line of training or of an evaluation."""
        line = {"step": step, **logs} | self._media_cache_hits(logs)
        if medians := self._outliers.of(logs):
            line["unusual"] = list(medians)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(plain_json(line)) + "\n")
        if "objective" in logs and self._explains_objective:
            self.progress.note(OBJECTIVE_LINE)
            self._explains_objective = False
        streams = self.run.config.streaming
        self._show(self.progress.line, shown_figures(line, has_epochs=not streams))
        if "loss" not in logs:
            return
        if logs["target_tokens"]:
            self.last_loss = float(logs["loss"])
            self.first_loss = self.last_loss if self.first_loss is None else self.first_loss
        if medians:
            self.progress.note(outlier_warning(step, medians, logs, None if streams else shlex.quote(output_dir)))
        if (warning := self._waiting.after(logs["data_wait"], logs["seconds"])) is not None:
            self.progress.note(warning)

    def _media_cache_hits(self, logs: Mapping[str, Any]) -> dict[str, float]:
        """Return a training line's share of media found in the cache, and warn once when the cache fails."""
        if "loss" not in logs:
            return {}
        before, self._reads = self._reads, self.loader.media_reads
        if self._reads.problem is not None and before.problem is None:
            self.progress.note(f"--media-cache: training goes on, and no more is kept: {self._reads.problem}")
        new = MediaReads(self._reads.hits - before.hits, self._reads.misses - before.misses)
        return {"media_cache_hits": new.share} if new.hits + new.misses else {}

    def _show(self, show: Callable[..., None], figures: Mapping[str, float | int | str] = MappingProxyType({})) -> None:
        """Show the steps since the last line, with the figures of exactly these steps."""
        num, self._num_unreported = self._num_unreported, 0
        show(num, **figures)


def ends_epoch(timeline: Timeline | OpenTimeline, step: int) -> bool:
    """Return whether an epoch is complete after ``step`` steps; epochs may differ in length."""
    return timeline.locate(step)[1] == 0


class RunCallback(TrainerCallback):
    """Logs, evaluates and completes checkpoints around the Trainer's steps, in one fixed order on every rank.

    Args:
        lock: of the output directory, on the first rank.
        unloaded: tensors of the base model and their files, which each saved model takes over unchanged.

    Attributes:
        report: of the first rank, None on others.
        ended_early: whether evaluations have stopped improving, so that the run ends with this step.
    """

    def __init__(
        self, trainer: PackTrainer, progress: Progress, lock: DirectoryLock | None, unloaded: Mapping[str, str]
    ) -> None:
        self.trainer, self.lock, self.unloaded = trainer, lock, unloaded
        self.run, self.watch, self.steps = trainer.loader.run, trainer.watch, trainer.loader.steps
        self.report = Report(self.run, progress, trainer.loader) if self.run.world.is_first else None
        self.ended_early = False
        self._progress = progress
        self._record = self.run.record()
        self._num_recorded = 0  # skipped samples of this rank in the ledger

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Start the report, and write the run's history."""
        if self.report is not None:
            self.report.begin(state.max_steps)
        if self._record is not None and state.is_world_process_zero:
            self._record.begin(str(args.output_dir))

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Start a step, perhaps the first of a stage."""
        self.watch.begin_step()
        if self.report is not None and (line := self.run.timeline.stage_line(state.global_step)) is not None:
            self._progress.note(line)

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Check the step's numbers: gradients are complete, weights are still the old ones."""
        assert model is not None
        self.watch.before_update(state.global_step, model, args.device)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Evaluate after a step if it is due, decide whether to log, save or stop, and check the directory's lock."""
        self._mark_ends(args, state, control)
        is_evaluated = self._is_evaluated(state)
        self.watch.end_step(state, control, is_evaluated=is_evaluated)
        if self.report is not None:
            self.report.end_step(should_log=control.should_log)
        if is_evaluated:
            self._evaluate(args, state, control)  # the best evaluation so far may request a checkpoint
        if self.lock is not None:
            (self.lock.check if control.should_save else self.lock.check_last_renewal)()
        if control.should_save and state.is_world_process_zero:
            discard_run_state(_checkpoint(args, state))  # perhaps an earlier run's, which will be overwritten

    def _mark_ends(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """Set the epoch, which the Trainer does not know, and log, save or stop where epochs or samples end."""
        timeline = self.run.timeline
        state.epoch = timeline.epochs(state.global_step)
        is_end = state.global_step >= timeline.num_steps
        control.should_log |= is_end
        if self.run.config.save_strategy == "epoch" and (is_end or ends_epoch(timeline, state.global_step)):
            control.should_save = True
        if self.steps.ended:
            control.should_log = control.should_training_stop = True
            control.should_save = args.save_strategy == SaveStrategy.STEPS

    def _is_evaluated(self, state: TrainerState) -> bool:
        """Return whether an evaluation follows this step; one always follows the last."""
        if self.run.validation is None:
            return False
        every = self.run.config.eval_steps if self.run.config.eval_strategy == "steps" else None
        step = state.global_step
        is_due = ends_epoch(self.run.timeline, step) if every is None else step % every == 0
        return is_due or step >= state.max_steps

    def _evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """Evaluate, save a checkpoint of the best result if requested, and stop when results no longer improve."""
        config = self.run.config
        should_log = control.should_log
        figures = self.trainer.evaluate_validation()
        control.should_log = should_log  # which logging an evaluation resets
        if (config.seeks_best or config.early_stop_interval is not None) and self._is_best(figures, state):
            state.best_global_step = state.global_step
            if config.seeks_best:
                state.best_model_checkpoint = _checkpoint(args, state)
                control.should_save = True
        patience, last_best = config.early_stop_interval, state.best_global_step or 0
        if patience is not None and state.global_step < state.max_steps:
            # Counted in the log, so that a resumed run continues the count.
            num_since = sum(config.best_metric in line and line["step"] > last_best for line in state.log_history)
            if patience and num_since >= patience:
                self.ended_early = control.should_training_stop = control.should_log = True
                control.should_save |= config.save_strategy not in ("no", "best")

    def _is_best(self, figures: dict[str, float], state: TrainerState) -> bool:
        config, name = self.run.config, self.run.config.best_metric
        if name not in figures:
            raise ConfigError(
                f"--metric-for-best-model {config.metric_for_best_model}: an evaluation has no {name}",
                f"It has {', '.join(sorted(figures))}.",
            )
        figure, best = figures[name], state.best_metric
        is_better = best is None or (figure > best if config.prefers_greater else figure < best)
        if math.isnan(figure) or not is_better:
            return False
        state.best_metric = figure
        return True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if self.report is not None and logs and logs.keys() & {"loss", "eval_loss"}:
            self.report.write_line(state.global_step, logs, str(args.output_dir))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add packtool's files to a checkpoint, and mark it finished once all ranks have written their part."""
        checkpoint = _checkpoint(args, state)
        self.steps.save(checkpoint, state.global_step)
        if self._record is not None:
            skipped = self._new_skipped()
            if state.is_world_process_zero:
                with saving(checkpoint):
                    self._record.save(checkpoint, state.global_step, skipped, self.watch.left_out)
            self.watch.left_out.clear()
        PartialState().wait_for_everyone()
        if state.is_world_process_zero:
            self._finish_checkpoint(checkpoint, str(args.output_dir), state)

    def _new_skipped(self) -> list[tuple[int, int]]:
        """Return (step, sample) of the samples that any rank has skipped since the last checkpoint."""
        if self.run.config.on_bad_media != "skip":
            return []
        skipped, self._num_recorded = self.trainer.skipped[self._num_recorded :], len(self.trainer.skipped)
        mine = [(step, sample.sample) for step, sample in skipped if sample.sample is not None]
        return [each for rank in all_gather_objects(mine, self.run.world.size) for each in rank]

    def _finish_checkpoint(self, checkpoint: str, output_dir: str, state: TrainerState) -> None:
        """Complete a checkpoint that all ranks have written, and remove the oldest ones."""
        run, step = self.run, state.global_step
        with saving(checkpoint):
            add_unloaded(checkpoint, self.unloaded)
            copy_processor(run.source.files.directory, checkpoint, run.source.files.template_file)
            epoch, step_in_epoch = run.timeline.locate(step)
            run_state = dataclasses.replace(
                run.state, step=step, epoch=epoch, step_in_epoch=step_in_epoch, saved_at=time.time()
            )
            write_run_state(checkpoint, run_state, options_kept(run.config))
        # The Trainer would delete older checkpoints before this one is finished.
        keeps_best = run.config.load_best_model_at_end
        best = state.best_model_checkpoint if keeps_best else best_of(output_dir, state.log_history)
        with saving(os.path.join(output_dir, f".{LAST}.part")):
            point(output_dir, LAST, checkpoint)
            if best is not None:
                point(output_dir, BEST, best)
        remove_oldest(output_dir, run.config.save_total_limit, last_good=self.watch.last_good, keep=best)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.report is not None:
            self._progress.finish()


def _checkpoint(args: TrainingArguments, state: TrainerState) -> str:
    return os.path.join(str(args.output_dir), f"{PREFIX}{state.global_step}")
