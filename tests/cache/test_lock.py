"""Several exports into one directory: at the end a cache equal to one of them whole, or an error; never a mixture."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from packtool import storage
from packtool.cache import executor as executor_module
from packtool.cache import lock, output_dir
from packtool.cache.export import export
from packtool.cache.lock import DirectoryLock, Holder
from packtool.cache.manifest import ExportSummary, Manifest
from packtool.config.data import ExportConfig
from packtool.errors import MismatchError
from packtool.progress import SilentProgress
from packtool.storage import AtomicFile
from tests.cache.conftest import tree
from tests.waiting import PATIENCE_S

Run = Callable[..., ExportSummary]
LOSSES = ("default", "all")
WRITES = ("publish", "publish_new", "remove", "make_directory", "discard_unfinished")


class Killed(BaseException):
    """``kill -9``: nothing is written any more, by ``finally`` neither."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """Rows of four shards, and the cache that each loss makes of them."""
    folder = tmp_path_factory.mktemp("lock")
    with (folder / "rows.jsonl").open("w") as file:
        for i in range(256):
            turns = [{"role": "user", "content": f"q {i}"}, {"role": "assistant", "content": "word " * (i % 20)}]
            file.write(json.dumps({"messages": turns, "channel": ("a", None)[i % 2]}) + "\n")
    for loss in LOSSES:
        _export(model, folder, str(folder / loss), loss_scale=loss)
    return folder


def _export(model: Path, base: Path, output: str, **settings: Any) -> ExportSummary:
    config = {"model": str(model), "dataset": (str(base / "rows.jsonl"),), "max_length": 80, "rows_per_shard": 64}
    return export(ExportConfig(**{**config, "output_dir": output, **settings}), SilentProgress())


@contextmanager
def _at_write(write_index: int | None, happens: Callable[[], None]) -> Iterator[None]:
    """Something happens right before the write of this number, counted from 0."""
    count = 0

    def before(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            nonlocal count
            count += 1
            if write_index is not None and count > write_index:
                happens()
            return real(*args, **more)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in WRITES:
            patch.setattr(storage, name, before(getattr(storage, name)))
        patch.setattr(AtomicFile, "commit", before(AtomicFile.commit))
        patch.setattr(AtomicFile, "discard", before(AtomicFile.discard))
        yield


def _kill() -> None:
    raise Killed


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Runs whose process is gone; all others live."""
    dead_runs: set[str] = set()
    monkeypatch.setattr(Holder, "is_live", property(lambda holder: holder.run not in dead_runs))
    return dead_runs


def _files(directory: str) -> dict[str, str]:
    base = directory.rstrip("/") + "/"
    return {path.removeprefix(base): sha256(storage.read_bytes(path)).hexdigest() for path in storage.walk(directory)}


def _follow(plan: list[tuple[str, int | None, bool]], directory: str, base: Path, model: Path, dead: set[str]) -> None:
    """Run exports one after the other, each perhaps killed, and look at the directory after each."""
    for loss, kill_at, overwrite in plan:
        finished = False
        try:
            with _at_write(kill_at, _kill):
                _export(model, base, directory, loss_scale=loss, overwrite=overwrite)
            finished = True
        except Killed:
            dead |= {holder.run for holder in lock.holders(directory).values()}
        except MismatchError as error:
            assert not overwrite
            assert "other settings" in error.message  # noqa: PT017
        if storage.exists(storage.join(directory, "packtool.json")):
            files = _files(directory)
            there = str(Manifest.read(directory).identity.spec["loss_scale"])
            expected_files = tree(base / there)
            assert {name: files.get(name) for name in expected_files} == expected_files
            if finished:
                assert there == loss
                assert files.keys() == expected_files.keys()
        else:
            assert not finished


_PLANS = st.lists(
    st.tuples(st.sampled_from(LOSSES), st.one_of(st.none(), st.integers(0, 40)), st.booleans()), min_size=2, max_size=4
)
_QUICK = settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@_QUICK
@given(plan=_PLANS)
@example(plan=[("default", 15, False), ("default", 5, True), ("default", None, False)])  # killed while it clears away
def test_concurrent_killed_exports_do_not_mix(
    plan: list[tuple[str, int | None, bool]], tmp_path_factory: Any, base: Path, model: Path, dead: set[str]
) -> None:
    directory = str(tmp_path_factory.mktemp("mixed") / "cache")
    _follow([*plan, ("all", None, True)], directory, base, model, dead)


