"""Prefixes shared among the samples that an epoch draws or a step has: each step still has the same samples."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtool.config.plan import PlanConfig
from packtool.errors import ConfigError
from packtool.launch.world import World
from packtool.planning.epoch import EpochPlan
from packtool.planning.ledger import DataChange, RowCounts
from packtool.progress import SilentProgress
from packtool.train.prepare.checkpoint import BatchShape
from packtool.train.prepare.preview import preview
from packtool.train.prepare.run import Run
from packtool.train.run import train
from tests.train.alike import make_alike_world
from tests.train.test_gradients import DESCENT, check_same_step
from tests.train.tiny import TinyWorld, check_same_rest, read_metrics

UNSHARED = {"share_prefix": "false"}


@pytest.fixture(scope="module")
def alike_world(tiny: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    return make_alike_world(tiny, tmp_path_factory.mktemp("alike"))


@pytest.fixture
def mix(alike_world: TinyWorld, tiny: TinyWorld, tmp_path: Path) -> str:
    """Some rows twice and a part of them a third time, with rows of another source that share nothing."""
    path = tmp_path / "mix.yaml"
    sources = [{"path": f"{alike_world.cache}#2.3x", "channel": "a", "loss_weight": 0.5}, {"path": tiny.cache}]
    path.write_text(json.dumps({"sources": sources}))
    return str(path)


def prepared(world: TinyWorld, folder: Path, size: int = 1, **settings: Any) -> Run:
    return Run.of(world.config(folder, **settings), World(size=size))


def samples_of_steps(plan: EpochPlan) -> list[list[int]]:
    return [sorted(plan.samples_of(step, step + 1).tolist()) for step in range(plan.steps.num_steps)]


def check_packs(plan: EpochPlan, run: Run) -> None:
    """Packs hold no more than they may, and a sample's tokens are those that it adds to the one before it."""
    packs = plan.packs
    assert packs.shared_tokens is not None
    assert packs.tokens_per_pack().max() <= packs.capacity
    assert (packs.full_lengths == run.source.reader.index.length[packs.samples]).all()
    assert (packs.shared_tokens[packs.offsets[:-1]] == 0).all()


def test_epochs_of_a_mixture_have_their_own_trees(alike_world: TinyWorld, mix: str, tmp_path: Path) -> None:
    settings = {"cached_dataset": (), "mix": mix, "num_train_epochs": 3.0}
    run, unshared = (prepared(alike_world, tmp_path, **settings, **options) for options in ({}, UNSHARED))
    inputs = run.source.inputs
    assert inputs.mixture is not None
    assert inputs.shared is not None
    steps = run.timeline.steps_per_epoch
    assert steps < unshared.timeline.steps_per_epoch
    all_packs = set()
    for epoch in range(3):
        plan = inputs.plan_of(epoch, BatchShape(1, 1, 1))
        check_packs(plan, run)
        assert plan.steps.num_steps == steps
        assert sorted(plan.packs.samples.tolist()) == sorted(inputs.mixture.draw(epoch).tolist())
        shared = inputs.shared_in(plan.packs)
        assert shared is not None
        assert shared.num_tokens_without_sharing - plan.packs.num_tokens == shared.trees.num_shared_tokens
        assert shared.saved > 0.3
        all_packs.add(plan.packs.fingerprint)
    assert len(all_packs) == 3
    # What is left of an epoch after the data changed, too.
    untrained = np.sort(inputs.mixture.draw(0))[3:]
    left = RowCounts.of(np.bincount(untrained, minlength=len(inputs.lengths)))
    rest = inputs.plan_remaining(DataChange(1, 0, (left,)), BatchShape(1, 1, 1))
    assert rest is not None
    check_packs(rest, run)
    assert sorted(rest.packs.samples.tolist()) == untrained.tolist()
    # Copies of a sample are in different trees.
    for start, stop in zip(shared.trees.offsets[:-1], shared.trees.offsets[1:], strict=True):
        assert len(set(shared.trees.samples[start:stop].tolist())) == stop - start
    figures = preview(PlanConfig(mix=mix, packing_length=256, max_length=160)).figures()
    assert figures["shared_prefixes"]["token_share_saved"] == pytest.approx(inputs.shared.saved)


