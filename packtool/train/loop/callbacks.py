"""What happens beside the step: the log file, the progress, the finishing of checkpoints.

The ledger of a run, kept while it trains.

The figures that a user sees of every log line, and what each of them is.

Log lines whose loss or gradient norm is far above those before it: a step that is worth looking at.
"""

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
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from packtool.batch.media_cache import MediaReads
from packtool.cache.evaluation_file import plain_json
from packtool.cache.lock import DirectoryLock
from packtool.config.checkpoints import CheckpointOptions
from packtool.config.settings import load_json
from packtool.errors import ConfigError
from packtool.launch.world import all_gather_objects
from packtool.progress import Progress
from packtool.simulate.hardware import peak_tflops
from packtool.train.loop.loader import StepLoader
from packtool.train.loop.trainer import PackTrainer
from packtool.train.loop.watch import StepWatch
from packtool.train.model.unloaded import add_unloaded
from packtool.train.prepare.checkpoint import (
    PREFIX,
    copy_processor,
    discard_run_state,
    remove_oldest,
    saving,
    write_run_state,
)
from packtool.train.prepare.figures import Steps
from packtool.train.prepare.history import options_kept
from packtool.train.prepare.place import BEST, LAST, METRICS_NAME, best_of, point
from packtool.train.prepare.record import RunRecord
from packtool.train.prepare.run import Run
from packtool.train.prepare.timeline import OpenTimeline, Timeline
from packtool.train.prepare.workers import WaitingNote, cores_of_a_rank, workers_of

_VAL_LOSS = "val loss"
_CHANNEL_LOSSES = "loss by channel"
_MAX_CHANNELS = 8  # whose losses are shown
_WAITS = ("data_wait", "copy_wait", "log_wait")


def heading_lines(run: Run, gpu: str | None) -> Iterator[str]:
    """What each figure of a log line is, and its unit; said once, before the first step.

    Args:
        gpu: name of this rank's GPU, None without one.
    """
    waited_for = "data / the log" if gpu is None else "data / copies to the GPU / the log"
    told = {} if run.config.streaming else {"epoch": "passes over the data so far"}
    told |= {
        "loss": "mean over target tokens, in nats",
        "grad norm": "length of the gradient of all trained weights, before it is clipped",
        "lr": "learning rate",
        "targets/s": "target tokens a second, all processes together",
        "fill": "tokens of samples, of all that are computed",
        "waiting": f"shares of the time that steps waited for {waited_for}",
        "memory": f"the most that this process has held so far of its {'machine' if gpu is None else 'GPU'}, in GiB",
    }
    if run.source.logs_channels:
        told[_CHANNEL_LOSSES] = "the loss of each channel; in a mixture, of each source"
    if run.config.media_cache is not None:
        told["kept"] = "pictures and videos that were in the media cache, of all that this process loaded"
    if run.config.router_aux_loss_coef:
        told["balance"] = "load-balancing loss of the experts, before --router-aux-loss-coef; even routers have k"
    if run.config.torch_compile:
        told["padding"] = "tokens that make micro-batches one of a few lengths, of all that this process computes"
    if gpu is not None and (peak := peak_tflops(gpu)) is not None:
        told["MFU"] = f"FLOP/s of the model, of the {peak:,.0f} TFLOP/s that the GPU has at its best in 16 bits"
        told["HFU"] = "the same with activations and logits that are computed again"
    if run.validation is not None:
        told[_VAL_LOSS] = "the loss of the val split, a line of its own"
    yield "log lines, each of the steps since the one before (metrics.jsonl has more):"
    width = max(map(len, told))
    yield from (f"  {name:{width}}  {meaning}" for name, meaning in told.items())


OBJECTIVE_LINE = (
    "  objective  what training minimizes: losses times their weights, over the number of target tokens, or with "
    "--loss-reduction sample the mean over samples"
)


def shown_figures(logs: Mapping[str, Any], *, has_epochs: bool) -> dict[str, float | int | str]:
    """The figures of a log line that are shown, by the names of ``heading_lines``.

    Args:
        logs: a line of ``metrics.jsonl``, of training or of an evaluation.
        has_epochs: False for a stream, whose number of rows is unknown.
    """
    shown: dict[str, float | int | str] = {"epoch": f"{logs['epoch']:.2f}"} if has_epochs else {}
    if "loss" not in logs:
        return shown | {_VAL_LOSS: round(logs["eval_loss"], 4)}
    # Without targets there is no mean; what --on-bad-media skip leaves out may be all that a step has.
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
"""Log lines that one is compared with."""
_FEWEST = 20
_SIGMAS = 6.0
_OF_MAD = 1.4826  # a normal distribution's standard deviation, of its median absolute deviation
_AS_LARGE, _NEARLY = 2, 0.7


