"""Best fit over a histogram of lengths: like samples and like packs are handled in groups, never singly."""

from __future__ import annotations

from collections.abc import Sequence

from packtool.plan.placements import PackRange, Placements

_WORD_BITS = 10
_WORD_MASK = (1 << _WORD_BITS) - 1


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
    """All packs, shelved by the tokens that remain free in them.

    ``_shelves`` maps free tokens to ranges of packs. A set bit in ``_words`` says that a shelf is not empty, one in
    ``_top`` that a word is not: the smallest shelf at or above a length is found with two shifts at any capacity.
    """

    def __init__(self, capacity: int, shortest: int, max_samples: int) -> None:
        self._capacity = capacity
        self._shortest = shortest
        self._max_samples = max_samples
        self._num_packs = 0
        self._shelves: dict[int, list[PackRange]] = {}
        self._closed: list[PackRange] = []
        self._words = [0] * ((capacity >> _WORD_BITS) + 2)
        self._top = 0
        self.placements: list[int] = []  # five numbers each, as in Placements

    def place(self, length: int, count: int) -> None:
        """Put ``count`` samples of ``length`` tokens where they fit most tightly."""
        free = length
        while count:
            free = self._smallest_shelf(free)
            if free < 0:
                num_new = -(-count // min(self._capacity // length, self._max_samples))
                count = self._fill([(self._num_packs, num_new, 0)], self._capacity, length, count)
                self._num_packs += num_new
                continue
            shelf = self._shelves[free]
            count = self._fill(shelf, free, length, count)
            if not shelf:
                self._take_down(free)
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
            self._words[free >> _WORD_BITS] |= 1 << (free & _WORD_MASK)
            self._top |= 1 << (free >> _WORD_BITS)

    def _take_down(self, free: int) -> None:
        del self._shelves[free]
        word = free >> _WORD_BITS
        self._words[word] ^= 1 << (free & _WORD_MASK)
        if not self._words[word]:
            self._top ^= 1 << word

    def _smallest_shelf(self, at_least: int) -> int:
        """Fewest free tokens of any open pack with ``at_least`` of them, or -1."""
        index = at_least >> _WORD_BITS
        word = self._words[index] >> (at_least & _WORD_MASK)
        if word:
            return at_least + (word & -word).bit_length() - 1
        above = self._top >> (index + 1)
        if not above:
            return -1
        index += (above & -above).bit_length()
        word = self._words[index]
        return (index << _WORD_BITS) + (word & -word).bit_length() - 1
