"""Text output of ``packtool plan``, also with ``--sweep``, ``--fit`` and ``--resume``, and the page of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from packtool.report.drawing import plural, render
from packtool.report.tables import Line, aligned, percent, source_rows
from packtool.train.prepare.timeline import stage_title


def plan_lines(figures: Mapping[str, Any]) -> list[Line]:
    """Return the output of ``packtool plan`` as (name, value); ``figures`` is that of ``packtool plan --json``."""
    lines = [
        *_sample_lines(figures),
        ("tokens", f"{figures['tokens']:,}"),
        *_shared_lines(figures),
        *_pack_lines(figures),
        ("optimizer steps per epoch", f"{figures['steps_per_epoch']:,}"),
        ("  samples per step, mean", f"{figures['samples_per_step']:,.1f}"),
    ]
    if figures["cache_fingerprint"] is not None:  # plans of --lengths have no cache: their target tokens are unknown
        lines.append(("  target tokens per step, mean", f"{figures['target_tokens_per_step']:,.0f}"))
    lines += [
        *_plain_batch_lines(figures),
        *_balance_lines(figures["balance"]),
        ("attention FLOPs, relative to packs without isolation", f"{figures['efficient_attn_ratio']:.1%}"),
        ("FLOPs per epoch", f"{figures['flops_per_epoch']:.3g}"),
    ]
    if "hours" in figures:
        lines.append(("training time, all epochs", f"{figures['hours']:,.2f} h"))
    return [*lines, ("planning time", f"{figures['plan_seconds']:.2f} s")]


def _plain_batch_lines(figures: Mapping[str, Any]) -> list[Line]:
    """Return the lines on the same samples without packing, in padded batches."""
    return [
        ("without packing, in padded batches of", plural(figures["rows_of_plain_batches"], "row")),
        ("  padding", percent(figures["padding_of_plain_batches"])),
        ("  tokens to compute, relative to packing", times_without_packing(figures)),
        ("  optimizer steps per epoch", f"{figures['steps_of_plain_batches']:,}"),
    ]


def _balance_lines(balance: Mapping[str, float]) -> list[Line]:
    """Return the lines on the load imbalance of ranks: with round-robin assignment, and as planned."""
    return [
        ("load imbalance, slowest rank ÷ mean rank", "round-robin → as planned"),
        ("  mean over all steps", f"{balance['mean_before']:.3f} → {balance['mean']:.3f}"),
        ("  worst step", f"{balance['worst_before']:.3f} → {balance['worst']:.3f}"),
    ]


def times_without_packing(figures: Mapping[str, Any]) -> str:
    """Return the tokens computed without packing, relative to those with packing, as text such as ``3.13×``."""
    return f"{figures['tokens_of_plain_batches'] / figures['tokens']:.2f}×"


def _sample_lines(figures: Mapping[str, Any]) -> list[Line]:
    """Return the lines on samples; ``samples`` minus repeats plus samples left out are all samples of the caches."""
    samples = ("samples", f"{figures['num_samples']:,}")
    filtered = ("  filtered by length", f"{figures['filtered']:,}")
    if figures["sources"] is None:
        return [samples, filtered]
    repeated = ("  repeated samples", f"{figures['num_samples'] - figures['num_distinct_samples']:,}")
    not_drawn = ("  not drawn", f"{figures['not_drawn']:,}")
    in_caches = ("  samples in the caches", f"{figures['num_samples_in_caches']:,}")
    return [samples, repeated, not_drawn, filtered, in_caches]


def _shared_lines(figures: Mapping[str, Any]) -> list[Line]:
    """Return the lines on tokens and steps that shared prefixes save; [] if the plan shares none."""
    shared = figures["shared_prefixes"]
    if shared is None:
        return []
    lines = [
        ("  tokens saved by shared prefixes", f"{shared['tokens_saved']:,} of {shared['tokens_without']:,}"),
        ("    fraction of tokens", percent(shared["token_share_saved"])),
    ]
    if shared["tower_work_share_saved"]:
        lines.append(("    fraction of the towers' FLOPs", percent(shared["tower_work_share_saved"])))
    steps_without = shared["steps_without"]  # optimizer steps per epoch without shared prefixes
    steps = f"{steps_without - figures['steps_per_epoch']:,} of {steps_without:,}"
    lines.append(("    optimizer steps saved per epoch", steps))
    return lines + _tree_lines(shared)


def _tree_lines(shared: Mapping[str, Any]) -> list[Line]:
    """Return the lines on prefix trees: their sizes and, if there are any, those split over packs."""
    sizes = f"{shared['samples_per_tree']:.1f} samples each on average, {shared['largest_tree']:,} at most"
    lines = [("    prefix trees", f"{shared['num_trees']:,}, {sizes}")]
    if shared.get("trees_in_several_packs"):
        split = f"{shared['trees_in_several_packs']:,}; {shared['of_them_in_one_step']:,} within one step, "
        split += f"{shared['of_them_meeting_in_a_step']:,} with several packs in the same step"
        lines.append(("    trees split over packs", split))
    return lines


def _pack_lines(figures: Mapping[str, Any]) -> list[Line]:
    """Return the lines on packs, on padded rows without packing, or on packs and micro-batches of Skrull."""
    skrull = figures["skrull"]
    if skrull is None and figures["waste_tokens"] is None:  # padded rows
        return [
            ("padded rows, one sample each", f"{figures['num_packs']:,}"),
            ("  fill (tokens that are not padding)", percent(figures["fill"])),
        ]
    lines = [
        ("packs", f"{figures['num_packs']:,} of {figures['packing_length']:,} tokens"),
        ("  samples per pack", f"{figures['samples_per_pack']:.2f}"),
    ]
    if skrull is not None:
        return lines + _skrull_lines(figures, skrull)
    excess = f"{figures['over_lower_bound']:.4%} (of {figures['lower_bound']:,} packs)"
    return [*lines, ("  fill", percent(figures["fill"])), ("  packs above the lower bound", excess)]


def _skrull_lines(figures: Mapping[str, Any], skrull: Mapping[str, Any]) -> list[Line]:
    """Return the lines on the micro-batches of Skrull; ``skrull``: its part of the plan's ``figures``."""
    num_processes = skrull["sequence_parallel_size"]  # processes that share a micro-batch
    bucket = f"{num_processes} x {skrull['bucket_size']:,}" if num_processes > 1 else f"{skrull['bucket_size']:,}"
    imbalance = skrull["device_balance"]
    return [
        ("micro-batches by Skrull", f"{skrull['micro_batches']:,} of at most {bucket} tokens"),
        ("  further empty micro-batches", f"{figures['num_empty_micro_batches']:,}"),
        ("  fill of the micro-batches", percent(skrull["bucket_fill"])),
        ("  tokens computed on one process", f"{skrull['local_tokens'] / figures['tokens']:.1%}"),
        (f"  tokens split over {num_processes} processes", f"{skrull['sharded_tokens'] / figures['tokens']:.1%}"),
        ("  hardware", str(skrull["hardware"])),
        ("  load imbalance, slowest process ÷ mean process", f"{imbalance['mean']:.3f}"),
        ("    worst step", f"{imbalance['worst']:.3f}"),
    ]


