"""What happens beside the step: the log file, the progress, the finishing of checkpoints."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from typing import Any

from accelerate import PartialState
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from packtool.cache.evaluation_file import plain_json
from packtool.config.checkpoints import CheckpointOptions
from packtool.encode.model_files import ModelFiles
from packtool.errors import ConfigError
from packtool.progress import Progress
from packtool.stream.state import write_state as write_stream
from packtool.train.loop.stream_loader import StreamLoader
from packtool.train.loop.watch import StepWatch
from packtool.train.prepare.checkpoint import (
    PREFIX,
    RunState,
    copy_processor,
    discard_state,
    remove_oldest,
    write_state,
)
from packtool.train.prepare.outcome import BEST, LAST, best_of, point
from packtool.train.prepare.place import METRICS_NAME
from packtool.train.prepare.schedule import Schedule
from packtool.train.prepare.streamed import OpenSchedule
from packtool.train.prepare.whole import saving
from packtool.train.prepare.workers import WaitingNote


class PlanCallback(TrainerCallback):
    """Keeps the Trainer's idea of epochs right: for it the whole run is one.

    Args:
        saves_epochs: a checkpoint is wanted at the end of every epoch, and of the run.
    """

    def __init__(self, schedule: Schedule | OpenSchedule, *, saves_epochs: bool = False) -> None:
        self.schedule = schedule
        self.saves_epochs = saves_epochs

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """After the Trainer has counted a step, before it logs or saves."""
        state.epoch = state.global_step / self.schedule.steps_per_epoch
        is_end = state.global_step >= self.schedule.num_steps
        if is_end:
            control.should_log = True
        if self.saves_epochs and (is_end or self.schedule.locate(state.global_step)[1] == 0):
            control.should_save = True
        return control


class StreamCallback(TrainerCallback):
    """Ends a run when its rows end, and adds to a checkpoint where every rank's stream stands.

    Must come before ``CheckpointCallback``, which waits for all ranks.
    """

    def __init__(self, loader: StreamLoader) -> None:
        self.loader = loader

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """The step that was given last may be the last there is."""
        if self.loader.is_last:
            control.should_log = control.should_training_stop = True
            control.should_save = args.save_strategy == SaveStrategy.STEPS
        return control

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Every rank writes its own part."""
        checkpoint = os.path.join(str(args.output_dir), f"{PREFIX}{state.global_step}")
        os.makedirs(checkpoint, exist_ok=True)
        world = self.loader.run.world
        if world.share_rank == 0:
            write_stream(checkpoint, world.data.rank, self.loader.state_after(state.global_step))


