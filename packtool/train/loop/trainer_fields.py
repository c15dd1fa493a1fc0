"""Fields of transformers' TrainingArguments that ``--set training.NAME=VALUE`` may give, with values of their types.

Every field either works as transformers documents it, or is refused with what does it here, as ``config.peers`` tells:
a field that is taken and has no effect would be a setting that a run silently lacks.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import TrainingArguments

from packtool.config.peers import reason_against
from packtool.errors import ConfigError, did_you_mean


def checked_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """What ``--set training.NAME=VALUE`` gave, with values of the declared types.

    Raises:
        ConfigError: listing unknown fields, those that packtool decides, and values of another type.
    """
    problems, found = [], {}
    known = {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    for name, value in given.items():
        origin = f"--set training.{name}"
        reason = reason_against(name)
        if reason is not None:
            problems.append(f"{origin}: {reason}")
        elif name not in known:
            problems.append(f"{origin}: transformers' TrainingArguments has no such field{did_you_mean(name, known)}")
        else:
            try:
                found[name] = _of_type(value, _types_of(name))
            except ValueError as error:
                problems.append(f"{origin}: {error}")
    if problems:
        raise ConfigError.from_problems(problems)
    return found


@functools.cache
def _hints() -> dict[str, Any]:
    return typing.get_type_hints(TrainingArguments)


def _types_of(name: str) -> tuple[Any, ...]:
    hint = _hints()[name]
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return tuple(typing.get_origin(member) or member for member in members)


def _of_type(value: Any, allowed: Iterable[Any]) -> Any:
    """The value, or what was meant by it where a text was read as something else.

    Raises:
        ValueError: with the value and what was expected.
    """
    allowed = tuple(allowed)
    kinds = {kind for kind in allowed if isinstance(kind, type)}
    takes_text = str in kinds or any(issubclass(kind, enum.Enum) for kind in kinds)
    if isinstance(value, bool):
        if bool in kinds:
            return value
    elif any(isinstance(value, kind) for kind in kinds):
        return value
    elif isinstance(value, int) and float in kinds:
        return float(value)
    elif isinstance(value, float) and int in kinds and value.is_integer():
        return int(value)
    elif isinstance(value, str) and bool in kinds and value.lower() in ("yes", "on", "no", "off"):
        return value.lower() in ("yes", "on")
    if takes_text and isinstance(value, (str, bool, int, float)):
        return str(value).lower() if isinstance(value, bool) else str(value)
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", dict: "names and values"}
    wanted = " or ".join(names.get(kind, "a list") for kind in allowed if kind is not type(None))
    raise ValueError(f"{value!r} is not {wanted}")
