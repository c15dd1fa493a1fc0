from __future__ import annotations

from typing import Any

import pytest

from packtool.rows.forms import RowProblem, to_sample
from packtool.rows.source import Source


def problem_of(row: dict[str, Any]) -> RowProblem:
    with pytest.raises(RowProblem) as caught:
        to_sample(row, Source("folder/rows.json"), 3)
    return caught.value


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_a_plain_row() -> None:
    row = {
        "messages": [{"role": "system", "content": "s"}, user("q"), {"role": "assistant", "content": "a"}],
        "channel": "chat",
        "other": 1,
    }
    sample = to_sample(row, Source("folder/rows.json"), 3)
    assert [(turn.role, turn.content) for turn in sample.turns] == [("system", "s"), ("user", "q"), ("assistant", "a")]
    assert (sample.source, sample.row, sample.channel) == ("folder/rows.json", 3, "chat")


def test_paths_start_in_the_files_folder() -> None:
    row = {"messages": [user("<image><image>")], "images": ["a.png", "/data/b.png"]}
    first, second = to_sample(row, Source("/folder/rows.json"), 0).images
    assert first.path == "/folder/a.png"
    assert second.path == "/data/b.png"


def test_missing_marks_are_put_before_the_first_user_text() -> None:
    row = {"messages": [{"role": "system", "content": "s"}, user("q"), user("<image>r")], "images": ["a", "b"]}
    sample = to_sample(row, Source("rows.json"), 0)
    assert [turn.content for turn in sample.turns] == ["s", "<image>q", "<image>r"]
    assert sample.num_marks_added == 1


def test_marks_in_a_row_without_pictures_are_text() -> None:
    assert (
        to_sample({"messages": [user("<image>")], "images": []}, Source("rows.json"), 0).turns[0].content == "<image>"
    )


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "x", "id": 1}, "unknown_form"),
        ({"messages": []}, "empty_conversation"),
        ({"messages": "text"}, "empty_conversation"),
        ({"messages": ["text"]}, "invalid_row"),
        ({"messages": [{"role": "human", "content": "x"}]}, "unknown_role"),
        ({"messages": [user(None)]}, "invalid_content"),
        ({"messages": [user([1])]}, "invalid_content"),
        ({"messages": [user("<image>")], "images": ["a"] * 0 + [""]}, "invalid_row"),
        ({"messages": [user("<image><image>")], "images": ["a"]}, "image_marks"),
        ({"messages": [{"role": "assistant", "content": "x"}], "images": ["a"]}, "image_marks"),
        ({"messages": [user("x")], "videos": ["a.mp4"]}, "media_unsupported"),
        ({"messages": [user("x")], "tools": "x"}, "invalid_row"),
    ],
)
def test_rows_that_cannot_be_used(row: dict[str, Any], reason: str) -> None:
    assert problem_of(row).reason == reason


def test_an_unknown_form_shows_its_keys() -> None:
    assert "id, text" in problem_of({"text": "x", "id": 1}).detail
