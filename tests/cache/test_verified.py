"""Damage on this machine's disk is found, once for all processes, and not looked for again."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packtool import storage
from packtool.cache import local
from packtool.cache.local import LocalCopies
from packtool.cache.manifest import ExportSummary
from packtool.cache.reader import CacheReader, ShardFile
from packtool.config.data import VerifyCache
from packtool.encode.encoded import EncodedSample
from packtool.errors import ConfigError, MismatchError
from packtool.progress import SilentProgress
from packtool.report import inspect
from tests.cache.conftest import tree

Export = Callable[..., ExportSummary]


@pytest.fixture
def cache(run_export: Export, tmp_path: Path) -> Path:
    run_export(split_dataset_ratio=0.1)
    return tmp_path / "cache"


@pytest.fixture
def hashed_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read for their checksum."""
    names: list[str] = []
    real = local.digests_of
    monkeypatch.setattr(local, "digests_of", lambda path: (names.append(Path(path).name), real(path))[1])
    return names


def _flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    path.write_bytes(data)


def _read(cache: Path, notes: Path, mode: Any = "once") -> None:
    reader = CacheReader.open([str(cache)], copies=LocalCopies(str(notes), verify=mode))
    for position in range(len(reader)):
        reader.sample(position)
    assert reader.prefixes() is not None


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_bit_is_detected(cache: Path, tmp_path: Path, data: st.DataObject) -> None:
    files = sorted((cache / "train").glob("*.arrow"))
    path = data.draw(st.sampled_from(files))
    bit = data.draw(st.integers(0, 8 * path.stat().st_size - 1))
    contents = path.read_bytes()
    _flip(path, bit)
    try:
        for mode in ("once", "always"):
            with pytest.raises(MismatchError, match=rf"{path.name} .*damaged|{path.name} is damaged"):
                _read(cache, tmp_path / "notes", mode)
        figures = inspect.damage_figures(str(cache), SilentProgress())
        assert [one["file"] for one in figures["damaged"]] == [f"train/{path.name}"]
        assert "--rows-per-shard 50" in figures["mend"]
        assert "--repair" in figures["mend"]
    finally:
        path.write_bytes(contents)


