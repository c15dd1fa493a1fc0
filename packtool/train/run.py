"""A training run from its options to its result: check caches (or rows) and options, plan, then train the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from packtool.cache.lock import DirectoryLock
from packtool.config.train import TrainConfig
from packtool.errors import raise_together
from packtool.launch.processes import imported_at_once
from packtool.launch.world import World
from packtool.progress import Progress, SilentProgress
from packtool.simulate.hardware import Hardware, read_hardware
from packtool.train.prepare.costs import recomputing_lines, with_recomputing
from packtool.train.prepare.from_rows import with_cache
from packtool.train.prepare.hub import HubUploads
from packtool.train.prepare.output_dir import checkpoint_of, locked_output_dir, with_resumed_folder
from packtool.train.prepare.parallelism import sequence_parallel_lines
from packtool.train.prepare.result import TrainResult, settings_lines
from packtool.train.prepare.run import Run, resume_lines

if TYPE_CHECKING:
    from packtool.train.model.memory import MemoryEstimate


def train(config: TrainConfig, progress: Progress, world: World | None = None) -> TrainResult:
    """Train a model on caches or rows; every process of a torchrun job calls this.

    Args:
        progress: reports the plan and every step, on the first rank only.
        world: rank and size of this process's job; by default from torchrun. A dry run can plan for another size.

    Returns:
        the figures that are also written to ``OUTPUT_DIR/packtool_train.json``; losses on the first rank only.

    Errors are raised before the first step, except for missing media files.
    """
    world = (world or World.from_environment()).shared_by(config.sequence_parallel_ranks)
    progress = progress if world.is_first else SilentProgress()
    world.check_shards(config)
    with locked_output_dir(config, world) as (config, lock):
        return _train(config, progress, world, lock)


def check_without_rows(config: TrainConfig) -> None:
    """Raise a PacktoolError with all errors of the options that do not depend on the rows."""
    with imported_at_once():
        from packtool.train.loop.checks import checks_without_rows

    raise_together([partial(checkpoint_of, with_resumed_folder(config)), *checks_without_rows(config)])


def prepare(config: TrainConfig, progress: Progress, world: World) -> None:
    """Check a run before its processes are started, and export its rows to a cache if it trains on rows."""
    if config.push_to_hub:
        HubUploads(config)  # checks name and token before rows are read
    config = with_cache(config, progress, check_without_rows)
    if config.bucket_size == "auto":
        # Only for the check of the plan: every process determines the size again, and the first one reports it.
        config = _with_bucket(with_recomputing(config), SilentProgress(), world)
    Run.of(config, world)


def _with_bucket(config: TrainConfig, progress: Progress, world: World) -> TrainConfig:
    """Replace ``--bucket-size auto`` by a number; imports torch only if it is ``auto``."""
    if config.bucket_size != "auto":
        return config
    with imported_at_once():
        from packtool.train.model.memory import with_bucket

    return with_bucket(config, world, progress)


def _train(config: TrainConfig, progress: Progress, world: World, lock: DirectoryLock | None) -> TrainResult:
    """Train in the locked output directory; with ``--dry-run``, only plan and estimate memory."""
    hardware = None if config.hardware is None else read_hardware(config.hardware)
    uploads = HubUploads(config) if config.push_to_hub and world.is_first and not config.dry_run else None
    decided_config = with_recomputing(config)
    run = _plan_run(decided_config, progress, world)
    # Importing torch and transformers takes seconds; most errors of the user have been reported by now.
    with imported_at_once():
        from packtool.train.loop.checks import estimate_training, load_spec
        from packtool.train.loop.execute import execute
        from packtool.train.model.load import has_gpu

    recomputing_notes = recomputing_lines(config, decided_config)  # empty unless all layers recompute by default
    if recomputing_notes and has_gpu(run.config):
        run = run.with_config(gradient_checkpointing="auto")  # only as many layers as the GPU's memory requires
    else:
        for line in recomputing_notes:
            progress.note(line)
    spec = load_spec(run)
    if config.dry_run:
        estimate, model_notes = estimate_training(run, spec)
        return _dry_run_result(run, estimate, model_notes, hardware, progress)
    result = run.expected()  # what is known before training
    if run.start >= run.timeline.num_steps:
        progress.note(f"{result.resumed_from} is already the last step of this run: nothing is left to train")
        return dataclasses.replace(result, checkpoint=result.resumed_from)
    return execute(run, spec, result, progress, lock, uploads)


def _plan_run(config: TrainConfig, progress: Progress, world: World) -> Run:
    """Export rows to a cache if the run trains on rows, plan the run, and report the plan."""
    config = with_cache(config, progress, check_without_rows)
    run = Run.of(_with_bucket(config, progress, world), world)
    for line in _run_lines(run):
        progress.note(line)
    return run


def _dry_run_result(
    run: Run, estimate: MemoryEstimate, model_notes: Sequence[str], hardware: Hardware | None, progress: Progress
) -> TrainResult:
    """Report the model and the memory of a run that is only planned; return its result."""
    for line in model_notes:
        progress.note(line)
    num_parameters, num_trainable = estimate.num_parameters, estimate.num_trainable
    progress.note(f"parameters: {num_parameters:,}, trained: {num_trainable:,} ({run.config.train_type})")
    progress.note(estimate.sentence())
    if hardware is not None:
        progress.note(estimate.sentence_on(hardware))
    return dataclasses.replace(run.expected(), num_parameters=num_parameters, num_trainable_parameters=num_trainable)


def _run_lines(run: Run) -> tuple[str, ...]:
    """Describe the settings, the schedule and the resume point of a run."""
    return (
        *settings_lines(run.config),
        *run.source.lines(run.config),
        *sequence_parallel_lines(run.world, run.axes),
        *run.length_lines(),
        *run.notes,
        *resume_lines(run.config, run.resume_point, run.state, run.timeline.num_steps),
    )
