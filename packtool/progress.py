"""The library never prints: it tells a ``Progress``, and only the command line decides what becomes of it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """What long-running functions report to."""

    def start(self, title: str, total: int | None) -> None:
        """A new piece of work begins; ``total`` in rows, packs, ... when known."""

    def advance(self, num_done: int, **fields: float | int | str) -> None:
        """``num_done`` more are finished; ``fields`` are shown beside the bar (drops, tokens, ...)."""

    def line(self, num_done: int = 0, **fields: float | int | str) -> None:
        """Like ``advance``, with figures that were asked for at this point: they get a line where no bar shows them."""

    def note(self, message: str) -> None:
        """Tell something that is worth a line of its own."""

    def finish(self) -> None:
        """The piece of work that ``start`` opened is over."""


class SilentProgress:
    """Progress that is shown nowhere."""

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
