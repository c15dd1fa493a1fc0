"""The page of ``packtool plan --html``: one HTML file that loads nothing from elsewhere."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from packtool.config.mixture import UNITS
from packtool.planning.mixture import added, by_name, share_figures
from packtool.planning.pack_plan import PackPlan
from packtool.planning.prefix_branches import Branch, find_branches
from packtool.report.drawing import AXIS_LENGTH, Axis, Box, Boxes, Chart, Drawing, Note, Path, Rectangle, render
from packtool.report.plan import plan_lines, times_without_packing
from packtool.report.tables import Figures, Histogram, fill_histogram, length_histogram, percent, source_rows
from packtool.train.prepare.preview import Preview
from packtool.train.prepare.timeline import stage_title

_MAX_PACKS = 20
_MAX_POINTS = 300  # of the chart of the load balance
_MAX_TREE_SAMPLES = 40
_MAX_INTERVALS = 60  # of the chart of a mixture
_NUM_COLOURS = 5
_MAX_LINES = 80
_LINE_HEIGHT, _LINE_GAP = 9, 2  # of lines of samples, in CSS pixels
_LINE_PITCH = _LINE_HEIGHT + _LINE_GAP
_MIN_WIDTH = 6  # units of the axis; narrower samples have neither a border nor a hint
_MIN_TOP = 1.02  # of the axis of the load balance
_MIN_SHOWN_PADDING = 0.05  # with less, the page does not compare the tokens without packing
_PREFIX_STYLE = "prefix"
_FINGERPRINT = re.compile("[0-9a-f]{12,}")
_EPOCH_TICKS = [(0.0, "first"), (0.25, "25%"), (0.5, "50%"), (0.75, "75%"), (1.0, "last")]

Card = tuple[str, str, str]
"""A large number on the page, the name of what it counts, and a remark."""
Block = tuple[int, str | None]
"""(tokens, style to draw them in) of a sample or a shared prefix; the style of padding and free space is None."""


def page_content(preview: Preview, figures: Figures, command: str, title: str) -> dict[str, Any]:
    """Collect the numbers and texts of ``page`` about a plan; ``figures`` is the output of ``packtool plan --json``."""
    packs = preview.plan.full_packs
    offsets = packs.offsets[: _MAX_PACKS + 1]  # first samples of the packs to draw, and the sample after them
    return {
        "title": title,
        "headline": _headline(figures),
        "sample_counts": _sample_counts(figures),
        "dropped": _dropped_counts(preview),
        "lengths": length_histogram(packs.full_lengths),
        "capacity": packs.capacity,
        "fills": fill_histogram(packs, num_bins=50),
        "packs": [_branches(packs, start, stop) for start, stop in pairwise(offsets)],
        "without_packing": {
            "rows": figures["rows_of_plain_batches"],
            "padding": percent(figures["padding_of_plain_batches"]),
            "times": times_without_packing(figures),
            "shows_times": figures["padding_of_plain_batches"] > _MIN_SHOWN_PADDING,
        },
        "balance": _balance_content(preview) if preview.options.world_size > 1 else None,
        "processes_per_rank": preview.first_inputs.sequence_parallel_size,
        "shared": _shared_content(packs, figures),
        "mixture": _mixture_content(preview, figures),
        "figures": _figure_rows(figures),
        "commands": [("This page was made by", command)],
    }


def _balance_content(preview: Preview) -> tuple[list[float], list[float]]:
    """Return the load imbalance of each step with round-robin assignment, and as planned."""
    balance = preview.plan.summary.balance
    assert balance is not None, "previews are planned with costs"
    return _maxima(balance.steps_before), _maxima(balance.steps)


def _figure_rows(figures: Figures) -> list[tuple[str, str]]:
    names = {"costs from": "cost_model", "plan": "plan_fingerprint", "caches": "cache_fingerprint"}
    return [*plan_lines(figures), *((name, str(figures[key])) for name, key in names.items() if figures[key])]


def _sample_counts(figures: Figures) -> list[tuple[str, int]]:
    """Return (name, count) of the samples used and not used; together they are all samples of the caches."""
    is_mixture = figures["sources"] is not None
    counts = [
        ("in the plan", figures["num_distinct_samples"]),
        ("not drawn in this epoch", figures["not_drawn"]),
        ("too long or too short" if is_mixture else "longer than --max-length", figures["filtered"]),
    ]
    return [(name, count) for name, count in counts if count]


def _dropped_counts(preview: Preview) -> list[tuple[str, int]]:
    """Return (reason, count) of the rows, turns and responses that the exports of the caches dropped."""
    counts = Counter[str]()
    for manifest in [] if preview.inputs.reader is None else preview.inputs.reader.manifests:
        for reason, count in manifest.dropped.items():
            counts[f"dropped at export: {reason}"] += count
        for reason, count in manifest.parts_left_out.items():
            counts[f"turns left out at export: {reason}"] += count
    return list(counts.items())


def _mixture_content(preview: Preview, figures: Figures) -> dict[str, Any] | None:
    """Return counts and shares of a mixture's sources, for a table and a chart by intervals of steps; None without one.

    They are those of an epoch or, if the run has stages with mixtures of their own, of the run.
    """
    mixture = preview.first_inputs.mixture  # its sources are those of all stages
    counts_of_steps = preview.counts_of_steps  # (steps, sources, UNITS)
    if counts_of_steps is None or mixture is None:
        return None
    sources = figures["sources"]
    stages = []
    if figures["stages"]:
        timeline = preview.timeline
        counts_of_steps = timeline.counts_of_steps()
        counts_of_stages = [by_name(stage.source_counts(), stage.mixture) for stage in timeline.stages]
        sources = share_figures(added(counts_of_stages))
        stages = [_stage_content(stage, timeline.num_steps) for stage in figures["stages"]]
    num_steps = len(counts_of_steps)
    steps_per_interval = _steps_per_interval(num_steps)
    counts_in_unit = counts_of_steps[:, :, UNITS.index(mixture.unit)]  # (steps, sources)
    heading, *rows = source_rows(sources)
    return {
        "heading": heading,
        "rows": rows,
        "shares": _interval_shares(counts_in_unit, mixture.names, list(sources), steps_per_interval),
        "unit": mixture.unit.replace("_", " "),
        "steps_per_interval": steps_per_interval,
        "num_steps": num_steps,
        "stages": stages,
        "of": "run" if stages else "epoch",
    }


def _stage_content(stage: Figures, num_steps: int) -> tuple[float, str, list[tuple[str, ...]]]:
    """Return a stage's start as a fraction of the run, its title, and a table row for each of its sources."""
    _, *rows = source_rows(stage["sources"])  # without the heading
    return (stage["first_step"] - 1) / num_steps, stage_title(stage), rows


