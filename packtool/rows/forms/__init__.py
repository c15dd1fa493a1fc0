"""Detect the form of a file's rows, and read rows as samples.

A form is a set of columns that contain a conversation, a text or tokens. It is detected once per file (``detect``).
Columns such as ``system`` and ``images`` are the same in all forms. Those of preference data (``rejected_response``,
``label``) are ignored: the preferred conversation is trained, as with ms-swift's ``sft``.

Functions of this package that read rows raise RowProblem for a row that cannot be used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from packtool.config.data import set_kwargs, template_kwargs_problem
from packtool.constants import MEDIA_MARKS
from packtool.errors import DataError, did_you_mean
from packtool.rows.forms.columns import NAMES, Columns, Fields, RowProblem, listed
from packtool.rows.forms.media import InlineMedia, LoneMark, media_of, missing_kind, with_marks
from packtool.rows.forms.messages import ALPACA, MESSAGES, QUERY, TEXT, RowForm, responses_of
from packtool.rows.forms.objects import objects_of
from packtool.rows.forms.prepared import PREPARED, TOKENS
from packtool.rows.forms.segments import SEGMENTS, Segments, formatted_prompt
from packtool.rows.sample import MediaKind, MediaRef, PreparedTokens, Response, Sample, Turn, unexpected_drop
from packtool.rows.source import Pairs, Source

__all__ = ["FORMS", "RowProblem", "check_first_rows", "detect", "to_sample"]

_Keys = tuple[str, ...]

FORMS: Mapping[str, RowForm] = {form.name: form for form in (MESSAGES, SEGMENTS, ALPACA, QUERY, TEXT, PREPARED)}
"""All forms by name; a file has the first form that fits."""


def detect(rows: Sequence[Mapping[str, Any]], named: Pairs, formatting: str | None, where: str) -> tuple[str, Pairs]:
    """Detect the form of a file from its first rows; DataError if none fits or a column is ambiguous or missing.

    Args:
        named: columns that the user named, as (packtool's name, the file's name) or the reverse, as in ms-swift's
            ``--columns``; "" as the file's name disables a column.
        formatting: ``alpaca`` or ``sharegpt`` from ``dataset_info.json``; ``tokens`` prefers tokens to text.

    Returns:
        the form, a key of ``FORMS``, and (packtool's name, the file's name) of columns that it uses or the user named.
    """
    keys = tuple({key: None for row in rows for key in row})
    non_null = {key for row in rows for key, value in row.items() if value is not None}
    filled = tuple([key for key in keys if key in non_null])
    return _cached_detect(keys, filled, named, formatting) or _detect(keys, filled, named, formatting, where)


@lru_cache(maxsize=256)
def _cached_detect(keys: _Keys, filled: _Keys, named: Pairs, formatting: str | None) -> tuple[str, Pairs] | None:
    """Detect the form once for all files with the same keys; return None on an error, which has to name the file."""
    try:
        return _detect(keys, filled, named, formatting, "")
    except DataError:
        return None


def _detect(keys: _Keys, filled: _Keys, named: Pairs, formatting: str | None, where: str) -> tuple[str, Pairs]:
    """Detect the form of a file with these ``keys``, of which ``filled`` have a value in at least one row."""
    columns = Columns(filled, _named_columns(named, keys, where), where)
    if formatting == TOKENS:
        if PREPARED.fits(columns, formatting):
            return PREPARED.name, tuple(sorted(columns.columns.items()))
        formatting = None
    form = next((form for form in FORMS.values() if form.fits(columns, formatting)), None)
    if form is None:
        known = "\n".join(f"  - {form.shown}" for form in FORMS.values())
        message = f"{where}: the rows have no known form; their keys are: {listed(keys)}\nKnown forms:\n{known}"
        raise DataError(message, "Name the columns with --columns, for example --columns query=title response=body")
    return form.name, tuple(sorted(columns.columns.items()))


def _named_columns(named: Pairs, file_columns: Sequence[str], where: str) -> dict[str, str]:
    """Check the columns that the user named, and return the file's names by packtool's names; "" disables a column.

    ``named`` has (packtool's name, the file's name) or the reverse. If it has a name of packtool's several times, the
    first column that the file has is used.
    """
    columns: dict[str, str] = {}
    pairs = [_in_order(pair, file_columns) for pair in named]
    for name, column in pairs:
        if name not in NAMES:
            message = f"--columns {name}={column}: unknown column name {name!r}{did_you_mean(name, NAMES)}"
            raise DataError(message, f"Known names are {', '.join(NAMES)}.")
        if column == "" or column in file_columns:
            columns.setdefault(name, column)
        elif not any(other_name == name and other in file_columns for other_name, other in pairs):
            raise DataError(
                f"--columns {name}={column}: {where} has no column {column!r} in its first rows"
                f"{did_you_mean(column, file_columns)}; its columns are: {listed(file_columns)}",
                "Name a column that the file has. If the datasets have different columns, name them for each dataset "
                "in a --dataset-info file.",
            )
    return columns


def _in_order(pair: tuple[str, str], file_columns: Sequence[str]) -> tuple[str, str]:
    """Return (packtool's name, the file's name) from a pair that may be in the reverse order, as in ms-swift."""
    name, column = pair
    is_in_order = name in NAMES and column in file_columns
    is_reversed = column in NAMES and (name in file_columns or name not in NAMES)
    return (column, name) if is_reversed and not is_in_order else (name, column)


def to_sample(row: Mapping[str, Any], source: Source, number: int) -> Sample:
    """Convert row ``number`` (0-based) to a sample, by the form of its source or, if unknown, by the row's own form."""
    form, columns = _form_and_columns(row, source)
    fields = Fields(row, columns)
    inline = InlineMedia(source)  # the media of messages, added as these are read
    content = formatted_prompt(form, fields, inline, source.prompt_format)
    if content is None:
        content = form.read(fields, inline)
    common: dict[str, Any] = {"source": source.label, "row": number, "loss_scale": source.loss_scale}
    if isinstance(content, PreparedTokens):
        return _tokenized_sample(content, fields, inline, common)
    common["tools"] = _tools(fields)
    if isinstance(content, Segments):
        common |= {"control": content.control, "ends_text": content.ends_text}
        return _sample_of_turns(content.turns, fields, inline, common, is_text=True)
    is_text = form is TEXT or (common["tools"] is None and _is_pretraining_text(content, fields))
    return _sample_of_turns(content, fields, inline, common, is_text=is_text)


