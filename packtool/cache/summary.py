"""What an export did, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from packtool.cache.manifest import Manifest


@dataclass(frozen=True)
class ExportSummary:
    """What an export did.

    Args:
        lengths: p50, p90, p99 and max of the kept samples' tokens.
        num_reused: shards that an earlier, interrupted run had finished.
        already_finished: nothing was done, because the cache was there.
        num_missing: shards that other parts of a job array have not finished; the counts are this part's then.
        pieces_added: samples beyond one a row: pieces of texts, turns, responses.
        parts_left_out: turns and responses by reason, of rows of which others are kept.
        rows_made: rows that this run encoded, without those of an earlier one's shards.
    """

    rows: int
    kept: int
    kept_by_split: Mapping[str, int]
    truncated: int
    dropped: Mapping[str, int]
    marks_added: int
    tokens: int
    target_tokens: int
    media_tokens: int
    lengths: Mapping[str, int]
    seconds: float
    output_dir: str
    num_reused: int = 0
    already_finished: bool = False
    num_missing: int = 0
    pieces_added: int = 0
    parts_left_out: Mapping[str, int] = field(default_factory=dict)
    rows_made: int = 0


def percentiles(counts: Mapping[int, int]) -> dict[str, int]:
    """The smallest lengths that 50, 90 and 99 % of the samples do not exceed, and the largest."""
    lengths = np.array(sorted(counts), np.int64)
    below = np.cumsum([counts[int(length)] for length in lengths])
    found = {f"p{p}": int(lengths[np.searchsorted(below, below[-1] * p / 100)]) for p in (50, 90, 99)}
    return {**found, "max": int(lengths[-1])}


def summary_of(
    manifest: Manifest,
    lengths: Mapping[str, int],
    seconds: float,
    output_dir: str,
    num_reused: int = 0,
    already_finished: bool = False,
    rows_made: int = 0,
) -> ExportSummary:
    """The figures of a manifest, and of the run that made it."""
    splits = manifest.splits
    return ExportSummary(
        rows=manifest.rows,
        kept=sum(split.rows for split in splits.values()),
        kept_by_split={name: split.rows for name, split in splits.items()},
        truncated=sum(split.truncated for split in splits.values()),
        dropped=manifest.dropped,
        marks_added=manifest.marks_added,
        tokens=sum(split.tokens for split in splits.values()),
        target_tokens=sum(split.target_tokens for split in splits.values()),
        media_tokens=sum(split.media_tokens for split in splits.values()),
        lengths=lengths,
        seconds=seconds,
        output_dir=output_dir,
        num_reused=num_reused,
        already_finished=already_finished,
        rows_made=rows_made,
        pieces_added=sum(split.pieces_added for split in splits.values()),
        parts_left_out=manifest.parts_left_out,
    )
