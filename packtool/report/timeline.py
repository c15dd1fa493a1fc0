"""Drawings of simulated steps: what every GPU does when, as bars, and what all their time goes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from packtool.report.markup import escape
from packtool.simulate.cost import Timing

_WIDTH = 1000
_LINE, _GAP = 11, 3  # CSS pixels of a GPU's line, and below it
_MOST_LINES = 32
_FIRST = 16  # lines of the first GPUs where not all can be drawn

KINDS = {
    "local": "local sequences",
    "sharded": "sharded sequences",
    "communication": "communication in the open",
    "launching": "launching kernels",
    "synchronisation": "gradients and weights",
    "waiting": "waiting for others",
}
"""What a GPU's time goes to, and how a legend calls it."""

STYLE = """
.k-local{fill:var(--c0);background:var(--c0)}.k-sharded{fill:var(--c2);background:var(--c2)}
.k-communication{fill:var(--c1);background:var(--c1)}.k-launching{fill:var(--c4);background:var(--c4)}
.k-synchronisation{fill:var(--c3);background:var(--c3)}.k-waiting{fill:var(--wait);background:var(--wait)}
.timeline{display:grid;grid-template-columns:auto minmax(0,1fr);gap:0 .7rem;font-size:.68rem;color:var(--soft);
font-variant-numeric:tabular-nums}
.gpus{display:grid;gap:3px;text-align:right;white-space:nowrap;line-height:11px}
.gpus span{height:11px}
.times-below{grid-column:2;display:flex;justify-content:space-between;margin-top:.35rem;font-size:.76rem}
.compare{display:grid;grid-template-columns:max-content minmax(0,1fr) max-content;gap:.5rem .9rem;align-items:center;
margin:.6rem 0 .3rem;font-size:.92rem;font-variant-numeric:tabular-nums}
.compare>div{display:contents}
.compare .bars{display:flex;height:22px;min-width:0}
.compare .bars i{display:block;height:100%}
.compare .full{opacity:.5}
.compare b{font-weight:650;font-size:.92rem;color:var(--ink);margin-left:.4rem}
.compare .said{color:var(--soft);font-size:.82rem;text-align:right}
.legend .dot{border-radius:2px}
.wide{overflow-x:auto}
.wide th{font-weight:600;text-align:right;padding:.3rem 0 .3rem 1.1rem;white-space:nowrap;color:var(--soft)}
.wide th:first-child{text-align:left;padding-left:0}
.wide td:first-child{white-space:nowrap;padding-left:0;text-indent:0}
.wide td+td{padding-left:1.1rem}
@media screen and (max-width:760px){
.compare{display:block}
.compare>div{display:grid;grid-template-columns:minmax(0,1fr) max-content;gap:.15rem .7rem;margin-bottom:.7rem}
.compare .bars{grid-column:1/3;grid-row:2}
}
"""


@dataclass(frozen=True)
class Piece:
    """A stretch of a GPU's step.

    Args:
        kind: one of ``KINDS``.
        start, seconds: within the step.
    """

    kind: str
    start: float
    seconds: float


@dataclass(frozen=True)
class GpuLine:
    """One GPU's step: a name and its pieces in their order, which fill the step."""

    name: str
    pieces: Sequence[Piece]


def lines_of(timing: Timing, step: int) -> list[GpuLine]:
    """Every GPU of a step, or the first ones, the slowest and the fastest."""
    num_sharing = timing.schedule.num_sharing
    world_size = timing.schedule.num_groups * num_sharing
    shown = {gpu: f"GPU {gpu}" for gpu in range(world_size if world_size <= _MOST_LINES else _FIRST)}
    if world_size > _MOST_LINES:
        busy = timing.busy[step]
        groups = timing.group_seconds[step]
        for word, group, pick in (
            ("slowest", int(groups.argmax()), np.argmax),
            ("fastest", int(groups.argmin()), np.argmin),
        ):
            gpu = group * num_sharing + int(pick(busy[group * num_sharing : (group + 1) * num_sharing]))
            shown[gpu] = f"GPU {gpu:,}, {word}"
    return [GpuLine(name, _pieces(timing, step, *divmod(gpu, num_sharing))) for gpu, name in shown.items()]


