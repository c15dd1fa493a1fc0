"""Rows of text files: a JSON object, a plain text or a csv record per line.

Python's ``csv`` decides what a record is. It gets the bytes as characters of the same number (latin-1), so that
positions in the file are known; fields are decoded as UTF-8 when they are read.
"""

from __future__ import annotations

import codecs
import csv
import io
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from packtool.config.data import MAX_ROW_BYTES
from packtool.errors import DataError
from packtool.rows.open_files import HashedFile, check_encoding, read_text
from packtool.rows.parsing import JsonProblem, parse_json
from packtool.rows.sample import Dropped
from packtool.rows.source import BLOCK_ROWS, NumberedRow, RowBlock, Source

CHUNK_BYTES = 1 << 23
# First bytes of a line that may be blank, perhaps after a byte order mark.
_MAY_BE_BLANK = np.isin(np.arange(256), [*b" \t\r\n\v\f", codecs.BOM_UTF8[0]])

Line = bytes | int
"""A line, or the number of bytes of a line that is too long to be kept in memory."""


def find_lines(path: str, file: HashedFile, max_bytes: int = MAX_ROW_BYTES) -> Iterator[RowBlock]:
    """Yield blocks of up to 64 lines and, except for longer lines, 8 MiB.

    Args:
        max_bytes: a longer line is not kept in memory and becomes a block of its own.

    Raises:
        DataError: if the file has another encoding than UTF-8.
    """
    start = first_row = 0  # of the block
    offset = number = 0  # of the next line
    for chunk in _chunks_of_lines(path, file, max_bytes):
        if isinstance(chunk, int):
            yield RowBlock(offset, offset + chunk, number, 1)
            offset, number = offset + chunk, number + 1
            start, first_row = offset, number
            continue
        if chunk.count(b"\n") < BLOCK_ROWS:
            # Mostly a small file: for few lines, arrays cost more than they save.
            lines = chunk.removesuffix(b"\n").split(b"\n")
            num_rows = sum(map(_is_row, lines))
            offset, number = offset + len(chunk), number + len(lines)
            if num_rows:
                yield RowBlock(start, offset, first_row, num_rows)
            start, first_row = offset, number
            continue
        ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == 10) + 1
        if ends[-1] != len(chunk):
            ends = np.append(ends, len(chunk))
        begins = np.concatenate(([0], ends[:-1]))
        is_blank = np.zeros(len(ends), bool)
        for i in np.flatnonzero(_MAY_BE_BLANK[np.frombuffer(chunk, np.uint8)[begins]]):
            is_blank[i] = not _is_row(chunk[begins[i] : ends[i]])
        for low in range(0, len(ends), BLOCK_ROWS):
            high = min(low + BLOCK_ROWS, len(ends))
            num_rows = int(high - low - is_blank[low:high].sum())
            stop = offset + int(ends[high - 1])
            if num_rows:
                yield RowBlock(start, stop, first_row, num_rows)
            start, first_row = stop, number + high
        offset += len(chunk)
        number += len(ends)


def _is_row(line: bytes) -> bool:
    return bool(line.removeprefix(codecs.BOM_UTF8).strip())


def _chunks_of_lines(path: str, file: HashedFile, max_bytes: int) -> Iterator[Line]:
    """Yield the file in chunks of whole lines, of about 8 MiB, and the size of each line above ``max_bytes``."""
    is_first = True
    while chunk := file.read(CHUNK_BYTES):
        if is_first:
            check_encoding(path, chunk)
            is_first = False
        if chunk.endswith(b"\n"):
            yield chunk
            continue
        rest = file.readline(max_bytes)
        if len(rest) < max_bytes or rest.endswith(b"\n"):
            yield chunk + rest
            continue
        begin = chunk.rfind(b"\n") + 1
        if begin:
            yield chunk[:begin]
        num_bytes = len(chunk) - begin + len(rest)
        while more := file.readline(CHUNK_BYTES):
            num_bytes += len(more)
            if more.endswith(b"\n"):
                break
        yield num_bytes


