"""Steps are numbered through all epochs, and loading begins at any of them."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from packtool.attention.parallel.axes import Axes
from packtool.config.train import TrainConfig
from packtool.launch.world import World
from packtool.plan.cost import CostModel
from packtool.plan.epoch import EpochPlan, assign_packs, plan_epoch
from packtool.plan.options import PlanOptions, SkrullOptions
from packtool.train.loop.callbacks import ends_epoch
from packtool.train.loop.loader import StepLoader
from packtool.train.prepare.cached import CachedRun
from packtool.train.prepare.figures import SampleFigures, figures_of_steps
from packtool.train.prepare.prepared import Beginning
from packtool.train.prepare.schedule import PlannedSchedule, rest_of
from tests.batch.reduced import reduced_spec
from tests.batch.test_dataset import Samples, documents

LENGTHS = [40] * 5 + [30] * 7 + [20] * 4
READER = Samples.of_lengths(LENGTHS)
CONFIG = TrainConfig(model="m", cached_dataset=("c",), output_dir="o", packing=True, dataloader_num_workers=0)
TARGETS = np.array([(sample.labels[1:] != -100).sum() for sample in READER.samples], np.int32)


def make_schedule(num_epochs: float = 3.0, max_steps: int | None = None, world_size: int = 1) -> PlannedSchedule:
    options = PlanOptions(
        balance="none",
        max_length=64,
        packing_length=64,
        world_size=world_size,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=1,
    )

    def plan_of(epoch: int) -> EpochPlan:
        return plan_epoch(np.array(LENGTHS, np.int32), TARGETS, options, seed=0, epoch=epoch)

    return PlannedSchedule(plan_of, num_epochs=num_epochs, max_steps=max_steps)


def load(schedule: PlannedSchedule, start: int, world: World | None = None) -> list[tuple[int, list[list[list[int]]]]]:
    """(target tokens, documents of each micro-batch) of every step."""
    nothing: Any = None
    before: Any = SimpleNamespace(step=start)
    run = CachedRun(
        config=CONFIG,
        world=world or World(),
        files=nothing,
        media_limits=nothing,
        schedule=schedule,
        state=nothing,
        beginning=Beginning(None, before, None, ()),
        axes=Axes(),
        reader=nothing,
        samples=READER,
        planner=nothing,
        ledger=nothing,
        figures=SampleFigures(TARGETS, np.zeros_like(TARGETS), np.zeros_like(TARGETS), TARGETS, None),
    )
    loader = StepLoader(run, reduced_spec("qwen3"))
    assert len(loader) == schedule.num_steps
    steps = []
    for step in loader:
        batches = list(step.micro_batches)
        assert len(batches) == step.num_micro_batches
        steps.append((step.figures.target_tokens, [documents(batch) for batch in batches]))
    return steps


def test_the_last_step_of_an_epoch_is_smaller() -> None:
    schedule = make_schedule()
    num_packs = schedule.plan_of(0).packs.num_packs
    assert num_packs % 2 == 1
    sizes = [len(batches) for _, batches in load(schedule, 0)]
    assert sizes == ([2] * (num_packs // 2) + [1]) * 3


@pytest.mark.smoke
def test_every_epoch_has_every_sample_in_new_company() -> None:
    schedule = make_schedule()
    steps = load(schedule, 0)
    epochs = [steps[n * schedule.steps_per_epoch : (n + 1) * schedule.steps_per_epoch] for n in range(3)]
    everything = sorted(sample.input_ids.tolist() for sample in READER.samples)
    packs = []
    for epoch in epochs:
        micro_batches = [batch for _, batches in epoch for batch in batches]
        assert sorted(ids for batch in micro_batches for ids in batch) == everything
        packs.append({tuple(sorted(map(tuple, batch))) for batch in micro_batches})
    assert packs[0] != packs[1] != packs[2]


@pytest.mark.parametrize("world_size", [1, 2])
def test_from_any_step_the_rest_is_the_same(world_size: int) -> None:
    schedule = make_schedule(world_size=world_size)
    for rank in range(world_size):
        world = World(rank, world_size)
        whole = load(schedule, 0, world)
        assert len(whole) == schedule.num_steps
        for start in range(schedule.num_steps + 1):
            assert load(schedule, start, world) == whole[start:]


def test_epochs_may_end_in_the_middle() -> None:
    whole = load(make_schedule(), 0)
    assert load(make_schedule(max_steps=7), 0) == whole[:7]
    per_epoch = make_schedule().steps_per_epoch
    assert make_schedule(num_epochs=0.5).num_steps == -(-per_epoch // 2)
    assert make_schedule(num_epochs=1.0, max_steps=100).num_steps == 100


def test_target_tokens_are_summed_without_reading() -> None:
    schedule = make_schedule(max_steps=11)
    steps = load(schedule, 0)
    for start in range(12):
        assert schedule.sum_of_target_tokens(start) == sum(targets for targets, _ in steps[start:])
    assert [schedule.target_tokens(step) for step in range(11)] == [targets for targets, _ in steps]


def test_empty_micro_batches_are_counted_by_epoch() -> None:
    per_epoch = make_schedule(world_size=2).plan_of(0).steps.num_empty_micro_batches
    assert per_epoch > 0
    assert make_schedule(world_size=2).num_empty_micro_batches() == 3 * per_epoch
    assert make_schedule(num_epochs=0.5, world_size=2).num_empty_micro_batches() == 0


def test_locating() -> None:
    schedule = make_schedule()
    per_epoch = schedule.steps_per_epoch
    assert schedule.locate(0) == (0, 0)
    assert schedule.locate(2 * per_epoch + 1) == (2, 1)


def assigned(world_size: int) -> Any:
    options = PlanOptions(
        balance="none",
        max_length=64,
        packing_length=64,
        world_size=world_size,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=1,
    )
    return lambda packs: assign_packs(packs, TARGETS, options)


def packs_trained(schedule: PlannedSchedule, first: int, last: int) -> list[tuple[int, tuple[int, ...]]]:
    """(epoch, samples of a pack) of steps [first, last)."""
    found = []
    for step in range(first, last):
        epoch, at = schedule.locate(step)
        plan = schedule.plan_of(epoch)
        for rank in range(plan.steps.world_size):
            for micro in range(plan.steps.num_micro_batches(at)):
                found += [(epoch, tuple(pack.tolist())) for pack in plan.samples(at, rank, micro)]
    return found


@pytest.mark.parametrize("step", range(0, 16, 3))
@pytest.mark.parametrize("world_sizes", [(1, 2), (2, 1), (1, 3)])
def test_every_pack_is_trained_once_whatever_the_processes(step: int, world_sizes: tuple[int, int]) -> None:
    """In each of three epochs, also when the number of processes changes a second time."""
    before, after = world_sizes
    whole = make_schedule(world_size=before)
    step = min(step, whole.num_steps - 1)
    rest = rest_of(whole, step, assigned(after))
    resumed = PlannedSchedule(make_schedule(world_size=after).plan_of, num_epochs=3.0, max_steps=None, rest=rest)
    expected = sorted(packs_trained(whole, 0, whole.num_steps))
    done = packs_trained(whole, 0, step)
    assert sorted(done + packs_trained(resumed, step, resumed.num_steps)) == expected
    targets = sum(resumed.target_tokens(number) for number in range(step, resumed.num_steps))
    assert resumed.sum_of_target_tokens(step) == targets
    again = min(step + 1, resumed.num_steps - 1)
    last = rest_of(resumed, again, assigned(before))
    third = PlannedSchedule(whole.plan_of, num_epochs=3.0, max_steps=None, rest=last)
    middle = packs_trained(resumed, step, again)
    assert sorted(done + middle + packs_trained(third, again, third.num_steps)) == expected


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("step", [0, 1, 3, 5])
def test_what_skrull_took_apart_is_assigned_anew_in_whole_packs(step: int, packing: bool) -> None:
    """Every sample once, in steps as large as without Skrull, whatever the processes and when they change again."""

    def options(world_size: int) -> PlanOptions:
        return PlanOptions(
            balance="none",
            max_length=64,
            packing_length=64,
            packing=packing,
            world_size=world_size,
            cost=CostModel.of_8b(),
            skrull=SkrullOptions(bucket_size=24, sequence_parallel_size=2, alignment=4),
        )

    def schedule(world_size: int) -> PlannedSchedule:
        lengths = np.array(LENGTHS, np.int32)
        plan_of = partial(plan_epoch, lengths, TARGETS, options(world_size), seed=0)
        return PlannedSchedule(lambda epoch: plan_of(epoch=epoch), num_epochs=2.0, max_steps=None)

    whole = schedule(1)
    expected = sorted(packs_trained(whole, 0, whole.num_steps))
    assert len(expected) == 2 * len(LENGTHS)
    done = packs_trained(whole, 0, step)
    rest = rest_of(whole, step, lambda packs: assign_packs(packs, TARGETS, options(3)))
    num_left = whole.plan_of(0).whole_packs.num_packs - step
    assert rest.plan.steps.num_steps == -(-num_left // 3)
    resumed = PlannedSchedule(schedule(3).plan_of, num_epochs=2.0, max_steps=None, rest=rest)
    assert sorted(done + packs_trained(resumed, step, resumed.num_steps)) == expected
    last = rest_of(resumed, step + 1, lambda packs: assign_packs(packs, TARGETS, options(2)))
    third = PlannedSchedule(schedule(2).plan_of, num_epochs=2.0, max_steps=None, rest=last)
    middle = packs_trained(resumed, step, step + 1)
    assert sorted(done + middle + packs_trained(third, step + 1, third.num_steps)) == expected


def test_figures_count_the_padding_of_what_is_sharded() -> None:
    options = PlanOptions(
        balance="none",
        max_length=64,
        packing_length=64,
        cost=CostModel.of_8b(),
        skrull=SkrullOptions(bucket_size=26, sequence_parallel_size=2, alignment=16),
    )
    plan = plan_epoch(np.array(LENGTHS, np.int32), TARGETS, options, seed=0)
    flops = np.arange(len(TARGETS), dtype=np.float64)
    samples = SampleFigures(TARGETS, np.zeros_like(TARGETS), np.zeros_like(TARGETS), TARGETS, flops, 2 * flops)
    figures = list(figures_of_steps(plan, samples, is_dynamic=False))
    assert sum(step.tokens for step in figures) == sum(LENGTHS)
    assert sum(step.flops for step in figures) == flops.sum()
    assert sum(step.hardware_flops for step in figures) == 2 * flops.sum()
    # 40 and 30 have to be shared, in 48 and 32 tokens.
    assert sum(step.computed_tokens for step in figures) >= sum(LENGTHS) + 5 * 8 + 7 * 2
    assert plan.summary.fill == pytest.approx(sum(LENGTHS) / sum(step.computed_tokens for step in figures))


def test_epochs_end_where_they_do_also_behind_a_rest() -> None:
    """Evaluation and checkpoints by epochs follow it: after a rest of other size the ends are no multiples."""
    whole = make_schedule()
    assert [step for step in range(1, whole.num_steps + 1) if ends_epoch(whole, step)] == [
        number * whole.steps_per_epoch for number in (1, 2, 3)
    ]
    rest = rest_of(whole, 3, assigned(2))
    resumed = PlannedSchedule(make_schedule(world_size=2).plan_of, num_epochs=3.0, max_steps=None, rest=rest)
    first = 3 + rest.num_steps
    assert first % resumed.steps_per_epoch
    ends = [step for step in range(4, resumed.num_steps + 1) if ends_epoch(resumed, step)]
    assert ends == [first + number * resumed.steps_per_epoch for number in range(3)]
