"""The page of ``packtool plan --html``: one HTML file that loads nothing from elsewhere."""

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
_MAX_POINTS = 300  # of the chart of the load balance
_MAX_TREE_SAMPLES = 40
_NUM_BINS = 48
_LOG_RATIO = 100  # longest ÷ shortest sample from which the axis of lengths is logarithmic
_MAX_INTERVALS = 60  # of the chart of a mixture
_NUM_COLOURS = 5
_MAX_LINES = 80
_LINE, _GAP = 9, 2  # CSS pixels: height of a line of samples, and space between lines
_MIN_WIDTH = 6  # units of the axis; narrower samples have neither a border nor a hint
_PREFIX = "prefix"
_FINGERPRINT = re.compile("[0-9a-f]{12,}")
_EPOCH_TICKS = [(part / 4, name) for part, name in enumerate(("first", "25%", "50%", "75%", "last"))]

Card = tuple[str, str, str]
"""A large number on the page, the name of what it counts, and a remark."""
Block = tuple[int, str | None]
"""Tokens of a sample, a shared prefix or free space, and the look to draw them in; None for padding and free space."""


@dataclass(frozen=True)
class Histogram:
    """Counts in B bins.

    Args:
        edges: (B + 1,), ascending.
        counts: (B,).
        is_log: draw on a logarithmic axis.
    """

    edges: Sequence[float]
    counts: Sequence[int]
    is_log: bool = False


