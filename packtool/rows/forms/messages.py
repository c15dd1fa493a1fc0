"""Forms of rows with text: a list of messages, question and answer, alpaca's columns, and a pretraining text.

Projects use different names for the roles and keys of messages; ShareGPT's pairs of question and answer are supported
too. ``tool_calls`` are passed to the chat template unchanged, and a message with the role ``function_call`` becomes
such a call. Consecutive calls, or a text of the assistant and the calls after it, are one turn.

The content of a message is a text, or a list of parts as in OpenAI's and Anthropic's formats, which becomes one text
with a mark in place of each medium. A row without an answer may have several accepted ``responses`` with weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from packtool.constants import ROLES
from packtool.rows.forms.columns import NAMES, Columns, Fields, RowProblem, finite, is_list, listed, parse_cell, shown
from packtool.rows.forms.media import InlineMedia
from packtool.rows.forms.parts import Content, as_call, content_of, first_value
from packtool.rows.sample import Response, Turn
from packtool.rows.source import Pairs, Source


@dataclass(frozen=True)
class RowForm:
    """A form of rows: how to recognize it and how to read it.

    Args:
        shown: its columns, for the error about rows with no known form.
        fits: returns whether a file has the form, and finds its columns, from all columns and ``formatting``
            (``alpaca`` or ``sharegpt`` from ``dataset_info.json``, ``tokens`` for ``packtool import``, or None).
        read: returns the turns of a row as list[Turn] or ``Segments``, or its ``PreparedTokens`` if another tool has
            tokenized it.
    """

    name: str
    shown: str
    fits: Callable[[Columns, str | None], bool]
    read: Callable[[Fields, InlineMedia], Any]


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
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
# Keys of a message that are passed to chat templates; others are ignored.
_MESSAGE_KEYS = (*_REASONING_KEYS, "name", "tool_call_id")

MAX_LOSS_SCALE = 10_000
"""Maximum loss weight of a token; far larger weights are mistakes and make a float32 loss infinite."""

TAG_NAMES = {
    "system_tag": "system",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": _CALL,
}
"""Roles by the keys of ``tags`` in ``dataset_info.json``."""


class _Tags(NamedTuple):
    """Roles by their lower-case name in the file, and the keys of role and content in the order they are tried."""

    roles: Mapping[str, str]
    role_keys: tuple[str, ...]
    content_keys: tuple[str, ...]


@lru_cache(maxsize=64)
def _tags_of(pairs: Pairs) -> _Tags:
    """Return the names of roles and keys: the usual ones, changed by the ``tags`` of ``dataset_info.json``."""
    tags = dict(pairs)
    named_roles = {_normalized(role): TAG_NAMES[name] for name, role in tags.items() if name in TAG_NAMES}
    role_keys = (tags["role_tag"],) if "role_tag" in tags else _ROLE_KEYS
    content_keys = (tags["content_tag"],) if "content_tag" in tags else _CONTENT_KEYS
    return _Tags({**_ROLES, **named_roles}, role_keys, content_keys)


def turns_of(messages: Any, inline: InlineMedia) -> list[Turn]:
    """Convert a list of messages to turns, and add the media in their contents to ``inline``.

    A message is an object with a role and a content under various names, or a pair of question and answer. Consecutive
    tool calls become one turn, together with the assistant's text before them. RowProblem for other values.
    """
    if not is_list(messages) or not messages:
        problem = "is empty" if not messages else f"is a {type(messages).__name__}, not a list of messages"
        raise RowProblem("empty_conversation", f"'messages' {problem}")
    tags = _tags_of(inline.source.tags)  # names of roles and keys in this file
    turns: list[Turn] = []
    is_after_call = False  # the last message was a tool call
    for i, message in enumerate(messages):
        plain_turn = _plain_turn(message, tags)  # the fast path of most messages
        if plain_turn is not None:
            turns.append(plain_turn)
            is_after_call = False
            continue
        for label, single_message in _split_pair(f"message {i}", message, tags):
            role = _role_of(label, single_message, tags)
            if role == _CALL:
                _add_call(turns, _call_turn(label, single_message, tags), is_after_call=is_after_call)
                is_after_call = True
            else:
                turns += _turns_of_message(label, role, single_message, inline, tags)
                is_after_call = False
    return turns


def _role_of(label: str, message: Mapping[str, Any], tags: _Tags) -> str:
    role_name = first_value(message, tags.role_keys)
    role = tags.roles.get(_normalized(role_name)) if isinstance(role_name, str) else None
    if role is None:
        detail = f"{label} has the unknown role {shown(role_name)}; known roles are {', '.join(tags.roles)}"
        raise RowProblem("unknown_role", detail)
    return role


def _add_call(turns: list[Turn], call_turn: Turn, *, is_after_call: bool) -> None:
    """Add a tool call to the assistant turn before it: a text, or the turn of the call before; else as a new turn."""
    follows_assistant = bool(turns) and turns[-1].role == "assistant"
    if follows_assistant and (is_after_call or not turns[-1].extra.get("tool_calls")):
        turns[-1] = _with_calls(turns[-1], call_turn)
    else:
        turns.append(call_turn)


def _plain_turn(message: Any, tags: _Tags) -> Turn | None:
    """Return the turn of a message that consists of a role and a text, as most messages; None for all others."""
    if type(message) is not dict or len(message) != 2:
        return None
    for role_key, content_key in zip(tags.role_keys, tags.content_keys, strict=False):
        content, role_name = message.get(content_key), message.get(role_key)
        if type(content) is str and type(role_name) is str:
            role = tags.roles.get(role_name)
            return Turn(role, content) if role is not None and role != _CALL else None
    return None


def _split_pair(label: str, message: Any, tags: _Tags) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (label for errors, message): one message, or several if the object is a pair of question and answer.

    ``{"human": "1 + 1", "assistant": "2"}`` becomes ``{"from": "user", "value": "1 + 1"}`` and another message, with
    the keys that ``tags`` has for role and content. A message may be JSON text.
    """
    if isinstance(message, str):
        message = parse_cell(message, "invalid_row", f"{label} is text, but not JSON")
    if not isinstance(message, Mapping):
        raise RowProblem("invalid_row", f"{label} is a {type(message).__name__}, not an object")
    if any(key in message for key in tags.role_keys):
        yield label, message
        return
    roles_and_keys = [(role, key) for role, keys in _PAIR_KEYS for key in keys if message.get(key) is not None]
    if not roles_and_keys:
        detail = f"{label} has no {' or '.join(tags.role_keys)}; its keys are: {listed(message)}"
        raise RowProblem("unknown_role", detail)
    for role, key in roles_and_keys:
        is_empty_system = role == "system" and not message[key]  # every pair of a file may have this key
        if not is_empty_system:
            yield f"{label} ({key})", {tags.role_keys[0]: role, tags.content_keys[0]: message[key]}


