"""Charts of a training run in one image: ``OUTPUT_DIR/curves.png`` from ``OUTPUT_DIR/metrics.jsonl``.

At 200 dots per inch, the image has the width of an A4 page. Everything is drawn at twice the size and then reduced,
because Pillow's lines are not smooth otherwise.
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
from packtool.report.drawing import AXIS_LENGTH, CURVE_COLOURS, Axis, Chart, Note, Path, Point, plural
from packtool.terminal import escape_line

CURVES_NAME = "curves.png"
_DOTS_PER_INCH = 200
_SCALE = 2  # of all lengths below
_WIDTH, _HEADER, _ROW = 3308, 236, 860  # width of the image, height of its title and of a row of charts, in pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 236, 88, 124, 168  # margins of a chart
_SMALL, _NORMAL, _LARGE = 44, 50, 68  # font sizes
_THIN, _THICK = 3, 6  # line widths
_MARK = 10  # half the side of the square that marks a point
_INK, _GREY, _WARNING = (CURVE_COLOURS[name] for name in ("ink", "grey", "warning"))
_MAX_CURVES = 8
_DASHES: tuple[tuple[int, int] | None, ...] = (None, (36, 18), (12, 14), (56, 16))
# Color, width and dashes (lengths of dash and gap) of each style.
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
"""Approximate number of independent values of a smoothed curve."""
_MAX_NAME_LENGTH = 18
_MAX_POINTS = 750  # of a curve; if there are more, the minimum and maximum of each group are drawn
_MAX_MARKED_POINTS = 12
_NEAR_ZERO = 0.2  # the axis of steps begins at 0 if its first value is less than this fraction of the last

Records = Sequence[Mapping[str, Any]]
Numbers = npt.NDArray[np.float64]


def draw_charts(charts: Sequence[Chart], title: str, subtitle: str) -> Image.Image:
    """Draw the first chart over the full width, and the others in pairs below."""
    num_rows = 1 + math.ceil((len(charts) - 1) / 2)
    image = Image.new("RGB", (_WIDTH, _HEADER + num_rows * _ROW), "white")
    draw = ImageDraw.Draw(image)
    draw.text((_LEFT, 88), title, fill=_INK, font=_font(_LARGE), anchor="lm")
    draw.text((_LEFT, 176), subtitle, fill=_GREY, font=_font(_SMALL), anchor="lm")
    for number, chart in enumerate(charts):
        row, column = divmod(number + 1, 2) if number else (0, 0)
        left, top = column * _WIDTH // 2, _HEADER + row * _ROW
        right = left + (_WIDTH // 2 if number else _WIDTH) - _RIGHT
        name_widths = (draw.textlength(path.name, font=_font(_SMALL)) / _SCALE for path in _named_paths(chart))
        right -= _SCALE * max(map(math.ceil, name_widths), default=0)
        _draw_chart(draw, chart, (left + _LEFT, top + _TOP, right, top + _ROW - _BOTTOM))
    return image.reduce(_SCALE)


def _named_paths(chart: Chart) -> list[Path]:
    return [path for path in chart.shapes if isinstance(path, Path) and path.name]


Area = tuple[int, int, int, int]
"""Left, upper, right and lower end of the inner area of a chart, in pixels of the image."""


def _to_pixels(point: Point, area: Area) -> Point:
    """Convert a point in units of the axes (0 to ``AXIS_LENGTH``, y pointing down) to pixels of the image."""
    x, y = point
    left, top, right, bottom = area
    return left + x / AXIS_LENGTH * (right - left), top + y / AXIS_LENGTH * (bottom - top)


def _draw_chart(draw: ImageDraw.ImageDraw, chart: Chart, area: Area) -> None:
    """Draw a chart, its axes and names."""
    # The name of the vertical axis and the notes are above the chart.
    left, top, _, _ = area
    title_y = top - _TOP + 60
    draw.text((left, title_y), chart.y.name, fill=_INK, font=_font(_NORMAL), anchor="lm")
    for note in chart.notes:
        x, _ = _to_pixels((note.x, 0), area)
        note_text = " ".join(text for _, text in note.texts)
        draw.text((x, title_y), note_text, fill=_WARNING, font=_font(_SMALL), anchor="rm")
    for shape in chart.drawing.shapes:  # the shapes of training curves are all paths
        if isinstance(shape, Path):
            for stroke in shape.strokes:
                _draw_stroke(draw, [_to_pixels(point, area) for point in stroke], *_PENS[shape.style])
    _draw_axis_labels(draw, chart, area)
    _draw_curve_names(draw, chart, area)


def _draw_axis_labels(draw: ImageDraw.ImageDraw, chart: Chart, area: Area) -> None:
    """Draw the labels of the ticks of both axes, and the name of the horizontal one."""
    font = _font(_SMALL)
    for tick, label in chart.y.tick_positions:
        x, y = _to_pixels((0, AXIS_LENGTH - tick), area)
        draw.text((x - 24, y), label, fill=_GREY, font=font, anchor="rm")
    for tick, label in chart.x.tick_positions:
        x, y = _to_pixels((tick, AXIS_LENGTH), area)
        _draw_stroke(draw, [(x, y), (x, y + 16)], *_PENS["axis"])
        draw.text((x, y + 28), label, fill=_GREY, font=font, anchor="ma")
    left, _, right, bottom = area
    draw.text(((left + right) / 2, bottom + 88), chart.x.name, fill=_GREY, font=font, anchor="ma")


def _draw_curve_names(draw: ImageDraw.ImageDraw, chart: Chart, area: Area) -> None:
    """Draw the name of each curve right of its last point, moved up or down where names would overlap."""
    _, _, right, bottom = area
    curve_ends = []  # (vertical position of the last point, curve)
    for path in _named_paths(chart):
        _, end_y = _to_pixels(path.strokes[-1][-1], area)
        curve_ends.append((end_y, path))
    curve_ends.sort(key=lambda curve_end: curve_end[0])
    name_ys = _spread_names([end_y for end_y, _ in curve_ends], bottom)
    for name_y, (end_y, path) in zip(name_ys, curve_ends, strict=True):
        color, _, _ = _PENS[path.style]
        _draw_stroke(draw, [(right + 6, end_y), (right + 24, name_y)], color, width=_THIN, dashes=None)
        draw.text((right + 32, name_y), path.name, fill=color, font=_font(_SMALL), anchor="lm")


def _spread_names(ascending_ys: Sequence[float], max_y: float) -> list[float]:
    """Move names apart vertically so that they do not overlap, and none is below ``max_y``; return their positions."""
    name_ys: list[float] = []
    for y in ascending_ys:
        name_ys.append(max(y, name_ys[-1] + _SMALL + 8) if name_ys else y)
    for number in reversed(range(len(name_ys))):
        name_ys[number] = min(name_ys[number], max_y)
        max_y = name_ys[number] - _SMALL - 8
    return name_ys


def _draw_stroke(
    draw: ImageDraw.ImageDraw, points: Sequence[Point], color: str, width: int, dashes: tuple[int, int] | None
) -> None:
    """Draw a line through points, or a square at a single point; ``dashes``: lengths of dash and gap."""
    if len(points) == 1:
        x, y = points[0]
        draw.rectangle([x - _MARK, y - _MARK, x + _MARK, y + _MARK], fill=color)
    for line in _split_into_dashes(points, dashes) if dashes else [points]:
        draw.line(list(line), fill=color, width=width, joint="curve")


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return Pillow's own font, so that images are the same on every machine."""
    return ImageFont.load_default(size)


