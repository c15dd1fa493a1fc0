"""Rows of text files: JSON objects, plain texts or csv records line by line, and JSON arrays.

Positions in the file must be known, so csv and JSON are parsed as characters of the same number as the bytes (latin-1):
their own marks are ASCII, so they parse alike. Fields are decoded as UTF-8 when they are read.

Python's ``csv`` decides what a record is. Elements of a JSON array are found with at most one of them in memory.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from packtool.errors import DataError
from packtool.rows.open_files import HashedFile, changed_error, check_encoding, read_text
from packtool.rows.parsing import JsonProblem, parse_json
from packtool.rows.sample import Dropped, guard_row, unexpected_drop
from packtool.rows.source import BLOCK_ROWS, FileFormat, NumberedRow, RowBlock, Source

CHUNK_BYTES = 1 << 23
# First bytes of a line that may be blank, perhaps after a byte order mark.
_MAY_BE_BLANK = np.isin(np.arange(256), [*b" \t\r\n\v\f", codecs.BOM_UTF8[0]])

Line = bytes | int
"""A line, or the number of bytes of a line that is too long to be kept in memory."""


def find_lines(path: str, file: HashedFile, max_bytes: int) -> Iterator[RowBlock]:
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
        ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == 10) + 1
        if not chunk.endswith(b"\n"):
            ends = np.append(ends, len(chunk))
        begins = np.concatenate(([0], ends[:-1]))
        is_blank = np.zeros(len(ends), bool)
        for i in np.flatnonzero(_MAY_BE_BLANK[np.frombuffer(chunk, np.uint8)[begins]]):
            is_blank[i] = not chunk[begins[i] : ends[i]].removeprefix(codecs.BOM_UTF8).strip()
        for low in range(0, len(ends), BLOCK_ROWS):
            high = min(low + BLOCK_ROWS, len(ends))
            num_rows = int(high - low - is_blank[low:high].sum())
            stop = offset + int(ends[high - 1])
            if num_rows:
                yield RowBlock(start, stop, first_row, num_rows)
            start, first_row = stop, number + high
        offset += len(chunk)
        number += len(ends)


def _chunks_of_lines(path: str, file: HashedFile, max_bytes: int) -> Iterator[Line]:
    """Yield the file in chunks of whole lines, of about 8 MiB, and the size of each line above ``max_bytes``."""
    check_encoding(path, file.peek(CHUNK_BYTES))
    while chunk := file.read(CHUNK_BYTES):
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


def too_large(source: Source, number: int) -> Dropped:
    """Return the ``Dropped`` for a row above ``--max-row-bytes``."""
    detail = f"the row has more than {source.max_row_bytes:,} bytes, the most that --max-row-bytes allows"
    return Dropped(source.label, number, "over_max_row_bytes", detail)


def parse_row(source: Source, number: int, text: bytes | None) -> dict[str, Any] | Dropped:
    """Parse a row of JSON; None as its text is a row that is too large."""
    if text is None:
        return too_large(source, number)
    try:
        return _checked_row(source, number, parse_json(text))
    except JsonProblem as problem:
        return Dropped(source.label, number, problem.reason, problem.detail)


def _checked_row(source: Source, number: int, value: Any) -> dict[str, Any] | Dropped:
    """Return a parsed row, or a ``Dropped`` if it is not an object."""
    if isinstance(value, dict):
        return value
    return Dropped(source.label, number, "invalid_row", f"a {type(value).__name__}, not an object")


def _numbered_lines(source: Source, block: RowBlock, data: bytes) -> Iterator[tuple[int, bytes | None]]:
    """Yield (line number, line) of a block's lines that are not blank; None for a line that is too long."""
    for number, line in enumerate(data.split(b"\n"), block.first_row):
        line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip():
            yield number, line if len(line) <= source.max_row_bytes else None


