"""One self-contained HTML page of a plan: no script, no font, no picture from elsewhere; it opens from a file.

Everything is drawn by hand and coloured by CSS variables, which follow the reader's light or dark setting. A printed
page is light.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from packtool import __version__
from packtool.report.drawing import (
    Histogram,
    Stretch,
    histogram_svg,
    num_lines,
    packs_svg,
    share_bar,
    steps_svg,
    stretches_svg,
)
from packtool.report.markup import breakable, escape

_COLOURS = 5
_MOST_LINES = 80


@dataclass(frozen=True)
class PlainFigures:
    """What packing is compared with: batches of rows, each padded to the longest of its batch.

    Args:
        rows: of a batch.
        padding: share of the epoch's tokens, as text.
        times: as many tokens to compute in an epoch, as text.
        is_worth_telling: whether ``times`` is large enough to be a headline.
    """

    rows: int
    padding: str
    times: str
    is_worth_telling: bool


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
        plain: batches without packing that the plan is compared with, or None.
        balance: (before, after) max/mean work of steps in their order, or None.
        processes_per_rank: that share a sequence.
        figures: (what, value), for the table at the end; long hexadecimal values are fingerprints.
        commands: that lead to and from here.
    """

    title: str
    headline: Sequence[tuple[str, str, str]]
    rows: Sequence[tuple[str, int]]
    lengths: Histogram
    capacity: int
    fills: Histogram
    packs: Sequence[Sequence[int]]
    balance: tuple[Sequence[float], Sequence[float]] | None
    figures: Sequence[tuple[str, str]]
    commands: Sequence[tuple[str, str]]
    plain: PlainFigures | None = None
    processes_per_rank: int = 1


def page(content: PageContent) -> str:
    """The page as text."""
    fingerprints = [(what, value) for what, value in content.figures if _FINGERPRINT.fullmatch(value)]
    figures = [figure for figure in content.figures if figure not in fingerprints]
    sections = [
        section("What became of the rows", _rows(content.rows)) if content.rows else "",
        _lengths_and_fills(content),
        _packs(content) if content.packs else "",
        _balance(content.balance, content.processes_per_rank) if content.balance else "",
        section("All figures", figure_list(figures)) if figures else "",
        section(
            "How to get here again",
            "".join(command_line(what, line) for what, line in content.commands)
            + "".join(command_line(f"Fingerprint of the {what}", value) for what, value in fingerprints),
            "The same inputs, options and seed give the same plan, and the same plan has the same fingerprint.",
        ),
    ]
    return document(content.title, "packtool plan", f"{headline(content.headline)}\n{''.join(sections)}")


def document(title: str, tool: str, body: str, style: str = "") -> str:
    """A page around its body.

    Args:
        title: plain text.
        tool: the command that made it.
        body, style: HTML, and CSS besides that of every page.
    """
    return (
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)} · {tool}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<style>{_STYLE}{style}</style></head>\n<body><main>"
        f"<header><p class=tool>{_SIGN}{tool}</p><h1>{breakable(title)}</h1></header>\n"
        f"{body}<footer>packtool {escape(__version__)}. This page needs nothing but itself.</footer>"
        "</main></body></html>\n"
    )


def headline(figures: Sequence[tuple[str, str, str]]) -> str:
    """Large figures on cards: (number, what it counts, remark)."""
    cards = "".join(
        f"<div class=card><p class='number{' long' * (len(number) > 8)}'>{escape(number)}</p>"
        f"<p class=what>{escape(what)}</p><p class=remark>{escape(remark)}</p></div>"
        for number, what, remark in figures
    )
    return f"<div class=cards>{cards}</div>"


def section(title: str, body: str, note: str = "") -> str:
    """A panel of HTML under a heading; heading and note are plain text."""
    said = f"<p class=note>{escape(note)}</p>" if note else ""
    return f"<section><h2>{escape(title)}</h2>{said}{body}</section>\n"


def _rows(rows: Sequence[tuple[str, int]]) -> str:
    total = sum(count for _, count in rows) or 1
    lines = "".join(
        f"<tr><td><span class='dot c{min(i, _COLOURS)}'></span>{breakable(name)}</td><td>{count:,}</td>"
        f"<td>{_percent(count / total)}</td></tr>"
        for i, (name, count) in enumerate(rows)
    )
    return f"{share_bar([count for _, count in rows])}<table class=rows>{lines}</table>"


