"""Execution of a prepared run: load the model, train with evaluations and checkpoints, and write the result."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate import PartialState
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from packtool.attention.parallel.mesh import SequenceParallel
from packtool.batch.dataset import explain_dead_workers
from packtool.batch.spec import InputSpec
from packtool.cache.lock import DirectoryLock
from packtool.errors import ConfigError, PacktoolError
from packtool.launch.world import all_gather_objects
from packtool.planning.mixture import share_figures
from packtool.progress import Progress
from packtool.train.loop.checks import (
    check_ranks_agree,
    estimate_run,
    liger_problem,
    name_failed_tracker,
    training_arguments,
)
from packtool.train.loop.log import Report
from packtool.train.loop.media_times import measure_workers
from packtool.train.loop.step_loader import StepLoader
from packtool.train.loop.trainer import PackTrainer
from packtool.train.loop.watch import StepWatch, StopSignals
from packtool.train.model.load import add_unloaded_tensors, build_model, quiet_transformers, resolve_dtype
from packtool.train.model.precision import count_parameters
from packtool.train.model.recompute import switch_of
from packtool.train.model.sharding import configure_fsdp, connect_deepspeed_on_cpus, shard_on_cpus
from packtool.train.prepare.checkpoint import (
    PREFIX,
    copy_processor,
    discard_run_state,
    remove_oldest,
    saving,
    write_run_state,
)
from packtool.train.prepare.history import recorded_options
from packtool.train.prepare.hub import HubUploads
from packtool.train.prepare.output_dir import BEST, LAST, best_checkpoint, make_output_dir, point
from packtool.train.prepare.result import TrainResult
from packtool.train.prepare.run import Run
from packtool.train.verify.checks import verify_before_training

SKIPPED_NAME = "skipped.jsonl"
_MAX_SHOWN = 20


def execute(
    run: Run,
    spec: InputSpec,
    result: TrainResult,
    progress: Progress,
    lock: DirectoryLock | None,
    uploads: HubUploads | None = None,
) -> TrainResult:
    """Load and train the model of a run on all ranks, and write the result.

    Args:
        result: what is known before training; the returned result is complete.
        lock: of the output directory; None on all but the first rank.
        uploads: to the hub; None on all but the first rank, and without them.
    """
    run = run.with_config(dataloader_num_workers=measure_workers(run, spec))
    with quiet_transformers():
        trainer, callback = _make_trainer(run, spec, progress, lock, uploads)
        parameter_counts = _report_parameters(trainer, progress)
        seconds = _train(trainer, spec, progress)

    _report_end(trainer, callback, result.steps, progress)
    result = _with_training_figures(result, trainer, callback, seconds)
    num_skipped = _report_skipped_samples(trainer, progress)
    result = dataclasses.replace(result, num_skipped=num_skipped, **parameter_counts)
    if run.world.is_first:
        result.write()
    if uploads is not None and not trainer.watch.stopped_by:
        uploads.finish(result.checkpoint, result.steps, progress)
    # No rank may end before everything is written: a launcher ends the others when the first one ends.
    trainer.accelerator.wait_for_everyone()
    trainer.watch.raise_if_stopped(result.steps, run.timeline.num_steps, _last_checkpoint(trainer))
    return result


def _report_parameters(trainer: PackTrainer, progress: Progress) -> dict[str, Any]:
    """Report the numbers of all and of trained parameters; return them by their names in ``TrainResult``."""
    assert trainer.model is not None
    num_trainable, num_parameters = count_parameters(trainer.model)
    progress.note(f"parameters: {num_parameters:,}, trained: {num_trainable:,} ({trainer.config.train_type})")
    return {"num_trainable_parameters": num_trainable, "num_parameters": num_parameters}


def _train(trainer: PackTrainer, spec: InputSpec, progress: Progress) -> float:
    """Estimate memory, check the model, and train it; return the seconds of training."""
    run = trainer.loader.run
    model = trainer.model
    assert model is not None
    # Only on the first rank, because all ranks have the same estimate.
    if run.world.is_first and _estimates_memory():
        dtype = resolve_dtype(spec.config, run.config, on_gpu=True)
        progress.note(estimate_run(run, model, spec, dtype).sentence())
    verify_before_training(run, model, spec, trainer.parallel, progress)
    begin = time.perf_counter()
    with trainer.watch.signals, explain_dead_workers(), name_failed_tracker():
        trainer.train(resume_from_checkpoint=run.resume_point.checkpoint)
    return time.perf_counter() - begin


def _with_training_figures(
    result: TrainResult, trainer: PackTrainer, callback: RunCallback, seconds: float
) -> TrainResult:
    """Return a result with the figures of ``seconds`` of training, and its checkpoint; all ranks call this.

    First and last loss are None on all ranks but the first one, which writes the result.
    """
    config = trainer.loader.run.config
    stream_counts = trainer.loader.steps.final_counts()  # of samples and tokens; empty unless rows were streamed
    result = dataclasses.replace(result, **stream_counts)
    report = callback.report
    return dataclasses.replace(
        result,
        sources=share_figures(trainer.meter.sources),
        output_dir=config.output_dir,
        steps=trainer.state.global_step,
        seconds=seconds,
        target_tokens_per_second=result.target_tokens / seconds,
        first_loss=None if report is None else report.first_loss,
        last_loss=None if report is None else report.last_loss,
        checkpoint=_final_checkpoint(trainer),
    )


def _final_checkpoint(trainer: PackTrainer) -> str | None:
    """Return the best checkpoint if the run looks for it, else the last one; None if neither was saved."""
    config = trainer.loader.run.config
    if config.seeks_best and trainer.state.best_model_checkpoint:
        return trainer.state.best_model_checkpoint
    return None if config.save_strategy in ("no", "best") else _last_checkpoint(trainer)


def _last_checkpoint(trainer: PackTrainer) -> str:
    """The checkpoint after the last step that was trained."""
    return os.path.join(trainer.loader.run.config.output_dir, f"{PREFIX}{trainer.state.global_step}")


def _estimates_memory() -> bool:
    """Return whether a run estimates its memory: not on a CPU, where memory is rarely the limit."""
    return torch.cuda.is_available()


def _make_trainer(
    run: Run, spec: InputSpec, progress: Progress, lock: DirectoryLock | None, uploads: HubUploads | None
) -> tuple[PackTrainer, RunCallback]:
    """Prepare a rank for training: start the process group, check that all ranks have the same plan, load the model.

    Also creates the output directory. The order of these steps matters.
    """
    on_gpu = torch.cuda.is_available()
    dtype = resolve_dtype(spec.config, run.config, on_gpu=on_gpu)
    args = _start_ranks(run, dtype, on_gpu=on_gpu)
    run = _with_output_dir(run, progress)
    args.output_dir = run.config.output_dir
    _switch_off_liger(args, run, spec, progress)
    loader = StepLoader(run, spec)
    parallel = _sequence_parallel(run, "cuda" if on_gpu else "cpu")

    connect_deepspeed_on_cpus(run.config)  # which building the model needs
    model, saved_precision, unloaded_files = build_model(run, spec, dtype, parallel, progress)

    shard_on_cpus(run.config)  # which the Trainer needs
    trainer = PackTrainer(
        model,
        args,
        loader,
        saved=saved_precision,
        watch=_step_watch(loader, progress),
        parallel=parallel,
        recomputation=switch_of(run, spec, dtype, model, progress),
    )
    configure_fsdp(trainer.accelerator, model, run.config)
    callback = RunCallback(trainer, progress, lock, unloaded_files, uploads)
    trainer.add_callback(callback)
    return trainer, callback


def _start_ranks(run: Run, dtype: torch.dtype, *, on_gpu: bool) -> TrainingArguments:
    """Return the Trainer's arguments, whose creation starts the process group, and check that its ranks agree."""
    args = training_arguments(run.config, num_steps=run.timeline.num_steps, dtype=dtype, on_gpu=on_gpu)
    check_ranks_agree(run.state, run.world, run.axes.name)
    return args


