"""The benchmark of pictures and long videos: it runs, and prints a ratio for each file."""

from __future__ import annotations

import re

import pytest

from tests.scripts.loading import load_script


def test_one_minute_benchmark_runs(capsys: pytest.CaptureFixture[str]) -> None:
    load_script("bench_media").main(
        ["--what", "videos", "--minutes", "1", "--take", "3", "--size", "32", "--repeat", "1"]
    )
    out = capsys.readouterr().out
    assert "1,500 frames, of which 3 are taken" in out
    ratios = re.findall(r"^(mp4|mkv), a keyframe every (2|10) s: ([\d.]+) times as fast", out, re.MULTILINE)
    assert [(form, group) for form, group, _ in ratios] == [("mp4", "2"), ("mp4", "10"), ("mkv", "2"), ("mkv", "10")]
    assert all(float(ratio) > 0 for *_, ratio in ratios)


def test_pictures_of_both_processors_are_equal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmark = load_script("bench_media")
    monkeypatch.setattr(benchmark, "_PICTURES", ((90, 70, "JPEG"), (40, 30, "PNG")))
    benchmark.main(["--what", "pictures", "--repeat", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["JPEG 90x70", "PNG 40x30"]
