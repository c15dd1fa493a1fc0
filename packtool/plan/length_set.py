"""A set of lengths that answers which of them is next to a number."""

from __future__ import annotations

from collections.abc import Iterable

_WORD_BITS = 14
_WORD_MASK = (1 << _WORD_BITS) - 1


class LengthSet:
    """Whole numbers of 1 or more, as words of bits.

    A set bit in ``_words`` is a length, one in ``_top`` a word that is not empty: at any capacity a search takes two
    shifts, and up to 16384 tokens there is one word.

    Args:
        lengths: what is in the set at first; nothing is added later.
    """

    def __init__(self, lengths: Iterable[int]) -> None:
        inside = set(lengths)
        self._longest = max(inside, default=0)
        self._words = [0] * ((self._longest >> _WORD_BITS) + 1)
        self._top = 0
        for length in inside:
            self._words[length >> _WORD_BITS] |= 1 << (length & _WORD_MASK)
            self._top |= 1 << (length >> _WORD_BITS)

    def __bool__(self) -> bool:
        return self._top != 0

    def remove(self, length: int) -> None:
        """Take out a length that is in the set."""
        word = length >> _WORD_BITS
        self._words[word] ^= 1 << (length & _WORD_MASK)
        if not self._words[word]:
            self._top ^= 1 << word

    def longest(self) -> int:
        """The longest length, or -1."""
        word = self._top.bit_length() - 1
        return (word << _WORD_BITS) + self._words[word].bit_length() - 1 if word >= 0 else -1

    def at_most(self, length: int) -> int:
        """The longest length that is not over ``length``, which is 0 or more; or -1."""
        if length >= self._longest:
            return self.longest()
        index = length >> _WORD_BITS
        word = self._words[index] & ((2 << (length & _WORD_MASK)) - 1)
        if not word:
            below = self._top & ((1 << index) - 1)
            if not below:
                return -1
            index = below.bit_length() - 1
            word = self._words[index]
        return (index << _WORD_BITS) + word.bit_length() - 1

    def at_least(self, length: int) -> int:
        """The shortest length that is not under ``length``, which is 0 or more; or -1."""
        if length > self._longest:
            return -1
        index = length >> _WORD_BITS
        word = self._words[index] >> (length & _WORD_MASK) << (length & _WORD_MASK)
        if not word:
            above = self._top >> (index + 1)
            if not above:
                return -1
            index += (above & -above).bit_length()
            word = self._words[index]
        return (index << _WORD_BITS) + (word & -word).bit_length() - 1

    def nearest(self, length: int, longest: int) -> int:
        """The length nearest to ``length``, of those up to ``longest``, which is in the set."""
        below, above = self.at_most(min(length, longest)), self.at_least(length)
        if above < 0 or above > longest:
            return below
        return above if below < 0 or above - length < length - below else below