Figures = Sequence[Mapping[str, Any]]


def _number(value: float) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


# Columns of a sweep: name of the figure, heading, and a function from the value to its text.
_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("packing_length", "packing length", _number),
    ("num_packs", "packs", _number),
    ("samples_per_pack", "samples per pack", _number),
    ("fill", "fill", percent),
    ("over_lower_bound", "packs above lower bound", percent),
    ("steps_per_epoch", "steps per epoch", _number),
    ("filtered", "samples too long", _number),
    (
        "shared_prefixes",
        "tokens saved by shared prefixes",
        lambda shared: "none" if shared is None else percent(shared["token_share_saved"]),
    ),
)


def sweep_cells(plans: Figures) -> list[tuple[str, ...]]:
    """Return a heading and a row for each packing length."""
    rows = [tuple(text(figures[name]) for name, _, text in _COLUMNS) for figures in plans]
    return [tuple(heading for _, heading, _ in _COLUMNS), *rows]


def sweep_page(plans: Figures, title: str, command: str) -> str:
    """Return the page of a sweep as HTML, which shows ``command`` as the command that made it.

    ``plans`` has the figures of the plan for each packing length, as ``packtool plan --json`` outputs them.
    """
    header, *rows = sweep_cells(plans)
    max_steps = max(figures["steps_per_epoch"] for figures in plans)
    return render(
        "sweep.html",
        title=title,
        command=command,
        cards=_sweep_cards(plans),
        header=header,
        rows=rows,
        fills=_sweep_bars(plans, "fill", percent, max_value=1.0),
        steps=_sweep_bars(plans, "steps_per_epoch", _number, max_value=max_steps),
    )


def _sweep_cards(plans: Figures) -> list[tuple[str, str, str]]:
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


def _sweep_bars(plans: Figures, name: str, text: Callable[[Any], str], max_value: float) -> list[Any]:
    """Return a bar of the figure ``name`` for each packing length, in the format of ``simulation._bars``.

    ``text`` formats the figure; a bar of ``max_value`` has the full width.
    """
    bars = []
    for figures in plans:
        value = figures[name]
        segment = ("accent", 100 * value / (max_value or 1), "")
        bars.append((f"{figures['packing_length']:,}", [segment], "", text(value), False))
    return bars


