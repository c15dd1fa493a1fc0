"""The shapes and charts of all pictures: pages, the curves of a training run, the documentation.

Shapes are plain data with a look, which is the name of a colour and a stroke. Whoever draws them gives the look its
meaning: a page its style sheet (templates/page.css), a picture on paper its table (picture.py).

Axes of charts: the round numbers along them, how these are written, and where values stand.

Pages drawn by templates: what others wrote can neither become HTML nor turn or hide what stands beside it.
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
from packtool.visible import visible_line

SIZE = 1000
"""Units that an axis is long, whatever it measures."""
_LETTER = 36  # units that a letter of a label takes on a narrow phone


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic scale.

    Args:
        name: what it measures, and in which unit.
        low, high: values at its ends.
        ticks: (value, label) of numbers along it.
        is_log: whether it is logarithmic; all values are above 0 then.
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
        most: int,
        *,
        whole: bool = False,
        cover: bool = False,
        suffix: str = "",
    ) -> Axis:
        """An axis with round numbers.

        Args:
            most: about as many of them.
            whole: no fractions.
            cover: the axis ends with a round number, at or above ``high``.
            suffix: unit behind every number.
        """
        values = round_numbers(low, high, most, whole=whole, cover=cover)
        return cls(name, low, values[-1] if cover else high, list(zip(values, labels(values, suffix), strict=True)))

    @classmethod
    def logarithmic(cls, name: str, low: float, high: float) -> Axis:
        """A logarithmic axis with round numbers that do not touch on a phone; it spans at least one power of ten."""
        powers = [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
        for factors, every in (((1, 2, 5), 1), ((1, 3), 1), ((1,), 1), ((1,), 2), ((1,), 3)):
            values = [factor * power for power in powers for factor in factors if low <= factor * power <= high][
                ::every
            ]
            axis = cls(name, low, high, [(value, _label(value, 1, 0)) for value in values], is_log=True)
            if all(
                there - here > _LETTER * (len(left + right) / 2 + 1)
                for (here, left), (there, right) in pairwise(axis.places)
            ):
                break
        return axis

    def at(self, value: float) -> float:
        """Units from the axis's beginning to a value."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low) * SIZE
        return (value - self.low) / ((self.high - self.low) or 1) * SIZE

    @property
    def places(self) -> list[tuple[float, str]]:
        """(units from the beginning, label) of every tick."""
        return [(self.at(value), label) for value, label in self.ticks]


