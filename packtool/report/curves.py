"""The curves of a training run as one picture: ``OUTPUT_DIR/curves.png`` from ``OUTPUT_DIR/metrics.jsonl``.

At 200 dots per inch the picture is as wide as an A4 page and letters have eight points. Curves that share a chart
differ in darkness and in dashes, not in colour alone. Everything is drawn twice as large and reduced, because Pillow's
lines are not smooth otherwise.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from packtool.config.settings import load_json
from packtool.report.drawing import CURVE_COLOURS, SIZE, Axis, Chart, Note, Path, Point
from packtool.terminal import escape_line

CURVES_NAME = "curves.png"
_DOTS_PER_INCH = 200
_SCALE = 2  # of all lengths below
_WIDTH, _HEADER, _ROW = 3308, 236, 860  # pixels of the picture, of its title, of a row of charts
_LEFT, _RIGHT, _TOP, _BOTTOM = 236, 88, 124, 168  # margins of a chart
_SMALL, _NORMAL, _LARGE = 44, 50, 68
_THIN, _THICK = 3, 6
_MARK = 10  # half the side of the square that marks a point
_INK, _GREY, _WARNING = (CURVE_COLOURS[name] for name in ("ink", "grey", "warning"))
_MAX_CURVES = 8
_DASHES: tuple[tuple[int, int] | None, ...] = (None, (36, 18), (12, 14), (56, 16))
# Colour, width and dashes (drawn and free length) of each look.
_PENS: dict[str, tuple[str, int, tuple[int, int] | None]] = {
    "pale": (CURVE_COLOURS["pale"], _THIN, None),
    "grid": (CURVE_COLOURS["grid"], _THIN, None),
    "axis": (_GREY, _THIN, None),
}
for _number in range(_MAX_CURVES):
    _PENS[f"c{_number}"] = (CURVE_COLOURS[f"c{_number}"], _THICK, _DASHES[_number % len(_DASHES)])
    _PENS[f"c{_number} solid"] = (CURVE_COLOURS[f"c{_number}"], _THICK, None)

_MIN_TO_SMOOTH = 30
_SMOOTHED_VALUES = 40
"""A smoothed curve has about as many independent values."""
_MAX_NAME_LENGTH = 18
_MAX_POINTS = 750  # of a curve; of more, the minimum and maximum of each group are drawn
_MAX_MARKED_POINTS = 12
_NEAR_ZERO = 0.2  # an axis begins at 0 if its first value is at most this share of the last

Records = Sequence[Mapping[str, Any]]
Numbers = npt.NDArray[np.float64]


def draw_charts(charts: Sequence[Chart], title: str, subtitle: str) -> Image.Image:
    """Draw the first chart over the whole width, the others in pairs below."""
    num_rows = 1 + math.ceil((len(charts) - 1) / 2)
    image = Image.new("RGB", (_WIDTH, _HEADER + num_rows * _ROW), "white")
    draw = ImageDraw.Draw(image)
    draw.text((_LEFT, 88), title, fill=_INK, font=_font(_LARGE), anchor="lm")
    draw.text((_LEFT, 176), subtitle, fill=_GREY, font=_font(_SMALL), anchor="lm")
    for number, chart in enumerate(charts):
        row, column = divmod(number + 1, 2) if number else (0, 0)
        left, top = column * _WIDTH // 2, _HEADER + row * _ROW
        right = left + (_WIDTH // 2 if number else _WIDTH) - _RIGHT
        names = (draw.textlength(path.name, font=_font(_SMALL)) / _SCALE for path in _named(chart))
        right -= _SCALE * max(map(math.ceil, names), default=0)
        _draw_chart(draw, chart, (left + _LEFT, top + _TOP, right, top + _ROW - _BOTTOM))
    return image.reduce(_SCALE)


def _named(chart: Chart) -> list[Path]:
    return [path for path in chart.shapes if isinstance(path, Path) and path.name]


def _draw_chart(draw: ImageDraw.ImageDraw, chart: Chart, box: tuple[int, int, int, int]) -> None:
    """Draw a chart; ``box``: pixels of its left, upper, right and lower end."""
    left, top, right, bottom = box

    def place(point: Point) -> Point:
        x, y = (part / SIZE for part in point)
        return left + x * (right - left), top + y * (bottom - top)

    above, small = top - _TOP + 60, _font(_SMALL)
    draw.text((left, above), chart.y.name, fill=_INK, font=_font(_NORMAL), anchor="lm")
    for note in chart.notes:
        x, _ = place((note.at, 0))
        draw.text((x, above), " ".join(text for _, text in note.texts), fill=_WARNING, font=small, anchor="rm")
    for path in chart.drawing.shapes:
        for stroke in path.strokes if isinstance(path, Path) else ():
            _draw_stroke(draw, [place(point) for point in stroke], *_PENS[path.look])
    for at, label in chart.y.places:
        x, y = place((0, SIZE - at))
        draw.text((x - 24, y), label, fill=_GREY, font=small, anchor="rm")
    for at, label in chart.x.places:
        x, y = place((at, SIZE))
        _draw_stroke(draw, [(x, y), (x, y + 16)], *_PENS["axis"])
        draw.text((x, y + 28), label, fill=_GREY, font=small, anchor="ma")
    draw.text(((left + right) / 2, bottom + 88), chart.x.name, fill=_GREY, font=small, anchor="ma")

    # Names after the curves' last points, moved apart where curves end close to one another.
    ends = sorted(((place(path.strokes[-1][-1])[1], path) for path in _named(chart)), key=lambda end: end[0])
    heights: list[float] = []
    for end, _ in ends:
        heights.append(max(end, heights[-1] + _SMALL + 8) if heights else end)
    limit: float = bottom
    for number in reversed(range(len(heights))):  # names below the chart push the others up again
        heights[number] = min(heights[number], limit)
        limit = heights[number] - _SMALL - 8
    for height, (end, path) in zip(heights, ends, strict=True):
        colour = _PENS[path.look][0]
        _draw_stroke(draw, [(right + 6, end), (right + 24, height)], colour, _THIN, None)
        draw.text((right + 32, height), path.name, fill=colour, font=small, anchor="lm")


def _draw_stroke(
    draw: ImageDraw.ImageDraw, points: Sequence[Point], colour: str, width: int, dashes: tuple[int, int] | None
) -> None:
    """Draw a line through all points; a single point is a square."""
    if len(points) == 1:
        x, y = points[0]
        draw.rectangle([x - _MARK, y - _MARK, x + _MARK, y + _MARK], fill=colour)
    for part in _dashed(points, dashes) if dashes else [points]:
        draw.line(list(part), fill=colour, width=width, joint="curve")


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own font, so that a picture is the same on every machine."""
    return ImageFont.load_default(size)


