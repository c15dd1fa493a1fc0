"""``memory://``: files of this process alone, gone with it. For tests and trials."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from typing import Any, BinaryIO

from packtool.errors import RemoteError
from packtool.storage.store import Bounds, FileState


class MemoryStore:
    """fsspec's files in memory; a ``Store``."""

    def __init__(self) -> None:
        import fsspec

        self._files: Any = fsspec.filesystem("memory")

    def find(self, path: str) -> FileState | None:
        """Size and last change of a file."""
        if not self._files.isfile(path):
            return None
        details = self._files.info(path)
        return FileState(details["size"], str(self._files.modified(path)))

    def is_directory(self, path: str) -> bool:
        """Whether it is a directory."""
        return bool(self._files.isdir(path))

    def open_read(self, path: str, first_block: int, bounds: Bounds | None = None) -> BinaryIO:
        """A copy of the file's bytes."""
        if self.find(path) is None:
            raise RemoteError(f"{path}: no such file", fault="missing")
        return BytesIO(self._files.cat_file(path))

    def entries(self, path: str) -> dict[str, FileState | None]:
        """Names in a directory, sorted, with None for directories."""
        if not self.is_directory(path):
            return {}
        names = sorted(found["name"].rstrip("/").rpartition("/")[2] for found in self._files.ls(path, detail=True))
        return {name: self.find(f"{path.rstrip('/')}/{name}") for name in names}

    def list_names(self, path: str) -> list[str]:
        """Names in a directory, sorted."""
        return list(self.entries(path))

    def walk(self, path: str) -> Iterator[str]:
        """Paths of all files under a directory."""
        yield from (f"memory:/{name}" for name in sorted(self._files.find(path)) if self._files.isdir(path))

    def make_directory(self, path: str) -> None:
        """Nothing to do: directories are where files are."""

    def publish(self, path: str, data: bytes) -> None:
        """Put the whole file in its place."""
        self._files.pipe_file(path, data)

    def publish_new(self, path: str, data: bytes) -> bool:
        """Put the whole file in its place if there is none."""
        if self._files.isfile(path):
            return bool(self._files.cat_file(path) == data)
        self.publish(path, data)
        return True

    def writer(self, path: str) -> MemoryWriter:
        """Begin a file that is written in pieces."""
        return MemoryWriter(self, path)

    def remove(self, path: str) -> None:
        """Remove a file or a directory; nothing there is fine."""
        if self._files.exists(path):
            self._files.rm(path, recursive=True)

    def discard_unfinished(self, path: str) -> None:
        """Nothing to do: a killed process leaves nothing."""


class MemoryWriter:
    """Bytes that become a file on ``commit``."""

    def __init__(self, store: MemoryStore, path: str) -> None:
        self._store, self._path, self._data = store, path, BytesIO()

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes."""
        return self._data.write(data)

    def commit(self) -> FileState:
        """Put the file in its place."""
        self._store.publish(self._path, self._data.getvalue())
        state = self._store.find(self._path)
        assert state is not None, "it was put there just now"
        return state

    def discard(self) -> None:
        """Forget what was written."""
        self._data = BytesIO()