def is_far_above(value: float, before: Sequence[float], least_sigma: float) -> bool:
    """Whether a number is far above others, and hardly any of these are.

    Far is six robust standard deviations above the median (Leys et al. 2013, "Detecting outliers: Do not use standard
    deviation around the mean, use absolute deviation around the median", take three). Where three of the others are
    nearly as far, the number is one of many: of a source that is harder than the others, or of a level that the run has
    come to. Fewer than twenty others tell nothing.

    Args:
        value: of a log line.
        before: those of the lines before.
        least_sigma: a standard deviation is taken to be that at least.
    """
    if len(before) < _FEWEST:
        return False
    middle = median(before)
    sigma = max(_OF_MAD * median(abs(other - middle) for other in before), least_sigma)
    nearly = middle + _NEARLY * (value - middle)
    return value - middle > _SIGMAS * sigma and sum(other >= nearly for other in before) <= _AS_LARGE


class Outliers:
    """Remembers the last log lines, and says what of the next one is far above them."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._norms: deque[float] = deque(maxlen=WINDOW)

    def of(self, logs: Mapping[str, Any]) -> dict[str, float]:
        """The figures of a line that are far above those of the last lines, each with the median of these.

        Gradient norms vary by factors: their logarithms are compared. A loss must be 12 % above the median at least,
        and a norm nearly twice of it.
        """
        found = {}
        loss, norm = logs.get("loss"), logs.get("grad_norm")
        if loss is not None and math.isfinite(loss):
            if is_far_above(loss, self._losses, 0.02 * abs(median(self._losses or [0.0]))):
                found["loss"] = median(self._losses)
            self._losses.append(loss)
        if norm is not None and math.isfinite(norm) and norm > 0:
            if is_far_above(math.log(norm), self._norms, 0.1):
                found["grad_norm"] = math.exp(median(self._norms))
            self._norms.append(math.log(norm))
        return found


def sentence(step: int, found: Mapping[str, float], logs: Mapping[str, Any], output_dir: str | None) -> str:
    """What is to be said of a line with such figures.

    Args:
        step: of the line.
        found: what ``Outliers`` has found.
        logs: the line.
        output_dir: of a run whose steps can be looked at.
    """
    told = " and ".join(
        f"{name.replace('_', ' ')} {float(logs[name]):.4g} (the last lines: {middle:.4g})"
        for name, middle in found.items()
    )
    look = "" if output_dir is None else f": packtool inspect {output_dir} --step {step} shows what it held"
    return f"step {step:,} is far above those before: {told}{look}"


def ends_epoch(timeline: Timeline | OpenTimeline, step: int) -> bool:
    """Whether an epoch is done after so many steps, which need not be alike many in each: one may be planned anew."""
    return timeline.locate(step)[1] == 0


class StepsCallback(TrainerCallback):
    """Keeps the Trainer's idea of epochs right (for it the whole run is one), and ends a run when its samples end.

    Must come before ``CheckpointCallback``, which waits for all ranks.

    Args:
        steps: of this rank.
        saves_epochs: a checkpoint is wanted at the end of every epoch, and of the run.
    """

    def __init__(self, timeline: Timeline | OpenTimeline, steps: Steps, *, saves_epochs: bool = False) -> None:
        self.timeline, self.steps = timeline, steps
        self.saves_epochs = saves_epochs

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Set the epoch once the Trainer has counted a step, and tell it whether to log, save and stop."""
        state.epoch = self.timeline.epochs(state.global_step)
        is_end = state.global_step >= self.timeline.num_steps
        if is_end:
            control.should_log = True
        if self.saves_epochs and (is_end or ends_epoch(self.timeline, state.global_step)):
            control.should_save = True
        if self.steps.ended:
            control.should_log = control.should_training_stop = True
            control.should_save = args.save_strategy == SaveStrategy.STEPS
        return control

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Every rank writes its own part."""
        self.steps.save(os.path.join(str(args.output_dir), f"{PREFIX}{state.global_step}"), state.global_step)


class CheckpointCallback(TrainerCallback):
    """Adds to a checkpoint what is packtool's, and declares it finished when all ranks have written their part.

    Args:
        watch: knows since when weights may be no numbers.
        lock: of the output directory, on the first rank.
        unloaded: tensors of the base model, and their files, that each saved model takes over unchanged.
    """

    def __init__(self, run: Run, watch: StepWatch, lock: DirectoryLock | None, unloaded: Mapping[str, str]) -> None:
        self.run, self.watch, self.lock, self.unloaded = run, watch, lock, unloaded

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A checkpoint may be about to be written over one of an earlier run.

        Raises:
            MismatchError: if another run has taken the output directory over.
        """
        if self.lock is not None:
            (self.lock.check if control.should_save else self.lock.check_last_renewal)()
        if control.should_save and state.is_world_process_zero:
            discard_run_state(os.path.join(str(args.output_dir), f"{PREFIX}{state.global_step}"))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Complete a checkpoint that the Trainer has written."""
        PartialState().wait_for_everyone()
        if state.is_world_process_zero:
            checkpoint = os.path.join(str(args.output_dir), f"{PREFIX}{state.global_step}")
            with saving(checkpoint):
                add_unloaded(checkpoint, self.unloaded)
                copy_processor(self.run.source.files.directory, checkpoint, self.run.source.files.template_file)
                epoch, step_in_epoch = self.run.timeline.locate(state.global_step)
                write_run_state(
                    checkpoint,
                    dataclasses.replace(
                        self.run.state,
                        step=state.global_step,
                        epoch=epoch,
                        step_in_epoch=step_in_epoch,
                        saved_at=time.time(),
                    ),
                    options_kept(self.run.config),
                )
            # Not left to the Trainer, which deletes older ones before this one is finished.
            self._name(str(args.output_dir), checkpoint, state)

    def _name(self, output_dir: str, checkpoint: str, state: TrainerState) -> None:
        """Let the names that stay be the right checkpoints, then remove the oldest ones."""
        config = self.run.config
        is_sought = config.load_best_model_at_end
        best = state.best_model_checkpoint if is_sought else best_of(output_dir, state.log_history)
        with saving(os.path.join(output_dir, f".{LAST}.part")):
            point(output_dir, LAST, checkpoint)
            if best is not None:
                point(output_dir, BEST, best)
        remove_oldest(output_dir, config.save_total_limit, last_good=self.watch.last_good, keep=best)


class EvaluationCallback(TrainerCallback):
    """Evaluates between steps, and logs what comes of it.

    Must come before ``CheckpointCallback``: the best evaluation so far may ask for a checkpoint.

    Args:
        evaluate: and log; called on every rank, where it returns the same.
        due: whether an evaluation follows so many steps; the last step is evaluated, too.
        options: whether the best evaluation is saved, what best means, and when it is long enough ago to end.

    Attributes:
        ended_early: the run ends with this step, because evaluations are not getting better.
    """

    def __init__(
        self, evaluate: Callable[[], dict[str, float]], due: Callable[[int], bool], options: CheckpointOptions
    ) -> None:
        self.evaluate, self.due, self.options = evaluate, due, options
        self.ended_early = False

    def is_due(self, state: TrainerState) -> bool:
        """Whether the step that is done now is evaluated."""
        return self.due(state.global_step) or state.global_step >= state.max_steps

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A step is done on every rank."""
        if self.is_due(state):
            # Logging takes back the wish to log, which the step itself may still have.
            should_log = control.should_log
            figures = self.evaluate()
            control.should_log = should_log
            options = self.options
            if (options.seeks_best or options.early_stop_interval is not None) and self._is_best(figures, state):
                state.best_global_step = state.global_step
                if options.seeks_best:
                    state.best_model_checkpoint = os.path.join(str(args.output_dir), f"{PREFIX}{state.global_step}")
                    control.should_save = True
            if state.global_step < state.max_steps and self._is_enough(state):
                control.should_training_stop = control.should_log = True
                control.should_save |= options.save_strategy not in ("no", "best")

    def _is_enough(self, state: TrainerState) -> bool:
        """Whether the last evaluations were no better; asked of the log, so that a resumed run counts on."""
        patience, name = self.options.early_stop_interval, self.options.best_metric
        since = state.best_global_step or 0
        found = patience is not None and sum(name in line and line["step"] > since for line in state.log_history)
        self.ended_early = bool(patience and found >= patience)
        return self.ended_early

    def _is_best(self, figures: dict[str, float], state: TrainerState) -> bool:
        name = self.options.best_metric
        if name not in figures:
            raise ConfigError(
                f"--metric-for-best-model {self.options.metric_for_best_model}: an evaluation has no {name}",
                f"It has {', '.join(sorted(figures))}.",
            )
        figure, before = figures[name], state.best_metric
        if figure != figure or (
            before is not None and not (figure > before if self.options.prefers_greater else figure < before)
        ):
            return False
        state.best_metric = figure
        return True