def fit_lines(figures: Mapping[str, Any], hardware: str | None) -> list[str]:
    """Return the output of ``packtool plan --fit``: a row for each proposal, and the command of the first one."""
    setting_names = ("packing length", "recompute", "sharding", "ranks per pack")
    rows: list[tuple[str, ...]] = [("", *setting_names, "GiB per rank", "tokens/step", "s/step", "tokens/s", "hours")]
    for number, proposal in enumerate(figures["proposals"], start=1):
        rows.append((f"{number}", *_proposal_cells(proposal)))
    lines = [
        f"{figures['num_settings']:,} settings for {figures['hardware']}; the {figures['num_tried']:,} with the "
        "highest throughput were tried.",
        f"{figures['num_too_large']:,} of them do not fit into {figures['budget_gib']:.1f} of "
        f"{figures['fit'] / 2**30:.1f} GiB (the rest is for libraries and the allocator).",
        *aligned(rows, "r"),
        "",
        "Command of the first row:",
        f"  {figures['proposals'][0]['command']}",
        f"Add --dry-run --hardware {hardware or 'h100'} to check it on any machine. --json has all commands.",
        "Options given with --fit (--packing-length, --gradient-checkpointing, --fsdp, ...) are not changed.",
    ]
    if (planned := figures["recomputation"]) is not None:
        lines.append(_recomputation_line(planned))
    if saved := figures["proposals"][0]["token_share_saved"]:
        lines.append(f"Shared prefixes save {saved:.0%} of the tokens of the first row; tokens/s counts them.")
    return lines


def _recomputation_line(planned: Mapping[str, Any]) -> str:
    layers = planned["recomputing_layers"]
    line = f"In the first row, {layers['min']} to {layers['max']} of {planned['layers']} layers recompute "
    return f"{line}(median {layers['median']:g}), at most {planned['recomputed_flops']:.1%} more FLOPs."


def _recompute_cell(proposal: Mapping[str, Any]) -> str:
    """Return the median number of layers that recompute with ``auto``, or whether all do."""
    if (planned := proposal["recomputation"]) is None:
        return "yes" if proposal["gradient_checkpointing"] else "no"
    return f"{planned['recomputing_layers']['median']:g} of {planned['layers']}"


def _proposal_cells(proposal: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of a proposal: its settings, memory, and throughput."""
    return (
        f"{proposal['packing_length']:,}",
        _recompute_cell(proposal),
        proposal["sharding"],
        f"{proposal['sequence_parallel_size']}",
        f"{proposal['memory_gib']:.1f}",
        f"{proposal['tokens_per_step']:,.0f}",
        f"{proposal['step_seconds']:.3g}",
        f"{proposal['tokens_per_second']:,.0f}",
        f"{proposal['hours']:,.2f}",
    )


def resumed_lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield the output of ``packtool plan --resume``."""
    step = figures["step"]
    yield f"resumes from {figures['checkpoint']}, after step {step:,}, in epoch {figures['epoch'] + 1:,}"
    if figures["data_changed"]:
        rows = [("cache", "status", "samples", "trained in this epoch", "left", "new", "removed")]
        for source in figures["sources"]:
            counts = [f"{source[name]:,}" for name in ("samples", "trained", "left", "new", "gone")]
            rows.append((source["directory"], source["fate"], *counts))
        yield from aligned(rows, "llr")  # all columns of numbers to the right
    else:
        yield "the data are the same as at the checkpoint"
    yield from aligned(_remaining_lines(figures), "ll")
    for stage in figures["stages"] or ():
        if stage["last_step"] > step:
            yield f"{stage_title(stage)}, {stage['samples']:,} samples:"
            yield from ("  " + line for line in aligned(source_rows(stage["sources"]), "lr"))
    if figures["data_changed"]:
        yield "to resume: packtool train with these caches, --resume-from-checkpoint true --data-change allow"


def _remaining_lines(figures: Mapping[str, Any]) -> list[Line]:
    """Return the lines on what is left of the epoch and of the run."""
    step = figures["step"]
    num_steps = figures["steps"]
    num_steps_before = figures["steps_before"]  # as planned when the checkpoint was written
    total, done = f"{num_steps:,}", f"{step / num_steps:.1%} done"
    if num_steps != num_steps_before:
        total += f", previously {num_steps_before:,}"
        done += f", previously {step / num_steps_before:.1%}"
    lines = [("left in this epoch", f"{figures['samples_left_in_epoch']:,} samples")]
    lines.append(("", f"{figures['steps_left_in_epoch']:,} steps"))
    if figures["stages"] is None:
        lines.append(("steps of a full epoch", f"{figures['steps_per_epoch']:,}"))
    lines += [
        ("steps of the run", total),
        ("learning rate schedule", done),
        ("data-parallel ranks", f"{figures['world_size']:,}"),
    ]
    return lines
