"""JSON of rows: parsed so that nothing of it changes silently.

Python's parser takes more than a row may hold: of a key that comes twice it keeps the last value, it reads half of a
surrogate pair as a character, and how deep values may nest depends on the stack of who called it. All JSON text of
rows goes through here, the lines of a file as well as the text in a cell.
"""

from __future__ import annotations

import json
import re
from typing import Any

_DEEPEST = 400
"""Most levels of lists and objects inside each other; the parser's own limit is about 1,000 less the caller's stack."""
# JSON can spell half of a character that needs two halves; real files hold such, cut through an emoji.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class JsonProblem(ValueError):
    """A text that is no JSON, or that JSON readers would not understand alike.

    Args:
        reason: ``invalid_json``, ``invalid_text`` or ``duplicate_keys``, as in ``dropped.jsonl``.
        detail: for a person.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def parse_json(text: str | bytes) -> Any:
    """What a JSON text stands for.

    Raises:
        JsonProblem: if it is none or is not UTF-8, nests more than 400 deep, holds a key twice in one object, or half
            of a surrogate pair.
    """
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError as error:
            raise JsonProblem("invalid_text", f"not UTF-8: {error}") from error
    try:
        value = _decode(text)
    except JsonProblem:
        raise
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:
        raise JsonProblem("invalid_json", str(error)) from error
    if text.count("[") + text.count("{") > _DEEPEST and _nests_deeper(value, _DEEPEST):
        raise _too_deep()
    if _SURROGATE.search(text) and not is_text(value):
        raise JsonProblem("invalid_text", "half of a surrogate pair (\\ud800 to \\udfff alone) is no character")
    return value


def is_text(value: Any) -> bool:
    """Whether all strings of nested lists and objects can be written as UTF-8."""
    waiting = [value]
    try:
        while waiting:
            item = waiting.pop()
            if isinstance(item, str):
                item.encode()
            elif isinstance(item, dict):
                waiting += item.keys()
                waiting += item.values()
            elif isinstance(item, list):
                waiting += item
    except UnicodeEncodeError:
        return False
    return True


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise JsonProblem("duplicate_keys", f"the key {twice[:80]!r} comes twice in one object: which one counts?")
    return found


# Made once: ``json.loads`` with a hook makes a parser for every call.
_decode = json.JSONDecoder(object_pairs_hook=_object).decode


def _nests_deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            inner
            for item in level
            if isinstance(item, (dict, list))
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return False
    return any(isinstance(item, (dict, list)) for item in level)


def _too_deep() -> JsonProblem:
    return JsonProblem("invalid_json", f"lists and objects nest more than {_DEEPEST} deep")
