"""Names of options, YAML keys and environment variables that other tools have, and what became of them here.

The names are data: ``peers.tsv`` has a line for each group of names that one sentence explains, with tabs between

    tool       ms-swift, LLaMA-Factory, axolotl, TRL, transformers, MindSpeed; env:TOOL for environment variables
    status     same         here under the same name
               renamed      here under another, which ``here`` names
               set          a field of transformers' TrainingArguments: ``--set training.NAME=VALUE``
               unneeded     accepted, without effect, and a run says so with ``why``
               unsupported  not done here, for the reason in ``why``; harmless where its value says no
    command    the only command that the line is about, or *
    here       options of packtool, or -; ``--set training.`` where a field of TrainingArguments may be given so, too;
               {area}, {not} and {per_epoch} stand for the other tool's value in this option's unit
    names      with spaces between
    why        the sentence, or empty
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, replace
from importlib import resources
from typing import Literal, cast

from packtool.config.settings import FALSE_WORDS, flag

Status = Literal["same", "renamed", "set", "unneeded", "unsupported"]
ENVIRONMENT = "env:"
EVERY_COMMAND = "*"
SET_TOO = "--set training."
_STRENGTH: tuple[Status, ...] = ("renamed", "set", "unsupported", "unneeded")


@dataclass(frozen=True)
class PeerName:
    """A name that another tool has.

    Args:
        name: with underscores.
        tool: whose it is.
        status: what became of it.
        command: the only command that this is about, or ``*``.
        here: options of packtool that do it, as they are written on the command line.
        why: a sentence, or nothing.
        is_variable: of the environment.
        others: the same name in other tools that mean something else by it.
    """

    name: str
    tool: str
    status: Status
    command: str
    here: str
    why: str
    is_variable: bool = False
    others: tuple[PeerName, ...] = ()

    def sentence(self, shown: str, value: object = None) -> str:
        """The explanation for somebody who gave this name: for each tool that has it, one after the other.

        Args:
            shown: the name as it was given.
            value: what it was given, None where that is not known.
        """
        return "; ".join(entry._explanation(shown, value) for entry in (self, *self.others))

    def _explanation(self, shown: str, value: object) -> str:
        why = f": {self.why}" if self.why else ""
        if self.status == "renamed":
            return f"{shown} ({self.tool}) is {_in_our_unit(self.here, value)} here{why}"
        if self.status == "set":
            field = self.here.removeprefix("--set training.") if self.here != "-" else self.name
            return (
                f"{shown} is no option, but a field of transformers' TrainingArguments: give it as "
                f"--set training.{field}={'VALUE' if value is None else value}"
            )
        if self.status == "unneeded":
            return f"{shown} ({self.tool}) has no effect here{why}"
        return f"{shown} ({self.tool}) is not done here{why}"


def reason_against(name: str) -> str | None:
    """What decides a field of transformers' TrainingArguments instead of ``--set training.NAME``.

    Returns:
        None for a field that may be given, or that transformers has and the table does not know.
    """
    for found in _by_name().get(name, ()):
        if found.tool != "transformers":
            continue
        if found.status == "set" or found.here == SET_TOO:
            return None
        option = flag(name) if found.status == "same" else found.here
        return found.why if option == "-" else f"{option} decides it" + (f": {found.why}" if found.why else "")
    return None


def find_peer(name: str, command: str, *, variable: bool = False) -> PeerName | None:
    """The entry of a name that other tools have and that is not simply the same here; None if there is none.

    Where tools mean different things by it, ``others`` has the rest. The first is the one that says most: a name that
    is an option here before one that is not done, and that before one without effect.

    Args:
        name: with dashes or underscores.
        command: that it was given to.
        variable: look among environment variables.
    """
    by_tool: dict[str, PeerName] = {}
    for entry in _by_name().get(name.replace("-", "_"), ()):
        if entry.is_variable == variable and entry.command in (EVERY_COMMAND, command) and entry.status != "same":
            by_tool.setdefault(entry.tool, entry)
    by_answer: dict[tuple[str, str, str], PeerName] = {}
    for entry in by_tool.values():
        key = (entry.status, entry.here, entry.why)
        known = by_answer.get(key)
        by_answer[key] = entry if known is None else replace(known, tool=f"{known.tool}, {entry.tool}")
    if not by_answer:
        return None
    first, *others = sorted(by_answer.values(), key=lambda entry: _STRENGTH.index(entry.status))
    return replace(first, others=tuple(others)) if others else first


def _in_our_unit(here: str, value: object) -> str:
    """``here`` with another tool's value in this tool's unit; a formula where the value is not known."""
    if "{" not in here:
        return here
    sides = [int(side) for side in re.findall(r"\d+", str(value))]
    falls = None if value is None else "true" if str(value).lower() in FALSE_WORDS else "false"
    return here.format_map(
        {
            "area": math.prod(sides * 2 if len(sides) == 1 else sides) if sides else "WIDTH*HEIGHT",
            "not": falls or "(the opposite)",
            "per_epoch": f"STEPS_PER_EPOCH/{'N' if value is None else value}",
        }
    )


@functools.cache
def peer_names() -> tuple[PeerName, ...]:
    """Every row of ``peers.tsv``, one entry a name."""
    text = resources.files("packtool.config").joinpath("peers.tsv").read_text(encoding="utf-8")
    found = []
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        tool, status, command, here, names, why = line.split("\t")
        for name in names.split():
            found.append(
                PeerName(
                    name,
                    tool.removeprefix(ENVIRONMENT),
                    cast(Status, status),
                    command,
                    here,
                    why,
                    tool.startswith(ENVIRONMENT),
                )
            )
    return tuple(found)


@functools.cache
def _by_name() -> dict[str, tuple[PeerName, ...]]:
    grouped: dict[str, tuple[PeerName, ...]] = {}
    # What is said of a single command before what is said of all.
    for entry in sorted(peer_names(), key=lambda entry: entry.command == EVERY_COMMAND):
        grouped[entry.name] = (*grouped.get(entry.name, ()), entry)
    return grouped
