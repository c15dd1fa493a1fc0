"""Columns of rows: finding them by their usual names or the user's, reading values, and showing values in messages.

Also ``RowProblem``, the error for a row that cannot be read.
"""

from __future__ import annotations

import ast
import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from packtool.errors import DataError
from packtool.rows.parsing import JsonProblem, Problem, is_utf8_text, parse_json
from packtool.rows.source import Pairs


class RowProblem(Problem):
    """A row that cannot be used, with its drop reason."""


def parse_cell(text: str, reason: str, what: str) -> Any:
    """Parse JSON text in a cell; if it is not JSON, RowProblem has ``reason`` and a message beginning with ``what``."""
    try:
        return parse_json(text)
    except JsonProblem as problem:
        if problem.reason == "invalid_json":
            raise RowProblem(reason, f"{what}: {problem.detail}") from problem
        raise RowProblem(problem.reason, problem.detail) from problem


_MAX_SHOWN, _MAX_LISTED = 80, 20
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = _MAX_SHOWN
_short.maxlevel = 3


def finite(value: Any) -> float | None:
    """Return a number as a float; None for anything else, NaN, infinity, and numbers too large for a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def is_list(value: Any) -> bool:
    """Return whether a value is a sequence, but not text or bytes."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def shown(value: Any) -> str:
    """Return a value as text for a message, at most 80 characters; fast for values of any size."""
    return _short.repr(value)[:_MAX_SHOWN]


def listed(names: Iterable[Any]) -> str:
    """Return names as text for a message: sorted, at most 20."""
    texts = sorted(str(name)[:_MAX_SHOWN] for name in names)
    return ", ".join(texts[:_MAX_LISTED]) + (", ..." if len(texts) > _MAX_LISTED else "") or "none"


TOKEN_COLUMNS = (
    *("input_ids", "labels", "attention_mask", "position_ids", "seq_lengths", "cu_seqlens", "seq_start_id"),
    *("completion_mask", "assistant_masks", "loss_mask", "loss_scale"),
)
"""Columns of rows that another tool has tokenized."""

# Usual names of each column in other projects, packtool's first.
NAMES: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages", "conversations", "conversation"),
    "query": ("query", "prompt", "question", "problem", "instruction", "input"),
    "response": (
        *("response", "answer", "output", "completion", "generation", "solution"),
        *("target", "targets", "answers", "answer_key"),
    ),
    **{name: (name,) for name in ("instruction", "input", "output", "history")},
    "text": ("text", "content"),
    "segments": ("segments",),
    "system": ("system", "system_prompt"),
    "tools": ("tools",),
    "images": ("images", "image"),
    "videos": ("videos", "video"),
    "audios": ("audios", "audio"),
    **{name: (name,) for name in ("channel", "objects", "bbox_type", "reasoning_content", "responses")},
    "chat_template_kwargs": ("chat_template_kwargs",),
    "response_weights": ("response_weights", "weights"),
    **{name: (name,) for name in TOKEN_COLUMNS},
    "seq_lengths": ("seq_lengths", "seq_lens"),
    "cu_seqlens": ("cu_seqlens", "cu_seq_lens", "cu_seqlens_q", "cu_seq_lens_q"),
}
NUMBER_COLUMNS = frozenset(column for name in TOKEN_COLUMNS for column in NAMES[name])
"""Usual names of these columns, whose values are lists of numbers."""
# Looked up under all usual names in each row, because the first rows of a file may lack them.
_OPTIONAL = (
    *("history", "input", "system", "tools", "images", "videos", "audios"),
    *("channel", "objects", "bbox_type", "reasoning_content", "chat_template_kwargs"),
)

# Characters; Python's parser needs some hundred times the size of the text in memory.
_MAX_LITERAL = 1 << 22


