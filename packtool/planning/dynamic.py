"""Samples of a step, or of an evaluation, divided into micro-batches by tokens instead of by count.

What verl and MindSpeed-RL call dynamic batch size: the samples of an optimizer step stay what they are, but a
micro-batch takes as many of them as its token budget allows, short ones many, long ones few. The budget is a hard
limit (theirs, made by Karmarkar-Karp partitioning, is exceeded in practice), every rank has equally many micro-batches
because sharded optimizers wait for one another, and those of one rank weigh about the same.

    lengths   7 1 1 5 2 3 | 4 4      budget 8, 2 ranks
    rank 0    [7] [3 4]              micro-batches, heaviest first
    rank 1    [1 1 5] [2 4]

Price: the samples of a step are placed one after the other, longest first, each into the emptiest micro-batch (LPT);
if that exceeds the budget, with one micro-batch more for every rank. All steps are worked on at once.

``rearrange`` makes micro-batches alike and then assigns them to ranks. ``assign_samples`` (``--samples-per-step``)
makes ranks alike: a sample goes to the rank with the least work, and there into the micro-batch with the least. A long
one then costs its rank other samples instead of time: with steps of 64 samples of lognormal lengths on 8 ranks, the
longest 8 times the mean, the slowest rank does 1.13 times the mean rank's work, and not 1.34 times.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.errors import ConfigError
from packtool.planning.balance import Costs
from packtool.planning.budgets import check_media_tokens
from packtool.planning.options import PlanOptions
from packtool.planning.pack_plan import Int64Array, PackPlan, to_offsets
from packtool.planning.prefix_trees import PrefixTrees
from packtool.planning.steps import Assignment

_CELLS_AT_ONCE = 1 << 22
_MAX_SHARING = 8
"""Samples of a bin up to which their sizes, not only their sum, tell how many bins are needed."""

Limit = tuple[npt.NDArray[np.integer[Any]], int]
"""Sizes of the samples, (K,), and their sum that a micro-batch may hold."""


def rearrange(
    lengths: npt.NDArray[np.integer[Any]],
    *,
    samples_per_step: int,
    num_ranks: int,
    max_tokens: int,
    max_samples: int | None = None,
) -> Assignment:
    """Divide the samples of every step into micro-batches of at most ``max_tokens`` tokens.

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
    limits = _limits(lengths, max_tokens, max_samples)
    bin_of, num_bins = _bins(lengths, limits, samples_per_step, num_ranks, num_groups=1)
    return _in_cells(lengths, bin_of, num_bins, samples_per_step, num_ranks, is_assigned=False)


def assign_samples(
    units: PackPlan,
    costs: Costs | None,
    options: PlanOptions,
    media_tokens: npt.NDArray[np.integer[Any]] | None = None,
) -> Assignment:
    """Divide the samples of steps that keep those of unpacked training into packs of equal work, few for each rank.

        order of the epoch   3 7 2 1 | 4 4 3 3 | 5 2       lengths; 4 samples a step, packs of 8, two ranks
        step 0               rank 0 [7]    rank 1 [3 2 1]
        step 1               rank 0 [4 3]  rank 1 [4 3]
        step 2               rank 0 [5]    rank 1 [2]

    The order is that of ``--packing false``, so a step's samples are those of the unpacked run with the same seed: loss
    and gradient, a mean over the target tokens of the step, are the same in exact arithmetic, and so are all weights
    after it. Every rank has as many micro-batches in a step as the others; some may be empty.

    Price: a step's last micro-batches are less full than packs that may take any sample, the more so the fewer tokens a
    step has for each rank. No tokens are computed for what is free in them.

    Args:
        units: the N samples of the epoch, one each, in its order.
        costs: (N,), work of each sample; its tokens where that is not known.
        options: ``samples_per_step``, ``world_size``, and what a pack may hold besides ``units.capacity``.
        media_tokens: by sample number as in ``units.samples``; needed with ``max_media_tokens_per_pack``.

    Raises:
        ConfigError, DataError: samples that are over a budget of a pack.
    """
    assert options.samples_per_step is not None
    limits = _limits(units.lengths, units.capacity, options.max_samples_per_pack)
    max_media, media = options.max_media_tokens_per_pack, None if media_tokens is None else media_tokens[units.samples]
    media = check_media_tokens(media, units.lengths, max_media, units.capacity)
    if media is not None and max_media is not None:
        limits.append((media, max_media))
    work = units.lengths.astype(np.float64) if costs is None else costs
    num_ranks, per_step = options.world_size, options.samples_per_step
    bin_of, num_bins = _bins(work, limits, per_step, num_ranks, num_groups=num_ranks)
    return _in_cells(work, bin_of, num_bins, per_step, num_ranks, is_assigned=True)


