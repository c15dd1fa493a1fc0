"""A form of rows as one record: how it is told from others, and how its turns are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from packtool.rows.forms.columns import Columns, Fields
from packtool.rows.forms.media import Found
from packtool.rows.sample import PreparedTokens, Turn


@dataclass(frozen=True)
class RowForm:
    """A form of rows.

    Args:
        name: of the form, in log lines.
        shown: its columns, for a message about rows of no known form.
        fits: whether a file with these columns has it, by ``formatting`` too (``alpaca`` or ``sharegpt`` of
            ``dataset_info.json``, ``tokens`` of ``packtool import``, or None); finds the columns that it needs.
        read: the turns of a row.
        tokens: what a row has instead of turns where another tool has tokenized it.
    """

    name: str
    shown: str
    fits: Callable[[Columns, str | None], bool]
    read: Callable[[Fields, Found], list[Turn]]
    tokens: Callable[[Fields], PreparedTokens] | None = None
