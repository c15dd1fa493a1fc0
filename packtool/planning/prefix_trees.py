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

import copy
from collections.abc import Sequence
from dataclasses import dataclass
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
        shared_tokens: int32 (N,), tokens that each sample shares with the one before it; 0 for a group's first.
        shared_prefixes: int64 (N,), index of that prefix among the M prefixes, or ``NOTHING``.
        tree_ids: int64 (N,), equal for all samples of a tree, in whichever groups; ``NOTHING`` without a tree.
        part_placement: required placement of the groups of one tree.
    """

    samples: Int64Array
    offsets: Int64Array
    shared_tokens: Int32Array
    shared_prefixes: Int64Array
    tree_ids: Int64Array
    part_placement: PartPlacement = "any"

    @property
    def num_shared_tokens(self) -> int:
        """Tokens that are not computed again."""
        return int(self.shared_tokens.sum(dtype=np.int64))

    def saved(self, lengths: IntArray) -> float:
        """Return the fraction of tokens, 0 to 1, that need not be computed; ``lengths`` (n,) are by sample number."""
        return self.num_shared_tokens / max(int(lengths[self.samples].sum(dtype=np.int64)), 1)

    def added(self, values: IntArray, prefix_values: IntArray) -> Int64Array:
        """Compute the amount that each sample (of its copies, the largest) adds to its group, by number, int64 (n,).

        ``values``, (n,), such as media tokens, are of complete samples; ``prefix_values``, (M,), of prefixes.
        """
        amounts = values[self.samples].astype(np.int64) - values_of_prefixes(prefix_values, self.shared_prefixes)
        added = np.zeros(len(values), np.int64)
        added[self.samples] = amounts
        np.maximum.at(added, self.samples, amounts)
        return added

    def new_tokens(self, lengths: IntArray) -> Int32Array:
        """Return the tokens that each sample adds to its group: int32 (N,), in the order of ``samples``."""
        return (lengths[self.samples] - self.shared_tokens).astype(np.int32)

    def sums_per_group(self, values: IntArray) -> Int64Array:
        """Sum ``values`` (N,), in the order of ``samples``, over each group; int64 (G,)."""
        return sums_of_groups(values, self.offsets)

    def expand(self, groups: PackPlan, lengths: IntArray) -> PackPlan:
        """Build a plan of samples from packs of groups; ``lengths`` (n,) are by sample number."""
        members, starts = gather_groups(self.offsets, groups.samples)
        new, shared = self.new_tokens(lengths)[members], self.shared_tokens[members]
        return PackPlan(self.samples[members], starts[groups.offsets], new, groups.capacity, shared)


def values_of_prefixes(prefix_values: IntArray, prefixes: Int64Array) -> Int64Array:
    """Select the values of ``prefixes``, (n,), from those of all prefixes, (M,); int64 (n,), 0 for ``NOTHING``."""
    has_prefix = prefixes != NOTHING
    values = np.zeros(len(prefixes), np.int64)
    values[has_prefix] = prefix_values[prefixes[has_prefix]]
    return values


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
    """Find the samples that share prefixes, and divide them into groups of which each fits into a pack.

    Args:
        lengths: tokens of each sample, (N,).
        prefixes: hashes of prefixes of these samples; equal hashes are shared prefixes.
        capacity, max_samples, max_media_tokens: maximum tokens, samples and media tokens of a group; a single sample
            with more media tokens is a group of its own.
        min_shared: minimum tokens of a shared prefix.
        max_length: longer samples are in no group; by default ``capacity``.
        media_tokens: of each sample, (N,), and of each prefix, (M,); needed with ``max_media_tokens``.
    """
    assert len(lengths) == prefixes.num_samples
    forest = _Forest.from_prefixes(prefixes, min_shared)
    if max_length is None:
        max_length = capacity
    short_enough = np.flatnonzero(lengths <= max_length)
    walk = _DepthFirstWalk.of(forest, short_enough)  # samples with common prefixes are now neighbors
    if max_samples is None and max_media_tokens is None:
        walk = _pack_wide_trees(walk, lengths, capacity)

    limits = [_Limit(lengths[walk.samples], walk.shared_tokens, capacity)]
    if max_samples is not None:
        ones = np.ones_like(walk.samples)  # each sample counts as one, and shares no part of that
        limits.append(_Limit(ones, np.zeros_like(ones), max_samples))
    if max_media_tokens is not None and media_tokens is not None:
        sample_media, prefix_media = media_tokens
        shared_media = values_of_prefixes(prefix_media, walk.shared_prefixes)
        limits.append(_Limit(sample_media[walk.samples], shared_media, max_media_tokens))
    group_starts = _split_trees(walk.shared_tokens, limits)
    return walk.divide(group_starts, forest.tree_ids()[walk.samples])


class DrawnPrefixes(NamedTuple):
    """Prefixes of all N samples, for trees of those that an epoch draws or that a step has.

    Args:
        media_tokens: of each sample, (N,), and of each prefix, (M,).
        min_shared, max_media_tokens: as for ``plan_trees``.
    """

    prefixes: Prefixes
    media_tokens: tuple[IntArray, IntArray]
    min_shared: int
    max_media_tokens: int | None = None

    def build_trees(
        self, samples: Int64Array, lengths: IntArray, capacity: int, sets: Int64Array | None = None
    ) -> PrefixTrees:
        """Build trees of drawn samples, which may repeat; in the trees they are numbered from 0 to n - 1.

        Args:
            samples: numbers of the drawn samples among all, (n,). Copies of a sample do not share prefixes.
            lengths: tokens of each drawn sample, (n,).
            sets: a number for each drawn sample, (n,); samples with different numbers do not share prefixes. None if
                all may.
        """
        # Indices of the prefixes of each drawn sample, (m,), and where those of each sample begin.
        selected, offsets = gather_groups(self.prefixes.offsets, samples)
        # Prefixes with different salts get different hashes, so they are not shared.
        salts = np.repeat(_salts(samples, sets), np.diff(offsets)).astype(np.uint64)
        hashes = self.prefixes.hashes[selected] ^ (salts * _SALT_FACTOR)
        sample_media, prefix_media = self.media_tokens
        return plan_trees(
            lengths,
            Prefixes(offsets, self.prefixes.lengths[selected], hashes),
            capacity=capacity,
            min_shared=self.min_shared,
            media_tokens=(sample_media[samples], prefix_media[selected]),
            max_media_tokens=self.max_media_tokens,
        )

    def added_media(self, trees: PrefixTrees, samples: Int64Array) -> Int64Array:
        """Return the media tokens that each drawn sample, (n,), adds to its group; int64 (n,)."""
        members, _ = gather_groups(self.prefixes.offsets, samples)
        sample_media, prefix_media = self.media_tokens
        return trees.added(sample_media[samples], prefix_media[members])


_SALT_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""An odd number, so that no two salts have the same product modulo 2^64."""


