"""The course of a training run as one picture: ``OUTPUT_DIR/curves.png`` from ``OUTPUT_DIR/metrics.jsonl``."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.config.yaml_values import load_json
from packtool.report.axes import SIZE, Axis
from packtool.report.drawing import Chart, Note, Path, Point
from packtool.report.picture import DOTS_PER_INCH, MOST_COLOURS, draw_charts
from packtool.visible import visible_line

CURVES_NAME = "curves.png"

_FEWEST_TO_SMOOTH = 30
_SMOOTHED_OVER = 40
"""A curve is smoothed so far that about so many separate values are left."""

_LONGEST_NAME = 18
_MOST_POINTS = 750  # of a curve; of more, the lowest and highest of each few are drawn
_FEW_POINTS = 12  # each is marked
_NEAR_ZERO = 0.2  # an axis whose first value is so small a part of the last begins at 0

Records = Sequence[Mapping[str, Any]]
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Curve:
    """A figure along the steps.

    Args:
        x, y: (N,), x rising; where y is not finite the curve is broken.
        look: ``pale`` behind others, or ``c0`` to ``c7``, with `` solid`` behind it for no dashes.
        name: written at its end; "" for none.
        is_marked: whether every point is.
    """

    x: Numbers
    y: Numbers
    look: str = "c0"
    name: str = ""
    is_marked: bool = False


def write_curves(metrics_path: str, output_dir: str) -> str | None:
    """Draw loss, objective, learning rate, gradient norm, speed, fill and token accuracy against the optimizer steps.

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
    charts = charts_of(records)
    if not charts:
        return None
    steps = max(int(record["step"]) for record in records)
    name = os.path.basename(os.path.abspath(output_dir))
    smooth = "; pale: as logged, dark: smoothed" if len(records) >= _FEWEST_TO_SMOOTH else ""
    subtitle = f"{len(records):,} log line{'s' if len(records) > 1 else ''} up to step {steps:,}{smooth}"
    image = draw_charts(charts, f"Training of {name}", subtitle)
    path = os.path.join(output_dir, CURVES_NAME)
    image.save(path + ".tmp", format="PNG", dpi=(DOTS_PER_INCH, DOTS_PER_INCH))
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
                record = load_json(text)
            except ValueError:
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield record


def charts_of(records: Records) -> list[Chart]:
    """What a log has to show, over one common axis of optimizer steps."""
    evaluated = _curves(records, {"eval_loss": "evaluation"}, look="c1 solid", is_marked=True)
    losses = sorted({name for record in records for name in record if name.startswith("loss_")})
    speeds = {"tokens_per_second": "all", "target_tokens_per_second": "targets"}
    fills = [record["fill"] for record in records if _is_logged(record.get("fill")) and math.isfinite(record["fill"])]
    floor = min(math.floor(10 * min(fills, default=0)) * 10, 90)
    found = [
        _chart(records, "loss, mean over target tokens, in nats", [*_smooth(records, "loss", evaluated), *evaluated]),
        _chart(records, "objective: the loss that training minimizes, in nats", _smooth(records, "objective")),
        _channel_chart(records, losses),
        _chart(records, "learning rate", _curves(records, {"learning_rate": ""}), floor=0.0),
        _chart(records, "gradient norm before clipping", _smooth(records, "grad_norm"), floor=0.0),
        _chart(records, "tokens per second", _curves(records, speeds, smooth=True), floor=0.0),
        _chart(
            records,
            "fill: share of the computed tokens that is not padding",
            _smooth(records, "fill", scale=100),
            floor=floor,
            ceiling=100,
            suffix="%",
        ),
        _chart(records, "token accuracy", _smooth(records, "token_accuracy", scale=100), suffix="%"),
    ]
    return [chart for chart in found if chart is not None]