def _parse_texts(source: Source, block: RowBlock, data: bytes) -> Iterator[NumberedRow]:
    """Yield (line number, {"text": line}) of a block's lines that are not blank, or a ``Dropped`` if not UTF-8."""
    for number, line in _numbered_lines(source, block, data):
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


def find_records(path: str, file: HashedFile, kind: str, max_bytes: int) -> tuple[tuple[str, ...], Iterator[RowBlock]]:
    """Return column names, and blocks of up to 64 records and 8 MiB; a longer or broken record is a block alone.

    Args:
        max_bytes: of a record; a quote that is closed later counts as never closed.

    Raises:
        DataError: if the header is broken or names a column twice.
    """
    chunks = _chunks_of_lines(path, file, max_bytes)
    lines = (line for chunk in chunks for line in ([chunk] if isinstance(chunk, int) else io.BytesIO(chunk)))
    records = _records(lines, kind, max_bytes)
    at = 0
    for num_bytes, fields in records:
        at += num_bytes
        if isinstance(fields, str):
            raise DataError(f"{path}: the header is broken: {fields}", "The first line must name the columns.")
        if fields:
            break
    else:
        return (), iter(())
    try:
        names = tuple(field.removeprefix(_BOM).encode("latin-1").decode().strip() for field in fields)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: the header is not UTF-8: {error}", "Save the file as UTF-8.") from error
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise DataError(
            f"{path}: the header names {', '.join(map(repr, duplicates))} twice", "Give each column its own name."
        )
    return names, _blocks(records, at)


def _parse_records(source: Source, block: RowBlock, data: bytes) -> Iterator[NumberedRow]:
    """Yield (record number, {column: text}) of a block, or a ``Dropped`` for a broken record."""
    number = block.first_row
    for _, fields in _records(io.BytesIO(data), source.kind, source.max_row_bytes):
        if isinstance(fields, str):
            yield number, Dropped(source.label, number, "invalid_csv", fields)
        elif fields and len(fields) != len(source.header):
            detail = f"{len(fields)} fields, and the header names {len(source.header)} columns"
            yield number, Dropped(source.label, number, "invalid_csv", detail)
        elif fields:
            try:
                texts = [field.encode("latin-1").decode() for field in fields]
                yield number, dict(zip(source.header, texts, strict=True))
            except UnicodeDecodeError as error:
                yield number, Dropped(source.label, number, "invalid_text", str(error))
        number += bool(fields)  # a blank line is not a record


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


def _records(lines: Iterable[Line], kind: str, max_bytes: int) -> Iterator[_Record]:
    """Yield records; of a broken record only the first line is skipped, and the next line begins a record again."""
    csv.field_size_limit(sys.maxsize)  # the limit is on whole records
    feed = _Feed(lines, max_bytes)
    while True:
        try:
            for fields in csv.reader(feed, delimiter=_DELIMITERS[kind]):
                if feed.ended_in_record:
                    raise csv.Error("a quote is never closed")
                yield sum(map(_size, feed.record)), fields
                feed.record.clear()
            return
        except csv.Error as error:
            problem = str(error)
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


_SPACE = re.compile(r"[ \t\r\n]*")
_SEPARATOR = re.compile(r"[ \t\r\n]*([,\]])[ \t\r\n]*")
# Longest literal or escape: an error further from the window's end is not caused by that end.
_MAX_TOKEN = 32
# To skip an element without parsing it.
_BRACKETS, _IN_STRINGS, _AFTER_ELEMENT = re.compile(r'[\[\]{}"]'), re.compile(r'["\\]'), re.compile(r"[,\]]")


