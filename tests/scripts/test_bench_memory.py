"""The benchmark of memory compares estimates with steps."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.scripts.loading import load_script


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_script("bench_memory")


def test_a_row_for_each_family(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(["--families", "qwen3", "qwen3-omni"])
    memory, planned = capsys.readouterr().out.split("\n\n")
    assert len(planned.splitlines()) == 2 + len(bench._PLANNED), "a heading, titles, and the settings"
    _, _, *rows = memory.splitlines()
    assert [row.split()[0] for row in rows] == ["qwen3", "qwen3-omni"]
    errors = [word for row in rows for word in row.split() if "%" in word or word == "-"]
    assert errors[-2:] == ["-", "-"], "no trees and no ranks for sounds"
    assert len(errors) == 12
    is_far_off = [abs(float(error.strip("%"))) >= 5 for error in errors[:-2]]
    # Only what recomputed sounds allocate may differ more: it depends on the CPU.
    assert not any(is_far_off[:8] + is_far_off[9:])
    assert abs(float(errors[8].strip("%"))) < 15
