"""Files of a cache compared with the checksums of its manifest, each once on a machine; and their blocks when read.

    CACHE_DIR/<fingerprint of the cache>/<digest of the file's path>.checked

is the note of a file that was right: a line of JSON with its path, size and times, then the checksums of its blocks.
While one process reads a file, the others that need it wait at the lock of its note and then trust the note. The
cache's own directory may be read-only; where no note can be kept, each process reads the file itself.

A file may be damaged later, while it is mapped into memory. So each process compares every block with its checksum when
it first reads the block, and again when the file has changed since.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from packtool import storage
from packtool.cache.files import locked, sha256_of
from packtool.cache.index import read_index
from packtool.cache.manifest import Manifest
from packtool.config.yaml_values import load_json
from packtool.constants import INDEX_NAME, PREFIXES_NAME
from packtool.errors import MismatchError

_SUFFIX = ".checked"
_CHUNK_BYTES = 4 * 2**20
BLOCK_BYTES = 16 * 2**10
_COPY_AGAIN = (
    "Copy it again from where it is whole. packtool inspect CACHE --verify finds all that is damaged, and says how to "
    "mend it."
)


def check_file(path: str, sha256: str, notes: str, since: float | None = None) -> bytes:
    """Make sure that a file of this machine holds what the manifest says.

    Args:
        sha256: that it should have.
        notes: directory of the notes.
        since: Unix time in seconds; older notes are not trusted. None trusts all.

    Returns:
        checksums of its blocks, for ``MappedBlocks``.

    Raises:
        MismatchError: if it holds something else.
        StorageError: if it cannot be read.
    """
    note = os.path.join(notes, hashlib.sha256(os.path.realpath(path).encode()).hexdigest()[:24] + _SUFFIX)
    with suppress(OSError), open(note, "rb") as file:
        if (sums := _known_sums(file, path, sha256, since)) is not None:
            return sums
    try:
        os.makedirs(notes, exist_ok=True)
        with locked(note) as file:
            if (sums := _known_sums(file, path, sha256, since)) is None:
                state = _state(path)
                sums = _compare(path, sha256)
                file.seek(0)
                file.truncate()
                file.write(json.dumps([*state, sha256, zlib.crc32(sums), time.time()]).encode() + b"\n" + sums)
            return sums
    except OSError:  # no place for notes
        return _compare(path, sha256)


def _known_sums(file: BinaryIO, path: str, sha256: str, since: float | None) -> bytes | None:
    """The checksums in a note; None if it does not hold for the file as it is now."""
    file.seek(0)
    try:
        *state, digest, crc, checked = load_json(file.readline())
        sums = file.read()
        is_same = [*state, digest, crc] == [*_state(path), sha256, zlib.crc32(sums)]
        return sums if is_same and (since is None or checked >= since) else None
    except (ValueError, TypeError):
        return None  # empty, cut off, or an older packtool's


def _state(path: str) -> list[str | int]:
    state = os.stat(path)
    return [os.path.realpath(path), state.st_size, state.st_mtime_ns, state.st_ctime_ns]


def _compare(path: str, sha256: str) -> bytes:
    found, sums = digests_of(path)
    if found != sha256:
        raise MismatchError(f"{path} is damaged: its SHA-256 is {found}, the manifest says {sha256}", _COPY_AGAIN)
    return sums


def digests_of(path: str) -> tuple[str, bytes]:
    """SHA-256 of a file, and the CRC-32 of each of its blocks, 4 bytes each.

    Raises:
        StorageError: if it cannot be read.
    """
    digest, sums = hashlib.sha256(), []
    with storage.open_read(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            view = memoryview(chunk)
            sums += [zlib.crc32(view[i : i + BLOCK_BYTES]) for i in range(0, len(view), BLOCK_BYTES)]
    return digest.hexdigest(), np.array(sums, np.uint32).tobytes()


class MappedBlocks:
    """The blocks of a mapped file, each compared with its checksum when it is first read.

    Args:
        path: of the file.
        data: the whole file in memory.
        sums: as ``check_file`` gives them.
        remedy: against damage; by default for a file of a local cache.
    """

    def __init__(self, path: str, data: pa.Buffer, sums: bytes, remedy: str | None = None) -> None:
        self._remedy = remedy or _COPY_AGAIN
        self._path, self._start, self._view = path, data.address, memoryview(data)
        self._sums = np.frombuffer(sums, np.uint32)
        self._is_right = bytearray(len(self._sums))
        self._state: os.stat_result | None = None

    def note_changes(self) -> None:
        """Compare all blocks again if the file has changed. Price: 2 microseconds.

        Raises:
            MismatchError: if the file was truncated, so that reading the mapped memory would kill this process.
        """
        with suppress(OSError):  # removed: what is mapped stays
            now, before = os.stat(self._path), self._state
            if before is not None and now.st_ino != before.st_ino:
                return  # replaced: what is mapped is the old file
            if now.st_size < len(self._view):
                raise self.damaged(f"it was cut from {len(self._view):,} to {now.st_size:,} bytes while in use")
            if before is None or (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                self._state, self._is_right = now, bytearray(len(self._sums))

    def were_right(self, address: int, num_bytes: int) -> bool:
        """Whether ``are_right`` has found so already."""
        start = address - self._start
        return self._is_right.find(0, start // BLOCK_BYTES, (start + num_bytes - 1) // BLOCK_BYTES + 1) < 0

    def are_right(self, address: int, num_bytes: int) -> bool:
        """Check the blocks that hold these bytes of memory against their checksums."""
        start = address - self._start
        end = (start + num_bytes - 1) // BLOCK_BYTES + 1
        block = self._is_right.find(0, start // BLOCK_BYTES, end)
        while block >= 0:
            if zlib.crc32(self._view[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]) != self._sums[block]:
                return False
            self._is_right[block] = 1
            block = self._is_right.find(0, block, end)
        return True

    def damaged(self, problem: str) -> MismatchError:
        """The error for a file that is no longer what was verified."""
        return MismatchError(f"{self._path} is damaged: {problem}", self._remedy)


@dataclass(frozen=True)
class FileCheck:
    """What became of a file that was looked at.

    Args:
        file: below the cache's directory.
        problem: what is wrong with it; empty if nothing is.
        bytes: that were read.
    """

    file: str
    problem: str
    bytes: int


def check_all(directory: str, manifest: Manifest) -> Iterator[FileCheck]:
    """Read all shards and indexes of a cache, wherever it lies, and trust no notes.

    Raises:
        StorageError: if the place cannot be reached.
    """
    for split, info in sorted(manifest.splits.items()):
        folder = storage.join(directory, split)
        wanted: list[tuple[str, int | None, str]] = [(INDEX_NAME, None, info.index_sha256)]
        wanted += [(PREFIXES_NAME, None, info.prefixes_sha256)] if info.prefixes_sha256 else []
        wanted += [(shard.file, shard.bytes, shard.sha256) for shard in info.shards]
        for name, size, sha256 in wanted:
            path = storage.join(folder, name)
            state = storage.stat(path) if storage.exists(path) else None
            problem = ""
            if state is None:
                problem = "is missing"
            elif size not in (None, state.size):
                problem = f"has {state.size:,} bytes, the manifest says {size:,}"
            elif sha256 and sha256_of(path) != sha256:
                problem = "does not have the SHA-256 that the manifest says"
            elif name == INDEX_NAME and (found := _index_problem(directory, manifest, split)):
                problem = found
            yield FileCheck(f"{split}/{name}", problem, state.size if state is not None else 0)


def _index_problem(directory: str, manifest: Manifest, split: str) -> str:
    try:
        read_index(directory, manifest, split)
    except MismatchError as error:
        return error.message.rpartition(": ")[2]
    return ""
