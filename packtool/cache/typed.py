"""JSON that somebody else may have written, as the dataclasses that the code works with: every value is what its
field's type says, or an error names it."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Hashable, Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, cast

T = TypeVar("T")

# More than any count of tokens or bytes, and still an int64.
_LARGEST = 2**62
_SHOWN = 60


class WrongValue(ValueError):
    """A value that cannot be what its place asks for; the text names both."""

    def __init__(self, place: str, value: object, wanted: str) -> None:
        shown = repr(value)
        shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."
        super().__init__(f"{place or 'it'} is {shown}, not {wanted}")


def build(kind: type[T], raw: object, place: str = "") -> T:
    """A dataclass from the object that ``dataclasses.asdict`` made of it; numbers are finite and not negative.

    Args:
        place: of the value in its file, for messages: ``splits.train.shards[3]``.

    Raises:
        WrongValue: naming place, value and what belongs there.
    """
    if not isinstance(raw, dict):
        raise WrongValue(place, raw, "an object")
    kinds = _kinds_of(cast(Hashable, kind))
    for name in raw:
        if name not in kinds:
            raise WrongValue(_at(place, str(name)), raw[name], f"known: {', '.join(kinds)} are")
    values = {}
    for field in dataclasses.fields(cast(Any, kind)):
        if field.name in raw:
            values[field.name] = value_of(kinds[field.name], raw[field.name], _at(place, field.name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise WrongValue(_at(place, field.name), None, "there, and must be")
    return kind(**values)


@cache
def _kinds_of(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _at(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def value_of(kind: Any, raw: Any, place: str) -> Any:
    """One value of a type: a dataclass, str, int, float, bool, None, unions and literals of these, tuples, mappings.

    ``Annotated[int, -1]`` is an int that may also be -1.

    Raises:
        WrongValue: naming it.
    """
    origin, given = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return raw if raw == given[1] else value_of(given[0], raw, place)
    if kind is Any:
        return raw
    if dataclasses.is_dataclass(kind):
        return build(cast(type, kind), raw, place)
    if origin in (Union, types.UnionType):
        if raw is None and type(None) in given:
            return None
        (wanted,) = (one for one in given if one is not type(None))
        return value_of(wanted, raw, place)
    if origin is Literal:
        if not isinstance(raw, str) or raw not in given:
            raise WrongValue(place, raw, f"one of {', '.join(map(str, given))}")
        return raw
    if origin is tuple:
        if not isinstance(raw, list):
            raise WrongValue(place, raw, "a list")
        return tuple(value_of(given[0], value, f"{place}[{i}]") for i, value in enumerate(raw))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(raw, dict):
            raise WrongValue(place, raw, "an object")
        return {name: value_of(given[1], value, _at(place, name)) for name, value in raw.items()}
    return _plain(kind, raw, place)


def _plain(kind: Any, raw: Any, place: str) -> Any:
    if kind is str and isinstance(raw, str):
        return raw
    if kind is bool and isinstance(raw, bool):
        return raw
    if kind is int and isinstance(raw, int) and not isinstance(raw, bool) and 0 <= raw < _LARGEST:
        return raw
    is_number = isinstance(raw, (int, float)) and not isinstance(raw, bool)
    if kind is float and is_number and 0 <= raw < _LARGEST and math.isfinite(raw):
        return raw
    words = {str: "a text", bool: "true or false", int: "a count", float: "a number that is not negative"}
    raise WrongValue(place, raw, words.get(kind, str(kind)))
