"""Packing by best fit and exact fit over a histogram of lengths: equal samples and equal packs form groups."""

from __future__ import annotations

import itertools
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


def fill_slots(by_length: Int64Array, placements: Placements, pack_starts: Int64Array) -> tuple[Int64Array, Int32Array]:
    """Assign samples to the slots of their lengths; return ``samples`` and ``lengths`` of the plan, (N,) each.

    ``by_length``, (N,), are sample numbers, grouped by length in the order of the placements; ``pack_starts``, (K,), is
    the first position of each pack of ``placements`` in the plan.
    """
    num = len(by_length)
    samples = np.empty(num, dtype=np.int64)
    lengths = np.empty(num, dtype=np.int32)
    placement_starts = to_offsets(placements.num_packs * placements.samples_per_pack)  # in by_length
    assert placement_starts[-1] == num
    for start in range(0, num, CHUNK):
        stop = min(start + CHUNK, num)
        # The placements with samples in this chunk, and how many each has there.
        first = int(np.searchsorted(placement_starts, start, side="right")) - 1
        last = int(np.searchsorted(placement_starts, stop, side="left"))
        bounds: Int64Array = np.clip(placement_starts[first : last + 1], start, stop)
        counts = bounds[1:] - bounds[:-1]
        chunk = slice(first, last)
        # Sample i of a placement with n samples per pack goes to its pack i // n, after i % n others.
        index = np.arange(start, stop) - np.repeat(placement_starts[chunk], counts)
        per_pack = np.repeat(placements.samples_per_pack[chunk], counts)
        pack = index // per_pack
        slot = index - pack * per_pack
        pack += np.repeat(placements.first_pack[chunk], counts)
        slot += np.repeat(placements.first_slot[chunk], counts)
        positions = pack_starts[pack] + slot
        samples[positions] = by_length[start:stop]
        lengths[positions] = np.repeat(placements.length[chunk], counts)
    return samples, lengths


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
    are the samples of each, 1 or more.
    """
    shortest, max_samples = min(lengths, default=1), max_samples or capacity
    open_packs: dict[int, list[PackRange]] = {}  # by their free tokens
    free_tokens = LengthSet(longest=capacity)  # keys of ``open_packs``
    full_packs: list[PackRange] = []
    placements: list[Placement] = []

    def fill(ranges: list[PackRange], free: int, length: int, count: int) -> int:
        """Place up to ``count`` samples in ``ranges`` of packs with ``free`` tokens each; return those left over."""
        while ranges and count:
            first_pack, num_packs, num_samples = ranges.pop()
            # Every pack takes as many as fit; if fewer are left, one pack takes these.
            per_pack = min(free // length, max_samples - num_samples, count)
            num_filled = min(count // per_pack, num_packs)
            if num_filled < num_packs:
                ranges.append(PackRange(first_pack + num_filled, num_packs - num_filled, num_samples))
            placements.append(Placement(first_pack, num_filled, num_samples, per_pack, length))
            count -= num_filled * per_pack
            filled = PackRange(first_pack, num_filled, num_samples + per_pack)
            free_after = free - per_pack * length
            if free_after < shortest or filled.num_samples == max_samples:
                full_packs.append(filled)
            elif free_after in open_packs:
                open_packs[free_after].append(filled)
            else:
                open_packs[free_after] = [filled]
                free_tokens.add(free_after)
        return count

    num_packs = 0
    for length, count in zip(lengths, counts, strict=True):
        free = length
        while count:
            free = free_tokens.at_least(free)
            if free < 0:
                num_new = -(-count // min(capacity // length, max_samples))
                count = fill([PackRange(num_packs, num_new, 0)], capacity, length, count)
                num_packs += num_new
                continue
            count = fill(open_packs[free], free, length, count)
            if not open_packs[free]:
                del open_packs[free]
                free_tokens.remove(free)
            # The filled packs have no space for this length any more, or nothing is left to place.
            free += 1
    return Placements.from_rows(placements, [*full_packs, *itertools.chain.from_iterable(open_packs.values())])


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
    """Fill packs one after the other, equal ones at once.

    Gupta and Ho 1999, "A new heuristic algorithm for the one-dimensional bin-packing problem", fill each bin with the
    subset that leaves least space; this considers subsets of two only. Of the pairs that fill a pack, it takes the most
    alike. Cost: as many patterns as distinct lengths, or a few times that.

    Args:
        lengths, counts: distinct, from 1 to ``capacity``, and samples of each, 1 or more.
        evenness: 0 never saves slots, and leaves short samples to the last packs. x takes samples of mean size while a
            free slot has, on average, space for 1 / x of the mean remaining length: the larger x, the earlier.
        noise: numbers from 0 to 1, used in turn, that vary which samples come together; 0 gives the strict order.
    """
    unplaced = _UnplacedSamples(lengths, counts)
    noise_values = itertools.cycle(noise)
    placements: list[Placement] = []
    ranges: list[PackRange] = []
    num_packs = 0
    while unplaced.num:
        count_by_length = Counter(_fill_pack(unplaced, capacity, max_samples or capacity, evenness, noise_values))
        # Further packs get the same lengths while there are enough samples.
        num_more = min(unplaced.counts.get(length, 0) // count for length, count in count_by_length.items())
        num_samples = 0
        for length, count in count_by_length.items():
            if num_more:
                unplaced.take(length, num_more * count)
            placements.append(Placement(num_packs, 1 + num_more, num_samples, count, length))
            num_samples += count
        ranges.append(PackRange(num_packs, 1 + num_more, num_samples))
        num_packs += 1 + num_more
    placements.sort(key=lambda placement: -placement.length)  # samples are handed out longest first
    return Placements.from_rows(placements, ranges)


def _fill_pack(
    unplaced: _UnplacedSamples, capacity: int, max_samples: int, evenness: float, noise_values: Iterator[float]
) -> list[int]:
    """Take the samples of one pack; return their lengths, the longest first."""
    first = unplaced.longest()
    if noise := next(noise_values):
        first = unplaced.at_least(first - int(first * HEAD_SPREAD * noise))
    unplaced.take(first, 1)
    taken = [first]
    free, slots = capacity - first, max_samples - 1
    while free and slots and unplaced.num:
        lengths = _next_lengths(unplaced, free, slots, evenness, int(capacity * GAP), next(noise_values))
        if not lengths:
            break
        for length in lengths:
            unplaced.take(length, 1)
        taken += lengths
        free -= sum(lengths)
        slots -= len(lengths)
    return sorted(taken, reverse=True)


def _next_lengths(
    unplaced: _UnplacedSamples, free: int, slots: int, evenness: float, max_gap: int, noise: float
) -> tuple[int, ...]:
    """Choose what a pack with ``free`` tokens and slots takes next; nothing if nothing fits.

    A sample that leaves at most ``max_gap`` tokens free; or else two that fill the pack exactly; or else the longest.
    """
    # Slots are scarce where a slot has, on average, more space than the mean remaining sample needs.
    is_scarce = slots > 1 and free * evenness * unplaced.num >= unplaced.num_tokens * slots
    if not is_scarce:
        min_gap = int(max_gap * noise)
        length = unplaced.at_most(max(free - min_gap, 0))
        if length >= max(free - max_gap, 1):
            return (length,)
    if slots == 2 or (slots > 2 and not is_scarce):
        pair = unplaced.pair(free, int(free * _PAIR_SPREAD * noise))
        if pair is not None:
            return pair
    longest = unplaced.at_most(free)
    if longest < 0:
        return ()
    return (unplaced.nearest(free // slots, longest),) if is_scarce else (longest,)


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

    def pair(self, total: int, min_difference: int) -> tuple[int, int] | None:
        """Find two lengths with a sum of ``total``, the most alike, or None.

        They differ by about twice ``min_difference`` tokens or more, if there are any such lengths.
        """
        if not self._has_pairs or total > 2 * self._longest:
            return None
        # Bit x of ``has_partner`` is set where samples of x tokens, and of total - x, are left.
        shift = self._longest - total
        has_partner = self._bits & (self._mirror >> shift if shift >= 0 else self._mirror << -shift)
        min_longer = (total + 1) // 2 + min_difference
        longer_bits = has_partner >> min_longer
        if not longer_bits:
            min_longer -= min_difference
            longer_bits = has_partner >> min_longer
        while longer_bits:
            lowest_bit = longer_bits & -longer_bits
            longer = min_longer + lowest_bit.bit_length() - 1
            if 2 * longer != total or self.counts[longer] > 1:
                return longer, total - longer
            longer_bits ^= lowest_bit
        return None


MIN_SAMPLES_PER_LENGTH = 10
"""Samples per distinct length below which a strict order would repeat packs in every epoch: see ``_place``."""

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

    ``lengths``, (N,), are checked; without ``shuffle`` nothing is drawn at random, and the order of the cache is kept.
    """
    distinct, counts = count_lengths(lengths)
    if max_samples is not None and len(distinct) and capacity // int(distinct[-1]) <= max_samples:
        max_samples = None  # no pack can have more
    noise = None
    if shuffle and len(lengths) < MIN_SAMPLES_PER_LENGTH * len(distinct):
        noise = seeded_uniform(len(distinct), seed=seed, epoch=epoch, stream=stream + RandomStream.JITTER)
    placements, order, num_packs = _place(distinct, counts, capacity, max_samples, noise)
    sizes = placements.pack_sizes
    if not shuffle:
        by_length = np.argsort(-lengths, kind="stable").astype(np.int64, copy=False)
        offsets = to_offsets(sizes)
        samples, pack_lengths = fill_slots(by_length, placements, offsets[:-1])
        return sort_by_sample(PackPlan(samples, offsets, pack_lengths, capacity))

    # Samples of each length in random order, the lengths in the order of the placements.
    draw = partial(seeded_order, seed=seed, epoch=epoch)
    by_length = draw(len(lengths), stream=stream + RandomStream.WITHIN_LENGTH, descending_by=lengths)
    if order is not None:
        by_length = by_length[gather_groups(to_offsets(counts), order)[0]]
    # Packs in random order.
    pack_order = draw(len(sizes), stream=stream + RandomStream.PACK_ORDER)
    offsets = to_offsets(sizes[pack_order])
    samples, pack_lengths = fill_slots(by_length, placements, offsets[:-1][invert_order(pack_order)])
    return split_to_count(PackPlan(samples, offsets, pack_lengths, capacity), num_packs)


