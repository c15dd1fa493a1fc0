"""Small multiples as one picture: a panel for each quantity over one common axis, drawn with Pillow.

Sizes are for paper: at 200 dots per inch a picture is as wide as an A4 page, letters are of eight points, and lines
that share a panel differ in darkness and in dashes, not in colour alone. Everything is drawn twice as large and shrunk,
since Pillow's lines have steps otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

DOTS_PER_INCH = 200
_SCALE = 2
_WIDTH, _HEAD, _ROW = 1654, 118, 430  # pixels of the picture, of its title, of a row of panels
_LEFT, _RIGHT, _TOP, _BOTTOM = 118, 44, 62, 84  # within a panel
_SMALL, _NORMAL, _LARGE = 22, 25, 34
_INK, _GREY, _GRID, _WARNING = "#111827", "#4b5563", "#e2e5ea", "#b91c1c"
_COLOURS = ("#12408f", "#c2570c", "#0f766e", "#7e22ce", "#a16207", "#be185d", "#475569", "#4d7c0f")
_PALE = "#a9bfe4"
_DASHES: tuple[tuple[int, int] | None, ...] = (None, (18, 9), (6, 7), (28, 8))
MOST_LINES = len(_COLOURS)
_MOST_POINTS = 1500
_FEW_POINTS = 12
_NEAR_ZERO = 0.2  # an axis whose first value is so small a part of the last begins at 0

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Line:
    """A quantity along the common axis.

    Args:
        x, y: (N,), x rising; where y is not finite the line is broken.
        name: written at its end; "" for none.
        kind: ``pale`` behind others, ``dark``, or ``marks`` with a square at every point.
        colour: number of the colour and of the dashes, below ``MOST_LINES``.
    """

    x: Numbers
    y: Numbers
    name: str = ""
    kind: Literal["pale", "dark", "marks"] = "dark"
    colour: int = 0


@dataclass(frozen=True, eq=False)
class Panel:
    """Lines that share a vertical axis.

    Args:
        title: what is shown, and in which unit.
        lines: at least one with a finite value.
        floor, ceiling: where the vertical axis ends; None for just beyond the values.
        is_share: numbers along the axis are percentages.
        warning: written into the panel.
    """

    title: str
    lines: Sequence[Line]
    floor: float | None = None
    ceiling: float | None = None
    is_share: bool = False
    warning: str = ""


@dataclass(frozen=True)
class _Axis:
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def draw_panels(panels: Sequence[Panel], title: str, subtitle: str, x_name: str) -> Image.Image:
    """The first panel over the whole width, the others in pairs below.

    Args:
        title: of the picture.
        subtitle: a line below it.
        x_name: of the common axis.
    """
    num_rows = 1 + math.ceil((len(panels) - 1) / 2)
    size = (_WIDTH * _SCALE, (_HEAD + num_rows * _ROW) * _SCALE)
    image = Image.new("RGB", size, "white")
    canvas = _Canvas(ImageDraw.Draw(image))
    canvas.text((_LEFT, 44), title, _LARGE, _INK, "lm")
    canvas.text((_LEFT, 88), subtitle, _SMALL, _GREY, "lm")
    values = np.concatenate([line.x for panel in panels for line in panel.lines])
    first, last = float(values.min()), float(values.max())
    x_range = _padded(0.0 if 0 <= first < _NEAR_ZERO * last else first, last, 0.0)
    for number, panel in enumerate(panels):
        row, column = divmod(number + 1, 2) if number else (0, 0)
        left = column * _WIDTH // 2
        right = _WIDTH if number == 0 else left + _WIDTH // 2
        _draw_panel(canvas, panel, (left, _HEAD + row * _ROW, right), x_range, x_name)
    return image.resize((size[0] // _SCALE, size[1] // _SCALE), Image.Resampling.LANCZOS)


def _draw_panel(
    canvas: _Canvas, panel: Panel, place: tuple[int, int, int], x_range: tuple[float, float], x_name: str
) -> None:
    """One panel at (left, top, right) of the picture."""
    left, top, right = place
    named = [line for line in panel.lines if line.name]
    gutter = max([_RIGHT, *(_RIGHT + canvas.width(line.name, _SMALL) for line in named)])
    x = _Axis(*x_range, left + _LEFT, right - gutter)
    y = _Axis(*_range(panel), top + _ROW - _BOTTOM, top + _TOP)
    canvas.text((x.start, top + 30), panel.title, _NORMAL, _INK, "lm")
    for value, label in ticks(y.low, y.high, 5, is_share=panel.is_share):
        canvas.line([(x.start, y(value)), (x.end, y(value))], _GRID, 1.5)
        canvas.text((x.start - 12, y(value)), label, _SMALL, _GREY, "rm")
    for value, label in ticks(x.low, x.high, 9 if x.end - x.start > _WIDTH / 2 else 5, whole=True):
        canvas.line([(x(value), y.start), (x(value), y.start + 8)], _GREY, 1.5)
        canvas.text((x(value), y.start + 14), label, _SMALL, _GREY, "ma")
    canvas.line([(x.start, y.start), (x.end, y.start)], _GREY, 1.5)
    canvas.text(((x.start + x.end) / 2, y.start + 44), x_name, _SMALL, _GREY, "ma")
    for line in panel.lines:
        _draw_line(canvas, line, x, y)
    _name_lines(canvas, named, x, y)
    if panel.warning:
        canvas.text((x.end, top + 30), panel.warning, _SMALL, _WARNING, "rm")


def _draw_line(canvas: _Canvas, line: Line, x: _Axis, y: _Axis) -> None:
    colour = _PALE if line.kind == "pale" else _COLOURS[line.colour]
    is_marked = line.kind == "marks" or len(line.x) <= _FEW_POINTS
    for run in _runs(*_thinned(line.x, line.y)):
        points = [(x(at), y(value)) for at, value in run]
        dashes = _DASHES[line.colour % len(_DASHES)] if line.kind == "dark" else None
        canvas.line(points, colour, 1.5 if line.kind == "pale" else 3, dashes)
        if is_marked or len(points) == 1:
            for at in points:
                canvas.square(at, 5, colour)


def _name_lines(canvas: _Canvas, lines: Sequence[Line], x: _Axis, y: _Axis) -> None:
    """Names behind the lines' last values, moved apart where lines end close to one another."""
    ends = sorted(((y(float(line.y[np.isfinite(line.y)][-1])), line) for line in lines), key=lambda end: end[0])
    places: list[float] = []
    for at, _ in ends:
        places.append(max(at, places[-1] + _SMALL + 4) if places else at)
    # What was pushed out of the panel pushes the others back up.
    limit = y.start
    for number in reversed(range(len(places))):
        places[number] = min(places[number], limit)
        limit = places[number] - _SMALL - 4
    for place, (at, line) in zip(places, ends, strict=True):
        colour = _COLOURS[line.colour]
        canvas.line([(x.end + 3, at), (x.end + 12, place)], colour, 1.5)
        canvas.text((x.end + 16, place), line.name, _SMALL, colour, "lm")


