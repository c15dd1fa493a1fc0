"""The rows of one block."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any

from packtool import storage
from packtool.errors import DataError
from packtool.rows.sample import Dropped
from packtool.rows.scan import Block, Form

# JSON can spell half of a character that needs two halves; real files hold such, cut through an emoji.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_block(path: str, form: Form, block: Block) -> Iterator[tuple[int, dict[str, Any] | Dropped]]:
    """(row number, parsed row) of each row, in order; a row that is no JSON object comes as ``Dropped``.

    Raises:
        DataError: if the file is no longer what was scanned.
    """
    with storage.open_read(path) as file:
        file.seek(block.start)
        data = file.read(block.stop - block.start)
    if form == "json":
        try:
            values = json.loads(b"[" + data.strip() + b"]")
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} has changed while it was read: {error}", "Run the export again.") from error
        suspect = _SURROGATE.search(data) is not None
        for row, value in enumerate(values, block.first_row):
            yield row, _checked(path, row, value, suspect)
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
        yield row, _checked(path, row, value, _SURROGATE.search(line) is not None)


def _checked(path: str, row: int, value: Any, suspect: bool) -> dict[str, Any] | Dropped:
    if not isinstance(value, dict):
        return Dropped(path, row, "invalid_row", f"a {type(value).__name__}, not an object")
    if suspect and not _is_text(value):
        return Dropped(path, row, "invalid_text", "half of a surrogate pair (\\ud800 to \\udfff alone) is no character")
    return value


def _is_text(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