def _is_pretraining_text(turns: Sequence[Turn], fields: Fields) -> bool:
    """Return whether turns are a single text of the assistant, as ms-swift writes pretraining texts."""
    is_single_answer = len(turns) == 1 and turns[0].role == "assistant" and not turns[0].extra
    return is_single_answer and fields.get("system") is None


def _form_and_columns(row: Mapping[str, Any], source: Source) -> tuple[RowForm, Pairs]:
    """Return form and columns of a source's rows, or if these have no common form, of the row alone."""
    if source.form is not None:
        return FORMS[source.form], source.columns
    try:
        form_name, columns = detect([row], source.columns, None, "the row")
    except DataError as error:
        raise RowProblem("unknown_form", error.message.partition("\n")[0]) from error
    return FORMS[form_name], columns


def _tokenized_sample(tokens: PreparedTokens, fields: Fields, inline: InlineMedia, common: Mapping[str, Any]) -> Sample:
    """Return a row that another tool has tokenized; ``common``: fields of ``Sample`` that all forms have."""
    return Sample(
        turns=(),
        **_media_fields(media_of(fields, inline)),
        channel=_channel(fields) if tokens.channels is None else None,  # else each sample of a pack has its own
        is_text=tokens.trained is None,
        tokens=tokens,
        **common,
    )


def _sample_of_turns(
    turns: list[Turn], fields: Fields, inline: InlineMedia, common: Mapping[str, Any], *, is_text: bool
) -> Sample:
    """Return a sample of turns with their media; ``is_text``: they need no chat template."""
    source = inline.source
    responses: tuple[Response, ...] = ()
    if not is_text:
        turns = _with_system(turns, fields, source)
        responses = responses_of(fields, turns, source)
    media = media_of(fields, inline)
    turns, num_marks_added = with_marks(turns, media)
    questions = [] if is_text else [turn.content for turn in turns if turn.role == "user"]
    lone_mark = missing_kind(turns, questions, media, fields, file_holds_media=source.holds_media)
    all_turns = [*turns, *(turn for response in responses for turn in response.turns)]
    return Sample(
        turns=tuple(turns),
        **_media_fields(media),
        channel=_channel(fields),
        num_marks_added=num_marks_added,
        is_text=is_text,
        lone_mark=lone_mark,
        responses=responses,
        objects=objects_of(fields, all_turns, len(media["image"])),
        chat_template_kwargs={} if is_text else _template_kwargs(fields),
        **common,
    )


def _media_fields(media: Mapping[MediaKind, tuple[MediaRef, ...]]) -> dict[str, Any]:
    return {"images": media["image"], "videos": media["video"], "audios": media["audio"]}


def _channel(fields: Fields) -> str | None:
    channel = fields.get("channel")
    return None if channel is None else str(channel)


def check_first_rows(rows: Sequence[Mapping[str, Any]], source: Source) -> None:
    """Raise DataError if no row can be used, and all rows that lack media seem to have them in one misnamed column."""
    lone_marks: list[LoneMark] = []
    for number, row in enumerate(rows):
        try:
            to_sample(row, source, number)
            return  # a usable row, usually the first
        except LoneMark as problem:
            lone_marks.append(problem)
        except RowProblem:
            pass  # the row is dropped later
        except BaseException as error:
            unexpected_drop(source.label, number, error)  # raises it again unless the row may be its cause
    suspected_columns = {problem.column for problem in lone_marks}  # "" for a row without one
    if len(suspected_columns) == 1 and "" not in suspected_columns:
        kind, column = lone_marks[0].kind, lone_marks[0].column
        mark = MEDIA_MARKS[kind]
        raise DataError(
            f"{source.label}: the rows have {mark} placeholders but no {kind}s; the column {column!r} seems to contain "
            "them",
            f"Pass --columns {kind}s={column}; if {mark} is plain text in these rows, pass --columns {kind}s=.",
        )


def _with_system(turns: list[Turn], fields: Fields, source: Source) -> list[Turn]:
    """Return the turns, with a system prompt in front if they have none: the column ``system``, or else ``--system``.

    RowProblem unless the first turn (of roles other than system) is the user's.
    """
    roles = [turn.role for turn in turns if turn.role != "system"]
    if not roles:
        raise RowProblem("empty_conversation", "the row has a system prompt but no other turn")
    if roles[0] != "user":
        raise RowProblem("role_order", f"the conversation begins with the role {roles[0]}, not user")
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
    return tuple(Fields({"tools": tool}, ()).parsed("tools") if isinstance(tool, str) else tool for tool in tools)


def _template_kwargs(fields: Fields) -> dict[str, Any]:
    kwargs = fields.parsed("chat_template_kwargs")
    if kwargs is None:
        return {}
    is_mapping = isinstance(kwargs, Mapping)
    problem = template_kwargs_problem(kwargs) if is_mapping else f"a {type(kwargs).__name__}, not an object"
    if problem is not None:
        raise RowProblem("invalid_template_kwargs", f"'chat_template_kwargs': {problem}")
    return set_kwargs(kwargs)