def _limits(lengths: npt.NDArray[np.integer[Any]], max_tokens: int, max_samples: int | None) -> list[Limit]:
    counts = [] if max_samples is None else [(np.ones(len(lengths), np.int64), max_samples)]
    return [(lengths, max_tokens), *counts]


def _bins(
    work: npt.NDArray[Any], limits: Sequence[Limit], samples_per_step: int, num_ranks: int, num_groups: int
) -> tuple[Int64Array, Int64Array]:
    """The bin of every sample among its step's, (K,), and the bins of each step, (S,): the fewest that LPT manages."""
    num_full = len(work) // samples_per_step
    bin_of, num_bins = np.zeros(len(work), np.int64), np.zeros(-(-len(work) // samples_per_step), np.int64)
    full, rest = np.split(np.arange(len(work)), [num_full * samples_per_step])
    for steps, samples in (
        (slice(num_full), full.reshape(num_full, samples_per_step)),
        (slice(num_full, None), rest[None]),
    ):
        if samples.size:
            of_steps = [(sizes[samples], most) for sizes, most in limits]
            bin_of[samples], num_bins[steps] = _bins_of_steps(work[samples], of_steps, num_ranks, num_groups)
    return bin_of, num_bins


def _bins_of_steps(
    work: npt.NDArray[Any], limits: Sequence[Limit], num_ranks: int, num_groups: int
) -> tuple[Int64Array, Int64Array]:
    """What ``_bins`` returns, for steps with equally many samples: (S, n) and (S,)."""
    falling = np.argsort(-work, axis=1, kind="stable")
    num_bins = -(-np.max([_fewest_bins(*limit) for limit in limits], axis=0) // num_ranks) * num_ranks
    bin_of, todo = np.zeros(work.shape, np.int64), np.arange(len(work))
    while len(todo):
        fits = np.zeros(len(work), np.bool_)
        for bins in np.unique(num_bins[todo]).tolist():
            same = todo[num_bins[todo] == bins]
            chunk = max(1, _CELLS_AT_ONCE // bins)
            for start in range(0, len(same), chunk):
                part = same[start : start + chunk]
                of_part = [(sizes[part], most) for sizes, most in limits]
                bin_of[part], fits[part] = _place(work[part], falling[part], of_part, num_groups, bins)
        todo = todo[~fits[todo]]
        num_bins[todo] += num_ranks
    return bin_of, num_bins


def _fewest_bins(sizes: npt.NDArray[np.integer[Any]], most: int) -> Int64Array:
    """Bins that the samples of each step, (S, n), need at least for one of their sizes; (S,)."""
    fewest: Int64Array = -(-sizes.sum(axis=1, dtype=np.int64) // most)
    for sharing in range(1, _MAX_SHARING + 1):
        # So many samples of more than 1 / (sharing + 1) of a bin may share one, and no more.
        num_large = np.count_nonzero(sizes * (sharing + 1) > most, axis=1)
        fewest = np.maximum(fewest, -(-num_large // sharing))
    return fewest


def _place(
    work: npt.NDArray[Any], falling: Int64Array, limits: Sequence[Limit], num_groups: int, num_bins: int
) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
    """The bin of every sample, (S, n), and whether all bins of a step keep to the limits, (S,).

    Args:
        num_groups: of bins; a sample goes to the group with the least work that has room, and there to such a bin.
    """
    num_steps, num_samples = work.shape
    shape, rows = (num_steps, num_groups, num_bins // num_groups), np.arange(num_steps)
    loads, used = np.zeros(shape), [np.zeros(shape, np.int64) for _ in limits]
    of_groups = np.zeros(shape[:2])
    placed, fits = np.empty((num_steps, num_samples), np.int64), np.ones(num_steps, np.bool_)
    for i in range(num_samples):
        sample = falling[:, i]
        added, sizes = work[rows, sample], [sizes[rows, sample] for sizes, _ in limits]
        has_room = np.ones(shape, np.bool_)
        for (_, most), taken, size in zip(limits, used, sizes, strict=True):
            has_room &= taken <= (most - size)[:, None, None]
        group = np.where(has_room.any(axis=2), of_groups, np.inf).argmin(axis=1)
        chosen = rows, group, np.where(has_room[rows, group], loads[rows, group], np.inf).argmin(axis=1)
        fits &= has_room[chosen]
        for taken, size in zip(used, sizes, strict=True):
            taken[chosen] += size
        loads[chosen] += added
        of_groups[chosen[:2]] += added
        placed[rows, sample] = group * shape[2] + chosen[2]
    return placed, fits


def _in_cells(
    work: npt.NDArray[Any],
    bin_of: Int64Array,
    num_bins: Int64Array,
    samples_per_step: int,
    num_ranks: int,
    *,
    is_assigned: bool,
) -> Assignment:
    """Bins in the order of their steps' cells, those of each rank heaviest first.

    Args:
        is_assigned: the bins of a step are those of rank 0, then those of rank 1, and so on; else they are assigned
            here, the heaviest ones side by side, then the next ones.
    """
    first = np.concatenate(([0], np.cumsum(num_bins)))
    bin_of = first[np.arange(len(work)) // samples_per_step] + bin_of
    loads = np.bincount(bin_of, weights=work, minlength=int(first[-1]))
    cell_of = np.empty(len(loads), np.int64)
    for bins in np.unique(num_bins).tolist():
        each = bins // num_ranks
        own = first[:-1][num_bins == bins, None] + np.arange(bins)
        by_rank = own.reshape(-1, num_ranks, each)
        if not is_assigned:
            falling = np.take_along_axis(own, np.argsort(-loads[own], axis=1, kind="stable"), axis=1)
            by_rank = falling.reshape(-1, each, num_ranks).transpose(0, 2, 1)
        by_rank = np.take_along_axis(by_rank, np.argsort(-loads[by_rank], axis=2, kind="stable"), axis=2)
        cell_of[by_rank.reshape(-1, bins)] = own
    cells = cell_of[bin_of]
    return Assignment(np.argsort(cells, kind="stable"), np.bincount(cells, minlength=len(loads)), num_bins)


def costs_in_turn(costs: Costs, samples_per_step: int, num_ranks: int) -> Costs:
    """Work of each rank in each step, (S, W), if the samples of a step went to the ranks in turn.

    Args:
        costs: (N,), of the samples in the order of the epoch.
    """
    step, place = np.divmod(np.arange(len(costs)), samples_per_step)
    num_steps = -(-len(costs) // samples_per_step)
    of_ranks = np.zeros((num_steps, num_ranks))
    np.add.at(of_ranks, (step, place % num_ranks), costs)
    return of_ranks


DEFAULT_MAX_TOKENS = 8192
"""Tokens of a micro-batch where nobody sets a cap; a longer sample raises it."""

_MIN_SAMPLES, _MAX_SAMPLES = 1 << 10, 1 << 16
_BATCHES_A_RANK, _MAX_BATCHES = 32, 1 << 12
"""Samples of a window: enough that its last micro-batches, of which every rank gets one, cost little; placing a sample
takes as long as there are micro-batches."""


@dataclass(frozen=True, eq=False)
class EvaluationPlan:
    """Who evaluates which samples together, and the way back to the order of the samples.

    The samples are divided into windows of a thousand or more that follow one another, so that reading stays local;
    within one ``rearrange`` makes micro-batches, equally many for every rank, and remembers where each sample went::

        lengths    7 1 1 5 2 3 | 4 4     cap 8, 2 ranks
        rank 0     [7] [3 4]             its results: 7 3 4
        rank 1     [1 1 5] [2 4]         its results: 1 1 5 2 4
        order      7 3 4 1 1 5 2 4       all results, rank by rank; results[inverse] have the samples' own order

    The cap holds for what a forward pass really sees: tokens with the padding that aligns each sample. Samples that
    share prefixes are placed tree by tree, by the tokens that are computed of each.

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
        groups = PackPlan(found.order, to_offsets(found.cell_sizes), in_cells, self.max_tokens)
        cells = trees.expand(groups, self.lengths)
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
        offsets = to_offsets(batches.cell_sizes)
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
        num_batches = min(_BATCHES_A_RANK * self.num_ranks, _MAX_BATCHES)
        mean = float(tokens.mean()) if len(tokens) else 1.0
        samples_of_a_batch = min(self.max_tokens / mean, self.max_samples or self.max_tokens)
        return min(max(int(num_batches * samples_of_a_batch), _MIN_SAMPLES), _MAX_SAMPLES)

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
