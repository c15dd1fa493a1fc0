"""Samples that begin alike are packed together, so that their common prefixes are computed once.

What samples begin with is told by hashes of their prefixes, some of each sample; where a prefix of p tokens has the
same hash in two samples, they share p - 1 tokens at least: the last one may have to predict two continuations (see
``batch.prefix_tree``, which compares the tokens themselves, and shares no less). Prefixes that more than one sample has
are the nodes of trees::

    sample  0  A B        trees   A -+- (1)            order        1  3  0  2     4
            1  A                     +- (3)            tokens       8  9  7  7     5
            2  A B                   +- B -+- (0)      shared       0  4  4  6     0
            3  A                           +- (2)      to compute   8  5  3  1     5
            4  C                  (4)

In the order of a walk through the trees, the tokens that a sample adds are those beyond what it shares with the one
before it, whatever comes after: sums of ``length - shared`` over neighbours are the tokens of a tree. So a tree is cut,
packed and counted as a run of numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from packtool.planning.histogram import pack_histogram
from packtool.planning.pack_plan import Int32Array, Int64Array, PackPlan, inverse_of, offsets_of

_LENGTHS = 1 << 31

NOTHING = -1
"""Stands for no prefix, or no parent."""

PartsIn = Literal["any", "together", "apart"]
"""Where steps have the parts of a tree that was cut: wherever they come, in one step, or in different ones."""


@dataclass(frozen=True, eq=False)
class Prefixes:
    """Hashes of prefixes of N samples, as CSR: sample ``i`` has those from ``offsets[i]`` to ``offsets[i + 1]``.

    Args:
        offsets: int64 (N + 1,).
        lengths: int32 (M,), tokens of each prefix, rising in each sample, at most all of it.
        hashes: uint64 (M,), of all that the model sees of them; one that two prefixes share by chance makes a pack
            longer than planned, and nothing else.
    """

    offsets: Int64Array
    lengths: Int32Array
    hashes: npt.NDArray[np.uint64]

    @property
    def num_samples(self) -> int:
        """The number N of samples."""
        return len(self.offsets) - 1


@dataclass(frozen=True, eq=False)
class Budget:
    """What a group may hold beside its tokens, such as media tokens.

    Args:
        values: (N,), of each sample, whole.
        of_prefixes: (M,), of each prefix.
        most: sum of what a group's samples add; a sample that alone has more is a group of its own.
    """

    values: npt.NDArray[np.integer[Any]]
    of_prefixes: npt.NDArray[np.integer[Any]]
    most: int


@dataclass(frozen=True, eq=False)
class PrefixTrees:
    """N of all samples in G groups, each of which is packed as one.

    Args:
        samples: int64 (N,), group after group, each a walk through a tree or a part of one.
        offsets: int64 (G + 1,), where groups begin in ``samples``, and N at the end.
        shared: int32 (N,), tokens that each sample has in common with the one before it; 0 for a group's first.
        prefixes: int64 (N,), which of the M prefixes that is, or ``NOTHING``.
        numbers: int64 (N,), the same for all samples of a tree, in whichever groups; ``NOTHING`` of those of none.
        parts: where steps are to have the groups of one tree.
    """

    samples: Int64Array
    offsets: Int64Array
    shared: Int32Array
    prefixes: Int64Array
    numbers: Int64Array
    parts: PartsIn = "any"

    @property
    def num_shared_tokens(self) -> int:
        """Tokens that are not computed again."""
        return int(self.shared.sum(dtype=np.int64))

    def saved(self, lengths: npt.NDArray[np.integer[Any]]) -> float:
        """What part of all tokens need not be computed, 0 to 1.

        Args:
            lengths: tokens of each sample, by its number.
        """
        return self.num_shared_tokens / max(int(lengths[self.samples].sum(dtype=np.int64)), 1)

    def added(
        self, values: npt.NDArray[np.integer[Any]], of_prefixes: npt.NDArray[np.integer[Any]]
    ) -> npt.NDArray[np.int64]:
        """What each sample adds to its group, by its number, int64; 0 for those that are in no group.

        Args:
            values: of each whole sample, such as its media tokens or what its pictures cost.
            of_prefixes: (M,), of each prefix.
        """
        has = self.prefixes != NOTHING
        found = np.zeros(len(values), np.int64)
        found[self.samples] = values[self.samples]
        found[self.samples[has]] -= of_prefixes[self.prefixes[has]]
        return found

    def new_tokens(self, lengths: npt.NDArray[np.integer[Any]]) -> Int32Array:
        """Tokens that each sample adds to its group, 1 or more: int32 (N,), in the order of ``samples``."""
        return (lengths[self.samples] - self.shared).astype(np.int32)

    def sums_per_group(self, values: npt.NDArray[np.integer[Any]]) -> Int64Array:
        """Sums of ``values`` (N,), which are in the order of ``samples``; int64 (G,)."""
        if not len(values):
            return np.zeros(0, np.int64)
        return np.add.reduceat(values, self.offsets[:-1], dtype=np.int64)

    def unfolded(self, groups: PackPlan, lengths: npt.NDArray[np.integer[Any]]) -> PackPlan:
        """A plan of samples from one of groups.

        Args:
            groups: packs of groups by number.
            lengths: tokens of each sample, by its number.
        """
        sizes = np.diff(self.offsets)[groups.samples]
        starts = offsets_of(sizes)
        taken = np.arange(starts[-1]) - np.repeat(starts[:-1] - self.offsets[:-1][groups.samples], sizes)
        new = self.new_tokens(lengths)
        return PackPlan(self.samples[taken], starts[groups.offsets], new[taken], groups.capacity, self.shared[taken])


def plan_trees(
    lengths: npt.NDArray[np.integer[Any]],
    prefixes: Prefixes,
    *,
    capacity: int,
    least_shared: int,
    max_length: int | None = None,
    max_samples: int | None = None,
    budget: Budget | None = None,
) -> PrefixTrees:
    """Find the trees, and cut those that do not fit into a pack: a pure function, the same on every machine.

    A part of a tree that is cut off pays for its prefix once more. Trees are cut along the walk; wide ones, of which
    nothing but their tokens is bounded, where their branches fit best. Ties: of trees, branches, and
    samples on one branch, the one with the first sample comes first.

    Price: O(M log M) for M prefixes, times the depth of the deepest tree.

    Args:
        lengths: (N,), tokens of each sample.
        prefixes: of the same samples.
        capacity: tokens that a pack may hold.
        least_shared: tokens that a prefix must have to be shared.
        max_length: longer samples are in no group; at most ``capacity``, which is the default.
        max_samples: most samples of a group.
        budget: what else bounds a group.
    """
    assert len(lengths) == prefixes.num_samples
    forest = _Forest.of(prefixes, least_shared)
    order = np.lexsort((np.arange(len(lengths)), forest.places()[forest.ends]))
    order = order[lengths[order] <= (capacity if max_length is None else max_length)]
    ends = forest.ends[order]
    common = np.full(len(order), NOTHING, np.int64)
    common[1:] = forest.meetings(ends[:-1], ends[1:])
    has = common != NOTHING
    shared = np.zeros(len(order), np.int32)
    shared[has] = forest.lengths[common[has]]
    found = np.full(len(order), NOTHING, np.int64)
    found[has] = forest.entries[common[has]]
    by_first = _by_first_samples(order, shared)
    order, shared, found = order[by_first], shared[by_first], found[by_first]
    numbers = forest.trees()[order]  # groups are cut, and branches change places, within a tree
    if budget is None and max_samples is None:
        places, shared, found = _best_fitted(lengths[order], shared, found, capacity)
        order = order[places]
    bounds = [(lengths[order].astype(np.int64), shared, capacity)]
    if budget is not None:
        before = np.append(budget.of_prefixes, 0)[found]  # the last one where nothing is shared
        bounds.append((budget.values[order].astype(np.int64), before, budget.most))
    starts = _cut(shared, bounds, max_samples or max(len(order), 1))
    shared[starts], found[starts] = 0, NOTHING
    return PrefixTrees(order.astype(np.int64), np.append(starts, len(order)), shared, found, numbers)


def _by_first_samples(order: Int64Array, shared: Int32Array) -> Int64Array:
    """Places of samples that put the tree with the first sample first: the cache's order, as far as trees have it."""
    starts = np.flatnonzero(shared == 0)
    if not len(starts):
        return starts
    first = np.minimum.reduceat(order, starts)
    return np.argsort(np.repeat(first, np.diff(np.append(starts, len(order)))), kind="stable")


