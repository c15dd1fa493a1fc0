"""The whole plan of an epoch: filtered, packed, assigned, summed up."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtool.errors import ConfigError, DataError
from packtool.planning.cost import CostModel
from packtool.planning.epoch import EpochPlan, plan_epoch
from packtool.planning.options import PlanOptions, SkrullOptions
from packtool.planning.pack_plan import PackPlan
from packtool.planning.skrull import SHARDED
from packtool.planning.steps import StepAssignment, StepPlan
from packtool.planning.summary import computed_tokens, device_costs

OPTIONS = PlanOptions(
    balance="none",
    max_length=40,
    packing_length=64,
    packing_num_proc=4,
    world_size=2,
    gradient_accumulation_steps=3,
    per_device_train_batch_size=1,
)
LENGTHS = ((np.arange(1000) * 37) % 50 + 1).astype(np.int32)  # 1 to 50, each twenty times
TARGETS = (LENGTHS // 3).astype(np.int32)


def trained_order(plan: EpochPlan) -> list[int]:
    """Cache positions in the order in which they would be trained."""
    steps = plan.steps
    return [
        int(position)
        for step in range(steps.num_steps)
        for rank in range(steps.world_size)
        for micro_batch in range(steps.num_micro_batches(step))
        for pack in plan.samples(step, rank, micro_batch)
        for position in pack
    ]


@pytest.mark.parametrize("packing", [True, False])
def test_positions_are_those_of_the_cache(packing: bool) -> None:
    options = dataclasses.replace(OPTIONS, packing=packing)
    plan = plan_epoch(LENGTHS, TARGETS, options, seed=1)
    short_samples = np.flatnonzero(LENGTHS <= 40)
    assert sorted(trained_order(plan)) == short_samples.tolist()
    assert np.array_equal(LENGTHS[plan.packs.samples], plan.packs.lengths)
    assert plan.steps.target_tokens_per_step.sum() == TARGETS[short_samples].sum()


def test_summary() -> None:
    summary = plan_epoch(LENGTHS, TARGETS, OPTIONS, seed=1).summary
    num_tokens = 20 * 40 * 41 // 2
    assert summary.num_cached == 1000
    assert summary.num_filtered == 200
    assert summary.num_samples == 800
    assert summary.num_tokens == num_tokens == 16_400
    assert summary.num_target_tokens == TARGETS[LENGTHS <= 40].sum()
    assert summary.longest == 40
    assert (summary.options.max_length, summary.options.packing_length, summary.options.packing_num_proc) == (40, 64, 4)
    assert summary.lower_bound == 257
    assert summary.num_packs == 257  # these lengths fit together without a gap
    assert summary.fill == pytest.approx(num_tokens / (257 * 64))
    assert summary.samples_per_pack == pytest.approx(800 / 257)
    assert summary.num_steps == 43  # 257 packs, 6 a step
    assert summary.num_steps_without_packing == 134
    assert summary.num_empty_micro_batches == 1  # 5 packs are left for 2 ranks


def test_summary_without_packing() -> None:
    lengths = np.array([4, 4, 4, 4, 8], dtype=np.int32)
    options = PlanOptions(
        balance="none", max_length=8, packing_length=8, packing=False, world_size=1, per_device_train_batch_size=5
    )
    summary = plan_epoch(lengths, lengths, options, seed=0).summary
    assert summary.num_packs == 5
    assert summary.fill == pytest.approx(24 / 40)  # five rows of 8
    assert summary.num_steps == summary.num_steps_without_packing == 1
    single_rows = dataclasses.replace(options, per_device_train_batch_size=1)
    assert plan_epoch(lengths, lengths, single_rows, seed=0).summary.fill == 1.0


def test_fill_is_defined_with_more_ranks_than_rows() -> None:
    options = PlanOptions(balance="none", max_length=8, packing_length=8, packing=False, world_size=7)
    plan = plan_epoch(np.array([3, 5]), np.array([1, 1]), options, seed=0)
    assert plan.summary.fill == 1.0
    assert plan.summary.num_empty_micro_batches == 5


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=60),
    max_length=st.integers(1, 30),
    world_size=st.integers(1, 4),
    packing=st.booleans(),
)
def test_filtered_and_trained_samples_add_up_to_the_cache(
    lengths: list[int], max_length: int, world_size: int, packing: bool
) -> None:
    array = np.array(lengths, dtype=np.int32)
    options = PlanOptions(
        balance="none", max_length=max_length, packing_length=30, packing=packing, world_size=world_size
    )
    if min(lengths) > max_length:
        with pytest.raises(DataError, match="No sample is left"):
            plan_epoch(array, array, options, seed=0)
        return
    plan = plan_epoch(array, array, options, seed=0)
    assert sorted(trained_order(plan)) == [i for i, length in enumerate(lengths) if length <= max_length]
    assert plan.summary.num_filtered + plan.summary.num_samples == plan.summary.num_cached == len(lengths)


@pytest.mark.smoke
@pytest.mark.parametrize("packing", [True, False])
def test_planning_is_deterministic(packing: bool) -> None:
    options = dataclasses.replace(OPTIONS, packing=packing)
    plans = [plan_epoch(LENGTHS.copy(), TARGETS, options, seed=s, epoch=e) for s, e in ((1, 0), (1, 0), (1, 1), (2, 0))]
    assert plans[0].fingerprint == plans[1].fingerprint
    assert len({plan.fingerprint for plan in plans}) == 3
    # A schedule is laid out before the first epoch: the next ones must have as many steps.
    assert len({plan.summary for plan in plans}) == (1 if packing else len({p.summary.fill for p in plans}))
    more_procs = plan_epoch(LENGTHS, TARGETS, dataclasses.replace(options, packing_num_proc=9), seed=1)
    assert more_procs.fingerprint == plans[0].fingerprint


def test_no_samples_left_is_an_error() -> None:
    with pytest.raises(DataError, match=r"holds 1,000, and all are longer than 0 tokens"):
        plan_epoch(LENGTHS, TARGETS, dataclasses.replace(OPTIONS, max_length=0), seed=0)
    with pytest.raises(DataError, match="the cache is empty"):
        plan_epoch(LENGTHS[:0], TARGETS[:0], OPTIONS, seed=0)


def test_samples_longer_than_a_pack() -> None:
    with pytest.raises(DataError, match="longer than a pack of 30 tokens; the longest has 40"):
        plan_epoch(LENGTHS, TARGETS, dataclasses.replace(OPTIONS, packing_length=30), seed=0)
    with pytest.raises(ConfigError, match="packing length is 0"):
        plan_epoch(LENGTHS, TARGETS, dataclasses.replace(OPTIONS, packing_length=0), seed=0)


def random_samples(num: int = 3000) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(6, 1, num).clip(16, 4096).astype(np.int32)
    return lengths, (lengths // 3 + 1).astype(np.int32)


@pytest.mark.parametrize("balance", ["within-step", "window"])
def test_balance_is_reported_before_and_after(balance: str) -> None:
    lengths, targets = random_samples()
    options = PlanOptions(
        balance="none",
        max_length=4096,
        packing_length=4096,
        world_size=4,
        gradient_accumulation_steps=4,
        cost=CostModel.of_8b(),
    )
    plain = plan_epoch(lengths, targets, options, seed=1).summary.balance
    even = plan_epoch(lengths, targets, dataclasses.replace(options, balance=balance), seed=1).summary.balance
    assert plain is not None
    assert even is not None
    assert np.array_equal(even.steps_before, plain.steps)
    assert 1 <= even.mean < even.steps_before.mean()
    assert even.flops == pytest.approx(plain.flops)
    assert plan_epoch(lengths, targets, dataclasses.replace(options, cost=None), seed=1).summary.balance is None


def test_efficient_attention_ratio() -> None:
    lengths = np.full(8, 10, np.int32)
    summary = plan_epoch(
        lengths, lengths, PlanOptions(balance="none", max_length=40, packing_length=40), seed=0
    ).summary
    assert summary.efficient_attn_ratio == pytest.approx(1 / 4)


def test_dynamic_batches_keep_each_steps_samples() -> None:
    lengths, targets = random_samples()
    options = PlanOptions(
        balance="none",
        max_length=4096,
        packing_length=4096,
        packing=False,
        world_size=2,
        per_device_train_batch_size=16,
    )
    plain = plan_epoch(lengths, targets, options, seed=1)
    dynamic = plan_epoch(lengths, targets, dataclasses.replace(options, dynamic_batch_tokens=8192), seed=1)
    assert dynamic.steps.num_steps == plain.steps.num_steps
    np.testing.assert_array_equal(dynamic.steps.target_tokens_per_step, plain.steps.target_tokens_per_step)
    for step in range(dynamic.steps.num_steps):
        for rank in range(2):
            for micro in range(dynamic.steps.num_micro_batches(step)):
                assert sum(lengths[pack].sum() for pack in dynamic.samples(step, rank, micro)) <= 8192
    assert dynamic.summary.fill == 1.0 > plain.summary.fill


def test_grouping_by_length_saves_padding_and_loses_nothing() -> None:
    lengths, targets = random_samples()
    options = PlanOptions(
        balance="none", max_length=4096, packing_length=4096, packing=False, per_device_train_batch_size=8
    )
    plain = plan_epoch(lengths, targets, options, seed=1)
    grouped = plan_epoch(lengths, targets, dataclasses.replace(options, group_by_length=True), seed=1)
    assert sorted(grouped.packs.samples.tolist()) == list(range(len(lengths)))
    assert grouped.summary.fill > 0.9 > plain.summary.fill
    # Lengths do not fall over the run.
    means = [lengths[grouped.packs.samples[i : i + 8]].mean() for i in range(0, 400, 8)]
    assert np.mean(means[:10]) < 3 * np.mean(means[-10:])


def test_options_of_packing_reach_the_packer() -> None:
    media = LENGTHS // 2
    options = dataclasses.replace(OPTIONS, max_samples_per_pack=2, max_media_tokens_per_pack=25)
    plan = plan_epoch(LENGTHS, TARGETS, options, seed=1, media_tokens=media)
    assert np.diff(plan.packs.offsets).max() == 2
    assert plan.packs.sums_per_pack(media[plan.packs.samples]).max() <= 25
    assert sorted(trained_order(plan)) == np.flatnonzero(LENGTHS <= 40).tolist()


@pytest.mark.parametrize("packing", [True, False])
def test_without_shuffling_every_epoch_is_the_same(packing: bool) -> None:
    options = dataclasses.replace(OPTIONS, shuffle=False, packing=packing)
    first_plan, second_plan = (plan_epoch(LENGTHS, TARGETS, options, seed=1, epoch=epoch) for epoch in (0, 1))
    assert first_plan.fingerprint == second_plan.fingerprint
    assert (np.diff(first_plan.packs.samples[first_plan.packs.offsets[:-1]]) > 0).all()


SKRULL = dataclasses.replace(
    OPTIONS,
    max_length=4096,
    packing_length=4096,
    per_device_train_batch_size=2,
    cost=CostModel.of_8b(),
    balance="within-step",
    skrull=SkrullOptions(bucket_size=1600, sequence_parallel_size=4, alignment=8),
)


def per_step(plan: EpochPlan) -> list[list[int]]:
    """Samples of each step."""
    steps = plan.steps
    bounds = steps.micro_batch_offsets[steps.step_offsets]
    return [
        sorted(i for pack in steps.order[first_pack:last] for i in plan.packs.pack(int(pack)).tolist())
        for first_pack, last in itertools.pairwise(bounds)
    ]


@pytest.mark.parametrize("packing", [True, False])
def test_skrull_keeps_each_steps_samples(packing: bool) -> None:
    lengths, targets = random_samples()
    options = dataclasses.replace(SKRULL, packing=packing)
    plain = plan_epoch(lengths, targets, dataclasses.replace(options, skrull=None), seed=1)
    plan = plan_epoch(lengths, targets, options, seed=1)
    assert per_step(plan) == per_step(plain)
    np.testing.assert_array_equal(plan.steps.target_tokens_per_step, plain.steps.target_tokens_per_step)
    assert plan.full_packs.fingerprint == plain.packs.fingerprint == plain.full_packs.fingerprint
    assert plain.placement is None
    assert plain.placement_of(0, 0, 0) is None
    local = 0
    for step in range(plan.steps.num_steps):
        for rank in range(2):
            for micro in range(plan.steps.num_micro_batches(step)):
                samples = np.array([i for pack in plan.samples(step, rank, micro) for i in pack.tolist()], np.int64)
                places = plan.placement_of(step, rank, micro)
                assert places is not None
                assert places.shape == samples.shape
                padded = -(-lengths[samples] // 8) * 8
                shared = padded[places == SHARDED].sum() / 4
                assert all(lengths[samples[places == place]].sum() + shared <= 1600 for place in range(4))
                local += int(lengths[samples[places != SHARDED]].sum())
    figures = plan.summary.skrull
    assert figures is not None
    assert figures.num_local_tokens == local
    assert figures.num_micro_batches + plan.steps.num_empty_micro_batches == len(plan.steps.micro_batch_sizes())
    assert 0 < figures.bucket_fill <= 1
    assert plan.summary.fill == pytest.approx(lengths.sum() / figures.num_padded_tokens)
    assert plan.summary.fill < 1
    assert plan.summary.num_packs == plain.packs.num_packs
    assert plan.summary.balance is not None
    assert plain.summary.balance is not None
    assert plan.summary.balance.flops == pytest.approx(plain.summary.balance.flops)
    assert np.array_equal(plan.summary.balance.steps_before, plain.summary.balance.steps_before)
    assert 1 <= plan.summary.balance.mean <= figures.mean_imbalance


def test_fingerprint_includes_the_placement_of_skrull() -> None:
    lengths, targets = random_samples(300)
    plan = plan_epoch(lengths, targets, SKRULL, seed=1)
    assert plan.fingerprint == plan_epoch(lengths, targets, SKRULL, seed=1).fingerprint
    assert plan.placement is not None
    places = plan.placement.copy()
    places[0] = SHARDED if places[0] != SHARDED else 1
    assert dataclasses.replace(plan, placement=places).fingerprint != plan.fingerprint


def test_device_costs_are_local_samples_and_a_share_of_sharded_ones() -> None:
    lengths = np.array([8, 4, 4, 2])
    singles = PackPlan(np.arange(4), np.arange(5), lengths.astype(np.int32), 8)
    places = np.array([SHARDED, 1, 0, SHARDED])
    assignment = StepAssignment(np.arange(4), np.array([2, 0, 1, 1]), np.array([4]), places)
    steps = StepPlan.of(singles, lengths, assignment, world_size=2)
    assert device_costs(steps, places, lengths * 1.0, 2).tolist() == [[4, 8, 5, 1]]
    assert computed_tokens(singles, steps, places, 3).tolist() == [9, 4, 4, 3]


def test_skrull_names_oversized_samples() -> None:
    lengths, targets = random_samples()
    options = dataclasses.replace(SKRULL, skrull=SkrullOptions(bucket_size=500, sequence_parallel_size=4, alignment=8))
    with pytest.raises(ConfigError, match="--bucket-size 500"):
        plan_epoch(lengths, targets, options, seed=1)


def test_untrained_draws_may_be_as_many_as_the_samples() -> None:
    lengths = np.array([10, 20, 30], np.int32)
    plan = plan_epoch(lengths, lengths, OPTIONS, seed=0, samples=np.array([0, 0, 2]))
    assert sorted(plan.packs.samples.tolist()) == [0, 0, 2]
