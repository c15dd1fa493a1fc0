"""One pass over a source that finds where its rows lie, so that any stretch of them can be read alone.

Nothing is kept of the rows but one entry for each block of them; a source of any size needs a few bytes a block.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Literal

import numpy as np

from packtool import storage
from packtool.errors import DataError

Form = Literal["json", "jsonl"]
BLOCK_ROWS = 64
_CHUNK_BYTES = 1 << 23
_SPACE = " \t\r\n"
# First bytes of a line that may hold nothing but blanks and a byte order mark.
_MAY_BE_BLANK = np.isin(np.arange(256), [*b" \t\r\n\v\f", codecs.BOM_UTF8[0]])
# A literal or an escape is at most so long: an error further from the window's end is no effect of its ending there.
_LONGEST_TOKEN = 32


@dataclass(frozen=True)
class Block:
    """Neighbouring rows of one source.

    Args:
        start, stop: bytes [start, stop) of the file.
        first_row: number of the first row, 0-based: the line of a .jsonl file, the element of a .json array.
        num_rows: rows in it; blank lines are none.
    """

    start: int
    stop: int
    first_row: int
    num_rows: int


@dataclass(frozen=True)
class ScannedSource:
    """A source and where its rows lie.

    Args:
        path: as the user gave it.
        size: bytes.
        modified: what the file system says of the last change, to notice an unchanged file at once.
        digest: of the content.
    """

    path: str
    form: Form
    size: int
    modified: str
    digest: str
    blocks: tuple[Block, ...]

    @property
    def num_rows(self) -> int:
        """Rows in the source."""
        return sum(block.num_rows for block in self.blocks)


def scan(path: str) -> ScannedSource:
    """Find the rows of a ``.jsonl`` file (one object a line) or a ``.json`` file (one array of objects).

    Raises:
        DataError: if the file is missing, or its JSON array is broken (a broken line of a .jsonl costs that row only).
    """
    if not storage.exists(path):
        raise DataError(f"--dataset {path}: there is no such file")
    if storage.is_directory(path):
        raise DataError(f"--dataset {path} is a directory", "Give the .json or .jsonl files in it.")
    state = storage.stat(path)
    digest = hashlib.blake2b(digest_size=16)
    with storage.open_read(path) as file:
        form = _form(path, file)
        finder = _lines(file, digest) if form == "jsonl" else _elements(path, file, digest)
        blocks = tuple(finder)
    return ScannedSource(path, form, state.size, state.modified, digest.hexdigest(), blocks)


def _form(path: str, file: BinaryIO) -> Form:
    if path.endswith((".jsonl", ".ndjson")):
        return "jsonl"
    if not path.endswith(".json"):
        raise DataError(f"--dataset {path}: neither .json nor .jsonl", "Convert the file to one of these.")
    # Many tools write one object a line and call it .json.
    start = file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()
    file.seek(0)
    return "jsonl" if start.startswith(b"{") else "json"


def _lines(file: BinaryIO, digest: hashlib.blake2b) -> Iterator[Block]:
    start = line = 0  # of the block
    rows = 0
    offset = number = 0  # of the line being read
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
        chunk = _complete_line(file, chunk, digest)
        ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == 10) + 1
        if not len(ends) or ends[-1] != len(chunk):
            ends = np.append(ends, len(chunk))
        begins = np.concatenate(([0], ends[:-1]))
        blank = np.zeros(len(ends), bool)
        for i in np.flatnonzero(_MAY_BE_BLANK[np.frombuffer(chunk, np.uint8)[begins]]):
            blank[i] = not chunk[begins[i] : ends[i]].removeprefix(codecs.BOM_UTF8).strip()
        for low in range(0, len(ends), BLOCK_ROWS):
            high = min(low + BLOCK_ROWS, len(ends))
            rows = int(high - low - blank[low:high].sum())
            stop = offset + int(ends[high - 1])
            if rows:
                yield Block(start, stop, line, rows)
            start, line = stop, number + high
        offset += len(chunk)
        number += len(ends)


def _complete_line(file: BinaryIO, chunk: bytes, digest: hashlib.blake2b) -> bytes:
    """The chunk, read on to the end of its last line."""
    if chunk.endswith(b"\n"):
        return chunk
    rest = file.readline()
    digest.update(rest)
    return chunk + rest


def _elements(path: str, file: BinaryIO, digest: hashlib.blake2b) -> Iterator[Block]:
    text = _JsonText(path, file, digest)
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
        if rows == BLOCK_ROWS or mark == "]":
            yield Block(start, stop, first, rows)
            start, first, rows = text.bytes_read, row, 0
        if mark == "]":
            text.end()
            return
        text.skip_space()


class _JsonText:
    """A window on the text of a JSON file that moves forward and never holds more than it must."""

    def __init__(self, path: str, file: BinaryIO, digest: hashlib.blake2b) -> None:
        self._path, self._file, self._digest = path, file, digest
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._json = json.JSONDecoder()
        self._text, self._at, self._ended = "", 0, False
        self.bytes_read = 0
        while not self._text and self._read(_CHUNK_BYTES):
            pass
        if self._text.startswith("\ufeff"):
            self._advance(1)

    def skip_space(self) -> None:
        while True:
            at = self._at
            while at < len(self._text) and self._text[at] in _SPACE:
                at += 1
            self._advance(at - self._at)
            if self._at < len(self._text) or not self._read(_CHUNK_BYTES):
                return

    def peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def take(self) -> str:
        char = self.peek()
        self._advance(len(char))
        return char

    def skip_element(self, row: int) -> None:
        want = _CHUNK_BYTES
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
        self._digest.update(data)
        self._ended = not data
        try:
            more = self._decoder.decode(data, final=self._ended)
        except UnicodeDecodeError as error:
            raise DataError(f"{self._path}: not UTF-8 near byte {self.bytes_read}: {error}") from error
        self._text = self._text[self._at :] + more
        self._at = 0
        return not self._ended
