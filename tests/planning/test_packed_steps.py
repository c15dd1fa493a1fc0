"""Steps with the samples of unpacked training: whoever computes which of them, and whenever the run is resumed."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtool.config.train import TrainConfig
from packtool.errors import DataError
from packtool.planning.cost import CostModel
from packtool.planning.epoch import EpochPlan, plan_epoch
from packtool.planning.options import PlanOptions
from packtool.train.prepare.checkpoint import Assignment
from packtool.train.prepare.inputs import Inputs
from packtool.train.prepare.timeline import Timeline

COST = CostModel(1.0, 0.05)


def micro_batches(plan: EpochPlan) -> list[list[list[list[int]]]]:
    """Of each step, of each rank, the samples of each micro-batch."""
    steps = plan.steps
    return [
        [
            [
                [int(position) for pack in plan.samples(step, rank, micro_batch) for position in pack]
                for micro_batch in range(steps.num_micro_batches(step))
            ]
            for rank in range(steps.world_size)
        ]
        for step in range(steps.num_steps)
    ]


def step_samples(plan: EpochPlan) -> list[list[int]]:
    """The samples of each step, whoever computes them."""
    return [sorted(i for rank in step for batch in rank for i in batch) for step in micro_batches(plan)]


def unpacked_options(options: PlanOptions) -> PlanOptions:
    """The run whose steps are to be kept, all in one batch."""
    assert options.samples_per_step is not None
    return dataclasses.replace(
        options,
        packing=False,
        balance="none",
        samples_per_step=None,
        world_size=1,
        per_device_train_batch_size=options.samples_per_step,
    )


@st.composite
def runs(draw: st.DrawFn) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], PlanOptions, int, int]:
    """Lengths, media tokens, options, seed and epoch."""
    lengths = np.array(draw(st.lists(st.integers(1, 60), min_size=1, max_size=80)), np.int32)
    max_length = draw(st.integers(int(lengths.min()), 60))
    options = PlanOptions(
        max_length=max_length,
        packing_length=draw(st.integers(max_length, 150)),
        samples_per_step=draw(st.integers(1, 30)),
        world_size=draw(st.integers(1, 5)),
        shuffle=draw(st.booleans()),
        cost=draw(st.sampled_from([None, COST])),
        max_samples_per_pack=draw(st.none() | st.integers(1, 4)),
        max_media_tokens_per_pack=draw(st.none() | st.integers(30, 50)),
    )
    return lengths, lengths // 2, options, draw(st.integers(0, 9)), draw(st.integers(0, 3))


@settings(max_examples=120)
@given(runs())
def test_steps_have_the_samples_of_unpacked_training(
    run: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], PlanOptions, int, int],
) -> None:
    lengths, media, options, seed, epoch = run
    plan_with = functools.partial(plan_epoch, lengths, lengths, seed=seed, epoch=epoch, media_tokens=media)
    plan, plain = plan_with(options), plan_with(unpacked_options(options))
    assert step_samples(plan) == step_samples(plain)
    assert np.array_equal(plan.steps.target_tokens_per_step, plain.steps.target_tokens_per_step)
    assert plan.summary.num_steps == plan.summary.num_steps_without_packing == plain.summary.num_steps
    for step in micro_batches(plan):
        assert len({len(rank) for rank in step}) == 1
        for batch in (batch for rank in step for batch in rank):
            assert lengths[batch].sum() <= options.packing_length
            assert options.max_samples_per_pack is None or len(batch) <= options.max_samples_per_pack
            assert options.max_media_tokens_per_pack is None or media[batch].sum() <= options.max_media_tokens_per_pack
    assert plan_with(options).fingerprint == plan.fingerprint


@settings(max_examples=50)
@given(run=runs(), done=st.integers(0, 10), ranks=st.integers(1, 6), later=st.integers(0, 10))
def test_resumed_on_other_ranks_the_steps_keep_their_samples(
    run: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], PlanOptions, int, int], done: int, ranks: int, later: int
) -> None:
    lengths, media, options, seed, _ = run

    config = TrainConfig(model="m", cached_dataset=("c",), output_dir="o", num_train_epochs=2, seed=seed)
    inputs = Inputs(config=config, options=options, lengths=lengths, targets=lengths, media_tokens=media)
    batch_options = options.gradient_accumulation_steps, options.per_device_train_batch_size
    assignments = [Assignment(0, options.world_size, *batch_options)]
    timeline = Timeline.of(inputs, assignments)
    other = Timeline.of(inputs, [Assignment(0, ranks, *batch_options)])
    assert other.first_plan.packs_fingerprint == timeline.first_plan.packs_fingerprint
    expected = [samples for epoch in (0, 1) for samples in step_samples(timeline.plan_of(epoch))]
    for step in sorted({min(done, timeline.num_steps - 1), min(done + later, timeline.num_steps - 1)}):
        assignments.append(Assignment(step, ranks, *batch_options))
        timeline = Timeline.of(inputs, assignments)
    assert [trained_in(timeline, each) for each in range(timeline.num_steps)] == expected


def trained_in(timeline: Timeline, step: int) -> list[int]:
    """The samples of one step of a run."""
    span = timeline.span_at(step)
    return step_samples(span.plan)[step - span.first_step]


def test_the_example_in_the_docstring() -> None:
    lengths = np.array([3, 7, 2, 1, 4, 4, 3, 3, 5, 2], np.int32)
    options = PlanOptions(max_length=8, packing_length=8, world_size=2, samples_per_step=4, shuffle=False)
    plan = plan_epoch(lengths, lengths, options, seed=0)
    assert [[[lengths[batch].tolist() for batch in rank] for rank in step] for step in micro_batches(plan)] == [
        [[[7]], [[3, 2, 1]]],
        [[[4, 3]], [[4, 3]]],
        [[[5]], [[2]]],
    ]
    assert plan.summary.num_packs == 6
    assert plan.summary.fill == 34 / 48


def test_few_micro_batches_and_ranks_of_equal_work() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 1, 4096).clip(16, 8192).astype(np.int32)
    cost = CostModel(1.0, 1e-4)
    options = PlanOptions(max_length=8192, packing_length=8192, world_size=8, samples_per_step=512, cost=cost)
    plan = plan_epoch(lengths, lengths, options, seed=0)
    fewest = sum(-(-int(lengths[step].sum()) // (8 * 8192)) for step in step_samples(plan))
    assert plan.steps.step_offsets[-1] <= 8 * fewest * 1.1
    balance = plan.summary.balance
    assert balance is not None
    assert balance.steps.max() < 1.01 < 1.2 < balance.steps_before.max()


def test_other_steps_in_the_state_of_a_run_with_other_samples() -> None:
    lengths = np.arange(1, 41, dtype=np.int32)
    plans = [
        plan_epoch(
            lengths,
            lengths,
            PlanOptions(max_length=40, packing_length=64, world_size=world_size, samples_per_step=num),
            seed=seed,
        )
        for world_size, num, seed in ((1, 8, 0), (4, 8, 0), (1, 8, 1), (1, 9, 0))
    ]
    original, more_ranks, other_seed, larger_steps = plans
    assert original.packs_fingerprint == more_ranks.packs_fingerprint != other_seed.packs_fingerprint
    assert len({plan.steps.fingerprint for plan in (original, more_ranks, larger_steps)}) == 3


def test_a_sample_larger_than_a_pack_is_an_error() -> None:
    lengths = np.array([3, 9, 4], np.int32)
    options = PlanOptions(max_length=9, packing_length=8, samples_per_step=2)
    with pytest.raises(DataError, match="1 of 3 samples are longer than a pack of 8 tokens"):
        plan_epoch(lengths, lengths, options, seed=0)
    options = dataclasses.replace(options, packing_length=9, max_media_tokens_per_pack=8)
    with pytest.raises(DataError, match="--max-media-tokens-per-pack"):
        plan_epoch(lengths, lengths, options, seed=0, media_tokens=lengths)
