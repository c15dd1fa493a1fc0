"""Charts on paper: small multiples below one another as one picture, drawn with Pillow.

At 200 dots per inch a picture is as wide as an A4 page, letters are of eight points, and curves that share a chart
differ in darkness and in dashes, not in colour alone. Everything is drawn twice as large and shrunk, since Pillow's
lines have steps otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from PIL import Image, ImageDraw, ImageFont

from packtool.report.axes import SIZE
from packtool.report.drawing import Box, Chart, Path, Point

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