def _steps_per_interval(num_steps: int) -> int:
    """Return 100 steps, fewer for at least four intervals, or more for at most ``_MAX_INTERVALS``."""
    steps = min(100, math.ceil(num_steps / 4))
    return max(steps, math.ceil(num_steps / _MAX_INTERVALS))


def _interval_shares(
    counts: npt.NDArray[Any], names: Sequence[str], shown_names: Sequence[str], steps_per_interval: int
) -> list[list[float]]:
    """Return the share of each shown name in each interval; ``counts`` (steps, sources) are of sources ``names``."""
    interval_starts = np.arange(0, len(counts), steps_per_interval)
    interval_counts = np.add.reduceat(counts, interval_starts, axis=0)  # (intervals, sources)
    source_names = np.array(names)
    columns = [interval_counts[:, source_names == name].sum(axis=1) for name in shown_names]
    name_counts = np.stack(columns, axis=1)  # (intervals, shown names)
    totals = name_counts.sum(axis=1, keepdims=True)
    shares: list[list[float]] = (name_counts / np.maximum(totals, 1)).tolist()
    return shares


def _headline(figures: Figures) -> list[Card]:
    """Return the cards at the top of the page: fill, packs, steps and samples."""
    pack_name = "packs"
    pack_note = f"of {figures['packing_length']:,} tokens each"
    if figures["skrull"] is None and figures["waste_tokens"] is None:  # without packing
        pack_name, pack_note = "padded rows", "one sample each"
    left_out = f"{figures['filtered']:,} were too long"
    if figures["sources"] is not None:
        left_out = f"{figures['not_drawn']:,} were not drawn, {figures['filtered']:,} were too long or short"
    num_steps = figures["steps_per_epoch"]
    samples_per_step = figures["num_samples"] / max(num_steps, 1)
    return [
        _fill_card(figures),
        (f"{figures['num_packs']:,}", pack_name, pack_note),
        (f"{num_steps:,}", "optimizer steps", f"per epoch, {samples_per_step:,.1f} samples each"),
        (f"{figures['num_samples']:,}", "samples", left_out),
    ]


