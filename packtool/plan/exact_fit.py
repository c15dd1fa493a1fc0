"""Pack by pack over a histogram of lengths: what fills a pack to the token is taken first.

Best-fit decreasing looks at one sample at a time and leaves packs a little short where long samples are many. Here each
pack takes the longest sample that is left, and then, as long as there is room, one sample that fills it but for a
thousandth, or two that fill it exactly, or else the longest that fits. Searching pairs is one shift and one AND of bit
sets. On lognormal(4300, 0.7) that leaves a third of what best fit leaves open, and nearly all of it is unavoidable.

Where the samples of a pack are limited as well, short samples must not be left to the last packs: ``evenness`` makes a
pack take samples of about the size that its free places have on average.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from packtool.plan.length_set import LengthSet
from packtool.plan.placements import Placements

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
