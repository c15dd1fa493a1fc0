"""The second stage, as a recipe: caches and model must fit, the plan follows, the Trainer does its steps."""

from __future__ import annotations

import dataclasses
import os
import time
from functools import partial

import torch
from transformers import set_seed

from packtool.attention.support import refuse_unsupported
from packtool.batch.spec import InputSpec
from packtool.cache.reader import CacheReader
from packtool.config import TrainConfig
from packtool.encode.model_files import ModelFiles
from packtool.plan.epoch import PlanOptions, plan_epoch
from packtool.progress import Progress, SilentProgress
from packtool.train.arguments import training_arguments
from packtool.train.callbacks import CheckpointCallback, PlanCallback, ReportCallback
from packtool.train.check import open_caches
from packtool.train.checkpoint import RunState, find_checkpoint, read_state
from packtool.train.model import count_parameters, load_model, make_trainable, resolve_dtype
from packtool.train.quiet import quiet_transformers
from packtool.train.result import TrainResult, last_step_line, plan_lines
from packtool.train.schedule import Schedule, StepLoader
from packtool.train.trainer import PackTrainer
from packtool.train.world import World


def train(config: TrainConfig, progress: Progress, world: World | None = None) -> TrainResult:
    """Train a model on caches; every process of a torchrun job calls this.

    Args:
        config: the run's settings.
        progress: told of the plan and of every step, on the first rank only.
        world: this process among the others; by default what torchrun says. A dry run may be given one to plan for.

    Returns:
        the figures that are also written to ``OUTPUT_DIR/packtool_train.json``.

    Raises:
        ConfigError, DataError, MismatchError: before the first step, except for a picture that turns out to be gone.
    """
    world = world or World.from_environment()
    progress = progress if world.is_first else SilentProgress()
    files = ModelFiles.load(config.model)
    reader = open_caches(config, files)
    spec = InputSpec.load(files.directory, reader.manifests[0].identity.image_limits)
    if config.packing:
        refuse_unsupported(spec.config)
    options = plan_options(config, reader, world)
    lengths, targets = reader.index.length, reader.index.target_tokens
    plan_of = partial(_plan, lengths, targets, options, config.seed)
    schedule = Schedule(plan_of, num_epochs=config.num_train_epochs, max_steps=config.max_steps)
    state = run_state(config, options, schedule, reader)
    checkpoint = find_checkpoint(config.resume_from_checkpoint, config.output_dir)
    start = _place(state, checkpoint) if checkpoint else 0
    result = dataclasses.replace(
        TrainResult.planned(schedule, world, config.output_dir, start), resumed_from=checkpoint
    )
    for line in (*plan_lines(plan_of(0).summary, result), last_step_line(schedule)):
        if line:
            progress.note(line)
    if config.dry_run:
        return result
    with quiet_transformers():
        return _train(config, progress, world, reader, spec, schedule, state, result, start)
