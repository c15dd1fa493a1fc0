"""Every table that a terminal shows: columns as wide as they need to be, on lines that are never wrapped.

Lines are searched and copied, and a table that is cut off or wrapped cannot be read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.cells import cell_len

from packtool.visible import show, visible_line

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
