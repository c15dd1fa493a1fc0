"""Errors confined to one row, and the list of drop reasons with the notes made from it."""

from __future__ import annotations

import ast
import errno
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

import packtool
from packtool.constants import MEDIA_MARKS
from packtool.errors import RowError, StorageError
from packtool.rows.read import read_block, scan
from packtool.rows.sample import DROP_REASONS, UNEXPECTED, Dropped, drop_notes, guard_row, unexpected_note
from packtool.rows.source import SourceSpec

ROOT = Path(packtool.__file__).parent
_ARGUMENT = {"RowProblem": 0, "MediaProblem": 0, "Dropped": 2}
"""Position of the reason among the arguments of these calls."""


def texts_of(tree: ast.AST) -> Iterator[str]:
    """Yield every text in the code; for ``f"{kind}_marks"``, one text for each kind of media."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr) and isinstance(last := node.values[-1], ast.Constant):
            yield from (f"{kind}{last.value}" for kind in MEDIA_MARKS)


def trees() -> Iterator[ast.AST]:
    """Yield the code of all modules."""
    return (ast.parse(path.read_text()) for path in ROOT.rglob("*.py"))


def test_every_used_drop_reason_is_listed() -> None:
    reasons = set()
    for tree in trees():
        for call in ast.walk(tree):
            name = getattr(getattr(call, "func", None), "id", "")
            if name in _ARGUMENT and len(args := getattr(call, "args", [])) > _ARGUMENT[name]:
                reason = args[_ARGUMENT[name]]
                if isinstance(reason, (ast.Constant, ast.JoinedStr)):
                    reasons |= set(texts_of(reason)) - {"_marks"}
    assert len(reasons) > 40
    assert reasons <= DROP_REASONS.keys()


def test_every_listed_drop_reason_is_used() -> None:
    used = {text for tree in trees() for text in texts_of(tree)}
    assert DROP_REASONS.keys() <= used


def test_every_reason_has_a_remedy() -> None:
    """Except for unexpected exceptions, which have a note of their own."""
    assert [reason for reason, remedy in DROP_REASONS.items() if not remedy] == [UNEXPECTED]


def test_the_reasons_in_the_documentation_are_in_the_list() -> None:
    page = (ROOT.parent / "docs" / "rows.md").read_text()
    tables = [table_text.partition("\n\n")[0] for table_text in page.split("| reason | cause |")[1:]]
    names = re.findall(r"^\| `(\w+)` \|", "\n".join(tables), re.MULTILINE)
    assert len(names) >= 10
    assert set(names) <= DROP_REASONS.keys()


def test_notes_about_dropped_rows() -> None:
    dropped = {"media_missing": 2, "unexpected": 9, "over_max_length": 3, "image_marks": 4, "role_order": 1}
    warning, *remedies = drop_notes(dropped, 70)
    assert warning == "warning: 19 of 70 rows (27%) were dropped"
    names = [note.partition(":")[0] for note in remedies]
    assert names == ["image_marks [R054] (4)", "over_max_length [R006] (3)", "media_missing [R002] (2)"]
    assert "--columns images=" in remedies[0]
    assert drop_notes(dropped, 76) == drop_notes(dropped) == remedies
    assert drop_notes({}, 5) == []


def fail(error: BaseException) -> NoReturn:
    raise error


class PanicException(BaseException):  # the name that libraries in Rust use
    pass


@pytest.mark.smoke
@pytest.mark.parametrize(
    "error", [ValueError("a\ud800"), RecursionError(), OSError(errno.EIO, "no"), AssertionError("b"), PanicException()]
)
def test_an_unexpected_exception_drops_its_row(error: BaseException) -> None:
    result = guard_row("rows.jsonl", 7, fail, error)
    assert isinstance(result, Dropped)
    assert (result.source, result.row, result.reason) == ("rows.jsonl", 7, "unexpected")
    assert result.detail.startswith(f"{type(error).__name__} at rows/sample.py:")
    result.detail.encode()


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
def test_errors_not_caused_by_a_row_are_raised(error: BaseException) -> None:
    with pytest.raises(type(error)):
        guard_row("rows.jsonl", 7, fail, error)


def test_the_note_has_the_count_and_the_file() -> None:
    assert unexpected_note({"invalid_json": 3}, "out/dropped.jsonl") == ""
    note = unexpected_note({"invalid_json": 3, "unexpected": 1200}, "out/dropped.jsonl")
    for words in ("1,200 rows", "out/dropped.jsonl", "--strict"):
        assert words in note


def test_a_detail_is_short_and_utf8() -> None:
    assert len(Dropped("a", 0, "b", "x" * 10**6).detail) < 1100
    assert Dropped("a", 0, "b", "\ud800").detail == "\\ud800"


def test_an_error_in_the_parser_drops_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b"}\n{"text": "c"}\n')
    result = scan(SourceSpec(str(path)))
    parse = __import__("packtool.rows.text_files", fromlist=["parse_json"]).parse_json
    monkeypatch.setattr(
        "packtool.rows.text_files.parse_json", lambda text: fail(KeyError("odd")) if b"b" in text else parse(text)
    )
    first_row, second_row, third = (row for _, row in read_block(result.source, result.blocks[0]))
    assert (first_row, third) == ({"text": "a"}, {"text": "c"})
    assert isinstance(second_row, Dropped)
    assert (second_row.row, second_row.reason) == (1, "unexpected")
