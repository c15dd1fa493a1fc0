"""Strict JSON parser for rows: the lines of files and JSON text in cells.

Python's parser accepts text that other parsers read differently: it keeps the last value of a duplicate key, and reads
an unpaired surrogate as a character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

_OPENING, _BLANKS = ("{", "["), " \t\r\n"
MAX_DEPTH = 100
"""Maximum nesting of lists and objects; far below Python's recursion limit, which also counts the callers."""

_TOO_DEEP = f"lists and objects are nested more than {MAX_DEPTH} levels deep"
# JSON can contain an unpaired surrogate; real files do where an emoji was cut in two.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class Problem(ValueError):
    """An error because of which a row is dropped: a reason of ``config/codes.tsv``, and an explanation for the user."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


class JsonProblem(Problem):
    """A text that is not JSON, or that JSON parsers read differently."""


def parse_json(text: str | bytes) -> Any:
    """Parse JSON strictly; raise a JsonProblem with the drop reason if the text is invalid.

    Also invalid are bytes that are not UTF-8, duplicate keys in an object, unpaired surrogates (half of a character,
    such as ``\\ud83d``), and more than 100 nested lists and objects.
    """
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError as error:
            raise JsonProblem("invalid_text", f"not UTF-8: {error}") from error
    try:
        value = _decode(text)
    except JsonProblem:  # duplicate keys; must not be caught as a ValueError below
        raise
    except RecursionError as error:
        raise JsonProblem("invalid_json", _TOO_DEEP) from error
    except StopIteration as error:  # raised by the scanner with the position
        raise JsonProblem("invalid_json", f"a value is missing or invalid at character {error.value}") from error
    except ValueError as error:
        raise JsonProblem("invalid_json", str(error)) from error
    # Both checks go through the entire value, which the text rarely makes necessary.
    may_be_too_deep = text.count("[") + text.count("{") > MAX_DEPTH
    if may_be_too_deep and _is_too_deep(value):
        raise JsonProblem("invalid_json", _TOO_DEEP)
    may_have_surrogates = _SURROGATE.search(text) is not None
    if may_have_surrogates and not is_utf8_text(value):
        raise JsonProblem("invalid_text", "the text has an unpaired surrogate (\\ud800 to \\udfff)")
    return value


def _decode(text: str) -> Any:
    """Decode with the fast scanner, or with the decoder if something precedes or follows the value."""
    if text.startswith(_OPENING):
        value, end = _scan(text, 0)
        if end == len(text) or not text[end:].strip(_BLANKS):
            return value
    return _decoder.decode(text)


def _is_too_deep(value: Any) -> bool:
    """Return whether lists and objects are nested more than 100 levels deep, without recursion."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        level = [
            child
            for item in level
            for child in (item.values() if item.__class__ is dict else item)
            if child.__class__ is dict or child.__class__ is list
        ]
        if not level:
            return False
    return True


def is_utf8_text(value: Any) -> bool:
    """Return whether all strings in nested lists and objects, keys included, can be encoded as UTF-8."""
    remaining = [value]
    try:
        while remaining:
            item = remaining.pop()
            if isinstance(item, str):
                item.encode()
            elif isinstance(item, dict):
                remaining += item.keys()
                remaining += item.values()
            elif isinstance(item, list):
                remaining += item
    except UnicodeEncodeError:
        return False
    return True


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        duplicate = next(key for key in keys if keys.count(key) > 1)
        raise JsonProblem("duplicate_keys", f"the key {duplicate[:80]!r} occurs twice in one object")
    return value


# Created once: ``json.loads`` with a hook creates a parser for every call.
_decoder = json.JSONDecoder(object_pairs_hook=_unique_keys)
_scan: Callable[[str, int], tuple[Any, int]] = vars(_decoder)["scan_once"]  # missing in its type stubs
