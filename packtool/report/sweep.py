"""``packtool plan --sweep``: several packing lengths beside each other, as lines of a terminal and as a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from packtool.report.markup import render
from packtool.report.statistics import percent
from packtool.report.tables import aligned

Figures = Sequence[Mapping[str, Any]]


def _number(value: float) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


def _shared(figures: Mapping[str, Any] | None) -> str:
    return "none" if figures is None else percent(figures["token_share_saved"])


_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("capacity", "packing length", _number),
    ("packs", "packs", _number),
    ("samples_per_pack", "samples per pack", _number),
    ("fill", "fill", percent),
    ("over_lower_bound", "above lower bound", percent),
    ("steps_per_epoch", "steps per epoch", _number),
    ("filtered", "samples too long", _number),
    ("shared_prefixes", "tokens saved by shared prefixes", _shared),
)


def sweep_cells(rows: Figures) -> list[tuple[str, ...]]:
    """Header and a line for each packing length."""
    header = tuple(title for _, title, _ in _COLUMNS)
    return [header, *(tuple(shown(row[name]) for name, _, shown in _COLUMNS) for row in rows)]


def sweep_lines(rows: Figures) -> list[str]:
    """What ``packtool plan --sweep`` prints."""
    return aligned(sweep_cells(rows), "r")


def sweep_page(rows: Figures, title: str, command: str) -> str:
    """The page of a sweep as text."""
    best = max(rows, key=lambda row: row["fill"])
    header, *cells = sweep_cells(rows)
    fewest, most = (pick(row["steps_per_epoch"] for row in rows) for pick in (min, max))
    least, largest = (pick(row["capacity"] for row in rows) for pick in (min, max))
    cards = [
        (f"{len(rows)}", "packing lengths", f"{least:,} to {largest:,} tokens"),
        (percent(best["fill"]), "is the best fill", f"with packs of {best['capacity']:,} tokens"),
        (f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}", "optimizer steps", "per epoch"),
        (f"{rows[0]['num_samples_in_caches']:,}", "samples", "including those that are left out"),
    ]
    return render(
        "sweep.html",
        title=title,
        command=command,
        cards=cards,
        header=header,
        rows=cells,
        fills=_bars(rows, "fill", percent, 1.0),
        steps=_bars(rows, "steps_per_epoch", _number, most),
    )


def _bars(rows: Figures, name: str, shown: Callable[[float], str], whole: float) -> list[Any]:
    """Bars to one scale, which ends at ``whole``."""
    return [
        (f"{row['capacity']:,}", [("accent", 100 * row[name] / (whole or 1), "")], "", shown(row[name]), False)
        for row in rows
    ]