class ReportCallback(TrainerCallback):
    """Appends log lines to ``metrics.jsonl`` and tells the progress; only on the first rank.

    Attributes:
        first_loss, last_loss: of the first and the last log line that has targets.
    """

    def __init__(self, run: Run, progress: Progress, loader: StepLoader) -> None:
        self.run, self.progress, self.loader = run, progress, loader
        self._reads = MediaReads()
        self.waiting = WaitingNote(workers_of(run), cores_of_a_rank())
        self.path = os.path.join(run.config.output_dir, METRICS_NAME)
        self.first_loss: float | None = None
        self.last_loss: float | None = None
        self._num_untold = 0  # steps that the next line tells
        self._explains_objective = True
        self._outliers = Outliers()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The first step is next."""
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        for line in heading_lines(self.run, gpu):
            self.progress.note(line)
        self.progress.start("train", state.max_steps)
        if self.run.start:
            self.progress.advance(self.run.start)
        self._drop_lines_after(self.run.start)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The next one is about to be trained, perhaps the first of a stage."""
        if (line := self.run.source.stage_line(state.global_step)) is not None:
            self.progress.note(line)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count the step; without a log line there are no figures of it to show."""
        self._num_untold += 1
        if not control.should_log:
            self._tell(self.progress.advance)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """A line of figures is there."""
        if not logs or not logs.keys() & {"loss", "eval_loss"}:
            return
        line = {"step": state.global_step, **logs} | self._kept_media(logs)
        if unusual := self._outliers.of(logs):
            line["unusual"] = list(unusual)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(plain_json(line)) + "\n")
        if "objective" in logs and self._explains_objective:
            self.progress.note(OBJECTIVE_LINE)
            self._explains_objective = False
        self._tell(self.progress.line, shown_figures(line, has_epochs=not self.run.config.streaming))
        if "loss" not in logs:
            return
        if logs["target_tokens"]:
            self.last_loss = float(logs["loss"])
            if self.first_loss is None:
                self.first_loss = self.last_loss
        if unusual:
            place = None if self.run.config.streaming else shlex.quote(str(args.output_dir))
            self.progress.note(sentence(state.global_step, unusual, logs, place))
        if (remark := self.waiting.after(logs["data_wait"], logs["seconds"])) is not None:
            self.progress.note(remark)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """All steps are done."""
        self.progress.finish()

    def _kept_media(self, logs: Mapping[str, Any]) -> dict[str, float]:
        """What a line of training says of the media cache; what is wrong with it is said when it is first known."""
        if "loss" not in logs:
            return {}
        before, self._reads = self._reads, self.loader.media_reads
        if self._reads.problem is not None and before.problem is None:
            self.progress.note(f"--media-cache: training goes on, and no more is kept: {self._reads.problem}")
        new = MediaReads(self._reads.hits - before.hits, self._reads.misses - before.misses)
        return {"media_cache_hits": new.share} if new.hits + new.misses else {}

    def _tell(self, how: Callable[..., None], figures: Mapping[str, float | int | str] = MappingProxyType({})) -> None:
        """Report the steps done since the last report, with figures of exactly these steps."""
        num, self._num_untold = self._num_untold, 0
        how(num, **figures)

    def _drop_lines_after(self, step: int) -> None:
        """Lines of an earlier run, from the step on that this one trains anew."""
        if not os.path.exists(self.path):
            return
        with open(self.path, encoding="utf-8") as file:
            kept = [line for line in file if line.endswith("\n") and load_json(line)["step"] <= step]
        with open(self.path, "w", encoding="utf-8") as file:
            file.writelines(kept)
        for line in kept[-WINDOW:]:
            self._outliers.of(load_json(line))


class RecordCallback(TrainerCallback):
    """Writes a run's history when it begins, and the ledger into its checkpoints; on every rank.

    Must come before ``CheckpointCallback``, which takes the sums of what is there.

    Args:
        record: of the run.
        trainer: knows the samples that this rank has skipped.
        watch: knows the steps that changed no weight.
    """

    def __init__(self, record: RunRecord, trainer: PackTrainer, watch: StepWatch) -> None:
        self.record, self.trainer, self.watch = record, trainer, watch
        self._num_told = 0  # skipped samples of this rank that the ledger has

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The first step is next."""
        if state.is_world_process_zero:
            self.record.begin(str(args.output_dir))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A checkpoint is being written."""
        trainer = self.trainer
        skipped: list[tuple[int, int]] = []
        if trainer.skips:
            steps, samples = trainer.skipped_in[self._num_told :], trainer.skipped[self._num_told :]
            found = zip(steps, samples, strict=True)
            mine = [(step, sample.sample) for step, sample in found if sample.sample is not None]
            self._num_told += len(samples)
            skipped = [each for rank in all_gather_objects(mine, args.world_size) for each in rank]
        if state.is_world_process_zero:
            checkpoint = os.path.join(str(args.output_dir), f"{PREFIX}{state.global_step}")
            with saving(checkpoint):
                self.record.save(checkpoint, state.global_step, skipped, self.watch.left_out)
        self.watch.left_out.clear()
