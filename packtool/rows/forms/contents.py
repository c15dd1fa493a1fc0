"""What stands in a message's content: text, or a list of parts as OpenAI and Anthropic write them.

A list becomes one text: its media are taken out in order, and their marks stand in their places.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from packtool.rows.forms.media import CLIP, FIXED, LIMITS, Found
from packtool.rows.forms.problem import RowProblem
from packtool.rows.forms.values import finite, listed, shown
from packtool.rows.sample import Turn

_TEXTS = ("text", "input_text", "output_text")
_MEDIA = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "video": "video",
    "video_url": "video",
    "input_video": "video",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
}
_SHOWN = {*_TEXTS, *_MEDIA}
_KEYS_OF_MEDIA = ("source", "url", "path", "bytes", "data", "file")


@dataclass
class Content:
    """A message's content.

    Args:
        text: with marks where media go.
        tool_calls: of Anthropic's ``tool_use`` parts.
        reasoning: of ``thinking`` parts.
        results: tool turns made of ``tool_result`` parts; they come before the text.
    """

    text: str = ""
    tool_calls: list[Any] = field(default_factory=list)
    reasoning: str = ""
    results: list[Turn] = field(default_factory=list)


def content_of(who: str, value: Any, found: Found, is_tool: bool = False) -> Content:
    """Read a content.

    Args:
        who: the message, for problems.
        found: takes the media.
        is_tool: a tool's answer may be any JSON value; what is no text and no list of parts is written as JSON.

    Raises:
        RowProblem: if it is nothing that a template could render.
    """
    if isinstance(value, str):
        return Content(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if isinstance(value, float) and finite(value) is None:
            raise RowProblem("invalid_content", f"{who} has the number {value} as content, which is no text")
        return Content(str(value))  # one column with two types: numbers that were not quoted
    if _is_parts(value) and (not is_tool or all(isinstance(part, str) or _kind(part) in _SHOWN for part in value)):
        content = Content()
        for part in value:
            _add(content, who, part, found)
        return content
    if is_tool and value is not None:
        try:
            return Content(json.dumps(value, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise RowProblem("invalid_content", f"{who} cannot be written as JSON: {error}") from error
    shown = "null" if value is None else f"a {type(value).__name__}"
    raise RowProblem("invalid_content", f"{who} has {shown} as content, not text")


def _is_parts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(part, (str, Mapping)) for part in value)


def _kind(part: Mapping[str, Any]) -> str:
    """A part's type, which some files leave to its only telling key."""
    kind = part.get("type")
    if kind is None:
        kind = next((key for key in (*_TEXTS, *_MEDIA) if key in part), "")
    return str(kind)


def _add(content: Content, who: str, part: str | Mapping[str, Any], found: Found) -> None:
    if isinstance(part, str):
        content.text += part
        return
    kind = _kind(part)
    if kind in _TEXTS:
        content.text += _text(who, kind, part.get(kind, part.get("text")))
    elif kind in _MEDIA:
        content.text += found.add(_MEDIA[kind], _medium(who, kind, part))
    elif kind == "thinking":
        content.reasoning += _text(who, kind, part.get("thinking"))
    elif kind == "redacted_thinking":
        pass  # encrypted: nothing in it can be trained on
    elif kind == "tool_use":
        if not isinstance(part.get("name"), str):
            raise RowProblem("invalid_tool_call", f"{who} has a tool_use without a name")
        function = {"name": part["name"], "arguments": part.get("input") or {}}
        content.tool_calls.append({"id": part.get("id"), "type": "function", "function": function})
    elif kind == "tool_result":
        inner = part.get("content")
        answer = content_of(f"{who}'s tool_result", "" if inner is None else inner, found, is_tool=True)
        extra = {"tool_call_id": part["tool_use_id"]} if part.get("tool_use_id") else {}
        if content.text:
            # Turns cannot be woven; an answer that follows text of its own message keeps its order by coming later.
            raise RowProblem("invalid_content", f"{who} has a tool_result behind text; Anthropic puts it before")
        content.results.append(Turn("tool", answer.text, extra))
    else:
        detail = f"{who} has a part of type {shown(kind)}; its keys are: {listed(part)}"
        raise RowProblem("invalid_content", detail)


def _text(who: str, kind: str, value: Any) -> str:
    if isinstance(value, Mapping):
        value = value.get("value")  # OpenAI's assistants write {"value": text}
    if not isinstance(value, str):
        raise RowProblem("invalid_content", f"{who} has a {type(value).__name__} as {kind} part, not text")
    return value


def _medium(who: str, kind: str, part: Mapping[str, Any]) -> Any:
    """What a part names as its medium; None if it is only a place for one."""
    plain = _MEDIA[kind]
    value = next((part[key] for key in (kind, plain, f"{plain}_url", *_KEYS_OF_MEDIA) if part.get(key)), None)
    if not isinstance(value, Mapping):
        if isinstance(value, (list, tuple)) and plain == "video" and part.get("fps"):
            return {**_own_limits(plain, part), "frames": value, "fps": part["fps"]}
        limits = _own_limits(plain, part)
        return {**limits, "path" if isinstance(value, str) else "frames": value} if limits and value else value
    if value.get("type") == "base64" or (kind == "input_audio" and "data" in value):
        if not isinstance(value.get("data"), str):
            raise RowProblem("invalid_media", f"{who} has an {plain} without data")
        limits = _own_limits(plain, part)
        return {**limits, "bytes": value["data"].partition("base64,")[2] or value["data"]}
    return {**_own_limits(plain, part), **value}


def _own_limits(kind: str, part: Mapping[str, Any]) -> dict[str, Any]:
    """What a part says of the size that its medium is to have, and of the clip of it that is meant."""
    return {key: part[key] for key in (*LIMITS[kind], *FIXED, *CLIP) if part.get(key) is not None}
