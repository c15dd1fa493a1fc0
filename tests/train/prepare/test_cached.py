"""What is decided before a weight is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from packtool.launch.world import World
from packtool.train.prepare.cached import prepare_run
from tests.train.tiny import TinyWorld, export_rows


def test_every_epoch_has_its_own_plan_and_every_rank_the_same(tiny: TinyWorld, tmp_path: Path) -> None:
    config = tiny.config(tmp_path, num_train_epochs=3.0)
    first, second = (prepare_run(config, World(rank, 2)) for rank in (0, 1))
    plans = [first.schedule.plan_of(epoch) for epoch in range(3)]
    assert len({plan.fingerprint for plan in plans}) == 3
    assert [second.schedule.plan_of(epoch).fingerprint for epoch in range(3)] == [plan.fingerprint for plan in plans]
    for plan in plans:
        assert sorted(plan.packs.samples) == list(range(len(first.reader)))
    assert not np.array_equal(plans[0].packs.samples, plans[1].packs.samples)


def test_the_seed_decides_the_plan(tiny: TinyWorld, tmp_path: Path) -> None:
    states = [prepare_run(tiny.config(tmp_path, seed=seed), World()).state for seed in (1, 1, 2)]
    assert states[0] == states[1]
    assert states[0].plan != states[2].plan
    assert states[0].cache == states[2].cache


def test_a_cache_that_may_name_web_addresses_is_told_of(tiny: TinyWorld, tmp_path: Path) -> None:
    export_rows(tiny, tmp_path / "any", media_access="any")
    given = {"cached_dataset": (tiny.cache, str(tmp_path / "any"))}
    (note,) = prepare_run(tiny.config(tmp_path, **given), World()).notes
    assert "--media-access any" in note
    assert not prepare_run(tiny.config(tmp_path, **given, media_access="any"), World()).notes
    assert not prepare_run(tiny.config(tmp_path), World()).notes


def test_lengths_are_the_exports_unless_given(tiny: TinyWorld, tmp_path: Path) -> None:
    state = prepare_run(tiny.config(tmp_path, packing_length=None), World()).state
    assert (state.max_length, state.packing_length) == (128, 128)
    state = prepare_run(tiny.config(tmp_path, packing_length=None, max_length=100), World()).state
    assert (state.max_length, state.packing_length) == (100, 100)
