"""Rows that need no chat template: axolotl's ``input_output``, and a question and its answer in a prompt format.

Both become *segments*, texts that are tokenized one by one. Assistant turns are targets, user turns are not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from packtool.rows.forms.columns import Columns, Fields, RowProblem, is_list, shown
from packtool.rows.forms.media import InlineMedia
from packtool.rows.forms.messages import ALPACA, QUERY, RowForm
from packtool.rows.forms.parts import content_of
from packtool.rows.sample import Turn


def _read_prompt_formats() -> dict[str, tuple[str, str]]:
    text = resources.files("packtool.rows").joinpath("prompt_formats.tsv").read_text(encoding="utf-8")
    lines = [line.replace("\\n", "\n").split("\t") for line in text.splitlines() if not line.startswith("#")]
    return {name: (with_input, without_input) for name, with_input, without_input in lines}


PROMPT_FORMATS: Mapping[str, tuple[str, str]] = _read_prompt_formats()
"""Named prompt formats of rows with an input and of those without; the first four are axolotl's."""

_NAMES = re.compile(r"\{(instruction|input|system)\}")
# Whatever may be a control token: texts that are none in the vocabulary stay text.
_CONTROL = re.compile(r"<[^<>\s]+>|\[/?\w+\]")


def prompt_format_name(formats: Sequence[str]) -> str:
    """Return the value of ``--prompt-format`` for formats of questions with and without an input: a name, or a text."""
    return next((name for name, known in PROMPT_FORMATS.items() if known == tuple(formats)), formats[0])


@dataclass(frozen=True)
class Segments:
    """Texts of a row that needs no chat template.

    Args:
        control: control tokens that keep their meaning in the texts.
        ends_text: append the end-of-text token as a target.
    """

    turns: list[Turn]
    control: frozenset[str]
    ends_text: bool


def _fits_segments(columns: Columns, formatting: str | None) -> bool:
    return formatting is None and columns.find("segments") is not None


def _read_segments(fields: Fields, inline: InlineMedia) -> Segments:
    segments = fields.parsed("segments")
    if not is_list(segments) or not segments:
        raise RowProblem("invalid_row", f"'segments' is {shown(segments)}, not a list of segments")
    turns = []
    for number, segment in enumerate(segments):
        is_segment = isinstance(segment, Mapping) and isinstance(segment.get("text"), str)
        if not is_segment or segment.get("label") not in (0, 1):  # true and false are equal to these
            detail = f"segment {number} is {shown(segment)}; it must be an object with a text and a label true or false"
            raise RowProblem("invalid_row", detail)
        turns.append(Turn("assistant" if segment["label"] else "user", segment["text"]))
    if all(turn.role == "user" for turn in turns):
        raise RowProblem("no_target_tokens", "no segment has the label true")
    control = frozenset(token for turn in turns for token in _CONTROL.findall(turn.content))
    return Segments(turns, control, ends_text=False)


SEGMENTS = RowForm(
    "segments",
    "segments: a list of {label, text}; texts with the label true are trained",
    _fits_segments,
    _read_segments,
)


def formatted_prompt(
    form: RowForm, fields: Fields, inline: InlineMedia, prompt_format: tuple[str, ...]
) -> Segments | None:
    """Write the question of a row in a prompt format, which replaces the chat template, and return it with its answer.

    Args:
        form: form of the row; formats apply to the forms ``alpaca`` and ``query`` only.
        fields: columns of the row.
        inline: receives the media in the texts.
        prompt_format: texts with ``{instruction}``, ``{input}`` and ``{system}``: one for questions with an input and
            one for those without, or one for both, or none.

    Returns:
        None if no format applies, so that the chat template is used.
    """
    if not prompt_format or form not in (ALPACA, QUERY):
        return None
    question_name, answer_name = ("instruction", "output") if form is ALPACA else ("query", "response")
    question, answer = fields.raw(question_name), fields.raw(answer_name)
    if _is_conversation(question):  # keeps the chat template, as in TRL
        return None
    if fields.get("history") is not None:
        raise RowProblem("invalid_row", "the row has a history, and prompt_format writes a single question")
    texts = _texts_of_question(question_name, fields, inline)  # by their names in a format
    text_format = prompt_format[0] if texts["input"] else prompt_format[-1]
    prompt = _NAMES.sub(lambda name: texts[name[1]], text_format)
    turns = [Turn("user", prompt), Turn("assistant", _text_of(answer_name, answer, inline))]
    control_tokens = frozenset(_CONTROL.findall(text_format))
    return Segments(turns, control_tokens, ends_text=True)


def _texts_of_question(question_name: str, fields: Fields, inline: InlineMedia) -> dict[str, str]:
    """Return the texts of a question by their names in a prompt format."""
    texts = {"instruction": _text_of(question_name, fields.raw(question_name), inline), "input": ""}
    if question_name == "instruction":  # in the other form, a column named ``input`` is the question itself
        texts["input"] = _text_of("input", fields.get("input"), inline)
    return texts | {"system": _text_of("system", fields.get("system"), inline)}


def _is_conversation(question: Any) -> bool:
    return is_list(question) and bool(question) and isinstance(question[0], Mapping) and "role" in question[0]


def _text_of(name: str, value: Any, inline: InlineMedia) -> str:
    """Return the text of a column; "" for null."""
    return "" if value is None else content_of(repr(name), value, inline).text
