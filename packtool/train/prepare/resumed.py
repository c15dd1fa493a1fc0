"""What a resumed run would train, before it is paid for: ``packtool plan --resume``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from packtool.config.mixture import mixture_problems
from packtool.config.plan import PlanConfig
from packtool.errors import ConfigError
from packtool.launch.world import World
from packtool.train.prepare.cached import CachedRun, prepare_cached
from packtool.train.prepare.checkpoint import find_checkpoint, is_checkpoint, read_run_state, run_directory
from packtool.train.prepare.continued import steps_planned
from packtool.train.prepare.history import read_history
from packtool.train.prepare.staged_schedule import StagedSchedule


@dataclass(frozen=True, eq=False)
class Resumed:
    """A run from a checkpoint on, as it would go on with these caches.

    Args:
        run: prepared.
        steps_before: how many the run was to have.
    """

    run: CachedRun
    steps_before: int

    def figures(self) -> dict[str, Any]:
        """All figures by name, as JSON has them."""
        run, changed = self.run, self.run.changed
        epoch, done = run.schedule.locate(run.start)
        left = run.schedule.epoch_end(run.start) - run.start
        stages = run.schedule.figures() if isinstance(run.schedule, StagedSchedule) else None
        return {
            "checkpoint": run.beginning.checkpoint,
            "step": run.start,
            "epoch": epoch,
            "steps_left_in_epoch": left,
            "steps_per_epoch": run.schedule.steps_per_epoch,
            "steps": run.schedule.num_steps,
            "steps_before": self.steps_before,
            "world_size": run.world.data.size,
            "samples_left_in_epoch": len(run.schedule.plan_of(epoch).samples_of(done, done + left)),
            "data_changed": changed is not None,
            "sources": [] if changed is None else [dataclasses.asdict(source) for source in changed.sources],
            "stages": stages,
        }


def resumed(config: PlanConfig) -> Resumed:
    """Prepare a run to go on as ``packtool train --resume-from-checkpoint`` would, with its own options.

    Args:
        config: ``resume`` is the run's directory or one of its checkpoints; caches or their recipe are the run's if
            none are given.

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
    if problems := mixture_problems(train, plan=train.plan):
        raise ConfigError.from_problems(problems)
    ranks = train.sequence_parallel_ranks
    size = segment.assignments[-1][1] * ranks if config.world_size == 1 else config.world_size
    return Resumed(prepare_cached(train, World(size=size).shared_by(ranks)), steps_planned(checkpoint))
