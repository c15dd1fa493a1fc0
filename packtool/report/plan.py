"""Plans, sweeps, ``--fit`` and ``--resume`` of ``packtool plan`` as lines of a terminal, and the page of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from packtool.report.drawing import plural, render
from packtool.report.tables import Line, aligned, percent, source_rows
from packtool.train.prepare.timeline import stage_title


def plan_lines(figures: Mapping[str, Any]) -> list[Line]:
    """The output of ``packtool plan``."""
    balance = figures["balance"]
    lines = [
        *_sample_lines(figures),
        ("tokens", f"{figures['tokens']:,}"),
        *_shared_lines(figures),
        *_pack_lines(figures),
        ("optimizer steps per epoch", f"{figures['steps_per_epoch']:,}"),
        ("  samples a step, mean", f"{figures['samples_per_step']:,.1f}"),
    ]
    if figures["cache_fingerprint"] is not None:  # a file of lengths does not contain labels
        lines.append(("  target tokens a step, mean", f"{figures['target_tokens_per_step']:,.0f}"))
    lines += [
        ("without packing, in padded batches of", plural(figures["rows_of_plain_batches"], "row")),
        ("  padding", percent(figures["padding_of_plain_batches"])),
        ("  tokens to compute", times_without_packing(figures)),
        ("  optimizer steps per epoch", f"{figures['steps_of_plain_batches']:,}"),
        ("load balance, slowest rank ÷ mean rank", "round-robin → as planned"),
        ("  mean over all steps", f"{balance['mean_before']:.3f} → {balance['mean']:.3f}"),
        ("  worst step", f"{balance['worst_before']:.3f} → {balance['worst']:.3f}"),
        ("attention FLOPs, of those without isolation", f"{figures['efficient_attn_ratio']:.1%}"),
        ("FLOPs per epoch", f"{figures['flops_per_epoch']:.3g}"),
    ]
    if "hours" in figures:
        lines.append(("training time, all epochs", f"{figures['hours']:,.2f} h"))
    return [*lines, ("planning time", f"{figures['plan_seconds']:.2f} s")]


def times_without_packing(figures: Mapping[str, Any]) -> str:
    """The tokens computed without packing, relative to those with packing, as text."""
    return f"{figures['tokens_of_plain_batches'] / figures['tokens']:.2f}×"


def _sample_lines(figures: Mapping[str, Any]) -> list[Line]:
    """Samples of the plan; less repeats and plus those left out, they are all samples of the caches."""
    lines = [("samples", f"{figures['num_samples']:,}")]
    filtered = ("  filtered by length", f"{figures['filtered']:,}")
    if figures["sources"] is None:
        return [*lines, filtered]
    return [
        *lines,
        ("  of them repeats", f"{figures['num_samples'] - figures['num_distinct_samples']:,}"),
        ("  not drawn", f"{figures['not_drawn']:,}"),
        filtered,
        ("  in the caches", f"{figures['num_samples_in_caches']:,}"),
    ]


def _shared_lines(figures: Mapping[str, Any]) -> list[Line]:
    """Savings by shared prefixes."""
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
    if num_split := shared.get("trees_in_several_packs"):
        one_step, meeting = shared["of_them_in_one_step"], shared["of_them_meeting_in_a_step"]
        split = f"{num_split:,}; {one_step:,} in one step, {meeting:,} with several packs in a step"
        lines.append(("    trees in several packs", split))
    return lines


def _pack_lines(figures: Mapping[str, Any]) -> list[Line]:
    """Number and fill of packs, of padded rows, or of Skrull's micro-batches."""
    skrull = figures["skrull"]
    if skrull is None and figures["waste_tokens"] is None:
        return [
            ("rows of one sample each", f"{figures['num_packs']:,}"),
            ("  share of the batches' tokens that is not padding", percent(figures["fill"])),
        ]
    lines = [
        ("packs", f"{figures['num_packs']:,} of {figures['packing_length']:,} tokens"),
        ("  samples per pack", f"{figures['samples_per_pack']:.2f}"),
    ]
    if skrull is None:
        bound = f"{figures['over_lower_bound']:.4%} (of {figures['lower_bound']:,} packs)"
        return [*lines, ("  fill", percent(figures["fill"])), ("  above the lower bound", bound)]
    size, device = skrull["sequence_parallel_size"], skrull["device_balance"]
    bucket = f"{size} x {skrull['bucket_size']:,}" if size > 1 else f"{skrull['bucket_size']:,}"
    return [
        *lines,
        ("micro-batches by Skrull", f"{skrull['micro_batches']:,} of {bucket} tokens at most"),
        ("  empty ones besides", f"{figures['num_empty_micro_batches']:,}"),
        ("  share of their tokens that is used", percent(skrull["bucket_fill"])),
        ("  tokens computed on one process", f"{skrull['local_tokens'] / figures['tokens']:.1%}"),
        (f"  tokens shared by {size} processes", f"{skrull['sharded_tokens'] / figures['tokens']:.1%}"),
        ("  planned for", str(skrull["hardware"])),
        ("  load balance, slowest process ÷ mean process", f"{device['mean']:.3f}"),
        ("    worst step", f"{device['worst']:.3f}"),
    ]


Figures = Sequence[Mapping[str, Any]]


def _number(value: float) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


