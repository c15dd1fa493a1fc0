"""The second stage, as a recipe: caches and model must fit, the plan follows, the Trainer does its steps."""

from __future__ import annotations

import dataclasses
import os
import time

import torch
from transformers import TrainerCallback, set_seed

from packtool.config import TrainConfig
from packtool.progress import Progress, SilentProgress
from packtool.train.arguments import training_arguments
from packtool.train.callbacks import CheckpointCallback, PlanCallback, ReportCallback
from packtool.train.checkpoint import PREFIX
from packtool.train.model import count_parameters, load_model, make_trainable, resolve_dtype, weights_dtype
from packtool.train.prepare import PreparedRun, prepare_run
from packtool.train.quiet import quiet_transformers
from packtool.train.result import TrainResult, plan_lines
from packtool.train.schedule import StepLoader
from packtool.train.trainer import PackTrainer
from packtool.train.world import World


def train(config: TrainConfig, progress: Progress, world: World | None = None) -> TrainResult:
    """Train a model on caches; every process of a torchrun job calls this.

    Args:
        config: the run's settings.
        progress: told of the plan and of every step, on the first rank only.
        world: this process among the others; by default what torchrun says. A dry run may be given one to plan for.

    Returns:
        the figures that are also written to ``OUTPUT_DIR/packtool_train.json``; losses on the first rank only.

    Raises:
        ConfigError, DataError, MismatchError: before the first step, except for a picture that turns out to be gone.
    """
    world = world or World.from_environment()
    progress = progress if world.is_first else SilentProgress()
    run = prepare_run(config, world)
    result = TrainResult.planned(run.schedule, world, config.output_dir, run.start)
    result = dataclasses.replace(result, resumed_from=run.checkpoint)
    for line in plan_lines(run.schedule, result):
        progress.note(line)
    if config.dry_run:
        return result
    if run.start >= run.schedule.num_steps:
        progress.note(f"{run.checkpoint} is the end of this run already: there is nothing left to train")
        return dataclasses.replace(result, checkpoint=run.checkpoint)
    with quiet_transformers():
        return _train(run, result, progress)


def _train(run: PreparedRun, result: TrainResult, progress: Progress) -> TrainResult:
    """Load, train, save."""
    config, on_gpu = run.config, torch.cuda.is_available()
    dtype = resolve_dtype(run.spec.config, config, on_gpu=on_gpu)
    args = training_arguments(config, num_steps=run.schedule.num_steps, dtype=dtype, on_gpu=on_gpu)
    if run.world.is_first:
        os.makedirs(config.output_dir, exist_ok=True)
    # Adapters are drawn at random: alike on every rank, and in every run with this seed.
    set_seed(config.seed)
    model = make_trainable(
        load_model(config.model, run.spec.config, dtype=weights_dtype(dtype, config), packing=config.packing), config
    )
    num_trainable, num_parameters = count_parameters(model)
    progress.note(f"parameters: {num_parameters:,}, of them trained: {num_trainable:,} ({config.train_type})")
    loader = StepLoader(
        run.schedule,
        run.reader,
        run.spec,
        run.world,
        packing=config.packing,
        start=run.start,
        num_workers=config.dataloader_num_workers,
        pin_memory=on_gpu,
    )
    callbacks: list[TrainerCallback] = [
        PlanCallback(run.schedule),
        CheckpointCallback(run.state, run.schedule, run.files.directory, config.save_total_limit),
    ]
    report = ReportCallback(progress, config.output_dir, run.start)
    trainer = PackTrainer(model, args, loader, [*callbacks, report] if run.world.is_first else callbacks)
    begin = time.perf_counter()
    trainer.train(resume_from_checkpoint=run.checkpoint)
    seconds = time.perf_counter() - begin
    result = dataclasses.replace(
        result,
        seconds=seconds,
        target_tokens_per_second=result.target_tokens / seconds,
        first_loss=report.first_loss,
        last_loss=report.last_loss,
        checkpoint=os.path.join(config.output_dir, f"{PREFIX}{run.schedule.num_steps}"),
        num_trainable_parameters=num_trainable,
        num_parameters=num_parameters,
    )
    if run.world.is_first:
        result.write()
    return result