def _normalized(role: str) -> str:
    return role.strip().lower().replace("-", "_")


def _turns_of_message(
    label: str, role: str, message: Mapping[str, Any], inline: InlineMedia, tags: _Tags
) -> list[Turn]:
    """Return the turns of a message: those of tool results in its parts, then its own, unless it has only results.

    Args:
        label: the message in errors.
        inline: receives the media in the content.
        tags: names of roles and keys in this file.
    """
    extra = {key: message[key] for key in _MESSAGE_KEYS if message.get(key) is not None}  # for the chat template
    calls = _tool_calls(label, message)
    value = first_value(message, tags.content_keys)
    if value is None and (calls or _has_reasoning(extra)):
        value = ""  # such a message needs no content
    content = content_of(f"{label} ({role})", value, inline, is_tool=role == "tool")
    calls += content.tool_calls
    if calls:
        extra["tool_calls"] = calls
    if content.reasoning and "reasoning_content" not in extra:
        extra["reasoning_content"] = content.reasoning
    has_own_content = content.text or calls or _has_reasoning(extra)
    if content.results and not has_own_content:
        return content.results
    loss, loss_scale = _loss_of_content(label, message, content)
    return [*content.results, Turn(role, content.text, extra, loss, loss_scale)]


def _has_reasoning(extra: Mapping[str, Any]) -> bool:
    return any(key in extra for key in _REASONING_KEYS)


