"""Forms of a row: whatever a file's rows look like, they become ``Sample``.

A form is told once for a file (``known.detect``). What a row has beside its conversation is read alike in all forms:
``system``, ``tools``, ``images``, ``videos``, ``audios``, ``channel``, and ``responses`` where the conversation has no
answer. Columns of preference data (``rejected_response``, ``rejected_messages``, ``label``, ``margin``) are no matter
of supervised training: the conversation that is to be preferred is trained, as ms-swift's ``sft`` does with such rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from packtool.errors import DataError
from packtool.rows.forms.columns import Fields, RowProblem
from packtool.rows.forms.known import KNOWN, detect
from packtool.rows.forms.media import Found, LoneMark, check_marks, lone_mark, media_of, with_marks
from packtool.rows.forms.objects import objects_of
from packtool.rows.forms.queries import TEXT
from packtool.rows.forms.responses import responses_of
from packtool.rows.sample import PreparedTokens, Sample, Turn, held
from packtool.rows.source import Pairs, Source

__all__ = ["RowProblem", "check_first_rows", "to_sample"]


def to_sample(row: Mapping[str, Any], source: Source, number: int) -> Sample:
    """Read one row.

    Args:
        row: the parsed object.
        source: the file it came from, and the form of its rows.
        number: 0-based row.

    Raises:
        RowProblem: if the row cannot be used.
    """
    form, columns = source.form, source.columns
    if form is None:
        form, columns = _form_of(row, source)
    fields, found = Fields(row, columns), Found(source)
    if (tokens_of := KNOWN[form].tokens) is not None:
        return _prepared(tokens_of(fields), fields, found, number)
    turns = KNOWN[form].read(fields, found)
    tools = _tools(fields)
    is_text = form == TEXT.name or (_is_text(turns) and tools is None and fields.get("system") is None)
    if not is_text:
        _check_order(turns)
        turns = _with_system(turns, fields, source)
    responses = () if is_text else responses_of(fields, turns, source)
    media = media_of(fields, found)
    turns, num_added = with_marks(turns, media)
    asked = lone_mark(turns, media, fields, is_text=is_text, holds_media=source.holds_media)
    said = [*turns, *(turn for response in responses for turn in response.turns)]
    objects = objects_of(fields, said, len(media["image"]))
    return Sample(
        turns=tuple(turns),
        images=media["image"],
        source=source.label,
        row=number,
        tools=tools,
        channel=_channel(fields),
        num_marks_added=num_added,
        videos=media["video"],
        audios=media["audio"],
        is_text=is_text,
        loss_scale=source.loss_scale,
        lone_mark=asked,
        responses=responses,
        objects=objects,
    )


def _prepared(tokens: PreparedTokens, fields: Fields, found: Found, number: int) -> Sample:
    """The sample of a row that another tool has tokenized."""
    media = media_of(fields, found)
    return Sample(
        turns=(),
        images=media["image"],
        source=found.source.label,
        row=number,
        channel=_channel(fields) if tokens.channels is None else None,
        videos=media["video"],
        audios=media["audio"],
        is_text=tokens.trained is None,
        loss_scale=found.source.loss_scale,
        tokens=tokens,
    )


def check_first_rows(rows: Sequence[Mapping[str, Any]], source: Source) -> None:
    """Look for what is wrong with all of the first rows of a file in the same way, so that it is told once.

    Raises:
        DataError: naming it, and the option that mends it.
    """
    problems: list[LoneMark] = []
    for number, row in enumerate(rows):
        found = held(source.label, number, _sample_or_problem, row, source, number)
        if isinstance(found, Sample):
            return  # one that can be used, most often the first
        if isinstance(found, LoneMark):
            problems.append(found)
    check_marks(problems, source.label)


def _sample_or_problem(row: Mapping[str, Any], source: Source, number: int) -> Sample | RowProblem:
    try:
        return to_sample(row, source, number)
    except RowProblem as problem:
        return problem


def _form_of(row: Mapping[str, Any], source: Source) -> tuple[str, Pairs]:
    try:
        layout = detect([row], source.columns, None, "the row")
    except DataError as error:
        raise RowProblem("unknown_form", error.message.partition("\n")[0]) from error
    return layout.form, layout.columns


def _is_text(turns: Sequence[Turn]) -> bool:
    """One assistant turn alone is ms-swift's form of a text for pretraining."""
    return len(turns) == 1 and turns[0].role == "assistant" and not turns[0].extra


def _check_order(turns: Sequence[Turn]) -> None:
    """Somebody must ask first. Who follows whom after that is the template's matter; a last turn without an answer
    stays, as context that is not trained.
    """
    first = next((turn for turn in turns if turn.role != "system"), None)
    if first is None:
        raise RowProblem("empty_conversation", "there is a system prompt and no other turn")
    if first.role != "user":
        raise RowProblem("role_order", f"the conversation begins with a turn of the {first.role}, not of the user")


def _with_system(turns: list[Turn], fields: Fields, source: Source) -> list[Turn]:
    """The row's own system prompt counts before the option's; without both the template has its own."""
    if turns[0].role == "system":
        return turns
    system = fields.get("system")
    if system is None:
        system = source.system
    elif not isinstance(system, str):
        raise RowProblem("invalid_content", f"'system' is a {type(system).__name__}, not text")
    return turns if system is None else [Turn("system", system), *turns]


def _tools(fields: Fields) -> tuple[Any, ...] | None:
    tools = fields.parsed("tools")
    if not tools:
        return None
    if not isinstance(tools, Sequence):
        raise RowProblem("invalid_row", f"'tools' is a {type(tools).__name__}, not a list")
    return tuple(_tool(tool) for tool in tools)


def _tool(tool: Any) -> Any:
    if isinstance(tool, str):
        return Fields({"tools": tool}, ()).parsed("tools")
    return tool


def _channel(fields: Fields) -> str | None:
    channel = fields.get("channel")
    return None if channel is None else str(channel)
