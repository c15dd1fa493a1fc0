"""The course of a training run as one picture: ``OUTPUT_DIR/curves.png`` from ``OUTPUT_DIR/metrics.jsonl``.

Charts on paper: small multiples below one another as one picture, drawn with Pillow.

At 200 dots per inch a picture is as wide as an A4 page, letters are of eight points, and curves that share a chart
differ in darkness and in dashes, not in colour alone. Everything is drawn twice as large and shrunk, since Pillow's
lines have steps otherwise.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from packtool.config.settings import load_json
from packtool.report.drawing import SIZE, Axis, Box, Chart, Note, Path, Point
from packtool.visible import visible_line

DOTS_PER_INCH = 200
_SCALE = 2
_WIDTH, _HEAD, _ROW = 1654, 118, 430  # pixels of the picture, of its title, of a row of charts
_LEFT, _RIGHT, _TOP, _BOTTOM = 118, 44, 62, 84  # around a chart
_SMALL, _NORMAL, _LARGE = 22, 25, 34
_INK, _GREY, _WARNING = "#111827", "#4b5563", "#b91c1c"
_COLOURS = ("#12408f", "#c2570c", "#0f766e", "#7e22ce", "#a16207", "#be185d", "#475569", "#4d7c0f")
_DASHES: tuple[tuple[int, int] | None, ...] = (None, (18, 9), (6, 7), (28, 8))
MOST_COLOURS = len(_COLOURS)


@dataclass(frozen=True)
class _Pen:
    """What a look means on paper: colour, width, and (drawn, free) of dashes, in pixels."""

    colour: str
    width: float = 3
    dashes: tuple[int, int] | None = None


_PENS = {f"c{i}": _Pen(colour, dashes=_DASHES[i % len(_DASHES)]) for i, colour in enumerate(_COLOURS)}
_PENS |= {f"c{i} solid": _Pen(colour) for i, colour in enumerate(_COLOURS)}
_PENS |= {"pale": _Pen("#a9bfe4", 1.5), "grid": _Pen("#e2e5ea", 1.5), "axis": _Pen(_GREY, 1.5), "bar": _Pen("#12408f")}


@dataclass(frozen=True)
class _Place:
    """Where a chart's axes stand, in pixels of the picture."""

    left: float
    top: float
    right: float
    bottom: float

    def at(self, point: Point) -> Point:
        """A point of the chart in pixels."""
        x, y = (part / SIZE for part in point)
        return self.left + x * (self.right - self.left), self.top + y * (self.bottom - self.top)


def draw_charts(charts: Sequence[Chart], title: str, subtitle: str) -> Image.Image:
    """The first chart over the whole width, the others in pairs below."""
    num_rows = 1 + math.ceil((len(charts) - 1) / 2)
    size = (_WIDTH * _SCALE, (_HEAD + num_rows * _ROW) * _SCALE)
    image = Image.new("RGB", size, "white")
    canvas = _Canvas(ImageDraw.Draw(image))
    canvas.text((_LEFT, 44), title, _LARGE, _INK, "lm")
    canvas.text((_LEFT, 88), subtitle, _SMALL, _GREY, "lm")
    for number, chart in enumerate(charts):
        row, column = divmod(number + 1, 2) if number else (0, 0)
        left, top = column * _WIDTH // 2, _HEAD + row * _ROW
        right = left + _WIDTH // 2 if number else _WIDTH
        names = (canvas.width(shape.name, _SMALL) for shape in chart.shapes if isinstance(shape, Path) and shape.name)
        right -= _RIGHT + max(names, default=0)
        _draw_chart(canvas, chart, _Place(left + _LEFT, top + _TOP, right, top + _ROW - _BOTTOM))
    return image.reduce(_SCALE)