def length_histogram(lengths: npt.NDArray[np.integer[Any]]) -> Histogram:
    """Count samples by their tokens; each bin includes its upper edge.

    Bins have equal widths, or are logarithmic if lengths span two orders of magnitude.

    Args:
        lengths: (S,), tokens of each sample.
    """
    longest = max(int(lengths.max(initial=1)), 1)
    shortest = max(int(lengths.min(initial=longest)), 1)
    if is_log := longest >= _LOG_RATIO * shortest:
        ends = np.minimum(np.ceil(np.geomspace(shortest, longest, _NUM_BINS + 1)[1:]), longest)
        edges = np.concatenate(([shortest - 0.5], np.unique(ends)))
    else:
        # Integer widths: if bins differed by one token, some lengths would look rare.
        width = -(-longest // _NUM_BINS)
        edges = np.arange(-(-longest // width) + 1) * width
    counts, _ = np.histogram(lengths, edges + 0.5)
    return Histogram(edges.tolist(), counts.tolist(), is_log)


def fill_histogram(packs: PackPlan, num_bins: int) -> Histogram:
    """Count packs by the percentage of their capacity that is filled."""
    counts, edges = np.histogram(packs.tokens_per_pack() / packs.capacity * 100, bins=num_bins, range=(0, 100))
    return Histogram(edges.tolist(), counts.tolist())


def page_content(preview: Preview, figures: Mapping[str, Any], command: str, title: str) -> dict[str, Any]:
    """Collect the content of the page for ``page``; ``figures`` are those of the preview's JSON."""
    packs = preview.plan.full_packs
    balance = preview.plan.summary.balance
    assert balance is not None, "previews are planned with costs"
    padding = figures["padding_of_plain_batches"]
    # These parts add up to all samples of the caches.
    length = "longer than --max-length" if figures["sources"] is None else "too long or too short"
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
    """Return the counts of each source in the epoch (with stages, in the run), and its share along the steps."""
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
    # Steps of an interval of the chart: 100, fewer in a short run, more in a very long one.
    num_steps = max(min(100, -(-len(counts) // 4)), -(-len(counts) // _MAX_INTERVALS))
    unit_counts = counts[:, :, ("samples", "tokens", "target_tokens").index(mixture.unit)]
    sums = np.add.reduceat(unit_counts, np.arange(0, len(unit_counts), num_steps), axis=0)
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
    """Return the cards at the top of the page: fill, packs, steps and samples."""
    without = f"{percent(figures['padding_of_plain_batches'])} padding without packing"
    packs = ("packs", f"of {figures['packing_length']:,} tokens each")
    if figures["skrull"] is not None:
        fill = (percent(figures["skrull"]["bucket_fill"]), "fill of the micro-batches", without)
    elif figures["waste_tokens"] is not None:
        fill = (percent(figures["fill"]), "fill of the packs", without)
    else:
        fill = (percent(figures["fill"]), "fill of the batches (tokens that are not padding)", "")
        packs = ("padded rows", "one sample each")
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
    """Return savings by shared prefixes, and two prefix trees to draw; None if no prefix is shared."""
    saved = figures["shared_prefixes"]
    if saved is None or packs.shared is None:
        return None
    tokens = f"{saved['tokens_saved']:,} of {saved['tokens_without']:,}"
    headline: list[Card] = [(percent(saved["token_share_saved"]), "of the tokens saved", tokens)]
    if saved["tower_work_share_saved"]:
        fraction = percent(saved["tower_work_share_saved"])
        headline.append((fraction, "of the towers' FLOPs saved", "each medium once per tree"))
    steps = f"instead of {saved['steps_without']:,} per epoch"
    headline.append((f"{figures['steps_per_epoch']:,}", "optimizer steps", steps))
    sizes = f"of {saved['samples_per_tree']:.1f} samples on average, {saved['largest_tree']:,} at most"
    headline.append((f"{saved['num_trees']:,}", "prefix trees", sizes))

    # A tree begins with the sample that shares nothing with the sample before it.
    starts = np.append(np.flatnonzero(packs.shared == 0), packs.num_samples)
    tokens_saved = np.add.reduceat(packs.shared, starts[:-1], dtype=np.int64)
    order, num_trees = np.argsort(-tokens_saved, kind="stable"), int(np.count_nonzero(tokens_saved))
    trees = []
    for name, number in (("The tree that saves most", 0), ("The median tree", num_trees // 2))[:num_trees]:
        start, stop = starts[order[number] : order[number] + 2].tolist()
        # ``lengths`` are tokens that samples add, ``full_lengths`` include their shared prefixes.
        num_tokens, num_unshared = int(packs.lengths[start:stop].sum()), int(packs.full_lengths[start:stop].sum())
        note = f"{stop - start:,} samples, {num_tokens:,} tokens instead of {num_unshared:,}"
        if stop - start > _MAX_TREE_SAMPLES:
            note += f"; only the first {_MAX_TREE_SAMPLES} samples are drawn"
        trees.append((name, note, _branches(packs, start, min(stop, start + _MAX_TREE_SAMPLES))))
    return {"headline": headline, "trees": trees}


def _branches(packs: PackPlan, start: int, stop: int) -> list[Branch]:
    """Return the branches (shared prefixes, and tokens that one sample adds) of samples ``start`` to ``stop - 1``."""
    return find_branches(packs.lengths[start:stop], None if packs.shared is None else packs.shared[start:stop])


def _maxima(values: npt.NDArray[np.float64]) -> list[float]:
    """Return the maxima of equal groups of consecutive values, at most ``_MAX_POINTS``."""
    group_size = -(-len(values) // _MAX_POINTS)
    return np.maximum.reduceat(values, np.arange(0, len(values), group_size)).tolist() if len(values) else []


def page(content: Mapping[str, Any]) -> str:
    """Return the page as HTML.

    Args:
        content: result of ``page_content``. ``parts`` and ``dropped`` are (name, count); ``packs`` has the branches of
            some packs; ``balance`` has the slowest rank's FLOPs ÷ mean of each step, (round-robin, as planned);
            ``figures`` are (name, value), where long hexadecimal values are fingerprints.
    """
    packs, capacity, plain, mixture = (content[name] for name in ("packs", "capacity", "plain", "mixture"))
    figures = content["figures"]
    prints = [(f"Fingerprint of the {name}", value) for name, value in figures if _FINGERPRINT.fullmatch(value)]
    is_packed = sum(content["lengths"].counts) > sum(content["fills"].counts)  # more samples than packs
    blocks = plain_batches(packs, plain["rows"]) if plain else []
    marks = ((float(capacity), f"pack: {capacity:,}"),) if is_packed else ()
    num_cached = sum(count for _, count in content["parts"]) or 1
    balance, trees = content["balance"], content["shared"]["trees"] if content["shared"] else []
    return render(
        "plan.html",
        plan=content,
        is_packed=is_packed,
        num_cached=num_cached,
        samples=[
            (_look(i), name, count, percent(count / num_cached)) for i, (name, count) in enumerate(content["parts"])
        ],
        share=share_drawing([count for _, count in content["parts"]]),
        looks=[_look(i) for i in range(len(mixture["rows"]))] if mixture else [],
        shares=shares_chart(mixture) if mixture else None,
        lengths=histogram(content["lengths"], "samples", "tokens of a sample", marks=marks),
        fills=histogram(content["fills"], "packs", "fill of a pack", suffix="%"),
        packed=packs_drawing(packs, capacity),
        padded=blocks_drawing(blocks, capacity),
        num_samples=sum(branch.num_samples == 1 for pack in packs for branch in pack),
        trees=[(name, note, tree_drawing(tree)) for name, note, tree in trees],
        num_lines=-(-sum(tokens for tokens, _ in blocks) // capacity),
        max_lines=_MAX_LINES,
        balance=balance_chart(*balance) if balance else None,
        is_round_robin=balance is None or list(balance[0]) == list(balance[1]),
        figures=[figure for figure in figures if not _FINGERPRINT.fullmatch(figure[1])],
        commands=[*content["commands"], *prints],
    )


def histogram(
    counted: Histogram, noun: str, unit: str, suffix: str = "", marks: Sequence[tuple[float, str]] = ()
) -> Chart:
    """Return a bar chart of counts.

    Args:
        noun: plural of the counted things.
        unit: name of the horizontal axis.
        suffix: unit after the numbers of the horizontal axis.
        marks: (value, name) of vertical lines; those far beyond the bars are left out.
    """
    low, high = counted.edges[0], counted.edges[-1]
    marks = [(position, name) for position, name in marks if low <= position <= low + 1.5 * (high - low)]
    end = max([high, *(position for position, _ in marks)])
    x = Axis.logarithmic(unit, low, end) if counted.is_log else Axis.over(unit, low, end, 6, suffix=suffix)
    y = Axis.over(noun, 0, max(counted.counts, default=0) or 1, 4, integers=True, cover=True)
    shapes: list[Box | Path] = []
    for count, (start, stop) in zip(counted.counts, pairwise(counted.edges), strict=True):
        if count:
            height = max(y.at(count), 8)  # keeps a count of one among thousands visible
            hint = f"{start:,.0f} to {stop:,.0f} {unit}: {count:,} {noun}"
            shapes.append(Box(x.at(start), SIZE - height, x.at(stop) - x.at(start), height, "bar", hint))
    shapes += [_mark(x, position) for position, _ in marks]
    return Chart(x, y, shapes, [Note(x.at(position), [("", name)]) for position, name in marks])


def _mark(x: Axis, position: float) -> Path:
    """Return a vertical line across a chart."""
    return Path([[(x.at(position), 0), (x.at(position), SIZE)]], "mark")


def balance_chart(before: Sequence[float], after: Sequence[float]) -> Chart:
    """Return a chart of each step's load imbalance: FLOPs of the slowest rank ÷ mean rank; 1 is balanced.

    A single step far above all others (often the last one, which is smaller) would compress the rest, so it is drawn at
    the upper edge with its value as text.

    Args:
        before: with round-robin assignment; not drawn if equal to ``after``.
        after: as planned.
    """
    peaks = [max(pair) for pair in zip(before, after, strict=True)]
    *_, second, highest = [1.0, 1.0, *sorted(peaks)]
    has_outlier = len(peaks) > 2 and highest - 1 > 3 * max(second - 1, 0.01)
    x = Axis("optimizer steps of the epoch, in order", 0, 1, _EPOCH_TICKS)
    top = max(second if has_outlier else highest, 1.02)
    y = Axis.over("FLOPs of the slowest rank ÷ mean rank", 1, top, 4, cover=True)

    def dots(values: Sequence[float], look: str) -> Path:
        steps = enumerate(values)
        return Path([[(x.at((i + 0.5) / len(values)), max(SIZE - y.at(value), 0))] for i, value in steps], look)

    shapes = [dots(before, "dot-before")] * (list(before) != list(after)) + [dots(after, "dot-after")]
    notes = []
    if has_outlier:
        step = peaks.index(highest)
        # The text has the color of its series, because both series may have a value in this step.
        outliers = {"hollow": before[step]} if f"{before[step]:.2f}" != f"{after[step]:.2f}" else {}
        outliers["c0"] = after[step]
        texts = [(look, f"{value:.2f} ↑") for look, value in outliers.items() if value > y.high]
        notes = [Note(x.at((step + 0.5) / len(peaks)), texts)]
    return Chart(x, y, shapes, notes)


def shares_chart(mixture: Mapping[str, Any]) -> Chart:
    """Return a chart of the sources' shares along the steps, stacked; a steady mixture has horizontal borders.

    Args:
        mixture: ``shares`` (0 to 1) of each source in intervals of ``steps`` steps (the last may be shorter) of
            ``num_steps``; ``rows`` that begin with the names of the sources; ``stages`` that begin with their relative
            start.
    """
    steps, num_steps, unit, stages = (mixture[name] for name in ("steps", "num_steps", "unit", "stages"))
    x = Axis(f"optimizer steps of the {mixture['of']}, {steps:,} at a time", 0, 1, _EPOCH_TICKS)
    y = Axis.over(f"share of the {unit}", 0, 100, 4, cover=True, suffix="%")
    shapes: list[Box | Path] = []
    for number, shares in enumerate(mixture["shares"]):
        left, right = (SIZE * min(edge * steps / num_steps, 1) for edge in (number, number + 1))
        stacked = 0.0  # sum of the shares below
        for source, share in enumerate(shares):
            hint = f"{mixture['rows'][source][0]}: {percent(share)} of the {unit} of these steps"
            box = Box(left, SIZE * (1 - stacked - share), right - left, SIZE * share, f"s {_look(source)}", hint)
            shapes += [box] if share else []
            stacked += share
    shapes += [_mark(x, position) for position, _, _ in stages[1:]]
    notes = [Note(x.at(position), [("", f"stage {number}")]) for number, (position, _, _) in enumerate(stages, 1)]
    return Chart(x, y, shapes, notes[1:])


def share_drawing(counts: Sequence[int]) -> Drawing:
    """Return a bar divided by counts; even the smallest part stays visible."""
    total = sum(counts) or 1
    widths = [max(SIZE * count / total, 9) if count else 0.0 for count in counts]
    scale = SIZE / (sum(widths) or 1)
    boxes = [
        Box(sum(widths[:i]) * scale, 0, width * scale, 1, f"s {_look(i)}") for i, width in enumerate(widths) if width
    ]
    return Drawing("share", "shares of the samples", boxes, height=1)


def packs_drawing(packs: Sequence[Sequence[Branch]], capacity: int) -> Drawing:
    """Return a drawing of packs (their branches) to scale, one per line; free space is outlined."""
    blocks: list[Block] = []
    for pack in packs:
        blocks += [(branch.num_tokens, _branch_look(branch)) for branch in pack]
        blocks.append((capacity - sum(branch.num_tokens for branch in pack), None))
    return blocks_drawing(blocks, capacity, len(packs), padded=False)


def tree_drawing(branches: Sequence[Branch]) -> Drawing:
    """Return a drawing of a prefix tree to scale: one line per sample; a prefix covers the lines of all its samples."""
    longest = max(branch.stop for branch in branches)
    shapes = []
    for branch in branches:
        x, width = branch.start / longest * SIZE, branch.num_tokens / longest * SIZE
        y, height = branch.first * (_LINE + _GAP), branch.num_samples * (_LINE + _GAP) - _GAP
        owner = f"shared by {branch.num_samples:,} samples" if branch.num_samples > 1 else "of one sample"
        shapes.append(Box(x, y, width, height, f"s {_branch_look(branch)}", f"{branch.num_tokens:,} tokens {owner}"))
    total_height = max(branch.last for branch in branches) * (_LINE + _GAP) - _GAP
    return Drawing("tree", "samples that share prefixes, to scale", shapes, total_height, in_pixels=True)


def _branch_look(branch: Branch) -> str:
    """Return the look of a shared prefix, or one of the looks of samples."""
    return _look(branch.first % _NUM_COLOURS) if branch.num_samples == 1 else _PREFIX


def blocks_drawing(
    blocks: Sequence[Block], capacity: int, max_lines: int = _MAX_LINES, *, padded: bool = True
) -> Drawing:
    """Return a drawing of blocks to scale, one after the other and wrapped like text.

    Args:
        capacity: tokens of a line.
        max_lines: maximum number of lines; later blocks are not drawn.
        padded: blocks without a look are padding, not free space. Padding is hatched by the background of the drawing,
            because a pattern in stretched shapes would be distorted.
    """
    shapes: list[Box | Boxes] = []
    narrow: dict[str, list[Rectangle]] = {}
    position = 0  # in tokens, over all lines
    for num_left, block_look in blocks:
        look, hint = ("waste", "of padding") if padded else ("room", "free")
        if block_look is not None:
            look, hint = f"s {block_look}", "of a shared prefix" if block_look == _PREFIX else "of a sample"
        while num_left and position < max_lines * capacity:
            line, start = divmod(position, capacity)
            num_tokens = min(num_left, capacity - start)  # on this line
            x, y, width = start / capacity * SIZE, line * (_LINE + _GAP), num_tokens / capacity * SIZE
            if width >= _MIN_WIDTH:
                shapes.append(Box(x, y, width, _LINE, look, f"{num_tokens:,} tokens {hint}"))
            elif block_look is not None:
                # Narrow blocks are drawn together by look; a tenth of the width is left free in place of a border.
                narrow.setdefault(block_look, []).append((x, y, width * 0.9, _LINE))
            position, num_left = position + num_tokens, num_left - num_tokens
    shapes += [Boxes(rectangles, look) for look, rectangles in narrow.items()]
    num_drawn = -(-position // capacity)
    if padded and num_drawn:
        # Cover the hatched background between lines and after the last block.
        gaps: list[Rectangle] = [(0.0, line * (_LINE + _GAP) - _GAP, SIZE, _GAP) for line in range(1, num_drawn)]
        end = (position - (num_drawn - 1) * capacity) / capacity * SIZE
        shapes.append(Boxes([*gaps, (end, (num_drawn - 1) * (_LINE + _GAP), SIZE - end, _LINE)], "between"))
    kind, label = ("padded", "samples and their padding") if padded else ("packed", "samples in packs")
    return Drawing(kind, f"{label}, to scale", shapes, max(num_drawn, 1) * (_LINE + _GAP) - _GAP, in_pixels=True)


def plain_batches(packs: Sequence[Sequence[Branch]], batch_size: int) -> list[Block]:
    """Return the samples of packs as trained without packing: shuffled, in batches padded to their longest sample.

    Args:
        packs: branches of each pack.
        batch_size: samples of a batch.

    Returns:
        blocks of each sample with all its shared prefixes, followed by its padding, in the looks of ``packs_drawing``.
    """
    samples = [branch for pack in packs for branch in pack if branch.num_samples == 1]
    random.Random(0).shuffle(samples)  # samples of a pack may have similar lengths, unlike those of a random batch
    blocks: list[Block] = []
    for start in range(0, len(samples), batch_size):
        batch = samples[start : start + batch_size]
        longest = max(sample.stop for sample in batch)
        for sample in batch:
            parts = ((sample.start, _PREFIX), (sample.num_tokens, _branch_look(sample)), (longest - sample.stop, None))
            blocks += [part for part in parts if part[0]]
    return blocks


def _look(number: int) -> str:
    """Return the look of a sample or a source by its number; all beyond the last color have the same look."""
    return f"c{min(number, _NUM_COLOURS)}"
