"""The demo's synthetic dataset: images of shapes and questions about their colours, as rows of messages and images.

Every answer is drawn independently and uniformly, so only the image reveals it, not even earlier turns of the row:

    kind      question about                           equally likely answers
    shape     the colour of the shapes                             4
    backdrop  the colour behind them                               4
    whole     both                                                16

A model of a few million random parameters learns colours within a minute on two cores; counting would take longer.
Shapes are painted without smoothing, so every pixel has one of the eight named colours.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image, ImageDraw

from packtool.constants import IMAGE_MARK

Colour = tuple[int, int, int]
ShapeBox = tuple[float, float, float, float]
"""Left, top, right and bottom of a shape, in pixels."""
Row = dict[str, Any]

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
POSITIONS = {"left": (0.0, 0.5), "right": (1.0, 0.5), "top": (0.5, 0.0), "bottom": (0.5, 1.0)}
"""Positions of a single shape: how far to the right and how far down, 0 to 1."""

MAX_SHAPES = 3

LONG_SIDES = tuple(range(96, 133, 6))
SHORT_SIDES = tuple(range(60, 91, 6))
"""Lengths of an image's sides in pixels: 2 to 4 cells of the model's grid of 32 pixels, rarely whole cells."""

TRAIN_ROWS_PER_HELD_OUT_ROW = 5

SYSTEM_PROMPT = "You look at pictures and answer briefly."
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


class Scene(NamedTuple):
    """Content of an image: shapes of one kind and colour, each in a box, on a backdrop."""

    width: int
    height: int
    backdrop: str
    colour: str
    kind: str
    boxes: tuple[ShapeBox, ...]


def _draw_scene(rng: random.Random, is_single: bool) -> Scene:
    """Draw a random scene: one shape at an end of the longer side, or 1 to ``MAX_SHAPES`` in a row along it."""
    long_side = rng.choice(LONG_SIDES)
    short_side = rng.choice(SHORT_SIDES)
    draw_boxes = _draw_single_box if is_single else _draw_row_of_boxes
    width, height, boxes = draw_boxes(rng, long_side, short_side)
    return Scene(
        width=width,
        height=height,
        backdrop=rng.choice(list(BACKDROP_COLOURS)),
        colour=rng.choice(list(SHAPE_COLOURS)),
        kind=rng.choice(SHAPE_KINDS),
        boxes=boxes,
    )


def _draw_single_box(rng: random.Random, long_side: int, short_side: int) -> tuple[int, int, tuple[ShapeBox, ...]]:
    """Return width and height of an image, and the box of a shape at an end of its longer side."""
    width, height = long_side, short_side
    position = rng.choice(list(POSITIONS))
    if position in ("top", "bottom"):
        width, height = short_side, long_side
    radius = short_side / 2 * rng.uniform(0.8, 0.95)
    right, down = POSITIONS[position]
    # At least one pixel stays free between the shape and the edges of the image.
    x = radius + 1 + right * (width - 2 * radius - 2)
    y = radius + 1 + down * (height - 2 * radius - 2)
    return width, height, (_box_around(x, y, radius),)


def _draw_row_of_boxes(rng: random.Random, long_side: int, short_side: int) -> tuple[int, int, tuple[ShapeBox, ...]]:
    """Return width and height of an image, and the boxes of 1 to ``MAX_SHAPES`` shapes along its longer side."""
    num_shapes = rng.randint(1, MAX_SHAPES)
    radius = min(long_side / num_shapes, short_side) / 2 * rng.uniform(0.8, 0.95)
    centers = [((index + 0.5) * long_side / num_shapes, short_side / 2) for index in range(num_shapes)]
    width, height = long_side, short_side
    is_upright = rng.random() >= 0.5
    if is_upright:
        width, height = short_side, long_side
        centers = [(y, x) for x, y in centers]
    return width, height, tuple(_box_around(x, y, radius) for x, y in centers)


def _box_around(x: float, y: float, radius: float) -> ShapeBox:
    return x - radius, y - radius, x + radius, y + radius


def paint(scene: Scene) -> Image.Image:
    """Return the RGB image of a scene."""
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


class Question(NamedTuple):
    """A user turn, its answer, and the number of equally likely answers."""

    kind: str
    text: str
    answer: str
    num_answers: int


@dataclass(frozen=True)
class SyntheticDataset:
    """Files of the dataset and its held-out questions.

    Args:
        held_out: other rows, all with images.
        swapped: the rows of ``held_out``, each with the images of another row.
        held_out_questions: questions of each held-out row in the order of its turns.
    """

    train: Path
    held_out: Path
    swapped: Path
    num_pictures: int
    held_out_questions: tuple[tuple[Question, ...], ...]

    @property
    def chance(self) -> float:
        """Expected accuracy on the held-out questions without images, 0 to 1."""
        shares = [1 / question.num_answers for questions in self.held_out_questions for question in questions]
        return sum(shares) / len(shares)


def make_rows(directory: str, num_rows: int, seed: int, num_unusable: int = 0) -> SyntheticDataset:
    """Write a random dataset: ``train.json``, ``held_out.json``, ``swapped.json``, and their images in ``pictures``.

    Args:
        num_rows: rows of ``train.json``; ``held_out.json`` has a fifth as many, at least 4.
        seed: the same seed writes the same bytes.
        num_unusable: how many of the training rows export must drop: too long, or with a missing image.
    """
    root = Path(directory)
    rng = random.Random(seed)
    maker = _RowMaker(root, rng)
    train = maker.training_rows(num_rows, num_unusable)
    num_held_out = max(4, num_rows // TRAIN_ROWS_PER_HELD_OUT_ROW)
    held_out, questions = zip(*(maker.picture_row() for _ in range(num_held_out)), strict=True)
    return SyntheticDataset(
        train=_write_rows(root / "train.json", train),
        held_out=_write_rows(root / "held_out.json", held_out),
        swapped=_write_rows(root / "swapped.json", _swap_pictures(held_out)),
        num_pictures=maker.num_pictures,
        held_out_questions=questions,
    )


def _write_rows(path: Path, rows: Sequence[Row]) -> Path:
    """Write rows as a JSON array with a line for each; return the path."""
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    return path


def _swap_pictures(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with their texts and answers, but the pictures of the next row that has as many."""
    swapped = [dict(row) for row in rows]
    for count in {len(row["images"]) for row in rows}:
        indices = [index for index, row in enumerate(rows) if len(row["images"]) == count]
        next_indices = indices[1:] + indices[:1]
        for index, next_index in zip(indices, next_indices, strict=True):
            swapped[index]["images"] = rows[next_index]["images"]
    return swapped


