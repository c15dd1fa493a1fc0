"""Media files opened, wherever they lie, and what can be wrong with them."""

from __future__ import annotations

import io
from typing import BinaryIO

from packtool import storage
from packtool.errors import StorageError
from packtool.rows.sample import MediaRef


class MediaProblem(ValueError):
    """A medium that cannot be used.

    Args:
        reason: machine-readable, as in ``dropped.jsonl``.
        detail: for a person; names the file.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def open_medium(ref: MediaRef, first_block: int = storage.HEADER_BLOCK) -> BinaryIO:
    """The encoded file.

    Raises:
        MediaProblem: if there is no such file, or it is empty.
        StorageError: if a remote store cannot be reached, which is no fault of the row's.
    """
    if ref.data is not None:
        file: BinaryIO = io.BytesIO(ref.data)
    else:
        assert ref.path is not None, "a medium is a path, bytes or frames"
        try:
            file = storage.open_read(ref.path, first_block)
        except StorageError as error:
            if storage.is_remote(ref.path) and storage.exists(ref.path):
                raise
            raise MediaProblem("media_missing", f"{label(ref)}: there is no such file") from error
    if not file.read(1):
        file.close()
        raise MediaProblem("media_unreadable", f"{label(ref)}: the file is empty")
    file.seek(0)
    return file


def label(ref: MediaRef) -> str:
    """A medium's name for messages, without the secrets that a URL can carry."""
    return storage.masked(ref.path) if ref.path is not None else ref.name
