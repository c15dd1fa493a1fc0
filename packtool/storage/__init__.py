"""Where files lie: this machine, ``s3://``, ``oss://`` and, to read, ``http(s)://``.

Everything that export and train read or write of caches, rows and media goes through here; nothing else imports
aiobotocore or aiohttp, which are imported here when a remote path turns up. Paths that may be remote are joined with
``join``.

Requests that fail for passing reasons are sent again: see ``packtool.storage.options``. What fails for good is a
StorageError that names path, operation, cause and remedy, without secrets. Object stores have no directories to make
and no files to rename: an object appears whole when its upload ends, so ``publish`` and ``AtomicFile`` keep their word
there too. Processes make connections of their own, also forked ones, and threads may share them.
"""

from __future__ import annotations

import glob as _glob
import os
import re
from collections.abc import Iterator
from fnmatch import translate
from functools import cache
from typing import TYPE_CHECKING, BinaryIO, cast

from packtool.errors import StorageError
from packtool.storage.local import Bounds, FileState, LedElsewhere, LocalStore, TooLarge, final_name
from packtool.storage.options import StorageOptions, failed, forget_failures, retries_for, set_options, worked
from packtool.storage.options import options as options
from packtool.storage.paths import (
    absolute,
    is_remote,
    join,
    masked,
    name,
    normalize,
    origin,
    parent,
    scheme_of,
    scrubbed,
)

if TYPE_CHECKING:
    from packtool.storage.http import HttpStore
    from packtool.storage.s3 import S3Store

__all__ = [
    "HEADER_BLOCK",
    "ROWS_BLOCK",
    "AtomicFile",
    "Bounds",
    "FileState",
    "LedElsewhere",
    "StorageOptions",
    "TooLarge",
    "absolute",
    "configure",
    "discard_unfinished",
    "entries",
    "exists",
    "failed",
    "final_name",
    "find",
    "glob",
    "is_directory",
    "is_remote",
    "join",
    "list_names",
    "make_directory",
    "masked",
    "name",
    "normalize",
    "open_read",
    "options",
    "origin",
    "parent",
    "place",
    "publish",
    "publish_new",
    "read_bytes",
    "remove",
    "retries_for",
    "scrub",
    "stat",
    "walk",
    "worked",
]

HEADER_BLOCK = 64 * 1024
"""First bytes to fetch of a file whose header alone is wanted."""

ROWS_BLOCK = 2**20
"""First bytes to fetch of a file that is read through."""

_local = LocalStore()


def _store_of(path: str) -> tuple[LocalStore | S3Store | HttpStore, str]:
    """The store that a path belongs to, and the path as it knows it."""
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
    store, path = _store_of(path)
    if path.startswith("http"):
        raise StorageError(f"{masked(path)}: a web server lists no files", "Name the files, or use s3:// or oss://.")
    return cast("LocalStore | S3Store", store), path


def _writable(path: str) -> tuple[LocalStore | S3Store, str]:
    store, path = _store_of(path)
    if path.startswith("http"):
        raise StorageError(
            f"{masked(path)}: web addresses can only be read", "Write to a directory, to s3:// or to oss://."
        )
    return cast("LocalStore | S3Store", store), path


def configure(new: StorageOptions | None) -> None:
    """Use other options from now on, on new connections; None reads the environment again."""
    set_options(new)
    forget_failures()
    if _store.cache_info().currsize:
        from packtool.storage import remote

        remote.forget_connections()


def exists(path: str) -> bool:
    """Whether a file or directory is there.

    Raises:
        StorageError: if that cannot be found out.
    """
    store, path = _store_of(path)
    return os.path.exists(path) if store is _local else store.find(path) is not None or store.is_directory(path)


def is_directory(path: str) -> bool:
    """Whether it is a directory; in object stores, whether anything lies under it.

    Raises:
        StorageError: if that cannot be found out.
    """
    store, path = _store_of(path)
    return store.is_directory(path)


def find(path: str) -> FileState | None:
    """Size and last change of a file; None if there is none, or a directory.

    Raises:
        StorageError: if it cannot be looked at.
    """
    store, path = _store_of(path)
    return store.find(path)


def stat(path: str) -> FileState:
    """Size and last change.

    Raises:
        StorageError: if there is no such file, or it cannot be looked at.
    """
    state = find(path)
    if state is None:
        what = "is a directory" if is_directory(path) else "no such file or directory"
        raise StorageError(f"{masked(path)}: {what}", "Check the path.")
    return state


def place(path: str) -> str:
    """The store of a remote path: ``s3://bucket``, ``http://host`` or ``http://host:port``; "" for this machine.

    Two addresses of one web server have the same, whether by http or https: messages name the ``origin``.

    Raises:
        StorageError: if the path is nothing that can be reached.
    """
    path = normalize(path)
    scheme = scheme_of(path)
    if scheme in ("http", "https"):
        from packtool.storage import http

        return http.server_of(path)
    return f"{scheme}://{path.partition('://')[2].partition('/')[0]}" if scheme else ""


