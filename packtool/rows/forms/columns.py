"""Which column of a file is which: by its usual names, or by what the user said."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from packtool.errors import DataError
from packtool.rows.forms.problem import RowProblem, json_problem
from packtool.rows.forms.values import listed
from packtool.rows.parsing import JsonProblem, is_text, parse_json
from packtool.rows.source import Pairs

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
    "reasoning_content": ("reasoning_content",),
}
# Read under any of their names, row by row: a file's first rows may lack them.
_OPTIONAL = (
    *("history", "input", "system", "tools", "images", "videos", "audios"),
    *("channel", "objects", "reasoning_content"),
)
FORMS: Mapping[str, str] = {
    "messages": "messages (or conversations, conversation): a list of {role, content}, of {from, value}, or of pairs "
    "{human, assistant}",
    "alpaca": "instruction, input and output, perhaps history and system",
    "query": "query (or prompt, question, problem) and response (or answer, output, completion, ...), perhaps history",
    "text": "text: a text for pretraining",
}


# Python's parser needs some hundred times a text's size in memory.
_LONGEST_LITERAL = 1 << 22


@dataclass(frozen=True)
class Layout:
    """The form of a file's rows.

    Args:
        form: a key of ``FORMS``.
        columns: (this project's name, the file's) of every column that was found or named.
    """

    form: str
    columns: Pairs


class Fields:
    """A row's values by this project's names."""

    def __init__(self, row: Mapping[str, Any], columns: Pairs) -> None:
        self._row, self._names = row, _names_of(columns)

    @property
    def row(self) -> Mapping[str, Any]:
        """The row as it was read."""
        return self._row

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
            if value is not None and value != "":
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


def detect(rows: Sequence[Mapping[str, Any]], named: Pairs, formatting: str | None, where: str) -> Layout:
    """The form of a file, from its first rows.

    Args:
        named: columns that the user named, as (this project's name, the file's), or the other way round as ms-swift's
            ``--columns`` has it; "" as the file's name leaves out what would be found.
        formatting: ``alpaca`` or ``sharegpt``, if ``dataset_info.json`` says it.
        where: the file, for messages.

    Raises:
        DataError: if no form fits, if several columns may be meant, or if a named one is not there.
    """
    keys = {key: None for row in rows for key in row}
    used = [key for key in keys if any(row.get(key) is not None for row in rows)]
    found = _Found(used, _resolve(named, list(keys), where), where)
    form = found.form(formatting)
    if form is None:
        known = "\n".join(f"  - {text}" for text in FORMS.values())
        raise DataError(
            f"{where}: the form of its rows is not recognised; their keys are: {listed(keys)}\nKnown forms:\n{known}",
            "Say which column is which, as in --columns query=title response=body",
        )
    return Layout(form, tuple(sorted(found.columns.items())))


class _Found:
    """The columns of a file by this project's names, as they are found."""

    def __init__(self, keys: Sequence[str], columns: dict[str, str], where: str) -> None:
        self.columns, self._where = columns, where
        self._keys = {key.lower(): key for key in reversed(keys)}
        for name in _OPTIONAL:
            # Names in the usual spelling are looked up row by row.
            spelled = [self._keys[usual] for usual in NAMES[name] if usual in self._keys]
            if name not in columns and spelled and not set(spelled) & set(NAMES[name]):
                columns[name] = spelled[0]

    def form(self, formatting: str | None) -> str | None:
        """The form that fits, with its columns found; None if there is none."""
        if formatting != "alpaca" and self._find("messages"):
            return "messages"
        if formatting == "sharegpt":
            return None
        asks = [name for name in NAMES["query"] if name in self._keys and name not in ("instruction", "input")]
        may_instruct = "instruction" in self.columns or formatting == "alpaca" or not (asks or "query" in self.columns)
        if may_instruct and self._find("instruction") and (self._find("output") or self._find("response", "output")):
            return "alpaca"
        if self._find("query") and (self._find("response") or self._find("text", "response")):
            return "query"
        return "text" if self._find("text") else None

    def _find(self, name: str, as_name: str | None = None) -> str | None:
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


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about a name that is not known."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
