"""Steps: no pack lost or doubled, no rank ahead of another, targets counted truly."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from packtool.errors import ConfigError
from packtool.planning.pack_plan import PackPlan
from packtool.planning.packing import pack, pack_singletons
from packtool.planning.steps import StepPlan
from tests.planning.assigned import plan_steps


def singletons(num_packs: int) -> PackPlan:
    return pack_singletons(np.full(num_packs, 3), 3, seed=0)


def cells(steps: StepPlan) -> list[list[list[list[int]]]]:
    """Packs by step, rank and micro-batch."""
    return [
        [
            [steps.packs(step, rank, micro).tolist() for micro in range(steps.num_micro_batches(step))]
            for rank in range(steps.world_size)
        ]
        for step in range(steps.num_steps)
    ]


def flat(step: list[list[list[int]]]) -> list[int]:
    return [pack for rank in step for micro_batch in rank for pack in micro_batch]


@pytest.mark.smoke
@given(
    num_packs=st.integers(0, 150),
    world_size=st.integers(1, 9),
    accumulation=st.integers(1, 5),
    batch=st.integers(1, 5),
)
@example(num_packs=1, world_size=8, accumulation=4, batch=3)
@example(num_packs=9, world_size=8, accumulation=4, batch=1)
def test_every_pack_is_assigned_once_and_ranks_are_balanced(
    num_packs: int, world_size: int, accumulation: int, batch: int
) -> None:
    plan = singletons(num_packs)
    targets = np.arange(num_packs, dtype=np.int32)
    steps = plan_steps(
        plan,
        targets,
        world_size=world_size,
        gradient_accumulation_steps=accumulation,
        packs_per_micro_batch=batch,
    )
    per_step = world_size * accumulation * batch
    assigned = cells(steps)
    assert steps.num_packs == num_packs
    assert steps.num_steps == -(-num_packs // per_step)
    # Steps follow the plan's order, so that what a step learns from does not depend on how many ranks share it.
    expected = [list(range(start, min(start + per_step, num_packs))) for start in range(0, num_packs, per_step)]
    assert [sorted(flat(step)) for step in assigned] == expected
    for step in assigned[: num_packs // per_step]:
        assert {len(rank) for rank in step} == {accumulation}
        assert {len(micro_batch) for rank in step for micro_batch in rank} == {batch}
    if num_packs % per_step:
        check_last_step(assigned[-1], batch, num_left=num_packs % per_step)
    num_empty = sum(not micro_batch for step in assigned for rank in step for micro_batch in rank)
    assert steps.num_empty_micro_batches == num_empty < world_size
    places = steps.locations()
    for index, step in enumerate(assigned):
        assert steps.target_tokens(index) == sum(int(targets[plan.pack(pack)].sum()) for pack in flat(step))
        for rank, micro_batches in enumerate(step):
            for micro, packs in enumerate(micro_batches):
                assert np.flatnonzero((places == (index, rank, micro)).all(axis=1)).tolist() == sorted(packs)
    assert steps.target_tokens_per_step.sum() == targets.sum()


def check_last_step(ranks: list[list[list[int]]], batch: int, num_left: int) -> None:
    """As short as can be, and spread as evenly as can be."""
    assert {len(rank) for rank in ranks} == {-(-num_left // (len(ranks) * batch))}
    per_rank = [sum(map(len, rank)) for rank in ranks]
    assert sum(per_rank) == num_left
    assert max(per_rank) - min(per_rank) <= 1
    for rank in ranks:
        sizes = [len(micro_batch) for micro_batch in rank]
        assert max(sizes) <= batch
        assert max(sizes) - min(sizes) <= 1


def test_the_last_step_by_hand() -> None:
    steps = plan_steps(
        singletons(11), np.ones(11), world_size=2, gradient_accumulation_steps=2, packs_per_micro_batch=2
    )
    assert cells(steps) == [[[[0, 2], [4, 6]], [[1, 3], [5, 7]]], [[[8, 10]], [[9]]]]
    steps = plan_steps(singletons(7), np.ones(7), world_size=2, gradient_accumulation_steps=2, packs_per_micro_batch=1)
    assert cells(steps) == [[[[0], [2]], [[1], [3]]], [[[4], [6]], [[5], []]]]
    assert steps.num_empty_micro_batches == 1


def test_targets_of_packed_samples() -> None:
    lengths = np.arange(200) % 9 + 1
    targets = lengths // 2
    plan = pack(lengths, 12, seed=0)
    steps = plan_steps(plan, targets, world_size=3, gradient_accumulation_steps=2, packs_per_micro_batch=1)
    for step, ranks in enumerate(cells(steps)):
        samples = np.concatenate([plan.pack(pack) for pack in flat(ranks)])
        assert steps.target_tokens(step) == targets[samples].sum()


def test_samples_of_a_step_do_not_depend_on_the_ranks() -> None:
    plan = singletons(100)
    shapes = [(1, 12, 1), (12, 1, 1), (2, 3, 2), (3, 1, 4)]
    plans = [
        plan_steps(plan, np.ones(100), world_size=w, gradient_accumulation_steps=g, packs_per_micro_batch=b)
        for w, g, b in shapes
    ]
    contents = [[sorted(flat(step)) for step in cells(steps)] for steps in plans]
    assert all(content == contents[0] for content in contents)
    assert len({steps.fingerprint for steps in plans}) == len(shapes)


def test_fingerprint_is_that_of_the_contents() -> None:
    def fingerprint(num_packs: int, target: int, world_size: int) -> str:
        targets = np.full(num_packs, target)
        plan = singletons(num_packs)
        return plan_steps(
            plan, targets, world_size=world_size, gradient_accumulation_steps=2, packs_per_micro_batch=1
        ).fingerprint

    assert fingerprint(10, 1, 2) == fingerprint(10, 1, 2)
    assert len({fingerprint(10, 1, 2), fingerprint(11, 1, 2), fingerprint(10, 2, 2), fingerprint(10, 1, 1)}) == 4


def test_no_packs_give_no_steps() -> None:
    steps = plan_steps(singletons(0), np.zeros(0), world_size=4, gradient_accumulation_steps=2, packs_per_micro_batch=1)
    assert (steps.num_steps, steps.num_packs, steps.num_empty_micro_batches) == (0, 0, 0)


def test_indices_out_of_range() -> None:
    steps = plan_steps(singletons(5), np.ones(5), world_size=2, gradient_accumulation_steps=2, packs_per_micro_batch=1)
    for step, rank, micro_batch in ((2, 0, 0), (-1, 0, 0), (0, 2, 0), (0, 0, 2), (1, 0, 1), (0, 0, -1)):
        with pytest.raises(IndexError):
            steps.packs(step, rank, micro_batch)
    with pytest.raises(IndexError):
        steps.target_tokens(2)


def test_all_errors_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        plan_steps(singletons(5), np.ones(5), world_size=0, gradient_accumulation_steps=-1, packs_per_micro_batch=1)
    assert "world_size is 0" in str(error.value)
    assert "gradient_accumulation_steps is -1" in str(error.value)


def test_millions_of_packs_are_arrays() -> None:
    plan = singletons(2_000_000)
    targets = np.ones(2_000_000, dtype=np.int32)
    tracemalloc.start()
    try:
        steps = plan_steps(plan, targets, world_size=8, gradient_accumulation_steps=4, packs_per_micro_batch=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert steps.num_steps == 62_500
    assert peak < 60 * plan.num_packs


@given(data=st.data(), world_size=st.integers(1, 4), accumulation=st.integers(1, 3), num_packs=st.integers(1, 30))
def test_num_micro_batches_is_the_maximum_over_ranks(
    data: st.DataObject, world_size: int, accumulation: int, num_packs: int
) -> None:
    packs = pack_singletons(np.full(num_packs, 5), 10, seed=0, epoch=0, shuffle=True)
    steps = plan_steps(
        packs,
        np.full(num_packs, 3),
        world_size=world_size,
        gradient_accumulation_steps=accumulation,
        packs_per_micro_batch=data.draw(st.integers(1, 3)),
    )
    is_in = np.array(data.draw(st.lists(st.booleans(), min_size=num_packs, max_size=num_packs)))
    expected = [
        any(is_in[steps.packs(step, rank, micro_batch)].any() for rank in range(world_size))
        for step in range(steps.num_steps)
        for micro_batch in range(steps.num_micro_batches(step))
    ]
    assert steps.on_any_rank(is_in).tolist() == expected
