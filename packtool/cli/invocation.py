"""How a command was called, besides its settings."""

from __future__ import annotations

import shlex
from dataclasses import dataclass


@dataclass(frozen=True)
class Invocation:
    """How a command was called.

    Args:
        arguments: everything behind ``packtool``, as it was given, so that torchrun can call it again in every process.
        as_json: one JSON document is wanted on stdout.
    """

    arguments: tuple[str, ...]
    as_json: bool

    @property
    def command(self) -> str:
        """The command line, to be shown and copied."""
        return shlex.join(["packtool", *self.arguments])
