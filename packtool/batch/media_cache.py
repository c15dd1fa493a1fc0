"""Resized pictures and frames on a disk of this machine, shared by all processes and runs that name the directory.

    DIR/entries/KEY        a header, then the pixels of one medium at one size: one read, and no decoding
    DIR/entries/KEY.part   one that is being written; its writer holds the system's lock on it
    DIR/runs/NAME          held by every process that reads what NAME stands for
    DIR/state              bytes of all entries; locked by whoever adds or removes some

Space is claimed before an entry is written, so the directory never grows beyond its bound, and an entry gets its name
when it is whole. What a killed process left behind is removed when a run begins or makes room.

Eviction: a plan reads each medium once per epoch, so no order of eviction gives more hits than the entries that fit.
Entries that the next epoch reads again are therefore kept. Later media find no room and are decoded in each epoch,
which spreads decoding evenly over the steps; evicting the least recently used entry would give almost no hits. The
modification time of an entry ends in a number for the NAME that touched it last. The oldest entries are removed first:
before all others those that the next epoch does not read (mixtures), then those whose NAME no process holds.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from packtool.config.data import MediaCacheOptions
from packtool.config.settings import format_bytes

_MAGIC = b"packmed1"
_HEADER = struct.Struct("<8sI4I4x")  # magic, checksum, shape
_STATE = struct.Struct("<qd")  # bytes of all entries, Unix time until which nothing can be removed
_PART = ".part"
_BLOCK = 4096
# Left free on the disk, because checkpoints are often on the same disk.
_SPARE_BYTES = 2**30
_PAUSE_SECONDS = 60.0
_NS_PER_MS = 10**6
# Fraction of the limit that is removed at once: scanning half a million entries takes a second.
_EVICTED_SHARE = 1 / 20

Frames = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class MediaReads:
    """Hits and misses of a media cache; ``problem``: reason why media could not be stored although there was room."""

    hits: int = 0
    misses: int = 0
    problem: str | None = None

    def __add__(self, other: MediaReads) -> MediaReads:
        return MediaReads(self.hits + other.hits, self.misses + other.misses, self.problem or other.problem)

    @property
    def share(self) -> float:
        """Share of hits."""
        return self.hits / max(self.hits + self.misses, 1)

    def sentence(self, cache: MediaCache) -> str:
        """Summary of a run."""
        message = f"media cache: {self.share:.0%} of {self.hits + self.misses:,} pictures and videos were there; "
        message += f"{cache.directory} holds {cache.used / 1e6:,.1f} MB of {format_bytes(cache.limit)}"
        return message if self.problem is None else f"{message}; not all were kept: {self.problem}"


@dataclass
class _State:
    """Content of the file ``state``: bytes of all entries (-1: unknown), Unix time until which nothing is evicted."""

    used_bytes: int
    paused_until: float


class _Entry(NamedTuple):
    """A file of an entry: time of its last change, path, and bytes on the disk; sorts by time."""

    modified_ns: int
    path: str
    num_bytes: int


class MediaCache:
    """One process's access to the cache directory; can be pickled. No method raises: problems end writing.

    Args:
        directory: on a disk of this machine.
        limit: maximum bytes of the directory; if runs differ in it, the largest applies while its run lives.
        name: fingerprint of the caches whose media are read. Runs on the same data keep the same entries.
    """

    def __init__(self, directory: str, limit: int, name: str) -> None:
        self.directory, self.limit = os.path.abspath(directory), limit
        self.name = key_of(name)
        self._arguments = (directory, limit, name)
        self._entries, self._runs = (os.path.join(self.directory, part) for part in ("entries", "runs"))
        self._run_file: BinaryIO | None = None
        self._reads, self._can_write = MediaReads(), True

    @classmethod
    def of(cls, options: MediaCacheOptions, name: str) -> MediaCache | None:
        """Media cache of these options; None without one."""
        if options.media_cache is None or options.media_cache_size is None:
            return None
        return cls(options.media_cache, options.media_cache_size, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return MediaCache, self._arguments

    def take_reads(self) -> MediaReads:
        """Return the reads since the last call and reset them."""
        reads, self._reads = self._reads, MediaReads()
        return reads

    @property
    def used(self) -> int:
        """Bytes of all entries."""
        try:
            with open(os.path.join(self.directory, "state"), "rb") as file:
                return int(_STATE.unpack(file.read())[0])
        except (OSError, struct.error):
            return 0

    def read(self, key: str | None, *, is_read_again: bool = True) -> Frames | None:
        """Return a medium's frames, uint8 (T, C, H, W); None if they are missing or damaged.

        Args:
            key: from ``key_of``; None counts a medium that is never kept.
            is_read_again: whether the plan's next epoch reads it again.
        """
        frames = None
        with self._recording_errors():
            if key is not None and self._register():
                frames = self._read_entry(key, is_read_again)
        self._reads += MediaReads(hits=int(frames is not None), misses=int(frames is None))
        return frames

    def store(self, key: str, frames: Frames, *, is_read_again: bool = True) -> None:
        """Store a medium's frames if there is room, or if removable entries make room."""
        with self._recording_errors():
            if self._can_write and self._register():
                size = _HEADER.size + frames.nbytes
                file = self._claim(key, size, is_read_again)
                if file is not None:
                    self._write(file, key, frames, size, is_read_again)

    @contextmanager
    def _recording_errors(self) -> Iterator[None]:
        """Record errors of the operating system, after which this process writes no more entries."""
        try:
            yield
        except (OSError, ValueError) as error:
            self._fail(f"{self.directory}: {getattr(error, 'strerror', None) or error}")

    def _fail(self, problem: str) -> None:
        self._can_write = False
        self._reads += MediaReads(problem=problem)

    def _register(self) -> bool:
        """Register this process as a reader, once, and prepare the directory; return False if that failed before."""
        if self._run_file is None and self._can_write:
            os.makedirs(self._entries, exist_ok=True)
            os.makedirs(self._runs, exist_ok=True)
            with self._locked() as state:
                self._begin_run(state)
        return self._run_file is not None

    def _begin_run(self, state: _State) -> None:
        """Mark this run as active, and remove what ended or killed processes left, and what exceeds the limit."""
        run_path = os.path.join(self._runs, self.name)
        run_paths = {entry.path for entry in os.scandir(self._runs)}
        active_paths = {path for path in run_paths if not _is_unlocked(path)}
        for path in run_paths - active_paths - {run_path}:
            os.remove(path)
        state.paused_until = 0.0
        # A shared lock, which is held until this process ends, marks the run as active.
        self._run_file = open(run_path, "ab")  # noqa: SIM115
        fcntl.flock(self._run_file, fcntl.LOCK_SH)
        if not active_paths or state.used_bytes < 0:  # killed processes may have left entries that are not counted
            self._recount_and_evict(state)
        if state.used_bytes > self.limit:
            self._recount_and_evict(state, state.used_bytes - self.limit, includes_active=True)

    def _read_entry(self, key: str, is_read_again: bool) -> Frames | None:
        path = os.path.join(self._entries, key)
        try:
            data = np.fromfile(path, np.uint8)
        except FileNotFoundError:
            return None
        frames = _frames_of(data)
        if frames is None:
            with self._locked() as state, suppress(FileNotFoundError):
                state.used_bytes -= _disk_bytes(os.stat(path).st_size)
                os.remove(path)
        else:
            with suppress(OSError):
                self._touch(path, is_read_again)
        return frames

    def _touch(self, path: str, is_read_again: bool) -> None:
        now = time.time_ns()
        modified = now // _NS_PER_MS * _NS_PER_MS + _run_number(self.name) if is_read_again else 0
        os.utime(path, ns=(now, modified))

    def _claim(self, key: str, size: int, is_read_again: bool) -> BinaryIO | None:
        """Create the file of an entry and count all its bytes as used; return None if there is no room."""
        path = os.path.join(self._entries, key)
        with self._locked() as state:
            if os.path.exists(path + _PART) or os.path.exists(path) or not self._make_room(state, size, is_read_again):
                return None
            file = open(path + _PART, "xb")  # noqa: SIM115  # until it is written
            fcntl.flock(file, fcntl.LOCK_EX)
            file.truncate(size)
            state.used_bytes += _disk_bytes(size)
            return file

    def _write(self, file: BinaryIO, key: str, frames: Frames, size: int, is_read_again: bool) -> None:
        path = os.path.join(self._entries, key)
        try:
            with file:
                pixels = np.ascontiguousarray(frames).data.cast("B")
                file.write(_HEADER.pack(_MAGIC, _checksum(frames.shape, pixels), *frames.shape))
                file.write(pixels)
                file.flush()
                self._touch(path + _PART, is_read_again)
                with self._locked():
                    os.rename(path + _PART, path)
        except BaseException:
            with self._locked() as state, suppress(FileNotFoundError):
                os.remove(path + _PART)
                state.used_bytes -= _disk_bytes(size)
            raise

    def _make_room(self, state: _State, size: int, is_read_again: bool) -> bool:
        """Make room for a new entry of ``size`` bytes, by evicting others if necessary; False if there is too little.

        Evicts nothing for an entry that the next epoch does not read again, nor for a minute after a failure. Changes
        ``state``, the content of the directory's state file, which the caller has locked.
        """

        def bytes_to_free() -> int:
            above_limit = state.used_bytes + _disk_bytes(size) - self.limit
            missing_on_disk = _disk_bytes(size) + _SPARE_BYTES - shutil.disk_usage(self.directory).free
            return max(above_limit, missing_on_disk)

        if bytes_to_free() <= 0:
            return True
        is_paused = time.time() < state.paused_until
        if is_paused or not is_read_again:
            return False
        # Evict more at once, because finding the oldest entries takes long.
        reserve = int(self.limit * _EVICTED_SHARE)
        self._recount_and_evict(state, bytes_to_free() + reserve)
        if bytes_to_free() <= 0:
            return True
        state.paused_until = time.time() + _PAUSE_SECONDS
        is_within_limit = state.used_bytes + _disk_bytes(size) <= self.limit
        if is_within_limit:  # so the disk is full
            self._fail(f"{self.directory}: the disk has less than {_SPARE_BYTES / 1e9:.1f} GB left")
        return False

    def _recount_and_evict(self, state: _State, num_bytes: int = 0, *, includes_active: bool = False) -> None:
        """Set ``state.used_bytes``, and evict the oldest entries until ``num_bytes`` are free.

        Entries that active runs read again are evicted only with ``includes_active``.
        """
        active_runs: set[int] = set()
        if not includes_active:
            active_runs = {_run_number(run.name) for run in os.scandir(self._runs) if not _is_unlocked(run.path)}
        for entry in self._recount(state, active_runs):
            if num_bytes <= 0:
                break
            os.remove(entry.path)
            state.used_bytes -= entry.num_bytes
            num_bytes -= entry.num_bytes

    def _recount(self, state: _State, active_runs: set[int]) -> list[_Entry]:
        """Set ``state.used_bytes`` by listing the directory, and delete unfinished entries without a writer.

        Returns:
            The finished entries that can be evicted, because none of ``active_runs`` (``_run_number`` of each run that
            is being trained) was the last to read them; the oldest first.
        """
        evictable = []
        state.used_bytes = 0
        for file in os.scandir(self._entries):
            is_unfinished = file.name.endswith(_PART)
            if is_unfinished and _is_unlocked(file.path):  # its writer, which held the lock, has ended
                os.remove(file.path)
                continue
            status = file.stat()
            entry = _Entry(status.st_mtime_ns, file.path, _disk_bytes(status.st_size))
            state.used_bytes += entry.num_bytes
            last_run = entry.modified_ns % _NS_PER_MS  # where ``_touch`` has stored the number of the run
            if not is_unfinished and last_run not in active_runs:
                evictable.append(entry)
        return sorted(evictable)

    @contextmanager
    def _locked(self) -> Iterator[_State]:
        """Hold the exclusive lock of the directory; changes of the state are saved at the end."""
        from packtool.cache.local import locked  # here, because batches alone need no pyarrow

        with locked(os.path.join(self.directory, "state")) as file:
            data = file.read()
            state = _State(*_STATE.unpack(data)) if len(data) == _STATE.size else _State(-1, 0.0)
            try:
                yield state
            finally:
                file.seek(0)
                file.write(_STATE.pack(state.used_bytes, state.paused_until))


