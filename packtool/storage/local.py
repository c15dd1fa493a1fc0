"""Files on this machine, and types that all stores share: size and version of a file, and limits on reading it."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import BinaryIO

from packtool.errors import RemoteError, StorageError


@dataclass(frozen=True)
class FileState:
    """Size in bytes and version of a file: time of the last change, or an entity tag; equal means unchanged."""

    size: int
    modified: str


@dataclass(frozen=True)
class Bounds:
    """Limits on reading a file that an untrusted row names.

    Args:
        max_bytes: maximum size of the file.
        stores: web servers (``storage.store_name``) that may be accessed, also by redirects; None for any.
        retries: attempts of a request after the first; None for the number in the options.
    """

    max_bytes: int
    stores: frozenset[str] | None = None
    retries: int | None = None


class TooLarge(RemoteError):
    """A file is larger than its bounds allow."""


class RedirectRefused(RemoteError):
    """A redirect or a host name leads to a server outside the bounds."""


_UNFINISHED = re.compile(r"\.\d+-[0-9a-f]{8}\.partial\Z")
"""End of the name of a temporary file: process id, random number and ``partial``."""


class LocalStore:
    """The functions of ``packtool.storage`` for local paths."""

    def find(self, path: str) -> FileState | None:
        try:
            state = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise local_error(path, error) from error
        return None if stat.S_ISDIR(state.st_mode) else FileState(state.st_size, str(state.st_mtime_ns))

    def is_directory(self, path: str) -> bool:
        return os.path.isdir(path)

    def open_read(self, path: str, first_block: int, bounds: Bounds | None = None) -> BinaryIO:
        """Open a file for reading; refuse a pipe, which would wait for its writer, and a device, which may not end."""
        with _local_errors(path):
            mode = os.stat(path).st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise StorageError(f"{path} is a pipe, a socket or a device, not a file", "Write it to a file first.")
            return open(path, "rb")

    def entries(self, path: str) -> dict[str, FileState | None]:
        states: dict[str, FileState | None] = {}
        with _local_errors(path):
            if os.path.isdir(path):
                for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
                    with suppress(FileNotFoundError):  # a dangling link, or removed since
                        state = entry.stat()
                        is_directory = entry.is_dir()
                        states[entry.name] = None if is_directory else FileState(state.st_size, str(state.st_mtime_ns))
        return states

    def list_names(self, path: str) -> list[str]:
        with _local_errors(path):
            return sorted(os.listdir(path)) if os.path.isdir(path) else []

    def walk(self, path: str) -> Iterator[str]:
        """Yield the paths of all files below a directory, in the order of their names."""

        def fail(error: OSError) -> None:
            raise local_error(path, error) from error

        for folder, folders, files in os.walk(path, onerror=fail, followlinks=True):
            folders.sort()
            yield from (os.path.join(folder, name) for name in sorted(files))

    def make_directory(self, path: str) -> None:
        with _local_errors(path):
            os.makedirs(path, exist_ok=True)

    def publish(self, path: str, data: bytes, durable: bool = True) -> None:
        file = self.writer(path)
        file.write(data)
        file.commit(durable)

    def publish_new(self, path: str, data: bytes) -> bool:
        file = self.writer(path)
        file.write(data)
        if file.commit_new():
            return True
        try:
            with open(path, "rb") as other:
                return other.read() == data
        except OSError:
            return False  # removed since, or not readable

    def writer(self, path: str) -> LocalWriter:
        return LocalWriter(path)

    def remove(self, path: str) -> None:
        with _local_errors(path):
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            elif os.path.lexists(path):
                os.remove(path)

    def discard_unfinished(self, path: str) -> None:
        for file in self.walk(path):
            if final_name(file) != file:
                _remove_if_possible(file)


class LocalWriter:
    """A file that is written under a temporary name beside its final path and renamed on commit.

    Each writer has its own temporary name, so that processes that write the same file do not mix their data.
    """

    def __init__(self, path: str) -> None:
        self._path, self._temporary = path, f"{path}.{os.getpid()}-{secrets.token_hex(4)}.partial"
        self._failure: StorageError | None = None
        with _local_errors(path):
            self._file = open(self._temporary, "wb")  # noqa: SIM115

    def write(self, data: bytes | memoryview) -> int:
        with self._discarded_on_failure():
            return self._file.write(data)

    def commit(self, durable: bool = True) -> FileState:
        """Rename the file to its final path; if ``durable``, after the disk has stored its data."""
        with self._discarded_on_failure():
            state = self._finish(durable)
            os.replace(self._temporary, self._path)
            return state

    def commit_new(self) -> bool:
        """Move the file to its final path unless that exists, atomically with hard links; return whether it moved."""
        try:
            with self._discarded_on_failure():
                self._finish()
                return self._link_or_copy()
        finally:
            _remove_if_possible(self._temporary)

    def _link_or_copy(self) -> bool:
        try:
            os.link(self._temporary, self._path)
        except (FileExistsError, FileNotFoundError):  # not found: another process removed all temporary files
            return False
        except OSError:  # the file system has no hard links
            return self._copy()
        return True

    def _copy(self) -> bool:
        try:
            with open(self._temporary, "rb") as written, open(self._path, "xb") as file:
                shutil.copyfileobj(written, file)
        except FileExistsError:
            return False
        return True

    def _finish(self, durable: bool = True) -> FileState:
        """Close the temporary file; return its size and version."""
        self._file.flush()
        if durable:
            os.fsync(self._file.fileno())
        state = os.fstat(self._file.fileno())
        self._file.close()
        return FileState(state.st_size, str(state.st_mtime_ns))

    @contextmanager
    def _discarded_on_failure(self) -> Iterator[None]:
        """Remove the file on an OSError and raise a StorageError, also in every later call.

        Later calls raise it again because a library that writes to this object may ignore the first error.
        """
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except OSError as error:
            self.discard()
            self._failure = local_error(self._path, error)
            raise self._failure from error

    def discard(self) -> None:
        with suppress(OSError):  # closing writes buffered data, which may be what has just failed
            self._file.close()
        _remove_if_possible(self._temporary)


def final_name(path: str) -> str:
    """Return the final path of a temporary file; any other path is returned unchanged."""
    return _UNFINISHED.sub("", path)


def local_error(path: str, error: OSError | ValueError) -> StorageError:
    """Return a StorageError for an error of the operating system."""
    reason = error.strerror if isinstance(error, OSError) else None
    return StorageError(f"{path}: {reason or error}", "Check the path, its permissions and the free space.")


@contextmanager
def _local_errors(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # a null byte in a name is a ValueError
        raise local_error(path, error) from error


def _remove_if_possible(path: str) -> None:
    with suppress(OSError):
        os.remove(path)
