"""The benchmark of sample losses: it runs, and swaps as many answers as it says."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from types import ModuleType

import pytest

from packtool.demo.model import make_model
from tests.scripts.loading import load_script


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_script("bench_sample_losses")


def test_shares_are_printed(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(["--rows", "100", "--rounds", "0"])
    out = capsys.readouterr().out
    assert re.match(r"demo: 100 samples, 2 with a swapped answer, \d+ steps", out)
    assert re.findall(r"^  epoch (\d): \d+% of them among the 5% highest", out, re.MULTILINE) == ["1", "2"]


def test_shares_of_real_rows_are_printed(
    bench: ModuleType, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model(str(tmp_path / "model"), 0)
    rows = data / "text_gpteacher_toolformer.jsonl"
    bench.main(["--rows", "0", "--real-model", str(tmp_path / "model"), "--real-file", str(rows), "--real-rows", "50"])
    out = capsys.readouterr().out
    assert re.match(r"real: 50 samples, 2 with a swapped answer, \d+ steps", out)
    assert re.findall(r"^  epoch (\d): \d+% of them among the 5% highest", out, re.MULTILINE) == ["1", "2"]


def test_answers_are_swapped_in_pairs(bench: ModuleType) -> None:
    rows = [
        {"messages": [{"role": "user", "content": str(n)}, {"role": "assistant", "content": str(n // 2)}]}
        for n in range(200)
    ]
    before = copy.deepcopy(rows)
    swapped = bench.swap_answers(rows)
    assert len(swapped) == 4
    assert {n for n, (row, old) in enumerate(zip(rows, before, strict=True)) if row != old} == swapped
    assert sorted(row["messages"][1]["content"] for row in rows) == sorted(
        row["messages"][1]["content"] for row in before
    )
