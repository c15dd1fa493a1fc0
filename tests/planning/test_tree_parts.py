"""Parts of trees that were cut: in one step, or apart, and nothing else of a plan is touched."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtool.planning import tree_parts
from packtool.planning.epoch import assign_packs, plan_epoch
from packtool.planning.options import PlanOptions
from packtool.planning.pack_plan import PackPlan, select_packs
from packtool.planning.packing import pack_trees
from packtool.planning.prefix_trees import NOTHING, PrefixTrees, plan_trees, rebuild_trees, select_samples
from packtool.planning.tree_parts import TreeParts, separate_groups
from tests.planning.test_prefix_trees import options_for, prefixes_of

CAPACITY = 30


def questions(each: list[int]) -> tuple[np.ndarray, PrefixTrees, Any]:
    """So many questions of three tokens about each picture of ten; a pack has room for five."""
    rows = [
        [1 + picture, *[90] * 9, 40 + question, 2, 3] for picture, num in enumerate(each) for question in range(num)
    ]
    lengths = np.array([len(row) for row in rows], np.int32)
    prefixes = prefixes_of(rows, [[10]] * len(rows))
    return lengths, plan_trees(lengths, prefixes, capacity=CAPACITY, min_shared=5), prefixes


def steps_of_trees(plan: Any, trees: PrefixTrees) -> dict[int, list[int]]:
    """The steps that the packs of each tree are in, once for each pack."""
    numbers = dict(zip(trees.samples.tolist(), trees.tree_ids.tolist(), strict=True))
    step_of = plan.steps.locations()[:, 0].tolist()
    pairs = {(numbers[int(i)], k) for k in range(plan.packs.num_packs) for i in plan.packs.pack(k)}
    result: dict[int, list[int]] = {}
    for tree, pack_index in sorted(pairs):
        if tree != NOTHING:
            result.setdefault(tree, []).append(step_of[pack_index])
    return result


def planned_epoch(
    each: list[int], parts: str, options: PlanOptions, **arguments: Any
) -> tuple[Any, PrefixTrees, np.ndarray]:
    lengths, trees, _ = questions(each)
    trees = replace(trees, part_placement=parts)  # type: ignore[arg-type]
    targets = np.ones(len(lengths), np.int64)
    return plan_epoch(lengths, targets, options, seed=3, trees=trees, **arguments), trees, lengths


def test_tree_longer_than_a_pack_stays_in_one_step() -> None:
    """Ten trees of two packs, and forty rows that share nothing: each tree in one of the steps of four packs."""
    each, options = [8] * 10 + [1] * 40, options_for(CAPACITY, gradient_accumulation_steps=2)
    for epoch in (0, 1):
        epoch_plan, trees, _ = planned_epoch(each, "any", options, epoch=epoch)
        plan, _, _ = planned_epoch(each, "together", options, epoch=epoch)
        assert any(len(set(steps)) > 1 for steps in steps_of_trees(epoch_plan, trees).values())
        assert all(len(set(steps)) == 1 for steps in steps_of_trees(plan, trees).values())
        assert plan.packs.fingerprint == epoch_plan.packs.fingerprint, "packs and what they hold stay as they were"
        assert plan.steps.step_offsets.tolist() == epoch_plan.steps.step_offsets.tolist()
        assert sorted(plan.steps.order.tolist()) == list(range(plan.packs.num_packs))
        # What is moved is moved no further than it must be: steps that no tree is in lose no more than they must.
        assert plan.packs_fingerprint == epoch_plan.packs_fingerprint


def test_split_trees_stay_in_one_step_for_any_ranks_and_balance() -> None:
    each = [12, 20] * 6 + [1] * 60
    for world_size in (2, 4, 8):
        for balance in ("none", "within-step", "window"):
            options = options_for(CAPACITY, world_size=world_size, gradient_accumulation_steps=2, balance=balance)
            plan, trees, _ = planned_epoch(each, "together", options)
            assert all(len(set(steps)) == 1 for steps in steps_of_trees(plan, trees).values())


def test_rest_of_an_epoch_keeps_trees_in_one_step_with_other_ranks() -> None:
    plan, trees, lengths = planned_epoch(
        [8] * 12 + [1] * 40, "together", options_for(CAPACITY, gradient_accumulation_steps=2)
    )
    remaining = plan.packs_from(4)
    for world_size in (1, 3, 8):
        options = options_for(CAPACITY, world_size=world_size, gradient_accumulation_steps=2)
        reassigned = assign_packs(remaining, np.ones(len(lengths), np.int64), options, trees=trees)
        assert all(len(set(steps)) == 1 for steps in steps_of_trees(reassigned, trees).values())


def test_trees_of_a_saved_plan_and_of_a_part_of_the_data() -> None:
    lengths, trees, prefixes = questions([8] * 8 + [1] * 30)
    trees, options = replace(trees, part_placement="together"), options_for(CAPACITY, gradient_accumulation_steps=2)
    targets = np.ones(len(lengths), np.int64)
    plan = plan_epoch(lengths, targets, options, seed=3, trees=trees)
    result = rebuild_trees(plan.packs, prefixes, min_shared=5)
    assert result is not None
    reassigned = assign_packs(plan.packs, targets, options, trees=replace(result, part_placement="together"))
    assert reassigned.fingerprint == plan.fingerprint
    untrained = np.flatnonzero(np.arange(len(lengths)) % 5)
    selected = select_samples(trees, np.isin(np.arange(len(lengths)), untrained))
    epoch_plan = plan_epoch(lengths, targets, options, seed=3, trees=selected, samples=untrained)
    assert all(len(set(steps)) == 1 for steps in steps_of_trees(epoch_plan, selected).values())


def test_plans_without_split_trees_do_not_change() -> None:
    for parts in ("together", "apart"):
        options = options_for(CAPACITY)
        plan, _, _ = planned_epoch([4] * 12 + [1] * 9, parts, options)
        assert plan.fingerprint == planned_epoch([4] * 12 + [1] * 9, "any", options)[0].fingerprint
        assert TreeParts.of(plan.packs, replace(questions([4] * 12 + [1] * 9)[1], part_placement=parts)) is None  # type: ignore[arg-type]


def test_trees_split_by_max_rows_are_in_different_packs_and_steps() -> None:
    rows = [[1 + picture, *[90] * 9, 40 + question, 2, 3] for picture in range(12) for question in range(6)]
    lengths = np.array([len(row) for row in rows], np.int32)
    arguments: dict[str, Any] = {"capacity": 40, "min_shared": 5, "max_samples": 2}
    prefixes = prefixes_of(rows, [[10]] * len(rows))
    trees = plan_trees(lengths, prefixes, **arguments)
    targets, met = np.ones(len(rows), np.int64), []
    for parts in ("any", "apart"):
        split_trees = replace(trees, part_placement=parts)  # type: ignore[arg-type]
        worst = 0
        for seed in range(8):
            plan = plan_epoch(lengths, targets, options_for(40), seed=seed, trees=split_trees)
            steps = steps_of_trees(plan, trees).values()
            worst += sum(len(result) - len(set(result)) for result in steps)
            worst += sum(3 - len(result) for result in steps)  # two parts in one pack
            assert plan.packs.tokens_per_pack().max() <= 40
            assert sorted(plan.packs.samples.tolist()) == list(range(len(rows)))
        met.append(worst)
    assert met[0] > 20
    assert met[1] == 0


def test_exchanges_keep_the_media_budget() -> None:
    """Two groups of one tree in a pack, and others of as many tokens that have too many media."""
    groups = PackPlan(np.arange(6), np.array([0, 2, 4, 6]), np.full(6, 5, np.int32), 10)
    trees, media = np.array([7, 7, 8, NOTHING, NOTHING, NOTHING]), np.array([1, 1, 9, 9, 2, 1])
    free = separate_groups(groups, trees, None, None)
    assert all(Counter(trees[free.pack(k)].tolist())[7] < 2 for k in range(3))
    bounded = separate_groups(groups, trees, media, 3)
    assert sorted(bounded.pack(1).tolist()) == [2, 3]
    assert [int(media[bounded.pack(k)].sum()) for k in (0, 2)] in ([2, 3], [3, 2])
    assert all(Counter(trees[bounded.pack(k)].tolist())[7] < 2 for k in range(3))
    assert separate_groups(groups, np.full(6, NOTHING), None, None) is groups


def parts_of(packs_of_trees: list[list[int]], placement: str) -> TreeParts:
    pairs = [(tree, pack) for tree, packs in enumerate(packs_of_trees) for pack in sorted(packs)]
    trees, packs = np.array(pairs).reshape(-1, 2).T
    return TreeParts(trees, packs, placement)  # type: ignore[arg-type]


drawn_trees = st.integers(2, 24).flatmap(
    lambda num: st.tuples(
        st.just(num),
        st.lists(st.lists(st.integers(0, num - 1), min_size=2, max_size=5, unique=True), min_size=1, max_size=8),
    )
)


@settings(max_examples=100)
@given(num_and_trees=drawn_trees, each=st.integers(1, 8), data=st.data())
def test_reordering_keeps_all_packs_and_satisfies_more_trees(
    num_and_trees: tuple[int, list[list[int]]], each: int, data: st.DataObject
) -> None:
    num, trees = num_and_trees
    order = np.array(data.draw(st.permutations(range(num))))
    before, after = np.empty(num, np.int64), np.empty(num, np.int64)
    before[order] = np.arange(num) // each
    for placement in ("together", "apart"):
        parts = parts_of(trees, placement)
        placed = parts.reorder(order, each)
        assert sorted(placed.tolist()) == list(range(num))
        assert placed.tolist() == parts.reorder(order, each).tolist()
        after[placed] = np.arange(num) // each
        was, now = parts.figures(before), parts.figures(after)
        if placement == "apart":
            meeting = [
                sum(len(packs) - len({int(pack_steps[k]) for k in packs}) for packs in trees)
                for pack_steps in (before, after)
            ]
            assert meeting[1] <= meeting[0]
        # A tree alone fits wherever a step has as many packs.
        elif len(trees) == 1 and len(trees[0]) <= each and num >= 2 * each:
            assert now["of_them_in_one_step"] == 1
        assert now["trees_in_several_packs"] == was["trees_in_several_packs"] == len(trees)


def test_a_tree_of_more_packs_than_a_step_keeps_its_order() -> None:
    order = np.random.default_rng(0).permutation(40)
    assert parts_of([list(range(9))], "together").reorder(order, 8).tolist() == order.tolist()
    reordered = parts_of([list(range(9)), [20, 21]], "together").reorder(order, 8).tolist()
    assert reordered.index(20) // 8 == reordered.index(21) // 8


def test_in_a_stream_parts_follow_one_another() -> None:
    order = parts_of([[1, 5], [5, 8], [2, 9]], "together").move_together(10)
    assert order.tolist() == [0, 1, 5, 8, 2, 9, 3, 4, 6, 7]


def test_impossible_separation_terminates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pack has the same two trees: nothing to be done, and not tried for ever."""
    monkeypatch.setattr(tree_parts, "_MAX_ATTEMPTS", 50)
    parts = parts_of([list(range(12))] * 2, "apart")
    assert parts.reorder(np.arange(12), 4).tolist() == list(range(12))
    groups = PackPlan(np.arange(8), np.array([0, 4, 8]), np.full(8, 5, np.int32), 20)
    assert separate_groups(groups, np.zeros(8, np.int64), None, None).samples.tolist() == list(range(8))


