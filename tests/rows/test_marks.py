"""Marks of media that a row does not have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from packtool.errors import DataError
from packtool.rows.forms import RowProblem, to_sample
from packtool.rows.forms.marks import likely_column
from packtool.rows.scan import follow, scan
from packtool.rows.source import Source, SourceSpec


def talk(question: str = "q", answer: str = "a", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (talk("<image>q", images=[]), "image_marks"),
        (talk("<image>q", images=None), "image_marks"),
        (talk("<image>q", image=""), "image_marks"),
        (talk("q", "<image>", images=[]), "image_marks"),
        (talk("<image><video>q", images=["a.png"], videos=None), "video_marks"),
        (talk("<audio>q", audio=[]), "audio_marks"),
        (talk("<image>q", image_path="a.png"), "image_marks"),
        (talk("<image>q", pictures=["a"]), "image_marks"),
        (talk("<image>q", where={"path": "b/c.JPG"}), "image_marks"),
        (talk("<video>q", films=["x.mp4"]), "video_marks"),
        ({"query": "<image>q", "response": "a", "img": "a.png"}, "image_marks"),
        ({"text": "<image>", "images": []}, "image_marks"),
    ],
)
def test_a_mark_whose_medium_was_lost(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowProblem) as caught:
        to_sample(row, Source("rows.jsonl"), 0)
    assert caught.value.reason == reason
    assert "--columns" in caught.value.detail


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        (talk("what is <video> for?"), "video"),
        (talk("<image>q", id="17", notes="see below"), "image"),
        (talk("q", "use <video> for that"), ""),
        ({"text": "an <image> tag"}, ""),
        ({"messages": [{"role": "assistant", "content": "an <image> tag"}]}, ""),
        (talk("q"), ""),
    ],
)
def test_a_mark_that_may_be_text(row: dict[str, Any], asked: str) -> None:
    assert to_sample(row, Source("rows.jsonl"), 0).lone_mark == asked


def test_the_user_says_that_there_are_none() -> None:
    source = Source("rows.jsonl", form="messages", columns=(("messages", "messages"), ("images", ""), ("videos", "")))
    row = talk("<image> and <video>", image_path="a.png", images=[])
    sample = to_sample(row, source, 0)
    assert (sample.lone_mark, sample.images) == ("", ())
    assert sample.turns[0].content == "<image> and <video>"


@pytest.mark.parametrize("look", [scan, follow])
def test_a_column_of_another_name_is_told_for_the_file(tmp_path: Path, look: Any) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [talk(f"<image>{i}", image_path=f"{i}.png", id=i) for i in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="image_path") as caught:
        look(SourceSpec(str(path)))
    assert "--columns images=image_path" in str(caught.value)
    look(SourceSpec(str(path), columns=(("images", "image_path"),)))
    look(SourceSpec(str(path), columns=(("images", ""),)))
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, talk("hello")]))
    look(SourceSpec(str(path)))  # not all rows: each tells for itself


def test_likely_columns() -> None:
    assert likely_column({"img": "", "file": "a.webp", "photo_id": 3}, "image") == "file"
    assert likely_column({"photo_id": 3, "messages": ["a.png"], "images": "b.png"}, "image") == "photo_id"
    assert likely_column({"id": 3, "notes": "text"}, "image") == ""
