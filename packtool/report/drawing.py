"""The shapes and charts of all pictures: pages, the curves of a training run, the documentation.

Shapes are plain data with a look, which is the name of a colour and a stroke. Whoever draws them gives the look its
meaning: a page its style sheet (templates/page.css), a picture on paper its table (picture.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from packtool.report.axes import SIZE, Axis

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
