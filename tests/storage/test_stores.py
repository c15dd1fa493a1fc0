"""All places that can be written to behave alike."""

from __future__ import annotations

import dataclasses
import io
import random
from pathlib import Path

import pytest

from packtool import storage
from packtool.errors import StorageError


@pytest.fixture(params=["local", "s3"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty directory."""
    if request.param == "local":
        return str(tmp_path / "base")
    return f"{request.getfixturevalue('bucket')}/base"


def _fill(base: str) -> None:
    for name in ("a.json", "b.jsonl", "sub/c.json", "sub/deep/d.json", ".hidden/e.json", "ümläut +%41.txt"):
        storage.make_directory(storage.parent(storage.join(base, name)))
        storage.publish(storage.join(base, name), name.encode())


@pytest.mark.smoke
def test_written_files_are_found(base: str) -> None:
    assert not storage.exists(base)
    assert storage.list_names(base) == []
    assert storage.entries(base) == {}
    _fill(base)
    assert storage.exists(base)
    assert storage.is_directory(base)
    assert storage.is_directory(base + "/")
    assert not storage.is_directory(storage.join(base, "a.json"))
    assert not storage.exists(storage.join(base, "a.jso"))
    assert storage.list_names(base) == [".hidden", "a.json", "b.jsonl", "sub", "ümläut +%41.txt"]
    states = storage.entries(base)
    assert states["sub"] is None
    assert states["a.json"] == storage.stat(storage.join(base, "a.json"))
    assert states["a.json"].size == 6
    assert sorted(storage.walk(base)) == sorted(
        storage.join(base, *name.split("/"))
        for name in ("a.json", "b.jsonl", "sub/c.json", "sub/deep/d.json", ".hidden/e.json", "ümläut +%41.txt")
    )
    assert storage.read_bytes(storage.join(base, "ümläut +%41.txt")) == "ümläut +%41.txt".encode()


def test_changed_files_have_another_state(base: str) -> None:
    storage.make_directory(base)
    path = storage.join(base, "x")
    storage.publish(path, b"one")
    before = storage.stat(path)
    storage.publish(path, b"two")
    assert storage.stat(path) != before
    assert storage.read_bytes(path) == b"two"


def test_patterns(base: str) -> None:
    _fill(base)

    def result(pattern: str) -> list[str]:
        return [path[len(base) + 1 :] for path in storage.glob(storage.join(base, pattern))]

    assert result("*.json") == ["a.json"]
    assert result("*.json*") == ["a.json", "b.jsonl"]
    assert result("*/*.json") == ["sub/c.json"]
    assert result("**/*.json") == ["a.json", "sub/c.json", "sub/deep/d.json"]
    assert result("s?b") == ["sub"]
    assert result(".h*/*") == [".hidden/e.json"]
    assert result("[ab].json*") == ["a.json", "b.jsonl"]
    assert result("a.json") == ["a.json"]
    assert result("gone*/x") == result("gone.json") == []


def test_missing_files_are_errors(base: str) -> None:
    for function in (storage.stat, storage.open_read, storage.read_bytes):
        with pytest.raises(StorageError, match=r"gone.json.*[nN]o such file"):
            function(storage.join(base, "gone.json"))
    storage.remove(storage.join(base, "gone.json"))


def test_removing_a_directory_removes_nothing_beside_it(base: str) -> None:
    _fill(base)
    storage.make_directory(base)
    storage.publish(storage.join(base, "subway"), b"stays")
    storage.remove(storage.join(base, "sub"))
    storage.remove(storage.join(base, "a.json"))
    assert storage.list_names(base) == [".hidden", "b.jsonl", "subway", "ümläut +%41.txt"]
    storage.remove(base)
    assert not storage.exists(base)


@pytest.mark.parametrize("size", [0, 1000, 8 * 2**20, 20_000_001])
def test_files_written_in_pieces_appear_complete(base: str, size: int) -> None:
    storage.make_directory(base)
    path = storage.join(base, "big")
    data = random.Random(size).randbytes(size)
    file = storage.AtomicFile(path)
    view = memoryview(data)
    for i in range(0, size, 3_000_000):
        assert file.write(view[i : i + 3_000_000]) == len(view[i : i + 3_000_000])
    assert not storage.exists(path)
    file.commit()
    file.discard()
    assert storage.read_bytes(path) == data
    assert storage.stat(path).size == size


def test_discarded_files_do_not_appear(base: str) -> None:
    storage.make_directory(base)
    file = storage.AtomicFile(storage.join(base, "x"))
    file.write(b"some" * 3_000_000)
    file.discard()
    assert storage.list_names(base) == []


def test_reading_at_random_positions(base: str) -> None:
    storage.make_directory(base)
    path = storage.join(base, "x")
    data = random.Random(1).randbytes(3_000_000)
    storage.publish(path, data)
    chance = random.Random(2)
    with storage.open_read(path, storage.HEADER_BLOCK) as file:
        assert file.readable()
        assert file.seekable()
        for _ in range(40):
            begin, count = chance.randrange(len(data)), chance.choice((1, 100, 70_000, 400_000))
            if chance.random() < 0.6:
                file.seek(begin)
            begin = file.tell()
            assert file.read(count) == data[begin : begin + count]
        assert file.seek(-5, io.SEEK_END) == len(data) - 5
        assert file.read() == data[-5:]
        assert file.read(1) == b""
        file.seek(0)
        assert b"".join(file) == data


def test_unfinished_files_can_be_removed(base: str) -> None:
    storage.make_directory(base)
    # The test's server answers 500 where S3 says NoSuchUpload.
    storage.configure(dataclasses.replace(storage.options(), retries=1))
    storage.publish(storage.join(base, "done"), b"x")
    killed = storage.AtomicFile(storage.join(base, "killed"))
    killed.write(bytes(9 * 2**20))
    storage.discard_unfinished(base)
    assert storage.list_names(base) == ["done"]
    if base.startswith("s3"):
        with pytest.raises(StorageError, match="killed"):
            killed.commit()
    storage.configure(None)
