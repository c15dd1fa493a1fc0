"""Where the rows of a file of lines lie: one JSON object a line, or one text a line."""

from __future__ import annotations

import codecs
from collections.abc import Iterator

import numpy as np

from packtool.errors import DataError
from packtool.rows.opened import Hashed
from packtool.rows.source import BLOCK_ROWS, Block

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
    while chunk := file.read(CHUNK_BYTES):
        chunk = _complete_line(path, file, chunk, offset)
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


def _complete_line(path: str, file: Hashed, chunk: bytes, offset: int) -> bytes:
    """The chunk, read on to the end of its last line."""
    if chunk.endswith(b"\n"):
        return chunk
    rest = file.readline(LONGEST_LINE)
    if len(rest) == LONGEST_LINE and not rest.endswith(b"\n"):
        raise DataError(
            f"{path}: the line near byte {offset + len(chunk)} is longer than 1 GiB",
            "Is this a file of lines? Rows that long cannot be samples.",
        )
    return chunk + rest