def test_killed_export_resumes_to_the_same_files(base: Path, model: Path, tmp_path: Path, dead: set[str]) -> None:
    """Its lock too is gone in the end: also one whose holder was killed when all but the lock was cleared away."""
    expected_files, kill_at, was_killed = tree(base / "default"), 0, True
    while was_killed:
        directory = tmp_path / str(kill_at)
        try:
            with _at_write(kill_at, _kill):
                _export(model, base, str(directory))
            was_killed = False
        except Killed:
            dead |= {holder.run for holder in lock.holders(str(directory)).values()}
        _export(model, base, str(directory))
        assert tree(directory) == expected_files
        kill_at += 1
    assert kill_at > 10


@pytest.mark.parametrize("kill_at", [3, 9, 17])
def test_killed_exports_do_not_mix_in_a_bucket(
    kill_at: int, bucket: str, base: Path, model: Path, dead: set[str]
) -> None:
    plan = [("default", kill_at, False), ("all", None, False), ("all", kill_at + 8, True), ("default", None, True)]
    _follow(plan, f"{bucket}/cache", base, model, dead)


@pytest.mark.parametrize("place", ["here", "bucket"])
@settings(parent=_QUICK, max_examples=3)
@given(at=st.integers(2, 14), loss=st.sampled_from(LOSSES))
def test_second_export_is_refused_while_the_first_runs(
    place: str, at: int, loss: str, request: pytest.FixtureRequest, tmp_path_factory: Any, base: Path, model: Path
) -> None:
    folder = tmp_path_factory.mktemp("two")
    directory = str(folder / "cache") if place == "here" else f"{request.getfixturevalue('bucket')}/{folder.name}"
    messages: list[str] = []

    def second_export() -> None:
        if not messages:
            messages.append("")
            with pytest.raises(MismatchError, match="is being written by another export on host") as exc_info:
                _export(model, base, directory, loss_scale=loss, overwrite=at % 2 == 0)
            messages.append(str(exc_info.value))

    with _at_write(at, second_export):
        _export(model, base, directory)
    assert f"process {os.getpid()}, since 20" in messages[1]
    assert "--output-dir" in messages[1]
    assert _files(directory) == tree(base / "default")