def _loss_of_content(label: str, message: Mapping[str, Any], content: Content) -> tuple[bool | None, float | None]:
    """Return the loss settings of a message; the flag ``train`` of its text parts takes precedence."""
    loss, loss_scale = _loss(label, message)
    if len(content.trained) > 1:
        detail = f"{label} trains only a part of its texts ('train'); packtool trains or masks entire messages"
        raise RowProblem("invalid_row", f"{detail}: use segments, or one message for each part")
    flag = next(iter(content.trained), None)
    return (loss if flag is None else bool(flag)), loss_scale


def _tool_calls(label: str, message: Mapping[str, Any]) -> list[Any]:
    """Return the calls in ``tool_calls`` or ``function_call``, parsed if they are JSON text."""
    calls = message.get("tool_calls")
    if isinstance(calls, str):
        calls = parse_cell(calls, "invalid_row", f"tool_calls of {label} is text, but not JSON") if calls else None
    if not calls and message.get("function_call"):
        return [as_call(label, message["function_call"])]  # predecessor of tool_calls in OpenAI's format
    if not calls:
        return []
    if not isinstance(calls, Sequence):
        raise RowProblem("invalid_tool_call", f"{label} has a {type(calls).__name__} as tool_calls, not a list")
    problem = f"a tool call of {label} is text, but not JSON"
    return [parse_cell(call, "invalid_row", problem) if isinstance(call, str) else call for call in calls]


def _call_turn(label: str, message: Mapping[str, Any], tags: _Tags) -> Turn:
    """Return the turn of a message whose content is a call or a list of calls, perhaps as JSON text."""
    value = first_value(message, tags.content_keys)
    if isinstance(value, str):
        value = parse_cell(value, "invalid_tool_call", f"{label} is a tool call, but not JSON")
    calls = value if isinstance(value, list) else [value]
    extra = {"tool_calls": [as_call(label, call) for call in calls]}
    return Turn("assistant", "", extra, *_loss(label, message))


def _with_calls(turn: Turn, call_turn: Turn) -> Turn:
    """Return an assistant turn with the calls of another added, whose loss settings take precedence if it has any."""
    calls = [*turn.extra.get("tool_calls", ()), *call_turn.extra["tool_calls"]]
    return replace(
        turn,
        extra={**turn.extra, "tool_calls": calls},
        loss=turn.loss if call_turn.loss is None else call_turn.loss,
        loss_scale=turn.loss_scale if call_turn.loss_scale is None else call_turn.loss_scale,
    )


def _loss(label: str, message: Mapping[str, Any]) -> tuple[bool | None, float | None]:
    """Return whether a message is trained, and the loss weight of its tokens; None for each that it does not set.

    The first is ``loss`` (``weight`` in OpenAI's format, ``train`` in axolotl's), the second ``loss_scale``.
    ``loss_weight`` of LLaMA-Factory's v1 format sets both: 0 is (False, None), 1 is (True, None), 2 is (True, 2.0).
    """
    if message.get("train_detail"):
        detail = f"{label} has train_detail, which trains a part of its text; packtool trains or masks entire messages"
        raise RowProblem("invalid_row", f"{detail}: use segments, or one message for each part")
    if message.get("loss_weight") is not None:
        weight = _weight(f"{label} has loss_weight", message["loss_weight"])
        is_default = weight in (0, 1)
        return weight > 0, None if is_default else weight
    loss = first_value(message, ("loss", "weight", "train"))
    if loss not in (None, 0, 1):  # true and false are equal to these
        raise RowProblem("invalid_row", f"{label} has loss {shown(loss)}; it must be true or false")
    is_trained = None if loss is None else bool(loss)
    loss_scale = message.get("loss_scale")
    if loss_scale is None:
        return is_trained, None
    return is_trained, _weight(f"{label} has loss_scale", loss_scale)


