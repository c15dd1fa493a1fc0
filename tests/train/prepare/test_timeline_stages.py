"""The stages of a curriculum: what each trains, and where a run goes on within them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtool.config.mixture import MixOptions, Recipe, parse_recipe, unify_sources
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError
from packtool.planning.ledger import Ledger, concatenate_counts
from packtool.planning.mixture import counts_of_samples
from packtool.planning.options import PlanOptions
from packtool.train.prepare.caches import _with_amounts
from packtool.train.prepare.checkpoint import Assignment, BatchShape
from packtool.train.prepare.history import begin_ledger, ledger_after
from packtool.train.prepare.inputs import Inputs
from packtool.train.prepare.resume import ledger_for_new_caches
from packtool.train.prepare.timeline import Timeline, TrainedStage

SHORT, LONG = 256, 1024


def recipe(*stages: dict[str, Any], **common: Any) -> Recipe:
    parsed_recipe = parse_recipe(json.dumps({**common, "stages": stages}), "mix.yaml", MixOptions())
    return unify_sources(parsed_recipe)


def reader(*sizes: int, seed: int = 0) -> Any:
    """What stands for a reader of caches that were never written."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(4.2, 1, sum(sizes)), 4, LONG).astype(np.int32)
    index = SimpleNamespace(length=lengths, media_tokens=np.zeros_like(lengths))
    names = tuple(f"/{index}" for index in range(len(sizes)))
    manifests = tuple(SimpleNamespace(fingerprint=f"{name} {size}") for name, size in zip(names, sizes, strict=True))
    return SimpleNamespace(index=index, offsets=np.cumsum([0, *sizes]), directories=names, manifests=manifests)


