"""Rows of parquet and Arrow files, read front to back a few at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from packtool import storage
from packtool.errors import DataError
from packtool.rows.forms.columns import NUMBER_COLUMNS, shown
from packtool.rows.lines import too_large
from packtool.rows.opened import Hashed, changed, open_text, opened
from packtool.rows.sample import Dropped, held
from packtool.rows.source import BLOCK_ROWS, NumberedRow, RowBlock, Source

_BATCH_BYTES = 1 << 23
_MOST_BATCH_ROWS = 1024
_COPY_BYTES = 1 << 22
_ARROW_FILE_MAGIC = b"ARROW1"


def find_table_rows(source: Source) -> tuple[str, Iterator[RowBlock]]:
    """Digest, and blocks of 64 rows.

    Raises:
        DataError: if the file cannot be read as what its name says.
        StorageError: if it cannot be reached.
    """
    reader = TableReader(source)
    try:
        num_rows, schema = reader.num_rows(), reader.schema
    finally:
        reader.close()
    return _digest(source, num_rows, schema), (
        RowBlock(start, min(start + BLOCK_ROWS, num_rows), start, min(BLOCK_ROWS, num_rows - start))
        for start in range(0, num_rows, BLOCK_ROWS)
    )


def read_table_rows(source: Source, block: RowBlock) -> Iterator[NumberedRow]:
    """(row number, row) of a block.

    Keys of nested values that are null are left out: these formats cannot tell them from keys that a row never had.
    """
    number = block.start
    for batch in opened(source, TableReader).read(block.start, block.stop):
        # Rows of pictures must not stand in memory twice; and what no Python value can be made of costs its row only.
        rows = _rows(batch) if batch.nbytes < min(_BATCH_BYTES, source.max_row_bytes) else None
        for position in range(batch.num_rows):
            if rows is not None:
                yield number, rows[position]
            else:
                yield number, held(source.label, number, _row, source, number, batch.slice(position, 1))
            number += 1


def _rows(batch: pa.RecordBatch) -> list[dict[str, Any]] | None:
    """All rows of a batch; None if one of them holds what Python has no value for (text that is no UTF-8, say)."""
    try:
        return _as_python(batch)
    except (pa.ArrowException, ValueError, ArithmeticError):
        return None


def _as_python(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    tokens = [
        name for name in NUMBER_COLUMNS if name in batch.schema.names and _holds_numbers(batch.schema.field(name))
    ]
    if tokens:
        others = batch.select([name for name in batch.schema.names if name not in tokens])
        rows = _as_python(others) if others.num_columns else [{} for _ in range(batch.num_rows)]
        for name in tokens:
            for row, value in zip(rows, batch.column(name), strict=True):
                row[name] = _array(value)
        return rows
    return [{name: _without_nulls(value) for name, value in row.items()} for row in batch.to_pylist()]


def _holds_numbers(field: pa.Field) -> bool:
    """Whether a column is of (lists of) lists of numbers, which Python would take a hundred times as long to hold."""
    if not _is_list(field.type):
        return False
    inner = field.type.value_type
    if _is_list(inner):
        inner = inner.value_type
    return pa.types.is_integer(inner) or pa.types.is_floating(inner) or pa.types.is_boolean(inner)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _array(value: pa.Scalar) -> Any:
    """A list of numbers as an array; as a list if a number in it is missing, None if all of it is.

    A list of lists becomes a list of these.
    """
    if not value.is_valid:
        return None
    if _is_list(value.type.value_type):
        return [_array(item) for item in value.values]
    return value.as_py() if value.values.null_count else value.values.to_numpy(zero_copy_only=False)


def _row(source: Source, number: int, one: pa.RecordBatch) -> dict[str, Any] | Dropped:
    try:
        (found,) = _as_python(one)
    except UnicodeDecodeError as error:
        return Dropped(source.label, number, "invalid_text", f"not UTF-8: {error}")
    except (pa.ArrowException, ValueError, ArithmeticError) as error:
        return Dropped(source.label, number, "invalid_row", f"a value cannot be read: {error}")
    return found if _text_bytes(found) <= source.max_row_bytes else too_large(source, number)


class _Table(Protocol):
    schema: pa.Schema

    def num_rows(self) -> int: ...

    def first_row(self, row: int) -> int:
        """Where ``batches`` begins that is to reach a row."""

    def batches(self, row: int) -> Iterator[pa.RecordBatch]:
        """Record batches from there on."""


class TableReader:
    """An open table that gives its rows front to back, and begins anew when earlier ones are asked for.

    What is compressed as a whole is decompressed once, to a nameless temporary file that ends with the reader.

    Raises:
        DataError: if the file cannot be read as what its name says.
        StorageError: if it cannot be reached.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._file = _seekable(source)
        self._table: _Table = self._tried(lambda: (_Parquet if source.kind == "parquet" else _Arrow)(self._file))
        self.schema = self._table.schema
        names = self.schema.names
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise DataError(f"{source.label} has two columns {shown(twice)}", "Give each column its own name.")
        self._batches: Iterator[pa.RecordBatch] | None = None
        self._batch: pa.RecordBatch | None = None
        self._first = 0  # row of the batch

    def num_rows(self) -> int:
        """Rows in the file."""
        return self._tried(self._table.num_rows)

    def read(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """Rows [start, stop) in pieces.

        Raises:
            DataError: if the file is broken there, or has no such rows any more.
        """
        near = self._table.first_row(start)
        if self._batches is None or start < self._first or near >= self._first + self._num_rows_held():
            self._batches, self._batch, self._first = self._table.batches(start), None, near
        while start < stop:
            if self._batch is None or start >= self._first + self._batch.num_rows:
                self._first += self._num_rows_held()
                self._batch = self._tried(lambda: next(self._batches or iter(()), None))
                if self._batch is None:
                    self._batches = None
                    raise changed(self._source, f"it ends at row {self._first}")
                continue
            offset = start - self._first
            piece = self._batch.slice(offset, stop - start)
            yield piece
            start += piece.num_rows

    def close(self) -> None:
        """Let go of the file."""
        self._batches = self._batch = None
        self._file.close()

    def _num_rows_held(self) -> int:
        return self._batch.num_rows if self._batch is not None else 0

    def _tried(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except (pa.ArrowException, OSError) as error:
            kind = "a parquet" if self._source.kind == "parquet" else "an Arrow"
            raise DataError(
                f"{self._source.label} cannot be read as {kind} file: {error}",
                "The file is broken, cut off or of another kind: write it again, or give it the suffix of its kind.",
            ) from error


class _Parquet:
    def __init__(self, file: Any) -> None:
        # Column chunks are read in pieces: a row group of pictures may be larger than the memory.
        self._file = pq.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
        self.schema = self._file.schema_arrow

    def num_rows(self) -> int:
        return int(self._file.metadata.num_rows)

    def first_row(self, row: int) -> int:
        first = 0
        for group in range(self._file.num_row_groups):
            stop = first + self._file.metadata.row_group(group).num_rows
            if row < stop:
                break
            first = stop
        return first

    def batches(self, row: int) -> Iterator[pa.RecordBatch]:
        stop = 0
        for group in range(self._file.num_row_groups):
            described = self._file.metadata.row_group(group)
            stop += described.num_rows
            if row < stop:
                row_bytes = described.total_byte_size // max(described.num_rows, 1)
                size = max(1, min(_MOST_BATCH_ROWS, _BATCH_BYTES // max(row_bytes, 1)))
                yield from self._file.iter_batches(size, row_groups=[group], use_threads=False)


class _Arrow:
    def __init__(self, file: Any) -> None:
        self._file = file
        self._is_file = file.read(len(_ARROW_FILE_MAGIC)) == _ARROW_FILE_MAGIC
        self.schema = self._open().schema

    def num_rows(self) -> int:
        return sum(batch.num_rows for batch in self.batches(0))

    def first_row(self, row: int) -> int:
        return 0

    def batches(self, row: int) -> Iterator[pa.RecordBatch]:
        reader = self._open()
        if self._is_file:
            yield from map(reader.get_batch, range(reader.num_record_batches))
        else:
            yield from reader

    def _open(self) -> Any:
        self._file.seek(0)
        return pa.ipc.open_file(self._file) if self._is_file else pa.ipc.open_stream(self._file)


def _seekable(source: Source) -> Any:
    if source.compression is None:
        if storage.is_remote(source.path):
            return pa.PythonFile(storage.open_read(source.path), mode="r")
        return pa.OSFile(storage.normalize(source.path)) if source.size == 0 else _mapped(source.path)
    copy = tempfile.TemporaryFile()  # noqa: SIM115
    try:
        with open_text(source.path, source.compression) as file:
            while data := file.read(_COPY_BYTES):
                copy.write(data)
    except BaseException:
        copy.close()
        raise
    copy.seek(0)
    return pa.PythonFile(copy, mode="r")


def _mapped(path: str) -> Any:
    storage.stat(path)  # says what is wrong, if anything is
    return pa.memory_map(storage.normalize(path))


def _digest(source: Source, num_rows: int, schema: pa.Schema) -> str:
    if not storage.is_remote(source.path):
        with open_text(source.path, None) as file:
            return Hashed(file, source.label).digest
    told = blake2b(digest_size=16)
    told.update(schema.serialize().to_pybytes())
    told.update(f"{num_rows} {source.size} {source.modified}".encode())
    return told.hexdigest()


def _text_bytes(value: Any) -> int:
    """Characters of all texts in a row, about; what is embedded of media does not count."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_text_bytes, value.values()))
    return sum(map(_text_bytes, value)) if isinstance(value, list) else 0


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