class CheckpointCallback(TrainerCallback):
    """Adds to a checkpoint what is packtool's, and declares it finished when all ranks have written their part."""

    def __init__(
        self,
        run: RunState,
        schedule: Schedule | OpenSchedule,
        files: ModelFiles,
        save_total_limit: int | None,
        *,
        keeps_best: bool = False,
        watch: StepWatch | None = None,
    ) -> None:
        self.keeps_best = keeps_best
        self.run = run
        self.schedule = schedule
        self.files = files
        self.save_total_limit = save_total_limit
        self.watch = watch

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A checkpoint may be about to be written over one of an earlier run."""
        if control.should_save and state.is_world_process_zero:
            discard_state(os.path.join(str(args.output_dir), f"{PREFIX}{state.global_step}"))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """After the Trainer has written a checkpoint."""
        PartialState().wait_for_everyone()
        if state.is_world_process_zero:
            checkpoint = os.path.join(str(args.output_dir), f"{PREFIX}{state.global_step}")
            with saving(checkpoint):
                copy_processor(self.files.directory, checkpoint, self.files.template_file)
                epoch, step_in_epoch = self.schedule.locate(state.global_step)
                write_state(
                    checkpoint,
                    dataclasses.replace(
                        self.run,
                        step=state.global_step,
                        epoch=epoch,
                        step_in_epoch=step_in_epoch,
                        saved_at=time.time(),
                    ),
                )
            # Not left to the Trainer, which deletes older ones before this one is finished.
            self._name(str(args.output_dir), checkpoint, state)

    def _name(self, output_dir: str, checkpoint: str, state: TrainerState) -> None:
        """Let the names that stay be the right checkpoints, then remove the oldest ones."""
        best = state.best_model_checkpoint if self.keeps_best else best_of(output_dir, state.log_history)
        with saving(os.path.join(output_dir, f".{LAST}.part")):
            point(output_dir, LAST, checkpoint)
            if best is not None:
                point(output_dir, BEST, best)
        last_good = self.watch.last_good if self.watch is not None else None
        remove_oldest(output_dir, self.save_total_limit, last_good=last_good, keep=best)


class EvaluationCallback(TrainerCallback):
    """Evaluates between steps, and logs what comes of it.

    Must come before ``CheckpointCallback``: the best evaluation so far may ask for a checkpoint.

    Args:
        evaluate: and log; called on every rank, where it returns the same.
        every: steps between two evaluations; the last step is evaluated, too.
        options: whether the best evaluation is saved, and what best means.
    """

    def __init__(self, evaluate: Callable[[], dict[str, float]], every: int, options: CheckpointOptions) -> None:
        self.evaluate, self.every, self.options = evaluate, every, options

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A step is done on every rank."""
        if state.global_step % self.every == 0 or state.global_step >= state.max_steps:
            # Logging takes back the wish to log, which the step itself may still have.
            should_log = control.should_log
            figures = self.evaluate()
            control.should_log = should_log
            if self.options.seeks_best and self._is_best(figures, state):
                state.best_global_step = state.global_step
                state.best_model_checkpoint = os.path.join(str(args.output_dir), f"{PREFIX}{state.global_step}")
                control.should_save = True

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
        first_loss, last_loss: of the first and the last log line.
    """

    def __init__(self, progress: Progress, output_dir: str, start: int, waiting: WaitingNote) -> None:
        self.progress = progress
        self.waiting = waiting
        self.path = os.path.join(output_dir, METRICS_NAME)
        self.start = start
        self.first_loss: float | None = None
        self.last_loss: float | None = None
        self._shown: dict[str, float | int | str] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The first step is next."""
        self.progress.start("train", state.max_steps)
        if self.start:
            self.progress.advance(self.start)
        self._drop_lines_after(self.start)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """One more is done; the figures shown are those of the last log line."""
        self.progress.advance(1, **self._shown)

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
        line = {"step": state.global_step, **logs}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(plain_json(line)) + "\n")
        if "loss" not in logs:
            self._shown["val loss"] = round(logs["eval_loss"], 4)
            self.progress.line(**{"val loss": self._shown["val loss"]})
            return
        self.last_loss = float(logs["loss"])
        if self.first_loss is None:
            self.first_loss = self.last_loss
        shown: dict[str, float | int | str] = {
            "loss": round(self.last_loss, 4),
            "lr": float(f"{logs['learning_rate']:.3g}"),
            "targets/s": round(logs["target_tokens_per_second"]),
            "fill": f"{logs['fill']:.1%}",
            "waiting": f"{logs['data_wait']:.0%}",
        }
        self._shown |= shown
        self.progress.line(**shown)
        if (remark := self.waiting.after(logs["data_wait"], logs["seconds"])) is not None:
            self.progress.note(remark)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """All steps are done."""
        self.progress.finish()

    def _drop_lines_after(self, step: int) -> None:
        """Lines of an earlier run, from the step on that this one trains anew."""
        if not os.path.exists(self.path):
            return
        with open(self.path, encoding="utf-8") as file:
            kept = [line for line in file if line.endswith("\n") and json.loads(line)["step"] <= step]
        with open(self.path, "w", encoding="utf-8") as file:
            file.writelines(kept)
