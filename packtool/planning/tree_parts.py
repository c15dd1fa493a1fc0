"""Placement of trees that were split over several packs.

A tree that is longer than a pack is kept in one step where a step has space for its packs. Parts made by
``--max-rows-per-tree`` are kept in several steps, and at least in several packs: that is why the tree was split. Only
the order of packs changes, by which steps take them, and nothing changes where no tree is split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from packtool.planning.pack_plan import Int64Array, IntArray, PackPlan, invert_order
from packtool.planning.prefix_trees import NOTHING, PartPlacement, PrefixTrees

_STEPS_AT_ONCE = 256
_MAX_ATTEMPTS = 200_000  # a fraction of a second
_MAX_ATTEMPTS_PER_PACK, _MAX_ATTEMPTS_PER_STEP = 128, 8


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
        steps = _TreesOfSteps(self, order, packs_per_step)
        attempts_left = _MAX_ATTEMPTS
        stride = max(packs_per_step // _MAX_ATTEMPTS_PER_STEP, 1)
        for pack in self._repeated_packs(steps.step_of):
            if attempts_left <= 0:
                break
            if steps.is_alone(pack):
                continue  # an earlier swap moved the other pack
            first_index = steps.step_of[pack] * packs_per_step
            for other_index in _nearby_indices(first_index, len(order), packs_per_step, stride):
                attempts_left -= 1
                if steps.swap(pack, other_index):
                    break
        return np.array(steps.order, np.int64)

    def _repeated_packs(self, step_of: list[int]) -> list[int]:
        """List the packs with a tree that another pack of their step has, too; ``step_of`` is the step of each pack."""
        steps = np.array(step_of, np.int64)
        tree_step_keys = self.trees * (int(steps.max()) + 1) + steps[self.packs]  # one number for tree and step
        by_key = np.argsort(tree_step_keys, kind="stable")
        is_repeated = tree_step_keys[by_key][1:] == tree_step_keys[by_key][:-1]
        repeated = np.sort(by_key[1:][is_repeated])
        return list(dict.fromkeys(self.packs[repeated].tolist()))


class _TreesOfSteps:
    """Packs of steps with the trees in them, while packs are swapped between steps.

    ``order`` lists the packs, step after step; ``step_of`` is the step of each pack.
    """

    def __init__(self, parts: TreeParts, order: Int64Array, packs_per_step: int) -> None:
        self.order: list[int] = order.tolist()
        self.step_of: list[int] = (invert_order(order) // packs_per_step).tolist()
        self._packs_per_step = packs_per_step
        # The trees in pack k are ``_trees[_starts[k] : _starts[k + 1]]``.
        by_pack = np.argsort(parts.packs, kind="stable")
        self._starts: list[int] = np.searchsorted(parts.packs[by_pack], np.arange(len(order) + 1)).tolist()
        self._trees: list[int] = parts.trees[by_pack].tolist()
        self._count_cache: dict[int, Counter[int]] = {}  # by step; entries of changed steps are deleted

    def is_alone(self, pack: int) -> bool:
        """Check that no other pack of a pack's step has one of its trees."""
        counts = self._counts_in(self.step_of[pack])
        return all(counts[tree] == 1 for tree in self._trees_in(pack))

    def swap(self, pack: int, other_index: int) -> bool:
        """Swap a pack and the one at an index of ``order``, if both are alone then; return False if not."""
        other = self.order[other_index]
        step, other_step = self.step_of[pack], other_index // self._packs_per_step
        if not self._can_replace(other, other_step, pack) or not self._can_replace(pack, step, other):
            return False
        first_index = step * self._packs_per_step
        index = self.order.index(pack, first_index, first_index + self._packs_per_step)
        self.order[index], self.order[other_index] = other, pack
        self.step_of[pack], self.step_of[other] = other_step, step
        del self._count_cache[step], self._count_cache[other_step]
        return True

    def _can_replace(self, leaving: int, step: int, entering: int) -> bool:
        """Check that, without ``leaving``, no pack of the step would share a tree with ``entering``."""
        counts = self._counts_in(step)
        leaving_trees = self._trees_in(leaving)
        return all(counts[tree] == (1 if tree in leaving_trees else 0) for tree in self._trees_in(entering))

    def _counts_in(self, step: int) -> Counter[int]:
        """Count the packs of a step in which each tree is."""
        if step not in self._count_cache:
            packs = self.order[step * self._packs_per_step : (step + 1) * self._packs_per_step]
            self._count_cache[step] = Counter(tree for pack in packs for tree in self._trees_in(pack))
        return self._count_cache[step]

    def _trees_in(self, pack: int) -> list[int]:
        return self._trees[self._starts[pack] : self._starts[pack + 1]]