def _split_into_dashes(points: Sequence[Point], dashes: tuple[int, int]) -> Iterator[list[Point]]:
    """Divide a line through points into dashes and gaps, and yield the points of each dash.

    A dash continues around corners. For example, the line (0, 0), (10, 0) with ``dashes`` (4, 2), the lengths of dash
    and gap, has the dashes (0, 0), (4, 0) and (6, 0), (10, 0). Lengths are in pixels.
    """
    dash_length, gap_length = dashes
    in_dash = True  # False in a gap
    length_left = float(dash_length)  # of the present dash or gap
    part = [points[0]]  # points of the present dash or gap
    for start, stop in pairwise(points):
        (x, y), (stop_x, stop_y) = start, stop
        segment_length = math.hypot(stop_x - x, stop_y - y)
        position = 0.0  # along the segment: where the present dash or gap began, or 0
        while segment_length - position > length_left:
            position += length_left
            end = (x + (stop_x - x) * position / segment_length, y + (stop_y - y) * position / segment_length)
            if in_dash:
                yield [*part, end]
            part = [end]
            in_dash = not in_dash
            length_left = float(dash_length if in_dash else gap_length)
        length_left -= segment_length - position
        part.append(stop)
    if in_dash and len(part) > 1:
        yield part


@dataclass(frozen=True, eq=False)
class Curve:
    """A logged figure by step, with ``name`` at its end; it is interrupted where ``y`` is not finite.

    ``style`` is ``pale`` for the background, or ``c0`` to ``c7``, optionally followed by `` solid`` for no dashes.
    """

    x: Numbers
    y: Numbers
    style: str = "c0"
    name: str = ""
    is_marked: bool = False


