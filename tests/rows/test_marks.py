"""Marks of media that a row does not have."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from packtool.errors import DataError
from packtool.rows.forms import RowProblem, to_sample
from packtool.rows.forms.media import could_hold_media, likely_column
from packtool.rows.read import follow, scan
from packtool.rows.source import Source, SourceSpec


def conversation(question: str = "q", answer: str = "a", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (conversation("<image>q", images=[]), "image_marks"),
        (conversation("<image>q", images=None), "image_marks"),
        (conversation("<image>q", image=""), "image_marks"),
        (conversation("q", "<image>", images=[]), "image_marks"),
        (conversation("<image><video>q", images=["a.png"], videos=None), "video_marks"),
        (conversation("<audio>q", audio=[]), "audio_marks"),
        (conversation("<image>q", image_path="a.png"), "image_marks"),
        (conversation("<image>q", pictures=["a"]), "image_marks"),
        (conversation("<image>q", where={"path": "b/c.JPG"}), "image_marks"),
        (conversation("<video>q", films=["x.mp4"]), "video_marks"),
        ({"query": "<image>q", "response": "a", "img": "a.png"}, "image_marks"),
        ({"text": "<image>", "images": []}, "image_marks"),
    ],
)
def test_placeholder_without_its_medium_is_dropped(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowProblem) as exc_info:
        to_sample(row, Source("rows.jsonl"), 0)
    assert exc_info.value.reason == reason
    assert "--columns" in exc_info.value.detail


@pytest.mark.parametrize(
    ("row", "requested"),
    [
        (conversation("what is <video> for?"), "video"),
        (conversation("<image>q", id="17", notes="see below"), "image"),
        (conversation("q", "use <video> for that"), ""),
        ({"text": "an <image> tag"}, ""),
        ({"messages": [{"role": "assistant", "content": "an <image> tag"}]}, ""),
        (conversation("q"), ""),
    ],
)
def test_placeholders_without_media_are_marked(row: dict[str, Any], requested: str) -> None:
    assert to_sample(row, Source("rows.jsonl"), 0).lone_mark == requested


def test_option_declares_that_there_are_no_media() -> None:
    source = Source("rows.jsonl", form="messages", columns=(("messages", "messages"), ("images", ""), ("videos", "")))
    row = conversation("<image> and <video>", image_path="a.png", images=[])
    sample = to_sample(row, source, 0)
    assert (sample.lone_mark, sample.images) == ("", ())
    assert sample.turns[0].content == "<image> and <video>"


@pytest.mark.parametrize("look", [scan, follow])
def test_unread_media_column_is_reported_per_file(tmp_path: Path, look: Any) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [conversation(f"<image>{i}", image_path=f"{i}.png", id=i) for i in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="image_path") as exc_info:
        look(SourceSpec(str(path)))
    assert "--columns images=image_path" in str(exc_info.value)
    look(SourceSpec(str(path), columns=(("images", "image_path"),)))
    look(SourceSpec(str(path), columns=(("images", ""),)))
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, conversation("hello")]))
    look(SourceSpec(str(path)))  # not all rows: each tells for itself


def test_likely_columns() -> None:
    assert likely_column({"img": "", "file": "a.webp", "photo_id": 3}, "image") == "file"
    assert likely_column({"photo_id": 3, "messages": ["a.png"], "images": "b.png"}, "image") == "photo_id"
    assert likely_column({"id": 3, "notes": "text", "topic": "art", "profile": "x", "configured": 1}, "image") == ""


TEXT_COLUMNS: list[dict[str, Any]] = [
    {},
    {"id": "17", "source": "forum/html", "topic": "a/b", "configured": True, "invoice": None, "score": 0.5},
    {"notes": "see a.html and /etc", "tags": ["x/y", "z"], "extra": {"lang": "en"}, "channel": "a/b"},
    {"system": "You know <image>.", "tools": [{"type": "function", "function": {"name": "f"}}]},
]
NAMES = ("images", "Image", "image_id", "img", "photoUrl", "file_name", "mediaRef", "picture2", "myimage")
VALUES: tuple[Any, ...] = ("/data/1", "https://h/1", "s3://b/1", "./1", "C:\\1", "data:;base64,AA", "1.JPG", "A" * 2000)
VALUES += ({"y": "/data/1"}, ["a", "b.mp4"], [{"y": ["~/1"]}])
MEDIA_COLUMNS: list[dict[str, Any]] = [
    *({name: None} for name in NAMES),
    *({"x": value} for value in VALUES),
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "1"}}]}]},
    {"messages": '[{"role": "user", "content": [{"type": "image"}]}]'},
]


@pytest.mark.parametrize("look", [lambda spec: scan(spec).source, lambda spec: follow(spec)[0]], ids=["scan", "follow"])
@pytest.mark.parametrize("columns", [*TEXT_COLUMNS, *MEDIA_COLUMNS], ids=str)
def test_placeholder_is_text_without_a_possible_media_column(
    tmp_path: Path, columns: dict[str, Any], look: Any
) -> None:
    """By the names and values of the file's first rows, and of the row itself."""
    path, requested = tmp_path / "rows.jsonl", "image" if columns in MEDIA_COLUMNS else ""
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in ({**conversation(), **columns}, conversation("<image>q")))
    )
    source = look(SourceSpec(str(path)))
    assert source.holds_media is bool(requested)
    assert to_sample(conversation("<image>q"), source, 1).lone_mark == requested
    path.write_text(json.dumps(conversation()) + "\n")
    source = look(SourceSpec(str(path)))
    assert not source.holds_media
    if requested and columns.keys() <= {"x"}:  # and the row alone has such a column
        with suppress(RowProblem):
            assert to_sample(conversation("<image>q", **columns), source, 1).lone_mark == requested


def test_bytes_and_named_columns_may_hold_media() -> None:
    assert could_hold_media({"x": {"y": b"1"}})
    assert could_hold_media({"x": "1"}, (("images", "x"),))
    assert not could_hold_media({"x": "1"}, (("messages", "x"), ("images", "")))
