"""Conflicts between options, as declared in ``conflicts.tsv``; its first lines describe the format."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING
from fnmatch import fnmatchcase
from importlib import resources
from typing import Any

from packtool.config.settings import flag

Alternative = tuple[str, str, str, str]
"""Condition on an option: (``!`` or empty, its name, an operator such as ``=`` or empty, the value to compare with)."""

_ALTERNATIVE = re.compile(r"^(!?)(\w+)(!=|>=|=|>|$)(.*)")


class Settings:
    """Base class of options; ``value_problems`` returns messages about conflicts that the table cannot express."""

    def problems(self, *sections: type) -> list[str]:
        """Return messages about conflicting options by the rules of some sections, by default of all base classes."""
        checks: dict[str, Callable[[Any], list[str]]] = {
            cls.__name__: vars(cls).get("value_problems", lambda _: []) for cls in sections or type(self).__mro__
        }
        names, problems = set(checks), list[str]()
        for section, terms, message in conflict_table():
            if section in checks:  # reported before the messages of the section's rules
                problems += checks.pop(section)(self)
            if section in names:
                problems += _messages(self, terms, message)
        return problems + [problem for check in checks.values() for problem in check(self)]


@functools.cache
def conflict_table() -> tuple[tuple[str, tuple[tuple[Alternative, ...], ...], str], ...]:
    """Return (section, terms, message) of ``conflicts.tsv``; a term holds if one of its alternatives does."""
    rules = []
    section = ""
    for line in resources.files("packtool.config").joinpath("conflicts.tsv").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            condition, message = line.split("\t")
            terms = []
            for term in condition.split(" "):
                terms.append(tuple(_ALTERNATIVE.findall(alternative)[0] for alternative in term.split("|")))
            rules.append((section, tuple(terms), message))
    return tuple(rules)


def _messages(settings: Settings, terms: tuple[tuple[Alternative, ...], ...], message: str) -> Iterator[str]:
    """Yield the messages of a rule for ``settings``; none if a term does not hold."""
    names: list[str] = []
    for alternatives in terms:
        names = [each[1] for each in alternatives if hasattr(settings, each[1]) and _holds(settings, *each)]
        if not names:
            return
    for name in names if "{given}" in message or "{option}" in message else names[:1]:
        value = getattr(settings, name)
        option_text = flag(name) if value is True else f"{flag(name)} {_text(value)}"
        yield message.format_map({**vars(settings), "option": flag(name), "given": option_text})


def _holds(settings: Settings, negation: str, name: str, operator: str, wanted: str) -> bool:
    """Return whether an ``Alternative`` holds; without an operator, whether the option differs from its default."""
    value = getattr(settings, name)
    if operator.startswith(">"):
        limit = getattr(settings, wanted) if wanted.isidentifier() else float(wanted)
        number = len(value) if isinstance(value, tuple) else value
        if number is None or limit is None:
            return False
        return bool(number >= limit if operator == ">=" else number > limit)
    if operator:
        is_one = any(fnmatchcase(_text(value), word) for word in wanted.split(","))
        return is_one == (operator == "=")
    default = getattr(type(settings), name, MISSING)
    is_given = bool(value) if isinstance(default, property) else value != default
    return is_given != bool(negation)


def _text(value: Any) -> str:
    """Return a value as on the command line; an empty text for None."""
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