def write_curves(metrics_path: str, output_dir: str) -> str | None:
    """Draw a training log by optimizer step; return the path of the image, None if the log has no figures."""
    records = _read_records(metrics_path)
    charts = charts_of(records)
    if not charts:
        return None
    last_step = max(int(record["step"]) for record in records)
    name = os.path.basename(os.path.abspath(output_dir))
    legend = "; pale: as logged, dark: smoothed" if len(records) >= _MIN_TO_SMOOTH else ""
    subtitle = f"{plural(len(records), 'log line')} up to step {last_step:,}{legend}"
    image = draw_charts(charts, f"Training of {name}", subtitle)
    path = os.path.join(output_dir, CURVES_NAME)
    # Rename the complete image, so that no reader sees a part of it.
    image.save(path + ".tmp", format="PNG", dpi=(_DOTS_PER_INCH, _DOTS_PER_INCH))
    os.replace(path + ".tmp", path)
    return path


def _read_records(metrics_path: str) -> list[dict[str, Any]]:
    """Read the records of a training log that have a step."""
    records = []
    with open(metrics_path, encoding="utf-8") as file:
        for text in file:
            with contextlib.suppress(ValueError):  # a killed run may leave an incomplete line
                record = load_json(text)
                if isinstance(record, dict) and isinstance(record.get("step"), int):
                    records.append(record)
    return records


def smoothed(values: Numbers) -> Numbers:
    """Return means over neighboring values with Gaussian weights, (N,); values that are not finite are left out."""
    width = max(len(values) / _SMOOTHED_VALUES / 2, 1.0)
    reach = math.ceil(3 * width)
    bell = np.exp(-0.5 * np.square(np.arange(-reach, reach + 1) / width))
    finite = np.isfinite(values)
    known = np.pad(np.where(finite, values, 0.0), reach)
    sums = np.convolve(known, bell, "valid")
    weights = np.convolve(np.pad(finite.astype(np.float64), reach), bell, "valid")
    return np.where(finite, sums / np.maximum(weights, 1e-12), values)


def charts_of(records: Records) -> list[Chart]:
    """Return the charts of a log, all with optimizer steps as horizontal axis."""
    evaluation_loss = _curves(records, {"eval_loss": "evaluation"}, style="c1 solid", is_marked=True)
    training_loss = _smooth_curves(records, "loss", name="training" if evaluation_loss else "")
    throughputs = {"tokens_per_second": "all", "target_tokens_per_second": "targets"}
    charts = [
        _chart(records, "loss, mean over target tokens, in nats", [*training_loss, *evaluation_loss]),
        _chart(records, "objective: the loss that training minimizes, in nats", _smooth_curves(records, "objective")),
        _channel_chart(records),
        _chart(records, "learning rate", _curves(records, {"learning_rate": ""}), low=0.0),
        _chart(records, "gradient norm before clipping", _smooth_curves(records, "grad_norm"), low=0.0),
        _chart(records, "throughput in tokens per second", _curves(records, throughputs, smooth=True), low=0.0),
        _fill_chart(records),
        _chart(records, "token accuracy", _smooth_curves(records, "token_accuracy", scale=100), suffix="%"),
    ]
    return [chart for chart in charts if chart is not None]