def ticks(
    low: float, high: float, most: int, *, whole: bool = False, is_share: bool = False
) -> list[tuple[float, str]]:
    """Round numbers between two bounds with what is written beside them.

    Args:
        most: about as many.
        whole: no fractions.
        is_share: as percentages.
    """
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    factors = (1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)
    step = next(factor * power for factor in factors if factor * power >= rough * (1 - 1e-9))
    step = max(step, 1) if whole else step
    first = math.ceil(low / step - 1e-9)
    values = [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]
    factor = 100 if is_share else 1
    return [(value, _label(value * factor, step * factor) + ("%" if is_share else "")) for value in values]


def _label(value: float, step: float) -> str:
    """A number with as many decimals as tell multiples of a step apart."""
    if value == 0:
        return "0"
    if step < 1e-3:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    digits = next((digits for digits in range(4) if abs(round(step, digits) - step) < 1e-9), 4)
    return f"{value:,.{digits}f}"


def _range(panel: Panel) -> tuple[float, float]:
    """Lowest and highest value of the vertical axis."""
    ends = [end for end in (panel.floor, panel.ceiling) if end is not None]
    found = np.concatenate([np.array(ends), *(line.y[np.isfinite(line.y)] for line in panel.lines)])
    low, high = _padded(float(found.min()), float(found.max()), 0.05)
    if panel.is_share:
        low, high = max(low, 0.0), min(high, 1.0)
    return low if panel.floor is None else panel.floor, high if panel.ceiling is None else panel.ceiling


def _padded(low: float, high: float, share: float) -> tuple[float, float]:
    """A little more than from ``low`` to ``high``; never nothing."""
    if high <= low:
        around = abs(low) * 0.1 or 1.0
        return low - around, high + around
    return low - share * (high - low), high + share * (high - low)


def _runs(x: Numbers, y: Numbers) -> Iterator[list[tuple[float, float]]]:
    """Stretches of finite values."""
    run: list[tuple[float, float]] = []
    for at, value in zip(x.tolist(), y.tolist(), strict=True):
        if math.isfinite(value):
            run.append((at, value))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _thinned(x: Numbers, y: Numbers) -> tuple[Numbers, Numbers]:
    """The lowest and highest of each few points where there are more than columns, so that no spike is lost."""
    group = math.ceil(len(x) / (_MOST_POINTS // 2))
    if group <= 2:
        return x, y
    kept: list[int] = []
    for start in range(0, len(x), group):
        part = y[start : start + group]
        if np.isfinite(part).any():
            kept += sorted({start + int(np.nanargmin(part)), start + int(np.nanargmax(part))})
        else:
            kept.append(start)
    return x[kept], y[kept]


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

    def line(
        self, points: Sequence[tuple[float, float]], colour: str, width: float, dashes: tuple[int, int] | None = None
    ) -> None:
        """Through all points, whole or in dashes of (drawn, free) pixels."""
        for part in [points] if dashes is None else _dashed(points, dashes):
            scaled = [(x * _SCALE, y * _SCALE) for x, y in part]
            self._draw.line(scaled, fill=colour, width=round(width * _SCALE), joint="curve")

    def square(self, place: tuple[float, float], half: float, colour: str) -> None:
        """A mark."""
        x, y = place
        box = ((x - half) * _SCALE, (y - half) * _SCALE, (x + half) * _SCALE, (y + half) * _SCALE)
        self._draw.rectangle(box, fill=colour)


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
