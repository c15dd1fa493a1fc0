"""Exports of rows that nobody would want: each is kept or has its line, and only --strict stops."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from packtool.cache.export import export
from packtool.config.data import ExportConfig
from packtool.config.settings import resolve
from packtool.config.train import TrainConfig
from packtool.encode.encoder import Encoder
from packtool.errors import ConfigError, RowError
from packtool.progress import SilentProgress

GOOD = '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}'
DIRTY = {
    b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}': "invalid_text",
    b'{"messages": "[{\\"role\\": \\"user\\", \\"content\\": \\"\\\\ud800\\"}]"}': "invalid_text",
    b'{"messages": [{"role": "user", "role": "assistant", "content": "a"}]}': "duplicate_keys",
    b'{"messages": [{"role": "user", "content": NaN}]}': "invalid_content",
    b'{"messages": [{"role": "user", "content": "<image>"}], "images": []}': "image_marks",
    b'{"messages": [{"role": "assistant", "content": "a", "loss_scale": 1e308}]}': "invalid_row",
    b'{"messages": "' + b"x" * 5000 + b'"}': "over_max_row_bytes",
    b"[" * 100_000: "over_max_row_bytes",
    GOOD.replace("q", "unforeseen").encode(): "unexpected",
}


class Notes(SilentProgress):
    """Remembers what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)


def config(model: Path, tmp_path: Path, **more: Any) -> ExportConfig:
    path = tmp_path / "rows.jsonl"
    if not path.exists():
        path.write_bytes(b"\n".join([GOOD.encode(), *DIRTY, GOOD.encode()]))
    options = {"model": str(model), "max_length": 1000, "dataset": (str(path),), "max_row_bytes": 4000}
    return ExportConfig(**{**options, "output_dir": str(tmp_path / "cache"), **more})


@pytest.fixture(autouse=True)
def _fail_on_marked_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the rows meets what nobody foresaw."""
    render = Encoder._render_or_drop

    def breaks(self: Encoder, sample: Any) -> Any:
        if any("unforeseen" in turn.content for turn in sample.turns):
            raise ZeroDivisionError("who would have thought")
        return render(self, sample)

    monkeypatch.setattr(Encoder, "_render_or_drop", breaks)


def test_only_broken_rows_are_dropped(model: Path, tmp_path: Path) -> None:
    progress = Notes()
    summary = export(config(model, tmp_path), progress)
    assert (summary.num_rows, summary.num_samples) == (len(DIRTY) + 2, 2)
    assert summary.dropped == Counter(DIRTY.values())
    lines = [json.loads(line) for line in (tmp_path / "cache" / "dropped.jsonl").read_text().splitlines()]
    assert [line["reason"] for line in lines] == list(DIRTY.values())
    assert lines[-1]["detail"].startswith("ZeroDivisionError at encode/encoder.py:")
    (note,) = [line for line in progress.lines if "error in packtool" in line]
    assert note.startswith("1 row was dropped")
    assert str(tmp_path / "cache" / "dropped.jsonl") in note


@pytest.mark.parametrize("row_index", range(len(DIRTY)))
def test_strict_names_the_row(model: Path, tmp_path: Path, row_index: int) -> None:
    line, reason = list(DIRTY.items())[row_index]
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join([GOOD.encode(), line]))
    with pytest.raises(RowError, match=rf"rows\.jsonl, row 1: {reason}: "):
        export(config(model, tmp_path, strict=True), Notes())


def test_the_limit_on_rows_is_a_size() -> None:
    options = {"model": "m", "max_length": 9, "dataset": ("a",), "output_dir": "o"}
    assert resolve(ExportConfig, options).max_row_bytes == 64_000_000
    assert resolve(ExportConfig, {**options, "max_row_bytes": "1.5MiB"}).max_row_bytes == 3 << 19
    for invalid_size in ("much", "0"):
        with pytest.raises(ConfigError, match="--max-row-bytes"):
            resolve(ExportConfig, {**options, "max_row_bytes": invalid_size})
    trained = {"model": "m", "output_dir": "o", "cached_dataset": ("c",)}
    resolve(TrainConfig, trained)
    with pytest.raises(ConfigError, match="--max-row-bytes requires --dataset"):
        resolve(TrainConfig, {**trained, "max_row_bytes": "1MB"})
