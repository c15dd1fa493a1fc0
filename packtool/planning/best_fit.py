"""Best fit and exact fit over a histogram of lengths: like samples and like packs are handled in groups, never singly.

*Best fit* takes one length at a time and puts its samples where they fit most tightly. It leaves packs a little short
where long samples are many. *Exact fit* fills one pack at a time: it takes the longest sample that is left, and then,
as long as there is room, one sample that fills it but for a thousandth, or two that fill it exactly, or else the
longest that fits. Searching pairs is one shift and one AND of bit sets. On lognormal(4300, 0.7) that leaves a third of
what best fit leaves open, and nearly all of it is unavoidable.

Where the samples of a pack are limited as well, short samples must not be left to the last packs: ``evenness`` makes a
pack take samples of about the size that its free places have on average.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packtool.planning.pack_plan import Int32Array, Int64Array
from packtool.planning.shuffle import CHUNK

PackRange = tuple[int, int, int]
"""Packs that are alike: (number of the first, how many, samples each holds). Their numbers follow one another."""


@dataclass(frozen=True, eq=False)
class Placements:
    """Which packs take how many samples, in the order in which the lengths were placed.

    Placement ``i`` gives ``per_pack[i]`` samples of ``length[i]`` tokens to each of the ``num_packs[i]`` packs from
    ``first_pack[i]`` on, behind the ``slot[i]`` samples that each of them holds already.

    Args:
        first_pack, num_packs, slot, per_pack, length: int64 (P,).
        pack_sizes: int64 (K,), samples in every pack.
    """

    first_pack: npt.NDArray[np.int64]
    num_packs: npt.NDArray[np.int64]
    slot: npt.NDArray[np.int64]
    per_pack: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    pack_sizes: npt.NDArray[np.int64]

    @classmethod
    def of_rows(cls, rows: Sequence[int], ranges: Sequence[PackRange]) -> Placements:
        """Placements from a flat list of five numbers for each, as above, and from all packs, in any order."""
        table = np.array(rows, dtype=np.int64).reshape(-1, 5)
        of_packs = np.array(sorted(ranges), dtype=np.int64).reshape(-1, 3)
        first_pack, num_packs, slot, per_pack, length = np.ascontiguousarray(table.T)
        return cls(first_pack, num_packs, slot, per_pack, length, np.repeat(of_packs[:, 2], of_packs[:, 1]))

    @property
    def num_packs_in_all(self) -> int:
        """The number K of packs."""
        return len(self.pack_sizes)


def falling_histogram(lengths: Int32Array) -> tuple[Int64Array, Int64Array]:
    """Distinct lengths, (D,), the longest first, and how many samples have each, (D,), from lengths (N,)."""
    longest = int(lengths.max(initial=0))
    if longest > max(1 << 20, 4 * len(lengths)):
        # Few samples, long ones: an array as long as the longest would be mostly zeros.
        distinct, counts = np.unique(lengths, return_counts=True)
        return distinct[::-1].astype(np.int64), counts[::-1].astype(np.int64)
    bins = np.zeros(longest + 1, dtype=np.int64)
    # bincount copies what is not int64: a slice at a time keeps that copy small.
    step = max(CHUNK, len(bins))
    for start in range(0, len(lengths), step):
        bins += np.bincount(lengths[start : start + step], minlength=len(bins))
    values = np.flatnonzero(bins)[::-1].astype(np.int64)
    return values, bins[values]


def reorder_groups(values: Int64Array, counts: Int64Array, order: Int64Array) -> Int64Array:
    """Bring groups of ``counts[i]`` neighbours in ``values``, (N,), into another order; counts and order are (G,)."""
    starts = np.cumsum(counts) - counts
    new_counts = counts[order]
    new_starts = np.cumsum(new_counts) - new_counts
    where: Int64Array = np.repeat(starts[order] - new_starts, new_counts)
    where += np.arange(len(values))
    return values[where]


def fill_slots(by_length: Int64Array, placements: Placements, starts: Int64Array) -> tuple[Int64Array, Int32Array]:
    """Put the samples in the slots that the placements gave to their length.

    Args:
        by_length: (N,), sample numbers, grouped by length in the order of the placements.
        starts: (K,), where each pack of ``placements`` begins in the plan.

    Returns:
        ``samples`` and ``lengths`` of the plan.
    """
    num = len(by_length)
    samples = np.empty(num, dtype=np.int64)
    pack_lengths = np.empty(num, dtype=np.int32)
    first_item = np.zeros(len(placements.slot) + 1, dtype=np.int64)
    np.cumsum(placements.num_packs * placements.per_pack, out=first_item[1:])
    assert first_item[-1] == num
    for start in range(0, num, CHUNK):
        stop = min(start + CHUNK, num)
        first = int(np.searchsorted(first_item, start, side="right")) - 1
        last = int(np.searchsorted(first_item, stop, side="left"))
        edges = np.clip(first_item[first : last + 1], start, stop)
        repeats = edges[1:] - edges[:-1]
        here = slice(first, last)
        # Item i of a placement goes to its pack i // per_pack, there behind i % per_pack others of this placement.
        item = np.arange(start, stop) - np.repeat(first_item[here], repeats)
        per_pack = np.repeat(placements.per_pack[here], repeats)
        pack = item // per_pack
        item -= pack * per_pack
        item += np.repeat(placements.slot[here], repeats)
        pack += np.repeat(placements.first_pack[here], repeats)
        item += starts[pack]
        samples[item] = by_length[start:stop]
        pack_lengths[item] = np.repeat(placements.length[here], repeats)
    return samples, pack_lengths


_LENGTH_BITS = 10
_LENGTH_MASK = (1 << _LENGTH_BITS) - 1


class LengthSet:
    """Whole numbers, as words of bits: finds the next number above or below another.

    A set bit in ``_words`` is a number, one in ``_top`` a word that is not empty: at any capacity a search takes two
    shifts.

    Args:
        lengths: in the set at first.
        longest: that may be added later, if longer than these.
    """

    def __init__(self, lengths: Iterable[int] = (), longest: int = 0) -> None:
        inside = set(lengths)
        self._longest = max(inside, default=longest)
        self._words = [0] * ((self._longest >> _LENGTH_BITS) + 1)
        self._top = 0
        for length in inside:
            self.add(length)

    def __bool__(self) -> bool:
        return self._top != 0

    def add(self, length: int) -> None:
        """Put in a length that is not in the set."""
        self._words[length >> _LENGTH_BITS] |= 1 << (length & _LENGTH_MASK)
        self._top |= 1 << (length >> _LENGTH_BITS)

    def remove(self, length: int) -> None:
        """Take out a length that is in the set."""
        word = length >> _LENGTH_BITS
        self._words[word] ^= 1 << (length & _LENGTH_MASK)
        if not self._words[word]:
            self._top ^= 1 << word

    def longest(self) -> int:
        """The longest length, or -1."""
        word = self._top.bit_length() - 1
        return (word << _LENGTH_BITS) + self._words[word].bit_length() - 1 if word >= 0 else -1

    def at_most(self, length: int) -> int:
        """The longest length that is not over ``length``, which is 0 or more; or -1."""
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
        """The shortest length that is not under ``length``, which is 0 or more; or -1."""
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
        """The length nearest to ``length``, of those up to ``longest``, which is in the set."""
        below, above = self.at_most(min(length, longest)), self.at_least(length)
        if above < 0 or above > longest:
            return below
        return above if below < 0 or above - length < length - below else below


def place_best_fit(
    lengths: Sequence[int], counts: Sequence[int], capacity: int, max_samples: int | None = None
) -> Placements:
    """Put all samples of one length after those of another where they fit most tightly, or in new packs.

    Args:
        lengths: distinct, from 1 to ``capacity``, in the order in which they are placed. In falling order this is
            best-fit decreasing.
        counts: samples of each length, 1 or more.
        capacity: tokens that a pack may hold.
        max_samples: samples that a pack may hold.
    """
    packs = _OpenPacks(capacity, min(lengths, default=1), max_samples or capacity)
    for length, count in zip(lengths, counts, strict=True):
        packs.place(length, count)
    return Placements.of_rows(packs.placements, packs.all_ranges())


class _OpenPacks:
    """All packs, shelved by the tokens that remain free in them: ``_shelves`` maps free tokens to ranges of packs."""

    def __init__(self, capacity: int, shortest: int, max_samples: int) -> None:
        self._capacity = capacity
        self._shortest = shortest
        self._max_samples = max_samples
        self._num_packs = 0
        self._shelves: dict[int, list[PackRange]] = {}
        self._closed: list[PackRange] = []
        self._free = LengthSet(longest=capacity)  # of the shelves that are not empty
        self.placements: list[int] = []  # five numbers each, as in Placements

    def place(self, length: int, count: int) -> None:
        """Put ``count`` samples of ``length`` tokens where they fit most tightly."""
        free = length
        while count:
            free = self._free.at_least(free)
            if free < 0:
                num_new = -(-count // min(self._capacity // length, self._max_samples))
                count = self._fill([(self._num_packs, num_new, 0)], self._capacity, length, count)
                self._num_packs += num_new
                continue
            shelf = self._shelves[free]
            count = self._fill(shelf, free, length, count)
            if not shelf:
                del self._shelves[free]
                self._free.remove(free)
            # What was filled has no room for this length any more, or nothing is left to place.
            free += 1

    def all_ranges(self) -> list[PackRange]:
        """Every pack, in no particular order."""
        return [*self._closed, *(entry for shelf in self._shelves.values() for entry in shelf)]

    def _fill(self, shelf: list[PackRange], free: int, length: int, count: int) -> int:
        """Fill packs of one shelf, each as far as it goes; returns the samples that are left over."""
        while shelf and count:
            first, num, slot = shelf.pop()
            per_pack = min(free // length, self._max_samples - slot)
            if count < per_pack:
                per_pack = count  # one more pack takes all that are left
            num_filled = count // per_pack
            if num_filled < num:
                shelf.append((first + num_filled, num - num_filled, slot))
            else:
                num_filled = num
            count -= num_filled * per_pack
            self.placements += (first, num_filled, slot, per_pack, length)
            self._shelve(free - per_pack * length, (first, num_filled, slot + per_pack))
        return count

    def _shelve(self, free: int, packs: PackRange) -> None:
        if free < self._shortest or packs[2] == self._max_samples:
            self._closed.append(packs)
        elif free in self._shelves:
            self._shelves[free].append(packs)
        else:
            self._shelves[free] = [packs]
            self._free.add(free)


MOST_BITS_FOR_PAIRS = 1 << 17
"""Longer lengths are packed without looking for pairs, whose bit sets would be too large to be quick."""

# Share of the capacity that may stay free where one sample fills a pack: short samples are saved for longer gaps.
_GAP = 1e-3
# How far chance may move the first choice, and the choice of a pair, with ``noise``.
_HEAD_SPREAD = 0.02
_PAIR_SPREAD = 0.25


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
    subset that leaves the least room; this looks at subsets of two only, of which thousands of lengths have plenty.
    Ties: of the pairs that fill a pack, the most alike.

    Price: every pattern uses up a length or nearly so: there are as many as distinct lengths, or a few times that.

    Args:
        lengths: distinct, from 1 to ``capacity``.
        counts: samples of each length, 1 or more.
        capacity: tokens that a pack may hold.
        max_samples: samples that a pack may hold.
        evenness: 0 never spares places; x takes samples of average size as long as the average place has room for 1 / x
            of the mean of the samples that are left, so the larger the sooner.
        noise: numbers from 0 to 1 that vary which samples come together; 0 gives the strict order.
    """
    stock = _Stock(lengths, counts)
    chance = itertools.cycle(noise)
    rows: list[int] = []
    ranges: list[tuple[int, int, int]] = []
    num_packs = 0
    while stock.num:
        pattern = _fill_one(stock, capacity, max_samples or capacity, evenness, chance)
        num = 1 + stock.take_more(pattern)
        slot = 0
        for length, same in itertools.groupby(pattern):
            per_pack = sum(1 for _ in same)
            rows += (num_packs, num, slot, per_pack, length)
            slot += per_pack
        ranges.append((num_packs, num, slot))
        num_packs += num
    # Samples are handed out length by length, the longest first.
    order = sorted(range(0, len(rows), 5), key=lambda row: -rows[row + 4])
    return Placements.of_rows([value for row in order for value in rows[row : row + 5]], ranges)


