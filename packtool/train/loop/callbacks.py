"""What happens beside the step: the log file, the progress, the finishing of checkpoints."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import time
from collections.abc import Callable, Mapping
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
from packtool.config.yaml_values import load_json
from packtool.errors import ConfigError
from packtool.progress import Progress
from packtool.train.loop.loader import StepLoader
from packtool.train.loop.log_line import OBJECTIVE_LINE, heading_lines, shown_figures
from packtool.train.loop.unusual import WINDOW, Outliers, sentence
from packtool.train.loop.watch import StepWatch
from packtool.train.model.unloaded import add_unloaded
from packtool.train.prepare.checkpoint import (
    PREFIX,
    copy_processor,
    discard_run_state,
    remove_oldest,
    write_run_state,
)
from packtool.train.prepare.history import options_kept
from packtool.train.prepare.outcome import BEST, LAST, best_of, point
from packtool.train.prepare.place import METRICS_NAME
from packtool.train.prepare.prepared import PreparedRun, Steps
from packtool.train.prepare.schedule import Schedule
from packtool.train.prepare.whole import saving
from packtool.train.prepare.workers import WaitingNote, cores_of_a_rank, workers_of


def ends_epoch(schedule: Schedule, step: int) -> bool:
    """Whether an epoch is done after so many steps, which need not be alike many in each: one may be planned anew."""
    return schedule.locate(step)[1] == 0


class StepsCallback(TrainerCallback):
    """Keeps the Trainer's idea of epochs right (for it the whole run is one), and ends a run when its samples end.

    Must come before ``CheckpointCallback``, which waits for all ranks.

    Args:
        steps: of this rank.
        saves_epochs: a checkpoint is wanted at the end of every epoch, and of the run.
    """

    def __init__(self, schedule: Schedule, steps: Steps, *, saves_epochs: bool = False) -> None:
        self.schedule, self.steps = schedule, steps
        self.saves_epochs = saves_epochs

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Set the epoch once the Trainer has counted a step, and tell it whether to log, save and stop."""
        state.epoch = self.schedule.epochs(state.global_step)
        is_end = state.global_step >= self.schedule.num_steps
        if is_end:
            control.should_log = True
        if self.saves_epochs and (is_end or ends_epoch(self.schedule, state.global_step)):
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

    def __init__(
        self, run: PreparedRun, watch: StepWatch, lock: DirectoryLock | None, unloaded: Mapping[str, str]
    ) -> None:
        self.run, self.watch, self.lock, self.unloaded = run, watch, lock, unloaded

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A checkpoint may be about to be written over one of an earlier run.

        Raises:
            MismatchError: if another run has taken the output directory over.
        """
        if self.lock is not None:
            (self.lock.check if control.should_save else self.lock.check_soon)()
        if control.should_save and state.is_world_process_zero:
            discard_run_state(os.path.join(str(args.output_dir), f"{PREFIX}{state.global_step}"))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Complete a checkpoint that the Trainer has written."""
        PartialState().wait_for_everyone()
        if state.is_world_process_zero:
            checkpoint = os.path.join(str(args.output_dir), f"{PREFIX}{state.global_step}")
            with saving(checkpoint):
                add_unloaded(checkpoint, self.unloaded)
                copy_processor(self.run.files.directory, checkpoint, self.run.files.template_file)
                epoch, step_in_epoch = self.run.schedule.locate(state.global_step)
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

    def __init__(self, run: PreparedRun, progress: Progress, loader: StepLoader) -> None:
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
        if (line := self.run.stage_line(state.global_step)) is not None:
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
