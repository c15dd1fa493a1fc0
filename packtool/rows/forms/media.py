"""Read the images, videos and audio of a row in all supported notations, and match them to placeholders in the texts.

A path is the first of these that applies: a URL, a data URI, an absolute path, a path relative to the media root (if
this file exists), a path relative to the folder of the file of rows. With a remote media root, every relative path is
relative to it. Only local files are checked for existence.

"Mark" is the name of a placeholder (``<image>``, ``<video>``, ``<audio>``) in this package. A mark without a medium is
either a lost medium, for which the row is dropped, or plain text: ``<video>`` is an HTML tag. A medium is lost if its
column is empty or seems to have an unknown name. Otherwise, marks in answers and pretraining texts are plain text, and
those in questions if no column could hold media or the model supports none. ``--columns images=`` makes all plain text.
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
from packtool.rows.forms.columns import NAMES, Fields, RowProblem, finite, is_list, listed, shown
from packtool.rows.sample import MediaKind, MediaRef, Turn
from packtool.rows.source import Pairs, Source

MEDIA_KINDS: tuple[MediaKind, ...] = ("image", "video", "audio")
CLIP_KEYS = ("video_start", "video_end")
"""Keys of qwen-vl-utils for the clip of a video, in seconds."""
_MEDIUM_KEYS = ("url", "path", "data")
_MIN_BASE64 = 1024  # characters; a shorter text is a path
LIMITS: dict[str, tuple[str, ...]] = {
    "image": ("min_pixels", "max_pixels"),
    "video": ("fps", "min_frames", "max_frames", "min_pixels", "max_pixels", "total_pixels"),
    "audio": (),
}
"""Size limits that a row may set for a medium, by kind, with the names of qwen-vl-utils."""
_MIN_FPS, _MAX_FPS = 1e-6, 1e6
_MAX_MINIMUM = 2**53  # of min_pixels and min_frames; max_pixels and max_frames have no upper bound
UNSUPPORTED_LIMITS = ("resized_height", "resized_width", "nframes")
"""Other size settings of qwen-vl-utils, which are not supported."""
_MAX_NESTING = 8
_MAX_SECONDS = 1_000_000  # times in milliseconds are stored as int32
_MILLISECONDS_PER_SECOND = 1000
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]+=*\s*")


@dataclass
class InlineMedia:
    """Media in the contents of a row's messages, by kind in the order of their marks, collected as messages are read.

    ``num_empty_parts`` counts, by kind, the message parts without a medium; the row's columns must provide these media.
    """

    source: Source
    refs: dict[str, list[MediaRef]] = field(default_factory=dict)
    num_empty_parts: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, value: Any) -> str:
        """Add a medium and return its mark; None or "" stands for a medium in the row's columns."""
        if value is None or value == "":
            self.num_empty_parts[kind] = self.num_empty_parts.get(kind, 0) + 1
        else:
            self.refs.setdefault(kind, []).append(media_ref(kind, value, self.source))
        return MEDIA_MARKS[kind]


def media_of(fields: Fields, inline: InlineMedia) -> dict[MediaKind, tuple[MediaRef, ...]]:
    """Return all media of a row by kind: those in its messages (``inline``), or those in its column for the kind.

    ``fields`` are the row's columns. RowProblem if a row has media of a kind in both, because their order is unknown,
    or if a message has a place for a medium that neither has.
    """
    media: dict[MediaKind, tuple[MediaRef, ...]] = {}
    for kind in MEDIA_KINDS:
        name = f"{kind}s"
        column_refs = _refs_of_column(fields, name, kind, inline.source)
        message_refs = inline.refs.get(kind)
        if column_refs and message_refs:
            detail = f"the messages contain {len(message_refs)} {kind}s and {name!r} {len(column_refs)} more"
            raise RowProblem(f"{kind}_marks", f"{detail}; their order is unknown")
        num_empty_parts = inline.num_empty_parts.get(kind, 0)
        if num_empty_parts and not column_refs:
            detail = f"{num_empty_parts} {kind} parts of the messages have no {kind}, and neither has the row"
            raise RowProblem(f"{kind}_marks", detail)
        media[kind] = column_refs or tuple(message_refs or ())
    return media


