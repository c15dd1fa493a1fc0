"""Samples with a common prefix are packed together, so that their shared prefixes are computed once.

Prefixes are compared by hashes, several per sample; where a prefix of p tokens has the same hash in two samples, they
share at least p - 1 tokens: the last one may have to predict two continuations. Shared prefixes are nodes of trees::

    sample  0  A B        trees   A -+- (1)            order        1  3  0  2     4
            1  A                     +- (3)            tokens       8  9  7  7     5
            2  A B                   +- B -+- (0)      shared       0  4  4  6     0
            3  A                           +- (2)      to compute   8  5  3  1     5
            4  C                  (4)

In depth-first order, a sample adds the tokens beyond those that it shares with the sample before it. So a tree is
split, packed and counted as a sequence of numbers: the sum of ``length - shared`` is its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from packtool.planning.best_fit import pack_histogram
from packtool.planning.pack_plan import (
    Int32Array,
    Int64Array,
    IntArray,
    PackPlan,
    gather_groups,
    invert_order,
    sums_of_groups,
)

NOTHING = -1
"""Stands for no prefix, no parent or no tree."""

PartPlacement = Literal["any", "together", "apart"]
"""Placement of the parts of a split tree: in any steps, in one step, or in different steps."""


@dataclass(frozen=True, eq=False)
class Prefixes:
    """Hashes of prefixes of N samples, as CSR: sample ``i`` has those from ``offsets[i]`` to ``offsets[i + 1]``.

    Args:
        offsets: int64 (N + 1,).
        lengths: int32 (M,), tokens of each prefix, ascending in each sample, at most the whole sample.
        hashes: uint64 (M,), of everything that the model sees of the prefix; a collision makes a pack longer than
            planned, and nothing else.
    """

    offsets: Int64Array
    lengths: Int32Array
    hashes: npt.NDArray[np.uint64]

    @property
    def num_samples(self) -> int:
        """The number N of samples."""
        return len(self.offsets) - 1


@dataclass(frozen=True, eq=False)
class PrefixTrees:
    """N of all samples in G groups, each of which is packed as one.

    Args:
        samples: int64 (N,), group after group, each in depth-first order of a tree or of a part of one.
        offsets: int64 (G + 1,), first sample of each group in ``samples``, and N.
        shared: int32 (N,), tokens that each sample shares with the one before it; 0 for a group's first.
        prefixes: int64 (N,), index of that prefix among the M prefixes, or ``NOTHING``.
        tree_ids: int64 (N,), equal for all samples of a tree, in whichever groups; ``NOTHING`` without a tree.
        parts: required placement of the groups of one tree.
    """

    samples: Int64Array
    offsets: Int64Array
    shared: Int32Array
    prefixes: Int64Array
    tree_ids: Int64Array
    parts: PartPlacement = "any"

    @property
    def num_shared_tokens(self) -> int:
        """Tokens that are not computed again."""
        return int(self.shared.sum(dtype=np.int64))

    def saved(self, lengths: IntArray) -> float:
        """Return the fraction of tokens, 0 to 1, that need not be computed; ``lengths`` (n,) are by sample number."""
        return self.num_shared_tokens / max(int(lengths[self.samples].sum(dtype=np.int64)), 1)

    def added(self, values: IntArray, prefix_values: IntArray) -> Int64Array:
        """Compute the amount that each sample adds to its group, by its number, int64 (n,); 0 for samples in no group.

        ``values``, (n,), are of samples including their prefixes, such as media tokens; ``prefix_values``, (M,), of
        prefixes.
        """
        has_prefix = self.prefixes != NOTHING
        added = np.zeros(len(values), np.int64)
        added[self.samples] = values[self.samples]
        added[self.samples[has_prefix]] -= prefix_values[self.prefixes[has_prefix]]
        return added

    def new_tokens(self, lengths: IntArray) -> Int32Array:
        """Return the tokens that each sample adds to its group: int32 (N,), in the order of ``samples``."""
        return (lengths[self.samples] - self.shared).astype(np.int32)

    def sums_per_group(self, values: IntArray) -> Int64Array:
        """Sum ``values`` (N,), in the order of ``samples``, over each group; int64 (G,)."""
        return sums_of_groups(values, self.offsets)

    def expand(self, groups: PackPlan, lengths: IntArray) -> PackPlan:
        """Build a plan of samples from packs of groups; ``lengths`` (n,) are by sample number."""
        members, starts = gather_groups(self.offsets, groups.samples)
        new = self.new_tokens(lengths)[members]
        return PackPlan(self.samples[members], starts[groups.offsets], new, groups.capacity, self.shared[members])


def plan_trees(
    lengths: IntArray,
    prefixes: Prefixes,
    *,
    capacity: int,
    min_shared: int,
    max_length: int | None = None,
    max_samples: int | None = None,
    media_tokens: tuple[IntArray, IntArray] | None = None,
    max_media_tokens: int | None = None,
) -> PrefixTrees:
    """Build prefix trees, and split those that do not fit into a pack: a pure function, the same on every machine.

    Each further part of a tree computes its prefix again. Trees are split in depth-first order; wide ones with no limit
    but their tokens are split where their branches fit best. Ties go to the first sample. Cost: O(M log M) for M
    prefixes, times the depth of the deepest tree.

    Args:
        lengths: (N,), tokens of each sample.
        capacity, max_samples, max_media_tokens: maximum tokens, samples and media tokens of a group; a single sample
            with more media tokens is a group of its own.
        min_shared: minimum tokens of a shared prefix.
        max_length: longer samples are in no group; by default ``capacity``.
        media_tokens: of each sample, (N,), and of each prefix, (M,); needed with ``max_media_tokens``.
    """
    assert len(lengths) == prefixes.num_samples
    forest = _Forest.from_prefixes(prefixes, min_shared)
    order = np.lexsort((np.arange(len(lengths)), forest.preorder()[forest.ends]))
    order = order[lengths[order] <= (capacity if max_length is None else max_length)]
    ends = forest.ends[order]
    common_nodes = np.full(len(order), NOTHING, np.int64)
    common_nodes[1:] = forest.common_ancestors(ends[:-1], ends[1:])
    # Tokens that each sample shares with the one before it, and the index of that prefix.
    shared, entries = forest.lengths[common_nodes], forest.entries[common_nodes]
    # Trees in the order of their first samples.
    starts = np.flatnonzero(shared == 0)
    if len(starts):
        first = np.minimum.reduceat(order, starts)
        by_first = np.argsort(np.repeat(first, np.diff(np.append(starts, len(order)))), kind="stable")
        order, shared, entries = order[by_first], shared[by_first], entries[by_first]
    tree_ids = forest.roots()[order]  # trees are split, and branches reordered, within a tree
    if max_media_tokens is None and max_samples is None:
        positions, shared, entries = _pack_wide_trees(lengths[order], shared, entries, capacity)
        order = order[positions]
    limits: list[_Limit] = [(lengths[order].astype(np.int64), shared, capacity)]
    if media_tokens is not None and max_media_tokens is not None:
        values, prefix_values = media_tokens
        shared_values = np.append(prefix_values, 0)[entries]  # the last one where nothing is shared
        limits.append((values[order].astype(np.int64), shared_values, max_media_tokens))
    starts = _split_trees(shared, limits, max_samples or max(len(order), 1))
    shared[starts], entries[starts] = 0, NOTHING
    return PrefixTrees(order.astype(np.int64), np.append(starts, len(order)), shared, entries, tree_ids)


def rebuild_trees(packs: PackPlan, prefixes: Prefixes, *, min_shared: int) -> PrefixTrees | None:
    """Rebuild the trees of a plan made with ``min_shared``, each pack a group; None if its prefixes were others."""
    assert packs.shared is not None, "the plan has shared prefixes"
    owners = np.repeat(np.arange(prefixes.num_samples), np.diff(prefixes.offsets))
    # Sample and prefix length in one number, ascending.
    keys = owners << 31 | prefixes.lengths
    has_prefix = packs.shared > 0
    wanted = (packs.samples << 31 | packs.shared + 1)[has_prefix]
    places = np.searchsorted(keys, wanted)
    if (places == len(keys)).any() or (keys[places] != wanted).any():
        return None
    entries = np.full(packs.num_samples, NOTHING, np.int64)
    entries[has_prefix] = places
    tree_ids = _Forest.from_prefixes(prefixes, min_shared).roots()[packs.samples]
    return PrefixTrees(packs.samples, packs.offsets, packs.shared, entries, tree_ids)


@dataclass(frozen=True, eq=False)
class _Forest:
    """The H prefixes of more than one sample; the last element of the arrays of nodes stands for ``NOTHING``."""

    parents: Int64Array  # (H + 1,), the next shorter prefix of the same samples
    lengths: Int32Array  # (H + 1,), tokens that samples with the prefix share
    entries: Int64Array  # (H + 1,), index of the prefix among all, in the first sample that has it
    ends: Int64Array  # (N,), the longest node of each sample

    @classmethod
    def from_prefixes(cls, prefixes: Prefixes, min_shared: int) -> _Forest:
        owners = np.repeat(np.arange(prefixes.num_samples), np.diff(prefixes.offsets))
        entries = np.flatnonzero(prefixes.lengths > min_shared)
        # Most hashes occur once: a plain sort, which is cheap, removes them first.
        hashes = prefixes.hashes[entries]
        sorted_hashes = np.sort(hashes)
        entries = entries[np.isin(hashes, sorted_hashes[1:][sorted_hashes[1:] == sorted_hashes[:-1]], kind="sort")]
        _, first, node = np.unique(prefixes.hashes[entries], return_index=True, return_inverse=True)
        # Numbered by first occurrence, so that a parent's number is below its children's.
        by_first = np.argsort(first)
        first, node = first[by_first], invert_order(by_first)[node]
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
        """Count the ancestors of each node, (H + 1,); -1 for ``NOTHING``."""
        depths = np.zeros(len(self.parents), np.int64)
        above = self.parents[:-1]
        while (above != NOTHING).any():
            depths[:-1] += above != NOTHING
            above = self.parents[above]
        depths[-1] = -1
        return depths

    def roots(self) -> Int64Array:
        """Find the root above the longest node of each sample, or ``NOTHING``; (N,)."""
        roots = self.ends
        while ((above := self.parents[roots]) != NOTHING).any():
            roots = np.where(above == NOTHING, roots, above)
        return roots

    def preorder(self) -> Int64Array:
        """Number the nodes in depth-first order, siblings by number, (H + 1,); the last is H."""
        depths = self.depths()[:-1]
        sizes = np.ones(len(depths), np.int64)
        levels = [np.flatnonzero(depths == depth) for depth in range(int(depths.max(initial=-1)) + 1)]
        for level in levels[:0:-1]:
            np.add.at(sizes, self.parents[level], sizes[level])
        positions = np.full(len(self.parents), len(depths), np.int64)
        for level in levels:
            level = level[np.argsort(self.parents[level], kind="stable")]
            parents = self.parents[level]
            before = np.cumsum(sizes[level]) - sizes[level]
            starts = np.flatnonzero(np.diff(parents, prepend=NOTHING - 1))
            own = before - np.repeat(before[starts], np.diff(np.append(starts, len(level))))
            positions[level] = own + np.where(parents == NOTHING, 0, positions[parents] + 1)
        return positions

    def common_ancestors(self, one: Int64Array, other: Int64Array) -> Int64Array:
        """Find the deepest common ancestors of pairs of nodes, which may be one of the two; or ``NOTHING``."""
        depths = self.depths()
        one, other = one.copy(), other.copy()
        while len(apart := np.flatnonzero(one != other)):
            a, b = one[apart], other[apart]
            one[apart] = np.where(depths[a] >= depths[b], self.parents[a], a)
            other[apart] = np.where(depths[b] >= depths[a], self.parents[b], b)
        return one


_Limit = tuple[Int64Array, IntArray, int]
"""Amount of each sample, (N,), the part of it shared with the sample before, (N,), and the maximum of a group."""


def _split_trees(shared: Int32Array, limits: list[_Limit], max_samples: int) -> Int64Array:
    """Find the first samples of groups: of each tree, and wherever a group would exceed a limit or ``max_samples``."""
    trees = np.flatnonzero(shared == 0)
    stops = np.append(trees, len(shared))[1:]
    fits = stops - trees <= max_samples
    sums = [np.cumsum(values - before) for values, before, _ in limits]
    for (values, _, limit), total in zip(limits, sums, strict=True):
        fits &= total[stops - 1] - total[trees] + values[trees] <= limit
    starts = trees[fits].tolist()
    for start, stop in zip(trees[~fits].tolist(), stops[~fits].tolist(), strict=True):
        while start < stop:
            starts.append(start)
            end = min(
                int(np.searchsorted(total, limit - int(values[start]) + int(total[start]), side="right"))
                for (values, _, limit), total in zip(limits, sums, strict=True)
            )
            start = min(max(end, start + 1), start + max_samples, stop)
    return np.sort(np.array(starts, np.int64))


WIDE = 64
"""Branches of a tree from which it is packed by itself."""


def _pack_wide_trees(
    lengths: IntArray, shared: Int32Array, entries: Int64Array, capacity: int
) -> tuple[Int64Array, Int32Array, Int64Array]:
    """Distribute the branches of wide trees over packs, each with the trunk, by best-fit decreasing.

    Splitting in depth-first order would waste half a branch a pack, since a wide tree is alone in its packs::

        branches      5 4 2 3 1 3 beside a trunk of 2, packs of 8 tokens
        depth-first   2 5 | 2 4 2 | 2 3 1 | 2 3       four packs
        best fit      2 5 1 | 2 4 2 | 2 3 3           three

    Takes lengths, ``shared`` and ``entries``, (N,) each, of samples in depth-first order. Returns a new order, and
    ``shared`` and ``entries`` in it: each pack is then a tree.
    """
    positions, shared, entries = np.arange(len(shared)), shared.copy(), entries.copy()
    trees = np.flatnonzero(shared == 0)
    sizes = np.diff(np.append(trees, len(shared)))
    for start, size in zip(trees[sizes >= WIDE].tolist(), sizes[sizes >= WIDE].tolist(), strict=True):
        tree = slice(start, start + size)
        trunk_end = 1 + int(shared[tree][1:].argmin())
        trunk, trunk_entry = int(shared[tree][trunk_end]), entries[tree][trunk_end]
        branches = np.flatnonzero(shared[tree] <= trunk)
        tokens = np.add.reduceat(lengths[tree] - np.maximum(shared[tree], trunk), branches)
        fits = np.flatnonzero(tokens <= capacity - trunk)
        if len(fits) < WIDE or tokens.sum() <= capacity - trunk:
            continue
        packs = pack_histogram(tokens[fits].astype(np.int32), capacity - trunk, shuffle=False, seed=0, epoch=0)
        too_long = np.setdiff1d(np.arange(len(branches)), fits)
        order = np.concatenate([fits[packs.samples], too_long])
        members, branch_starts = gather_groups(np.append(branches, size), order)
        members, branch_starts = members + start, branch_starts[:-1] + start
        positions[tree], shared[tree], entries[tree] = members, shared[members], entries[members]
        shared[branch_starts], entries[branch_starts] = trunk, trunk_entry
        pack_starts = branch_starts[np.append(packs.offsets[:-1], np.arange(len(fits), len(order)))]
        shared[pack_starts], entries[pack_starts] = 0, NOTHING
    return positions, shared, entries


def select_samples(trees: PrefixTrees, is_selected: npt.NDArray[np.bool_]) -> PrefixTrees:
    """Keep flagged samples, (n,), at least one; two that become neighbors share what all between them shared."""
    positions: IntArray = np.flatnonzero(is_selected[trees.samples])
    # The minimum shared since the previous neighbor, and its position, in one number.
    keys = trees.shared.astype(np.int64) * len(is_selected) + np.arange(len(trees.samples))
    min_positions = np.minimum.reduceat(keys[: positions[-1] + 1], np.append(0, positions[:-1] + 1)) % len(is_selected)
    offsets = np.unique(np.searchsorted(positions, trees.offsets))
    shared, prefixes = trees.shared[min_positions], trees.prefixes[min_positions]
    shared[offsets[:-1]], prefixes[offsets[:-1]] = 0, NOTHING
    return replace(
        trees,
        samples=trees.samples[positions],
        offsets=offsets,
        shared=shared,
        prefixes=prefixes,
        tree_ids=trees.tree_ids[positions],
    )


@dataclass(frozen=True)
class Branch:
    """Tokens that occur once in a pack: a prefix of several samples, or the rest of one sample.

    Args:
        first, last: the samples that have them, in pack order, ``last`` excluded.
        start, stop: their positions, the same in each of these samples.
        parent: index of the branch that they continue, earlier in the list; or ``NOTHING``.
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
        """Tokens of the branch."""
        return self.stop - self.start


