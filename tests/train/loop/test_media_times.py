from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from packtool.errors import MediaError
from packtool.launch.world import World
from packtool.train.loop import media_times as module
from packtool.train.loop.media_times import LoadingTimes, measure_workers
from packtool.train.prepare.run import Run
from tests.train.tiny_media import export_kinds, make_media_world


def times(step_seconds: float) -> LoadingTimes:
    names = ("kind", "measured", "seconds", "megabytes", "per_step")
    rows = ("pictures", 32, 0.01, 0.5, 20.0), ("videos", 8, 0.4, 12.0, 0.5)
    kinds = [dict(zip(names, row, strict=True)) for row in rows]
    return LoadingTimes(kinds, step_seconds, "a model on a GPU", cores=2)


def test_number_of_workers_that_load_as_fast_as_steps_compute() -> None:
    media_times = times(0.1)
    assert media_times.seconds == pytest.approx(0.4)
    assert media_times.workers == 4
    assert media_times.megabytes_per_second == pytest.approx(160)
    # Two load for 0.2 s what is computed in 0.1; without any, 0.4 of 0.5 s are waited.
    assert [media_times.waited(workers) for workers in (0, 1, 2, 4)] == pytest.approx([0.8, 0.75, 0.5, 0])
    assert "has only 2 cores" in media_times.sentences()[-1]


def test_one_worker_suffices_for_long_steps() -> None:
    media_times = times(10.0)
    assert media_times.workers == 1
    assert media_times.waited(1) == 0
    _, waiting = media_times.sentences()
    assert waiting == "Share of time that steps would wait, by number of data workers: 4% with 0, 0% with 1."


def test_a_run_has_workers_by_the_measured_time_of_its_media(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = make_media_world(tmp_path, hears=False)
    tiny = export_kinds(tiny, str(tmp_path / "cache"), [["picture"], ["picture"], ["picture", "picture"], ["text"]])
    run = Run.of(tiny.config("unused", dataloader_num_workers=None), World())
    monkeypatch.setattr("packtool.train.prepare.workers.cores_of_a_rank", lambda: 16)
    now, seconds_each, loaded = [0.0], [0.25], []

    def load(samples: list[Any], spec: Any) -> None:
        loaded.append(samples[0].row)
        now[0] += seconds_each[0] * sum(image.num_tokens for image in samples[0].images)
        if samples[0].row == 2:
            raise MediaError("a missing file", "Restore it.")

    monkeypatch.setattr(module, "load_media", load)
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(module.time, "process_time", lambda: 0.0)
    tokens_per_micro_batch = run.source.media_tokens()
    for workers in (1, 3, 8):
        loaded.clear()
        seconds_each[0] = (workers - 0.5) * 0.1 / tokens_per_micro_batch
        assert measure_workers(run, SimpleSpec()) == workers
        assert sorted(loaded) == [0, 1, 2], "samples with media only"
    given = dataclasses.replace(run, config=dataclasses.replace(run.config, dataloader_num_workers=5))
    loaded.clear()
    assert measure_workers(given, SimpleSpec()) == 5
    assert not loaded


@dataclasses.dataclass
class SimpleSpec:
    media_cache: None = None
