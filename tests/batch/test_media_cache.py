"""The media cache: what is read is what was kept, the bound holds, and what the plan reads again stays."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch  # noqa: F401  # which each fork would else import for itself
from hypothesis import given, settings
from hypothesis import strategies as st

from packtool.batch import media_cache
from packtool.batch.media_cache import MediaCache, MediaReads, key_of
from tests.forked import forked_process

BLOCK = 4096
MUCH = 1 << 30


def frames(medium: int, blocks: int = 1) -> npt.NDArray[np.uint8]:
    """Frames of a medium whose entry takes so many blocks."""
    return np.full((1, 3, 8, blocks * 128), medium % 251, np.uint8)


def size_of(directory: Path) -> int:
    return sum(-(-path.stat().st_size // BLOCK) * BLOCK for path in (directory / "entries").iterdir())


def load(cache: MediaCache, medium: int, *, blocks: int = 1, is_read_again: bool = True) -> bool:
    """Whether a medium was there; it is right, and kept if it was not."""
    cached_frames = cache.read(key_of(medium), is_read_again=is_read_again)
    if cached_frames is None:
        cache.store(key_of(medium), frames(medium, blocks), is_read_again=is_read_again)
        return False
    np.testing.assert_array_equal(cached_frames, frames(medium, blocks))
    return True


def end(cache: MediaCache) -> None:
    """What the end of its process does."""
    if cache._run_file is not None:
        cache._run_file.close()


def belady(order: Sequence[int], room: int) -> list[bool]:
    """Which reads the best order of eviction finds, which knows all that is read."""
    next_uses: dict[int, int] = {}
    hits = []
    for place, medium in enumerate(order):
        hits.append(next_uses.pop(medium, None) is not None)
        later = next((i for i in range(place + 1, len(order)) if order[i] == medium), len(order) + place)
        next_uses[medium] = later
        if len(next_uses) > room:
            next_uses.pop(max(next_uses, key=lambda each: next_uses[each]))
    return hits


def test_half_sized_cache_has_the_hit_rate_of_belady(tmp_path: Path) -> None:
    num, room, epochs = 40, 20, 4
    random = np.random.default_rng(0)
    order = [int(medium) for _ in range(epochs) for medium in random.permutation(num)]
    cache = MediaCache(str(tmp_path), room * BLOCK, "rows")
    cache_hits = [load(cache, medium) for medium in order]
    best = belady(order, room)
    assert sum(cache_hits) == sum(best) == (epochs - 1) * room
    # Spread over the epoch, where the best order by step has all of them in its first half.
    last, best_last = cache_hits[-num:], best[-num:]
    assert 5 <= sum(last[: num // 2]) <= 15
    assert sum(best_last[: num // 2]) == num // 2
    # What was not used for longest, for comparison.
    recent: list[int] = []
    hits = 0
    for medium in order:
        hits += medium in recent
        recent = [*[each for each in recent if each != medium], medium][-room:]
    assert hits < sum(cache_hits) / 2
    end(cache)


def test_resumed_runs_and_runs_on_the_same_rows_reuse_entries(tmp_path: Path) -> None:
    first_cache = MediaCache(str(tmp_path), 20 * BLOCK, "rows")
    for medium in range(40):
        load(first_cache, medium)
    end(first_cache)
    second_cache = MediaCache(str(tmp_path), 20 * BLOCK, "rows")
    assert sum(load(second_cache, int(medium)) for medium in np.random.default_rng(1).permutation(40)) == 20
    assert second_cache.take_reads() == MediaReads(20, 20)
    assert second_cache.take_reads() == MediaReads()
    end(second_cache)


def test_entries_of_active_runs_are_not_evicted_for_others(tmp_path: Path) -> None:
    first_cache = MediaCache(str(tmp_path), 10 * BLOCK, "rows")
    for medium in range(10):
        load(first_cache, medium)
    second_cache = MediaCache(str(tmp_path), 10 * BLOCK, "other rows")
    assert not any(load(second_cache, medium) for medium in range(100, 110))
    assert not any(load(second_cache, medium) for medium in range(100, 110))
    assert all(load(first_cache, medium) for medium in range(10))
    end(first_cache)
    end(second_cache)
    third = MediaCache(str(tmp_path), 10 * BLOCK, "other rows")
    assert not any(load(third, medium) for medium in range(100, 110))
    assert all(load(third, medium) for medium in range(100, 110))
    assert size_of(tmp_path) == 10 * BLOCK == third.used
    end(third)


def test_media_unused_in_the_next_epoch_are_evicted_first(tmp_path: Path) -> None:
    cache = MediaCache(str(tmp_path), 4 * BLOCK, "rows")
    for medium in range(4):
        load(cache, medium, is_read_again=medium != 2)
    assert not load(cache, 10, is_read_again=False)
    assert not load(cache, 10)
    assert load(cache, 10)
    assert [load(cache, medium) for medium in (0, 1, 3, 2)] == [True, True, True, False]
    end(cache)


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "longer", "header"])
def test_damaged_entry_is_recreated(tmp_path: Path, damage: str) -> None:
    cache = MediaCache(str(tmp_path), MUCH, "rows")
    load(cache, 7, blocks=2)
    path = tmp_path / "entries" / key_of(7)
    data = bytearray(path.read_bytes())
    changed = {"cut": data[:-5], "empty": b"", "longer": data + b"x"}
    if damage in ("flipped", "header"):
        data[1000 if damage == "flipped" else 9] ^= 4
    path.write_bytes(changed.get(damage, data))
    assert not load(cache, 7, blocks=2)
    assert load(cache, 7, blocks=2)
    assert cache.take_reads() == MediaReads(hits=1, misses=2)
    end(cache)


def _claim_and_die(directory: Path) -> None:
    cache = MediaCache(str(directory), 4 * BLOCK, "rows")
    load(cache, 0)
    assert cache._claim(key_of(1), 3 * BLOCK, True) is not None
    os.kill(os.getpid(), 9)


def test_partial_entry_of_a_killed_writer_is_ignored(tmp_path: Path) -> None:
    with forked_process(_claim_and_die, tmp_path) as process:
        process.join()
        assert process.exitcode == -9
    assert (tmp_path / "entries" / f"{key_of(1)}.part").exists()
    cache = MediaCache(str(tmp_path), 4 * BLOCK, "rows")
    assert load(cache, 0)
    assert not load(cache, 1, blocks=3)
    assert load(cache, 1, blocks=3)
    assert cache.used == size_of(tmp_path) == 4 * BLOCK
    end(cache)


def _read_many(directory: Path, seed: int, name: str) -> int:
    cache = MediaCache(str(directory), 30 * BLOCK, name)
    for medium in np.random.default_rng(seed).integers(0, 40, 60):
        load(cache, int(medium), blocks=1 + int(medium) % 3)
    return 0 if cache.take_reads().problem is None else 1


def test_processes_and_runs_share_the_cache(tmp_path: Path) -> None:
    with (
        forked_process(_read_many, tmp_path, 0, "rows") as first_process,
        forked_process(_read_many, tmp_path, 1, "rows") as second_process,
        forked_process(_read_many, tmp_path, 2, "other rows") as third,
    ):
        for process in (first_process, second_process, third):
            process.join()
            assert process.exitcode == 0
    cache = MediaCache(str(tmp_path), 30 * BLOCK, "rows")
    load(cache, 0)
    assert cache.used == size_of(tmp_path) <= 30 * BLOCK
    end(cache)


STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 12), st.booleans(), st.sampled_from(("load", "load", "end", "damage"))),
    max_size=40,
)


@settings(max_examples=25)
@given(STEPS)
def test_size_limit_holds_and_pixels_are_correct(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int, bool, str]]
) -> None:
    directory, limits = tmp_path_factory.mktemp("cache"), (8 * BLOCK, 8 * BLOCK, 5 * BLOCK)
    caches = [MediaCache(str(directory), limit, f"rows {index}") for index, limit in enumerate(limits)]
    for run, medium, is_read_again, action in steps:
        cache = caches[run]
        if action == "end":
            end(cache)
            caches[run] = MediaCache(str(directory), limits[run], f"rows {run}")
            continue
        path = directory / "entries" / key_of(medium)
        if action == "damage" and path.exists():
            path.write_bytes(path.read_bytes()[:-1] + b"\xff")
        load(cache, medium, blocks=1 + medium % 3, is_read_again=is_read_again)
        assert size_of(directory) <= 8 * BLOCK
        assert cache.used == size_of(directory)
    for cache in caches:
        end(cache)


def test_run_with_a_smaller_limit_evicts_at_the_start(tmp_path: Path) -> None:
    first_cache = MediaCache(str(tmp_path), 10 * BLOCK, "rows")
    for medium in range(10):
        load(first_cache, medium)
    end(first_cache)
    second_cache = MediaCache(str(tmp_path), 4 * BLOCK, "rows")
    second_cache.read(None)
    load(second_cache, 9)
    assert size_of(tmp_path) <= 4 * BLOCK
    end(second_cache)


def test_full_disk_and_unwritable_folder_are_reported_and_harmless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = MediaCache(str(tmp_path / "full"), MUCH, "rows")
    load(cache, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=media_cache._SPARE_BYTES))
    assert not load(cache, 1)
    assert not load(cache, 1)
    assert load(cache, 0)
    reads = cache.take_reads()
    assert (reads.hits, reads.misses) == (1, 3)
    assert "the disk has less than 1.1 GB left" in str(reads.problem)
    end(cache)
    (tmp_path / "file").write_text("")
    cache = MediaCache(str(tmp_path / "file" / "cache"), MUCH, "rows")
    assert not load(cache, 0)
    assert "Not a directory" in str(cache.take_reads().problem)


def test_disk_filling_during_a_write_leaves_no_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    cache = MediaCache(str(tmp_path), MUCH, "rows")
    load(cache, 0)
    with monkeypatch.context() as patched:
        patched.setattr(media_cache.os, "rename", full)
        assert not load(cache, 1)
    assert cache.used == size_of(tmp_path) == BLOCK
    assert "No space left on device" in str(cache.take_reads().problem)
    end(cache)


def test_pickled_cache_is_the_same_cache(tmp_path: Path) -> None:
    import pickle

    cache = MediaCache(str(tmp_path), MUCH, "rows")
    load(cache, 3)
    other = pickle.loads(pickle.dumps(cache))
    assert load(other, 3)
    with open(tmp_path / "runs" / cache.name, "rb") as run, pytest.raises(BlockingIOError):
        fcntl.flock(run, fcntl.LOCK_EX | fcntl.LOCK_NB)
    end(cache)
    end(other)
