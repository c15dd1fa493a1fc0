"""Cache files on this machine: verification against the manifest's checksums, and copies of remote caches.

    CACHE_DIR/<fingerprint of the cache>/<SHA-256>.arrow                      a copy of a shard, verified
    CACHE_DIR/<fingerprint of the cache>/<split>-<tag>.index                  a copy of an index
    CACHE_DIR/<fingerprint of the cache>/<digest of the file's path>.checked  a note about a verified file

Copies are named by their content, so that two URLs of one cache share them. One process of a machine fetches a file
when it is first needed, while the others wait for the lock of the unfinished file, which the operating system releases
when a process dies. Before the directory exceeds its limit, or the disk is full, the least recently used copies of
other caches are removed. A copy that a process has mapped keeps its bytes until that process ends.

A note is a line of JSON with path, size and times of the file, followed by the checksums of its blocks. Each file is
verified once on a machine: processes that need it wait for the lock of its note and then trust the note. Where no note
can be kept, each process verifies the file. A file may be damaged later, while it is mapped. So each process compares
every block with its checksum when it first reads it, and again when the file has changed.
"""

from __future__ import annotations

import fcntl
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
    """Open a file, created if it is missing, and hold its lock."""
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield file
        finally:
            file.flush()
            # Explicit, because a process forked meanwhile would keep the lock with its copy of the descriptor.
            fcntl.flock(file, fcntl.LOCK_UN)


def sha256_of(path: str) -> str:
    """Return the SHA-256 of a file."""
    with storage.open_read(path) as file:
        return hashlib.file_digest(cast(BufferedReader, file), "sha256").hexdigest()


_SUFFIX = ".checked"

BLOCK_BYTES = 16 * 2**10
_COPY_AGAIN = (
    "Copy it again from where it is whole. packtool inspect CACHE --verify finds all that is damaged, and says how to "
    "mend it."
)


