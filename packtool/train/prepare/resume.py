"""Resuming a run on caches: the timeline from its checkpoint on, and the ledger of what was trained before."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from packtool.config.settings import flag, load_json
from packtool.config.train import TrainConfig
from packtool.errors import MismatchError
from packtool.launch.world import World
from packtool.planning.ledger import Ledger
from packtool.train.prepare.checkpoint import ONLY_MODEL, RunState, read_options
from packtool.train.prepare.data_change import SourceChange, cache_differences, change_lines, with_changed_data
from packtool.train.prepare.history import history_of, options_kept, read_ledger
from packtool.train.prepare.inputs import Inputs
from packtool.train.prepare.output_dir import ResumePoint
from packtool.train.prepare.record import begin_ledger, ledger_of_plan
from packtool.train.prepare.timeline import Timeline

_FIXED_PANELS = ("Optimizer", "Parameters")
"""Panels of options that a resumed optimizer has from its checkpoint."""
_LENGTH = ("num_train_epochs", "max_steps")
_NOT_COMPARED = ("output_dir", "dataloader_num_workers", "data_change")


@dataclass(frozen=True, eq=False)
class ResumedState:
    """The timeline, state and ledger of a run from its resume point.

    Args:
        timeline: of all steps from there.
        state: with each time that packs were assigned.
        ledger: of what was trained before.
        changes: of each cache; empty if the data are the same.
        notes: for the user.
    """

    timeline: Timeline
    state: RunState
    ledger: Ledger
    changes: tuple[SourceChange, ...] = ()
    notes: tuple[str, ...] = ()


def resume(resume_point: ResumePoint, state: RunState, world: World, inputs: Inputs) -> ResumedState:
    """Resume from a checkpoint, or start a run.

    Args:
        state: of a run that starts with these options and caches.
    """
    before, checkpoint, (config, _, reader) = resume_point.before, resume_point.checkpoint, inputs.of_run
    if before is None:
        return ResumedState(Timeline.of(inputs, ((0, *state.assignment),)), state, begin_ledger(reader))
    # packtool.Batches resumes without a checkpoint, and so without a ledger.
    ledger = begin_ledger(reader) if checkpoint is None else read_ledger(checkpoint)
    origin = checkpoint or "this state"
    if checkpoint is not None:
        trained = () if ledger is None else ledger.sources
        resume_point.check(
            state,
            world,
            data_may_change=config.data_change == "allow",
            other_data=lambda: cache_differences(trained, reader) if trained else [],
        )
        if state.has_other_data(before):
            return _with_other_data(checkpoint, before, state, inputs, ledger)
    assignments, notes = before.assignments or ((0, *before.assignment),), []
    if state.is_assigned_anew_after(before):
        notes.append(
            f"{origin} was trained by {before.world_size} data-parallel ranks, and there are "
            f"{state.world_size}: what it left of its epoch is assigned anew, every pack once"
        )
        assignments = (*assignments, (before.step, *state.assignment))
    timeline = Timeline.of(inputs, assignments, None if ledger is None else ledger.change)
    if ledger is None:
        ledger = ledger_of_plan(timeline, before.step)
        notes.append(
            f"{origin} is of an older packtool and keeps no ledger: what was trained is told from its plan, with "
            "what --on-bad-media skip may have left out"
        )
    is_plain = len(assignments) == 1 and before.data_since == 0
    state = dataclasses.replace(state, assignments=() if is_plain else assignments, data_since=before.data_since)
    return ResumedState(timeline, state, ledger, notes=tuple(notes))


def _with_other_data(
    checkpoint: str, before: RunState, state: RunState, inputs: Inputs, ledger: Ledger | None
) -> ResumedState:
    """Resume with other data: the rest of the epoch is planned again."""
    if ledger is None:
        raise MismatchError(
            f"{checkpoint} is of an older packtool and keeps no ledger, so nobody knows which samples of the caches "
            "that it had were trained",
            "Go on with its own caches until the next checkpoint, and change the data there.",
        )
    step, epoch = before.step, ledger.epoch
    wanted, max_length, stage = inputs.epoch_to_resume(ledger, state.assignment)
    ledger, changes = with_changed_data(ledger, inputs.of_run[2], wanted, history_of(checkpoint), max_length, stage)
    assert ledger.change is not None, "made with it"
    assignments = ((step, *state.assignment),)
    timeline = Timeline.of(inputs, assignments, ledger.change)
    state = dataclasses.replace(state, assignments=assignments, data_since=step)
    stretch, num_steps, num_before = timeline.stretch(step), timeline.num_steps, steps_planned(checkpoint)
    steps_left = stretch.stop - step if stretch.epoch == epoch else 0
    steps = f"the run ends after step {num_steps:,}"
    if stage is None:
        steps = f"later epochs have {timeline.steps_per_epoch:,} steps each, and {steps}"
    if num_before == num_steps:
        steps += ", as before"
    else:
        steps += (
            f" instead of {num_before:,}: of the schedule of learning rates {step / num_steps:.1%} is done, where it "
            f"was {step / num_before:.1%}"
        )
    return ResumedState(
        timeline, state, ledger, changes, tuple(change_lines(ledger.change, changes, steps_left, steps))
    )


def steps_planned(checkpoint: str) -> int:
    """The planned number of steps of the run of a checkpoint."""
    with open(os.path.join(checkpoint, "trainer_state.json"), encoding="utf-8") as file:
        return int(load_json(file.read())["max_steps"])


def resume_lines(config: TrainConfig, resume_point: ResumePoint, state: RunState, num_steps: int) -> Iterator[str]:
    """Yield one line for a resumed run: checkpoint, steps done and left, changed settings; nothing for a new run.

    Raises:
        MismatchError: if a changed setting would have no effect, or would shift the schedule of learning rates.
    """
    checkpoint, before = resume_point.checkpoint, resume_point.before
    if checkpoint is None or before is None:
        return
    changes = _changed_settings(config, read_options(checkpoint))
    num_planned = steps_planned(checkpoint)
    panels = {field.name: field.metadata["panel"] for field in dataclasses.fields(TrainConfig)}
    refused = [name for name in changes if panels[name] in _FIXED_PANELS and name != "adapters"]
    is_same_data = config.data_change == "refuse" and not state.is_assigned_anew_after(before)
    shifts = num_steps != num_planned and config.lr_scheduler_type != "constant"
    reasons = []
    is_length_set = config.data_change == "refuse" and any(name in changes for name in _LENGTH)
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
    done = f"{before.step:,} of {num_steps:,} steps done, {max(num_steps - before.step, 0):,} left"
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
