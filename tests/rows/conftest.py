"""Rows written as files of every kind."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packtool.rows.read import read_block, scan
from packtool.rows.source import ScannedSource, SourceSpec

KINDS = ("json", "jsonl", "ndjson", "csv", "tsv", "txt", "parquet", "arrow", "stream.arrow")
COMPRESSIONS = ("", ".gz", ".zst")


def write_rows(path: Path, kind: str, rows: list[dict[str, Any]]) -> None:
    """Write rows; csv, tsv and txt hold text only."""
    kind = kind.rpartition(".")[2] if kind != "stream.arrow" else kind
    if kind == "json":
        path.write_text(json.dumps(rows, ensure_ascii=False, indent=1))
    elif kind in ("jsonl", "ndjson"):
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    elif kind in ("csv", "tsv"):
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="," if kind == "csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
    elif kind == "txt":
        path.write_text("".join(row["text"] + "\n" for row in rows))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=100)
    else:
        table = pa.Table.from_pylist(rows)
        opened = pa.ipc.new_stream if kind == "stream.arrow" else pa.ipc.new_file
        with opened(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=70)


def compress(path: Path, compression: str) -> Path:
    """The file compressed, in two members or frames; the plain one is gone then."""
    if not compression:
        return path
    data = path.read_bytes()
    path.unlink()
    path = path.with_name(path.name + compression)
    half = len(data) // 2
    if compression == ".gz":
        path.write_bytes(gzip.compress(data[:half]) + gzip.compress(data[half:]))
        return path
    with path.open("wb") as file:
        for part in (data[:half], data[half:]):
            sink = pa.BufferOutputStream()
            with pa.CompressedOutputStream(sink, "zstd") as stream:
                stream.write(part)
            file.write(sink.getvalue().to_pybytes())
    return path


def rows_of(result: ScannedSource) -> list[tuple[int, Any]]:
    """(number, row) of all blocks."""
    rows = [item for block in result.blocks for item in read_block(result.source, block)]
    assert len(rows) == result.num_rows
    return rows


@pytest.fixture
def scanned() -> Callable[..., ScannedSource]:
    """Scans one file."""
    return lambda path, **requested: scan(SourceSpec(str(path), **requested))