def _weight(what: str, value: Any) -> float:
    """Check a loss weight; ``what`` begins the error message."""
    number = finite(value)
    if number is None or not 0 <= number <= MAX_LOSS_SCALE:
        raise RowProblem("invalid_row", f"{what} {shown(value)}; it must be a number from 0 to {MAX_LOSS_SCALE:,}")
    return number


def responses_of(fields: Fields, turns: Sequence[Turn], source: Source) -> tuple[Response, ...]:
    """Return the accepted responses of a row, without those of weight 0.

    The result is empty if ``turns``, the row's conversation, ends with an answer, or if the row has no responses.
    """
    if (turns and turns[-1].role == "assistant") or fields.get("responses") is None:
        return ()
    values = fields.parsed("responses")
    if not is_list(values) or not values:
        raise RowProblem("invalid_row", f"'responses' is {shown(values)}, not a list of answers")
    weights = _response_weights(fields, len(values))
    answers = [_response_turns(f"response {number}", value, source) for number, value in enumerate(values)]
    responses = [Response(tuple(answer), weight) for answer, weight in zip(answers, weights, strict=True) if weight]
    if not responses:
        raise RowProblem("invalid_row", "all responses have the weight 0")
    return tuple(responses)


def _response_weights(fields: Fields, num_responses: int) -> list[float]:
    """Return the weight of each response of a row, 1 by default."""
    weights = fields.parsed("response_weights")
    if weights is None:
        return [1.0] * num_responses
    if not is_list(weights) or len(weights) != num_responses:
        expected = f"a list with a weight for each of {num_responses} responses"
        raise RowProblem("invalid_row", f"'response_weights' is {shown(weights)}, not {expected}")
    return [_weight("a response has the weight", weight) for weight in weights]


def _response_turns(label: str, value: Any, source: Source) -> list[Turn]:
    """Return the turns of a response: a text, a message, or messages that begin and end with an assistant message."""
    if isinstance(value, Mapping):
        value = [value]
    inline = InlineMedia(source)
    if is_list(value) and value and isinstance(value[0], Mapping) and "type" not in value[0]:
        turns = turns_of(value, inline)
    else:
        turns = [Turn("assistant", content_of(label, value, inline).text)]
    if turns[0].role != "assistant" or turns[-1].role != "assistant":
        raise RowProblem("role_order", f"{label} must begin and end with an assistant turn")
    if inline.refs or inline.num_empty_parts:
        raise RowProblem("invalid_media", f"{label} contains a medium; media are only allowed before the responses")
    return turns


def _fits_messages(columns: Columns, formatting: str | None) -> bool:
    if formatting == "alpaca" or columns.find("messages") is None:
        return False
    columns.find("responses")
    return True


def _read_messages(fields: Fields, inline: InlineMedia) -> list[Turn]:
    messages = fields.raw("messages")
    return turns_of(fields.parsed("messages") if isinstance(messages, str) and messages else messages, inline)


MESSAGES = RowForm(
    "messages",
    "messages (or conversations, conversation): a list of {role, content}, {from, value}, or pairs {human, assistant}",
    _fits_messages,
    _read_messages,
)


def _read_query(fields: Fields, inline: InlineMedia) -> list[Turn]:
    question = _turns_of_cell("user", "query", fields.raw("query"), inline)
    return [*_history(fields, inline), *question, *_answer(fields, "response", inline)]


