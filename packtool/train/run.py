"""Training as a recipe: check that caches (or rows) and options fit, plan, then train the model."""

from __future__ import annotations

import dataclasses
from functools import partial

from packtool.cache.lock import DirectoryLock
from packtool.config.train import TrainConfig
from packtool.errors import raise_together
from packtool.launch.processes import imported_at_once
from packtool.launch.world import World
from packtool.progress import Progress, SilentProgress
from packtool.simulate.hardware import read_hardware
from packtool.train.prepare.costs import recomputing_lines, with_recomputing
from packtool.train.prepare.from_rows import with_cache
from packtool.train.prepare.output_dir import checkpoint_of, locked_output_dir, with_resumed_version
from packtool.train.prepare.result import TrainResult, settings_lines
from packtool.train.prepare.resume import resume_lines
from packtool.train.prepare.run import Run
from packtool.train.prepare.sequence_parallel import sequence_parallel_lines


def train(config: TrainConfig, progress: Progress, world: World | None = None) -> TrainResult:
    """Train a model on caches or rows; every process of a torchrun job calls this.

    Args:
        config: the run's settings.
        progress: reports the plan and every step, on the first rank only.
        world: this process among the others; by default from torchrun. A dry run can plan for another.

    Returns:
        the figures that are also written to ``OUTPUT_DIR/packtool_train.json``; losses on the first rank only.

    Raises:
        ConfigError, DataError, MismatchError, StorageError: before the first step, except for pictures that are gone.
    """
    world = (world or World.from_environment()).shared_by(config.sequence_parallel_ranks)
    progress = progress if world.is_first else SilentProgress()
    world.check_shards(config)
    with locked_output_dir(config, world) as (config, lock):
        return _train(config, progress, world, lock)


def check_without_rows(config: TrainConfig) -> None:
    """Raise a PacktoolError with every mistake that does not depend on the rows."""
    with imported_at_once():
        from packtool.train.loop.checks import checks_without_rows

    raise_together([partial(checkpoint_of, with_resumed_version(config)), *checks_without_rows(config)])


def prepare(config: TrainConfig, progress: Progress, world: World) -> None:
    """Refuse a run that would fail, and make the cache of its rows, before processes are started."""
    config = with_cache(config, progress, check_without_rows)
    if config.bucket_size == "auto":
        # Every process determines the size itself and reports it; the plan is only checked here.
        config = _with_bucket(with_recomputing(config), SilentProgress(), world)
    Run.of(config, world)


def _with_bucket(config: TrainConfig, progress: Progress, world: World) -> TrainConfig:
    """Replace ``--bucket-size auto`` by a number, for which torch is imported."""
    if config.bucket_size != "auto":
        return config
    with imported_at_once():
        from packtool.train.model.memory import with_bucket

    return with_bucket(config, world, progress)


def _train(config: TrainConfig, progress: Progress, world: World, lock: DirectoryLock | None) -> TrainResult:
    """Train in the locked output directory."""
    hardware = None if config.hardware is None else read_hardware(config.hardware)
    decided = with_recomputing(config)
    notes = recomputing_lines(config, decided)
    config = with_cache(decided, progress, check_without_rows)
    run = Run.of(_with_bucket(config, progress, world), world)
    result = run.expected()
    lines = (
        *settings_lines(run.config),
        *run.source.lines(run.config),
        *notes,
        *sequence_parallel_lines(run.world, run.axes),
        *run.length_lines(),
        *run.notes,
        *resume_lines(run.config, run.resume_point, run.state, run.timeline.num_steps),
    )
    for line in lines:
        progress.note(line)
    # From here on torch and transformers are needed; mistakes of the user have been reported by now.
    with imported_at_once():
        from packtool.train.loop.checks import estimate_training, load_spec
        from packtool.train.loop.execute import execute

    spec = load_spec(run)
    if config.dry_run:
        estimate, precision = estimate_training(run, spec)
        trained, parameters = estimate.num_trainable, estimate.num_parameters
        for line in (*precision, f"parameters: {parameters:,}, of them trained: {trained:,} ({config.train_type})"):
            progress.note(line)
        progress.note(estimate.sentence())
        if hardware is not None:
            progress.note(estimate.sentence_on(hardware))
        return dataclasses.replace(
            result, num_parameters=estimate.num_parameters, num_trainable_parameters=estimate.num_trainable
        )
    if run.start >= run.timeline.num_steps:
        progress.note(f"{result.resumed_from} is the end of this run already: there is nothing left to train")
        return dataclasses.replace(result, checkpoint=result.resumed_from)
    return execute(run, spec, result, progress, lock)