def trees_of(packs: PackPlan, prefixes: Prefixes, *, least_shared: int) -> PrefixTrees | None:
    """The trees of a plan that was made before, each pack a group; None if these prefixes are not those it shares.

    Args:
        least_shared: as the plan was made with.
    """
    assert packs.shared is not None, "a plan that shares something"
    owners = np.repeat(np.arange(prefixes.num_samples), np.diff(prefixes.offsets))
    # Rising, for prefixes rise in each sample: sample and length in one number.
    keys = owners * _LENGTHS + prefixes.lengths
    wanted = packs.samples * _LENGTHS + packs.shared + 1
    has = packs.shared > 0
    places = np.searchsorted(keys, wanted[has])
    if (places == len(keys)).any() or (keys[places] != wanted[has]).any():
        return None
    found = np.full(packs.num_samples, NOTHING, np.int64)
    found[has] = places
    numbers = _Forest.of(prefixes, least_shared).trees()[packs.samples]
    return PrefixTrees(packs.samples, packs.offsets, packs.shared, found, numbers)


@dataclass(frozen=True, eq=False)
class _Forest:
    """The H prefixes that more than one sample has; the last element of the arrays of nodes stands for ``NOTHING``.

    Args:
        parents: int64 (H + 1,), the longest shorter one that the same samples begin with.
        lengths: int32 (H + 1,), tokens that samples with it share.
        entries: int64 (H + 1,), which of all prefixes it is in the first sample that has it.
        ends: int64 (N,), the longest one of each sample.
    """

    parents: Int64Array
    lengths: Int32Array
    entries: Int64Array
    ends: Int64Array

    @classmethod
    def of(cls, prefixes: Prefixes, least_shared: int) -> _Forest:
        """Take the prefixes that more than one sample has; nodes are numbered by the first sample that has them."""
        owners = np.repeat(np.arange(prefixes.num_samples), np.diff(prefixes.offsets))
        entries = np.flatnonzero(prefixes.lengths > least_shared)
        # Most hashes are of one sample alone: these are sorted out first, for a plain sort costs next to nothing.
        hashes = prefixes.hashes[entries]
        ordered = np.sort(hashes)
        entries = entries[np.isin(hashes, ordered[1:][ordered[1:] == ordered[:-1]], kind="sort")]
        _, first, node = np.unique(prefixes.hashes[entries], return_index=True, return_inverse=True)
        # Numbered by where they come first, so that a parent's number is below its children's.
        by_first = np.argsort(first)
        first, node = first[by_first], inverse_of(by_first)[node]
        owner = owners[entries]
        parents = np.full(len(first) + 1, NOTHING, np.int64)
        if len(first):
            has_parent = (first > 0) & (owner[first - 1] == owner[first])
            parents[:-1][has_parent] = node[first[has_parent] - 1]
        ends = np.full(prefixes.num_samples, NOTHING, np.int64)
        ends[owner] = node  # of several, the last one stays: the longest
        lengths = np.append(prefixes.lengths[entries[first]] - 1, 0).astype(np.int32)
        return cls(parents, lengths, np.append(entries[first], NOTHING), ends)

    def depths(self) -> Int64Array:
        """Nodes above each one, (H + 1,); -1 for ``NOTHING``."""
        found = np.zeros(len(self.parents), np.int64)
        above = self.parents[:-1]
        while (above != NOTHING).any():
            found[:-1] += above != NOTHING
            above = self.parents[above]
        found[-1] = -1
        return found

    def trees(self) -> Int64Array:
        """The topmost node above each sample's longest prefix, or ``NOTHING``; (N,)."""
        found = self.ends
        while ((above := self.parents[found]) != NOTHING).any():
            found = np.where(above == NOTHING, found, above)
        return found

    def places(self) -> Int64Array:
        """Where each node comes in a walk in which parents come before their children, (H + 1,); the last is H."""
        depths = self.depths()[:-1]
        sizes = np.ones(len(depths), np.int64)
        levels = [np.flatnonzero(depths == depth) for depth in range(int(depths.max(initial=-1)) + 1)]
        for level in levels[:0:-1]:
            np.add.at(sizes, self.parents[level], sizes[level])
        found = np.full(len(self.parents), len(depths), np.int64)
        for level in levels:
            parents = self.parents[level]
            # Siblings by their numbers: those of the first samples first.
            by_parent = np.argsort(parents, kind="stable")
            level, parents = level[by_parent], parents[by_parent]
            before = np.cumsum(sizes[level]) - sizes[level]
            starts = np.flatnonzero(np.diff(parents, prepend=NOTHING - 1))
            own = before - np.repeat(before[starts], np.diff(np.append(starts, len(level))))
            found[level] = own + np.where(parents == NOTHING, 0, found[parents] + 1)
        return found

    def meetings(self, one: Int64Array, other: Int64Array) -> Int64Array:
        """The deepest nodes that pairs of nodes have in common, each itself or above it; or ``NOTHING``."""
        depths = self.depths()
        one, other = one.copy(), other.copy()
        while len(apart := np.flatnonzero(one != other)):
            a, b = one[apart], other[apart]
            one[apart] = np.where(depths[a] >= depths[b], self.parents[a], a)
            other[apart] = np.where(depths[b] >= depths[a], self.parents[b], b)
        return one


