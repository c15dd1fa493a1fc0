"""Files on this machine, in ``s3://`` and ``oss://`` buckets, and on ``http(s)://`` servers, which can only be read.

All caches, rows and media are read and written with these functions. Every function raises a StorageError if the
operation fails, with path, operation, cause and remedy, and without secrets. Object stores have neither directories nor
renaming: an object appears when its upload is complete, so ``publish`` and ``AtomicFile`` are atomic there too. Each
process opens its own connections, also after a fork; threads may share them.
"""

from __future__ import annotations

import glob as _glob
import hashlib
import os
import re
from collections.abc import Iterator
from fnmatch import translate
from functools import cache
from typing import TYPE_CHECKING, BinaryIO, Self, cast

from packtool.errors import StorageError
from packtool.storage.local import Bounds as Bounds
from packtool.storage.local import FileState as FileState
from packtool.storage.local import LocalStore
from packtool.storage.local import RedirectRefused as RedirectRefused
from packtool.storage.local import TooLarge as TooLarge
from packtool.storage.local import final_name as final_name
from packtool.storage.options import StorageOptions as StorageOptions
from packtool.storage.options import options as options
from packtool.storage.options import record_failure as record_failure
from packtool.storage.options import record_success as record_success
from packtool.storage.options import retries_for as retries_for
from packtool.storage.options import set_options
from packtool.storage.paths import absolute as absolute
from packtool.storage.paths import is_remote as is_remote
from packtool.storage.paths import join as join
from packtool.storage.paths import masked as masked
from packtool.storage.paths import name as name
from packtool.storage.paths import normalize as normalize
from packtool.storage.paths import origin as origin
from packtool.storage.paths import parent as parent
from packtool.storage.paths import scheme_of
from packtool.storage.paths import scrubbed as scrubbed

if TYPE_CHECKING:
    from packtool.storage.http import HttpStore
    from packtool.storage.s3 import S3Store

HEADER_BLOCK = 64 * 1024
"""Size in bytes of the first request for a file of which only the header is read."""

ROWS_BLOCK = 2**20
"""Size in bytes of the first request for a file that is read to its end."""

_local = LocalStore()


def _store_of(path: str) -> tuple[LocalStore | S3Store | HttpStore, str]:
    path = normalize(path)
    scheme = scheme_of(path)
    return _store(scheme) if scheme else _local, path


@cache
def _store(scheme: str) -> S3Store | HttpStore:
    # Imported here, because runs on local files need none of it.
    if scheme.startswith("http"):
        from packtool.storage.http import HttpStore

        return HttpStore()
    from packtool.storage.s3 import S3Store

    return S3Store(scheme)


def _listable(path: str) -> tuple[LocalStore | S3Store, str]:
    """Return the store of a path, and the normalized path; raise a StorageError for a web address."""
    store, path = _store_of(path)
    if path.startswith("http"):
        raise StorageError(f"{masked(path)}: a web server cannot list files", "Name the files, or use s3:// or oss://.")
    return cast("LocalStore | S3Store", store), path


def _writable(path: str) -> tuple[LocalStore | S3Store, str]:
    """Return the store of a path, and the normalized path; raise a StorageError for a web address."""
    store, path = _store_of(path)
    if path.startswith("http"):
        raise StorageError(
            f"{masked(path)}: web addresses can only be read", "Write to a directory, to s3:// or to oss://."
        )
    return cast("LocalStore | S3Store", store), path


def configure(new: StorageOptions | None) -> None:
    """Replace the options for all further requests, which use new connections; None reads the environment again."""
    set_options(new)
    if _store.cache_info().currsize:
        from packtool.storage import remote

        remote.forget_connections()


def exists(path: str) -> bool:
    """Return whether a file or directory exists."""
    store, path = _store_of(path)
    return os.path.exists(path) if store is _local else store.find(path) is not None or store.is_directory(path)


def is_directory(path: str) -> bool:
    """Return whether a path is a directory; in object stores, whether there are objects below it."""
    store, path = _store_of(path)
    return store.is_directory(path)


def find(path: str) -> FileState | None:
    """Return size and version of a file; None if it does not exist or is a directory."""
    store, path = _store_of(path)
    return store.find(path)


def stat(path: str) -> FileState:
    """Return size and version of a file; raise a StorageError if it does not exist."""
    state = find(path)
    if state is None:
        what = "is a directory" if is_directory(path) else "no such file or directory"
        raise StorageError(f"{masked(path)}: {what}", "Check the path.")
    return state


def store_name(path: str) -> str:
    """Return the bucket or server of a path: ``s3://bucket``, ``http://host``, ``http://host:port``; "" if local.

    The result identifies a web server for http and https; for messages, use ``origin``.
    """
    path = normalize(path)
    scheme = scheme_of(path)
    if scheme in ("http", "https"):
        from packtool.storage import http

        return http.server_of(path)
    return f"{scheme}://{path.partition('://')[2].partition('/')[0]}" if scheme else ""


def open_read(path: str, first_block: int = ROWS_BLOCK, bounds: Bounds | None = None) -> BinaryIO:
    """Open a file for reading bytes, seekable and buffered. Reading from it may raise a StorageError.

    Args:
        first_block: size in bytes of the first request for a remote file, and of the first after a seek; sequential
            reads fetch larger blocks. Use ``HEADER_BLOCK`` for files of which only the header is read.
        bounds: limits for a file that an untrusted row names.
    """
    store, path = _store_of(path)
    file = store.open_read(path, first_block, bounds)
    if bounds is not None:
        if (size := file.seek(0, os.SEEK_END)) > bounds.max_bytes:
            file.close()
            raise TooLarge(f"{masked(path)}: the file has {size:,} bytes, more than the limit of {bounds.max_bytes:,}")
        file.seek(0)
    return file