def _lengths_and_fills(content: PageContent) -> str:
    """Side by side where there is room. Without packing, fill is length told twice: it is left out."""
    marks = ((float(content.capacity), f"pack: {content.capacity:,}"),) if _shares_packs(content) else ()
    lengths = section(
        "Sample lengths",
        histogram_svg(content.lengths, "samples", "tokens of a sample", marks=marks),
        "How many samples have how many tokens.",
    )
    if not _shares_packs(content):
        return lengths
    fills = section(
        "Fill of the packs",
        histogram_svg(content.fills, "packs", "part of a pack that is used", suffix="%"),
        "How many packs are how full.",
    )
    return f"<div class=pair>{lengths}{fills}</div>"


def _shares_packs(content: PageContent) -> bool:
    """Whether any two samples share a pack."""
    return sum(content.lengths.counts) > sum(content.fills.counts)


def _packs(content: PageContent) -> str:
    num, room = len(content.packs), f"{content.capacity:,} tokens"
    drawn = packs_svg(content.packs, content.capacity)
    if not _shares_packs(content):
        note = f"Each bar is a sample; the full width is {room}. No two share a pack."
        return section(f"{num} {_plural(num, 'sample')} to scale", drawn, note)
    plain = content.plain
    if plain is None:
        return section(f"{num} {_plural(num, 'pack')} to scale", drawn, f"A line is {room}.")
    stretches = plain_batches(content.packs, plain.rows)
    num_samples = sum(map(len, content.packs))
    lines = num_lines(stretches, content.capacity)
    more = f"<p class=note>and {lines - _MOST_LINES:,} more</p>" if lines > _MOST_LINES else ""
    times = f"<span class=number>{escape(plain.times)}</span> as many tokens to compute without packing"
    return section(
        f"{num} {_plural(num, 'pack')} to scale, and the same samples without packing",
        f"<div class=sides><div><h3>Packed: {num} {_plural(num, 'line')}</h3>{drawn}"
        f"<p class=note>{num_samples:,} {_plural(num_samples, 'sample')}, each attended to by itself.</p>"
        f"{f'<p class=times>{times}</p>' * plain.is_worth_telling}</div>"
        f"<div><h3>In plain batches of {plain.rows:,} {_plural(plain.rows, 'row')}: "
        f"{lines:,} {_plural(lines, 'line')}</h3>"
        f"{stretches_svg(stretches, content.capacity, _MOST_LINES)}{more}"
        f"<p class=note><span class='dot hatched'></span>Padding: every sample is filled up to the length of its "
        f"batch's longest. In the whole epoch {escape(plain.padding)} of the tokens would be padding.</p></div></div>",
        f"A line is {room}. Each piece of colour is one sample, and has the same length on both sides.",
    )


def plain_batches(packs: Sequence[Sequence[int]], each: int) -> list[Stretch]:
    """The samples of packs, shuffled, in batches that are padded to their longest: what training without packing does.

    Args:
        packs: sample lengths, in tokens.
        each: samples of a batch.

    Returns:
        samples, with padding behind each that is shorter than its batch's longest. Colours are those of ``packs_svg``.
    """
    samples = [Stretch(length, i % _COLOURS) for pack in packs for i, length in enumerate(pack)]
    random.Random(0).shuffle(samples)  # companions in a pack are often alike, in a plain batch they are not
    found = []
    for start in range(0, len(samples), each):
        batch = samples[start : start + each]
        longest = max(sample.tokens for sample in batch)
        for sample in batch:
            found.append(sample)
            if sample.tokens < longest:
                found.append(Stretch(longest - sample.tokens, None))
    return found


def _balance(balance: tuple[Sequence[float], Sequence[float]], processes_per_rank: int) -> str:
    before, after = balance
    alike = list(before) == list(after)
    legend = "<p class=legend><span class='dot hollow'></span>packs dealt in turn, like cards</p>" * (not alike)
    legend += "<p class=legend><span class='dot c0'></span>as planned</p>"
    note = "The slowest rank's work over the mean rank's. At 1 nobody waits for anybody."
    if processes_per_rank > 1:
        note += f" A rank here is {processes_per_rank} processes that share their sequences."
    return section("Balance of the ranks, step by step", f"{legend}{steps_svg(before, after)}", note)


def figure_list(figures: Sequence[tuple[str, str]]) -> str:
    """A list in two columns where there is room; an indented line belongs to the one before it."""
    lines = "".join(
        f"<div{' class=sub' * what.startswith(' ')}><dt>{breakable(what.strip())}</dt><dd>{breakable(value)}</dd></div>"
        for what, value in figures
    )
    return f"<dl>{lines}</dl>"


