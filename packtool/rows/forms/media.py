"""Pictures, videos and sounds of a row, in every way that rows name them.

A path is, in this order: a URL (kept as it is), a data URI (its bytes are taken), absolute, relative to the media root
if such a file is there, or relative to the folder of the file of rows. Whether a file is there is asked of this
machine's file system only; with a remote media root every relative path lies in it.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote_to_bytes

from packtool import storage
from packtool.constants import MEDIA_MARKS
from packtool.errors import StorageError
from packtool.rows.forms.columns import Fields
from packtool.rows.forms.problem import RowProblem
from packtool.rows.forms.values import finite, listed, shown
from packtool.rows.sample import MediaRef
from packtool.rows.source import Source

MEDIA_KINDS = ("image", "video", "audio")
CLIP = ("video_start", "video_end")
"""What Qwen's tools call the seconds from which, and up to which, a video is meant."""
_KEYS = ("url", "path", "data")
_LEAST_BASE64 = 1024
LIMITS: dict[str, tuple[str, ...]] = {
    "image": ("min_pixels", "max_pixels"),
    "video": ("fps", "min_frames", "max_frames", "min_pixels", "max_pixels", "total_pixels"),
    "audio": (),
}
"""Limits that a row may give a medium of its own, by kind, under the names of Qwen's tools."""
_MIN_FPS, _MAX_FPS = 1e-6, 1e6
_MAX_MINIMUM = 2**53  # of min_pixels and min_frames; maximums may be any number
FIXED = ("resized_height", "resized_width", "nframes")
"""What Qwen's tools know besides, and is not done here."""
_DEEPEST = 8
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]+=*\s*")


@dataclass
class Found:
    """Media that a row's messages hold themselves.

    Args:
        refs: by kind, in the order of their marks.
        num_open: places of a kind without a medium; the row's own lists fill them.
    """

    source: Source
    refs: dict[str, list[MediaRef]] = field(default_factory=dict)
    num_open: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, value: Any) -> str:
        """Take a medium, or None for one that the row's list has, and give the mark that stands for it."""
        if value is None or value == "":
            self.num_open[kind] = self.num_open.get(kind, 0) + 1
        else:
            self.refs.setdefault(kind, []).append(media_ref(kind, value, self.source))
        return MEDIA_MARKS[kind]


def media_of(fields: Fields, found: Found) -> dict[str, tuple[MediaRef, ...]]:
    """All media of a row by kind: those of its messages, or those of its columns ``images``, ``videos``, ``audios``.

    Raises:
        RowProblem: if one is not to be understood, or messages and columns both have some.
    """
    media = {}
    for kind in MEDIA_KINDS:
        listed = _listed(fields, kind, found.source)
        inner = found.refs.get(kind)
        if listed and inner:
            detail = f"messages hold {len(inner)} {kind}s and the row lists {len(listed)} more: their order is unknown"
            raise RowProblem(f"{kind}_marks", detail)
        if not listed and (num_open := found.num_open.get(kind)):
            detail = f"the messages have places for {num_open} {kind}s more than the row has"
            raise RowProblem(f"{kind}_marks", detail)
        media[kind] = tuple(listed or inner or ())
    return media


def _listed(fields: Fields, kind: str, source: Source) -> list[MediaRef]:
    name = f"{kind}s"
    value = fields.get(name)
    if value is None:
        return []
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = fields.parsed(name)
    if isinstance(value, (str, bytes, bytearray, Mapping)) or _is_bytes(value):
        value = [value]
    if not isinstance(value, Sequence):
        raise RowProblem("invalid_media", f"{name!r} is a {type(value).__name__}, not a list")
    return [media_ref(kind, item, source, i) for i, item in enumerate(value)]


def media_ref(kind: str, value: Any, source: Source, position: int = 0, depth: int = 0) -> MediaRef:
    """One medium: a path, a URL, a data URI, base64, bytes, ``{bytes, path}``, or a list of a video's frames.

    Args:
        depth: objects and lists around it.

    Raises:
        RowProblem: if it is none of these.
    """
    name = f"{kind} {position}"
    if depth > _DEEPEST:
        raise RowProblem("invalid_media", f"{name} lies in more than {_DEEPEST} objects and lists")
    if isinstance(value, str) and value:
        return _of_text(name, value, source)
    if isinstance(value, (bytes, bytearray)) or _is_bytes(value):
        return MediaRef(path=None, data=bytes(value))
    if isinstance(value, Mapping):
        return _of_mapping(kind, name, value, source, depth)
    if isinstance(value, (list, tuple)) and value and kind == "video":
        frames = tuple(media_ref("image", frame, source, i, depth + 1) for i, frame in enumerate(value))
        return MediaRef(path=None, frames=frames)
    raise RowProblem("invalid_media", f"{name} is {shown(value)}, not a path")


def _of_mapping(kind: str, name: str, value: Mapping[str, Any], source: Source, depth: int) -> MediaRef:
    ref = _in_mapping(kind, name, value, source, depth)
    limits = _limits(kind, name, value, has_frames=bool(ref.frames))
    ref = replace(ref, limits=(*limits, *ref.limits)) if limits else ref
    return _clipped(ref, name, value) if kind == "video" else ref


