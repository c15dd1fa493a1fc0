"""The benchmark of sequence parallelism: memory falls, what is sent is what was reckoned, and cuts are told apart."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.scripts.loading import load_script


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    torch.set_num_threads(1)
    return load_script("bench_sequence_parallel")


def test_quick_run(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(["--quick"])
    out = capsys.readouterr().out
    row = r"^([a-z ]+?) +(\d) +([\d,]+) +\d+ +([\d.]+) +\d+ +[\d.]+ +[\d.]+ +[\d.]+(?: +([\d.]+) +([\d.]+) +([\d.]+))?$"
    rows = {match[1]: match for match in re.finditer(row, out, re.MULTILINE)}
    assert list(rows) == ["packed", "padded", "ulysses", "ring", "allgather", "whole documents"]
    assert [match[2] for match in rows.values()] == ["1", "1", "2", "2", "2", "2"]
    assert [match[3] for match in rows.values()] == ["256", "384", "128", "128", "128", "128"]
    ratios = {name: float(match[4]) for name, match in rows.items()}
    assert ratios["padded"] > ratios["packed"] == 1
    for name in ("ulysses", "ring", "allgather"):
        assert 0.45 < ratios[name] < 0.55
        # As counted, and as the choice of axes reckons.
        assert rows[name][5] == rows[name][6]
    assert float(rows["ring"][7]) > float(rows["allgather"][7]) > float(rows["ring"][5])
    assert re.search(r"every way computes the loss of P = 1 \(largest difference \de-0[6-9]\)", out)
    assert re.search(r"^every document in zigzag +1\.00 +1\.00 +1\.00 +1\.00$", out, re.MULTILINE)
    assert re.search(r"^the sequence in equal parts +([2-9]\.\d\d|1\.[3-9]\d) ", out, re.MULTILINE)


def test_a_process_that_fails_ends_the_run(bench: ModuleType, tmp_path: Path) -> None:
    work = bench.Work((8, 6), "tiny", "cpu")
    with bench.Ranks(work, 2, tmp_path) as ranks, pytest.raises(RuntimeError, match="no such way over 2: a process"):
        ranks.step("no such way")


def test_cuts_of_one_document(bench: ModuleType) -> None:
    # Two ranks, four chunks of two tokens: 1 + 2, 3 + 4, 5 + 6, 7 + 8 pairs.
    works_by_cut = {name: works.tolist() for name, works in bench.cuts_of([8], 2)}
    assert works_by_cut == {
        "every document in zigzag": [18, 18],
        "the sequence in zigzag": [18, 18],
        "the sequence in equal parts": [10, 26],
    }


def test_a_loss_that_differs_ends_the_run(bench: ModuleType) -> None:
    class Ranks:
        size = 2

    step = bench.Step(8, 8, 1.0, 0, 0.0, 0.0, 0.0)
    other = bench.Step(8, 8, 1.001, 0, 0.0, 0.0, 0.0)
    variants = [bench.Way("packed", Ranks(), [step]), bench.Way("ring", Ranks(), [other])]
    with pytest.raises(SystemExit, match=r"ring on 2: the loss is off by 1\.0e-03"):
        bench.check_losses(variants, 1e-5)
