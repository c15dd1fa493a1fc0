"""The list of drop reasons, and the notes made of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import packtool
from packtool.constants import MEDIA_MARKS
from packtool.rows.sample import DROP_REASONS, UNEXPECTED, drop_notes

ROOT = Path(packtool.__file__).parent
_ARGUMENT = {"RowProblem": 0, "MediaProblem": 0, "CannotRender": 0, "Dropped": 2}
"""Which argument of these calls is the reason."""


def texts_of(tree: ast.AST) -> Iterator[str]:
    """Every text in the code, with the kinds of media in place of a value in front: ``f"{kind}_marks"``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr) and isinstance(last := node.values[-1], ast.Constant):
            yield from (f"{kind}{last.value}" for kind in MEDIA_MARKS)


def trees() -> Iterator[ast.AST]:
    """The code of all modules, that of this one without the list itself."""
    for path in ROOT.rglob("*.py"):
        tree = ast.parse(path.read_text())
        if path == ROOT / "rows" / "sample.py":
            tree.body = [node for node in tree.body if "DROP_REASONS =" not in ast.unparse(node)]
        yield tree


def test_every_reason_that_is_used_is_in_the_list() -> None:
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


def test_every_reason_in_the_list_is_used() -> None:
    used = {text for tree in trees() for text in texts_of(tree)}
    assert DROP_REASONS.keys() <= used


def test_every_reason_has_a_remedy() -> None:
    """But for what nobody foresaw, which has a note of its own."""
    assert [reason for reason, remedy in DROP_REASONS.items() if not remedy] == [UNEXPECTED]


def test_the_reasons_in_the_documentation_are_in_the_list() -> None:
    page = (ROOT.parent / "docs" / "rows.md").read_text()
    tables = [rest.partition("\n\n")[0] for rest in page.split("| reason | cause |")[1:]]
    names = re.findall(r"^\| `(\w+)` \|", "\n".join(tables), re.MULTILINE)
    assert len(names) >= 10
    assert set(names) <= DROP_REASONS.keys()


def test_notes_about_dropped_rows() -> None:
    dropped = {"media_missing": 2, "unexpected": 9, "over_max_length": 3, "image_marks": 4, "role_order": 1}
    warning, *remedies = drop_notes(dropped, 70)
    assert warning == "warning: 19 of 70 rows (27%) were dropped"
    names = [note.partition(":")[0] for note in remedies]
    assert names == ["image_marks (4)", "over_max_length (3)", "media_missing (2)"]
    assert "--columns images=" in remedies[0]
    assert drop_notes(dropped, 76) == drop_notes(dropped) == remedies
    assert drop_notes({}, 5) == []
