"""The code of the page and of the notebook runs as it stands, from the first line to the last."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from packtool.train.evaluate.per_sample import Total
from tests.examples.conftest import Reference

ROOT = Path(__file__).parent.parent.parent


def test_the_page(reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands before the recipes, which have tests of their own."""
    monkeypatch.chdir(tmp_path)
    for name in ("model", "cache"):
        (tmp_path / name).symlink_to(getattr(reference.tiny, name))
    page = (ROOT / "docs" / "any-trainer.md").read_text().partition("## Recipes")[0]
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) >= 3
    assert len(blocks[0].strip().splitlines()) <= 10, "ten lines, and no more"
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "any-trainer.md", "exec"), names)
    assert (tmp_path / "plan.html").exists()


def test_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer rows, which are not enough to learn to see; what is committed has no outputs."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "examples" / "demo.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    names: dict[str, Any] = {}
    for cell_index, cell in enumerate(cells):
        code, small = "".join(cell["source"]), r"\1 = 60"
        code, num_replaced = re.subn(r"^(NUM_ROWS) = \d+", small, code, flags=re.MULTILINE)
        assert num_replaced == (cell_index == 0)
        exec(compile(code, f"cell {cell_index}", "exec"), names)
    totals: dict[str, Total] = names["totals"]
    assert totals["after"].loss < totals["before"].loss