def command_line(what: str, line: str) -> str:
    """A line that wraps between words: an option is not torn at its hyphens."""
    words = " ".join(f"<span>{escape(word)}</span>" for word in line.split(" "))
    return f"<h3>{escape(what)}</h3><pre>{words}</pre>"


def _percent(share: float, digits: int = 2) -> str:
    """Never 0 % or 100 % of what is neither."""
    least = 10.0 ** -(digits + 2)
    if 0 < share < least:
        return f"< {least:.{digits}%}"
    return f"> {1 - least:.{digits}%}" if 1 - least < share < 1 else f"{share:.{digits}%}"


def _plural(count: int, noun: str) -> str:
    return noun if count == 1 else f"{noun}s"


_FINGERPRINT = re.compile("[0-9a-f]{12,}")

_SIGN = (
    '<svg class="sign" viewBox="0 0 24 24" aria-hidden="true" xmlns="http://www.w3.org/2000/svg">'
    '<path class="c0" d="M2 3h11v5H2z"/><path class="c1" d="M14 3h8v5h-8z"/><path class="c2" d="M2 9.5h6v5H2z"/>'
    '<path class="c0" d="M9 9.5h13v5H9z"/>'
    '<path class="c3" d="M2 16h9v5H2z"/><path class="c4" d="M12 16h10v5H12z"/></svg>'
)

_LIGHT = """--back:#f6f5f1;--panel:#fff;--ink:#1b2126;--soft:#5b6670;--line:#e3e1da;--axis:#a9aeb2;--accent:#0f766e;
--wait:#d3d6d8;--waste:#c98f2b;--c0:#0f766e;--c1:#d0743c;--c2:#5569b8;--c3:#b0497a;--c4:#84943a;--c5:#8a8f98"""
_DARK = """--back:#101417;--panel:#191f23;--ink:#e8ecee;--soft:#a3aeb6;--line:#2b343a;--axis:#5b676f;--accent:#4cc2b5;
--wait:#46525a;--waste:#c0923a;--c0:#3fb0a4;--c1:#dd8d58;--c2:#8195dc;--c3:#cf6f9a;--c4:#a3b658;--c5:#8a939b"""