def _refs_of_column(fields: Fields, name: str, kind: MediaKind, source: Source) -> tuple[MediaRef, ...]:
    """Read the media in the column ``name`` of a row: one medium, a list of media, or none."""
    value = fields.get(name)
    if value is None:
        return ()
    if isinstance(value, str) and value.lstrip().startswith("["):  # a list as JSON text
        value = fields.parsed(name)
    if isinstance(value, (str, Mapping)) or _is_bytes(value):  # a single medium
        value = [value]
    if not isinstance(value, Sequence):
        raise RowProblem("invalid_media", f"{name!r} is a {type(value).__name__}, not a list")
    return tuple(media_ref(kind, item, source, i) for i, item in enumerate(value or ()))


def media_ref(kind: str, value: Any, source: Source, position: int = 0, depth: int = 0) -> MediaRef:
    """Read a medium in any notation; nothing is opened or downloaded.

    Args:
        value: a path, a URL, a data URI, base64, bytes, an object with one of these and perhaps size limits, or a list
            of the frames of a video.
        source: the file of the row, to which paths are relative.
        position: number of the medium in its list, for messages.
        depth: number of objects and lists around ``value``.
    """
    name = f"{kind} {position}"
    if depth > _MAX_NESTING:
        raise RowProblem("invalid_media", f"{name} is nested in more than {_MAX_NESTING} objects and lists")
    if isinstance(value, str) and value:
        return _ref_from_text(name, value, source)
    if _is_bytes(value):
        return MediaRef(path=None, data=bytes(value))
    if isinstance(value, Mapping):
        ref = _ref_from_object(kind, name, value, source, depth)
        return _with_limits_and_clip(kind, name, value, ref)
    if isinstance(value, (list, tuple)) and value and kind == "video":
        frames = tuple(media_ref("image", frame, source, i, depth + 1) for i, frame in enumerate(value))
        return MediaRef(path=None, frames=frames)
    raise RowProblem("invalid_media", f"{name} is {shown(value)}, not a path, a URL or bytes")


def _with_limits_and_clip(kind: str, name: str, value: Mapping[str, Any], ref: MediaRef) -> MediaRef:
    """Return a medium with the size limits and the clip in its object ``value``."""
    limits = _limits(kind, name, value, has_frames=bool(ref.frames))
    if limits:  # limits of an inner object come last, and so take precedence
        ref = replace(ref, limits=(*limits, *ref.limits))
    return _clipped(ref, name, value) if kind == "video" else ref


def _ref_from_object(kind: str, name: str, value: Mapping[str, Any], source: Source, depth: int) -> MediaRef:
    """Read the medium in an object, but not its limits and clip; ``name`` is for messages."""
    content = _embedded_content(name, value)
    if content is not None:
        return MediaRef(path=None, data=content)
    if isinstance(value.get("data"), str):  # a data URI or a URL
        return _ref_from_text(name, value["data"], source)
    content_keys = (*_MEDIUM_KEYS, kind, f"{kind}_url", "frames")
    inner_value = next((value[key] for key in content_keys if value.get(key)), None)
    if inner_value is None:
        raise RowProblem("invalid_media", f"{name} has no bytes, path or URL; its keys are: {listed(value)}")
    ref = media_ref(kind, inner_value, source, depth=depth + 1)
    return _with_frame_times(kind, name, value, ref)


def _embedded_content(name: str, value: Mapping[str, Any]) -> bytes | None:
    """Return the bytes in an object: ``bytes``, perhaps as base64, or ``data`` as base64; None if it has neither."""
    content = value.get("bytes")
    if isinstance(content, str):
        return _decoded(name, content)
    if content is not None:
        if not _is_bytes(content):
            raise RowProblem("invalid_media", f"{name} has a {type(content).__name__} as 'bytes'")
        return bytes(content)
    text = value.get("data")
    if isinstance(text, str) and ":" not in text:  # base64, for a data URI or a URL has a colon
        return _decoded(name, text)
    return None


