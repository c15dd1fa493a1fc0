"""The page of a plan: one HTML file without script, font or picture from elsewhere, so it opens wherever it is copied.

Colours are variables of the style sheet, which follow the reader's light or dark setting. A printed page is light.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from packtool.planning.prefix_trees import Branch
from packtool.report.drawing import SIZE, Axis, Box, Boxes, Chart, Drawing, Note, Path, Rectangle, render
from packtool.report.statistics import percent

_COLOURS = 5
_MOST_LINES = 80
_LINE, _GAP = 9, 2  # CSS pixels of a line of samples, and below it
_NARROW = 6  # units: samples below have neither a border nor a hint of their own
_PREFIX = "prefix"
_FINGERPRINT = re.compile("[0-9a-f]{12,}")


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
class Histogram:
    """Counts between edges.

    Args:
        edges: B + 1, rising.
        counts: B.
        is_log: whether edges are about evenly spaced on a logarithmic axis.
    """

    edges: Sequence[float]
    counts: Sequence[int]
    is_log: bool = False


@dataclass(frozen=True)
class Stretch:
    """A sample, a prefix that it shares with others, or the padding behind it.

    Args:
        tokens: that it takes.
        look: of a sample or prefix; None is padding.
    """

    tokens: int
    look: str | None


@dataclass(frozen=True)
class SharedFigures:
    """What it saves that samples share prefixes.

    Args:
        headline: (number, what it counts, remark) of the large figures.
        trees: (what it is, its figures, its branches) of some.
    """

    headline: Sequence[tuple[str, str, str]]
    trees: Sequence[tuple[str, str, Sequence[Branch]]]


@dataclass(frozen=True)
class MixtureFigures:
    """What an epoch has of each source.

    Args:
        heading: of the table.
        rows: of each source, its name first.
        parts: of the stretches of the epoch, or of a run with stages, one after the other, each source's share, 0 to 1.
        unit: that shares are of.
        steps: of a stretch; the last one may have fewer.
        num_steps: of all.
        stages: of each stage, where in the run it begins, 0 to 1, what it is, and rows as above.
    """

    heading: Sequence[str]
    rows: Sequence[Sequence[str]]
    parts: Sequence[Sequence[float]]
    unit: str
    steps: int
    num_steps: int
    stages: Sequence[tuple[float, str, Sequence[Sequence[str]]]] = ()

    @property
    def of(self) -> str:
        """What the figures are of."""
        return "run" if self.stages else "epoch"


@dataclass(frozen=True)
class PageContent:
    """What a page shows; numbers that are unknown are left out, not drawn as zero.

    Args:
        title: what was planned.
        headline: (number, what it counts, remark) of the large figures.
        parts: (what, how many) of the samples of the caches, in the plan first, which add up to all of them.
        dropped: (what, how many) of what the exports left out.
        lengths: of samples.
        capacity: tokens of a pack.
        fills: of packs, in percent.
        packs: some of them: what several samples have, and what each has of its own.
        plain: batches without packing that the plan is compared with, or None.
        balance: (round-robin, planned) max/mean work of steps in their order, or None.
        processes_per_rank: that share a sequence.
        shared: what shared prefixes save, or None where there are none.
        mixture: what the epoch has of each source, or None where every sample is there once.
        figures: (what, value), for the table at the end; long hexadecimal values are fingerprints.
        commands: that lead to and from here.
    """

    title: str
    headline: Sequence[tuple[str, str, str]]
    parts: Sequence[tuple[str, int]]
    lengths: Histogram
    capacity: int
    fills: Histogram
    packs: Sequence[Sequence[Branch]]
    balance: tuple[Sequence[float], Sequence[float]] | None
    figures: Sequence[tuple[str, str]]
    commands: Sequence[tuple[str, str]]
    plain: PlainFigures | None = None
    processes_per_rank: int = 1
    shared: SharedFigures | None = None
    mixture: MixtureFigures | None = None
    dropped: Sequence[tuple[str, int]] = ()

    @property
    def shares_packs(self) -> bool:
        """Whether any two samples share a pack."""
        return sum(self.lengths.counts) > sum(self.fills.counts)


def page(content: PageContent) -> str:
    """The page as text."""
    prints = [(f"Fingerprint of the {what}", value) for what, value in content.figures if _FINGERPRINT.fullmatch(value)]
    stretches = plain_batches(content.packs, content.plain.rows) if content.plain is not None else []
    marks = ((float(content.capacity), f"pack: {content.capacity:,}"),) if content.shares_packs else ()
    total = sum(count for _, count in content.parts) or 1
    return render(
        "plan.html",
        plan=content,
        num_cached=total,
        samples=[(_look(i), name, count, percent(count / total)) for i, (name, count) in enumerate(content.parts)],
        share=share_drawing([count for _, count in content.parts]),
        looks=[_look(i) for i in range(len(content.mixture.rows))] if content.mixture else [],
        shares=shares_chart(content.mixture) if content.mixture else None,
        lengths=histogram(content.lengths, "samples", "tokens of a sample", marks=marks),
        fills=histogram(content.fills, "packs", "share of a pack's tokens that samples fill", suffix="%"),
        packed=packs_drawing(content.packs, content.capacity),
        padded=stretches_drawing(stretches, content.capacity),
        num_samples=sum(branch.num_samples == 1 for pack in content.packs for branch in pack),
        trees=[(name, told, tree_drawing(tree)) for name, told, tree in content.shared.trees] if content.shared else [],
        num_lines=num_lines(stretches, content.capacity),
        most_lines=_MOST_LINES,
        balance=balance_chart(*content.balance) if content.balance else None,
        is_alike=content.balance is None or list(content.balance[0]) == list(content.balance[1]),
        figures=[(what, value) for what, value in content.figures if not _FINGERPRINT.fullmatch(value)],
        commands=[*content.commands, *prints],
    )


def histogram(
    found: Histogram, what: str, unit: str, suffix: str = "", marks: Sequence[tuple[float, str]] = ()
) -> Chart:
    """Bars between labelled axes.

    Args:
        what: that is counted.
        unit: of the edges, as the axis names it.
        suffix: of the numbers along the axis.
        marks: (place on the axis, name) of vertical lines; those far beyond the bars are left out.
    """
    low, high = found.edges[0], found.edges[-1]
    marks = [(place, name) for place, name in marks if low <= place <= low + 1.5 * (high - low)]
    end = max([high, *(place for place, _ in marks)])
    x = Axis.logarithmic(unit, low, end) if found.is_log else Axis.over(unit, low, end, 6, suffix=suffix)
    y = Axis.over(what, 0, max(found.counts, default=0) or 1, 4, whole=True, cover=True)
    shapes: list[Box | Path] = []
    for count, (start, stop) in zip(found.counts, pairwise(found.edges), strict=True):
        if count:
            tall = max(y.at(count), 8)  # one among thousands is seen, too
            hint = f"{start:,.0f} to {stop:,.0f} {unit}: {count:,} {what}"
            shapes.append(Box(x.at(start), SIZE - tall, x.at(stop) - x.at(start), tall, "bar", hint))
    lines = [Path([[(x.at(place), 0), (x.at(place), SIZE)]], "mark") for place, _ in marks]
    return Chart(x, y, [*shapes, *lines], [Note(x.at(place), [("", name)]) for place, name in marks])


def balance_chart(before: Sequence[float], after: Sequence[float]) -> Chart:
    """Imbalance of steps in their order, before (not drawn where it is the same) and after; 1 is even.

    One step far above all others, mostly the last and smallest one, would press the rest flat. It is drawn at the upper
    edge, with its number.
    """
    peaks = [max(pair) for pair in zip(before, after, strict=True)]
    *_, second, highest = [1.0, 1.0, *sorted(peaks)]
    far = len(peaks) > 2 and highest - 1 > 3 * max(second - 1, 0.01)
    ends = [(part / 4, name) for part, name in enumerate(("first", "25%", "50%", "75%", "last"))]
    x = Axis("optimizer steps of the epoch, in order", 0, 1, ends)
    y = Axis.over("work of the slowest rank ÷ mean rank", 1, max(second if far else highest, 1.02), 4, cover=True)

    def dots(values: Sequence[float], look: str) -> Path:
        places = (x.at((i + 0.5) / len(values)) for i in range(len(values)))
        points = zip(places, (max(SIZE - y.at(value), 0) for value in values), strict=True)
        return Path([[point] for point in points], look)

    shapes = [dots(before, "dot-before")] * (list(before) != list(after)) + [dots(after, "dot-after")]
    notes = []
    if far:
        place = peaks.index(highest)
        # Which of the two is beyond the edge must be seen: the worst planned step is not the worst of round-robin.
        beyond = {"hollow": before[place]} if f"{before[place]:.2f}" != f"{after[place]:.2f}" else {}
        beyond["c0"] = after[place]
        texts = [(look, f"{value:.2f} ↑") for look, value in beyond.items() if value > y.high]
        notes = [Note(x.at((place + 0.5) / len(peaks)), texts)]
    return Chart(x, y, shapes, notes)


def shares_chart(found: MixtureFigures) -> Chart:
    """Shares of sources through the epoch, on top of each other: even where the borders are level."""
    ends = [(part / 4, name) for part, name in enumerate(("first", "25%", "50%", "75%", "last"))]
    x = Axis(f"optimizer steps of the {found.of}, {found.steps:,} at a time", 0, 1, ends)
    y = Axis.over(f"share of the {found.unit}", 0, 100, 4, cover=True, suffix="%")
    shapes: list[Box | Path] = []
    for number, part in enumerate(found.parts):
        left, right = (SIZE * min(at * found.steps / found.num_steps, 1) for at in (number, number + 1))
        below = 0.0
        for source, share in enumerate(part):
            hint = f"{found.rows[source][0]}: {percent(share)} of these steps' {found.unit}"
            box = Box(left, SIZE * (1 - below - share), right - left, SIZE * share, f"s {_look(source)}", hint)
            shapes += [box] if share else []
            below += share
    shapes += [Path([[(x.at(place), 0), (x.at(place), SIZE)]], "mark") for place, _, _ in found.stages[1:]]
    notes = [Note(x.at(place), [("", f"stage {number}")]) for number, (place, _, _) in enumerate(found.stages, 1)]
    return Chart(x, y, shapes, notes[1:])


def share_drawing(counts: Sequence[int]) -> Drawing:
    """Shares of a whole side by side; the smallest can still be seen."""
    total = sum(counts) or 1
    wide = [max(SIZE * count / total, 9) if count else 0.0 for count in counts]
    scale = SIZE / (sum(wide) or 1)
    boxes = [Box(sum(wide[:i]) * scale, 0, width * scale, 1, f"s {_look(i)}") for i, width in enumerate(wide) if width]
    return Drawing("share", "shares of the samples", boxes, height=1)


def packs_drawing(packs: Sequence[Sequence[Branch]], capacity: int) -> Drawing:
    """Packs below one another to scale; what they leave free is outlined.

    Args:
        packs: the branches of each.
        capacity: tokens that the full width stands for.
    """
    stretches: list[Stretch] = []
    for pack in packs:
        stretches += [Stretch(branch.num_tokens, _branch_look(branch)) for branch in pack]
        stretches.append(Stretch(capacity - sum(branch.num_tokens for branch in pack), None))
    return stretches_drawing(stretches, capacity, len(packs), padded=False)


def tree_drawing(branches: Sequence[Branch]) -> Drawing:
    """Samples below one another to scale, from their first tokens on; a prefix is as high as all that share it."""
    longest = max(branch.stop for branch in branches)
    shapes = []
    for branch in branches:
        x, wide = branch.start / longest * SIZE, branch.num_tokens / longest * SIZE
        y, tall = branch.first * (_LINE + _GAP), branch.num_samples * (_LINE + _GAP) - _GAP
        what = f"shared by {branch.num_samples:,} samples" if branch.num_samples > 1 else "of a sample alone"
        shapes.append(Box(x, y, wide, tall, f"s {_branch_look(branch)}", f"{branch.num_tokens:,} tokens {what}"))
    height = max(branch.last for branch in branches) * (_LINE + _GAP) - _GAP
    return Drawing("tree", "samples that share prefixes, to scale", shapes, height, in_pixels=True)


def _branch_look(branch: Branch) -> str:
    return _look(branch.first % _COLOURS) if branch.num_samples == 1 else _PREFIX


def stretches_drawing(
    stretches: Sequence[Stretch], capacity: int, most_lines: int = _MOST_LINES, *, padded: bool = True
) -> Drawing:
    """Samples and what is behind them one behind the other, wrapped like text.

    Args:
        capacity: tokens of a line.
        most_lines: after which the drawing ends.
        padded: what is no sample is padding, not merely free. It is hatched: the hatch is the drawing's background,
            because a stretched pattern would slant otherwise.
    """
    shapes: list[Box | Boxes] = []
    narrow: dict[str, list[Rectangle]] = {}
    at = 0
    for stretch in stretches:
        left = stretch.tokens
        look, hint = ("waste", "of padding") if padded else ("room", "free")
        if stretch.look is not None:
            look, hint = f"s {stretch.look}", "of a shared prefix" if stretch.look == _PREFIX else "of a sample"
        while left and at < most_lines * capacity:
            line, start = divmod(at, capacity)
            here = min(left, capacity - start)
            x, y, wide = start / capacity * SIZE, line * (_LINE + _GAP), here / capacity * SIZE
            if wide >= _NARROW:
                shapes.append(Box(x, y, wide, _LINE, look, f"{here:,} tokens {hint}"))
            elif stretch.look is not None:
                # A tenth is left free behind it, in place of a border. Those of a look are drawn together.
                narrow.setdefault(stretch.look, []).append((x, y, wide * 0.9, _LINE))
            at, left = at + here, left - here
    shapes += [Boxes(places, look) for look, places in narrow.items()]
    lines = -(-at // capacity)
    if padded and lines:
        # Between lines, and behind the last stretch, the hatched background must not be seen.
        gaps: list[Rectangle] = [(0.0, line * (_LINE + _GAP) - _GAP, SIZE, _GAP) for line in range(1, lines)]
        end = (at - (lines - 1) * capacity) / capacity * SIZE
        shapes.append(Boxes([*gaps, (end, (lines - 1) * (_LINE + _GAP), SIZE - end, _LINE)], "between"))
    kind, label = ("padded", "samples and their padding") if padded else ("packed", "samples in packs")
    return Drawing(kind, f"{label}, to scale", shapes, max(lines, 1) * (_LINE + _GAP) - _GAP, in_pixels=True)


def num_lines(stretches: Sequence[Stretch], capacity: int) -> int:
    """Lines that ``stretches_drawing`` would need."""
    return -(-sum(stretch.tokens for stretch in stretches) // capacity)


def plain_batches(packs: Sequence[Sequence[Branch]], each: int) -> list[Stretch]:
    """The samples of packs, shuffled, in batches that are padded to their longest: what training without packing does.

    Args:
        packs: the branches of each.
        each: samples of a batch.

    Returns:
        samples, each with all prefixes that it shares, and with padding behind those that are shorter than their
        batch's longest. Colours are as in ``packs_drawing``.
    """
    samples = [branch for pack in packs for branch in pack if branch.num_samples == 1]
    random.Random(0).shuffle(samples)  # companions in a pack are often alike, in a plain batch they are not
    found = []
    for start in range(0, len(samples), each):
        batch = samples[start : start + each]
        longest = max(sample.stop for sample in batch)
        for sample in batch:
            parts = ((sample.start, _PREFIX), (sample.num_tokens, _branch_look(sample)), (longest - sample.stop, None))
            found += [Stretch(tokens, look) for tokens, look in parts if tokens]
    return found


def _look(number: int) -> str:
    return f"c{min(number, _COLOURS)}"
