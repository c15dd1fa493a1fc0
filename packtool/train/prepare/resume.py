"""Resuming a run on caches: the timeline from its checkpoint on, and the ledger of what was trained before."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

from packtool.config.settings import load_json
from packtool.errors import MismatchError
from packtool.launch.world import World
from packtool.planning.ledger import Ledger
from packtool.train.prepare.checkpoint import RunState
from packtool.train.prepare.data_change import ChangedData, cache_differences, history_of, with_changed_data
from packtool.train.prepare.inputs import Inputs
from packtool.train.prepare.prepared import ResumePoint
from packtool.train.prepare.record import begin_ledger, ledger_of_plan, read_ledger
from packtool.train.prepare.timeline import Timeline


@dataclass(frozen=True, eq=False)
class ResumedState:
    """A run from its resume point on.

    Args:
        timeline: of all steps from there.
        state: with each time that packs were assigned.
        ledger: of what was trained before.
        changed: differences of the data; None where they are the same.
        notes: for the user.
    """

    timeline: Timeline
    state: RunState
    ledger: Ledger
    changed: ChangedData | None = None
    notes: tuple[str, ...] = ()


def resume(
    resume_point: ResumePoint, state: RunState, world: World, inputs: Inputs, *, may_change: bool
) -> ResumedState:
    """Resume from a checkpoint, or begin a run.

    Args:
        state: of a run that begins with these options and caches.
        may_change: the caches may be others than the checkpoint's.

    Raises:
        MismatchError: if the run does not fit the checkpoint, or what was trained cannot be found in other caches.
    """
    before, checkpoint, (_, _, reader) = resume_point.before, resume_point.checkpoint, inputs.of_run
    if before is None:
        return ResumedState(Timeline.of(inputs, ((0, *state.assignment),)), state, begin_ledger(reader))
    if checkpoint is None:  # as packtool.Batches goes on, whose user keeps the checkpoints, and no ledger
        return _assigned_anew("this state", before, state, inputs, begin_ledger(reader))
    ledger = read_ledger(checkpoint)
    had = () if ledger is None else ledger.sources
    resume_point.check(
        state, world, data_may_change=may_change, other_data=lambda: cache_differences(had, reader) if had else []
    )
    if state.has_other_data(before):
        return _with_other_data(checkpoint, before, state, inputs, ledger)
    return _assigned_anew(checkpoint, before, state, inputs, ledger)


def _assigned_anew(
    checkpoint: str,
    before: RunState,
    state: RunState,
    inputs: Inputs,
    ledger: Ledger | None,
) -> ResumedState:
    """Go on with the same data, perhaps with other processes."""
    assignments, notes = before.assignments or ((0, *before.assignment),), []
    if state.is_assigned_anew_after(before):
        notes.append(
            f"{checkpoint} was trained by {before.world_size} data-parallel ranks, and there are "
            f"{state.world_size}: what it left of its epoch is assigned anew, every pack once"
        )
        assignments = (*assignments, (before.step, *state.assignment))
    timeline = Timeline.of(inputs, assignments, None if ledger is None else ledger.change)
    if ledger is None:
        ledger = ledger_of_plan(timeline, before.step)
        notes.append(
            f"{checkpoint} is of an older packtool and keeps no ledger: what was trained is told from its plan, with "
            "what --on-bad-media skip may have left out"
        )
    is_plain = len(assignments) == 1 and before.data_since == 0
    state = dataclasses.replace(state, assignments=() if is_plain else assignments, data_since=before.data_since)
    return ResumedState(timeline, state, ledger, notes=tuple(notes))


def _with_other_data(
    checkpoint: str, before: RunState, state: RunState, inputs: Inputs, ledger: Ledger | None
) -> ResumedState:
    """Go on with other data: what is left of the epoch is planned anew.

    Raises:
        MismatchError: if the checkpoint keeps no ledger, or samples cannot be found again.
    """
    if ledger is None:
        raise MismatchError(
            f"{checkpoint} is of an older packtool and keeps no ledger, so nobody knows which samples of the caches "
            "that it had were trained",
            "Go on with its own caches until the next checkpoint, and change the data there.",
        )
    wanted, max_length, stage = inputs.epoch_to_resume(ledger, state.assignment)
    changed = with_changed_data(ledger, inputs.of_run[2], wanted, history_of(checkpoint), max_length, stage)
    assignments = ((before.step, *state.assignment),)
    timeline = Timeline.of(inputs, assignments, changed.ledger.change)
    state = dataclasses.replace(state, assignments=assignments, data_since=before.step)
    notes = changed.lines(
        _steps_left(timeline, before.step, ledger.epoch), _told_steps(checkpoint, before.step, timeline)
    )
    return ResumedState(timeline, state, changed.ledger, changed, tuple(notes))


def _steps_left(timeline: Timeline, step: int, epoch: int) -> int:
    """Steps of an epoch from a step on, none where nothing of it is left."""
    stretch = timeline.stretch(step)
    return stretch.stop - step if stretch.epoch == epoch else 0


def _told_steps(checkpoint: str, step: int, timeline: Timeline) -> str:
    """How many steps there are now, and how far the schedule of learning rates is."""
    planned = timeline.num_steps
    told = f"later epochs have {timeline.steps_per_epoch:,} steps each, and the run ends after step {planned:,}"
    if timeline.stage_of(step) is not None:
        told = f"the run ends after step {planned:,}"
    had = steps_planned(checkpoint)
    if had == planned:
        return f"{told}, as before"
    return (
        f"{told} instead of {had:,}: of the schedule of learning rates {step / planned:.1%} is done, where it was "
        f"{step / had:.1%}"
    )


def steps_planned(checkpoint: str) -> int:
    """How many steps the run of a checkpoint was to have."""
    with open(os.path.join(checkpoint, "trainer_state.json"), encoding="utf-8") as file:
        return int(load_json(file.read())["max_steps"])
