"""Rows of text files: lines with a JSON object or a plain text, csv records, and elements of a JSON array.

Finding rows needs byte offsets. csv and JSON are therefore parsed as latin-1, one character per byte: their syntax is
ASCII, so the result is the same. Field values are decoded as UTF-8 when they are read.

Python's ``csv`` decides what a record is. A JSON array is scanned with at most one element in memory.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np

from packtool.errors import DataError
from packtool.rows.open_files import HashedFile, changed_error, read_text
from packtool.rows.parsing import JsonProblem, parse_json
from packtool.rows.sample import Dropped, guard_row, unexpected_drop
from packtool.rows.source import BLOCK_ROWS, FileFormat, NumberedRow, RowBlock, Source

CHUNK_BYTES = 1 << 23
# First bytes of a line that may be blank, perhaps after a byte order mark.
_MAY_BE_BLANK = np.isin(np.arange(256), [*b" \t\r\n\v\f", codecs.BOM_UTF8[0]])

LinesOrSize = bytes | int
"""Whole lines, or the number of bytes of a single line that is too long to be kept in memory."""


def read_head(file: HashedFile) -> bytes:
    """Return the first chunk of a text file, which the next read returns again."""
    return file.peek(CHUNK_BYTES)


def find_lines(file: HashedFile, max_bytes: int) -> Iterator[RowBlock]:
    """Find the lines of a text file, and yield their positions in blocks of at most 64 lines, blank ones included.

    A line of more than ``max_bytes`` is a block of its own. Blocks without rows, that is, only of blank lines, are
    skipped. ``RowBlock.first_row`` is a line number, which counts blank lines; ``num_rows`` does not count them.
    """
    start = first_row = 0  # byte offset and line number at which the next block begins
    for chunk in _chunks_of_lines(file, max_bytes):
        if isinstance(chunk, int):  # the size of a line that is too long
            yield RowBlock(start, start + chunk, first_row, num_rows=1)
            start += chunk
            first_row += 1
            continue
        chunk_start = start
        line_ends, is_blank = _line_ends(chunk)
        for first_line in range(0, len(line_ends), BLOCK_ROWS):
            lines = slice(first_line, first_line + BLOCK_ROWS)
            block_ends = line_ends[lines]
            num_rows = len(block_ends) - int(np.count_nonzero(is_blank[lines]))
            stop = chunk_start + int(block_ends[-1])
            if num_rows:
                yield RowBlock(start, stop, first_row, num_rows)
            start = stop
            first_row += len(block_ends)


def _line_ends(chunk: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return the offset after each of the N lines of a chunk, int64 (N,), and whether the line is blank, bool (N,)."""
    chars = np.frombuffer(chunk, np.uint8)
    line_ends = np.flatnonzero(chars == ord("\n")) + 1
    if not chunk.endswith(b"\n"):
        line_ends = np.append(line_ends, len(chunk))
    line_starts = np.append(0, line_ends[:-1])
    is_blank = np.zeros(len(line_ends), bool)
    # Most lines begin with a brace, so only the others are looked at one by one.
    for i in np.flatnonzero(_MAY_BE_BLANK[chars[line_starts]]):
        is_blank[i] = not chunk[line_starts[i] : line_ends[i]].removeprefix(codecs.BOM_UTF8).strip()
    return line_ends, is_blank


def _chunks_of_lines(file: HashedFile, max_bytes: int) -> Iterator[LinesOrSize]:
    """Read a text file in chunks of complete lines, about ``CHUNK_BYTES`` each.

    A line of which ``max_bytes`` or more follow its first chunk is not kept in memory: only its size in bytes is
    yielded, after a chunk with the lines before it.
    """
    while chunk := file.read(CHUNK_BYTES):
        if chunk.endswith(b"\n"):
            yield chunk
            continue
        line_rest = file.readline(max_bytes)  # of the line at the end of the chunk
        is_complete = len(line_rest) < max_bytes or line_rest.endswith(b"\n")
        if is_complete:
            yield chunk + line_rest
            continue
        line_start = chunk.rfind(b"\n") + 1
        if line_start:
            yield chunk[:line_start]
        num_line_bytes = len(chunk) - line_start + len(line_rest)
        while line_rest := file.readline(CHUNK_BYTES):
            num_line_bytes += len(line_rest)
            if line_rest.endswith(b"\n"):
                break
        yield num_line_bytes


