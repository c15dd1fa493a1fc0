"""Locks on files of this machine, and digests of files anywhere."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from packtool import storage

_CHUNK_BYTES = 4 * 2**20


@contextmanager
def locked(path: str) -> Iterator[BinaryIO]:
    """A file, made if need be, that this process alone holds the lock of."""
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield file
        finally:
            file.flush()
            # Said aloud, since a process forked meanwhile would keep the lock with its copy of the file.
            fcntl.flock(file, fcntl.LOCK_UN)


def sha256_of(path: str) -> str:
    """Digest of a file's bytes.

    Raises:
        StorageError: if it cannot be read.
    """
    digest = hashlib.sha256()
    with storage.open_read(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