def _chart(
    records: Records,
    title: str,
    curves: Sequence[Curve],
    *,
    floor: float | None = None,
    ceiling: float | None = None,
    suffix: str = "",
) -> Chart | None:
    """Curves that share a vertical axis; None where none of them has anything to show.

    Args:
        title: what is shown, and in which unit.
        floor, ceiling: where the vertical axis ends; None for just beyond the values.
        suffix: unit behind the numbers of the axis.
    """
    shown = [curve for curve in curves if np.isfinite(curve.y).any()]
    if not shown:
        return None
    ends = [end for end in (floor, ceiling) if end is not None]
    values = np.concatenate([np.array(ends), *(curve.y[np.isfinite(curve.y)] for curve in shown)])
    low, high = _padded(float(values.min()), float(values.max()), 0.05)
    if suffix == "%":
        low, high = max(low, 0.0), min(high, 100.0)
    y = Axis.over(title, low if floor is None else floor, high if ceiling is None else ceiling, 5, suffix=suffix)
    x = _steps(records)
    shapes = []
    for curve in shown:
        strokes = list(_strokes(curve, x, y))
        shapes.append(Path(strokes, curve.look, curve.name))
        if curve.is_marked or len(curve.x) <= _FEW_POINTS:
            shapes.append(Path([[point] for stroke in strokes for point in stroke], curve.look))
    lost = max(int(np.count_nonzero(~np.isfinite(curve.y))) for curve in curves)
    warning = Note(SIZE, [("", f"{lost:,} value{'s' if lost > 1 else ''} not finite")])
    return Chart(x, y, shapes, [warning] if lost else [])


def _steps(records: Records) -> Axis:
    first, last = (float(pick(record["step"] for record in records)) for pick in (min, max))
    low, high = _padded(0.0 if 0 <= first < _NEAR_ZERO * last else first, last, 0.0)
    return Axis.over("optimizer step", low, high, 5, whole=True)


def _strokes(curve: Curve, x: Axis, y: Axis) -> Iterator[list[Point]]:
    """Stretches of finite values in units of the axes, no more points than can be told apart."""
    stroke: list[Point] = []
    for at in _kept(curve.y):
        if np.isfinite(curve.y[at]):
            stroke.append((x.at(float(curve.x[at])), SIZE - y.at(float(curve.y[at]))))
        elif stroke:
            yield stroke
            stroke = []
    if stroke:
        yield stroke


def _kept(y: Numbers) -> list[int]:
    """The lowest and highest of each few points where there are too many to draw, so that no spike is lost."""
    group = math.ceil(len(y) / _MOST_POINTS)
    if group <= 2:
        return list(range(len(y)))
    kept: list[int] = []
    for start in range(0, len(y), group):
        part = y[start : start + group]
        # A stretch without a finite value breaks the curve.
        few = {int(np.nanargmin(part)), int(np.nanargmax(part))} if np.isfinite(part).any() else {0}
        kept += sorted(start + i for i in few)
    return kept


def _padded(low: float, high: float, share: float) -> tuple[float, float]:
    """A little more than from ``low`` to ``high``; never nothing."""
    if high <= low:
        around = abs(low) * 0.1 or 1.0
        return low - around, high + around
    return low - share * (high - low), high + share * (high - low)


def _smooth(records: Records, name: str, beside: Sequence[Curve] = (), scale: float = 1) -> list[Curve]:
    """A figure as it was logged, and smoothed where there is enough of it; named if another curve is beside it."""
    curves = _curves(records, {name: "training" if beside else ""}, scale=scale)
    if not curves or len(curves[0].x) < _FEWEST_TO_SMOOTH:
        return curves
    x, y = curves[0].x, curves[0].y
    return [Curve(x, y, "pale"), Curve(x, smoothed(y), name=curves[0].name)]


def _channel_chart(records: Records, names: Sequence[str]) -> Chart | None:
    """Losses by channel; of many the most often seen."""
    count = {name: sum(name in record for record in records) for name in names}
    shown = sorted(sorted(names, key=lambda name: -count[name])[:MOST_COLOURS])
    left_out = f" ({len(shown)} of {len(names)})" if len(shown) < len(names) else ""
    curves = _curves(records, {name: _short(name.removeprefix("loss_")) for name in shown}, smooth=True)
    return _chart(records, f"loss by channel, in nats, smoothed{left_out}", curves)


def _curves(
    records: Records,
    names: Mapping[str, str],
    *,
    look: str = "",
    scale: float = 1,
    smooth: bool = False,
    is_marked: bool = False,
) -> list[Curve]:
    """Figures of the lines that have them, by name in the log, with the names that are written beside the curves."""
    found = []
    for colour, (name, shown) in enumerate(names.items()):
        points = [(record["step"], record[name]) for record in records if _is_logged(record.get(name))]
        if points:
            x, y = np.array(points, np.float64).T
            y = smoothed(y) if smooth and len(y) >= _FEWEST_TO_SMOOTH else y
            found.append(Curve(x, y * scale, look or f"c{colour}", shown, is_marked))
    return found


def _is_logged(value: Any) -> bool:
    return isinstance(value, (int, float))


def _short(name: str) -> str:
    name = visible_line(name)
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"