def test_the_last_step_takes_packs_that_an_epoch_has_too_many(
    alike_world: TinyWorld, mix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepared(alike_world, tmp_path, cached_dataset=(), mix=mix)
    inputs, shape = run.source.inputs, BatchShape(2, 2, 1)
    needed = inputs._drawn_packs(1).num_packs
    fewer = dataclasses.replace(inputs)
    vars(fewer)["_num_drawn_packs"] = needed - 1 - needed % 4
    plan = fewer.plan_of(1, shape)
    assert plan.packs.num_packs == needed
    assert plan.steps.num_steps == -(-(needed - 1 - needed % 4) // 4)
    assert sorted(plan.packs.samples.tolist()) == sorted(inputs.plan_of(1, shape).packs.samples.tolist())
    assert sorted(plan.steps.order.tolist()) == list(range(needed))


@pytest.mark.parametrize("settings", [{}, {"samples_per_step": 60, "max_steps": 1}], ids=["packs", "samples per step"])
def test_a_step_of_a_mixture_equals_that_without_sharing(
    settings: dict[str, Any], alike_world: TinyWorld, mix: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = DESCENT | {"cached_dataset": (), "mix": mix} | settings
    if not settings:
        options |= {"gradient_accumulation_steps": 64}
    for name, sharing in (("shared", {"share_prefix": "true"}), ("unshared", UNSHARED)):
        train(alike_world.config(tmp_path / name, **options, **sharing), SilentProgress())
    check_same_step(tmp_path / "shared", tmp_path / "unshared")
    (line,), (expected,) = read_metrics(tmp_path / "shared"), read_metrics(tmp_path / "unshared")
    assert line["tokens"] < 0.9 * expected["tokens"]


def test_steps_of_stages_share_prefixes(alike_world: TinyWorld, tiny: TinyWorld, tmp_path: Path) -> None:
    path = tmp_path / "stages.yaml"
    sources = [{"path": f"{alike_world.cache}#70%"}, {"path": tiny.cache}]
    path.write_text(json.dumps({"stages": [{"until": "40%", "sources": sources}, {"sources": sources}]}))
    settings = {"cached_dataset": (), "mix": str(path), "max_steps": 12}
    run, unshared = (prepared(alike_world, tmp_path, **settings, **options) for options in ({}, UNSHARED))
    num_saved = []
    for stage, unshared_stage in zip(run.timeline.stages, unshared.timeline.stages, strict=True):
        assert (stage.first_step, stage.stop_step) == (unshared_stage.first_step, unshared_stage.stop_step)
        spans = list(stage.spans())
        num_saved.append(sum(int(span.plan.packs.full_lengths.sum()) - span.plan.packs.num_tokens for span in spans))
    assert min(num_saved) > 0
    train(alike_world.config(tmp_path / "whole", **settings, save_steps=5), SilentProgress())
    resume = {"resume_from_checkpoint": str(tmp_path / "whole" / "checkpoint-5")}
    train(alike_world.config(tmp_path / "rest", **settings, save_steps=5, **resume), SilentProgress())
    check_same_rest(tmp_path / "whole", tmp_path / "rest", 5)


@pytest.mark.parametrize("size", [1, 2])
def test_steps_of_a_number_of_samples_keep_them(size: int, alike_world: TinyWorld, tmp_path: Path) -> None:
    settings = {"samples_per_step": 12, "num_train_epochs": 2.0}
    run, unshared = (prepared(alike_world, tmp_path, size, **settings, **options) for options in ({}, UNSHARED))
    assert run.source.min_shared is not None
    for epoch in range(2):
        plan, expected = (each.source.inputs.plan_of(epoch, BatchShape(size, 1, 1)) for each in (run, unshared))
        check_packs(plan, run)
        assert samples_of_steps(plan) == samples_of_steps(expected)
        assert plan.packs.num_tokens < 0.9 * expected.packs.num_tokens
    # What is left of an epoch keeps its steps, too, on another number of ranks.
    rest = run.source.inputs.assign(plan.packs_from(1), BatchShape(3 - size, 1, 1))
    check_packs(rest, run)
    assert samples_of_steps(rest) == samples_of_steps(expected)[1:]
    in_order = prepared(alike_world, tmp_path, size, **settings, shuffle=False).timeline.first_plan
    assert in_order.packs.num_tokens < plan.packs.num_tokens
    assert np.concatenate(samples_of_steps(in_order)).tolist() == list(range(36))


def test_a_run_of_samples_per_step_resumes_exactly(alike_world: TinyWorld, tmp_path: Path) -> None:
    settings = {"samples_per_step": 12, "num_train_epochs": 2.0, "save_steps": 1}
    train(alike_world.config(tmp_path / "whole", **settings), SilentProgress())
    checkpoint = str(tmp_path / "whole" / "checkpoint-2")
    train(alike_world.config(tmp_path / "rest", **settings, resume_from_checkpoint=checkpoint), SilentProgress())
    check_same_rest(tmp_path / "whole", tmp_path / "rest", 2)


def test_limits_of_rows_per_tree_exclude_drawn_trees(alike_world: TinyWorld, mix: str, tmp_path: Path) -> None:
    settings = {"cached_dataset": (), "mix": mix, "max_rows_per_tree": 2}
    inputs = prepared(alike_world, tmp_path, **settings).source.inputs
    assert inputs.shared is None
    assert "--max-rows-per-tree" in str(inputs.no_sharing_reason)
    with pytest.raises(ConfigError, match="--max-rows-per-tree cannot be combined"):
        prepared(alike_world, tmp_path, **settings, share_prefix="true")
