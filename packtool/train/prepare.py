"""Everything of a run that is decided before torch is imported: the same on every rank, without communication."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from packtool.cache.chosen import ChosenTargets, SampleReader
from packtool.cache.plan_file import read_plan
from packtool.cache.reader import CacheReader
from packtool.config import PackingOptions, TrainConfig
from packtool.encode.families import MediaLimits
from packtool.encode.model_files import ModelFiles
from packtool.plan.cost import CostModel
from packtool.plan.epoch import EpochPlan, PlanOptions, deal_packs, plan_epoch, reordered
from packtool.train.check import check_plan, choice_of_targets, open_caches, packs_of
from packtool.train.checkpoint import RunState, find_checkpoint, read_state
from packtool.train.figures import SampleFigures
from packtool.train.schedule import Schedule
from packtool.train.world import World


def plan_options(options: PackingOptions, *, packing: bool, max_length: int, world_size: int) -> PlanOptions:
    """What the planner needs to know of a run."""
    return PlanOptions(
        max_length=max_length,
        packing_length=options.packing_length or max_length,
        packing=packing,
        packing_num_proc=options.packing_num_proc,
        world_size=world_size,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        packs_per_micro_batch=options.per_device_train_batch_size,
        balance=options.balance,
        group_by_length=options.group_by_length,
        dynamic_batch_tokens=options.dynamic_batch_tokens,
        dynamic_max_batch_size=options.dynamic_max_batch_size,
        packing_algorithm=options.packing_algorithm,
        packing_window=options.packing_window,
        packing_batch_size=options.packing_batch_size,
        look_ahead=options.look_ahead,
        max_samples_per_pack=options.max_samples_per_pack,
        max_media_tokens_per_pack=options.max_media_tokens_per_pack,
        shuffle=options.shuffle,
    )


def cost_of(config: Mapping[str, Any]) -> CostModel:
    """FLOPs of a model; of one of 8 billion weights where ``config.json`` does not tell the sizes."""
    try:
        return CostModel.of_config(config)
    except (KeyError, TypeError, ValueError):
        return CostModel.of_8b()


@dataclass(frozen=True)
class PreparedRun:
    """A run that only has to be trained.

    Args:
        reader: of all caches.
        samples: the same with their labels as ``--loss-scale`` chooses them.
        figures: of all samples.
        schedule: all steps.
        state: what a checkpoint of this run says of it.
        checkpoint: the one to go on from, or None.
        start: first step to train.
    """

    config: TrainConfig
    world: World
    files: ModelFiles
    reader: CacheReader
    samples: SampleReader
    figures: SampleFigures
    schedule: Schedule
    state: RunState
    checkpoint: str | None
    start: int

    @property
    def media_limits(self) -> MediaLimits:
        """That pixels and sounds are loaded with."""
        return self.reader.manifests[0].identity.media_limits


def prepare_run(config: TrainConfig, world: World) -> PreparedRun:
    """Check that tokenizer, caches, options and checkpoint fit, and plan; takes a second.

    Raises:
        ConfigError, DataError, MismatchError: naming what does not fit, and what to do.
    """
    files = ModelFiles.load(config.model)
    reader = open_caches(config, files)
    index = reader.index
    choice = choice_of_targets(config, reader, files)
    samples: SampleReader = reader
    targets = index.target_tokens
    if choice is not None:
        samples = chosen = ChosenTargets(reader, choice)
        targets = chosen.target_tokens()
    saved = read_plan(config.plan) if config.plan is not None else None
    if saved is not None:
        check_plan(saved, config, reader)
    max_length = config.max_length or max(manifest.max_length for manifest in reader.manifests)
    options = plan_options(config, packing=config.packing, max_length=max_length, world_size=world.size)
    options = dataclasses.replace(options, cost=cost_of(files.config))
    if saved is not None:
        options = dataclasses.replace(options, max_length=saved.info.max_length, packing_length=saved.info.capacity)

    def plan_of(epoch: int) -> EpochPlan:
        if saved is not None:
            packs = packs_of(saved)
            packs = reordered(packs, seed=config.seed, epoch=epoch) if config.shuffle else packs
            return deal_packs(packs, targets, options, media_tokens=index.media_tokens)
        return plan_epoch(
            index.length,
            targets,
            options,
            seed=config.seed,
            epoch=epoch,
            media_tokens=index.media_tokens,
        )

    schedule = Schedule(plan_of, num_epochs=config.num_train_epochs, max_steps=config.max_steps)
    state = _state(config, world, schedule, options, reader.fingerprint)
    checkpoint = find_checkpoint(config.resume_from_checkpoint, config.output_dir)
    start = 0
    if checkpoint is not None:
        before = read_state(checkpoint)
        state.check_continues(checkpoint, before)
        start = before.step
    units = targets > 0 if config.loss_reduction == "sample" else targets
    figures = SampleFigures(targets, index.media_tokens, units.astype(np.int64), options.cost)
    return PreparedRun(config, world, files, reader, samples, figures, schedule, state, checkpoint, start)


def _state(config: TrainConfig, world: World, schedule: Schedule, options: PlanOptions, cache: str) -> RunState:
    return RunState(
        plan=schedule.plan_of(0).fingerprint,
        cache=cache,
        seed=config.seed,
        train_type=config.train_type,
        packing=config.packing,
        max_length=options.max_length,
        packing_length=options.packing_length,
        world_size=world.size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        per_device_train_batch_size=config.per_device_train_batch_size,
        loss_scale=config.loss_scale or "",
        loss_reduction=config.loss_reduction,
    )
