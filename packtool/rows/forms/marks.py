"""Marks of media in a row's texts (``<image>``, ``<video>``, ``<audio>``), and what becomes of those without a medium.

A mark without a medium is either a picture that was lost on the way (an empty cell, a column of another name) or only
text: ``<video>`` is an HTML tag that people ask about. A lost picture must not be trained as the word "<image>", so:

- a row that has a column for such media, with nothing in it, is left out;
- so is one whose picture lies under a name that packtool does not know (``image_path``);
- where the row has no column for it, marks in answers, in tools' results and in texts for pretraining are text. One in
  a question is text if no column of the row or of the file's first rows could hold media (``could_hold_media``), or if
  the model reads no such media; else the row is left out;
- ``--columns images=`` (or ``videos=``, ``audios=``) says that there are none: then all these marks are text.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

from packtool.constants import MEDIA_MARKS
from packtool.errors import DataError
from packtool.rows.forms.columns import NAMES, Fields
from packtool.rows.forms.media import MEDIA_KINDS
from packtool.rows.forms.problem import RowProblem
from packtool.rows.sample import MediaRef, Turn
from packtool.rows.source import Pairs

_KNOWN = frozenset(column for columns in NAMES.values() for column in columns)
_WORDS = {
    "image": ("image", "img", "pic", "photo", "figure", "screenshot"),
    "video": ("video", "clip", "movie"),
    "audio": ("audio", "sound", "speech", "voice", "wav"),
}
_SUFFIXES = {
    "image": (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
    "video": (".mp4", ".mkv", ".mov", ".avi", ".webm"),
    "audio": (".wav", ".mp3", ".flac", ".ogg", ".m4a"),
}


_MEDIA_COLUMNS = frozenset(column for kind in MEDIA_MARKS for column in NAMES[f"{kind}s"])
_MEDIA_WORDS = (*(word for words in _WORDS.values() for word in words), "media", "file", "path", "frames")
_MEDIA_SUFFIXES = tuple(suffix for suffixes in _SUFFIXES.values() for suffix in suffixes)
_PATH = re.compile(r"[a-z][a-z0-9+.-]*://\S+|data:\S+|(~|\.{1,2})?/\S+|[A-Za-z]:\\\S+")
_CAMEL_CASE = re.compile("(?<=[a-z])(?=[A-Z])")
_MIN_ENCODED = 1024
"""Characters from which on a text without blanks may be a file in base64."""


class LoneMark(RowProblem):
    """A row speaks of a medium that it does not have.

    Args:
        kind: of the medium.
        column: of the row, that may be the medium's; "" if none looks so.
        detail: explanation for the user.
    """

    def __init__(self, kind: str, column: str, detail: str) -> None:
        super().__init__(f"{kind}_marks", detail)
        self.kind, self.column = kind, column


def with_marks(turns: list[Turn], media: Mapping[str, Sequence[MediaRef]]) -> tuple[list[Turn], int]:
    """Turns with as many marks of each kind as there are media, and how many had to be added.

    Missing ones are put before the first user text, videos before sounds before images, as ms-swift does. Marks of a
    kind of which the row has no media are a matter of ``lone_mark``.

    Raises:
        RowProblem: if there are more marks than media: which mark goes with which is unknown.
    """
    if not any(media.values()):
        return turns, 0
    added = ""
    for kind in ("video", "audio", "image"):
        if not media[kind]:
            continue
        mark = MEDIA_MARKS[kind]
        num_marks = sum(turn.content.count(mark) for turn in turns)
        num_media = len(media[kind])
        if num_marks > num_media:
            detail = f"{num_marks} {mark} marks and {num_media} {kind}s: which mark goes with which is unknown"
            raise RowProblem(f"{kind}_marks", detail)
        added += mark * (num_media - num_marks)
    if not added:
        return turns, 0
    first = next((i for i, turn in enumerate(turns) if turn.role == "user"), 0)
    turn = turns[first]
    marked = Turn(turn.role, added + turn.content, turn.extra, turn.loss, turn.loss_scale)
    return [*turns[:first], marked, *turns[first + 1 :]], added.count("<")


def could_hold_media(row: Mapping[str, Any], columns: Pairs = ()) -> bool:
    """Whether a column of a row could hold media, by its name, or by values that look like paths, URLs or bytes.

    Args:
        columns: (this project's name, the file's name) of columns that the user named.
    """
    named = {column for name, column in columns if name[:-1] in MEDIA_MARKS}
    return any(_could_hold(key, value, named) for key, value in row.items() if isinstance(key, str))


def _could_hold(key: str, value: Any, named: Container[str]) -> bool:
    name = key.lower()
    if key in named or name in _MEDIA_COLUMNS:
        return True
    if name in _KNOWN:
        return _has_parts(value)
    return _is_named(key, _MEDIA_WORDS) or _looks_like_media(value)


def _is_named(key: str, words: Sequence[str]) -> bool:
    """Whether a word of a column's name begins with one of some ("topic" has no "pic"), or a kind of media is in it."""
    spaced = _CAMEL_CASE.sub("_", key).lower()
    kinds = [kind for kind in MEDIA_KINDS if kind in words]
    return any(kind in spaced for kind in kinds) or any(
        part.startswith(tuple(words)) for part in re.split("[^a-z]+", spaced)
    )


