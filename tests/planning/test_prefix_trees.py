"""Trees of samples that begin alike, found by hashes: what they share, in which groups, and how these are packed."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtool.planning.cost import CostModel
from packtool.planning.epoch import assign_packs, plan_epoch
from packtool.planning.options import PlanOptions
from packtool.planning.pack_plan import PackPlan, split_to_count
from packtool.planning.packing import pack, pack_singletons, share_drawn_prefixes, share_prefixes_in_steps
from packtool.planning.prefix_branches import Branch, find_branches
from packtool.planning.prefix_trees import NOTHING, DrawnPrefixes, Prefixes, PrefixTrees, plan_trees, rebuild_trees
from packtool.planning.summary import pack_costs
from packtool.planning.towers import TowerWork

Rows = list[list[int]]


def prefixes_of(rows: Rows, ends: Sequence[Sequence[int]]) -> Prefixes:
    """Hashes of the first so many tokens of each row."""
    flat = [(end, row[:end]) for row, sample_ends in zip(rows, ends, strict=True) for end in sample_ends]
    hashes = [int.from_bytes(hashlib.sha256(bytes(prefix)).digest()[:8], "little") for _, prefix in flat]
    offsets = np.cumsum([0, *map(len, ends)])
    return Prefixes(offsets, np.array([end for end, _ in flat], np.int32), np.array(hashes, np.uint64))


def planned_trees(
    rows: Rows, ends: Sequence[Sequence[int]] | None = None, **options: int
) -> tuple[PrefixTrees, np.ndarray]:
    lengths = np.array([len(row) for row in rows], np.int32)
    given_prefixes = prefixes_of(rows, ends or [range(1, len(row) + 1) for row in rows])
    return plan_trees(lengths, given_prefixes, **({"capacity": 1000, "min_shared": 1} | options)), lengths


def test_trees_match_the_diagram() -> None:
    a, b, c = [1] * 5, [2] * 2, [3] * 2
    rows = [[*a, *b], [*a, *c, 4], [*a, *b], [*a, 5, 5, 5, 5], [6] * 5]
    trees, lengths = planned_trees(rows, [[5, 7], [5, 7], [5, 7], [5], [5]])
    assert trees.samples.tolist() == [1, 3, 0, 2, 4]
    assert lengths[trees.samples].tolist() == [8, 9, 7, 7, 5]
    assert trees.shared_tokens.tolist() == [0, 4, 4, 6, 0]
    assert trees.new_tokens(lengths).tolist() == [8, 5, 3, 1, 5]
    assert trees.offsets.tolist() == [0, 4, 5]
    assert trees.sums_per_group(trees.new_tokens(lengths)).tolist() == [17, 5]
    assert trees.num_shared_tokens == 14
    assert trees.saved(lengths) == pytest.approx(14 / 36)


def test_branches_match_the_diagram() -> None:
    new, shared = np.array([8, 5, 3, 1, 5]), np.array([0, 4, 4, 6, 0])
    assert find_branches(new, shared) == [
        Branch(0, 4, 0, 4, NOTHING),  # A
        Branch(0, 1, 4, 8, 0),  # (1)
        Branch(1, 2, 4, 9, 0),  # (3)
        Branch(2, 4, 4, 6, 0),  # B
        Branch(2, 3, 6, 7, 3),  # (0)
        Branch(3, 4, 6, 7, 3),  # (2)
        Branch(4, 5, 0, 5, NOTHING),  # (4)
    ]
    assert find_branches(new) == [Branch(i, i + 1, 0, tokens, NOTHING) for i, tokens in enumerate(new.tolist())]
    assert find_branches(new[:0], shared[:0]) == []


@given(st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=9), max_size=12))
def test_branches_hold_every_token_of_every_sample(rows: Rows) -> None:
    trees, lengths = planned_trees(rows)
    new = trees.new_tokens(lengths)
    branches = find_branches(new, trees.shared_tokens)
    assert sum(branch.num_tokens for branch in branches) == new.sum()
    for place, sample in enumerate(trees.samples):
        branches_of_sample = [branch for branch in branches if branch.first_sample <= place < branch.stop_sample]
        assert [branch.start for branch in branches_of_sample] == [
            0,
            *(branch.stop for branch in branches_of_sample[:-1]),
        ]
        assert branches_of_sample[-1].stop == lengths[sample]
        assert [branch.num_samples == 1 for branch in branches_of_sample] == [False] * (len(branches_of_sample) - 1) + [
            True
        ]
        assert [branch.parent for branch in branches_of_sample] == [
            NOTHING,
            *(branches.index(branch) for branch in branches_of_sample[:-1]),
        ]
        for branch in branches_of_sample:
            inside = {
                tuple(rows[row_index][: branch.stop])
                for row_index in trees.samples[branch.first_sample : branch.stop_sample]
            }
            assert len(inside) == 1


def test_each_part_of_a_split_tree_computes_the_prefix() -> None:
    rows = [[1] * 10 + [2 + index] * 3 for index in range(5)]
    ends = [[10]] * 5
    trees, lengths = planned_trees(rows, ends, capacity=22)
    assert trees.new_tokens(lengths).tolist() == [13, 4, 4, 13, 4]
    assert trees.offsets.tolist() == [0, 3, 5]
    trees, lengths = planned_trees(rows, ends, max_samples=2)
    assert np.diff(trees.offsets).tolist() == [2, 2, 1]
    trees, lengths = planned_trees(rows, ends, capacity=13)
    assert trees.num_shared_tokens == 0
    assert trees.offsets.tolist() == [0, 1, 2, 3, 4, 5]


@settings(max_examples=60)
@given(
    media=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    of_prefix=st.integers(0, 5),
    max_media_tokens=st.integers(3, 20),
)
def test_groups_respect_the_second_budget(media: list[int], of_prefix: int, max_media_tokens: int) -> None:
    """Ten tokens that all samples begin with, and media of each behind those of the prefix."""
    rows = [[1] * 10 + [2 + index] * 3 for index in range(len(media))]
    prefixes = prefixes_of(rows, [[10]] * len(rows))
    values, prefix_values = np.array(media) + of_prefix, np.full(len(rows), of_prefix)
    lengths = np.array([len(row) for row in rows], np.int32)
    given_prefixes = {"capacity": 40, "min_shared": 1}
    trees = plan_trees(
        lengths, prefixes, **given_prefixes, media_tokens=(values, prefix_values), max_media_tokens=max_media_tokens
    )
    assert sorted(trees.samples.tolist()) == list(range(len(rows)))
    sums = trees.sums_per_group(trees.added(values, prefix_values)[trees.samples])
    assert ((sums <= max_media_tokens) | (np.diff(trees.offsets) == 1)).all()
    assert (trees.sums_per_group(trees.new_tokens(lengths)) <= 40).all()
    ample = plan_trees(lengths, prefixes, **given_prefixes, media_tokens=(values, prefix_values), max_media_tokens=1000)
    assert ample.offsets.tolist() == plan_trees(lengths, prefixes, **given_prefixes).offsets.tolist()


def test_short_prefixes_are_not_shared() -> None:
    rows = [[1, 1, 1, 2], [1, 1, 1, 3]]
    assert planned_trees(rows, [[3], [3]], min_shared=2)[0].shared_tokens.tolist() == [0, 2]
    assert planned_trees(rows, [[3], [3]], min_shared=3)[0].shared_tokens.tolist() == [0, 0]


def test_media_of_a_prefix_count_once() -> None:
    rows = [[1, 1, 2], [1, 1, 3], [4]]
    trees, _ = planned_trees(rows, [[2], [2], []])
    media, of_prefixes = np.array([7, 9, 5]), np.array([6, 6])
    assert trees.samples.tolist() == [0, 1, 2]
    assert trees.added(media, of_prefixes).tolist() == [7, 3, 5]
    assert planned_trees(rows, [[2], [2], []], max_length=2)[0].added(media, of_prefixes).tolist() == [0, 0, 5]


def test_groups_are_packed_and_their_samples_stay_together() -> None:
    rows = [[1] * 10 + [2 + index // 4, 9 - index % 4] for index in range(8)] + [[7] * 4, [8] * 5]
    trees, lengths = planned_trees(rows, min_shared=5, capacity=20)
    groups = pack(trees.sums_per_group(trees.new_tokens(lengths)), 20, seed=0)
    plan = trees.expand(groups, lengths)
    assert sorted(plan.samples.tolist()) == list(range(10))
    assert plan.tokens_per_pack().tolist() == groups.tokens_per_pack().tolist()
    assert plan.num_packs == groups.num_packs
    together = {frozenset(plan.pack(pack_index).tolist()) for pack_index in range(plan.num_packs)}
    walks = [trees.samples[a:b].tolist() for a, b in zip(trees.offsets[:-1], trees.offsets[1:], strict=True)]
    assert all(any(set(walk) <= members for members in together) for walk in walks)


def test_no_samples_and_no_prefixes() -> None:
    trees, lengths = planned_trees([])
    assert trees.offsets.tolist() == [0]
    assert trees.saved(lengths) == 0
    assert trees.expand(pack([], 10, seed=0), lengths).num_packs == 0
    trees, lengths = planned_trees([[1], [1]], [[], []])
    assert trees.samples.tolist() == [0, 1]
    assert trees.shared_prefixes.tolist() == [NOTHING, NOTHING]
    assert trees.expand(pack([1, 1], 10, seed=0), lengths).num_samples == 2


def options_for(capacity: int, **given_prefixes: Any) -> PlanOptions:
    cost = CostModel(per_token=3.0, per_square=0.5)
    return PlanOptions(
        **({"max_length": capacity, "packing_length": capacity, "cost": cost, "world_size": 2} | given_prefixes)
    )


def test_epoch_is_planned_by_computed_tokens() -> None:
    """Forty pictures of ten tokens with four questions of one to three; their attention is that of the rows alone."""
    rows = [[1 + i, 2 + i, *[90] * 8, *[5 + k] * (1 + k % 3)] for i in range(40) for k in range(4)]
    rows.append([99] * 70)
    lengths = np.array([len(row) for row in rows], np.int32)
    given_prefixes = prefixes_of(rows, [[10]] * len(rows[:-1]) + [[]])
    targets = np.ones(len(rows), np.int64)
    trees = plan_trees(lengths, given_prefixes, capacity=60, min_shared=5, max_length=50)
    towers = TowerWork(np.append(np.full(160, 100), 0), np.append(np.ones(160, np.int64), 0))
    added = TowerWork(trees.added(towers.flops, np.full(len(given_prefixes.lengths), 100)), towers.num_media)
    options = options_for(60, max_length=50)
    plans = [plan_epoch(lengths, targets, options, seed=1, epoch=epoch, towers=added, trees=trees) for epoch in (0, 1)]
    plan = plans[0]
    assert plan.summary.num_filtered == 1
    assert plan.summary.num_samples == 160
    assert plan.packs.num_packs == plans[1].packs.num_packs
    assert plan.packs.samples.tolist() != plans[1].packs.samples.tolist()
    without_trees = plan_epoch(lengths, targets, options, seed=1, towers=towers)
    assert plan.summary.num_target_tokens == without_trees.summary.num_target_tokens
    assert plan.packs.num_packs < 0.5 * without_trees.packs.num_packs
    for pack_index in range(plan.packs.num_packs):
        members = [rows[i] for i in plan.packs.pack(pack_index)]
        # Without the last token of what is alike, which each question has for itself.
        distinct = {tuple(row[:end]) for row in members for end in range(1, 10)}
        num_own = sum(len(row) - 9 for row in members)
        assert plan.packs.tokens_per_pack()[pack_index] == len(distinct) + num_own
        prefixes = len({tuple(row[:10]) for row in members})
        squares = sum(len(row) ** 2 for row in members) - 81 * (len(members) - prefixes)
        assert plan.packs.sum_squares_per_pack()[pack_index] == squares
    costs = pack_costs(plan.packs, options.cost, targets, added)  # type: ignore[arg-type]
    pictures = [len({tuple(rows[i][:10]) for i in plan.packs.pack(k)}) for k in range(plan.packs.num_packs)]
    assert costs.tolist() == pytest.approx(
        (3 * plan.packs.tokens_per_pack() + 0.5 * plan.packs.sum_squares_per_pack() + 100 * np.array(pictures)).tolist()
    )


def test_rest_of_an_epoch_keeps_shared_prefixes() -> None:
    rows = [[1 + i, *[90] * 8, k] for i in range(12) for k in range(3)]
    lengths = np.array([len(row) for row in rows], np.int32)
    trees = plan_trees(lengths, prefixes_of(rows, [[9]] * len(rows)), capacity=30, min_shared=5)
    plan = plan_epoch(lengths, np.ones(36, np.int64), options_for(30), seed=0, trees=trees)
    remaining = plan.packs_from(2)
    assert 0 < remaining.num_samples < 36
    assert remaining.tokens_per_pack().max() <= 30
    reassigned = assign_packs(remaining, np.ones(36, np.int64), options_for(30, world_size=1))
    assert reassigned.summary.num_samples == remaining.num_samples
    assert reassigned.packs.sum_squares_per_pack().sum() == remaining.sum_squares_per_pack().sum()
    assert remaining.shared_tokens is not None
    unlike = dataclasses.replace(remaining, shared_tokens=np.zeros_like(remaining.shared_tokens))
    assert unlike.fingerprint != remaining.fingerprint != dataclasses.replace(remaining, shared_tokens=None).fingerprint


def test_groups_are_in_the_order_of_their_first_samples() -> None:
    rows = [[7] * 5, [1] * 9, [8] * 5, [2] * 9, [1] * 9, [2] * 9]
    trees, _ = planned_trees(rows, [[], [8], [], [8], [8], [8]])
    assert trees.samples.tolist() == [0, 1, 4, 2, 3, 5]
    assert trees.offsets.tolist() == [0, 1, 3, 4, 6]


def test_trees_are_rebuilt_from_a_plan() -> None:
    rows = [[1 + i, *[90] * 8, k] for i in range(12) for k in range(3)]
    lengths = np.array([len(row) for row in rows], np.int32)
    prefixes = prefixes_of(rows, [[9]] * len(rows))
    trees = plan_trees(lengths, prefixes, capacity=30, min_shared=5)
    plan = plan_epoch(lengths, np.ones(36, np.int64), options_for(30), seed=0, trees=trees)
    result = rebuild_trees(plan.packs, prefixes, min_shared=5)
    assert result is not None
    media, of_prefixes = np.full(36, 4), np.full(len(prefixes.lengths), 4)
    assert result.added(media, of_prefixes).tolist() == trees.added(media, of_prefixes).tolist()
    assert result.num_shared_tokens == trees.num_shared_tokens
    assert rebuild_trees(plan.packs, prefixes_of(rows, [[8]] * len(rows)), min_shared=5) is None
    assert rebuild_trees(plan.packs, prefixes_of(rows, [[]] * len(rows)), min_shared=5) is None


some_rows = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=9), max_size=12)


def _alike(one: list[int], other: list[int]) -> int:
    return next(
        (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )


@settings(max_examples=200)
@given(
    rows=some_rows,
    min_shared=st.integers(0, 4),
    capacity=st.integers(9, 40),
    max_samples=st.integers(1, 5),
)
def test_neighbors_share_their_longest_common_prefix(
    rows: Rows, min_shared: int, capacity: int, max_samples: int
) -> None:
    trees, lengths = planned_trees(rows, min_shared=min_shared, capacity=capacity, max_samples=max_samples)
    assert sorted(trees.samples.tolist()) == list(range(len(rows)))
    starts = set(trees.offsets[:-1].tolist())
    for place in range(len(rows)):
        before, here = (rows[int(trees.samples[at])] for at in (max(place - 1, 0), place))
        num_common = _alike(before, here) - 1 if place else 0
        assert trees.shared_tokens[place] == (0 if place in starts else num_common)
        assert place in starts or num_common >= min_shared
    tokens, sizes = trees.sums_per_group(trees.new_tokens(lengths)), np.diff(trees.offsets)
    assert (tokens <= capacity).all()
    assert (sizes <= max_samples).all()
    assert trees.new_tokens(lengths).min(initial=1) >= 1
    # Nothing is cut that would have fitted.
    for group in range(len(sizes) - 1):
        first_sample = int(trees.offsets[group + 1])
        num_common = _alike(rows[int(trees.samples[first_sample - 1])], rows[int(trees.samples[first_sample])]) - 1
        if num_common >= max(min_shared, 1):
            assert (
                sizes[group] == max_samples
                or tokens[group] + lengths[trees.samples[first_sample]] - num_common > capacity
            )


@settings(max_examples=200)
@given(rows=some_rows, data=st.data())
def test_shared_prefixes_are_equal(rows: Rows, data: st.DataObject) -> None:
    """Whichever prefixes of each sample were kept."""
    ends = [sorted(data.draw(st.sets(st.integers(1, len(row))))) for row in rows]
    trees, lengths = planned_trees(rows, ends)
    for place in range(1, len(rows)):
        one, other = (rows[int(row_index)] for row_index in trees.samples[place - 1 : place + 1])
        assert trees.shared_tokens[place] <= max(_alike(one, other) - 1, 0)
    replanned, _ = planned_trees(rows, ends)
    assert replanned.samples.tolist() == trees.samples.tolist()
    assert trees.expand(pack(trees.sums_per_group(trees.new_tokens(lengths)), 1000, seed=1), lengths).num_tokens == int(
        trees.new_tokens(lengths).sum()
    )


def check_drawn(plan: PackPlan, drawn: list[int], rows: Rows) -> None:
    """The drawn samples, each with a prefix that it has in common with the one before it, which is no copy of it."""
    assert sorted(plan.samples.tolist()) == sorted(drawn)
    assert plan.full_lengths.tolist() == [len(rows[sample]) for sample in plan.samples.tolist()]
    shared = np.zeros(len(drawn), np.int64) if plan.shared_tokens is None else plan.shared_tokens
    for index in np.flatnonzero(shared).tolist():
        before, sample = plan.samples[index - 1 : index + 1].tolist()
        assert rows[before][: shared[index]] == rows[sample][: shared[index]]
        assert before != sample


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=8), st.data())
def test_drawn_samples_keep_their_steps_or_their_packs_limits(rows: Rows, data: st.DataObject) -> None:
    """Repeated ones among them; in steps of a number of samples, and in packs."""
    drawn = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=20))
    size, capacity = data.draw(st.integers(1, 20)), data.draw(st.integers(9, 30))
    samples = np.array(drawn)
    lengths = np.array([len(row) for row in rows], np.int32)
    prefixes = prefixes_of(rows, [range(1, len(row) + 1) for row in rows])
    media = np.zeros(len(rows), np.int64), np.zeros(len(prefixes.lengths), np.int64)
    sharing = DrawnPrefixes(prefixes, media, min_shared=1)
    singles = pack_singletons(lengths[samples], capacity, seed=0, shuffle=False)
    plan = share_prefixes_in_steps(dataclasses.replace(singles, samples=samples), sharing, size)
    check_drawn(plan, drawn, rows)
    for start in range(0, len(drawn), size):
        step = slice(start, start + size)
        assert sorted(plan.samples[step].tolist()) == sorted(drawn[step])
        assert plan.shared_tokens is None or plan.shared_tokens[start] == 0
    options = PlanOptions(max_length=capacity, packing_length=capacity, world_size=1)
    packs = dataclasses.replace(pack(lengths[samples], capacity, seed=0), mixture="drawn")
    packs = dataclasses.replace(packs, samples=samples[packs.samples])
    shared = share_drawn_prefixes(packs, sharing, options, seed=0, epoch=0)
    check_drawn(shared, drawn, rows)
    assert shared.mixture == "drawn"
    assert shared.tokens_per_pack().max() <= capacity
    split = split_to_count(shared, len(drawn))  # a pack for each
    check_drawn(split, drawn, rows)
    assert split.num_packs == len(drawn)


def test_copies_count_as_the_one_that_adds_most() -> None:
    """In one group, sample 0 continues the prefix of sample 1; in the other, its copy is alone."""
    trees = PrefixTrees(
        samples=np.array([1, 0, 0]),
        offsets=np.array([0, 2, 3]),
        shared_tokens=np.array([0, 5, 0], np.int32),
        shared_prefixes=np.array([NOTHING, 0, NOTHING]),
        tree_ids=np.array([0, 0, NOTHING]),
    )
    assert trees.added(np.array([100, 100, 7]), np.array([90])).tolist() == [100, 100, 0]
