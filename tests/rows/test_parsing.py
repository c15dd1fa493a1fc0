from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtool.rows.parsing import JsonProblem, parse_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(VALUES, st.booleans())
def test_written_json_is_read_back(value: Any, ascii_only: bool) -> None:
    assert parse_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"{", "invalid_json"),
        (b"1" * 5000, "invalid_json"),
        (b"", "invalid_json"),
        (b" ", "invalid_json"),
        (b"[1] 2", "invalid_json"),
        (b"{} {}", "invalid_json"),
        (b"[" * 100_000 + b"]" * 100_000, "invalid_json"),
        (b'"a\xed\xa0\x80"', "invalid_text"),
        (b'"\xff"', "invalid_text"),
        (b'["\\ud83d"]', "invalid_text"),
        (b'{"\\ud83d": 1}', "invalid_text"),
        (b'{"a": 1, "b": {"c": 1, "c": 1}}', "duplicate_keys"),
    ],
)
def test_ambiguous_json_is_refused(text: bytes, reason: str) -> None:
    with pytest.raises(JsonProblem) as exc_info:
        parse_json(text)
    assert exc_info.value.reason == reason


def _from_below(frames: int, text: bytes) -> str:
    """What becomes of a text that is read by somebody who was called so many times over."""
    if frames:
        return _from_below(frames - 1, text)
    try:
        parse_json(text)
    except JsonProblem as problem:
        return problem.detail
    return ""


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}"), (b'[{"a":', b"}]")])
@pytest.mark.parametrize("inner", [b"1", b'"\\ud83d\\ude00 [[[ {{{"', b"null"])
@pytest.mark.parametrize("depth", [100, 102, 300, 600, 900, 990, 5000])
def test_nesting_depth_is_limited(opening: bytes, closing: bytes, inner: bytes, depth: int) -> None:
    times = depth // (len(opening.strip(b'"a:')) or 1)
    text = opening * times + inner + closing * times
    message = {_from_below(frames, text) for frames in (0, 100, 400, 700)}
    assert message == ({""} if depth == 100 else {"lists and objects are nested more than 100 levels deep"})


def test_harmless_json_is_accepted() -> None:
    assert parse_json(b'["\\ud83d\\ude00", "\\\\ud83d", "[[[{{{"]') == ["\U0001f600", "\\ud83d", "[[[{{{"]
    assert parse_json(b" [1]\r\n") == [1]
    assert parse_json(b"[1] ") == [1]
