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
        if trees is None or trees.parts == "any" or not packs.num_samples:
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
        return cls(tree[is_split], pack[is_split], trees.parts) if is_split.any() else None

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

        ``order`` is that in which steps would take them. Trees that need more packs than a step has keep their order,
        and so do those that no step has space for, for all steps are full. Cost: seconds for a million samples in split
        trees.
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
        new_order = order.tolist()
        step_of = invert_order(order) // packs_per_step  # (K,), by pack number
        # The trees in pack k are ``trees[starts[k] : starts[k + 1]]``.
        by_pack = np.argsort(self.packs, kind="stable")
        starts = np.searchsorted(self.packs[by_pack], np.arange(len(order) + 1)).tolist()
        trees = self.trees[by_pack].tolist()
        count_cache: dict[int, Counter[int]] = {}  # by step; entries of changed steps are deleted

        def trees_in(pack: int) -> list[int]:
            return trees[starts[pack] : starts[pack + 1]]

        def counts_in(step: int) -> Counter[int]:
            """Count the packs of a step in which each tree is."""
            if step not in count_cache:
                packs = new_order[step * packs_per_step : (step + 1) * packs_per_step]
                count_cache[step] = Counter(tree for pack in packs for tree in trees_in(pack))
            return count_cache[step]

        def can_replace(leaving: int, step: int, entering: int) -> bool:
            """Return whether, without ``leaving``, no pack of the step would share a tree with ``entering``."""
            counts = counts_in(step)
            leaving_trees = trees_in(leaving)
            return all(counts[tree] == (1 if tree in leaving_trees else 0) for tree in trees_in(entering))

        # Find packs with a tree that an earlier pack of their step has, too: equal pairs of tree and step.
        tree_step_keys = self.trees * (int(step_of.max()) + 1) + step_of[self.packs]
        by_key = np.argsort(tree_step_keys, kind="stable")
        is_repeated = tree_step_keys[by_key][1:] == tree_step_keys[by_key][:-1]
        repeated = np.sort(by_key[1:][is_repeated])
        attempts_left = _MAX_ATTEMPTS
        stride = max(packs_per_step // _MAX_ATTEMPTS_PER_STEP, 1)
        for pack in dict.fromkeys(self.packs[repeated].tolist()):
            step = int(step_of[pack])
            if all(counts_in(step)[tree] == 1 for tree in trees_in(pack)):
                continue  # an earlier swap moved the other pack
            for other_index in _nearby_indices(step * packs_per_step, len(new_order), packs_per_step, stride):
                attempts_left -= 1
                other_step = other_index // packs_per_step
                other = new_order[other_index]
                if can_replace(other, other_step, pack) and can_replace(pack, step, other):
                    index = new_order.index(pack, step * packs_per_step, (step + 1) * packs_per_step)
                    new_order[index], new_order[other_index] = other, pack
                    step_of[pack], step_of[other] = other_step, step
                    del count_cache[step], count_cache[other_step]
                    break
            if attempts_left <= 0:
                break
        return np.array(new_order, np.int64)


def separate_parts(
    packs: PackPlan, tree_of_group: Int64Array, media_tokens: IntArray | None, max_media_tokens: int | None
) -> PackPlan:
    """Swap groups of samples between packs so that no pack has two groups of one tree, as far as possible.

    ``packs`` are packs of groups. ``tree_of_group``, (G,), may be ``NOTHING``; ``media_tokens``, (G,), are None without
    a limit. Groups of about equal tokens are swapped, and no pack exceeds its limits.
    """
    # All arrays below are by position in ``packs.samples``. A swap exchanges the groups at two positions.
    pack_of = np.repeat(np.arange(packs.num_packs), np.diff(packs.offsets))
    groups = packs.samples.copy()
    tree_of = tree_of_group[groups]
    tokens = packs.lengths.astype(np.int64)
    limits = [(tokens, packs.capacity)]
    if media_tokens is not None and max_media_tokens is not None:
        limits.append((media_tokens[groups].astype(np.int64), max_media_tokens))
    # Find positions with a tree that an earlier position of their pack has, too.
    by_tree = np.lexsort((tree_of, pack_of))
    is_same = (np.diff(pack_of[by_tree]) == 0) & (np.diff(tree_of[by_tree]) == 0)
    repeated = by_tree[1:][is_same & (tree_of[by_tree][1:] != NOTHING)].tolist()
    if not repeated:
        return packs

    def pack_slice(position: int) -> slice:
        """Return the positions of the pack that a position is in."""
        return slice(*packs.offsets[pack_of[position] : pack_of[position] + 2])

    def count_in_pack(position: int, tree: int) -> int:
        return int((tree_of[pack_slice(position)] == tree).sum()) if tree != NOTHING else 0

    def can_swap(one: int, other: int) -> bool:
        if pack_of[one] == pack_of[other] or count_in_pack(other, tree_of[one]) or count_in_pack(one, tree_of[other]):
            return False
        for values, limit in limits:
            added = values[other] - values[one]
            if values[pack_slice(one)].sum() + added > limit or values[pack_slice(other)].sum() - added > limit:
                return False
        return True

    by_tokens = np.argsort(packs.lengths, kind="stable")
    rank_of_position = invert_order(by_tokens)  # where ``by_tokens`` lists each position
    attempts_left = _MAX_ATTEMPTS
    for position in repeated:
        if count_in_pack(position, tree_of[position]) < 2:
            continue  # an earlier swap moved the other group
        for rank in _nearby_indices(int(rank_of_position[position]), len(by_tokens), width=1, stride=1):
            attempts_left -= 1
            other = int(by_tokens[rank])
            if can_swap(position, other):
                for array in (tree_of, groups, *(values for values, _ in limits)):
                    array[[position, other]] = array[[other, position]]
                break
        if attempts_left <= 0:
            break
    return replace(packs, samples=groups, lengths=tokens.astype(np.int32))


def _distinct(lists: Iterable[list[int]]) -> list[list[int]]:
    """Return the lists that are different objects, in order of their first occurrence."""
    return list({id(each): each for each in lists}.values())


def _nearby_indices(start: int, num: int, width: int, stride: int) -> list[int]:
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
