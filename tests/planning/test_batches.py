"""The library binpacking, in batches: what it is asked, and what becomes of its answers."""

from __future__ import annotations

import numpy as np
import pytest

from packtool.config.packing import PackOptions
from packtool.planning import packing
from packtool.planning.packing import pack
from tests.planning.test_packing import check, lognormal_lengths, sample_sets

LENGTHS = lognormal_lengths(3000, median=1500, sigma=1.0)


@pytest.mark.parametrize("batch_size", [1, 7, 1000, 5000])
def test_each_sample_once(batch_size: int) -> None:
    options = PackOptions(packing_algorithm="binpacking", packing_batch_size=batch_size)
    plan = pack(LENGTHS[:300], 10240, options, seed=0)
    check(plan, LENGTHS[:300])


def test_a_batch_continues_the_last_pack() -> None:
    options = PackOptions(packing_algorithm="binpacking", packing_batch_size=2, shuffle=False)
    plan = pack([9, 3, 7, 1], 10, options, seed=0)
    # 9 | 3 from the first batch; 3 goes on and finds the 7 there.
    assert [plan.pack(pack_index).tolist() for pack_index in range(plan.num_packs)] == [[0], [1, 2], [3]]
    assert sorted(np.diff(pack([9, 10, 1], 10, options, seed=0).offsets).tolist()) == [1, 2]


def test_empty_input_gives_no_batches() -> None:
    plan = pack([], 10, PackOptions(packing_algorithm="binpacking"), seed=0)
    assert plan.num_samples == plan.num_packs == 0


def test_plan_does_not_depend_on_the_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_MIN_SAMPLES_FOR_CHAIN_PROCESSES", 0)
    options = [
        PackOptions(packing_algorithm="binpacking", packing_batch_size=10, packing_num_proc=num_proc)
        for num_proc in (1, 2, 3)
    ]
    plans = [pack(LENGTHS, 10240, changed, seed=3, epoch=1) for changed in options]
    assert len({plan.fingerprint for plan in plans}) == 1


def test_epochs_have_different_packs() -> None:
    lengths = (np.arange(5000) * 37 % 97 + 1).astype(np.int32)
    options = PackOptions(packing_algorithm="binpacking")
    first_plan, second_plan = (pack(lengths, 128, options, seed=1, epoch=epoch) for epoch in (0, 1))
    assert first_plan.num_packs == second_plan.num_packs
    assert len(sample_sets(first_plan) & sample_sets(second_plan)) < 0.1 * first_plan.num_packs
