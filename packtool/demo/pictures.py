"""The pictures of the small world: one or two coloured shapes before a coloured backdrop.

Shapes are painted without smoothing, so every pixel has exactly one of the twelve named colours and a test can read
every answer back from the file.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

Colour = tuple[int, int, int]

SHAPE_COLOURS: dict[str, Colour] = {
    "red": (220, 30, 30),
    "green": (30, 160, 60),
    "blue": (30, 60, 220),
    "yellow": (240, 215, 30),
    "purple": (135, 40, 170),
    "orange": (245, 130, 20),
}
BACKDROP_COLOURS: dict[str, Colour] = {
    "white": (250, 250, 250),
    "black": (15, 15, 15),
    "grey": (128, 128, 128),
    "pink": (250, 180, 200),
    "cyan": (100, 215, 225),
    "brown": (115, 70, 35),
}
SHAPE_KINDS = ("circle", "square", "triangle", "diamond")
PLACES: dict[str, tuple[str, ...]] = {"single": ("single",), "columns": ("left", "right"), "lines": ("top", "bottom")}
"""The shapes of each layout, in drawing order."""

SIDES = tuple(range(60, 133, 6))
"""Pixels that a side of a picture may have: 2 to 4 cells of the model's 32-pixel grid, seldom a whole number of them."""


@dataclass(frozen=True)
class Shape:
    """One shape; ``x`` and ``y`` are its middle and ``radius`` half its extent, in pixels."""

    place: str
    kind: str
    colour: str
    x: float
    y: float
    radius: float


@dataclass(frozen=True)
class Scene:
    """What a picture shows; ``layout`` is a key of ``PLACES``."""

    width: int
    height: int
    layout: str
    backdrop: str
    shapes: tuple[Shape, ...]


def draw_scene(rng: random.Random, layout: str) -> Scene:
    """A scene with independent colours, sides and positions; two shapes may well have the same colour."""
    width, height = rng.choice(SIDES), rng.choice(SIDES)
    backdrop = rng.choice(list(BACKDROP_COLOURS))
    places = PLACES[layout]
    columns, lines = (len(places), 1) if layout == "columns" else (1, len(places))
    cell_width, cell_height = width / columns, height / lines
    shapes = []
    for index, place in enumerate(places):
        radius = min(cell_width, cell_height) / 2 * rng.uniform(0.7, 0.9)
        x = (index if columns > 1 else 0) * cell_width + rng.uniform(radius + 1, cell_width - radius - 1)
        y = (index if lines > 1 else 0) * cell_height + rng.uniform(radius + 1, cell_height - radius - 1)
        shapes.append(Shape(place, rng.choice(SHAPE_KINDS), rng.choice(list(SHAPE_COLOURS)), x, y, radius))
    return Scene(width, height, layout, backdrop, tuple(shapes))


def paint(scene: Scene) -> Image.Image:
    """The scene as an RGB picture of ``scene.width`` by ``scene.height`` pixels."""
    picture = Image.new("RGB", (scene.width, scene.height), BACKDROP_COLOURS[scene.backdrop])
    brush = ImageDraw.Draw(picture)
    for shape in scene.shapes:
        left, top, right, bottom = (
            shape.x - shape.radius,
            shape.y - shape.radius,
            shape.x + shape.radius,
            shape.y + shape.radius,
        )
        colour = SHAPE_COLOURS[shape.colour]
        if shape.kind == "circle":
            brush.ellipse((left, top, right, bottom), fill=colour)
        elif shape.kind == "square":
            brush.rectangle((left, top, right, bottom), fill=colour)
        elif shape.kind == "triangle":
            brush.polygon([(shape.x, top), (right, bottom), (left, bottom)], fill=colour)
        else:
            brush.polygon([(shape.x, top), (right, shape.y), (shape.x, bottom), (left, shape.y)], fill=colour)
    return picture
