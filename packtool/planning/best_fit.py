"""Packing by best fit and exact fit over a histogram of lengths: equal samples and equal packs form groups."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from packtool.planning.length_set import NO_LENGTH, LengthSet, lowest_bit
from packtool.planning.pack_plan import (
    Costs,
    Int32Array,
    Int64Array,
    PackPlan,
    invert_order,
    sort_by_sample,
    split_to_count,
    to_offsets,
)
from packtool.planning.shuffle import CHUNK, RandomStream, seeded_order, seeded_uniform


class PackRange(NamedTuple):
    """Consecutive packs that hold ``samples_per_pack`` samples each."""

    first_pack: int
    num_packs: int
    samples_per_pack: int


class Placement(NamedTuple):
    """Samples of one length in each of consecutive packs, after the ``first_slot`` samples that each holds already."""

    first_pack: int
    num_packs: int
    first_slot: int
    samples_per_pack: int
    length: int


@dataclass(frozen=True, eq=False)
class Placements:
    """All P ``Placement``s, those of the longest samples first, as columns; int64 (P,) each.

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
        """Build placements from ``rows`` and from ``ranges``, which are all packs; both may be in any order."""
        table = np.fromiter(itertools.chain.from_iterable(rows), np.int64).reshape(-1, len(Placement._fields))
        longest_first = np.argsort(-table[:, Placement._fields.index("length")], kind="stable")
        first_pack, num_packs, first_slot, samples_per_pack, length = np.ascontiguousarray(table[longest_first].T)
        packs = np.fromiter(itertools.chain.from_iterable(sorted(ranges)), np.int64).reshape(-1, len(PackRange._fields))
        pack_sizes = np.repeat(packs[:, 2], packs[:, 1])
        return cls(first_pack, num_packs, first_slot, samples_per_pack, length, pack_sizes)

    @property
    def total_packs(self) -> int:
        return len(self.pack_sizes)


def count_lengths(lengths: Int32Array) -> tuple[Int64Array, Int64Array]:
    """Count equal lengths: return the distinct ones of (N,), the longest first, and their numbers of samples, (D,)."""
    longest = int(lengths.max(initial=0))
    if longest > max(1 << 20, 4 * len(lengths)):  # an array with a number for each length would be mostly zeros
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
    longest_first: Int64Array, placements: Placements, pack_starts: Int64Array
) -> tuple[Int64Array, Int32Array]:
    """Write the samples of every placement into its packs; all samples of a placement have its length.

    Args:
        longest_first: sample numbers, the longest samples first, (N,); each placement takes the next ones.
        pack_starts: position in the plan at which each pack of the placements begins, (K,).

    Returns:
        The sample number and the length at each position of the plan, (N,) each.
    """
    num_samples = len(longest_first)
    plan_samples = np.empty(num_samples, dtype=np.int64)
    plan_lengths = np.empty(num_samples, dtype=np.int32)
    # Placement p takes ``longest_first[placement_starts[p] : placement_starts[p + 1]]``.
    placement_starts = to_offsets(placements.num_packs * placements.samples_per_pack)
    assert placement_starts[-1] == num_samples
    for start in range(0, num_samples, CHUNK):
        stop = min(start + CHUNK, num_samples)
        # All arrays from here on are by sample of this chunk, (stop - start,).
        placement = _find_placements(placement_starts, start, stop)
        index_in_placement = np.arange(start, stop) - placement_starts[placement]
        # Sample i of a placement with n samples per pack goes to pack i // n of the placement, and there to slot i % n.
        samples_per_pack = placements.samples_per_pack[placement]
        pack_in_placement = index_in_placement // samples_per_pack
        slot_in_placement = index_in_placement - pack_in_placement * samples_per_pack
        pack = placements.first_pack[placement] + pack_in_placement
        slot = placements.first_slot[placement] + slot_in_placement
        positions = pack_starts[pack] + slot
        plan_samples[positions] = longest_first[start:stop]
        plan_lengths[positions] = placements.length[placement]
    return plan_samples, plan_lengths


