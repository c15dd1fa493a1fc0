"""Names of other tools: options, YAML keys and environment variables, with their equivalents in packtool.

They are listed in ``compat_names.tsv``, whose first comments describe its columns.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import resources
from typing import Literal, cast, get_args

from packtool.config.settings import FALSE_WORDS, flag

# "same": an option of packtool, too; the others from the most to the least helpful explanation.
Status = Literal["same", "renamed", "set", "unsupported", "unneeded"]
EVERY_COMMAND = "*"
SET_TOO = "--set training."
TRANSFORMERS = "transformers"
"""Owner of the fields of transformers' TrainingArguments, which all other tools accept."""


@dataclass(frozen=True)
class CompatName:
    """Option, YAML key or environment variable of another tool, with the columns of the table.

    ``tool`` names one or several; ``other_meanings`` are entries of tools in which the name means something else.
    """

    name: str
    tool: str
    status: Status
    command: str
    options: str
    reason: str
    is_variable: bool = False
    other_meanings: tuple[CompatName, ...] = ()

    def sentence(self, shown: str, value: object = None) -> str:
        """Return each tool's explanation of this name, which the user gave as ``shown``; an unknown value is None."""
        return "; ".join(entry._explanation(shown, value) for entry in (self, *self.other_meanings))

    @property
    def selects_a_value(self) -> bool:
        """True for a switch that selects one value of our option: ``use_galore`` is ``--optim galore_adamw``."""
        fixed_value = " " in self.options and "{" not in self.options and not self.options.startswith("--set")
        return self.status == "renamed" and fixed_value

    def _explanation(self, shown: str, value: object) -> str:
        reason = f": {self.reason}" if self.reason else ""
        if self.status == "renamed":
            return f"{shown} ({self.tool}) is {in_our_unit(self.options, value)} here{reason}"
        if self.status == "set":
            field = self.options.removeprefix("--set training.") if self.options != "-" else self.name
            setting = f"--set training.{field}={'VALUE' if value is None else value}"
            return f"{shown} is not an option but a field of transformers' TrainingArguments: give it as {setting}"
        if self.status == "unneeded":
            return f"{shown} ({self.tool}) has no effect here{reason}"
        return f"{shown} ({self.tool}) is not supported{reason}"


def training_argument_problem(name: str) -> str | None:
    """Return why ``--set training.NAME`` cannot set this field of transformers' TrainingArguments; None if it can."""
    entry = next((entry for entry in compat_entries(name) if entry.tool == "transformers"), None)
    if entry is None or entry.status == "set" or entry.options == SET_TOO:
        return None
    option = flag(name) if entry.status == "same" else entry.options
    return entry.reason if option == "-" else f"use {option} instead" + (f": {entry.reason}" if entry.reason else "")


def find_entry_of_tool(name: str, tool: str, command: str) -> CompatName | None:
    """Return the entry of a name for a tool, else that of transformers' TrainingArguments, which all tools take."""
    entries = [entry for entry in compat_entries(name) if entry.command in (EVERY_COMMAND, command)]
    entries_by_owner = [entry for owner in (tool, TRANSFORMERS) for entry in entries if entry.tool == owner]
    return next((entry for entry in entries_by_owner if not entry.is_variable), None)


def find_compat_name(name: str, command: str) -> CompatName | None:
    """Return the entry of another tool's option or key that packtool does not have; None if there is none.

    If the name has several meanings, the most helpful entry has the others in ``other_meanings``.
    """
    entry_of_tool: dict[str, CompatName] = {}
    for entry in compat_entries(name.replace("-", "_")):  # those of this command come before those of all commands
        applies = entry.command in (EVERY_COMMAND, command) and not entry.is_variable
        if applies and entry.status != "same":
            entry_of_tool.setdefault(entry.tool, entry)
    if not entry_of_tool:
        return None
    status_order = get_args(Status)  # the most helpful explanations first
    meanings = _join_tools(entry_of_tool.values())
    first, *others = sorted(meanings, key=lambda entry: status_order.index(entry.status))
    return replace(first, other_meanings=tuple(others))


def _join_tools(entries: Iterable[CompatName]) -> list[CompatName]:
    """Replace the entries of tools with the same explanation by one entry, which names all of these tools."""
    joined: dict[tuple[str, str, str], CompatName] = {}
    for entry in entries:
        explanation = (entry.status, entry.options, entry.reason)
        if explanation in joined:
            entry = replace(joined[explanation], tool=f"{joined[explanation].tool}, {entry.tool}")
        joined[explanation] = entry
    return list(joined.values())


def in_our_unit(options: str, value: object) -> str:
    """Return ``options`` with another tool's value in packtool's unit, or with a formula if it is unknown."""
    if "{" not in options:
        return options
    sides = [int(side) for side in re.findall(r"\d+", str(value))]
    opposite = None if value is None else "true" if str(value).lower() in FALSE_WORDS else "false"
    return options.format_map(
        {
            "area": math.prod(sides * 2 if len(sides) == 1 else sides) if sides else "WIDTH*HEIGHT",
            "not": opposite or "(the opposite)",
            "per_epoch": f"STEPS_PER_EPOCH/{'N' if value is None else value}",
        }
    )


@functools.cache
def compat_names() -> tuple[CompatName, ...]:
    """Return the entries of ``compat_names.tsv``, one for each name."""
    text = resources.files("packtool.config").joinpath("compat_names.tsv").read_text(encoding="utf-8")
    entries = []
    for line in text.splitlines():
        if line and not line.startswith("#"):
            tool, status, command, options, names, reason = line.split("\t")
            owner, is_variable = tool.removeprefix("env:"), tool.startswith("env:")
            entries += [
                CompatName(name, owner, cast(Status, status), command, options, reason, is_variable)
                for name in names.split()
            ]
    return tuple(entries)


@functools.cache
def compat_entries(name: str) -> tuple[CompatName, ...]:
    """Return all entries of a name with underscores; those of a single command take precedence, and are first."""
    entries = [entry for entry in compat_names() if entry.name == name]
    return tuple(sorted(entries, key=lambda entry: entry.command == EVERY_COMMAND))