def _salts(samples: Int64Array, sets: Int64Array | None) -> Int64Array:
    """Number drawn samples, (n,), so that copies of a sample, and samples of different ``sets``, differ; int64 (n,)."""
    copies = _number_copies(samples)
    if sets is None:
        return copies
    max_copies = int(copies.max(initial=0)) + 1
    return sets * max_copies + copies


def _number_copies(samples: Int64Array) -> Int64Array:
    """Number the occurrences of each sample: 0 for the first, 1 for the second; int64 (n,)."""
    by_sample = np.argsort(samples, kind="stable")
    sorted_samples = samples[by_sample]
    first_indices = np.searchsorted(sorted_samples, sorted_samples)  # of equal samples, the first
    copies = np.empty_like(samples)
    copies[by_sample] = np.arange(len(samples)) - first_indices
    return copies


@dataclass(frozen=True, eq=False)
class _DepthFirstWalk:
    """N samples, tree after tree, each in depth-first order, with the prefix that each shares with the one before it.

    Args:
        samples: int64 (N,).
        shared_tokens: int32 (N,), tokens of the shared prefix; 0 for the first sample of a tree.
        shared_prefixes: int64 (N,), index of the shared prefix among all prefixes, or ``NOTHING``.
    """

    samples: Int64Array
    shared_tokens: Int32Array
    shared_prefixes: Int64Array

    @classmethod
    def of(cls, forest: _Forest, samples: Int64Array) -> _DepthFirstWalk:
        """Sort samples, (N,), which ascend: trees by their lowest sample, and samples at the same node by number."""
        samples = samples[np.argsort(forest.preorder()[forest.last_nodes[samples]], kind="stable")]
        nodes = forest.last_nodes[samples]
        # Neighbors share the deepest node above both.
        common_nodes = np.full(len(samples), _ROOT)
        common_nodes[1:] = forest.common_ancestors(nodes[:-1], nodes[1:])
        shared_tokens = forest.tokens[common_nodes]
        tree_starts = np.flatnonzero(shared_tokens == 0)
        tree_sizes = np.diff(np.append(tree_starts, len(samples)))
        lowest_samples = np.minimum.reduceat(samples, tree_starts)  # of each tree
        by_tree = np.argsort(np.repeat(lowest_samples, tree_sizes), kind="stable")
        return cls(samples, shared_tokens, forest.prefixes[common_nodes]).select(by_tree)

    def select(self, positions: Int64Array | slice) -> _DepthFirstWalk:
        """Select the samples at ``positions``, with what they share in this walk."""
        return _DepthFirstWalk(self.samples[positions], self.shared_tokens[positions], self.shared_prefixes[positions])

    def set_shared(self, positions: Int64Array, tokens: int, prefix: int) -> None:
        """Set, in place, what the samples at ``positions`` share with the one before them."""
        self.shared_tokens[positions] = tokens
        self.shared_prefixes[positions] = prefix

    def divide(
        self, group_starts: Int64Array, tree_ids: Int64Array, part_placement: PartPlacement = "any"
    ) -> PrefixTrees:
        """Divide the walk into groups that begin at ``group_starts``, (G,), and share nothing with each other."""
        walk = copy.deepcopy(self)
        walk.set_shared(group_starts, 0, NOTHING)
        offsets = np.append(group_starts, len(walk.samples))
        return PrefixTrees(walk.samples, offsets, walk.shared_tokens, walk.shared_prefixes, tree_ids, part_placement)


