"""Packing within two budgets, tokens and media tokens (and optionally samples).

    pack    tokens       media tokens   samples
    limit   10240        4096           16
    used     9870         4091           5       one budget used up, nearly all of the other

Vector packing is hard even to approximate; it helps to keep each pack on the diagonal: a pack with little space left
for media takes text, one with little space for text takes media.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from packtool.errors import ConfigError, DataError
from packtool.planning.best_fit import GAP, HEAD_SPREAD, LengthSet
from packtool.planning.pack_plan import (
    Costs,
    Int32Array,
    Int64Array,
    IntArray,
    PackPlan,
    build_plan,
    digest_arrays,
    invert_order,
    select_packs,
    sort_by_sample,
    split_to_count,
)
from packtool.planning.shuffle import RandomStream, seeded_order, seeded_uniform

_NUM_CLASSES = 16
_MAX_SUBSET = 20_000
_EVENNESS = (1.5, 2.0, 4.0, 1e9, 0.0)
_MAX_CLASSES_TRIED = 4
_SLACK = 3e-4
_HEAD_STREAMS = (RandomStream.JITTER, RandomStream.BUDGET_JITTER_2, RandomStream.BUDGET_JITTER_3)  # one an attempt


class PackLimits(NamedTuple):
    """Maximum tokens, media tokens and samples of a pack."""

    tokens: int
    media_tokens: int
    samples: int


_num_packs_of_first_epoch: dict[str, int] = {}


def check_media_tokens(
    media_tokens: IntArray | None, lengths: Int32Array, max_media_tokens: int | None, capacity: int
) -> Int32Array | None:
    """Check the media tokens of samples, (N,), and return them as int32; None if no pack can exceed the limit.

    ``lengths``, (N,), include media tokens; a pack holds ``capacity`` tokens and ``max_media_tokens``.
    """
    if max_media_tokens is None or len(lengths) == 0:
        return None
    if media_tokens is None:
        problem = f"--max-media-tokens-per-pack {max_media_tokens}: the media tokens of the samples are unknown."
        raise ConfigError(problem, "Plan from a cache, or remove the option.")
    assert media_tokens.shape == lengths.shape
    largest = int(media_tokens.max())
    if largest > max_media_tokens:
        num_over = int(np.count_nonzero(media_tokens > max_media_tokens))
        raise DataError(
            f"{num_over:,} of {len(lengths):,} samples have more media tokens than a pack may hold, "
            f"{max_media_tokens:,}; the largest has {largest:,}.",
            f"Raise --max-media-tokens-per-pack to {largest}, or export with smaller media (--max-pixels).",
        )
    # A pack of ``capacity`` tokens cannot have more media tokens than that.
    tokens_limit_media = max_media_tokens >= capacity and bool((media_tokens <= lengths).all())
    if largest == 0 or tokens_limit_media:
        return None
    return media_tokens.astype(np.int32, copy=False)


def pack_within_budgets(
    lengths: Int32Array,
    media_tokens: Int32Array,
    limits: PackLimits,
    *,
    shuffle: bool,
    seed: int,
    epoch: int,
    stream: int,
) -> PackPlan:
    """Pack by best fit within ``limits``; lengths (N,) are checked.

    Every epoch has the number of packs of epoch 0, which is remembered in this process, and a few more, so that the
    random order of a later epoch fits. Further arguments are as for ``best_fit.pack_histogram``.
    """
    if not shuffle:
        order = np.arange(len(lengths), dtype=np.int64)
        return sort_by_sample(place_within_budgets(lengths, media_tokens, limits, order, noise=None))

    def pack_epoch(epoch: int, noise_stream: int = _HEAD_STREAMS[0]) -> PackPlan:
        order = seeded_order(len(lengths), seed=seed, epoch=epoch, stream=stream + RandomStream.BUDGET_ORDER)
        noise = seeded_uniform(len(lengths), seed=seed, epoch=epoch, stream=stream + noise_stream)
        return place_within_budgets(lengths, media_tokens, limits, order, noise)

    key = digest_arrays(hashlib.sha256(f"{limits} {seed} {stream}".encode()), lengths, media_tokens)
    first_plan = None
    if epoch == 0 or key not in _num_packs_of_first_epoch:
        first_plan = pack_epoch(0)
        _num_packs_of_first_epoch[key] = first_plan.num_packs
    num_first_packs = _num_packs_of_first_epoch[key]
    num_packs = min(num_first_packs + 2 + int(num_first_packs * _SLACK), len(lengths))
    plan = first_plan
    if epoch > 0:
        # The first of several random packings with few enough packs, else the packing of epoch 0.
        attempts = (pack_epoch(epoch, noise_stream) for noise_stream in _HEAD_STREAMS)
        plan = next((attempt for attempt in attempts if attempt.num_packs <= num_packs), first_plan)
    plan = plan or pack_epoch(0)
    order = seeded_order(plan.num_packs, seed=seed, epoch=epoch, stream=stream + RandomStream.PACK_ORDER)
    return split_to_count(select_packs(plan, order), num_packs)


def place_within_budgets(
    lengths: Int32Array, media_tokens: Int32Array, limits: PackLimits, order: Int64Array, noise: Costs | None
) -> PackPlan:
    """Fill packs one after the other, within hard limits; return them in the order in which they were filled.

    Each pack begins with the largest remaining sample, by the larger of its shares of the two budgets. While there is
    space, ``_Packer._next_group`` chooses its next sample. Where sample slots are scarce, the pack takes samples of
    mean size: ``evenness`` of ``place_exact_fit`` is then the value that needs the fewest packs for up to 20,000 of the
    samples. Cost: about six microseconds a sample.

    All arrays are (N,): ``order`` lists the samples; of equally long ones of a density class, the earlier one is taken
    first. ``noise``, from 0 to 1, varies the first sample of packs.
    """
    size = np.maximum(lengths / limits.tokens, media_tokens / limits.media_tokens)
    if noise is not None:
        size *= 1 - HEAD_SPREAD * noise
    evenness = 0.0
    can_reach_max_samples = len(lengths) > 0 and limits.samples * int(lengths.min()) < limits.tokens
    if can_reach_max_samples:
        subset = order[:: math.ceil(len(order) / _MAX_SUBSET)]  # evenly spaced samples
        evenness = _best_evenness(lengths[subset], media_tokens[subset], limits, size[subset])
    packer = _Packer(lengths, media_tokens, order, limits, evenness)
    samples, pack_sizes = packer.pack(heads=np.argsort(-size, kind="stable"), noise=noise)
    return build_plan(samples, pack_sizes, lengths, limits.tokens)


def _best_evenness(lengths: Int32Array, media_tokens: Int32Array, limits: PackLimits, size: Costs) -> float:
    """Return the evenness that needs the fewest packs for these samples; all arrays are (n,)."""
    largest_first = np.argsort(-size, kind="stable")

    def count_packs(evenness: float) -> int:
        packer = _Packer(lengths, media_tokens, np.arange(len(lengths)), limits, evenness)
        _, pack_sizes = packer.pack(heads=largest_first)
        return len(pack_sizes)

    return min(_EVENNESS, key=count_packs)


def _density_classes(density: Costs) -> tuple[Costs, Int64Array]:
    """Divide samples into classes of about equally many by density, without empty classes.

    Returns the maximum density of each class, ascending, and the class of each sample, int64 (N,).
    """
    quantiles = np.quantile(density, np.linspace(0, 1, _NUM_CLASSES + 1), method="higher")
    edges = np.unique(quantiles)
    used_edges, class_of_sample = np.unique(np.searchsorted(edges, density), return_inverse=True)
    return edges[used_edges], class_of_sample


class _Packer:
    """Unpacked samples, in groups of equal length and density class.

    The density of a sample is its media tokens divided by its tokens. Class c has the densities above
    ``_max_density[c - 1]`` up to ``_max_density[c]``. Groups are numbered by class, and in a class by length.
    """

    def __init__(
        self, lengths: Int32Array, media_tokens: Int32Array, order: Int64Array, limits: PackLimits, evenness: float
    ) -> None:
        self._limits = limits
        self._evenness = evenness
        self._lengths: list[int] = lengths.tolist()
        self._media: list[int] = media_tokens.tolist()
        self._num_left = len(lengths)
        self._tokens_left = int(lengths.sum(dtype=np.int64))
        self._is_packed = bytearray(len(lengths))
        max_density, class_of_sample = _density_classes(media_tokens / lengths)
        self._max_density: list[float] = max_density.tolist()
        self._make_groups(lengths, class_of_sample, order)
        # Lower bound of the lengths left in each class, which saves most searches without a result.
        self._min_length = [1] * len(self._max_density)

    def _make_groups(self, lengths: Int32Array, class_of_sample: Int64Array, order: Int64Array) -> None:
        """Group samples (N,) of equal class and length; groups are used up from their ends, the first in ``order``."""
        sorted_samples = np.lexsort((invert_order(order[::-1]), lengths, class_of_sample))
        sorted_classes = class_of_sample[sorted_samples]
        sorted_lengths = lengths[sorted_samples]
        begins_group = (np.diff(sorted_classes, prepend=-1) != 0) | (np.diff(sorted_lengths, prepend=-1) != 0)
        starts = np.flatnonzero(begins_group)
        stops = np.append(starts[1:], len(lengths))
        group_of_sample = np.empty(len(lengths), dtype=np.int64)
        group_of_sample[sorted_samples] = np.cumsum(begins_group) - 1
        self._sorted_samples: list[int] = sorted_samples.tolist()
        self._group_of: list[int] = group_of_sample.tolist()
        self._stops: list[int] = stops.tolist()  # of groups in ``_sorted_samples``; lowered as samples are packed
        self._group_sizes: list[int] = (stops - starts).tolist()
        self._class_of_group: list[int] = sorted_classes[starts].tolist()
        self._index_groups(sorted_lengths[starts].tolist())

    def _index_groups(self, group_lengths: list[int]) -> None:
        """Make the indexes of each class by length: the nonempty groups, and the set of their lengths."""
        self._group_by_length: list[dict[int, int]] = [{} for _ in self._max_density]
        for group, length in enumerate(group_lengths):
            self._group_by_length[self._class_of_group[group]][length] = group
        self._lengths_in_class = [LengthSet(group_by_length) for group_by_length in self._group_by_length]

    def pack(self, heads: Int64Array, noise: Costs | None = None) -> tuple[Int64Array, Int64Array]:
        """Return samples in pack order and the sizes of packs, each beginning with the next unpacked of ``heads``."""
        packed: list[int] = []
        sizes: list[int] = []
        # Tokens that may stay free in a pack whose last sample is chosen; noise varies which gap is aimed at.
        max_gap = int(self._limits.tokens * GAP)
        min_gaps = np.zeros(len(heads)) if noise is None else (max_gap + 1) * noise
        for head, min_gap in zip(heads.tolist(), min_gaps.astype(np.int64).tolist(), strict=True):
            if not self._is_packed[head]:
                before = len(packed)
                self._fill(head, packed, min_gap, max_gap)
                sizes.append(len(packed) - before)
        return np.array(packed, dtype=np.int64), np.array(sizes, dtype=np.int64)

    def _fill(self, sample: int, packed: list[int], min_gap: int, max_gap: int) -> None:
        """Append the samples of one pack to ``packed``, beginning with ``sample``; gaps are as for ``_next_group``."""
        free_tokens, free_media, free_slots = self._limits
        while True:
            packed.append(sample)
            self._remove(sample)
            free_tokens -= self._lengths[sample]
            free_media -= self._media[sample]
            free_slots -= 1
            if not (free_tokens and free_slots and self._num_left):
                return
            group = self._next_group(free_tokens, free_media, free_slots, min_gap, max_gap)
            if group < 0:
                return
            # Take the last unpacked sample; packed ones before the end were the first samples of their packs.
            while self._is_packed[self._sorted_samples[self._stops[group] - 1]]:
                self._stops[group] -= 1
            sample = self._sorted_samples[self._stops[group] - 1]

    def _remove(self, sample: int) -> None:
        length, group = self._lengths[sample], self._group_of[sample]
        self._is_packed[sample] = 1
        self._num_left -= 1
        self._tokens_left -= length
        self._group_sizes[group] -= 1
        if not self._group_sizes[group]:
            density_class = self._class_of_group[group]
            self._lengths_in_class[density_class].remove(length)
            del self._group_by_length[density_class][length]

    def _next_group(self, free_tokens: int, free_media: int, free_slots: int, min_gap: int, max_gap: int) -> int:
        """Choose the group that a pack takes its next sample from, or -1 if no sample fits.

        First a sample that leaves from ``min_gap`` to ``max_gap`` tokens free, unless slots are scarce (``evenness`` of
        ``place_exact_fit``); else the longest that fits, or with scarce slots the nearest to the mean space of a slot.
        """
        slots_are_scarce = (
            free_slots > 1 and free_tokens * self._evenness * self._num_left >= self._tokens_left * free_slots
        )
        # The densest class whose samples could fill all free tokens within the free media tokens; -1 if there is none.
        densest = bisect_right(self._max_density, free_media / free_tokens) - 1
        if not slots_are_scarce:
            filling_group = self._filling_group(densest, max(free_tokens - max_gap, 1), max(free_tokens - min_gap, 0))
            if filling_group >= 0:
                return filling_group
        # From ``densest`` down to the class with least media, and then the denser classes.
        for density_class in (*range(densest, -1, -1), *range(densest + 1, len(self._max_density))):
            max_length = free_tokens
            if density_class > densest:
                max_length = int(free_media / self._max_density[density_class])
            if max_length < self._min_length[density_class]:
                continue
            length = self._lengths_in_class[density_class].at_most(max_length)
            if length > 0:
                if slots_are_scarce:
                    length = self._lengths_in_class[density_class].nearest(free_tokens // free_slots, length)
                return self._group_by_length[density_class][length]
            self._min_length[density_class] = max_length + 1  # the class has no shorter sample
        return -1

    def _filling_group(self, densest: int, min_length: int, max_length: int) -> int:
        """Return the group of the longest samples of these lengths in the class ``densest``, or in one below; or -1."""
        last_class = max(densest - _MAX_CLASSES_TRIED, -1)  # exclusive
        for density_class in range(densest, last_class, -1):
            length = self._lengths_in_class[density_class].at_most(max_length)
            if length >= min_length:
                return self._group_by_length[density_class][length]
        return -1
