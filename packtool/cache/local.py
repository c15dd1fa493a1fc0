"""Cache files on this machine: verification against the manifest's checksums, and copies of remote caches.

    CACHE_DIR/<fingerprint of the cache>/<SHA-256>.arrow                      a copy of a shard, verified
    CACHE_DIR/<fingerprint of the cache>/<split>-<tag>.index                  a copy of an index
    CACHE_DIR/<fingerprint of the cache>/<digest of the file's path>.checked  a note about a verified file

Copies are named by content, so two URLs of one cache share them; processes that mapped a removed copy keep its bytes.
A file is verified once per machine (by each process where no note can be written). Because a mapped file may be damaged
later, each process also compares every block with its checksum when it first reads it, and again after a change.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from io import BufferedReader
from typing import BinaryIO, TypeVar, cast

import numpy as np
import pyarrow as pa

from packtool import storage
from packtool.cache.index import read_index
from packtool.cache.manifest import Manifest, ShardInfo
from packtool.config.data import CacheOptions, VerifyCache, default_cache_dir
from packtool.config.settings import load_json
from packtool.constants import INDEX_NAME, PREFIXES_NAME
from packtool.errors import ConfigError, MismatchError, StorageError

_CHUNK_BYTES = 4 * 2**20


@contextmanager
def locked(path: str) -> Iterator[BinaryIO]:
    """Open a file, which is created if it is missing, and hold its lock until the end of the block."""
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield file
        finally:
            file.flush()
            # Closing is not enough: a process forked meanwhile has a copy of the descriptor, which keeps the lock.
            fcntl.flock(file, fcntl.LOCK_UN)


def sha256_of(path: str) -> str:
    """Return the SHA-256 of a file."""
    with storage.open_read(path) as file:
        return hashlib.file_digest(cast(BufferedReader, file), "sha256").hexdigest()


_SUFFIX = ".checked"

BLOCK_BYTES = 16 * 2**10
_COPY_AGAIN = (
    "Copy it again from an intact cache. packtool inspect CACHE --verify lists all damaged files and how to repair "
    "them."
)


def check_file(path: str, sha256: str, records: str, since: float | None = None) -> bytes:
    """Verify that a local file has the SHA-256 ``sha256``; raise a MismatchError if it has not.

    The result is recorded in a small file, so that the verified file is read again only if it has changed. Several
    processes may verify the same file: one of them reads it, and the others wait.

    Args:
        records: directory of the records.
        since: Unix time in seconds; older records are not trusted. None trusts all.

    Returns:
        The CRC-32 of each block of ``BLOCK_BYTES`` of the file, 4 bytes each.
    """
    record_name = hashlib.sha256(os.path.realpath(path).encode()).hexdigest()[:24] + _SUFFIX
    record_path = os.path.join(records, record_name)
    with suppress(OSError), open(record_path, "rb") as record:
        block_sums = _read_record(record, path, sha256, since)
        if block_sums is not None:
            return block_sums
    try:
        os.makedirs(records, exist_ok=True)
        with locked(record_path) as record:
            # Another process may have written the record while this one waited for the lock.
            block_sums = _read_record(record, path, sha256, since)
            if block_sums is None:
                block_sums = _write_record(record, path, sha256)
            return block_sums
    except OSError:  # the record cannot be written
        return _verified_sums(path, sha256)


def _write_record(record: BinaryIO, path: str, sha256: str) -> bytes:
    """Verify a file, and write its new record; return the block checksums."""
    state = _state(path)  # before the file is read, so that a change during the reading is noticed
    block_sums = _verified_sums(path, sha256)
    header = [*state, sha256, zlib.crc32(block_sums), time.time()]
    record.seek(0)
    record.truncate()
    record.write(json.dumps(header).encode() + b"\n" + block_sums)
    return block_sums


def _read_record(record: BinaryIO, path: str, sha256: str, since: float | None) -> bytes | None:
    """Return the block checksums in a record; None if it is older than ``since`` or the file has changed."""
    record.seek(0)
    try:
        *recorded_values, checked_at = load_json(record.readline())
        block_sums = record.read()
        expected_values = [*_state(path), sha256, zlib.crc32(block_sums)]
        is_too_old = since is not None and not checked_at >= since  # also if it is NaN
    except (ValueError, TypeError):
        return None  # empty, incomplete, or of an older packtool
    return block_sums if recorded_values == expected_values and not is_too_old else None


def _state(path: str) -> list[str | int]:
    """Return the path, size and times by which a change of a file is noticed."""
    state = os.stat(path)
    return [os.path.realpath(path), state.st_size, state.st_mtime_ns, state.st_ctime_ns]


def _verified_sums(path: str, sha256: str) -> bytes:
    """Read a file; return its block checksums, or raise a MismatchError if its SHA-256 is another."""
    digest, sums = digests_of(path)
    if digest != sha256:
        raise MismatchError(f"{path} is damaged: its SHA-256 is {digest}, the manifest says {sha256}", _COPY_AGAIN)
    return sums


def digests_of(path: str) -> tuple[str, bytes]:
    """Return the SHA-256 of a file, and the CRC-32 of each of its blocks, 4 bytes each."""
    digest, sums = hashlib.sha256(), []
    with storage.open_read(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            view = memoryview(chunk)
            sums += [zlib.crc32(view[i : i + BLOCK_BYTES]) for i in range(0, len(view), BLOCK_BYTES)]
    return digest.hexdigest(), np.array(sums, np.uint32).tobytes()


class MappedBlocks:
    """The blocks of a mapped file; each is compared with its checksum in ``sums`` before its first use."""

    def __init__(self, path: str, data: pa.Buffer, sums: bytes, remedy: str | None = None) -> None:
        self._remedy = remedy or _COPY_AGAIN
        self._path, self._start, self._view = path, data.address, memoryview(data)
        self._sums = np.frombuffer(sums, np.uint32)
        self._is_verified = bytearray(len(self._sums))
        self._state: os.stat_result | None = None

    def note_changes(self) -> None:
        """Require that all blocks are verified again if the file has changed since the last call.

        This takes 2 microseconds. Raises a MismatchError if the file was truncated: reading the mapped memory would
        kill this process.
        """
        with suppress(OSError):  # the file was removed: its content stays mapped
            state, last_state = os.stat(self._path), self._state
            is_replaced = last_state is not None and state.st_ino != last_state.st_ino
            if is_replaced:
                return  # the old file stays mapped
            num_bytes = len(self._view)
            if state.st_size < num_bytes:
                raise self.damaged(f"it was truncated from {num_bytes:,} to {state.st_size:,} bytes while in use")
            if last_state is None or _size_and_time(state) != _size_and_time(last_state):
                self._state = state
                self._is_verified = bytearray(len(self._sums))  # zeros

    def are_verified(self, address: int, num_bytes: int) -> bool:
        """Return whether all blocks of a memory range were verified before; reads no block."""
        first_block, stop_block = self._blocks_of(address, num_bytes)
        return self._is_verified.find(0, first_block, stop_block) < 0

    def verify(self, address: int, num_bytes: int) -> bool:
        """Compare the blocks of a memory range with their checksums; return False if one differs."""
        first_block, stop_block = self._blocks_of(address, num_bytes)
        block = self._is_verified.find(0, first_block, stop_block)  # the first unverified one; -1 for none
        while block >= 0:
            content = self._view[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
            if zlib.crc32(content) != self._sums[block]:
                return False
            self._is_verified[block] = 1
            block = self._is_verified.find(0, block, stop_block)
        return True

    def _blocks_of(self, address: int, num_bytes: int) -> tuple[int, int]:
        """Return the first block of a memory range, and the block after its last one."""
        start = address - self._start
        return start // BLOCK_BYTES, (start + num_bytes - 1) // BLOCK_BYTES + 1

    def damaged(self, problem: str) -> MismatchError:
        """Return the error for a file that changed after it was verified."""
        return MismatchError(f"{self._path} is damaged: {problem}", self._remedy)


def _size_and_time(state: os.stat_result) -> tuple[int, int]:
    return state.st_size, state.st_mtime_ns


def check_all(directory: str, manifest: Manifest) -> Iterator[tuple[str, str, int]]:
    """Verify all files of a cache by reading them: indexes, prefixes and shards of its splits.

    Yields:
        For each file, its path below ``directory``, how it differs from the manifest ("" if it does not), and its size
        in bytes (0 if it is missing).
    """
    for split, info in sorted(manifest.splits.items()):
        # Name, size in bytes (None if the manifest lacks it) and SHA-256 ("" if the manifest lacks it) of each file.
        expected_files: list[tuple[str, int | None, str]] = [(INDEX_NAME, None, info.index_sha256)]
        if info.prefixes_sha256:
            expected_files.append((PREFIXES_NAME, None, info.prefixes_sha256))
        expected_files += [(shard.file, shard.bytes, shard.sha256) for shard in info.shards]
        for name, num_bytes, sha256 in expected_files:
            path = storage.join(directory, split, name)
            state = storage.stat(path) if storage.exists(path) else None
            problem = _file_problem(path, state, num_bytes, sha256)
            if name == INDEX_NAME and not problem:
                problem = _unreadable_index_problem(directory, manifest, split)
            yield f"{split}/{name}", problem, state.size if state is not None else 0


def _file_problem(path: str, state: storage.FileState | None, num_bytes: int | None, sha256: str) -> str:
    """Describe how a file differs from the manifest; "" if it does not. ``state`` is None if it does not exist."""
    if state is None:
        return "is missing"
    if num_bytes is not None and state.size != num_bytes:
        return f"has {state.size:,} bytes, the manifest says {num_bytes:,}"
    if sha256 and sha256_of(path) != sha256:
        return "has another SHA-256 than in the manifest"
    return ""


def _unreadable_index_problem(directory: str, manifest: Manifest, split: str) -> str:
    """Describe why the index of a split cannot be read; "" if it can."""
    try:
        read_index(directory, manifest, split)
    except MismatchError as error:
        return error.message.rpartition(": ")[2]  # without the file's path, which is yielded
    return ""


T = TypeVar("T")

_SHARD, _INDEX, _UNFINISHED = ".arrow", ".index", ".partial"
_LOCK_NAME = ".lock"
_FETCH_BLOCK = 8 * 2**20
_SPARE_BYTES = 2**30  # left free on the disk, which often holds checkpoints too
_MAX_ATTEMPTS = 2


@dataclass(frozen=True)
class LocalCopies:
    """A directory with local copies of remote caches, and notes about verified files.

    Args:
        directory: on a local disk, the same for all processes of the machine.
        limit: maximum size in bytes; None for the whole disk.
        caches_in_use: fingerprints of the caches whose copies are not removed.
        verify: when files are compared with their checksums.
        begun: Unix time in seconds; with ``--verify-cache always``, older notes are not trusted.
    """

    directory: str = field(default_factory=default_cache_dir)
    limit: int | None = None
    caches_in_use: frozenset[str] = frozenset()
    verify: VerifyCache = "once"
    begun: float = field(default_factory=time.time, compare=False)

    @classmethod
    def of(cls, options: CacheOptions) -> LocalCopies:
        """Return the directory that a command's options name."""
        return cls(options.cache_dir or default_cache_dir(), options.cache_dir_size, verify=options.verify_cache)

    def check(self, path: str, fingerprint: str, sha256: str) -> bytes | None:
        """Verify a file unless a note says that it was verified; return checksums of its blocks, None for "never"."""
        if self.verify == "never":
            return None
        since = self.begun if self.verify == "always" else None
        return check_file(path, sha256, os.path.join(self.directory, fingerprint), since)

    def keeping(self, manifests: Sequence[Manifest]) -> LocalCopies:
        """Return this directory with the remote caches of ``manifests`` in use, so that their copies are not removed.

        Raises a ConfigError if all of their shards together exceed the size limit of the directory.
        """
        bytes_by_shard: dict[tuple[str, str], int] = {}  # copies of a cache hold shards of equal content once
        for manifest in manifests:
            for split in manifest.splits.values():
                bytes_by_shard |= {(manifest.fingerprint, shard.sha256): shard.bytes for shard in split.shards}
        total_bytes = sum(bytes_by_shard.values())
        if self.limit is not None and total_bytes > self.limit:
            raise ConfigError(
                f"--cache-dir-size {self.limit / 1e6:,.1f} MB is less than the {total_bytes / 1e6:,.1f} MB of the "
                f"remote caches: they do not fit into {self.directory}; raise it, or give a --cache-dir on a larger "
                "disk"
            )
        return replace(self, caches_in_use=frozenset(manifest.fingerprint for manifest in manifests))

    def shard(self, path: str, fingerprint: str, info: ShardInfo) -> tuple[str, bytes | None]:
        """Return path and block checksums of the verified copy of a shard at URL ``path``; fetch it if missing."""
        copy = os.path.join(self.directory, fingerprint, info.sha256 + _SHARD)
        return self._read_copy(
            path, copy, info.bytes, info.sha256, lambda copy: (copy, self.check(copy, fingerprint, info.sha256))
        )

    def index(
        self, directory: str, split: str, fingerprint: str, read: Callable[[str], T], name: str = INDEX_NAME
    ) -> T:
        """Return ``read(copy)`` for the copy of a split's index, or of its file ``name``; fetch it if it is missing."""
        path = storage.join(directory, split, name)
        state = storage.stat(path)
        tag = hashlib.sha256(f"{state.size} {state.modified} {path}".encode()).hexdigest()[:16]
        copy = os.path.join(self.directory, fingerprint, f"{split}-{tag}{_INDEX}")
        return self._read_copy(path, copy, state.size, None, read)

    def _read_copy(self, path: str, copy: str, size: int, sha256: str | None, read: Callable[[str], T]) -> T:
        """Return ``read(copy)`` of the copy of a remote file; fetch a damaged copy again, once."""
        try:
            return read(self._fetch_if_missing(path, copy, size, sha256))
        except MismatchError:
            _remove(copy)
            return read(self._fetch_if_missing(path, copy, size, sha256))

    def _fetch_if_missing(self, url: str, copy_path: str, size: int, sha256: str | None) -> str:
        """Download a remote file to ``copy_path`` unless this machine already has a copy there.

        Several processes may call this for the same file: one of them downloads it, and the others wait. The download
        goes to a partial file, whose lock the downloading process holds, and which is then renamed to ``copy_path``.

        Args:
            size: bytes of the file. A copy of another size is downloaded again.
            sha256: checksum of the download; None if it is unknown.

        Returns:
            ``copy_path``, whose modification time is now: it is used as the time of the last use.
        """
        partial_path = copy_path + _UNFINISHED
        try:
            while not _has_size(copy_path, size):
                os.makedirs(os.path.dirname(copy_path), exist_ok=True)
                with locked(partial_path) as partial_file:  # waits while another process downloads
                    if not _is_at_path(partial_file, partial_path):
                        continue  # that process has renamed or removed the partial file: look for the copy again
                    if _has_size(copy_path, size):
                        os.remove(partial_path)  # the copy was completed just before this process created the file
                    else:
                        self._download_and_rename(url, copy_path, partial_file, size, sha256)
            with suppress(FileNotFoundError):  # another process may have removed the copy to make room
                os.utime(copy_path)
        except OSError as error:
            message = f"{self.directory}: {error.strerror or error} (while copying {storage.masked(url)})"
            raise StorageError(message, "Give a --cache-dir on a local disk with enough space.") from error
        return copy_path

    def _download_and_rename(
        self, url: str, copy_path: str, partial_file: BinaryIO, size: int, sha256: str | None
    ) -> None:
        """Download a file into ``partial_file``, which is open and locked, and rename that to ``copy_path``.

        The partial file is removed after an error, such as the StorageError if all attempts have another size or
        SHA-256 (None if it is unknown).
        """
        partial_path = copy_path + _UNFINISHED
        try:
            self._reserve(partial_file, size)
            for _ in range(_MAX_ATTEMPTS):
                num_bytes, digest = _download(url, partial_file)  # replaces the content
                if num_bytes == size and sha256 in (None, digest):
                    break
            else:
                if num_bytes != size:
                    difference = f"{num_bytes} bytes, the manifest says {size}"
                else:
                    difference = f"the SHA-256 {digest}, the manifest says {sha256}"
                message = f"{storage.masked(url)}: the download has {difference}"
                raise StorageError(message, "Copy the cache again, or export it again.")
            partial_file.flush()
            os.fsync(partial_file.fileno())  # the content must be on the disk before the name is
            os.replace(partial_path, copy_path)
        except BaseException:
            with suppress(OSError):
                os.remove(partial_path)
            raise

    def _reserve(self, file: BinaryIO, size: int) -> None:
        """Extend the unfinished copy ``file`` to ``size`` bytes, which other processes count as used.

        Makes room if necessary; raises a StorageError if the disk is still too full.
        """
        with locked(os.path.join(self.directory, _LOCK_NAME)):
            self._make_room(size)
            free = shutil.disk_usage(self.directory).free
            if size + _SPARE_BYTES > free:
                raise StorageError(
                    f"{self.directory}: no space for {size / 1e6:,.1f} MB more: the disk has {free / 1e9:,.2f} GB "
                    f"left, of which {_SPARE_BYTES / 1e9:,.2f} GB stay free",
                    "Give a --cache-dir on a larger disk, or free some space.",
                )
            file.truncate(size)

    def _make_room(self, size: int) -> None:
        """Remove copies of caches that are not in use, the least recently used first, until ``size`` more bytes fit."""
        copies = self._copies()
        bytes_to_free = size + _SPARE_BYTES - shutil.disk_usage(self.directory).free
        if self.limit is not None:
            used_bytes = sum(state.st_size for _, state in copies)
            bytes_to_free = max(bytes_to_free, used_bytes + size - self.limit)
        for copy, state in copies:
            if bytes_to_free <= 0:
                return
            fingerprint = os.path.basename(os.path.dirname(copy))
            if fingerprint not in self.caches_in_use and _remove(copy):
                bytes_to_free -= state.st_size

    def _copies(self) -> list[tuple[str, os.stat_result]]:
        """Return path and status of all copies, finished and unfinished, the least recently used first."""
        copies = []
        for path in glob.glob(os.path.join(glob.escape(self.directory), "*", "*")):
            if path.endswith((_SHARD, _INDEX, _UNFINISHED)):
                with suppress(FileNotFoundError):
                    copies.append((path, os.stat(path)))
        return sorted(copies, key=lambda copy: copy[1].st_mtime)


def _download(path: str, file: BinaryIO) -> tuple[int, str]:
    """Write the content of a remote file to ``file``; return its size and SHA-256."""
    digest, size = hashlib.sha256(), 0
    file.seek(0)
    with storage.open_read(path, _FETCH_BLOCK) as source:
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += file.write(chunk)
    file.truncate(size)
    return size, digest.hexdigest()


def _has_size(path: str, size: int) -> bool:
    """Return whether a file exists and has this size."""
    try:
        return os.stat(path).st_size == size
    except FileNotFoundError:
        return False


def _is_at_path(file: BinaryIO, path: str) -> bool:
    """Return whether an open file has not been renamed or removed."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _remove(path: str) -> bool:
    """Remove a copy, but no unfinished one that a process is writing; return whether it was removed."""
    try:
        if path.endswith(_UNFINISHED):
            with open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.remove(path)
        else:
            os.remove(path)
    except OSError:
        return False
    return True