def rebuild_trees(packs: PackPlan, prefixes: Prefixes, *, min_shared: int) -> PrefixTrees | None:
    """Rebuild the trees of a plan made with ``min_shared``; None if it was made from other prefixes."""
    assert packs.shared_tokens is not None, "the plan has shared prefixes"
    has_prefix = packs.shared_tokens > 0
    prefix_lengths = packs.shared_tokens[has_prefix] + 1  # samples share all of a prefix but its last token
    wanted_keys = _prefix_keys(packs.samples[has_prefix], prefix_lengths)
    keys = _prefix_keys(prefixes.owners(), prefixes.lengths)
    if not np.isin(wanted_keys, keys).all():
        return None
    shared_prefixes = np.full(packs.num_samples, NOTHING, np.int64)
    shared_prefixes[has_prefix] = np.searchsorted(keys, wanted_keys)
    tree_ids = _Forest.from_prefixes(prefixes, min_shared).tree_ids()[packs.samples]
    walk = _DepthFirstWalk(packs.samples, packs.shared_tokens, shared_prefixes)
    return walk.divide(np.flatnonzero(~has_prefix), tree_ids)


def _prefix_keys(samples: Int64Array, lengths: Int32Array) -> Int64Array:
    """Return a number for each prefix, (n,), that sorts prefixes by sample, then by length."""
    return (samples << 31) + lengths


_ROOT = 0
"""Number of the node above all trees."""