def check_file(path: str, sha256: str, notes: str, since: float | None = None) -> bytes:
    """Verify a local file against its SHA-256.

    Args:
        sha256: that it should have.
        notes: directory of the notes.
        since: Unix time in seconds; older notes are not trusted. None trusts all.

    Returns:
        checksums of its blocks, for ``MappedBlocks``.

    Raises:
        MismatchError: if it has another one.
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
    except OSError:  # the note cannot be written
        return _compare(path, sha256)


def _known_sums(file: BinaryIO, path: str, sha256: str, since: float | None) -> bytes | None:
    """Return the checksums in a note; None if it does not match the file as it is now."""
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
    """The blocks of a mapped file, each compared with its checksum when it is first read.

    Args:
        data: the mapped file.
        sums: checksums from ``check_file``.
        remedy: of errors about damage; by default for a file of a local cache.
    """

    def __init__(self, path: str, data: pa.Buffer, sums: bytes, remedy: str | None = None) -> None:
        self._remedy = remedy or _COPY_AGAIN
        self._path, self._start, self._view = path, data.address, memoryview(data)
        self._sums = np.frombuffer(sums, np.uint32)
        self._is_verified = bytearray(len(self._sums))
        self._state: os.stat_result | None = None

    def note_changes(self) -> None:
        """Compare all blocks again if the file has changed. Takes 2 microseconds.

        Raises:
            MismatchError: if the file was truncated, so that reading the mapped memory would kill this process.
        """
        with suppress(OSError):  # removed: its content stays mapped
            now, before = os.stat(self._path), self._state
            if before is not None and now.st_ino != before.st_ino:
                return  # replaced: the old file is mapped
            if now.st_size < len(self._view):
                raise self.damaged(f"it was cut from {len(self._view):,} to {now.st_size:,} bytes while in use")
            if before is None or (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                self._state, self._is_verified = now, bytearray(len(self._sums))

    def are_verified(self, address: int, num_bytes: int) -> bool:
        """Return whether these bytes of memory were verified before, without reading them."""
        start = address - self._start
        return self._is_verified.find(0, start // BLOCK_BYTES, (start + num_bytes - 1) // BLOCK_BYTES + 1) < 0

    def verify(self, address: int, num_bytes: int) -> bool:
        """Compare the blocks that hold these bytes of memory with their checksums."""
        start = address - self._start
        end = (start + num_bytes - 1) // BLOCK_BYTES + 1
        block = self._is_verified.find(0, start // BLOCK_BYTES, end)
        while block >= 0:
            if zlib.crc32(self._view[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]) != self._sums[block]:
                return False
            self._is_verified[block] = 1
            block = self._is_verified.find(0, block, end)
        return True

    def damaged(self, problem: str) -> MismatchError:
        """Return the error for a file that changed after it was verified."""
        return MismatchError(f"{self._path} is damaged: {problem}", self._remedy)


def check_all(directory: str, manifest: Manifest) -> Iterator[tuple[str, str, int]]:
    """Read all shards and indexes of a cache, ignoring the notes.

    Yields:
        (path below the directory, problem or an empty text, bytes read) of each file.
    """
    for split, info in sorted(manifest.splits.items()):
        expected: list[tuple[str, int | None, str]] = [(INDEX_NAME, None, info.index_sha256)]
        expected += [(PREFIXES_NAME, None, info.prefixes_sha256)] if info.prefixes_sha256 else []
        expected += [(shard.file, shard.bytes, shard.sha256) for shard in info.shards]
        for name, size, sha256 in expected:
            path = storage.join(directory, split, name)
            state = storage.stat(path) if storage.exists(path) else None
            problem = ""
            if state is None:
                problem = "is missing"
            elif size not in (None, state.size):
                problem = f"has {state.size:,} bytes, the manifest says {size:,}"
            elif sha256 and sha256_of(path) != sha256:
                problem = "does not have the SHA-256 that the manifest says"
            elif name == INDEX_NAME:
                try:
                    read_index(directory, manifest, split)
                except MismatchError as error:
                    problem = error.message.rpartition(": ")[2]
            yield f"{split}/{name}", problem, state.size if state is not None else 0


T = TypeVar("T")

_SHARD, _INDEX, _UNFINISHED = ".arrow", ".index", ".partial"
_LOCK_NAME = ".lock"
_FETCH_BLOCK = 8 * 2**20
_SPARE_BYTES = 2**30  # left free on the disk, which often holds checkpoints too
_MAX_ATTEMPTS = 2


@dataclass(frozen=True)
class LocalCopies:
    """A directory of copies and notes.

    Args:
        directory: on a local disk, the same for all processes of the machine.
        limit: maximum bytes, or None for the whole disk.
        kept: fingerprints of the caches in use, whose copies are not removed.
        verify: when files are compared with their checksums.
        begun: Unix time in seconds; ``always`` does not trust older notes.
    """

    directory: str = field(default_factory=default_cache_dir)
    limit: int | None = None
    kept: frozenset[str] = frozenset()
    verify: VerifyCache = "once"
    begun: float = field(default_factory=time.time, compare=False)

    @classmethod
    def of(cls, options: CacheOptions) -> LocalCopies:
        """Return the directory that a command's options name."""
        return cls(options.cache_dir or default_cache_dir(), options.cache_dir_size, verify=options.verify_cache)

    def check(self, path: str, fingerprint: str, sha256: str) -> bytes | None:
        """Verify a local file of the cache with this fingerprint, unless a note says that it was verified.

        Returns:
            checksums of its blocks; None with ``--verify-cache never``.
        """
        if self.verify == "never":
            return None
        since = self.begun if self.verify == "always" else None
        return check_file(path, sha256, os.path.join(self.directory, fingerprint), since)

    def keeping(self, manifests: Sequence[Manifest]) -> LocalCopies:
        """Return a directory that keeps the copies of these remote caches.

        Raises:
            ConfigError: if they are larger than the limit.
        """
        sizes = {(m.fingerprint, s.sha256): s.bytes for m in manifests for p in m.splits.values() for s in p.shards}
        total = sum(sizes.values())
        if self.limit is not None and total > self.limit:
            raise ConfigError(
                f"--cache-dir-size {self.limit / 1e6:,.1f} MB is less than the {total / 1e6:,.1f} MB of the remote "
                f"caches: they do not fit into {self.directory}; raise it, or give a --cache-dir on a larger disk"
            )
        return replace(self, kept=frozenset(manifest.fingerprint for manifest in manifests))

    def shard(self, path: str, fingerprint: str, info: ShardInfo) -> tuple[str, bytes | None]:
        """Return the path and the block checksums of the verified copy of a shard, which is fetched if it is missing.

        Args:
            path: of the original.
            fingerprint: of its cache.
        """
        place = os.path.join(self.directory, fingerprint, info.sha256 + _SHARD)
        return self._read_copy(
            path, place, info.bytes, info.sha256, lambda copy: (copy, self.check(copy, fingerprint, info.sha256))
        )

    def index(
        self, directory: str, split: str, fingerprint: str, read: Callable[[str], T], name: str = INDEX_NAME
    ) -> T:
        """Return ``read(path)`` of the copy of an index, or of the file ``name``; a damaged copy is fetched again."""
        path = storage.join(directory, split, name)
        state = storage.stat(path)
        tag = hashlib.sha256(f"{state.size} {state.modified} {path}".encode()).hexdigest()[:16]
        place = os.path.join(self.directory, fingerprint, f"{split}-{tag}{_INDEX}")
        return self._read_copy(path, place, state.size, None, read)

    def _read_copy(self, path: str, place: str, size: int, sha256: str | None, read: Callable[[str], T]) -> T:
        """Return ``read(place)`` of a copy; a damaged one is fetched again, once."""
        try:
            return read(self._copy(path, place, size, sha256))
        except MismatchError:
            _remove(place)
            return read(self._copy(path, place, size, sha256))

    def _copy(self, path: str, place: str, size: int, sha256: str | None) -> str:
        try:
            while not _is_there(place, size):
                os.makedirs(os.path.dirname(place), exist_ok=True)
                with locked(place + _UNFINISHED) as file:
                    if not _is_at(file, place + _UNFINISHED):
                        continue
                    if _is_there(place, size):  # fetched meanwhile: the locked file is a new, empty one
                        os.remove(place + _UNFINISHED)
                    else:
                        self._fetch(path, place, file, size, sha256)
            with suppress(FileNotFoundError):
                os.utime(place)
        except OSError as error:
            raise StorageError(
                f"{self.directory}: {error.strerror or error} (while copying {storage.masked(path)})",
                "Give a --cache-dir on a disk of this machine that has room.",
            ) from error
        return place

    def _fetch(self, path: str, place: str, file: BinaryIO, size: int, sha256: str | None) -> None:
        """Fill the unfinished file, whose lock is held, and publish it."""
        try:
            self._make_room(file, size)
            for _ in range(_MAX_ATTEMPTS):
                arrived_size, digest = _download(path, file)
                if arrived_size == size and sha256 in (None, digest):
                    break
            else:
                arrived, expected = f"the SHA-256 {digest}", sha256
                if arrived_size != size:
                    arrived, expected = f"{arrived_size} bytes", str(size)
                raise StorageError(
                    f"{storage.masked(path)}: what arrives has {arrived}, the manifest says {expected}",
                    "Copy the cache again, or export it again.",
                )
            file.flush()
            os.fsync(file.fileno())
            os.replace(place + _UNFINISHED, place)
        except BaseException:
            with suppress(OSError):
                os.remove(place + _UNFINISHED)
            raise

    def _make_room(self, file: BinaryIO, size: int) -> None:
        """Remove copies of other caches until ``size`` more bytes fit, and reserve these bytes."""
        with locked(os.path.join(self.directory, _LOCK_NAME)):
            copies = list(self._copies())
            used = sum(state.st_size for _, _, state in copies)
            excess = size + _SPARE_BYTES - shutil.disk_usage(self.directory).free
            if self.limit is not None:
                excess = max(excess, used + size - self.limit)
            for path, fingerprint, state in sorted(copies, key=lambda copy: copy[2].st_mtime):
                if excess <= 0:
                    break
                if fingerprint not in self.kept and _remove(path):
                    excess -= state.st_size
            free = shutil.disk_usage(self.directory).free
            if size + _SPARE_BYTES > free:
                raise StorageError(
                    f"{self.directory}: {size / 1e6:,.1f} MB more do not fit, the disk has {free / 1e9:,.2f} GB left, "
                    f"of which {_SPARE_BYTES / 1e9:,.2f} GB stay free",
                    "Give a --cache-dir on a larger disk, or make room.",
                )
            file.truncate(size)  # counts as used from now on

    def _copies(self) -> Iterator[tuple[str, str, os.stat_result]]:
        """Yield (path, fingerprint, state) of all copies, also unfinished ones."""
        for fingerprint in os.listdir(self.directory):
            folder = os.path.join(self.directory, fingerprint)
            for name in os.listdir(folder) if os.path.isdir(folder) else ():
                if name.endswith((_SHARD, _INDEX, _UNFINISHED)):
                    path = os.path.join(folder, name)
                    with suppress(FileNotFoundError):
                        yield path, fingerprint, os.stat(path)


def _download(path: str, file: BinaryIO) -> tuple[int, str]:
    """Copy a file and return its size and SHA-256."""
    digest, size = hashlib.sha256(), 0
    file.seek(0)
    with storage.open_read(path, _FETCH_BLOCK) as source:
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += file.write(chunk)
    file.truncate(size)
    return size, digest.hexdigest()


def _is_there(path: str, size: int) -> bool:
    try:
        return os.stat(path).st_size == size
    except FileNotFoundError:
        return False


def _is_at(file: BinaryIO, path: str) -> bool:
    """Return whether an open file still has its path: the lock's last holder may have moved or removed it."""
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
