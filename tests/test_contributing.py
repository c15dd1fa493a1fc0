"""CONTRIBUTING.md leads somewhere: every file, folder and name that it writes as code is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from itertools import chain, product
from pathlib import Path

ROOT = Path(__file__).parent.parent
CODE = tuple(dict.fromkeys(re.findall(r"(?<!`)`([^`\n]+)`(?!`)", (ROOT / "CONTRIBUTING.md").read_text())))
PATHS = [text for text in CODE if " " not in text and ("/" in text or re.search(r"\.(py|md|tsv|toml|txt)$", text))]
NAMES = [
    text for text in CODE if re.fullmatch(r"[A-Za-z]\w+[a-zA-Z](\.\w+)*|_[a-z]\w+[a-z]", text) and text not in PATHS
]


@cache
def names_in_the_code() -> frozenset[str]:
    """Modules, what they define and take, and strings, such as variables of the environment."""
    code_names: set[str] = set()
    for path in chain((ROOT / "packtool").rglob("*.py"), (ROOT / "tests").rglob("*.py")):
        code_names.add(path.stem)
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name) | ast.arg(arg=name):
                    code_names.add(name)
                case ast.Attribute(attr=name) | ast.Constant(value=str(name)):
                    code_names.add(name)
    return frozenset(code_names)


def test_every_path_leads_to_a_file() -> None:
    assert [text for text in PATHS if not leads_to_a_file(text)] == []


def leads_to_a_file(text: str) -> bool:
    """Whether a path, perhaps with a function behind it, is there: from the repository or a folder of the package.

    ``NAME`` stands for any name.
    """
    path, _, function = text.partition("::")
    pattern = path.rstrip("/").replace("NAME", "*")
    starts = (ROOT, ROOT / "packtool", ROOT / "tests")
    depths, suffixes = ("", "**/"), ("", ".py")
    files = [
        file
        for start, depth, suffix in product(starts, depths, suffixes)
        if start != ROOT or not depth  # never through all that lies beside the package
        for file in start.glob(f"{depth}{pattern}{suffix}")
    ]
    return bool(files) and (not function or f"def {function}(" in files[0].read_text())


def test_every_name_exists_in_the_code() -> None:
    assert len(PATHS) + len(NAMES) > 100
    assert [text for text in NAMES if not set(text.split(".")) <= names_in_the_code()] == []