@dataclass(frozen=True, eq=False)
class _Forest:
    """Trees of H nodes: the root, which is the empty prefix, and each prefix that several samples have."""

    parents: Int64Array  # (H,), the next shorter prefix of the same samples; the root is its own parent
    tokens: Int32Array  # (H,), tokens that samples with the prefix share
    prefixes: Int64Array  # (H,), index of the prefix among all, in the first sample that has it; root: ``NOTHING``
    last_nodes: Int64Array  # (N,), the longest shared prefix of each sample, or the root

    @classmethod
    def from_prefixes(cls, prefixes: Prefixes, min_shared: int) -> _Forest:
        """Make one node of all prefixes with the same hash, if several samples have it.

        Only prefixes of more than ``min_shared`` tokens count. A node's parent is the next shorter prefix of its
        samples that is a node, or the root.
        """
        repeated = _repeated_prefixes(prefixes, min_shared)  # indices of prefixes, (X,), sample after sample
        samples = prefixes.owners()[repeated]  # the sample of each of these prefixes, (X,)
        numbers, first_of_node = _number_by_occurrence(prefixes.hashes[repeated])
        nodes = numbers + 1  # the node of each of these prefixes, (X,); the root is number 0

        # A sample lists its prefixes from short to long: the parent of a node is the one listed before it.
        parents = np.full(len(nodes), _ROOT)
        has_same_sample = samples[1:] == samples[:-1]
        parents[1:] = np.where(has_same_sample, nodes[:-1], _ROOT)
        last_nodes = np.full(prefixes.num_samples, _ROOT)
        last_nodes[samples] = nodes  # the last one assigned to a sample remains: its longest prefix
        first_prefixes = repeated[first_of_node]
        # Samples share all of a prefix but its last token, which may have different targets.
        shared_tokens = prefixes.lengths[first_prefixes] - 1
        return cls(
            parents=np.insert(parents[first_of_node], 0, _ROOT),
            tokens=np.insert(shared_tokens, 0, 0),
            prefixes=np.insert(first_prefixes, 0, NOTHING),
            last_nodes=last_nodes,
        )

    def depths(self) -> Int64Array:
        """Count the ancestors of each node, (H,): 0 for the root."""
        depths = np.zeros_like(self.parents)
        ancestors = np.arange(len(self.parents))
        while (ancestors != _ROOT).any():
            depths += ancestors != _ROOT
            ancestors = self.parents[ancestors]
        return depths

    def tree_ids(self) -> Int64Array:
        """Return the tree of each sample, (N,): the node below the root that it is in, or ``NOTHING``."""
        nodes, parents = self.last_nodes, self.parents[self.last_nodes]
        while (parents != _ROOT).any():
            nodes = np.where(parents == _ROOT, nodes, parents)
            parents = self.parents[nodes]
        return np.where(nodes == _ROOT, NOTHING, nodes)

    def preorder(self) -> Int64Array:
        """Return each node's position in depth-first order, siblings by number; (H,)."""
        depths = self.depths()
        levels = [np.flatnonzero(depths == depth) for depth in range(int(depths.max()) + 1)]
        subtree_sizes = self._subtree_sizes(levels)
        positions = np.zeros_like(depths)
        for level in levels[1:]:
            nodes = level[np.argsort(self.parents[level], kind="stable")]
            parents = self.parents[nodes]
            size_before = np.cumsum(subtree_sizes[nodes]) - subtree_sizes[nodes]  # of earlier nodes of the level
            first_siblings = np.flatnonzero(np.diff(parents, prepend=NOTHING))
            num_siblings = np.diff(np.append(first_siblings, len(nodes)))
            size_of_earlier_siblings = size_before - np.repeat(size_before[first_siblings], num_siblings)
            # A node follows its parent and the subtrees of its earlier siblings.
            positions[nodes] = positions[parents] + 1 + size_of_earlier_siblings
        return positions

    def _subtree_sizes(self, levels: Sequence[Int64Array]) -> Int64Array:
        """Count the nodes of the subtree below and with each node, (H,); ``levels`` are the nodes by depth."""
        sizes = np.ones_like(self.parents)
        for level in reversed(levels[1:]):  # from the deepest level up, without the root
            np.add.at(sizes, self.parents[level], sizes[level])
        return sizes

    def common_ancestors(self, one: Int64Array, other: Int64Array) -> Int64Array:
        """Find the deepest common ancestors of pairs of nodes, which may be one of the two."""
        depths = self.depths()
        one, other = one.copy(), other.copy()
        pairs = np.flatnonzero(one != other)
        while len(pairs):
            # The deeper node of a pair moves up to its parent, or both do.
            a, b = one[pairs], other[pairs]
            one[pairs] = np.where(depths[a] >= depths[b], self.parents[a], a)
            other[pairs] = np.where(depths[b] >= depths[a], self.parents[b], b)
            pairs = pairs[one[pairs] != other[pairs]]
        return one


