"""This machine's file system, and what all stores have in common: the state of a file and bounds of reading it."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

from packtool.errors import RemoteError, StorageError


@dataclass(frozen=True)
class FileState:
    """What a place says of a file.

    Args:
        size: bytes.
        modified: of the last change, or an entity tag; equal means unchanged.
    """

    size: int
    modified: str


@dataclass(frozen=True)
class Bounds:
    """What reading a file may cost and where it may lead, if a row named the file and nobody looked at it.

    Args:
        most_bytes: a larger file is refused.
        places: web servers (``storage.place``) that an address and its redirects may lead to; None for any.
        retries: further tries of a request; None for those of the options.
    """

    most_bytes: int
    places: frozenset[str] | None = None
    retries: int | None = None


class TooLarge(RemoteError):
    """A file is larger than its bounds."""


class LedElsewhere(RemoteError):
    """A redirect, or a server's name, leads readers to a server that they may not ask."""


_UNFINISHED = re.compile(r"\.\d+-[0-9a-f]{8}\.partial\Z")
"""What a file's name ends in while it is written: process, chance, and a word for people."""


class LocalStore:
    """Files and directories of this machine."""

    def find(self, path: str) -> FileState | None:
        """Size and last change of a file; None if there is none, or a directory."""
        try:
            state = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise local_error(path, error) from error
        return None if stat.S_ISDIR(state.st_mode) else FileState(state.st_size, str(state.st_mtime_ns))

    def is_directory(self, path: str) -> bool:
        """Whether it is a directory."""
        return os.path.isdir(path)

    def open_read(self, path: str, first_block: int, bounds: Bounds | None = None) -> BinaryIO:
        """Open for reading bytes; the system reads ahead by itself.

        A pipe would wait for somebody to write into it, and a device may never end: neither is opened.
        """
        try:
            mode = os.stat(path).st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise StorageError(f"{path} is a pipe, a socket or a device, not a file", "Write it to a file first.")
            return open(path, "rb")
        except (OSError, ValueError) as error:  # a name with a null byte is a ValueError
            raise local_error(path, error) from error

    def entries(self, path: str) -> dict[str, FileState | None]:
        """Names in a directory, sorted, with None for directories."""
        found: dict[str, FileState | None] = {}
        try:
            if os.path.isdir(path):
                for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
                    with suppress(FileNotFoundError):  # a dangling link, or gone since
                        state = entry.stat()
                        is_directory = entry.is_dir()
                        found[entry.name] = None if is_directory else FileState(state.st_size, str(state.st_mtime_ns))
        except OSError as error:
            raise local_error(path, error) from error
        return found

    def list_names(self, path: str) -> list[str]:
        """Names in a directory, sorted, also those of dangling links."""
        try:
            return sorted(os.listdir(path)) if os.path.isdir(path) else []
        except OSError as error:
            raise local_error(path, error) from error

    def walk(self, path: str) -> Iterator[str]:
        """Paths of all files under a directory, in the order of their names."""

        def stop(error: OSError) -> None:
            raise local_error(path, error) from error

        for folder, folders, files in os.walk(path, onerror=stop, followlinks=True):
            folders.sort()
            yield from (os.path.join(folder, name) for name in sorted(files))

    def make_directory(self, path: str) -> None:
        """Make a directory and its parents."""
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise local_error(path, error) from error

    def publish(self, path: str, data: bytes, to_stay: bool = True) -> None:
        """Write a whole file so that nobody ever sees a part of it."""
        file = self.writer(path)
        file.write(data)
        file.commit(to_stay)

    def publish_new(self, path: str, data: bytes) -> bool:
        """Write a whole file if there is none of that name; False if there is, with other content."""
        file = self.writer(path)
        file.write(data)
        return file.commit_new() or self._holds(path, data)

    @staticmethod
    def _holds(path: str, data: bytes) -> bool:
        try:
            with open(path, "rb") as file:
                return file.read() == data
        except OSError:
            return False  # gone again, or not to be read

    def writer(self, path: str) -> LocalWriter:
        """Begin a file that is written in pieces."""
        return LocalWriter(path)

    def remove(self, path: str) -> None:
        """Remove a file or a whole directory; nothing there is fine."""
        try:
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            elif os.path.lexists(path):
                os.remove(path)
        except OSError as error:
            raise local_error(path, error) from error

    def discard_unfinished(self, path: str) -> None:
        """Remove the temporary files of killed processes under a directory."""
        for file in self.walk(path):
            if final_name(file) != file:
                _forget(file)


class LocalWriter:
    """A file under a temporary name beside its place, renamed at the end.

    The name is this writer's own: two processes that write the same file do not write into each other's.
    """

    def __init__(self, path: str) -> None:
        self._path, self._temporary = path, f"{path}.{os.getpid()}-{secrets.token_hex(4)}.partial"
        self._failed: StorageError | None = None
        try:
            self._file = open(self._temporary, "wb")  # noqa: SIM115
        except OSError as error:
            raise local_error(path, error) from error

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes."""
        if self._failed is not None:  # who writes through a library may hear of the first failure only afterwards
            raise self._failed
        try:
            return self._file.write(data)
        except OSError as error:
            raise self._failure(error) from error

    def commit(self, to_stay: bool = True) -> FileState:
        """Put the file in its place, safely on the disk unless it need not stay."""
        try:
            state = self._finish(to_stay)
            os.replace(self._temporary, self._path)
        except OSError as error:
            raise self._failure(error) from error
        return state

    def commit_new(self) -> bool:
        """Put the file in its place if there is none yet, which no other process can do at the same time."""
        try:
            self._finish()
            try:
                os.link(self._temporary, self._path)
            except (FileExistsError, FileNotFoundError):  # or cleared away by who was quicker
                return False
            except OSError:  # a file system without links
                try:
                    with open(self._temporary, "rb") as done, open(self._path, "xb") as file:
                        shutil.copyfileobj(done, file)
                except FileExistsError:
                    return False
            return True
        except OSError as error:
            raise self._failure(error) from error
        finally:
            _forget(self._temporary)

    def _finish(self, to_stay: bool = True) -> FileState:
        if self._failed is not None:
            raise self._failed
        self._file.flush()
        if to_stay:
            os.fsync(self._file.fileno())
        state = os.fstat(self._file.fileno())
        self._file.close()
        return FileState(state.st_size, str(state.st_mtime_ns))

    def _failure(self, error: OSError) -> StorageError:
        self.discard()
        self._failed = local_error(self._path, error)
        return self._failed

    def discard(self) -> None:
        """Forget what was written."""
        with suppress(OSError):  # closing writes what is still buffered, which may be what has just failed
            self._file.close()
        _forget(self._temporary)


def final_name(path: str) -> str:
    """The place for which a temporary file was written; the path itself if it is no such file."""
    return _UNFINISHED.sub("", path)


def local_error(path: str, error: OSError | ValueError) -> StorageError:
    """What the operating system said, in words for the user."""
    said = error.strerror if isinstance(error, OSError) else None
    return StorageError(f"{path}: {said or error}", "Check the path, its permissions and the free space.")


def _forget(path: str) -> None:
    with suppress(OSError):
        os.remove(path)
