"""The benchmark of mixtures runs, and computes errors of shares correctly."""

from __future__ import annotations

import re
from types import ModuleType

import numpy as np
import pytest

from tests.scripts.loading import load_script


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_script("bench_mixture")


def test_report(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Every source is used up, and packtool's largest error is below that of random draws."""
    bench.main(["--samples", "20000", "--sources", "3", "--packs-per-step", "16", "--rounds", "2"])
    out = capsys.readouterr().out
    match = re.search(r"an epoch draws ([\d,]+)", out)
    assert match is not None
    assert int(match[1].replace(",", "")) > 20000
    errors = re.findall(r"^  (\S+) .*largest error .*: ([\d.]+)%, ([\d.]+)%", out, re.MULTILINE)
    names = ["packtool", "datasets.interleave_datasets"]
    assert [name for name, _, _ in errors] == 2 * names
    for _, error, error_of_large in errors:
        assert 0 < float(error_of_large) <= float(error) < 60
    assert float(errors[0][1]) < float(errors[1][1])
    assert float(errors[2][1]) < float(errors[3][1])
    assert len(re.findall(r"CPU seconds per million samples \([\d.]+ to [\d.]+\)", out)) == 6


def test_largest_errors(bench: ModuleType) -> None:
    """100 steps of one source and then 100 of the other, compared with alternating steps."""
    steps, halves = np.arange(200), np.array([0.5, 0.5])
    assert bench.largest_errors(np.arange(200) // 100, steps, halves) == pytest.approx([1, 1])
    assert bench.largest_errors(np.arange(200) % 2, steps, halves) == pytest.approx([0, 0])