class Fields:
    """The values of a row by packtool's column names; ``columns`` from ``detect`` renames those with unusual names."""

    def __init__(self, row: Mapping[str, Any], columns: Pairs) -> None:
        self.row, self._names = row, _names_of(columns)

    def names(self, name: str) -> tuple[str, ...]:
        """Return the names that a column may have in the file."""
        return self._names[name]

    def has(self, name: str) -> bool:
        """Return whether the row has the column, even with an empty value."""
        return any(column in self.row for column in self._names[name])

    def is_disabled(self, name: str) -> bool:
        """Return whether the user has disabled the column, as in ``--columns images=``."""
        return self._names[name] == ("",)

    def get(self, name: str) -> Any:
        """Return the value of a column; None if it is missing, null or an empty text."""
        for column in self._names[name]:
            value = self.row.get(column)
            if value is not None and not (isinstance(value, str) and value == ""):  # arrays have no truth value
                return value
        return None

    def raw(self, name: str) -> Any:
        """Return the value of a column, even an empty text; raise RowProblem if it is missing or null."""
        for column in self._names[name]:
            if self.row.get(column) is not None:
                return self.row[column]
        columns = " or ".join(self._names[name])
        if self.has(name):
            raise RowProblem("null_field", f"{columns} is null")
        raise RowProblem("unknown_form", f"the row has no {columns}; its keys are: {listed(self.row)}")

    def parsed(self, name: str) -> Any:
        """Return the value of a column, parsed if it is text (JSON, or a Python literal); None as for ``get``."""
        value = self.get(name)
        if not isinstance(value, str):
            return value
        try:
            return parse_cell(value, "invalid_row", f"{name!r} is text, but not JSON")
        except RowProblem as problem:
            if problem.reason == "invalid_row" and len(value) <= _MAX_LITERAL:
                with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                    literal = ast.literal_eval(value.strip())  # pandas writes lists as Python literals
                    if is_utf8_text(literal):
                        return literal
            raise


@lru_cache(maxsize=64)
def _names_of(columns: Pairs) -> dict[str, tuple[str, ...]]:
    return {**NAMES, **{name: (column,) for name, column in columns}}


class Columns:
    """Columns of a file, given the keys of its rows, among which a form finds those that it needs.

    ``columns`` maps packtool's name to the file's, for columns that the user named; ``find`` adds to it.
    """

    def __init__(self, keys: Sequence[str], columns: dict[str, str], where: str) -> None:
        self.columns, self._where = columns, where
        self._keys = {key.lower(): key for key in reversed(keys)}
        for name in _OPTIONAL:
            # Columns with a usual name in lower case are looked up in each row instead.
            candidates = self._candidates(name)
            if name not in columns and candidates and not set(candidates) & set(NAMES[name]):
                columns[name] = candidates[0]

    def _candidates(self, name: str) -> list[str]:
        """Return the columns of the file that have a usual name of column ``name``, packtool's own name first."""
        return [self._keys[usual_name] for usual_name in NAMES[name] if usual_name in self._keys]

    def has(self, name: str) -> bool:
        """Return whether the file has a column with this name in upper or lower case."""
        return name in self._keys

    def find(self, name: str, as_name: str | None = None) -> str | None:
        """Return the file's column for ``name``, and add it to ``columns``; None if there is none.

        It is the column that the user named, or one with a usual name. It is added under ``as_name``, by which the form
        reads it (by default ``name``), unless the user named another column for that.
        """
        stored_name = as_name or name
        if name in self.columns:
            self.columns[stored_name] = self.columns[name]
        elif stored_name not in self.columns:
            column = self._usual_column(name)
            if column is not None:
                self.columns[stored_name] = column
        return self.columns.get(stored_name)

    def _usual_column(self, name: str) -> str | None:
        """Return the file's column with a usual name of ``name``; DataError if there are several, none named so."""
        candidates = self._candidates(name)
        if len(candidates) > 1 and name not in self._keys:
            message = f"{self._where}: several columns could be the {name}: {', '.join(candidates)}"
            raise DataError(message, f"Choose one, for example --columns {name}={candidates[0]}")
        return candidates[0] if candidates else None