def block_text(source: Source, block: RowBlock) -> bytes | None:
    """Return the bytes of a block; None if it is one row that is too large to be kept in memory."""
    if block.num_rows == 1 and block.stop - block.start > source.max_row_bytes + CHUNK_BYTES:
        return None
    return read_text(source, block.start, block.stop)


def too_large(source: Source, number: int) -> Dropped:
    """Return the ``Dropped`` for a row above ``--max-row-bytes``."""
    detail = f"the row has more than {source.max_row_bytes:,} bytes, the most that --max-row-bytes allows"
    return Dropped(source.label, number, "over_max_row_bytes", detail)


def parse_row(source: Source, number: int, text: bytes | None) -> dict[str, Any] | Dropped:
    """Parse a row of JSON; None as its text is a row that is too large."""
    if text is None:
        return too_large(source, number)
    try:
        return checked_row(source, number, parse_json(text))
    except JsonProblem as problem:
        return Dropped(source.label, number, problem.reason, problem.detail)


def checked_row(source: Source, number: int, value: Any) -> dict[str, Any] | Dropped:
    """Return a parsed row, or a ``Dropped`` if it is not an object."""
    if isinstance(value, dict):
        return value
    return Dropped(source.label, number, "invalid_row", f"a {type(value).__name__}, not an object")


def numbered_lines(source: Source, block: RowBlock, data: bytes | None) -> Iterator[tuple[int, bytes | None]]:
    """Yield (line number, line) of a block's lines that are not blank; None for a line that is too long.

    Args:
        data: of the block, from ``block_text``.
    """
    if data is None:
        yield block.first_row, None
        return
    for number, line in enumerate(data.split(b"\n"), block.first_row):
        line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip():
            yield number, line if len(line) <= source.max_row_bytes else None


def read_texts(source: Source, block: RowBlock, data: bytes | None) -> Iterator[NumberedRow]:
    """Yield (line number, {"text": line}) of a block's lines that are not blank, or a ``Dropped`` if not UTF-8."""
    for number, line in numbered_lines(source, block, data):
        if line is None:
            yield number, too_large(source, number)
            continue
        try:
            yield number, {"text": line.removesuffix(b"\r").decode()}
        except UnicodeDecodeError as error:
            yield number, Dropped(source.label, number, "invalid_text", str(error))


_DELIMITERS = {"csv": ",", "tsv": "\t"}
_BOM = "\ufeff".encode().decode("latin-1")
_Record = tuple[int, list[str] | str]
"""Number of bytes of a record, and its fields or what is wrong with it."""


def find_records(
    path: str, file: HashedFile, kind: str, max_bytes: int = MAX_ROW_BYTES
) -> tuple[tuple[str, ...], Iterator[RowBlock]]:
    """Return column names, and blocks of up to 64 records and 8 MiB; a longer or broken record is a block alone.

    Args:
        max_bytes: of a record; a quote that is closed later counts as never closed.

    Raises:
        DataError: if the header is broken or names a column twice.
    """
    records = _records(_lines(path, file, max_bytes), kind, max_bytes)
    at = 0
    for num_bytes, fields in records:
        at += num_bytes
        if isinstance(fields, str):
            raise DataError(f"{path}: the header is broken: {fields}", "The first line must name the columns.")
        if fields:
            return _header(path, fields), _blocks(records, at)
    return (), iter(())


def read_records(source: Source, block: RowBlock, data: bytes | None) -> Iterator[NumberedRow]:
    """Yield (record number, {column: text}) of a block, or a ``Dropped`` for a broken record."""
    if data is None:
        yield block.first_row, too_large(source, block.first_row)
        return
    number = block.first_row
    for _, fields in _records(io.BytesIO(data), source.kind, source.max_row_bytes):
        if fields:
            yield number, _row(source, number, fields)
            number += 1