def _cut(
    shared: Int32Array, bounds: Sequence[tuple[Int64Array, npt.NDArray[np.integer[Any]], int]], most: int
) -> Int64Array:
    """Where groups begin: at each tree, and wherever one would hold too much or too many samples.

    Args:
        shared: (N,), tokens that each sample shares with the one before.
        bounds: of tokens, and of what else is bounded: of each sample, (N,); of what it shares with the one before,
            (N,); and what a group may hold.
        most: samples that a group may hold.
    """
    trees = np.flatnonzero(shared == 0)
    stops = np.append(trees, len(shared))[1:]
    whole = stops - trees <= most
    sums = [np.cumsum(values - before) for values, before, _ in bounds]
    for (values, _, capacity), each in zip(bounds, sums, strict=True):
        whole &= each[stops - 1] - each[trees] + values[trees] <= capacity
    starts = [trees[whole]]
    for start, stop in zip(trees[~whole].tolist(), stops[~whole].tolist(), strict=True):
        cuts = []
        while start < stop:
            cuts.append(start)
            ends = [
                int(np.searchsorted(each, capacity - int(values[start]) + int(each[start]), side="right"))
                for (values, _, capacity), each in zip(bounds, sums, strict=True)
            ]
            start = min(max(min(ends), start + 1), start + most, stop)
        starts.append(np.array(cuts, np.int64))
    return np.sort(np.concatenate(starts)).astype(np.int64)


