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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

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
        lengths: int32 (M,), tokens of each prefix, ascending in each sample, at most the whole sample.
        hashes: uint64 (M,), of everything that the model sees of the prefix; a collision makes a pack longer than
            planned, and nothing else.
    """

    offsets: Int64Array
    lengths: Int32Array
    hashes: npt.NDArray[np.uint64]

    @property
    def num_samples(self) -> int:
        return len(self.offsets) - 1

    def owners(self) -> Int64Array:
        """Return the sample of each prefix, int64 (M,)."""
        return np.repeat(np.arange(self.num_samples), np.diff(self.offsets))


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

    Each further part of a tree computes its prefix again. Trees are split in depth-first order. If tokens are the only
    limit, wide trees are split where their branches fit best. Ties go to the first sample. Cost: O(M log M) for M
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
    fits = lengths <= (capacity if max_length is None else max_length)
    order, shared, shared_prefixes = _sort_by_tree(forest, fits)
    tree_ids = forest.roots()[order]  # stays valid, because samples are only reordered within their tree below
    if max_media_tokens is None and max_samples is None:
        positions, shared, shared_prefixes = _pack_wide_trees(lengths[order], shared, shared_prefixes, capacity)
        order = order[positions]
    limits = [_Limit(lengths[order].astype(np.int64), shared, capacity)]
    if media_tokens is not None and max_media_tokens is not None:
        sample_media, prefix_media = media_tokens
        shared_media = np.append(prefix_media, 0)[shared_prefixes]  # ``NOTHING``, -1, selects the appended 0
        limits.append(_Limit(sample_media[order].astype(np.int64), shared_media, max_media_tokens))
    group_starts = _split_trees(shared, limits, max_samples or max(len(order), 1))
    shared[group_starts] = 0
    shared_prefixes[group_starts] = NOTHING
    offsets = np.append(group_starts, len(order))
    return PrefixTrees(order.astype(np.int64), offsets, shared, shared_prefixes, tree_ids)


def _sort_by_tree(forest: _Forest, fits: npt.NDArray[np.bool_]) -> tuple[Int64Array, Int32Array, Int64Array]:
    """Sort the samples flagged by ``fits``, (N,), depth first in each tree, and the trees by their first samples.

    Returns the samples, (n,), and what each shares with the one before it: the number of tokens, 0 at the beginning of
    a tree, and the index of the prefix, or ``NOTHING``.
    """
    # By the preorder number of the longest node of each sample, then by sample number.
    order = np.argsort(forest.preorder()[forest.ends], kind="stable")
    order = order[fits[order]]
    ends = forest.ends[order]
    common_nodes = np.full(len(order), NOTHING, np.int64)
    common_nodes[1:] = forest.common_ancestors(ends[:-1], ends[1:])
    shared, shared_prefixes = forest.lengths[common_nodes], forest.prefixes[common_nodes]
    starts = np.flatnonzero(shared == 0)
    if len(starts) == 0:
        return order, shared, shared_prefixes
    first_samples = np.minimum.reduceat(order, starts)
    tree_sizes = np.diff(np.append(starts, len(order)))
    by_tree = np.argsort(np.repeat(first_samples, tree_sizes), kind="stable")
    return order[by_tree], shared[by_tree], shared_prefixes[by_tree]


def rebuild_trees(packs: PackPlan, prefixes: Prefixes, *, min_shared: int) -> PrefixTrees | None:
    """Rebuild the trees of a plan made with ``min_shared``, each pack a group; None if its prefixes were others."""
    assert packs.shared is not None, "the plan has shared prefixes"
    # Sample and prefix length in one number, ascending.
    keys = prefixes.owners() << 31 | prefixes.lengths
    has_prefix = packs.shared > 0
    wanted_keys = (packs.samples << 31 | packs.shared + 1)[has_prefix]
    indices = np.searchsorted(keys, wanted_keys)
    if (indices == len(keys)).any() or (keys[indices] != wanted_keys).any():
        return None
    shared_prefixes = np.full(packs.num_samples, NOTHING, np.int64)
    shared_prefixes[has_prefix] = indices
    tree_ids = _Forest.from_prefixes(prefixes, min_shared).roots()[packs.samples]
    return PrefixTrees(packs.samples, packs.offsets, packs.shared, shared_prefixes, tree_ids)


@dataclass(frozen=True, eq=False)
class _Forest:
    """The H prefixes of more than one sample; the last element of the arrays of nodes stands for ``NOTHING``."""

    parents: Int64Array  # (H + 1,), the next shorter prefix of the same samples
    lengths: Int32Array  # (H + 1,), tokens that samples with the prefix share
    prefixes: Int64Array  # (H + 1,), index of the prefix among all, in the first sample that has it
    ends: Int64Array  # (N,), the longest node of each sample

    @classmethod
    def from_prefixes(cls, prefixes: Prefixes, min_shared: int) -> _Forest:
        """Find the prefixes with more than ``min_shared`` tokens that several samples have, by equal hashes."""
        shared = _repeated_prefixes(prefixes, min_shared)  # (X,)
        # Prefixes with equal hashes are one node: ``node_of``, (X,), is the node of each shared prefix, and ``first``,
        # (H,), the position in ``shared`` of each node's first prefix.
        _, first, node_of = np.unique(prefixes.hashes[shared], return_index=True, return_inverse=True)
        # Renumber the nodes by first occurrence, so that a parent's number is below its children's.
        by_first = np.argsort(first)
        first, node_of = first[by_first], invert_order(by_first)[node_of]
        # The parent of a node is the shared prefix before it, if that is of the same sample.
        owners = prefixes.owners()[shared]
        parents = np.full(len(first) + 1, NOTHING, np.int64)
        if len(first):
            has_parent = (first > 0) & (owners[first - 1] == owners[first])
            parents[:-1][has_parent] = node_of[first[has_parent] - 1]
        ends = np.full(prefixes.num_samples, NOTHING, np.int64)
        ends[owners] = node_of  # the last assignment of a sample stays: its longest prefix
        lengths = np.append(prefixes.lengths[shared[first]] - 1, 0).astype(np.int32)
        return cls(parents, lengths, np.append(shared[first], NOTHING), ends)

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
        """Return each node's position in depth-first order, siblings by number, (H + 1,); ``NOTHING`` comes last."""
        depths = self.depths()[:-1]
        levels = [np.flatnonzero(depths == depth) for depth in range(int(depths.max(initial=-1)) + 1)]
        subtree_sizes = self._subtree_sizes(levels)
        positions = np.full(len(self.parents), len(depths), np.int64)
        for level in levels:
            # A node follows its parent and the subtrees of its earlier siblings.
            nodes = level[np.argsort(self.parents[level], kind="stable")]
            parents = self.parents[nodes]
            size_before = np.cumsum(subtree_sizes[nodes]) - subtree_sizes[nodes]  # of earlier nodes of the level
            first_siblings = np.flatnonzero(np.diff(parents, prepend=NOTHING - 1))
            num_siblings = np.diff(np.append(first_siblings, len(nodes)))
            size_of_earlier_siblings = size_before - np.repeat(size_before[first_siblings], num_siblings)
            child_start = np.where(parents == NOTHING, 0, positions[parents] + 1)
            positions[nodes] = child_start + size_of_earlier_siblings
        return positions

    def _subtree_sizes(self, levels: Sequence[Int64Array]) -> Int64Array:
        """Count the nodes of the subtree below and with each node, (H,); ``levels`` are the nodes by depth."""
        sizes = np.ones(len(self.parents) - 1, np.int64)
        for level in reversed(levels[1:]):  # from the deepest level up, without the roots
            np.add.at(sizes, self.parents[level], sizes[level])
        return sizes

    def common_ancestors(self, one: Int64Array, other: Int64Array) -> Int64Array:
        """Find the deepest common ancestors of pairs of nodes, which may be one of the two; or ``NOTHING``."""
        depths = self.depths()
        one, other = one.copy(), other.copy()
        while len(pairs := np.flatnonzero(one != other)):
            # The deeper node of a pair moves up to its parent, or both do.
            a, b = one[pairs], other[pairs]
            one[pairs] = np.where(depths[a] >= depths[b], self.parents[a], a)
            other[pairs] = np.where(depths[b] >= depths[a], self.parents[b], b)
        return one


