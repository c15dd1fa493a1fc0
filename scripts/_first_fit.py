"""First fit over a histogram of lengths, to compare with: every sample goes to the first pack that still takes it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from packtool.planning.best_fit import PackRange, Placement, Placements

_NONE = 1 << 62


def place_first_fit(
    lengths: Sequence[int], counts: Sequence[int], capacity: int, max_samples: int | None = None
) -> Placements:
    """Put all samples of one length after those of another in the first packs that take them, or in new ones.

    Johnson, Demers, Ullman, Garey, Graham 1974 as for best fit. Samples of one length are handled together, and so are
    packs that follow one another and are alike; the packs are those of placing samples one by one.

    Price: some 2 log2(capacity) steps for each group of packs that takes samples of a length, whatever their number.

    Args:
        lengths: distinct, from 1 to ``capacity``, in the order in which they are placed. In falling order this is
            first-fit decreasing.
        counts: samples of each length, 1 or more.
        capacity: tokens that a pack may hold.
        max_samples: samples that a pack may hold.
    """
    packs = _RowOfPacks(capacity, min(lengths, default=1), max_samples or capacity)
    for length, count in zip(lengths, counts, strict=True):
        packs.place(length, count)
    return Placements.from_rows(packs.placements, packs.all_ranges())


class _RowOfPacks:
    """All packs in the order in which they were opened.

    ``_shelves`` maps free tokens to a heap of ranges of packs. ``_tree`` is a tournament: leaf ``_leaves + free`` holds
    the first pack with so many free tokens as ``pack << _bits | free``, every other node the smaller of its two
    children. The first pack with at least ``length`` free tokens is the smallest of the leaves from there on.
    """

    def __init__(self, capacity: int, shortest: int, max_samples: int) -> None:
        self._capacity = capacity
        self._shortest = shortest
        self._max_samples = max_samples
        self._num_packs = 0
        self._shelves: dict[int, list[PackRange]] = {}
        self._closed: list[PackRange] = []
        self._bits = capacity.bit_length()
        self._leaves = 1 << self._bits
        self._tree: dict[int, int] = {}
        self.placements: list[Placement] = []

    def place(self, length: int, count: int) -> None:
        """Put ``count`` samples of ``length`` tokens into the first packs that take them."""
        while count:
            found = self._first(length)
            if found == _NONE:
                num_new = -(-count // min(self._capacity // length, self._max_samples))
                self._shelve(self._capacity, PackRange(self._num_packs, num_new, 0))
                self._num_packs += num_new
                continue
            free = found & ((1 << self._bits) - 1)
            shelf = self._shelves[free]
            first, num, slot = heapq.heappop(shelf)
            per_pack = min(free // length, self._max_samples - slot)
            if count < per_pack:
                per_pack = count
            num_filled = min(num, count // per_pack)
            if num_filled < num:
                heapq.heappush(shelf, PackRange(first + num_filled, num - num_filled, slot))
            self._update(free)
            count -= num_filled * per_pack
            self.placements.append(Placement(first, num_filled, slot, per_pack, length))
            self._shelve(free - per_pack * length, PackRange(first, num_filled, slot + per_pack))

    def all_ranges(self) -> list[PackRange]:
        """Every pack, in no particular order."""
        return [*self._closed, *(entry for shelf in self._shelves.values() for entry in shelf)]

    def _shelve(self, free: int, packs: PackRange) -> None:
        if free < self._shortest or packs.samples_per_pack == self._max_samples:
            self._closed.append(packs)
            return
        shelf = self._shelves.setdefault(free, [])
        heapq.heappush(shelf, packs)
        if shelf[0] is packs:
            self._update(free)

    def _update(self, free: int) -> None:
        """Bring the tree up to date with the first pack of a shelf."""
        tree, shelf = self._tree, self._shelves[free]
        value = shelf[0][0] << self._bits | free if shelf else _NONE
        node = self._leaves + free
        while node:
            if tree.get(node, _NONE) == value:
                return
            tree[node] = value
            other = tree.get(node ^ 1, _NONE)
            value = value if value < other else other
            node >>= 1

    def _first(self, at_least: int) -> int:
        """The first pack with so many free tokens and what it has free, as in ``_tree``; ``_NONE`` if there is none."""
        tree = self._tree
        node = self._leaves + at_least
        best = tree.get(node, _NONE)
        while node > 1:
            if not node & 1:
                value = tree.get(node + 1, _NONE)
                best = value if value < best else best
            node >>= 1
        return best
