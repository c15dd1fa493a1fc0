"""Trees of many branches are cut where these fit best."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtool.planning import prefix_trees
from packtool.planning.prefix_trees import PrefixTrees, plan_trees
from tests.planning.test_prefix_trees import prefixes_of

TRUNK, BRANCHES = 4, 64


def planned_trees(tails: list[list[int]], capacity: int, **options: int) -> tuple[PrefixTrees, np.ndarray]:
    """Trees of rows that begin with one trunk; each tail is its sizes: a fork behind the first, if it has two."""
    rows, ends = [], []
    for tree_index, (num_own, *others) in enumerate(tails):
        for place, more in enumerate(others or [0]):
            rows.append([1] * (TRUNK + 1) + [10 + tree_index] * num_own + [9 + place] * more)
            ends.append([TRUNK + 1, TRUNK + 1 + num_own] if num_own else [TRUNK + 1])
    lengths = np.array([len(row) for row in rows], np.int32)
    return plan_trees(lengths, prefixes_of(rows, ends), capacity=capacity, min_shared=1, **options), lengths


def test_packs_match_the_diagram(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_trees, "MIN_BRANCHES", 2)
    lengths, capacity = np.array([5, 4, 2, 3, 1, 3]) + 2, 8
    walk = prefix_trees._DepthFirstWalk(
        np.arange(6), np.array([0, 2, 2, 2, 2, 2], np.int32), np.array([-1, 7, 7, 7, 7, 7])
    )
    packed = prefix_trees._pack_wide_trees(walk, lengths, capacity)
    assert packed.samples.tolist() == [0, 4, 1, 2, 3, 5]
    assert packed.shared_tokens.tolist() == [0, 2, 0, 2, 0, 2]
    assert packed.shared_prefixes.tolist() == [-1, 7, -1, 7, -1, 7]


@settings(max_examples=40)
@given(
    tails=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=BRANCHES, max_size=90),
    capacity=st.integers(TRUNK + 20, 60),
)
def test_every_sample_once_and_no_pack_over_capacity(tails: list[list[int]], capacity: int) -> None:
    trees, lengths = planned_trees(tails, capacity)
    assert sorted(trees.samples.tolist()) == list(range(len(lengths)))
    tokens = trees.sums_per_group(trees.new_tokens(lengths))
    assert (tokens <= capacity).all()
    assert ((trees.shared_tokens == 0) == np.isin(np.arange(len(lengths)), trees.offsets)).all()
    # As many rows a tree as there are keeps to the walk.
    walk, _ = planned_trees(tails, capacity, max_samples=len(lengths))
    assert len(trees.offsets) <= len(walk.offsets)
    # Neighbours have no more in common than their branch, and no less than the trunk.
    branch = np.repeat(np.arange(len(tails)), [max(len(tail) - 1, 1) for tail in tails])[trees.samples]
    same = branch[1:] == branch[:-1]
    assert np.isin(trees.shared_tokens[1:][~same], [0, TRUNK]).all()
    firsts = np.array([tail[0] for tail in tails])[branch[1:]]
    assert (trees.shared_tokens[1:][same] <= TRUNK + firsts[same]).all()
    replanned, _ = planned_trees(tails, capacity)
    assert replanned.samples.tolist() == trees.samples.tolist()


def test_a_branch_longer_than_a_pack_is_split() -> None:
    tails = [[9, *[5] * 9], *[[3]] * BRANCHES]
    trees, lengths = planned_trees(tails, 30)
    assert (trees.sums_per_group(trees.new_tokens(lengths)) <= 30).all()
    groups = np.repeat(np.arange(len(trees.offsets) - 1), np.diff(trees.offsets))
    long = groups[trees.samples < 9]
    assert len(set(long.tolist())) > 1
    assert not np.isin(groups[trees.samples >= 9], long).any()