def read_bytes(path: str) -> bytes:
    """Return the content of a file."""
    with open_read(path) as file:
        return file.read()


def list_names(path: str) -> list[str]:
    """Return the names in a directory, sorted; none if the directory does not exist."""
    store, path = _listable(path)
    return store.list_names(path)


def entries(path: str) -> dict[str, FileState | None]:
    """List a directory: size and version of each file by name, None for sub-directories; sorted by name."""
    store, path = _listable(path)
    return store.entries(path)


def walk(path: str) -> Iterator[str]:
    """Yield the paths of all files below a directory, in a stable order."""
    store, path = _listable(path)
    return store.walk(path)


def glob(pattern: str) -> list[str]:
    """Return files and directories that match a pattern with ``*``, ``?``, ``[...]`` and ``**``, sorted.

    A name that begins with a dot matches only if the pattern has the dot. A web address is returned unchanged, because
    web servers cannot list files.
    """
    if not is_remote(pattern):
        return sorted(_glob.glob(normalize(pattern), recursive=True))
    if (pattern := normalize(pattern)).startswith("http"):
        return [pattern]
    scheme, _, path = pattern.partition("://")
    bucket, *patterns = path.rstrip("/").split("/")
    return sorted(set(_matching_paths(f"{scheme}://{bucket}", patterns)))


def _matching_paths(base: str, patterns: list[str]) -> Iterator[str]:
    """Yield the paths below ``base`` whose names match ``patterns``, one per level; ``**`` is any number of levels."""
    if not patterns:
        yield base
        return
    pattern, *deeper_patterns = patterns
    if pattern == "**":
        yield from _paths_at_any_level(base, deeper_patterns)
    elif _glob.has_magic(pattern):
        matches = re.compile(translate(pattern)).match
        for name, state in entries(base).items():
            is_directory = state is None
            is_hidden = name.startswith(".") and not pattern.startswith(".")
            if matches(name) and not is_hidden and (is_directory or not deeper_patterns):
                yield from _matching_paths(f"{base}/{name}", deeper_patterns)
    elif deeper_patterns or exists(f"{base}/{pattern}"):
        yield from _matching_paths(f"{base}/{pattern}", deeper_patterns)


def _paths_at_any_level(base: str, patterns: list[str]) -> Iterator[str]:
    """Yield the paths that match ``patterns`` below ``base`` or any directory in it; without patterns, all paths."""
    if patterns:
        yield from _matching_paths(base, patterns)
    for child, state in entries(base).items():
        if child.startswith("."):
            continue
        is_directory = state is None
        if is_directory:
            yield from _paths_at_any_level(f"{base}/{child}", patterns)
        if not patterns:
            yield f"{base}/{child}"


def make_directory(path: str) -> None:
    """Create a directory and its parents; does nothing in object stores."""
    store, path = _writable(path)
    store.make_directory(path)


def publish(path: str, data: bytes, *, durable: bool = True) -> None:
    """Write a file atomically: readers see the old file or the complete new one, and a failure leaves nothing behind.

    Args:
        durable: wait until the local disk has stored the data. If False, a power failure may lose or damage the file;
            use it only for files that are compared with a checksum before use and can be created again.
    """
    store, path = _writable(path)
    store.publish(path, data, durable)


def publish_new(path: str, data: bytes) -> bool:
    """Write a file atomically unless it exists; if several processes try at the same time, one succeeds.

    Returns:
        True if the file now has this content, even if it existed before, because a retried request may find the file
        of its first attempt. False if it exists with other content.
    """
    store, path = _writable(path)
    return store.publish_new(path, data)


def remove(path: str) -> None:
    """Remove a file, or a directory and its content; does nothing if it does not exist."""
    store, path = _writable(path)
    store.remove(path)


def discard_unfinished(path: str) -> None:
    """Remove temporary files and unfinished uploads of killed processes below a directory that no process writes to."""
    store, path = _writable(path)
    store.discard_unfinished(path)


class AtomicFile:
    """A file that is written in pieces and appears under its path, complete, on ``commit``.

    A local file is written under a temporary name beside its path. An object in a bucket is uploaded in parts while it
    is written, with up to 32 MiB in memory. As a context manager it commits at the end of the block, and discards the
    file after an error. pyarrow can write to it (``pa.PythonFile``). ``digest``: SHA-256 of the written bytes.
    """

    closed = False

    def __init__(self, path: str) -> None:
        store, path = _writable(path)
        self._writer = store.writer(path)
        self._is_discarded = False
        self.digest = hashlib.sha256()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is not None:
            self.discard()
            return
        try:
            self.commit()
        except BaseException:
            self.discard()
            raise

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes; return their number. After ``discard`` they are ignored, as of a garbage-collected writer."""
        view = memoryview(data)
        self.digest.update(view)
        if not self._is_discarded:
            self._writer.write(view)
        return view.nbytes

    def flush(self) -> None:
        """Do nothing: pyarrow calls it."""

    def close(self) -> None:
        """Mark as closed, without publishing the file: pyarrow calls it."""
        self.closed = True

    def commit(self) -> FileState:
        """Publish the file, durably; return its size and version, as ``stat`` would."""
        return self._writer.commit()

    def discard(self) -> None:
        """Remove the unfinished file; never raises."""
        self._is_discarded = True
        self._writer.discard()