def _has_parts(value: Any) -> bool:
    """Return whether messages, or their JSON, have parts that are not text."""
    if isinstance(value, str):
        return value.lstrip().startswith("[") and any(f'"{kind}' in value for kind in MEDIA_MARKS)
    messages = value if isinstance(value, (list, tuple)) else ()
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, (list, tuple)) for part in content]
    return any(isinstance(part, Mapping) and part.get("type") != "text" for part in parts)


def _looks_like_media(value: Any, depth: int = 3) -> bool:
    if isinstance(value, (bytes, bytearray)):
        return True
    if isinstance(value, str):
        is_encoded = len(value) >= _MIN_ENCODED and not any(map(str.isspace, value[:_MIN_ENCODED]))
        return is_encoded or _PATH.fullmatch(value) is not None or value[-8:].lower().endswith(_MEDIA_SUFFIXES)
    if isinstance(value, Mapping):
        value = list(value.values())
    return depth > 0 and isinstance(value, (list, tuple)) and any(_looks_like_media(v, depth - 1) for v in value[:8])


def lone_mark(
    turns: Sequence[Turn],
    media: Mapping[str, Sequence[MediaRef]],
    fields: Fields,
    *,
    is_text: bool,
    holds_media: bool = True,
) -> str:
    """The kind of a mark without a medium that a model with such media must not be trained on; "" if there is none.

    Args:
        is_text: the row is a text for pretraining.
        holds_media: a column of the row's file could hold media.

    Raises:
        LoneMark: if the row had a place for the medium, so that no model should be trained on it.
    """
    asked = ""
    if not any("<" in turn.content for turn in turns):
        return asked
    for kind in MEDIA_KINDS:
        mark, name = MEDIA_MARKS[kind], f"{kind}s"
        if media[kind] or not any(mark in turn.content for turn in turns) or fields.is_left_out(name):
            continue
        num_marks = sum(turn.content.count(mark) for turn in turns)
        if fields.has(name):
            detail = f"{num_marks} {mark} marks, and the row's {name} are empty"
            raise LoneMark(kind, likely_column(fields.row, kind), detail + _remedy(fields.row, kind))
        if is_text or not any(turn.role == "user" and mark in turn.content for turn in turns):
            continue
        if column := likely_column(fields.row, kind):
            raise LoneMark(kind, column, _asked(kind) + _remedy(fields.row, kind))
        if holds_media or could_hold_media(fields.row):
            asked = asked or kind
    return asked


def lone_mark_detail(kind: str) -> str:
    """What is wrong with a row that asks about a medium of which it has none."""
    return _asked(kind) + _remedy({}, kind)


def likely_column(row: Mapping[str, Any], kind: str) -> str:
    """A column of no known name that may hold media of a kind, by its own name or by what it names; "" for none."""
    unknown = [key for key, value in row.items() if isinstance(key, str) and key.lower() not in _KNOWN and value]
    by_name = [key for key in unknown if _is_named(key, _WORDS[kind])]
    by_value = [key for key in unknown if _names_a_file(row[key], _SUFFIXES[kind])]
    return next((key for key in by_name if key in by_value), next(iter([*by_value, *by_name]), ""))


def check_marks(problems: Sequence[LoneMark], where: str) -> None:
    """Tell once that the media of a file lie under a name that is not known.

    Args:
        problems: of its first rows, if no row among them can be used.
        where: the file, for messages.

    Raises:
        DataError: if one same column of all of them looks as if it held the media.
    """
    if not problems or not problems[0].column or any(problem.column != problems[0].column for problem in problems):
        return
    kind, column = problems[0].kind, problems[0].column
    raise DataError(
        f"{where}: its rows speak of {MEDIA_MARKS[kind]} and have no {kind}s; the column {column!r} seems to hold them",
        f"Say so with --columns {kind}s={column} (or --columns {kind}s= if {MEDIA_MARKS[kind]} is plain text here).",
    )


def _asked(kind: str) -> str:
    return f"{MEDIA_MARKS[kind]} stands in a question, and the row has no {kind}s"


def _remedy(row: Mapping[str, Any], kind: str) -> str:
    if column := likely_column(row, kind):
        return f"; are they in {column[:80]!r}? Then --columns {kind}s={column[:80]} says so"
    return f"; if {MEDIA_MARKS[kind]} is plain text here, --columns {kind}s= says that there are none"


def _names_a_file(value: Any, suffixes: tuple[str, ...]) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and _names_a_file(value[0], suffixes)
    if isinstance(value, Mapping):
        return any(isinstance(item, bytes) or _names_a_file(item, suffixes) for item in list(value.values())[:4])
    return isinstance(value, str) and value[-8:].lower().endswith(suffixes)
