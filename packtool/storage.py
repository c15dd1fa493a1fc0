"""Where files lie. Everything that export and train read or write of caches and rows goes through here.

Paths on this machine only, so far: URLs (``s3://``, ``oss://``, ...) are refused by name, not misread as folders.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

from packtool.errors import StorageError

_URL = re.compile(r"^[a-zA-Z][a-zA-Z0-9+.-]+:/")


@dataclass(frozen=True)
class FileState:
    """What the file system says of a file.

    Args:
        size: bytes.
        modified: of the last change; equal means unchanged.
    """

    size: int
    modified: str


def check_path(path: str) -> str:
    """The path itself.

    Raises:
        StorageError: if it is a URL.
    """
    if _URL.match(path):
        raise StorageError(
            f"{path}: this version reads and writes paths of this machine only",
            "Copy the data here first, or mount the bucket.",
        )
    return path


def exists(path: str) -> bool:
    """Whether a file or directory is there."""
    return os.path.exists(check_path(path))


def is_directory(path: str) -> bool:
    """Whether it is a directory."""
    return os.path.isdir(check_path(path))


def stat(path: str) -> FileState:
    """Size and last change.

    Raises:
        StorageError: if the file cannot be looked at.
    """
    try:
        state = os.stat(check_path(path))
    except OSError as error:
        raise _storage_error(path, error) from error
    return FileState(state.st_size, str(state.st_mtime_ns))


def open_read(path: str) -> BinaryIO:
    """Open for reading bytes.

    Raises:
        StorageError: if the file cannot be opened.
    """
    try:
        return open(check_path(path), "rb")
    except OSError as error:
        raise _storage_error(path, error) from error


def list_names(path: str) -> list[str]:
    """Names in a directory, sorted; none if there is no such directory.

    Raises:
        StorageError: if it cannot be looked into.
    """
    try:
        return sorted(os.listdir(path)) if os.path.isdir(check_path(path)) else []
    except OSError as error:
        raise _storage_error(path, error) from error


def make_directory(path: str) -> None:
    """Make a directory and its parents.

    Raises:
        StorageError: if that fails.
    """
    try:
        os.makedirs(check_path(path), exist_ok=True)
    except OSError as error:
        raise _storage_error(path, error) from error


def publish(path: str, data: bytes) -> None:
    """Write a whole file so that nobody ever sees a part of it.

    Raises:
        StorageError: if it cannot be written; nothing is left behind then.
    """
    temporary = f"{check_path(path)}.partial"
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        _forget(temporary)
        raise _storage_error(path, error) from error


def remove(path: str) -> None:
    """Remove a file or a whole directory; nothing there is fine.

    Raises:
        StorageError: if it cannot be removed.
    """
    try:
        if os.path.isdir(check_path(path)) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.remove(path)
    except OSError as error:
        raise _storage_error(path, error) from error


class AtomicFile:
    """A file written in pieces that appears whole or not at all: ``commit`` puts it in its place.

    Args:
        path: its final place.

    Raises:
        StorageError: from every method, naming the path.
    """

    def __init__(self, path: str) -> None:
        self._path, self._temporary = check_path(path), f"{path}.partial"
        try:
            self._file = open(self._temporary, "wb")  # noqa: SIM115
        except OSError as error:
            raise _storage_error(path, error) from error

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes."""
        try:
            return self._file.write(data)
        except OSError as error:
            self.discard()
            raise _storage_error(self._path, error) from error

    def commit(self) -> None:
        """Put the file in its place, safely on the disk."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._temporary, self._path)
        except OSError as error:
            self.discard()
            raise _storage_error(self._path, error) from error

    def discard(self) -> None:
        """Forget what was written."""
        with suppress(OSError):  # closing writes what is still buffered, which may be what has just failed
            self._file.close()
        _forget(self._temporary)


def _forget(path: str) -> None:
    with suppress(OSError):
        os.remove(path)


def _storage_error(path: str, error: OSError) -> StorageError:
    return StorageError(f"{path}: {error.strerror or error}", "Check the path, its permissions and the free space.")
