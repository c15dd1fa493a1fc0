"""Pictures, videos and sounds of a row, in all ways that rows name them, and their marks in the row's texts.

A path is, in this order: a URL (kept unchanged), a data URI (decoded), absolute, relative to the media root if such a
file exists, or relative to the folder of the file of rows. Only this machine's files are checked for existence; with a
remote media root every relative path is below it.

A mark (``<image>``, ``<video>``, ``<audio>``) without a medium is either a lost picture (an empty cell, a column of
another name) or plain text: ``<video>`` is an HTML tag that people ask about. A lost picture must not be trained as the
word "<image>", so:

- a row is dropped if it has an empty column for such media, or if its picture is in a column with an unknown name
  (``image_path``);
- if the row has no such column, marks in answers, in tools' results and in texts for pretraining are plain text. A mark
  in a question is plain text if no column of the row or of the file's first rows could hold media
  (``could_hold_media``), or if the model takes no such media; otherwise the row is dropped;
- ``--columns images=`` (or ``videos=``, ``audios=``) makes all these marks plain text.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote_to_bytes

from packtool import storage
from packtool.constants import MEDIA_MARKS
from packtool.errors import StorageError
from packtool.rows.forms.columns import NAMES, Fields, RowProblem, finite, listed, shown
from packtool.rows.sample import MediaKind, MediaRef, Turn
from packtool.rows.source import Pairs, Source

MEDIA_KINDS: tuple[MediaKind, ...] = ("image", "video", "audio")
CLIP = ("video_start", "video_end")
"""Keys of Qwen's tools for the first and last second of a video that are used."""
_KEYS = ("url", "path", "data")
_MIN_BASE64 = 1024
LIMITS: dict[str, tuple[str, ...]] = {
    "image": ("min_pixels", "max_pixels"),
    "video": ("fps", "min_frames", "max_frames", "min_pixels", "max_pixels", "total_pixels"),
    "audio": (),
}
"""Limits that a row may set for a medium, by kind, under the names of Qwen's tools."""
_MIN_FPS, _MAX_FPS = 1e-6, 1e6
_MAX_MINIMUM = 2**53  # of min_pixels and min_frames; maximums may be any number
FIXED = ("resized_height", "resized_width", "nframes")
"""Further keys of Qwen's tools, which are refused."""
_MAX_NESTING = 8
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]+=*\s*")


@dataclass
class InlineMedia:
    """Media inside a row's messages, collected while they are read.

    Args:
        refs: by kind, in the order of their marks.
        num_open: marks by kind without a medium, which the row's own lists provide.
    """

    source: Source
    refs: dict[str, list[MediaRef]] = field(default_factory=dict)
    num_open: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, value: Any) -> str:
        """Add a medium, or None for one of the row's list, and return its mark."""
        if value is None or value == "":
            self.num_open[kind] = self.num_open.get(kind, 0) + 1
        else:
            self.refs.setdefault(kind, []).append(media_ref(kind, value, self.source))
        return MEDIA_MARKS[kind]


def media_of(fields: Fields, inline: InlineMedia) -> dict[MediaKind, tuple[MediaRef, ...]]:
    """Return all media of a row by kind: those in its messages, or those of ``images``, ``videos`` and ``audios``."""
    media = {}
    for kind in MEDIA_KINDS:
        name = f"{kind}s"
        value = fields.get(name)
        if isinstance(value, str) and value.lstrip().startswith("["):
            value = fields.parsed(name)
        if isinstance(value, (str, Mapping)) or _is_bytes(value):
            value = [value]
        if value is not None and not isinstance(value, Sequence):
            raise RowProblem("invalid_media", f"{name!r} is a {type(value).__name__}, not a list")
        listed = [media_ref(kind, item, inline.source, i) for i, item in enumerate(value or ())]
        inner = inline.refs.get(kind)
        if listed and inner:
            detail = f"messages hold {len(inner)} {kind}s and the row lists {len(listed)} more: their order is unknown"
            raise RowProblem(f"{kind}_marks", detail)
        if not listed and (num_open := inline.num_open.get(kind)):
            detail = f"the messages have places for {num_open} {kind}s more than the row has"
            raise RowProblem(f"{kind}_marks", detail)
        media[kind] = tuple(listed or inner or ())
    return media


