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
from packtool.report.curves import smoothed, write_curves
from packtool.report.plot import Line, Panel, draw_panels, ticks


def write_log(folder: Path, records: list[dict[str, Any]], tail: str = "") -> str:
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    return str(path)


def record(step: int, **further: float) -> dict[str, Any]:
    """A log line as training writes it."""
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
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Panel]:
    """The panels of the last picture."""
    seen: list[Panel] = []

    def draw(panels: list[Panel], *args: Any) -> Image.Image:
        seen[:] = panels
        return draw_panels(panels, *args)

    monkeypatch.setattr(curves, "draw_panels", draw)
    return seen


def titles(panels: list[Panel]) -> list[str]:
    return [panel.title for panel in panels]


def test_every_quantity_has_a_panel_in_one_picture(tmp_path: Path, drawn: list[Panel]) -> None:
    records = [record(step, loss_web=2.5, loss_books=2.0) for step in range(1, 101)]
    records.insert(50, {"step": 50, "eval_loss": 2.4})
    path = write_curves(write_log(tmp_path, records), str(tmp_path))
    assert path == str(tmp_path / "curves.png")
    assert titles(drawn) == [
        "loss, mean over target tokens",
        "loss by channel, smoothed",
        "learning rate",
        "gradient norm before clipping",
        "tokens per second",
        "fill: true tokens of those computed",
        "token accuracy",
    ]
    loss, channels, _, _, speeds, fill, _ = drawn
    assert [(line.kind, line.name, len(line.x)) for line in loss.lines] == [
        ("pale", "", 100),
        ("dark", "training", 100),
        ("marks", "evaluation", 1),
    ]
    assert [line.name for line in channels.lines] == ["books", "web"]
    assert [line.name for line in speeds.lines] == ["all", "targets"]
    assert (fill.floor, fill.ceiling, fill.is_share) == (0.9, 1.0, True)
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.width / image.info["dpi"][0] == pytest.approx(8.27, abs=0.01)  # inches of an A4 page
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24)}
    assert {(255, 255, 255), (0x12, 0x40, 0x8F), (0xC2, 0x57, 0x0C)} <= colours
    assert sorted(file.name for file in tmp_path.iterdir()) == ["curves.png", "metrics.jsonl"]


def test_what_the_log_does_not_have_is_left_out(tmp_path: Path, drawn: list[Panel]) -> None:
    assert write_curves(write_log(tmp_path, [{"step": 3, "loss": 1.0, "learning_rate": 0.0}]), str(tmp_path))
    assert titles(drawn) == ["loss, mean over target tokens", "learning rate"]
    assert drawn[0].warning == ""
    assert len(drawn[0].lines) == 1


@pytest.mark.parametrize("records", [[], [{"step": 1, "epoch": 1.0}], [{"step": 1, "loss": math.nan}], [{"loss": 1.0}]])
def test_nothing_to_draw(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    assert write_curves(write_log(tmp_path, records), str(tmp_path)) is None
    assert not (tmp_path / "curves.png").exists()


def test_half_a_line_and_values_that_are_no_numbers(tmp_path: Path, drawn: list[Panel]) -> None:
    records = [record(step) for step in range(1, 41)]
    records[7]["loss"] = math.nan
    records[8]["loss"] = math.inf
    records[9]["fill"] = "none"
    assert write_curves(write_log(tmp_path, records, '{"step": 41, "lo'), str(tmp_path))
    assert drawn[0].warning == "2 values not finite"
    raw, smooth = drawn[0].lines
    assert np.isfinite(raw.y).sum() == np.isfinite(smooth.y).sum() == 38


def test_the_most_frequent_of_many_channels(tmp_path: Path, drawn: list[Panel]) -> None:
    records = [record(step, loss_every=1.0, **{f"loss_c{step % 11:02}": 1.0}) for step in range(1, 50)]
    assert write_curves(write_log(tmp_path, records), str(tmp_path))
    assert drawn[1].title == "loss by channel, smoothed (8 of 12)"
    assert "every" in [line.name for line in drawn[1].lines]


def test_a_long_run_keeps_its_spikes() -> None:
    y = np.ones(50_000)
    y[31_234] = 9.0
    image = draw_panels([Panel("p", [Line(np.arange(50_000.0), y)])], "title", "subtitle", "step")
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


@pytest.mark.parametrize(
    ("low", "high", "settings", "labels"),
    [
        (0, 1.04e-4, {}, ["0", "2.5e-5", "5e-5", "7.5e-5", "1e-4"]),
        (0.9, 1.0, {"is_share": True}, ["90%", "92%", "94%", "96%", "98%", "100%"]),
        (0, 363, {"whole": True}, ["0", "100", "200", "300"]),
        (1, 3, {"whole": True}, ["1", "2", "3"]),
        (0, 21_000, {}, ["0", "5,000", "10,000", "15,000", "20,000"]),
        (-1.5, 2.2, {}, ["-1", "0", "1", "2"]),
    ],
)
def test_ticks_are_round(low: float, high: float, settings: dict[str, bool], labels: list[str]) -> None:
    assert [label for _, label in ticks(low, high, 5, **settings)] == labels


def test_nothing_but_full_packs(tmp_path: Path, drawn: list[Panel]) -> None:
    records = [record(step, fill=1.0, token_accuracy=1.0) for step in range(1, 4)]
    assert write_curves(write_log(tmp_path, records), str(tmp_path))
    assert (drawn[-2].floor, drawn[-2].ceiling) == (0.9, 1.0)