class _RowMaker:
    """Draws random rows and saves their images."""

    def __init__(self, root: Path, rng: random.Random) -> None:
        self.root = root
        self.rng = rng
        self.num_pictures = 0
        (root / "pictures").mkdir(parents=True, exist_ok=True)

    def training_rows(self, num_rows: int, num_unusable: int) -> list[Row]:
        """Return rows in random order: unusable ones, conversations without images (a tenth), and rows with images."""
        rows = [self.unusable_row(index) for index in range(num_unusable)]
        for _ in range(num_rows - num_unusable):
            has_images = self.rng.random() >= 1 / 10
            rows.append(self.picture_row()[0] if has_images else {"messages": text_turns(self.rng), "images": []})
        self.rng.shuffle(rows)
        return rows

    def picture_row(self) -> tuple[Row, tuple[Question, ...]]:
        """Return a row and its questions, and write its images; one in six rows has a second image in a later turn."""
        num_scenes = 2 if self.rng.random() < 1 / 6 else 1
        scenes = [_draw_scene(self.rng, is_single=self.rng.random() < 0.5) for _ in range(num_scenes)]
        turns: list[dict[str, str]] = []
        questions: list[Question] = []
        pictures: list[str] = []
        for scene in scenes:
            scene_questions = ask_about(self.rng, scene)
            scene_turns = [turn for question in scene_questions for turn in _turns(question.text, question.answer)]
            scene_turns[0]["content"] = IMAGE_MARK + scene_turns[0]["content"]
            turns += scene_turns
            questions += scene_questions
            pictures.append(self._write_picture(scene))
        if self.rng.random() < 1 / 8:
            turns.insert(0, {"role": "system", "content": SYSTEM_PROMPT})
        return {"messages": turns, "images": pictures}, tuple(questions)

    def _write_picture(self, scene: Scene) -> str:
        """Write the image of a scene, and return its path below the dataset's directory."""
        self.num_pictures += 1
        path = f"pictures/{self.num_pictures:04d}.png"
        paint(scene).save(self.root / path, optimize=False)
        return path

    def unusable_row(self, index: int) -> Row:
        """Return a row that export must drop: too long for even ``index``, else with a missing image."""
        if index % 2 == 0:
            numbers = " ".join(str(number) for number in range(1, 2001))
            return {"messages": _turns("Count from 1 to 2000.", numbers), "images": []}
        question = ask_about(self.rng, _draw_scene(self.rng, self.rng.random() < 0.5))[0]
        turns = _turns(IMAGE_MARK + question.text, question.answer)
        return {"messages": turns, "images": [f"pictures/lost-{index:04d}.png"]}


def ask_about(rng: random.Random, scene: Scene) -> list[Question]:
    """Draw one or two questions about an image, each about a different fact."""
    num_colours, num_backdrops = len(SHAPE_COLOURS), len(BACKDROP_COLOURS)
    if rng.random() < 1 / 5:
        answer = f"The colour is {scene.colour} on a {scene.backdrop} background."
        return [Question("whole", "Describe the picture.", answer, num_colours * num_backdrops)]
    shapes = "shape" if len(scene.boxes) == 1 else "shapes"
    questions = []
    for kind, thing, colour, num_answers in (
        ("shape", shapes, scene.colour, num_colours),
        ("backdrop", "background", scene.backdrop, num_backdrops),
    ):  # answered in a word or, one in four times, in a sentence
        text, answer = f"What is the colour of the {thing}?", colour
        if rng.random() < 1 / 4:
            text, answer = f"Tell me the colour of the {thing}.", f"The colour of the {thing} is {colour}."
        questions.append(Question(kind, text, answer, num_answers))
    return rng.sample(questions, k=rng.randint(1, 2))


def sentences(rng: random.Random, count: int) -> Iterator[str]:
    """Yield texts like those of the dataset, to train a tokenizer; ``count`` images give several texts each."""
    for _ in range(count):
        questions = [question for single in (True, False) for question in ask_about(rng, _draw_scene(rng, single))]
        turns = [turn for question in questions for turn in _turns(question.text, question.answer)]
        yield from (turn["content"] for turn in turns + text_turns(rng))
        yield f"{SYSTEM_PROMPT}\nsystem\nuser\nassistant\n"


def text_turns(rng: random.Random) -> list[dict[str, str]]:
    """Draw a conversation without images, about counting or the days of the week."""
    if rng.random() < 0.5:
        first = rng.randrange(1, 60)
        last = first + rng.randrange(2, 12)
        return _turns(f"Count from {first} to {last}.", " ".join(str(number) for number in range(first, last + 1)))
    day = rng.randrange(7)
    return _turns(f"Which day follows {DAYS[day]}?", DAYS[(day + 1) % 7])


def _turns(text: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