def _number_by_occurrence(values: npt.NDArray[np.uint64]) -> tuple[Int64Array, Int64Array]:
    """Number the H distinct values in the order in which they first occur.

    Returns the number of each value, (X,), and the index of the first occurrence of each number, (H,).
    """
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    by_first = np.argsort(first)
    return invert_order(by_first)[inverse], first[by_first]


def _repeated_prefixes(prefixes: Prefixes, min_shared: int) -> Int64Array:
    """Return the indices of prefixes with more than ``min_shared`` tokens whose hash another one has, too; (X,)."""
    long = np.flatnonzero(prefixes.lengths > min_shared)
    # Most hashes occur once: a plain sort, which is cheap, removes them first.
    hashes = np.sort(prefixes.hashes[long])
    repeated_hashes = hashes[1:][hashes[1:] == hashes[:-1]]
    return long[np.isin(prefixes.hashes[long], repeated_hashes, kind="sort")]


class _Limit:
    """Maximum tokens, media tokens or samples of a group: consecutive samples of one tree in depth-first order.

    ``amounts`` (N,) are those of complete samples, ``shared`` (N,) the part that each shares with the one before it.
    """

    def __init__(self, amounts: IntArray, shared: IntArray, maximum: int) -> None:
        self._amounts = amounts.astype(np.int64)
        self._added_up_to = np.cumsum(self._amounts - shared)  # by each sample and all before it, (N,)
        self._maximum = maximum

    def allows(self, starts: Int64Array, stops: Int64Array) -> npt.NDArray[np.bool_]:
        """Return for groups of samples from ``starts`` to ``stops`` - 1, (G,), whether they are within the limit."""
        added_by_others = self._added_up_to[stops - 1] - self._added_up_to[starts]
        return self._amounts[starts] + added_by_others <= self._maximum

    def max_stop(self, start: int) -> int:
        """Return where the longest group from ``start`` on ends: at the first sample that would exceed the limit."""
        max_added_up_to = self._maximum - int(self._amounts[start]) + int(self._added_up_to[start])
        return int(np.searchsorted(self._added_up_to, max_added_up_to, side="right"))


def _split_trees(shared_tokens: Int32Array, limits: list[_Limit]) -> Int64Array:
    """Divide each tree into groups within all limits; return the first samples of the groups, int64 (G,), ascending.

    ``shared_tokens``, (N,), are 0 where a tree begins. A single sample is a group even if it exceeds a limit.
    """
    tree_starts = np.flatnonzero(shared_tokens == 0)
    tree_stops = np.append(tree_starts, len(shared_tokens))[1:]
    fits = np.logical_and.reduce([limit.allows(tree_starts, tree_stops) for limit in limits])
    group_starts = tree_starts[fits].tolist()
    for start, tree_stop in zip(tree_starts[~fits].tolist(), tree_stops[~fits].tolist(), strict=True):
        while start < tree_stop:
            group_starts.append(start)
            stop = min(tree_stop, *(limit.max_stop(start) for limit in limits))
            start = max(stop, start + 1)
    return np.sort(np.array(group_starts, np.int64))


MIN_BRANCHES = 64
"""Branches of a tree from which they are packed by best fit."""


def _pack_wide_trees(walk: _DepthFirstWalk, lengths: IntArray, capacity: int) -> _DepthFirstWalk:
    """Distribute the branches of wide trees over packs, each with the trunk, by best-fit decreasing.

    The trunk is the prefix that all samples of a tree share; a branch is consecutive samples that share more than that.
    Splitting in depth-first order would waste space::

        branches      5 4 2 3 1 3 beside a trunk of 2, packs of 8 tokens
        depth-first   2 5 | 2 4 2 | 2 3 1 | 2 3       four packs
        best fit      2 5 1 | 2 4 2 | 2 3 3           three
    """
    packed = copy.deepcopy(walk)
    tree_offsets = np.append(np.flatnonzero(walk.shared_tokens == 0), len(walk.samples))
    for number in np.flatnonzero(np.diff(tree_offsets) >= MIN_BRANCHES).tolist():
        positions = slice(tree_offsets[number], tree_offsets[number + 1])
        tree = _pack_wide_tree(walk.select(positions), lengths, capacity)
        packed.samples[positions] = tree.samples
        packed.shared_tokens[positions] = tree.shared_tokens
        packed.shared_prefixes[positions] = tree.shared_prefixes
    return packed


