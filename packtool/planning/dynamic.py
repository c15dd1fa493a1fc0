"""Division of the samples of a step, or of an evaluation, into micro-batches by tokens instead of by count.

The samples of an optimizer step stay the same, but a micro-batch takes as many of them as its token budget allows. The
budget is a hard limit, every rank has equally many micro-batches because sharded optimizers wait for one another, and
those of one rank have about equal work::

    lengths   7 1 1 5 2 3 | 4 4      budget 8, 2 ranks
    rank 0    [7] [3 4]              micro-batches, heaviest first
    rank 1    [1 1 5] [2 4]
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from packtool.errors import ConfigError
from packtool.planning.budgets import check_media_tokens
from packtool.planning.options import PlanOptions
from packtool.planning.pack_plan import Costs, Int64Array, IntArray, PackPlan, invert_order, to_offsets
from packtool.planning.prefix_trees import PrefixTrees
from packtool.planning.steps import StepAssignment

_BINS_AT_ONCE = 1 << 22
_MAX_LARGE_SAMPLES = 8
"""Samples per micro-batch up to which their sizes, not only their sum, bound the number of micro-batches."""


class Limit(NamedTuple):
    """Sizes of samples, such as tokens, (K,) or (S, n), and the maximum of their sum in a micro-batch."""

    sizes: IntArray
    maximum: int

    def select(self, index: Int64Array) -> Limit:
        """Return the limit of some samples, or of the samples of some steps."""
        return Limit(self.sizes[index], self.maximum)


def assign_by_tokens(
    lengths: IntArray, *, samples_per_step: int, num_ranks: int, max_tokens: int, max_samples: int | None = None
) -> StepAssignment:
    """Divide the samples of every step, (K,) in epoch order, into micro-batches of at most ``max_tokens`` tokens."""
    longest = int(lengths.max(initial=0))
    if longest > max_tokens:
        num_over = int(np.count_nonzero(lengths > max_tokens))
        raise ConfigError(
            f"--dynamic-batch-tokens {max_tokens}: {num_over:,} samples have more tokens than that; "
            f"the longest has {longest:,}",
            f"Raise it to {longest}, or leave those samples out with --max-length {max_tokens}.",
        )
    limits = _limits(lengths, max_tokens, max_samples)
    return _divide_steps(lengths, limits, samples_per_step, num_ranks, balance_by="step")


def assign_samples(
    samples: PackPlan, costs: Costs | None, options: PlanOptions, media_tokens: IntArray | None = None
) -> StepAssignment:
    """Divide the samples of each optimizer step into micro-batches, so that all ranks have about equal work.

        lengths in epoch order   3 7 2 1 | 4 4 3 3 | 5 2       4 samples per step, at most 8 tokens per micro-batch
        step 0                   rank 0 [7]    rank 1 [3 2 1]
        step 1                   rank 0 [4 3]  rank 1 [4 3]
        step 2                   rank 0 [5]    rank 1 [2]

    All ranks get the same small number of micro-batches in a step, so some may be empty. Samples that share a prefix
    stay in one micro-batch.

    Args:
        samples: the N samples in epoch order, each a pack of its own.
        costs: work of each of these samples, (N,); None for their number of tokens.
        options: limits of a micro-batch, samples of a step, and number of ranks.
        media_tokens: tokens of images, videos and sounds, by sample number; only needed if they are limited.
    """
    assert options.samples_per_step is not None
    lengths: IntArray = samples.lengths
    work: npt.NDArray[Any] = lengths.astype(np.float64) if costs is None else costs
    sample_media = None if media_tokens is None else media_tokens[samples.samples]
    leaders = None
    if samples.shared_tokens is not None:
        # Treat samples that share a prefix as one: the first of them, the leader, takes the sums of all.
        leaders = _leaders_of_prefixes(samples.shared_tokens)
        work = np.bincount(leaders, weights=work, minlength=len(work))
        lengths = _sums_at_leaders(leaders, lengths)
        if sample_media is not None:
            sample_media = _sums_at_leaders(leaders, sample_media)

    limits = _limits(lengths, samples.capacity, options.max_samples_per_pack)
    max_media = options.max_media_tokens_per_pack
    limiting_media = check_media_tokens(sample_media, lengths, max_media, samples.capacity)
    if limiting_media is not None and max_media is not None:
        limits.append(Limit(limiting_media, max_media))
    return _divide_steps(work, limits, options.samples_per_step, options.world_size, balance_by="rank", leaders=leaders)


def _leaders_of_prefixes(shared_tokens: IntArray) -> Int64Array:
    """Return the leader of each sample, (N,): the last one so far that shares no tokens with the sample before it."""
    is_leader = shared_tokens == 0
    index_of_leader = np.cumsum(is_leader) - 1
    return np.flatnonzero(is_leader)[index_of_leader]


def _sums_at_leaders(leaders: Int64Array, values: IntArray) -> IntArray:
    """Sum ``values`` (N,) over the samples with the same leader: int64 (N,), the sum for the leader, 0 for others."""
    return np.bincount(leaders, weights=values, minlength=len(values)).astype(np.int64)


def _limits(lengths: IntArray, max_tokens: int, max_samples: int | None) -> list[Limit]:
    limits = [Limit(lengths, max_tokens)]
    if max_samples is not None:
        limits.append(Limit(np.ones(len(lengths), np.int64), max_samples))
    return limits


def _divide_steps(
    work: npt.NDArray[Any],
    limits: Sequence[Limit],
    samples_per_step: int,
    num_ranks: int,
    *,
    balance_by: Literal["rank", "step"],
    leaders: Int64Array | None = None,
) -> StepAssignment:
    """Divide the samples of each step into bins within ``limits``; each bin becomes a micro-batch of a rank.

    The micro-batches of a rank are sorted, most work first.

    Args:
        work: of each of the K samples, in epoch order, (K,).
        balance_by: "rank": a sample first goes to the rank with the least work so far, and there to a bin. "step": a
            sample goes to any bin of its step, and full bins are given to the ranks.
        leaders: for each sample, the sample whose bin it shares, (K,). A leader has the work and the sizes of all that
            share its bin, which then have none of their own.
    """
    num_groups = num_ranks if balance_by == "rank" else 1  # of the bins of a step
    bin_of_sample, bins_per_step = _find_bins(work, limits, samples_per_step, num_ranks, num_groups)
    if leaders is not None:
        bin_of_sample = bin_of_sample[leaders]
    bin_work = np.bincount(bin_of_sample, weights=work, minlength=int(bins_per_step.sum()))
    micro_batch_of_bin = _number_by_rank(bin_work, bins_per_step, num_ranks, balance_by)
    micro_batch_of_sample = micro_batch_of_bin[bin_of_sample]
    return StepAssignment(
        order=np.argsort(micro_batch_of_sample, kind="stable"),
        micro_batch_sizes=np.bincount(micro_batch_of_sample, minlength=len(bin_work)),
        micro_batches_per_step=bins_per_step,
    )


def _find_bins(
    work: npt.NDArray[Any], limits: Sequence[Limit], samples_per_step: int, num_ranks: int, num_groups: int
) -> tuple[Int64Array, Int64Array]:
    """Place the K samples of all steps in bins, few in each step.

    Returns:
        The bin of each sample, (K,), where the bins of step 1 are numbered after those of step 0; and the number of
        bins of each step, (S,), a multiple of ``num_ranks``.
    """
    samples = np.arange(len(work))
    num_full_steps = len(work) // samples_per_step
    num_in_full_steps = num_full_steps * samples_per_step
    full_steps = samples[:num_in_full_steps].reshape(num_full_steps, samples_per_step)  # (steps, samples of a step)
    last_step = samples[num_in_full_steps:].reshape(1, -1)
    steps_of_equal_size = [full_steps, last_step] if last_step.size else [full_steps]

    bin_in_step, num_bins = [], []
    for steps in steps_of_equal_size:
        step_limits = [limit.select(steps) for limit in limits]
        bins, num_bins_of_steps = _find_bins_of_equal_steps(work[steps], step_limits, num_ranks, num_groups)
        bin_in_step.append(bins.reshape(-1))
        num_bins.append(num_bins_of_steps)

    bins_per_step = np.concatenate(num_bins)
    first_bin_of_step = to_offsets(bins_per_step)[:-1]
    step_of_sample = samples // samples_per_step
    return first_bin_of_step[step_of_sample] + np.concatenate(bin_in_step), bins_per_step


def _number_by_rank(
    bin_work: npt.NDArray[Any], bins_per_step: Int64Array, num_ranks: int, balance_by: Literal["rank", "step"]
) -> Int64Array:
    """Return new numbers of the bins, (bins,): step by step, in a step rank by rank, in a rank from most to least work.

    ``bin_work``: of the bins of all S steps, step by step, (bins,). If balanced by "rank", the bins of a step are
    divided into consecutive ones for each rank; otherwise they go to the ranks in turn, the heaviest first.
    """
    step_of_bin = np.repeat(np.arange(len(bins_per_step)), bins_per_step)
    index_in_step = np.arange(len(bin_work)) - to_offsets(bins_per_step)[step_of_bin]
    if balance_by == "rank":
        bins_per_rank = bins_per_step // num_ranks
        rank_of_bin = index_in_step // bins_per_rank[step_of_bin]
    else:
        heaviest_first = np.lexsort((-bin_work, step_of_bin))  # sorted by step, and in each step by work
        rank_of_bin = np.empty(len(bin_work), np.int64)
        rank_of_bin[heaviest_first] = index_in_step % num_ranks
    bins_in_order = np.lexsort((-bin_work, rank_of_bin, step_of_bin))  # the last key is the main one
    return invert_order(bins_in_order)


def _find_bins_of_equal_steps(
    work: npt.NDArray[Any], limits: Sequence[Limit], num_ranks: int, num_groups: int
) -> tuple[Int64Array, Int64Array]:
    """Place the samples of S steps, n in each, in bins, few in each step.

    Args:
        work: of each sample, (S, n); so are the sizes of ``limits``.
        num_groups: of the bins of a step, as for ``_place_in_bins``.

    Returns:
        The bin of each sample within its step, (S, n), and the number of bins of each step, (S,), a multiple of
        ``num_ranks``.
    """
    heaviest_first = np.argsort(-work, axis=1, kind="stable")
    min_bins = np.max([_min_bins(limit) for limit in limits], axis=0)
    num_bins = -(-min_bins // num_ranks) * num_ranks  # rounded up to a multiple
    bin_of_sample = np.zeros(work.shape, np.int64)
    unplaced_steps = np.arange(len(work))  # steps whose samples did not fit yet
    while len(unplaced_steps):
        fits = np.zeros(len(work), np.bool_)
        for bins_per_step, steps in _chunks_of_equal_bins(unplaced_steps, num_bins):
            step_limits = [limit.select(steps) for limit in limits]
            bin_of_sample[steps], fits[steps] = _place_in_bins(
                work[steps], heaviest_first[steps], step_limits, num_groups, bins_per_step
            )
        unplaced_steps = unplaced_steps[~fits[unplaced_steps]]
        num_bins[unplaced_steps] += num_ranks  # one more bin for every rank
    return bin_of_sample, num_bins


def _chunks_of_equal_bins(steps: Int64Array, num_bins: Int64Array) -> Iterator[tuple[int, Int64Array]]:
    """Yield a number of bins, and steps that have as many each, (k,); ``num_bins``, (S,), are those of all steps."""
    for bins_per_step in np.unique(num_bins[steps]).tolist():
        same_steps = steps[num_bins[steps] == bins_per_step]
        chunk_size = max(1, _BINS_AT_ONCE // bins_per_step)  # bounds memory
        for start in range(0, len(same_steps), chunk_size):
            yield bins_per_step, same_steps[start : start + chunk_size]


def _min_bins(limit: Limit) -> Int64Array:
    """Compute a lower bound of the bins of each step, (S,), from the sizes of its samples, (S, n)."""
    min_bins: Int64Array = -(-limit.sizes.sum(axis=1, dtype=np.int64) // limit.maximum)
    for num_per_bin in range(1, _MAX_LARGE_SAMPLES + 1):
        # At most ``num_per_bin`` samples of more than 1 / (num_per_bin + 1) of a bin fit into one.
        num_large = np.count_nonzero(limit.sizes * (num_per_bin + 1) > limit.maximum, axis=1)
        min_bins = np.maximum(min_bins, -(-num_large // num_per_bin))
    return min_bins


def _place_in_bins(
    work: npt.NDArray[Any], order: Int64Array, limits: Sequence[Limit], num_groups: int, num_bins: int
) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
    """Place the samples of S steps, n in each, in ``num_bins`` bins of their step, which form equally large groups.

    A sample goes to the lightest group that has a bin with space, and there to the lightest such bin.

    Args:
        work: of each sample, (S, n).
        order: indices of a step's samples in the order in which they are placed, (S, n).

    Returns:
        The bin of each sample, (S, n), and whether all samples of a step fit, (S,); others are placed anyway.
    """
    steps = np.arange(len(work))
    sizes = np.stack([limit.sizes for limit in limits])  # (limits, S, n)
    bins = _Bins([limit.maximum for limit in limits], (len(work), num_groups, num_bins // num_groups))
    bin_of_sample = np.empty(work.shape, np.int64)
    fits = np.ones(len(work), np.bool_)
    for samples in order.T:  # one sample of each step, (S,): all steps make their choice at once
        bin_of_sample[steps, samples], has_space = bins.place(work[steps, samples], sizes[:, steps, samples])
        fits &= has_space
    return bin_of_sample, fits


class _Bins:
    """The work and the sizes of the samples in each bin; ``shape``: S steps, groups, bins of a group."""

    def __init__(self, maxima: Sequence[int], shape: tuple[int, int, int]) -> None:
        self._maxima = np.array(maxima)[:, None]
        self._used = np.zeros((len(maxima), *shape), np.int64)
        self._work = np.zeros(shape)
        self._group_work = np.zeros(shape[:2])
        self._steps = np.arange(shape[0])

    def place(self, work: Costs, sizes: IntArray) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
        """Place a sample of each step; return its bin in the step, (S,), and whether that has space for it, (S,).

        ``work`` is (S,), ``sizes`` are (limits, S).
        """
        steps = self._steps
        max_used = self._maxima - sizes
        has_space = np.all(self._used <= max_used[:, :, None, None], axis=0)
        group = np.where(has_space.any(axis=2), self._group_work, np.inf).argmin(axis=1)
        bin_in_group = np.where(has_space[steps, group], self._work[steps, group], np.inf).argmin(axis=1)
        self._used[:, steps, group, bin_in_group] += sizes
        self._work[steps, group, bin_in_group] += work
        self._group_work[steps, group] += work
        return group * self._work.shape[2] + bin_in_group, has_space[steps, group, bin_in_group]


DEFAULT_MAX_TOKENS = 8192
"""Default token cap of an evaluation's micro-batch; a longer sample raises it."""

