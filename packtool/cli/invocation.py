"""The call of a command: its arguments, the printing of its result, and interrupts."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from packtool.errors import EXIT_INTERRUPTED
from packtool.terminal import show, show_json

if TYPE_CHECKING:
    from packtool.report.tables import TerminalProgress


@dataclass(frozen=True)
class Invocation:
    """The call of a command.

    Args:
        arguments: everything after ``packtool``, unchanged, so that torchrun can run it again in every process.
        as_json: print one JSON document on stdout instead of text.
    """

    arguments: tuple[str, ...]
    as_json: bool

    @property
    def command(self) -> str:
        """The command line, to be shown and copied."""
        return shlex.join(["packtool", *self.arguments])

    def show(self, figures: object, lines: Iterable[str]) -> None:
        """Print the figures as JSON or, without ``--json``, the lines."""
        if self.as_json:
            show_json(figures)
        else:
            show("\n".join(lines))


@contextmanager
def interruptible_progress(message: str) -> Iterator[TerminalProgress]:
    """Progress on stderr; Ctrl-C prints ``message`` and exits with code 130."""
    from packtool.report.tables import TerminalProgress

    with TerminalProgress() as progress:
        try:
            yield progress
        except KeyboardInterrupt:
            progress.note(message)
            raise typer.Exit(EXIT_INTERRUPTED) from None
