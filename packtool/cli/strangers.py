"""What is said of names that a command does not know: another tool's, another command's, or mistyped."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from packtool.config.peers import find_peer, peer_names
from packtool.config.settings import FALSE_WORDS, flag, option_names
from packtool.errors import did_you_mean, most_similar

_NOTHING = ("", "none", "null", "[]", "{}", *FALSE_WORDS)
_LIKENESS = 0.75


class Strangers:
    """Answers for one command.

    Args:
        command: its name.
        settings: of all commands, by name.
        tell: takes remarks that are no mistakes.
    """

    def __init__(self, command: str, settings: Mapping[str, type], tell: Callable[[str], None]) -> None:
        self.command = command
        self._settings = settings
        self.tell = tell

    def on_command_line(self, name: str, value: str | None) -> str | None:
        """See ``cli.arguments.rewrite``.

        Args:
            name: ``--name``.
            value: what followed it.

        Returns:
            what is wrong; None if nothing is.
        """
        answer = self._answer(name.removeprefix("--"), name, value)
        return answer if answer is None or self._is_peers(name) else f"No such option: {answer}"

    def in_settings(self, name: str, value: Any) -> str | None:
        """See ``config.settings.resolve``; ``name`` is a key of YAML or of ``--set``."""
        answer = self._answer(name, repr(name), value)
        return answer if answer is None or self._is_peers(name) else f"unknown setting {answer}"

    def variables(self, environ: Mapping[str, str]) -> None:
        """Tell of environment variables that another tool would have read and packtool does not."""
        for entry in peer_names():
            if entry.is_variable and entry.status in ("renamed", "unsupported") and environ.get(entry.name):
                self.tell(entry.sentence(f"environment variable {entry.name}"))

    def _is_peers(self, name: str) -> bool:
        return find_peer(name.removeprefix("--"), self.command) is not None

    def _answer(self, name: str, shown: str, value: Any) -> str | None:
        peer = find_peer(name, self.command)
        if peer is None:
            return shown + self._guess(name)
        if peer.status == "unneeded":
            self.tell(peer.sentence(shown))
            return None
        if peer.status == "unsupported" and value is not None and str(value).strip().lower() in _NOTHING:
            return None
        return peer.sentence(shown, value)

    def _guess(self, name: str) -> str:
        """Another command's, the most similar one, or the most similar one of another command."""
        wanted = flag(name)
        others = {
            command: _names(settings)
            for command, settings in self._settings.items()
            if command not in (self.command, "sft")
        }
        if owned := _owned(wanted, others):
            return f"; it is {owned}"
        if guess := did_you_mean(wanted, _names(self._settings[self.command]), _LIKENESS):
            return guess
        elsewhere = most_similar(wanted, itertools.chain(*others.values()), _LIKENESS)
        return f"; did you mean {elsewhere}? It is {_owned(elsewhere, others)}" if elsewhere else ""


def _owned(name: str, options: Mapping[str, list[str]]) -> str:
    """Whose option it is, by commands and their options; nothing where it is nobody's."""
    owners = [command for command, names in options.items() if name in names]
    return f"an option of packtool {', '.join(owners)}" if owners else ""


def _names(settings: type) -> list[str]:
    fields = [field for field in dataclasses.fields(settings) if field.metadata["flag"]]
    return [name for field in fields for name in option_names(field)]
