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
from collections.abc import Callable
from functools import cache
from itertools import starmap
from typing import NamedTuple

import numpy as np

from packtool.errors import ConfigError, DataError
from packtool.planning.best_fit import MAX_GAP_SHARE, MAX_SHORTENING, slots_are_scarce
from packtool.planning.length_set import NO_LENGTH, LengthSet
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
_SCARCITY_FACTORS = (1.5, 2.0, 4.0, 1e9, 0.0)
_MAX_CLASSES_TRIED = 4
_SLACK, _SLACK_PACKS = 3e-4, 2
"""Share of packs, and number of packs, by which every epoch may exceed the packs that epoch 0 needs."""
_NOISE_STREAMS = RandomStream.JITTER, RandomStream.BUDGET_JITTER_2, RandomStream.BUDGET_JITTER_3  # one per attempt


class PackLimits(NamedTuple):
    """Maximum tokens, media tokens and samples of a pack."""

    tokens: int
    media_tokens: int
    samples: int


_num_packs_of_epochs: dict[str, int] = {}  # remembered by this process, by a hash of samples, limits and seed


def check_media_tokens(
    media_tokens: IntArray | None, lengths: IntArray, max_media_tokens: int | None, capacity: int
) -> Int32Array | None:
    """Return the media tokens of samples if packing must limit them, int32 (N,); otherwise None.

    None if there is no limit, or if no pack of ``capacity`` tokens can exceed it.

    Args:
        media_tokens: tokens of images, videos and sounds of each sample, (N,). It is a ConfigError if they are None
            though limited, and a DataError if a single sample exceeds the limit.
        lengths: all tokens of each sample, (N,), those of media included.
        max_media_tokens: maximum media tokens of a pack; None for no limit.
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
    if largest == 0:
        return None
    if max_media_tokens >= capacity and (media_tokens <= lengths).all():
        return None  # a pack that is within its capacity is within this limit, too
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
    """Pack samples within a limit of tokens and one of media tokens; both arrays are (N,).

    Every epoch has different packs, but equally many: a few more than epoch 0 needs. If an epoch needs fewer, some
    packs are split. Without ``shuffle`` nothing is random. ``stream``: offset of the random streams, as from
    ``of_window``.
    """
    if not shuffle:
        order = np.arange(len(lengths), dtype=np.int64)
        return sort_by_sample(place_within_budgets(lengths, media_tokens, limits, order, noise=None))

    @cache  # epoch 0 is needed for its number of packs, and perhaps for its plan
    def pack_epoch(number: int, noise_stream: int) -> PackPlan:
        order = seeded_order(len(lengths), seed=seed, epoch=number, stream=stream + RandomStream.BUDGET_ORDER)
        noise = seeded_uniform(len(lengths), seed=seed, epoch=number, stream=stream + noise_stream)
        return place_within_budgets(lengths, media_tokens, limits, order, noise)

    inputs_hash = digest_arrays(hashlib.sha256(f"{limits} {seed} {stream}".encode()), lengths, media_tokens)
    if inputs_hash not in _num_packs_of_epochs:
        num_packs_of_epoch_0 = pack_epoch(0, _NOISE_STREAMS[0]).num_packs
        _num_packs_of_epochs[inputs_hash] = min(_with_slack(num_packs_of_epoch_0), len(lengths))  # none is empty
    num_packs = _num_packs_of_epochs[inputs_hash]
    plan = _pack_up_to(num_packs, pack_epoch, epoch)
    pack_order = seeded_order(plan.num_packs, seed=seed, epoch=epoch, stream=stream + RandomStream.PACK_ORDER)
    return split_to_count(select_packs(plan, pack_order), num_packs)


def _with_slack(num_packs: int) -> int:
    """Return the packs that every epoch may need if epoch 0 needs ``num_packs``."""
    return num_packs + _SLACK_PACKS + int(num_packs * _SLACK)


def _pack_up_to(max_packs: int, pack_epoch: Callable[[int, int], PackPlan], epoch: int) -> PackPlan:
    """Try all noise streams for at most ``max_packs`` packs of an epoch; else return epoch 0, which never needs more.

    ``pack_epoch`` packs an epoch, by its number, with a noise stream.
    """
    attempts = [*((epoch, noise_stream) for noise_stream in _NOISE_STREAMS), (0, _NOISE_STREAMS[0])]
    return next(plan for plan in starmap(pack_epoch, attempts) if plan.num_packs <= max_packs)


def place_within_budgets(
    lengths: Int32Array, media_tokens: Int32Array, limits: PackLimits, order: Int64Array, noise: Costs | None
) -> PackPlan:
    """Fill packs one after the other; return them in the order in which they were filled.

    Each pack begins with the largest remaining sample, by its share of a pack's tokens or media tokens.

    Args:
        lengths, media_tokens: of each sample, (N,).
        order: sample numbers, (N,); of similar samples, the first one in this order is packed first.
        noise: from 0 to 1, (N,), varies which samples begin packs, and how many tokens stay free. None for no noise.
    """
    shares = np.maximum(lengths / limits.tokens, media_tokens / limits.media_tokens)  # of a pack, (N,)
    if noise is not None:
        shares *= 1 - MAX_SHORTENING * noise
    scarcity_factor = 0.0  # slots are never scarce
    shortest = int(lengths.min(initial=limits.tokens))
    if limits.samples * shortest < limits.tokens:  # the limit of samples may leave tokens free
        stride = math.ceil(len(order) / _MAX_SUBSET)
        subset = order[::stride]
        scarcity_factor = _best_scarcity_factor(lengths[subset], media_tokens[subset], limits, shares[subset])
    packer = _Packer(lengths, media_tokens, order, limits, scarcity_factor)
    largest_first = np.argsort(-shares, kind="stable")
    samples, pack_sizes = packer.pack(largest_first, noise)
    return build_plan(samples, pack_sizes, lengths, limits.tokens)


def _best_scarcity_factor(lengths: Int32Array, media_tokens: Int32Array, limits: PackLimits, shares: Costs) -> float:
    """Return the factor for ``slots_are_scarce`` with which these samples need the fewest packs; arrays are (n,)."""
    largest_first = np.argsort(-shares, kind="stable")

    def count_packs(scarcity_factor: float) -> int:
        packer = _Packer(lengths, media_tokens, np.arange(len(lengths)), limits, scarcity_factor)
        _, pack_sizes = packer.pack(largest_first)
        return len(pack_sizes)

    return min(_SCARCITY_FACTORS, key=count_packs)


def _density_classes(density: Costs) -> tuple[Costs, Int64Array]:
    """Divide samples evenly by density: return the maximum of each class, ascending, and each sample's class, (N,)."""
    quantiles = np.quantile(density, np.linspace(0, 1, _NUM_CLASSES + 1), method="higher")
    edges = np.unique(quantiles)
    used_edges, class_of_sample = np.unique(np.searchsorted(edges, density), return_inverse=True)
    return edges[used_edges], class_of_sample