@pytest.fixture
def shard(run_export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All rows in one shard, with blocks smaller than a row."""
    monkeypatch.setattr(local, "BLOCK_BYTES", 64)
    run_export(rows_per_shard=1000, media="embed")
    (path,) = (tmp_path / "cache" / "train").glob("data-*")
    return path


def _values(sample: EncodedSample) -> list[object]:
    return [value.tobytes() if isinstance(value, np.ndarray) else value for value in vars(sample).values()]


def _outcome(mapped: ShardFile, row: int) -> tuple[list[object], str | None]:
    """Values of a row, or the message of the error."""
    try:
        return _values(mapped.sample(row)), None
    except MismatchError as error:
        return [], error.message


def test_reading_a_row_detects_damage_of_its_mapped_shard(shard: Path) -> None:
    """A changed file is compared again. A fault of the disk, which changes no time, is found on the first read."""
    contents, (_, sums) = shard.read_bytes(), local.digests_of(str(shard))
    reference = ShardFile(str(shard))
    expected = [_values(reference.sample(row)) for row in range(len(reference))]
    columns = reference.table(("input_ids", "source"))
    table = pa.Table.from_pydict(columns.to_pydict(), columns.schema)
    copy = shard.with_name("copy")

    @settings(max_examples=60)
    @given(
        start=st.integers(0, len(contents) - 1),
        damage=st.builds(lambda piece, times: piece * times, st.binary(min_size=1, max_size=4), st.integers(1, 5000)),
        rows_before=st.none() | st.integers(0, len(expected)),
    )
    def check(start: int, damage: bytes, rows_before: int | None) -> None:
        copy.write_bytes(contents)
        os.utime(copy, (1, 1))
        mapped = None if rows_before is None else ShardFile(str(copy), sums)
        for row in range(rows_before or 0):
            assert mapped is not None
            assert _values(mapped.sample(row)) == expected[row]
        with copy.open("r+b") as file:
            file.seek(start)
            file.write(damage[: len(contents) - start])
        os.utime(copy, (1, 1 if mapped is None else 2))
        is_whole = copy.read_bytes() == contents
        try:
            mapped = mapped or ShardFile(str(copy), sums)
        except MismatchError:
            assert not is_whole
            return
        for row in range(len(mapped)):
            values, problem = _outcome(mapped, row)
            assert values == expected[row] if problem is None else f"{copy} is damaged: row {row} changed" in problem
            assert problem is None or not is_whole
        with suppress(MismatchError):
            assert mapped.table(table.schema.names).equals(table)

    check()


def test_truncated_mapped_shard_is_an_error_not_a_crash(shard: Path) -> None:
    """Reading mapped memory behind the end of its file is a bus error, which ends a process."""
    mapped = ShardFile(str(shard), local.digests_of(str(shard))[1])
    mapped.sample(0)
    os.truncate(shard, shard.stat().st_size // 2)
    with pytest.raises(MismatchError, match="is damaged: it was truncated from"):
        mapped.sample(0)


def test_a_replaced_or_removed_shard_stays_mapped(shard: Path, tmp_path: Path) -> None:
    mapped = ShardFile(str(shard), local.digests_of(str(shard))[1])
    expected = _values(mapped.sample(3))
    (tmp_path / "other").write_bytes(b"other")
    os.replace(tmp_path / "other", shard)
    assert _values(mapped.sample(3)) == expected
    shard.unlink()
    assert _values(mapped.sample(3)) == expected


def test_shard_is_verified_once_and_again_after_a_change(cache: Path, tmp_path: Path, hashed_names: list[str]) -> None:
    before = tree(cache)
    for _ in range(3):
        _read(cache, tmp_path / "notes")
    shards = sorted(path.name for path in (cache / "train").glob("data-*"))
    files = [*shards, "prefixes.arrow"]
    assert sorted(hashed_names) == files
    os.utime(cache / "train" / shards[2])
    _read(cache, tmp_path / "notes")
    assert sorted(hashed_names) == sorted([*files, shards[2]])
    _read(cache, tmp_path / "notes", "always")
    assert len(hashed_names) == 2 * len(files) + 1
    (cache / "train" / "index.arrow").touch()
    _read(cache, tmp_path / "none", "never")
    assert len(hashed_names) == 2 * len(files) + 1
    assert tree(cache) == before  # nothing is written beside a cache, which may be read-only


def test_one_process_verifies_while_others_wait(
    cache: Path, tmp_path: Path, hashed_names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = next((cache / "train").glob("data-*"))
    sha256 = {
        s["file"]: s["sha256"] for s in json.loads((cache / "packtool.json").read_text())["splits"]["train"]["shards"]
    }
    barrier = threading.Barrier(4)

    def check() -> None:
        barrier.wait()
        local.check_file(str(path), sha256[path.name], str(tmp_path / "notes"))

    threads = [threading.Thread(target=check) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert hashed_names == [path.name]


def test_without_a_directory_for_notes_each_process_verifies(
    cache: Path, tmp_path: Path, hashed_names: list[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    for _ in range(2):
        _read(cache, tmp_path / "file" / "notes")
    assert len(hashed_names) == 2 * len([*(cache / "train").glob("data-*"), "prefixes.arrow"])


@pytest.mark.parametrize("verify", ["once", "always"])
def test_a_damaged_local_copy_is_fetched_again(verify: VerifyCache, cache: Path, bucket: str, tmp_path: Path) -> None:
    for path in sorted(cache.rglob("*")):
        if path.is_file():
            storage.publish(storage.join(bucket, "cache", *path.relative_to(cache).parts), path.read_bytes())
    copies = LocalCopies(str(tmp_path / "copies"), verify=verify)
    CacheReader.open([f"{bucket}/cache"], copies=copies).sample(0)
    (copy,) = (tmp_path / "copies").rglob("*.arrow")
    contents = copy.read_bytes()
    _flip(copy, 8 * 1000)
    CacheReader.open([f"{bucket}/cache"], copies=LocalCopies(str(tmp_path / "copies"), verify=verify)).sample(0)
    assert copy.read_bytes() == contents


def test_old_caches_without_index_checksum_can_be_opened(cache: Path) -> None:
    path = cache / "packtool.json"
    document = json.loads(path.read_text())
    for split in document["splits"].values():
        assert len(split.pop("index_sha256")) == 64
    path.write_text(json.dumps(document))
    assert len(CacheReader.open([str(cache)]))
    figures = inspect.damage_figures(str(cache), SilentProgress())
    assert figures["damaged"] == []
    assert figures["without_checksum"] == ["train/index.arrow", "val/index.arrow"]
    assert "no checksum was recorded for" in "\n".join(inspect.damage_lines(figures))


def test_repair_recreates_only_damaged_files(
    cache: Path, run_export: Export, rows: Path, hashed_names: list[str]
) -> None:
    expected_files = tree(cache)
    shards = sorted((cache / "train").glob("data-*"))
    _flip(shards[1], 8 * 5000)
    shards[4].write_bytes(shards[4].read_bytes()[:-7])
    (cache / "val" / "index.arrow").unlink()
    times = {path: path.stat().st_mtime_ns for path in cache.rglob("*.arrow")}
    run_export(split_dataset_ratio=0.1, repair=True)
    assert tree(cache) == expected_files
    renewed = {path for path, time in times.items() if path.stat().st_mtime_ns != time}
    assert renewed == {shards[1], shards[4]}
    for name in ("train", "val"):
        _flip(cache / name / "index.arrow", 8 * 700)
    run_export(split_dataset_ratio=0.1, repair=True)
    assert tree(cache) == expected_files
    with pytest.raises(MismatchError, match="other settings"):
        run_export(split_dataset_ratio=0.2, repair=True)
    rows.write_text(rows.read_text() + "\n")
    _flip(shards[1], 8 * 5000)
    with pytest.raises(MismatchError, match="has changed"):
        run_export(split_dataset_ratio=0.1, repair=True)


def test_a_repair_that_would_differ_is_refused(cache: Path, run_export: Export) -> None:
    path = cache / "packtool.json"
    document = json.loads(path.read_text())
    document["splits"]["train"]["shards"][2]["sha256"] = "0" * 64  # as if another version had written it
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    before = tree(cache)
    with pytest.raises(MismatchError, match=r"data-00002.*the recreated file differs(.|\n)*--overwrite"):
        run_export(split_dataset_ratio=0.1, repair=True)
    assert tree(cache) == before
    with pytest.raises(ConfigError, match="holds no finished cache"):
        run_export("nothing", repair=True)