def _fill_card(figures: Figures) -> Card:
    """Return the card with the fill of the micro-batches (with Skrull), of the packs, or of the batches."""
    padding = f"{percent(figures['padding_of_plain_batches'])} padding without packing"
    if figures["skrull"] is not None:
        return percent(figures["skrull"]["bucket_fill"]), "fill of the micro-batches", padding
    if figures["waste_tokens"] is not None:
        return percent(figures["fill"]), "fill of the packs", padding
    return percent(figures["fill"]), "fill of the batches (tokens that are not padding)", ""


def _shared_content(packs: PackPlan, figures: Figures) -> dict[str, Any] | None:
    """Return savings by shared prefixes, and up to two trees as (name, note, branches); None if nothing is shared."""
    savings = figures["shared_prefixes"]
    if savings is None or packs.shared_tokens is None:
        return None
    tokens = f"{savings['tokens_saved']:,} of {savings['tokens_without']:,}"
    headline: list[Card] = [(percent(savings["token_share_saved"]), "of the tokens saved", tokens)]
    if savings["tower_work_share_saved"]:
        fraction = percent(savings["tower_work_share_saved"])
        headline.append((fraction, "of the towers' FLOPs saved", "each medium once per tree"))
    steps = f"instead of {savings['steps_without']:,} per epoch"
    headline.append((f"{figures['steps_per_epoch']:,}", "optimizer steps", steps))
    sizes = f"of {savings['samples_per_tree']:.1f} samples on average, {savings['largest_tree']:,} at most"
    headline.append((f"{savings['num_trees']:,}", "prefix trees", sizes))
    return {"headline": headline, "trees": _example_trees(packs, packs.shared_tokens)}


