"""The rows of one block."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any

from packtool import storage
from packtool.rows.sample import Dropped
from packtool.rows.scan import Block, Form


def read_block(path: str, form: Form, block: Block) -> Iterator[tuple[int, dict[str, Any] | Dropped]]:
    """(row number, parsed row) of each row, in order; a row that is no JSON object comes as ``Dropped``."""
    with storage.open_read(path) as file:
        file.seek(block.start)
        data = file.read(block.stop - block.start)
    if form == "json":
        for i, value in enumerate(json.loads(b"[" + data.removeprefix(codecs.BOM_UTF8).strip() + b"]")):
            yield block.first_row + i, _checked(path, block.first_row + i, value)
        return
    for i, line in enumerate(data.split(b"\n")):
        if not (line := line.removeprefix(codecs.BOM_UTF8).strip()):
            continue
        row = block.first_row + i
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield row, Dropped(path, row, "invalid_json", str(error))
            continue
        yield row, _checked(path, row, value)


def _checked(path: str, row: int, value: Any) -> dict[str, Any] | Dropped:
    if isinstance(value, dict):
        return value
    return Dropped(path, row, "invalid_row", f"a {type(value).__name__}, not an object")