def too_large(source: Source, number: int) -> Dropped:
    """Return the ``Dropped`` for a row that exceeds ``--max-row-bytes``."""
    detail = f"the row has more than {source.max_row_bytes:,} bytes, the limit of --max-row-bytes"
    return Dropped(source.label, number, "over_max_row_bytes", detail)


def parse_row(source: Source, number: int, text: bytes | None) -> dict[str, Any] | Dropped:
    """Parse a row of JSON, or return a ``Dropped``; a ``text`` of None stands for a row that is too large."""
    if text is None:
        return too_large(source, number)
    try:
        return _checked_row(source, number, parse_json(text))
    except JsonProblem as problem:
        return Dropped(source.label, number, problem.reason, problem.detail)


def _checked_row(source: Source, number: int, value: Any) -> dict[str, Any] | Dropped:
    """Return a parsed JSON value as a row, or a ``Dropped`` if it is not an object."""
    if isinstance(value, dict):
        return value
    return Dropped(source.label, number, "invalid_row", f"the row is a {type(value).__name__}, not an object")


def _numbered_lines(source: Source, block: RowBlock, data: bytes) -> Iterator[tuple[int, bytes | None]]:
    """Yield (line number, line) for the lines of a block that are not blank; None for a line that is too long."""
    for number, line in enumerate(data.split(b"\n"), block.first_row):
        line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip():
            yield number, line if len(line) <= source.max_row_bytes else None


def _parse_texts(source: Source, block: RowBlock, data: bytes) -> Iterator[NumberedRow]:
    """Yield (line number, {"text": line}) for the lines of a block that are not blank."""
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
"""Number of bytes of a csv record, and its fields; an error message in place of the fields of an invalid record."""


def find_records(path: str, file: HashedFile, kind: str, max_bytes: int) -> tuple[tuple[str, ...], Iterator[RowBlock]]:
    """Read the header of a csv or tsv file, and find the positions of its records.

    A record may have several lines, because fields in quotes may have line breaks. An invalid record is a block of its
    own; a quote that is not closed within ``max_bytes`` counts as never closed.

    Args:
        path: name of the file in messages.
        kind: ``csv`` or ``tsv``.

    Returns:
        The column names, () for an empty file, and an iterator of blocks of records, which reads the file.
    """
    lines = _lines_of_chunks(_chunks_of_lines(file, max_bytes))
    records = _records(lines, kind, max_bytes)
    header_stop = 0  # the byte after the header
    for num_bytes, fields in records:
        header_stop += num_bytes
        if isinstance(fields, str):  # an error message
            raise DataError(f"{path}: the header is invalid: {fields}", "The first line must name the columns.")
        if fields:  # the first record that is not blank is the header; the other records follow
            return _column_names(path, fields), _blocks(_row_ranges(records, header_stop))
    return (), iter(())


def _column_names(path: str, header: Sequence[str]) -> tuple[str, ...]:
    """Return the names in a header, whose fields are latin-1; DataError if they are not UTF-8 or not distinct."""
    try:
        names = tuple(field.removeprefix(_BOM).encode("latin-1").decode().strip() for field in header)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: the header is not UTF-8: {error}", "Save the file as UTF-8.") from error
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        message = f"{path}: the header names {', '.join(map(repr, duplicates))} twice"
        raise DataError(message, "Give each column its own name.")
    return names


def _lines_of_chunks(chunks: Iterable[LinesOrSize]) -> Iterator[LinesOrSize]:
    """Yield the lines of chunks of whole lines, with their line ends; sizes of lines that are too long as they are."""
    for chunk in chunks:
        if isinstance(chunk, int):
            yield chunk
        else:
            yield from io.BytesIO(chunk)


def _parse_records(source: Source, block: RowBlock, data: bytes) -> Iterator[NumberedRow]:
    """Yield (record number, {column: text}) for the csv records of a block, whose bytes are ``data``.

    Invalid records are dropped; blank lines are no records and have no number.
    """
    number = block.first_row
    for _, fields in _records(io.BytesIO(data), source.kind, source.max_row_bytes):
        if not fields:  # a blank line
            continue
        if isinstance(fields, str):  # an error message
            yield number, Dropped(source.label, number, "invalid_csv", fields)
        elif len(fields) != len(source.header):
            detail = f"the record has {len(fields)} fields, and the header has {len(source.header)}"
            yield number, Dropped(source.label, number, "invalid_csv", detail)
        else:
            try:
                texts = [field.encode("latin-1").decode() for field in fields]
                yield number, dict(zip(source.header, texts, strict=True))
            except UnicodeDecodeError as error:
                yield number, Dropped(source.label, number, "invalid_text", str(error))
        number += 1