_STYLE = (
    f":root{{color-scheme:light dark;{_LIGHT}}}\n"
    f"@media screen and (prefers-color-scheme:dark){{:root{{{_DARK}}}}}\n"
    """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;text-size-adjust:100%;-webkit-print-color-adjust:exact;print-color-adjust:exact}
body{margin:0;background:var(--back);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1080px;margin:0 auto;padding:2.5rem 1.5rem 2rem}
header{margin-bottom:1.5rem}
h1{font-size:1.9rem;line-height:1.2;margin:.3rem 0 0;font-weight:650;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:1.1rem;line-height:1.35;margin:0 0 .15rem;font-weight:650}
h3{font-size:.9rem;margin:.9rem 0 .4rem;font-weight:600;font-variant-numeric:tabular-nums}
.tool{display:flex;align-items:center;gap:.5rem;margin:0;color:var(--accent);font-weight:650}
.sign{width:1.25rem;height:1.25rem}
.cards{display:grid;grid-template-columns:repeat(4,minmax(0,1fr));gap:.9rem}
.card,section{background:var(--panel);border:1px solid var(--line);border-radius:12px;min-width:0}
.card{padding:1rem 1.1rem}
.card p{margin:0}
.number{font-size:2rem;font-weight:680;line-height:1.15;letter-spacing:-.02em;font-variant-numeric:tabular-nums}
.card:first-child .number{color:var(--accent)}
.what{font-weight:600}
.remark,.note,.legend{color:var(--soft);font-size:.88rem;line-height:1.45;font-variant-numeric:tabular-nums}
.note{margin:0 0 .8rem;max-width:46rem}
svg~.note{margin:.6rem 0 0}
section{padding:1.2rem 1.3rem 1.3rem;margin-top:.9rem}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:0 .9rem}
.sides{display:grid;grid-template-columns:1fr 1fr;gap:0 1.8rem;align-items:start}
.sides>div{min-width:0}
.sides h3{margin-top:0}
footer{margin-top:1.2rem;color:var(--soft);font-size:.82rem;text-align:center}
svg{display:block;width:100%;overflow:visible}
svg *{vector-effect:non-scaling-stroke}
.share{height:20px;margin:.7rem 0 .5rem}
.c0{background:var(--c0);fill:var(--c0)}.c1{background:var(--c1);fill:var(--c1)}.c2{background:var(--c2);fill:var(--c2)}
.c3{background:var(--c3);fill:var(--c3)}.c4{background:var(--c4);fill:var(--c4)}.c5{background:var(--c5);fill:var(--c5)}
.s{stroke:var(--panel);stroke-width:1px}
.room{fill:none;stroke:var(--axis);stroke-width:1px}
.waste{fill:transparent}
.padded,.hatched{background:repeating-linear-gradient(135deg,var(--waste) 0 1.2px,transparent 1.2px 5px)}
.between{fill:var(--panel)}
.packed .between{fill:none}
.chart{padding:0 1.1rem 0 var(--gutter);font-size:.78rem;color:var(--soft);font-variant-numeric:tabular-nums}
.plot{position:relative;height:190px}
.plot span{position:absolute;line-height:1;white-space:nowrap}
.drawn{height:100%}
.y{right:calc(100% + .5rem);transform:translateY(50%)}
.x{top:calc(100% + .45rem);transform:translateX(-50%)}
.at{top:0;padding:0 .4rem;color:var(--ink)}
.before{transform:translateX(-100%)}
.chart .name{margin:0 0 .55rem calc(0px - var(--gutter))}
.chart .name.below{margin:1.7rem 0 0;text-align:center}
.bar{fill:var(--accent);stroke:var(--panel);stroke-width:1px}
.grid{stroke:var(--line);stroke-width:1px}
.axis{stroke:var(--axis);stroke-width:1px}
.mark{stroke:var(--ink);stroke-width:1.2px;stroke-dasharray:4 3}
.dot-before,.dot-after{fill:none;stroke-linecap:round}
.dot-before{stroke:var(--c1);stroke-width:5px;opacity:.75}
.dot-after{stroke:var(--c0);stroke-width:5px}
.legend{display:inline-block;margin:0 1.2rem .6rem 0}
.dot{display:inline-block;width:.7em;height:.7em;border-radius:50%;margin-right:.5em}
.hollow{background:var(--c1);opacity:.75}
.hatched{border-radius:2px;width:1.6em}
.times{display:flex;align-items:center;gap:.9rem;max-width:22rem;margin:1.4rem 0 0;font-weight:600;line-height:1.35}
.times .number{font-size:2.6rem;color:var(--accent)}
table{border-collapse:collapse;width:100%;font-size:.92rem;font-variant-numeric:tabular-nums}
td{padding:.32rem 0;border-top:1px solid var(--line);vertical-align:top}
td:first-child{padding-left:1.2em;text-indent:-1.2em;overflow-wrap:anywhere}
td+td{padding-left:1.5rem;width:1%;text-align:right;white-space:nowrap}
tr:first-child td{border-top:0}
dl{margin:.4rem 0 0;columns:2 24rem;column-gap:2.5rem;font-size:.92rem;font-variant-numeric:tabular-nums}
dl>div{display:flex;justify-content:space-between;gap:1.2rem;padding:.32rem 0;border-bottom:1px solid var(--line);
break-inside:avoid}
dl>.sub{padding-left:1.1rem;break-before:avoid}
dt{flex:none;max-width:60%;color:var(--soft)}
dd{margin:0;text-align:right;overflow-wrap:anywhere}
pre{margin:0 0 .9rem;padding:.75rem .9rem;border-radius:8px;background:var(--back);border:1px solid var(--line);
white-space:pre-wrap;overflow-wrap:anywhere;user-select:all;-webkit-user-select:all;
font:.82rem/1.6 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
pre span,.word{display:inline-block;max-width:100%}
.word{text-indent:0}
pre:last-child{margin:0}
@media screen and (max-width:760px){
main{padding:1.4rem .8rem 1.5rem}
h1{font-size:1.5rem}
.number{font-size:1.6rem}
.long{font-size:clamp(.9rem,5vw,1.6rem)}
.card{padding:.9rem .85rem}
.cards{grid-template-columns:repeat(2,minmax(0,1fr));gap:.7rem}
.pair,.sides{grid-template-columns:1fr}
.sides>div+div{margin-top:1.2rem}
section{padding:1rem .9rem;margin-top:.7rem}
.plot{height:160px}
}
@media print{
html{font-size:12px;color-scheme:light}
body{background:#fff;font-size:12px}
.plot{height:130px}
main{max-width:none;padding:0}
.card,section{border-color:#ccc;break-inside:avoid}
}
"""
)
