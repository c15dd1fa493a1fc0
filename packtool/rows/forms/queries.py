"""Forms without messages: question and answer (``query`` and ``response``, alpaca's columns), and a text alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from packtool.rows.forms.columns import NAMES, Columns, Fields, RowProblem, shown
from packtool.rows.forms.media import InlineMedia
from packtool.rows.forms.messages import RowForm, content_of, turns_of
from packtool.rows.sample import Turn


def _read_query(fields: Fields, inline: InlineMedia) -> list[Turn]:
    question = _turns("user", "query", fields.raw("query"), inline)
    return [*_history(fields, inline), *question, *_answer(fields, "response", inline)]


def _read_alpaca(fields: Fields, inline: InlineMedia) -> list[Turn]:
    """Read instruction and input as one question, and output as its answer."""
    instruction, extra_input = fields.raw("instruction"), fields.get("input")
    question = content_of("'instruction'", instruction, inline).text
    if extra_input is not None:
        text = content_of("'input'", extra_input, inline).text
        question = f"{question}\n{text}" if question else text
    return [*_history(fields, inline), Turn("user", question), *_answer(fields, "output", inline)]


def _answer(fields: Fields, name: str, inline: InlineMedia) -> list[Turn]:
    """Return the turns of the answer; none if the row has several responses instead."""
    if fields.get(name) is None and fields.get("responses") is not None:
        return []
    value = fields.raw(name)
    if isinstance(value, Sequence) and not isinstance(value, str) and value and isinstance(value[0], str):
        value = value[0]  # of several equal answers the first is trained, as ms-swift does
    turns = _turns("assistant", name, value, inline)
    reasoning = fields.get("reasoning_content")
    if isinstance(reasoning, str) and turns:
        turns[-1] = replace(turns[-1], extra={**turns[-1].extra, "reasoning_content": reasoning})
    return turns


def _turns(role: str, name: str, value: Any, inline: InlineMedia) -> list[Turn]:
    """Return one turn of a text, or those of a list of messages, as TRL's ``prompt`` and ``completion`` can be."""
    if isinstance(value, Sequence) and value and isinstance(value[0], Mapping) and "role" in value[0]:
        return turns_of(value, inline)
    return [Turn(role, content_of(f"{name!r}", value, inline).text)]


def _history(fields: Fields, inline: InlineMedia) -> list[Turn]:
    history = fields.parsed("history")
    if history is None:
        return []
    if not isinstance(history, Sequence):
        raise RowProblem("invalid_row", f"'history' is a {type(history).__name__}, not a list")
    turns = []
    for i, pair in enumerate(history):
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise RowProblem("invalid_row", f"'history' {i} is {shown(pair)}, not [query, response]")
        for role, value in zip(("user", "assistant"), pair, strict=True):
            turns.append(Turn(role, content_of(f"'history' {i} ({role})", value, inline).text))
    return turns


def _is_query(columns: Columns, formatting: str | None) -> bool:
    if formatting == "sharegpt" or not columns.find("query"):
        return False
    return bool(columns.find("response") or columns.find("text", "response") or columns.find("responses"))


def _is_alpaca(columns: Columns, formatting: str | None) -> bool:
    if formatting == "sharegpt":
        return False
    named = columns.columns
    has_query = any(columns.has(name) for name in NAMES["query"] if name not in ("instruction", "input"))
    if not ("instruction" in named or formatting == "alpaca" or not (has_query or "query" in named)):
        return False
    has_answer = columns.find("output") or columns.find("response", "output") or columns.find("responses")
    return bool(columns.find("instruction") and has_answer)


ALPACA = RowForm("alpaca", "instruction, input and output, perhaps history and system", _is_alpaca, _read_alpaca)

QUERY = RowForm(
    "query",
    "query (or prompt, question, problem) and response (or answer, output, completion, ...) or responses, perhaps "
    "history",
    _is_query,
    _read_query,
)


def _is_text(columns: Columns, formatting: str | None) -> bool:
    return formatting != "sharegpt" and columns.find("text") is not None


def _read_text(fields: Fields, inline: InlineMedia) -> list[Turn]:
    text = content_of("'text'", fields.raw("text"), inline).text
    if not text.strip():
        raise RowProblem("empty_text", "there is nothing but blanks in it")
    return [Turn("assistant", text)]


TEXT = RowForm("text", "text: a text for pretraining", _is_text, _read_text)
