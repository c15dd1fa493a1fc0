"""The benchmark of long videos: it runs, and says a ratio for each file."""

from __future__ import annotations

import re

import pytest

from tests.scripts.loading import load_script


def test_one_minute_benchmark_runs(capsys: pytest.CaptureFixture[str]) -> None:
    load_script("bench_media").main(["--minutes", "1", "--take", "3", "--size", "32", "--repeat", "1"])
    out = capsys.readouterr().out
    assert "1,500 frames, of which 3 are taken" in out
    ratios = re.findall(r"^(mp4|mkv), a keyframe every (2|10) s: ([\d.]+) times as fast", out, re.MULTILINE)
    assert [(form, group) for form, group, _ in ratios] == [("mp4", "2"), ("mp4", "10"), ("mkv", "2"), ("mkv", "10")]
    assert all(float(ratio) > 0 for *_, ratio in ratios)
