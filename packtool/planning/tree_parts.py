"""Trees that were cut into several packs: where their parts are trained.

A tree that is longer than a pack is to be in one step all the same, where a step has room for its packs. Parts that
``--max-rows-per-tree`` made are to be in several steps, and in several packs at least: that is what they were cut for.
Packs change places in their order, which steps take them by; nothing else of a plan is touched, and nothing at all
where no tree is cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.planning.pack_plan import Int64Array, PackPlan, inverse_of
from packtool.planning.prefix_trees import NOTHING, PartsIn, PrefixTrees

_STEPS_AT_ONCE = 256
_MOST_TRIES = 200_000  # a fraction of a second
_TRIES_EACH, _TRIES_A_STEP = 128, 8


@dataclass(frozen=True, eq=False)
class TreeParts:
    """Which packs have parts of which trees, of those that are in several packs: P parts, tree after tree.

    Args:
        trees: int64 (P,), numbers of trees, rising.
        packs: int64 (P,), rising for each tree.
        wanted: where steps are to have them; not "any".
    """

    trees: Int64Array
    packs: Int64Array
    wanted: PartsIn

    @classmethod
    def of(cls, packs: PackPlan, trees: PrefixTrees | None) -> TreeParts | None:
        """The parts in a plan, of all samples of the trees or of some; None if none are to be placed.

        Args:
            trees: None where samples share nothing.
        """
        if trees is None or trees.parts == "any" or not packs.num_samples:
            return None
        numbers = np.full(max(int(trees.samples.max(initial=0)), int(packs.samples.max())) + 1, NOTHING, np.int64)
        numbers[trees.samples] = trees.numbers
        own = numbers[packs.samples]
        here = np.repeat(np.arange(packs.num_packs), np.diff(packs.offsets))
        begins = own != NOTHING
        begins[1:] &= (own[1:] != own[:-1]) | (here[1:] != here[:-1])
        keys = np.sort(own[begins] * packs.num_packs + here[begins])
        tree, pack = np.divmod(keys[np.diff(keys, prepend=-1) > 0], packs.num_packs)
        same = tree[1:] == tree[:-1]
        is_cut = np.append(same, False) | np.append(False, same)
        return cls(tree[is_cut], pack[is_cut], trees.parts) if is_cut.any() else None

    def figures(self, step_of: npt.NDArray[np.integer[Any]]) -> dict[str, int]:
        """How many trees are in several packs, and in how many steps these are; ``step_of`` (K,) is that of each."""
        starts = np.flatnonzero(np.diff(self.trees, prepend=NOTHING - 1))
        steps = step_of[self.packs]
        is_one = np.minimum.reduceat(steps, starts) == np.maximum.reduceat(steps, starts)
        pairs, counts = np.unique(np.stack((self.trees, steps)), axis=1, return_counts=True)
        return {
            "trees_in_several_packs": len(starts),
            "of_them_in_one_step": int(is_one.sum()),
            "of_them_meeting_in_a_step": len(np.unique(pairs[0][counts > 1])),
        }

    def placed(self, order: Int64Array, packs_per_step: int) -> Int64Array:
        """The packs in an order by which parts are in one step, or apart; a pure function.

        Trees that need more packs than a step has stay as they come; and so do those that no step has room for, since
        steps are full and as many as before. Price: seconds for a million samples of which all are in cut trees.

        Args:
            order: int64 (K,), all packs, in the order in which steps would take them.
            packs_per_step: of a full one.
        """
        if packs_per_step >= len(order):
            return order
        return (self._apart if self.wanted == "apart" else self._together)(order, packs_per_step)

    def side_by_side(self, num_packs: int) -> Int64Array:
        """All packs in their order, but those of one tree, and of others that share a pack with it, as one comes."""
        first = np.arange(num_packs)
        for cluster in self._clusters(np.arange(num_packs), num_packs):
            first[cluster] = min(cluster)
        return np.argsort(first, kind="stable")

    def _together(self, order: Int64Array, each: int) -> Int64Array:
        place = inverse_of(order)
        free = np.full(-(-len(order) // each), each)
        free[-1] = len(order) - each * (len(free) - 1)
        step_of, at = np.full(len(order), NOTHING), place.tolist()
        clusters = [(-len(packs), min(at[pack] for pack in packs), packs) for packs in self._clusters(place, each)]
        for _, begin, cluster in sorted(clusters):
            step = _with_room(free, begin // each, len(cluster))
            if step != NOTHING:
                step_of[cluster] = step
                free[step] -= len(cluster)
        loose = order[step_of[order] == NOTHING]
        step_of[loose] = np.repeat(np.arange(len(free)), free)
        return order[np.argsort(step_of[order], kind="stable")]

    def _clusters(self, place: Int64Array, most: int) -> list[list[int]]:
        """Packs that are to be in one step, since trees are in them: at most so many, trees of few packs first."""
        starts = np.flatnonzero(np.diff(self.trees, prepend=NOTHING - 1))
        sizes = np.diff(np.append(starts, len(self.trees)))
        packs, first = self.packs.tolist(), np.minimum.reduceat(place[self.packs], starts)
        cluster_of: dict[int, list[int]] = {}
        for tree in np.lexsort((first, sizes)).tolist():
            start, stop = int(starts[tree]), int(starts[tree] + sizes[tree])
            found = {id(own): own for own in (cluster_of.get(pack, [pack]) for pack in packs[start:stop])}
            if sum(map(len, found.values())) > most:
                continue
            joined = [pack for own in found.values() for pack in own]
            cluster_of.update(dict.fromkeys(joined, joined))
        return list({id(cluster): cluster for cluster in cluster_of.values()}.values())

    def _apart(self, order: Int64Array, each: int) -> Int64Array:
        found, steps = order.tolist(), inverse_of(order) // each
        trees_in, held = self._trees_by_pack(len(order)), dict[int, Counter[int]]()

        def held_in(step: int) -> Counter[int]:
            if step not in held:
                packs = found[step * each : (step + 1) * each]
                held[step] = Counter(tree for pack in packs for tree in trees_in(pack))
            return held[step]

        def may_go(pack: int, step: int, instead: int) -> bool:
            there, leaving = held_in(step), trees_in(instead)
            return all(there[tree] == (tree in leaving) for tree in trees_in(pack))

        tries = _MOST_TRIES
        for pack in self._meeting(steps):
            step = int(steps[pack])
            if all(held_in(step)[tree] == 1 for tree in trees_in(pack)):
                continue  # what it met has left
            for at in _around(step * each, len(found), each, max(each // _TRIES_A_STEP, 1)):
                tries -= 1
                other, its = at // each, found[at]
                if may_go(pack, other, its) and may_go(its, step, pack):
                    here = found.index(pack, step * each, (step + 1) * each)
                    found[here], found[at] = its, pack
                    steps[pack], steps[its] = other, step
                    held.pop(step), held.pop(other)
                    break
            if tries <= 0:
                break
        return np.array(found, np.int64)

    def _meeting(self, steps: Int64Array) -> list[int]:
        """Packs with parts of which others are in their step, but for the first of each tree there."""
        keys = self.trees * (int(steps.max()) + 1) + steps[self.packs]
        by_key = np.argsort(keys, kind="stable")
        again = by_key[1:][keys[by_key][1:] == keys[by_key][:-1]]
        return list(dict.fromkeys(self.packs[np.sort(again)].tolist()))

    def _trees_by_pack(self, num_packs: int) -> Callable[[int], list[int]]:
        by_pack = np.argsort(self.packs, kind="stable")
        starts = np.searchsorted(self.packs[by_pack], np.arange(num_packs + 1)).tolist()
        trees = self.trees[by_pack].tolist()
        return lambda pack: trees[starts[pack] : starts[pack + 1]]


def apart_in_packs(
    groups: PackPlan, trees: Int64Array, media: npt.NDArray[np.integer[Any]] | None, most_media: int | None
) -> PackPlan:
    """Packs of groups of samples, of which no two are of one tree where they can change places with others.

    Those of about as many tokens change places, so no pack becomes too full.

    Args:
        groups: by number, as ``lengths`` has their tokens.
        trees: (G,), the tree of each group, or ``NOTHING``.
        media: (G,), media tokens of each; None where nothing bounds them.
        most_media: of a pack.
    """
    pack_of = np.repeat(np.arange(groups.num_packs), np.diff(groups.offsets))
    own = trees[groups.samples]
    by_tree = np.lexsort((own, pack_of))
    again = (np.diff(pack_of[by_tree]) == 0) & (np.diff(own[by_tree]) == 0) & (own[by_tree][1:] != NOTHING)
    if not again.any():
        return groups
    bounds = [(groups.lengths.astype(np.int64), groups.capacity)]
    if media is not None and most_media is not None:
        bounds.append((media[groups.samples].astype(np.int64), most_media))
    by_tokens = np.argsort(groups.lengths, kind="stable")
    rank, samples, tries = inverse_of(by_tokens), groups.samples.copy(), _MOST_TRIES

    def inside(place: int) -> slice:
        return slice(*groups.offsets[pack_of[place] : pack_of[place] + 2])

    def num_alike(place: int, tree: int) -> int:
        return int((own[inside(place)] == tree).sum()) if tree != NOTHING else 0

    def may_swap(one: int, other: int) -> bool:
        if pack_of[one] == pack_of[other] or num_alike(other, own[one]) or num_alike(one, own[other]):
            return False
        for values, most in bounds:
            more = values[other] - values[one]
            if values[inside(one)].sum() + more > most or values[inside(other)].sum() - more > most:
                return False
        return True

    for one in by_tree[1:][again].tolist():
        if num_alike(one, own[one]) < 2:
            continue  # what it met has left
        for at in _around(int(rank[one]), len(by_tokens), 1, 1):
            tries -= 1
            other = int(by_tokens[at])
            if may_swap(one, other):
                for array in (own, samples, *(values for values, _ in bounds)):
                    array[[one, other]] = array[[other, one]]
                break
        if tries <= 0:
            break
    return replace(groups, samples=samples, lengths=bounds[0][0].astype(np.int32))


def _around(place: int, num: int, width: int, stride: int) -> list[int]:
    """Some places from 0 up to ``num``, the nearest to the ``width`` places that begin here, without these."""
    found: list[int] = []
    for distance in range(0, _TRIES_EACH * stride, stride):
        behind, before = place + width + distance, place - 1 - distance
        found += [at for at in (behind, before) if 0 <= at < num]
    return found[:_TRIES_EACH]


def _with_room(free: npt.NDArray[np.integer[Any]], step: int, size: int) -> int:
    """The first step from this one on, or else of all, with room for so many packs; or ``NOTHING``."""
    for start, stop in ((step, step + _STEPS_AT_ONCE), (step + _STEPS_AT_ONCE, len(free)), (0, step)):
        found = free[start:stop] >= size
        if found.any():
            return start + int(found.argmax())
    return NOTHING
