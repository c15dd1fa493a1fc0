"""Every table that a terminal shows: columns as wide as they need to be, on lines that are never wrapped.

Lines are searched and copied, and a table that is cut off or wrapped cannot be read.

Progress as a user sees it: a bar in a terminal, a plain line every few seconds elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from packtool.visible import show, visible, visible_line

_WIDEST = 60  # columns; a longer cell pushes what is behind it on its own line, not on all of them


def aligned(rows: Sequence[Sequence[str]], sides: str = "lr") -> list[str]:
    """Rows as lines whose columns stand below one another.

    Args:
        rows: cells; control characters of others become visible.
        sides: where each column's cells stand, ``l``eft or ``r``ight; the last letter is for all further columns.
    """
    cells = [[visible_line(cell) for cell in row] for row in rows]
    sides += sides[-1] * max((len(row) for row in cells), default=0)
    widths = [
        max((width for cell in column if (width := cell_len(cell)) <= _WIDEST), default=0)
        for column in zip(*cells, strict=True)
    ]
    lines = []
    for row in cells:
        padded = [
            cell + " " * room if side == "l" else " " * room + cell
            for cell, side, room in zip(
                row, sides, (width - cell_len(cell) for cell, width in zip(row, widths, strict=True)), strict=False
            )
        ]
        lines.append("  ".join(padded).rstrip())
    return lines


def print_table(title: str, rows: Sequence[Sequence[str]], sides: str = "lr") -> None:
    """Print a title and the table below it on stdout."""
    show(title)
    if rows:
        show("\n".join(aligned(rows, sides)))


def histogram_lines(counts: Sequence[int], ends: Sequence[float], width: int, rows: int = 16) -> list[str]:
    """Bars of how many there are up to each length.

    Args:
        counts: of each bin.
        ends: where each bin ends.
        width: columns of the terminal.
        rows: most bars.
    """
    each = -(-len(counts) // rows)
    grouped = np.add.reduceat(counts, np.arange(0, len(counts), each))
    grouped = grouped[: int(np.flatnonzero(grouped).max(initial=0)) + 1]
    most = int(grouped.max())
    room = max(width - len(f"{ends[-1]:,.0f}{most:,}") - 4, 10)
    lines = []
    for i, count in enumerate(grouped.tolist()):
        bar = "█" * max(round(room * count / most), 1) + " " if count else ""
        lines.append((f"{ends[min((i + 1) * each, len(ends)) - 1]:,.0f}", f"{bar}{count:,}"))
    return aligned(lines, "rl")


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
