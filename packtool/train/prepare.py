"""Everything of a run that is decided before torch is imported: the same on every rank, without communication."""

from __future__ import annotations

from dataclasses import dataclass

from packtool.cache.reader import CacheReader
from packtool.config import TrainConfig
from packtool.encode.model_files import ModelFiles
from packtool.plan.epoch import EpochPlan, PlanOptions, plan_epoch
from packtool.train.check import open_caches
from packtool.train.checkpoint import RunState, find_checkpoint, read_state
from packtool.train.schedule import Schedule
from packtool.train.world import World


@dataclass(frozen=True)
class PreparedRun:
    """A run that only has to be trained.

    Args:
        reader: of all caches.
        schedule: all steps.
        state: what a checkpoint of this run says of it.
        checkpoint: the one to go on from, or None.
        start: first step to train.
    """

    config: TrainConfig
    world: World
    files: ModelFiles
    reader: CacheReader
    schedule: Schedule
    state: RunState
    checkpoint: str | None
    start: int


def prepare_run(config: TrainConfig, world: World) -> PreparedRun:
    """Check that tokenizer, caches, options and checkpoint fit, and plan; takes a second.

    Raises:
        ConfigError, DataError, MismatchError: naming what does not fit, and what to do.
    """
    files = ModelFiles.load(config.model)
    reader = open_caches(config, files)
    max_length = config.max_length or max(manifest.max_length for manifest in reader.manifests)
    options = PlanOptions(
        max_length=max_length,
        packing_length=config.packing_length or max_length,
        packing=config.packing,
        packing_num_proc=config.packing_num_proc,
        world_size=world.size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        packs_per_micro_batch=config.per_device_train_batch_size,
    )

    def plan_of(epoch: int) -> EpochPlan:
        return plan_epoch(reader.index.length, reader.index.target_tokens, options, seed=config.seed, epoch=epoch)

    schedule = Schedule(plan_of, num_epochs=config.num_train_epochs, max_steps=config.max_steps)
    state = RunState(
        plan=schedule.plan_of(0).fingerprint,
        cache=reader.fingerprint,
        seed=config.seed,
        train_type=config.train_type,
        packing=config.packing,
        max_length=options.max_length,
        packing_length=options.packing_length,
        world_size=world.size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        per_device_train_batch_size=config.per_device_train_batch_size,
    )
    checkpoint = find_checkpoint(config.resume_from_checkpoint, config.output_dir)
    start = 0
    if checkpoint is not None:
        before = read_state(checkpoint)
        state.check_continues(checkpoint, before)
        start = before.step
    return PreparedRun(config, world, files, reader, schedule, state, checkpoint, start)
