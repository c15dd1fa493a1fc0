"""Files of a cache held against the checksums of its manifest, each once on a machine.

    CACHE_DIR/<fingerprint of the cache>/<digest of the file's path>.checked

remembers a file that was right by path, size and times. While one process reads a file, the others that need it wait at
the lock of its note and then trust the note. The cache's own directory may be read-only; where no note can be kept,
each process looks for itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

from packtool import storage
from packtool.cache.files import locked, sha256_of
from packtool.cache.index import read_index
from packtool.cache.manifest import Manifest
from packtool.constants import INDEX_NAME, PREFIXES_NAME
from packtool.errors import MismatchError

_SUFFIX = ".checked"


def check_file(path: str, sha256: str, notes: str, since: float | None = None) -> None:
    """Make sure that a file of this machine holds what the manifest says.

    Args:
        sha256: that it should have.
        notes: directory of the notes.
        since: Unix time in seconds; older notes are not trusted. None trusts all.

    Raises:
        MismatchError: if it holds something else.
        StorageError: if it cannot be read.
    """
    note = os.path.join(notes, hashlib.sha256(os.path.realpath(path).encode()).hexdigest()[:24] + _SUFFIX)
    with suppress(OSError), open(note, "rb") as file:
        if _is_known(file, path, sha256, since):
            return
    try:
        os.makedirs(notes, exist_ok=True)
        with locked(note) as file:
            if not _is_known(file, path, sha256, since):
                state = _state(path)
                _compare(path, sha256)
                file.seek(0)
                file.truncate()
                file.write(json.dumps([*state, sha256, time.time()]).encode())
    except OSError:  # no place for notes
        _compare(path, sha256)


def _is_known(file: BinaryIO, path: str, sha256: str, since: float | None) -> bool:
    file.seek(0)
    try:
        *state, digest, checked = json.loads(file.read())
        return [*state, digest] == [*_state(path), sha256] and (since is None or checked >= since)
    except (ValueError, TypeError):
        return False  # empty, or cut off


def _state(path: str) -> list[str | int]:
    state = os.stat(path)
    return [os.path.realpath(path), state.st_size, state.st_mtime_ns, state.st_ctime_ns]


def _compare(path: str, sha256: str) -> None:
    if (found := sha256_of(path)) != sha256:
        raise MismatchError(
            f"{path} is damaged: its SHA-256 is {found}, the manifest says {sha256}",
            "Copy it again from where it is whole. packtool inspect CACHE --verify finds all that is damaged, and says "
            "how to mend it.",
        )


@dataclass(frozen=True)
class FileCheck:
    """What became of a file that was looked at.

    Args:
        file: below the cache's directory.
        problem: what is wrong with it; empty if nothing is.
        bytes: that were read.
    """

    file: str
    problem: str
    bytes: int


def check_all(directory: str, manifest: Manifest) -> Iterator[FileCheck]:
    """Read all shards and indexes of a cache, wherever it lies, and trust no notes.

    Raises:
        StorageError: if the place cannot be reached.
    """
    for split, info in sorted(manifest.splits.items()):
        folder = storage.join(directory, split)
        wanted: list[tuple[str, int | None, str]] = [(INDEX_NAME, None, info.index_sha256)]
        wanted += [(PREFIXES_NAME, None, info.prefixes_sha256)] if info.prefixes_sha256 else []
        wanted += [(shard.file, shard.bytes, shard.sha256) for shard in info.shards]
        for name, size, sha256 in wanted:
            path = storage.join(folder, name)
            state = storage.stat(path) if storage.exists(path) else None
            problem = ""
            if state is None:
                problem = "is missing"
            elif size not in (None, state.size):
                problem = f"has {state.size:,} bytes, the manifest says {size:,}"
            elif sha256 and sha256_of(path) != sha256:
                problem = "does not have the SHA-256 that the manifest says"
            elif name == INDEX_NAME and (found := _index_problem(directory, manifest, split)):
                problem = found
            yield FileCheck(f"{split}/{name}", problem, state.size if state is not None else 0)


def _index_problem(directory: str, manifest: Manifest, split: str) -> str:
    try:
        read_index(directory, manifest, split)
    except MismatchError as error:
        return error.message.rpartition(": ")[2]
    return ""
