"""Progress as a user sees it: a bar in a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from packtool.visible import visible, visible_line

_PLAIN_SECONDS = 5.0


class TerminalProgress:
    """Progress on stderr; use as a context manager, so that the bar is gone whatever happens.

    Args:
        console: where to; stderr by default.
        enabled: False on ranks that should be silent.
    """

    def __init__(self, console: Console | None = None, enabled: bool = True) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._enabled = enabled
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._title, self._total, self._done = "", 0, 0
        self._begin = self._last = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def start(self, title: str, total: int | None) -> None:
        """See ``packtool.progress.Progress``."""
        self._title, self._total, self._done = visible_line(title), total or 0, 0
        self._begin = self._last = time.monotonic()
        if not self._enabled or not self._console.is_terminal:
            return
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            # In a narrow terminal figures take several lines, rather than the space of what is left of the time.
            TextColumn("{task.fields[shown]}", markup=False, table_column=Column(no_wrap=False)),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task(self._title, total=total, shown="")
        self._bar.start()

    def advance(self, num_done: int, **fields: float | int | str) -> None:
        """See ``packtool.progress.Progress``."""
        self._advance(num_done, fields, is_due=time.monotonic() - self._last >= _PLAIN_SECONDS)

    def line(self, num_done: int = 0, **fields: float | int | str) -> None:
        """See ``packtool.progress.Progress``."""
        self._advance(num_done, fields, is_due=True, label=f"at {self._done + num_done:,}: ")

    def _advance(
        self, num_done: int, fields: Mapping[str, float | int | str], *, is_due: bool, label: str = ""
    ) -> None:
        """Advance; a bar without new fields keeps the last ones, which ``label`` dates."""
        self._done += num_done
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done)
            if fields:
                self._bar.update(self._task, shown=label + _shown(fields))
        elif self._enabled and is_due:
            self._print_line(fields)

    def _print_line(self, fields: Mapping[str, float | int | str]) -> None:
        self._last = time.monotonic()
        share = f"{self._done:,} of {self._total:,}" if self._total else f"{self._done:,}"
        seconds = self._last - self._begin
        rest = seconds / self._done * (self._total - self._done) if self._done else 0.0
        left = f", {_duration(rest)} left" if self._total and self._done else ""
        self._print(f"{self._title}: {share} after {_elapsed(seconds)}{left}  {_shown(fields)}".rstrip())

    def note(self, message: str) -> None:
        """See ``packtool.progress.Progress``."""
        if self._enabled:
            self._print(message)

    def finish(self) -> None:
        """See ``packtool.progress.Progress``."""
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None

    def _print(self, message: str) -> None:
        # No wrapping: logs are searched by line, and commands are copied from them.
        self._console.print(visible(message), markup=False, soft_wrap=True)


def _elapsed(seconds: float) -> str:
    """``45 s``, ``12 min 5 s``, ``3 h 25 min 7 s``: lines a few seconds apart differ."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min {rest} s" if hours else f"{minutes} min {rest} s"


def _duration(seconds: float) -> str:
    """``45 s``, ``12 min``, ``3.5 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _shown(fields: Mapping[str, float | int | str]) -> str:
    return visible_line("  ".join(f"{name.replace('_', ' ')} {_short(value)}" for name, value in fields.items()))


def _short(value: float | int | str) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else value
