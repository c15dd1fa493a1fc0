"""Text files in another encoding than UTF-8: told once for the file, before each of its rows is dropped."""

from __future__ import annotations

import codecs
import re

from packtool.errors import DataError

# The longer marks first: UTF-32's begins with UTF-16's.
_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
_HEAD = 1 << 17
_ROW_ENDS = re.compile(rb"\n|\}\s*,")
_LEAST_ROWS = 2
_HIGH = re.compile(rb"[\x80-\xff]+")


def check_encoding(path: str, head: bytes) -> None:
    """Look at the first bytes of a file of text.

    Single rows that are no UTF-8 are a matter of those rows; this is for files of which more than half of the rows are
    not.

    Raises:
        DataError: naming the encoding as far as it can be told, and the command that mends it.
    """
    head = head[:_HEAD]
    if b"\0" not in head and _is_utf8(head):
        return  # as nearly all files
    name = next((name for mark, name in _MARKS if head.startswith(mark)), None) or _without_mark(head)
    if name is None:
        try:
            head.decode()
            return
        except UnicodeDecodeError as error:
            if error.end == len(head) and error.start >= len(head) - 3:
                return  # a character that goes on behind this piece
        rows = [row for row in _ROW_ENDS.split(head) if row.strip()]
        num_broken = sum(not _is_utf8(row) for row in rows)
        if num_broken < _LEAST_ROWS or 2 * num_broken <= len(rows):
            return
        name = _legacy(head)
    known = name.startswith("UTF")
    sure = f"the file is {name}" if known else f"most of its rows are no UTF-8; by its bytes it may be {name}"
    raise DataError(
        f"{path}: {sure}, and rows are read as UTF-8",
        f"Convert it once: iconv -f {name} -t UTF-8 FILE > NEW_FILE"
        + ("" if known else " (file -i FILE may tell the encoding)"),
    )


def _without_mark(head: bytes) -> str | None:
    """UTF-16 and UTF-32 without a byte order mark, by the zeros that ASCII characters have in them."""
    if len(head) < 8 or head.count(0) < len(head) // 4:
        return None
    zeros = [head[place::4].count(0) * 4 > len(head) * 0.8 for place in range(4)]
    if sum(zeros) == 3:
        return "UTF-32LE" if not zeros[0] else "UTF-32BE"
    even, odd = head[::2].count(0), head[1::2].count(0)
    if max(even, odd) < 4 * (min(even, odd) + 1):
        return None
    return "UTF-16LE" if odd > even else "UTF-16BE"


def _is_utf8(row: bytes) -> bool:
    try:
        row.decode()
    except UnicodeDecodeError:
        return False
    return True


def _legacy(head: bytes) -> str:
    """A guess: letters with accents stand between plain ones, the others' come in runs of two bytes each."""
    runs = [len(run) for run in _HIGH.findall(head)]
    if sum(length == 1 for length in runs) * 2 > len(runs):
        return "WINDOWS-1252"
    for name in ("GB18030", "SHIFT_JIS", "EUC-KR", "BIG5"):
        try:
            codecs.getincrementaldecoder(name)().decode(head)
        except UnicodeDecodeError:
            continue
        return name
    return "WINDOWS-1252"
