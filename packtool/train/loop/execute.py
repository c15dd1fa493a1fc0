"""Execution of a prepared run: load the model, check it, train, and write the result."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator, Sequence

import torch

from packtool.attention.parallel.mesh import SequenceParallel
from packtool.batch.batch import SkippedSample
from packtool.batch.dataset import explain_dead_workers
from packtool.batch.spec import InputSpec
from packtool.cache.lock import DirectoryLock
from packtool.config.train import TrainConfig
from packtool.launch.world import all_gather_objects
from packtool.progress import Progress
from packtool.train.loop.arguments import training_arguments
from packtool.train.loop.callbacks import RunCallback
from packtool.train.loop.checks import check_ranks_agree, estimate_run
from packtool.train.loop.loader import StepLoader
from packtool.train.loop.trainer import PackTrainer
from packtool.train.loop.watch import StepWatch, StopSignals
from packtool.train.model.load import build_model, quiet_transformers, resolve_dtype
from packtool.train.model.precision import count_parameters
from packtool.train.model.sharding import configure_fsdp, connect_deepspeed_on_cpus, shard_on_cpus
from packtool.train.prepare.checkpoint import PREFIX
from packtool.train.prepare.output_dir import make_output_dir
from packtool.train.prepare.result import TrainResult
from packtool.train.prepare.run import Run
from packtool.train.prepare.workers import workers_of
from packtool.train.verify.checks import verify_before_training

SKIPPED_NAME = "skipped.jsonl"
_MAX_SHOWN = 20


def execute(
    run: Run, spec: InputSpec, result: TrainResult, progress: Progress, lock: DirectoryLock | None
) -> TrainResult:
    """Load the model, train and save.

    Args:
        result: the planned figures.
        lock: of the output directory, on the first rank.

    Returns:
        ``result``, completed with the figures of training.
    """
    run = run.with_config(dataloader_num_workers=workers_of(run))
    with quiet_transformers():
        trainer, callback = _make_trainer(run, spec, progress, lock)
        run = trainer.loader.run
        assert trainer.model is not None
        num_trainable, num_parameters = count_parameters(trainer.model)
        progress.note(f"parameters: {num_parameters:,}, of them trained: {num_trainable:,} ({run.config.train_type})")
        # The first rank is enough: others would trace the same.
        if run.world.is_first and _estimates_memory():
            dtype = resolve_dtype(spec.config, run.config, on_gpu=True)
            progress.note(estimate_run(run, trainer.model, spec, dtype).sentence())
        verify_before_training(run, trainer.model, spec, trainer.parallel, progress)
        begin = time.perf_counter()
        with trainer.watch.signals, explain_dead_workers():
            trainer.train(resume_from_checkpoint=run.resume_point.checkpoint)
        seconds = time.perf_counter() - begin
    steps = trainer.state.global_step
    result = dataclasses.replace(result, **trainer.loader.steps.counted())
    skipped = [sample for rank in all_gather_objects(trainer.skipped, run.world.size) for _, sample in rank]
    lines = list(early_end_lines(trainer, callback, result.steps))
    if spec.media_cache is not None:
        lines.append(trainer.loader.all_media_reads().sentence(spec.media_cache))
    for line in (*lines, *skipped_lines(skipped)):
        progress.note(line)
    result = dataclasses.replace(
        result,
        num_skipped=len(skipped),
        sources=trainer.trained_shares,
        output_dir=run.config.output_dir,
        steps=steps,
        seconds=seconds,
        target_tokens_per_second=result.target_tokens / seconds,
        first_loss=callback.report.first_loss if callback.report is not None else None,
        last_loss=callback.report.last_loss if callback.report is not None else None,
        checkpoint=_last_checkpoint(run.config, trainer),
        num_trainable_parameters=num_trainable,
        num_parameters=num_parameters,
    )
    if run.world.is_first:
        result.write()
        write_skipped(run.config.output_dir, skipped)
    # No rank may end before everything is written: a launcher ends the others when the first one ends.
    trainer.accelerator.wait_for_everyone()
    checkpoint = os.path.join(run.config.output_dir, f"{PREFIX}{steps}")
    trainer.watch.raise_if_stopped(steps, run.timeline.num_steps, checkpoint)
    return result


def _estimates_memory() -> bool:
    """Return whether a run estimates its memory: on a CPU, memory is rarely the limit."""
    return torch.cuda.is_available()


def _make_trainer(
    run: Run, spec: InputSpec, progress: Progress, lock: DirectoryLock | None
) -> tuple[PackTrainer, RunCallback]:
    """Start the process group, check that all ranks planned the same, create the output directory, and load the model.

    Returns:
        the trainer, whose loader has the run with the directory that all ranks write to; and its callback.
    """
    on_gpu = torch.cuda.is_available()
    dtype = resolve_dtype(spec.config, run.config, on_gpu=on_gpu)
    args = training_arguments(run.config, num_steps=run.timeline.num_steps, dtype=dtype, on_gpu=on_gpu)
    check_ranks_agree(run.state, run.world, run.axes.name)
    config = make_output_dir(run.config, run.world)
    if config.add_version:
        progress.note(f"this run is in {config.output_dir}")
    args.output_dir = config.output_dir
    run = run.with_config(output_dir=config.output_dir)
    config, loader = run.config, StepLoader(run, spec)
    signals = StopSignals(launched=run.world.size > 1)
    watch = StepWatch(signals, loader.names, on_nan=config.on_nan, world=run.world, progress=progress)
    parallel = None
    if run.world.sequence_parallel_size > 1:
        device_type = "cuda" if on_gpu else "cpu"
        stages = [axes for size, axes in run.axes_by_size.items() if size not in (1, run.world.sequence_parallel_size)]
        others = tuple(SequenceParallel.on_mesh(axes, device_type) for axes in stages)
        parallel = dataclasses.replace(SequenceParallel.on_mesh(run.axes, device_type), others=others)
    connect_deepspeed_on_cpus(config)
    model, saved, unloaded = build_model(run, spec, dtype, parallel, progress)
    shard_on_cpus(config)
    trainer = PackTrainer(model, args, loader, saved=saved, watch=watch, parallel=parallel)
    configure_fsdp(trainer.accelerator, model, config)
    callback = RunCallback(trainer, progress, lock, unloaded)
    trainer.add_callback(callback)
    return trainer, callback


def _last_checkpoint(config: TrainConfig, trainer: PackTrainer) -> str | None:
    """Return the best checkpoint if requested, else the last; None if the run saves none at its end."""
    if config.seeks_best and trainer.state.best_model_checkpoint is not None:
        return trainer.state.best_model_checkpoint
    if config.save_strategy in ("no", "best"):
        return None
    return os.path.join(config.output_dir, f"{PREFIX}{trainer.state.global_step}")


def early_end_lines(trainer: PackTrainer, callback: RunCallback, planned: int) -> Iterator[str]:
    """Explain why training ended before ``planned`` steps, unless a signal or an error ended it."""
    steps, config, state = trainer.state.global_step, trainer.loader.run.config, trainer.state
    if steps < planned and trainer.loader.steps.ended and not trainer.watch.stopped_by:
        yield f"the rows ended after step {steps:,} of {planned:,}; a larger --num-train-epochs reads them again"
    if callback.ended_early:
        yield (
            f"ended early after step {steps:,} of {planned:,}: {config.best_metric} was best after step "
            f"{state.best_global_step or 0:,}, and not in the {config.early_stop_interval} evaluations since"
        )


def skipped_lines(skipped: Sequence[SkippedSample]) -> Iterator[str]:
    """Summarize the samples that ``--on-bad-media skip`` left out of a run."""
    if not skipped:
        return
    yield f"samples left out because their media could not be loaded: {len(skipped):,} (all in {SKIPPED_NAME})"
    for sample in skipped[:_MAX_SHOWN]:
        yield f"  row {sample.row} of {sample.source}: {sample.message}"
    if len(skipped) > _MAX_SHOWN:
        yield f"  and {len(skipped) - _MAX_SHOWN:,} more"


def write_skipped(output_dir: str, skipped: Sequence[SkippedSample]) -> None:
    """Write a line for each skipped sample and epoch; no file without skipped samples."""
    path = os.path.join(output_dir, SKIPPED_NAME)
    if not skipped:
        if os.path.exists(path):
            os.remove(path)
        return
    with open(path, "w", encoding="utf-8") as file:
        for sample in skipped:
            file.write(json.dumps(dataclasses.asdict(sample), ensure_ascii=False) + "\n")
