"""Where the rows of a file of lines lie: one JSON object a line, or one text a line."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from packtool.config.rows import MAX_ROW_BYTES
from packtool.rows.encoding import check_encoding
from packtool.rows.opened import Hashed, read_text
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