# Of a sweep: the figure, the heading, and the text of a value.
_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("packing_length", "packing length", _number),
    ("num_packs", "packs", _number),
    ("samples_per_pack", "samples per pack", _number),
    ("fill", "fill", percent),
    ("over_lower_bound", "above lower bound", percent),
    ("steps_per_epoch", "steps per epoch", _number),
    ("filtered", "samples too long", _number),
    (
        "shared_prefixes",
        "tokens saved by shared prefixes",
        lambda shared: "none" if shared is None else percent(shared["token_share_saved"]),
    ),
)


def sweep_cells(plans: Figures) -> list[tuple[str, ...]]:
    """A heading and a row for each packing length."""
    rows = [tuple(text(figures[name]) for name, _, text in _COLUMNS) for figures in plans]
    return [tuple(heading for _, heading, _ in _COLUMNS), *rows]


def sweep_page(plans: Figures, title: str, command: str) -> str:
    """The page of the plans with each packing length; ``command``: shown as the one that made the page."""
    best = max(plans, key=lambda figures: figures["fill"])
    header, *rows = sweep_cells(plans)
    steps = [figures["steps_per_epoch"] for figures in plans]
    lengths = [figures["packing_length"] for figures in plans]
    min_steps, max_steps = min(steps), max(steps)
    cards = [
        (f"{len(plans)}", "packing lengths", f"{min(lengths):,} to {max(lengths):,} tokens"),
        (percent(best["fill"]), "is the best fill", f"with packs of {best['packing_length']:,} tokens"),
        (
            f"{min_steps:,}" if min_steps == max_steps else f"{min_steps:,} to {max_steps:,}",
            "optimizer steps",
            "per epoch",
        ),
        (f"{plans[0]['num_samples_in_caches']:,}", "samples", "including those that are left out"),
    ]

    def bars(name: str, text: Callable[[Any], str], scale: float) -> list[Any]:
        return [
            (f"{length:,}", [("accent", 100 * figures[name] / (scale or 1), "")], "", text(figures[name]), False)
            for length, figures in zip(lengths, plans, strict=True)
        ]

    return render(
        "sweep.html",
        title=title,
        command=command,
        cards=cards,
        header=header,
        rows=rows,
        fills=bars("fill", percent, 1.0),
        steps=bars("steps_per_epoch", _number, max_steps),
    )


def fit_lines(figures: Mapping[str, Any], hardware: str | None) -> list[str]:
    """The output of ``packtool plan --fit``: the search, a row for each proposal, and the command of the first one."""
    heading = (
        *("", "packing length", "recompute", "sharding", "ranks a pack", "GiB a rank"),
        *("tokens/step", "s/step", "tokens/s", "hours"),
    )
    rows = [
        (
            f"{number}",
            f"{proposal['packing_length']:,}",
            "yes" if proposal["gradient_checkpointing"] else "no",
            proposal["sharding"],
            f"{proposal['sequence_parallel_size']}",
            f"{proposal['memory_gib']:.1f}",
            f"{proposal['tokens_per_step']:,.0f}",
            f"{proposal['step_seconds']:.3g}",
            f"{proposal['tokens_per_second']:,.0f}",
            f"{proposal['hours']:,.2f}",
        )
        for number, proposal in enumerate(figures["proposals"], start=1)
    ]
    lines = [
        f"{figures['num_settings']:,} settings for {figures['hardware']}, of which the {figures['num_tried']:,} of "
        "least time per token were tried:",
        f"{figures['num_too_large']:,} of them do not fit into {figures['budget_gib']:.1f} GiB of "
        f"{figures['fit'] / 2**30:.1f} (the rest is for libraries and the allocator)",
        *aligned([heading, *rows], "r"),
        "",
        "the first one trains with:",
        f"  {figures['proposals'][0]['command']}",
        f"--dry-run --hardware {hardware or 'h100'} behind it checks it on any machine. --json has every row with its "
        "command;",
        "what is given beside --fit (--packing-length, --gradient-checkpointing, --fsdp, ...) is kept.",
    ]
    if figures["shareable"]:
        lines.append(
            f"shared prefixes could save {figures['shareable']:.0%} of the tokens beyond that: --fit computes every "
            "sample whole, and packtool plan --share-prefix true tells what they do to a plan."
        )
    return lines


def resumed_lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """The output of ``packtool plan --resume``."""
    steps, before, step = figures["steps"], figures["steps_before"], figures["step"]
    yield f"from {figures['checkpoint']}, after step {step:,}, in epoch {figures['epoch'] + 1:,}"
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
    lines = [
        ("left of this epoch", f"{figures['samples_left_in_epoch']:,} samples"),
        ("", f"{figures['steps_left_in_epoch']:,} steps"),
    ]
    if figures["stages"] is None:
        lines.append(("steps of a whole epoch", f"{figures['steps_per_epoch']:,}"))
    differs = steps != before
    done = f"{step / steps:.1%} done" + (f", before {step / before:.1%}" if differs else "")
    lines += [
        ("steps of the run", f"{steps:,}" + (f", before {before:,}" if differs else "")),
        ("of the learning rate's schedule", done),
        ("data-parallel ranks", f"{figures['world_size']:,}"),
    ]
    yield from aligned(lines, "ll")
    for stage in figures["stages"] or ():
        if stage["last_step"] > step:
            yield f"{stage_title(stage)}, {stage['samples']:,} samples:"
            yield from ("  " + line for line in aligned(source_rows(stage["sources"]), "lr"))
    if figures["data_changed"]:
        yield "packtool train --resume-from-checkpoint true --data-change allow, with these caches, goes on so"
