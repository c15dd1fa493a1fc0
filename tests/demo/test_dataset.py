"""The small world is the same for the same seed, and only its pictures tell the answers."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from packtool.demo.dataset import (
    BACKDROP_COLOURS,
    SHAPE_COLOURS,
    TRAIN_ROWS_PER_HELD_OUT_ROW,
    SyntheticDataset,
    make_rows,
)

NUM_ROWS = 1500
NUM_UNUSABLE = 6
MARK = "<image>"


@dataclass(frozen=True)
class Question:
    """A question with all that stands before it, its answer, and the picture that it is about."""

    before: tuple[str, ...]
    text: str
    answer: str
    image: str


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("world")


@pytest.fixture(scope="module")
def world(folder: Path) -> SyntheticDataset:
    return make_rows(str(folder), NUM_ROWS, 7, NUM_UNUSABLE)


def rows_of(path: Path) -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def questions_in(row: dict[str, Any]) -> list[Question]:
    """The picture questions of a row; a picture is what was shown last before the question."""
    questions, before, images, image = [], [], iter(row["images"]), ""
    for turn, answer in zip(row["messages"], row["messages"][1:], strict=False):
        for _ in range(turn["content"].count(MARK)):
            image = next(images)
        if turn["role"] == "user" and image:
            questions.append(Question(tuple(before), turn["content"].replace(MARK, ""), answer["content"], image))
        before.append(turn["content"])
    return questions


@cache
def colours_of(path: Path) -> tuple[str, str]:
    """The colour of the shapes and that of the backdrop, from nothing but the pixels."""
    names = {rgb: name for colours in (SHAPE_COLOURS, BACKDROP_COLOURS) for name, rgb in colours.items()}
    with Image.open(path) as picture:
        colours = {names[rgb] for _, rgb in picture.getcolors()}
        corner = names[picture.getpixel((0, 0))]
    (shape,) = colours & set(SHAPE_COLOURS)
    (backdrop,) = colours & set(BACKDROP_COLOURS)
    assert corner == backdrop
    return shape, backdrop


def true_colours(question: str, path: Path) -> list[str]:
    """What the answer to a question must name, in order."""
    shape, backdrop = colours_of(path)
    if "background" in question:
        return [backdrop]
    return [shape] if "shape" in question else [shape, backdrop]


def named_colours(answer: str) -> list[str]:
    return [word for word in answer.rstrip(".").split() if word in SHAPE_COLOURS or word in BACKDROP_COLOURS]


@pytest.mark.smoke
def test_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("first", 3), ("again", 3), ("other", 4)):
        make_rows(str(tmp_path / name), 60, seed, 2)
    files = {
        name: {str(path.relative_to(tmp_path / name)): path.read_bytes() for path in (tmp_path / name).rglob("*.*")}
        for name in ("first", "again", "other")
    }
    assert files["first"] == files["again"]
    assert files["first"]["train.json"] != files["other"]["train.json"]


def test_images_show_the_answers(folder: Path, world: SyntheticDataset) -> None:
    questions = [one for path in (world.train, world.held_out) for row in rows_of(path) for one in questions_in(row)]
    there = [one for one in questions if (folder / one.image).exists()]
    assert len(there) > NUM_ROWS
    for one in there:
        assert named_colours(one.answer) == true_colours(one.text, folder / one.image), one


def test_evaluated_questions_are_those_of_the_rows(world: SyntheticDataset) -> None:
    rows = rows_of(world.held_out)
    assert len(rows) == len(world.held_out_questions) == NUM_ROWS // TRAIN_ROWS_PER_HELD_OUT_ROW
    for row, questions in zip(rows, world.held_out_questions, strict=True):
        assert row["images"]
        assert [(one.text, one.answer) for one in questions_in(row)] == [(q.text, q.answer) for q in questions]


def test_only_the_image_reveals_the_answer(world: SyntheticDataset) -> None:
    """Whoever knows by heart which answer most often follows what was said stays near chance."""
    keys = {
        "question": lambda one: one.text,
        "question and last answer": lambda one: (one.text, one.before[-1:]),
        "all before": lambda one: (one.before, one.text),
    }
    train = [one for row in rows_of(world.train) for one in questions_in(row)]
    held_out = [one for row in rows_of(world.held_out) for one in questions_in(row)]
    for key_name, key in keys.items():
        answers_by_key: dict[Any, Counter[str]] = defaultdict(Counter)
        for one in train:
            answers_by_key[key(one)][one.answer] += 1
        right = [
            bool(answers_by_key[key(one)]) and answers_by_key[key(one)].most_common(1)[0][0] == one.answer
            for one in held_out
        ]
        assert float(np.mean(right)) < world.chance + 0.08, key_name


def test_answers_are_balanced(world: SyntheticDataset) -> None:
    counts: dict[str, Counter[tuple[str, ...]]] = defaultdict(Counter)
    for row in rows_of(world.train):
        for one in questions_in(row):
            counts[one.text][tuple(named_colours(one.answer))] += 1
    for text, answers in counts.items():
        total = sum(answers.values())
        expected = total / (len(SHAPE_COLOURS) * (len(BACKDROP_COLOURS) if text.startswith("Describe") else 1))
        # Five standard deviations of a count.
        assert max(answers.values()) < expected + 5 * expected**0.5, text


def test_swapped_rows_differ_only_in_their_images(folder: Path, world: SyntheticDataset) -> None:
    held_out, swapped = rows_of(world.held_out), rows_of(world.swapped)
    assert [row["messages"] for row in held_out] == [row["messages"] for row in swapped]
    assert [len(row["images"]) for row in held_out] == [len(row["images"]) for row in swapped]
    assert not any(set(a["images"]) & set(b["images"]) for a, b in zip(held_out, swapped, strict=True))
    pictures = [sorted(image for row in rows for image in row["images"]) for rows in (held_out, swapped)]
    assert pictures[0] == pictures[1]
    sizes = [[Image.open(folder / row["images"][0]).size for row in rows] for rows in (held_out, swapped)]
    assert np.mean([a != b for a, b in zip(*sizes, strict=True)]) > 0.9


def test_answers_from_swapped_images_are_right_by_chance(folder: Path, world: SyntheticDataset) -> None:
    questions = [one for row in rows_of(world.swapped) for one in questions_in(row)]
    agree = [named_colours(one.answer) == true_colours(one.text, folder / one.image) for one in questions]
    assert abs(float(np.mean(agree)) - world.chance) < 0.08


def test_rows_and_images_vary(folder: Path, world: SyntheticDataset) -> None:
    rows = rows_of(world.train)
    assert len(rows) == NUM_ROWS
    assert {len(row["images"]) for row in rows} == {0, 1, 2}
    assert {sum(turn["role"] == "user" for turn in row["messages"]) for row in rows} == {1, 2, 3, 4}
    assert {row["messages"][0]["role"] for row in rows} == {"system", "user"}
    answers = [len(turn["content"].split()) for row in rows for turn in row["messages"] if turn["role"] == "assistant"]
    assert min(answers) == 1
    assert max(answers) > 8
    sizes = {Image.open(path).size for path in (folder / "pictures").iterdir()}
    assert len(sizes) > 50
    assert any(width > height for width, height in sizes)
    assert any(width < height for width, height in sizes)


def test_unusable_rows_are_too_long_or_lack_their_image(folder: Path, world: SyntheticDataset) -> None:
    rows = rows_of(world.train)
    lost = [row for row in rows if not all((folder / image).exists() for image in row["images"])]
    long = [row for row in rows if any(len(turn["content"]) > 5000 for turn in row["messages"])]
    assert (len(lost), len(long)) == (NUM_UNUSABLE // 2, NUM_UNUSABLE // 2)
    assert world.num_pictures == len(list((folder / "pictures").iterdir()))
