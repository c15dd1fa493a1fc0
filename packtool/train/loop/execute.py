"""A prepared run, carried out.

Every rank has planned for itself: one exchange proves that all came to the same.

Samples that ``--on-bad-media skip`` left out of a run: counted, shown at its end, and listed in a file.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from transformers import TrainingArguments

from packtool.attention.parallel.mesh import SequenceParallel
from packtool.batch.batch import SkippedSample
from packtool.batch.dataset import deaths_told
from packtool.batch.spec import InputSpec
from packtool.cache.lock import DirectoryLock
from packtool.config.train import TrainConfig
from packtool.launch.world import World, all_gather_objects
from packtool.progress import Progress
from packtool.train.evaluate.per_sample import evaluate_in_training
from packtool.train.loop.arguments import training_arguments
from packtool.train.loop.callbacks import (
    CheckpointCallback,
    EvaluationCallback,
    RecordCallback,
    ReportCallback,
    StepsCallback,
    ends_epoch,
)
from packtool.train.loop.checks import check_ranks_agree, estimate_run
from packtool.train.loop.loader import StepLoader
from packtool.train.loop.trainer import PackTrainer
from packtool.train.loop.watch import StepWatch, StopSignals, name_samples
from packtool.train.model.build import build_model
from packtool.train.model.load import quiet_transformers, resolve_dtype
from packtool.train.model.quantize import count_parameters
from packtool.train.model.sharding import (
    keep_digits_of_outputs,
    meet_on_cpus,
    shard_layers_that_are_there,
    shard_on_cpus,
)
from packtool.train.prepare.checkpoint import PREFIX
from packtool.train.prepare.place import make_place
from packtool.train.prepare.result import TrainResult
from packtool.train.prepare.run import Run
from packtool.train.prepare.workers import workers_of
from packtool.train.verify.before_training import verify_before_training

SKIPPED_NAME = "skipped.jsonl"
_MOST_SHOWN = 20


def all_skipped(mine: Sequence[SkippedSample], world: World) -> list[SkippedSample]:
    """Those of all ranks; every rank must call this."""
    return [sample for each in all_gather_objects(list(mine), world.size) for sample in each]


def skipped_lines(skipped: Sequence[SkippedSample]) -> Iterator[str]:
    """What is to be said of them at the end of a run."""
    if not skipped:
        return
    yield f"samples left out because their media could not be loaded: {len(skipped):,} (all in {SKIPPED_NAME})"
    for sample in skipped[:_MOST_SHOWN]:
        yield f"  row {sample.row} of {sample.source}: {sample.message}"
    if len(skipped) > _MOST_SHOWN:
        yield f"  and {len(skipped) - _MOST_SHOWN:,} more"


def write_skipped(output_dir: str, skipped: Sequence[SkippedSample]) -> None:
    """A line for each, once for every epoch that it is missing in; no file if there are none."""
    path = os.path.join(output_dir, SKIPPED_NAME)
    if not skipped:
        if os.path.exists(path):
            os.remove(path)
        return
    with open(path, "w", encoding="utf-8") as file:
        for sample in skipped:
            file.write(json.dumps(dataclasses.asdict(sample), ensure_ascii=False) + "\n")


def _is_scarce_here() -> bool:
    """Whether memory is that of a GPU, which is told of at the start of a run."""
    return torch.cuda.is_available()


def execute(
    run: Run, spec: InputSpec, result: TrainResult, progress: Progress, lock: DirectoryLock | None
) -> TrainResult:
    """Load, train, save.

    Args:
        result: what was planned.
        lock: of the output directory; None on all ranks but the first.

    Returns:
        ``result`` with what came of it.
    """
    run = run.with_config(dataloader_num_workers=workers_of(run))
    with quiet_transformers():
        run, args = enter(run, spec, progress)
        training = make_training(run, args, spec, progress, lock)
        trainer, report, watch = training.trainer, training.report, training.watch
        assert trainer.model is not None
        num_trainable, num_parameters = count_parameters(trainer.model)
        progress.note(f"parameters: {num_parameters:,}, of them trained: {num_trainable:,} ({run.config.train_type})")
        # The others would trace the same; and the memory of a CPU is seldom what a run waits for.
        if run.world.is_first and _is_scarce_here():
            dtype = resolve_dtype(spec.config, run.config, on_gpu=True)
            progress.note(estimate_run(run, trainer.model, spec, dtype).sentence())
        verify_before_training(run, trainer.model, spec, training.parallel, progress)
        begin = time.perf_counter()
        with watch.signals, deaths_told():
            trainer.train(resume_from_checkpoint=run.resume_point.checkpoint)
        seconds = time.perf_counter() - begin
    steps = trainer.state.global_step
    result = trainer.loader.steps.counted(result)
    for line in training.early_lines(result.steps):
        progress.note(line)
    if spec.media_cache is not None:
        progress.note(trainer.loader.all_media_reads().sentence(spec.media_cache))
    skipped = all_skipped(trainer.skipped, run.world)
    for line in skipped_lines(skipped):
        progress.note(line)
    result = dataclasses.replace(
        result,
        num_skipped=len(skipped),
        sources=trainer.trained_shares,
        output_dir=run.config.output_dir,
        steps=steps,
        seconds=seconds,
        target_tokens_per_second=result.target_tokens / seconds,
        first_loss=report.first_loss,
        last_loss=report.last_loss,
        checkpoint=_last_checkpoint(run.config, trainer),
        num_trainable_parameters=num_trainable,
        num_parameters=num_parameters,
    )
    if run.world.is_first:
        result.write()
        write_skipped(run.config.output_dir, skipped)
    # No rank may end before all is written: a launcher ends the others when the first one ends.
    trainer.accelerator.wait_for_everyone()
    watch.raise_if_stopped(steps, run.timeline.num_steps, os.path.join(run.config.output_dir, f"{PREFIX}{steps}"))
    return result


def _last_checkpoint(config: TrainConfig, trainer: PackTrainer) -> str | None:
    """The checkpoint that a run ends with: its last, or its best where that is asked for."""
    if config.seeks_best and trainer.state.best_model_checkpoint is not None:
        return trainer.state.best_model_checkpoint
    if config.save_strategy in ("no", "best"):
        return None
    return os.path.join(config.output_dir, f"{PREFIX}{trainer.state.global_step}")


def enter(run: Run, spec: InputSpec, progress: Progress) -> tuple[Run, TrainingArguments]:
    """Start the process group, let the ranks compare what they will train, and clear the output directory.

    Returns:
        the run with the directory that all ranks write to.
    """
    on_gpu = torch.cuda.is_available()
    dtype = resolve_dtype(spec.config, run.config, on_gpu=on_gpu)
    args = training_arguments(run.config, num_steps=run.timeline.num_steps, dtype=dtype, on_gpu=on_gpu)
    check_ranks_agree(run.state, run.world, run.axes.name)
    config = make_place(run.config, run.world)
    if config.add_version:
        progress.note(f"this run is in {config.output_dir}")
    args.output_dir = config.output_dir
    return run.with_config(output_dir=config.output_dir), args


@dataclass(frozen=True)
class Training:
    """What trains on this rank.

    Args:
        trainer: transformers' Trainer, told what a step is.
        report: what it tells the user.
        watch: what ends it.
        parallel: ranks that share sequences with this one, as the model was told; None for nobody.
        evaluation: what evaluates between steps; None for nothing.
    """

    trainer: PackTrainer
    report: ReportCallback
    watch: StepWatch
    parallel: SequenceParallel | None
    evaluation: EvaluationCallback | None

    def early_lines(self, planned: int) -> Iterator[str]:
        """Why training ended before so many steps, if neither a signal nor a mistake ended it."""
        steps, config, state = self.trainer.state.global_step, self.trainer.loader.run.config, self.trainer.state
        if steps < planned and self.trainer.loader.steps.ended and not self.watch.stopped_by:
            yield f"the rows ended after step {steps:,} of {planned:,}; a larger --num-train-epochs reads them again"
        if self.evaluation is not None and self.evaluation.ended_early:
            told = f"ended early after step {steps:,} of {planned:,}: {config.best_metric} was best after step "
            told += f"{state.best_global_step or 0:,}"
            yield f"{told}, and not in the {config.early_stop_interval} evaluations since"


def make_training(
    run: Run, args: TrainingArguments, spec: InputSpec, progress: Progress, lock: DirectoryLock | None
) -> Training:
    """Load the model, and put together what trains it."""
    config, on_gpu = run.config, torch.cuda.is_available()
    dtype = resolve_dtype(spec.config, config, on_gpu=on_gpu)
    loader = StepLoader(run, spec)
    watch = StepWatch(
        StopSignals(launched=run.world.size > 1),
        lambda: partial(name_samples, loader.names(), run.world.rank),
        on_nan=config.on_nan,
        world=run.world,
        progress=progress,
    )
    report = ReportCallback(run, progress, loader)
    parallel = None
    if run.world.sequence_parallel_size > 1:
        device_type = "cuda" if on_gpu else "cpu"
        own = run.world.sequence_parallel_size
        stages = [axes for size, axes in run.axes_by_size.items() if size not in (1, own)]
        others = tuple(SequenceParallel.on_mesh(axes, device_type) for axes in stages)
        parallel = dataclasses.replace(SequenceParallel.on_mesh(run.axes, device_type), others=others)
    meet_on_cpus(config)
    built = build_model(run, spec, dtype, parallel, progress)
    shard_on_cpus(config)
    # In the order in which they must come; evaluation and the finishing of checkpoints come after them.
    saves_epochs = config.save_strategy == "epoch"
    callbacks = [StepsCallback(run.timeline, loader.steps, saves_epochs=saves_epochs), watch]
    trainer = PackTrainer(
        built.model,
        args,
        loader,
        [*callbacks, report] if run.world.is_first else callbacks,
        saved=built.saved,
        numbers=watch.numbers,
    )
    keep_digits_of_outputs(trainer.accelerator, config)
    shard_layers_that_are_there(trainer.accelerator, built.model, config)
    evaluation = None
    if run.validation is not None:
        every = config.eval_steps if config.eval_strategy == "steps" else None
        evaluate = partial(_evaluate, run, trainer, parallel)
        ends = partial(ends_epoch, run.timeline)
        evaluation = EvaluationCallback(
            partial(trainer.log_evaluation, evaluate), ends if every is None else lambda step: step % every == 0, config
        )
        trainer.add_callback(evaluation)
        watch.is_evaluated = evaluation.is_due
    if (record := run.record()) is not None:
        trainer.add_callback(RecordCallback(record, trainer, watch))
    trainer.add_callback(CheckpointCallback(run, watch, lock, built.unloaded))
    return Training(trainer, report, watch, parallel, evaluation)


def _evaluate(run: Run, trainer: PackTrainer, parallel: SequenceParallel | None) -> dict[str, float]:
    """Evaluate the val split between two steps."""
    validation = run.validation
    assert validation is not None, "there is a val split"
    return evaluate_in_training(
        trainer.model_wrapped,
        validation.reader,
        trainer.loader.spec,
        validation.plan,
        world=run.world,
        num_workers=workers_of(run),
        samples=validation.samples,
        parallel=parallel,
    )