def _find_placements(placement_starts: Int64Array, start: int, stop: int) -> Int64Array:
    """Return the placements of the samples ``start`` to ``stop`` - 1, (n,), from the first sample of each, (P + 1,)."""
    first = int(np.searchsorted(placement_starts, start, side="right")) - 1
    end = int(np.searchsorted(placement_starts, stop, side="left"))
    bounds: Int64Array = np.clip(placement_starts[first : end + 1], start, stop)
    return np.repeat(np.arange(first, end), np.diff(bounds))


def place_best_fit(
    lengths: Sequence[int], counts: Sequence[int], capacity: int, max_samples: int | None = None
) -> Placements:
    """Place the samples of one length after the other where they fit most tightly, or in new packs.

    With ``lengths`` in descending order this is best-fit decreasing (Johnson et al. 1974, "Worst-case performance
    bounds for simple one-dimensional packing algorithms"). ``lengths`` are distinct, from 1 to ``capacity``.
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
        self._open_keys = LengthSet(longest=capacity)  # the keys of ``open_packs``
        self.full_packs: list[PackRange] = []
        self.placements: list[Placement] = []
        self._num_packs = 0

    def fill_open_packs(self, length: int, count: int) -> int:
        """Place samples in open packs, those with the least sufficient space first; return how many do not fit."""
        free_tokens = self._open_keys.shortest_from(length)
        while count and free_tokens >= 0:
            count = self._fill(self.open_packs[free_tokens], free_tokens, length, count)
            if not self.open_packs[free_tokens]:
                del self.open_packs[free_tokens]
                self._open_keys.remove(free_tokens)
            free_tokens = self._open_keys.shortest_from(free_tokens + 1)  # filled packs have less space now
        return count

    def fill_new_packs(self, length: int, count: int) -> None:
        """Place samples in as many new packs as they need."""
        num_new_packs = math.ceil(count / min(self._capacity // length, self._max_samples))
        new_packs = PackRange(first_pack=self._num_packs, num_packs=num_new_packs, samples_per_pack=0)
        self._fill([new_packs], self._capacity, length, count)
        self._num_packs += num_new_packs

    def _fill(self, ranges: list[PackRange], free_tokens: int, length: int, count: int) -> int:
        """Place up to ``count`` samples in packs with ``free_tokens`` each; return the number of samples left over.

        Filled packs move from ``ranges``, which is changed in place, to ``open_packs`` or ``full_packs``.
        """
        while ranges and count:
            first_pack, num_packs, num_before = ranges.pop()
            # Each pack takes as many samples as fit. If fewer are left, one pack takes them all.
            per_pack = min(free_tokens // length, self._max_samples - num_before, count)
            num_filled = min(count // per_pack, num_packs)
            if num_filled < num_packs:
                ranges.append(PackRange(first_pack + num_filled, num_packs - num_filled, num_before))
            self.placements.append(Placement(first_pack, num_filled, num_before, per_pack, length))
            count -= num_filled * per_pack
            filled = PackRange(first_pack, num_filled, num_before + per_pack)
            self._add_filled(filled, free_tokens - per_pack * length)
        return count

    def _add_filled(self, packs: PackRange, free_tokens: int) -> None:
        """Add packs with ``free_tokens`` each to the open packs, or to the full ones if no sample fits any more."""
        if free_tokens < self._shortest or packs.samples_per_pack == self._max_samples:
            self.full_packs.append(packs)
        elif free_tokens in self.open_packs:
            self.open_packs[free_tokens].append(packs)
        else:
            self.open_packs[free_tokens] = [packs]
            self._open_keys.add(free_tokens)


MAX_BITS_FOR_PAIRS = 1 << 17
"""Longer lengths are packed without looking for pairs: their bit sets would be too large to be fast."""

MAX_GAP_SHARE = 1e-3
"""Share of the capacity that may stay free where one sample fills a pack: short samples are saved for longer gaps."""
MAX_SHORTENING = 0.02
"""Share of the longest unplaced sample by which noise shortens the first sample of a pack, at most."""
_MAX_PAIR_OFFSET = 0.25
"""Share of a pair's tokens by which noise makes the longer sample exceed half of them, at most."""


