"""Where the rows of a file of lines lie: one JSON object a line, or one text a line."""

from __future__ import annotations

import codecs
from collections.abc import Iterator

import numpy as np

from packtool.errors import DataError
from packtool.rows.opened import Hashed, TextReader, opened
from packtool.rows.sample import Dropped
from packtool.rows.source import BLOCK_ROWS, Block, Row, Source

CHUNK_BYTES = 1 << 23
LONGEST_LINE = 1 << 30
# First bytes of a line that may hold nothing but blanks and a byte order mark.
_MAY_BE_BLANK = np.isin(np.arange(256), [*b" \t\r\n\v\f", codecs.BOM_UTF8[0]])


def find_lines(path: str, file: Hashed) -> Iterator[Block]:
    """Blocks of up to 64 lines and, but for longer lines, 8 MiB.

    Raises:
        DataError: at a line of more than 1 GiB, which is no row.
    """
    start = line = 0  # of the block
    offset = number = 0  # of the line being read
    for chunk in chunks_of_lines(path, file):
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


def chunks_of_lines(path: str, file: Hashed) -> Iterator[bytes]:
    """The file in pieces of whole lines, of about 8 MiB.

    Raises:
        DataError: at a line of more than 1 GiB.
    """
    offset = 0
    while chunk := file.read(CHUNK_BYTES):
        if not chunk.endswith(b"\n"):
            rest = file.readline(LONGEST_LINE)
            if len(rest) == LONGEST_LINE and not rest.endswith(b"\n"):
                raise DataError(
                    f"{path}: the line near byte {offset + len(chunk)} is longer than 1 GiB",
                    "Is this a file of lines? Rows that long cannot be samples.",
                )
            chunk += rest
        yield chunk
        offset += len(chunk)


def numbered_lines(source: Source, block: Block) -> Iterator[tuple[int, bytes]]:
    """(line number, line without byte order mark) of the lines of a block that are not blank."""
    data = opened(source, TextReader).read(block.start, block.stop)
    for number, line in enumerate(data.split(b"\n"), block.first_row):
        line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip():
            yield number, line


def read_texts(source: Source, block: Block) -> Iterator[Row]:
    """(line number, {"text": line}) of each line of a block that is not blank; one that is no UTF-8 is ``Dropped``."""
    for number, line in numbered_lines(source, block):
        try:
            yield number, {"text": line.removesuffix(b"\r").decode()}
        except UnicodeDecodeError as error:
            yield number, Dropped(source.label, number, "invalid_text", str(error))