def _dashed(points: Sequence[Point], dashes: tuple[int, int]) -> Iterator[list[Point]]:
    """The dashes of a line."""
    is_drawn, left = True, float(dashes[0])
    dash = [points[0]]
    for (x, y), (next_x, next_y) in pairwise(points):
        length = math.hypot(next_x - x, next_y - y)
        done = 0.0
        while length - done > left:
            done += left
            at = (x + (next_x - x) * done / length, y + (next_y - y) * done / length)
            if is_drawn:
                yield [*dash, at]
            is_drawn, dash = not is_drawn, [at]
            left = float(dashes[0] if is_drawn else dashes[1])
        left -= length - done
        dash.append((next_x, next_y))
    if is_drawn and len(dash) > 1:
        yield dash


@dataclass(frozen=True, eq=False)
class Curve:
    """A figure along the steps.

    Args:
        x, y: (N,), x rising; the curve is interrupted where y is not finite.
        look: ``pale`` for the background, or ``c0`` to ``c7``, optionally followed by `` solid`` for no dashes.
        name: written at its end; "" for none.
        is_marked: mark every point.
    """

    x: Numbers
    y: Numbers
    look: str = "c0"
    name: str = ""
    is_marked: bool = False


def write_curves(metrics_path: str, output_dir: str) -> str | None:
    """Draw loss, objective, learning rate, gradient norm, speed, fill and token accuracy along the optimizer steps.

    Losses of channels (``loss_<name>``) and of an evaluation (``eval_loss``) are drawn if the log contains them.

    Args:
        metrics_path: a JSON object a line with ``step`` and figures; an incomplete last line is ignored.
        output_dir: directory of the picture.

    Returns:
        the picture's path; None if there is nothing to draw.

    Raises:
        OSError: if the log cannot be read or the picture not be written.
    """
    records = []
    with open(metrics_path, encoding="utf-8") as file:
        for text in file:
            with contextlib.suppress(ValueError):  # a run that was killed may have left an incomplete line
                record = load_json(text)
                if isinstance(record, dict) and isinstance(record.get("step"), int):
                    records.append(record)
    charts = charts_of(records)
    if not charts:
        return None
    last_step = max(int(record["step"]) for record in records)
    name = os.path.basename(os.path.abspath(output_dir))
    smooth = "; pale: as logged, dark: smoothed" if len(records) >= _MIN_TO_SMOOTH else ""
    subtitle = f"{len(records):,} log line{'s' if len(records) > 1 else ''} up to step {last_step:,}{smooth}"
    image = draw_charts(charts, f"Training of {name}", subtitle)
    path = os.path.join(output_dir, CURVES_NAME)
    image.save(path + ".tmp", format="PNG", dpi=(_DOTS_PER_INCH, _DOTS_PER_INCH))
    os.replace(path + ".tmp", path)
    return path


