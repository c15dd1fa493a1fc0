"""Contents of messages: a text, or a list of parts, which becomes one text with a placeholder for each medium.

Parts are texts, media, tool calls and their results, in OpenAI's and Anthropic's formats.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from packtool.rows.forms.columns import RowProblem, finite, listed, parse_cell, shown
from packtool.rows.forms.media import CLIP_KEYS, LIMITS, UNSUPPORTED_LIMITS, InlineMedia
from packtool.rows.sample import Turn

_TEXT_TYPES = ("text", "input_text", "output_text")
_MEDIA_TYPES = {name: kind for kind in LIMITS for name in (kind, f"{kind}_url", f"input_{kind}")}
_PART_TYPES = {*_TEXT_TYPES, *_MEDIA_TYPES}
_MEDIUM_KEYS = ("source", "url", "path", "bytes", "data", "file", "value")


@dataclass
class Content:
    """The content of a message: text with marks in place of media, and ``thinking`` parts as ``reasoning``.

    ``tool_calls`` are Anthropic's ``tool_use`` parts; ``results`` are its ``tool_result`` turns and precede the text.
    ``trained`` has the flags ``train`` of text parts, as in axolotl; None for a part without one.
    """

    text: str = ""
    tool_calls: list[Any] = field(default_factory=list)
    reasoning: str = ""
    results: list[Turn] = field(default_factory=list)
    trained: set[Any] = field(default_factory=set)


def content_of(label: str, value: Any, inline: InlineMedia, is_tool: bool = False) -> Content:
    """Read the content of a message: text, a number, or a list of parts such as texts, media and tool calls.

    Args:
        label: the message in errors, such as "message 3".
        inline: receives the media; the text has a placeholder in place of each.
        is_tool: the message is the result of a tool, which may be any JSON value: it becomes JSON text.
    """
    if isinstance(value, str):
        return Content(value)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number:  # some columns have both texts and numbers
        is_nan_or_infinite = isinstance(value, float) and finite(value) is None
        if is_nan_or_infinite:
            raise RowProblem("invalid_content", f"{label} has the number {value} as content, which is not text")
        return Content(str(value))
    if _is_parts(value, is_tool=is_tool):
        content = Content()
        for part in value:
            _add_part(content, label, part, inline)
        return content
    if is_tool and value is not None:
        try:
            return Content(json.dumps(value, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise RowProblem("invalid_content", f"{label} cannot be written as JSON: {error}") from error
    kind = "null" if value is None else f"a {type(value).__name__}"
    raise RowProblem("invalid_content", f"{label} has {kind} as content, not text")


def _is_parts(value: Any, *, is_tool: bool) -> bool:
    """Return whether a message's content is a list of parts; objects of unknown types are the result of a tool."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(part, (str, Mapping)) for part in value):
        return False
    return not is_tool or all(isinstance(part, str) or _type_of(part) in _PART_TYPES for part in value)


def _type_of(part: Mapping[str, Any]) -> str:
    """Return the type of a content part; if it has no ``type``, the first of its keys that is the name of a type."""
    kind = part.get("type")
    if kind is None:
        kind = next((key for key in (*_TEXT_TYPES, *_MEDIA_TYPES) if key in part), "")
    return str(kind)


def _add_part(content: Content, label: str, part: str | Mapping[str, Any], inline: InlineMedia) -> None:
    """Add a part of a message to its content, and a medium in it to ``inline``; ``label`` names it in errors."""
    if isinstance(part, str):
        content.text += part
        return
    kind = _type_of(part)
    if kind in _TEXT_TYPES:
        value = first_value(part, (kind, "text", "content", "value"))
        content.text += _text_of_part(label, kind, value)
        content.trained.add(_train_flag(label, part))
    elif kind in _MEDIA_TYPES:
        content.text += inline.add(_MEDIA_TYPES[kind], _medium_of_part(label, kind, part))
    elif kind in ("thinking", "reasoning"):
        content.reasoning += _text_of_part(label, kind, first_value(part, (kind, "value")))
    elif kind in ("tool_call", "tool_use", "tool_result"):
        _add_tool_part(content, label, part, inline)
    elif kind != "redacted_thinking":  # this is encrypted, so it cannot be trained
        raise RowProblem("invalid_content", f"{label} has a part of type {shown(kind)}; its keys are: {listed(part)}")