def _read_alpaca(fields: Fields, inline: InlineMedia) -> list[Turn]:
    """Read instruction and input as one question, and output as its answer."""
    instruction, extra_input = fields.raw("instruction"), fields.get("input")
    question = content_of("'instruction'", instruction, inline).text
    if extra_input is not None:
        text = content_of("'input'", extra_input, inline).text
        question = f"{question}\n{text}" if question else text
    return [*_history(fields, inline), Turn("user", question), *_answer(fields, "output", inline)]


def _answer(fields: Fields, name: str, inline: InlineMedia) -> list[Turn]:
    """Return the turns of the answer in column ``name``; [] if the row has ``responses`` instead."""
    if fields.get(name) is None and fields.get("responses") is not None:
        return []
    value = fields.raw(name)
    if isinstance(value, Sequence) and not isinstance(value, str) and value and isinstance(value[0], str):
        value = value[0]  # of several answers, the first is trained, as in ms-swift
    turns = _turns_of_cell("assistant", name, value, inline)
    reasoning = fields.get("reasoning_content")
    if isinstance(reasoning, str) and turns:
        turns[-1] = replace(turns[-1], extra={**turns[-1].extra, "reasoning_content": reasoning})
    return turns


def _turns_of_cell(role: str, name: str, value: Any, inline: InlineMedia) -> list[Turn]:
    """Return the turn of a text, or the turns of a list of messages, as in TRL's ``prompt`` and ``completion``."""
    if isinstance(value, Sequence) and value and isinstance(value[0], Mapping) and "role" in value[0]:
        return turns_of(value, inline)
    return [Turn(role, content_of(f"{name!r}", value, inline).text)]


def _history(fields: Fields, inline: InlineMedia) -> list[Turn]:
    history = fields.parsed("history")
    if history is None:
        return []
    if not isinstance(history, Sequence):
        raise RowProblem("invalid_row", f"'history' is a {type(history).__name__}, not a list")
    turns = []
    for i, pair in enumerate(history):
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise RowProblem("invalid_row", f"item {i} of 'history' is {shown(pair)}, not [query, response]")
        for role, value in zip(("user", "assistant"), pair, strict=True):
            turns.append(Turn(role, content_of(f"item {i} of 'history' ({role})", value, inline).text))
    return turns


def _fits_query(columns: Columns, formatting: str | None) -> bool:
    if formatting == "sharegpt" or not columns.find("query"):
        return False
    return bool(columns.find("response") or columns.find("text", "response") or columns.find("responses"))


def _fits_alpaca(columns: Columns, formatting: str | None) -> bool:
    if formatting == "sharegpt":
        return False
    # A file with instruction and also query, prompt or the like has the form "query", unless the user says otherwise.
    is_alpaca = formatting == "alpaca" or "instruction" in columns.columns
    has_query = any(columns.has(name) for name in NAMES["query"] if name not in ("instruction", "input"))
    if not is_alpaca and (has_query or "query" in columns.columns):
        return False
    has_answer = columns.find("output") or columns.find("response", "output") or columns.find("responses")
    return bool(columns.find("instruction") and has_answer)


ALPACA = RowForm("alpaca", "instruction, input and output, optionally history and system", _fits_alpaca, _read_alpaca)

QUERY = RowForm(
    "query",
    "query (or prompt, question, problem) and response (or answer, output, completion, ...) or responses, optionally "
    "history",
    _fits_query,
    _read_query,
)


def _fits_text(columns: Columns, formatting: str | None) -> bool:
    return formatting != "sharegpt" and columns.find("text") is not None


def _read_text(fields: Fields, inline: InlineMedia) -> list[Turn]:
    text = content_of("'text'", fields.raw("text"), inline).text
    if not text.strip():
        raise RowProblem("empty_text", "the text is empty or blank")
    return [Turn("assistant", text)]


TEXT = RowForm("text", "text: a pretraining text", _fits_text, _read_text)
