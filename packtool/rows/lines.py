"""Where the rows of a file of lines lie: one JSON object a line, or one text a line.

Records of csv and tsv files: with a header, with line breaks in quotes, and each broken one apart from the others.

Python's ``csv`` decides what a record is. It is given the bytes as characters of the same number (latin-1), so that a
record's place in the file is known; fields become UTF-8 when they are read.
"""

from __future__ import annotations

import codecs
import csv
import io
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from packtool.config.data import MAX_ROW_BYTES
from packtool.errors import DataError
from packtool.rows.opened import Hashed, check_encoding, read_text
from packtool.rows.sample import Dropped
from packtool.rows.source import BLOCK_ROWS, NumberedRow, RowBlock, Source

CHUNK_BYTES = 1 << 23
# First bytes of a line that may hold nothing but blanks and a byte order mark.
_MAY_BE_BLANK = np.isin(np.arange(256), [*b" \t\r\n\v\f", codecs.BOM_UTF8[0]])


@dataclass(frozen=True)
class LongLine:
    """A line that was passed over, for no row is that long.

    Args:
        num_bytes: with the line break.
    """

    num_bytes: int


def find_lines(path: str, file: Hashed, longest: int = MAX_ROW_BYTES) -> Iterator[RowBlock]:
    """Blocks of up to 64 lines and, but for longer lines, 8 MiB.

    Args:
        longest: bytes of the longest line that is held in memory; a longer one is a block alone.

    Raises:
        DataError: if the file is in another encoding than UTF-8.
    """
    start = line = 0  # of the block
    offset = number = 0  # of the line being read
    for chunk in chunks_of_lines(path, file, longest):
        if isinstance(chunk, LongLine):
            yield RowBlock(offset, offset + chunk.num_bytes, number, 1)
            offset, number = offset + chunk.num_bytes, number + 1
            start, line = offset, number
            continue
        if chunk.count(b"\n") < BLOCK_ROWS:
            # A small file, most often: of so few lines arrays cost more than they save.
            lines = chunk.removesuffix(b"\n").split(b"\n")
            rows = sum(map(_is_row, lines))
            offset, number = offset + len(chunk), number + len(lines)
            if rows:
                yield RowBlock(start, offset, line, rows)
            start, line = offset, number
            continue
        ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == 10) + 1
        if not len(ends) or ends[-1] != len(chunk):
            ends = np.append(ends, len(chunk))
        begins = np.concatenate(([0], ends[:-1]))
        blank = np.zeros(len(ends), bool)
        for i in np.flatnonzero(_MAY_BE_BLANK[np.frombuffer(chunk, np.uint8)[begins]]):
            blank[i] = not _is_row(chunk[begins[i] : ends[i]])
        for low in range(0, len(ends), BLOCK_ROWS):
            high = min(low + BLOCK_ROWS, len(ends))
            rows = int(high - low - blank[low:high].sum())
            stop = offset + int(ends[high - 1])
            if rows:
                yield RowBlock(start, stop, line, rows)
            start, line = stop, number + high
        offset += len(chunk)
        number += len(ends)


def _is_row(line: bytes) -> bool:
    return bool(line.removeprefix(codecs.BOM_UTF8).strip())


def chunks_of_lines(path: str, file: Hashed, longest: int = MAX_ROW_BYTES) -> Iterator[bytes | LongLine]:
    """The file in pieces of whole lines, of about 8 MiB; a line of more than ``longest`` bytes is only counted.

    Raises:
        DataError: if the first piece is in another encoding than UTF-8.
    """
    is_first = True
    while chunk := file.read(CHUNK_BYTES):
        if is_first:
            check_encoding(path, chunk)
            is_first = False
        if chunk.endswith(b"\n"):
            yield chunk
            continue
        rest = file.readline(longest)
        if len(rest) < longest or rest.endswith(b"\n"):
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
        yield LongLine(num_bytes)


def block_text(source: Source, block: RowBlock) -> bytes | None:
    """The bytes of a block; None if it is one row that was too large to be held when it was found.

    Raises:
        DataError: if the file is no longer what was scanned.
        StorageError: if it cannot be read.
    """
    if block.num_rows == 1 and block.stop - block.start > source.max_row_bytes + CHUNK_BYTES:
        return None
    return read_text(source, block.start, block.stop)


def too_large(source: Source, number: int) -> Dropped:
    """What becomes of a row of more than ``--max-row-bytes``."""
    detail = f"the row has more than {source.max_row_bytes:,} bytes, the most that --max-row-bytes allows"
    return Dropped(source.label, number, "over_max_row_bytes", detail)


def numbered_lines(source: Source, block: RowBlock, data: bytes | None) -> Iterator[tuple[int, bytes | None]]:
    """(line number, line without byte order mark) of a block's lines that are not blank; None for one too long.

    Args:
        data: of the block, as ``block_text`` gives it.
    """
    if data is None:
        yield block.first_row, None
        return
    for number, line in enumerate(data.split(b"\n"), block.first_row):
        line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip():
            yield number, line if len(line) <= source.max_row_bytes else None