def _row(source: Source, number: int, fields: list[str] | str) -> dict[str, str] | Dropped:
    if isinstance(fields, str):
        return Dropped(source.label, number, "invalid_csv", fields)
    if len(fields) != len(source.header):
        detail = f"{len(fields)} fields, and the header names {len(source.header)} columns"
        return Dropped(source.label, number, "invalid_csv", detail)
    try:
        return {name: _utf8(field) for name, field in zip(source.header, fields, strict=True)}
    except UnicodeDecodeError as error:
        return Dropped(source.label, number, "invalid_text", str(error))


def _blocks(records: Iterator[_Record], at: int) -> Iterator[RowBlock]:
    start, first, num_rows = at, 0, 0
    for num_bytes, fields in records:
        is_broken = isinstance(fields, str)
        if is_broken and num_rows:
            yield RowBlock(start, at, first, num_rows)
            start, first, num_rows = at, first + num_rows, 0
        at += num_bytes
        num_rows += bool(fields)  # a blank line is not a record
        if num_rows and (is_broken or num_rows == BLOCK_ROWS or at - start >= CHUNK_BYTES):
            yield RowBlock(start, at, first, num_rows)
            start, first, num_rows = at, first + num_rows, 0
    if num_rows:
        yield RowBlock(start, at, first, num_rows)


def _lines(path: str, file: HashedFile, max_bytes: int) -> Iterator[Line]:
    for chunk in _chunks_of_lines(path, file, max_bytes):
        if isinstance(chunk, int):
            yield chunk
        else:
            yield from io.BytesIO(chunk)


def _records(lines: Iterable[Line], kind: str, max_bytes: int) -> Iterator[_Record]:
    """Yield records; of a broken record only the first line is skipped, and the next line begins a record again."""
    csv.field_size_limit(sys.maxsize)  # the limit is on whole records
    feed = _Feed(lines, max_bytes)
    while True:
        reader = csv.reader(feed, delimiter=_DELIMITERS[kind])
        problem = None
        while problem is None:
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                problem = str(error)
                continue
            if feed.ended_in_record:
                problem = "a quote is never closed"
                continue
            yield sum(map(_size, feed.record)), fields
            feed.record.clear()
        yield _size(feed.skip_line()), problem


class _Feed(Iterator[str]):
    """Lines for ``csv``, with those of the current record in ``record``."""

    def __init__(self, lines: Iterable[Line], max_bytes: int) -> None:
        self._lines, self._returned, self._max_bytes = iter(lines), deque[Line](), max_bytes
        self._size = 0
        self.record: list[Line] = []
        self.ended_in_record = False

    def skip_line(self) -> Line:
        """Return the first line of a broken record; the others are read again."""
        first, *rest = self.record
        self._returned.extendleft(reversed(rest))
        self.record.clear()
        self.ended_in_record = False
        return first

    def __next__(self) -> str:
        line = self._returned.popleft() if self._returned else next(self._lines, None)
        if line is None:
            self.ended_in_record = bool(self.record)
            raise StopIteration
        self._size = _size(line) + (self._size if self.record else 0)
        self.record.append(line)
        if isinstance(line, int) or self._size > self._max_bytes:
            problem = "a quote is not closed" if len(self.record) > 1 else "the record does not end"
            raise csv.Error(f"{problem} within {self._max_bytes:,} bytes (--max-row-bytes)")
        return line.decode("latin-1")


def _size(line: Line) -> int:
    return line if isinstance(line, int) else len(line)


def _header(path: str, fields: list[str]) -> tuple[str, ...]:
    try:
        names = tuple(_utf8(field.removeprefix(_BOM)).strip() for field in fields)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: the header is not UTF-8: {error}", "Save the file as UTF-8.") from error
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise DataError(
            f"{path}: the header names {', '.join(map(repr, duplicates))} twice", "Give each column its own name."
        )
    return names


def _utf8(field: str) -> str:
    return field.encode("latin-1").decode()