def _limits(kind: str, name: str, value: Mapping[str, Any], *, has_frames: bool) -> list[tuple[str, float]]:
    """The limits that an object gives its medium; the rate of a video of frames is none."""
    fixed = FIXED if kind == "video" else (*FIXED, *CLIP)
    if refused := [key for key in fixed if value.get(key) is not None]:
        known = ", ".join(LIMITS[kind]) or "none"
        raise RowProblem("media_limits", f"{name} has {refused[0]}, which is not done here; known are {known}")
    found = []
    for key in LIMITS[kind]:
        # Of a video that packtool has measured, fps is the file's rate.
        if (given := value.get(key)) is None or (key == "fps" and (has_frames or is_measured(value))):
            continue
        found.append((key, _limit(name, key, given)))
    return found


def is_measured(value: Mapping[str, Any]) -> bool:
    """Return whether an object has the sizes that packtool's caches and packs keep of a medium."""
    return "tokens" in value and ("grid" in value or "features" in value)


def _limit(name: str, key: str, value: Any) -> float:
    if key == "fps":
        return _frame_rate(name, value, "media_limits")
    number = finite(value)
    if number is None or number < 1:
        raise RowProblem("media_limits", f"{name} has {shown(value)} as {key}, which is no number from 1 on")
    if key.startswith("min_") and number > _MAX_MINIMUM:
        raise RowProblem("media_limits", f"{name} has {shown(value)} as {key}; at most {_MAX_MINIMUM:,} is possible")
    return number


def _frame_rate(name: str, value: Any, reason: str) -> float:
    rate = finite(value)
    if rate is None or not _MIN_FPS <= rate <= _MAX_FPS:
        detail = f"{name} has {shown(value)} frames a second; it must be a number from {_MIN_FPS:g} to {_MAX_FPS:,.0f}"
        raise RowProblem(reason, detail)
    return rate


def _in_mapping(kind: str, name: str, value: Mapping[str, Any], source: Source, depth: int) -> MediaRef:
    data = value.get("bytes")
    if data is not None:
        return MediaRef(path=None, data=_decoded(name, data) if isinstance(data, str) else _bytes(name, data))
    if isinstance(value.get("data"), str):
        return _of_text(name, value["data"], source) if ":" in value["data"] else _of_base64(name, value["data"])
    inner = next((value[key] for key in (*_KEYS, kind, f"{kind}_url", "frames") if value.get(key)), None)
    if inner is None:
        raise RowProblem("invalid_media", f"{name} has neither bytes nor a path; its keys are: {listed(value)}")
    ref = media_ref(kind, inner, source, depth=depth + 1)
    fps = value.get("fps", value.get("sample_fps"))
    if fps is None or not ref.frames:
        return ref
    return replace(ref, fps=_frame_rate(name, fps, "invalid_media"))


def _clipped(ref: MediaRef, name: str, value: Mapping[str, Any]) -> MediaRef:
    """The part of a video from ``video_start`` to ``video_end``, in seconds."""
    given = {key: value[key] for key in CLIP if value.get(key) is not None}
    if not given:
        return ref
    if ref.frames:
        told = f"{name} is a list of frames and has {listed(given)}: list the frames that are meant"
        raise RowProblem("invalid_media", told)
    numbers = {key: finite(value) for key, value in given.items()}
    for key, number in numbers.items():
        if number is None or number < 0:
            raise RowProblem("invalid_media", f"{name} has {shown(given[key])} as {key}, not seconds")
    start, end = (numbers.get(key) for key in CLIP)
    if end is not None and end <= (start or 0.0):
        raise RowProblem("invalid_media", f"{name} begins at {start or 0:g} s and ends at {end:g} s")
    return replace(ref, clip=(start, end))


def _of_text(name: str, text: str, source: Source) -> MediaRef:
    if text.startswith("data:"):
        return MediaRef(path=None, data=_of_data_uri(name, text))
    if len(text) >= _LEAST_BASE64 and _BASE64.fullmatch(text):
        return _of_base64(name, text)
    try:
        return MediaRef(path=_path(text, source), rights=source.media_rights)
    except StorageError as error:
        raise RowProblem("invalid_media", f"{name}: {error.message}") from error


def _of_base64(name: str, text: str) -> MediaRef:
    return MediaRef(path=None, data=_decoded(name, text))


def _of_data_uri(name: str, uri: str) -> bytes:
    head, comma, body = uri.partition(",")
    if not comma:
        raise RowProblem("invalid_media", f"{name} is a data URI without a comma")
    return _decoded(name, body) if head.endswith(";base64") else unquote_to_bytes(body)


def _decoded(name: str, text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowProblem("invalid_media", f"{name} is no base64: {error}") from error


def _bytes(name: str, value: Any) -> bytes:
    if isinstance(value, (bytes, bytearray)) or _is_bytes(value):
        return bytes(value)
    raise RowProblem("invalid_media", f"{name} has a {type(value).__name__} as bytes")


def _is_bytes(value: Any) -> bool:
    """Whether it is a file's bytes as a list of numbers, as tables of uint8 and some JSON writers have them."""
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