def _with_frame_times(kind: str, name: str, value: Mapping[str, Any], ref: MediaRef) -> MediaRef:
    """Return a medium with the times of its frames, or their rate, if its object ``value`` has them."""
    milliseconds = _milliseconds(name, value, ref) if kind == "video" else ()
    if milliseconds:
        return replace(ref, milliseconds=milliseconds)
    fps = _fps(value)
    if fps is None or not ref.frames:
        return ref
    return replace(ref, fps=_frame_rate(name, fps, "invalid_media"))


def _fps(value: Mapping[str, Any]) -> Any:
    return value.get("fps", value.get("sample_fps"))  # qwen-vl-utils has both names


def _milliseconds(name: str, value: Mapping[str, Any], ref: MediaRef) -> tuple[int, ...]:
    """Return the time of each frame of a video that is listed as frames, in milliseconds; () if it has no times.

    ``value`` is the object of the video in the row, ``ref`` the video with its frames, and ``name`` is for messages.
    """
    times, milliseconds_per_unit = _frame_times(name, value)
    is_length_of_file = not ref.frames and not is_list(times)  # ``seconds`` of a video file has another meaning
    if times is None or is_length_of_file:
        return ()
    if not is_list(times) or len(times) != len(ref.frames):
        count = f"{len(times)} times" if is_list(times) else shown(times)
        raise RowProblem("invalid_seconds", f"{name} has {count} as seconds for {len(ref.frames)} listed frames")
    _check_times(name, times, max_time=_MAX_SECONDS * _MILLISECONDS_PER_SECOND / milliseconds_per_unit)
    return tuple(round(time * milliseconds_per_unit) for time in times)


def _frame_times(name: str, value: Mapping[str, Any]) -> tuple[Any, int]:
    """Return the times in the object of a video, unchecked, and the milliseconds of their unit; None without times."""
    # Caches store times of listed frames as indexes at 1,000 frames per second, which are milliseconds.
    if is_measured(value) and value.get("fps") == _MILLISECONDS_PER_SECOND:
        return value.get("indices"), 1
    seconds = value.get("seconds")
    if seconds is not None and _fps(value) is not None:
        raise RowProblem("invalid_seconds", f"{name} has both fps and seconds; give one of them")
    return seconds, _MILLISECONDS_PER_SECOND


def _check_times(name: str, times: Sequence[Any], max_time: float) -> None:
    """Raise RowProblem unless the times of a video's frames are ascending numbers from 0 to ``max_time``."""
    previous = -1.0
    for time in times:
        number = finite(time)
        if number is None or not 0 <= number <= max_time:
            detail = f"{name} has {shown(time)} in seconds; they must be numbers from 0 to {_MAX_SECONDS:,}"
            raise RowProblem("invalid_seconds", detail)
        if number <= previous:
            detail = f"{name} has {number:g} after {previous:g} in seconds; they must ascend"
            raise RowProblem("invalid_seconds", detail)
        previous = number


def _limits(kind: str, name: str, value: Mapping[str, Any], *, has_frames: bool) -> list[tuple[str, float]]:
    """Return (key, value) of the size limits in the object of a medium, such as ("max_pixels", 100352.0).

    Args:
        value: the object in the row.
        name: the medium in messages.
        has_frames: the medium is a video that is listed as frames; their rate ``fps`` is then no limit.
    """
    unsupported_keys = UNSUPPORTED_LIMITS if kind == "video" else (*UNSUPPORTED_LIMITS, *CLIP_KEYS)
    fps_is_limit = not has_frames and not is_measured(value)  # measured videos have their chosen frames
    for key in unsupported_keys:
        if value.get(key) is not None:
            supported = ", ".join(LIMITS[kind]) or "none"
            raise RowProblem("media_limits", f"{name} has {key}, which is not supported; supported are {supported}")
    limits = []
    for key in LIMITS[kind]:
        limit = value.get(key)
        if limit is None:
            continue
        if key != "fps":
            limits.append((key, _size_limit(name, key, limit)))
        elif fps_is_limit:
            limits.append((key, _frame_rate(name, limit, "media_limits")))
    return limits