def find_elements(path: str, file: HashedFile, max_bytes: int) -> Iterator[RowBlock]:
    """Yield blocks of up to 64 elements and, except for larger elements, 8 MiB.

    Args:
        max_bytes: a larger element is not kept in memory and becomes a block of its own.

    Raises:
        DataError: if the file is no array, or the array is broken, with the row.
    """
    check_encoding(path, file.peek(CHUNK_BYTES))
    text = _JsonText(path, file, max_bytes)
    text.skip_space()
    if text.take() != "[":
        raise DataError(
            f"{path}: a .json file must hold one array of rows, or one object a line",
            "Wrap the rows in [ and ], or rename a file of lines to .jsonl.",
        )
    start = stop = text.bytes_read
    first = row = rows = 0
    text.skip_space()
    mark = text.take() if text.peek() == "]" else ","
    while mark == ",":
        begin = text.bytes_read
        text.skip_element(row)
        if rows and text.bytes_read - begin > max_bytes:
            yield RowBlock(start, stop, first, rows)
            start, first, rows = begin, row, 0
        is_long = text.bytes_read - begin > max_bytes
        row, rows = row + 1, rows + 1
        stop, mark = text.separator()
        if mark not in (",", "]"):
            raise text.broken(row, f"expected , or ] and found {mark!r}" if mark else "the file ends inside the array")
        if rows == BLOCK_ROWS or mark == "]" or is_long or stop - start >= CHUNK_BYTES:
            yield RowBlock(start, stop, first, rows)
            start, first, rows = text.bytes_read, row, 0
    text.skip_space()
    if text.peek():
        raise DataError(
            f"{path}: something follows the JSON array, near byte {text.bytes_read}",
            "A .json file holds one array of rows; give several arrays as several files.",
        )


def _elements(source: Source, data: bytes) -> Iterator[bytes | None]:
    """Yield the text of each element of a block; None for one that is larger than ``--max-row-bytes``."""
    text = _JsonText(source.label, HashedFile(io.BytesIO(data + b"]"), source.label), source.max_row_bytes)
    mark = ","
    while mark == ",":
        text.skip_space()
        begin = text.bytes_read
        try:
            text.skip_element(0)
        except DataError as error:
            raise changed_error(source, error.message) from error
        num_bytes = text.bytes_read - begin
        yield data[begin : begin + num_bytes] if num_bytes <= source.max_row_bytes else None
        _, mark = text.separator()
    if mark != "]":
        raise changed_error(source, "elements of the array lie elsewhere")