def media_ref(kind: str, value: Any, source: Source, position: int = 0, depth: int = 0) -> MediaRef:
    """Read a medium: a path, a URL, a data URI, base64, bytes, ``{bytes, path}``, or a list of a video's frames."""
    name = f"{kind} {position}"
    if depth > _MAX_NESTING:
        raise RowProblem("invalid_media", f"{name} lies in more than {_MAX_NESTING} objects and lists")
    if isinstance(value, str) and value:
        return _of_text(name, value, source)
    if _is_bytes(value):
        return MediaRef(path=None, data=bytes(value))
    if isinstance(value, Mapping):
        ref = _of_mapping(kind, name, value, source, depth)
        limits = _limits(kind, name, value, has_frames=bool(ref.frames))
        ref = replace(ref, limits=(*limits, *ref.limits)) if limits else ref
        return _clipped(ref, name, value) if kind == "video" else ref
    if isinstance(value, (list, tuple)) and value and kind == "video":
        frames = tuple(media_ref("image", frame, source, i, depth + 1) for i, frame in enumerate(value))
        return MediaRef(path=None, frames=frames)
    raise RowProblem("invalid_media", f"{name} is {shown(value)}, not a path")


def _of_mapping(kind: str, name: str, value: Mapping[str, Any], source: Source, depth: int) -> MediaRef:
    data = value.get("bytes")
    if isinstance(data, str):
        return MediaRef(path=None, data=_decoded(name, data))
    if data is not None:
        if not _is_bytes(data):
            raise RowProblem("invalid_media", f"{name} has a {type(data).__name__} as bytes")
        return MediaRef(path=None, data=bytes(data))
    data = value.get("data")
    if isinstance(data, str):
        return _of_text(name, data, source) if ":" in data else MediaRef(path=None, data=_decoded(name, data))
    inner = next((value[key] for key in (*_KEYS, kind, f"{kind}_url", "frames") if value.get(key)), None)
    if inner is None:
        raise RowProblem("invalid_media", f"{name} has neither bytes nor a path; its keys are: {listed(value)}")
    ref = media_ref(kind, inner, source, depth=depth + 1)
    fps = value.get("fps", value.get("sample_fps"))
    if fps is None or not ref.frames:
        return ref
    return replace(ref, fps=_frame_rate(name, fps, "invalid_media"))


def _limits(kind: str, name: str, value: Mapping[str, Any], *, has_frames: bool) -> list[tuple[str, float]]:
    """Return the limits in the object of a medium; fps of a video of frames is not one."""
    fixed = FIXED if kind == "video" else (*FIXED, *CLIP)
    if refused := [key for key in fixed if value.get(key) is not None]:
        known = ", ".join(LIMITS[kind]) or "none"
        raise RowProblem("media_limits", f"{name} has {refused[0]}, which is not done here; known are {known}")
    limits = []
    for key in LIMITS[kind]:
        limit = value.get(key)
        # In a video measured by packtool, fps is the file's rate.
        if limit is None or (key == "fps" and (has_frames or is_measured(value))):
            continue
        if key == "fps":
            limits.append((key, _frame_rate(name, limit, "media_limits")))
            continue
        number = finite(limit)
        if number is None or number < 1:
            raise RowProblem("media_limits", f"{name} has {shown(limit)} as {key}, which is no number from 1 on")
        if key.startswith("min_") and number > _MAX_MINIMUM:
            detail = f"{name} has {shown(limit)} as {key}; at most {_MAX_MINIMUM:,} is possible"
            raise RowProblem("media_limits", detail)
        limits.append((key, number))
    return limits


def is_measured(value: Mapping[str, Any]) -> bool:
    """Return whether an object has the sizes that packtool's caches and packs keep of a medium."""
    return "tokens" in value and ("grid" in value or "features" in value)


def _frame_rate(name: str, value: Any, reason: str) -> float:
    rate = finite(value)
    if rate is None or not _MIN_FPS <= rate <= _MAX_FPS:
        detail = f"{name} has {shown(value)} frames a second; it must be a number from {_MIN_FPS:g} to {_MAX_FPS:,.0f}"
        raise RowProblem(reason, detail)
    return rate


