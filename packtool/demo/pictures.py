"""The pictures of the small world: one to three shapes of one colour before a coloured backdrop.

Shapes are painted without smoothing, so every pixel has exactly one of the eight named colours and a test can read
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
}
BACKDROP_COLOURS: dict[str, Colour] = {
    "white": (250, 250, 250),
    "black": (15, 15, 15),
    "grey": (128, 128, 128),
    "cyan": (100, 215, 225),
}
SHAPE_KINDS = ("circle", "square", "triangle", "diamond")
PLACES: dict[str, tuple[float, float]] = {
    "left": (0.0, 0.5),
    "right": (1.0, 0.5),
    "top": (0.5, 0.0),
    "bottom": (0.5, 1.0),
}
"""Where one shape may be: how far to the right and how far down, 0 to 1."""

MOST_SHAPES = 3

LONG_SIDES = tuple(range(96, 133, 6))
SHORT_SIDES = tuple(range(60, 91, 6))
"""Pixels of a picture's sides: 2 to 4 cells of the model's 32-pixel grid, seldom a whole number of them."""


@dataclass(frozen=True)
class Scene:
    """What a picture shows: ``count`` shapes of one kind and colour.

    Args:
        place: of a single shape, a key of ``PLACES``; several stand in a row, and it is None.
        boxes: (left, top, right, bottom) of each shape in pixels.
    """

    width: int
    height: int
    backdrop: str
    colour: str
    kind: str
    place: str | None
    boxes: tuple[tuple[float, float, float, float], ...]

    @property
    def count(self) -> int:
        """The number of shapes in the picture."""
        return len(self.boxes)


def draw_placed(rng: random.Random) -> Scene:
    """One shape at an end of the longer side."""
    long, short = rng.choice(LONG_SIDES), rng.choice(SHORT_SIDES)
    place = rng.choice(list(PLACES))
    width, height = (long, short) if place in ("left", "right") else (short, long)
    radius = short / 2 * rng.uniform(0.8, 0.95)
    right, down = PLACES[place]
    x = radius + 1 + right * (width - 2 * radius - 2)
    y = radius + 1 + down * (height - 2 * radius - 2)
    return _scene(rng, width, height, place, [(x, y)], radius)


def draw_counted(rng: random.Random) -> Scene:
    """One to three shapes in a row along the longer side; the more there are, the smaller they are."""
    long, short = rng.choice(LONG_SIDES), rng.choice(SHORT_SIDES)
    count = rng.randint(1, MOST_SHAPES)
    radius = min(long / count, short) / 2 * rng.uniform(0.8, 0.95)
    along = [(index + 0.5) * long / count for index in range(count)]
    if rng.random() < 0.5:
        return _scene(rng, long, short, None, [(a, short / 2) for a in along], radius)
    return _scene(rng, short, long, None, [(short / 2, a) for a in along], radius)


def _scene(
    rng: random.Random,
    width: int,
    height: int,
    place: str | None,
    middles: list[tuple[float, float]],
    radius: float,
) -> Scene:
    return Scene(
        width=width,
        height=height,
        backdrop=rng.choice(list(BACKDROP_COLOURS)),
        colour=rng.choice(list(SHAPE_COLOURS)),
        kind=rng.choice(SHAPE_KINDS),
        place=place,
        boxes=tuple((x - radius, y - radius, x + radius, y + radius) for x, y in middles),
    )


def paint(scene: Scene) -> Image.Image:
    """The scene as an RGB picture of ``scene.width`` by ``scene.height`` pixels."""
    picture = Image.new("RGB", (scene.width, scene.height), BACKDROP_COLOURS[scene.backdrop])
    brush = ImageDraw.Draw(picture)
    colour = SHAPE_COLOURS[scene.colour]
    for left, top, right, bottom in scene.boxes:
        x, y = (left + right) / 2, (top + bottom) / 2
        if scene.kind == "circle":
            brush.ellipse((left, top, right, bottom), fill=colour)
        elif scene.kind == "square":
            brush.rectangle((left, top, right, bottom), fill=colour)
        elif scene.kind == "triangle":
            brush.polygon([(x, top), (right, bottom), (left, bottom)], fill=colour)
        else:
            brush.polygon([(x, top), (right, y), (x, bottom), (left, y)], fill=colour)
    return picture
