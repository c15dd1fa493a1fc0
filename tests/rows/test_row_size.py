"""Rows that are too large or too odd for a parser cost themselves, in a file of any kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packtool.rows import text_files
from packtool.rows.read import scan
from packtool.rows.sample import Dropped
from packtool.rows.source import SourceSpec
from tests.rows.conftest import rows_of, write_rows

KINDS = ("json", "jsonl", "csv", "txt", "parquet", "arrow")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [100, 1 << 23])
@pytest.mark.parametrize("size", [1100, 5000])
def test_oversized_rows_are_dropped(
    tmp_path: Path, kind: str, chunk: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "CHUNK_BYTES", chunk)
    texts = ["a", "b" * size, "c", "d" * 800, 'e"[{\\' * (size // 4), "f"]
    if kind == "csv":
        texts[4] = "e" * size
    path = tmp_path / f"rows.{kind}"
    write_rows(path, kind, [{"text": text, "more": "x"} for text in texts])
    result = rows_of(scan(SourceSpec(str(path), max_row_bytes=1000)))
    assert [row_number for row_number, _ in result] == list(range(6))
    row_texts = [row["text"] if isinstance(row, dict) else row.reason for _, row in result]
    too_large = "invalid_csv" if kind == "csv" and chunk > size else "over_max_row_bytes"
    assert row_texts[:4:2] + row_texts[5:] == ["a", "c", "f"]
    assert row_texts[3] == "d" * 800
    assert {row_texts[1], row_texts[4]} <= {too_large, "over_max_row_bytes", "invalid_csv"}


ODD = {
    "deep": "[" * 3000 + "]" * 3000,
    "digits": "1" * 5000,
    "many digits in a list": "[" + "1" * 5000 + "]",
    "emoji": "[" * 990 + '"\\ud83d\\ude00"' + "]" * 990,
    "surrogate": '"\\ud83d"',
    "twice": '{"a": 1, "a": 2}',
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_unparsable_row_is_dropped(tmp_path: Path, kind: str, name: str) -> None:
    rows = ['{"text": "a"}', f'{{"text": {ODD[name]}}}', '{"text": "b"}', ODD[name], '{"text": "c ]}"}']
    path = tmp_path / f"rows.{kind}"
    path.write_text("\n".join(rows) if kind == "jsonl" else f"[{', '.join(rows)}]")
    result = [row for _, row in rows_of(scan(SourceSpec(str(path))))]
    assert [row for row in result if isinstance(row, dict)] == [{"text": "a"}, {"text": "b"}, {"text": "c ]}"}]
    assert isinstance(result[1], Dropped)
    assert isinstance(result[3], Dropped)


def test_table_with_invalid_utf8_drops_its_rows(tmp_path: Path) -> None:
    text = pa.array([b"a", b"b\xff", b"c"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": text}), tmp_path / "rows.parquet")
    result = [row for _, row in rows_of(scan(SourceSpec(str(tmp_path / "rows.parquet"))))]
    assert [row.reason if isinstance(row, Dropped) else row for row in result] == [
        {"text": "a"},
        "invalid_text",
        {"text": "c"},
    ]


def test_embedded_media_do_not_count(tmp_path: Path) -> None:
    rows = [{"text": "a", "images": [{"bytes": b"x" * 5000}]}, {"text": "b" * 5000, "images": []}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    first_row, second_row = (
        row for _, row in rows_of(scan(SourceSpec(str(tmp_path / "rows.parquet"), max_row_bytes=1000)))
    )
    assert first_row["text"] == "a"
    assert isinstance(second_row, Dropped)
    assert second_row.reason == "over_max_row_bytes"


def test_overlong_line_is_not_kept_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 1 << 16)
    sizes: list[int] = []
    read: Callable[..., Any] = text_files.read_text
    monkeypatch.setattr(
        text_files, "read_text", lambda source, start, stop: sizes.append(stop - start) or read(source, start, stop)
    )
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "\n".join([json.dumps({"text": "a"}), json.dumps({"text": "b" * 10**6}), json.dumps({"text": "c"})])
    )
    result = [row for _, row in rows_of(scan(SourceSpec(str(path), max_row_bytes=1000)))]
    assert [isinstance(row, Dropped) for row in result] == [False, True, False]
    assert max(sizes) < 100
