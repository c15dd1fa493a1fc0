"""A small world of drawn pictures and questions about them, as rows of messages and images.

Every fact that a question asks for is drawn independently and evenly, so nothing but the picture tells the answer, not
even the earlier turns of the same row:

    kind      asks for                                       answers
    shape     the colour of the shapes                             4
    backdrop  the colour behind them                               4
    whole     both                                                16

The price: number, place and kind of the shapes are drawn but not asked for. A model of a few million random parameters
learns to tell colours, wherever they are, within a minute on two cores; counting would take it much longer.

The pictures of the small world: one to three shapes of one colour before a coloured backdrop.

Shapes are painted without smoothing, so every pixel has exactly one of the eight named colours and a test can read
every answer back from the file.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from packtool.constants import IMAGE_MARK

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


Row = dict[str, Any]

HELD_OUT_SHARE = 5
"""One held-out row for so many training rows."""

NUM_COLOURS = len(SHAPE_COLOURS)
NUM_BACKDROPS = len(BACKDROP_COLOURS)
SYSTEM_PROMPT = "You look at pictures and answer briefly."
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


@dataclass(frozen=True)
class Question:
    """One user turn, its answer, and how many equally likely answers it might have had."""

    kind: str
    text: str
    answer: str
    num_answers: int


@dataclass(frozen=True)
class DemoWorld:
    """Where the rows lie and what is known of the held-out questions.

    Args:
        train: rows to train on.
        held_out: other rows, all of them with pictures.
        swapped: the rows of ``held_out``, each with the pictures of another one.
        held_out_questions: for each held-out row its questions, turn by turn.
    """

    train: Path
    held_out: Path
    swapped: Path
    num_pictures: int
    held_out_questions: tuple[tuple[Question, ...], ...]

    @property
    def chance(self) -> float:
        """Share of the held-out questions that the best guesser gets right who never sees a picture."""
        return chance_of([question for questions in self.held_out_questions for question in questions])


def chance_of(questions: list[Question]) -> float:
    """Mean over ``questions`` of one over the number of equally likely answers."""
    return sum(1 / question.num_answers for question in questions) / len(questions)


def make_rows(directory: str, num_rows: int, seed: int, num_unusable: int = 0) -> DemoWorld:
    """Draw pictures and write ``train.json``, ``held_out.json`` and ``swapped.json`` beside them.

    Args:
        directory: made if it is not there; the pictures go to its ``pictures``.
        num_rows: rows of ``train.json``; a fifth of that is held out.
        seed: the same seed writes the same bytes.
        num_unusable: so many of the training rows cannot be used: by turns far too long or with a lost picture.
    """
    root = Path(directory)
    rng = random.Random(seed)
    maker = _RowMaker(root, rng)
    train = [maker.unusable_row(index) for index in range(num_unusable)]
    train += [maker.training_row() for _ in range(num_rows - num_unusable)]
    rng.shuffle(train)
    held_out = [maker.picture_row() for _ in range(max(4, num_rows // HELD_OUT_SHARE))]
    rows = [row for row, _ in held_out]
    return DemoWorld(
        train=_write(root / "train.json", train),
        held_out=_write(root / "held_out.json", rows),
        swapped=_write(root / "swapped.json", swap_pictures(rows)),
        num_pictures=maker.num_pictures,
        held_out_questions=tuple(questions for _, questions in held_out),
    )


def swap_pictures(rows: list[Row]) -> list[Row]:
    """Each row with the pictures of the next one that has as many; its text and answers stay."""
    swapped = [dict(row) for row in rows]
    for count in {len(row["images"]) for row in rows}:
        alike = [index for index, row in enumerate(rows) if len(row["images"]) == count]
        for index, other in zip(alike, alike[1:] + alike[:1], strict=True):
            swapped[index]["images"] = rows[other]["images"]
    return swapped


class _RowMaker:
    """Draws rows one after the other and saves their pictures."""

    def __init__(self, root: Path, rng: random.Random) -> None:
        self.root = root
        self.rng = rng
        self.num_pictures = 0
        (root / "pictures").mkdir(parents=True, exist_ok=True)

    def training_row(self) -> Row:
        """A row with pictures, or one in ten times without."""
        if self.rng.random() < 1 / 10:
            return {"messages": text_turns(self.rng), "images": []}
        return self.picture_row()[0]

    def picture_row(self) -> tuple[Row, tuple[Question, ...]]:
        """A row with one picture, or one in six times with a second one in a later turn, and its questions."""
        scenes = [draw_any(self.rng) for _ in range(2 if self.rng.random() < 1 / 6 else 1)]
        turns: list[dict[str, str]] = []
        questions: list[Question] = []
        for scene in scenes:
            asked = ask_about(self.rng, scene)
            about = [turn for question in asked for turn in _turns(question.text, question.answer)]
            about[0]["content"] = IMAGE_MARK + about[0]["content"]
            turns += about
            questions += asked
        if self.rng.random() < 1 / 8:
            turns.insert(0, {"role": "system", "content": SYSTEM_PROMPT})
        return {"messages": turns, "images": [self._save(scene) for scene in scenes]}, tuple(questions)

    def unusable_row(self, index: int) -> Row:
        """A row that export has to leave out: its text is far too long, or its picture is lost."""
        if index % 2 == 0:
            numbers = " ".join(str(number) for number in range(1, 2001))
            return {"messages": _turns("Count from 1 to 2000.", numbers), "images": []}
        question = ask_about(self.rng, draw_any(self.rng))[0]
        turns = _turns(IMAGE_MARK + question.text, question.answer)
        return {"messages": turns, "images": [f"pictures/lost-{index:04d}.png"]}

    def _save(self, scene: Scene) -> str:
        self.num_pictures += 1
        name = f"pictures/{self.num_pictures:04d}.png"
        paint(scene).save(self.root / name, optimize=False)
        return name


def draw_any(rng: random.Random) -> Scene:
    """One shape somewhere, or some in a row."""
    return draw_placed(rng) if rng.random() < 0.5 else draw_counted(rng)


def ask_about(rng: random.Random, scene: Scene) -> list[Question]:
    """One or two questions about one picture, each about another fact."""
    if rng.random() < 1 / 5:
        answer = f"The colour is {scene.colour} on a {scene.backdrop} background."
        return [Question("whole", "Describe the picture.", answer, NUM_COLOURS * NUM_BACKDROPS)]
    facts = [
        _ask(rng, "shape", "shape" if scene.count == 1 else "shapes", scene.colour, NUM_COLOURS),
        _ask(rng, "backdrop", "background", scene.backdrop, NUM_BACKDROPS),
    ]
    return rng.sample(facts, k=rng.randint(1, 2))


def _ask(rng: random.Random, kind: str, thing: str, colour: str, num_answers: int) -> Question:
    """Ask for the colour of a thing, to be answered in a word or, one in four times, in a sentence."""
    if rng.random() < 1 / 4:
        return Question(
            kind, f"Tell me the colour of the {thing}.", f"The colour of the {thing} is {colour}.", num_answers
        )
    return Question(kind, f"What is the colour of the {thing}?", colour, num_answers)


def sentences(rng: random.Random, count: int) -> Iterator[str]:
    """What is said in this world: questions and answers as in ``make_rows``, for training a tokenizer."""
    for _ in range(count):
        questions = [*ask_about(rng, draw_placed(rng)), *ask_about(rng, draw_counted(rng))]
        turns = [turn for question in questions for turn in _turns(question.text, question.answer)]
        yield from (turn["content"] for turn in turns + text_turns(rng))
        yield f"{SYSTEM_PROMPT}\nsystem\nuser\nassistant\n"


def text_turns(rng: random.Random) -> list[dict[str, str]]:
    """A conversation without pictures: counting, or the days of the week."""
    if rng.random() < 0.5:
        first = rng.randrange(1, 60)
        last = first + rng.randrange(2, 12)
        return _turns(f"Count from {first} to {last}.", " ".join(str(number) for number in range(first, last + 1)))
    day = rng.randrange(7)
    return _turns(f"Which day follows {DAYS[day]}?", DAYS[(day + 1) % 7])


def _turns(text: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


def _write(path: Path, rows: list[Row]) -> Path:
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    return path
