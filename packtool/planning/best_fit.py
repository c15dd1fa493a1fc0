"""Packing by best fit and exact fit over a histogram of lengths: equal samples and equal packs form groups."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from packtool.planning.pack_plan import (
    Costs,
    Int32Array,
    Int64Array,
    PackPlan,
    gather_groups,
    invert_order,
    sort_by_sample,
    split_to_count,
    to_offsets,
)
from packtool.planning.shuffle import CHUNK, RandomStream, seeded_order, seeded_uniform


class PackRange(NamedTuple):
    """Consecutive packs that hold ``num_samples`` samples each."""

    first_pack: int
    num_packs: int
    num_samples: int


class Placement(NamedTuple):
    """Samples of one length in each of consecutive packs, after the ``first_slot`` samples that each holds already."""

    first_pack: int
    num_packs: int
    first_slot: int
    samples_per_pack: int
    length: int


@dataclass(frozen=True, eq=False)
class Placements:
    """All ``Placement``s in the order in which the lengths were placed, as columns; int64 (P,) each.

    ``pack_sizes``, int64 (K,), are the numbers of samples of all packs.
    """

    first_pack: Int64Array
    num_packs: Int64Array
    first_slot: Int64Array
    samples_per_pack: Int64Array
    length: Int64Array
    pack_sizes: Int64Array

    @classmethod
    def from_rows(cls, rows: Sequence[Placement], ranges: Iterable[PackRange]) -> Placements:
        """Build placements; ``ranges`` are all packs, in any order."""
        table = np.fromiter(itertools.chain.from_iterable(rows), np.int64).reshape(-1, len(Placement._fields))
        first_pack, num_packs, first_slot, samples_per_pack, length = np.ascontiguousarray(table.T)
        packs = np.fromiter(itertools.chain.from_iterable(sorted(ranges)), np.int64).reshape(-1, len(PackRange._fields))
        pack_sizes = np.repeat(packs[:, 2], packs[:, 1])
        return cls(first_pack, num_packs, first_slot, samples_per_pack, length, pack_sizes)

    @property
    def total_packs(self) -> int:
        return len(self.pack_sizes)


def count_lengths(lengths: Int32Array) -> tuple[Int64Array, Int64Array]:
    """Count equal lengths: return the distinct ones of (N,), the longest first, and their numbers of samples, (D,)."""
    longest = int(lengths.max(initial=0))
    if longest > max(1 << 20, 4 * len(lengths)):
        # Few samples, long ones: an array as long as the longest would be mostly zeros.
        distinct, counts = np.unique(lengths, return_counts=True)
        return distinct[::-1].astype(np.int64), counts[::-1].astype(np.int64)
    bins = np.zeros(longest + 1, dtype=np.int64)
    # bincount copies everything but int64: slices keep that copy small.
    step = max(CHUNK, len(bins))
    for start in range(0, len(lengths), step):
        bins += np.bincount(lengths[start : start + step], minlength=len(bins))
    values = np.flatnonzero(bins)[::-1].astype(np.int64)
    return values, bins[values]


def fill_slots(
    grouped_samples: Int64Array, placements: Placements, pack_starts: Int64Array
) -> tuple[Int64Array, Int32Array]:
    """Assign samples to the slots of their lengths; return ``samples`` and ``lengths`` of the plan, (N,) each.

    ``grouped_samples``, (N,), are sample numbers in the order of the placements: each placement takes as many as it has
    slots. ``pack_starts``, (K,), is the first position of each pack of ``placements`` in the plan.
    """
    num_samples = len(grouped_samples)
    samples = np.empty(num_samples, dtype=np.int64)
    lengths = np.empty(num_samples, dtype=np.int32)
    # Placement p takes ``grouped_samples[placement_starts[p] : placement_starts[p + 1]]``.
    placement_starts = to_offsets(placements.num_packs * placements.samples_per_pack)
    assert placement_starts[-1] == num_samples
    for start in range(0, num_samples, CHUNK):
        stop = min(start + CHUNK, num_samples)
        placement = _find_placements(placement_starts, start, stop)  # of each sample in this chunk, (n,)
        index = np.arange(start, stop) - placement_starts[placement]  # the sample's number in the placement
        # Sample i of a placement with n samples per pack goes to pack i // n of the placement, and there to slot i % n.
        samples_per_pack = placements.samples_per_pack[placement]
        pack_in_placement = index // samples_per_pack
        slot_in_placement = index - pack_in_placement * samples_per_pack
        pack = placements.first_pack[placement] + pack_in_placement
        slot = placements.first_slot[placement] + slot_in_placement
        positions = pack_starts[pack] + slot
        samples[positions] = grouped_samples[start:stop]
        lengths[positions] = placements.length[placement]
    return samples, lengths


def _find_placements(placement_starts: Int64Array, start: int, stop: int) -> Int64Array:
    """Return the placements of the samples ``start`` to ``stop`` - 1, (n,), from the first sample of each, (P + 1,)."""
    first = int(np.searchsorted(placement_starts, start, side="right")) - 1
    end = int(np.searchsorted(placement_starts, stop, side="left"))
    bounds: Int64Array = np.clip(placement_starts[first : end + 1], start, stop)
    return np.repeat(np.arange(first, end), np.diff(bounds))


_LENGTH_BITS = 10
_LENGTH_MASK = (1 << _LENGTH_BITS) - 1


class LengthSet:
    """Set of lengths that finds the nearest length above or below another.

    A set bit in ``_words`` is a length, one in ``_top`` a word that is not empty, so a search takes two shifts at any
    capacity. ``longest`` bounds lengths added later, if above the initial ones.
    """

    def __init__(self, lengths: Iterable[int] = (), longest: int = 0) -> None:
        elements = set(lengths)
        self._longest = max(elements, default=longest)
        self._words = [0] * ((self._longest >> _LENGTH_BITS) + 1)
        self._top = 0
        for length in elements:
            self.add(length)

    def add(self, length: int) -> None:
        """Add a length that is not in the set."""
        self._words[length >> _LENGTH_BITS] |= 1 << (length & _LENGTH_MASK)
        self._top |= 1 << (length >> _LENGTH_BITS)

    def remove(self, length: int) -> None:
        """Remove a length that is in the set."""
        word = length >> _LENGTH_BITS
        self._words[word] ^= 1 << (length & _LENGTH_MASK)
        if not self._words[word]:
            self._top ^= 1 << word

    def longest(self) -> int:
        """Return the longest length, or -1."""
        word = self._top.bit_length() - 1
        return (word << _LENGTH_BITS) + self._words[word].bit_length() - 1 if word >= 0 else -1

    def at_most(self, length: int) -> int:
        """Return the longest length up to ``length``, which is 0 or more; or -1."""
        if length >= self._longest:
            return self.longest()
        index = length >> _LENGTH_BITS
        word = self._words[index] & ((2 << (length & _LENGTH_MASK)) - 1)
        if not word:
            below = self._top & ((1 << index) - 1)
            if not below:
                return -1
            index = below.bit_length() - 1
            word = self._words[index]
        return (index << _LENGTH_BITS) + word.bit_length() - 1

    def at_least(self, length: int) -> int:
        """Return the shortest length from ``length`` on, which is 0 or more; or -1."""
        if length > self._longest:
            return -1
        index = length >> _LENGTH_BITS
        word = self._words[index] >> (length & _LENGTH_MASK) << (length & _LENGTH_MASK)
        if not word:
            above = self._top >> (index + 1)
            if not above:
                return -1
            index += (above & -above).bit_length()
            word = self._words[index]
        return (index << _LENGTH_BITS) + (word & -word).bit_length() - 1

    def nearest(self, length: int, longest: int) -> int:
        """Return the length nearest to ``length`` up to ``longest``, which is in the set."""
        below, above = self.at_most(min(length, longest)), self.at_least(length)
        if above < 0 or above > longest:
            return below
        return above if below < 0 or above - length < length - below else below


def place_best_fit(
    lengths: Sequence[int], counts: Sequence[int], capacity: int, max_samples: int | None = None
) -> Placements:
    """Place one length after the other where its samples fit most tightly, or in new packs.

    ``lengths`` are distinct, from 1 to ``capacity``; with the longest first, this is best-fit decreasing. ``counts``
    are the numbers of samples of each length, 1 or more.
    """
    packer = _BestFit(capacity, max_samples or capacity, shortest=min(lengths, default=1))
    for length, count in zip(lengths, counts, strict=True):
        num_left = packer.fill_open_packs(length, count)
        if num_left:
            packer.fill_new_packs(length, num_left)
    packs = itertools.chain(packer.full_packs, *packer.open_packs.values())
    return Placements.from_rows(packer.placements, list(packs))


class _BestFit:
    """Packs while they are filled by best fit; packs of equal content are filled at once."""

    def __init__(self, capacity: int, max_samples: int, shortest: int) -> None:
        self._capacity, self._max_samples, self._shortest = capacity, max_samples, shortest
        self.open_packs: dict[int, list[PackRange]] = {}  # packs by their number of free tokens
        self._free_tokens = LengthSet(longest=capacity)  # the keys of ``open_packs``
        self.full_packs: list[PackRange] = []
        self.placements: list[Placement] = []
        self._num_packs = 0

    def fill_open_packs(self, length: int, count: int) -> int:
        """Place samples in open packs, those with the least sufficient space first; return how many do not fit."""
        free = self._free_tokens.at_least(length)
        while count and free >= 0:
            count = self._fill(self.open_packs[free], free, length, count)
            if not self.open_packs[free]:
                del self.open_packs[free]
                self._free_tokens.remove(free)
            free = self._free_tokens.at_least(free + 1)  # filled packs have less space now
        return count

    def fill_new_packs(self, length: int, count: int) -> None:
        """Place samples in as many new packs as they need."""
        num_new_packs = math.ceil(count / min(self._capacity // length, self._max_samples))
        new_packs = PackRange(first_pack=self._num_packs, num_packs=num_new_packs, num_samples=0)
        self._fill([new_packs], self._capacity, length, count)
        self._num_packs += num_new_packs

    def _fill(self, ranges: list[PackRange], free: int, length: int, count: int) -> int:
        """Place up to ``count`` samples in packs with ``free`` tokens each; return the number of samples left over.

        Filled packs move from ``ranges`` to ``open_packs`` or ``full_packs``.
        """
        while ranges and count:
            first_pack, num_packs, num_samples = ranges.pop()
            # Every pack takes as many samples as fit; if fewer are left, one pack takes all of them.
            per_pack = min(free // length, self._max_samples - num_samples, count)
            num_filled = min(count // per_pack, num_packs)
            if num_filled < num_packs:
                ranges.append(PackRange(first_pack + num_filled, num_packs - num_filled, num_samples))
            self.placements.append(Placement(first_pack, num_filled, num_samples, per_pack, length))
            count -= num_filled * per_pack
            filled = PackRange(first_pack, num_filled, num_samples + per_pack)
            free_after = free - per_pack * length
            if free_after < self._shortest or filled.num_samples == self._max_samples:
                self.full_packs.append(filled)
            elif free_after in self.open_packs:
                self.open_packs[free_after].append(filled)
            else:
                self.open_packs[free_after] = [filled]
                self._free_tokens.add(free_after)
        return count


MAX_BITS_FOR_PAIRS = 1 << 17
"""Longer lengths are packed without looking for pairs: their bit sets would be too large to be fast."""

GAP = 1e-3
"""Share of the capacity that may stay free where one sample fills a pack: short samples are saved for longer gaps."""
HEAD_SPREAD = 0.02
"""Maximum change of the first choice by noise, as a share of its length."""
_PAIR_SPREAD = 0.25  # the same for the choice of a pair


def place_exact_fit(
    lengths: Sequence[int],
    counts: Sequence[int],
    capacity: int,
    *,
    max_samples: int | None = None,
    evenness: float = 0.0,
    noise: Sequence[float] = (0.0,),
) -> Placements:
    """Fill packs one after the other so that little space stays free; packs of the same lengths are filled at once.

    Gupta and Ho 1999, "A new heuristic algorithm for the one-dimensional bin-packing problem", fill each bin with the
    subset that leaves least space; this considers subsets of two samples only. Of all pairs that fill a pack exactly,
    it takes the two most similar lengths. Cost: one filled pack for each distinct length, or a few times that.

    Args:
        lengths: distinct, from 1 to ``capacity``.
        counts: number of samples of each length, 1 or more.
        evenness: where ``max_samples`` makes the sample slots of a pack scarce, the pack takes samples of mean size.
            Slots are scarce if the free tokens per free slot are at least 1 / evenness of the mean remaining length.
            With 0 slots are never scarce, and short samples remain for the last packs.
        noise: numbers from 0 to 1, one for each choice, used cyclically. They vary which samples share a pack; 0 makes
            the best choice.
    """
    unplaced = _UnplacedSamples(lengths, counts)
    noise_values = itertools.cycle(noise)
    placements: list[Placement] = []
    ranges: list[PackRange] = []
    num_packs = 0
    while unplaced.num:
        pack_lengths = _take_pack(unplaced, capacity, max_samples or capacity, evenness, noise_values)
        count_by_length = Counter(pack_lengths)
        # Further packs get the same lengths while there are enough samples.
        num_further = min(unplaced.counts.get(length, 0) // count for length, count in count_by_length.items())
        num_equal_packs = 1 + num_further
        num_samples = 0
        for length, count in count_by_length.items():
            if num_further:
                unplaced.take(length, num_further * count)
            placements.append(Placement(num_packs, num_equal_packs, num_samples, count, length))
            num_samples += count
        ranges.append(PackRange(num_packs, num_equal_packs, num_samples))
        num_packs += num_equal_packs
    # ``fill_slots`` gets the samples grouped by length, the longest first, and needs placements in that order.
    placements.sort(key=lambda placement: -placement.length)
    return Placements.from_rows(placements, ranges)


def _take_pack(
    unplaced: _UnplacedSamples, capacity: int, max_samples: int, evenness: float, noise_values: Iterator[float]
) -> list[int]:
    """Remove the samples of one pack from ``unplaced``; return their lengths, the longest first."""
    first_length = unplaced.longest()
    if noise := next(noise_values):  # begin with a somewhat shorter sample
        first_length = unplaced.at_least(first_length - int(first_length * HEAD_SPREAD * noise))
    unplaced.take(first_length, 1)
    pack_lengths = [first_length]
    free_tokens = capacity - first_length
    free_slots = max_samples - 1
    max_gap = int(capacity * GAP)
    while free_tokens and free_slots and unplaced.num:
        lengths = _next_lengths(unplaced, free_tokens, free_slots, evenness, max_gap, next(noise_values))
        if not lengths:
            break
        for length in lengths:
            unplaced.take(length, 1)
        pack_lengths += lengths
        free_tokens -= sum(lengths)
        free_slots -= len(lengths)
    return sorted(pack_lengths, reverse=True)


def _next_lengths(
    unplaced: _UnplacedSamples, free_tokens: int, free_slots: int, evenness: float, max_gap: int, noise: float
) -> tuple[int, ...]:
    """Choose the lengths of the one or two samples that a pack takes next; () if none fits.

    The first choice is a sample that leaves at most ``max_gap`` tokens free, the second are two samples that fill the
    pack exactly, the last is the longest that fits. If slots are scarce (``evenness`` of ``place_exact_fit``), it is
    two samples that fill the pack and its last two slots, or else the sample nearest to the mean space of a slot.
    """
    slots_are_scarce = free_slots > 1 and free_tokens * evenness * unplaced.num >= unplaced.num_tokens * free_slots
    if not slots_are_scarce:
        min_gap = int(max_gap * noise)
        length = unplaced.at_most(max(free_tokens - min_gap, 0))
        if length >= max(free_tokens - max_gap, 1):
            return (length,)
    if free_slots == 2 or (free_slots > 2 and not slots_are_scarce):
        pair = unplaced.pair(free_tokens, int(free_tokens * _PAIR_SPREAD * noise))
        if pair is not None:
            return pair
    length = unplaced.at_most(free_tokens)
    if length < 0:
        return ()
    if slots_are_scarce:
        length = unplaced.nearest(free_tokens // free_slots, length)
    return (length,)


class _UnplacedSamples(LengthSet):
    """Unplaced samples by length; ``_bits`` and its mirror image find pairs."""

    def __init__(self, lengths: Sequence[int], counts: Sequence[int]) -> None:
        super().__init__(lengths)
        self.counts = dict(zip(lengths, counts, strict=True))
        self.num = sum(counts)
        self.num_tokens = sum(length * count for length, count in self.counts.items())
        self._has_pairs = self._longest <= MAX_BITS_FOR_PAIRS
        self._bits = self._mirror = 0
        if self._has_pairs:
            digits = bytearray(b"0") * (self._longest + 1)
            for length in lengths:
                digits[length] = ord("1")
            self._mirror = int(digits.decode(), 2)
            self._bits = int(digits[::-1].decode(), 2)

    def take(self, length: int, num: int) -> None:
        self.counts[length] -= num
        self.num -= num
        self.num_tokens -= num * length
        if not self.counts[length]:
            del self.counts[length]
            self.remove(length)
            if self._has_pairs:
                self._bits ^= 1 << length
                self._mirror ^= 1 << (self._longest - length)

    def pair(self, total: int, min_distance: int) -> tuple[int, int] | None:
        """Find the two most similar lengths with a sum of ``total``; return the longer one first, or None.

        The longer one has at least ``min_distance`` tokens more than half of ``total``, if there is such a pair.
        """
        if not self._has_pairs or total > 2 * self._longest:
            return None
        # Bit x of ``_bits``, and bit longest - x of ``_mirror``, are set if samples of x tokens are left. Bit x of the
        # shifted mirror is set if samples of total - x tokens are left. So bit x of both is a pair (x, total - x).
        shift = self._longest - total
        shifted_mirror = self._mirror >> shift if shift >= 0 else self._mirror << -shift
        pair_bits = self._bits & shifted_mirror
        min_longer = (total + 1) // 2 + min_distance
        longer_bits = pair_bits >> min_longer
        if not longer_bits:
            min_longer -= min_distance
            longer_bits = pair_bits >> min_longer
        while longer_bits:
            lowest_bit = longer_bits & -longer_bits
            longer = min_longer + lowest_bit.bit_length() - 1
            if 2 * longer != total or self.counts[longer] > 1:  # two equal lengths need two samples
                return longer, total - longer
            longer_bits ^= lowest_bit
        return None


MIN_SAMPLES_PER_LENGTH = 10
"""Samples per distinct length below which a strict order would repeat packs in every epoch: see ``_place_fewest``."""

MAX_EXCESS = 1e-4
"""Share of packs over the lower bound that does not justify a second attempt."""

_SLACK = 4e-4
_EVENNESS = (1.5, 2.0, 3.0, 1e9, 1.0, 0.0)


def pack_histogram(
    lengths: Int32Array,
    capacity: int,
    *,
    max_samples: int | None = None,
    shuffle: bool = True,
    seed: int,
    epoch: int,
    stream: int = 0,
) -> PackPlan:
    """Pack by best-fit decreasing over the histogram of lengths, with different packs in every epoch.

    Best-fit decreasing (Johnson, Demers, Ullman, Garey, Graham 1974, "Worst-case performance bounds for simple
    one-dimensional packing algorithms") needs at most 11/9 of the fewest possible packs + 4. Where it needs over 0.01 %
    more than the lower bound, exact fit is tried, too. The sample for each slot, and the order of packs, are drawn
    from ``seed`` and ``epoch``. The number of packs depends on the lengths only, so every epoch has equally many.

    Cost: O(N log N) to sort N integers, and some 30,000 group steps for 10,000 distinct lengths. Peak memory: 30 bytes
    a sample at four samples a pack and 55 at one, of which 14 and 20 remain in the plan.

    ``lengths``, (N,), are checked. Without ``shuffle`` nothing is drawn at random, and the order of the cache is kept;
    ``stream`` is an offset of the random streams.
    """
    distinct, counts = count_lengths(lengths)
    if max_samples is not None and len(distinct) and capacity // int(distinct[-1]) <= max_samples:
        max_samples = None  # not even the shortest samples reach the limit
    noise = None
    if shuffle and len(lengths) < MIN_SAMPLES_PER_LENGTH * len(distinct):
        noise = seeded_uniform(len(distinct), seed=seed, epoch=epoch, stream=stream + RandomStream.JITTER)
    placements, length_order, num_packs = _place_fewest(distinct, counts, capacity, max_samples, noise)
    pack_sizes = placements.pack_sizes
    draw_order = partial(seeded_order, seed=seed, epoch=epoch)
    if shuffle:
        # Samples of each length in random order, the lengths in the order of the placements.
        samples = draw_order(len(lengths), stream=stream + RandomStream.WITHIN_LENGTH, descending_by=lengths)
        if length_order is not None:
            positions, _ = gather_groups(to_offsets(counts), length_order)
            samples = samples[positions]
        pack_order = draw_order(len(pack_sizes), stream=stream + RandomStream.PACK_ORDER)
        return split_to_count(_fill_packs(samples, placements, pack_order, capacity), num_packs)
    longest_first = np.argsort(-lengths, kind="stable").astype(np.int64, copy=False)
    return sort_by_sample(_fill_packs(longest_first, placements, np.arange(len(pack_sizes)), capacity))


def _fill_packs(grouped_samples: Int64Array, placements: Placements, pack_order: Int64Array, capacity: int) -> PackPlan:
    """Fill the packs of ``placements``, (K,), with samples, (N,) as for ``fill_slots``, in the order of the packs."""
    offsets = to_offsets(placements.pack_sizes[pack_order])
    pack_starts = offsets[:-1][invert_order(pack_order)]  # of each pack of the placements
    samples, lengths = fill_slots(grouped_samples, placements, pack_starts)
    return PackPlan(samples, offsets, lengths, capacity)


class _CumulativeCounts(NamedTuple):
    """The number of samples shorter than each length, and their tokens, (D + 1,): the last is of all samples.

    ``lengths``, (D,), are distinct and ascending.
    """

    lengths: Int64Array
    num_shorter: Int64Array
    tokens_shorter: Int64Array

    @classmethod
    def of(cls, lengths: Int64Array, counts: Int64Array) -> _CumulativeCounts:
        return cls(lengths, to_offsets(counts), to_offsets(lengths * counts))

    def up_to(self, length: npt.NDArray[np.int64] | int) -> tuple[Int64Array, Int64Array]:
        """Return the number of samples of at most ``length`` tokens, and their tokens."""
        index = np.searchsorted(self.lengths, length, side="right")
        return self.num_shorter[index], self.tokens_shorter[index]


def min_packs(distinct: Int64Array, counts: Int64Array, capacity: int, max_samples: int | None = None) -> int:
    """Compute a lower bound of the number of packs, from distinct lengths, descending, and samples of each, (D,).

    Martello and Toth 1990, "Lower bounds and reduction procedures for the bin packing problem" (their L2): samples
    longer than half a pack need a pack each. For any ``k``, samples from ``k`` tokens to half a pack cannot use the
    space beside samples longer than ``capacity - k``. The result is the largest of the bounds for all ``k``.
    """
    if len(distinct) == 0:
        return 0
    half = capacity // 2
    shorter = _CumulativeCounts.of(distinct[::-1], counts[::-1])
    # One bound for each k; arrays below are of the same shape.
    k = np.concatenate(([0], shorter.lengths[shorter.lengths <= half]))
    num_up_to_half, tokens_up_to_half = shorter.up_to(half)
    num_paired, tokens_paired = shorter.up_to(capacity - k)
    _, tokens_below_k = shorter.up_to(k - 1)
    num_samples = int(counts.sum())
    num_alone = num_samples - num_paired  # longer than capacity - k
    num_long = num_paired - num_up_to_half  # longer than half, with space for samples of k tokens
    free_tokens = num_long * capacity - (tokens_paired - tokens_up_to_half)
    short_tokens = tokens_up_to_half - tokens_below_k
    num_more = np.maximum(0, -((free_tokens - short_tokens) // capacity))  # for short samples, rounded up
    bound = int((num_alone + num_long + num_more).max())
    if max_samples:
        bound = max(bound, math.ceil(num_samples / max_samples))
    return bound


def _place_fewest(
    distinct: Int64Array, counts: Int64Array, capacity: int, max_samples: int | None, noise: Costs | None
) -> tuple[Placements, Int64Array | None, int]:
    """Place by best fit or, where that needs fewer packs, by exact fit.

    ``distinct``, (D,), are the lengths, the longest first, and ``counts`` the samples of each. ``noise``, (D,), from 0
    to 1, varies which lengths share a pack.

    Returns:
        Placements, the order (D,) of distinct lengths in them (None: the longest first), and the number of packs that
        every epoch has, whatever its noise: it is no less than that of the placements.
    """
    lengths = distinct.tolist()
    best_fit = place_best_fit(lengths, counts.tolist(), capacity, max_samples)
    exact_fit = partial(place_exact_fit, lengths, counts.tolist(), capacity, max_samples=max_samples)
    enough_packs = int(min_packs(distinct, counts, capacity, max_samples) * (1 + MAX_EXCESS))
    fewest = best_fit
    evenness = None  # of exact fit, if it needs fewer packs than best fit
    if best_fit.total_packs > enough_packs and (max_samples or lengths[0] <= MAX_BITS_FOR_PAIRS):
        candidates = _EVENNESS if max_samples else (0.0,)
        for candidate in candidates:
            exact = exact_fit(evenness=candidate)
            if exact.total_packs < fewest.total_packs:
                fewest, evenness = exact, candidate
            if fewest.total_packs <= enough_packs:
                break
    if noise is None:
        return fewest, None, fewest.total_packs
    # With noise, exact fit may need a few more packs than without, so every epoch gets a few more.
    num_packs = fewest.total_packs + 1 + int(fewest.total_packs * _SLACK)
    if evenness is not None and num_packs < best_fit.total_packs:
        varied = exact_fit(evenness=evenness, noise=noise.tolist())
        return varied if varied.total_packs <= num_packs else fewest, None, num_packs
    varied_best_fit = _vary_best_fit(distinct, counts, capacity, max_samples, noise, best_fit.total_packs)
    return *(varied_best_fit or (best_fit, None)), best_fit.total_packs


def _vary_best_fit(
    distinct: Int64Array, counts: Int64Array, capacity: int, max_samples: int | None, noise: Costs, num_packs: int
) -> tuple[Placements, Int64Array] | None:
    """Place by best fit, the longest first, with the most noise that needs ``num_packs``; None if all needs more.

    Returns placements, and the order (D,) of distinct lengths in them. On 3,000 lognormal lengths, the strict order
    repeats 69 % of its packs in the next epoch, with noise 7 %.
    """
    # The more samples a length has, the less noise is needed, and the more packs it costs.
    rarity = len(counts) / int(counts.sum())
    for divisor in (1, 4, 16):
        max_change = 0.1 * rarity * rarity / divisor
        order = np.argsort(-distinct * (1 + max_change * noise), kind="stable")
        varied = place_best_fit(distinct[order].tolist(), counts[order].tolist(), capacity, max_samples)
        if varied.total_packs == num_packs:
            return varied, order
    return None
