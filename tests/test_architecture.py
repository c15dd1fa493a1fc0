"""The house's rules, read off the code itself: who may import whom, and how long a room may be."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "packtool"

# The way of the data: a folder imports only from those before it, and from the base.
ORDER = (
    "rows",
    "media",
    "encode",
    "cache",
    "plan",
    "stream",
    "batch",
    "attention",
    "train",
    "report",
    "launch",
    "demo",
    "cli",
)
BASE = {"errors", "constants", "progress", "config", "storage"}

OWNERS = {
    "torch": {"batch", "attention", "train", "demo"},
    "transformers": {"encode", "batch", "attention", "train", "demo"},
    "pyarrow": {"rows", "cache"},
    "datasets": {"rows", "cache"},
    "fsspec": {"storage"},
    "s3fs": {"storage"},
    "botocore": {"storage"},
    "aiohttp": {"storage"},
    "PIL": {"media", "batch", "demo", "report"},
    "av": {"media"},
    "ray": {"cache"},
    "binpacking": {"plan"},
    "typer": {"cli"},
    "rich": {"cli", "report"},
}


def _files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield name.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            module = node.module or ""
            yield module, node.lineno
            if module == "packtool":
                for name in node.names:
                    yield f"packtool.{name.name}", node.lineno


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_folder_imports_only_from_those_before_it(path: Path) -> None:
    room = _room(path)
    if room in ("__init__", "__main__"):
        return
    for name, line in _imports(path):
        parts = name.split(".")
        if parts[0] != "packtool" or len(parts) == 1:
            continue
        other = parts[1]
        if other in BASE | {room, "__version__"}:
            allowed = room not in BASE or other in BASE or other == "__version__"
        else:
            allowed = room in ORDER and other in ORDER and ORDER.index(other) < ORDER.index(room)
        assert allowed, f"{path.relative_to(PACKAGE)}:{line}: {room} may not import {name}"


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_heavy_dependencies_have_owners(path: Path) -> None:
    for name, line in _imports(path):
        owners = OWNERS.get(name.split(".")[0])
        assert owners is None or _room(path) in owners, f"{path.relative_to(PACKAGE)}:{line}: imports {name}"


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_rooms_are_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 400, "a file of more than 400 lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 60, f"{node.name} has more than 60 lines"
            arguments = node.args
            count = len(arguments.args) + len(arguments.kwonlyargs) + len(arguments.posonlyargs)
            assert count <= 9, f"{node.name} has {count} parameters"


def test_every_public_thing_has_a_docstring() -> None:
    missing = []
    for path in _files():
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), f"{path} has no docstring"
        for node in tree.body:
            public = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
            if public and not ast.get_docstring(node):
                missing.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}")
    assert not missing
