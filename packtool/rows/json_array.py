"""Where the elements of a JSON array lie, found without holding more of it than one of them."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator

from packtool.errors import DataError
from packtool.rows.lines import CHUNK_BYTES
from packtool.rows.opened import Hashed
from packtool.rows.source import BLOCK_ROWS, Block

_BLOCK_BYTES = 1 << 23
_SPACE = re.compile(r"[ \t\r\n]*")
_SEPARATOR = re.compile(r"[ \t\r\n]*([,\]])[ \t\r\n]*")
# A literal or an escape is at most so long: an error further from the window's end is no effect of its ending there.
_LONGEST_TOKEN = 32


def find_elements(path: str, file: Hashed) -> Iterator[Block]:
    """Blocks of up to 64 elements and, but for larger elements, 8 MiB.

    Raises:
        DataError: if the array is broken, naming the row; or if the file holds something else.
    """
    text = _JsonText(path, file)
    text.skip_space()
    if text.take() != "[":
        raise DataError(
            f"{path}: a .json file must hold one array of rows, or one object a line",
            "Wrap the rows in [ and ], or rename a file of lines to .jsonl.",
        )
    start, first, rows = text.bytes_read, 0, 0
    row = 0
    text.skip_space()
    if text.peek() == "]":
        text.take()
        text.end()
        return
    while True:
        text.skip_element(row)
        row, rows = row + 1, rows + 1
        stop, mark = text.separator()
        if mark not in (",", "]"):
            raise text.broken(row, f"expected , or ] and found {mark!r}" if mark else "the file ends inside the array")
        if rows == BLOCK_ROWS or mark == "]" or stop - start >= _BLOCK_BYTES:
            yield Block(start, stop, first, rows)
            start, first, rows = text.bytes_read, row, 0
        if mark == "]":
            text.end()
            return


class _JsonText:
    """A window on the text of a JSON file that moves forward and never holds more than it must.

    It holds bytes as characters of the same number (latin-1): JSON's own marks are ASCII, so it parses alike, and
    places in it are places in the file.
    """

    def __init__(self, path: str, file: Hashed) -> None:
        self._path, self._file = path, file
        self._decoder = codecs.getincrementaldecoder("utf-8")()
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
        want = CHUNK_BYTES
        while True:
            try:
                _, end = self._json.raw_decode(self._text, self._at)
            except (ValueError, RecursionError) as error:
                # Either broken, or the window ends inside it: read on, twice as much each time.
                if not self._may_be_cut(error) or not self._read(want):
                    raise self.broken(row, str(error)) from error
                want *= 2
                continue
            if end == len(self._text) and self._read(want):
                continue  # a number may go on
            self._at = end
            return

    def _may_be_cut(self, error: Exception) -> bool:
        """Whether the text that is yet to come may mend the error; only a string's is told at its beginning."""
        if not isinstance(error, json.JSONDecodeError):
            return False
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
        try:
            self._decoder.decode(data, final=self._ended)
        except UnicodeDecodeError as error:
            raise DataError(f"{self._path}: not UTF-8 near byte {self.bytes_read}: {error}") from error
        self._before += self._at
        self._text = self._text[self._at :] + data.decode("latin-1")
        self._at = 0
        return not self._ended
