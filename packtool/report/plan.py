"""Figures of a plan, a sweep, ``--fit`` and ``--resume`` as lines of a terminal and as content of pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.planning.mixture import added, by_name, share_figures
from packtool.planning.pack_plan import PackPlan
from packtool.planning.prefix_trees import Branch, find_branches
from packtool.report.drawing import render
from packtool.report.plan_page import Histogram, MixtureFigures, PageContent, PlainFigures, SharedFigures
from packtool.report.statistics import Line, percent, source_rows
from packtool.report.tables import aligned
from packtool.train.prepare.preview import Preview
from packtool.train.prepare.timeline import stage_title

_DRAWN_PACKS = 20
_DRAWN_STEPS = 300
_DRAWN_SAMPLES = 40  # of a tree
_BINS = 48
_LOG_SPAN = 100  # the longest sample over the shortest, from which on lengths have a logarithmic axis
_DRAWN_STRETCHES = 60


def plan_lines(figures: Mapping[str, Any]) -> list[Line]:
    """What ``packtool plan`` prints."""
    balance = figures["balance"]
    lines = [
        *_sample_lines(figures),
        ("tokens", f"{figures['tokens']:,}"),
        *_shared_lines(figures),
        *_use_lines(figures),
        ("optimizer steps per epoch", f"{figures['steps_per_epoch']:,}"),
        ("  samples a step, mean", f"{figures['samples_per_step']:,.1f}"),
        *_target_lines(figures),
        *_plain_lines(figures),
        ("load balance, slowest rank ÷ mean rank", "round-robin → as planned"),
        ("  mean over all steps", f"{balance['mean_before']:.3f} → {balance['mean']:.3f}"),
        ("  worst step", f"{balance['worst_before']:.3f} → {balance['worst']:.3f}"),
        ("attention FLOPs, of those without isolation", f"{figures['efficient_attn_ratio']:.1%}"),
        ("FLOPs per epoch", f"{figures['flops_per_epoch']:.3g}"),
    ]
    if "hours" in figures:
        lines.append(("training time, all epochs", f"{figures['hours']:,.2f} h"))
    return [*lines, ("planning time", f"{figures['plan_seconds']:.2f} s")]


def _sample_lines(figures: Mapping[str, Any]) -> list[Line]:
    """Samples of the plan; with repeats taken off and those left out added, they are all samples of the caches."""
    lines = [("samples", f"{figures['samples']:,}")]
    if figures["sources"] is not None:
        lines.append(("  of them repeats", f"{figures['samples'] - figures['num_distinct_samples']:,}"))
        lines.append(("  not drawn", f"{figures['not_drawn']:,}"))
    lines.append(("  filtered by length", f"{figures['filtered']:,}"))
    if figures["sources"] is not None:
        lines.append(("  in the caches", f"{figures['num_samples_in_caches']:,}"))
    return lines


def _target_lines(figures: Mapping[str, Any]) -> list[Line]:
    """Labels that carry loss; a file of lengths does not tell them."""
    is_known = figures["cache_fingerprint"] is not None
    return [("  target tokens a step, mean", f"{figures['target_tokens_per_step']:,.0f}")] if is_known else []


def _shared_lines(figures: Mapping[str, Any]) -> list[Line]:
    """What prefixes save that samples share and that are computed once."""
    shared = figures["shared_prefixes"]
    if shared is None:
        return []
    lines = [
        ("  saved by shared prefixes", f"{shared['tokens_saved']:,} of {shared['tokens_without']:,}"),
        ("    share of the tokens", percent(shared["token_share_saved"])),
    ]
    if shared["tower_work_share_saved"]:
        lines.append(("    share of the towers' work", percent(shared["tower_work_share_saved"])))
    steps = f"{shared['steps_without'] - figures['steps_per_epoch']:,} of {shared['steps_without']:,}"
    trees = f"{shared['num_trees']:,} of {shared['samples_per_tree']:.1f} samples, {shared['largest_tree']:,} at most"
    lines += [("    optimizer steps per epoch", steps), ("    trees", trees)]
    if cut := shared.get("trees_in_several_packs"):
        one, meeting = shared["of_them_in_one_step"], shared["of_them_meeting_in_a_step"]
        told = f"{cut:,}; {one:,} in one step, {meeting:,} with several packs in a step"
        lines.append(("    trees in several packs", told))
    return lines


def _use_lines(figures: Mapping[str, Any]) -> list[Line]:
    """How well packs are filled, or what Skrull makes of their samples."""
    skrull = figures["skrull"]
    packs = [
        ("packs", f"{figures['packs']:,} of {figures['capacity']:,} tokens"),
        ("  samples per pack", f"{figures['samples_per_pack']:.2f}"),
    ]
    if skrull is None and figures["waste_tokens"] is None:
        return [
            ("rows of one sample each", f"{figures['packs']:,}"),
            ("  share of the batches' tokens that is not padding", percent(figures["fill"])),
        ]
    if skrull is None:
        return [
            *packs,
            ("  fill", percent(figures["fill"])),
            ("  above the lower bound", f"{figures['over_lower_bound']:.4%} (of {figures['lower_bound']:,} packs)"),
        ]
    sequence_parallel_size, device = skrull["sequence_parallel_size"], skrull["device_balance"]
    each = (
        f"{sequence_parallel_size} x {skrull['bucket_size']:,}"
        if sequence_parallel_size > 1
        else f"{skrull['bucket_size']:,}"
    )
    return [
        *packs,
        ("micro-batches by Skrull", f"{skrull['micro_batches']:,} of {each} tokens at most"),
        ("  empty ones besides", f"{figures['empty_micro_batches']:,}"),
        ("  share of their tokens that is used", percent(skrull["bucket_fill"])),
        ("  tokens computed on one process", f"{skrull['local_tokens'] / figures['tokens']:.1%}"),
        (
            f"  tokens shared by {sequence_parallel_size} processes",
            f"{skrull['sharded_tokens'] / figures['tokens']:.1%}",
        ),
        ("  planned for", str(skrull["hardware"])),
        ("  load balance, slowest process ÷ mean process", f"{device['mean']:.3f}"),
        ("    worst step", f"{device['worst']:.3f}"),
    ]


def _plain_lines(figures: Mapping[str, Any]) -> list[Line]:
    """The one thing that packing is compared with: batches of as many rows as packs hold samples."""
    return [
        ("without packing, in padded batches of", _rows_each(figures)),
        ("  padding", percent(figures["padding_of_plain_batches"])),
        ("  tokens to compute", _times(figures)),
        ("  optimizer steps per epoch", f"{figures['steps_of_plain_batches']:,}"),
    ]


def _rows_each(figures: Mapping[str, Any]) -> str:
    rows = figures["rows_of_plain_batches"]
    return f"{rows:,} {'row' if rows == 1 else 'rows'}"


def _times(figures: Mapping[str, Any]) -> str:
    """How many times as many tokens the model computes without packing."""
    return f"{figures['tokens_of_plain_batches'] / figures['tokens']:.2f}×"


def length_histogram(lengths: npt.NDArray[np.integer[Any]]) -> Histogram:
    """Samples by tokens, from their lengths (S,); each bin includes its upper edge.

    Bins are equal, or on a logarithmic axis where lengths span two orders of magnitude.
    """
    longest = max(int(lengths.max(initial=1)), 1)
    shortest = max(int(lengths.min(initial=longest)), 1)
    if is_log := longest >= _LOG_SPAN * shortest:
        ends = np.minimum(np.ceil(np.geomspace(shortest, longest, _BINS + 1)[1:]), longest)
        edges = np.concatenate(([shortest - 0.5], np.unique(ends)))
    else:
        # Whole tokens: bins of unequal size would look like lengths that are rare.
        width = -(-longest // _BINS)
        edges = np.arange(-(-longest // width) + 1) * width
    counts, _ = np.histogram(lengths, edges + 0.5)
    return Histogram(edges.tolist(), counts.tolist(), is_log)


def fill_histogram(packs: PackPlan, num_bins: int) -> Histogram:
    """Packs by the share of their tokens that is filled, in percent."""
    counts, edges = np.histogram(packs.tokens_per_pack() / packs.capacity * 100, bins=num_bins, range=(0, 100))
    return Histogram(edges.tolist(), counts.tolist())


def page_content(found: Preview, figures: Mapping[str, Any], command: str, title: str) -> PageContent:
    """What the page of a plan shows.

    Args:
        title: what was planned for.
    """
    packs = found.plan.whole_packs
    drawn = [_branches(packs, *packs.offsets[i : i + 2]) for i in range(min(packs.num_packs, _DRAWN_PACKS))]
    balance = found.plan.summary.balance
    assert balance is not None, "a preview knows costs"
    before, after = _worst_of_each(balance.steps_before), _worst_of_each(balance.steps)
    padding = figures["padding_of_plain_batches"]
    return PageContent(
        title=title,
        headline=_headline(figures),
        parts=sample_parts(figures),
        dropped=_dropped(found),
        lengths=length_histogram(packs.full_lengths),
        capacity=packs.capacity,
        fills=fill_histogram(packs, 50),
        packs=drawn,
        plain=PlainFigures(figures["rows_of_plain_batches"], percent(padding), _times(figures), padding > 0.05),
        balance=(before, after) if found.options.world_size > 1 else None,
        processes_per_rank=found.first_inputs.sequence_parallel_size,
        shared=_shared_figures(packs, figures),
        mixture=_mixture(found),
        figures=[*plan_lines(figures), *_fingerprints(figures)],
        commands=[("This page was made by", command)],
    )


def _mixture(found: Preview) -> MixtureFigures | None:
    """What the epoch, or a run with stages, has of each source, and how evenly it comes."""
    sources, counts, mixture = found.source_figures, found.counts_of_steps, found.first_inputs.mixture
    if sources is None or counts is None or mixture is None:
        return None
    stages: list[tuple[float, str, list[tuple[str, ...]]]] = []
    if found.inputs.stages:
        counts = found.timeline.counts_of_steps()
        each_stage = found.timeline.figures()
        sources = share_figures(added([by_name(stage.counts(), stage.mixture) for stage in found.timeline.stages]))
        num = found.timeline.num_steps
        stages = [((s["first_step"] - 1) / num, stage_title(s), source_rows(s["sources"])[1:]) for s in each_stage]
    each = max(min(100, -(-len(counts) // 4)), -(-len(counts) // _DRAWN_STRETCHES))
    of_unit = counts[:, :, ("samples", "tokens", "target_tokens").index(mixture.unit)]
    sums = np.add.reduceat(of_unit, np.arange(0, len(of_unit), each), axis=0)
    # Sources of one name are one.
    columns = [sums[:, [own == name for own in mixture.names]].sum(axis=1) for name in sources]
    together = np.stack(columns, axis=1)
    heading, *rows = source_rows(sources)
    parts = together / np.maximum(together.sum(axis=1, keepdims=True), 1)
    return MixtureFigures(heading, rows, parts.tolist(), mixture.unit.replace("_", " "), each, len(counts), stages)


def _headline(figures: Mapping[str, Any]) -> tuple[tuple[str, str, str], ...]:
    """The large figures, each as the table has it."""
    without = f"{percent(figures['padding_of_plain_batches'])} padding without packing"
    if figures["skrull"] is not None:
        use = (percent(figures["skrull"]["bucket_fill"]), "fill of the micro-batches", without)
    elif figures["waste_tokens"] is not None:
        use = (percent(figures["fill"]), "fill of the packs", without)
    else:
        use = (percent(figures["fill"]), "of the batches' tokens are not padding", "")
    steps = figures["steps_per_epoch"]
    is_packed = figures["waste_tokens"] is not None or figures["skrull"] is not None
    packs = ("packs", f"of {figures['capacity']:,} tokens each") if is_packed else ("rows", "one sample each")
    return (
        use,
        (f"{figures['packs']:,}", *packs),
        (f"{steps:,}", "optimizer steps", f"per epoch, {figures['samples'] / max(steps, 1):,.1f} samples each"),
        (f"{figures['samples']:,}", "samples", _left_out(figures)),
    )


def _left_out(figures: Mapping[str, Any]) -> str:
    """Counts of samples of the caches that are left out."""
    if figures["sources"] is None:
        return f"{figures['filtered']:,} were too long"
    return f"{figures['not_drawn']:,} were not drawn, {figures['filtered']:,} were too long or short"


def _shared_figures(packs: PackPlan, figures: Mapping[str, Any]) -> SharedFigures | None:
    """What shared prefixes save, in large figures, and two of the trees: the one that saves most, and a usual one."""
    saved = figures["shared_prefixes"]
    if saved is None or packs.shared is None:
        return None
    whole = saved["tokens_without"]
    headline = [(percent(saved["token_share_saved"]), "of the tokens saved", f"{saved['tokens_saved']:,} of {whole:,}")]
    if saved["tower_work_share_saved"]:
        remark = "each medium once a tree"
        headline.append((percent(saved["tower_work_share_saved"]), "of the towers' work saved", remark))
    steps = (f"{figures['steps_per_epoch']:,}", "optimizer steps", f"instead of {saved['steps_without']:,} per epoch")
    sizes = f"of {saved['samples_per_tree']:.1f} samples, {saved['largest_tree']:,} at most"
    return SharedFigures([*headline, steps, (f"{saved['num_trees']:,}", "trees", sizes)], _drawn_trees(packs))


def _drawn_trees(packs: PackPlan) -> list[tuple[str, str, list[Branch]]]:
    """What it is, its figures and its branches, of the tree that saves most and of the median one."""
    assert packs.shared is not None, "asked before"
    starts = np.append(np.flatnonzero(packs.shared == 0), packs.num_samples)
    saved = np.add.reduceat(packs.shared, starts[:-1], dtype=np.int64)
    by_saved, num_trees = np.argsort(-saved, kind="stable"), int(np.count_nonzero(saved))
    names = {"The tree that saves most": 0, "The median tree": num_trees // 2}
    found = []
    for name, place in list(names.items())[:num_trees]:
        start, stop = starts[by_saved[place] : by_saved[place] + 2].tolist()
        tokens, whole = int(packs.lengths[start:stop].sum()), int(packs.full_lengths[start:stop].sum())
        told = f"{stop - start:,} samples, {tokens:,} tokens instead of {whole:,}"
        if stop - start > _DRAWN_SAMPLES:
            told += f"; the first {_DRAWN_SAMPLES} samples are drawn"
        found.append((name, told, _branches(packs, start, min(stop, start + _DRAWN_SAMPLES))))
    return found


def _branches(packs: PackPlan, start: int, stop: int) -> list[Branch]:
    return find_branches(packs.lengths[start:stop], None if packs.shared is None else packs.shared[start:stop])


def _worst_of_each(steps: npt.NDArray[np.float64]) -> list[float]:
    """The largest of every few steps, so that no more than can be drawn are left and the worst is among them."""
    every = -(-len(steps) // _DRAWN_STEPS)
    return [float(value) for value in np.maximum.reduceat(steps, np.arange(0, len(steps), every))] if len(steps) else []


def sample_parts(figures: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Where the samples of the caches are: (what, how many), which add up to all of them."""
    is_mixture = figures["sources"] is not None
    parts = [
        ("in the plan", figures["num_distinct_samples"]),
        ("not drawn in this epoch", figures["not_drawn"]),
        ("of another length than is taken" if is_mixture else "longer than --max-length", figures["filtered"]),
    ]
    return [(what, count) for what, count in parts if count]


