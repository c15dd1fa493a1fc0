"""Positions of the elements of a JSON array, found with at most one element in memory."""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Iterator

from packtool.config.data import MAX_ROW_BYTES
from packtool.errors import DataError
from packtool.rows.lines import CHUNK_BYTES
from packtool.rows.open_files import HashedFile, changed_error, check_encoding
from packtool.rows.source import BLOCK_ROWS, RowBlock, Source

_SPACE = re.compile(r"[ \t\r\n]*")
_SEPARATOR = re.compile(r"[ \t\r\n]*([,\]])[ \t\r\n]*")
# Longest literal or escape: an error further from the window's end is not caused by that end.
_MAX_TOKEN = 32
# To skip an element without parsing it.
_BRACKETS, _IN_STRINGS, _AFTER_ELEMENT = re.compile(r'[\[\]{}"]'), re.compile(r'["\\]'), re.compile(r"[,\]]")


def find_elements(path: str, file: HashedFile, max_bytes: int = MAX_ROW_BYTES) -> Iterator[RowBlock]:
    """Yield blocks of up to 64 elements and, except for larger elements, 8 MiB.

    Args:
        max_bytes: a larger element is not kept in memory and becomes a block of its own.

    Raises:
        DataError: if the file is no array, or the array is broken, with the row.
    """
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
    if text.peek() == "]":
        text.take()
        text.end()
        return
    while True:
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
        if mark == "]":
            text.end()
            return


def elements_of(source: Source, data: bytes) -> Iterator[bytes | None]:
    """Yield the text of each element of a block; None for one that is larger than ``--max-row-bytes``."""
    text = _JsonText(
        source.label, HashedFile(io.BytesIO(data + b"]"), source.label), source.max_row_bytes, is_part=True
    )
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
    """A window on the text of a JSON file that moves forward and is as small as possible.

    Bytes are characters of the same number (latin-1): JSON's own marks are ASCII, so it parses alike, and positions in
    the text are positions in the file.

    Args:
        is_part: the file is a part of an array whose encoding was checked.
    """

    def __init__(self, path: str, file: HashedFile, max_bytes: int, is_part: bool = False) -> None:
        self._path, self._file, self._max_bytes, self._is_part = path, file, max_bytes, is_part
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
                # Either broken, or the window ends inside it: read more, twice as much each time.
                if not self._may_be_incomplete(error):
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

    def _may_be_incomplete(self, error: json.JSONDecodeError) -> bool:
        """Return whether more text may remove the error; only a string's error is reported at its beginning."""
        return error.msg.startswith("Unterminated string") or error.pos + _MAX_TOKEN > len(self._text)

    def end(self) -> None:
        """Raise DataError if anything but blanks follows."""
        self.skip_space()
        if self.peek():
            raise DataError(
                f"{self._path}: something follows the JSON array, near byte {self.bytes_read}",
                "A .json file holds one array of rows; give several arrays as several files.",
            )

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
        if not self._before and not self._text and not self._is_part:
            check_encoding(self._path, data)
        self._before += self._at
        self._text = self._text[self._at :] + data.decode("latin-1")
        self._at = 0
        return not self._ended