def _size_limit(name: str, key: str, value: Any) -> float:
    number = finite(value)
    if number is None or number < 1:
        raise RowProblem("media_limits", f"{name} has {shown(value)} as {key}; it must be a number of at least 1")
    if key.startswith("min_") and number > _MAX_MINIMUM:
        raise RowProblem("media_limits", f"{name} has {shown(value)} as {key}; the maximum is {_MAX_MINIMUM:,}")
    return number


def is_measured(value: Mapping[str, Any]) -> bool:
    """Return whether the object of a medium has the sizes that export measured, as in packtool's caches and packs."""
    return "tokens" in value and ("grid" in value or "features" in value)


def _frame_rate(name: str, value: Any, reason: str) -> float:
    """Check a number of frames per second; raise RowProblem with ``reason`` if it is invalid."""
    rate = finite(value)
    if rate is None or not _MIN_FPS <= rate <= _MAX_FPS:
        detail = f"{name} has {shown(value)} as fps; it must be a number from {_MIN_FPS:g} to {_MAX_FPS:,.0f}"
        raise RowProblem(reason, detail)
    return rate


def _clipped(ref: MediaRef, name: str, value: Mapping[str, Any]) -> MediaRef:
    """Restrict a video to a section of it, from ``video_start`` to ``video_end`` seconds, if its object has these keys.

    ``value`` is the object of the video in the row, and ``name`` is for messages. A missing key leaves the video's own
    start or end.
    """
    bounds = {key: value[key] for key in CLIP_KEYS if value.get(key) is not None}
    if not bounds:
        return ref
    if ref.frames:
        detail = f"{name} is a list of frames and has {listed(bounds)}; list only the frames to use instead"
        raise RowProblem("invalid_media", detail)
    seconds = {key: finite(bound) for key, bound in bounds.items()}
    for key, number in seconds.items():
        if number is None or number < 0:
            raise RowProblem("invalid_media", f"{name} has {shown(bounds[key])} as {key}, not a number of seconds")
    start, end = (seconds.get(key) for key in CLIP_KEYS)  # None for a missing key
    start_or_zero = start or 0.0
    if end is not None and end <= start_or_zero:
        raise RowProblem("invalid_media", f"{name} has a clip from {start_or_zero:g} s to {end:g} s")
    return replace(ref, clip=(start, end))


def _ref_from_text(name: str, text: str, source: Source) -> MediaRef:
    """Read a medium given as a data URI, long base64 text, URL or path; ``name`` is for messages."""
    if text.startswith("data:"):
        head, comma, body = text.partition(",")
        if not comma:
            raise RowProblem("invalid_media", f"{name} is a data URI without a comma")
        data = _decoded(name, body) if head.endswith(";base64") else unquote_to_bytes(body)
        return MediaRef(path=None, data=data)
    if len(text) >= _MIN_BASE64 and _BASE64.fullmatch(text):
        return MediaRef(path=None, data=_decoded(name, text))
    try:
        return MediaRef(path=_absolute_path(text, source), policy=source.media_policy)
    except StorageError as error:
        raise RowProblem("invalid_media", f"{name}: {error.message}") from error


