"""The page of a plan: one HTML file without scripts, fonts or images from elsewhere."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.planning.mixture import added, by_name, share_figures
from packtool.planning.pack_plan import PackPlan
from packtool.planning.prefix_trees import Branch, find_branches
from packtool.report.drawing import SIZE, Axis, Box, Boxes, Chart, Drawing, Note, Path, Rectangle, render
from packtool.report.plan import plan_lines, times_without_packing
from packtool.report.tables import percent, source_rows
from packtool.train.prepare.preview import Preview
from packtool.train.prepare.timeline import stage_title

_MAX_PACKS = 20
_MAX_POINTS = 300  # of the load balance
_MAX_TREE_SAMPLES = 40
_NUM_BINS = 48
_LOG_RATIO = 100  # of the longest to the shortest sample, from which on the axis of lengths is logarithmic
_MAX_STRETCHES = 60  # of the mixture's chart
_NUM_COLOURS = 5
_MAX_LINES = 80
_LINE, _GAP = 9, 2  # CSS pixels of a line of samples, and between lines
_MIN_WIDTH = 6  # units; narrower samples have neither a border nor a hint
_PREFIX = "prefix"
_FINGERPRINT = re.compile("[0-9a-f]{12,}")
_EPOCH_TICKS = [(part / 4, name) for part, name in enumerate(("first", "25%", "50%", "75%", "last"))]

Card = tuple[str, str, str]
"""A large figure: number, what it counts, remark."""
Stretch = tuple[int, str | None]
"""Tokens and look of a sample or of a shared prefix; None instead of a look is padding."""


@dataclass(frozen=True)
class Histogram:
    """Counts between edges.

    Args:
        edges: (B + 1,), rising.
        counts: (B,).
        is_log: the edges are about evenly spaced on a logarithmic axis.
    """

    edges: Sequence[float]
    counts: Sequence[int]
    is_log: bool = False


def length_histogram(lengths: npt.NDArray[np.integer[Any]]) -> Histogram:
    """Samples by tokens; each bin includes its upper edge.

    Bins are equal, or logarithmic if lengths span two orders of magnitude.

    Args:
        lengths: (S,), tokens of each sample.
    """
    longest = max(int(lengths.max(initial=1)), 1)
    shortest = max(int(lengths.min(initial=longest)), 1)
    if is_log := longest >= _LOG_RATIO * shortest:
        ends = np.minimum(np.ceil(np.geomspace(shortest, longest, _NUM_BINS + 1)[1:]), longest)
        edges = np.concatenate(([shortest - 0.5], np.unique(ends)))
    else:
        # A whole number of tokens: bins that differ by one would look like rare lengths.
        width = -(-longest // _NUM_BINS)
        edges = np.arange(-(-longest // width) + 1) * width
    counts, _ = np.histogram(lengths, edges + 0.5)
    return Histogram(edges.tolist(), counts.tolist(), is_log)


def fill_histogram(packs: PackPlan, num_bins: int) -> Histogram:
    """Packs by the share of their capacity that is filled, in percent."""
    counts, edges = np.histogram(packs.tokens_per_pack() / packs.capacity * 100, bins=num_bins, range=(0, 100))
    return Histogram(edges.tolist(), counts.tolist())


def page_content(preview: Preview, figures: Mapping[str, Any], command: str, title: str) -> dict[str, Any]:
    """Collect the content of a plan's page, for ``page``.

    Args:
        figures: of the preview.
        command: shown as the command that made the page.
        title: what was planned for.
    """
    packs = preview.plan.full_packs
    balance = preview.plan.summary.balance
    assert balance is not None, "a preview knows costs"
    padding = figures["padding_of_plain_batches"]
    # The caches' samples; these parts add up to all of them.
    length = "longer than --max-length" if figures["sources"] is None else "of another length than is taken"
    parts = [
        ("in the plan", figures["num_distinct_samples"]),
        ("not drawn in this epoch", figures["not_drawn"]),
        (length, figures["filtered"]),
    ]
    dropped = Counter[str]()
    for manifest in () if preview.inputs.reader is None else preview.inputs.reader.manifests:
        dropped.update({f"dropped at export: {reason}": count for reason, count in manifest.dropped.items()})
        left_out = manifest.parts_left_out.items()
        dropped.update({f"turns left out at export: {reason}": count for reason, count in left_out})
    fingerprints = [("costs from", str(figures["cost_model"])), ("plan", str(figures["plan_fingerprint"]))]
    if figures["cache_fingerprint"]:
        fingerprints.append(("caches", str(figures["cache_fingerprint"])))
    return {
        "title": title,
        "headline": _headline(figures),
        "parts": [(name, count) for name, count in parts if count],
        "dropped": list(dropped.items()),
        "lengths": length_histogram(packs.full_lengths),
        "capacity": packs.capacity,
        "fills": fill_histogram(packs, 50),
        "packs": [_branches(packs, *packs.offsets[i : i + 2]) for i in range(min(packs.num_packs, _MAX_PACKS))],
        "plain": {
            "rows": figures["rows_of_plain_batches"],
            "padding": percent(padding),
            "times": times_without_packing(figures),
            "shows_times": padding > 0.05,
        },
        "balance": (_maxima(balance.steps_before), _maxima(balance.steps)) if preview.options.world_size > 1 else None,
        "processes_per_rank": preview.first_inputs.sequence_parallel_size,
        "shared": _shared_content(packs, figures),
        "mixture": _mixture_content(preview),
        "figures": [*plan_lines(figures), *fingerprints],
        "commands": [("This page was made by", command)],
    }


def _mixture_content(preview: Preview) -> dict[str, Any] | None:
    """Counts of each source in the epoch, or in a run with stages, and its share along the steps."""
    sources, counts, mixture = preview.source_figures, preview.counts_of_steps, preview.first_inputs.mixture
    if sources is None or counts is None or mixture is None:
        return None
    stages: list[tuple[float, str, list[tuple[str, ...]]]] = []
    if preview.inputs.stages:
        timeline = preview.timeline
        counts = timeline.counts_of_steps()
        sources = share_figures(added([by_name(stage.counts(), stage.mixture) for stage in timeline.stages]))
        stages = [
            ((stage["first_step"] - 1) / timeline.num_steps, stage_title(stage), source_rows(stage["sources"])[1:])
            for stage in timeline.figures()
        ]
    num_steps = max(min(100, -(-len(counts) // 4)), -(-len(counts) // _MAX_STRETCHES))
    of_unit = counts[:, :, ("samples", "tokens", "target_tokens").index(mixture.unit)]
    sums = np.add.reduceat(of_unit, np.arange(0, len(of_unit), num_steps), axis=0)
    # Sources of the same name are shown as one.
    columns = [sums[:, [own == name for own in mixture.names]].sum(axis=1) for name in sources]
    by_source = np.stack(columns, axis=1)
    heading, *rows = source_rows(sources)
    return {
        "heading": heading,
        "rows": rows,
        "shares": (by_source / np.maximum(by_source.sum(axis=1, keepdims=True), 1)).tolist(),
        "unit": mixture.unit.replace("_", " "),
        "steps": num_steps,
        "num_steps": len(counts),
        "stages": stages,
        "of": "run" if stages else "epoch",
    }


def _headline(figures: Mapping[str, Any]) -> list[Card]:
    without = f"{percent(figures['padding_of_plain_batches'])} padding without packing"
    packs = ("packs", f"of {figures['packing_length']:,} tokens each")
    if figures["skrull"] is not None:
        fill = (percent(figures["skrull"]["bucket_fill"]), "fill of the micro-batches", without)
    elif figures["waste_tokens"] is not None:
        fill = (percent(figures["fill"]), "fill of the packs", without)
    else:
        fill = (percent(figures["fill"]), "of the batches' tokens are not padding", "")
        packs = ("rows", "one sample each")
    left_out = f"{figures['filtered']:,} were too long"
    if figures["sources"] is not None:
        left_out = f"{figures['not_drawn']:,} were not drawn, {figures['filtered']:,} were too long or short"
    steps = figures["steps_per_epoch"]
    return [
        fill,
        (f"{figures['num_packs']:,}", *packs),
        (f"{steps:,}", "optimizer steps", f"per epoch, {figures['num_samples'] / max(steps, 1):,.1f} samples each"),
        (f"{figures['num_samples']:,}", "samples", left_out),
    ]


def _shared_content(packs: PackPlan, figures: Mapping[str, Any]) -> dict[str, Any] | None:
    """Savings by shared prefixes, and two trees: the one that saves most, and the median one."""
    saved = figures["shared_prefixes"]
    if saved is None or packs.shared is None:
        return None
    tokens = f"{saved['tokens_saved']:,} of {saved['tokens_without']:,}"
    headline: list[Card] = [(percent(saved["token_share_saved"]), "of the tokens saved", tokens)]
    if saved["tower_work_share_saved"]:
        share = percent(saved["tower_work_share_saved"])
        headline.append((share, "of the towers' work saved", "each medium once a tree"))
    steps = f"instead of {saved['steps_without']:,} per epoch"
    headline.append((f"{figures['steps_per_epoch']:,}", "optimizer steps", steps))
    sizes = f"of {saved['samples_per_tree']:.1f} samples, {saved['largest_tree']:,} at most"
    headline.append((f"{saved['num_trees']:,}", "trees", sizes))

    starts = np.append(np.flatnonzero(packs.shared == 0), packs.num_samples)
    tokens_saved = np.add.reduceat(packs.shared, starts[:-1], dtype=np.int64)
    order, num_trees = np.argsort(-tokens_saved, kind="stable"), int(np.count_nonzero(tokens_saved))
    trees = []
    for name, number in (("The tree that saves most", 0), ("The median tree", num_trees // 2))[:num_trees]:
        start, stop = starts[order[number] : order[number] + 2].tolist()
        num_tokens, num_whole = int(packs.lengths[start:stop].sum()), int(packs.full_lengths[start:stop].sum())
        note = f"{stop - start:,} samples, {num_tokens:,} tokens instead of {num_whole:,}"
        if stop - start > _MAX_TREE_SAMPLES:
            note += f"; the first {_MAX_TREE_SAMPLES} samples are drawn"
        trees.append((name, note, _branches(packs, start, min(stop, start + _MAX_TREE_SAMPLES))))
    return {"headline": headline, "trees": trees}


def _branches(packs: PackPlan, start: int, stop: int) -> list[Branch]:
    return find_branches(packs.lengths[start:stop], None if packs.shared is None else packs.shared[start:stop])


def _maxima(values: npt.NDArray[np.float64]) -> list[float]:
    """The maxima of groups of values, at most as many as are drawn."""
    group = -(-len(values) // _MAX_POINTS)
    return np.maximum.reduceat(values, np.arange(0, len(values), group)).tolist() if len(values) else []


def page(content: Mapping[str, Any]) -> str:
    """Draw the page.

    Args:
        content: as ``page_content`` returns it. ``parts`` and ``dropped`` are (name, count); ``packs`` are the branches
            of some packs; ``balance`` is the max/mean work of the steps, (round-robin, planned); of ``figures``,
            (name, value), long hexadecimal values are fingerprints.
    """
    packs, capacity, plain, mixture = (content[name] for name in ("packs", "capacity", "plain", "mixture"))
    figures = content["figures"]
    prints = [(f"Fingerprint of the {name}", value) for name, value in figures if _FINGERPRINT.fullmatch(value)]
    shares_packs = sum(content["lengths"].counts) > sum(content["fills"].counts)
    stretches = plain_batches(packs, plain["rows"]) if plain else []
    marks = ((float(capacity), f"pack: {capacity:,}"),) if shares_packs else ()
    num_cached = sum(count for _, count in content["parts"]) or 1
    balance, trees = content["balance"], content["shared"]["trees"] if content["shared"] else []
    return render(
        "plan.html",
        plan=content,
        shares_packs=shares_packs,
        num_cached=num_cached,
        samples=[
            (_look(i), name, count, percent(count / num_cached)) for i, (name, count) in enumerate(content["parts"])
        ],
        share=share_drawing([count for _, count in content["parts"]]),
        looks=[_look(i) for i in range(len(mixture["rows"]))] if mixture else [],
        shares=shares_chart(mixture) if mixture else None,
        lengths=histogram(content["lengths"], "samples", "tokens of a sample", marks=marks),
        fills=histogram(content["fills"], "packs", "share of a pack's tokens that samples fill", suffix="%"),
        packed=packs_drawing(packs, capacity),
        padded=stretches_drawing(stretches, capacity),
        num_samples=sum(branch.num_samples == 1 for pack in packs for branch in pack),
        trees=[(name, note, tree_drawing(tree)) for name, note, tree in trees],
        num_lines=-(-sum(tokens for tokens, _ in stretches) // capacity),
        max_lines=_MAX_LINES,
        balance=balance_chart(*balance) if balance else None,
        is_alike=balance is None or list(balance[0]) == list(balance[1]),
        figures=[figure for figure in figures if not _FINGERPRINT.fullmatch(figure[1])],
        commands=[*content["commands"], *prints],
    )


def histogram(
    counted: Histogram, noun: str, unit: str, suffix: str = "", marks: Sequence[tuple[float, str]] = ()
) -> Chart:
    """A bar chart.

    Args:
        noun: what is counted.
        unit: of the edges, as the axis names it.
        suffix: of the numbers along the axis.
        marks: (position on the axis, name) of vertical lines; those far beyond the bars are left out.
    """
    low, high = counted.edges[0], counted.edges[-1]
    marks = [(position, name) for position, name in marks if low <= position <= low + 1.5 * (high - low)]
    end = max([high, *(position for position, _ in marks)])
    x = Axis.logarithmic(unit, low, end) if counted.is_log else Axis.over(unit, low, end, 6, suffix=suffix)
    y = Axis.over(noun, 0, max(counted.counts, default=0) or 1, 4, integers=True, cover=True)
    shapes: list[Box | Path] = []
    for count, (start, stop) in zip(counted.counts, pairwise(counted.edges), strict=True):
        if count:
            height = max(y.at(count), 8)  # one among thousands stays visible
            hint = f"{start:,.0f} to {stop:,.0f} {unit}: {count:,} {noun}"
            shapes.append(Box(x.at(start), SIZE - height, x.at(stop) - x.at(start), height, "bar", hint))
    shapes += [_mark(x, position) for position, _ in marks]
    return Chart(x, y, shapes, [Note(x.at(position), [("", name)]) for position, name in marks])


def _mark(x: Axis, position: float) -> Path:
    """A vertical line across a chart."""
    return Path([[(x.at(position), 0), (x.at(position), SIZE)]], "mark")


def balance_chart(before: Sequence[float], after: Sequence[float]) -> Chart:
    """Imbalance of the steps in their order; 1 is even.

    One step far above all others, mostly the last and smallest one, would flatten the rest. It is drawn at the upper
    edge, with its number.

    Args:
        before: with round-robin assignment; not drawn if equal to ``after``.
        after: as planned.
    """
    peaks = [max(pair) for pair in zip(before, after, strict=True)]
    *_, second, highest = [1.0, 1.0, *sorted(peaks)]
    has_outlier = len(peaks) > 2 and highest - 1 > 3 * max(second - 1, 0.01)
    x = Axis("optimizer steps of the epoch, in order", 0, 1, _EPOCH_TICKS)
    top = max(second if has_outlier else highest, 1.02)
    y = Axis.over("work of the slowest rank ÷ mean rank", 1, top, 4, cover=True)

    def dots(values: Sequence[float], look: str) -> Path:
        steps = enumerate(values)
        return Path([[(x.at((i + 0.5) / len(values)), max(SIZE - y.at(value), 0))] for i, value in steps], look)

    shapes = [dots(before, "dot-before")] * (list(before) != list(after)) + [dots(after, "dot-after")]
    notes = []
    if has_outlier:
        step = peaks.index(highest)
        # Each number has its series' colour: the worst planned step is not the worst of round-robin.
        outliers = {"hollow": before[step]} if f"{before[step]:.2f}" != f"{after[step]:.2f}" else {}
        outliers["c0"] = after[step]
        texts = [(look, f"{value:.2f} ↑") for look, value in outliers.items() if value > y.high]
        notes = [Note(x.at((step + 0.5) / len(peaks)), texts)]
    return Chart(x, y, shapes, notes)


def shares_chart(mixture: Mapping[str, Any]) -> Chart:
    """Stacked shares of a mixture's sources along the steps; level borders mean an even mixture.

    Args:
        mixture: ``shares`` (from 0 to 1) of each source in each stretch of ``steps`` steps (the last may be shorter) of
            ``num_steps``; ``rows`` with the names of the sources; ``stages`` with their relative positions.
    """
    steps, num_steps, unit, stages = (mixture[name] for name in ("steps", "num_steps", "unit", "stages"))
    x = Axis(f"optimizer steps of the {mixture['of']}, {steps:,} at a time", 0, 1, _EPOCH_TICKS)
    y = Axis.over(f"share of the {unit}", 0, 100, 4, cover=True, suffix="%")
    shapes: list[Box | Path] = []
    for number, shares in enumerate(mixture["shares"]):
        left, right = (SIZE * min(at * steps / num_steps, 1) for at in (number, number + 1))
        below = 0.0
        for source, share in enumerate(shares):
            hint = f"{mixture['rows'][source][0]}: {percent(share)} of these steps' {unit}"
            box = Box(left, SIZE * (1 - below - share), right - left, SIZE * share, f"s {_look(source)}", hint)
            shapes += [box] if share else []
            below += share
    shapes += [_mark(x, position) for position, _, _ in stages[1:]]
    notes = [Note(x.at(position), [("", f"stage {number}")]) for number, (position, _, _) in enumerate(stages, 1)]
    return Chart(x, y, shapes, notes[1:])


def share_drawing(counts: Sequence[int]) -> Drawing:
    """Shares of a total side by side; the smallest stays visible."""
    total = sum(counts) or 1
    widths = [max(SIZE * count / total, 9) if count else 0.0 for count in counts]
    scale = SIZE / (sum(widths) or 1)
    boxes = [
        Box(sum(widths[:i]) * scale, 0, width * scale, 1, f"s {_look(i)}") for i, width in enumerate(widths) if width
    ]
    return Drawing("share", "shares of the samples", boxes, height=1)


def packs_drawing(packs: Sequence[Sequence[Branch]], capacity: int) -> Drawing:
    """Packs below one another to scale; free space is outlined.

    Args:
        packs: the branches of each.
        capacity: tokens of the full width.
    """
    stretches: list[Stretch] = []
    for pack in packs:
        stretches += [(branch.num_tokens, _branch_look(branch)) for branch in pack]
        stretches.append((capacity - sum(branch.num_tokens for branch in pack), None))
    return stretches_drawing(stretches, capacity, len(packs), padded=False)


def tree_drawing(branches: Sequence[Branch]) -> Drawing:
    """Samples below one another to scale, from their first token on; a prefix covers all lines that share it."""
    longest = max(branch.stop for branch in branches)
    shapes = []
    for branch in branches:
        x, width = branch.start / longest * SIZE, branch.num_tokens / longest * SIZE
        y, height = branch.first * (_LINE + _GAP), branch.num_samples * (_LINE + _GAP) - _GAP
        owner = f"shared by {branch.num_samples:,} samples" if branch.num_samples > 1 else "of a sample alone"
        shapes.append(Box(x, y, width, height, f"s {_branch_look(branch)}", f"{branch.num_tokens:,} tokens {owner}"))
    total_height = max(branch.last for branch in branches) * (_LINE + _GAP) - _GAP
    return Drawing("tree", "samples that share prefixes, to scale", shapes, total_height, in_pixels=True)


def _branch_look(branch: Branch) -> str:
    return _look(branch.first % _NUM_COLOURS) if branch.num_samples == 1 else _PREFIX


def stretches_drawing(
    stretches: Sequence[Stretch], capacity: int, max_lines: int = _MAX_LINES, *, padded: bool = True
) -> Drawing:
    """Stretches one after the other, wrapped like text.

    Args:
        capacity: tokens of a line.
        max_lines: after which the drawing ends.
        padded: stretches without a look are padding, not free space. Padding is hatched: the hatch is the drawing's
            background, because a stretched pattern would slant otherwise.
    """
    shapes: list[Box | Boxes] = []
    narrow: dict[str, list[Rectangle]] = {}
    at = 0
    for left, stretch_look in stretches:
        look, hint = ("waste", "of padding") if padded else ("room", "free")
        if stretch_look is not None:
            look, hint = f"s {stretch_look}", "of a shared prefix" if stretch_look == _PREFIX else "of a sample"
        while left and at < max_lines * capacity:
            line, start = divmod(at, capacity)
            here = min(left, capacity - start)
            x, y, width = start / capacity * SIZE, line * (_LINE + _GAP), here / capacity * SIZE
            if width >= _MIN_WIDTH:
                shapes.append(Box(x, y, width, _LINE, look, f"{here:,} tokens {hint}"))
            elif stretch_look is not None:
                # A tenth is left free in place of a border. Those of the same look are drawn together.
                narrow.setdefault(stretch_look, []).append((x, y, width * 0.9, _LINE))
            at, left = at + here, left - here
    shapes += [Boxes(rectangles, look) for look, rectangles in narrow.items()]
    num_drawn = -(-at // capacity)
    if padded and num_drawn:
        # Cover the hatched background between lines and after the last stretch.
        gaps: list[Rectangle] = [(0.0, line * (_LINE + _GAP) - _GAP, SIZE, _GAP) for line in range(1, num_drawn)]
        end = (at - (num_drawn - 1) * capacity) / capacity * SIZE
        shapes.append(Boxes([*gaps, (end, (num_drawn - 1) * (_LINE + _GAP), SIZE - end, _LINE)], "between"))
    kind, label = ("padded", "samples and their padding") if padded else ("packed", "samples in packs")
    return Drawing(kind, f"{label}, to scale", shapes, max(num_drawn, 1) * (_LINE + _GAP) - _GAP, in_pixels=True)


def plain_batches(packs: Sequence[Sequence[Branch]], batch_size: int) -> list[Stretch]:
    """The samples of packs as trained without packing: shuffled, in batches padded to their longest.

    Args:
        packs: the branches of each.
        batch_size: samples of a batch.

    Returns:
        each sample with all its shared prefixes, followed by its padding; looks are those of ``packs_drawing``.
    """
    samples = [branch for pack in packs for branch in pack if branch.num_samples == 1]
    random.Random(0).shuffle(samples)  # samples of a pack are often alike, those of a plain batch are not
    stretches: list[Stretch] = []
    for start in range(0, len(samples), batch_size):
        batch = samples[start : start + batch_size]
        longest = max(sample.stop for sample in batch)
        for sample in batch:
            parts = ((sample.start, _PREFIX), (sample.num_tokens, _branch_look(sample)), (longest - sample.stop, None))
            stretches += [part for part in parts if part[0]]
    return stretches


def _look(number: int) -> str:
    return f"c{min(number, _NUM_COLOURS)}"