def min_packs(distinct: Int64Array, counts: Int64Array, capacity: int, max_samples: int | None = None) -> int:
    """Compute a lower bound of the number of packs, from distinct lengths, descending, and samples of each, (D,).

    Martello and Toth 1990, "Lower bounds and reduction procedures for the bin packing problem" (their L2): samples
    longer than half a pack need one each; samples from ``k`` tokens to half a pack cannot use the space beside samples
    longer than ``capacity - k``; the best ``k`` is taken.
    """
    if len(distinct) == 0:
        return 0
    ascending, half = distinct[::-1], capacity // 2
    num_before, tokens_before = to_offsets(counts[::-1]), to_offsets(ascending * counts[::-1])

    def up_to(length: npt.NDArray[np.int64] | int) -> tuple[Int64Array, Int64Array]:
        """Return the number of samples of at most ``length`` tokens, and their tokens."""
        index = np.searchsorted(ascending, length, side="right")
        return num_before[index], tokens_before[index]

    k = np.concatenate(([0], ascending[ascending <= half]))
    num_up_to_half, tokens_up_to_half = up_to(half)
    num_paired, tokens_paired = up_to(capacity - k)
    _, tokens_below_k = up_to(k - 1)
    num_alone = num_before[-1] - num_paired
    num_long = num_paired - num_up_to_half
    free_tokens = num_long * capacity - (tokens_paired - tokens_up_to_half)
    short_tokens = tokens_up_to_half - tokens_below_k
    num_more = np.maximum(0, -((free_tokens - short_tokens) // capacity))
    bound = int((num_alone + num_long + num_more).max())
    return max(bound, -(-int(num_before[-1]) // max_samples)) if max_samples else bound


def _place(
    distinct: Int64Array, counts: Int64Array, capacity: int, max_samples: int | None, noise: Costs | None
) -> tuple[Placements, Int64Array | None, int]:
    """Place by best fit or, where that needs fewer packs, by exact fit.

    Returns placements, the order (D,) of distinct lengths in them (None: the longest first), and each epoch's packs.

    ``distinct``, (D,), are the lengths, the longest first, and ``counts`` the samples of each. ``noise``, (D,), from 0
    to 1, varies which lengths come together; the number of packs is the same for any.
    """
    lengths = distinct.tolist()
    best_fit = place_best_fit(lengths, counts.tolist(), capacity, max_samples)
    exact_fit = partial(place_exact_fit, lengths, counts.tolist(), capacity, max_samples=max_samples)
    enough_packs = int(min_packs(distinct, counts, capacity, max_samples) * (1 + MAX_EXCESS))
    fewest, evenness = best_fit, None
    if best_fit.total_packs > enough_packs and (max_samples or lengths[0] <= MAX_BITS_FOR_PAIRS):
        for candidate in _EVENNESS if max_samples else (0.0,):
            exact = exact_fit(evenness=candidate)
            if exact.total_packs < fewest.total_packs:
                fewest, evenness = exact, candidate
            if fewest.total_packs <= enough_packs:
                break
    if noise is None:
        return fewest, None, fewest.total_packs
    if evenness is not None:
        # With noise, exact fit may need a few more packs than without; all epochs get as many.
        num_packs = fewest.total_packs + 1 + int(fewest.total_packs * _SLACK)
        if num_packs < best_fit.total_packs:
            varied = exact_fit(evenness=evenness, noise=noise.tolist())
            return varied if varied.total_packs <= num_packs else fewest, None, num_packs
    # The longest first, with the most noise that leaves the number of packs unchanged. On 3,000 lognormal lengths, the
    # strict order repeats 69 % of its packs in the next epoch, with noise 7 %. The more samples a length has, the less
    # noise is needed, and the more packs it costs.
    rarity = len(counts) / int(counts.sum())
    for divisor in (1, 4, 16):
        max_change = 0.1 * rarity * rarity / divisor
        order = np.argsort(-distinct * (1 + max_change * noise), kind="stable")
        varied = place_best_fit(distinct[order].tolist(), counts[order].tolist(), capacity, max_samples)
        if varied.total_packs == best_fit.total_packs:
            return varied, order, best_fit.total_packs
    return best_fit, None, best_fit.total_packs