_MIN_SAMPLES, _MAX_SAMPLES = 1 << 10, 1 << 16
_BATCHES_PER_RANK, _MAX_BATCHES = 32, 1 << 12
"""Bounds of a window: large enough that its last, less full micro-batches cost little; the time to place a sample grows
with the number of micro-batches."""


@dataclass(frozen=True, eq=False)
class EvaluationPlan:
    """Micro-batches of an evaluation; ``batches.inverse`` restores the order of the samples from results rank by rank.

    Args:
        lengths: (K,), tokens of the samples, in their order.
        max_tokens, max_samples: of a micro-batch, including alignment padding.
        alignment: each sample is padded to a multiple of it.
        trees: groups of samples with shared prefixes, each in one micro-batch and of as many tokens as are computed.
    """

    lengths: IntArray
    max_tokens: int
    num_ranks: int
    alignment: int = 1
    max_samples: int | None = None
    trees: PrefixTrees | None = None

    @cached_property
    def batches(self) -> StepAssignment:
        """The micro-batches: few and about equally full ones; each "step" of the assignment is a window of samples."""
        trees = self.trees
        if trees is None:
            return self._assign_windows(aligned_lengths(self.lengths, self.alignment))
        tokens = trees.sums_per_group(trees.new_tokens(self.lengths))
        batches = self._assign_windows(tokens)
        # Replace the groups in the micro-batches by their samples.
        offsets = to_offsets(batches.micro_batch_sizes)
        group_tokens = tokens[batches.order].astype(np.int32)
        batches_of_groups = PackPlan(batches.order, offsets, group_tokens, self.max_tokens)
        packs = trees.expand(batches_of_groups, self.lengths)
        return StepAssignment(packs.samples, np.diff(packs.offsets), batches.micro_batches_per_step)

    def _assign_windows(self, tokens: IntArray) -> StepAssignment:
        """Make micro-batches, window by window, from the tokens (n,) of samples, or of groups with shared prefixes."""
        mean_tokens = float(tokens.mean()) if len(tokens) else 1.0
        samples_per_batch = min(self.max_tokens / mean_tokens, self.max_samples or self.max_tokens)
        batches_per_window = min(_BATCHES_PER_RANK * self.num_ranks, _MAX_BATCHES)
        samples_per_window = int(batches_per_window * samples_per_batch)
        return assign_by_tokens(
            tokens,
            samples_per_step=min(max(samples_per_window, _MIN_SAMPLES), _MAX_SAMPLES),
            num_ranks=self.num_ranks,
            max_tokens=self.max_tokens,
            max_samples=self.max_samples,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed, without padding."""
        return int(self.lengths.sum()) - (0 if self.trees is None else self.trees.num_shared_tokens)

    @property
    def fingerprint(self) -> str:
        """Hash of the plan, to verify that all ranks have the same one."""
        options = f"{self.max_tokens} {self.num_ranks} {self.alignment}".encode()
        arrays = self.batches.order.tobytes() + self.batches.micro_batch_sizes.tobytes()
        return hashlib.sha256(options + arrays).hexdigest()[:16]

    def micro_batches(self, rank: int) -> list[Int64Array]:
        """Return the samples (n,) of each micro-batch of a rank; one may be empty."""
        all_batches = np.split(self.batches.order, np.cumsum(self.batches.micro_batch_sizes)[:-1])
        return [all_batches[number] for number in np.flatnonzero(self._rank_of_micro_batch == rank)]

    def order_positions(self, rank: int) -> Int64Array:
        """Return the positions (n,) in ``batches.order`` of a rank's samples, micro-batch by micro-batch."""
        return np.flatnonzero(np.repeat(self._rank_of_micro_batch, self.batches.micro_batch_sizes) == rank)

    def one_sample_each(self) -> EvaluationPlan:
        """Return a plan with each sample in a micro-batch of its own."""
        return replace(self, max_samples=1, trees=None)

    @cached_property
    def _rank_of_micro_batch(self) -> Int64Array:
        """int64 (C,): within a window the micro-batches of rank 0 come first, then those of rank 1."""
        per_window = self.batches.micro_batches_per_step
        index_in_window = np.arange(per_window.sum()) - np.repeat(np.cumsum(per_window) - per_window, per_window)
        return index_in_window // np.repeat(per_window // self.num_ranks, per_window)


def plan_evaluation(
    lengths: IntArray,
    *,
    num_ranks: int,
    max_tokens: int | None = None,
    max_samples: int | None = None,
    alignment: int = 1,
) -> EvaluationPlan:
    """Distribute samples (K,) over ranks and micro-batches; arguments as for ``EvaluationPlan``.

    ``max_tokens`` is by default ``DEFAULT_MAX_TOKENS``, or the longest sample if that is longer.
    """
    longest = int(aligned_lengths(lengths, alignment).max(initial=1))
    cap = max(DEFAULT_MAX_TOKENS, longest) if max_tokens is None else max_tokens
    plan = EvaluationPlan(lengths, cap, num_ranks, alignment, max_samples)
    _ = plan.batches
    return plan


def aligned_lengths(lengths: IntArray, alignment: int) -> IntArray:
    """Return the tokens (K,) of samples with the padding that makes them multiples of ``alignment``."""
    return -(-lengths // alignment) * alignment
