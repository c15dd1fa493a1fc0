"""Which column of a file is which: by its usual names, or by what the user said.

What a form says about a row that it cannot read.

Single values of rows: numbers that a float can hold, and how a value is shown in a message.
"""

from __future__ import annotations

import ast
import math
import reprlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from packtool.errors import DataError
from packtool.rows.parsing import JsonProblem, is_text, parse_json
from packtool.rows.source import Pairs


class RowProblem(ValueError):
    """A row that cannot be used.

    Args:
        reason: machine-readable, as in ``dropped.jsonl``.
        detail: explanation for the user.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def json_problem(reason: str, what: str, problem: JsonProblem) -> RowProblem:
    """What to say of a cell that is no JSON (``reason``, ``what``), or JSON that is not to be trusted (its own)."""
    if problem.reason == "invalid_json":
        return RowProblem(reason, f"{what}: {problem.detail}")
    return RowProblem(problem.reason, problem.detail)


_LONGEST_SHOWN = 80
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = _LONGEST_SHOWN
_short.maxlevel = 3


def finite(value: Any) -> float | None:
    """A number as a float; None for anything else, for NaN and infinity, and for what is too large for a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def shown(value: Any) -> str:
    """A value for a message, cut short; one of any size and depth costs nothing."""
    return _short.repr(value)[:_LONGEST_SHOWN]


def listed(names: Any, most: int = 20) -> str:
    """Names for a message, sorted, each and all of them cut short."""
    texts = sorted(str(name)[:_LONGEST_SHOWN] for name in names)
    return ", ".join(texts[:most]) + (", ..." if len(texts) > most else "") or "none"


TOKEN_COLUMNS = (
    *("input_ids", "labels", "attention_mask", "position_ids", "seq_lengths", "cu_seqlens", "seq_start_id"),
    *("completion_mask", "assistant_masks", "loss_mask", "loss_scale"),
)
"""Columns of rows that another tool has tokenized."""

# The names that other projects' rows have for the same thing, this project's own first.
NAMES: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages", "conversations", "conversation"),
    "query": ("query", "prompt", "question", "problem", "instruction", "input"),
    "response": (
        *("response", "answer", "output", "completion", "solution"),
        *("target", "targets", "answers", "answer_key"),
    ),
    "instruction": ("instruction",),
    "input": ("input",),
    "output": ("output",),
    "history": ("history",),
    "text": ("text", "content"),
    "system": ("system", "system_prompt"),
    "tools": ("tools",),
    "images": ("images", "image"),
    "videos": ("videos", "video"),
    "audios": ("audios", "audio"),
    "channel": ("channel",),
    "objects": ("objects",),
    "bbox_type": ("bbox_type",),
    "reasoning_content": ("reasoning_content",),
    "responses": ("responses",),
    "response_weights": ("response_weights", "weights"),
    **{name: (name,) for name in TOKEN_COLUMNS},
    "seq_lengths": ("seq_lengths", "seq_lens"),
    "cu_seqlens": ("cu_seqlens", "cu_seq_lens", "cu_seqlens_q", "cu_seq_lens_q"),
}
NUMBER_COLUMNS = frozenset(column for name in TOKEN_COLUMNS for column in NAMES[name])
"""Names of the columns of such rows in files: lists of numbers."""
# Read under any of their names, row by row: a file's first rows may lack them.
_OPTIONAL = (
    *("history", "input", "system", "tools", "images", "videos", "audios"),
    *("channel", "objects", "bbox_type", "reasoning_content"),
)

# Python's parser needs some hundred times a text's size in memory.
_LONGEST_LITERAL = 1 << 22


class Fields:
    """A row's values by this project's names."""

    def __init__(self, row: Mapping[str, Any], columns: Pairs) -> None:
        self._row, self._names = row, _names_of(columns)

    @property
    def row(self) -> Mapping[str, Any]:
        """The row as it was read."""
        return self._row

    def names(self, name: str) -> tuple[str, ...]:
        """The columns of the file that are looked up for one of this project's names."""
        return self._names[name]

    def has(self, name: str) -> bool:
        """Whether the row has such a column, with anything or nothing in it."""
        return any(column in self._row for column in self._names[name])

    def is_left_out(self, name: str) -> bool:
        """Whether the user said that there is no such column: ``--columns images=``."""
        return self._names[name] == ("",)

    def get(self, name: str) -> Any:
        """A value, or None if the row has none; text in which nothing stands is none."""
        for column in self._names[name]:
            value = self._row.get(column)
            if value is not None and not (isinstance(value, str) and value == ""):  # arrays have no truth value
                return value
        return None

    def raw(self, name: str) -> Any:
        """A value as it is, also an empty text.

        Raises:
            RowProblem: if the row has no such column, or null in it.
        """
        for column in self._names[name]:
            if self._row.get(column) is not None:
                return self._row[column]
        columns = " or ".join(self._names[name])
        there = any(column in self._row for column in self._names[name])
        if there:
            raise RowProblem("null_field", f"{columns} is null")
        raise RowProblem("unknown_form", f"the row has no {columns}; its keys are: {listed(self._row)}")

    def parsed(self, name: str) -> Any:
        """A value that may be written as JSON text, as cells of csv files are.

        Raises:
            RowProblem: if it is text and no JSON.
        """
        value = self.get(name)
        return from_json(name, value) if isinstance(value, str) else value


def from_json(name: str, text: str) -> Any:
    """What a JSON text stands for.

    Raises:
        RowProblem: if it is none.
    """
    try:
        return parse_json(text)
    except JsonProblem as problem:
        if problem.reason == "invalid_json" and len(text) <= _LONGEST_LITERAL:
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                value = ast.literal_eval(text.strip())  # pandas writes lists as Python does
                if is_text(value):
                    return value
        raise json_problem("invalid_row", f"{name!r} is text and no JSON", problem) from problem


@lru_cache(maxsize=64)
def _names_of(columns: Pairs) -> dict[str, tuple[str, ...]]:
    return {**NAMES, **{name: (column,) for name, column in columns}}


class Columns:
    """The columns of a file by this project's names, as they are found.

    Args:
        keys: of the file's rows.
        columns: the file's names by this project's, of those that the user named.
        where: the file, for messages.
    """

    def __init__(self, keys: Sequence[str], columns: dict[str, str], where: str) -> None:
        self.columns, self._where = columns, where
        self._keys = {key.lower(): key for key in reversed(keys)}
        for name in _OPTIONAL:
            # Names in the usual spelling are looked up row by row.
            spelled = [self._keys[usual] for usual in NAMES[name] if usual in self._keys]
            if name not in columns and spelled and not set(spelled) & set(NAMES[name]):
                columns[name] = spelled[0]

    def has(self, name: str) -> bool:
        """Whether there is a column that is called so, in whatever spelling."""
        return name in self._keys

    def find(self, name: str, as_name: str | None = None) -> str | None:
        """The file's name of the column that is meant by one of this project's; None if there is none.

        Args:
            as_name: the name under which it is kept, if it is another.

        Raises:
            DataError: if several may be meant.
        """
        as_name = as_name or name
        if name in self.columns:
            self.columns[as_name] = self.columns[name]
        elif as_name not in self.columns:
            usual = [self._keys[usual] for usual in NAMES[name] if usual in self._keys]
            if name not in self._keys and len(usual) > 1:
                raise DataError(
                    f"{self._where}: {' and '.join(usual)} may both be the {name}",
                    f"Say which it is, as in --columns {name}={usual[0]}",
                )
            if usual:
                self.columns[as_name] = usual[0]
        return self.columns.get(as_name)
