"""Encoded files of media: open them, local or remote, and identify their contents without decoding.

Files are opened only if the media access policy allows it. Any failure of a single medium (its address, its server or
its content) becomes a ``MediaProblem`` of that medium. Only a store that fails for all media raises StorageError.

Contents are identified in three ways:

content_name     hashes four pieces of a file: export finds media that may be equal, in whatever files
content_digest   hashes the whole file: collation compares two such media exactly
content_state    reads only size and time of the last change: training reuses cached media while it is unchanged
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, BinaryIO

from packtool import storage
from packtool.errors import PacktoolError, RemoteError, StorageError, StoreDownError
from packtool.rows.media_policy import NOT_ALLOWED, MediaPolicy
from packtool.rows.parsing import Problem
from packtool.rows.sample import MediaRef

_REASONS = {"missing": "media_missing", "refused": "media_refused", "unreachable": "media_unreachable"}


class MediaProblem(Problem):
    """A medium that cannot be used; ``detail`` names the file."""


@contextmanager
def open_medium(
    ref: MediaRef, first_block: int = storage.HEADER_BLOCK, *, is_image: bool = False
) -> Iterator[BinaryIO]:
    """Open the encoded file of a medium, local, remote or embedded, for a ``with`` block that decodes it.

    ``first_block`` is the number of bytes that are read first from a remote file; ``is_image`` selects the size limit.

    Raises:
        MediaProblem: if the file cannot be used, or the ``with`` block raises an error that is not packtool's.
        StorageError: if the medium's store has failed ``ref.policy.max_failures`` times in a row.
    """
    try:
        with _open_file(ref, first_block, is_image) as file, _recorded_success(ref):
            if not file.read(1):
                raise MediaProblem("media_unreadable", f"{label(ref)}: the file is empty")
            file.seek(0)
            yield file
    except RemoteError as error:
        raise _record_remote_error(ref, error) from error
    except StorageError as error:
        raise MediaProblem("media_unreadable", error.message) from error
    except (MediaProblem, PacktoolError):
        raise
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise MediaProblem("media_unreadable", f"{label(ref)}: {storage.scrubbed(reason)}") from error


@contextmanager
def _recorded_success(ref: MediaRef) -> Iterator[None]:
    """Record a success of the medium's store, unless the ``with`` block raises a RemoteError."""
    try:
        yield
    except RemoteError:
        raise
    except Exception:  # the store has delivered the file, which is the one at fault
        _record_success(ref)
        raise
    _record_success(ref)


def _record_success(ref: MediaRef) -> None:
    """Record that the store of a remote medium works, which resets its count of consecutive failures."""
    if ref.path is not None and ref.data is None and storage.is_remote(ref.path):
        storage.record_success(storage.store_name(ref.path))


def check_allowed(ref: MediaRef) -> None:
    """Raise MediaProblem if the policy does not allow a medium, and StorageError if its path is invalid."""
    if ref.path is not None and (refusal := ref.policy.refusal(ref.path)) is not None:
        raise MediaProblem(NOT_ALLOWED, f"{label(ref)}: {refusal}")


def _open_file(ref: MediaRef, first_block: int, is_image: bool) -> BinaryIO:
    """Open the file of a medium, or its bytes as a file; arguments and errors are those of ``open_medium``."""
    max_bytes = ref.policy.max_file_bytes(is_image)
    if ref.path is None or ref.data is not None:  # embedded media keep their path, for messages
        data = ref.data or b""
        _check_size(ref, len(data), max_bytes)
        return io.BytesIO(data)
    check_allowed(ref)
    if storage.is_remote(ref.path):
        retries = storage.retries_for(storage.store_name(ref.path))
        return storage.open_read(ref.path, first_block, storage.Bounds(max_bytes, ref.policy.stores, retries))
    state = _local_state(ref, ref.path)
    _check_size(ref, state.st_size, max_bytes)
    return storage.open_read(ref.path, first_block)


def _local_state(ref: MediaRef, path: str) -> os.stat_result:
    """Return the status of a local medium; raise MediaProblem if it is missing or no regular file."""
    try:
        state = os.stat(storage.normalize(path))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MediaProblem("media_missing", f"{label(ref)}: there is no such file") from error
    except OSError as error:
        raise MediaProblem("media_unreadable", f"{label(ref)}: {error.strerror or error}") from error
    if not stat.S_ISREG(state.st_mode):  # opening a pipe would wait for its writer, and a device may have no end
        raise MediaProblem("media_unreadable", f"{label(ref)}: not a regular file")
    return state