def _add_tool_part(content: Content, label: str, part: Mapping[str, Any], inline: InlineMedia) -> None:
    """Add the calls, or the result, in a part of a message to its content."""
    kind = _type_of(part)
    if kind == "tool_call":
        content.tool_calls += _calls_of_part(label, part)
    elif kind == "tool_use":
        content.tool_calls.append(_call_of_tool_use(label, part))
    else:
        result = _result_turn(label, part, inline)
        if content.text:  # the turn of the result comes before the message's own
            raise RowProblem("invalid_content", f"{label} has a tool_result after text; it must come before the text")
        content.results.append(result)


def _train_flag(label: str, part: Mapping[str, Any]) -> Any:
    """Return whether a text part is trained, as in axolotl: true, false, or None if it does not say."""
    is_trained = first_value(part, ("train", "weight"))
    if is_trained not in (None, 0, 1):  # true and false are equal to 1 and 0
        detail = f"{label} has a text part with train {shown(is_trained)}; it must be true or false"
        raise RowProblem("invalid_row", detail)
    return is_trained


def _calls_of_part(label: str, part: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the calls in a part of LLaMA-Factory's v1 format: one call or a list of calls, perhaps as JSON text."""
    calls = part.get("value")
    if isinstance(calls, str):
        calls = parse_cell(calls, "invalid_tool_call", f"a tool_call part of {label} is not JSON")
    return [as_call(label, call) for call in (calls if isinstance(calls, list) else [calls])]


def _call_of_tool_use(label: str, part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the call in a part of Anthropic's format."""
    if not isinstance(part.get("name"), str):
        raise RowProblem("invalid_tool_call", f"{label} has a tool_use part without a name")
    function = {"name": part["name"], "arguments": part.get("input") or {}}
    return {"id": part.get("id"), "type": "function", "function": function}


def _result_turn(label: str, part: Mapping[str, Any], inline: InlineMedia) -> Turn:
    """Return the turn of a tool result in Anthropic's format."""
    value = part.get("content")
    result = content_of(f"the tool_result of {label}", "" if value is None else value, inline, is_tool=True)
    extra = {"tool_call_id": part["tool_use_id"]} if part.get("tool_use_id") else {}
    return Turn("tool", result.text, extra)


def _text_of_part(label: str, kind: str, value: Any) -> str:
    """Return the text of a content part of type ``kind``, whose ``value`` was found under one of its usual keys."""
    if isinstance(value, Mapping):
        value = value.get("value")  # OpenAI's Assistants API writes {"value": text}
    if not isinstance(value, str):
        raise RowProblem("invalid_content", f"{label} has a {type(value).__name__} in a {kind} part, not text")
    return value


def _medium_of_part(label: str, part_type: str, part: Mapping[str, Any]) -> Any:
    """Return the medium in a part of a message, in a notation that ``media_ref`` reads, with its limits and clip.

    None if the part has none: it then stands for a medium in the row's columns. ``part_type`` is a type such as
    ``image_url``, and ``label`` names the message in errors.
    """
    kind = _MEDIA_TYPES[part_type]  # image, video or audio
    content_keys = (part_type, kind, f"{kind}_url", *_MEDIUM_KEYS)
    content = next((part[key] for key in content_keys if part.get(key)), None)
    limit_keys = (*LIMITS[kind], *UNSUPPORTED_LIMITS, *CLIP_KEYS, "seconds")
    limits = {key: part[key] for key in limit_keys if part.get(key) is not None}
    if isinstance(content, Mapping):
        is_base64 = content.get("type") == "base64" or (part_type == "input_audio" and "data" in content)
        if not is_base64:
            return {**limits, **content}
        text = content.get("data")
        if not isinstance(text, str):
            raise RowProblem("invalid_media", f"{label} has a part of type {part_type} without data")
        without_data_uri = text.partition("base64,")[2] or text  # a data URI has this in front of the base64
        return {**limits, "bytes": without_data_uri}
    if limits and content:
        content_key = "path" if isinstance(content, str) else "frames"
        return {**limits, content_key: content}
    return content


def as_call(label: str, call: Any) -> dict[str, Any]:
    """Convert a call to the format of OpenAI's ``tool_calls``."""
    if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
        return dict(call)
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        raise RowProblem("invalid_tool_call", f"{label} has a tool call without a function name: {shown(call)}")
    arguments = call.get("arguments", call.get("parameters", {}))
    return {"type": "function", "function": {"name": call["name"], "arguments": arguments}}


def first_value(message: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    """Return the value under the first of ``keys`` that is not null; None if there is none."""
    return next((message[key] for key in keys if message.get(key) is not None), None)
