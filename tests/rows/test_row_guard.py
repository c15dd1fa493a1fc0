from __future__ import annotations

import errno
from pathlib import Path
from typing import NoReturn

import pytest

from packtool.errors import RowError, StorageError
from packtool.rows.read import read_block, scan
from packtool.rows.sample import Dropped, guard_row, unforeseen_note
from packtool.rows.source import SourceSpec


def fail(error: BaseException) -> NoReturn:
    raise error


class PanicException(BaseException):  # as libraries in Rust name theirs
    pass


@pytest.mark.smoke
@pytest.mark.parametrize(
    "error", [ValueError("a\ud800"), RecursionError(), OSError(errno.EIO, "no"), AssertionError("b"), PanicException()]
)
def test_what_nobody_foresaw_is_a_dropped_row(error: BaseException) -> None:
    found = guard_row("rows.jsonl", 7, fail, error)
    assert isinstance(found, Dropped)
    assert (found.source, found.row, found.reason) == ("rows.jsonl", 7, "unexpected")
    assert found.detail.startswith(f"{type(error).__name__} at rows/sample.py:")
    found.detail.encode()


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        SystemExit(),
        MemoryError(),
        OSError(errno.ENOSPC, "full"),
        OSError(errno.EMFILE, "too many"),
        StorageError("the output is gone"),
        RowError("rows.jsonl", 0, "over_max_length", "too long"),
    ],
)
def test_what_is_no_fault_of_the_row_is_raised(error: BaseException) -> None:
    with pytest.raises(type(error)):
        guard_row("rows.jsonl", 7, fail, error)


def test_the_note_counts_and_says_where_to_look() -> None:
    assert unforeseen_note({"invalid_json": 3}, "out/dropped.jsonl") == ""
    note = unforeseen_note({"invalid_json": 3, "unexpected": 1200}, "out/dropped.jsonl")
    for words in ("1,200 rows", "out/dropped.jsonl", "--strict"):
        assert words in note


def test_a_detail_is_short_and_can_be_written() -> None:
    assert len(Dropped("a", 0, "b", "x" * 10**6).detail) < 1100
    assert Dropped("a", 0, "b", "\ud800").detail == "\\ud800"


def test_a_parser_that_breaks_costs_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b"}\n{"text": "c"}\n')
    found = scan(SourceSpec(str(path)))
    parse = __import__("packtool.rows.lines", fromlist=["parse_json"]).parse_json
    monkeypatch.setattr(
        "packtool.rows.lines.parse_json", lambda text: fail(KeyError("odd")) if b"b" in text else parse(text)
    )
    first, second, third = (row for _, row in read_block(found.source, found.blocks[0]))
    assert (first, third) == ({"text": "a"}, {"text": "c"})
    assert isinstance(second, Dropped)
    assert (second.row, second.reason) == (1, "unexpected")
