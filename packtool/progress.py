"""Progress of long-running functions; the library itself never prints."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives the progress of long-running functions; the command line prints it."""

    def start(self, title: str, total: int | None) -> None:
        """Begin a piece of work; ``total`` is its number of rows, packs, ..., if known."""

    def advance(self, num_done: int, **fields: float | int | str) -> None:
        """Add ``num_done`` finished items; ``fields`` (drops, tokens, ...) are shown beside the bar."""

    def line(self, num_done: int = 0, **fields: float | int | str) -> None:
        """Do what ``advance`` does, and print the fields on a line of their own if there is no bar."""

    def note(self, message: str) -> None:
        """Print a message on a line of its own."""

    def finish(self) -> None:
        """End the piece of work that ``start`` began."""


class SilentProgress:
    """Progress that is not shown."""

    def start(self, title: str, total: int | None) -> None:
        pass

    def advance(self, num_done: int, **fields: float | int | str) -> None:
        pass

    def line(self, num_done: int = 0, **fields: float | int | str) -> None:
        self.advance(num_done, **fields)

    def note(self, message: str) -> None:
        pass

    def finish(self) -> None:
        pass
