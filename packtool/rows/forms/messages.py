"""``messages`` in their many spellings: roles, keys, ShareGPT's pairs, tool calls.

What a row says of ``tool_calls`` is handed to the chat template as it is; what it says as text of a message with the
role ``function_call`` becomes such a call. Calls that follow one another, or an assistant's text, are one turn.

What stands in a message's content: text, or a list of parts as OpenAI and Anthropic write them.

A list becomes one text: its media are taken out in order, and their marks stand in their places.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from packtool.constants import ROLES
from packtool.rows.forms.columns import Columns, Fields, RowProblem, finite, json_problem, listed, shown
from packtool.rows.forms.form import RowForm
from packtool.rows.forms.media import CLIP, FIXED, LIMITS, Found
from packtool.rows.parsing import JsonProblem, parse_json
from packtool.rows.sample import Turn
from packtool.rows.source import Pairs

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


_CALL = "tool_call"
_ROLES = {
    **{role: role for role in ROLES},
    **dict.fromkeys(("developer",), "system"),
    **dict.fromkeys(("human",), "user"),
    **dict.fromkeys(("gpt", "bot", "model", "chatgpt"), "assistant"),
    **dict.fromkeys(("observation", "observations", "function", "ipython"), "tool"),
    **dict.fromkeys(("tool_response", "tool_result", "function_response", "function_result"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), _CALL),
}
_ROLE_KEYS, _CONTENT_KEYS = ("role", "from"), ("content", "value")
_PAIR_KEYS = (
    ("system", ("system",)),
    ("user", ("user", "human", "input", "query", "question")),
    ("assistant", ("assistant", "gpt", "bot", "output", "response", "answer")),
)
# Keys of a message that chat templates read; others are the user's own business.
_MESSAGE_KEYS = ("reasoning_content", "thinking", "reasoning", "name", "tool_call_id")

MOST_LOSS_SCALE = 10_000
"""Labels weigh 1 without it; what is far above is a mistake, and a float32 loss ends in infinity."""


@dataclass(frozen=True)
class Tags:
    """How a file spells roles and keys of messages.

    Args:
        roles: role by its spelling, in lower case with underscores.
        role_keys, content_keys: names of these keys, the first that is there counts.
    """

    roles: Mapping[str, str]
    role_keys: tuple[str, ...]
    content_keys: tuple[str, ...]


TAG_NAMES = {
    "system_tag": "system",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": _CALL,
}
"""Names of ``dataset_info.json``'s ``tags`` that spell a role."""


@lru_cache(maxsize=64)
def tags_of(pairs: Pairs) -> Tags:
    """Usual spellings, and those that ``dataset_info.json`` adds."""
    given = dict(pairs)
    own = {_plain(spelled): TAG_NAMES[name] for name, spelled in given.items() if name in TAG_NAMES}
    return Tags(
        roles={**_ROLES, **own},
        role_keys=(given["role_tag"],) if "role_tag" in given else _ROLE_KEYS,
        content_keys=(given["content_tag"],) if "content_tag" in given else _CONTENT_KEYS,
    )


def turns_of(messages: Any, found: Found) -> list[Turn]:
    """Turns of a list of messages.

    Raises:
        RowProblem: if a message cannot be read.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        shown = "no turns" if not messages else f"a {type(messages).__name__}, no list of turns"
        raise RowProblem("empty_conversation", f"'messages' holds {shown}")
    tags = tags_of(found.source.tags)
    turns: list[Turn] = []
    after_call = False
    for i, message in enumerate(messages):
        if (plain := _plain_turn(message, tags)) is not None:
            turns.append(plain)
            after_call = False
            continue
        for who, part in _parts(f"message {i}", message, tags):
            role = _role(who, part, tags)
            if role != _CALL:
                turns += _turns(who, role, part, found, tags)
                after_call = False
                continue
            turn = _call(who, part, tags)
            if turns and turns[-1].role == "assistant" and (after_call or not turns[-1].extra.get("tool_calls")):
                turn = _joined(turns.pop(), turn)
            turns.append(turn)
            after_call = True
    return turns


def _plain_turn(message: Any, tags: Tags) -> Turn | None:
    """The turn of a message with role and text and nothing else, as most are; None for all others."""
    if type(message) is not dict or len(message) != 2:
        return None
    for role_key, content_key in zip(tags.role_keys, tags.content_keys, strict=False):
        content, spelled = message.get(content_key), message.get(role_key)
        if type(content) is str and type(spelled) is str:
            role = tags.roles.get(spelled)
            return Turn(role, content) if role is not None and role != _CALL else None
    return None


def _parts(who: str, message: Any, tags: Tags) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(name for problems, message); a pair of question and answer is taken apart."""
    if isinstance(message, str):
        message = _parsed(who, message)
    if not isinstance(message, Mapping):
        raise RowProblem("invalid_row", f"{who} is a {type(message).__name__}, not an object")
    if any(key in message for key in tags.role_keys):
        yield who, message
        return
    pair = [(role, key) for role, keys in _PAIR_KEYS for key in keys if message.get(key) is not None]
    if not pair:
        detail = f"{who} has no {' or '.join(tags.role_keys)}; its keys are: {listed(message)}"
        raise RowProblem("unknown_role", detail)
    for role, key in pair:
        if role != "system" or message[key]:  # each pair of a file may have the key, most of them empty
            yield f"{who} ({key})", {tags.role_keys[0]: role, tags.content_keys[0]: message[key]}


