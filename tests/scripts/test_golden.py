"""The golden record: what is normalised of outputs, and which differences a comparison shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.scripts.loading import load_script


@pytest.fixture(scope="module")
def record() -> Any:
    """scripts/_golden_record.py, as a module."""
    return load_script("_golden_record")


def test_measured_figures_are_replaced_and_losses_are_kept(record: Any) -> None:
    line = {"step": 3, "loss": 1.25, "seconds": 0.2, "tokens_per_second": 1e4, "nested": [{"memory_gib": 1.5}]}
    step_line = {"step": 3, "loss": 1.25}
    replaced = {"seconds": "<measured>", "tokens_per_second": "<measured>", "nested": [{"memory_gib": "<measured>"}]}
    assert record.normalize_json(line, "train") == step_line | replaced
    assert record.normalize_json({"memory_gib": 1.5, "plan_seconds": 2}, "plan") == {
        "memory_gib": 1.5,  # an estimate
        "plan_seconds": "<measured>",
    }


def test_times_rates_and_paths_are_replaced_in_texts(record: Any) -> None:
    line = "train: 3 of 6 after 1 s, 12 s left  loss 5.634  samples/s 5,266  fill 78.9%  waiting 11/4%  memory 1.1 GiB"
    assert record.normalize_text(line, "train", {}) == (
        "train: 3 of 6 after <time>, <time> left  loss 5.634  samples/s <rate>  fill 78.9%  waiting <share>"
        "  memory <size>"
    )
    places = {"/tmp/x/golden": "<golden>"}
    assert record.normalize_text("/tmp/x/golden/a has 3 packs", "plan", places) == "<golden>/a has 3 packs"


def test_files_have_checksums_and_readable_ones_their_contents(record: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "weights.bin").write_bytes(b"1234")
    np.savez(folder / "ledger.npz", counts=np.array([1, 2]))
    (folder / "metrics.jsonl").write_text(json.dumps({"loss": 1.5, "seconds": 3.0}) + "\n")
    sections = record.describe_files(tmp_path, ("run",), "train", {})
    assert [line.split("  ")[1] for line in sections["files"].splitlines()] == [
        "run/ledger.npz",
        "run/metrics.jsonl",
        "run/weights.bin",
    ]
    assert sections["run/ledger.npz"] == "counts: int64[2] [1, 2]"
    assert json.loads(sections["run/metrics.jsonl"]) == {"loss": 1.5, "seconds": "<measured>"}
    (folder / "metrics.jsonl").write_text(json.dumps({"loss": 1.5, "seconds": 4.0}) + "\n")
    assert record.describe_files(tmp_path, ("run",), "train", {}) == sections
    (folder / "weights.bin").write_bytes(b"1235")
    assert record.describe_files(tmp_path, ("run",), "train", {})["files"] != sections["files"]


def test_a_comparison_shows_every_entry_that_differs(record: Any, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    sections = {"stdout": "\n".join(map(str, range(100))), "stderr": "", "files": "abc  cache/a"}
    for directory in (old, new):
        directory.mkdir()
        (directory / "plan.txt").write_text(record.format_sections(sections))
    assert record.compare_records(old, new) == []
    changed = {"stdout": "\n".join(str(-n) for n in range(100)), "stderr": "one", "page": "new"}
    (new / "plan.txt").write_text(record.format_sections(changed))
    differences = record.compare_records(old, new)
    assert [text.splitlines()[0] for text in differences] == [
        "--- plan.txt: files",
        "--- plan.txt: page",
        "--- plan.txt: stderr",
        "--- plan.txt: stdout",
    ]
    assert differences[0].endswith("only in the old record")
    assert differences[2].splitlines()[-1] == "+one"
    assert len(differences[3].splitlines()) == record.MAX_DIFF_LINES + 2
    assert differences[3].endswith("more lines")


def test_wrong_lines_come_from_the_options_of_help() -> None:
    golden_commands = load_script("_golden_commands")
    help_text = (
        "Options:\n"
        "  --packing / --no-packing  Pack samples. (default: true)\n"
        "  --balance none|window     Assign packs.\n"
        "                            (default: window)\n"
        "  --packing-length, --length TOKENS\n"
        "                            Tokens of a pack.\n"
    )
    assert [(option.name, option.kind, option.default) for option in golden_commands.options_of(help_text)] == [
        ("--packing", "bool", "true"),
        ("--balance", "none|window", "window"),
        ("--packing-length", "TOKENS", ""),
    ]
    lines = golden_commands.wrong_lines("simulate", help_text)
    base = ["simulate", "caches/none"]
    assert lines["base-0"] == [
        base,
        [*base, "--packing", "false"],
        [*base, "--balance", "none"],
        [*base, "--packing-length", "64"],
    ]
    assert [*base, "--balance", "neither"] in lines["values"]
    assert [*base, "--paking", "false"] in lines["names"]
