"""Identify what media contain without decoding them, at three costs.

content_name     hashes four pieces of a file: export groups media that may be equal, wherever they are
content_digest   hashes the whole file: collation compares two such media exactly
content_state    reads only the time of the last change: training reuses what it cached for this path
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from packtool import storage
from packtool.errors import PacktoolError
from packtool.media.opening import check_allowed, open_medium
from packtool.rows.media_policy import MediaPolicy
from packtool.rows.sample import MediaRef

SETTLED_SECONDS = 2.0
"""A file changed more recently may change again without a new time stamp."""
_PIECE_BYTES, _NUM_PIECES = 4096, 4
_CHUNK_BYTES = 1 << 20
_DIGEST_BYTES = 16


def content_name(path: str | None, data: bytes | None) -> str:
    """Return a name that equal media share, and also files of one size that are equal in four pieces.

    Remote and unreadable media are named by their address: fetching them costs more than sharing saves. Costs 30 us
    for each version of a file.

    Args:
        path, data: of a measured medium, as in ``EncodedImage``.
    """
    if data is not None:
        return _name(len(data), [data[start:stop] for start, stop in _pieces(len(data))])
    return _of_version(_name_of_file, path) or f"at {path}"


def content_digest(path: str | None, data: bytes | None, policy: MediaPolicy) -> str | None:
    """Return a digest of a medium's whole content; None if it is remote, unreadable or not allowed.

    Args:
        path, data: as for ``content_name``.
    """
    if data is not None:
        return hashlib.sha256(data).hexdigest()
    return _of_version(_digest_of_file, path, policy)


def content_state(path: str | None, data: bytes | None, policy: MediaPolicy, *, is_image: bool) -> str | None:
    """Return a text that changes whenever the content may change; None if unknown or not allowed.

    For bytes, their hash. For a local file, path, size and times, one of which the system sets at every change. For a
    remote file, address, size and entity tag (or date), by one short request.

    Args:
        path, data: as for ``content_name``.
    """
    if data is not None or path is None:
        return hashlib.sha256(data or b"").hexdigest()
    ref = MediaRef(path, policy=policy)
    try:
        check_allowed(ref)
        if storage.is_remote(path):
            with open_medium(ref, 1, is_image=is_image) as file:
                tag = getattr(getattr(file, "raw", None), "tag", "")
                return f"{path} {file.seek(0, io.SEEK_END)} {tag}" if tag else None
        state = _stat(path)
    except (OSError, PacktoolError, ValueError):
        return None  # as above
    if state is None or state.st_size > policy.max_file_bytes(is_image):
        return None
    if time.time() - max(state.st_mtime, state.st_ctime) < SETTLED_SECONDS:
        return None
    # Without device and inode, which may change when the machine restarts.
    return f"{os.path.abspath(storage.normalize(path))} {state.st_size} {state.st_mtime_ns} {state.st_ctime_ns}"


_Version = tuple[int, ...]
"""Size, device, inode and times of a file: at least one changes with its content."""


def _of_version(identify: Callable[..., str], path: str | None, *arguments: Any) -> str | None:
    """Return ``identify(path, version, ...)`` of a local file; None if it is remote or unreadable."""
    try:
        if path is not None and (state := _stat(path)) is not None:
            version = state.st_size, state.st_dev, state.st_ino, state.st_mtime_ns, state.st_ctime_ns
            return identify(path, version, *arguments)
    except (OSError, PacktoolError, ValueError):  # MediaProblem among them; loading it reports the problem
        pass
    return None


def _stat(path: str) -> os.stat_result | None:
    """Return the status of a file; None for remote paths and anything but regular files, which could block."""
    state = None if storage.is_remote(path) else os.stat(storage.normalize(path))
    return state if state is not None and stat.S_ISREG(state.st_mode) else None


# Rows about one picture are mostly neighbours, and an entry takes some hundred bytes.
@lru_cache(maxsize=1 << 14)
def _name_of_file(path: str, version: _Version) -> str:
    size = version[0]
    file = os.open(storage.normalize(path), os.O_RDONLY)
    try:
        return _name(size, [os.pread(file, stop - start, start) for start, stop in _pieces(size)])
    finally:
        os.close(file)


@lru_cache(maxsize=1 << 14)
def _digest_of_file(path: str, version: _Version, policy: MediaPolicy) -> str:
    del version  # only a key of the cache
    with open_medium(MediaRef(path, policy=policy)) as file:
        digest = hashlib.sha256()
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _pieces(size: int) -> list[tuple[int, int]]:
    """Return [start, stop) of the pieces of a file, evenly spaced from its first byte to its last."""
    if size <= _PIECE_BYTES * _NUM_PIECES:
        return [(0, size)]
    starts = [(size - _PIECE_BYTES) * number // (_NUM_PIECES - 1) for number in range(_NUM_PIECES)]
    return [(start, start + _PIECE_BYTES) for start in starts]


def _name(size: int, pieces: list[bytes]) -> str:
    return f"{size} {hashlib.blake2b(b''.join(pieces), digest_size=_DIGEST_BYTES).hexdigest()}"