_RowRange = tuple[int, int, bool]
"""First byte of a row, the byte after it, and whether the row must be a block of its own."""


def _row_ranges(records: Iterable[_Record], offset: int) -> Iterator[_RowRange]:
    """Yield the range of each csv record, the first of which begins at byte ``offset``; invalid ones are alone."""
    for num_bytes, fields in records:
        offset += num_bytes
        if fields:  # a blank line is not a record
            yield offset - num_bytes, offset, isinstance(fields, str)


def _blocks(rows: Iterable[_RowRange]) -> Iterator[RowBlock]:
    """Group consecutive rows into blocks of at most ``BLOCK_ROWS`` rows and about ``CHUNK_BYTES``.

    Each row is given by its first byte, the byte after it, and whether it must be a block of its own.
    """
    start = stop = first_row = num_rows = 0  # of the unfinished block
    for row_start, row_stop, is_alone in rows:
        if is_alone and num_rows:  # finish the block before this row
            yield RowBlock(start, stop, first_row, num_rows)
            first_row += num_rows
            num_rows = 0
        if num_rows == 0:  # the row begins a new block
            start = row_start
        stop = row_stop
        num_rows += 1
        is_full = num_rows == BLOCK_ROWS or stop - start >= CHUNK_BYTES
        if is_alone or is_full:
            yield RowBlock(start, stop, first_row, num_rows)
            first_row += num_rows
            num_rows = 0
    if num_rows:
        yield RowBlock(start, stop, first_row, num_rows)


def _records(lines: Iterable[LinesOrSize], kind: str, max_bytes: int) -> Iterator[_Record]:
    """Yield the size in bytes and the fields of each csv record; an error message in place of invalid fields.

    An invalid record consists of its first line only: the next line begins a new record. ``max_bytes`` limits a record,
    ``kind`` is ``csv`` or ``tsv``. Fields are decoded as latin-1, one character per byte.
    """
    csv.field_size_limit(sys.maxsize)  # max_bytes limits whole records instead
    feed = _LineFeed(lines, max_bytes)
    while True:
        try:
            # After an error, a new csv.reader begins with the line after the invalid one.
            for fields in csv.reader(feed, delimiter=_DELIMITERS[kind]):
                if feed.ended_in_record:
                    raise csv.Error("a quote is never closed")
                yield sum(map(_num_bytes, feed.record)), fields
                feed.record.clear()
            return
        except csv.Error as error:
            problem = str(error)
        yield _num_bytes(feed.skip_line()), problem


class _LineFeed(Iterator[str]):
    """Input of ``csv.reader``: lines as latin-1; the user clears ``record``, the current lines, after each record."""

    def __init__(self, lines: Iterable[LinesOrSize], max_bytes: int) -> None:
        self._lines, self._pushed_back, self._max_bytes = iter(lines), deque[LinesOrSize](), max_bytes
        self._record_bytes = 0
        self.record: list[LinesOrSize] = []
        self.ended_in_record = False

    def skip_line(self) -> LinesOrSize:
        """Remove the first line of an invalid record and return it; the other lines are fed again."""
        first, *rest = self.record
        self._pushed_back.extendleft(reversed(rest))
        self.record.clear()
        self.ended_in_record = False
        return first

    def __next__(self) -> str:
        line = self._pushed_back.popleft() if self._pushed_back else next(self._lines, None)
        if line is None:
            self.ended_in_record = bool(self.record)
            raise StopIteration
        self._record_bytes = _num_bytes(line) + (self._record_bytes if self.record else 0)
        self.record.append(line)
        if isinstance(line, int) or self._record_bytes > self._max_bytes:
            problem = "a quote is not closed" if len(self.record) > 1 else "the record does not end"
            raise csv.Error(f"{problem} within {self._max_bytes:,} bytes (--max-row-bytes)")
        return line.decode("latin-1")


def _num_bytes(line: LinesOrSize) -> int:
    return line if isinstance(line, int) else len(line)


_SPACE = re.compile(r"[ \t\r\n]*")
_SEPARATOR = re.compile(r"[ \t\r\n]*([,\]])[ \t\r\n]*")
# Characters of the longest literal or escape: an error further from the end of the text is not caused by that end.
_MAX_TOKEN_CHARS = 32
# To skip an element without parsing it.
_BRACKETS, _IN_STRINGS, _AFTER_ELEMENT = re.compile(r'[\[\]{}"]'), re.compile(r'["\\]'), re.compile(r"[,\]]")