def test_media_budget_splits_trees() -> None:
    lengths, _, prefixes = questions([6] * 6 + [1] * 30)
    media = np.full(len(lengths), 3)
    trees = plan_trees(
        lengths,
        prefixes,
        capacity=CAPACITY,
        min_shared=5,
        media_tokens=(media, np.full(len(prefixes.lengths), 1)),
        max_media_tokens=9,
    )
    trees = replace(trees, part_placement="together")
    options = options_for(CAPACITY, max_media_tokens_per_pack=9, gradient_accumulation_steps=2)
    added = trees.added(media, np.full(len(prefixes.lengths), 1))
    targets = np.ones(len(lengths), np.int64)
    plan = plan_epoch(lengths, targets, options, seed=1, trees=trees, media_tokens=added)
    assert TreeParts.of(plan.packs, trees) is not None
    assert all(len(set(steps)) == 1 for steps in steps_of_trees(plan, trees).values())
    split_trees = replace(trees, part_placement="apart")
    packs = pack_trees(split_trees, lengths, CAPACITY, options, seed=1, media_tokens=added)
    assert packs.sums_per_pack(added[packs.samples]).max() <= 9
    selected = select_packs(packs, np.arange(1))
    assert TreeParts.of(selected, split_trees) is None, "one pack has no tree that is in several"