def _switch_off_liger(args: TrainingArguments, run: Run, spec: InputSpec, progress: Progress) -> None:
    """Do not use Liger's kernels for a model that they do not support."""
    warning = liger_problem(run.config, spec.config)
    if warning is not None:
        args.use_liger_kernel = False
        progress.note(warning)


def _step_watch(loader: StepLoader, progress: Progress) -> StepWatch:
    """The watch for stop signals and bad steps of a run."""
    run = loader.run
    signals = StopSignals(launched=run.world.size > 1)
    return StepWatch(signals, loader.names, on_nan=run.config.on_nan, world=run.world, progress=progress)


def _with_output_dir(run: Run, progress: Progress) -> Run:
    """Create the output directory of a run; return the run with the directory that all ranks use."""
    config = make_output_dir(run.config, run.world)
    if config.add_version:
        progress.note(f"output directory: {config.output_dir}")
    return run.with_config(output_dir=config.output_dir)


def _sequence_parallel(run: Run, device_type: str) -> SequenceParallel | None:
    """Create all process groups of sequence parallelism, also those of stages with fewer ranks per sequence."""
    run_size = run.world.sequence_parallel_size
    if run_size == 1:
        return None
    stage_axes = [axes for size, axes in run.axes_by_size.items() if size not in (1, run_size)]
    others = tuple(SequenceParallel.on_mesh(axes, device_type) for axes in stage_axes)
    return dataclasses.replace(SequenceParallel.on_mesh(run.axes, device_type), others=others)