def _draw_chart(canvas: _Canvas, chart: Chart, place: _Place) -> None:
    above = place.top - _TOP + 30
    canvas.text((place.left, above), chart.y.name, _NORMAL, _INK, "lm")
    for note in chart.notes:
        x, _ = place.at((note.at, 0))
        canvas.text((x, above), " ".join(text for _, text in note.texts), _SMALL, _WARNING, "rm")
    for shape in chart.drawing.shapes:
        if isinstance(shape, Path):
            for stroke in shape.strokes:
                canvas.stroke([place.at(point) for point in stroke], _PENS[shape.look])
        elif isinstance(shape, Box):
            end = (shape.x + shape.width, shape.y + shape.height)
            canvas.box(place.at((shape.x, shape.y)), place.at(end), _PENS[shape.look].colour)
    for at, label in chart.y.places:
        x, y = place.at((0, SIZE - at))
        canvas.text((x - 12, y), label, _SMALL, _GREY, "rm")
    for at, label in chart.x.places:
        x, y = place.at((at, SIZE))
        canvas.stroke([(x, y), (x, y + 8)], _PENS["axis"])
        canvas.text((x, y + 14), label, _SMALL, _GREY, "ma")
    canvas.text(((place.left + place.right) / 2, place.bottom + 44), chart.x.name, _SMALL, _GREY, "ma")
    _name_curves(canvas, [shape for shape in chart.shapes if isinstance(shape, Path) and shape.name], place)


def _name_curves(canvas: _Canvas, curves: Sequence[Path], place: _Place) -> None:
    """Names behind the curves' last points, moved apart where curves end close to one another."""
    ends = sorted(((place.at(curve.strokes[-1][-1])[1], curve) for curve in curves), key=lambda end: end[0])
    places: list[float] = []
    for at, _ in ends:
        places.append(max(at, places[-1] + _SMALL + 4) if places else at)
    # What was pushed out of the chart pushes the others back up.
    limit = place.bottom
    for number in reversed(range(len(places))):
        places[number] = min(places[number], limit)
        limit = places[number] - _SMALL - 4
    for at_name, (at, curve) in zip(places, ends, strict=True):
        colour = _PENS[curve.look].colour
        canvas.stroke([(place.right + 3, at), (place.right + 12, at_name)], _Pen(colour, 1.5))
        canvas.text((place.right + 16, at_name), curve.name, _SMALL, colour, "lm")


class _Canvas:
    """Pillow's drawing in pixels of the finished picture."""

    def __init__(self, draw: ImageDraw.ImageDraw) -> None:
        self._draw = draw

    def text(self, place: tuple[float, float], text: str, size: int, colour: str, anchor: str) -> None:
        """Where ``anchor`` is Pillow's: horizontal l, m or r, vertical m or a (top)."""
        x, y = place
        self._draw.text((x * _SCALE, y * _SCALE), text, fill=colour, font=_font(size), anchor=anchor)

    def width(self, text: str, size: int) -> int:
        """Pixels that a text takes."""
        return math.ceil(self._draw.textlength(text, font=_font(size)) / _SCALE)

    def stroke(self, points: Sequence[Point], pen: _Pen) -> None:
        """A line through all points, whole or in dashes; a single point is a square."""
        if len(points) == 1:
            (x, y), half = points[0], 5
            self.box((x - half, y - half), (x + half, y + half), pen.colour)
        for part in _dashed(points, pen.dashes) if pen.dashes else [points]:
            scaled = [(x * _SCALE, y * _SCALE) for x, y in part]
            self._draw.line(scaled, fill=pen.colour, width=round(pen.width * _SCALE), joint="curve")

    def box(self, start: Point, end: Point, colour: str) -> None:
        """A filled rectangle between two corners."""
        self._draw.rectangle([part * _SCALE for part in (*start, *end)], fill=colour)


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow brings a font of its own, so that a picture is the same on every machine."""
    return ImageFont.load_default(size * _SCALE)


def _dashed(points: Sequence[tuple[float, float]], dashes: tuple[int, int]) -> Iterator[list[tuple[float, float]]]:
    """The drawn stretches of a line."""
    drawn, left = True, float(dashes[0])
    part = [points[0]]
    for (x, y), (next_x, next_y) in pairwise(points):
        length = math.hypot(next_x - x, next_y - y)
        done = 0.0
        while length - done > left:
            done += left
            at = (x + (next_x - x) * done / length, y + (next_y - y) * done / length)
            if drawn:
                yield [*part, at]
            drawn, part = not drawn, [at]
            left = float(dashes[0] if drawn else dashes[1])
        left -= length - done
        part.append((next_x, next_y))
    if drawn and len(part) > 1:
        yield part


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
