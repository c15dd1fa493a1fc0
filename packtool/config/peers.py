"""Names of options, YAML keys and environment variables that other tools have, and what became of them here.

The names are data: ``peers.tsv`` has a line for each group of names that one sentence explains, with tabs between

    tool       ms-swift, LLaMA-Factory, axolotl, TRL, transformers, MindSpeed; env:TOOL for environment variables
    status     same         here under the same name
               renamed      here under another, which ``here`` names
               set          a field of transformers' TrainingArguments: ``--set training.NAME=VALUE``
               unneeded     accepted, without effect, and a run says so with ``why``
               unsupported  not done here, for the reason in ``why``; harmless where its value says no
    command    the only command that the line is about, or *
    here       options of packtool, or -; ``--set training.`` where a field of TrainingArguments may be given so, too
    names      with spaces between
    why        the sentence, or empty
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib import resources
from typing import Literal, cast

from packtool.config.settings import flag

Status = Literal["same", "renamed", "set", "unneeded", "unsupported"]
ENVIRONMENT = "env:"
EVERY_COMMAND = "*"
SET_TOO = "--set training."


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
    """

    name: str
    tool: str
    status: Status
    command: str
    here: str
    why: str
    is_variable: bool = False

    def sentence(self, shown: str, value: object = None) -> str:
        """What to say to somebody who gave it.

        Args:
            shown: the name as it was given.
            value: what it was given, None where that is not known.
        """
        why = f": {self.why}" if self.why else ""
        if self.status == "renamed":
            return f"{shown} ({self.tool}) is {self.here} here{why}"
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
    """What became of a name, if another tool has it and it is not simply the same here.

    Args:
        name: with dashes or underscores.
        command: that it was given to.
        variable: look among environment variables.
    """
    for found in _by_name().get(name.replace("-", "_"), ()):
        if found.is_variable == variable and found.command in (EVERY_COMMAND, command) and found.status != "same":
            return found
    return None


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