def find_elements(path: str, file: HashedFile, max_bytes: int) -> Iterator[RowBlock]:
    """Yield blocks of elements of a JSON array; an element above ``max_bytes`` is not kept in memory."""
    text = _JsonText(path, file, max_bytes)
    text.skip_space()
    if text.take() != "[":
        raise DataError(
            f"{path}: a .json file must contain one array of rows, or one object per line",
            "Put the rows into an array with [ and ], or rename a file with one object per line to .jsonl.",
        )
    yield from _blocks(_element_ranges(text, max_bytes))
    text.skip_space()
    if text.peek():
        raise DataError(
            f"{path}: there is more text after the JSON array, near byte {text.bytes_read}",
            "A .json file must contain a single array of rows: write several arrays to several files.",
        )


def _element_ranges(text: _JsonText, max_bytes: int) -> Iterator[_RowRange]:
    """Yield the byte range of each element of a JSON array, up to its comma, and whether it exceeds ``max_bytes``.

    ``text`` is a scanner whose position is after the [ of the array; at the end it is after the ]. DataError if the
    array is invalid.
    """
    text.skip_space()
    if text.peek() == "]":  # an empty array
        text.take()
        return
    for number in count():
        start = text.bytes_read
        text.skip_element(number)
        is_too_long = text.bytes_read - start > max_bytes
        stop, separator = text.take_separator()
        if separator not in (",", "]"):
            detail = f"expected , or ] but found {separator!r}" if separator else "the file ends inside the array"
            raise text.error(number + 1, detail)
        yield start, stop, is_too_long
        if separator == "]":
            return


def _elements(source: Source, data: bytes) -> Iterator[bytes | None]:
    """Yield the text of each array element of a block; None in place of one larger than ``--max-row-bytes``."""
    text = _JsonText(source.label, HashedFile(io.BytesIO(data + b"]"), source.label), source.max_row_bytes)
    try:
        for start, stop, is_too_long in _element_ranges(text, source.max_row_bytes):
            yield None if is_too_long else data[start:stop]
    except DataError as error:
        raise changed_error(source, error.message) from error