def _repeated_prefixes(prefixes: Prefixes, min_shared: int) -> Int64Array:
    """Return the indices of prefixes with more than ``min_shared`` tokens whose hash another one has, too; (X,)."""
    long = np.flatnonzero(prefixes.lengths > min_shared)
    # Most hashes occur once: a plain sort, which is cheap, removes them first.
    hashes = np.sort(prefixes.hashes[long])
    repeated_hashes = hashes[1:][hashes[1:] == hashes[:-1]]
    return long[np.isin(prefixes.hashes[long], repeated_hashes, kind="sort")]


class _Limit(NamedTuple):
    """Maximum tokens, or media tokens, of a group.

    ``values``, (N,), are of samples in depth-first order; ``shared``, (N,), is the part of them that each sample shares
    with the one before it, which is counted for the first sample of a group only.
    """

    values: Int64Array
    shared: IntArray
    maximum: int


def _split_trees(shared: Int32Array, limits: list[_Limit], max_samples: int) -> Int64Array:
    """Return the first samples of groups, int64 (G,): of each tree, and wherever a group would exceed a limit.

    ``shared``, (N,), is what each sample in depth-first order shares with the one before it; ``max_samples`` is a
    further limit. A single sample is a group even if it exceeds a limit.
    """
    tree_starts = np.flatnonzero(shared == 0)
    tree_stops = np.append(tree_starts, len(shared))[1:]
    # A group from i to j has values[i], shared prefix included, and what the others add: total[j] - total[i].
    totals = [np.cumsum(limit.values - limit.shared) for limit in limits]
    fits = tree_stops - tree_starts <= max_samples
    for limit, total in zip(limits, totals, strict=True):
        fits &= total[tree_stops - 1] - total[tree_starts] + limit.values[tree_starts] <= limit.maximum
    group_starts = tree_starts[fits].tolist()
    for start, tree_stop in zip(tree_starts[~fits].tolist(), tree_stops[~fits].tolist(), strict=True):
        while start < tree_stop:
            group_starts.append(start)
            max_stop = min(start + max_samples, tree_stop)
            start = max(_end_of_group(start, max_stop, limits, totals), start + 1)
    return np.sort(np.array(group_starts, np.int64))


