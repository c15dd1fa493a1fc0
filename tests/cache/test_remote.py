"""Caches in object stores: read through checked copies on this machine, one download for all its processes."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from packtool import storage
from packtool.cache import local as local_module
from packtool.cache.export import export
from packtool.cache.local import LocalCopies
from packtool.cache.manifest import Manifest
from packtool.cache.reader import CacheReader
from packtool.config.data import ExportConfig
from packtool.config.settings import num_bytes
from packtool.errors import ConfigError, MismatchError, StorageError
from packtool.progress import SilentProgress
from tests.s3_server import ENVIRONMENT, Proxy, S3Server

Through = Callable[..., Proxy]


def _upload(folder: Path, target: str) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            storage.publish(storage.join(target, *path.relative_to(folder).parts), path.read_bytes())


@pytest.fixture(scope="module")
def cache(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache on this machine."""
    folder = tmp_path_factory.mktemp("remote")
    with (folder / "rows.jsonl").open("w") as file:
        for i in range(300):
            turns = [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": "word " * (i % 50)}]
            file.write(json.dumps({"messages": turns, "channel": ("a", "b", None)[i % 3]}) + "\n")
    options = {"model": str(model), "dataset": (str(folder / "rows.jsonl"),), "output_dir": str(folder / "cache")}
    export(ExportConfig(max_length=200, rows_per_shard=64, split_dataset_ratio=0.1, **options), SilentProgress())
    return folder / "cache"


@pytest.fixture
def remote(cache: Path, bucket: str) -> str:
    """The same in a bucket."""
    _upload(cache, f"{bucket}/cache")
    return f"{bucket}/cache"


@pytest.fixture
def copies(tmp_path: Path) -> LocalCopies:
    return LocalCopies(str(tmp_path / "copies"))


def _shards(copies: LocalCopies) -> list[Path]:
    return sorted(Path(copies.directory).rglob("*.arrow"))


def test_remote_cache_equals_the_local_one(remote: str, cache: Path, copies: LocalCopies) -> None:
    for split in ("train", "val"):
        local = CacheReader.open([str(cache)], split)
        there = CacheReader.open([remote.replace("s3://", "s3:/")], split, copies)
        assert len(there) == len(local)
        assert there.fingerprint == local.fingerprint
        np.testing.assert_array_equal(there.index.length, local.index.length)
        for position in range(len(local)):
            a, b = there.sample(position), local.sample(position)
            np.testing.assert_array_equal(a.input_ids, b.input_ids)
            np.testing.assert_array_equal(a.labels, b.labels)
            assert (a.images, a.row, a.channel) == (b.images, b.row, b.channel)
        assert not there.sample(0).input_ids.flags.owndata  # mapped
    assert len(CacheReader.open([f"{remote}/train/"], copies=copies)) == len(CacheReader.open([str(cache / "train")]))


def test_planning_reads_no_shard(remote: str, copies: LocalCopies, through_proxy: Through) -> None:
    proxy = through_proxy()
    reader = CacheReader.open([remote], copies=copies)
    assert reader.index.length.sum() > 0
    assert not proxy.requests("GET .*data-")
    assert not proxy.requests("HEAD .*data-")  # one listing says all sizes
    assert len(proxy.requests("GET .*list-type=2")) == 1
    reader.sample(0)
    assert len(proxy.requests("GET .*data-")) == 1
    assert len(_shards(copies)) == 1


def test_copies_are_shared_by_addresses_and_runs(remote: str, bucket: str, copies: LocalCopies, cache: Path) -> None:
    reader = CacheReader.open([remote], copies=copies)
    reader.sample(0)
    (copy,) = _shards(copies)
    inode = copy.stat().st_ino
    _upload(cache, f"{bucket}/elsewhere")
    CacheReader.open([f"{bucket}/elsewhere"], copies=copies).sample(0)
    assert [path.stat().st_ino for path in _shards(copies)] == [inode]


def _read_all(arguments: tuple[str, str]) -> int:
    remote, directory = arguments
    reader = CacheReader.open([remote], copies=LocalCopies(directory))
    return int(sum(reader.sample(i).length for i in range(len(reader))))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_of_a_machine_download_once(
    remote: str, copies: LocalCopies, through_proxy: Through, cache: Path, method: str
) -> None:
    proxy = through_proxy()
    local = CacheReader.open([str(cache)])
    with multiprocessing.get_context(method).Pool(3) as pool:
        sums = pool.map(_read_all, [(remote, copies.directory)] * 3, chunksize=1)
    assert sums == [int(local.index.length.sum())] * 3
    shards = local.manifests[0].splits["train"].shards
    assert len(proxy.requests("GET .*train/data-")) == len(shards) == len(_shards(copies))
    assert len(proxy.requests("GET .*index.arrow")) == 1
    assert not list(Path(copies.directory).rglob("*.partial"))


def test_a_copy_finished_while_its_lock_is_awaited_leaves_no_other_file(
    remote: str, copies: LocalCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process puts it in its place between this one's look and its lock."""
    real, looks = local_module._has_size, []

    def late(path: str, size: int) -> bool:
        looks.append(path)
        if len(looks) > 1:
            return real(path, size)
        monkeypatch.setattr(local_module, "_has_size", real)
        CacheReader.open([remote], copies=copies).sample(0)
        monkeypatch.setattr(local_module, "_has_size", late)
        return False

    CacheReader.open([remote], copies=copies)
    monkeypatch.setattr(local_module, "_has_size", late)
    CacheReader.open([remote], copies=copies).sample(0)
    assert len(looks) > 1
    assert len(_shards(copies)) == 1
    assert not list(Path(copies.directory).rglob("*.partial"))


def test_the_lock_of_a_killed_process_is_released(remote: str, copies: LocalCopies) -> None:
    manifest = Manifest.read(remote)
    shard = manifest.splits["train"].shards[0]
    partial = Path(copies.directory) / manifest.fingerprint / f"{shard.sha256}.arrow.partial"
    partial.parent.mkdir(parents=True)
    program = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'wb'); f.write(b'half'); f.flush();"
        "fcntl.flock(f, fcntl.LOCK_EX); print('locked', flush=True); time.sleep(900)"
    )
    holder = subprocess.Popen([sys.executable, "-c", program, str(partial)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"locked\n"
    with partial.open("rb") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    holder.kill()
    holder.wait()
    CacheReader.open([remote], copies=copies).sample(0)
    assert not partial.exists()
    assert len(_shards(copies)) == 1


def test_a_wrong_download_is_repeated_once(remote: str, copies: LocalCopies, through_proxy: Through) -> None:
    proxy = through_proxy(once=[("GET .*data-", "change byte")])
    reader = CacheReader.open([remote], copies=copies)
    reader.sample(0)
    assert len(proxy.requests("GET .*data-")) == 2


def test_a_damaged_copy_of_an_index_is_fetched_again(remote: str, copies: LocalCopies, through_proxy: Through) -> None:
    """Damaged on the way, and later on the disk."""
    proxy = through_proxy(once=[("GET .*index.arrow", "change byte"), ("GET .*prefixes.arrow", "change byte")])
    for _ in range(2):
        assert CacheReader.open([remote], copies=copies).prefixes() is not None
        copied_indexes = list(Path(copies.directory).rglob("*.index"))
        assert len(copied_indexes) == 2
        for path in copied_indexes:
            path.write_bytes(bytes(path.stat().st_size))
    assert proxy.counts["change byte"] == 2


def test_a_wrong_shard_is_refused(remote: str, copies: LocalCopies, through_proxy: Through) -> None:
    shard = Manifest.read(remote).splits["train"].shards[0]
    path = f"{remote}/train/{shard.file}"
    data = bytearray(storage.read_bytes(path))
    data[len(data) // 2] ^= 1
    storage.publish(path, bytes(data))
    proxy = through_proxy()
    reader = CacheReader.open([remote], copies=copies)
    with pytest.raises(StorageError, match=f"SHA-256.*the manifest says {shard.sha256}"):
        reader.sample(0)
    assert len(proxy.requests("GET .*data-")) == 2
    assert not _shards(copies)
    assert not list(Path(copies.directory).rglob("*.partial"))


def test_missing_and_short_shards_are_detected_before_training(remote: str, copies: LocalCopies) -> None:
    shards = Manifest.read(remote).splits["train"].shards
    storage.publish(f"{remote}/train/{shards[1].file}", b"short")
    with pytest.raises(MismatchError, match=f"{shards[1].file} has 5 bytes, the manifest says {shards[1].bytes}"):
        CacheReader.open([remote], copies=copies)
    storage.remove(f"{remote}/train/{shards[0].file}")
    with pytest.raises(MismatchError, match=f"{shards[0].file} is missing"):
        CacheReader.open([remote], copies=copies)
    with pytest.raises(MismatchError, match="no finished cache"):
        CacheReader.open([f"{remote}-gone"], copies=copies)


def test_copies_of_other_caches_are_removed_first(remote: str, cache: Path, copies: LocalCopies) -> None:
    manifest = Manifest.read(remote)
    total = sum(shard.bytes for split in manifest.splits.values() for shard in split.shards)
    index = sum(path.stat().st_size for path in (cache).rglob("index.arrow"))
    other = Path(copies.directory) / "another"
    other.mkdir(parents=True)
    for age, name in ((300, "old"), (100, "new"), (200, "middle")):
        path = other / f"{name}.arrow"
        path.write_bytes(bytes(total))
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    limited = dataclasses.replace(copies, limit=2 * total + index + 100)
    reader = CacheReader.open([remote], copies=limited)
    for position in range(len(reader)):
        reader.sample(position)
    assert sorted(path.name for path in other.iterdir()) == ["new.arrow"]
    assert len(list((Path(copies.directory) / manifest.fingerprint).glob("*.arrow"))) == len(
        manifest.splits["train"].shards
    )


def test_a_cache_that_cannot_fit_is_refused(remote: str, copies: LocalCopies, monkeypatch: pytest.MonkeyPatch) -> None:
    small = dataclasses.replace(copies, limit=1000)
    with pytest.raises(ConfigError, match=r"--cache-dir-size 0\.0 MB is less than"):
        CacheReader.open([remote], copies=small)
    full = SimpleNamespace(free=2**29)
    monkeypatch.setattr("packtool.cache.local.shutil.disk_usage", lambda path: full)
    with pytest.raises(StorageError, match=r"the disk has 0\.54 GB left"):
        CacheReader.open([remote], copies=copies)


def test_reading_survives_broken_connections(
    remote: str, copies: LocalCopies, through_proxy: Through, cache: Path
) -> None:
    proxy = through_proxy(timeout=1.0, share=0.5, seed=5)
    reader = CacheReader.open([remote], copies=copies)
    thread = reader.prefetch()
    assert thread is not None
    thread.join()
    for info in reader.manifests[0].splits["train"].shards:
        copy = Path(copies.directory) / reader.manifests[0].fingerprint / f"{info.sha256}.arrow"
        assert copy.read_bytes() == (cache / "train" / info.file).read_bytes()
    assert sum(proxy.counts.values()) > proxy.counts["requests"] + 3
    assert CacheReader.open([str(cache)]).prefetch() is None


def test_cache_on_a_web_server_is_readable(
    remote: str, bucket: str, s3_server: S3Server, copies: LocalCopies, cache: Path
) -> None:
    client, name = s3_server.client(), bucket.removeprefix("s3://")
    for path in storage.walk(remote):
        client.put_object_acl(Bucket=name, Key=path.removeprefix(f"{bucket}/"), ACL="public-read")
    there = CacheReader.open([f"{s3_server.url}/{name}/cache"], copies=copies)
    here = CacheReader.open([str(cache)])
    np.testing.assert_array_equal(there.sample(7).labels, here.sample(7).labels)


def test_datasets_opens_a_remote_cache(remote: str, s3_server: S3Server) -> None:
    datasets = pytest.importorskip("datasets")
    keys = {"key": ENVIRONMENT["AWS_ACCESS_KEY_ID"], "secret": ENVIRONMENT["AWS_SECRET_ACCESS_KEY"]}
    rows = datasets.load_from_disk(f"{remote}/train", storage_options={"endpoint_url": s3_server.url, **keys})
    manifest = json.loads(storage.read_bytes(f"{remote}/packtool.json"))
    assert len(rows) == manifest["splits"]["train"]["rows"]
    assert sum(rows["length"]) == manifest["splits"]["train"]["tokens"]


@pytest.mark.parametrize(
    ("text", "size"), [("200GB", 200 * 10**9), ("1.5 TiB", 3 * 2**39), ("100", 100), ("10m", 10**7), ("2KiB", 2048)]
)
def test_sizes(text: str, size: int) -> None:
    assert num_bytes(text) == size


def test_invalid_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="200GB"):
        num_bytes("much")
