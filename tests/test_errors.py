from __future__ import annotations

import ast
import inspect
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import packtool
from packtool import errors


@pytest.mark.smoke
def test_docstring_draws_the_real_tree_with_the_real_codes() -> None:
    classes = [
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, errors.PacktoolError) and value.__module__ == errors.__name__
    ]
    codes = dict(re.findall(r"(\w+Error)\s+(\d)", errors.__doc__ or ""))
    assert codes == {cls.__name__: str(cls.exit_code) for cls in classes}


@pytest.mark.smoke
def test_pickled_errors_keep_all_fields() -> None:
    error = errors.RowError("rows.jsonl", 3, "media_missing", "a.png", "Put it back.")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is errors.RowError
    assert str(copy) == str(error)
    assert (copy.source, copy.row, copy.reason, copy.detail) == ("rows.jsonl", 3, "media_missing", "a.png")


def _messages() -> Iterator[tuple[str, str]]:
    """Place and text of every call and list in the package that has texts, but for the options' declarations."""
    folder = Path(packtool.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        if path.parent.name == "config":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            items = node.args if isinstance(node, ast.Call) else node.elts if isinstance(node, ast.List) else []
            parts = [part for item in items for part in ast.walk(item) if isinstance(part, ast.Constant)]
            yield (
                f"{path.relative_to(folder)}:{getattr(node, 'lineno', 0)}",
                " ".join(str(part.value) for part in parts),
            )


def test_messages_suggesting_overwrite_mention_the_deletion() -> None:
    suggestions = [(place, text) for place, text in _messages() if "--overwrite" in text]
    assert len(suggestions) > 3
    assert [place for place, text in suggestions if not re.search("delete|remove|replace", text)] == []


def test_several_problems_become_one_error() -> None:
    error = errors.ConfigError.from_problems(["--a is wrong", "--b is missing"])
    assert "2 settings" in str(error)
    assert "--a is wrong" in str(error)
    assert "--b is missing" in str(error)


def test_most_similar_name_is_suggested() -> None:
    assert errors.did_you_mean("sed", ["model", "seed"]) == "; did you mean 'seed'?"
    assert errors.did_you_mean("--packin-length", ["--packing-length"]) == "; did you mean --packing-length?"
    assert errors.did_you_mean("sed", ["model"]) == errors.did_you_mean("sed", ["seed"], likeness=0.99) == ""


def test_part_of_a_name_suggests_the_full_name() -> None:
    options = ["--expand-turns", "--dataset-num-proc", "--model"]
    assert errors.most_similar("--expand", options, likeness=0.75) == "--expand-turns"
    assert errors.most_similar("--num-proc", options, likeness=0.75) == "--dataset-num-proc"
    assert errors.most_similar("best", ["binpacking", "best_fit"]) == "best_fit"
    assert errors.most_similar("--urns", options, likeness=0.75) is None
    assert errors.most_similar("--mo", options, likeness=0.75) is None
