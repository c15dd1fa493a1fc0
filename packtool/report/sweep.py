"""``packtool plan --sweep``: several packing lengths beside each other, as lines of a terminal and as a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from packtool.report.markup import escape
from packtool.report.page import command_line, document, headline, section

Figures = Sequence[Mapping[str, Any]]


def _share(value: float) -> str:
    return f"{value:.2%}"


def _number(value: float) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


_COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("capacity", "packing length", _number),
    ("packs", "packs", _number),
    ("samples_per_pack", "samples a pack", _number),
    ("fill", "fill", _share),
    ("over_lower_bound", "over lower bound", _share),
    ("steps_per_epoch", "steps an epoch", _number),
    ("filtered", "too long", _number),
)

_STYLE = """
.bars{display:grid;grid-template-columns:max-content minmax(0,1fr) max-content;gap:.45rem .9rem;align-items:center;
font-size:.92rem;font-variant-numeric:tabular-nums}
.bars span{text-align:right}
.bars i{display:block;height:16px;background:var(--accent)}
.wide{overflow-x:auto}
.wide th{font-weight:600;text-align:right;padding:.3rem 0 .3rem 1.1rem;white-space:nowrap;color:var(--soft)}
.wide th:first-child{text-align:left;padding-left:0}
.wide td:first-child{white-space:nowrap;padding-left:0;text-indent:0}
.wide td+td{padding-left:1.1rem}
"""


def sweep_cells(rows: Figures) -> list[tuple[str, ...]]:
    """Header and a line for each packing length."""
    header = tuple(title for _, title, _ in _COLUMNS)
    return [header, *(tuple(shown(row[name]) for name, _, shown in _COLUMNS) for row in rows)]


def sweep_lines(rows: Figures) -> list[str]:
    """What ``packtool plan --sweep`` prints: columns as wide as they need to be."""
    cells = sweep_cells(rows)
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]


def sweep_page(rows: Figures, title: str, command: str) -> str:
    """The page of a sweep as text."""
    best = max(rows, key=lambda row: row["fill"])
    header, *lines = sweep_cells(rows)
    table = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    fewest, most = (pick(row["steps_per_epoch"] for row in rows) for pick in (min, max))
    least, largest = (pick(row["capacity"] for row in rows) for pick in (min, max))
    body = [
        headline(
            [
                (f"{len(rows)}", "packing lengths", f"{least:,} to {largest:,} tokens"),
                (_share(best["fill"]), "is the best fill", f"at {best['capacity']:,} tokens"),
                (f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}", "steps an epoch", ""),
                (f"{rows[0]['samples'] + rows[0]['filtered']:,}", "samples", "before those that are too long"),
            ]
        ),
        section("Beside each other", f"<div class=wide><table><tr>{head}</tr>{table}</table></div>"),
        section("Fill by packing length", _bars(rows, "fill", _share, 1.0), "Part of the packs that is used."),
        section("Steps an epoch by packing length", _bars(rows, "steps_per_epoch", _number, most)),
        section("How to get here again", command_line("This page was made by", command)),
    ]
    return document(title, "packtool plan --sweep", "".join(body), _STYLE)


def _bars(rows: Figures, name: str, shown: Callable[[float], str], whole: float) -> str:
    """Bars to one scale, which ends at ``whole``."""
    found = "".join(
        f"<span>{row['capacity']:,}</span><i style='width:{row[name] / (whole or 1):.3%}'></i>"
        f"<span>{escape(shown(row[name]))}</span>"
        for row in rows
    )
    return f"<div class=bars>{found}</div>"
