"""Where the elements of a JSON array lie, found without holding more of it than one of them."""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Iterator

from packtool.config.data import MAX_ROW_BYTES
from packtool.errors import DataError
from packtool.rows.lines import CHUNK_BYTES
from packtool.rows.opened import Hashed, changed, check_encoding
from packtool.rows.source import BLOCK_ROWS, RowBlock, Source

_BLOCK_BYTES = 1 << 23
_SPACE = re.compile(r"[ \t\r\n]*")
_SEPARATOR = re.compile(r"[ \t\r\n]*([,\]])[ \t\r\n]*")
# A literal or an escape is at most so long: an error further from the window's end is no effect of its ending there.
_LONGEST_TOKEN = 32
# Where an element ends that is passed over without parsing it.
_BRACKETS, _OF_STRINGS, _BEHIND = re.compile(r'[\[\]{}"]'), re.compile(r'["\\]'), re.compile(r"[,\]]")


def find_elements(path: str, file: Hashed, longest: int = MAX_ROW_BYTES) -> Iterator[RowBlock]:
    """Blocks of up to 64 elements and, but for larger elements, 8 MiB.

    Args:
        longest: bytes of the longest element that is held in memory; a longer one is a block alone.

    Raises:
        DataError: if the array is broken, naming the row; or if the file holds something else.
    """
    text = _JsonText(path, file, longest)
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
        if rows and text.bytes_read - begin > longest:
            yield RowBlock(start, stop, first, rows)
            start, first, rows = begin, row, 0
        is_long = text.bytes_read - begin > longest
        row, rows = row + 1, rows + 1
        stop, mark = text.separator()
        if mark not in (",", "]"):
            raise text.broken(row, f"expected , or ] and found {mark!r}" if mark else "the file ends inside the array")
        if rows == BLOCK_ROWS or mark == "]" or is_long or stop - start >= _BLOCK_BYTES:
            yield RowBlock(start, stop, first, rows)
            start, first, rows = text.bytes_read, row, 0
        if mark == "]":
            text.end()
            return


def elements_of(source: Source, data: bytes) -> Iterator[bytes | None]:
    """The text of each element of a block; None for one that is larger than ``--max-row-bytes``.

    Raises:
        DataError: if the file is no longer what was scanned.
    """
    text = _JsonText(source.label, Hashed(io.BytesIO(data + b"]"), source.label), source.max_row_bytes, is_part=True)
    mark = ","
    while mark == ",":
        text.skip_space()
        begin = text.bytes_read
        try:
            text.skip_element(0)
        except DataError as error:
            raise changed(source, error.message) from error
        num_bytes = text.bytes_read - begin
        yield data[begin : begin + num_bytes] if num_bytes <= source.max_row_bytes else None
        _, mark = text.separator()
    if mark != "]":
        raise changed(source, "elements of the array lie elsewhere")


class _JsonText:
    """A window on the text of a JSON file that moves forward and never holds more than it must.

    It holds bytes as characters of the same number (latin-1): JSON's own marks are ASCII, so it parses alike, and
    places in it are places in the file.
    """

    def __init__(self, path: str, file: Hashed, longest: int, is_part: bool = False) -> None:
        self._path, self._file, self._longest, self._is_part = path, file, longest, is_part
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
        """Where the mark behind an element lies, and the mark; the window moves on to what follows it."""
        match = _SEPARATOR.match(self._text, self._at)
        if match is not None and match.end() < len(self._text):
            self._at = match.end()
            return self._before + match.start(1), match[1]
        self.skip_space()
        stop, mark = self.bytes_read, self.take()
        self.skip_space()
        return stop, mark

    def skip_element(self, row: int) -> None:
        """Pass over one element, also one that is too deep, too large or too many digits for the parser.

        Raises:
            DataError: if it is broken.
        """
        want = CHUNK_BYTES
        while True:
            try:
                _, end = self._json.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                # Either broken, or the window ends inside it: read on, twice as much each time.
                if not self._may_be_cut(error):
                    raise self.broken(row, str(error)) from error
                if len(self._text) - self._at > self._longest:
                    self._pass_over(row)
                    return
                if not self._read(want):
                    raise self.broken(row, str(error)) from error
                want *= 2
                continue
            except (ValueError, RecursionError):
                self._pass_over(row)
                return
            if end == len(self._text) and self._read(want):
                continue  # a number may go on
            self._at = end
            return

    def _pass_over(self, row: int) -> None:
        """Move behind an element by its brackets and quotes alone, holding none of it."""
        if self.peek() not in ("[", "{", '"'):
            self._find(_BEHIND, row)
            return
        depth, in_string = 0, False
        while True:
            mark = self._find(_OF_STRINGS if in_string else _BRACKETS, row)
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
        """Move to the next of some characters, and tell which it is."""
        while (match := marks.search(self._text, self._at)) is None:
            self._at = len(self._text)
            if not self._read(CHUNK_BYTES):
                raise self.broken(row, "the file ends inside the array")
        self._at = match.start()
        return match.group()

    def _may_be_cut(self, error: json.JSONDecodeError) -> bool:
        """Whether the text that is yet to come may mend the error; only a string's is told at its beginning."""
        return error.msg.startswith("Unterminated string") or error.pos + _LONGEST_TOKEN > len(self._text)

    def end(self) -> None:
        """Nothing may follow but blanks."""
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