class _JsonText:
    """Scanner of a JSON file that moves forward and keeps only a section of the text in memory, one character per byte.

    An element of more than ``max_bytes`` is skipped without keeping it in memory.
    """

    def __init__(self, path: str, file: HashedFile, max_bytes: int) -> None:
        self._path, self._file, self._max_bytes = path, file, max_bytes
        self._json = json.JSONDecoder()
        self._text, self._position = "", 0  # section in memory, and position in it
        self._num_bytes_before = 0  # bytes of the file before the section
        self._ended = False  # the file has no more bytes after the section
        while len(self._text) < len(codecs.BOM_UTF8) and self._read(CHUNK_BYTES):
            pass
        if self._text.startswith(codecs.BOM_UTF8.decode("latin-1")):
            self._position = len(codecs.BOM_UTF8)

    @property
    def bytes_read(self) -> int:
        """Position in the file, in bytes."""
        return self._num_bytes_before + self._position

    def skip_space(self) -> None:
        """Move past blanks; afterwards a character is in memory unless the file has ended."""
        while True:
            match = _SPACE.match(self._text, self._position)
            assert match is not None
            self._position = match.end()
            if self._position < len(self._text) or not self._read(CHUNK_BYTES):
                return

    def peek(self) -> str:
        """Return the next character in memory, "" at its end."""
        return self._text[self._position : self._position + 1]

    def take(self) -> str:
        """Return the next character in memory and move past it."""
        char = self.peek()
        self._position += len(char)
        return char

    def take_separator(self) -> tuple[int, str]:
        """Move past the character after an element, normally ``,`` or ``]``; return its position and the character."""
        match = _SEPARATOR.match(self._text, self._position)
        if match is not None and match.end() < len(self._text):
            self._position = match.end()
            return self._num_bytes_before + match.start(1), match[1]
        self.skip_space()
        position, separator = self.bytes_read, self.take()
        self.skip_space()
        return position, separator

    def skip_element(self, row: int) -> None:
        """Move past one element of the array, however large or deeply nested it is.

        Only a section of the file is in memory, ``_text``. An element that may continue after it is parsed again with
        more text, or, if more than ``max_bytes`` of it are in memory, skipped by its brackets and quotes.

        Args:
            row: number of the element, for the DataError if it is invalid.
        """
        num_bytes = CHUNK_BYTES  # to read next
        while True:
            try:
                _, end = self._json.raw_decode(self._text, self._position)
            except json.JSONDecodeError as error:
                may_continue = self._may_continue(error)
                is_too_long = len(self._text) - self._position > self._max_bytes
                if may_continue and is_too_long:
                    self._skip_unparsed(row)
                    return
                has_more_text = may_continue and self._read(num_bytes)
                if not has_more_text:
                    raise self.error(row, str(error)) from error
                num_bytes *= 2  # the element is parsed again from its beginning: keep the number of attempts low
                continue
            except (ValueError, RecursionError):  # too many digits, or nested too deep
                self._skip_unparsed(row)
                return
            if end < len(self._text):
                self._position = end
                return
            # A number at the end of the text in memory may continue after it.
            has_more_text = self._read(num_bytes)
            if not has_more_text:
                self._position = len(self._text)
                return

    def _may_continue(self, error: json.JSONDecodeError) -> bool:
        """Return whether the element with an error may continue after the text in memory; otherwise it is invalid."""
        is_near_end = error.pos + _MAX_TOKEN_CHARS > len(self._text)
        # The error of an unterminated string is where the string begins.
        return is_near_end or error.msg.startswith("Unterminated string")

    def _skip_unparsed(self, row: int) -> None:
        """Move past one element of the array by its brackets and quotes alone, without keeping it in memory.

        ``row`` is its number, for the DataError if the file ends inside it.
        """
        if self.peek() not in ("[", "{", '"'):  # a number or a literal
            self._find(_AFTER_ELEMENT, row)
            return
        depth = 0  # number of open brackets
        is_in_string = False
        while True:
            mark = self._find(_IN_STRINGS if is_in_string else _BRACKETS, row)  # a bracket, a quote or a backslash
            self.take()
            if mark == "\\":  # skip the escaped character, which may be a quote
                if not self.peek() and not self._read(CHUNK_BYTES):
                    raise self.error(row, "the file ends inside a string")
                self.take()
            elif mark == '"':
                is_in_string = not is_in_string
            else:
                depth += 1 if mark in "[{" else -1
            is_complete = depth == 0 and not is_in_string
            if is_complete:
                return

    def _find(self, marks: re.Pattern[str], row: int) -> str:
        """Move to the next match of ``marks`` and return it."""
        while (match := marks.search(self._text, self._position)) is None:
            self._position = len(self._text)
            if not self._read(CHUNK_BYTES):
                raise self.error(row, "the file ends inside the array")
        self._position = match.start()
        return match.group()

    def error(self, row: int, detail: str) -> DataError:
        """Return the error for an invalid element."""
        return DataError(
            f"{self._path}: the JSON array is invalid at row {row}, near byte {self.bytes_read}: {detail}",
            "Repair the file, or write it as .jsonl, where an invalid line drops only its own row.",
        )

    def _read(self, size: int) -> bool:
        """Drop the text before the position and append ``size`` bytes of the file; return False at the file's end."""
        if self._ended:
            return False
        data = self._file.read(size)
        self._ended = not data
        self._num_bytes_before += self._position
        self._text = self._text[self._position :] + data.decode("latin-1")
        self._position = 0
        return not self._ended


def _parse_array(source: Source, block: RowBlock, data: bytes) -> Iterator[NumberedRow]:
    try:
        values = parse_json(b"[" + data.strip() + b"]")
    except JsonProblem:  # of one of the elements, which are parsed one by one below
        values = ()
    if len(values) == block.num_rows and len(data) <= source.max_row_bytes:
        for number, value in enumerate(values, block.first_row):
            yield number, _checked_row(source, number, value)
        return
    for number, text in enumerate(_elements(source, data), block.first_row):
        yield number, guard_row(source.label, number, parse_row, source, number, text)


def _parse_lines(source: Source, block: RowBlock, data: bytes) -> Iterator[NumberedRow]:
    for number, line in _numbered_lines(source, block, data):
        try:  # as ``guard_row`` does, without the cost of a call
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
"""Functions by text format; each parses the bytes of a block and yields its rows, with a ``Dropped`` if invalid."""


def text_rows(source: Source, block: RowBlock) -> Iterator[NumberedRow]:
    """Read and parse all rows of a block; a row that is too large for memory is dropped without reading it."""
    if block.num_rows == 1 and block.stop - block.start > source.max_row_bytes + CHUNK_BYTES:
        return iter([(block.first_row, too_large(source, block.first_row))])
    return PARSERS[source.kind](source, block, read_text(source, block.start, block.stop))
