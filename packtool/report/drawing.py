"""Drawings of a page as SVG text; sizes are in the drawing's own units and scale with the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH = 900
_COLOURS = 5


@dataclass(frozen=True)
class Histogram:
    """Counts between edges.

    Args:
        edges: B + 1, rising.
        counts: B.
    """

    edges: Sequence[float]
    counts: Sequence[int]


def histogram_svg(
    histogram: Histogram, what: str, unit: str, marks: Sequence[tuple[float, str]] = (), height: int = 220
) -> str:
    """Bars of a histogram over a labelled axis.

    Args:
        what: that is counted.
        unit: of the edges.
        marks: (place on the axis, name) of vertical lines.
    """
    low, high = histogram.edges[0], histogram.edges[-1]
    span = (high - low) or 1
    most = max(histogram.counts, default=0) or 1
    base, top = height - 34, 14

    def x(value: float) -> float:
        return 10 + (value - low) / span * (_WIDTH - 20)

    bars = []
    for count, start, stop in zip(histogram.counts, histogram.edges, histogram.edges[1:], strict=False):
        if count:
            tall = max((base - top) * count / most, 1.5)
            hint = f"{_short(start)} to {_short(stop)} {unit}: {count:,} {what}"
            place = f'x="{x(start):.1f}" y="{base - tall:.1f}"'
            size = f'width="{max(x(stop) - x(start) - 1, 1):.1f}" height="{tall:.1f}"'
            bars.append(f'<rect class="bar" {place} {size} rx="1.5"><title>{escape(hint)}</title></rect>')
    ticks = [low + span * i / 5 for i in range(6)]
    labels = "".join(_text(x(tick), base + 18, _short(tick), _anchor(i, 5)) for i, tick in enumerate(ticks))
    lines = "".join(
        f'<line class="mark" x1="{x(place):.1f}" x2="{x(place):.1f}" y1="{top - 8}" y2="{base}"/>'
        + _text(x(place) - 5, top, f"{name} {_short(place)}", "end")
        for place, name in marks
        if low <= place <= high
    )
    axis = f'<line class="axis" x1="10" x2="{_WIDTH - 10}" y1="{base}" y2="{base}"/>'
    peak = _text(12, top, f"up to {most:,} {what}", "start")
    return _svg(height, f"{what} by {unit}", f"{axis}{''.join(bars)}{lines}{labels}{peak}")


def share_bar(counts: Sequence[int]) -> str:
    """Shares of a whole side by side."""
    total = sum(counts) or 1
    parts, at = [], 0.0
    for i, count in enumerate(counts):
        wide = _WIDTH * count / total
        if wide:
            parts.append(f'<rect class="c{min(i, 5)}" x="{at:.1f}" y="0" width="{max(wide, 2):.1f}" height="18"/>')
        at += wide
    return _svg(22, "shares of the rows", "".join(parts))


def packs_svg(rows: Sequence[Sequence[int]], capacity: int, padded: bool = False) -> str:
    """Rows of samples to scale.

    Args:
        rows: lengths of each row's samples.
        capacity: tokens that the full width stands for.
        padded: what a row leaves free is hatched: it is computed in vain.
    """
    tall, gap = 15, 4
    parts = [_HATCH] if padded else []
    for number, row in enumerate(rows):
        y = number * (tall + gap)
        at = 0.0
        for i, length in enumerate(row):
            wide = _WIDTH * length / capacity
            hint = f"sample of {length:,} tokens"
            colour = number % _COLOURS if padded else i % _COLOURS
            place = f'x="{at:.2f}" y="{y}" width="{max(wide - 0.8, 0.4):.2f}" height="{tall}" rx="2"'
            parts.append(f'<rect class="c{colour}" {place}><title>{hint}</title></rect>')
            at += wide
        if _WIDTH - at > 1:
            hint = f"{round(capacity * (_WIDTH - at) / _WIDTH):,} tokens {'of padding' if padded else 'free'}"
            fill = 'fill="url(#hatch)"' if padded else 'class="room"'
            place = f'x="{at:.2f}" y="{y + 0.5}" width="{_WIDTH - at - 0.5:.2f}" height="{tall - 1}" rx="2"'
            parts.append(f"<rect {fill} {place}><title>{hint}</title></rect>")
    return _svg(len(rows) * (tall + gap), "samples to scale", "".join(parts))


def steps_svg(before: Sequence[float], after: Sequence[float], height: int = 200) -> str:
    """Imbalance of each step, before and after."""
    count = max(len(before), len(after), 1)
    worst = max([1.05, *before, *after])
    base, top = height - 28, 12

    def dots(values: Sequence[float], kind: str, radius: float) -> str:
        return "".join(
            f'<circle class="{kind}" cx="{12 + (i + 0.5) / count * (_WIDTH - 24):.1f}" '
            f'cy="{base - (value - 1) / (worst - 1) * (base - top):.1f}" r="{radius}">'
            f"<title>step {i}: {value:.3f}</title></circle>"
            for i, value in enumerate(values)
        )

    axis = f'<line class="axis" x1="10" x2="{_WIDTH - 10}" y1="{base}" y2="{base}"/>'
    labels = _text(12, base + 18, "1.00 (even)", "start") + _text(12, top + 2, f"{worst:.2f}", "start")
    end = _text(_WIDTH - 12, base + 18, f"{count} steps", "end")
    drawn = f"{dots(before, 'before', 3)}{dots(after, 'after', 2.6)}"
    return _svg(height, "imbalance by step", f"{axis}{labels}{end}{drawn}")


_HATCH = (
    '<defs><pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<line class="waste" x1="0" y1="0" x2="0" y2="7" stroke-width="2.4"/></pattern></defs>'
)


def _svg(height: float, label: str, body: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(label)}" '
        f'xmlns="http://www.w3.org/2000/svg">{body}</svg>'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _anchor(i: int, last: int) -> str:
    return "start" if i == 0 else "end" if i == last else "middle"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"