def _end_of_group(start: int, max_stop: int, limits: list[_Limit], totals: list[Int64Array]) -> int:
    """Return where a group from ``start`` on ends: before the first sample that exceeds a limit, or at ``max_stop``.

    ``totals`` are, for each limit, the cumulative sums of what samples add, (N,).
    """
    stop = max_stop
    for limit, total in zip(limits, totals, strict=True):
        max_total = limit.maximum - int(limit.values[start]) + int(total[start])
        stop = min(stop, int(np.searchsorted(total, max_total, side="right")))
    return stop


MIN_BRANCHES = 64
"""Branches of a tree from which they are packed by best fit."""


def _pack_wide_trees(
    lengths: IntArray, shared: Int32Array, shared_prefixes: Int64Array, capacity: int
) -> tuple[Int64Array, Int32Array, Int64Array]:
    """Distribute the branches of wide trees over packs, each with the trunk, by best-fit decreasing.

    Splitting in depth-first order would waste half a branch a pack, since a wide tree is alone in its packs::

        branches      5 4 2 3 1 3 beside a trunk of 2, packs of 8 tokens
        depth-first   2 5 | 2 4 2 | 2 3 1 | 2 3       four packs
        best fit      2 5 1 | 2 4 2 | 2 3 3           three

    The trunk is the prefix that all samples of a tree share; a branch is consecutive samples that share more than that.
    All arrays, (N,), are of samples in depth-first order. Returns the position of each sample of the new order in the
    old one, and ``shared`` and ``shared_prefixes`` of the new order, in which each pack is a tree of its own.
    """
    positions, shared, shared_prefixes = np.arange(len(shared)), shared.copy(), shared_prefixes.copy()
    starts = np.flatnonzero(shared == 0)
    sizes = np.diff(np.append(starts, len(shared)))
    is_wide = sizes >= MIN_BRANCHES
    for start, size in zip(starts[is_wide].tolist(), sizes[is_wide].tolist(), strict=True):
        tree = slice(start, start + size)
        order = _pack_wide_tree(lengths[tree], shared[tree], shared_prefixes[tree], capacity)
        if order is not None:
            positions[tree] = start + order
    return positions, shared, shared_prefixes


def _pack_wide_tree(
    lengths: IntArray, shared: Int32Array, shared_prefixes: Int64Array, capacity: int
) -> Int64Array | None:
    """Distribute the branches of one tree over packs, as ``_pack_wide_trees`` does.

    Returns the new order of its samples, (n,), and changes ``shared`` and ``shared_prefixes``, (n,), in place; or None
    without changes.
    """
    # Of the samples after the first one, the one that shares least shares the trunk only, and begins a branch.
    fork_index = 1 + int(shared[1:].argmin())
    trunk_tokens, trunk_prefix = int(shared[fork_index]), shared_prefixes[fork_index]
    branches = np.flatnonzero(shared <= trunk_tokens)  # first sample of each branch
    own_tokens = lengths - np.maximum(shared, trunk_tokens)  # that each sample adds to the trunk
    packs = _pack_branches(np.add.reduceat(own_tokens, branches), capacity - trunk_tokens)
    if packs is None:
        return None
    branch_order, first_branches = packs
    order, branch_offsets = gather_groups(np.append(branches, len(shared)), branch_order)
    shared[:] = shared[order]
    shared_prefixes[:] = shared_prefixes[order]
    # The first sample of a branch shares the trunk with the sample before it, but nothing if it begins a pack.
    branch_starts = branch_offsets[:-1]
    shared[branch_starts] = trunk_tokens
    shared_prefixes[branch_starts] = trunk_prefix
    pack_starts = branch_starts[first_branches]
    shared[pack_starts] = 0
    shared_prefixes[pack_starts] = NOTHING
    return order


