"""Windows: drawn by chance, packed by any number of processes, the same plan."""

from __future__ import annotations

import multiprocessing.synchronize

import numpy as np
import pytest

from packtool.config.packing import PackOptions
from packtool.errors import DataError, PacktoolError
from packtool.planning import packing
from packtool.planning.packing import draw_windows, map_on_processes, pack
from tests.planning.test_packing import check, lognormal_lengths, sample_sets

LENGTHS = lognormal_lengths(4000, median=1500, sigma=1.0)
MEDIA = (LENGTHS // 2).astype(np.int32)


def test_every_sample_is_in_one_window() -> None:
    windows = draw_windows(1000, 300, seed=1)
    assert [len(samples) for samples in windows] == [250] * 4
    assert sorted(np.concatenate(windows).tolist()) == list(range(1000))
    for samples in windows:
        assert (np.diff(samples) > 0).all()
        # From all over the cache, not side by side.
        assert np.ptp(samples) > 900
    assert not np.array_equal(windows[0], draw_windows(1000, 300, seed=2)[0])


@pytest.mark.parametrize(
    "options",
    [
        PackOptions(packing_window=1000),
        PackOptions(packing_window=1500, shuffle=False),
        PackOptions(packing_window=1000, packing_algorithm="sequential"),
        PackOptions(packing_window=1000, max_media_tokens_per_pack=5120),
    ],
    ids=["best_fit", "unshuffled", "sequential", "budget"],
)
def test_plan_does_not_depend_on_the_number_of_processes(options: PackOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_MIN_SAMPLES_FOR_PROCESSES", 0)
    # Semaphores have names, and stay behind when the whole group is killed.
    monkeypatch.setattr(multiprocessing.synchronize.SemLock, "__init__", None)
    plans = []
    for num_proc in (1, 2, 3):
        changed = PackOptions(**{**vars(options), "packing_num_proc": num_proc})
        plans.append(pack(LENGTHS, 10240, changed, seed=3, epoch=1, media_tokens=MEDIA))
    check(plans[0], LENGTHS)
    assert len({plan.fingerprint for plan in plans}) == 1


def test_sorted_caches_are_packed_well() -> None:
    # Windows of neighbours would hold the long samples only, or the short ones.
    lengths = np.sort(lognormal_lengths(20_000, median=1500, sigma=1.0))[::-1]
    plan = pack(lengths, 10240, PackOptions(packing_window=2000), seed=0)
    check(plan, lengths)
    assert plan.num_packs <= 1.005 * plan.lower_bound


def test_epochs_differ_in_packs_but_not_in_their_number() -> None:
    options = PackOptions(packing_window=1000)
    first_plan, second_plan = (pack(LENGTHS, 10240, options, seed=1, epoch=epoch) for epoch in (0, 1))
    assert first_plan.num_packs == second_plan.num_packs
    crowded = {samples for samples in sample_sets(first_plan) if len(samples) > 1}
    assert len(crowded & sample_sets(second_plan)) < 0.3 * len(crowded)


def die(job: int) -> int:
    import os

    os._exit(job)


def refuse(job: int) -> int:
    raise DataError(f"job {job}", "Give others.")


def test_errors_of_processes_are_raised() -> None:
    with pytest.raises(DataError, match=r"job \d\nGive others"):
        map_on_processes(refuse, [1, 2, 3], 2)


def test_a_dead_process_is_an_error() -> None:
    with pytest.raises(PacktoolError, match="a packing process died"):
        map_on_processes(die, [1, 2], 2)
