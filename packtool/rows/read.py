"""The rows of one block."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

from packtool.rows.lines import numbered_lines, read_texts
from packtool.rows.opened import TextReader, changed, opened
from packtool.rows.records import read_records
from packtool.rows.sample import Dropped
from packtool.rows.source import Block, Kind, Row, Source

# JSON can spell half of a character that needs two halves; real files hold such, cut through an emoji.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_block(source: Source, block: Block) -> Iterator[Row]:
    """(row number, parsed row) of each row, in order; a row that cannot be parsed comes as ``Dropped``.

    A row that was picked several times comes several times.

    Raises:
        DataError: if the file is no longer what was scanned.
        StorageError: if it cannot be read.
    """
    rows = _READ[source.kind](source, block)
    if block.picks is None:
        yield from rows
        return
    times = [0] * (block.picks[-1] + 1)
    for position in block.picks:
        times[position] += 1
    for count, row in zip(times, rows, strict=False):
        yield from repeat(row, count)


def _array(source: Source, block: Block) -> Iterator[Row]:
    data = opened(source, TextReader).read(block.start, block.stop)
    try:
        values = json.loads(b"[" + data.strip() + b"]")
    except (ValueError, RecursionError) as error:
        raise changed(source, str(error)) from error
    suspect = _SURROGATE.search(data) is not None
    for number, value in enumerate(values, block.first_row):
        yield number, _checked(source, number, value, suspect)


def _lines(source: Source, block: Block) -> Iterator[Row]:
    for number, line in numbered_lines(source, block):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield number, Dropped(source.label, number, "invalid_json", str(error))
            continue
        yield number, _checked(source, number, value, _SURROGATE.search(line) is not None)


def _checked(source: Source, row: int, value: Any, suspect: bool) -> dict[str, Any] | Dropped:
    if not isinstance(value, dict):
        return Dropped(source.label, row, "invalid_row", f"a {type(value).__name__}, not an object")
    if suspect and not _is_text(value):
        detail = "half of a surrogate pair (\\ud800 to \\udfff alone) is no character"
        return Dropped(source.label, row, "invalid_text", detail)
    return value


def _is_text(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _table(source: Source, block: Block) -> Iterator[Row]:
    from packtool.rows.tables import read_table_rows  # here, because text needs no pyarrow

    return read_table_rows(source, block)


_READ: dict[Kind, Callable[[Source, Block], Iterator[Row]]] = {
    "json": _array,
    "jsonl": _lines,
    "csv": read_records,
    "tsv": read_records,
    "txt": read_texts,
    "parquet": _table,
    "arrow": _table,
}