def _pieces(timing: Timing, step: int, group: int, rank: int) -> list[Piece]:
    plan = timing.schedule
    done = float(timing.group_seconds[step].max())
    found: list[Piece] = []
    at = 0.0
    for cell in np.flatnonzero((plan.cell_steps == step) & (plan.cell_groups == group)):
        together = float(timing.ranks[cell].max())
        parts = (
            ("local", timing.local[cell, rank]),
            ("communication", timing.exposed[cell, rank]),
            ("sharded", timing.sharded[cell, rank]),
            ("launching", timing.launching[cell, rank]),
            ("waiting", together - timing.ranks[cell, rank]),
        )
        start = at
        for kind, seconds in parts:
            if seconds > 1e-9:
                found.append(Piece(kind, start, float(seconds)))
                start += float(seconds)
        at += together
    if done > at:
        found.append(Piece("waiting", at, done - at))
    if timing.synchronisation:
        found.append(Piece("synchronisation", done, timing.synchronisation))
    return found


def timeline_html(lines: Sequence[GpuLine], seconds: float) -> str:
    """GPUs below one another over the seconds of their step; pieces of a kind are one path, which is drawn fast."""
    paths: dict[str, list[str]] = {}
    for number, line in enumerate(lines):
        y = number * (_LINE + _GAP)
        for piece in line.pieces:
            x, wide = piece.start / seconds * _WIDTH, piece.seconds / seconds * _WIDTH
            paths.setdefault(piece.kind, []).append(f"M{x:.2f} {y}h{wide:.2f}v{_LINE}H{x:.2f}z")
    height = max(len(lines), 1) * (_LINE + _GAP) - _GAP
    body = "".join(f'<path class="k-{kind}" d="{"".join(path)}"/>' for kind, path in paths.items())
    names = "".join(f"<span>{escape(line.name)}</span>" for line in lines)
    ticks = "".join(f"<span>{duration(seconds * part / 4)}</span>" for part in range(5))
    return (
        f'<div class="timeline"><div class="gpus">{names}</div>'
        f'<svg viewBox="0 0 {_WIDTH} {height}" preserveAspectRatio="none" role="img" style="height:{height}px" '
        f'aria-label="what each GPU does during the step" xmlns="http://www.w3.org/2000/svg">{body}</svg>'
        f'<div class="times-below">{ticks}</div></div>'
    )


def legend_html(kinds: Sequence[str]) -> str:
    """The colours of these kinds, in the order of ``KINDS``."""
    shown = [kind for kind in KINDS if kind in kinds]
    return "".join(f"<p class=legend><span class='dot k-{kind}'></span>{KINDS[kind]}</p>" for kind in shown)


def compare_html(rows: Sequence[tuple[str, float, Mapping[str, float], str, str, bool]]) -> str:
    """Bars below one another.

    Args:
        rows: (name, length from 0 to 1, shares of the kinds, figure, remark, whether it would run out of memory).
    """
    found = []
    for name, length, shares, figure, remark, is_full in rows:
        parts = "".join(
            f'<i class="k-{kind}" style="width:{length * shares[kind]:.3%}" title="{said}: {shares[kind]:.1%}"></i>'
            for kind, said in KINDS.items()
            if shares.get(kind, 0) > 0
        )
        found.append(
            f"<div><span>{escape(name)}</span><span class='bars{' full' * is_full}'>{parts}</span>"
            f"<span class=said>{escape(remark)} <b>{escape(figure)}</b></span></div>"
        )
    return f'<div class="compare">{"".join(found)}</div>'


def duration(seconds: float) -> str:
    """``0``, ``36.3 ms``, ``1.16 s``, ``12.3 s``: three digits."""
    if seconds == 0:
        return "0"
    if seconds < 1:
        milliseconds = seconds * 1000
        return f"{milliseconds:.{max(0, 2 - int(np.floor(np.log10(milliseconds))))}f} ms"
    return f"{seconds:.{max(0, 2 - int(np.floor(np.log10(seconds))))}f} s"