def _report_end(trainer: PackTrainer, callback: RunCallback, num_planned: int, progress: Progress) -> None:
    """Report why training ended early, if it did, and the use of the media cache; all ranks call this."""
    for line in _early_end_lines(trainer, callback, num_planned):
        progress.note(line)
    media_cache = trainer.loader.spec.media_cache
    if media_cache is not None:
        progress.note(trainer.loader.all_media_reads().sentence(media_cache))


def _early_end_lines(trainer: PackTrainer, callback: RunCallback, num_planned: int) -> Iterator[str]:
    """Explain why training ended before step ``num_planned``, unless a signal or an error ended it."""
    steps, config, state = trainer.state.global_step, trainer.loader.run.config, trainer.state
    if steps < num_planned and trainer.loader.steps.ended and not trainer.watch.stopped_by:
        yield (
            f"training ended after step {steps:,} of {num_planned:,} because there are no more rows; a larger "
            "--num-train-epochs reads them again"
        )
    if callback.ended_early:
        yield (
            f"training ended early after step {steps:,} of {num_planned:,}: {config.best_metric} was best after step "
            f"{state.best_global_step or 0:,} and has not improved in {config.early_stop_interval} evaluations"
        )


def _report_skipped_samples(trainer: PackTrainer, progress: Progress) -> int:
    """Report the samples that any rank skipped, list them in a file, and return their number; all ranks call this."""
    run = trainer.loader.run
    skipped_by_rank = all_gather_objects(trainer.skipped, run.world.size)
    skipped = [sample for rank_skipped in skipped_by_rank for _, sample in rank_skipped]
    for line in _skipped_lines(skipped):
        progress.note(line)
    if run.world.is_first:
        shown = [{name: value for name, value in vars(sample).items() if name != "index"} for sample in skipped]
        lines = [json.dumps(sample, ensure_ascii=False) + "\n" for sample in shown]
        _write_or_remove(os.path.join(run.config.output_dir, SKIPPED_NAME), lines)
    return len(skipped)


def _skipped_lines(skipped: Sequence[Any]) -> Iterator[str]:
    """Describe skipped samples: their number, and the first ``_MAX_SHOWN``."""
    if skipped:
        yield f"skipped samples, whose media could not be loaded: {len(skipped):,} (all are listed in {SKIPPED_NAME})"
    for sample in skipped[:_MAX_SHOWN]:
        yield f"  row {sample.row} of {sample.source}: {sample.message}"
    if len(skipped) > _MAX_SHOWN:
        yield f"  and {len(skipped) - _MAX_SHOWN:,} more"


def _write_or_remove(path: str, lines: Sequence[str]) -> None:
    """Write lines into a file; without any, remove the file of an earlier run."""
    if lines:
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(lines)
    elif os.path.exists(path):
        os.remove(path)


