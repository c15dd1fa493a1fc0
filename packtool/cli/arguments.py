"""ms-swift's spelling of a command line, rewritten into typer's.

Accepted are both spellings of a name (``--max_length``), values behind booleans (``--packing true``), and several
values behind a list option (``--dataset a b c``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from packtool.config.settings import FALSE_WORDS, TRUE_WORDS
from packtool.errors import ConfigError

Kind = Literal["flag", "single", "list"]
_HELP = ("--help",)


def rewrite(
    arguments: Sequence[str],
    kinds: Mapping[str, Kind],
    nameless: str | None = None,
    stranger: Callable[[str, str | None], str | None] | None = None,
) -> list[str]:
    """The same command line as typer reads it.

    Args:
        arguments: behind the command's name.
        kinds: of each option, by its name with dashes.
        nameless: the option that words without a name are values of.
        stranger: asked what to say of an option that is not known, and of its value; None leaves it out without a
            word. By default such options pass through, for typer to refuse.

    Raises:
        ConfigError: naming all options that are not known.
    """
    result: list[str] = []
    problems: list[str] = []
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
            if not equals and at < len(arguments) and arguments[at].lower() in TRUE_WORDS + FALSE_WORDS:
                value, equals = arguments[at], "="
                at += 1
            result.append(_flag(name, value) if equals else name)
        elif kind == "list":
            words = _words(arguments, at)
            at += len(words)
            values = [value, *words] if equals else words
            # A name without a value stays, for typer to say so.
            result += [part for item in values for part in (name, item)] or [name]
        elif kind is None and stranger is not None and not _is_known(name, kinds):
            words = _words(arguments, at)
            at += len(words)
            values = [value, *words] if equals else words
            said = stranger(name, " ".join(values) if values else None)
            problems += [said] if said is not None else []
        else:
            result.append(f"{name}={value}" if equals else name)
            if kind == "single" and not equals and at < len(arguments):
                result.append(arguments[at])
                at += 1
    if problems:
        raise ConfigError.from_problems(problems)
    return result


def _words(arguments: Sequence[str], at: int) -> list[str]:
    """The words from there on to the next option."""
    end = at
    while end < len(arguments) and not arguments[end].startswith("--"):
        end += 1
    return list(arguments[at:end])


def _is_known(name: str, kinds: Mapping[str, Kind]) -> bool:
    return name in _HELP or kinds.get("--" + name.removeprefix("--no-")) == "flag"


def _flag(name: str, value: str) -> str:
    if value.lower() in TRUE_WORDS:
        return name
    if value.lower() in FALSE_WORDS:
        return "--no-" + name.removeprefix("--")
    return f"{name}={value}"
