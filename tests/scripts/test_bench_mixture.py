"""The benchmark of mixtures: it runs, and what it says of shares is counted rightly."""

from __future__ import annotations

import re
from types import ModuleType

import numpy as np
import pytest

from tests.scripts.loading import load_script


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_script("bench_mixture")


def test_table_is_printed(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Every source is used up, and comes about as often as the recipe has it in the packed plan and in the peer's."""
    bench.main(["--samples", "20000", "--sources", "3", "--packs-per-step", "16"])
    out = capsys.readouterr().out
    match = re.search(r"an epoch draws ([\d,]+)", out)
    assert match is not None
    assert int(match[1].replace(",", "")) > 20000
    for name in ("packtool --mix", "datasets.interleave_datasets"):
        off = re.search(rf"^{name} .* ([\d.]+)% +([\d.]+)%$", out, re.MULTILINE)
        assert off is not None
        assert 0 < float(off[2]) <= float(off[1]) < 30


def test_largest_deviation(bench: ModuleType) -> None:
    """100 steps of a source, then 100 of the other; and one after the other."""
    steps, halves = np.arange(200), np.array([0.5, 0.5])
    assert bench.furthest(np.arange(200) // 100, steps, halves) == pytest.approx([1, 1])
    assert bench.furthest(np.arange(200) % 2, steps, halves) == pytest.approx([0, 0])