def _clipped(ref: MediaRef, name: str, value: Mapping[str, Any]) -> MediaRef:
    """Return a video with the clip from ``video_start`` to ``video_end``, in seconds."""
    bounds = {key: value[key] for key in CLIP if value.get(key) is not None}
    if not bounds:
        return ref
    if ref.frames:
        detail = f"{name} is a list of frames and has {listed(bounds)}: list the frames that are meant"
        raise RowProblem("invalid_media", detail)
    seconds = {key: finite(bound) for key, bound in bounds.items()}
    for key, number in seconds.items():
        if number is None or number < 0:
            raise RowProblem("invalid_media", f"{name} has {shown(bounds[key])} as {key}, not seconds")
    start, end = (seconds.get(key) for key in CLIP)
    if end is not None and end <= (start or 0.0):
        raise RowProblem("invalid_media", f"{name} begins at {start or 0:g} s and ends at {end:g} s")
    return replace(ref, clip=(start, end))


def _of_text(name: str, text: str, source: Source) -> MediaRef:
    if text.startswith("data:"):
        head, comma, body = text.partition(",")
        if not comma:
            raise RowProblem("invalid_media", f"{name} is a data URI without a comma")
        data = _decoded(name, body) if head.endswith(";base64") else unquote_to_bytes(body)
        return MediaRef(path=None, data=data)
    if len(text) >= _MIN_BASE64 and _BASE64.fullmatch(text):
        return MediaRef(path=None, data=_decoded(name, text))
    try:
        return MediaRef(path=_path(text, source), policy=source.media_policy)
    except StorageError as error:
        raise RowProblem("invalid_media", f"{name}: {error.message}") from error


