"""The steps of a trained run, planned again from its history: a plan is a pure function of options and caches."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from packtool.cache.manifest import Manifest
from packtool.cache.plan_file import read_plan
from packtool.cache.reader import CacheReader
from packtool.config.settings import load_json
from packtool.errors import ConfigError, MismatchError, PacktoolError
from packtool.train.prepare.checkpoint import finished_checkpoints, read_run_state
from packtool.train.prepare.history import Segment, ledger_name, read_history, read_ledger
from packtool.train.prepare.opening import open_to_train
from packtool.train.prepare.output_dir import HISTORY, METRICS_NAME
from packtool.train.prepare.timeline import Timeline


@dataclass(frozen=True, eq=False)
class Replay:
    """A segment of a run, planned again.

    Args:
        segment: of its history.
        stop: the first step after the segment, or that was not trained yet.
        timeline: its steps, numbered as in the run.
    """

    segment: Segment
    stop: int
    timeline: Timeline

    @property
    def reader(self) -> CacheReader:
        """The reader of its caches."""
        return self.timeline.inputs.of_run[2]

    def occurrences(self, position: int) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield step, epoch, rank, micro-batch, and the pack in the epoch's plan, each time a sample was trained."""
        step = self.segment.first
        while step < self.stop:
            stretch = self.timeline.stretch(step)
            plan, stop = stretch.plan, min(stretch.stop, self.stop)
            for at in np.flatnonzero(plan.packs.samples == position):
                pack = int(np.searchsorted(plan.packs.offsets, at, side="right")) - 1
                number, rank, micro_batch = map(int, plan.steps.locations()[pack])
                if step <= stretch.first + number < stop:
                    yield stretch.first + number, stretch.epoch, rank, micro_batch, pack
            step = stop


def segments_of(output_dir: str) -> list[tuple[Segment, int]]:
    """The segments of a run, each with the step at which it was resumed, or at which the run is now."""
    segments = read_history(output_dir)
    stops = [*(segment.first for segment in segments[1:]), max(steps_done(output_dir), segments[-1].first)]
    return list(zip(segments, stops, strict=True))


def steps_done(output_dir: str) -> int:
    """Steps that a run has trained, from its log and its checkpoints."""
    steps = [read_run_state(checkpoint).step for checkpoint in finished_checkpoints(output_dir)]
    path = os.path.join(output_dir, METRICS_NAME)
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            steps += [load_json(line)["step"] for line in file if line.endswith("\n")]
    return max(steps, default=0)


def replay_segment(output_dir: str, segment: Segment, stop: int, model: str | None = None) -> Replay:
    """Plan a segment of a run again.

    Args:
        model: directory of its model, if that has moved.

    Raises:
        MismatchError: if a cache is gone or has changed since, or this packtool plans otherwise.
        ConfigError: if its model cannot be read.
    """
    for directory, fingerprint, _ in segment.caches:
        _check_cache(directory, fingerprint)
    config = segment.train_config
    if config.plan is not None:
        _check_plan(config.plan)
    changes = {"resume_from_checkpoint": None, "data_change": "refuse", "cache_dir": None, "output_dir": output_dir}
    try:
        inputs = open_to_train(dataclasses.replace(config, **changes, model=model or config.model))  # type: ignore[arg-type]
    except ConfigError as error:
        if model is not None:
            raise
        raise ConfigError(
            f"the model of this run, {config.model}, cannot be read here: {error.message}",
            "Say where it is now: --model DIR.",
        ) from error
    change = None
    if segment.changed_at is not None:
        name = ledger_name(segment.changed_at)
        ledger = read_ledger(os.path.join(output_dir, HISTORY), name)
        if ledger is None or ledger.change is None:
            raise MismatchError(f"{output_dir}/{HISTORY} lacks {name}, which says what was left then", "Copy it again.")
        change = ledger.change
    state = inputs.state(segment.assignments[-1][1:])
    if (state.plan, state.steps) != (segment.plan, segment.steps):
        if config.plan is not None:
            raise MismatchError(
                f"the file {config.plan}, the --plan of {output_dir}, is another since it was trained: its packs were "
                f"{segment.plan} and are {state.plan}",
                "Bring it back as it was: what the run's steps held is told from it.",
            )
        raise MismatchError(
            f"the steps of {output_dir} cannot be planned anew: packtool {segment.version} planned other ones for the "
            "same options and caches",
            f"Look at them with that version{', on such hardware as it ran on' if state.schedule else ''}.",
        )
    return Replay(segment, stop, Timeline.of(inputs, segment.assignments, change))


def _check_plan(path: str) -> None:
    try:
        read_plan(path)
    except PacktoolError as error:
        raise MismatchError(
            f"the --plan of this run is gone: {error.message}", "Bring it back where it was."
        ) from error


def _check_cache(directory: str, fingerprint: str) -> None:
    try:
        current = Manifest.read(directory).fingerprint
    except MismatchError as error:
        raise MismatchError(
            f"the cache {directory} of this run is gone: {error.message}", "Bring it back where it was."
        ) from error
    if current != fingerprint:
        raise MismatchError(
            f"the cache {directory} has changed since it was trained: it was {fingerprint} and is {current}",
            "Export it as it was: what its steps held is planned from the same cache only.",
        )
