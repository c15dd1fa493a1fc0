from __future__ import annotations

import pytest

from packtool.train.loop.media_times import LoadingTimes


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
