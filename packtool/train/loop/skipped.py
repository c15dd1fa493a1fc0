"""Samples that ``--on-bad-media skip`` left out of a run: counted, shown at its end, and listed in a file."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence

from packtool.batch.batch import SkippedSample
from packtool.launch.exchange import all_gather_objects
from packtool.launch.world import World

SKIPPED_NAME = "skipped.jsonl"
_MOST_SHOWN = 20


def all_skipped(mine: Sequence[SkippedSample], world: World) -> list[SkippedSample]:
    """Those of all ranks; every rank must call this."""
    return [sample for each in all_gather_objects(list(mine), world.size) for sample in each]


def skipped_lines(skipped: Sequence[SkippedSample]) -> Iterator[str]:
    """What is to be said of them at the end of a run."""
    if not skipped:
        return
    yield f"samples left out because their media could not be loaded: {len(skipped):,} (all in {SKIPPED_NAME})"
    for sample in skipped[:_MOST_SHOWN]:
        yield f"  row {sample.row} of {sample.source}: {sample.message}"
    if len(skipped) > _MOST_SHOWN:
        yield f"  and {len(skipped) - _MOST_SHOWN:,} more"


def write_skipped(output_dir: str, skipped: Sequence[SkippedSample]) -> None:
    """A line for each, once for every epoch that it is missing in; no file if there are none."""
    path = os.path.join(output_dir, SKIPPED_NAME)
    if not skipped:
        if os.path.exists(path):
            os.remove(path)
        return
    with open(path, "w", encoding="utf-8") as file:
        for sample in skipped:
            file.write(json.dumps(dataclasses.asdict(sample), ensure_ascii=False) + "\n")
