"""The benchmark of memory compares a trace with the pass itself."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

from tests.scripts.loading import load_script


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_script("bench_memory")


def test_a_row_for_each_family(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(["--families", "qwen3", "qwen3_vl", "qwen3-omni"])
    memory, planned = capsys.readouterr().out.split("\n\n")
    assert len(planned.splitlines()) == 2 + 5, "a heading, titles, and five settings"
    _, _, *rows = memory.splitlines()
    assert [row.split()[0] for row in rows] == ["qwen3", "qwen3_vl"], "sounds need real settings"
    for row in rows:
        differences = [float(percent) for percent in re.findall(r"\(([+-][\d.]+)%\)", row)]
        assert len(differences) == 4
        assert all(abs(difference) < 5 for difference in differences)