def inputs(cache_reader: Any, recipe: Recipe, **overrides: Any) -> Inputs:
    config = TrainConfig(model="m", cached_dataset=("c",), output_dir="o", **overrides)
    options = PlanOptions(max_length=LONG, packing_length=LONG, balance="none")
    targets = np.maximum(cache_reader.index.length // 2, 1)
    plain = Inputs(
        config=config, options=options, lengths=cache_reader.index.length, targets=targets, reader=cache_reader
    )
    return plain.with_mixture(recipe, LONG)


def weights(**each: float) -> list[dict[str, Any]]:
    return [{"path": path, "samples": weight} for path, weight in each.items()]


def samples_of(timeline: Timeline, start: int, stop: int) -> np.ndarray[Any, Any]:
    """What the steps train, one by one."""
    sample_ids = []
    for step in range(start, stop):
        span = timeline.span_at(step)
        sample_ids.append(span.plan.samples_of(step - span.first_step, step - span.first_step + 1))
    return np.concatenate([np.zeros(0, np.int64), *sample_ids])


TWO = (
    {"until": "60%", "packing_length": SHORT, "sources": weights(a=3, b=1)},
    {"sources": weights(a=1, b=1, c=2)},
)


def test_every_stage_has_its_shares_lengths_and_steps() -> None:
    cache_reader = reader(9000, 6000, 6000)
    timeline = Timeline.of(inputs(cache_reader, recipe(*TWO), max_steps=700), (Assignment(0, 1, 1, 4),))
    assert timeline.num_steps == 700
    assert [(part.first_step, part.stop_step) for part in timeline.stages] == [(0, 420), (420, 700)]
    for part, shares in zip(timeline.stages, ([0.75, 0.25, 0], [0.25, 0.25, 0.5]), strict=True):
        room = part.inputs.options.packing_length
        for first_step in range(part.first_step, part.stop_step - 99, 40):
            sample_ids = samples_of(timeline, first_step, first_step + 100)
            counts = counts_of_samples(sample_ids, part.mixture)[:, 0]
            assert counts / counts.sum() == pytest.approx(shares, rel=0.1)
            assert cache_reader.index.length[sample_ids].max() <= room
    assert [timeline.plan_of(timeline.locate(step)[0]).packs.capacity for step in (0, 419, 420, 699)] == [
        SHORT, SHORT, LONG, LONG,
    ]  # fmt: skip
    assert timeline.stage_of(419)[0] == 0
    assert timeline.stage_of(420) == (1, timeline.locate(420)[0])
    assert timeline.locate(420)[1] == 0


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"until": 9}, {}, r"stages\[0\].until: 9 steps need --max-steps"),
        ({"until": 9}, {"max_steps": 9}, r"stages\[1\]: the run ends after step 9"),
        ({"until": None}, {"max_steps": 9}, r"stages\[0\].until is missing: with --max-steps"),
        ({"packing_length": 9}, {"packing": False}, r"stages\[0\].packing_length: it cannot be combined with"),
        ({"sequence_parallel_size": 2}, {}, r"stages\[0\].sequence_parallel_size: 2 does not divide the 1 processes"),
    ],
)
def test_stages_that_conflict_with_the_run_are_refused(
    change: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        inputs(reader(9, 9, 9), recipe({**TWO[0], **change}, TWO[1]), **options)


def test_two_stages_that_end_at_the_same_step_are_refused() -> None:
    stages = {**TWO[0], "until": "1%"}, {**TWO[0], "until": "2%"}, TWO[1]
    with pytest.raises(ConfigError, match=r"stages\[1\]\.until: 2% is step 1, not after step 1"):
        inputs(reader(9, 9, 9), recipe(*stages), max_steps=9)


@st.composite
def runs(draw: st.DrawFn) -> tuple[Any, Recipe, dict[str, Any]]:
    """Caches, a recipe of two or three stages, and how long the run is."""
    sizes = draw(st.lists(st.integers(5, 60), min_size=2, max_size=3))
    num = draw(st.integers(2, 3))
    mode = draw(st.sampled_from(["steps", "shares", "shares of steps", "epochs"]))
    ends = sorted(draw(st.lists(st.integers(1, 19), min_size=num - 1, max_size=num - 1, unique=True)))
    stages = []
    for stage_index in range(num):
        names = draw(st.lists(st.sampled_from("abc"[: len(sizes)]), min_size=1, max_size=3, unique=True))
        amounts = draw(st.booleans())
        sources = [
            {"path": f"{name}#{draw(st.sampled_from(['7', '40%', '1.5x']))}"} if amounts
            else {"path": name, "samples": draw(st.integers(1, 3))}
            for name in sorted(names)
        ]  # fmt: skip
        stage: dict[str, Any] = {"sources": sources, "packing_length": draw(st.sampled_from([512, LONG]))}
        if mode != "epochs" and stage_index < num - 1:
            stage["until"] = ends[stage_index] if mode == "steps" else f"{5 * ends[stage_index]}%"
        stages.append(stage)
    length = {"num_train_epochs": draw(st.sampled_from([1.0, 2.5]))}
    recipe = recipe_of_stages(stages)
    return reader(*sizes[: len(recipe.sources)]), recipe, {"max_steps": 20} if "steps" in mode else length


def recipe_of_stages(stages: list[dict[str, Any]]) -> Recipe:
    """A recipe with the sources of all stages, also of caches that were never written."""
    parsed_recipe = parse_recipe(json.dumps({"stages": stages}), "mix.yaml", MixOptions())
    problems: list[str] = []
    parts = [_with_amounts(stage, problems) for stage in parsed_recipe.stages]
    assert not problems
    # All caches have a place, whether a stage takes them or not.
    return unify_sources(replace(parsed_recipe, stages=tuple(parts)))


def mixture_of(stage: TrainedStage, epoch: int) -> np.ndarray[Any, Any]:
    """How often an epoch draws each sample."""
    return np.bincount(stage.sections[-1].plan_of(epoch).packs.samples, minlength=len(stage.inputs.lengths))


@settings(max_examples=12)
@given(runs())
def test_stages_start_with_the_least_trained_samples(
    run: tuple[Any, Recipe, dict[str, Any]],
) -> None:
    cache_reader, recipe, length = run
    timeline = Timeline.of(inputs(cache_reader, recipe, **length), (Assignment(0, 2, 1, 1),))
    resumed = Timeline.of(inputs(cache_reader, recipe, **length), (Assignment(0, 2, 1, 1),))
    assert timeline.num_steps == resumed.num_steps == length.get("max_steps", timeline.num_steps)
    trained = np.zeros(len(cache_reader.index.length), np.int64)
    step = 0
    for stage_index, part in enumerate(timeline.stages):
        assert (part.number, part.first_step) == (stage_index, step)
        assert part.stop_step > step
        epoch, done = timeline.locate(step)
        assert (epoch, done) == (part.first_epoch, 0)
        num_trained = mixture_of(part, epoch)
        for source_candidates in part.mixture.candidates:
            # What comes more often than another sample of its source was trained no more often than that.
            order = np.argsort(num_trained[source_candidates], kind="stable")
            for less, more in pairwise(np.unique(num_trained[source_candidates])):
                assert (
                    trained[source_candidates][num_trained[source_candidates] == more].max()
                    <= trained[source_candidates][num_trained[source_candidates] == less].min()
                ), order
        assert np.array_equal(
            np.sort(samples_of(timeline, step, part.stop_step)), np.sort(samples_of(resumed, step, part.stop_step))
        )
        counts = np.bincount(samples_of(timeline, step, part.stop_step), minlength=len(trained))
        assert np.array_equal(counts, part.training_counts())
        assert timeline.target_tokens_from(step) >= int((counts * np.maximum(cache_reader.index.length // 2, 1)).sum())
        trained += counts
        step = part.stop_step
    assert step == timeline.num_steps


@settings(max_examples=12)
@given(
    runs(), st.lists(st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 4])), min_size=1, max_size=3), st.booleans()
)
def test_a_run_with_stages_resumes_at_any_step(
    run: tuple[Any, Recipe, dict[str, Any]], kills: list[tuple[int, int]], at_ends: bool
) -> None:
    """Killed after any step, or exactly where a stage ends, and resumed by any number of processes."""
    cache_reader, recipe, length = run
    run_inputs = inputs(cache_reader, recipe, **length)
    lengths = cache_reader.index.length
    assignments = [Assignment(0, 2, 1, 1)]
    timeline = Timeline.of(run_inputs, assignments)
    ledger, counted = begin_of(cache_reader), np.zeros(len(lengths), np.int64)
    for ahead, world_size in kills:
        stop = min(ledger.step + ahead, timeline.num_steps)
        if at_ends:
            stop = timeline.stage(ledger.step).stop_step
        counted += np.bincount(samples_of(timeline, ledger.step, stop), minlength=len(lengths))
        ledger = ledger_after(ledger, timeline, stop)
        assert ledger.stage == timeline.stage_of(stop)
        before = timeline
        if stop == timeline.num_steps:
            break
        if world_size != assignments[-1][1]:
            assignments.append(Assignment(stop, world_size, 1, 1))
        timeline = Timeline.of(inputs(cache_reader, recipe, **length), assignments)
        if len(assignments) == 1:
            assert np.array_equal(samples_of(timeline, 0, stop), samples_of(before, 0, stop))
        epoch, _ = timeline.locate(stop)
        assert epoch == before.locate(stop)[0]
    total = concatenate_counts([source.trained for source in ledger.sources])
    assert np.array_equal(total, counted)
    remaining = samples_of(timeline, ledger.step, timeline.num_steps)
    counted += np.bincount(remaining, minlength=len(lengths))
    if "max_steps" in length:
        assert timeline.num_steps == 20
        return
    # Other processes pack nothing anew: what a stage has to train, it trains.
    uninterrupted = Timeline.of(run_inputs, (Assignment(0, 1, 1, 1),))
    assert np.array_equal(counted, sum(part.training_counts() for part in uninterrupted.stages))


@settings(max_examples=12)
@given(runs(), st.integers(0, 25), st.booleans(), st.sampled_from([1, 2]))
def test_data_may_change_in_any_stage(
    run: tuple[Any, Recipe, dict[str, Any]], step: int, is_end: bool, world_size: int
) -> None:
    """A cache comes, or other weights: of what was trained in the epoch nothing comes again in it."""
    cache_reader, recipe, length = run
    run_inputs = inputs(cache_reader, recipe, **length)
    timeline = Timeline.of(run_inputs, (Assignment(0, 2, 1, 1),))
    step = min(timeline.stage(step).stop_step if is_end else step, timeline.num_steps - 1)
    ledger = ledger_after(begin_of(cache_reader), timeline, step)
    more = replace(
        recipe,
        stages=tuple(
            replace(stage, sources=tuple(replace(s, weight=s.weight and 2.0) for s in stage.sources))
            for stage in recipe.stages
        ),
    )
    other = inputs(cache_reader, more, **length)
    batch_shape = BatchShape(world_size, 1, 1)
    to_resume = other.epoch_to_resume(ledger, batch_shape)
    changed, _ = ledger_for_new_caches(ledger, cache_reader, to_resume, "")
    change = changed.change
    assert change is not None
    after = Timeline.of(other, (Assignment(step, *batch_shape),), change)
    assert after.stage_of(step)[0] == ledger.stage[0] or after.stage(step).first_step == step
    epoch = after.locate(step)[0]
    if epoch == ledger.epoch:
        trained = concatenate_counts([each.epoch for each in ledger.sources])
        planned_counts = np.bincount(after.plan_of(epoch).packs.samples, minlength=len(trained))
        expected_counts = to_resume.count_samples(
            concatenate_counts([source.before for source in ledger.sources]), trained
        )
        assert np.array_equal(planned_counts, np.maximum(expected_counts - trained, 0))
    # Written down, and read, it goes on as it was planned; and once more from a later step.
    remaining = samples_of(after, step, after.num_steps)
    later = ledger_after(changed, after, min(step + 3, after.num_steps))
    resumed = Timeline.of(inputs(cache_reader, more, **length), (Assignment(step, *batch_shape),), later.change)
    assert np.array_equal(samples_of(resumed, step, resumed.num_steps), remaining)
    assert [part.stop_step for part in resumed.stages] == [part.stop_step for part in after.stages]
    if "max_steps" in length:
        assert after.num_steps == 20


def begin_of(cache_reader: Any) -> Ledger:
    return begin_ledger(cache_reader)