def open_read(path: str, first_block: int = ROWS_BLOCK, bounds: Bounds | None = None) -> BinaryIO:
    """Open for reading bytes: seekable and buffered.

    Args:
        first_block: of a remote file, bytes to fetch at first and after a jump; where reading goes on, more.
            ``HEADER_BLOCK`` for files whose header alone is wanted.
        bounds: of a file that a row names.

    Raises:
        StorageError: if the file cannot be opened; reading raises it too.
    """
    store, path = _store_of(path)
    file = store.open_read(path, first_block, bounds)
    if bounds is not None:
        if (size := file.seek(0, os.SEEK_END)) > bounds.most_bytes:
            file.close()
            raise TooLarge(f"{masked(path)}: {size:,} bytes, more than {bounds.most_bytes:,}")
        file.seek(0)
    return file


def read_bytes(path: str) -> bytes:
    """A whole file.

    Raises:
        StorageError: if it cannot be read.
    """
    with open_read(path) as file:
        return file.read()


def list_names(path: str) -> list[str]:
    """Names in a directory, sorted; none if there is no such directory.

    Raises:
        StorageError: if it cannot be looked into.
    """
    store, path = _listable(path)
    return store.list_names(path)


def entries(path: str) -> dict[str, FileState | None]:
    """Names in a directory, sorted, each with its file's state, or None if it is a directory, from one listing.

    Raises:
        StorageError: if it cannot be looked into.
    """
    store, path = _listable(path)
    return store.entries(path)


def walk(path: str) -> Iterator[str]:
    """Paths of all files under a directory, in an order that does not change.

    Raises:
        StorageError: if it cannot be looked into.
    """
    store, path = _listable(path)
    return store.walk(path)


def glob(pattern: str) -> list[str]:
    """Files and directories that fit a pattern with ``*``, ``?``, ``[...]`` and ``**``, sorted.

    Names that begin with a dot fit only where the pattern does too. A web address stands for itself, for nothing can be
    listed there.

    Raises:
        StorageError: if a directory cannot be looked into.
    """
    if not is_remote(pattern):
        return sorted(_glob.glob(normalize(pattern), recursive=True))
    if (pattern := normalize(pattern)).startswith("http"):
        return [pattern]
    scheme, _, place = pattern.partition("://")
    bucket, *parts = place.rstrip("/").split("/")
    return sorted(set(_expand(f"{scheme}://{bucket}", parts)))


def _expand(base: str, parts: list[str]) -> Iterator[str]:
    """Paths under ``base`` that fit the pattern's parts, one directory at a time."""
    if not parts:
        yield base
        return
    part, *rest = parts
    if part == "**":
        if rest:
            yield from _expand(base, rest)
        for child, state in entries(base).items():
            if not child.startswith("."):
                if state is None:
                    yield from _expand(f"{base}/{child}", parts)
                if not rest:
                    yield f"{base}/{child}"
    elif _glob.has_magic(part):
        fits = re.compile(translate(part))
        for child, state in entries(base).items():
            hidden = child.startswith(".") and not part.startswith(".")
            if fits.match(child) and not hidden and (state is None or not rest):
                yield from _expand(f"{base}/{child}", rest)
    elif rest or exists(f"{base}/{part}"):
        yield from _expand(f"{base}/{part}", rest)


def make_directory(path: str) -> None:
    """Make a directory and its parents; in object stores there is nothing to do.

    Raises:
        StorageError: if that fails.
    """
    store, path = _writable(path)
    store.make_directory(path)


def publish(path: str, data: bytes, *, to_stay: bool = True) -> None:
    """Write a whole file so that nobody ever sees a part of it.

    Args:
        to_stay: wait until this machine's disk has it. Without, a power failure may leave nothing there, or nonsense:
            for what is held against a checksum before it is used, and can be made again.

    Raises:
        StorageError: if it cannot be written; nothing is left behind then.
    """
    store, path = _writable(path)
    store.publish(path, data, to_stay)


def publish_new(path: str, data: bytes) -> bool:
    """Write a whole file if there is none of that name: of several processes that try, one succeeds.

    Returns:
        False if there is such a file with other content; with the same, an answer may have got lost on its way.

    Raises:
        StorageError: if it cannot be written.
    """
    store, path = _writable(path)
    return store.publish_new(path, data)


def remove(path: str) -> None:
    """Remove a file, or a directory with all in it; nothing there is fine.

    Raises:
        StorageError: if it cannot be removed.
    """
    store, path = _writable(path)
    store.remove(path)


def discard_unfinished(path: str) -> None:
    """Remove what killed processes left half-written under a directory: temporary files, or uploads that never ended.

    Only to be called while nobody writes there.

    Raises:
        StorageError: if that fails.
    """
    store, path = _writable(path)
    store.discard_unfinished(path)


def scrub(text: str) -> str:
    """A library's message without URLs' passwords and queries and without the values of secret variables."""
    return scrubbed(text, os.environ)


class AtomicFile:
    """A file written in pieces that appears whole or not at all: ``commit`` puts it in its place.

    Here it is written under a temporary name beside its place. In object stores it is uploaded in parts while it is
    written: no copy on disk, 32 MiB in memory.

    Args:
        path: its final place.

    Raises:
        StorageError: from every method but ``discard``, naming the path.
    """

    def __init__(self, path: str) -> None:
        store, path = _writable(path)
        self._writer = store.writer(path)

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes."""
        return self._writer.write(data)

    def commit(self) -> FileState:
        """Put the file in its place, to stay; gives what ``stat`` says of it until somebody else writes there."""
        return self._writer.commit()

    def discard(self) -> None:
        """Forget what was written."""
        self._writer.discard()