def _decoded(name: str, text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowProblem("invalid_media", f"{name} is not valid base64: {error}") from error


def _is_bytes(value: Any) -> bool:
    """Return whether a value is bytes, or a list of numbers below 256, as some tables and JSON files store bytes."""
    if isinstance(value, (bytes, bytearray)):
        return True
    return isinstance(value, list) and len(value) > 0 and all(type(item) is int and 0 <= item < 256 for item in value)


def _absolute_path(text: str, source: Source) -> str:
    """Resolve a URL or path in a row, as the module docstring describes."""
    text = storage.normalize(text)
    if storage.is_remote(text):
        return text
    text = os.path.expanduser(text)
    if os.path.isabs(text):
        return os.path.abspath(text)
    if source.media_root is not None:
        in_root = storage.join(source.media_root, text)
        if storage.is_remote(in_root):
            return in_root
        if os.path.exists(in_root):
            return os.path.abspath(in_root)
    in_folder = storage.join(storage.parent(source.path), text)
    return in_folder if storage.is_remote(in_folder) else os.path.abspath(in_folder)


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
    """A row has a mark of media that it lacks; ``column`` (or "") has an unknown name and seems to contain them."""

    def __init__(self, kind: str, column: str, detail: str) -> None:
        super().__init__(f"{kind}_marks", detail)
        self.kind, self.column = kind, column


def with_marks(turns: list[Turn], media: Mapping[MediaKind, Sequence[MediaRef]]) -> tuple[list[Turn], int]:
    """Add missing marks such as ``<image>``, one for each medium; return the turns and the number of added marks.

    Added marks precede the text of the first user turn (or else of the first turn), as in ms-swift. RowProblem if the
    texts have more marks of a kind than the row has media; without media of a kind, its marks may be plain text.
    """
    missing_marks = []
    for kind in ("video", "audio", "image"):
        if media[kind]:
            missing_marks += [MEDIA_MARKS[kind]] * _num_missing_marks(kind, turns, len(media[kind]))
    if not missing_marks:
        return turns, 0
    target = next((i for i, turn in enumerate(turns) if turn.role == "user"), 0)
    marked_turn = replace(turns[target], content="".join(missing_marks) + turns[target].content)
    return [*turns[:target], marked_turn, *turns[target + 1 :]], len(missing_marks)


def _num_missing_marks(kind: str, turns: Sequence[Turn], num_media: int) -> int:
    mark = MEDIA_MARKS[kind]
    num_marks = sum(turn.content.count(mark) for turn in turns)
    if num_marks > num_media:
        detail = f"the texts have {num_marks} {mark} placeholders, but the row has {num_media} {kind}s"
        raise RowProblem(f"{kind}_marks", detail)
    return num_media - num_marks


def could_hold_media(row: Mapping[str, Any], columns: Pairs = ()) -> bool:
    """Return whether any column of a row could contain media, by its name or by a value such as a path or URL."""
    media_columns = {column for name, column in columns if name[:-1] in MEDIA_MARKS}
    return any(
        _column_could_hold_media(key, value, media_columns) for key, value in row.items() if isinstance(key, str)
    )


def _column_could_hold_media(column: str, value: Any, media_columns: Container[str]) -> bool:
    """Return whether a column could contain media; ``media_columns`` were named as such by the user."""
    lower = column.lower()
    if column in media_columns or lower in _MEDIA_COLUMNS:
        return True
    if lower in _KNOWN_COLUMNS:
        return _has_media_parts(value)
    return _has_word(column, _MEDIA_WORDS) or _looks_like_media(value)


def _has_word(column: str, words: Sequence[str]) -> bool:
    """Return whether a word of a column's name begins with one of ``words``; a kind of media may be anywhere in it."""
    snake_case = _CAMEL_CASE.sub("_", column).lower()
    if any(kind in snake_case for kind in MEDIA_KINDS if kind in words):
        return True
    return any(word.startswith(tuple(words)) for word in re.split("[^a-z]+", snake_case))


def _has_media_parts(value: Any) -> bool:
    """Return whether messages, as a list or as JSON text, have content parts that are not text."""
    if isinstance(value, str):
        return value.lstrip().startswith("[") and any(f'"{kind}' in value for kind in MEDIA_MARKS)
    messages = value if isinstance(value, (list, tuple)) else ()
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, (list, tuple)) for part in content]
    return any(isinstance(part, Mapping) and part.get("type") != "text" for part in parts)


def _looks_like_media(value: Any, depth: int = 3) -> bool:
    """Return whether a value is bytes, base64, a path or a URL, or contains one, at most ``depth`` levels deep."""
    if isinstance(value, (bytes, bytearray)):
        return True
    if isinstance(value, str):
        is_encoded = len(value) >= _MIN_BASE64 and not any(map(str.isspace, value[:_MIN_BASE64]))
        return is_encoded or _PATH.fullmatch(value) is not None or value[-8:].lower().endswith(_MEDIA_SUFFIXES)
    if isinstance(value, Mapping):
        value = list(value.values())
    return depth > 0 and isinstance(value, (list, tuple)) and any(_looks_like_media(v, depth - 1) for v in value[:8])


