"""Forms of a row: so far ``messages`` with system, user, assistant and tool turns.

A row's text holds ``<image>`` where a picture goes, and ``images`` names the pictures in that order. In a row without
pictures ``<image>`` is text. Marks that are missing are put before the first user turn, as ms-swift does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from packtool.constants import IMAGE_MARK, ROLES
from packtool.rows.sample import MediaRef, Sample, Turn
from packtool.rows.source import Source

_UNREAD_MEDIA = ("videos", "audios")
# Keys of a message that chat templates read; others are the user's own business.
_MESSAGE_KEYS = ("tool_calls", "reasoning_content", "thinking", "reasoning", "name", "tool_call_id")


class RowProblem(ValueError):
    """A row that cannot be used.

    Args:
        reason: machine-readable, as in ``dropped.jsonl``.
        detail: for a person.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def to_sample(row: Mapping[str, Any], source: Source, number: int) -> Sample:
    """Read one row.

    Args:
        row: the parsed object.
        source: dataset it came from; relative media paths start in its folder.
        number: 0-based row.

    Raises:
        RowProblem: if the row cannot be used.
    """
    messages = row.get("messages")
    if messages is None:
        keys = ", ".join(sorted(map(str, row))) or "none"
        raise RowProblem("unknown_form", f"the row has no 'messages'; its keys are: {keys}")
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RowProblem("empty_conversation", "'messages' holds no turns")
    for name in _UNREAD_MEDIA:
        if row.get(name):
            raise RowProblem("media_unsupported", f"the row has {name!r}, and this version reads pictures only")
    turns = [_turn(i, message) for i, message in enumerate(messages)]
    images = _images(row.get("images"), os.path.dirname(source.path))
    num_missing = _num_missing_marks(turns, len(images)) if images else 0
    return Sample(
        turns=tuple(_with_marks(turns, num_missing) if num_missing else turns),
        images=tuple(images),
        source=source.label,
        loss_scale=source.loss_scale,
        row=number,
        tools=_tools(row.get("tools")),
        channel=_channel(row.get("channel")),
        num_marks_added=num_missing,
    )


def _turn(i: int, message: Any) -> Turn:
    if not isinstance(message, Mapping):
        raise RowProblem("invalid_row", f"message {i} is a {type(message).__name__}, not an object")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise RowProblem("unknown_role", f"message {i} has role {role!r}; known are {', '.join(ROLES)}")
    extra = {key: message[key] for key in _MESSAGE_KEYS if message.get(key) is not None}
    if content is None and "tool_calls" in extra:
        content = ""
    if not isinstance(content, str):
        raise RowProblem("invalid_content", f"message {i} ({role}) has {type(content).__name__} as content, not text")
    return Turn(role, content, extra)


def _images(value: Any, folder: str) -> list[MediaRef]:
    if value is None:
        return []
    if isinstance(value, (str, Mapping)):
        value = [value]
    if not isinstance(value, Sequence):
        raise RowProblem("invalid_row", f"'images' is a {type(value).__name__}, not a list")
    return [_image(i, image, folder) for i, image in enumerate(value)]


def _image(i: int, image: Any, folder: str) -> MediaRef:
    path = image.get("path") if isinstance(image, Mapping) else image
    if not isinstance(path, str) or not path:
        raise RowProblem("invalid_row", f"image {i} is {image!r:.80}, not a path")
    path = path.removeprefix("file://")
    return MediaRef(path=os.path.abspath(os.path.join(folder, os.path.expanduser(path))))


def _num_missing_marks(turns: list[Turn], num_images: int) -> int:
    marks = sum(turn.content.count(IMAGE_MARK) for turn in turns)
    if marks > num_images:
        raise RowProblem(
            "image_marks", f"{marks} {IMAGE_MARK} marks and {num_images} images: which mark goes with which is unknown"
        )
    return num_images - marks


def _with_marks(turns: list[Turn], num_missing: int) -> list[Turn]:
    first = next((i for i, turn in enumerate(turns) if turn.role == "user"), None)
    if first is None:
        raise RowProblem("image_marks", f"{num_missing} {IMAGE_MARK} marks are missing, and no user turn is there")
    turn = turns[first]
    marked = Turn(turn.role, IMAGE_MARK * num_missing + turn.content, turn.extra)
    return [*turns[:first], marked, *turns[first + 1 :]]


def _tools(value: Any) -> tuple[Any, ...] | None:
    if not value:
        return None
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise RowProblem("invalid_row", f"'tools' is a {type(value).__name__}, not a list")
    return tuple(value)


def _channel(value: Any) -> str | None:
    return None if value is None else str(value)
