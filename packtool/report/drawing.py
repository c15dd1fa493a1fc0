"""Drawings of a page: shapes as SVG that is stretched to its place, words as HTML above it.

A stretched drawing is as tall on a phone as on a desk and its words keep their size; lines keep their width because
nothing here scales a stroke. Places are in thousandths of a drawing's width and, in charts, of its height.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from packtool.report.markup import escape

_SIZE = 1000
_COLOURS = 5
_LINE, _GAP = 9, 2  # CSS pixels of a line of samples, and below it
_NARROW = 6  # thousandths: samples below have neither a border nor a hint of their own


@dataclass(frozen=True)
class Histogram:
    """Counts between edges.

    Args:
        edges: B + 1, rising.
        counts: B.
    """

    edges: Sequence[float]
    counts: Sequence[int]


@dataclass(frozen=True)
class Stretch:
    """A sample, or the padding behind it.

    Args:
        tokens: that it takes.
        colour: of a sample; None is padding.
    """

    tokens: int
    colour: int | None


def histogram_svg(
    histogram: Histogram, what: str, unit: str, suffix: str = "", marks: Sequence[tuple[float, str]] = ()
) -> str:
    """Bars of a histogram between labelled axes.

    Args:
        what: that is counted.
        unit: of the edges, as the axis names it.
        suffix: of the numbers along the axis.
        marks: (place on the axis, name) of vertical lines; those far beyond the bars are left out.
    """
    low, high = histogram.edges[0], histogram.edges[-1]
    marks = [(place, name) for place, name in marks if low <= place <= low + 1.5 * (high - low)]
    span = (max([high, *(place for place, _ in marks)]) - low) or 1
    heights = _ticks(0, max(histogram.counts, default=0) or 1, 4, whole=True)
    top = heights[-1]
    bars = []
    for count, start, stop in zip(histogram.counts, histogram.edges, histogram.edges[1:], strict=False):
        if count:
            tall = max(_SIZE * count / top, 8)  # one among thousands is seen, too
            hint = f"{_short(start)} to {_short(stop)} {unit}: {count:,} {what}"
            left, right = ((edge - low) / span * _SIZE for edge in (start, stop))
            place = f'x="{left:.1f}" y="{_SIZE - tall:.1f}" width="{right - left:.1f}" height="{tall:.1f}"'
            bars.append(f'<rect class="bar" {place}><title>{escape(hint)}</title></rect>')
    places = [((place - low) / span, name) for place, name in marks]
    lines = "".join(f'<path class="mark" d="M{at * _SIZE:.1f} 0V{_SIZE}"/>' for at, _ in places)
    words = "".join(_word(at, [("", name)]) for at, name in places)
    across = [((tick - low) / span, _label(tick) + suffix) for tick in _ticks(low, low + span, 6, inside=True)]
    up = [(tick / top, _label(tick)) for tick in heights]
    return _chart(f"{what} by {unit}", "".join(bars) + lines, words, across, up, (unit, what))


def steps_svg(before: Sequence[float], after: Sequence[float]) -> str:
    """Imbalance of steps in their order, before (not drawn where it is the same) and after; 1 is even.

    One step far above all others, mostly the last and smallest one, would press the rest flat. It is drawn at the upper
    edge, with its number.
    """
    peaks = [max(pair) for pair in zip(before, after, strict=True)]
    *_, second, highest = [1.0, 1.0, *sorted(peaks)]
    far = len(peaks) > 2 and highest - 1 > 3 * max(second - 1, 0.01)
    heights = _ticks(1, max(second if far else highest, 1.02), 4)
    top = heights[-1]

    def dots(values: Sequence[float], kind: str) -> str:
        # A line of no length has round ends: a dot that no stretching makes an egg.
        points = (
            f"M{(i + 0.5) / len(values) * _SIZE:.1f} {max(top - value, 0) / (top - 1) * _SIZE:.0f}h0"
            for i, value in enumerate(values)
        )
        return f'<path class="{kind}" d="{"".join(points)}"/>'

    drawn = (dots(before, "dot-before") if list(before) != list(after) else "") + dots(after, "dot-after")
    words = ""
    if far:
        place = peaks.index(highest)
        # Which of the two is beyond the edge must be seen: the worst planned step is not the worst dealt like cards.
        beyond = {"hollow": before[place]} if f"{before[place]:.2f}" != f"{after[place]:.2f}" else {}
        beyond["c0"] = after[place]
        dots_and_numbers = [(kind, f"{value:.2f} ↑") for kind, value in beyond.items() if value > top]
        words = _word((place + 0.5) / len(peaks), dots_and_numbers)
    up = [((tick - 1) / (top - 1), f"{tick:.{_digits(heights[1] - 1)}f}") for tick in heights]
    across = [(part / 4, name) for part, name in enumerate(("first", "25%", "50%", "75%", "last"))]
    names = ("steps of the epoch, in order", "slowest rank's work ÷ mean rank's")
    return _chart("imbalance by step", drawn, words, across, up, names)


def share_bar(counts: Sequence[int]) -> str:
    """Shares of a whole side by side; the smallest can still be seen."""
    total = sum(counts) or 1
    wide = [max(_SIZE * count / total, 9) if count else 0.0 for count in counts]
    scale = _SIZE / (sum(wide) or 1)
    parts, at = [], 0.0
    for i, width in enumerate(wide):
        if width:
            place = f'x="{at:.1f}" y="0" width="{width * scale:.1f}" height="1"'
            parts.append(f'<rect class="s c{min(i, _COLOURS)}" {place}/>')
        at += width * scale
    return _svg("share", "shares of the rows", 1, "".join(parts))


def packs_svg(packs: Sequence[Sequence[int]], capacity: int) -> str:
    """Packs below one another to scale; what they leave free is outlined.

    Args:
        packs: lengths of each one's samples.
        capacity: tokens that the full width stands for.
    """
    pieces: list[tuple[int, float, float, Stretch]] = []
    for number, pack in enumerate(packs):
        at = 0
        for i, length in enumerate(pack):
            pieces.append((number, at / capacity, length / capacity, Stretch(length, i % _COLOURS)))
            at += length
        if at < capacity:
            pieces.append((number, at / capacity, 1 - at / capacity, Stretch(capacity - at, None)))
    return _lines(pieces, len(packs), padded=False)


def stretches_svg(stretches: Sequence[Stretch], capacity: int, most_lines: int) -> str:
    """Samples and their padding one behind the other, wrapped like text, to the scale of ``packs_svg``.

    Args:
        capacity: tokens of a line.
        most_lines: after which the drawing ends.
    """
    pieces: list[tuple[int, float, float, Stretch]] = []
    at = 0
    for stretch in stretches:
        left = stretch.tokens
        while left and at < most_lines * capacity:
            line, start = divmod(at, capacity)
            here = min(left, capacity - start)
            pieces.append((line, start / capacity, here / capacity, stretch))
            at, left = at + here, left - here
    return _lines(pieces, -(-at // capacity), padded=True)


def num_lines(stretches: Iterable[Stretch], capacity: int) -> int:
    """Lines that ``stretches_svg`` would need."""
    return -(-sum(stretch.tokens for stretch in stretches) // capacity)


def _lines(pieces: Sequence[tuple[int, float, float, Stretch]], lines: int, padded: bool) -> str:
    """(line, start, width, what) as rectangles; narrow ones of a colour are one path, which a browser draws faster.

    Args:
        padded: what is no sample is padding, not merely free. It is hatched: the hatch is the drawing's background,
            because a stretched pattern would slant otherwise.
    """
    parts = []
    narrow: dict[str, list[str]] = {}
    for line, start, part, stretch in pieces:
        y, x, wide = line * (_LINE + _GAP), start * _SIZE, part * _SIZE
        if stretch.colour is None:
            kind, hint = ("waste", "of padding") if padded else ("room", "free")
        else:
            kind, hint = f"s c{stretch.colour}", "of a sample"
        if wide >= _NARROW:
            place = f'x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{_LINE}"'
            parts.append(f'<rect class="{kind}" {place}><title>{stretch.tokens:,} tokens {hint}</title></rect>')
        elif stretch.colour is not None:
            # A tenth is left free behind it, in place of a border.
            wide *= 0.9
            narrow.setdefault(f"c{stretch.colour}", []).append(f"M{x:.2f} {y}h{wide:.2f}v{_LINE}h-{wide:.2f}z")
    height = max(lines, 1) * (_LINE + _GAP) - _GAP
    paths = "".join(f'<path class="{name}" d="{"".join(path)}"/>' for name, path in narrow.items())
    between = "".join(f"M0 {i * (_LINE + _GAP) + _LINE}h{_SIZE}v{_GAP}H0z" for i in range(lines - 1))
    if padded and pieces:
        line, start, part, _ = pieces[-1]
        x, y = (start + part) * _SIZE, line * (_LINE + _GAP)
        between += f"M{x:.2f} {y}H{_SIZE}v{_LINE}H{x:.2f}z"
    kind, label = ("padded", "samples in padded batches") if padded else ("packed", "samples in packs")
    body = f'{"".join(parts)}{paths}<path class="between" d="{between}"/>'
    return _svg(kind, f"{label}, to scale", height, body, f"height:{height}px")


def _chart(
    label: str,
    body: str,
    words: str,
    across: Sequence[tuple[float, str]],
    up: Sequence[tuple[float, str]],
    names: tuple[str, str],
) -> str:
    """A drawing between axes.

    Args:
        across, up: (part of the axis, label).
        names: of both axes.
    """
    grid = "".join(f'<path class="grid" d="M0 {(1 - at) * _SIZE:.1f}H{_SIZE}"/>' for at, _ in up[1:])
    axis = f'<path class="axis" d="M0 {_SIZE}H{_SIZE}"/>'
    gutter = max(len(text) for _, text in up) + 1
    left = "".join(f'<span class="y" style="bottom:{at:.2%}">{escape(text)}</span>' for at, text in up)
    below = "".join(f'<span class="x" style="left:{at:.2%}">{escape(text)}</span>' for at, text in across)
    return (
        f'<div class="chart" style="--gutter:{gutter}ch"><p class="name">{escape(names[1])}</p>'
        f'<div class="plot">{_svg("drawn", label, _SIZE, grid + body + axis)}{left}{below}{words}</div>'
        f'<p class="name below">{escape(names[0])}</p></div>'
    )


def _svg(kind: str, label: str, height: float, body: str, style: str = "") -> str:
    styled = f' style="{style}"' if style else ""
    return (
        f'<svg class="{kind}" viewBox="0 0 {_SIZE} {height}" preserveAspectRatio="none" role="img"{styled} '
        f'aria-label="{escape(label)}" xmlns="http://www.w3.org/2000/svg">{body}</svg>'
    )


def _word(at: float, texts: Sequence[tuple[str, str]]) -> str:
    """Words at the top of a plot, on the side of their place where there is room.

    Args:
        texts: (class of a dot before it, or "", text).
    """
    said = " ".join(f'<i class="dot {dot}"></i>{escape(text)}' if dot else escape(text) for dot, text in texts)
    return f'<span class="at {"before" if at > 0.5 else "after"}" style="left:{at:.2%}">{said}</span>'


def _ticks(low: float, high: float, most: int, whole: bool = False, inside: bool = False) -> list[float]:
    """Round numbers from ``low`` (itself round) on, at most about ``most`` steps.

    Args:
        whole: only whole numbers.
        inside: the last is at most ``high``; otherwise at least.
    """
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    step = max(step, 1) if whole else step
    if whole and step != int(step):
        step = math.ceil(step)
    count = (high - low) / step
    count = math.floor(count + 1e-9) if inside else math.ceil(count - 1e-9)
    return [low + i * step for i in range(max(count, 1) + 1)]


def _digits(step: float) -> int:
    """Decimals that tell multiples of a step apart."""
    return next((digits for digits in range(1, 6) if abs(round(step, digits) - step) < 1e-9), 6)


def _label(tick: float) -> str:
    """A round number; millions would take too much of a phone's width."""
    return f"{tick / 1e6:g}M" if tick >= 1e6 else _short(tick)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"
