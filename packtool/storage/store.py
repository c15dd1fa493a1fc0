"""What every kind of place can do: the interface behind the functions of ``packtool.storage``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from packtool.errors import RemoteError


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


class Writer(Protocol):
    """A file that appears whole on ``commit`` or, after ``discard``, not at all."""

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes."""

    def commit(self) -> FileState:
        """Put the file in its place; gives what ``find`` will say of it as long as nobody else writes there."""

    def discard(self) -> None:
        """Forget what was written; never fails."""


class Store(Protocol):
    """A kind of place. Paths are normalized. Every method raises StorageError that names path, operation and remedy."""

    def find(self, path: str) -> FileState | None:
        """Size and last change of a file; None if there is none, or a directory."""

    def is_directory(self, path: str) -> bool:
        """Whether it is a directory; in object stores, whether anything lies under it."""

    def open_read(self, path: str, first_block: int, bounds: Bounds | None = None) -> BinaryIO:
        """Open for reading; ``first_block`` bytes are fetched at first, more when reading goes on."""

    def entries(self, path: str) -> dict[str, FileState | None]:
        """Names in a directory, sorted, with None for directories; empty if there is no such directory."""

    def list_names(self, path: str) -> list[str]:
        """Names in a directory, sorted; none if there is no such directory."""

    def walk(self, path: str) -> Iterator[str]:
        """Paths of all files under a directory."""

    def make_directory(self, path: str) -> None:
        """Make a directory and its parents."""

    def publish(self, path: str, data: bytes, to_stay: bool = True) -> None:
        """Write a whole file so that nobody ever sees a part of it."""

    def publish_new(self, path: str, data: bytes) -> bool:
        """Write a whole file if there is none of that name; False if there is, with other content."""

    def writer(self, path: str) -> Writer:
        """Begin a file that is written in pieces."""

    def remove(self, path: str) -> None:
        """Remove a file, or a directory with all in it; nothing there is fine."""

    def discard_unfinished(self, path: str) -> None:
        """Remove what killed processes left half-written under a directory."""
