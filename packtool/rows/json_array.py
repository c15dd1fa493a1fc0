"""Where the elements of a JSON array lie, found without holding more of it than one of them."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator

from packtool.errors import DataError
from packtool.rows.lines import CHUNK_BYTES
from packtool.rows.opened import Hashed
from packtool.rows.source import BLOCK_ROWS, Block

_BLOCK_BYTES = 1 << 23
_SPACE = " \t\r\n"
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
        text.skip_space()
        stop = text.bytes_read
        mark = text.take()
        if mark not in (",", "]"):
            raise text.broken(row, f"expected , or ] and found {mark!r}" if mark else "the file ends inside the array")
        if rows == BLOCK_ROWS or mark == "]" or stop - start >= _BLOCK_BYTES:
            yield Block(start, stop, first, rows)
            start, first, rows = text.bytes_read, row, 0
        if mark == "]":
            text.end()
            return
        text.skip_space()


class _JsonText:
    """A window on the text of a JSON file that moves forward and never holds more than it must."""

    def __init__(self, path: str, file: Hashed) -> None:
        self._path, self._file = path, file
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._json = json.JSONDecoder()
        self._text, self._at, self._ended = "", 0, False
        self.bytes_read = 0
        while not self._text and self._read(CHUNK_BYTES):
            pass
        if self._text.startswith("\ufeff"):
            self._advance(1)

    def skip_space(self) -> None:
        while True:
            at = self._at
            while at < len(self._text) and self._text[at] in _SPACE:
                at += 1
            self._advance(at - self._at)
            if self._at < len(self._text) or not self._read(CHUNK_BYTES):
                return

    def peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def take(self) -> str:
        char = self.peek()
        self._advance(len(char))
        return char

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
            self._advance(end - self._at)
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

    def _advance(self, chars: int) -> None:
        self.bytes_read += len(self._text[self._at : self._at + chars].encode())
        self._at += chars

    def _read(self, size: int) -> bool:
        if self._ended:
            return False
        data = self._file.read(size)
        self._ended = not data
        try:
            more = self._decoder.decode(data, final=self._ended)
        except UnicodeDecodeError as error:
            raise DataError(f"{self._path}: not UTF-8 near byte {self.bytes_read}: {error}") from error
        self._text = self._text[self._at :] + more
        self._at = 0
        return not self._ended