def _dropped(found: Preview) -> list[tuple[str, int]]:
    """Rows, and turns and responses of others, that the exports left out, by reason."""
    lost = Counter[str]()
    for manifest in () if found.inputs.reader is None else found.inputs.reader.manifests:
        lost.update({f"dropped at export: {reason}": count for reason, count in manifest.dropped.items()})
        lost.update({f"turns left out at export: {reason}": count for reason, count in manifest.parts_left_out.items()})
    return list(lost.items())


def _fingerprints(figures: Mapping[str, Any]) -> list[Line]:
    found = [("costs from", str(figures["cost_model"])), ("plan", str(figures["plan_fingerprint"]))]
    if figures["cache_fingerprint"]:
        found.append(("caches", str(figures["cache_fingerprint"])))
    return found


Figures = Sequence[Mapping[str, Any]]


def _number(value: float) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


def _share_saved(figures: Mapping[str, Any] | None) -> str:
    return "none" if figures is None else percent(figures["token_share_saved"])


_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("capacity", "packing length", _number),
    ("packs", "packs", _number),
    ("samples_per_pack", "samples per pack", _number),
    ("fill", "fill", percent),
    ("over_lower_bound", "above lower bound", percent),
    ("steps_per_epoch", "steps per epoch", _number),
    ("filtered", "samples too long", _number),
    ("shared_prefixes", "tokens saved by shared prefixes", _share_saved),
)