def place_exact_fit(
    lengths: Sequence[int],
    counts: Sequence[int],
    capacity: int,
    *,
    max_samples: int | None = None,
    scarcity_factor: float = 0.0,
    noise: Sequence[float] = (0.0,),
) -> Placements:
    """Decide which lengths share a pack: fill packs one after the other, each time with the samples that fit best.

    A variant of Gupta and Ho 1999, "A new heuristic algorithm for the one-dimensional bin-packing problem".

    Args:
        lengths: distinct, from 1 to ``capacity``.
        counts: number of samples of each length, 1 or more.
        scarcity_factor: as for ``slots_are_scarce``: when a pack with few samples left to take avoids short ones; 0:
            never.
        noise: numbers from 0 to 1, which the choices use in turn: 0 makes the best choice, larger ones vary it.
    """
    unplaced = _UnplacedSamples(lengths, counts)
    max_samples = max_samples or capacity  # samples have one token or more
    packer = _ExactFit(unplaced, capacity, max_samples, scarcity_factor, itertools.cycle(noise))
    placements: list[Placement] = []
    ranges: list[PackRange] = []
    num_packs = 0
    while unplaced.num_samples:
        count_by_length = packer.take_pack()
        num_equal_packs = 1 + unplaced.take_more_packs(count_by_length)
        samples_per_pack = 0
        for length, count in count_by_length.items():
            placements.append(Placement(num_packs, num_equal_packs, samples_per_pack, count, length))
            samples_per_pack += count
        ranges.append(PackRange(num_packs, num_equal_packs, samples_per_pack))
        num_packs += num_equal_packs
    return Placements.from_rows(placements, ranges)


def slots_are_scarce(free_tokens: int, free_slots: int, num_unplaced: int, unplaced_tokens: int, factor: float) -> bool:
    """Return whether a pack's free slots, under its limit of samples, are so few that short samples would waste them.

    They are scarce if the free tokens per free slot, times ``factor``, are at least the unplaced samples' mean length.
    """
    return free_slots > 1 and free_tokens * factor * num_unplaced >= unplaced_tokens * free_slots


class _ExactFit(NamedTuple):
    """Choice of the samples of packs; each choice uses the next value of ``noise``, from 0 to 1."""

    unplaced: _UnplacedSamples
    capacity: int
    max_samples: int
    scarcity_factor: float
    noise: Iterator[float]

    def take_pack(self) -> dict[int, int]:
        """Remove the samples of one pack from ``self.unplaced``, which must not be empty.

        The pack starts with the longest sample (with noise, a slightly shorter one) and takes samples until none fits.

        Returns:
            The number of samples of each length in the pack, the longest length first.
        """
        unplaced = self.unplaced
        longest = unplaced.longest()
        min_first_length = longest - int(longest * MAX_SHORTENING * next(self.noise))
        first_length = unplaced.shortest_from(min_first_length)
        unplaced.take(first_length, 1)
        count_by_length = {first_length: 1}
        free_tokens = self.capacity - first_length
        free_slots = self.max_samples - 1
        while free_tokens and free_slots and unplaced.num_samples:
            lengths = self._next_lengths(free_tokens, free_slots)
            if not lengths:
                break
            for length in lengths:
                unplaced.take(length, 1)
                count_by_length[length] = count_by_length.get(length, 0) + 1
                free_tokens -= length
                free_slots -= 1
        return dict(sorted(count_by_length.items(), reverse=True))

    def _next_lengths(self, free_tokens: int, free_slots: int) -> tuple[int, ...]:
        """Choose the next one or two samples of a pack from the unplaced samples, by their lengths in tokens.

        The first possible of these choices is taken:
        1. one sample that fills the pack, except for a tiny gap
        2. two samples that fill the pack exactly
        3. the longest sample that fits

        Args:
            free_tokens: tokens that the pack can still take.
            free_slots: samples that the pack can still take, 1 or more. If only a few are left for many tokens, short
                samples would waste them, and ``for_scarce_slots`` chooses instead.

        Returns:
            One or two lengths; () if no sample fits. The samples are not removed from ``self.unplaced``.
        """
        unplaced = self.unplaced
        noise = next(self.noise)  # from 0 to 1; above 0, the choice is less tight, so that packs vary
        if slots_are_scarce(free_tokens, free_slots, unplaced.num_samples, unplaced.num_tokens, self.scarcity_factor):
            return unplaced.for_scarce_slots(free_tokens, free_slots, noise)

        max_gap = int(self.capacity * MAX_GAP_SHARE)
        min_gap = int(max_gap * noise)
        filling_length = unplaced.longest_between(free_tokens - max_gap, free_tokens - min_gap)
        if filling_length != NO_LENGTH:
            return (filling_length,)

        if free_slots >= 2:
            pair = unplaced.find_pair(free_tokens, noise)
            if pair is not None:
                return pair

        longest_length = unplaced.longest_up_to(free_tokens)
        return () if longest_length == NO_LENGTH else (longest_length,)


