"""The benchmark of packing: it runs, its figures are right, and its plot is one file that any browser shows."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from tests.scripts.loading import load_script


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_script("bench_packing")


def test_table_and_plot(bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "plot.svg"
    bench.main(["--sizes", "500", "100", "--rounds", "2", "--time-limit", "30", "--plot", str(plot)])
    out = capsys.readouterr().out
    for size in ("100", "500"):
        line = re.search(
            rf"^ +{size}  packtool best_fit +[\d.]+ +[\d.]+ to [\d.]+ +(\d+) +([\d.]+)%", out, re.MULTILINE
        )
        assert line is not None
        next_fit = re.search(rf"^ +{size}  next-fit, plain loop +[\d.]+ +[\d.]+ to [\d.]+ +(\d+) ", out, re.MULTILINE)
        assert next_fit is not None
        assert int(line[1]) < int(next_fit[1])
    for packer in bench.PACKERS:
        assert out.count(f"  {packer.name} ") == 2
    svg = ElementTree.parse(plot).getroot()
    text = " ".join(svg.itertext())
    for name in (
        "best_fit",
        "first-fit decreasing",
        "sequential",
        "next-fit",
        "binpacking, thousands",
        "binpacking, whole",
    ):
        assert name in text
    assert "http" not in plot.read_text().replace("http://www.w3.org/2000/svg", "")


def test_slow_algorithms_skip_larger_inputs(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def measure(packer: object, lengths: list[int], capacity: int, time_limit: float) -> str:
        tried.append(len(lengths))
        return f"over {time_limit:g} s"

    monkeypatch.setattr(bench, "measure", measure)
    bench.main(["--sizes", "10", "20"])
    assert set(tried) == {10}


def test_plot_of_lines_that_end_early(bench: ModuleType) -> None:
    svg = bench.draw_plot("<title>", {"a & b": [(10, 0.01), (1000, 2.0)], "slow": [(10, 30.0)], "none": []})
    text = list(ElementTree.fromstring(svg).itertext())
    assert "<title>" in text
    assert "a & b, 2 s" in text
    assert "slow, up to 10" in text
    assert {"10", "100", "1,000", "0.01 s", "100 s"} <= set(text)
