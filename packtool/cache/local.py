"""Copies of remote caches' files on this machine, so that training maps them into memory like any other.

    CACHE_DIR/<fingerprint of the cache>/<SHA-256>.arrow          a shard, checked
    CACHE_DIR/<fingerprint of the cache>/<split>-<tag>.index      an index

Copies are named by what they hold, not by where they came from: two URLs of one cache share them. A file is fetched
when it is first needed, by one process of the machine, while the others wait for it; they queue at the operating
system's lock on the unfinished file, which a dead process lets go of. Before the directory grows beyond its limit, or
the disk is full, copies of other caches go, those first that were not used for the longest time. A copy that somebody
has mapped may go too: its bytes stay until that process ends.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import BinaryIO, TypeVar

from packtool import storage
from packtool.cache.files import locked
from packtool.cache.manifest import Manifest, ShardInfo
from packtool.cache.verified import check_file
from packtool.config.caches import CacheOptions, VerifyCache, default_cache_dir
from packtool.constants import INDEX_NAME
from packtool.errors import ConfigError, MismatchError, StorageError

T = TypeVar("T")

_SHARD, _INDEX, _UNFINISHED = ".arrow", ".index", ".partial"
_LOCK_NAME = ".lock"
_FETCH_BLOCK, _CHUNK = 8 * 2**20, 4 * 2**20
# Left free on the disk, for checkpoints are often on the same one.
_SPARE_BYTES = 2**30
_TRIES = 2


@dataclass(frozen=True)
class LocalCopies:
    """A directory of copies.

    Args:
        directory: the same for all processes of a machine; on a disk of this machine.
        limit: bytes that it may hold, or None for all that the disk has.
        kept: fingerprints of the caches in use, which are not removed.
        verify: when files are held against their checksums.
        begun: Unix time in seconds from which on ``always`` counts.
    """

    directory: str
    limit: int | None = None
    kept: frozenset[str] = frozenset()
    verify: VerifyCache = "once"
    begun: float = field(default_factory=time.time, compare=False)

    @classmethod
    def default(cls) -> LocalCopies:
        """Where copies go if nobody says where."""
        return cls(default_cache_dir())

    @classmethod
    def of(cls, options: CacheOptions) -> LocalCopies:
        """Copies where a command's options say."""
        directory = options.cache_dir or cls.default().directory
        return cls(directory, options.cache_dir_size, verify=options.verify_cache)

    def check(self, path: str, fingerprint: str, sha256: str) -> bytes | None:
        """Compare a file of this machine with its checksum, if that is wanted and was not done yet.

        Args:
            fingerprint: of its cache.

        Returns:
            checksums of its blocks; None with ``--verify-cache never``.

        Raises:
            MismatchError: if it is damaged.
            StorageError: if it cannot be read.
        """
        if self.verify == "never":
            return None
        since = self.begun if self.verify == "always" else None
        return check_file(path, sha256, os.path.join(self.directory, fingerprint), since)

    def keeping(self, manifests: Sequence[Manifest]) -> LocalCopies:
        """Copies for a run that reads these remote caches, whose shards are not removed to make room.

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
        """The copy of a shard, fetched and checked against the manifest if it is not there yet.

        Args:
            path: of the shard itself.
            fingerprint: of its cache.

        Returns:
            the path of the copy; what ``check`` returns for it.

        Raises:
            StorageError: if it cannot be fetched, is not what the manifest says, or finds no room.
        """
        place = os.path.join(self.directory, fingerprint, info.sha256 + _SHARD)
        copy = self._copy(path, place, info.bytes, info.sha256)
        try:
            return copy, self.check(copy, fingerprint, info.sha256)
        except MismatchError:  # damaged here since it was fetched
            _remove(copy)
            self._copy(path, place, info.bytes, info.sha256)
            return copy, self.check(copy, fingerprint, info.sha256)

    def index(
        self, directory: str, split: str, fingerprint: str, read: Callable[[str], T], name: str = INDEX_NAME
    ) -> T:
        """Read the copy of a split's index, or of another file that planning reads; a damaged copy is fetched again.

        Args:
            read: reads the file at a path.

        Raises:
            MismatchError: if the second copy is damaged, too.
            StorageError: as above.
        """
        path = storage.join(directory, split, name)
        state = storage.stat(path)
        tag = hashlib.sha256(f"{state.size} {state.modified} {path}".encode()).hexdigest()[:16]
        place = os.path.join(self.directory, fingerprint, f"{split}-{tag}{_INDEX}")
        try:
            return read(self._copy(path, place, state.size, None))
        except MismatchError:
            _remove(place)
            return read(self._copy(path, place, state.size, None))

    def _copy(self, path: str, place: str, size: int, sha256: str | None) -> str:
        try:
            while not _is_there(place, size):
                os.makedirs(os.path.dirname(place), exist_ok=True)
                with locked(place + _UNFINISHED) as file:
                    if not _is_at(file, place + _UNFINISHED):
                        continue
                    if _is_there(place, size):  # since this process looked: what it locked is a new, empty file
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
        """Fill the unfinished file, whose lock is held, and put it in its place."""
        try:
            self._make_room(file, size)
            for _ in range(_TRIES):
                found_size, found = _download(path, file)
                if found_size == size and sha256 in (None, found):
                    break
            else:
                what = f"has the SHA-256 {found}" if found_size == size else f"has {found_size} bytes"
                said = sha256 if found_size == size else size
                raise StorageError(
                    f"{storage.masked(path)}: what arrives {what}, the manifest says {said}",
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
        """Remove copies of other caches until ``size`` more bytes fit, and claim these bytes."""
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
        """(path, fingerprint, state) of all copies, also unfinished ones."""
        for fingerprint in os.listdir(self.directory):
            folder = os.path.join(self.directory, fingerprint)
            for name in os.listdir(folder) if os.path.isdir(folder) else ():
                if name.endswith((_SHARD, _INDEX, _UNFINISHED)):
                    path = os.path.join(folder, name)
                    with suppress(FileNotFoundError):
                        yield path, fingerprint, os.stat(path)


def _download(path: str, file: BinaryIO) -> tuple[int, str]:
    """Bytes and SHA-256 of what was written."""
    digest, size = hashlib.sha256(), 0
    file.seek(0)
    with storage.open_read(path, _FETCH_BLOCK) as source:
        while chunk := source.read(_CHUNK):
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
    """Whether the path still is the open file, which the lock's last holder may have moved or removed."""
    try:
        here, there = os.fstat(file.fileno()), os.stat(path)
    except FileNotFoundError:
        return False
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _remove(path: str) -> bool:
    """Remove a copy; an unfinished one only if nobody is at work on it."""
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
