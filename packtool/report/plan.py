"""Text output of ``packtool plan``, also with ``--sweep``, ``--fit`` and ``--resume``, and the page of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from packtool.report.drawing import plural, render
from packtool.report.tables import Figures, Line, aligned, fill_in, filled_lines, percent, source_rows
from packtool.train.prepare.timeline import stage_title


def plan_lines(figures: Figures) -> list[Line]:
    """Return the output of ``packtool plan`` as (name, value); ``figures`` is that of ``packtool plan --json``."""
    values = {
        **figures,
        "num_repeats": figures["num_samples"] - figures["num_distinct_samples"],
        "plain_rows": plural(figures["rows_of_plain_batches"], "row"),  # of a padded batch without packing
        "times": times_without_packing(figures),
    }
    lines = filled_lines("plan samples", values)
    savings = figures["shared_prefixes"]
    if savings is not None:
        steps_saved = savings["steps_without"] - figures["steps_per_epoch"]
        lines += filled_lines("plan shared prefixes", {**savings, "steps_saved": steps_saved})
    return [*lines, *_pack_lines(figures), *filled_lines("plan steps", values)]


def times_without_packing(figures: Figures) -> str:
    """Return the tokens computed without packing, relative to those with packing, as text such as ``3.13×``."""
    return f"{figures['tokens_of_plain_batches'] / figures['tokens']:.2f}×"


def _pack_lines(figures: Figures) -> list[Line]:
    """Return the lines on packs, on padded rows without packing, or on packs and micro-batches of Skrull."""
    skrull = figures["skrull"]
    if skrull is None:
        if figures["waste_tokens"] is None:
            return filled_lines("plan padded rows", figures)
        return filled_lines("plan packs", figures) + filled_lines("plan fill", figures)
    num_processes = skrull["sequence_parallel_size"]  # processes that share a micro-batch
    values = {
        **figures,
        **skrull,
        "bucket": f"{num_processes} x " * (num_processes > 1) + f"{skrull['bucket_size']:,}",
        "local_share": skrull["local_tokens"] / figures["tokens"],
        "sharded_share": skrull["sharded_tokens"] / figures["tokens"],
    }
    return filled_lines("plan packs", values) + filled_lines("plan skrull", values)


_COLUMNS = (  # of a sweep: heading and text
    ("packing length", "{packing_length:,}"),
    ("packs", "{num_packs:,}"),
    ("samples per pack", "{samples_per_pack:,.2f}"),
    ("fill", "{fill:percent}"),
    ("packs above lower bound", "{over_lower_bound:percent}"),
    ("steps per epoch", "{steps_per_epoch:,}"),
    ("samples too long", "{filtered:,}"),
    ("tokens saved by shared prefixes", "{saved}"),
)


def sweep_cells(plans: Sequence[Figures]) -> list[tuple[str, ...]]:
    """Return a heading and a row for each packing length."""
    rows = [tuple(heading for heading, _ in _COLUMNS)]
    for figures in plans:
        shared = figures["shared_prefixes"]
        saved = "none" if shared is None else percent(shared["token_share_saved"])
        rows.append(fill_in([text for _, text in _COLUMNS], {**figures, "saved": saved}))
    return rows


def sweep_page(plans: Sequence[Figures], title: str, command: str) -> str:
    """Return the page of a sweep as HTML; ``plans`` are the figures of each packing length."""
    header, *rows = sweep_cells(plans)
    max_steps = max(figures["steps_per_epoch"] for figures in plans)
    cards, steps = _sweep_cards(plans), _sweep_bars(plans, "steps_per_epoch", "{:,}".format, max_value=max_steps)
    fills = _sweep_bars(plans, "fill", percent, max_value=1.0)
    return render(
        "sweep.html", title=title, command=command, cards=cards, header=header, rows=rows, fills=fills, steps=steps
    )


def _sweep_cards(plans: Sequence[Figures]) -> list[tuple[str, str, str]]:
    """Return the cards at the top of the page of a sweep: packing lengths, best fill, steps and samples."""
    lengths = [figures["packing_length"] for figures in plans]
    best = max(plans, key=lambda figures: figures["fill"])
    steps = [figures["steps_per_epoch"] for figures in plans]
    min_steps, max_steps = min(steps), max(steps)
    step_range = f"{min_steps:,}" if min_steps == max_steps else f"{min_steps:,} to {max_steps:,}"
    return [
        (f"{len(plans)}", "packing lengths", f"{min(lengths):,} to {max(lengths):,} tokens"),
        (percent(best["fill"]), "best fill", f"with packs of {best['packing_length']:,} tokens"),
        (step_range, "optimizer steps", "per epoch"),
        (f"{plans[0]['num_samples_in_caches']:,}", "samples", "including those that are too long"),
    ]


def _sweep_bars(plans: Sequence[Figures], name: str, text: Callable[[Any], str], max_value: float) -> list[Any]:
    """Return a bar of the figure ``name`` for each packing length, in the format of ``simulation._bars``."""
    bars = []
    for figures in plans:
        segment = ("accent", 100 * figures[name] / (max_value or 1), "")
        bars.append((f"{figures['packing_length']:,}", [segment], "", text(figures[name]), False))
    return bars


_PROPOSAL_HEADING: tuple[str, ...] = (
    *("", "packing length", "recompute", "sharding", "ranks per pack", "GiB per rank"),
    *("tokens/step", "s/step", "tokens/s", "hours"),
)
_PROPOSAL_CELLS = (
    *("{number}", "{packing_length:,}", "{recompute}", "{sharding}", "{sequence_parallel_size}", "{memory_gib:.1f}"),
    *("{tokens_per_step:,.0f}", "{step_seconds:.3g}", "{tokens_per_second:,.0f}", "{hours:,.2f}"),
)
_FIT_TEXTS = (
    "{num_settings:,} settings for {hardware}; the {num_tried:,} with the highest throughput were tried.",
    "{num_too_large:,} of them do not fit into {budget_gib:.1f} of {fit_gib:.1f} GiB (the rest is for libraries and "
    "the allocator).",
)
_SHARING_TEXTS = (
    "Shared prefixes save {token_share_saved:.0%} of the tokens of the first row; tokens/s counts them.",
    "Gathering their keys and values takes {gathering_share:.1%} of the time.",
)
_RECOMPUTATION_TEXT = (
    "In the first row, {recomputing_layers[min]} to {recomputing_layers[max]} of {layers} layers recompute (median "
    "{recomputing_layers[median]:g}), at most {recomputed_flops:.1%} more FLOPs."
)


def fit_lines(figures: Figures, hardware: str | None) -> list[str]:
    """Return the output of ``packtool plan --fit``: a row for each proposal, and the command of the first one.

    ``figures`` are those of ``Fit.figures``, with at least one proposal, the fastest first. ``hardware`` is the value
    of ``--hardware``.
    """
    proposals = figures["proposals"]
    rows = [_PROPOSAL_HEADING]
    for number, proposal in enumerate(proposals, start=1):
        values = {**proposal, "number": number, "recompute": _recompute_text(proposal)}
        rows.append(fill_in(_PROPOSAL_CELLS, values))

    fastest = proposals[0]
    fit_gib = figures["fit"] / 2**30
    lines = [
        *fill_in(_FIT_TEXTS, {**figures, "fit_gib": fit_gib}),
        *aligned(rows, "r"),
        "",
        "Command of the first row:",
        f"  {fastest['command']}",
        f"Add --dry-run --hardware {hardware or 'h100'} to check it on any machine. --json has all commands.",
        "Options given with --fit (--packing-length, --gradient-checkpointing, --fsdp, ...) are not changed.",
    ]
    if figures["recomputation"] is not None:
        lines += fill_in([_RECOMPUTATION_TEXT], figures["recomputation"])
    if fastest["token_share_saved"]:
        lines += fill_in(_SHARING_TEXTS, fastest)
    return lines


def _recompute_text(proposal: Figures) -> str:
    """Return which layers of a proposal recompute their activations: yes, no, or their number."""
    layers = proposal["recomputation"]
    if layers:
        return f"{layers['recomputing_layers']['median']:g} of {layers['layers']}"
    return "yes" if proposal["gradient_checkpointing"] else "no"


_CHANGED_HEADING = ("cache", "status", "samples", "trained in this epoch", "left", "new", "removed")
_CHANGED_CELLS = ("{directory}", "{fate}", "{samples:,}", "{trained:,}", "{left:,}", "{new:,}", "{gone:,}")


def resumed_lines(figures: Figures) -> Iterator[str]:
    """Yield the output of ``packtool plan --resume``."""
    step = figures["step"]
    yield f"resumes from {figures['checkpoint']}, after step {step:,}, in epoch {figures['epoch'] + 1:,}"
    if figures["data_changed"]:
        rows = [_CHANGED_HEADING, *(fill_in(_CHANGED_CELLS, source) for source in figures["sources"])]
        yield from aligned(rows, "llr")
    else:
        yield "the data are the same as at the checkpoint"
    yield from aligned(filled_lines("plan resumed", {**figures, **_progress_texts(figures)}), "ll")
    for stage in figures["stages"] or ():
        if stage["last_step"] > step:
            yield f"{stage_title(stage)}, {stage['samples']:,} samples:"
            yield from ("  " + line for line in aligned(source_rows(stage["sources"]), "lr"))
    if figures["data_changed"]:
        yield "to resume: packtool train with these caches, --resume-from-checkpoint true --data-change allow"


def _progress_texts(figures: Figures) -> dict[str, Any]:
    """Return how much of the run is done, and how much it was of the steps planned before the checkpoint."""
    step, num_steps, num_steps_before = figures["step"], figures["steps"], figures["steps_before"]
    texts = {"done": step / num_steps, "before": "", "done_before": ""}
    if num_steps != num_steps_before:
        texts["before"] = f", previously {num_steps_before:,}"
        texts["done_before"] = f", previously {step / num_steps_before:.1%}"
    return texts