@settings(max_examples=60, deadline=None)
@given(
    each=st.lists(st.integers(1, 14), min_size=1, max_size=20),
    parts=st.sampled_from(["together", "apart"]),
    first_ranks=st.sampled_from([1, 2, 4]),
    later_ranks=st.sampled_from([1, 2, 4]),
    data=st.data(),
)
def test_steps_are_kept_on_other_ranks(
    each: list[int], parts: str, first_ranks: int, later_ranks: int, data: st.DataObject
) -> None:
    """Steps of four packs resume on other ranks with the packs that they had, also those of split trees."""
    first, later = (
        options_for(CAPACITY, world_size=ranks, gradient_accumulation_steps=4 // ranks)
        for ranks in (first_ranks, later_ranks)
    )
    plan, trees, lengths = planned_epoch(each, parts, first)
    step = data.draw(st.integers(0, plan.steps.num_steps - 1))
    targets = np.ones(len(lengths), np.int64)
    resumed = assign_packs(plan.packs_from(step, keeps_steps=True), targets, later, trees=trees, keeps_steps=True)
    assert resumed.steps.num_steps == plan.steps.num_steps - step
    for number in range(resumed.steps.num_steps):
        samples = resumed.samples_of(number, number + 1)
        assert sorted(samples.tolist()) == sorted(plan.samples_of(step + number, step + number + 1).tolist())
