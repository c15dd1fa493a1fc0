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
    """Detect the form of a file from its first rows: which columns hold a conversation, a text or tokens.

    Args:
        rows: the first rows.
        named: columns that the user named, as (packtool's name, the file's name) or the reverse, as in ms-swift's
            ``--columns``; "" as the file's name disables a column.
        formatting: ``alpaca`` or ``sharegpt`` from ``dataset_info.json``; ``tokens`` prefers tokens to text.
        where: name of the file in messages.

    Returns:
        The form, a key of ``FORMS``, and (packtool's name, the file's name) of columns that it uses or the user named.
        DataError if no form fits, or if a column is ambiguous or missing.
    """
    keys = tuple({key: None for row in rows for key in row})  # distinct, in order
    keys_with_value = {key for row in rows for key, value in row.items() if value is not None}
    filled = tuple([key for key in keys if key in keys_with_value])
    return _cached_detect(keys, filled, named, formatting) or _detect(keys, filled, named, formatting, where)


@lru_cache(maxsize=256)
def _cached_detect(keys: _Keys, filled: _Keys, named: Pairs, formatting: str | None) -> tuple[str, Pairs] | None:
    """Detect the form once for all files with the same keys; return None on an error, which has to name the file."""
    try:
        return _detect(keys, filled, named, formatting, "")
    except DataError:
        return None


def _detect(keys: _Keys, filled: _Keys, named: Pairs, formatting: str | None, where: str) -> tuple[str, Pairs]:
    """Detect the form of a file with these ``keys``, of which ``filled`` have a value in at least one row.

    Arguments and result are those of ``detect``.
    """
    columns = Columns(filled, _named_columns(named, keys, where), where)
    if formatting == TOKENS:
        if PREPARED.fits(columns, formatting):
            return PREPARED.name, tuple(sorted(columns.columns.items()))
        formatting = None  # without tokens, any form is accepted
    for form in FORMS.values():
        if form.fits(columns, formatting):  # also adds the columns of the form to ``columns``
            return form.name, tuple(sorted(columns.columns.items()))
    known = "\n".join(f"  - {form.shown}" for form in FORMS.values())
    message = f"{where}: the rows have no known form; their keys are: {listed(keys)}\nKnown forms:\n{known}"
    raise DataError(message, "Name the columns with --columns, for example --columns query=title response=body")


def _named_columns(named: Pairs, file_columns: Sequence[str], where: str) -> dict[str, str]:
    """Check the columns that the user named with ``--columns``, and return the file's names by packtool's names.

    ``named`` has (packtool's name, the file's name) or the reverse; "" as the file's name disables a column. If a name
    of packtool occurs several times, its first column that exists in the file is used; DataError if none does.
    """
    columns: dict[str, str] = {}
    pairs = [_in_order(pair, file_columns) for pair in named]  # (packtool's name, the file's name)
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
    """Convert a row to a sample: a conversation, a text, or tokens that another tool has made, with their media.

    The row is read in the form (which columns hold what) of its source or, if the source has none, in its own form.
    ``number``, counted from 0, is its number in the file. RowProblem if the row cannot be used.
    """
    form, columns = _form_and_columns(row, source)
    fields = Fields(row, columns)  # reads columns by packtool's names
    inline = InlineMedia(source)  # receives the media in messages while these are read
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
    looks_like_text = common["tools"] is None and _is_pretraining_text(content, fields)
    return _sample_of_turns(content, fields, inline, common, is_text=form is TEXT or looks_like_text)


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
    """Make the sample of a row from its turns (messages), and match its media to their placeholders in the texts.

    Args:
        turns: the turns of the conversation; without a system turn, one may be added.
        fields: the columns of the row.
        inline: the media in its messages; ``media_of`` adds those in its columns.
        common: fields of ``Sample`` that all forms have.
        is_text: the turns need no chat template, as a pretraining text.
    """
    source = inline.source
    responses: tuple[Response, ...] = ()
    if not is_text:
        turns = _with_system(turns, fields, source)
        responses = responses_of(fields, turns, source)
    media = media_of(fields, inline)
    turns, num_marks_added = with_marks(turns, media)
    questions = [] if is_text else [turn.content for turn in turns if turn.role == "user"]
    lone_mark = missing_kind(turns, questions, media, fields, file_holds_media=source.holds_media)
    all_turns = list(turns)
    for response in responses:
        all_turns += response.turns
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
    """Check that the column with the media of a file's first rows does not merely have an unknown name.

    Raises DataError if no row can be used, and all rows with a placeholder (``<image>``) but without media have a value
    that looks like a medium in the same column. Other problems of rows are ignored: such rows are dropped later.
    """
    lone_marks: list[LoneMark] = []  # problems of rows that lack a medium
    for number, row in enumerate(rows):
        try:
            to_sample(row, source, number)
            return  # a usable row, usually the first
        except LoneMark as problem:
            lone_marks.append(problem)
        except RowProblem:
            pass
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
    """Put a system prompt in front of the turns if they do not begin with one.

    It is the text in the column ``system`` of the row or, without this column, the prompt of ``source`` (``--system``);
    the turns are unchanged if neither exists. RowProblem unless the first turn of another role is the user's.
    """
    other_roles = [turn.role for turn in turns if turn.role != "system"]
    if not other_roles:
        raise RowProblem("empty_conversation", "the row has a system prompt but no other turn")
    if other_roles[0] != "user":
        raise RowProblem("role_order", f"the conversation begins with the role {other_roles[0]}, not user")
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
