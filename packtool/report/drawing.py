"""Shapes, axes and charts as data, and the rendering of pages from templates.

A shape's style names its color and stroke: ``templates/page.css`` for pages, ``curves`` for ``curves.png``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from packtool.constants import VERSION
from packtool.terminal import escape_line

CURVE_COLOURS = {
    "ink": "#111827",
    "grey": "#4b5563",
    "warning": "#b91c1c",
    "pale": "#a9bfe4",
    "grid": "#e2e5ea",
    "c0": "#12408f",
    "c1": "#c2570c",
    "c2": "#0f766e",
    "c3": "#7e22ce",
    "c4": "#a16207",
    "c5": "#be185d",
    "c6": "#475569",
    "c7": "#4d7c0f",
}
"""Colors of ``curves.png``; curves also differ in brightness, for print."""
AXIS_LENGTH = 1000
"""Length of every axis in units, the coordinates of shapes."""
_LETTER_WIDTH = 36  # of a label on a narrow phone, in units


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic axis; ``name`` is the quantity and its unit, ``ticks`` are (value, label)."""

    name: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    is_log: bool = False

    @classmethod
    def linear(
        cls,
        name: str,
        low: float,
        high: float,
        num_ticks: int,
        *,
        integers: bool = False,
        extend: bool = False,
        suffix: str = "",
    ) -> Axis:
        """Make a linear axis whose ticks are multiples of 1, 2, 2.5 or 5 times a power of ten.

        For example, from 0 to 9 with about 4 ticks: 0, 2.5, 5, 7.5.

        Args:
            num_ticks: approximate number of ticks.
            integers: only integers have ticks.
            extend: ticks begin at ``low``, and the axis ends with the first tick at or above ``high``.
            suffix: unit after the number of each tick.
        """
        step = _round_step((high - low) / num_ticks, integers=integers)
        rounding_error = 1e-9  # of quotients that should be integers
        if extend:
            num_steps = max(math.ceil((high - low) / step - rounding_error), 1)
            values = [low + i * step for i in range(num_steps + 1)]
            high = values[-1]
        else:
            first_multiple = math.ceil(low / step - rounding_error)
            last_multiple = math.floor(high / step + rounding_error)
            values = [i * step for i in range(first_multiple, last_multiple + 1)]
        ticks = [(value, label + suffix) for value, label in _labeled(values)]
        return cls(name, low, high, ticks)

    @classmethod
    def logarithmic(cls, name: str, low: float, high: float) -> Axis:
        """Make a logarithmic axis whose ticks are round numbers with labels that do not overlap on a phone."""
        powers = [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
        # Try fewer and fewer ticks: those at some factors of each power of ten, and of these every n-th.
        for factors, every_nth in (((1, 2, 5), 1), ((1, 3), 1), ((1,), 1), ((1,), 2), ((1,), 3)):
            values = [factor * power for power in powers for factor in factors if low <= factor * power <= high]
            ticks = [(value, _label(value, 1, 0)) for value in values[::every_nth]]
            axis = cls(name, low, high, ticks, is_log=True)
            neighbors = pairwise(axis.tick_positions)  # (position, label) of each tick and of the next one
            if all(right - left > _LETTER_WIDTH * (len(a + b) / 2 + 1) for (left, a), (right, b) in neighbors):
                break
        return axis

    def position(self, value: float) -> float:
        """Return the position of a value, in units."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low) * AXIS_LENGTH
        return (value - self.low) / ((self.high - self.low) or 1) * AXIS_LENGTH

    @property
    def tick_positions(self) -> list[tuple[float, str]]:
        """(position in units, label) of every tick."""
        return [(self.position(value), label) for value, label in self.ticks]


def _round_step(min_step: float, *, integers: bool) -> float:
    """Return the smallest round number that is at least ``min_step``; of ``integers``, 1 if none is."""
    power = 10.0 ** math.floor(math.log10(min_step))
    steps = [factor * power for factor in (1, 2, 2.5, 5, 10)]
    for step in steps:
        is_large_enough = step >= min_step * (1 - 1e-9)  # with a tolerance for rounding errors
        if is_large_enough and (not integers or step == int(step)):
            return step
    return 1.0


def _labeled(values: Sequence[float]) -> list[tuple[float, str]]:
    """Return the values of evenly spaced ticks with their labels, all with the same number of decimals."""
    spacing = values[1] - values[0] if len(values) > 1 else 1.0  # a single tick has no spacing
    num_decimals = 0  # the fewest that represent the spacing exactly, at most 4
    while num_decimals < 4 and abs(round(spacing, num_decimals) - spacing) >= 1e-9:
        num_decimals += 1
    return [(value, _label(value, spacing, num_decimals)) for value in values]


def _label(value: float, spacing: float, num_decimals: int) -> str:
    """Return the label of a tick with some decimals; ``spacing`` is the distance of ticks."""
    if abs(value) < spacing * 1e-9:
        return "0"
    if spacing < 1e-3:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    # Millions are abbreviated, because phones are narrow.
    return f"{value / 1e6:g}M" if abs(value) >= 1e6 else f"{value:,.{num_decimals}f}"


Point = tuple[float, float]
Rectangle = tuple[float, float, float, float]
"""x, y, width and height."""


@dataclass(frozen=True)
class Box:
    """A rectangle with a tooltip."""

    x: float
    y: float
    width: float
    height: float
    style: str
    hint: str = ""


@dataclass(frozen=True)
class Boxes:
    """Rectangles of one style, which a browser draws faster than separate boxes."""

    rectangles: Sequence[Rectangle]
    style: str

    @property
    def d(self) -> str:
        """The rectangles as an SVG path."""
        return "".join(f"M{x:.2f} {y:g}h{width:.2f}v{high:g}H{x:.2f}z" for x, y, width, high in self.rectangles)


@dataclass(frozen=True)
class Path:
    """Lines through points, or a dot for a stroke of one point; ``name`` is the text at the end."""

    strokes: Sequence[Sequence[Point]]
    style: str
    name: str = ""

    @property
    def d(self) -> str:
        """The strokes as an SVG path; a dot is a line of length 0 with round ends, which are not stretched."""
        points = [" ".join(f"{x:.1f} {y:.1f}" for x, y in stroke) for stroke in self.strokes]
        ends = ["h0" if len(stroke) == 1 else "" for stroke in self.strokes]
        return "".join(f"M{text}{end}" for text, end in zip(points, ends, strict=True))


@dataclass(frozen=True)
class Drawing:
    """Shapes in a coordinate system whose y points down.

    Args:
        kind: class in the style sheet.
        label: description for screen readers.
        shapes: from back to front.
        height: of the coordinate system; its width is ``AXIS_LENGTH``. Pages stretch shapes, but not line widths.
        in_pixels: the height is in CSS pixels and not stretched.
    """

    kind: str
    label: str
    shapes: Sequence[Box | Boxes | Path]
    height: float = AXIS_LENGTH
    in_pixels: bool = False


@dataclass(frozen=True)
class Note:
    """Text at the upper edge of a chart, at ``x``; ``texts``: (style of a dot before the text or "", text)."""

    x: float
    texts: Sequence[tuple[str, str]]

    @classmethod
    def plain(cls, x: float, text: str) -> Note:
        """Make a note of one text without a dot."""
        return cls(x, [("", text)])


@dataclass(frozen=True)
class Chart:
    """Shapes between two axes; their coordinates are in units of the axes, with y pointing down."""

    x: Axis
    y: Axis
    shapes: Sequence[Box | Path]
    notes: Sequence[Note] = ()

    @property
    def drawing(self) -> Drawing:
        """The shapes, the grid and the horizontal axis."""
        lines = [(AXIS_LENGTH - position, "grid") for position, _ in self.y.tick_positions if position]
        lines.append((AXIS_LENGTH, "axis"))
        *grid, axis = (Path([[(0, y), (AXIS_LENGTH, y)]], style) for y, style in lines)
        return Drawing("drawn", f"{self.y.name} by {self.x.name}", [*grid, *self.shapes, axis])


# Characters inside a long name after which it may wrap.
_WRAP_AFTER = re.compile(r"(?<=[^\s])([/_.,:=]|(?<=\w)-)(?=\w)")


def render(template: str, **values: Any) -> str:
    """Render a template of ``templates/`` to text; all values are escaped."""
    return _environment().get_template(template).render(version=VERSION, **values)


def wrap_in_frame(page: str, title: str) -> str:
    """Return an HTML page as an iframe, to be shown inside another document such as a notebook."""
    return render("framed.html", page=escape(page), title=title)


def breakable(text: str) -> Markup:
    """Return text as HTML that wraps between words and, in long words, after ``/``, ``_`` and similar characters."""
    words = []
    for word in text.split(" "):
        # Split before HTML escaping, which adds ampersands and semicolons.
        parts = _WRAP_AFTER.sub("\\1\n", escape_line(word)).split("\n")
        joined = Markup("<wbr>").join(parts)
        words.append(joined if len(parts) == 1 else Markup("<span class=word>{}</span>").format(joined))
    return Markup(" ").join(words)


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 pack``, ``1,000 packs``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


@cache
def _environment() -> Environment:
    """Return the Jinja environment, which escapes HTML and control characters in all values."""
    environment = Environment(
        loader=PackageLoader("packtool.report"),
        autoescape=True,
        finalize=lambda value: (
            escape_line(value) if isinstance(value, str) and not isinstance(value, Markup) else value
        ),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"breakable": breakable, "plural": plural}
    return environment