def sweep_cells(rows: Figures) -> list[tuple[str, ...]]:
    """Header and a line for each packing length."""
    header = tuple(title for _, title, _ in _COLUMNS)
    return [header, *(tuple(shown(row[name]) for name, _, shown in _COLUMNS) for row in rows)]


def sweep_lines(rows: Figures) -> list[str]:
    """What ``packtool plan --sweep`` prints."""
    return aligned(sweep_cells(rows), "r")


def sweep_page(rows: Figures, title: str, command: str) -> str:
    """The page of a sweep as text."""
    best = max(rows, key=lambda row: row["fill"])
    header, *cells = sweep_cells(rows)
    fewest, most = (pick(row["steps_per_epoch"] for row in rows) for pick in (min, max))
    least, largest = (pick(row["capacity"] for row in rows) for pick in (min, max))
    cards = [
        (f"{len(rows)}", "packing lengths", f"{least:,} to {largest:,} tokens"),
        (percent(best["fill"]), "is the best fill", f"with packs of {best['capacity']:,} tokens"),
        (f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}", "optimizer steps", "per epoch"),
        (f"{rows[0]['num_samples_in_caches']:,}", "samples", "including those that are left out"),
    ]
    return render(
        "sweep.html",
        title=title,
        command=command,
        cards=cards,
        header=header,
        rows=cells,
        fills=_bars(rows, "fill", percent, 1.0),
        steps=_bars(rows, "steps_per_epoch", _number, most),
    )