class RunCallback(TrainerCallback):
    """Callback of the Trainer that logs, evaluates and completes checkpoints, in the same order on every rank.

    Args:
        lock: of the output directory; None on all but the first rank.
        unloaded: tensors of the base model that transformers does not load, with their files, for checkpoints.
        uploads: to the hub; None on all but the first rank, and without them.

    Attributes:
        report: log lines; None on all but the first rank.
        ended_early: whether training ended because evaluations no longer improved.
    """

    def __init__(
        self,
        trainer: PackTrainer,
        progress: Progress,
        lock: DirectoryLock | None,
        unloaded: Mapping[str, str],
        uploads: HubUploads | None,
    ) -> None:
        self.trainer, self.lock, self.unloaded, self.uploads = trainer, lock, unloaded, uploads
        self.run, self.watch, self.steps = trainer.loader.run, trainer.watch, trainer.loader.steps
        self.report = Report(self.run, progress) if self.run.world.is_first else None
        self.ended_early = False
        self._progress = progress
        self._record = self.run.record()
        self._num_recorded = 0  # this rank's skipped samples that the ledger has

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Start the report, and write the run's history; all ranks raise the first rank's error."""
        if self.report is not None:
            self.report.begin(state.max_steps)
        error: PacktoolError | None = None
        if state.is_world_process_zero:
            try:
                self._record.begin(str(args.output_dir))
            except PacktoolError as begin_error:
                error = begin_error
        error = all_gather_objects(error, self.run.world.size)[0]  # else the other ranks would report a lost process
        if error is not None:
            raise error

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Start watching a step, and announce a stage that begins with it."""
        self.watch.begin_step()
        if self.report is not None and (line := self.run.timeline.stage_line(state.global_step)) is not None:
            self._progress.note(line)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check losses and gradients before the update of the weights."""
        self.watch.before_update(state.global_step, kwargs["model"], args.device)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Decide whether to log, save or stop (in ``control``), evaluate if due, and check the lock.

        ``state.global_step`` is the number of finished steps. The Trainer logs and saves after this call.
        """
        timeline = self.run.timeline
        num_steps_done = state.global_step
        state.epoch = timeline.epochs(num_steps_done)  # the Trainer regards the whole run as one epoch
        _next_epoch, next_step_in_epoch = timeline.locate(num_steps_done)
        ends_epoch = next_step_in_epoch == 0
        ends_run = num_steps_done >= timeline.num_steps

        control.should_log |= ends_run
        self._request_saving(control, is_epoch_end=ends_run or ends_epoch)
        is_due = ends_run or self._is_evaluation_due(num_steps_done, ends_epoch=ends_epoch)
        will_evaluate = self.run.validation is not None and is_due
        self.watch.end_step(state, control, will_evaluate=will_evaluate)  # requests the end after a stop signal
        if self.report is not None:
            self.report.end_step(should_log=control.should_log)
        if will_evaluate:
            self._evaluate(args, state, control)  # may request a checkpoint or the end of training

        # From here on, control.should_save is final.
        self._check_lock(is_saved=control.should_save)
        if control.should_save and state.is_world_process_zero:
            discard_run_state(_checkpoint(args, state))  # if there is one, it is overwritten

    def _request_saving(self, control: TrainerControl, *, is_epoch_end: bool) -> None:
        """Request checkpoints that the Trainer cannot: at the end of an epoch, and of a stream, which also stops."""
        save_strategy = self.run.config.save_strategy
        if self.steps.ended:
            control.should_log = control.should_training_stop = True
            control.should_save = save_strategy == "steps"  # also between two of --save-steps
        elif save_strategy == "epoch" and is_epoch_end:
            control.should_save = True

    def _check_lock(self, *, is_saved: bool) -> None:
        """Raise an error if another run may have taken the output directory; read the lock only before saving."""
        if self.lock is None:
            return
        if is_saved:
            self.lock.check()
        else:
            self.lock.check_last_renewal()

    def _is_evaluation_due(self, step: int, *, ends_epoch: bool) -> bool:
        """Return whether ``--eval-strategy`` requests an evaluation after ``step`` steps."""
        config = self.run.config
        if config.eval_strategy != "steps" or config.eval_steps is None:
            return ends_epoch
        interval = config.eval_steps
        if interval < 1:  # a share of the run, as for --save-steps in transformers
            interval = math.ceil(interval * self.run.timeline.num_steps)
        return step % interval == 0

    def _evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """Evaluate; in ``control``, request a checkpoint of a best result, and the end if results no longer improve.

        ``state`` keeps the best result so far and its step. Raise a ConfigError if an evaluation has no figure of the
        name ``--metric-for-best-model``.
        """
        config = self.run.config
        should_log = control.should_log
        figures = self.trainer.evaluate_validation()  # by names such as eval_loss
        control.should_log = should_log  # the evaluation's log line has reset it
        if not config.seeks_best and config.early_stop_interval is None:
            return

        name = config.best_metric
        if name not in figures:
            raise ConfigError(
                f"--metric-for-best-model {config.metric_for_best_model}: an evaluation has no figure {name}",
                f"Choose one of {', '.join(sorted(figures))}.",
            )
        if self._is_best(figures[name], state.best_metric):
            state.best_metric = figures[name]
            state.best_global_step = state.global_step
            if config.seeks_best:
                state.best_model_checkpoint = _checkpoint(args, state)
                control.should_save = True
        self._stop_without_progress(state, control)

    def _is_best(self, figure: float, best: float | None) -> bool:
        if math.isnan(figure):
            return False
        if best is None:
            return True
        return figure > best if self.run.config.prefers_greater else figure < best

    def _stop_without_progress(self, state: TrainerState, control: TrainerControl) -> None:
        """Request the end of training in ``control`` after ``--early-stop-interval`` evaluations without a best one."""
        config = self.run.config
        if not config.early_stop_interval or state.global_step >= state.max_steps:
            return
        # Count evaluations in the log history, because that also has those before a resume.
        best_step = state.best_global_step or 0
        num_since_best = sum(config.best_metric in line and line["step"] > best_step for line in state.log_history)
        if num_since_best >= config.early_stop_interval:
            self.ended_early = True
            control.should_training_stop = control.should_log = True
            control.should_save |= config.save_strategy not in ("no", "best")

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs: dict[str, Any] = kwargs["logs"]
        if "loss" in logs:
            self._gather_losses()
        if self.report is not None and logs.keys() & {"loss", "eval_loss"}:
            self.report.write_line(state.global_step, logs, str(args.output_dir), self.trainer.loader.media_reads)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add packtool's files to a checkpoint, and mark it as finished when all ranks have written their files."""
        checkpoint = _checkpoint(args, state)
        self.steps.save(checkpoint, state.global_step)
        self._gather_losses()
        skipped = self._gather_new_skipped() if self.run.config.on_bad_media == "skip" else []
        if state.is_world_process_zero:
            with saving(checkpoint):
                self._record.save(checkpoint, state.global_step, skipped, self.watch.skipped_steps)
        self.watch.skipped_steps.clear()
        PartialState().wait_for_everyone()
        if state.is_world_process_zero:
            self._finish_checkpoint(checkpoint, str(args.output_dir), state)

    def _gather_losses(self) -> None:
        """Gather the losses of the samples that all ranks trained since the last call; all ranks call this."""
        if self.trainer.sample_losses is None:
            return
        gathered = self.trainer.sample_losses.gather(self.run.world.size)
        if self.run.world.is_first:
            self._record.losses.add(gathered, self.watch.skipped_steps)

    def _gather_new_skipped(self) -> list[tuple[int, int]]:
        """Gather step and number of each cached sample that any rank has newly skipped; all ranks call this."""
        new_skipped = self.trainer.skipped[self._num_recorded :]
        self._num_recorded = len(self.trainer.skipped)
        local_skipped = [(step, sample.sample) for step, sample in new_skipped if sample.sample is not None]
        gathered = all_gather_objects(local_skipped, self.run.world.size)
        return [step_and_sample for rank_skipped in gathered for step_and_sample in rank_skipped]

    def _finish_checkpoint(self, checkpoint: str, output_dir: str, state: TrainerState) -> None:
        """Complete a checkpoint that all ranks have written, link it as the last and best one, and remove old ones."""
        config = self.run.config
        with saving(checkpoint):
            self._add_files(checkpoint, state.global_step)
        if self.uploads is not None:
            self.uploads.save(checkpoint, state.global_step, self._progress)
        keeps_best = config.load_best_model_at_end
        best = state.best_model_checkpoint if keeps_best else best_checkpoint(output_dir, state.log_history)
        with saving(os.path.join(output_dir, f".{LAST}.part")):
            point(output_dir, LAST, checkpoint)
            if best is not None:
                point(output_dir, BEST, best)
        # The Trainer does not do this, because it would remove older checkpoints before this one is finished.
        remove_oldest(output_dir, config.save_total_limit, last_good=self.watch.num_good, keep=best)

    def _add_files(self, checkpoint: str, step: int) -> None:
        """Add unloaded tensors, the processor and the state of the run after ``step`` steps to a checkpoint."""
        run = self.run
        add_unloaded_tensors(checkpoint, self.unloaded)
        copy_processor(run.source.files.directory, checkpoint, run.source.files.other_template)
        epoch, step_in_epoch = run.timeline.locate(step)
        run_state = dataclasses.replace(
            run.state, step=step, epoch=epoch, step_in_epoch=step_in_epoch, saved_at=time.time()
        )
        write_run_state(checkpoint, run_state, recorded_options(run.config))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._gather_losses()
        if self.run.world.is_first:
            self._record.losses.write()
        if self.report is not None:
            self._progress.finish()


def _checkpoint(args: TrainingArguments, state: TrainerState) -> str:
    return os.path.join(str(args.output_dir), f"{PREFIX}{state.global_step}")