class _Packer:
    """Unpacked samples, in groups of equal length and density class.

    The density of a sample is its media tokens divided by its tokens. Class c has the densities above
    ``_max_density[c - 1]`` up to ``_max_density[c]``. A *slot* is space for one more sample in a pack.
    """

    def __init__(
        self, lengths: Int32Array, media_tokens: Int32Array, order: Int64Array, limits: PackLimits, scarcity: float
    ) -> None:
        self._limits = limits
        self._scarcity_factor = scarcity
        self._lengths: list[int] = lengths.tolist()
        self._media: list[int] = media_tokens.tolist()
        self._num_left = len(lengths)
        self._tokens_left = int(lengths.sum(dtype=np.int64))
        self._is_packed = bytearray(len(lengths))
        max_density, class_of_sample = _density_classes(media_tokens / lengths)
        self._max_density: list[float] = max_density.tolist()
        self._make_groups(lengths, class_of_sample, order)
        self._min_length = [1] * len(self._max_density)  # lower bound of the lengths left in each class

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

    def pack(self, largest_first: Int64Array, noise: Costs | None = None) -> tuple[Int64Array, Int64Array]:
        """Pack all samples, beginning packs with the largest; return samples in pack order, (N,), and pack sizes."""
        packed: list[int] = []
        sizes: list[int] = []
        max_gap = int(self._limits.tokens * MAX_GAP_SHARE)
        min_gaps = np.zeros(len(largest_first)) if noise is None else (max_gap + 1) * noise
        for sample, min_gap in zip(largest_first.tolist(), min_gaps.astype(np.int64).tolist(), strict=True):
            if not self._is_packed[sample]:
                num_before = len(packed)
                self._fill_pack(sample, packed, min_gap, max_gap)
                sizes.append(len(packed) - num_before)
        return np.array(packed, dtype=np.int64), np.array(sizes, dtype=np.int64)

    def _fill_pack(self, first_sample: int, packed: list[int], min_gap: int, max_gap: int) -> None:
        """Append the samples of one pack to ``packed``, leaving ``min_gap`` to ``max_gap`` tokens if possible."""
        free_tokens, free_media, free_slots = self._limits
        sample = first_sample
        while True:
            packed.append(sample)
            self._remove(sample)
            free_tokens -= self._lengths[sample]
            free_media -= self._media[sample]
            free_slots -= 1
            # Without free media tokens, samples without media still fit.
            if not (free_tokens and free_slots and self._num_left):
                return
            group = self._next_group(free_tokens, free_media, free_slots, min_gap, max_gap)
            if group is None:
                return
            sample = self._last_unpacked(group)

    def _last_unpacked(self, group: int) -> int:
        """Return the last unpacked sample of a nonempty group."""
        while self._is_packed[self._sorted_samples[self._stops[group] - 1]]:
            self._stops[group] -= 1
        return self._sorted_samples[self._stops[group] - 1]

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

    def _next_group(self, free_tokens: int, free_media: int, free_slots: int, min_gap: int, max_gap: int) -> int | None:
        """Choose the group of equal samples that a pack takes its next sample from; None if no sample fits.

        A sample fills the pack up to a gap of ``min_gap`` to ``max_gap`` tokens, or else is the longest that fits.
        Where slots are scarce, it takes about an equal share of the free tokens.
        """
        # The densest class whose samples, up to the free tokens, never exceed the free media tokens; -1 if none is so.
        densest_safe = bisect_right(self._max_density, free_media / free_tokens) - 1
        if slots_are_scarce(free_tokens, free_slots, self._num_left, self._tokens_left, self._scarcity_factor):
            return self._fitting_group(densest_safe, free_tokens, free_media, free_tokens // free_slots)
        filling_group = self._filling_group(densest_safe, free_tokens - max_gap, free_tokens - min_gap)
        if filling_group is not None:
            return filling_group
        return self._fitting_group(densest_safe, free_tokens, free_media, free_tokens)

    def _fitting_group(self, densest_safe: int, free_tokens: int, free_media: int, wanted_length: int) -> int | None:
        """Return the group of samples that fit and are nearest to ``wanted_length``; None if none fits.

        Searches the density classes one after the other, and takes the first one with samples that fit. First come
        ``densest_safe`` and the classes below it, whose samples always have few enough media tokens; then those above.
        """
        less_dense = range(densest_safe, -1, -1)
        denser = range(densest_safe + 1, len(self._max_density))
        for density_class in (*less_dense, *denser):
            max_length = free_tokens
            if density_class > densest_safe:
                max_length = int(free_media / self._max_density[density_class])
            if max_length < self._min_length[density_class]:
                continue
            lengths = self._lengths_in_class[density_class]
            length = lengths.longest_up_to(max_length)
            if length == NO_LENGTH:
                self._min_length[density_class] = max_length + 1  # saves further searches
                continue
            if wanted_length < length:
                length = lengths.nearest(wanted_length, max_length=length)
            return self._group_by_length[density_class][length]
        return None

    def _filling_group(self, densest_safe: int, min_length: int, max_length: int) -> int | None:
        """Return the group of the longest samples of these lengths, in ``densest_safe`` or a few classes below."""
        last_class = max(densest_safe - _MAX_CLASSES_TRIED, -1)  # exclusive
        for density_class in range(densest_safe, last_class, -1):
            length = self._lengths_in_class[density_class].longest_between(min_length, max_length)
            if length != NO_LENGTH:
                return self._group_by_length[density_class][length]
        return None
