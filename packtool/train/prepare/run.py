"""What a run is made of, whichever kind it is.

What a resumed run trains: the line at its start, and its preview with ``packtool plan --resume``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from packtool.config.mixture import MixOptions
from packtool.config.plan import PlanConfig
from packtool.config.settings import flag
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError, MismatchError
from packtool.launch.world import World
from packtool.train.prepare.cached import prepare_cached
from packtool.train.prepare.checkpoint import (
    ONLY_MODEL,
    find_checkpoint,
    is_checkpoint,
    read_options,
    read_run_state,
    run_directory,
)
from packtool.train.prepare.history import options_kept, read_history
from packtool.train.prepare.prepared import PreparedRun
from packtool.train.prepare.resume import steps_planned
from packtool.train.prepare.streamed import prepare_stream


def prepare_run(config: TrainConfig, world: World) -> PreparedRun:
    """A run on caches, or with ``--streaming true`` on rows as they come: checked and, as far as can be, planned.

    Raises:
        ConfigError, DataError, MismatchError, StorageError: naming what does not fit, and what to do.
    """
    return prepare_stream(config, world) if config.streaming else prepare_cached(config, world)


_FIXED_PANELS = ("Optimizer", "Parameters")  # a resumed optimizer has these settings from its checkpoint
_LENGTH = ("num_train_epochs", "max_steps")
_NOT_COMPARED = ("output_dir", "dataloader_num_workers", "data_change")


def resumed_figures(config: PlanConfig) -> dict[str, Any]:
    """Preview how ``packtool train --resume-from-checkpoint`` would resume a run, with its own options.

    Args:
        config: ``resume`` is the run's directory or one of its checkpoints; caches or their recipe are the run's if
            none are given.

    Returns:
        all figures by name, as JSON has them.

    Raises:
        ConfigError, MismatchError: as training, and where the run keeps no history.
    """
    assert config.resume is not None, "asked for"
    directory = config.resume.rstrip("/")
    output_dir = run_directory(directory)
    segments = read_history(output_dir)
    found = find_checkpoint(directory if is_checkpoint(directory) else "true", output_dir)
    checkpoint = str(found.directory)
    step = read_run_state(checkpoint).step
    segment = next(each for each in reversed(segments) if each.first < step or each is segments[0])
    train = segment.train_config
    has_caches = bool(config.cached_dataset or config.mix)
    train = dataclasses.replace(
        train,
        cached_dataset=config.cached_dataset if has_caches else train.cached_dataset,
        mix=config.mix if has_caches else train.mix,
        output_dir=output_dir,
        resume_from_checkpoint=checkpoint,
        data_change="allow",
    )
    if problems := train.problems(MixOptions):
        raise ConfigError.from_problems(problems)
    ranks = train.sequence_parallel_ranks
    size = segment.assignments[-1][1] * ranks if config.world_size == 1 else config.world_size
    run = prepare_cached(train, World(size=size).shared_by(ranks))
    stretch = run.timeline.stretch(run.start)
    return {
        "checkpoint": run.resume_point.checkpoint,
        "step": run.start,
        "epoch": stretch.epoch,
        "steps_left_in_epoch": stretch.stop - run.start,
        "steps_per_epoch": run.timeline.steps_per_epoch,
        "steps": run.timeline.num_steps,
        "steps_before": steps_planned(checkpoint),
        "world_size": run.world.data.size,
        "samples_left_in_epoch": len(stretch.plan.samples_of(run.start - stretch.first, stretch.stop - stretch.first)),
        "data_changed": run.changed is not None,
        "sources": [] if run.changed is None else [dataclasses.asdict(source) for source in run.changed.sources],
        "stages": run.timeline.figures() or None,
    }


def resume_lines(run: PreparedRun) -> Iterator[str]:
    """One line for a resumed run: checkpoint, steps done and left, changed settings; nothing for a new run.

    Raises:
        MismatchError: if a changed setting would have no effect, or would shift the schedule of learning rates.
    """
    checkpoint, before = run.resume_point.checkpoint, run.resume_point.before
    if checkpoint is None or before is None:
        return
    changes = _changed_settings(run.config, read_options(checkpoint))
    num_steps, num_planned = run.timeline.num_steps, steps_planned(checkpoint)
    panels = {field.name: field.metadata["panel"] for field in dataclasses.fields(TrainConfig)}
    refused = [name for name in changes if panels[name] in _FIXED_PANELS and name != "adapters"]
    is_same_data = run.config.data_change == "refuse" and not run.state.is_assigned_anew_after(before)
    shifts = num_steps != num_planned and run.config.lr_scheduler_type != "constant"
    reasons = []
    is_length_set = run.config.data_change == "refuse" and any(name in changes for name in _LENGTH)
    if shifts and (is_same_data or is_length_set):
        refused += [name for name in _LENGTH if name in changes]
        reasons = [f"    the schedule of learning rates would have {num_steps:,} steps instead of {num_planned:,}"]
    if refused or reasons:
        lines = [f"  - {flag(name)}: {changes[name][0]} there, {changes[name][1]} now" for name in refused]
        raise MismatchError(
            "\n".join([f"{checkpoint} cannot be resumed with other settings:", *lines, *reasons]),
            f"Resume with the settings of that run; or {ONLY_MODEL}",
        )
    settings = ", ".join(f"{flag(name)} {new} (was {old})" for name, (old, new) in changes.items())
    done = f"{run.start:,} of {num_steps:,} steps done, {max(num_steps - run.start, 0):,} left"
    yield f"resuming from {checkpoint}: {done}" + (f"; changed settings: {settings}" if settings else "")


def _changed_settings(config: TrainConfig, before: dict[str, Any] | None) -> dict[str, tuple[str, str]]:
    """Settings that differ from a checkpoint's, by name: its value and the new one; none if it does not say."""
    if before is None:
        return {}
    now = options_kept(config)
    return {
        field.name: (_shown(field, before), _shown(field, now))
        for field in dataclasses.fields(config)
        if field.name not in _NOT_COMPARED and before.get(field.name) != now.get(field.name)
    }


def _shown(field: dataclasses.Field[Any], values: Mapping[str, Any]) -> str:
    """A setting's value, or its default, as a command line has it."""
    value = values.get(field.name, field.default)
    if isinstance(value, list):
        return " ".join(map(str, value))
    if value is None or value is dataclasses.MISSING:
        return "none" if field.name in values else "default"
    return str(value).lower() if isinstance(value, bool) else str(value)