def _example_trees(packs: PackPlan, shared: npt.NDArray[np.integer[Any]]) -> list[tuple[str, str, list[Branch]]]:
    """Return (name, note, branches) of the best and of the median one of the trees that save tokens.

    ``shared``: tokens that each sample shares with the sample before it, (N,); a tree begins where this is 0.
    """
    trees = _saving_trees(shared)
    examples = []
    if len(trees) > 0:
        examples.append(("The tree that saves most", trees[0]))
    if len(trees) > 1:
        examples.append(("The median tree", trees[len(trees) // 2]))
    drawn_trees = []
    for name, (start, stop) in examples:
        drawn_stop = min(stop, start + _MAX_TREE_SAMPLES)
        drawn_trees.append((name, _tree_note(packs, start, stop), _branches(packs, start, drawn_stop)))
    return drawn_trees


def _saving_trees(shared: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
    """Return the first sample of each tree that saves tokens and the one after its last, (trees, 2), the best first."""
    starts = np.flatnonzero(shared == 0)
    stops = np.append(starts, len(shared))[1:]
    tokens_saved = np.add.reduceat(shared, starts, dtype=np.int64)
    num_saving = np.count_nonzero(tokens_saved)  # trees of a single sample save nothing
    best_first = np.argsort(-tokens_saved, kind="stable")
    return np.stack((starts, stops), axis=1)[best_first[:num_saving]]


def _tree_note(packs: PackPlan, start: int, stop: int) -> str:
    """Return the numbers of samples and tokens of the tree of samples ``start`` to ``stop - 1``."""
    # ``lengths`` are tokens that samples add, ``full_lengths`` include their shared prefixes.
    num_tokens = packs.lengths[start:stop].sum()
    num_unshared = packs.full_lengths[start:stop].sum()
    note = f"{stop - start:,} samples, {num_tokens:,} tokens instead of {num_unshared:,}"
    if stop - start > _MAX_TREE_SAMPLES:
        note += f"; only the first {_MAX_TREE_SAMPLES} samples are drawn"
    return note


def _branches(packs: PackPlan, start: int, stop: int) -> list[Branch]:
    """Return the branches (shared prefixes, and tokens that one sample adds) of samples ``start`` to ``stop - 1``."""
    return find_branches(
        packs.lengths[start:stop], None if packs.shared_tokens is None else packs.shared_tokens[start:stop]
    )


def _maxima(values: npt.NDArray[np.float64]) -> list[float]:
    """Return the maxima of equal groups of consecutive values, at most ``_MAX_POINTS``."""
    group_size = math.ceil(len(values) / _MAX_POINTS)
    return np.maximum.reduceat(values, np.arange(0, len(values), group_size)).tolist()


def page(content: Figures) -> str:
    """Return the page as HTML; ``content`` is the result of ``page_content``."""
    mixture, shared = content["mixture"], content["shared"]
    figures, fingerprints = _split_fingerprints(content["figures"])
    return render(
        "plan.html",
        plan=content,
        source_styles=[_colour(i) for i in range(len(mixture["rows"]))] if mixture else [],
        shares=shares_chart(mixture) if mixture else None,
        figures=figures,
        commands=[*content["commands"], *fingerprints],
        trees=[(name, note, tree_drawing(branches)) for name, note, branches in shared["trees"]] if shared else [],
        **_histograms(content),
        **_balance_chart_of(content["balance"]),
        **_use_of_samples(content["sample_counts"]),
        **_pack_drawings(content["packs"], content["capacity"], batch_size=content["without_packing"]["rows"]),
    )


def _histograms(content: Figures) -> dict[str, Any]:
    """Return charts of the lengths of samples and of the fill of packs, and whether packs have several samples."""
    is_packed = sum(content["lengths"].counts) > sum(content["fills"].counts)
    pack_limit = [(float(content["capacity"]), f"pack: {content['capacity']:,}")] if is_packed else []
    return {
        "is_packed": is_packed,
        "lengths": histogram(content["lengths"], "samples", "tokens of a sample", vertical_lines=pack_limit),
        "fills": histogram(content["fills"], "packs", "fill of a pack", suffix="%"),
    }


def _balance_chart_of(balance: tuple[list[float], list[float]] | None) -> dict[str, Any]:
    """Return the chart of the load balance, and whether packs are assigned to ranks in turn.

    ``balance``: imbalance of each step if they were, and as planned; None for a single rank.
    """
    if balance is None:
        return {"balance": None, "is_round_robin": True}
    in_turn, planned = balance
    return {"balance": balance_chart(in_turn, planned), "is_round_robin": list(in_turn) == list(planned)}


def _use_of_samples(sample_counts: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """Return the number of all samples, and a bar and table rows of those used and not used."""
    counts = [count for _, count in sample_counts]
    num_cached = max(sum(counts), 1)
    rows = []
    for number, (name, count) in enumerate(sample_counts):
        rows.append((_colour(number), name, count, percent(count / num_cached)))
    return {"num_cached": num_cached, "samples": rows, "sample_bar": divided_bar(counts)}


def _split_fingerprints(figures: Sequence[tuple[str, str]]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return (name, value) of the figures without fingerprints, and of the fingerprints."""
    others, fingerprints = [], []
    for name, value in figures:
        if _FINGERPRINT.fullmatch(value):
            fingerprints.append((f"Fingerprint of the {name}", value))
        else:
            others.append((name, value))
    return others, fingerprints


def _pack_drawings(packs: Sequence[Sequence[Branch]], capacity: int, batch_size: int) -> dict[str, Any]:
    """Return drawings of packs (their branches), and of the same samples in padded batches, with their counts."""
    padded_blocks = plain_batches(packs, batch_size)
    num_padded_tokens = sum(num_tokens for num_tokens, _ in padded_blocks)
    # A pack has one branch for each sample, and further ones for prefixes that several samples share.
    num_samples = sum(branch.num_samples == 1 for pack in packs for branch in pack)
    return {
        "packed": packs_drawing(packs, capacity),
        "padded": blocks_drawing(padded_blocks, capacity),
        "num_samples": num_samples,
        "num_lines": math.ceil(num_padded_tokens / capacity),
        "max_lines": _MAX_LINES,
    }


def histogram(
    counted: Histogram, noun: str, unit: str, suffix: str = "", vertical_lines: Sequence[tuple[float, str]] = ()
) -> Chart:
    """Return a bar chart: how many things (``noun``, plural) have a value in each bin, in a ``unit``.

    ``suffix`` follows the numbers of a linear horizontal axis. Of the ``vertical_lines``, (value, name), those far
    right of the bars, or left of them, are left out.
    """
    low, high = counted.edges[0], counted.edges[-1]
    max_line = low + 1.5 * (high - low)
    drawn_lines = [(value, name) for value, name in vertical_lines if low <= value <= max_line]
    x_stop = max([high, *(value for value, _ in drawn_lines)])
    if counted.is_log:
        x = Axis.logarithmic(unit, low, x_stop)
    else:
        x = Axis.linear(unit, low, x_stop, num_ticks=6, suffix=suffix)
    max_count = max(counted.counts, default=0) or 1  # an axis needs a length
    y = Axis.linear(noun, 0, max_count, num_ticks=4, integers=True, extend=True)
    lines, line_names = _vertical_lines(x, drawn_lines)
    return Chart(x, y, [*_bars(counted, x, y), *lines], line_names)


def _bars(counted: Histogram, x: Axis, y: Axis) -> list[Box]:
    """Return a bar for each bin that is not empty; the hints name the counted things as the axes do."""
    bars = []
    for count, (lower, upper) in zip(counted.counts, pairwise(counted.edges), strict=True):
        if count:
            left, right = x.position(lower), x.position(upper)
            height = max(y.position(count), 8)  # keeps a count of one among thousands visible
            hint = f"{lower:,.0f} to {upper:,.0f} {x.name}: {count:,} {y.name}"
            bars.append(Box(left, AXIS_LENGTH - height, right - left, height, "bar", hint))
    return bars


def _vertical_lines(x: Axis, named_values: Iterable[tuple[float, str]]) -> tuple[list[Path], list[Note]]:
    """Return a vertical line at each value, and its name above the chart."""
    named_positions = [(x.position(value), name) for value, name in named_values]
    lines = [Path([[(position, 0), (position, AXIS_LENGTH)]], "mark") for position, _ in named_positions]
    return lines, [Note.plain(position, name) for position, name in named_positions]


def balance_chart(before: Sequence[float], after: Sequence[float]) -> Chart:
    """Return a chart of each step's load imbalance: FLOPs of the slowest rank ÷ mean rank; 1 is balanced.

    A single step far above all others, often the last one, is drawn at the upper edge with its value as text.
    ``before`` is with packs assigned to ranks in turn, and not drawn if equal to ``after``, which is as planned.
    """
    num_steps = len(after)
    larger_values = [max(pair) for pair in zip(before, after, strict=True)]
    top, outlier_step = _top_and_outlier(larger_values)
    x = Axis("optimizer steps of the epoch, in order", low=0, high=1, ticks=_EPOCH_TICKS)
    y = Axis.linear("FLOPs of the slowest rank ÷ mean rank", 1, max(top, _MIN_TOP), num_ticks=4, extend=True)
    step_positions = [x.position((step + 0.5) / num_steps) for step in range(num_steps)]  # their middles
    dots = []
    if list(before) != list(after):
        dots.append(_dots(step_positions, before, y, "dot-before"))
    dots.append(_dots(step_positions, after, y, "dot-after"))
    notes = []
    if outlier_step is not None:
        position = step_positions[outlier_step]
        notes.append(_outlier_note(position, before[outlier_step], after[outlier_step], y.high))
    return Chart(x, y, dots, notes)


def _top_and_outlier(peaks: Sequence[float]) -> tuple[float, int | None]:
    """Return the highest value to draw to scale, and the step far above all others; None if there is none."""
    # The two values of 1 (balanced) are for epochs of fewer than two steps.
    highest, second_highest = sorted([1.0, 1.0, *peaks], reverse=True)[:2]
    if len(peaks) > 2 and highest - 1 > 3 * max(second_highest - 1, 0.01):
        return second_highest, peaks.index(highest)
    return highest, None


def _dots(step_positions: Sequence[float], values: Sequence[float], y: Axis, style: str) -> Path:
    """Return a dot for each step; a value above the vertical axis is drawn at the upper edge."""
    heights = [min(y.position(value), AXIS_LENGTH) for value in values]
    points = zip(step_positions, heights, strict=True)
    return Path([[(left, AXIS_LENGTH - height)] for left, height in points], style)


def _outlier_note(position: float, before: float, after: float, max_drawn: float) -> Note:
    """Return the values of a step that exceed ``max_drawn`` as text, each with a dot in the style of its series."""
    before_text, after_text = f"{before:.2f} ↑", f"{after:.2f} ↑"
    texts = []  # (style of the dot, text)
    if before > max_drawn and before_text != after_text:
        texts.append(("hollow", before_text))
    if after > max_drawn:
        texts.append(("c0", after_text))
    return Note(position, texts)


def shares_chart(mixture: Figures) -> Chart:
    """Return a chart of the sources' shares along the steps, stacked; ``mixture`` is that of ``_mixture_content``."""
    steps_per_interval = mixture["steps_per_interval"]
    x_name = f"optimizer steps of the {mixture['of']}, {steps_per_interval:,} at a time"
    x = Axis(x_name, low=0, high=1, ticks=_EPOCH_TICKS)
    y = Axis.linear(f"share of the {mixture['unit']}", 0, 100, num_ticks=4, extend=True, suffix="%")
    boxes = [box for interval in range(len(mixture["shares"])) for box in _interval_boxes(mixture, interval)]
    later_stages = enumerate(mixture["stages"][1:], start=2)
    lines, notes = _vertical_lines(x, [(start, f"stage {number}") for number, (start, _, _) in later_stages])
    return Chart(x, y, [*boxes, *lines], notes)


def _interval_boxes(mixture: Figures, interval: int) -> list[Box]:
    """Return a box for each source with samples in an interval of steps, from bottom to top."""
    num_steps = mixture["num_steps"]
    first_step = interval * mixture["steps_per_interval"]
    end_step = min(first_step + mixture["steps_per_interval"], num_steps)
    left = AXIS_LENGTH * (first_step / num_steps)
    right = AXIS_LENGTH * (end_step / num_steps)
    boxes = []
    share_below = 0.0  # sum of the shares that are drawn below
    for source, share in enumerate(mixture["shares"][interval]):
        if share:
            name = mixture["rows"][source][0]
            hint = f"{name}: {percent(share)} of the {mixture['unit']} of these steps"
            top, height = AXIS_LENGTH * (1 - share_below - share), AXIS_LENGTH * share
            boxes.append(Box(left, top, right - left, height, f"s {_colour(source)}", hint))
        share_below += share
    return boxes


def divided_bar(counts: Sequence[int]) -> Drawing:
    """Return a bar divided in proportion to counts; even the smallest part stays visible."""
    total = sum(counts) or 1
    widths = [max(AXIS_LENGTH * count / total, 9) if count else 0.0 for count in counts]
    scale = AXIS_LENGTH / (sum(widths) or 1)
    boxes = []
    for number, width in enumerate(widths):
        if width:
            left = sum(widths[:number]) * scale
            boxes.append(Box(left, 0, width * scale, 1, f"s {_colour(number)}"))
    return Drawing("share", "shares of the samples", boxes, height=1)


def packs_drawing(packs: Sequence[Sequence[Branch]], capacity: int) -> Drawing:
    """Return a drawing of packs (their branches) to scale, one per line; free space is outlined."""
    blocks: list[Block] = []
    for pack in packs:
        blocks += [(branch.num_tokens, _branch_style(branch)) for branch in pack]
        blocks.append((capacity - sum(branch.num_tokens for branch in pack), None))
    return blocks_drawing(blocks, capacity, len(packs), padded=False)


def tree_drawing(branches: Sequence[Branch]) -> Drawing:
    """Return a drawing of a prefix tree to scale: one line per sample; a prefix covers the lines of all its samples."""
    longest = max(branch.stop for branch in branches)
    shapes = []
    for branch in branches:
        x, width = branch.start / longest * AXIS_LENGTH, branch.num_tokens / longest * AXIS_LENGTH
        y, height = branch.first_sample * _LINE_PITCH, _height(branch.num_samples)
        sharing = f"shared by {branch.num_samples:,} samples" if branch.num_samples > 1 else "of one sample"
        hint = f"{branch.num_tokens:,} tokens {sharing}"
        shapes.append(Box(x, y, width, height, f"s {_branch_style(branch)}", hint))
    num_lines = max(branch.stop_sample for branch in branches)
    return Drawing("tree", "samples that share prefixes, to scale", shapes, _height(num_lines), in_pixels=True)


def _height(num_lines: int) -> int:
    """Return the height of lines with the gaps between them, in CSS pixels."""
    return num_lines * _LINE_PITCH - _LINE_GAP


def _branch_style(branch: Branch) -> str:
    return _colour(branch.first_sample % _NUM_COLOURS) if branch.num_samples == 1 else _PREFIX_STYLE


def blocks_drawing(
    blocks: Sequence[Block], capacity: int, max_lines: int = _MAX_LINES, *, padded: bool = True
) -> Drawing:
    """Return a drawing of blocks to scale, one after the other and wrapped like text into lines of ``capacity`` tokens.

    ``padded``: blocks without a style are padding, which the background hatches; otherwise they are free space.
    """
    num_drawn = min(sum(num_tokens for num_tokens, _ in blocks), max_lines * capacity)
    num_lines = math.ceil(num_drawn / capacity)
    shapes = _shapes_of_pieces(_pieces(blocks, capacity, num_drawn), capacity, padded=padded)
    if padded and num_lines:
        shapes.append(_gaps(num_drawn, num_lines, capacity))
    kind, label = ("padded", "samples and their padding") if padded else ("packed", "samples in packs")
    return Drawing(kind, f"{label}, to scale", shapes, _height(max(num_lines, 1)), in_pixels=True)


def _shapes_of_pieces(pieces: Iterable[_Piece], capacity: int, *, padded: bool) -> list[Box | Boxes]:
    """Return a box for each wide piece on its line of ``capacity`` tokens, and the narrow ones together by style."""
    shapes: list[Box | Boxes] = []
    narrow_by_style: dict[str, list[Rectangle]] = {}
    for piece in pieces:
        line, token_in_line = divmod(piece.position, capacity)
        x = token_in_line / capacity * AXIS_LENGTH
        y = line * _LINE_PITCH
        width = piece.num_tokens / capacity * AXIS_LENGTH
        if width >= _MIN_WIDTH:
            box_style, hint = _style_and_hint(piece.style, padded=padded)
            shapes.append(Box(x, y, width, _LINE_HEIGHT, box_style, f"{piece.num_tokens:,} tokens {hint}"))
        elif piece.style is not None:  # narrow padding and free space are left to the background
            visible_width = width * 0.9  # the rest replaces a border
            narrow_by_style.setdefault(piece.style, []).append((x, y, visible_width, _LINE_HEIGHT))
    shapes += [Boxes(rectangles, style) for style, rectangles in narrow_by_style.items()]
    return shapes


class _Piece(NamedTuple):
    """Tokens of a block on one line, ``position`` tokens after the beginning of all blocks; None: no style."""

    num_tokens: int
    style: str | None
    position: int


def _pieces(blocks: Sequence[Block], line_tokens: int, max_tokens: int) -> Iterator[_Piece]:
    """Divide blocks at the ends of lines of ``line_tokens``; yield the pieces of the first ``max_tokens`` tokens."""
    position = 0  # in tokens, over all lines
    for num_tokens, block_style in blocks:
        block_end = min(position + num_tokens, max_tokens)
        while position < block_end:
            left_in_line = line_tokens - position % line_tokens
            num_piece_tokens = min(block_end - position, left_in_line)
            yield _Piece(num_piece_tokens, block_style, position)
            position += num_piece_tokens


def _style_and_hint(block_style: str | None, *, padded: bool) -> tuple[str, str]:
    """Return the style of a box, and what its tokens are; blocks without a style are padding or free space."""
    if block_style is None:
        return ("waste", "of padding") if padded else ("room", "free")
    return f"s {block_style}", "of a shared prefix" if block_style == _PREFIX_STYLE else "of a sample"


def _gaps(num_tokens: int, num_lines: int, capacity: int) -> Boxes:
    """Return boxes that cover the hatched background between lines and after the last of ``num_tokens`` tokens."""
    last_line = num_lines - 1
    gap_ys = range(_LINE_HEIGHT, last_line * _LINE_PITCH, _LINE_PITCH)
    gaps: list[Rectangle] = [(0.0, y, AXIS_LENGTH, _LINE_GAP) for y in gap_ys]
    end = (num_tokens - last_line * capacity) / capacity * AXIS_LENGTH
    gaps.append((end, last_line * _LINE_PITCH, AXIS_LENGTH - end, _LINE_HEIGHT))
    return Boxes(gaps, "between")


def plain_batches(packs: Sequence[Sequence[Branch]], batch_size: int) -> list[Block]:
    """Return the samples of packs as blocks without packing: shuffled, in batches padded to their longest sample."""
    # The last branch of each sample, which no other sample has: it ends with the sample.
    last_branches = [branch for pack in packs for branch in pack if branch.num_samples == 1]
    random.Random(0).shuffle(last_branches)  # samples of a pack may have similar lengths, unlike those of a batch
    blocks: list[Block] = []
    for start in range(0, len(last_branches), batch_size):
        batch = last_branches[start : start + batch_size]
        longest = max(branch.stop for branch in batch)
        for branch in batch:
            prefixes, own_tokens = (branch.start, _PREFIX_STYLE), (branch.num_tokens, _branch_style(branch))
            padding = (longest - branch.stop, None)
            blocks += [(num, style) for num, style in (prefixes, own_tokens, padding) if num]
    return blocks


def _colour(number: int) -> str:
    """Return the style of a sample or a source by its number; all beyond the last color have the same style."""
    return f"c{min(number, _NUM_COLOURS)}"
