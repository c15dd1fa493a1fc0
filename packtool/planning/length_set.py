"""A set of lengths as bits, which finds the nearest length above or below another."""

from __future__ import annotations

from collections.abc import Iterable

_LENGTH_BITS = 10
_LENGTH_MASK = (1 << _LENGTH_BITS) - 1
NO_LENGTH = -1
"""Result of a search that finds no length."""


class LengthSet:
    """Set of lengths that finds the nearest length above or below another.

    A set bit in ``_words`` is a length, one in ``_top`` a word that is not empty. Lengths added later must not exceed
    the longest initial one or, without initial ones, ``longest``.
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
        """Return the longest length; ``NO_LENGTH`` if the set is empty."""
        word = self._top.bit_length() - 1
        return (word << _LENGTH_BITS) + self._words[word].bit_length() - 1 if word >= 0 else NO_LENGTH

    def longest_up_to(self, length: int) -> int:
        """Return the longest length up to ``length``, which is 0 or more; ``NO_LENGTH`` if there is none."""
        if length >= self._longest:
            return self.longest()
        index = length >> _LENGTH_BITS
        word = self._words[index] & ((2 << (length & _LENGTH_MASK)) - 1)
        if not word:
            below = self._top & ((1 << index) - 1)
            if not below:
                return NO_LENGTH
            index = below.bit_length() - 1
            word = self._words[index]
        return (index << _LENGTH_BITS) + word.bit_length() - 1

    def shortest_from(self, length: int) -> int:
        """Return the shortest length of at least ``length``, which is 0 or more; ``NO_LENGTH`` if there is none."""
        if length > self._longest:
            return NO_LENGTH
        index = length >> _LENGTH_BITS
        word = self._words[index] >> (length & _LENGTH_MASK) << (length & _LENGTH_MASK)
        if not word:
            above = self._top >> (index + 1)
            if not above:
                return NO_LENGTH
            index += 1 + lowest_bit(above)
            word = self._words[index]
        return (index << _LENGTH_BITS) + lowest_bit(word)

    def longest_between(self, min_length: int, max_length: int) -> int:
        """Return the longest length from ``min_length`` to ``max_length``; ``NO_LENGTH`` if there is none."""
        length = self.longest_up_to(max_length) if max_length > 0 else NO_LENGTH
        return length if length >= min_length else NO_LENGTH

    def nearest(self, length: int, max_length: int) -> int:
        """Return the length nearest to ``length`` of those up to ``max_length``, which is in the set."""
        below = self.longest_up_to(min(length, max_length))
        above = self.shortest_from(length)
        if above == NO_LENGTH or above > max_length:
            return below
        if below == NO_LENGTH or above - length < length - below:
            return above
        return below


def lowest_bit(bits: int) -> int:
    """Return the index of the lowest bit that is set."""
    return (bits & -bits).bit_length() - 1