def smoothed(values: Numbers) -> Numbers:
    """Means over neighbours with Gaussian weights, (N,), without delay.

    Values that are not finite have no weight and stay as they are.
    """
    width = max(len(values) / _SMOOTHED_VALUES / 2, 1.0)
    reach = math.ceil(3 * width)
    bell = np.exp(-0.5 * np.square(np.arange(-reach, reach + 1) / width))
    finite = np.isfinite(values)
    known = np.pad(np.where(finite, values, 0.0), reach)
    sums = np.convolve(known, bell, "valid")
    weights = np.convolve(np.pad(finite.astype(np.float64), reach), bell, "valid")
    return np.where(finite, sums / np.maximum(weights, 1e-12), values)


def charts_of(records: Records) -> list[Chart]:
    """The charts of a log, with the optimizer steps as their common axis."""
    evaluated = _curves(records, {"eval_loss": "evaluation"}, look="c1 solid", is_marked=True)
    loss = _smooth_curves(records, "loss", name="training" if evaluated else "")
    count = Counter(name for record in records for name in record if name.startswith("loss_"))
    channels = sorted(count)
    shown = sorted(sorted(channels, key=lambda name: -count[name])[:_MAX_CURVES])
    left_out = f" ({len(shown)} of {len(channels)})" if len(shown) < len(channels) else ""
    channel_names = {}
    for name in shown:
        label = escape_line(name.removeprefix("loss_"))
        channel_names[name] = label if len(label) <= _MAX_NAME_LENGTH else label[: _MAX_NAME_LENGTH - 1] + "…"
    speeds = {"tokens_per_second": "all", "target_tokens_per_second": "targets"}
    fills = [fill for curve in _curves(records, {"fill": ""}) for fill in curve.y if math.isfinite(fill)]
    min_fill = min(math.floor(10 * min(fills, default=0)) * 10, 90)
    charts = [
        _chart(records, "loss, mean over target tokens, in nats", [*loss, *evaluated]),
        _chart(records, "objective: the loss that training minimizes, in nats", _smooth_curves(records, "objective")),
        _chart(records, f"loss by channel, in nats, smoothed{left_out}", _curves(records, channel_names, smooth=True)),
        _chart(records, "learning rate", _curves(records, {"learning_rate": ""}), low=0.0),
        _chart(records, "gradient norm before clipping", _smooth_curves(records, "grad_norm"), low=0.0),
        _chart(records, "tokens per second", _curves(records, speeds, smooth=True), low=0.0),
        _chart(
            records,
            "fill: share of the computed tokens that is not padding",
            _smooth_curves(records, "fill", scale=100),
            low=min_fill,
            high=100,
            suffix="%",
        ),
        _chart(records, "token accuracy", _smooth_curves(records, "token_accuracy", scale=100), suffix="%"),
    ]
    return [chart for chart in charts if chart is not None]