def _pack_branches(branch_tokens: Int64Array, space: int) -> tuple[Int64Array, Int64Array] | None:
    """Pack branches of a tree into ``space`` tokens each; None if all fit into one pack, or few fit at all.

    ``branch_tokens``, (B,), are without the trunk. Returns the branches in pack order, (B,), and the index in it of the
    first branch of each pack. A branch that is too long is alone in its pack, and split later.
    """
    fits = np.flatnonzero(branch_tokens <= space)
    if len(fits) < MIN_BRANCHES or branch_tokens.sum() <= space:
        return None
    packs = pack_histogram(branch_tokens[fits].astype(np.int32), space, shuffle=False, seed=0, epoch=0)
    too_long = np.setdiff1d(np.arange(len(branch_tokens)), fits)
    order = np.concatenate([fits[packs.samples], too_long])
    first_branches = np.append(packs.offsets[:-1], np.arange(len(fits), len(order)))
    return order, first_branches


def select_samples(trees: PrefixTrees, is_selected: npt.NDArray[np.bool_]) -> PrefixTrees:
    """Keep flagged samples, (n,), at least one; two that become neighbors share what all between them shared."""
    positions: IntArray = np.flatnonzero(is_selected[trees.samples])
    # The minimum shared since the previous kept sample: tokens and position are compared as one number.
    keys = trees.shared.astype(np.int64) * len(is_selected) + np.arange(len(trees.samples))
    starts = np.append(0, positions[:-1] + 1)
    sources = np.minimum.reduceat(keys[: positions[-1] + 1], starts) % len(is_selected)
    offsets = np.unique(np.searchsorted(positions, trees.offsets))
    shared, prefixes = trees.shared[sources], trees.prefixes[sources]
    shared[offsets[:-1]], prefixes[offsets[:-1]] = 0, NOTHING
    samples, tree_ids = trees.samples[positions], trees.tree_ids[positions]
    return replace(trees, samples=samples, offsets=offsets, shared=shared, prefixes=prefixes, tree_ids=tree_ids)


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
        return self.last - self.first

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


def find_branches(new_tokens: IntArray, shared: IntArray | None = None) -> list[Branch]:
    """List the branches of one pack, each after its parent, in the order of their tokens in the pack.

    ``new_tokens``, (S,), are what each sample adds to the pack, 1 or more. ``shared``, (S,), is the prefix that it
    shares with the sample before it, shorter than either sample; None if nothing is shared. Cost: each sample is
    visited once for each prefix that it shares.
    """
    shared_tokens = [0] * len(new_tokens) if shared is None else shared.tolist()
    lengths = [new + old for new, old in zip(new_tokens.tolist(), shared_tokens, strict=True)]
    shared_tokens.append(0)  # nothing is shared beyond the end of the pack
    branches: list[Branch] = []
    path: list[int] = []  # indices of the branches that make up the current sample, from its beginning
    for sample, length in enumerate(lengths):
        while path and branches[path[-1]].stop > shared_tokens[sample]:
            path.pop()
        end_of_prefix = _ends_of_prefixes(sample, length, shared_tokens)
        for stop in sorted(end_of_prefix):
            start, parent = (branches[path[-1]].stop, path[-1]) if path else (0, NOTHING)
            path.append(len(branches))
            branches.append(Branch(first=sample, last=end_of_prefix[stop], start=start, stop=stop, parent=parent))
    return branches


def _ends_of_prefixes(sample: int, length: int, shared_tokens: list[int]) -> dict[int, int]:
    """Return, for each prefix of a sample that is new in the pack, the first following sample that does not share it.

    Prefixes are given by their lengths; the longest is the sample itself. ``shared_tokens`` is what each sample shares
    with the one before it, with a 0 at the end.
    """
    end_of_prefix: dict[int, int] = {}
    prefix_length = length
    following = sample + 1
    while prefix_length > shared_tokens[sample] and following < len(shared_tokens):
        if prefix_length > shared_tokens[following]:
            end_of_prefix[prefix_length] = following
            prefix_length = shared_tokens[following]
        following += 1
    return end_of_prefix
