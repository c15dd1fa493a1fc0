"""Rows that lie elsewhere are read as if they lay here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from packtool import storage
from packtool.config.data import ExportConfig
from packtool.errors import DataError, StorageError
from packtool.rows.forms import to_sample
from packtool.rows.open_files import close_readers
from packtool.rows.read import scan, scan_sources
from packtool.rows.source import SourceSpec
from packtool.rows.sources import sources_of
from tests.rows.conftest import COMPRESSIONS, KINDS, compress, rows_of, write_rows
from tests.rows.megatron import megatron

ROWS = [{"text": f"row {i}", "channel": str(i % 3)} for i in range(200)]
Put = Callable[[Path, str], str]


@pytest.fixture
def upload(bucket: str) -> Iterator[Put]:
    """Copies a file to a name in a bucket, and says where it lies."""

    def copy(path: Path, name: str) -> str:
        storage.publish(f"{bucket}/{name}", path.read_bytes())
        return f"{bucket}/{name}"

    yield copy
    close_readers()


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_file_kind_is_read_remotely(tmp_path: Path, kind: str, compression: str, upload: Put) -> None:
    write_rows(tmp_path / f"rows.{kind}", kind, ROWS)
    path = compress(tmp_path / f"rows.{kind}", compression)
    result = scan(SourceSpec(upload(path, path.name)))
    assert [row["text"] for _, row in rows_of(result)] == [row["text"] for row in ROWS]
    assert scan(result.spec).digest == result.digest


def test_tokens_of_megatron(tmp_path: Path, upload: Put) -> None:
    documents = [[token, token + 1] for token in range(100)]
    path = megatron(tmp_path / "text", documents, list(range(101)))
    upload(path.with_suffix(".bin"), "text.bin")
    result = scan(SourceSpec(upload(path, "text.idx")))
    assert [row["input_ids"].tolist() for _, row in rows_of(result)] == documents
    assert scan(result.spec).digest == result.digest


def test_folders_patterns_and_media(tmp_path: Path, upload: Put, bucket: str) -> None:
    for name in ("a.jsonl", "b/c.jsonl", ".d.jsonl", "b/p.png"):
        (tmp_path / "x").write_text('{"query": "<image>", "response": "a", "image": "p.png"}\n')
        upload(tmp_path / "x", name)
    config = ExportConfig(
        model="m", max_length=9, output_dir="o", dataset=(bucket, f"{bucket}/*.jsonl#2", f"{bucket}/b")
    )
    specs = sources_of(config)
    assert [spec.path.removeprefix(bucket) for spec in specs] == ["/a.jsonl", "/b/c.jsonl", "/a.jsonl", "/b/c.jsonl"]
    result = scan_sources(specs, 42)
    assert [source.num_rows for source in result] == [1, 1, 2, 1]
    ((row_number, row),) = rows_of(result[1])
    assert to_sample(row, result[1].source, row_number).images[0].path == f"{bucket}/b/p.png"


def test_changed_and_missing_files_are_errors(tmp_path: Path, upload: Put, bucket: str) -> None:
    write_rows(tmp_path / "rows.jsonl", "jsonl", ROWS)
    path = upload(tmp_path / "rows.jsonl", "rows.jsonl")
    result = scan(SourceSpec(path))
    (tmp_path / "rows.jsonl").write_text((tmp_path / "rows.jsonl").read_text().replace("row 1", "ROW 1"))
    upload(tmp_path / "rows.jsonl", "rows.jsonl")
    with pytest.raises(DataError, match="has changed since it was scanned: its entity tag"):
        rows_of(result)
    config = ExportConfig(model="m", max_length=9, output_dir="o", dataset=(f"{bucket}/gone.jsonl",))
    with pytest.raises(DataError, match=r"--dataset s3://.*/gone.jsonl: there is no such file"):
        sources_of(config)


@pytest.mark.parametrize("kind", ["parquet", "stream.arrow", "jsonl.gz"])
def test_failing_store_is_reported(tmp_path: Path, kind: str, upload: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "rows", kind.removesuffix(".gz"), ROWS)
    path = tmp_path / "rows"
    if kind.endswith(".gz"):
        path = compress(path, ".gz")
    address = upload(path, f"rows.{kind}")

    def fail(path: str, first_block: int = 0) -> Failing:
        return Failing()

    monkeypatch.setattr(storage, "open_read", fail)
    with pytest.raises(StorageError, match="the line is dead"):
        scan(SourceSpec(address))


class Failing:
    """A file behind a connection that is gone."""

    closed = False

    def read(self, *_: int) -> bytes:
        raise StorageError("the line is dead")

    readline = read

    def seek(self, *_: int) -> int:
        return 0

    def tell(self) -> int:
        return 1000

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        pass
