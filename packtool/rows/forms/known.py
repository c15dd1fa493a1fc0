"""The forms of rows that are known, and which of them a file's rows have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from packtool.errors import DataError, did_you_mean
from packtool.rows.forms.columns import NAMES, Columns, listed
from packtool.rows.forms.form import RowForm
from packtool.rows.forms.messages import MESSAGES
from packtool.rows.forms.prepared import PREPARED, TOKENS
from packtool.rows.forms.queries import ALPACA, QUERY, TEXT
from packtool.rows.source import Pairs

_Keys = tuple[str, ...]

KNOWN: Mapping[str, RowForm] = {form.name: form for form in (MESSAGES, ALPACA, QUERY, TEXT, PREPARED)}
"""All forms by name; the first that fits a file is taken."""


@dataclass(frozen=True)
class RowLayout:
    """The form of a file's rows.

    Args:
        form: a key of ``KNOWN``.
        columns: (this project's name, the file's) of every column that was found or named.
    """

    form: str
    columns: Pairs


def detect(rows: Sequence[Mapping[str, Any]], named: Pairs, formatting: str | None, where: str) -> RowLayout:
    """The form of a file, from its first rows.

    Args:
        named: columns that the user named, as (this project's name, the file's), or the other way round as ms-swift's
            ``--columns`` has it; "" as the file's name leaves out what would be found.
        formatting: ``alpaca`` or ``sharegpt``, if ``dataset_info.json`` says it; ``tokens`` takes these where a row has
            both tokens and what they were made of.
        where: the file, for messages.

    Raises:
        DataError: if no form fits, if several columns may be meant, or if a named one is not there.
    """
    keys = tuple({key: None for row in rows for key in row})
    filled = {key for row in rows for key, value in row.items() if value is not None}
    used = tuple([key for key in keys if key in filled])
    return _layout_like_others(keys, used, named, formatting) or _layout(keys, used, named, formatting, where)


@lru_cache(maxsize=256)
def _layout_like_others(keys: _Keys, used: _Keys, named: Pairs, formatting: str | None) -> RowLayout | None:
    """The form of files that have the same keys, found once for all of them; None if there is none."""
    try:
        return _layout(keys, used, named, formatting, "")
    except DataError:  # to be raised with the file's name
        return None


def _layout(keys: _Keys, used: _Keys, named: Pairs, formatting: str | None, where: str) -> RowLayout:
    columns = Columns(used, _resolve(named, keys, where), where)
    if formatting == TOKENS:
        if PREPARED.fits(columns, formatting):
            return RowLayout(PREPARED.name, tuple(sorted(columns.columns.items())))
        formatting = None
    form = next((form for form in KNOWN.values() if form.fits(columns, formatting)), None)
    if form is None:
        known = "\n".join(f"  - {form.shown}" for form in KNOWN.values())
        raise DataError(
            f"{where}: the form of its rows is not recognised; their keys are: {listed(keys)}\nKnown forms:\n{known}",
            "Say which column is which, as in --columns query=title response=body",
        )
    return RowLayout(form.name, tuple(sorted(columns.columns.items())))


def _resolve(named: Pairs, keys: Sequence[str], where: str) -> dict[str, str]:
    columns = {}
    for name, column in named:
        if not (name in NAMES and column in keys) and column in NAMES and name in keys:
            name, column = column, name
        if name not in NAMES and column not in NAMES:
            raise DataError(
                f"--columns {name}={column}: neither is a name of this project{did_you_mean(name, NAMES)}",
                f"Known are {', '.join(NAMES)}.",
            )
        if column and column not in keys:
            raise DataError(
                f"--columns {name}={column}: {where} has no column {column!r} in its first rows"
                f"{did_you_mean(column, keys)}; its columns are: {listed(keys)}",
                "Name a column that is there (rows may have null in it); where sets differ, name each set's columns in "
                "a --dataset-info file.",
            )
        columns[name] = column
    return columns