WIDE = 64
"""Branches of a tree from which it is packed by itself."""


def _best_fitted(
    lengths: npt.NDArray[np.integer[Any]], shared: Int32Array, found: Int64Array, capacity: int
) -> tuple[Int64Array, Int32Array, Int64Array]:
    """Branches of wide trees in packs of their own, each with the trunk, by best fit decreasing.

    A tree that is divided along its walk wastes half a branch a pack, which is nothing where trees are of a few
    samples, for these fill the packs with others. A wide tree, such as all rows of a set that begin with one system
    prompt, has only its own branches to fill its packs::

        branches      5 4 2 3 1 3 beside a trunk of 2, packs of 8 tokens
        by the walk   2 5 | 2 4 2 | 2 3 1 | 2 3       four packs
        best fit      2 5 1 | 2 4 2 | 2 3 3           three

    A branch that is longer than a pack stays whole, as a tree of its own. Price: sorts the branches, and a number of
    steps that depends on their distinct lengths, see ``packing.pack_best_fit``.

    Args:
        lengths: (N,), tokens of samples in the order of a walk.
        shared: (N,), tokens that each shares with the one before it; 0 where a tree begins.
        found: (N,), which prefix that is, or ``NOTHING``.
        capacity: tokens of a pack.

    Returns:
        places of the samples in another order (N,), and ``shared`` and ``found`` in that: each pack is a tree.
    """
    places, shared, found = np.arange(len(shared)), shared.copy(), found.copy()
    trees = np.flatnonzero(shared == 0)
    sizes = np.diff(np.append(trees, len(shared)))
    for start, size in zip(trees[sizes >= WIDE].tolist(), sizes[sizes >= WIDE].tolist(), strict=True):
        here = slice(start, start + size)
        at = 1 + int(shared[here][1:].argmin())
        trunk, trunk_found = int(shared[here][at]), found[here][at]
        branches = np.flatnonzero(shared[here] <= trunk)
        tokens = np.add.reduceat(lengths[here] - np.maximum(shared[here], trunk), branches)
        fits = np.flatnonzero(tokens <= capacity - trunk)
        if len(fits) < WIDE or tokens.sum() <= capacity - trunk:
            continue
        packs = pack_histogram(tokens[fits].astype(np.int32), capacity - trunk, shuffle=False, seed=0, epoch=0)
        long = np.setdiff1d(np.arange(len(branches)), fits)
        order = np.concatenate([fits[packs.samples], long])
        counts = np.diff(np.append(branches, size))[order]
        heads = offsets_of(counts)[:-1]
        taken = start + np.arange(size) - np.repeat(heads - branches[order], counts)
        places[here], shared[here], found[here] = taken, shared[taken], found[taken]
        heads += start
        shared[heads], found[heads] = trunk, trunk_found
        first = heads[np.append(packs.offsets[:-1], np.arange(len(fits), len(order)))]
        shared[first], found[first] = 0, NOTHING
    return places, shared, found