def _check_size(ref: MediaRef, num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise MediaProblem("media_size", f"{label(ref)}: {num_bytes:,} bytes; --max-media-bytes allows {max_bytes:,}")


def _record_remote_error(ref: MediaRef, error: RemoteError) -> MediaProblem:
    """Record whether a medium's store works, and return the medium's problem; StorageError if the store is down."""
    assert ref.path is not None, "embedded bytes cannot fail remotely"
    try:
        store = storage.store_name(ref.path)
    except StorageError:  # the address is invalid
        return MediaProblem("invalid_media", error.message)
    if isinstance(error, storage.TooLarge):
        return MediaProblem("media_size", f"{error.message}: --max-media-bytes allows more")
    if isinstance(error, storage.RedirectRefused):
        return MediaProblem(NOT_ALLOWED, f"{error.message}: --media-access any allows it")
    if _may_be_store_failure(error, store):
        _record_failure(store, error, ref.path, ref.policy.max_failures)
    else:
        storage.record_success(store)  # the store works, and only this medium is at fault
    return MediaProblem(_REASONS.get(error.fault, "media_unreadable"), error.message)


def _may_be_store_failure(error: RemoteError, store: str) -> bool:
    """Return whether other media of the store may fail, too: a bucket with wrong credentials refuses all of them."""
    is_bucket = not store.startswith("http")
    return error.fault == "unreachable" or (error.fault == "refused" and is_bucket)


def _record_failure(store: str, error: RemoteError, path: str, max_failures: int) -> None:
    """Record a failure of a store; raise StorageError if it is the ``max_failures``-th in a row (0: never)."""
    num_failures = storage.record_failure(store)
    if not 0 < max_failures <= num_failures:
        return
    if max_failures == 1:
        raise error
    raise StoreDownError(
        f"{storage.origin(path)}: {num_failures} media in a row could not be read; the last error: {error.message}",
        f"{error.remedy or 'Check the store.'} --max-media-failures 0 drops any number of such rows.",
    ) from error


def label(ref: MediaRef) -> str:
    """Return the name of a medium for messages, without the secrets in its URL."""
    return storage.masked(ref.path) if ref.path is not None else ref.name


SETTLED_SECONDS = 2.0
"""Seconds after which a change of a file surely gives it a new timestamp."""
_PIECE_BYTES, _NUM_PIECES = 4096, 4
_CHUNK_BYTES = 1 << 20
_DIGEST_BYTES = 16


def content_name(path: str | None, data: bytes | None) -> str:
    """Return a name that depends on a medium's size and four pieces of its content: equal for equal media.

    Remote and unreadable media are named by their address, since reading them costs more than shared prefixes save.
    """
    if data is not None:
        return _name(len(data), [data[start:stop] for start, stop in _pieces(len(data))])
    return _identify_version(_name_of_file, path) or f"at {path}"


def content_digest(path: str | None, data: bytes | None, policy: MediaPolicy) -> str | None:
    """Return a digest of a medium's whole content; None if it is remote, unreadable or not allowed."""
    if data is not None:
        return hashlib.sha256(data).hexdigest()
    return _identify_version(_digest_of_file, path, policy)


def content_state(path: str | None, data: bytes | None, policy: MediaPolicy, *, is_image: bool) -> str | None:
    """Return a text that changes whenever the content of a medium may change, without reading a file.

    It has the hash of embedded bytes (``data``); path, size and times of a local file; or address, size and tag of a
    remote one. ``is_image`` selects the policy's size limit. None on any error, or if a change might be missed.
    """
    if data is not None or path is None:  # embedded bytes, which may keep the path of their file
        return hashlib.sha256(data or b"").hexdigest()
    ref = MediaRef(path, policy=policy)
    try:
        check_allowed(ref)
        if storage.is_remote(path):
            return _remote_state(ref, is_image=is_image)
        status = _stat(path)
    except (OSError, PacktoolError, ValueError):
        return None
    if status is None or status.st_size > policy.max_file_bytes(is_image):
        return None
    seconds_since_change = time.time() - max(status.st_mtime, status.st_ctime)
    if seconds_since_change < SETTLED_SECONDS:
        return None  # the file may change again without a new timestamp
    # Device and inode are not included, because they may change when the machine restarts.
    absolute_path = os.path.abspath(storage.normalize(path))
    return f"{absolute_path} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def _remote_state(ref: MediaRef, *, is_image: bool) -> str | None:
    """Return address, size and entity tag of a remote file; None if the server sends no tag."""
    with open_medium(ref, first_block=1, is_image=is_image) as file:
        tag = getattr(getattr(file, "raw", None), "tag", "")  # ``raw`` is storage's remote file
        if not tag:
            return None
        size = file.seek(0, io.SEEK_END)
        return f"{ref.path} {size} {tag}"


_Version = tuple[int, ...]
"""Size, device, inode and times of a file; at least one changes with its content."""


def _identify_version(identify: Callable[..., str], path: str | None, *arguments: Any) -> str | None:
    """Return ``identify(path, version, ...)`` of a local file; None if it is remote or unreadable."""
    try:
        if path is not None and (state := _stat(path)) is not None:
            version = state.st_size, state.st_dev, state.st_ino, state.st_mtime_ns, state.st_ctime_ns
            return identify(path, version, *arguments)
    except (OSError, PacktoolError, ValueError):  # MediaProblem among them; loading it reports the problem
        pass
    return None


def _stat(path: str) -> os.stat_result | None:
    """Return the status of a local regular file; None for remote paths, and for others, which could block."""
    state = None if storage.is_remote(path) else os.stat(storage.normalize(path))
    return state if state is not None and stat.S_ISREG(state.st_mode) else None


# Rows with the same picture are mostly close together, and an entry takes a few hundred bytes.
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
    del version  # only part of the cache's key
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