def key_of(*parts: object) -> str:
    """Return the name of an entry: a hash of ``parts`` and of the versions of the decoding libraries."""
    return hashlib.blake2b(repr((_versions(), *parts)).encode(), digest_size=20).hexdigest()


@lru_cache(maxsize=1)
def _versions() -> tuple[str, ...]:
    return (_MAGIC.decode(), *map(version, ("pillow", "av", "torch", "torchvision", "transformers")))


def _frames_of(data: npt.NDArray[np.uint8]) -> Frames | None:
    if len(data) < _HEADER.size:
        return None
    magic, checksum, *shape = _HEADER.unpack(data[: _HEADER.size].tobytes())
    pixels = data[_HEADER.size :]
    if magic != _MAGIC or len(pixels) != np.prod(shape, dtype=np.int64):
        return None
    return pixels.reshape(shape) if _checksum(tuple(shape), pixels) == checksum else None


def _checksum(shape: tuple[int, ...], pixels: Any) -> int:
    return zlib.crc32(pixels, zlib.crc32(repr(tuple(map(int, shape))).encode()))


def _run_number(name: str) -> int:
    """Return the number, 1 to 999,999, that stands for a run's name in the modification times of its entries."""
    return int(name, 16) % (_NS_PER_MS - 1) + 1


def _disk_bytes(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _is_unlocked(path: str) -> bool:
    """Check that no running process has locked a file."""
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
