"""Shapes, axes and charts, and their rendering on pages.

Shapes are plain data with a look: the name of a colour and a stroke. Pages define the looks in ``templates/page.css``,
and ``curves`` in a table.
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

PAGE_COLOURS = {
    "back": ("#f6f5f1", "#101417"),
    "panel": ("#fff", "#191f23"),
    "ink": ("#1b2126", "#e8ecee"),
    "soft": ("#5b6670", "#a3aeb6"),
    "line": ("#e3e1da", "#2b343a"),
    "axis": ("#a9aeb2", "#5b676f"),
    "accent": ("#0f766e", "#4cc2b5"),
    "wait": ("#d3d6d8", "#46525a"),
    "prefix": ("#3f4b55", "#c3ccd2"),
    "waste": ("#c98f2b", "#c0923a"),
    "c0": ("#0f766e", "#3fb0a4"),
    "c1": ("#d0743c", "#dd8d58"),
    "c2": ("#5569b8", "#8195dc"),
    "c3": ("#b0497a", "#cf6f9a"),
    "c4": ("#84943a", "#a3b658"),
    "c5": ("#8a8f98", "#8a939b"),
}
"""Colours of pages in light and in dark mode."""
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
"""Colours of ``curves.png``; those of the curves differ in darkness, too, for print."""
SIZE = 1000
"""Length of every axis, in units."""
_LETTER = 36  # units of a label's letter on a narrow phone


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic scale.

    Args:
        name: quantity and unit.
        low, high: values at its ends.
        ticks: (value, label) along it.
        is_log: logarithmic; all values are positive.
    """

    name: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    is_log: bool = False

    @classmethod
    def over(
        cls,
        name: str,
        low: float,
        high: float,
        num_ticks: int,
        *,
        integers: bool = False,
        cover: bool = False,
        suffix: str = "",
    ) -> Axis:
        """A linear axis whose ticks are multiples of 1, 2, 2.5 or 5 times a power of ten.

        Args:
            low, high: different values.
            num_ticks: approximate number of ticks.
            integers: ticks at integers only.
            cover: ticks from ``low``, which is round, to the first one at or above ``high``, where the axis ends.
            suffix: unit after every number.
        """
        rough = (high - low) / num_ticks
        power = 10.0 ** math.floor(math.log10(rough))
        steps = (factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
        step = next((step for step in steps if not integers or step == int(step)), 1.0)
        if cover:
            values = [low + i * step for i in range(max(math.ceil((high - low) / step - 1e-9), 1) + 1)]
        else:
            values = [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
        spacing = values[1] - values[0] if len(values) > 1 else 1.0
        digits = next((digits for digits in range(4) if abs(round(spacing, digits) - spacing) < 1e-9), 4)
        ticks = [(value, _label(value, spacing, digits) + suffix) for value in values]
        return cls(name, low, values[-1] if cover else high, ticks)

    @classmethod
    def logarithmic(cls, name: str, low: float, high: float) -> Axis:
        """A logarithmic axis of at least one power of ten, with round numbers that do not overlap on a phone."""
        powers = [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
        for factors, every in (((1, 2, 5), 1), ((1, 3), 1), ((1,), 1), ((1,), 2), ((1,), 3)):
            values = [factor * power for power in powers for factor in factors if low <= factor * power <= high]
            axis = cls(name, low, high, [(value, _label(value, 1, 0)) for value in values[::every]], is_log=True)
            if all(
                right - left > _LETTER * (len(left_label + right_label) / 2 + 1)
                for (left, left_label), (right, right_label) in pairwise(axis.places)
            ):
                break
        return axis

    def at(self, value: float) -> float:
        """The position of a value, in units."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low) * SIZE
        return (value - self.low) / ((self.high - self.low) or 1) * SIZE

    @property
    def places(self) -> list[tuple[float, str]]:
        """(position in units, label) of every tick."""
        return [(self.at(value), label) for value, label in self.ticks]


def _label(value: float, step: float, digits: int) -> str:
    if abs(value) < step * 1e-9:
        return "0"
    if step < 1e-3:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    # A phone is too narrow for six zeros.
    return f"{value / 1e6:g}M" if abs(value) >= 1e6 else f"{value:,.{digits}f}"


Point = tuple[float, float]
Rectangle = tuple[float, float, float, float]
"""x, y, width and height."""


@dataclass(frozen=True)
class Box:
    """A rectangle, with a hint that is shown when the mouse points at it."""

    x: float
    y: float
    width: float
    height: float
    look: str
    hint: str = ""


@dataclass(frozen=True)
class Boxes:
    """Rectangles of one look; a browser draws them faster than separate boxes."""

    places: Sequence[Rectangle]
    look: str

    @property
    def d(self) -> str:
        """The rectangles as an SVG path."""
        return "".join(f"M{x:.2f} {y:g}h{wide:.2f}v{tall:g}H{x:.2f}z" for x, y, wide, tall in self.places)


@dataclass(frozen=True)
class Path:
    """Lines through points; a stroke of a single point is a dot.

    Args:
        strokes: lines with the same look.
        name: written at the end of the last stroke; "" for none.
    """

    strokes: Sequence[Sequence[Point]]
    look: str
    name: str = ""

    @property
    def d(self) -> str:
        """The strokes as an SVG path; a dot is a line of length 0, whose round ends are never stretched."""
        return "".join(
            "M" + " ".join(f"{x:.1f} {y:.1f}" for x, y in stroke) + "h0" * (len(stroke) == 1) for stroke in self.strokes
        )


@dataclass(frozen=True)
class Drawing:
    """Shapes in a coordinate system whose y points down.

    Args:
        kind: class for the style sheet.
        label: description for screen readers.
        shapes: from the back to the front.
        height: of the coordinate system; its width is ``SIZE``. A page stretches the width but not the strokes.
        in_pixels: the height is in CSS pixels and not stretched.
    """

    kind: str
    label: str
    shapes: Sequence[Box | Boxes | Path]
    height: float = SIZE
    in_pixels: bool = False


@dataclass(frozen=True)
class Note:
    """Text at the upper edge of a chart.

    Args:
        at: position along the horizontal axis, in units.
        texts: (look of the dot before it, or "", text).
    """

    at: float
    texts: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Chart:
    """Shapes between two axes, in units of the axes, with y pointing down."""

    x: Axis
    y: Axis
    shapes: Sequence[Box | Path]
    notes: Sequence[Note] = ()

    @property
    def drawing(self) -> Drawing:
        """The shapes with grid and horizontal axis."""
        grid = [Path([[(0, SIZE - at), (SIZE, SIZE - at)]], "grid") for at, _ in self.y.places if at]
        axis = Path([[(0, SIZE), (SIZE, SIZE)]], "axis")
        return Drawing("drawn", f"{self.y.name} by {self.x.name}", [*grid, *self.shapes, axis])

    @property
    def gutter(self) -> int:
        """Width of the vertical axis's labels, in letters."""
        return max(len(label) for _, label in self.y.ticks) + 1


# A long name may be broken after these; the word itself is copied and searched without a gap.
_JOINT = re.compile(r"(?<=[^\s])([/_.,:=]|(?<=\w)-)(?=\w)")


def render(template: str, **values: Any) -> str:
    """Render a template of ``templates/``; all values are escaped."""
    return _environment().get_template(template).render(version=VERSION, colours=PAGE_COLOURS, **values)


def framed(page: str, title: str) -> str:
    """A whole page in a frame, to be shown inside another document such as a notebook."""
    return render("framed.html", page=escape(page), title=title)


def breakable(text: str) -> Markup:
    """Text that is broken between words; a word longer than a line after ``/``, ``_`` and the like."""
    words = []
    for word in text.split(" "):
        # Find the joints before escaping, which adds ampersands and semicolons.
        parts = _JOINT.sub("\\1\n", escape_line(word)).split("\n")
        joined = Markup("<wbr>").join(parts)
        words.append(joined if len(parts) == 1 else Markup("<span class=word>{}</span>").format(joined))
    return Markup(" ").join(words)


def plural(count: int, noun: str) -> str:
    """A count with its noun: ``1 pack``, ``1,000 packs``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


@cache
def _environment() -> Environment:
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
