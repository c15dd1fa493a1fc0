"""Rows of parquet and Arrow files, read sequentially a few at a time."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from packtool import storage
from packtool.errors import DataError
from packtool.rows.forms.columns import NUMBER_COLUMNS, shown
from packtool.rows.lines import too_large
from packtool.rows.open_files import HashedFile, changed_error, open_text
from packtool.rows.sample import Dropped, guard_row
from packtool.rows.source import NumberedRow, RowBlock, Source, equal_blocks

_BATCH_BYTES = 1 << 23
_MAX_BATCH_ROWS = 1024
_ARROW_FILE_MAGIC = b"ARROW1"


class TableReader:
    """An open table, read sequentially; reading earlier rows starts again.

    A compressed file is decompressed once, into an anonymous temporary file.

    Args:
        source: of format ``kind``, the name of the format in messages.

    Raises:
        DataError: from all methods, if the file is broken or of another format.
        StorageError: if it cannot be reached.
    """

    kind = ""
    schema: pa.Schema

    def __init__(self, source: Source) -> None:
        self._source = source
        self._file = _seekable(source)
        with self._data_errors():
            self._open()
        names = self.schema.names
        if len(set(names)) < len(names):
            duplicate = next(name for name in names if names.count(name) > 1)
            raise DataError(f"{source.label} has two columns {shown(duplicate)}", "Give each column its own name.")
        self._iterator: Iterator[pa.RecordBatch] | None = None
        self._batch: pa.RecordBatch | None = None
        self._first = 0  # row of the batch

    def _open(self) -> None:
        """Set ``schema``."""
        raise NotImplementedError

    def _count_rows(self) -> int:
        raise NotImplementedError

    def _start_of(self, row: int) -> int:
        """Return the first row of ``_batches(row)``."""
        raise NotImplementedError

    def _batches(self, row: int) -> Iterator[pa.RecordBatch]:
        """Yield record batches from the batch (or row group) of a row to the end."""
        raise NotImplementedError

    def num_rows(self) -> int:
        with self._data_errors():
            return self._count_rows()

    def blocks(self) -> Iterator[RowBlock]:
        return equal_blocks(self.num_rows())

    def digest(self) -> str:
        """Return a digest of the content; of a remote file, of its schema, size and version."""
        source = self._source
        if not storage.is_remote(source.path):
            with open_text(source.path, None) as file:
                return HashedFile(file, source.label).digest
        digest = blake2b(digest_size=16)
        digest.update(self.schema.serialize().to_pybytes())
        digest.update(f"{self.num_rows()} {source.size} {source.modified}".encode())
        return digest.hexdigest()

    def rows(self, block: RowBlock) -> Iterator[NumberedRow]:
        """Yield (row number, row) of a block.

        Null values in nested objects are left out: these formats cannot tell them from missing keys.
        """
        source, number = self._source, block.start
        for batch in self.read(block.start, block.stop):
            # Rows of pictures must not be in memory twice, and a value without a Python type must cost its row only.
            rows = _rows(batch) if batch.nbytes < min(_BATCH_BYTES, source.max_row_bytes) else None
            for position in range(batch.num_rows):
                if rows is not None:
                    yield number, rows[position]
                else:
                    yield number, guard_row(source.label, number, _row, source, number, batch.slice(position, 1))
                number += 1

    def read(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """Yield rows [start, stop) in batches; raise DataError if the file has no such rows any more."""
        first = self._start_of(start)
        if self._iterator is None or start < self._first or first >= self._first + self._num_batch_rows():
            self._iterator, self._batch, self._first = self._batches(start), None, first
        while start < stop:
            if self._batch is None or start >= self._first + self._batch.num_rows:
                self._first += self._num_batch_rows()
                with self._data_errors():
                    self._batch = next(self._iterator or iter(()), None)
                if self._batch is None:
                    self._iterator = None
                    raise changed_error(self._source, f"it ends at row {self._first}")
                continue
            batch = self._batch.slice(start - self._first, stop - start)
            yield batch
            start += batch.num_rows

    def close(self) -> None:
        self._iterator = self._batch = None
        self._file.close()

    def _num_batch_rows(self) -> int:
        return self._batch.num_rows if self._batch is not None else 0

    @contextmanager
    def _data_errors(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{self._source.label} cannot be read as {self.kind} file: {error}",
                "The file is broken, cut off or of another kind: write it again, or give it the suffix of its kind.",
            ) from error


class ParquetReader(TableReader):
    """An open parquet file."""

    kind = "a parquet"

    def _open(self) -> None:
        # Column chunks are read in pieces: a row group of pictures may be larger than the memory.
        self._table = pq.ParquetFile(self._file, pre_buffer=False, buffer_size=1 << 20)
        self.schema = self._table.schema_arrow
        self._groups = [self._table.metadata.row_group(group) for group in range(self._table.num_row_groups)]

    def _count_rows(self) -> int:
        return int(self._table.metadata.num_rows)

    def _start_of(self, row: int) -> int:
        first = 0
        for group in self._groups:
            if row < first + group.num_rows:
                break
            first += group.num_rows
        return first

    def _batches(self, row: int) -> Iterator[pa.RecordBatch]:
        stop = 0
        for number, group in enumerate(self._groups):
            stop += group.num_rows
            if row < stop:
                row_bytes = group.total_byte_size // max(group.num_rows, 1)
                size = max(1, min(_MAX_BATCH_ROWS, _BATCH_BYTES // max(row_bytes, 1)))
                yield from self._table.iter_batches(size, row_groups=[number], use_threads=False)


class ArrowReader(TableReader):
    """An open Arrow file or stream."""

    kind = "an Arrow"

    def _open(self) -> None:
        self._is_file = self._file.read(len(_ARROW_FILE_MAGIC)) == _ARROW_FILE_MAGIC
        self.schema = self._opened().schema

    def _opened(self) -> Any:
        self._file.seek(0)
        return pa.ipc.open_file(self._file) if self._is_file else pa.ipc.open_stream(self._file)

    def _count_rows(self) -> int:
        return sum(batch.num_rows for batch in self._batches(0))

    def _start_of(self, row: int) -> int:
        return 0

    def _batches(self, row: int) -> Iterator[pa.RecordBatch]:
        reader = self._opened()
        yield from map(reader.get_batch, range(reader.num_record_batches)) if self._is_file else reader


def _seekable(source: Source) -> Any:
    if source.compression is None:
        if storage.is_remote(source.path):
            return pa.PythonFile(storage.open_read(source.path), mode="r")
        path = storage.normalize(source.path)
        if source.size == 0:  # which cannot be mapped
            return pa.OSFile(path)
        storage.stat(source.path)  # raises a clear error if the file is missing
        return pa.memory_map(path)
    copy = tempfile.TemporaryFile()  # noqa: SIM115
    try:
        with open_text(source.path, source.compression) as file:
            shutil.copyfileobj(file, copy, 1 << 22)
    except BaseException:
        copy.close()
        raise
    copy.seek(0)
    return pa.PythonFile(copy, mode="r")


def _rows(batch: pa.RecordBatch) -> list[dict[str, Any]] | None:
    """Return all rows of a batch; None if a value has no Python type (text that is not UTF-8, say)."""
    try:
        return _as_python(batch)
    except (pa.ArrowException, ValueError, ArithmeticError):
        return None


def _as_python(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    tokens = [
        name for name in NUMBER_COLUMNS if name in batch.schema.names and _holds_numbers(batch.schema.field(name))
    ]
    if not tokens:
        return [{name: _without_nulls(value) for name, value in row.items()} for row in batch.to_pylist()]
    others = batch.select([name for name in batch.schema.names if name not in tokens])
    rows = _as_python(others) if others.num_columns else [{} for _ in range(batch.num_rows)]
    for name in tokens:
        for row, value in zip(rows, batch.column(name), strict=True):
            row[name] = _array(value)
    return rows


def _holds_numbers(field: pa.Field) -> bool:
    """Return whether a column has (lists of) lists of numbers, for which Python objects are 100 times slower."""
    if not _is_list(field.type):
        return False
    inner = field.type.value_type
    if _is_list(inner):
        inner = inner.value_type
    return pa.types.is_integer(inner) or pa.types.is_floating(inner) or pa.types.is_boolean(inner)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _array(value: pa.Scalar) -> Any:
    """Return a list of numbers as an array, or as a list if it has nulls; None for null; nested lists as a list."""
    if not value.is_valid:
        return None
    if _is_list(value.type.value_type):
        return [_array(item) for item in value.values]
    return value.as_py() if value.values.null_count else value.values.to_numpy(zero_copy_only=False)


def _row(source: Source, number: int, one: pa.RecordBatch) -> dict[str, Any] | Dropped:
    try:
        (row,) = _as_python(one)
    except UnicodeDecodeError as error:
        return Dropped(source.label, number, "invalid_text", f"not UTF-8: {error}")
    except (pa.ArrowException, ValueError, ArithmeticError) as error:
        return Dropped(source.label, number, "invalid_row", f"a value cannot be read: {error}")
    return row if _text_bytes(row) <= source.max_row_bytes else too_large(source, number)


def _text_bytes(value: Any) -> int:
    """Return the approximate number of characters of all texts in a row, without embedded media."""
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
