"""Who evaluates which samples together: dynamic micro-batches under a token cap, and the way back to the old order.

The samples are cut into windows of a thousand or more that follow one another, so that reading stays local; within one
``dynamic.rearrange`` makes micro-batches, equally many for every rank, and remembers where each sample went::

    lengths    7 1 1 5 2 3 | 4 4     cap 8, 2 ranks
    rank 0     [7] [3 4]             its results: 7 3 4
    rank 1     [1 1 5] [2 4]         its results: 1 1 5 2 4
    order      7 3 4 1 1 5 2 4       all results, rank by rank; results[inverse] have the samples' own order

The cap holds for what a forward pass really sees: tokens with the padding that aligns each sample. Samples that share
prefixes are placed tree by tree, by the tokens that are computed of each.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.plan.dynamic import rearrange
from packtool.plan.pack_plan import Int64Array, PackPlan, offsets_of
from packtool.plan.prefix_trees import PrefixTrees
from packtool.plan.steps import Assignment

DEFAULT_MAX_TOKENS = 8192
"""Tokens of a micro-batch where nobody sets a cap; a longer sample raises it."""

_LEAST_SAMPLES, _MOST_SAMPLES = 1 << 10, 1 << 16
_BATCHES_A_RANK, _MOST_BATCHES = 32, 1 << 12
"""Samples of a window: enough that its last micro-batches, of which every rank gets one, cost little; placing a sample
takes as long as there are micro-batches."""


@dataclass(frozen=True, eq=False)
class EvaluationPlan:
    """Micro-batches of all ranks.

    Args:
        lengths: (K,), tokens of the samples, in their order.
        max_tokens: of a micro-batch, padding of the alignment included.
        num_ranks: data-parallel ranks that share the work.
        alignment: each sample is padded to a multiple of it.
        max_samples: of a micro-batch, or None.
        trees: groups of samples that begin alike, of which each is in one micro-batch; None has all computed whole.
    """

    lengths: npt.NDArray[np.integer[Any]]
    max_tokens: int
    num_ranks: int
    alignment: int = 1
    max_samples: int | None = None
    trees: PrefixTrees | None = None

    @cached_property
    def batches(self) -> Assignment:
        """The micro-batches: samples of similar lengths together, as many as the token cap allows."""
        trees = self.trees
        tokens = aligned_lengths(self.lengths, self.alignment)
        if trees is not None:
            tokens = trees.sums_per_group(trees.new_tokens(self.lengths))
        found = rearrange(
            tokens,
            samples_per_step=self._window(tokens),
            num_ranks=self.num_ranks,
            max_tokens=self.max_tokens,
            max_samples=self.max_samples,
        )
        if trees is None:
            return found
        in_cells = tokens[found.order].astype(np.int32)
        groups = PackPlan(found.order, offsets_of(found.cell_sizes), in_cells, self.max_tokens)
        cells = trees.unfolded(groups, self.lengths)
        return Assignment(cells.samples, np.diff(cells.offsets), found.cells_per_step)

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed, without padding."""
        return int(self.lengths.sum()) - (0 if self.trees is None else self.trees.num_shared_tokens)

    @property
    def fingerprint(self) -> str:
        """Names the plan, so that ranks can prove that they have the same one."""
        digest = hashlib.sha256(f"{self.max_tokens} {self.num_ranks} {self.alignment}".encode())
        for part in (self.batches.order, self.batches.cell_sizes):
            digest.update(part.tobytes())
        return digest.hexdigest()[:16]

    def micro_batches(self, rank: int) -> list[Int64Array]:
        """The samples of each micro-batch of a rank; one may be empty, for all ranks have equally many."""
        batches = self.batches
        offsets = np.append(0, np.cumsum(batches.cell_sizes))
        return [batches.order[offsets[cell] : offsets[cell + 1]] for cell in np.flatnonzero(self._rank_of_cell == rank)]

    def places(self, rank: int) -> Int64Array:
        """Where in ``batches.order`` the samples of a rank's micro-batches are, one after the other."""
        return np.flatnonzero(np.repeat(self._rank_of_cell, self.batches.cell_sizes) == rank)

    def alone(self) -> EvaluationPlan:
        """The same samples, each in a micro-batch of its own."""
        return dataclasses.replace(self, max_samples=1, trees=None)

    def _window(self, tokens: npt.NDArray[np.integer[Any]]) -> int:
        """Samples, or groups of them, of a window.

        Args:
            tokens: of each.
        """
        num_batches = min(_BATCHES_A_RANK * self.num_ranks, _MOST_BATCHES)
        mean = float(tokens.mean()) if len(tokens) else 1.0
        samples_of_a_batch = min(self.max_tokens / mean, self.max_samples or self.max_tokens)
        return min(max(int(num_batches * samples_of_a_batch), _LEAST_SAMPLES), _MOST_SAMPLES)

    @cached_property
    def _rank_of_cell(self) -> Int64Array:
        """int64 (C,): within a window the cells of rank 0 come first, then those of rank 1."""
        cells = self.batches.cells_per_step
        first = np.cumsum(cells) - cells
        return (np.arange(cells.sum()) - np.repeat(first, cells)) // np.repeat(cells // self.num_ranks, cells)


def plan_evaluation(
    lengths: npt.NDArray[np.integer[Any]],
    *,
    num_ranks: int,
    max_tokens: int | None = None,
    max_samples: int | None = None,
    alignment: int = 1,
) -> EvaluationPlan:
    """Share out samples.

    Args:
        lengths: (K,), tokens of the samples.
        num_ranks: data-parallel ranks.
        max_tokens: cap of a micro-batch, a hard one; by default ``DEFAULT_MAX_TOKENS``, or the longest sample if that
            is longer.
        max_samples: of a micro-batch, or None.
        alignment: see ``batch.positions.alignment_for``.

    Raises:
        ConfigError: if a sample alone is over the cap.
    """
    longest = int(aligned_lengths(lengths, alignment).max(initial=1))
    cap = max(DEFAULT_MAX_TOKENS, longest) if max_tokens is None else max_tokens
    plan = EvaluationPlan(lengths, cap, num_ranks, alignment, max_samples)
    _ = plan.batches
    return plan


def aligned_lengths(lengths: npt.NDArray[np.integer[Any]], alignment: int) -> npt.NDArray[np.integer[Any]]:
    """(K,): tokens of the samples with the padding that makes them multiples of ``alignment``."""
    return -(-lengths // alignment) * alignment
