"""JSON of rows: parsed so that nothing of it changes silently.

Python's parser takes more than a row may hold: of a key that comes twice it keeps the last value, and it reads half of
a surrogate pair as a character. All JSON text of rows goes through here, the lines of a file as well as the text in a
cell.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

_OPENING, _BLANKS = ("{", "["), " \t\r\n"
MOST_DEEP = 100
"""Lists and objects in each other: far from where Python's own limit, which counts the caller's calls too, begins."""

_TOO_DEEP = f"lists and objects nest more than {MOST_DEEP} deep"
# JSON can spell half of a character that needs two halves; real files hold such, cut through an emoji.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class JsonProblem(ValueError):
    """A text that is no JSON, or that JSON readers would not understand alike.

    Args:
        reason: ``invalid_json``, ``invalid_text`` or ``duplicate_keys``, as in ``dropped.jsonl``.
        detail: explanation for the user.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def parse_json(text: str | bytes) -> Any:
    """What a JSON text stands for.

    Raises:
        JsonProblem: if it is none or is not UTF-8, nests more than 100 deep, holds a key twice in one object, or half
            of a surrogate pair.
    """
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError as error:
            raise JsonProblem("invalid_text", f"not UTF-8: {error}") from error
    try:
        value, end = _scan(text, 0) if text[:1] in _OPENING else (None, -1)
        if end != len(text) and (end < 0 or text[end:].strip(_BLANKS)):
            value = _decoder.decode(text)  # which begins behind blanks, and names what is wrong at the end
    except JsonProblem:
        raise
    except RecursionError as error:
        raise JsonProblem("invalid_json", _TOO_DEEP) from error
    except StopIteration as error:  # what the parser within the parser says for "expecting value"
        raise JsonProblem("invalid_json", f"a value is missing or broken at character {error.value}") from error
    except ValueError as error:
        raise JsonProblem("invalid_json", str(error)) from error
    if text.count("[") + text.count("{") > MOST_DEEP and _is_deep(value):
        raise JsonProblem("invalid_json", _TOO_DEEP)
    if _SURROGATE.search(text) and not is_text(value):
        raise JsonProblem("invalid_text", "half of a surrogate pair (\\ud800 to \\udfff alone) is no character")
    return value


def _is_deep(value: Any) -> bool:
    """Whether lists and objects nest more than ``MOST_DEEP`` deep."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MOST_DEEP):
        level = [
            child
            for item in level
            for child in (item.values() if item.__class__ is dict else item)
            if child.__class__ is dict or child.__class__ is list
        ]
        if not level:
            return False
    return True


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
_decoder = json.JSONDecoder(object_pairs_hook=_object)
_scan: Callable[[str, int], tuple[Any, int]] = vars(_decoder)["scan_once"]  # which its type stubs leave out
