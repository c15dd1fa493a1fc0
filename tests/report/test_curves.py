"""The picture of a run: what is drawn of a log, and that nothing in a log stops it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from packtool.report import curves
from packtool.report.curves import charts_of, draw_charts, smoothed, write_curves
from packtool.report.drawing import Chart, Note
from packtool.report.drawing import Path as Curve


def write_log(folder: Path, records: list[dict[str, Any]], tail: str = "") -> str:
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    return str(path)


def record(step: int, **further: float) -> dict[str, Any]:
    """Return a log line as training writes it."""
    return {
        "step": step,
        "loss": 2.0 + math.exp(-step / 40),
        "learning_rate": 1e-5 * step,
        "grad_norm": 1.0 + step % 3,
        "tokens_per_second": 4000.0 + step % 7,
        "target_tokens_per_second": 1000.0 + step % 5,
        "fill": 0.99,
        "token_accuracy": 0.5,
        "seconds": 1.0,
        **further,
    }


@pytest.fixture
def charts(monkeypatch: pytest.MonkeyPatch) -> list[Chart]:
    """Collect the charts of the last image."""
    shown_charts: list[Chart] = []

    def draw(charts: list[Chart], *args: Any) -> Image.Image:
        shown_charts[:] = charts
        return draw_charts(charts, *args)

    monkeypatch.setattr(curves, "draw_charts", draw)
    return shown_charts


def titles(charts: list[Chart]) -> list[str]:
    return [chart.y.name for chart in charts]


def lines(chart: Chart) -> list[tuple[str, str, int]]:
    """Return style, name and number of points of each path."""
    return [
        (shape.style, shape.name, sum(map(len, shape.strokes))) for shape in chart.shapes if isinstance(shape, Curve)
    ]


def test_every_figure_has_a_chart(tmp_path: Path, charts: list[Chart]) -> None:
    records = [record(step, loss_web=2.5, loss_books=2.0) for step in range(1, 101)]
    records.insert(50, {"step": 50, "eval_loss": 2.4})
    path = write_curves(write_log(tmp_path, records), str(tmp_path))
    assert path == str(tmp_path / "curves.png")
    assert titles(charts) == [
        "loss, mean over target tokens, in nats",
        "loss by channel, in nats, smoothed",
        "learning rate",
        "gradient norm before clipping",
        "throughput in tokens per second",
        "fill: computed tokens that are not padding",
        "token accuracy",
    ]
    loss, channels, _, _, speeds, fill, _ = charts
    assert lines(loss) == [
        ("pale", "", 100),
        ("c0", "training", 100),
        ("c1 solid", "evaluation", 1),
        ("c1 solid", "", 1),
    ]
    assert [name for _, name, _ in lines(channels)] == ["books", "web"]
    assert [name for _, name, _ in lines(speeds)] == ["all", "targets"]
    assert (fill.y.low, fill.y.high, fill.y.ticks[-1]) == (90, 100, (100, "100%"))
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.width / image.info["dpi"][0] == pytest.approx(8.27, abs=0.01)  # inches of an A4 page
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24)}
    assert {(255, 255, 255), (0x12, 0x40, 0x8F), (0xC2, 0x57, 0x0C)} <= colours
    assert sorted(file.name for file in tmp_path.iterdir()) == ["curves.png", "metrics.jsonl"]


def test_loss_weights_add_a_chart_of_the_objective() -> None:
    records = [record(step, objective=1.5) for step in range(1, 5)]
    assert titles(charts_of(records))[:3] == [
        "loss, mean over target tokens, in nats",
        "objective: the loss that training minimizes, in nats",
        "learning rate",
    ]


def test_missing_figures_have_no_chart(tmp_path: Path, charts: list[Chart]) -> None:
    assert write_curves(write_log(tmp_path, [{"step": 3, "loss": 1.0, "learning_rate": 0.0}]), str(tmp_path))
    assert titles(charts) == ["loss, mean over target tokens, in nats", "learning rate"]
    assert charts[0].notes == []
    assert lines(charts[0]) == [("c0", "", 1), ("c0", "", 1)], "a line, and a mark at each of few points"


def test_curves_in_one_chart_have_names(tmp_path: Path, charts: list[Chart]) -> None:
    records = [{"step": step, "loss": 1.0} for step in range(1, 20)] + [{"step": 19, "eval_loss": 1.5}]
    assert write_curves(write_log(tmp_path, records), str(tmp_path))
    assert [name for _, name, _ in lines(charts[0]) if name] == ["training", "evaluation"]


@pytest.mark.parametrize("records", [[], [{"step": 1, "epoch": 1.0}], [{"step": 1, "loss": math.nan}], [{"loss": 1.0}]])
def test_empty_data_draws_no_chart(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    assert write_curves(write_log(tmp_path, records), str(tmp_path)) is None
    assert not (tmp_path / "curves.png").exists()


def test_incomplete_lines_and_values_that_are_not_finite(tmp_path: Path, charts: list[Chart]) -> None:
    records = [record(step) for step in range(1, 41)]
    records[7]["loss"] = math.nan
    records[8]["loss"] = math.inf
    records[9]["fill"] = "none"
    assert write_curves(write_log(tmp_path, records, '{"step": 41, "lo'), str(tmp_path))
    assert charts[0].notes == [Note(1000, [("", "2 values not finite")])]
    assert [num_points for _, _, num_points in lines(charts[0])] == [38, 38]


def test_the_most_frequent_of_many_channels(tmp_path: Path, charts: list[Chart]) -> None:
    records = [record(step, loss_every=1.0, **{f"loss_c{step % 11:02}": 1.0}) for step in range(1, 50)]
    assert write_curves(write_log(tmp_path, records), str(tmp_path))
    assert charts[1].y.name == "loss by channel, in nats, smoothed (8 of 12 channels)"
    assert "every" in [name for _, name, _ in lines(charts[1])]


def test_a_long_run_keeps_its_spikes() -> None:
    records = [{"step": step, "learning_rate": 9.0 if step == 31_234 else 1.0} for step in range(50_000)]
    image = draw_charts(charts_of(records), "title", "subtitle")
    dark = np.asarray(image.convert("L")) < 100
    rows = np.flatnonzero(dark[150:, 130:1600].any(axis=1))
    assert rows.max() - rows.min() > 200  # from the curve up to the spike


def test_smoothing_follows_the_curve() -> None:
    straight = np.arange(200.0)
    np.testing.assert_allclose(smoothed(straight)[20:-20], straight[20:-20], atol=1e-9)
    np.testing.assert_allclose(smoothed(np.full(50, 3.0)), 3.0)
    noisy = straight + np.where(np.arange(200) % 2, 1.0, -1.0)
    assert np.abs(smoothed(noisy) - straight)[20:-20].max() < 0.05
    holed = np.where(np.arange(50) == 20, math.nan, 3.0)
    assert math.isnan(smoothed(holed)[20])
    np.testing.assert_allclose(np.delete(smoothed(holed), 20), 3.0)


def test_fill_of_full_packs_only(tmp_path: Path, charts: list[Chart]) -> None:
    records = [record(step, fill=1.0, token_accuracy=1.0) for step in range(1, 4)]
    assert write_curves(write_log(tmp_path, records), str(tmp_path))
    assert (charts[-2].y.low, charts[-2].y.high) == (90, 100)