def _parsed(who: str, text: str) -> Any:
    try:
        return parse_json(text)
    except JsonProblem as problem:
        raise json_problem("invalid_row", f"{who} is text and no JSON", problem) from problem


def _role(who: str, message: Mapping[str, Any], tags: Tags) -> str:
    spelled = next((message[key] for key in tags.role_keys if message.get(key) is not None), None)
    role = tags.roles.get(_plain(spelled)) if isinstance(spelled, str) else None
    if role is None:
        raise RowProblem("unknown_role", f"{who} has role {shown(spelled)}; known are {', '.join(tags.roles)}")
    return role


def _plain(role: str) -> str:
    return role.strip().lower().replace("-", "_")


def _turns(who: str, role: str, message: Mapping[str, Any], found: Found, tags: Tags) -> list[Turn]:
    """The turn of a message; tool results that it holds are turns before it."""
    value = next((message[key] for key in tags.content_keys if message.get(key) is not None), None)
    extra = {key: message[key] for key in _MESSAGE_KEYS if message.get(key) is not None}
    if calls := _given_calls(who, message):
        extra["tool_calls"] = calls
    if value is None and extra.keys() & {"tool_calls", "reasoning_content", "thinking", "reasoning"}:
        value = ""
    content = content_of(f"{who} ({role})", value, found, is_tool=role == "tool")
    if content.tool_calls:
        extra["tool_calls"] = [*extra.get("tool_calls", ()), *content.tool_calls]
    if content.reasoning:
        extra.setdefault("reasoning_content", content.reasoning)
    if content.results and not content.text:
        return content.results
    return [*content.results, Turn(role, content.text, extra, _loss(who, message), _loss_scale(who, message))]


def _given_calls(who: str, message: Mapping[str, Any]) -> list[Any]:
    calls = message.get("tool_calls")
    if isinstance(calls, str):
        calls = _parsed(f"{who}'s tool_calls", calls) if calls else None
    if not calls and message.get("function_call"):
        return [_as_call(who, message["function_call"])]  # what OpenAI had before tool_calls
    if not calls:
        return []
    if not isinstance(calls, Sequence):
        raise RowProblem("invalid_tool_call", f"{who} has a {type(calls).__name__} as tool_calls, not a list")
    return [_parsed(f"{who}'s tool call", call) if isinstance(call, str) else call for call in calls]


def _call(who: str, message: Mapping[str, Any], tags: Tags) -> Turn:
    """A message whose content is a call, or a list of them, as JSON text."""
    value = next((message[key] for key in tags.content_keys if message.get(key) is not None), None)
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except JsonProblem as problem:
            raise json_problem("invalid_tool_call", f"{who} is a call and no JSON", problem) from problem
    calls = value if isinstance(value, list) else [value]
    extra = {"tool_calls": [_as_call(who, call) for call in calls]}
    return Turn("assistant", "", extra, _loss(who, message), _loss_scale(who, message))


def _as_call(who: str, call: Any) -> dict[str, Any]:
    if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
        return dict(call)
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        raise RowProblem("invalid_tool_call", f"{who} calls no function by name: {shown(call)}")
    arguments = call.get("arguments", call.get("parameters", {}))
    return {"type": "function", "function": {"name": call["name"], "arguments": arguments}}


def _joined(turn: Turn, call: Turn) -> Turn:
    """An assistant's turn and a call that follows it at once."""
    calls = [*turn.extra.get("tool_calls", ()), *call.extra["tool_calls"]]
    return Turn(
        turn.role,
        turn.content,
        {**turn.extra, "tool_calls": calls},
        turn.loss if call.loss is None else call.loss,
        turn.loss_scale if call.loss_scale is None else call.loss_scale,
    )


def _loss(who: str, message: Mapping[str, Any]) -> bool | None:
    """``loss``, or ``weight`` as OpenAI has it for the same."""
    value = message.get("loss")
    value = message.get("weight") if value is None else value
    if value is None:
        return None
    if value not in (0, 1):  # true and false are too
        raise RowProblem("invalid_row", f"{who} has loss {shown(value)}; it must be true or false")
    return bool(value)


def _loss_scale(who: str, message: Mapping[str, Any]) -> float | None:
    value = message.get("loss_scale")
    if value is None:
        return None
    number = finite(value)
    if number is None or not 0 <= number <= MOST_LOSS_SCALE:
        known = f"it must be a number from 0 to {MOST_LOSS_SCALE:,}"
        raise RowProblem("invalid_row", f"{who} has loss_scale {shown(value)}; {known}")
    return number


def _fits(columns: Columns, formatting: str | None) -> bool:
    if formatting == "alpaca" or columns.find("messages") is None:
        return False
    columns.find("responses")
    return True


def _turns_of_row(fields: Fields, found: Found) -> list[Turn]:
    messages = fields.raw("messages")
    return turns_of(fields.parsed("messages") if isinstance(messages, str) and messages else messages, found)


MESSAGES = RowForm(
    "messages",
    "messages (or conversations, conversation): a list of {role, content}, of {from, value}, or of pairs "
    "{human, assistant}",
    _fits,
    _turns_of_row,
)