def separate_groups(
    packs: PackPlan, tree_of_group: Int64Array, media_tokens: IntArray | None, max_media_tokens: int | None
) -> PackPlan:
    """Swap groups of about equal tokens so that no pack has two groups of one tree, as far as possible.

    A "sample" of ``packs`` is a group; for each group, (G,), ``tree_of_group`` is its tree or ``NOTHING``.
    """
    groups = _GroupsOfPacks(packs, tree_of_group, media_tokens, max_media_tokens)
    repeated = groups.repeated_positions()
    if not repeated:
        return packs
    by_tokens = np.argsort(packs.lengths, kind="stable")
    rank_by_tokens = invert_order(by_tokens)
    attempts_left = _MAX_ATTEMPTS
    for position in repeated:
        if attempts_left <= 0:
            break
        if groups.is_alone(position):
            continue  # an earlier swap moved the other group
        for rank in _nearby_indices(int(rank_by_tokens[position]), packs.num_samples):
            attempts_left -= 1
            if groups.swap(position, int(by_tokens[rank])):
                break
    return replace(packs, samples=groups.groups, lengths=groups.tokens.astype(np.int32))


class _GroupsOfPacks:
    """Groups of packs with their trees, while groups are swapped; all arrays are by position in ``packs.samples``."""

    def __init__(
        self, packs: PackPlan, tree_of_group: Int64Array, media_tokens: IntArray | None, max_media_tokens: int | None
    ) -> None:
        self.groups = packs.samples.copy()
        self.tokens = packs.lengths.astype(np.int64)
        self._tree_of = tree_of_group[self.groups]
        self._pack_of = np.repeat(np.arange(packs.num_packs), np.diff(packs.offsets))
        self._offsets: list[int] = packs.offsets.tolist()
        self._limits = [(self.tokens, packs.capacity)]  # values, and the maximum of their sum in a pack
        if media_tokens is not None and max_media_tokens is not None:
            self._limits.append((media_tokens[self.groups].astype(np.int64), max_media_tokens))

    def repeated_positions(self) -> list[int]:
        """List the positions with a tree that an earlier position of their pack has, too."""
        by_tree = np.lexsort((self._tree_of, self._pack_of))
        trees, packs = self._tree_of[by_tree], self._pack_of[by_tree]
        is_same = (np.diff(packs) == 0) & (np.diff(trees) == 0)
        repeated: list[int] = by_tree[1:][is_same & (trees[1:] != NOTHING)].tolist()
        return repeated

    def is_alone(self, position: int) -> bool:
        """Check that no other group of a group's pack is of its tree."""
        return self._count_in_pack(position, self._tree_of[position]) < 2

    def swap(self, one: int, other: int) -> bool:
        """Swap the groups at two positions, if limits allow it and both are alone then; return False if not."""
        if self._pack_of[one] == self._pack_of[other]:
            return False
        if self._count_in_pack(other, self._tree_of[one]) or self._count_in_pack(one, self._tree_of[other]):
            return False
        for values, limit in self._limits:
            added = values[other] - values[one]
            one_sum = values[self._pack_slice(one)].sum() + added
            other_sum = values[self._pack_slice(other)].sum() - added
            if one_sum > limit or other_sum > limit:
                return False
        for array in (self._tree_of, self.groups, *(values for values, _ in self._limits)):
            array[[one, other]] = array[[other, one]]
        return True

    def _count_in_pack(self, position: int, tree: int) -> int:
        """Count the groups of a tree in the pack that a position is in; 0 for ``NOTHING``."""
        if tree == NOTHING:
            return 0
        return int((self._tree_of[self._pack_slice(position)] == tree).sum())

    def _pack_slice(self, position: int) -> slice:
        """Return the positions of the pack that a position is in."""
        pack = int(self._pack_of[position])
        return slice(self._offsets[pack], self._offsets[pack + 1])


def _distinct(lists: Iterable[list[int]]) -> list[list[int]]:
    """Return the lists that are different objects, in order of their first occurrence."""
    return list({id(each): each for each in lists}.values())


def _nearby_indices(start: int, num: int, width: int = 1, stride: int = 1) -> list[int]:
    """List indices below ``num``, the nearest to the ``width`` indices from ``start`` on, without these."""
    indices = []
    for distance in range(0, _MAX_ATTEMPTS_PER_PACK * stride, stride):
        indices += [start + width + distance, start - 1 - distance]
    return [index for index in indices if 0 <= index < num][:_MAX_ATTEMPTS_PER_PACK]


def _find_free_step(free: IntArray, step: int, size: int) -> int:
    """Find the first step from ``step`` on, or else of all, with space for ``size`` packs; or ``NOTHING``."""
    for start, stop in ((step, step + _STEPS_AT_ONCE), (step + _STEPS_AT_ONCE, len(free)), (0, step)):
        has_space = free[start:stop] >= size
        if has_space.any():
            return start + int(has_space.argmax())
    return NOTHING