def _fill_one(stock: _Stock, capacity: int, max_samples: int, evenness: float, chance: Iterator[float]) -> list[int]:
    """Take the samples of one pack; their lengths, equal ones side by side."""
    head = stock.longest()
    if drawn := next(chance):
        head = stock.at_least(head - int(head * _HEAD_SPREAD * drawn))
    stock.take(head, 1)
    pattern = [head]
    free, places = capacity - head, max_samples - 1
    gap = int(capacity * _GAP)
    while free and places and stock.num:
        taken = _companions(stock, free, places, evenness, gap, next(chance))
        for length in taken:
            stock.take(length, 1)
        if not taken:
            break
        pattern += taken
        free -= sum(taken)
        places -= len(taken)
    return sorted(pattern, reverse=True)


def _companions(stock: _Stock, free: int, places: int, evenness: float, gap: int, drawn: float) -> tuple[int, ...]:
    """What goes next into a pack with so many free tokens and places; nothing if nothing fits."""
    scarce = places > 1 and free * evenness * stock.num >= stock.num_tokens * places
    if not scarce:
        nearly = stock.at_most(max(free - int(gap * drawn), 0))
        if nearly >= max(free - gap, 1):
            return (nearly,)
    if places == 2 or (places > 2 and not scarce):
        pair = stock.pair(free, int(free * _PAIR_SPREAD * drawn))
        if pair is not None:
            return pair
    longest = stock.at_most(free)
    if longest < 0:
        return ()
    return (stock.nearest(free // places, longest),) if scarce else (longest,)


class _Stock(LengthSet):
    """Samples that are not placed yet, and how many of each length; ``_bits`` and its mirror image find pairs."""

    def __init__(self, lengths: Sequence[int], counts: Sequence[int]) -> None:
        super().__init__(lengths)
        self.counts = dict(zip(lengths, counts, strict=True))
        self.num = sum(counts)
        self.num_tokens = sum(length * count for length, count in self.counts.items())
        self._has_pairs = self._longest <= MOST_BITS_FOR_PAIRS
        self._bits = self._mirror = 0
        if self._has_pairs:
            digits = bytearray(b"0") * (self._longest + 1)
            for length in lengths:
                digits[length] = ord("1")
            self._mirror = int(digits.decode(), 2)
            self._bits = int(digits[::-1].decode(), 2)

    def take(self, length: int, num: int) -> None:
        """Remove samples from those that are left."""
        left = self.counts[length] - num
        self.num -= num
        self.num_tokens -= num * length
        if left:
            self.counts[length] = left
            return
        del self.counts[length]
        self.remove(length)
        if self._has_pairs:
            self._bits ^= 1 << length
            self._mirror ^= 1 << (self._longest - length)

    def take_more(self, pattern: Sequence[int]) -> int:
        """Remove the samples of a pattern as many times as there are; returns how many times."""
        needed = [(length, sum(1 for _ in same)) for length, same in itertools.groupby(pattern)]
        times = min(self.counts.get(length, 0) // each for length, each in needed)
        if times:
            for length, each in needed:
                self.take(length, times * each)
        return times

    def pair(self, total: int, off_center: int) -> tuple[int, int] | None:
        """Two lengths that are left and make ``total`` together, the most alike; or from so far off the middle on."""
        if not self._has_pairs or total > 2 * self._longest:
            return None
        # Bit x of the mirror image, shifted, is set where total - x is left.
        shift = self._longest - total
        found = self._bits & (self._mirror >> shift if shift >= 0 else self._mirror << -shift)
        half = (total + 1) // 2
        upper = found >> (half + off_center)
        if upper:
            half += off_center
        else:
            upper = found >> half
        if not upper:
            return None
        longer = (upper & -upper).bit_length() - 1 + half
        shorter = total - longer
        if longer == shorter and self.counts[longer] == 1:
            upper &= upper - 1
            if not upper:
                return None
            longer = (upper & -upper).bit_length() - 1 + half
            shorter = total - longer
        return longer, shorter
