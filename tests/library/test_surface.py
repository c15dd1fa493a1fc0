"""The public surface: what it is, and that it costs nothing until it is used.

A change of ``surface.txt`` is a change for users: it goes into CHANGELOG.md, and what it breaks into a new version.
``python -m tests.library.test_surface`` prints what is there now.
"""

from __future__ import annotations

import inspect
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import packtool
from scripts._api_docs import public_members, signature

LISTING = Path(__file__).parent / "surface.txt"
HEAVY = ("torch", "transformers", "pyarrow", "datasets", "numpy", "tokenizers", "accelerate", "fsspec", "yaml")


def surface() -> Iterator[str]:
    """A line for each name, and for each member of a class."""
    for name in packtool.__all__:
        public_object = getattr(packtool, name)
        if not callable(public_object):
            yield f"packtool.{name}"
            continue
        for line in [signature(name, public_object)] if name != "Plan" else [name]:
            yield "packtool." + "".join(part.strip() + " " * part.endswith(",") for part in line.splitlines())
        for member, value in public_members(public_object) if inspect.isclass(public_object) else ():
            yield f"packtool.{name}.{signature(member, value)}"


@pytest.mark.smoke
def test_names_and_signatures() -> None:
    assert list(surface()) == LISTING.read_text().splitlines()


def test_importing_packtool_imports_no_library() -> None:
    """In a process of its own; an error class is no reason to import more, and a misspelt name neither."""
    code = (
        "import json, sys, packtool; packtool.errors.ConfigError; assert not hasattr(packtool, 'exprot'); "
        "from packtool import errors; print(json.dumps([*sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = json.loads(done.stdout)
    assert not {name.split(".")[0] for name in imported} & set(HEAVY)
    assert not any(name.startswith("packtool.library") for name in imported)


def test_every_public_name_exists() -> None:
    for name in packtool.__all__:
        assert getattr(packtool, name) is not None
    assert set(packtool.__all__) < set(dir(packtool))
    with pytest.raises(AttributeError, match="no attribute 'exprot'"):
        packtool.exprot  # noqa: B018


def test_names_can_be_pickled() -> None:
    """Workers that start as new processes receive functions by name."""
    for name in packtool.__all__:
        member = getattr(packtool, name)
        if callable(member):
            assert pickle.loads(pickle.dumps(member)) is member


if __name__ == "__main__":
    print("\n".join(surface()))
