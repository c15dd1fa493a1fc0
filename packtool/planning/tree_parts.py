"""Placement of trees that were split over several packs.

A tree that is longer than a pack is kept in one step where a step has space for its packs. Parts made by
``--max-rows-per-tree`` are kept in several steps, and at least in several packs: that is why the tree was split. Only
the order of packs changes, by which steps take them, and nothing changes where no tree is split.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

import numpy as np

from packtool.planning.pack_plan import Int64Array, IntArray, PackPlan, invert_order
from packtool.planning.prefix_trees import NOTHING, PartPlacement, PrefixTrees

_STEPS_AT_ONCE = 256
_MAX_ATTEMPTS = 200_000  # a fraction of a second
_MAX_ATTEMPTS_PER_ITEM, _MAX_ATTEMPTS_PER_STEP = 128, 8


@dataclass(frozen=True, eq=False)
class TreeParts:
    """P parts of trees that are in several packs, tree after tree.

    ``trees``, int64 (P,), are ascending ids, ``packs``, int64 (P,), ascend in each tree; ``placement`` is not "any".
    """

    trees: Int64Array
    packs: Int64Array
    placement: PartPlacement

    @classmethod
    def of(cls, packs: PackPlan, trees: PrefixTrees | None) -> TreeParts | None:
        """Find the parts in a plan of all or some samples of the trees; None if there are none to place."""
        if trees is None or trees.part_placement == "any" or not packs.num_samples:
            return None
        num_samples = 1 + max(int(trees.samples.max(initial=0)), int(packs.samples.max()))
        tree_of_sample = np.full(num_samples, NOTHING, np.int64)
        tree_of_sample[trees.samples] = trees.tree_ids
        # Pairs of tree and pack, each as one number; first those of every sample, then the distinct ones.
        tree_of = tree_of_sample[packs.samples]
        pack_of = np.repeat(np.arange(packs.num_packs), np.diff(packs.offsets))
        has_tree = tree_of != NOTHING
        keys = np.unique(tree_of[has_tree] * packs.num_packs + pack_of[has_tree])
        tree, pack = np.divmod(keys, packs.num_packs)
        is_same = tree[1:] == tree[:-1]
        is_split = np.append(is_same, False) | np.append(False, is_same)
        return cls(tree[is_split], pack[is_split], trees.part_placement) if is_split.any() else None

    def figures(self, step_of: IntArray) -> dict[str, int]:
        """Count split trees, and how many are in one step or meet in one; ``step_of`` (K,) is that of each pack."""
        starts = np.flatnonzero(np.diff(self.trees, prepend=NOTHING - 1))
        steps = step_of[self.packs]
        is_one = np.minimum.reduceat(steps, starts) == np.maximum.reduceat(steps, starts)
        pairs, counts = np.unique(np.stack((self.trees, steps)), axis=1, return_counts=True)
        return {
            "trees_in_several_packs": len(starts),
            "of_them_in_one_step": int(is_one.sum()),
            "of_them_meeting_in_a_step": len(np.unique(pairs[0][counts > 1])),
        }

    def reorder(self, order: Int64Array, packs_per_step: int) -> Int64Array:
        """Reorder all packs, int64 (K,), so that the parts of a tree are in one step, or apart; a pure function.

        ``order`` is that in which steps would take them. Trees that no step has space for keep their order.
        """
        if packs_per_step >= len(order):
            return order
        return (self._separate if self.placement == "apart" else self._join)(order, packs_per_step)

    def move_together(self, num_packs: int) -> Int64Array:
        """Order all packs (K,) by number, but those connected by trees where the first of them comes."""
        first = np.arange(num_packs)
        for cluster in self._clusters(np.arange(num_packs), num_packs):
            first[cluster] = min(cluster)
        return np.argsort(first, kind="stable")

    def _join(self, order: Int64Array, packs_per_step: int) -> Int64Array:
        """Reorder packs so that those connected by trees are in one step: the largest clusters first."""
        position = invert_order(order)
        positions = position.tolist()
        free = np.full(-(-len(order) // packs_per_step), packs_per_step)
        free[-1] = len(order) - packs_per_step * (len(free) - 1)
        step_of = np.full(len(order), NOTHING)
        clusters = self._clusters(position, packs_per_step)
        by_size = sorted((-len(packs), min(positions[pack] for pack in packs), packs) for packs in clusters)
        for _, first, packs in by_size:
            step = _find_free_step(free, first // packs_per_step, len(packs))
            if step != NOTHING:
                step_of[packs] = step
                free[step] -= len(packs)
        # The other packs fill up the steps in their order.
        step_of[order[step_of[order] == NOTHING]] = np.repeat(np.arange(len(free)), free)
        return order[np.argsort(step_of[order], kind="stable")]

    def _clusters(self, position: Int64Array, max_packs: int) -> list[list[int]]:
        """Group packs connected by trees, at most ``max_packs`` each, trees of few packs first."""
        starts = np.flatnonzero(np.diff(self.trees, prepend=NOTHING - 1))
        sizes = np.diff(np.append(starts, len(self.trees)))
        packs, first = self.packs.tolist(), np.minimum.reduceat(position[self.packs], starts)
        cluster_of: dict[int, list[int]] = {}  # packs of one cluster have the same list
        for tree in np.lexsort((first, sizes)).tolist():
            start, stop = int(starts[tree]), int(starts[tree] + sizes[tree])
            clusters = _distinct(cluster_of.get(pack, [pack]) for pack in packs[start:stop])
            if sum(map(len, clusters)) <= max_packs:
                joined = list(chain.from_iterable(clusters))
                cluster_of.update(dict.fromkeys(joined, joined))
        return _distinct(cluster_of.values())

    def _separate(self, order: Int64Array, packs_per_step: int) -> Int64Array:
        """Swap packs of nearby steps so that no step has two packs of one tree, as far as possible."""
        step_offsets = np.append(np.arange(0, len(order), packs_per_step), len(order))
        steps = _Swaps(order, step_offsets, self.trees, self.packs)
        stride = max(packs_per_step // _MAX_ATTEMPTS_PER_STEP, 1)
        for pack in self._repeated_packs(invert_order(order) // packs_per_step):
            position = steps.position_of[pack]
            step_start = position // packs_per_step * packs_per_step
            steps.separate(position, _nearby_indices(step_start, len(order), packs_per_step, stride))
        return np.array(steps.items, np.int64)

    def _repeated_packs(self, step_of: Int64Array) -> list[int]:
        """List the packs with a tree that an earlier pack of their step has, too; ``step_of`` is by pack, (K,)."""
        tree_step_keys = self.trees * (int(step_of.max()) + 1) + step_of[self.packs]  # one number for tree and step
        by_key = np.argsort(tree_step_keys, kind="stable")
        is_repeated = tree_step_keys[by_key][1:] == tree_step_keys[by_key][:-1]
        repeated = np.sort(by_key[1:][is_repeated])
        return list(dict.fromkeys(self.packs[repeated].tolist()))


def separate_groups(
    packs: PackPlan, tree_of_group: Int64Array, media_tokens: IntArray | None, max_media_tokens: int | None
) -> PackPlan:
    """Swap groups of about equal tokens so that no pack has two groups of one tree, as far as possible.

    A group is a part of a prefix tree that is packed like one sample.

    Args:
        packs: packs of groups: ``packs.samples`` are the numbers of all G groups.
        tree_of_group: its tree, or ``NOTHING``, (G,).
        media_tokens: of each group, (G,); together with ``max_media_tokens`` of a pack, or None if not limited.
    """
    repeated = _repeated_groups(packs, tree_of_group)  # positions in ``packs.samples``
    if not repeated:
        return packs
    group_tokens = np.empty_like(packs.lengths)
    group_tokens[packs.samples] = packs.lengths
    limits = [(group_tokens.tolist(), packs.capacity)]
    if media_tokens is not None and max_media_tokens is not None:
        limits.append((media_tokens.tolist(), max_media_tokens))
    groups_in_trees = np.flatnonzero(tree_of_group != NOTHING)
    swaps = _Swaps(packs.samples, packs.offsets, tree_of_group[groups_in_trees], groups_in_trees, limits)

    positions_by_tokens = np.argsort(packs.lengths, kind="stable")
    index_by_tokens = invert_order(positions_by_tokens)  # of each position in ``positions_by_tokens``
    for position in repeated:
        similar = _nearby_indices(int(index_by_tokens[position]), packs.num_samples)
        similar_positions = (int(positions_by_tokens[index]) for index in similar)
        swaps.separate(position, similar_positions)
    groups = np.array(swaps.items, np.int64)
    return replace(packs, samples=groups, lengths=group_tokens[groups])


def _repeated_groups(packs: PackPlan, tree_of_group: Int64Array) -> list[int]:
    """List the positions in ``packs.samples`` of groups with a tree that an earlier group of their pack has, too."""
    tree_of = tree_of_group[packs.samples]
    pack_of = np.repeat(np.arange(packs.num_packs), np.diff(packs.offsets))
    by_tree = np.lexsort((tree_of, pack_of))
    is_same = (np.diff(pack_of[by_tree]) == 0) & (np.diff(tree_of[by_tree]) == 0)
    return [position for position in by_tree[1:][is_same].tolist() if tree_of[position] != NOTHING]


class _Swaps:
    """Items in bins (packs in steps, or groups in packs), which swap positions until no bin has a tree twice.

    Args:
        items: int64 (n,), the numbers from 0 to n - 1 in any order, bin after bin.
        offsets: int64 (b + 1,), the first position of each bin in ``items``, and n.
        trees, items_in_trees: int64 (P,), pairs of a tree and an item that has it.
        limits: amounts by item, (n,), and the maximum of their sum in a bin.
    """

    def __init__(
        self,
        items: Int64Array,
        offsets: Int64Array,
        trees: Int64Array,
        items_in_trees: Int64Array,
        limits: Sequence[tuple[list[int], int]] = (),
    ) -> None:
        bins = np.arange(len(offsets) - 1)
        bin_of_position = np.repeat(bins, np.diff(offsets))
        self.items: list[int] = items.tolist()
        self.position_of: list[int] = invert_order(items).tolist()  # by item
        self._offsets: list[int] = offsets.tolist()
        self._bin_of: list[int] = bin_of_position.tolist()
        self._trees_of = defaultdict[int, list[int]](list)  # by item
        for tree, item in zip(trees.tolist(), items_in_trees.tolist(), strict=True):
            self._trees_of[item].append(tree)
        self._limits = limits
        self._sums: list[list[int]] = []  # for each limit, the sum of the amounts in each bin
        for amounts, _ in limits:
            amounts_by_position = np.array(amounts)[items]
            self._sums.append(np.add.reduceat(amounts_by_position, offsets[:-1]).tolist())
        self._counts: dict[int, Counter[int]] = {}  # by bin, the items in each tree; filled when a bin is needed
        self._attempts_left = _MAX_ATTEMPTS

    def separate(self, position: int, others: Iterable[int]) -> None:
        """Swap an item that repeats a tree with the first of ``others`` for which both fit; all are positions."""
        if self._attempts_left <= 0 or self._is_alone(position):
            return
        for other in islice(others, _MAX_ATTEMPTS_PER_ITEM):
            self._attempts_left -= 1
            if self._can_replace(position, other) and self._can_replace(other, position):
                item, other_item = self.items[position], self.items[other]
                self._replace(position, other_item)
                self._replace(other, item)
                return

    def _is_alone(self, position: int) -> bool:
        """Check that no other item of its bin has one of an item's trees."""
        counts = self._counts_in(self._bin_of[position])
        return all(counts[tree] == 1 for tree in self._trees_of[self.items[position]])

    def _can_replace(self, position: int, other: int) -> bool:
        """Check that the item at ``other`` fits at ``position``: within all limits, and without repeating a tree."""
        leaving, entering = self.items[position], self.items[other]
        bin_index = self._bin_of[position]
        counts, leaving_trees = self._counts_in(bin_index), self._trees_of[leaving]
        if any(counts[tree] > (1 if tree in leaving_trees else 0) for tree in self._trees_of[entering]):
            return False
        return all(
            sums[bin_index] - amounts[leaving] + amounts[entering] <= maximum
            for sums, (amounts, maximum) in zip(self._sums, self._limits, strict=True)
        )

    def _replace(self, position: int, entering: int) -> None:
        """Put an item at a position, and change the sums and counts of its bin."""
        bin_index, leaving = self._bin_of[position], self.items[position]
        for sums, (amounts, _) in zip(self._sums, self._limits, strict=True):
            sums[bin_index] += amounts[entering] - amounts[leaving]
        counts = self._counts_in(bin_index)
        counts.subtract(self._trees_of[leaving])
        counts.update(self._trees_of[entering])
        self.items[position] = entering
        self.position_of[entering] = position

    def _counts_in(self, bin_index: int) -> Counter[int]:
        """Count the items of a bin in each tree; the returned counter is kept up to date."""
        if bin_index not in self._counts:
            items = self.items[self._offsets[bin_index] : self._offsets[bin_index + 1]]
            self._counts[bin_index] = Counter(chain.from_iterable(self._trees_of[item] for item in items))
        return self._counts[bin_index]


def _distinct(lists: Iterable[list[int]]) -> list[list[int]]:
    """Return the lists that are different objects, in order of their first occurrence."""
    return list({id(each): each for each in lists}.values())


def _nearby_indices(start: int, num: int, width: int = 1, stride: int = 1) -> Iterator[int]:
    """Yield indices below ``num``, the nearest to the ``width`` indices from ``start`` on, without these."""
    for distance in range(0, _MAX_ATTEMPTS_PER_ITEM * stride, stride):
        for index in (start + width + distance, start - 1 - distance):
            if 0 <= index < num:
                yield index


def _find_free_step(free: IntArray, step: int, size: int) -> int:
    """Find the first step from ``step`` on, or else of all, with space for ``size`` packs; or ``NOTHING``."""
    for start, stop in ((step, step + _STEPS_AT_ONCE), (step + _STEPS_AT_ONCE, len(free)), (0, step)):
        has_space = free[start:stop] >= size
        if has_space.any():
            return start + int(has_space.argmax())
    return NOTHING