def find_branches(new: IntArray, shared: IntArray | None = None) -> list[Branch]:
    """List the branches of one pack, each after its parent, in the order of their tokens in the pack.

    Cost: each sample is visited once for each prefix that it shares. ``new``, (S,), are tokens that each sample adds to
    the pack, 1 or more, and ``shared``, (S,), those that it shares with the one before it, fewer than either has.
    """
    shared_tokens = [0] * (len(new) + 1) if shared is None else [*shared.tolist(), 0]
    lengths = [added + before for added, before in zip(new.tolist(), shared_tokens, strict=False)]
    branches: list[Branch] = []
    path: list[int] = []  # branches of the current sample
    for sample, length in enumerate(lengths):
        while path and branches[path[-1]].stop > shared_tokens[sample]:
            path.pop()
        # Prefixes of this sample end where the following samples share less of it.
        prefix_length, last_of_prefix = length, dict[int, int]()
        for other in range(sample + 1, len(shared_tokens)):
            if prefix_length > shared_tokens[other]:
                last_of_prefix[prefix_length] = other
                prefix_length = shared_tokens[other]
            if prefix_length <= shared_tokens[sample]:
                break
        for stop in sorted(last_of_prefix):
            start, parent = (branches[path[-1]].stop, path[-1]) if path else (0, NOTHING)
            path.append(len(branches))
            branches.append(Branch(sample, last_of_prefix[stop], start, stop, parent))
    return branches