def trees_of_some(trees: PrefixTrees, wanted: npt.NDArray[np.bool_]) -> PrefixTrees:
    """The trees without some samples: two that become neighbours share what all between them shared.

    Args:
        trees: of N samples.
        wanted: (N,) or longer, which samples stay, by number; at least one of them.
    """
    places: npt.NDArray[np.integer[Any]] = np.flatnonzero(wanted[trees.samples])
    # The least of what is shared since the neighbour before, and where that is: both in one number.
    keys = trees.shared.astype(np.int64) * len(wanted) + np.arange(len(trees.samples))
    least = np.minimum.reduceat(keys[: places[-1] + 1], np.append(0, places[:-1] + 1)) % len(wanted)
    offsets = np.unique(np.searchsorted(places, trees.offsets))
    shared, prefixes = trees.shared[least], trees.prefixes[least]
    shared[offsets[:-1]], prefixes[offsets[:-1]] = 0, NOTHING
    return replace(
        trees,
        samples=trees.samples[places],
        offsets=offsets,
        shared=shared,
        prefixes=prefixes,
        numbers=trees.numbers[places],
    )


@dataclass(frozen=True)
class Branch:
    """Tokens that are there once in a pack: a prefix of several samples, or what one of them has of its own.

    Args:
        first, last: the samples that have them, in pack order, from the first to behind the last.
        start, stop: their positions, the same in each of these samples.
        parent: place of the branch that they go on from, before it in the list; or ``NOTHING``.
    """

    first: int
    last: int
    start: int
    stop: int
    parent: int

    @property
    def num_samples(self) -> int:
        """Samples that have the tokens."""
        return self.last - self.first

    @property
    def num_tokens(self) -> int:
        """Tokens that are there once."""
        return self.stop - self.start


def branches_of(new: npt.NDArray[np.integer[Any]], shared: npt.NDArray[np.integer[Any]] | None = None) -> list[Branch]:
    """The trees of one pack, each branch behind the one that it goes on from: the order in which they are laid out.

    Price: each sample is looked at once for each prefix that it shares.

    Args:
        new: (S,), tokens that each sample adds to the pack, 1 or more.
        shared: (S,), tokens that each has in common with the one before it, fewer than either has; None for none.
    """
    common = [0] * (len(new) + 1) if shared is None else [*shared.tolist(), 0]
    lengths = [tokens + known for tokens, known in zip(new.tolist(), common, strict=False)]
    found: list[Branch] = []
    path: list[int] = []  # the branches that the sample of the moment is in
    for sample, length in enumerate(lengths):
        while path and found[path[-1]].stop > common[sample]:
            path.pop()
        # How much of it each following sample has: prefixes that begin with it end there.
        least, lasts = length, dict[int, int]()
        for other in range(sample + 1, len(common)):
            if least > common[other]:
                lasts[least] = other
                least = common[other]
            if least <= common[sample]:
                break
        for stop in sorted(lasts):
            start, parent = (found[path[-1]].stop, path[-1]) if path else (0, NOTHING)
            path.append(len(found))
            found.append(Branch(sample, lasts[stop], start, stop, parent))
    return found
