"""What the steps of an epoch have of each source of a mixture: samples, tokens, target tokens, and epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from packtool.plan.mixture import Mixture
from packtool.plan.pack_plan import Int64Array, PackPlan
from packtool.plan.steps import StepPlan


@dataclass(frozen=True)
class SourceCounts:
    """What was, or will be, trained of one source.

    Args:
        samples, tokens, target_tokens: as often as they are trained.
        epochs: samples over those that the source has.
    """

    samples: int = 0
    tokens: int = 0
    target_tokens: int = 0
    epochs: float = 0.0

    def __add__(self, other: SourceCounts) -> SourceCounts:
        return SourceCounts(
            self.samples + other.samples,
            self.tokens + other.tokens,
            self.target_tokens + other.target_tokens,
            self.epochs + other.epochs,
        )


Counts = Mapping[str, SourceCounts]
"""What was trained of each source, by its name."""


def counts_of_steps(packs: PackPlan, steps: StepPlan, mixture: Mixture) -> Int64Array:
    """Samples, tokens and target tokens of each of S sources in each of T steps; int64 (T, S, 3).

    Args:
        packs: that the steps train, of samples by their positions in the caches.
    """
    num_sources = len(mixture.names)
    of_pack = np.empty(packs.num_packs, np.int64)
    of_pack[steps.order] = np.repeat(np.arange(steps.num_steps), np.diff(steps.cell_offsets[steps.step_offsets]))
    cells = np.repeat(of_pack, np.diff(packs.offsets)) * num_sources + mixture.source_of(packs.samples)
    found = np.empty((steps.num_steps * num_sources, 3), np.int64)
    for column, values in enumerate((None, packs.whole_lengths, mixture.target_tokens[packs.samples])):
        # Sums of whole numbers below 2^53 are exact.
        found[:, column] = np.bincount(cells, weights=values, minlength=len(found))
    return found.reshape(steps.num_steps, num_sources, 3)


def counts_of_samples(samples: Int64Array, mixture: Mixture) -> Int64Array:
    """Samples, tokens and target tokens of each of S sources among some samples of the caches; int64 (S, 3)."""
    of, num_sources = mixture.source_of(samples), len(mixture.names)
    columns = (None, mixture.lengths[samples], mixture.target_tokens[samples])
    return np.stack([np.bincount(of, weights=each, minlength=num_sources) for each in columns], axis=1).astype(np.int64)


def by_name(counts: Int64Array, mixture: Mixture) -> dict[str, SourceCounts]:
    """Counts (S, 3) by the names of sources; those of one name are added up."""
    found: dict[str, SourceCounts] = {}
    for name, numbers, own in zip(mixture.names, counts.tolist(), mixture.candidates, strict=True):
        samples, tokens, target_tokens = numbers
        more = SourceCounts(samples, tokens, target_tokens, samples / max(len(own), 1))
        found[name] = found.get(name, SourceCounts()) + more
    return found


def added(parts: Sequence[Counts]) -> dict[str, SourceCounts]:
    """Counts of several steps added up."""
    found: dict[str, SourceCounts] = {}
    for part in parts:
        for name, counts in part.items():
            found[name] = found.get(name, SourceCounts()) + counts
    return found


def share_figures(counts: Counts) -> dict[str, dict[str, Any]]:
    """What is told of each source: its counts, their shares of all sources', 0 to 1, and its epochs."""
    whole = added([{"": each} for each in counts.values()]).get("", SourceCounts())
    return {
        name: {
            "num_samples": each.samples,
            "tokens": each.tokens,
            "target_tokens": each.target_tokens,
            "share_of_samples": each.samples / max(whole.samples, 1),
            "share_of_tokens": each.tokens / max(whole.tokens, 1),
            "share_of_target_tokens": each.target_tokens / max(whole.target_tokens, 1),
            "epochs": each.epochs,
        }
        for name, each in counts.items()
    }