def _channel_chart(records: Records) -> Chart | None:
    """Return the chart of the losses of channels, logged as ``loss_CHANNEL``; of many, those logged most often."""
    num_logged = Counter(name for record in records for name in record if name.startswith("loss_"))
    by_frequency = sorted(num_logged, key=lambda name: (-num_logged[name], name))
    shown = sorted(by_frequency[:_MAX_CURVES])
    note = f" ({len(shown)} of {len(num_logged)} channels)" if len(shown) < len(num_logged) else ""
    labels = {}
    for name in shown:
        label = escape_line(name.removeprefix("loss_"))
        labels[name] = label if len(label) <= _MAX_NAME_LENGTH else label[: _MAX_NAME_LENGTH - 1] + "…"
    return _chart(records, f"loss by channel, in nats, smoothed{note}", _curves(records, labels, smooth=True))


def _fill_chart(records: Records) -> Chart | None:
    """Return the chart of the fill in percent; its axis begins at a multiple of ten below all values, at most at 90."""
    fills = [value for curve in _curves(records, {"fill": ""}) for value in curve.y if math.isfinite(value)]
    low = min(math.floor(10 * min(fills, default=0)) * 10, 90)
    curves = _smooth_curves(records, "fill", scale=100)
    return _chart(records, "fill: computed tokens that are not padding", curves, low=low, high=100, suffix="%")


def _chart(
    records: Records,
    title: str,
    curves: Sequence[Curve],
    *,
    low: float | None = None,
    high: float | None = None,
    suffix: str = "",
) -> Chart | None:
    """Return a chart of curves over the optimizer steps of a log; None if no curve has a finite value.

    ``low`` and ``high`` are the ends of the vertical axis; where None, it is slightly larger than the values.
    ``suffix`` follows the numbers of its ticks.
    """
    finite_curves = [curve for curve in curves if np.isfinite(curve.y).any()]
    if not finite_curves:
        return None
    x = _step_axis(records)
    y_low, y_high = _value_range(finite_curves, low, high, is_percent=suffix == "%")
    y = Axis.linear(title, y_low, y_high, num_ticks=5, suffix=suffix)
    paths: list[Path] = []
    for curve in finite_curves:
        paths += _curve_paths(curve, x, y)

    # The maximum, because a smoothed curve has the same gaps as the values themselves.
    num_gaps = max(int(np.count_nonzero(~np.isfinite(curve.y))) for curve in curves)
    notes = []
    if num_gaps:
        notes.append(Note.plain(AXIS_LENGTH, f"{plural(num_gaps, 'value')} not finite"))
    return Chart(x, y, paths, notes)


def _value_range(
    curves: Sequence[Curve], low: float | None, high: float | None, *, is_percent: bool
) -> tuple[float, float]:
    """Return the ends of the vertical axis: ``low`` and ``high`` or, where None, slightly beyond all finite values."""
    finite_values = [curve.y[np.isfinite(curve.y)] for curve in curves]
    fixed_ends = [end for end in (low, high) if end is not None]
    values = np.concatenate([np.array(fixed_ends), *finite_values])
    padded_low, padded_high = _padded(float(values.min()), float(values.max()), fraction=0.05)
    if is_percent:
        padded_low, padded_high = max(padded_low, 0.0), min(padded_high, 100.0)
    return padded_low if low is None else low, padded_high if high is None else high


