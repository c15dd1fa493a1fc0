"""One self-contained HTML page of a plan: no script, no font, no picture from elsewhere; it opens from a file.

Everything is drawn as SVG by hand and coloured by CSS variables, which follow the reader's light or dark setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from packtool.report.drawing import Histogram, histogram_svg, packs_svg, share_bar, steps_svg


@dataclass(frozen=True)
class PageContent:
    """What a page shows; numbers that are unknown are left out, not drawn as zero.

    Args:
        title: what was planned.
        headline: (number, what it counts, remark) of the large figures.
        rows: (what, how many) of what became of the rows: kept first, then drops by reason.
        lengths: of samples.
        capacity: tokens of a pack.
        fills: of packs, in percent.
        packs: sample lengths of some packs.
        padded: sample lengths of some padded batches of the same samples, for comparison.
        balance: (before, after) max/mean work of each step, or None.
        figures: (what, value), for the table at the end.
        commands: that lead to and from here.
    """

    title: str
    headline: Sequence[tuple[str, str, str]]
    rows: Sequence[tuple[str, int]]
    lengths: Histogram
    capacity: int
    fills: Histogram
    packs: Sequence[Sequence[int]]
    padded: Sequence[Sequence[int]]
    balance: tuple[Sequence[float], Sequence[float]] | None
    figures: Sequence[tuple[str, str]]
    commands: Sequence[tuple[str, str]]


def page(content: PageContent) -> str:
    """The page as text."""
    sections = [
        _section("What became of the rows", _rows(content.rows)) if content.rows else "",
        _section(
            "Sample lengths",
            histogram_svg(content.lengths, "samples", "tokens", marks=((content.capacity, "pack"),)),
            "How many samples have how many tokens.",
        ),
        _section("Fill of the packs", histogram_svg(content.fills, "packs", "% full"), "A full pack wastes nothing."),
        _section(
            f"{len(content.packs)} packs to scale",
            _packs(content),
            "Each bar is one forward pass; each colour in it is one sample, attended to by itself. "
            "Below, as many rows of plain batches: the hatched part is padding, computed and thrown away.",
        ),
        _section(
            "Work of the slowest rank, step by step",
            steps_svg(*content.balance),
            "The slowest rank's work over the mean rank's: at 1 nobody waits. "
            "Hollow: packs dealt like cards; solid: as dealt here.",
        )
        if content.balance
        else "",
        _section("All figures", _table(content.figures)),
        _section("Commands", "".join(_command(what, line) for what, line in content.commands)),
    ]
    return (
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(content.title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<style>{_STYLE}</style></head>\n<body><main>"
        f"<header><p class=tool>packtool plan</p><h1>{escape(content.title)}</h1></header>"
        f"{_headline(content.headline)}{''.join(sections)}"
        "</main></body></html>\n"
    )


def _headline(figures: Sequence[tuple[str, str, str]]) -> str:
    cards = "".join(
        f"<div class=card><p class=number>{escape(number)}</p><p class=what>{escape(what)}</p>"
        f"<p class=remark>{escape(remark)}</p></div>"
        for number, what, remark in figures
    )
    return f"<div class=cards>{cards}</div>"


def _section(title: str, body: str, note: str = "") -> str:
    said = f"<p class=note>{escape(note)}</p>" if note else ""
    return f"<section><h2>{escape(title)}</h2>{said}{body}</section>\n"


def _rows(rows: Sequence[tuple[str, int]]) -> str:
    total = sum(count for _, count in rows)
    lines = "".join(
        f"<tr><td><span class='dot c{min(i, 5)}'></span>{escape(name)}</td><td>{count:,}</td>"
        f"<td>{count / total:.2%}</td></tr>"
        for i, (name, count) in enumerate(rows)
    )
    return f"{share_bar([count for _, count in rows])}<table>{lines}</table>"


def _packs(content: PageContent) -> str:
    longest = max((length for row in content.padded for length in row), default=1)
    return (
        f"<h3>Packed</h3>{packs_svg(content.packs, content.capacity)}"
        f"<h3>Plain batches, padded to the longest row</h3>{packs_svg(content.padded, max(longest, 1), padded=True)}"
    )


def _table(figures: Sequence[tuple[str, str]]) -> str:
    lines = "".join(f"<tr><td>{escape(what)}</td><td>{escape(value)}</td></tr>" for what, value in figures)
    return f"<div class=wide><table>{lines}</table></div>"


def _command(what: str, line: str) -> str:
    return f"<p class=note>{escape(what)}</p><pre>{escape(line)}</pre>"


_STYLE = """
:root{--back:#fbfaf7;--panel:#fff;--ink:#1d2328;--soft:#626d77;--line:#e2e0d9;--accent:#0f766e;--waste:#d9a441;
--c0:#0f766e;--c1:#c2703d;--c2:#5b6fb5;--c3:#a8476f;--c4:#7a8b3a;--c5:#8a8f98}
@media(prefers-color-scheme:dark){:root{--back:#14181b;--panel:#1c2226;--ink:#e7eaec;--soft:#98a4ad;--line:#2d353b;
--accent:#45b8ac;--waste:#b98a2f;--c0:#45b8ac;--c1:#e0905c;--c2:#8b9fe0;--c3:#d678a0;--c4:#a9bd5f;--c5:#8a939b}}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:960px;margin:0 auto;padding:2.5rem 1.25rem 4rem}
header{margin-bottom:1.5rem}
h1{font-size:1.7rem;line-height:1.25;margin:.1rem 0;font-weight:650;overflow-wrap:anywhere}
h2{font-size:1.12rem;margin:0 0 .2rem;font-weight:650}
h3{font-size:.85rem;margin:1rem 0 .3rem;color:var(--soft);font-weight:600}
.tool{margin:0;color:var(--accent);font-weight:650;letter-spacing:.02em}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:.75rem;margin-bottom:.75rem}
.card,section{background:var(--panel);border:1px solid var(--line);border-radius:12px}
.card{padding:.9rem 1rem}
.card p{margin:0}
.number{font-size:1.6rem;font-weight:680;line-height:1.2;font-variant-numeric:tabular-nums}
.what{font-weight:550}
.remark,.note{color:var(--soft);font-size:.87rem}
.note{margin:0 0 .7rem}
section{padding:1.1rem 1.2rem 1.2rem;margin-top:.75rem}
svg{display:block;width:100%;height:auto}
svg text{fill:var(--soft);font:12px system-ui,sans-serif;font-variant-numeric:tabular-nums}
table{border-collapse:collapse;width:100%;font-size:.92rem;font-variant-numeric:tabular-nums}
td{padding:.28rem .2rem;border-top:1px solid var(--line);overflow-wrap:anywhere}
tr:first-child td{border-top:0}
td:not(:first-child){text-align:right}
.wide{overflow-x:auto}
.dot{display:inline-block;width:.7em;height:.7em;border-radius:50%;margin-right:.5em}
pre{margin:0 0 .9rem;padding:.7rem .9rem;overflow-x:auto;border-radius:8px;background:var(--back);
border:1px solid var(--line);font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,monospace}
.c0{background:var(--c0);fill:var(--c0)}.c1{background:var(--c1);fill:var(--c1)}.c2{background:var(--c2);fill:var(--c2)}
.c3{background:var(--c3);fill:var(--c3)}.c4{background:var(--c4);fill:var(--c4)}.c5{background:var(--c5);fill:var(--c5)}
.bar{fill:var(--accent)}.axis{stroke:var(--line)}.mark{stroke:var(--waste);stroke-dasharray:4 3}
.room{fill:none;stroke:var(--line)}.waste{stroke:var(--waste);fill:none}
@media(max-width:600px){svg text{font-size:25px}main{padding:1.5rem .8rem 3rem}section{padding:1rem .8rem}}
.before{fill:none;stroke:var(--c1)}.after{fill:var(--accent)}
"""