def _chart(
    records: Records,
    title: str,
    curves: Sequence[Curve],
    *,
    low: float | None = None,
    high: float | None = None,
    suffix: str = "",
) -> Chart | None:
    """Curves with a common vertical axis; None if they have no finite value.

    Args:
        title: what is shown, and in which unit.
        low, high: ends of the vertical axis; None for slightly beyond the values.
        suffix: unit after the numbers of the axis.
    """
    shown = [curve for curve in curves if np.isfinite(curve.y).any()]
    if not shown:
        return None
    ends = [end for end in (low, high) if end is not None]
    values = np.concatenate([np.array(ends), *(curve.y[np.isfinite(curve.y)] for curve in shown)])
    lowest, highest = _padded(float(values.min()), float(values.max()), 0.05)
    if suffix == "%":
        lowest, highest = max(lowest, 0.0), min(highest, 100.0)
    y = Axis.over(title, lowest if low is None else low, highest if high is None else high, 5, suffix=suffix)
    first, last = (float(pick(record["step"] for record in records)) for pick in (min, max))
    begin, end = _padded(0.0 if 0 <= first < _NEAR_ZERO * last else first, last, 0.0)
    x = Axis.over("optimizer step", begin, end, 5, integers=True)
    shapes = []
    for curve in shown:
        strokes = list(_strokes(curve, x, y))
        shapes.append(Path(strokes, curve.look, curve.name))
        if curve.is_marked or len(curve.x) <= _MAX_MARKED_POINTS:
            shapes.append(Path([[point] for stroke in strokes for point in stroke], curve.look))
    num_lost = max(int(np.count_nonzero(~np.isfinite(curve.y))) for curve in curves)
    warning = Note(SIZE, [("", f"{num_lost:,} value{'s' if num_lost > 1 else ''} not finite")])
    return Chart(x, y, shapes, [warning] if num_lost else [])


def _strokes(curve: Curve, x: Axis, y: Axis) -> Iterator[list[Point]]:
    """Stretches of finite values in units of the axes, with no more points than can be distinguished."""
    stroke: list[Point] = []
    for at in _drawn_points(curve.y):
        if np.isfinite(curve.y[at]):
            stroke.append((x.at(float(curve.x[at])), SIZE - y.at(float(curve.y[at]))))
        elif stroke:
            yield stroke
            stroke = []
    if stroke:
        yield stroke


def _drawn_points(y: Numbers) -> list[int]:
    """Indices of the minimum and maximum of each group of points if there are many, so that spikes stay visible."""
    size = math.ceil(len(y) / _MAX_POINTS)
    if size <= 2:
        return list(range(len(y)))
    kept: list[int] = []
    for start in range(0, len(y), size):
        group = y[start : start + size]
        # A group without a finite value interrupts the curve.
        extremes = {int(np.nanargmin(group)), int(np.nanargmax(group))} if np.isfinite(group).any() else {0}
        kept += sorted(start + i for i in extremes)
    return kept


def _padded(low: float, high: float, share: float) -> tuple[float, float]:
    """A slightly larger range, which is never empty."""
    if high <= low:
        around = abs(low) * 0.1 or 1.0
        return low - around, high + around
    return low - share * (high - low), high + share * (high - low)


def _smooth_curves(records: Records, figure: str, *, name: str = "", scale: float = 1) -> list[Curve]:
    """A figure as logged and, with enough values, smoothed; ``name``: written at the curve's end."""
    curves = _curves(records, {figure: name}, scale=scale)
    if not curves or len(curves[0].x) < _MIN_TO_SMOOTH:
        return curves
    x, y = curves[0].x, curves[0].y
    return [Curve(x, y, "pale"), Curve(x, smoothed(y), name=name)]


def _curves(
    records: Records,
    names: Mapping[str, str],
    *,
    look: str = "",
    scale: float = 1,
    smooth: bool = False,
    is_marked: bool = False,
) -> list[Curve]:
    """Curves of the figures that the log contains; ``names``: texts at their ends, by figure."""
    curves = []
    for number, (figure, name) in enumerate(names.items()):
        points = [(each["step"], each[figure]) for each in records if isinstance(each.get(figure), (int, float))]
        if points:
            x, y = np.array(points, np.float64).T
            y = smoothed(y) if smooth and len(y) >= _MIN_TO_SMOOTH else y
            curves.append(Curve(x, y * scale, look or f"c{number}", name, is_marked))
    return curves
