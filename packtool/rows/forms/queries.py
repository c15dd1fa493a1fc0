"""A question and an answer, with what came before them: ``query`` and ``response``, alpaca's columns.

A text for pretraining.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from packtool.rows.forms.columns import NAMES, Columns, Fields, RowProblem, shown
from packtool.rows.forms.form import RowForm
from packtool.rows.forms.media import Found
from packtool.rows.forms.messages import content_of, turns_of
from packtool.rows.sample import Turn


def _turns_of_query(fields: Fields, found: Found) -> list[Turn]:
    """Turns of a row with query, response and perhaps history.

    Raises:
        RowProblem: if one of them is null or no text.
    """
    asked = _turns("user", "query", fields.raw("query"), found)
    return [*_history(fields, found), *asked, *_answer(fields, "response", found)]


def _turns_of_alpaca(fields: Fields, found: Found) -> list[Turn]:
    """Turns of a row with instruction, input, output and perhaps history: instruction and input are one question.

    Raises:
        RowProblem: if one of them is null or no text.
    """
    instruction, given = fields.raw("instruction"), fields.get("input")
    asked = content_of("'instruction'", instruction, found).text
    if given is not None:
        text = content_of("'input'", given, found).text
        asked = f"{asked}\n{text}" if asked else text
    return [*_history(fields, found), Turn("user", asked), *_answer(fields, "output", found)]


def _answer(fields: Fields, name: str, found: Found) -> list[Turn]:
    """The turns of the answer; none where several answers are the row's responses."""
    if fields.get(name) is None and fields.get("responses") is not None:
        return []
    value = fields.raw(name)
    if isinstance(value, Sequence) and not isinstance(value, str) and value and isinstance(value[0], str):
        value = value[0]  # answers of equal right: the first is trained, as ms-swift does
    turns = _turns("assistant", name, value, found)
    reasoning = fields.get("reasoning_content")
    if isinstance(reasoning, str) and turns:
        last = turns[-1]
        extra = {**last.extra, "reasoning_content": reasoning}
        turns[-1] = Turn(last.role, last.content, extra, last.loss, last.loss_scale)
    return turns


def _turns(role: str, name: str, value: Any, found: Found) -> list[Turn]:
    """One turn of a text; or those of a list of messages, as TRL's ``prompt`` and ``completion`` can be."""
    if isinstance(value, Sequence) and value and isinstance(value[0], Mapping) and "role" in value[0]:
        return turns_of(value, found)
    return [Turn(role, content_of(f"{name!r}", value, found).text)]


def _history(fields: Fields, found: Found) -> list[Turn]:
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
            turns.append(Turn(role, content_of(f"'history' {i} ({role})", value, found).text))
    return turns


def _is_query(columns: Columns, formatting: str | None) -> bool:
    if formatting == "sharegpt" or not columns.find("query"):
        return False
    return bool(columns.find("response") or columns.find("text", "response") or columns.find("responses"))


def _is_alpaca(columns: Columns, formatting: str | None) -> bool:
    if formatting == "sharegpt":
        return False
    named = columns.columns
    asks = any(columns.has(name) for name in NAMES["query"] if name not in ("instruction", "input"))
    if not ("instruction" in named or formatting == "alpaca" or not (asks or "query" in named)):
        return False
    answers = columns.find("output") or columns.find("response", "output") or columns.find("responses")
    return bool(columns.find("instruction") and answers)


ALPACA = RowForm("alpaca", "instruction, input and output, perhaps history and system", _is_alpaca, _turns_of_alpaca)

QUERY = RowForm(
    "query",
    "query (or prompt, question, problem) and response (or answer, output, completion, ...) or responses, perhaps "
    "history",
    _is_query,
    _turns_of_query,
)


def _fits(columns: Columns, formatting: str | None) -> bool:
    return formatting != "sharegpt" and columns.find("text") is not None


def _text_turns(fields: Fields, found: Found) -> list[Turn]:
    text = content_of("'text'", fields.raw("text"), found).text
    if not text.strip():
        raise RowProblem("empty_text", "there is nothing but blanks in it")
    return [Turn("assistant", text)]


TEXT = RowForm("text", "text: a text for pretraining", _fits, _text_turns)