def _bars(rows: Figures, name: str, shown: Callable[[float], str], whole: float) -> list[Any]:
    """Bars to one scale, which ends at ``whole``."""
    return [
        (f"{row['capacity']:,}", [("accent", 100 * row[name] / (whole or 1), "")], "", shown(row[name]), False)
        for row in rows
    ]


_TITLES = (
    *("", "packing length", "recompute", "sharding", "ranks a pack", "GiB a rank"),
    *("tokens/step", "s/step", "tokens/s", "hours"),
)


def fit_lines(figures: Mapping[str, Any]) -> list[str]:
    """What ``packtool plan --fit`` prints below its title: a row for each proposal, the cheapest first."""
    rows = [
        (
            f"{number}",
            f"{found['packing_length']:,}",
            "yes" if found["gradient_checkpointing"] else "no",
            found["sharding"],
            f"{found['sequence_parallel_size']}",
            f"{found['memory_gib']:.1f}",
            f"{found['tokens_per_step']:,.0f}",
            f"{found['step_seconds']:.3g}",
            f"{found['tokens_per_second']:,.0f}",
            f"{found['hours']:,.2f}",
        )
        for number, found in enumerate(figures["proposals"], start=1)
    ]
    return aligned([_TITLES, *rows], "r")


def fit_title(figures: Mapping[str, Any]) -> list[str]:
    """What was searched, and what came of it."""
    return [
        f"{figures['num_settings']:,} settings for {figures['hardware']}, of which the {figures['num_tried']:,} of "
        "least time per token were tried:",
        f"{figures['num_too_large']:,} of them do not fit into {figures['budget_gib']:.1f} GiB of "
        f"{figures['fit'] / 2**30:.1f} (the rest is for libraries and the allocator)",
    ]