def round_numbers(low: float, high: float, most: int, *, whole: bool = False, cover: bool = False) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten between two different numbers.

    Args:
        most: about as many.
        whole: no fractions.
        cover: from ``low`` itself, which is round, to the first at or above ``high``.
    """
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    steps = (factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    step = next((step for step in steps if not whole or step == int(step)), 1.0)
    if cover:
        return [low + i * step for i in range(max(math.ceil((high - low) / step - 1e-9), 1) + 1)]
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def labels(values: Sequence[float], suffix: str = "") -> list[str]:
    """Evenly spaced numbers, each with as many decimals as tell them apart."""
    step = values[1] - values[0] if len(values) > 1 else 1.0
    digits = next((digits for digits in range(4) if abs(round(step, digits) - step) < 1e-9), 4)
    return [_label(value, step, digits) + suffix for value in values]


def _label(value: float, step: float, digits: int) -> str:
    if abs(value) < step * 1e-9:
        return "0"
    if step < 1e-3:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    # A phone has no room for six zeros.
    return f"{value / 1e6:g}M" if abs(value) >= 1e6 else f"{value:,.{digits}f}"


Point = tuple[float, float]
Rectangle = tuple[float, float, float, float]
"""x, y, width and height of a rectangle."""


@dataclass(frozen=True)
class Box:
    """A rectangle, with a hint for who points at it."""

    x: float
    y: float
    width: float
    height: float
    look: str
    hint: str = ""


@dataclass(frozen=True)
class Boxes:
    """Many rectangles of one look, which a browser draws faster than each by itself."""

    places: Sequence[Rectangle]
    look: str

    @property
    def d(self) -> str:
        """The rectangles as data of an SVG path."""
        return "".join(f"M{x:.2f} {y:g}h{wide:.2f}v{tall:g}H{x:.2f}z" for x, y, wide, tall in self.places)


@dataclass(frozen=True)
class Path:
    """Lines through points; a stroke of a single point is a dot.

    Args:
        strokes: that share the look.
        name: written at the end of the last one; "" for none.
    """

    strokes: Sequence[Sequence[Point]]
    look: str
    name: str = ""

    @property
    def d(self) -> str:
        """The strokes as data of an SVG path; a line of no length has round ends, which no stretching makes an egg."""
        return "".join(
            "M" + " ".join(f"{x:.1f} {y:.1f}" for x, y in stroke) + "h0" * (len(stroke) == 1) for stroke in self.strokes
        )


@dataclass(frozen=True)
class Word:
    """A line of text whose baseline is at y.

    Args:
        anchor: where x is: ``start``, ``middle`` or ``end`` of the text.
        size: of the letters.
    """

    x: float
    y: float
    text: str
    look: str
    anchor: str = "start"
    size: int = 13


@dataclass(frozen=True)
class Drawing:
    """Shapes in a coordinate system whose y goes down.

    Args:
        kind: what it is, for the style sheet.
        label: what it shows, for who cannot see it.
        shapes: from the back to the front.
        height, width: of the coordinate system. A page stretches the width to the room there is, and keeps strokes.
        in_pixels: whether the height is in CSS pixels, and not stretched.
    """

    kind: str
    label: str
    shapes: Sequence[Box | Boxes | Path | Word]
    height: float = SIZE
    width: float = SIZE
    in_pixels: bool = False


@dataclass(frozen=True)
class Note:
    """Words at the upper edge of a chart.

    Args:
        at: place along the horizontal axis, in its units.
        texts: (look of the dot before it, or "", text).
    """

    at: float
    texts: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Chart:
    """Shapes between two axes.

    Args:
        x, y: the axes.
        shapes: in units of the axes, y going down.
        notes: at the upper edge.
    """

    x: Axis
    y: Axis
    shapes: Sequence[Box | Path]
    notes: Sequence[Note] = ()

    @property
    def drawing(self) -> Drawing:
        """The shapes before the grid, and with the horizontal axis."""
        grid = [Path([[(0, SIZE - at), (SIZE, SIZE - at)]], "grid") for at, _ in self.y.places if at]
        axis = Path([[(0, SIZE), (SIZE, SIZE)]], "axis")
        return Drawing("drawn", f"{self.y.name} by {self.x.name}", [*grid, *self.shapes, axis])

    @property
    def gutter(self) -> int:
        """Letters that the numbers of the vertical axis need."""
        return max(len(label) for _, label in self.y.ticks) + 1


# Behind these a long name may go on in the next line; the word itself is copied and searched without a gap.
_JOINT = re.compile(r"(?<=[^\s])([/_.,:=]|(?<=\w)-)(?=\w)")


def render(template: str, **values: Any) -> str:
    """A template of ``templates/`` with these values; every text among them is shown as text, whatever it holds."""
    return _environment().get_template(template).render(version=VERSION, **values)


def framed(page: str, title: str) -> str:
    """A whole page inside of another document, such as a notebook, with a frame of its own."""
    return render("framed.html", page=escape(page), title=title)


def breakable(text: str) -> Markup:
    """Text whose words go to the next line as a whole.

    Where one is longer than a line, it is broken behind ``/``, ``_`` and the like if it has any of them.
    """
    return Markup(" ").join(_word(word) for word in text.split(" "))


def plural(count: int, noun: str) -> str:
    """A count with its noun: ``1 pack``, ``1,000 packs``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("packtool.report"),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"breakable": breakable, "plural": plural}
    return environment


def _shown(value: Any) -> Any:
    """What an expression of a template puts out, before it is escaped."""
    return visible_line(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _word(word: str) -> Markup:
    # Joints are looked for before escaping, which brings ampersands and semicolons of its own.
    parts = _JOINT.sub("\\1\n", visible_line(word)).split("\n")
    if len(parts) == 1:
        return escape(parts[0])
    return Markup("<span class=word>{}</span>").format(Markup("<wbr>").join(parts))
