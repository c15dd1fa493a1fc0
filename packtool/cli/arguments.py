"""ms-swift's spelling of a command line, rewritten into typer's.

Accepted are both spellings of a name (``--max_length``), values behind booleans (``--packing true``), and several
values behind a list option (``--dataset a b c``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

Kind = Literal["flag", "single", "list"]
_TRUE, _FALSE = ("true", "1"), ("false", "0")


def rewrite(arguments: Sequence[str], kinds: Mapping[str, Kind], nameless: str | None = None) -> list[str]:
    """The same command line as typer reads it.

    Args:
        arguments: behind the command's name.
        kinds: of each option, by its name with dashes; unknown options pass through for typer to refuse.
        nameless: the option that words without a name are values of.
    """
    result: list[str] = []
    at = 0
    while at < len(arguments):
        argument = arguments[at]
        at += 1
        if not argument.startswith("--") or argument == "--":
            result += [nameless, argument] if nameless and not argument.startswith("-") else [argument]
            continue
        name, equals, value = argument.partition("=")
        name = name.replace("_", "-")
        kind = kinds.get(name)
        if kind == "flag":
            if not equals and at < len(arguments) and arguments[at].lower() in _TRUE + _FALSE:
                value, equals = arguments[at], "="
                at += 1
            result.append(_flag(name, value) if equals else name)
        elif kind == "list":
            values = [value] if equals else []
            while at < len(arguments) and not arguments[at].startswith("--"):
                values.append(arguments[at])
                at += 1
            # A name without a value stays, for typer to say so.
            result += [part for item in values for part in (name, item)] or [name]
        else:
            result.append(f"{name}={value}" if equals else name)
            if kind == "single" and not equals and at < len(arguments):
                result.append(arguments[at])
                at += 1
    return result


def _flag(name: str, value: str) -> str:
    if value.lower() in _TRUE:
        return name
    if value.lower() in _FALSE:
        return "--no-" + name.removeprefix("--")
    return f"{name}={value}"
