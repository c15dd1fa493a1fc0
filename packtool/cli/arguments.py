"""ms-swift's spelling of a command line, rewritten into typer's.

Accepted are both spellings of a name (``--max_length``), values behind booleans (``--packing true``), and several
values behind a list option (``--dataset a b c``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from packtool.config.settings import FALSE_WORDS, TRUE_WORDS
from packtool.errors import ConfigError

# A switch is off where it is not given, and has no name for no.
ArgumentKind = Literal["flag", "switch", "single", "list"]
_HELP = ("--help",)


def rewrite(
    arguments: Sequence[str],
    kinds: Mapping[str, ArgumentKind],
    nameless: str | None = None,
    stranger: Callable[[str, str | None], str | None] | None = None,
) -> list[str]:
    """The command line in the form that typer reads.

    Args:
        arguments: behind the command's name.
        kinds: of each option, by its name with dashes.
        nameless: the option that words without a name are values of.
        stranger: asked what to say of an option that is not known, and of its value; None leaves it out without a
            word. By default such options, and words of no option, pass through, for typer to refuse.

    Raises:
        ConfigError: naming unknown options, booleans that are neither true nor false, and words of no option.
    """
    result: list[str] = []
    problems: list[str] = []
    at = 0
    while at < len(arguments):
        argument = arguments[at]
        at += 1
        if not argument.startswith("--") or argument == "--":
            is_word = not argument.startswith("-")
            result += [nameless, argument] if nameless and is_word else [argument]
            if is_word and not nameless and stranger:
                problems.append(_stray(argument, arguments[at - 2] if at > 1 else "", kinds))
            continue
        name, equals, value = argument.partition("=")
        name = name.replace("_", "-")
        kind = kinds.get(name)
        if kind in ("flag", "switch"):
            if not equals and at < len(arguments) and arguments[at].lower() in TRUE_WORDS + FALSE_WORDS:
                value, equals = arguments[at], "="
                at += 1
            told = _flag(name, value, kind) if equals else [name]
            result += told or []
            problems += [f"{name}: {value!r} is neither true nor false"] if told is None else []
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


def _is_known(name: str, kinds: Mapping[str, ArgumentKind]) -> bool:
    return name in _HELP or kinds.get("--" + name.removeprefix("--no-")) == "flag"


def _stray(word: str, before: str, kinds: Mapping[str, ArgumentKind]) -> str:
    """What to say of a word that no option takes."""
    name = before.replace("_", "-")
    if kinds.get(name) in ("flag", "switch"):
        return f"{name}: {word!r} is neither true nor false"
    return f"{word!r} stands alone: every value has the name of its option in front, and values with spaces are quoted"


def _flag(name: str, value: str, kind: ArgumentKind) -> list[str] | None:
    """Words for typer.

    Returns:
        None for a value that is neither true nor false.
    """
    if value.lower() in TRUE_WORDS:
        return [name]
    if value.lower() in FALSE_WORDS:
        return ["--no-" + name.removeprefix("--")] if kind == "flag" else []
    return None
