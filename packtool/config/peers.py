"""Options, YAML keys and environment variables of other tools, and their equivalents here.

``peers.tsv`` has a line for each group of names that one sentence explains, with tabs between

    tool       ms-swift, LLaMA-Factory, axolotl, TRL, transformers, MindSpeed; env:TOOL for environment variables
    status     same         here under the same name
               renamed      here under another, which ``here`` names
               set          a field of transformers' TrainingArguments: ``--set training.NAME=VALUE``
               unneeded     accepted, without effect, and a run says so with ``why``
               unsupported  not supported, for the reason in ``why``; harmless where its value says no
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
        tool: one or several, with commas between.
        command: the only command that the entry is about, or ``*``.
        here: equivalent options of packtool, as on the command line.
        why: a sentence, or nothing.
        is_variable: whether it is an environment variable.
        others: entries of other tools where the name has another meaning.
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
        """Return the explanations of this name for each tool.

        Args:
            shown: the name as it was given.
            value: its value, None if that is not known.
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
        return f"{shown} ({self.tool}) is not supported{why}"


def reason_against(name: str) -> str | None:
    """Return why a TrainingArguments field of transformers cannot be set by ``--set training.NAME``; None if it can."""
    entry = next((entry for entry in _by_name().get(name, ()) if entry.tool == "transformers"), None)
    if entry is None or entry.status == "set" or entry.here == SET_TOO:
        return None
    option = flag(name) if entry.status == "same" else entry.here
    return entry.why if option == "-" else f"{option} decides it" + (f": {entry.why}" if entry.why else "")


def find_peer(name: str, command: str, *, variable: bool = False) -> PeerName | None:
    """Return the entry of a name of other tools that is not the same here; None if there is none.

    If the name has several meanings, ``others`` has the rest: names that are options here come before unsupported ones,
    and these before names without effect.

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
    """Return ``here`` with another tool's value in this tool's unit; with a formula if the value is not known."""
    if "{" not in here:
        return here
    sides = [int(side) for side in re.findall(r"\d+", str(value))]
    opposite = None if value is None else "true" if str(value).lower() in FALSE_WORDS else "false"
    return here.format_map(
        {
            "area": math.prod(sides * 2 if len(sides) == 1 else sides) if sides else "WIDTH*HEIGHT",
            "not": opposite or "(the opposite)",
            "per_epoch": f"STEPS_PER_EPOCH/{'N' if value is None else value}",
        }
    )


@functools.cache
def peer_names() -> tuple[PeerName, ...]:
    """Return the entries of ``peers.tsv``, one for each name."""
    text = resources.files("packtool.config").joinpath("peers.tsv").read_text(encoding="utf-8")
    entries = []
    for line in text.splitlines():
        if line and not line.startswith("#"):
            tool, status, command, here, names, why = line.split("\t")
            owner, is_variable = tool.removeprefix(ENVIRONMENT), tool.startswith(ENVIRONMENT)
            entries += [
                PeerName(name, owner, cast(Status, status), command, here, why, is_variable) for name in names.split()
            ]
    return tuple(entries)


@functools.cache
def _by_name() -> dict[str, tuple[PeerName, ...]]:
    grouped: dict[str, tuple[PeerName, ...]] = {}
    # Entries of a single command before those of all.
    for entry in sorted(peer_names(), key=lambda entry: entry.command == EVERY_COMMAND):
        grouped[entry.name] = (*grouped.get(entry.name, ()), entry)
    return grouped
