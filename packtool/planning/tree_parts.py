"""Placement of trees that were split over several packs.

A tree that is longer than a pack is kept in one step where a step has space for its packs. Parts made by
``--max-rows-per-tree`` are kept in several steps, and at least in several packs: that is why the tree was split. Only
the order of packs changes, by which steps take them, and nothing changes where no tree is split.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from packtool.planning.pack_plan import Int64Array, IntArray, PackPlan, invert_order
from packtool.planning.prefix_trees import NOTHING, PartPlacement, PrefixTrees

_STEPS_AT_ONCE = 256
_MAX_ATTEMPTS = 200_000  # a fraction of a second
_MAX_ATTEMPTS_PER_PACK, _MAX_ATTEMPTS_PER_STEP = 128, 8


@dataclass(frozen=True, eq=False)
class TreeParts:
    """P parts of trees that are in several packs, tree after tree.

    Args:
        trees: int64 (P,), ids of trees, ascending.
        packs: int64 (P,), ascending for each tree.
        placement: required steps of the parts of a tree; not "any".
    """

    trees: Int64Array
    packs: Int64Array
    placement: PartPlacement

    @classmethod
    def of(cls, packs: PackPlan, trees: PrefixTrees | None) -> TreeParts | None:
        """Find the parts in a plan of all or some samples of the trees; None if there are none to place."""
        if trees is None or trees.parts == "any" or not packs.num_samples:
            return None
        tree_of = np.full(max(int(trees.samples.max(initial=0)), int(packs.samples.max())) + 1, NOTHING, np.int64)
        tree_of[trees.samples] = trees.tree_ids
        own = tree_of[packs.samples]
        pack_of = np.repeat(np.arange(packs.num_packs), np.diff(packs.offsets))
        begins = own != NOTHING
        begins[1:] &= (own[1:] != own[:-1]) | (pack_of[1:] != pack_of[:-1])
        keys = np.unique(own[begins] * packs.num_packs + pack_of[begins])
        tree, pack = np.divmod(keys, packs.num_packs)
        same = tree[1:] == tree[:-1]
        is_split = np.append(same, False) | np.append(False, same)
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
        place = invert_order(order)
        free = np.full(-(-len(order) // packs_per_step), packs_per_step)
        free[-1] = len(order) - packs_per_step * (len(free) - 1)
        step_of, places = np.full(len(order), NOTHING), place.tolist()
        clusters = self._clusters(place, packs_per_step)
        for _, begin, cluster in sorted(
            (-len(packs), min(places[pack] for pack in packs), packs) for packs in clusters
        ):
            step = _find_free_step(free, begin // packs_per_step, len(cluster))
            if step != NOTHING:
                step_of[cluster] = step
                free[step] -= len(cluster)
        step_of[order[step_of[order] == NOTHING]] = np.repeat(np.arange(len(free)), free)
        return order[np.argsort(step_of[order], kind="stable")]

    def _clusters(self, place: Int64Array, max_packs: int) -> list[list[int]]:
        """Group packs connected by trees, at most ``max_packs`` each, trees of few packs first."""
        starts = np.flatnonzero(np.diff(self.trees, prepend=NOTHING - 1))
        sizes = np.diff(np.append(starts, len(self.trees)))
        packs, first = self.packs.tolist(), np.minimum.reduceat(place[self.packs], starts)
        cluster_of: dict[int, list[int]] = {}
        for tree in np.lexsort((first, sizes)).tolist():
            start, stop = int(starts[tree]), int(starts[tree] + sizes[tree])
            clusters = {id(own): own for own in (cluster_of.get(pack, [pack]) for pack in packs[start:stop])}
            if sum(map(len, clusters.values())) <= max_packs:
                joined = [pack for own in clusters.values() for pack in own]
                cluster_of.update(dict.fromkeys(joined, joined))
        return list({id(cluster): cluster for cluster in cluster_of.values()}.values())

    def _separate(self, order: Int64Array, packs_per_step: int) -> Int64Array:
        new_order, steps = order.tolist(), invert_order(order) // packs_per_step
        by_pack = np.argsort(self.packs, kind="stable")
        starts = np.searchsorted(self.packs[by_pack], np.arange(len(order) + 1)).tolist()
        trees = self.trees[by_pack].tolist()
        counts = dict[int, Counter[int]]()

        def trees_in(pack: int) -> list[int]:
            return trees[starts[pack] : starts[pack + 1]]

        def counts_in(step: int) -> Counter[int]:
            if step not in counts:
                packs = new_order[step * packs_per_step : (step + 1) * packs_per_step]
                counts[step] = Counter(tree for pack in packs for tree in trees_in(pack))
            return counts[step]

        def may_replace(other: int, step: int, pack: int) -> bool:
            there, leaving = counts_in(step), trees_in(other)
            return all(there[tree] == (tree in leaving) for tree in trees_in(pack))

        # Packs with parts of a tree that another pack of their step has, too, but for the first of each tree there.
        keys = self.trees * (int(steps.max()) + 1) + steps[self.packs]
        by_key = np.argsort(keys, kind="stable")
        repeated = by_key[1:][keys[by_key][1:] == keys[by_key][:-1]]
        attempts = _MAX_ATTEMPTS
        for pack in dict.fromkeys(self.packs[np.sort(repeated)].tolist()):
            step = int(steps[pack])
            if all(counts_in(step)[tree] == 1 for tree in trees_in(pack)):
                continue  # the other part has moved
            stride = max(packs_per_step // _MAX_ATTEMPTS_PER_STEP, 1)
            for at in _nearby_indices(step * packs_per_step, len(new_order), packs_per_step, stride):
                attempts -= 1
                other_step, other = at // packs_per_step, new_order[at]
                if may_replace(other, other_step, pack) and may_replace(pack, step, other):
                    place = new_order.index(pack, step * packs_per_step, (step + 1) * packs_per_step)
                    new_order[place], new_order[at] = other, pack
                    steps[pack], steps[other] = other_step, step
                    counts.pop(step), counts.pop(other_step)
                    break
            if attempts <= 0:
                break
        return np.array(new_order, np.int64)


def separate_parts(
    groups: PackPlan, trees: Int64Array, media: IntArray | None, max_media_tokens: int | None
) -> PackPlan:
    """Exchange groups of samples between packs so that no pack has two groups of one tree, as far as possible.

    Groups of about equal tokens are exchanged, so no pack exceeds its limits. ``groups`` are packs of groups by number;
    ``trees`` and ``media``, (G,), are the tree of each group, or ``NOTHING``, and its media tokens, None without limit.
    """
    pack_of = np.repeat(np.arange(groups.num_packs), np.diff(groups.offsets))
    tree_of = trees[groups.samples]
    by_tree = np.lexsort((tree_of, pack_of))
    repeated = (np.diff(pack_of[by_tree]) == 0) & (np.diff(tree_of[by_tree]) == 0) & (tree_of[by_tree][1:] != NOTHING)
    if not repeated.any():
        return groups
    limits = [(groups.lengths.astype(np.int64), groups.capacity)]
    if media is not None and max_media_tokens is not None:
        limits.append((media[groups.samples].astype(np.int64), max_media_tokens))
    by_tokens = np.argsort(groups.lengths, kind="stable")
    rank, samples, attempts = invert_order(by_tokens), groups.samples.copy(), _MAX_ATTEMPTS

    def pack_slice(index: int) -> slice:
        return slice(*groups.offsets[pack_of[index] : pack_of[index] + 2])

    def num_of_tree(index: int, tree: int) -> int:
        return int((tree_of[pack_slice(index)] == tree).sum()) if tree != NOTHING else 0

    def may_swap(index: int, other: int) -> bool:
        if pack_of[index] == pack_of[other] or num_of_tree(other, tree_of[index]) or num_of_tree(index, tree_of[other]):
            return False
        for values, limit in limits:
            more = values[other] - values[index]
            if values[pack_slice(index)].sum() + more > limit or values[pack_slice(other)].sum() - more > limit:
                return False
        return True

    for index in by_tree[1:][repeated].tolist():
        if num_of_tree(index, tree_of[index]) < 2:
            continue  # the other part has moved
        for at in _nearby_indices(int(rank[index]), len(by_tokens), 1, 1):
            attempts -= 1
            other = int(by_tokens[at])
            if may_swap(index, other):
                for array in (tree_of, samples, *(values for values, _ in limits)):
                    array[[index, other]] = array[[other, index]]
                break
        if attempts <= 0:
            break
    return replace(groups, samples=samples, lengths=limits[0][0].astype(np.int32))


def _nearby_indices(place: int, num: int, width: int, stride: int) -> list[int]:
    """List indices below ``num``, the nearest to the ``width`` indices from ``place`` on, without these."""
    distances = range(0, _MAX_ATTEMPTS_PER_PACK * stride, stride)
    places = [at for distance in distances for at in (place + width + distance, place - 1 - distance)]
    return [at for at in places if 0 <= at < num][:_MAX_ATTEMPTS_PER_PACK]


def _find_free_step(free: IntArray, step: int, size: int) -> int:
    """Find the first step from ``step`` on, or else of all, with space for ``size`` packs; or ``NOTHING``."""
    for start, stop in ((step, step + _STEPS_AT_ONCE), (step + _STEPS_AT_ONCE, len(free)), (0, step)):
        has_space = free[start:stop] >= size
        if has_space.any():
            return start + int(has_space.argmax())
    return NOTHING