def _step_axis(records: Records) -> Axis:
    """Return the horizontal axis: the steps of the log, from 0 if the log begins near it."""
    steps = [float(record["step"]) for record in records]
    begins_near_zero = 0 <= min(steps) < _NEAR_ZERO * max(steps)
    first_step, last_step = _padded(0.0 if begins_near_zero else min(steps), max(steps), fraction=0.0)
    return Axis.linear("optimizer step", first_step, last_step, num_ticks=5, integers=True)


def _curve_paths(curve: Curve, x: Axis, y: Axis) -> list[Path]:
    """Return the line of a curve and, if it is marked or has few points, a dot for each point."""
    strokes = list(_strokes(curve, x, y))
    paths = [Path(strokes, curve.style, curve.name)]
    if curve.is_marked or len(curve.x) <= _MAX_MARKED_POINTS:
        dots = [[point] for stroke in strokes for point in stroke]  # a stroke of one point is drawn as a dot
        paths.append(Path(dots, curve.style))
    return paths


def _strokes(curve: Curve, x: Axis, y: Axis) -> Iterator[list[Point]]:
    """Yield lines through consecutive finite values, as points in units of the axes with y pointing down."""
    stroke: list[Point] = []
    for index in _drawn_indices(curve.y):
        if np.isfinite(curve.y[index]):
            stroke.append((x.position(float(curve.x[index])), AXIS_LENGTH - y.position(float(curve.y[index]))))
        elif stroke:
            yield stroke
            stroke = []
    if stroke:
        yield stroke


def _drawn_indices(values: Numbers) -> list[int]:
    """Return the indices of the points to draw: of many, the minimum and maximum of each group, to keep spikes."""
    group_size = math.ceil(len(values) / _MAX_POINTS)
    if group_size <= 2:
        return list(range(len(values)))
    indices = []
    for start in range(0, len(values), group_size):
        group = values[start : start + group_size]
        chosen = {0}
        if np.isfinite(group).any():
            chosen = {int(np.nanargmin(group)), int(np.nanargmax(group))}
        indices += sorted(start + i for i in chosen)
    return indices


def _padded(low: float, high: float, fraction: float) -> tuple[float, float]:
    """Return a range that is larger by a fraction of its size at both ends, and never empty."""
    if high <= low:
        padding = abs(low) * 0.1 or 1.0
        return low - padding, high + padding
    return low - fraction * (high - low), high + fraction * (high - low)


def _smooth_curves(records: Records, figure: str, *, name: str = "", scale: float = 1) -> list[Curve]:
    """Return the curve of a figure as logged and, with enough values, a smoothed one; ``name``: text at its end."""
    curves = _curves(records, {figure: name}, scale=scale)
    if not curves or len(curves[0].x) < _MIN_TO_SMOOTH:
        return curves
    x, y = curves[0].x, curves[0].y
    return [Curve(x, y, "pale"), Curve(x, smoothed(y), name=name)]


def _curves(
    records: Records,
    end_texts: Mapping[str, str],
    *,
    style: str = "",
    scale: float = 1,
    smooth: bool = False,
    is_marked: bool = False,
) -> list[Curve]:
    """Return a curve for each logged figure that is a key of ``end_texts``, without figures that no record has.

    ``end_texts`` has the text at the end of each curve. Values are multiplied by ``scale``, and smoothed with
    ``smooth`` if there are enough. Without ``style``, each curve has its own. ``is_marked``: draw a square at each
    point.
    """
    curves = []
    for number, (figure, end_text) in enumerate(end_texts.items()):
        steps: list[float] = []
        logged_values: list[float] = []
        for record in records:
            if isinstance(record.get(figure), (int, float)):
                steps.append(record["step"])
                logged_values.append(record[figure])
        if not steps:
            continue
        values = np.array(logged_values, np.float64)
        if smooth and len(values) >= _MIN_TO_SMOOTH:
            values = smoothed(values)
        curve = Curve(np.array(steps, np.float64), values * scale, style or f"c{number}", end_text, is_marked)
        curves.append(curve)
    return curves