class _UnplacedSamples(LengthSet):
    """Unplaced samples by length.

    Bit x of ``_bits``, and bit 2 * longest - x of ``_mirrored_bits``, is set if samples of x tokens are left.
    """

    def __init__(self, lengths: Sequence[int], counts: Sequence[int]) -> None:
        super().__init__(lengths)
        self.counts = dict(zip(lengths, counts, strict=True))
        self.num_samples = sum(counts)
        self.num_tokens = sum(length * count for length, count in self.counts.items())
        self._has_bits = self._longest <= MAX_BITS_FOR_PAIRS
        self._bits = self._mirrored_bits = 0
        if self._has_bits:
            digits = bytearray(b"0") * (self._longest + 1)
            for length in lengths:
                digits[length] = ord("1")
            self._mirrored_bits = int(digits.decode(), 2) << self._longest
            self._bits = int(digits[::-1].decode(), 2)

    def take(self, length: int, num: int) -> None:
        """Remove ``num`` samples, 1 or more, of this length."""
        self.counts[length] -= num
        self.num_samples -= num
        self.num_tokens -= num * length
        if not self.counts[length]:
            del self.counts[length]
            self.remove(length)
            if self._has_bits:
                self._bits ^= 1 << length
                self._mirrored_bits ^= 1 << (2 * self._longest - length)

    def take_more_packs(self, count_by_length: dict[int, int]) -> int:
        """Remove the samples of as many packs as possible with these numbers of each length; return how many packs."""
        num_packs = min(self.counts.get(length, 0) // count for length, count in count_by_length.items())
        if num_packs:
            for length, count in count_by_length.items():
                self.take(length, num_packs * count)
        return num_packs

    def for_scarce_slots(self, free_tokens: int, free_slots: int, noise: float) -> tuple[int, ...]:
        """Choose two lengths that fill a pack's last two slots, else an equal share of its tokens; () if none fits."""
        pair = self.find_pair(free_tokens, noise) if free_slots == 2 else None
        if pair is not None:
            return pair
        longest_length = self.longest_up_to(free_tokens)
        if longest_length == NO_LENGTH:
            return ()
        return (self.nearest(free_tokens // free_slots, longest_length),)

    def find_pair(self, total_tokens: int, noise: float) -> tuple[int, int] | None:
        """Find the lengths of two unplaced samples with exactly ``total_tokens`` together, the longer length first.

        Of several pairs, the one of the most similar lengths is taken; with ``noise``, 0 to 1, one that differs more.
        None if there is no pair, or if lengths are too large for bit sets.
        """
        if not self._has_bits or total_tokens > 2 * self._longest:
            return None
        # Bit x is set if there are samples of ``total_tokens`` - x tokens.
        partner_bits = self._mirrored_bits >> (2 * self._longest - total_tokens)
        pair_bits = self._bits & partner_bits  # bit x: there are samples of x, and of total_tokens - x tokens
        half = (total_tokens + 1) // 2  # the least length of the longer sample
        if 2 * half == total_tokens and self.counts.get(half) == 1:
            pair_bits &= ~(1 << half)  # two equal lengths need two samples
        preferred_length = half + int(total_tokens * _MAX_PAIR_OFFSET * noise)
        for min_length in (preferred_length, half):
            longer_bits = pair_bits >> min_length
            if longer_bits:
                longer_length = min_length + lowest_bit(longer_bits)
                return longer_length, total_tokens - longer_length
        return None


MIN_SAMPLES_PER_LENGTH = 10
"""Samples per distinct length below which every epoch would have much the same packs, were there no noise."""

MAX_EXCESS = 1e-4
"""Share of packs over the lower bound that does not justify a second attempt."""

_SLACK = 4e-4  # share of packs that noise may cost with exact fit
_SCARCITY_FACTORS = (1.5, 2.0, 3.0, 1e9, 1.0, 0.0)  # the first that needs few enough packs is used


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
    """Pack samples by their lengths, (N,): every epoch has different packs, but as many as the first.

    First it is decided, by counts of equal lengths, which lengths share a pack ("placements"); then random samples of
    these lengths fill the packs. Without ``shuffle`` nothing is random, and samples keep their order where possible.

    Args:
        max_samples: maximum samples of a pack.
        stream: offset of the random streams, as from ``of_window``.
    """
    histogram = _Histogram(lengths, capacity, max_samples)
    placements = histogram.fewest_packs
    num_packs = placements.total_packs
    if not shuffle:
        longest_first = np.argsort(-lengths, kind="stable").astype(np.int64, copy=False)
        return sort_by_sample(_fill_packs(longest_first, placements, np.arange(num_packs), capacity))

    if histogram.has_few_equal_lengths:
        # Without noise, epochs would have many packs in common.
        noise = seeded_uniform(len(histogram.lengths), seed=seed, epoch=epoch, stream=stream + RandomStream.JITTER)
        placements = histogram.place_with_noise(noise)
        num_packs = histogram.num_packs_with_noise
    draw_order = partial(seeded_order, seed=seed, epoch=epoch)
    longest_first = draw_order(len(lengths), stream=stream + RandomStream.WITHIN_LENGTH, descending_by=lengths)
    pack_order = draw_order(placements.total_packs, stream=stream + RandomStream.PACK_ORDER)
    packs = _fill_packs(longest_first, placements, pack_order, capacity)
    return split_to_count(packs, num_packs)  # placements with noise may have fewer packs


def _fill_packs(longest_first: Int64Array, placements: Placements, pack_order: Int64Array, capacity: int) -> PackPlan:
    """Fill the K packs of ``placements`` with N samples, and order the packs by ``pack_order``, (K,)."""
    offsets = to_offsets(placements.pack_sizes[pack_order])
    pack_starts = offsets[:-1][invert_order(pack_order)]  # of each pack of the placements
    samples, lengths = fill_slots(longest_first, placements, pack_starts)
    return PackPlan(samples, offsets, lengths, capacity)


def min_packs(distinct: Int64Array, counts: Int64Array, capacity: int, max_samples: int | None = None) -> int:
    """Compute a lower bound of the number of packs that samples need.

    Martello and Toth 1990, "Lower bounds and reduction procedures for the bin packing problem" (their L2): each sample
    longer than half a pack needs its own pack, and leaves a gap. Of the others, those of at least some minimum length
    can use the gaps of that length or more; for their remaining tokens they need further packs.

    Args:
        distinct: the different lengths, the longest first, (D,).
        counts: number of samples of each, (D,).
    """
    is_long = distinct > capacity // 2
    num_long_samples = int(counts[is_long].sum())
    gaps = capacity - distinct[is_long]  # beside a sample of each long length, the shortest gap first
    tokens_of_shortest_gaps = to_offsets(gaps * counts[is_long])  # entry i: sum over the i shortest

    # Try each short length as the minimum. The following arrays are by this minimum, (number of short lengths,).
    min_lengths = distinct[~is_long]
    tokens = np.cumsum(min_lengths * counts[~is_long])  # of the short samples of at least the minimum
    num_unusable_gaps = np.searchsorted(gaps, min_lengths)
    usable_tokens = tokens_of_shortest_gaps[-1] - tokens_of_shortest_gaps[num_unusable_gaps]
    num_further_packs = -(-(tokens - usable_tokens) // capacity)  # rounded up

    bound = num_long_samples + int(num_further_packs.max(initial=0))
    if max_samples:
        bound = max(bound, math.ceil(int(counts.sum()) / max_samples))
    return bound


class _Histogram:
    """Samples counted by length, and their placements in packs; ``lengths``, int64 (D,), are the distinct ones."""

    def __init__(self, sample_lengths: Int32Array, capacity: int, max_samples: int | None) -> None:
        self.lengths, self._counts = count_lengths(sample_lengths)
        shortest = int(self.lengths.min(initial=capacity))
        if max_samples is not None and capacity // shortest <= max_samples:
            max_samples = None  # not even packs of the shortest samples reach the limit
        self._capacity, self._max_samples = capacity, max_samples
        self.has_few_equal_lengths = len(sample_lengths) < MIN_SAMPLES_PER_LENGTH * len(self.lengths)
        self._best_fit = place_best_fit(self.lengths.tolist(), self._counts.tolist(), capacity, max_samples)
        self.fewest_packs, self._scarcity_factor = self._place_in_fewest_packs()

    @property
    def num_packs_with_noise(self) -> int:
        """Number of packs that placements with any noise do not exceed."""
        fewest = self.fewest_packs.total_packs
        return min(fewest + 1 + int(fewest * _SLACK), self._best_fit.total_packs)

    def place_with_noise(self, noise: Costs) -> Placements:
        """Vary with ``noise``, (D,), from 0 to 1, which lengths share a pack."""
        if self.num_packs_with_noise == self._best_fit.total_packs:
            return self._vary_best_fit(noise)
        varied = self._place_exact_fit(self._scarcity_factor, noise.tolist())
        return varied if varied.total_packs <= self.num_packs_with_noise else self.fewest_packs

    def _place_in_fewest_packs(self) -> tuple[Placements, float]:
        """Place by best fit, or by exact fit if that needs fewer packs; return also exact fit's scarcity factor."""
        fewest, best_factor = self._best_fit, 0.0
        lower_bound = min_packs(self.lengths, self._counts, self._capacity, self._max_samples)
        enough_packs = int(lower_bound * (1 + MAX_EXCESS))
        for factor in self._factors_to_try():
            if fewest.total_packs <= enough_packs:
                break
            exact_fit = self._place_exact_fit(factor)
            if exact_fit.total_packs < fewest.total_packs:
                fewest, best_factor = exact_fit, factor
        return fewest, best_factor

    def _factors_to_try(self) -> tuple[float, ...]:
        """Return the scarcity factors for exact fit."""
        if self._max_samples:
            return _SCARCITY_FACTORS
        finds_pairs = self.lengths.max(initial=0) <= MAX_BITS_FOR_PAIRS
        return (0.0,) if finds_pairs else ()  # without a limit of samples, no slots are scarce

    def _vary_best_fit(self, noise: Costs) -> Placements:
        """Place by best fit in an order of lengths with ``noise``, (D,): as much as needs no further packs."""
        # The more samples a length has, the less noise is needed, and the more packs it costs.
        rarity = len(self.lengths) / int(self._counts.sum())
        for divisor in (1, 4, 16):
            max_change = 0.1 * rarity * rarity / divisor
            order = np.argsort(-self.lengths * (1 + max_change * noise), kind="stable")
            lengths, counts = self.lengths[order].tolist(), self._counts[order].tolist()
            varied = place_best_fit(lengths, counts, self._capacity, self._max_samples)
            if varied.total_packs == self._best_fit.total_packs:
                return varied
        return self._best_fit

    def _place_exact_fit(self, scarcity_factor: float, noise: Sequence[float] = (0.0,)) -> Placements:
        place = partial(place_exact_fit, max_samples=self._max_samples, scarcity_factor=scarcity_factor, noise=noise)
        return place(self.lengths.tolist(), self._counts.tolist(), self._capacity)