class _JsonText:
    """A window on the text of a JSON file that moves forward and is as small as possible."""

    def __init__(self, path: str, file: HashedFile, max_bytes: int) -> None:
        self._path, self._file, self._max_bytes = path, file, max_bytes
        self._json = json.JSONDecoder()
        self._text, self._at, self._ended = "", 0, False
        self._before = 0  # bytes of the file before the window
        while len(self._text) < len(codecs.BOM_UTF8) and self._read(CHUNK_BYTES):
            pass
        if self._text.startswith(codecs.BOM_UTF8.decode("latin-1")):
            self._at = len(codecs.BOM_UTF8)

    @property
    def bytes_read(self) -> int:
        return self._before + self._at

    def skip_space(self) -> None:
        while True:
            match = _SPACE.match(self._text, self._at)
            assert match is not None
            self._at = match.end()
            if self._at < len(self._text) or not self._read(CHUNK_BYTES):
                return

    def peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def take(self) -> str:
        char = self.peek()
        self._at += len(char)
        return char

    def separator(self) -> tuple[int, str]:
        """Return position and text of the mark after an element, and move behind it."""
        match = _SEPARATOR.match(self._text, self._at)
        if match is not None and match.end() < len(self._text):
            self._at = match.end()
            return self._before + match.start(1), match[1]
        self.skip_space()
        stop, mark = self.bytes_read, self.take()
        self.skip_space()
        return stop, mark

    def skip_element(self, row: int) -> None:
        """Move behind one element, even if it is too deep, too large or has too many digits for the parser."""
        num_bytes = CHUNK_BYTES
        while True:
            try:
                _, end = self._json.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                # Either broken, or the window ends inside it: read more, twice as much each time. Only the error of an
                # unterminated string is reported at its beginning, all others close to the window's end.
                if not error.msg.startswith("Unterminated string") and error.pos + _MAX_TOKEN <= len(self._text):
                    raise self.broken(row, str(error)) from error
                if len(self._text) - self._at > self._max_bytes:
                    self._skip_unparsed(row)
                    return
                if not self._read(num_bytes):
                    raise self.broken(row, str(error)) from error
                num_bytes *= 2
                continue
            except (ValueError, RecursionError):
                self._skip_unparsed(row)
                return
            if end == len(self._text) and self._read(num_bytes):
                continue  # a number may continue
            self._at = end
            return

    def _skip_unparsed(self, row: int) -> None:
        """Move behind an element by its brackets and quotes alone, without keeping it in memory."""
        if self.peek() not in ("[", "{", '"'):
            self._find(_AFTER_ELEMENT, row)
            return
        depth, in_string = 0, False
        while True:
            mark = self._find(_IN_STRINGS if in_string else _BRACKETS, row)
            self.take()
            if mark == "\\":
                if not self.peek() and not self._read(CHUNK_BYTES):
                    raise self.broken(row, "the file ends inside a string")
                self.take()
            elif mark == '"':
                in_string = not in_string
            else:
                depth += 1 if mark in "[{" else -1
            if depth == 0 and not in_string:
                return

    def _find(self, marks: re.Pattern[str], row: int) -> str:
        """Move to the next match of a pattern, and return it."""
        while (match := marks.search(self._text, self._at)) is None:
            self._at = len(self._text)
            if not self._read(CHUNK_BYTES):
                raise self.broken(row, "the file ends inside the array")
        self._at = match.start()
        return match.group()

    def broken(self, row: int, detail: str) -> DataError:
        return DataError(
            f"{self._path}: the JSON array is broken at row {row}, near byte {self.bytes_read}: {detail}",
            "Mend the file, or write it as .jsonl, where a broken line costs only that row.",
        )

    def _read(self, size: int) -> bool:
        if self._ended:
            return False
        data = self._file.read(size)
        self._ended = not data
        self._before += self._at
        self._text = self._text[self._at :] + data.decode("latin-1")
        self._at = 0
        return not self._ended


def _parse_array(source: Source, block: RowBlock, data: bytes) -> Iterator[NumberedRow]:
    try:
        values = parse_json(b"[" + data.strip() + b"]")
    except JsonProblem:  # of one element, which parsing each alone will show
        values = ()
    if len(values) == block.num_rows and len(data) <= source.max_row_bytes:
        for number, value in enumerate(values, block.first_row):
            yield number, _checked_row(source, number, value)
        return
    for number, text in enumerate(_elements(source, data), block.first_row):
        yield number, guard_row(source.label, number, parse_row, source, number, text)


def _parse_lines(source: Source, block: RowBlock, data: bytes) -> Iterator[NumberedRow]:
    for number, line in _numbered_lines(source, block, data):
        try:  # like ``guard_row``, without the cost of a call
            row = parse_row(source, number, line)
        except BaseException as error:
            row = unexpected_drop(source.label, number, error)
        yield number, row


PARSERS: dict[FileFormat, Callable[[Source, RowBlock, bytes], Iterator[NumberedRow]]] = {
    "json": _parse_array,
    "jsonl": _parse_lines,
    "csv": _parse_records,
    "tsv": _parse_records,
    "txt": _parse_texts,
}
"""Functions by text format that parse all rows of a block, given its bytes."""


def text_rows(source: Source, block: RowBlock) -> Iterator[NumberedRow]:
    """Read and parse all rows of a block of a text file; one that is too large to be kept in memory is not read."""
    if block.num_rows == 1 and block.stop - block.start > source.max_row_bytes + CHUNK_BYTES:
        return iter([(block.first_row, too_large(source, block.first_row))])
    return PARSERS[source.kind](source, block, read_text(source, block.start, block.stop))
