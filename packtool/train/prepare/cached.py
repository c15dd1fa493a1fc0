"""Everything of a run that is decided before torch is imported: the same on every rank, without communication."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.attention.parallel.axes import Axes
from packtool.cache.chosen import ChosenTargets, SampleReader
from packtool.cache.plan_file import read_plan
from packtool.cache.reader import CacheReader
from packtool.config.train import TrainConfig
from packtool.constants import VAL_SPLIT
from packtool.encode.families import MediaLimits
from packtool.encode.model_files import ModelFiles
from packtool.encode.relabel import TargetChoice
from packtool.launch.world import World
from packtool.plan.evaluation import EvaluationPlan
from packtool.train.prepare.check import check_plan, choice_of_targets, open_caches, packs_of, with_template_of
from packtool.train.prepare.checkpoint import RunState, read_state
from packtool.train.prepare.evaluation import plan_of_samples
from packtool.train.prepare.figures import SampleFigures
from packtool.train.prepare.place import checkpoint_of, with_resumed_version
from packtool.train.prepare.planner import Dealing, Planner, plan_options, with_model
from packtool.train.prepare.schedule import Schedule
from packtool.train.prepare.sequence_parallel import axes_of
from packtool.train.prepare.whole import check_resumable


@dataclass(frozen=True, eq=False)
class Validation:
    """The val split of a run's caches.

    Args:
        samples: with their labels as ``--loss-scale`` chooses them.
        plan: micro-batches of all ranks.
    """

    reader: CacheReader
    samples: SampleReader
    plan: EvaluationPlan


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
        axes: how rows are shared.
        notes: remarks for the user.
        validation: what is evaluated between steps, None for nothing.
        weights: checkpoint to take weights from, and nothing else; None for those of the model.
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
    axes: Axes
    notes: tuple[str, ...] = ()
    validation: Validation | None = None
    weights: str | None = None

    @property
    def media_limits(self) -> MediaLimits:
        """The limits that pixels and sounds are loaded with."""
        return self.reader.manifests[0].identity.media_limits


def prepare_run(config: TrainConfig, world: World) -> PreparedRun:
    """Check that tokenizer, caches, options and checkpoint fit, and plan; takes a second.

    Raises:
        ConfigError, DataError, MismatchError: naming what does not fit, and what to do.
    """
    config = with_resumed_version(config)
    files = ModelFiles.load(config.model)
    reader = open_caches(config, files)
    files = with_template_of(reader, files)
    index = reader.index
    choice = choice_of_targets(config, reader, files)
    samples: SampleReader = reader
    targets = index.target_tokens
    if choice is not None:
        samples = chosen = ChosenTargets(reader, choice)
        targets = chosen.target_tokens()
    planner = _planner(config, files, reader, targets)
    found = checkpoint_of(config)
    checkpoint = None if config.resume_only_model else found.directory
    before = read_state(checkpoint) if checkpoint is not None else None
    mine: Dealing = (world.data.size, config.gradient_accumulation_steps, config.per_device_train_batch_size)
    state = _state(config, planner, mine, reader.fingerprint)
    dealings: tuple[tuple[int, int, int, int], ...] = ((0, *mine),)
    notes = [*_access_notes(config, reader), *found.notes()]
    if checkpoint is not None and before is not None:
        state.check_continues(checkpoint, before)
        check_resumable(checkpoint, world.rank, world.size)
        dealings = before.dealings or ((0, *before.dealing),)
        if state.is_dealt_anew_after(before):
            dealings = (*dealings, (before.step, *mine))
            notes.append(
                f"{checkpoint} was trained by {before.world_size} data-parallel ranks, and there are "
                f"{world.data.size}: what it left of its epoch is dealt anew, every pack once"
            )
    schedule = planner.schedule(dealings)
    state = dataclasses.replace(state, dealings=dealings if len(dealings) > 1 else ())
    start = before.step if before is not None else 0
    cost = planner.options.cost
    axes = axes_of(config, world, files, index.length, trained=True)
    units = targets > 0 if config.loss_reduction == "sample" else targets
    is_seen, is_heard = _media_kinds(reader)
    figures = SampleFigures(targets, index.media_tokens, units.astype(np.int64), cost, is_seen, is_heard)
    return PreparedRun(
        config,
        world,
        files,
        reader,
        samples,
        figures,
        schedule,
        state,
        checkpoint,
        start,
        axes,
        tuple(notes),
        _validation(config, world, reader, choice, axes),
        found.directory if config.resume_only_model else None,
    )


def _media_kinds(reader: CacheReader) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Which samples have something to look at, and which to listen to; the index does not tell which videos sound."""
    index, audio = reader.index, reader.manifests[0].identity.media_limits.audio
    has_videos = index.num_videos > 0
    may_sound = has_videos & (audio is not None and audio.in_video)
    return (index.num_images > 0) | has_videos, (index.num_audios > 0) | may_sound


def _access_notes(config: TrainConfig, reader: CacheReader) -> list[str]:
    """Said before the first step, for the one sample with a web address may come after hours."""
    for manifest in reader.manifests:
        far = any('"media_access": "any"' in source.settings for source in manifest.sources)
        kept = manifest.identity.spec["media"] == "reference" and any(s.media_tokens for s in manifest.splits.values())
        if far and kept and config.media_access != "any":
            return [
                "a cache was exported with --media-access any: if its rows name web addresses, training needs it, too"
            ]
    return []


def _planner(
    config: TrainConfig, files: ModelFiles, reader: CacheReader, targets: npt.NDArray[np.integer[Any]]
) -> Planner:
    saved = read_plan(config.plan) if config.plan is not None else None
    if saved is not None:
        check_plan(saved, config, reader)
    max_length = config.max_length or max(manifest.max_length for manifest in reader.manifests)
    options = plan_options(config, packing=config.packing, max_length=max_length, world_size=1)
    options = with_model(options, files.config)
    if saved is not None:
        options = dataclasses.replace(options, max_length=saved.info.max_length, packing_length=saved.info.capacity)
    return Planner(config, options, reader.index, targets, packs_of(saved) if saved is not None else None)


def _validation(
    config: TrainConfig, world: World, reader: CacheReader, choice: TargetChoice | None, axes: Axes
) -> Validation | None:
    if config.eval_strategy == "no":
        return None
    val = CacheReader.open(reader.directories, VAL_SPLIT, reader.copies)
    plan = plan_of_samples(val, world.data, max_tokens=config.max_tokens_per_micro_batch, alignment=axes.multiple)
    return Validation(val, val if choice is None else ChosenTargets(val, choice), plan)


def _state(config: TrainConfig, planner: Planner, dealing: Dealing, cache: str) -> RunState:
    plan = planner.plan_of(0, dealing)
    world_size, _, _ = dealing
    return RunState(
        plan=plan.packs.fingerprint,
        steps=plan.steps.fingerprint if plan.places is None else plan.fingerprint,
        cache=cache,
        seed=config.seed,
        train_type=config.train_type,
        packing=config.packing,
        max_length=planner.options.max_length,
        packing_length=planner.options.packing_length,
        world_size=world_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        per_device_train_batch_size=config.per_device_train_batch_size,
        loss_scale=config.loss_scale or "",
        loss_reduction=config.loss_reduction,
        schedule=_schedule_of(planner),
        master_weights=config.master_weights,
    )


def _schedule_of(planner: Planner) -> str:
    """What decides how Skrull deals, in one line."""
    skrull = planner.options.skrull
    if skrull is None:
        return ""
    return f"skrull, buckets of {skrull.bucket_size} tokens, a row on {skrull.context_parallel}"
