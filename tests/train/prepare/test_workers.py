"""Processes that load media: as many as there is for them to do, and a word where they are too few."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtool.launch.world import World
from packtool.train.prepare.run import Run
from packtool.train.prepare.workers import WaitingNote, choose_workers, workers_of
from tests.train.tiny import TinyWorld


@pytest.mark.parametrize(
    ("media_seconds", "cores", "expected"),
    [(0, 16, 1), (0.4, 16, 4), (0.4, 3, 2), (0.4, 1, 1), (5, 64, 8), (0.101, 16, 2)],
)
def test_workers_depend_on_media_and_cores(media_seconds: float, cores: int, expected: int) -> None:
    assert choose_workers(media_seconds, cores) == expected


@given(seconds=st.floats(0, 1e9), cores=st.integers(1, 512))
def test_there_is_at_least_one_worker_and_at_most_one_per_core(seconds: float, cores: int) -> None:
    assert 1 <= choose_workers(seconds, cores) <= max(min(cores - 1, 8), 1)


def test_workers_of_a_run_depend_on_its_media(tiny: TinyWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.of(tiny.config("unused"), World())
    assert workers_of(run) == 0, "the tiny world asks for none"
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, dataloader_num_workers=None))
    monkeypatch.setattr("packtool.train.prepare.workers.cores_of_a_rank", lambda: 16)
    assert workers_of(run) == 1
    packed = int(run.source.figures.media_tokens.sum()) / run.timeline.plan_of(0).packs.num_packs
    assert workers_of(run, 0.1 / packed * 3.5) == 4


def test_workers_of_a_stage_without_sequence_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packtool.train.prepare.workers.cores_of_a_rank", lambda: 16)
    stage_config, config = SimpleNamespace(sequence_parallel_ranks=1), SimpleNamespace(dataloader_num_workers=None)
    source = SimpleNamespace(media_tokens=lambda: 4 * 2048)
    run: Any = SimpleNamespace(config=config, step_configs=[(stage_config, None)], source=source)
    assert workers_of(run) == 4
    stage_config.sequence_parallel_ranks = 4
    assert workers_of(run) == 1


def test_waiting_is_reported_once_with_a_remedy() -> None:
    note = WaitingNote(num_workers=1, cores=8)
    assert note.add_steps(0.9, 100.0) is None, "the first steps start the processes"
    assert note.add_steps(0.5, 10.0) is None, "too short to tell"
    message = note.add_steps(0.5, 20.0)
    assert message is not None
    assert message.startswith("steps wait 50% of their time for data: try --dataloader-num-workers 2 ")
    assert note.add_steps(0.5, 100.0) is None


def test_short_waits_are_not_reported() -> None:
    note = WaitingNote(num_workers=1, cores=8)
    assert all(note.add_steps(0.04, 100.0) is None for _ in range(20))


def test_the_remedy_without_free_cores() -> None:
    note = WaitingNote(num_workers=4, cores=4)
    note.add_steps(0.0, 1.0)
    message = note.add_steps(0.2, 100.0)
    assert message is not None
    assert "4 processes per rank load it, and no more cores are free (4 per rank)" in message