def fit_advice(figures: Mapping[str, Any], hardware: str | None) -> list[str]:
    """The command of the best, how to check it, and how to get the others'."""
    return [
        "",
        "the first one trains with:",
        f"  {figures['proposals'][0]['command']}",
        f"--dry-run --hardware {hardware or 'h100'} behind it checks it on any machine. --json has every row with its "
        "command;",
        "what is given beside --fit (--packing-length, --gradient-checkpointing, --fsdp, ...) is kept.",
        *_what_sharing_saves(figures["shareable"]),
    ]


def _what_sharing_saves(share: float) -> list[str]:
    if not share:
        return []
    return [
        f"shared prefixes could save {share:.0%} of the tokens beyond that: --fit computes every sample whole, and "
        "packtool plan --share-prefix true tells what they do to a plan."
    ]


def resumed_lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """The figures for a terminal."""
    yield f"from {figures['checkpoint']}, after step {figures['step']:,}, in epoch {figures['epoch'] + 1:,}"
    if figures["data_changed"]:
        columns = ("samples", "trained", "left", "new", "gone")
        rows = [("cache", "", "samples", "trained in this epoch", "left", "new", "gone")]
        rows += [
            (source["directory"], source["fate"], *(f"{source[name]:,}" for name in columns))
            for source in figures["sources"]
        ]
        yield from aligned(rows, "llr")
    else:
        yield "the data are those of the checkpoint"
    steps, before, step = figures["steps"], figures["steps_before"], figures["step"]
    has_others = steps != before
    yield from aligned(
        [
            ("left of this epoch", f"{figures['samples_left_in_epoch']:,} samples"),
            ("", f"{figures['steps_left_in_epoch']:,} steps"),
            *([("steps of a whole epoch", f"{figures['steps_per_epoch']:,}")] if figures["stages"] is None else []),
            ("steps of the run", f"{steps:,}" + (f", before {before:,}" if has_others else "")),
            (
                "of the learning rate's schedule",
                f"{step / steps:.1%} done" + (f", before {step / before:.1%}" if has_others else ""),
            ),
            ("data-parallel ranks", f"{figures['world_size']:,}"),
        ],
        "ll",
    )
    for stage in figures["stages"] or ():
        if stage["last_step"] > step:
            yield f"{stage_title(stage)}, {stage['samples']:,} samples:"
            yield from ("  " + line for line in aligned(source_rows(stage["sources"]), "lr"))
    if figures["data_changed"]:
        yield "packtool train --resume-from-checkpoint true --data-change allow, with these caches, goes on so"
