"""SVG pictures for the documentation, made of the shapes of packtool's pages and of words."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files

from markupsafe import Markup

from packtool.report.drawing import Box, Path

_PAGE_STYLE = files("packtool.report").joinpath("templates/page.css").read_text(encoding="utf-8")
COLOURS = dict(re.findall(r"--(\w+):(#\w+)", _PAGE_STYLE.split("@media", 1)[0]))
"""Colors of packtool's pages in light mode, by name."""


@dataclass(frozen=True)
class Word:
    """A line of text whose baseline is at y.

    Args:
        anchor: position of x in the text: ``start``, ``middle`` or ``end``.
        size: font size.
    """

    x: float
    y: float
    text: str
    style: str
    anchor: str = "start"
    size: int = 13


def svg_picture(width: int, height: int, label: str, shapes: Iterable[Box | Path | Word]) -> str:
    """An SVG on a white card, which is readable on light and dark pages; the styles of its shapes are colours."""
    head = Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0} {1}" width="{0}" height="{1}" '
        'font-family="system-ui, sans-serif" role="img" aria-label="{2}">'
    )
    card = Markup('<rect width="{}" height="{}" rx="8" fill="{}"/>').format(width, height, COLOURS["panel"])
    lines = [head.format(width, height, label), card, *map(_element, shapes), "</svg>"]
    return "\n".join(lines) + "\n"


def _element(shape: Box | Path | Word) -> str:
    if isinstance(shape, Word):
        text = Markup('<text x="{:.1f}" y="{:.1f}" font-size="{}" text-anchor="{}" fill="{}">{}</text>')
        return text.format(shape.x, shape.y, shape.size, shape.anchor, shape.style, shape.text)
    if isinstance(shape, Path):
        path = Markup('<path d="{}" fill="none" stroke="{}" stroke-width="2" stroke-linejoin="round"/>')
        return path.format(shape.d, shape.style)
    hint = Markup("<title>{}</title>").format(shape.hint) if shape.hint else ""
    rect = Markup('<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" rx="2" fill="{}">{}</rect>')
    return rect.format(shape.x, shape.y, shape.width, shape.height, shape.style, hint)
