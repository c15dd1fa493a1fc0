"""The course of a training run as one picture: ``OUTPUT_DIR/curves.png`` from ``OUTPUT_DIR/metrics.jsonl``."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from packtool.report.plot import DOTS_PER_INCH, MOST_LINES, Line, Numbers, Panel, draw_panels
from packtool.visible import visible_line

CURVES_NAME = "curves.png"

_FEWEST_TO_SMOOTH = 30
_SMOOTHED_OVER = 40
"""A curve is smoothed so far that about so many separate values are left."""

_LONGEST_NAME = 18

Records = Sequence[Mapping[str, Any]]


def write_curves(metrics_path: str, output_dir: str) -> str | None:
    """Draw loss, learning rate, gradient norm, speed, fill and token accuracy against the optimizer steps.

    Losses of channels (``loss_<name>``) and of an evaluation (``eval_loss``) are drawn where there are any; what the
    log does not have is left out.

    Args:
        metrics_path: a JSON object a line with ``step`` and figures; a broken last line is passed over.
        output_dir: where the picture goes.

    Returns:
        the picture's path; None if there is nothing to draw.

    Raises:
        OSError: if the one cannot be read or the other not be written.
    """
    records = list(_records(metrics_path))
    panels = [panel for panel in _panels(records) if panel is not None]
    if not panels:
        return None
    steps = max(int(record["step"]) for record in records)
    name = os.path.basename(os.path.abspath(output_dir))
    smooth = "; pale: as logged, dark: smoothed" if len(records) >= _FEWEST_TO_SMOOTH else ""
    subtitle = f"{len(records):,} log line{'s' if len(records) > 1 else ''} up to step {steps:,}{smooth}"
    image = draw_panels(panels, f"Training of {name}", subtitle, "optimizer step")
    path = os.path.join(output_dir, CURVES_NAME)
    image.save(path + ".tmp", format="PNG", optimize=True, dpi=(DOTS_PER_INCH, DOTS_PER_INCH))
    os.replace(path + ".tmp", path)
    return path


def smoothed(values: Numbers) -> Numbers:
    """Means over neighbours with the weights of a bell, (N,); it follows the curve without lagging behind it.

    Values that are not finite weigh nothing, and stay what they are.
    """
    width = max(len(values) / _SMOOTHED_OVER / 2, 1.0)
    reach = math.ceil(3 * width)
    bell = np.exp(-0.5 * np.square(np.arange(-reach, reach + 1) / width))
    finite = np.isfinite(values)
    known = np.pad(np.where(finite, values, 0.0), reach)
    sums = np.convolve(known, bell, "valid")
    weights = np.convolve(np.pad(finite.astype(np.float64), reach), bell, "valid")
    return np.where(finite, sums / np.maximum(weights, 1e-12), values)


def _records(path: str) -> Iterator[dict[str, Any]]:
    """Objects with a step; a run that was killed may have left half a line."""
    with open(path, encoding="utf-8") as file:
        for text in file:
            try:
                record = json.loads(text)
            except ValueError:
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield record


def _panels(records: Records) -> Iterator[Panel | None]:
    evaluated = _line(records, "eval_loss", "evaluation", kind="marks", colour=1)
    yield _smooth_panel(records, "loss", "loss, mean over target tokens", further=evaluated)
    channels = sorted({name for record in records for name in record if name.startswith("loss_")})
    yield _channel_panel(records, channels)
    yield _panel("learning rate", [_line(records, "learning_rate")], floor=0.0)
    yield _smooth_panel(records, "grad_norm", "gradient norm before clipping", floor=0.0)
    speeds = {"tokens_per_second": "all", "target_tokens_per_second": "targets"}
    lines = [_line(records, name, label, colour=i, smooth=True) for i, (name, label) in enumerate(speeds.items())]
    yield _panel("tokens per second", lines, floor=0.0)
    fills = [record["fill"] for record in records if _is_number(record.get("fill"))]
    floor = min(math.floor(10 * min(fills, default=0)) / 10, 0.9)
    yield _smooth_panel(records, "fill", "fill: true tokens of those computed", floor=floor, ceiling=1.0, is_share=True)
    yield _smooth_panel(records, "token_accuracy", "token accuracy", is_share=True)


def _smooth_panel(
    records: Records,
    name: str,
    title: str,
    *,
    further: Line | None = None,
    floor: float | None = None,
    ceiling: float | None = None,
    is_share: bool = False,
) -> Panel | None:
    """A figure as it was logged, and smoothed where there is enough of it."""
    raw = _line(records, name)
    lines = [raw]
    if raw is not None and len(raw.x) >= _FEWEST_TO_SMOOTH:
        label = "training" if further is not None else ""
        lines = [Line(raw.x, raw.y, kind="pale"), Line(raw.x, smoothed(raw.y), label)]
    return _panel(title, [*lines, further], floor=floor, ceiling=ceiling, is_share=is_share)


def _channel_panel(records: Records, names: Sequence[str]) -> Panel | None:
    """Losses by channel; of many the most often seen."""
    count = {name: sum(name in record for record in records) for name in names}
    shown = sorted(sorted(names, key=lambda name: -count[name])[:MOST_LINES])
    lines = [
        _line(records, name, _short(name.removeprefix("loss_")), colour=i, smooth=True) for i, name in enumerate(shown)
    ]
    left_out = f" ({len(shown)} of {len(names)})" if len(shown) < len(names) else ""
    return _panel(f"loss by channel, smoothed{left_out}", lines)


def _panel(
    title: str,
    lines: Sequence[Line | None],
    *,
    floor: float | None = None,
    ceiling: float | None = None,
    is_share: bool = False,
) -> Panel | None:
    """None where no line has anything to show."""
    there = [line for line in lines if line is not None]
    if not any(np.isfinite(line.y).any() for line in there):
        return None
    lost = max(int(np.count_nonzero(~np.isfinite(line.y))) for line in there)
    warning = f"{lost:,} value{'s' if lost > 1 else ''} not finite" if lost else ""
    return Panel(title, [line for line in there if np.isfinite(line.y).any()], floor, ceiling, is_share, warning)


def _line(
    records: Records, name: str, label: str = "", *, kind: Any = "dark", colour: int = 0, smooth: bool = False
) -> Line | None:
    """A figure of all lines that have it; None if none does."""
    found = [(record["step"], record[name]) for record in records if _is_logged(record.get(name))]
    if not found:
        return None
    x, y = (np.array(column, np.float64) for column in zip(*found, strict=True))
    return Line(x, smoothed(y) if smooth and len(y) >= _FEWEST_TO_SMOOTH else y, label, kind, colour)


def _is_logged(value: Any) -> bool:
    return isinstance(value, (int, float))


def _is_number(value: Any) -> bool:
    return _is_logged(value) and math.isfinite(value)


def _short(name: str) -> str:
    name = visible_line(name)
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"
