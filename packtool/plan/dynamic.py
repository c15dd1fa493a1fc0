"""Dynamic batches: the samples of a step rearranged into micro-batches by tokens instead of by count.

What verl and MindSpeed-RL call dynamic batch size: the samples of an optimizer step stay what they are, but a
micro-batch takes as many of them as its token budget allows, short ones many, long ones few. The budget is a hard
limit (theirs, made by Karmarkar-Karp partitioning, is exceeded in practice), every rank has equally many micro-batches
because sharded optimizers wait for one another, and those of one rank weigh about the same.

    lengths   7 1 1 5 2 3 | 4 4      budget 8, 2 ranks
    rank 0    [7] [3 4]              micro-batches, heaviest first
    rank 1    [1 1 5] [2 4]

Price: the samples of a step are placed one after the other, longest first, each into the emptiest micro-batch (LPT);
if that exceeds the budget, with one micro-batch more for every rank. All steps are worked on at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.errors import ConfigError

Int64Array = npt.NDArray[np.int64]
_CELLS_AT_ONCE = 1 << 22
_MOST_SHARING = 8
"""Samples of a bin up to which their sizes, not only their sum, tell how many bins are needed."""


@dataclass(frozen=True, eq=False)
class DynamicBatches:
    """Samples of S steps in micro-batches.

    Args:
        order: int64 (K,), the samples, cell by cell, as in ``StepPlan``.
        cell_sizes: int64 (C,), samples in each micro-batch of each rank.
        cells_per_step: int64 (S,), a multiple of the ranks.
    """

    order: Int64Array
    cell_sizes: Int64Array
    cells_per_step: Int64Array

    @property
    def inverse(self) -> Int64Array:
        """int64 (K,): where in ``order`` each sample is; ``values[inverse]`` brings results back to their order."""
        inverse = np.empty_like(self.order)
        inverse[self.order] = np.arange(len(self.order))
        return inverse


def rearrange(
    lengths: npt.NDArray[np.integer[Any]],
    *,
    samples_per_step: int,
    num_ranks: int,
    max_tokens: int,
    max_samples: int | None = None,
) -> DynamicBatches:
    """Rearrange the samples of every step into micro-batches of at most ``max_tokens`` tokens.

    Args:
        lengths: (K,), tokens of the samples in the order of the epoch.
        samples_per_step: samples of an optimizer step over all ranks; the last step has what is left.
        num_ranks: data-parallel ranks, W.
        max_tokens: of a micro-batch.
        max_samples: of a micro-batch, or None.

    Raises:
        ConfigError: if a sample alone has more tokens than a micro-batch may hold.
    """
    longest = int(lengths.max(initial=0))
    if longest > max_tokens:
        num_over = int(np.count_nonzero(lengths > max_tokens))
        raise ConfigError(
            f"--dynamic-batch-tokens {max_tokens}: {num_over:,} samples have more tokens than that; "
            f"the longest has {longest:,}",
            f"Raise it to {longest}, or leave those samples out with --max-length {max_tokens}.",
        )
    num_full, num_left = divmod(len(lengths), samples_per_step)
    steps = [np.arange(num_full * samples_per_step).reshape(num_full, samples_per_step)]
    if num_left:
        steps.append(np.arange(num_full * samples_per_step, len(lengths))[None])
    orders, sizes, counts = [], [], []
    for samples in steps:
        bins = _bins(lengths[samples], num_ranks, max_tokens, max_samples or samples.shape[1])
        for step, of_sample, num_bins in bins:
            order, cell_sizes = _cells(samples[step], lengths[samples[step]], of_sample, num_bins, num_ranks)
            orders.append(order)
            sizes.append(cell_sizes)
            counts.append(num_bins)
    nothing = [np.zeros(0, dtype=np.int64)]
    return DynamicBatches(
        np.concatenate(orders or nothing), np.concatenate(sizes or nothing), np.array(counts, dtype=np.int64)
    )


def _bins(
    lengths: npt.NDArray[np.integer[Any]], num_ranks: int, max_tokens: int, max_samples: int
) -> list[tuple[int, Int64Array, int]]:
    """(step, bin of each sample, number of bins) of every step, in their order; the fewest bins that LPT manages."""
    num_steps, num_samples = lengths.shape
    falling = np.argsort(-lengths, axis=1, kind="stable")
    totals = lengths.sum(axis=1)
    fewest = np.maximum(-(-totals // max_tokens), -(-num_samples // max_samples))
    for sequence_parallel_size in range(1, _MOST_SHARING + 1):
        # So many samples of more than 1 / (sequence_parallel_size + 1) of a bin may share one, and no more.
        num_large = np.count_nonzero(lengths * (sequence_parallel_size + 1) > max_tokens, axis=1)
        fewest = np.maximum(fewest, -(-num_large // sequence_parallel_size))
    num_bins = -(-fewest // num_ranks) * num_ranks
    found: list[tuple[int, Int64Array, int]] = []
    todo = np.arange(num_steps)
    while len(todo):
        failed = []
        for bins in np.unique(num_bins[todo]):
            same = todo[num_bins[todo] == bins]
            chunk = max(1, _CELLS_AT_ONCE // int(bins))
            for start in range(0, len(same), chunk):
                part = same[start : start + chunk]
                placed, fits = _place(lengths[part], falling[part], int(bins), max_tokens, max_samples)
                found += [(int(step), row, int(bins)) for step, row in zip(part[fits], placed[fits], strict=True)]
                failed.append(part[~fits])
        todo = np.sort(np.concatenate(failed))
        num_bins[todo] += num_ranks
    return sorted(found, key=lambda item: item[0])


def _place(
    lengths: npt.NDArray[np.integer[Any]], falling: Int64Array, num_bins: int, max_tokens: int, max_samples: int
) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
    """The bin of every sample, and whether all bins of a step keep to the limits."""
    num_steps, num_samples = lengths.shape
    loads = np.zeros((num_steps, num_bins), dtype=np.int64)
    counts = np.zeros((num_steps, num_bins), dtype=np.int64)
    placed = np.empty((num_steps, num_samples), dtype=np.int64)
    rows = np.arange(num_steps)
    for i in range(num_samples):
        sample = falling[:, i]
        # A bin that has its number of samples is as good as full.
        emptiest = np.where(counts < max_samples, loads, np.iinfo(np.int64).max).argmin(axis=1)
        loads[rows, emptiest] += lengths[rows, sample]
        counts[rows, emptiest] += 1
        placed[rows, sample] = emptiest
    return placed, (loads.max(axis=1) <= max_tokens) & (counts.max(axis=1) <= max_samples)


def _cells(
    samples: Int64Array,
    lengths: npt.NDArray[np.integer[Any]],
    of_sample: Int64Array,
    num_bins: int,
    num_ranks: int,
) -> tuple[Int64Array, Int64Array]:
    """Bins in the order of a step's cells: the heaviest bins side by side on the ranks, then the next ones."""
    loads = np.bincount(of_sample, weights=lengths, minlength=num_bins)
    rank_by_rank = np.argsort(-loads, kind="stable").reshape(num_bins // num_ranks, num_ranks).T.reshape(-1)
    place = np.empty(num_bins, dtype=np.int64)
    place[rank_by_rank] = np.arange(num_bins)
    cell = place[of_sample]
    return samples[np.argsort(cell, kind="stable")], np.bincount(cell, minlength=num_bins)
