"""Ctrl-C that is heard whatever a library does with it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from packtool.progress import Progress


@contextmanager
def interrupts_heard(progress: Progress) -> Iterator[Progress]:
    """Inside, an interrupt that somebody caught and dropped is raised again, the next time that progress is told.

    Libraries have ``except:`` without a name, and what is raised in a callback from C or in a finalizer goes nowhere:
    a Ctrl-C at that moment would be lost, and the run go on.

    Args:
        progress: that is told of every step.

    Returns:
        the one to tell instead.
    """
    listening = _Listening(progress)
    before = signal.signal(signal.SIGINT, listening.hear)
    try:
        yield listening
    finally:
        signal.signal(signal.SIGINT, before)


class _Listening:
    """Passes on what it is told, unless there was an interrupt before."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._was_interrupted = False

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        self._was_interrupted = True
        raise KeyboardInterrupt

    def start(self, title: str, total: int | None) -> None:
        """See ``packtool.progress.Progress``."""
        self._check()
        self._progress.start(title, total)

    def advance(self, num_done: int, **fields: float | int | str) -> None:
        """See ``packtool.progress.Progress``."""
        self._check()
        self._progress.advance(num_done, **fields)

    def line(self, num_done: int = 0, **fields: float | int | str) -> None:
        """See ``packtool.progress.Progress``."""
        self._check()
        self._progress.line(num_done, **fields)

    def note(self, message: str) -> None:
        """See ``packtool.progress.Progress``."""
        self._check()
        self._progress.note(message)

    def finish(self) -> None:
        """See ``packtool.progress.Progress``."""
        self._check()
        self._progress.finish()

    def _check(self) -> None:
        if self._was_interrupted:
            raise KeyboardInterrupt
