"""What is decided before a weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtool.config.train import TrainConfig
from packtool.errors import ConfigError
from packtool.launch.world import World
from packtool.train.prepare.run import Run
from tests.train.tiny import TinyWorld, export_rows


def test_epochs_have_different_plans_and_ranks_the_same_plan(tiny: TinyWorld, tmp_path: Path) -> None:
    config = tiny.config(tmp_path, num_train_epochs=3.0)
    first_run, second_run = (Run.of(config, World(rank, 2)) for rank in (0, 1))
    plans = [first_run.timeline.plan_of(epoch) for epoch in range(3)]
    assert len({plan.fingerprint for plan in plans}) == 3
    assert [second_run.timeline.plan_of(epoch).fingerprint for epoch in range(3)] == [
        plan.fingerprint for plan in plans
    ]
    for plan in plans:
        assert sorted(plan.packs.samples) == list(range(len(first_run.source.reader)))
    assert not np.array_equal(plans[0].packs.samples, plans[1].packs.samples)


def test_the_seed_decides_the_plan(tiny: TinyWorld, tmp_path: Path) -> None:
    states = [Run.of(tiny.config(tmp_path, seed=seed), World()).state for seed in (1, 1, 2)]
    assert states[0] == states[1]
    assert states[0].plan != states[2].plan
    assert states[0].cache == states[2].cache


def test_caches_with_web_addresses_give_a_warning(tiny: TinyWorld, tmp_path: Path) -> None:
    export_rows(tiny, tmp_path / "any", media_access="any")
    run_options = {"cached_dataset": (tiny.cache, str(tmp_path / "any"))}
    (note,) = Run.of(tiny.config(tmp_path, **run_options), World()).notes
    assert "--media-access any" in note
    assert not Run.of(tiny.config(tmp_path, **run_options, media_access="any"), World()).notes
    assert not Run.of(tiny.config(tmp_path), World()).notes


def test_maximum_length_defaults_to_that_of_the_export(tiny: TinyWorld, tmp_path: Path) -> None:
    state = Run.of(tiny.config(tmp_path, packing_length=None), World()).state
    assert (state.max_length, state.packing_length) == (128, 128)
    state = Run.of(tiny.config(tmp_path, packing_length=None, max_length=100), World()).state
    assert (state.max_length, state.packing_length) == (100, 100)


def test_the_first_samples_are_the_shortest_of_the_first_pack_in_its_order(tiny: TinyWorld, tmp_path: Path) -> None:
    run = Run.of(tiny.config(tmp_path), World())
    (pack,) = run.timeline.plan_of(0).samples(0, 0, 0)
    lengths = [int(run.source.reader.index.length[position]) for position in pack]
    shortest = sorted(range(len(pack)), key=lambda position: lengths[position])[:3]
    expected = [run.source.reader.sample(int(pack[position])).row for position in sorted(shortest)]
    assert [sample.row for sample in run.source.first_samples(3)] == expected


def test_plans_are_cached_in_one_place(tiny: TinyWorld, tmp_path: Path) -> None:
    """The epoch that is trained and the one that is read ahead are planned once, whoever asks."""
    schedule = Run.of(tiny.config(tmp_path, num_train_epochs=4.0), World()).timeline
    assert schedule.first_plan is schedule.plan_of(0)
    second_plan, third = schedule.plan_of(1), schedule.plan_of(2)
    assert (schedule.plan_of(1), schedule.plan_of(2)) == (second_plan, third)


def test_the_log_says_whether_samples_are_packed(tiny: TinyWorld, tmp_path: Path) -> None:
    assert TrainConfig(model="m", cached_dataset=("c",), output_dir="o").packing, "unless something else is said"

    def packing_line(**settings: Any) -> str:
        run = Run.of(tiny.config(tmp_path, **settings), World())
        (line,) = [line for line in run.source.lines(run.config) if line.startswith("packing: ")]
        return line

    assert packing_line().startswith("packing: yes (--packing false pads); packing length: 256, ")
    assert "padded rows of one sample each (--packing false)" in packing_line(packing=False)
    assert "up to 500 tokens without padding" in packing_line(packing=False, dynamic_batch_tokens=500)


def test_a_val_split_is_evaluated_when_checkpoints_are_saved(tiny: TinyWorld, tmp_path: Path) -> None:
    export_rows(tiny, tmp_path / "with", split_dataset_ratio=0.1)
    split = {"cached_dataset": (str(tmp_path / "with"),), "save_steps": 7}

    def decided(**settings: Any) -> tuple[str | None, int | None, bool, bool]:
        run = Run.of(tiny.config(tmp_path, **settings), World())
        has_note = any("--eval-strategy no turns this off" in note for note in run.notes)
        return run.config.eval_strategy, run.config.eval_steps, run.validation is not None, has_note

    assert decided(**split) == ("steps", 7, True, True)
    assert decided(**split, save_strategy="best") == ("steps", 7, True, True)
    assert decided(**split, save_strategy="epoch", eval_steps=3) == ("epoch", 3, True, True)
    assert decided(**split, eval_strategy="steps", eval_steps=3) == ("steps", 3, True, False)
    for disabling_options in ({"eval_strategy": "no"}, {"save_strategy": "no"}):
        assert decided(**split, **disabling_options)[2:] == (False, False)
    assert decided()[2:] == (False, False)
    both = {"cached_dataset": (str(tmp_path / "with"), tiny.cache)}
    (note,) = Run.of(tiny.config(tmp_path, **both), World()).notes
    assert note == "nothing is evaluated, because only some of the caches have a val split"
    with pytest.raises(
        ConfigError, match="the best checkpoint and early stopping need an evaluation, and nothing is evaluated"
    ):
        decided(load_best_model_at_end=True)
