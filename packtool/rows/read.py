"""The rows of one block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

from packtool.rows.boundary import held, unexpected
from packtool.rows.json_array import elements_of
from packtool.rows.lines import block_text, numbered_lines, read_texts, too_large
from packtool.rows.parsing import JsonProblem, parse_json
from packtool.rows.records import read_records
from packtool.rows.sample import Dropped
from packtool.rows.source import FileFormat, NumberedRow, RowBlock, Source


def read_block(source: Source, block: RowBlock) -> Iterator[NumberedRow]:
    """(row number, parsed row) of each row, in order; a row that cannot be parsed comes as ``Dropped``.

    A row that was picked several times comes several times.

    Raises:
        DataError: if the file is no longer what was scanned.
        StorageError: if it cannot be read.
    """
    if source.kind in _PARSE:
        rows = parse_block(source, block, block_text(source, block))
    elif source.kind == "megatron":
        from packtool.rows.megatron import read_documents

        rows = read_documents(source, block)
    elif source.kind == "tar":
        from packtool.rows.tars import read_packs

        rows = read_packs(source, block)
    else:
        from packtool.rows.tables import read_table_rows  # here, because text needs no pyarrow

        rows = read_table_rows(source, block)
    if block.picks is None:
        yield from rows
        return
    times = [0] * (block.picks[-1] + 1)
    for position in block.picks:
        times[position] += 1
    for count, row in zip(times, rows, strict=False):
        yield from repeat(row, count)


def parse_block(source: Source, block: RowBlock, data: bytes | None) -> Iterator[NumberedRow]:
    """All rows of a block of text, as ``read_block``.

    Args:
        data: its bytes; None for one row that is too large to be held.
    """
    return _PARSE[source.kind](source, block, data)


def _array(source: Source, block: RowBlock, data: bytes | None) -> Iterator[NumberedRow]:
    if data is None:
        yield block.first_row, too_large(source, block.first_row)
        return
    try:
        values = parse_json(b"[" + data.strip() + b"]")
    except JsonProblem:  # of one of them; which one shows when each is read alone
        values = ()
    if len(values) == block.num_rows and len(data) <= source.max_row_bytes:
        for number, value in enumerate(values, block.first_row):
            yield number, _object(source, number, value)
        return
    for number, text in enumerate(elements_of(source, data), block.first_row):
        yield number, held(source.label, number, _parsed, source, number, text)


def _lines(source: Source, block: RowBlock, data: bytes | None) -> Iterator[NumberedRow]:
    for number, line in numbered_lines(source, block, data):
        try:  # as ``held`` does, without the price of a call
            row = _parsed(source, number, line)
        except BaseException as error:
            row = unexpected(source.label, number, error)
        yield number, row


def _parsed(source: Source, number: int, text: bytes | None) -> dict[str, Any] | Dropped:
    if text is None:
        return too_large(source, number)
    try:
        return _object(source, number, parse_json(text))
    except JsonProblem as problem:
        return Dropped(source.label, number, problem.reason, problem.detail)


def _object(source: Source, row: int, value: Any) -> dict[str, Any] | Dropped:
    if isinstance(value, dict):
        return value
    return Dropped(source.label, row, "invalid_row", f"a {type(value).__name__}, not an object")


_PARSE: dict[FileFormat, Callable[[Source, RowBlock, bytes | None], Iterator[NumberedRow]]] = {
    "json": _array,
    "jsonl": _lines,
    "csv": read_records,
    "tsv": read_records,
    "txt": read_texts,
}