def _decoded(name: str, text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowProblem("invalid_media", f"{name} is no base64: {error}") from error


def _is_bytes(value: Any) -> bool:
    """Return whether a value is bytes, or their numbers in a list, as tables of uint8 and some JSON writers have it."""
    if isinstance(value, (bytes, bytearray)):
        return True
    return isinstance(value, list) and len(value) > 0 and all(type(item) is int and 0 <= item < 256 for item in value)


def _path(text: str, source: Source) -> str:
    text = storage.normalize(text)
    if storage.is_remote(text):
        return text
    text = os.path.expanduser(text)
    if os.path.isabs(text):
        return os.path.abspath(text)
    if source.media_root is not None:
        inside = storage.join(source.media_root, text)
        if storage.is_remote(inside):
            return inside
        if os.path.exists(inside):
            return os.path.abspath(inside)
    beside = storage.join(storage.parent(source.path), text)
    return beside if storage.is_remote(beside) else os.path.abspath(beside)


_KNOWN_COLUMNS = frozenset(column for columns in NAMES.values() for column in columns)
_COLUMN_WORDS = {
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
_MEDIA_WORDS = (*(word for words in _COLUMN_WORDS.values() for word in words), "media", "file", "path", "frames")
_MEDIA_SUFFIXES = tuple(suffix for suffixes in _SUFFIXES.values() for suffix in suffixes)
_PATH = re.compile(r"[a-z][a-z0-9+.-]*://\S+|data:\S+|(~|\.{1,2})?/\S+|[A-Za-z]:\\\S+")
_CAMEL_CASE = re.compile("(?<=[a-z])(?=[A-Z])")


class LoneMark(RowProblem):
    """A row has a mark of a medium that it does not have; ``column`` may hold the medium, "" if none does."""

    def __init__(self, kind: str, column: str, detail: str) -> None:
        super().__init__(f"{kind}_marks", detail)
        self.kind, self.column = kind, column


def with_marks(turns: list[Turn], media: Mapping[MediaKind, Sequence[MediaRef]]) -> tuple[list[Turn], int]:
    """Return turns with one mark for each medium, and the number of marks that were added.

    Missing marks are put before the first user text, videos before sounds before images, as ms-swift does. Marks of
    kinds without media are left to ``lone_mark``. More marks than media are a RowProblem.
    """
    added = ""
    for kind in ("video", "audio", "image"):
        if not media[kind]:
            continue
        mark, num_media = MEDIA_MARKS[kind], len(media[kind])
        num_marks = sum(turn.content.count(mark) for turn in turns)
        if num_marks > num_media:
            detail = f"{num_marks} {mark} marks and {num_media} {kind}s: which mark goes with which is unknown"
            raise RowProblem(f"{kind}_marks", detail)
        added += mark * (num_media - num_marks)
    if not added:
        return turns, 0
    first = next((i for i, turn in enumerate(turns) if turn.role == "user"), 0)
    marked = replace(turns[first], content=added + turns[first].content)
    return [*turns[:first], marked, *turns[first + 1 :]], added.count("<")


def could_hold_media(row: Mapping[str, Any], columns: Pairs = ()) -> bool:
    """Return whether a column of a row could hold media, by its name (or the user's) or a value like a path or URL."""
    named = {column for name, column in columns if name[:-1] in MEDIA_MARKS}
    return any(_column_could_hold(key, value, named) for key, value in row.items() if isinstance(key, str))


def _column_could_hold(key: str, value: Any, named: Container[str]) -> bool:
    name = key.lower()
    if key in named or name in _MEDIA_COLUMNS:
        return True
    if name in _KNOWN_COLUMNS:
        return _has_media_parts(value)
    return _has_word(key, _MEDIA_WORDS) or _looks_like_media(value)


def _has_word(key: str, words: Sequence[str]) -> bool:
    """Return whether a word of a column's name begins with one of ``words``, or a kind of media among them is in it.

    So "topic" has no "pic".
    """
    spaced = _CAMEL_CASE.sub("_", key).lower()
    if any(kind in spaced for kind in MEDIA_KINDS if kind in words):
        return True
    return any(part.startswith(tuple(words)) for part in re.split("[^a-z]+", spaced))


def _has_media_parts(value: Any) -> bool:
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
        is_encoded = len(value) >= _MIN_BASE64 and not any(map(str.isspace, value[:_MIN_BASE64]))
        return is_encoded or _PATH.fullmatch(value) is not None or value[-8:].lower().endswith(_MEDIA_SUFFIXES)
    if isinstance(value, Mapping):
        value = list(value.values())
    return depth > 0 and isinstance(value, (list, tuple)) and any(_looks_like_media(v, depth - 1) for v in value[:8])


def lone_mark(
    turns: Sequence[Turn],
    media: Mapping[MediaKind, Sequence[MediaRef]],
    fields: Fields,
    *,
    is_text: bool,
    holds_media: bool = True,
) -> str:
    """Return the kind of a mark without a medium, on which a model with such media must not be trained; "" if none.

    Args:
        is_text: the row is a text for pretraining.
        holds_media: a column of the row's file could hold media.

    Raises:
        LoneMark: if the row lost its medium, so that no model should be trained on it.
    """
    lone = ""
    if not any("<" in turn.content for turn in turns):
        return lone
    for kind in MEDIA_KINDS:
        mark, name = MEDIA_MARKS[kind], f"{kind}s"
        num_marks = sum(turn.content.count(mark) for turn in turns)
        if media[kind] or not num_marks or fields.is_disabled(name):
            continue
        if fields.has(name):
            column = likely_column(fields.row, kind)
            detail = f"{num_marks} {mark} marks, and the row's {name} are empty"
            raise LoneMark(kind, column, detail + _remedy(column, kind))
        if is_text or not any(turn.role == "user" and mark in turn.content for turn in turns):
            continue
        if column := likely_column(fields.row, kind):
            raise LoneMark(kind, column, lone_mark_detail(kind, column))
        if holds_media or could_hold_media(fields.row):
            lone = lone or kind
    return lone


def lone_mark_detail(kind: str, column: str = "") -> str:
    """Describe a row that asks about a medium it lacks, with the remedy; ``column`` may hold the medium."""
    return f"{MEDIA_MARKS[kind]} stands in a question, and the row has no {kind}s{_remedy(column, kind)}"


def _remedy(column: str, kind: str) -> str:
    if column:
        return f"; are they in {column[:80]!r}? Then --columns {kind}s={column[:80]} says so"
    return f"; if {MEDIA_MARKS[kind]} is plain text here, --columns {kind}s= says that there are none"


def likely_column(row: Mapping[str, Any], kind: str) -> str:
    """Return a column of unknown name that may hold media of a kind, by its name or its value; "" for none."""
    unknown = [
        key for key, value in row.items() if isinstance(key, str) and key.lower() not in _KNOWN_COLUMNS and value
    ]
    by_name = [key for key in unknown if _has_word(key, _COLUMN_WORDS[kind])]
    by_value = [key for key in unknown if _names_a_file(row[key], _SUFFIXES[kind])]
    return next((key for key in by_name if key in by_value), next(iter([*by_value, *by_name]), ""))


def _names_a_file(value: Any, suffixes: tuple[str, ...]) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and _names_a_file(value[0], suffixes)
    if isinstance(value, Mapping):
        return any(isinstance(item, bytes) or _names_a_file(item, suffixes) for item in list(value.values())[:4])
    return isinstance(value, str) and value[-8:].lower().endswith(suffixes)