def _pack_wide_tree(tree: _DepthFirstWalk, lengths: IntArray, capacity: int) -> _DepthFirstWalk:
    """Distribute the branches of one tree over packs; return its samples in pack order.

    Trunk and branches are as in ``_pack_wide_trees``. The first branch of each pack shares nothing with the branch
    before it, the others share the trunk. A tree of few branches, or of one pack, is returned as it is.

    Args:
        tree: two or more samples of one tree.
        lengths: tokens of complete samples, by sample number, (n,).
    """
    # The first sample shares nothing with the one before it. The least that another shares is the trunk.
    trunk_position = 1 + int(tree.shared_tokens[1:].argmin())
    trunk_tokens = int(tree.shared_tokens[trunk_position])
    trunk_prefix = int(tree.shared_prefixes[trunk_position])
    branch_starts, branch_tokens = _branches_of(tree, lengths, trunk_tokens)
    space = capacity - trunk_tokens  # of a pack, beside the trunk
    if np.count_nonzero(branch_tokens <= space) < MIN_BRANCHES or branch_tokens.sum() <= space:
        return tree

    branch_order, opens_pack = _pack_branches(branch_tokens, space)
    branch_offsets = np.append(branch_starts, len(tree.samples))
    positions, new_branch_offsets = gather_groups(branch_offsets, branch_order)
    packed = tree.select(positions)
    new_branch_starts = new_branch_offsets[:-1]
    packed.set_shared(new_branch_starts, trunk_tokens, trunk_prefix)
    packed.set_shared(new_branch_starts[opens_pack], 0, NOTHING)
    return packed


def _branches_of(tree: _DepthFirstWalk, lengths: IntArray, trunk_tokens: int) -> tuple[Int64Array, Int64Array]:
    """Return where the branches of a tree begin, (B,), and the tokens of each without the trunk, (B,)."""
    branch_starts = np.flatnonzero(tree.shared_tokens <= trunk_tokens)
    added_tokens = lengths[tree.samples] - tree.shared_tokens
    added_tokens[0] -= trunk_tokens  # the trunk belongs to no branch
    return branch_starts, np.add.reduceat(added_tokens, branch_starts)


def _pack_branches(branch_tokens: Int64Array, space: int) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
    """Pack branches of ``branch_tokens``, (B,), into packs of ``space`` tokens; longer ones get a pack of their own.

    Returns the branches in pack order, (B,), and for each whether it is the first of its pack.
    """
    fits = np.flatnonzero(branch_tokens <= space)
    too_long = np.flatnonzero(branch_tokens > space)
    packs = pack_histogram(branch_tokens[fits].astype(np.int32), space, shuffle=False, seed=0, epoch=0)
    order = np.concatenate([fits[packs.samples], too_long])
    opens_pack = np.zeros(len(order), np.bool_)
    opens_pack[packs.offsets[:-1]] = True
    opens_pack[len(fits) :] = True
    return order, opens_pack


def select_samples(trees: PrefixTrees, is_selected: npt.NDArray[np.bool_]) -> PrefixTrees:
    """Keep flagged samples, (n,), at least one; two that become neighbors share what all between them shared."""
    positions: IntArray = np.flatnonzero(is_selected[trees.samples])
    # The minimum shared since the previous kept sample: tokens and position are compared as one number.
    keys = trees.shared_tokens.astype(np.int64) * len(is_selected) + np.arange(len(trees.samples))
    starts = np.append(0, positions[:-1] + 1)
    sources = np.minimum.reduceat(keys[: positions[-1] + 1], starts) % len(is_selected)
    offsets = np.unique(np.searchsorted(positions, trees.offsets))
    walk = _DepthFirstWalk(trees.samples[positions], trees.shared_tokens[sources], trees.shared_prefixes[sources])
    return walk.divide(offsets[:-1], trees.tree_ids[positions], trees.part_placement)
