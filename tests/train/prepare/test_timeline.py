"""Steps are numbered through all epochs, and loading begins at any of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtool.attention.parallel.axes import Axes
from packtool.config.train import TrainConfig
from packtool.launch.world import World
from packtool.planning.cost import CostModel
from packtool.planning.epoch import plan_epoch
from packtool.planning.options import PlanOptions, SkrullOptions
from packtool.train.loop.step_loader import StepLoader
from packtool.train.prepare.checkpoint import Assignment, BatchShape
from packtool.train.prepare.figures import SampleFigures, figures_of_steps
from packtool.train.prepare.inputs import Inputs
from packtool.train.prepare.output_dir import ResumePoint
from packtool.train.prepare.run import CachedSource, Run
from packtool.train.prepare.timeline import Timeline
from tests.batch.reduced import reduced_spec
from tests.batch.test_dataset import Samples, documents

LENGTHS = [40] * 5 + [30] * 7 + [20] * 4
READER = Samples.of_lengths(LENGTHS)
CONFIG = TrainConfig(model="m", cached_dataset=("c",), output_dir="o", packing=True, dataloader_num_workers=0)
TARGETS = np.array([(sample.labels[1:] != -100).sum() for sample in READER.samples], np.int32)


def make_timeline(
    num_epochs: float = 3.0,
    max_steps: int | None = None,
    world_size: int = 1,
    *,
    later: Sequence[tuple[int, int]] = (),
    options: PlanOptions | None = None,
) -> Timeline:
    """A run on ``world_size`` ranks; ``later``: (step, ranks that resume it there)."""
    options = options or PlanOptions(balance="none", max_length=64, packing_length=64)
    config = dataclasses.replace(CONFIG, num_train_epochs=num_epochs, max_steps=max_steps, seed=0)
    reader: Any = READER
    files: Any = object()
    lengths = np.array(LENGTHS, np.int32)
    inputs = Inputs(config=config, options=options, lengths=lengths, targets=TARGETS, reader=reader, files=files)
    accumulation = 1 if options.skrull else 2
    return Timeline.of(inputs, [Assignment(step, ranks, accumulation, 1) for step, ranks in ((0, world_size), *later)])


def load(timeline: Timeline, start: int, world: World | None = None) -> list[tuple[int, list[list[list[int]]]]]:
    """(target tokens, documents of each micro-batch) of every step."""
    no_state: Any = None
    before: Any = SimpleNamespace(step=start)
    world = world or World()
    figures = SampleFigures(np.zeros_like(TARGETS), TARGETS, None)
    source = CachedSource(inputs=timeline.inputs, timeline=timeline, world=world, start=start, figures=figures)
    resume_point = ResumePoint(saved_state=before)
    run = Run(
        config=CONFIG, world=world, source=source, state=no_state, resume_point=resume_point, axes_by_size={1: Axes()}
    )
    loader = StepLoader(run, reduced_spec("qwen3"))
    assert len(loader) == timeline.num_steps
    steps = []
    for step in loader:
        batches = list(step.micro_batches)
        assert len(batches) == len(step.planned)
        steps.append((step.figures.target_tokens, [documents(batch) for batch in batches]))
    return steps


def test_the_last_step_of_an_epoch_is_smaller() -> None:
    timeline = make_timeline()
    num_packs = timeline.plan_of(0).packs.num_packs
    assert num_packs % 2 == 1
    sizes = [len(batches) for _, batches in load(timeline, 0)]
    assert sizes == ([2] * (num_packs // 2) + [1]) * 3


@pytest.mark.smoke
def test_every_epoch_has_all_samples_in_new_packs() -> None:
    timeline = make_timeline()
    steps = load(timeline, 0)
    epochs = [steps[n * timeline.steps_per_epoch : (n + 1) * timeline.steps_per_epoch] for n in range(3)]
    everything = sorted(sample.input_ids.tolist() for sample in READER.samples)
    packs = []
    for epoch in epochs:
        micro_batches = [batch for _, batches in epoch for batch in batches]
        assert sorted(ids for batch in micro_batches for ids in batch) == everything
        packs.append({tuple(sorted(map(tuple, batch))) for batch in micro_batches})
    assert packs[0] != packs[1] != packs[2]


@pytest.mark.parametrize("world_size", [1, 2])
def test_steps_after_resuming_are_the_same(world_size: int) -> None:
    timeline = make_timeline(world_size=world_size)
    for rank in range(world_size):
        world = World(rank, world_size)
        all_steps = load(timeline, 0, world)
        assert len(all_steps) == timeline.num_steps
        for start in range(timeline.num_steps + 1):
            assert load(timeline, start, world) == all_steps[start:]


def test_epochs_may_end_in_the_middle() -> None:
    all_steps = load(make_timeline(), 0)
    assert load(make_timeline(max_steps=7), 0) == all_steps[:7]
    per_epoch = make_timeline().steps_per_epoch
    assert make_timeline(num_epochs=0.5).num_steps == -(-per_epoch // 2)
    assert make_timeline(num_epochs=1.0, max_steps=100).num_steps == 100


def test_target_tokens_are_summed_without_reading() -> None:
    timeline = make_timeline(max_steps=11)
    steps = load(timeline, 0)
    for start in range(12):
        assert timeline.target_tokens_from(start) == sum(targets for targets, _ in steps[start:])


def test_empty_micro_batches_are_counted_by_epoch() -> None:
    per_epoch = make_timeline(world_size=2).plan_of(0).steps.num_empty_micro_batches
    assert per_epoch > 0
    assert make_timeline(world_size=2).num_empty_micro_batches() == 3 * per_epoch
    assert make_timeline(num_epochs=0.5, world_size=2).num_empty_micro_batches() == 0


def test_locate_finds_epoch_and_step() -> None:
    timeline = make_timeline()
    per_epoch = timeline.steps_per_epoch
    assert timeline.locate(0) == (0, 0)
    assert timeline.locate(2 * per_epoch + 1) == (2, 1)


def packs_trained(timeline: Timeline, first_step: int, last: int) -> list[tuple[int, tuple[int, ...]]]:
    """(epoch, samples of a pack) of steps [first, last)."""
    packs = []
    for step in range(first_step, last):
        span = timeline.span_at(step)
        epoch, at, plan = span.epoch, step - span.first_step, span.plan
        for rank in range(plan.steps.world_size):
            for micro in range(plan.steps.num_micro_batches(at)):
                packs += [(epoch, tuple(pack.tolist())) for pack in plan.samples(at, rank, micro)]
    return packs


@pytest.mark.parametrize("step", range(0, 16, 3))
@pytest.mark.parametrize("world_sizes", [(1, 2), (2, 1), (1, 3)])
def test_every_pack_is_trained_once_on_any_number_of_processes(step: int, world_sizes: tuple[int, int]) -> None:
    """In each of three epochs, also when the number of processes changes a second time."""
    before, after = world_sizes
    uninterrupted = make_timeline(world_size=before)
    step = min(step, uninterrupted.num_steps - 1)
    resumed = make_timeline(world_size=before, later=[(step, after)])
    expected = sorted(packs_trained(uninterrupted, 0, uninterrupted.num_steps))
    done = packs_trained(uninterrupted, 0, step)
    assert sorted(done + packs_trained(resumed, step, resumed.num_steps)) == expected
    targets = sum(int(TARGETS[list(pack)].sum()) for _, pack in packs_trained(resumed, step, resumed.num_steps))
    assert resumed.target_tokens_from(step) == targets
    later_step = min(step + 1, resumed.num_steps - 1)
    third = make_timeline(world_size=before, later=[(step, after), (later_step, before)])
    middle = packs_trained(resumed, step, later_step)
    assert sorted(done + middle + packs_trained(third, later_step, third.num_steps)) == expected
    # Steps that were trained before are where they were.
    assert sorted(packs_trained(third, 0, third.num_steps)) == expected
    assert third.target_tokens_from(0) == uninterrupted.target_tokens_from(0)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("step", [0, 1, 3, 5])
def test_skrull_is_reassigned_in_complete_packs(step: int, packing: bool) -> None:
    """Every sample once, in steps as large as without Skrull, whatever the processes and when they change again."""

    options = PlanOptions(
        balance="none",
        max_length=64,
        packing_length=64,
        packing=packing,
        cost=CostModel.of_8b(),
        skrull=SkrullOptions(bucket_size=24, sequence_parallel_size=2, alignment=4),
    )
    uninterrupted = make_timeline(2.0, options=options)
    expected = sorted(packs_trained(uninterrupted, 0, uninterrupted.num_steps))
    assert len(expected) == 2 * len(LENGTHS)
    done = packs_trained(uninterrupted, 0, step)
    resumed = make_timeline(2.0, later=[(step, 3)], options=options)
    num_left = uninterrupted.plan_of(0).full_packs.num_packs - step
    assert resumed.span_at(step).stop_step - step == -(-num_left // 3)
    assert sorted(done + packs_trained(resumed, step, resumed.num_steps)) == expected
    third = make_timeline(2.0, later=[(step, 3), (step + 1, 2)], options=options)
    middle = packs_trained(resumed, step, step + 1)
    assert sorted(done + middle + packs_trained(third, step + 1, third.num_steps)) == expected


def test_figures_count_the_padding_of_sharded_sequences() -> None:
    options = PlanOptions(
        balance="none",
        max_length=64,
        packing_length=64,
        cost=CostModel.of_8b(),
        skrull=SkrullOptions(bucket_size=26, sequence_parallel_size=2, alignment=16),
    )
    plan = plan_epoch(np.array(LENGTHS, np.int32), TARGETS, options, seed=0)
    flops = np.arange(len(TARGETS), dtype=np.float64)
    samples = SampleFigures(np.zeros_like(TARGETS), TARGETS, flops, 2 * flops)
    figures = list(figures_of_steps(plan, samples, is_dynamic=False))
    assert sum(step.tokens for step in figures) == sum(LENGTHS)
    assert sum(step.flops for step in figures) == flops.sum()
    assert sum(step.hardware_flops for step in figures) == 2 * flops.sum()
    # 40 and 30 have to be shared, in 48 and 32 tokens.
    assert sum(step.computed_tokens for step in figures) >= sum(LENGTHS) + 5 * 8 + 7 * 2
    assert plan.summary.fill == pytest.approx(sum(LENGTHS) / sum(step.computed_tokens for step in figures))


def test_epochs_end_at_the_same_step_after_a_partial_epoch() -> None:
    """Evaluation and checkpoints by epochs follow it: after a rest of other size the ends are no multiples."""
    uninterrupted = make_timeline()
    assert [step for step in range(1, uninterrupted.num_steps + 1) if uninterrupted.locate(step)[1] == 0] == [
        epoch * uninterrupted.steps_per_epoch for epoch in (1, 2, 3)
    ]
    resumed = make_timeline(later=[(3, 2)])
    first_stop = resumed.span_at(3).stop_step
    assert first_stop % resumed.steps_per_epoch
    ends = [step for step in range(4, resumed.num_steps + 1) if resumed.locate(step)[1] == 0]
    assert ends == [first_stop + epoch * resumed.steps_per_epoch for epoch in range(3)]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=120),
    rank_counts=st.lists(st.sampled_from([1, 2, 4, 8]), min_size=2, max_size=4),
    balance=st.sampled_from(["none", "within-step"]),
    skrull=st.booleans(),
    data=st.data(),
)
def test_packs_per_step_makes_steps_independent_of_ranks(
    lengths: list[int], rank_counts: list[int], balance: Any, skrull: bool, data: st.DataObject
) -> None:
    """Whichever ranks train the run, resumed at any steps: the samples of every step are those of one rank."""
    options = PlanOptions(
        balance=balance,
        max_length=64,
        packing_length=64,
        cost=CostModel(per_token=3.0, per_square=0.5),
        skrull=SkrullOptions(bucket_size=64) if skrull else None,
    )
    config = dataclasses.replace(CONFIG, packs_per_step=8, num_train_epochs=2.0)
    reader: Any = None
    files: Any = object()
    targets = np.ones(len(lengths), np.int64)
    inputs = Inputs(
        config=config, options=options, lengths=np.array(lengths, np.int32), targets=targets, reader=reader, files=files
    )

    def shape(num_ranks: int) -> BatchShape:
        return BatchShape.of(config, num_ranks)

    one_rank = Timeline.of(inputs, (Assignment(0, *shape(1)),))
    last = one_rank.num_steps - 1
    resumed_at = sorted(data.draw(st.lists(st.integers(0, last), max_size=len(rank_counts) - 1, unique=True)))
    assignments = [Assignment(step, *shape(ranks)) for step, ranks in zip((0, *resumed_at), rank_counts, strict=False)]
    timeline = Timeline.of(inputs, assignments)
    assert timeline.num_steps == one_rank.num_steps
    for step in range(one_rank.num_steps):
        samples, expected = (
            np.sort(span.plan.samples_of(step - span.first_step, step - span.first_step + 1))
            for span in (timeline.span_at(step), one_rank.span_at(step))
        )
        assert samples.tolist() == expected.tolist()
        assert timeline.epochs(step) == pytest.approx(one_rank.epochs(step))