def missing_kind(
    turns: Sequence[Turn],
    questions: Sequence[str],
    media: Mapping[MediaKind, Sequence[MediaRef]],
    fields: Fields,
    *,
    file_holds_media: bool,
) -> str:
    """Find a kind of media whose mark, such as ``<image>``, is in a question of a row that has no such media.

    Args:
        turns: all turns of the row.
        questions: texts of the user's turns, in which marks stand for media.
        media: media of the row by kind.
        fields: columns of the row.
        file_holds_media: whether any of the first rows of the file could hold media.

    Returns:
        The kind; "" if there is none, or if neither the file nor the row could hold media, so that marks are plain
        text. LoneMark if the column for such media is empty, or a column with an unknown name seems to contain them.
    """
    if not any("<" in turn.content for turn in turns):
        return ""  # without marks
    missing_kinds: list[MediaKind] = []
    for kind in MEDIA_KINDS:
        mark = MEDIA_MARKS[kind]
        num_marks = sum(turn.content.count(mark) for turn in turns)
        is_plain_text = fields.is_disabled(f"{kind}s")  # by the user
        if num_marks == 0 or media[kind] or is_plain_text:
            continue
        is_in_question = any(mark in question for question in questions)
        _check_not_lost(fields, kind, num_marks, is_in_question=is_in_question)
        if is_in_question:
            missing_kinds.append(kind)
    if missing_kinds and (file_holds_media or could_hold_media(fields.row)):
        return missing_kinds[0]
    return ""


def _check_not_lost(fields: Fields, kind: str, num_marks: int, *, is_in_question: bool) -> None:
    """Raise LoneMark if a row has marks of a kind, and its column for these media is empty or seems misnamed."""
    suspected_column = likely_column(fields.row, kind)  # "" for none
    usual_column = f"{kind}s"
    if fields.has(usual_column):
        detail = f"the texts have {num_marks} {MEDIA_MARKS[kind]} placeholders, but the row's {usual_column!r} is empty"
        raise LoneMark(kind, suspected_column, detail + _remedy(suspected_column, kind))
    if is_in_question and suspected_column:
        raise LoneMark(kind, suspected_column, lone_mark_detail(kind, suspected_column))


def lone_mark_detail(kind: str, column: str = "") -> str:
    """Return the message for a mark without a medium, which ``column`` (if not "") seems to contain."""
    return f"a question has the placeholder {MEDIA_MARKS[kind]}, but the row has no {kind}s{_remedy(column, kind)}"


def _remedy(column: str, kind: str) -> str:
    if column:
        return f"; if they are in {column[:80]!r}, pass --columns {kind}s={column[:80]}"
    return f"; if {MEDIA_MARKS[kind]} is plain text, pass --columns {kind}s="


def likely_column(row: Mapping[str, Any], kind: str) -> str:
    """Return the column with an unknown name that most likely contains media of a kind; "" if there is none."""
    unknown = [
        key for key, value in row.items() if isinstance(key, str) and key.lower() not in _KNOWN_COLUMNS and value
    ]
    by_name = [key for key in unknown if _has_word(key, _COLUMN_WORDS[kind])]
    by_value = [key for key in unknown if _is_media_file(row[key], _SUFFIXES[kind])]
    by_both = [key for key in by_name if key in by_value]
    return next(iter([*by_both, *by_value, *by_name]), "")


def _is_media_file(value: Any, suffixes: tuple[str, ...]) -> bool:
    """Return whether a value is a file name with one of ``suffixes``, or a list or object with one, or with bytes."""
    if isinstance(value, (list, tuple)):
        return bool(value) and _is_media_file(value[0], suffixes)
    if isinstance(value, Mapping):
        return any(isinstance(item, bytes) or _is_media_file(item, suffixes) for item in list(value.values())[:4])
    return isinstance(value, str) and value[-8:].lower().endswith(suffixes)
