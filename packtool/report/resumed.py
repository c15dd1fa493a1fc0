"""What ``packtool plan --resume`` shows: how a run would go on, and what has become of its data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from packtool.report.statistics import source_rows
from packtool.report.tables import aligned
from packtool.train.prepare.staged_schedule import stage_title


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
