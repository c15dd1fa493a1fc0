"""A form of rows as one record: how to recognise it, and how to read its turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from packtool.rows.forms.columns import Columns, Fields
from packtool.rows.forms.media import InlineMedia
from packtool.rows.sample import PreparedTokens, Turn


@dataclass(frozen=True)
class RowForm:
    """A form of rows.

    Args:
        name: of the form, in log lines.
        shown: its columns, for a message about rows of unknown form.
        fits: whether a file with these columns has the form, also by ``formatting`` (``alpaca`` or ``sharegpt`` of
            ``dataset_info.json``, ``tokens`` of ``packtool import``, or None); registers the columns that it needs.
        read: returns the turns of a row.
        tokens: returns what a row has instead of turns if another tool has tokenized it.
    """

    name: str
    shown: str
    fits: Callable[[Columns, str | None], bool]
    read: Callable[[Fields, InlineMedia], list[Turn]]
    tokens: Callable[[Fields], PreparedTokens] | None = None