def read_texts(source: Source, block: RowBlock, data: bytes | None) -> Iterator[NumberedRow]:
    """(line number, {"text": line}) of each line of a block that is not blank; one that is no UTF-8 is ``Dropped``."""
    for number, line in numbered_lines(source, block, data):
        if line is None:
            yield number, too_large(source, number)
            continue
        try:
            yield number, {"text": line.removesuffix(b"\r").decode()}
        except UnicodeDecodeError as error:
            yield number, Dropped(source.label, number, "invalid_text", str(error))


_BLOCK_BYTES = 1 << 23
_DELIMITERS = {"csv": ",", "tsv": "\t"}
_BOM = "\ufeff".encode().decode("latin-1")


class _TooLongError(Exception):
    """Its quote is never closed, most likely."""


_Line = bytes | LongLine


def find_records(
    path: str, file: Hashed, kind: str, longest: int = MAX_ROW_BYTES
) -> tuple[tuple[str, ...], Iterator[RowBlock]]:
    """Column names, and blocks of up to 64 records and 8 MiB, but for longer ones; a broken record is a block alone.

    Args:
        longest: bytes of the longest record; a quote that is closed later counts as never closed.

    Raises:
        DataError: if the header is broken or names a column twice.
    """
    found = _records(_lines_of(path, file, longest), kind, longest)
    at = 0
    for num_bytes, fields in found:
        at += num_bytes
        if isinstance(fields, str):
            raise DataError(f"{path}: the header is broken: {fields}", "The first line must name the columns.")
        if fields:
            return _header(path, fields), _blocks(found, at)
    return (), iter(())


def read_records(source: Source, block: RowBlock, data: bytes | None) -> Iterator[NumberedRow]:
    """(record number, {column: text}) of a block; a broken record comes as ``Dropped``."""
    if data is None:
        yield block.first_row, too_large(source, block.first_row)
        return
    number = block.first_row
    for _, fields in _records(io.BytesIO(data), source.kind, source.max_row_bytes):
        if not fields:
            continue
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


def _blocks(found: Iterator[tuple[int, list[str] | str]], at: int) -> Iterator[RowBlock]:
    start, first, rows = at, 0, 0
    for num_bytes, fields in found:
        broken = isinstance(fields, str)
        if broken and rows:
            yield RowBlock(start, at, first, rows)
            start, first, rows = at, first + rows, 0
        at += num_bytes
        rows += bool(fields)  # a blank line is no record
        if rows and (broken or rows == BLOCK_ROWS or at - start >= _BLOCK_BYTES):
            yield RowBlock(start, at, first, rows)
            start, first, rows = at, first + rows, 0
    if rows:
        yield RowBlock(start, at, first, rows)


def _lines_of(path: str, file: Hashed, longest: int) -> Iterator[_Line]:
    for chunk in chunks_of_lines(path, file, longest):
        if isinstance(chunk, LongLine):
            yield chunk
        else:
            yield from io.BytesIO(chunk)


def _records(lines: Iterable[_Line], kind: str, longest: int) -> Iterator[tuple[int, list[str] | str]]:
    """Number of bytes of each record, and its fields or what is wrong with it.

    Of a record that is broken only the first line is given up: the next one begins a record again.
    """
    csv.field_size_limit(sys.maxsize)  # the limit below is on whole records
    waiting = deque[_Line]()
    feed = _Feed(lines, waiting, longest)
    while True:
        reader = csv.reader(feed, delimiter=_DELIMITERS[kind])
        problem = None
        while problem is None:
            try:
                fields = next(reader)
            except StopIteration:
                return
            except (csv.Error, _TooLongError) as error:
                problem = str(error)
                continue
            if feed.ended and feed.asked_beyond:
                problem = "a quote is never closed"
                continue
            yield sum(map(_size, feed.taken)), fields
            feed.taken.clear()
        first, *rest = feed.taken
        waiting.extendleft(reversed(rest))
        feed.restart()
        yield _size(first), problem


class _Feed(Iterator[str]):
    """Lines for ``csv``, remembered as long as the record that they belong to is not complete."""

    def __init__(self, lines: Iterable[_Line], waiting: deque[_Line], longest: int) -> None:
        self._lines, self._waiting, self._longest = iter(lines), waiting, longest
        self._size = 0
        self.taken: list[_Line] = []
        self.restart()

    def restart(self) -> None:
        self.taken.clear()
        self.ended = self.asked_beyond = False

    def __next__(self) -> str:
        line = self._waiting.popleft() if self._waiting else next(self._lines, None)
        if line is None:
            self.ended, self.asked_beyond = True, bool(self.taken)
            raise StopIteration
        self._size = _size(line) + (self._size if self.taken else 0)
        self.taken.append(line)
        if isinstance(line, LongLine) or self._size > self._longest:
            what = "a quote is not closed" if len(self.taken) > 1 else "the record does not end"
            raise _TooLongError(f"{what} within {self._longest:,} bytes (--max-row-bytes)")
        return line.decode("latin-1")


def _size(line: _Line) -> int:
    return line.num_bytes if isinstance(line, LongLine) else len(line)


def _header(path: str, fields: list[str]) -> tuple[str, ...]:
    try:
        names = tuple(_utf8(field.removeprefix(_BOM)).strip() for field in fields)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: the header is not UTF-8: {error}", "Save the file as UTF-8.") from error
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(
            f"{path}: the header names {', '.join(map(repr, twice))} twice", "Give each column its own name."
        )
    return names


def _utf8(field: str) -> str:
    return field.encode("latin-1").decode()