def test_a_run_that_lost_its_lock_stops(
    base: Path, model: Path, tmp_path: Path, dead: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first stands still at its second shard, the second takes its place and finishes, the first wakes up."""
    directory = str(tmp_path / "cache")

    real, count = executor_module.run_task, 0

    def slow(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            dead.update(holder.run for holder in lock.holders(directory).values())
            _export(model, base, directory, loss_scale="all", overwrite=True)
        return real(*args)

    monkeypatch.setattr(executor_module, "run_task", slow)
    with pytest.raises(MismatchError, match="was taken over by another run"):
        _export(model, base, directory)
    files = tree(tmp_path / "cache")
    assert {name: files[name] for name in tree(base / "all")} == tree(base / "all")


def test_shards_changed_by_another_process_are_not_published(
    base: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard of the same name and size that is not the one that was written."""
    real = output_dir.publish_cache

    def publish_after_change(directory: str, *args: Any) -> None:
        shard = sorted(Path(directory, "train").glob("data-*"))[1]
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
        real(directory, *args)

    with monkeypatch.context() as patch:
        patch.setattr(output_dir, "publish_cache", publish_after_change)
        with pytest.raises(MismatchError, match=r"1 shards differ from those .*train/data-00001-of-00004\.arrow"):
            _export(model, base, str(tmp_path / "cache"))
    assert _export(model, base, str(tmp_path / "cache")).num_reused == 3
    assert tree(tmp_path / "cache") == tree(base / "default")


def _write_lock(directory: Path, **changes: Any) -> Holder:
    holder = replace(Holder.this_process(), **changes)
    directory.mkdir(exist_ok=True)
    (directory / ".lock-000001.json").write_text(json.dumps(asdict(holder)))
    return holder


@pytest.mark.parametrize(
    ("changes", "is_live"),
    [
        ({}, True),
        ({"started": "1"}, False),  # the number was given to another process since
        ({"pid": 2**22 + 1}, False),
        ({"host": "far"}, True),
        ({"space": "another container"}, True),
        ({"host": "far", "renewed": time.time() - 3600, "since": time.time() - 7200}, False),
        ({"host": "far", "renewed": time.time() + 3600}, True),  # its clock is ahead
    ],
)
def test_stale_locks_are_distinguished_from_live_ones(
    changes: dict[str, Any], is_live: bool, base: Path, model: Path, tmp_path: Path
) -> None:
    holder = _write_lock(tmp_path / "cache", **changes)
    if is_live:
        with pytest.raises(MismatchError, match=rf"host {holder.host}, process {holder.pid}, since .*\(last renewed"):
            _export(model, base, str(tmp_path / "cache"))
    else:
        _export(model, base, str(tmp_path / "cache"))
        assert tree(tmp_path / "cache") == tree(base / "default")


def test_only_parts_of_one_export_share_a_directory(base: Path, model: Path, tmp_path: Path) -> None:
    directory = str(tmp_path / "cache")
    with DirectoryLock(directory, "0 of 2"):
        _export(model, base, directory, task_index=1, num_tasks=2)
        with pytest.raises(MismatchError, match="other settings"):
            _export(model, base, directory, task_index=0, num_tasks=2, loss_scale="all")
        for overwrite in (False, True):
            with pytest.raises(MismatchError, match="written by another part 0 of 2 on host"):
                _export(model, base, directory, overwrite=overwrite)
    with DirectoryLock(directory), pytest.raises(MismatchError, match="another export on host"):
        _export(model, base, directory, task_index=0, num_tasks=2)
    _export(model, base, directory, task_index=0, num_tasks=2)
    assert tree(tmp_path / "cache") == tree(base / "default")


def test_one_of_many_processes_takes_the_lock(tmp_path: Path) -> None:
    import threading

    directory = str(tmp_path / "cache")
    barrier, inside, refused = threading.Barrier(8), [], []

    def take() -> None:
        barrier.wait()
        try:
            with DirectoryLock(directory):
                inside.append(1)
                barrier.wait(PATIENCE_S)
        except MismatchError:
            refused.append(1)
            barrier.wait(PATIENCE_S)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(inside) <= 1
    assert len(inside) + len(refused) == 8
    assert not list((tmp_path / "cache").iterdir())


def test_a_half_written_lock_does_not_block_an_export(base: Path, model: Path, tmp_path: Path) -> None:
    """Neither is it a reason to refuse the directory, nor an error when it is removed."""
    half = tmp_path / "cache" / ".lock-000001.json.4711-0a1b2c3d.partial"
    half.parent.mkdir()
    half.touch()
    _export(model, base, str(half.parent))
    _export(model, base, str(half.parent), loss_scale="all", overwrite=True)


def test_a_new_file_removed_by_another_process_is_not_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def cleared(source: str, target: str) -> None:
        os.remove(source)
        link(source, target)

    monkeypatch.setattr(os, "link", cleared)
    assert not storage.publish_new(str(tmp_path / "new"), b"first")
    assert not list(tmp_path.iterdir())


def test_a_new_file_is_created_once(tmp_path: Path, bucket: str) -> None:
    for place in (str(tmp_path), bucket):
        path = storage.join(place, "new")
        assert storage.publish_new(path, b"first")
        assert storage.publish_new(path, b"first")  # an answer that got lost
        assert not storage.publish_new(path, b"second")
        assert storage.read_bytes(path) == b"first"
        assert storage.list_names(place).count("new") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_unfinished_uploads_of_a_killed_run_are_removed(base: Path, model: Path, bucket: str, s3_server: Any) -> None:
    client, name = s3_server.client(), bucket.removeprefix("s3://")
    for key in ("cache/train/data-00000-of-00004.arrow", "other/train/data-00000-of-00004.arrow"):
        client.create_multipart_upload(Bucket=name, Key=key)
    _export(model, base, f"{bucket}/cache")
    remaining_uploads = [upload["Key"] for upload in client.list_multipart_uploads(Bucket=name).get("Uploads", ())]
    assert remaining_uploads == ["other/train/data-00000-of-00004.arrow"]
