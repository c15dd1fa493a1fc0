from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtool.planning.packing import pack
from packtool.planning.steps import assign_evenly, divide_evenly, group_alike, imbalance
from tests.planning.assigned import plan_steps


def loads(costs: npt.NDArray[np.float64], rank_packs: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    return np.take_along_axis(costs, rank_packs.reshape(costs.shape), axis=1).reshape(rank_packs.shape).sum(axis=2)


@settings(max_examples=100)
@given(st.integers(0, 5), st.integers(1, 6), st.integers(1, 6), st.integers(0, 1000))
def test_every_pack_is_assigned_once_and_ranks_get_equally_many(steps: int, ranks: int, each: int, seed: int) -> None:
    costs = np.random.default_rng(seed).lognormal(0, 1, (steps, ranks * each))
    rank_packs = assign_evenly(costs, ranks)
    assert rank_packs.shape == (steps, ranks, each)
    np.testing.assert_array_equal(
        np.sort(rank_packs.reshape(costs.shape), axis=1),
        np.broadcast_to(np.arange(ranks * each), (steps, ranks * each)),
    )


@pytest.mark.parametrize("seed", range(5))
def test_assignment_is_close_to_the_optimum(seed: int) -> None:
    costs = np.random.default_rng(seed).lognormal(0, 0.5, (1, 8))
    result = loads(costs, assign_evenly(costs, 2)).max()
    best = min(
        max(costs[0, list(packs)].sum(), costs.sum() - costs[0, list(packs)].sum())
        for packs in itertools.combinations(range(8), 4)
    )
    assert result <= best * 1.02


def test_swapping_never_makes_a_step_less_even_than_longest_first() -> None:
    costs = np.random.default_rng(0).lognormal(0, 0.4, (200, 32))
    cards = costs.reshape(200, 4, 8).sum(axis=1)
    assigned = loads(costs, assign_evenly(costs, 8))
    assert (assigned.max(axis=1) <= cards.max(axis=1) + 1e-9).all()
    # A step with one pack heavier than a rank's fair share cannot be even.
    assert np.median(imbalance(assigned)) < 1.02 < 1.2 < np.median(imbalance(cards))


def test_window_balances_packs_of_a_step() -> None:
    costs = np.random.default_rng(0).lognormal(0, 0.5, 16 * 8)
    packs = np.arange(16 * 8).reshape(16, 8)
    grouped = group_alike(packs, costs, 8)
    np.testing.assert_array_equal(np.sort(grouped.reshape(-1)), packs.reshape(-1))
    for start in (0, 8):  # nothing leaves its window
        assert set(grouped[start : start + 8].reshape(-1).tolist()) == set(
            packs[start : start + 8].reshape(-1).tolist()
        )
    assert imbalance(costs[grouped]).mean() < 1.2 < imbalance(costs[packs]).mean()


@pytest.mark.parametrize("balance", ["none", "within-step", "window"])
@pytest.mark.parametrize(("num", "ranks", "accumulation", "batch"), [(997, 4, 2, 1), (500, 3, 1, 2), (3, 8, 1, 1)])
def test_exchanging_packs_between_steps_loses_none(
    balance: str, num: int, ranks: int, accumulation: int, batch: int
) -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(10, 1000, num).astype(np.int32)
    targets = rng.integers(1, 10, num)
    plan = pack(lengths, 1000, seed=0)
    costs = plan.tokens_per_pack() + plan.sum_squares_per_pack() / 500
    counts = {"world_size": ranks, "gradient_accumulation_steps": accumulation, "packs_per_micro_batch": batch}
    steps = plan_steps(plan, targets, **counts, costs=costs, balance=balance)
    plain = plan_steps(plan, targets, **counts)
    assert sorted(steps.order.tolist()) == list(range(plan.num_packs))
    assert steps.target_tokens_per_step.sum() == targets.sum()
    np.testing.assert_array_equal(np.sort(steps.micro_batch_sizes()), np.sort(plain.micro_batch_sizes()))
    per_pack = plan.sums_per_pack(targets[plan.samples])
    for step in range(steps.num_steps):
        packs = [
            int(pack)
            for rank in range(ranks)
            for micro in range(steps.num_micro_batches(step))
            for pack in steps.packs(step, rank, micro)
        ]
        assert per_pack[packs].sum() == steps.target_tokens(step)
        if balance == "within-step":
            first_pack = step * ranks * accumulation * batch
            assert set(packs) == set(range(first_pack, min(first_pack + ranks * accumulation * batch, plan.num_packs)))
    by_rank = steps.rank_costs(costs)
    assert by_rank.shape == (steps.num_steps, ranks)
    np.testing.assert_allclose(by_rank.sum(), costs.sum())
    if balance != "none" and steps.num_steps > 8:
        assert imbalance(by_rank).mean() <= imbalance(plain.rank_costs(costs)).mean()


@given(st.lists(st.tuples(st.integers(1, 20), st.floats(0, 100)), max_size=30), st.integers(1, 8), st.integers(15, 60))
def test_packs_of_even_work_do_not_exceed_the_capacity(
    things: list[tuple[int, float]], num_packs: int, capacity: int
) -> None:
    sizes, work = [size for size, _ in things], [float(one) for _, one in things]
    packs = divide_evenly(sizes, work, num_packs, capacity)
    if packs is None:
        # One that has no room finds every pack so full that less than the largest thing is left in it.
        assert sum(sizes) > num_packs * (capacity - max(sizes))
        return
    assert len(packs) == num_packs
    assert sorted(one for pack in packs for one in pack) == list(range(len(things)))
    assert all(sum(sizes[one] for one in pack) <= capacity for pack in packs)
    totals = [sum(work[one] for one in pack) for pack in packs]
    assert totals == pytest.approx(sorted(totals, reverse=True))
    assert all(work[a] <= work[b] for pack in packs for a, b in itertools.pairwise(pack))
    if capacity >= sum(sizes):
        # Graham's bound: no heavier than the mean and the heaviest thing together.
        assert max(totals) <= sum(work) / num_packs + max(work, default=0) + 1e-9
