"""Media files opened, wherever they lie, and what can be wrong with them.

Every medium that a row or a cache names is opened here: nothing is opened that its rights do not cover, and whatever
goes wrong with one medium, its address, its server or its bytes, is that medium's problem. Only a store that is down
for everything is told as a StorageError.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from packtool import storage
from packtool.errors import PacktoolError, RemoteError, StorageError, StoreDownError
from packtool.rows.rights import NOT_ALLOWED
from packtool.rows.sample import MediaRef

_REASONS = {"missing": "media_missing", "refused": "media_refused", "unreachable": "media_unreachable"}


class MediaProblem(ValueError):
    """A medium that cannot be used.

    Args:
        reason: machine-readable, as in ``dropped.jsonl``.
        detail: explanation for the user, with the name of the file.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@contextmanager
def open_medium(
    ref: MediaRef, first_block: int = storage.HEADER_BLOCK, *, is_image: bool = False
) -> Iterator[BinaryIO]:
    """The encoded file, for as long as it is read.

    Args:
        first_block: bytes of a remote file to fetch at first.
        is_image: pictures may not be as large as other media.

    Raises:
        MediaProblem: if it may not be opened, is not there, is no file or empty or too large; also in place of whatever
            reading and decoding it raise.
        StorageError: if its store has failed ``rights.max_failures`` times in a row.
    """
    try:
        with _opened(ref, first_block, is_image) as file:
            try:
                if not file.read(1):
                    raise MediaProblem("media_unreadable", f"{label(ref)}: the file is empty")
                file.seek(0)
                yield file
            except RemoteError:
                raise
            except Exception:
                _note_success(ref)  # of the store, whatever is wrong with the file
                raise
        _note_success(ref)
    except MediaProblem:
        raise
    except RemoteError as error:
        if (told := _told(ref, error)) is error:
            raise
        raise told from error
    except StorageError as error:
        raise MediaProblem("media_unreadable", error.message) from error
    except PacktoolError:
        raise
    except Exception as error:  # decoders raise whatever they stumble over in bytes that are none of theirs
        text = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise MediaProblem("media_unreadable", f"{label(ref)}: {storage.scrub(text)}") from error


def _note_success(ref: MediaRef) -> None:
    if ref.path is not None and ref.data is None and storage.is_remote(ref.path):
        storage.record_success(storage.store_name(ref.path))


def check_allowed(ref: MediaRef) -> None:
    """Refuse a medium that its row may not name.

    Raises:
        MediaProblem: if so.
        StorageError: if its path is nothing that can be reached.
    """
    if ref.path is not None and (refusal := ref.rights.refusal(ref.path)) is not None:
        raise MediaProblem(NOT_ALLOWED, f"{label(ref)}: {refusal}")


def _opened(ref: MediaRef, first_block: int, is_image: bool) -> BinaryIO:
    most = ref.rights.most_bytes(is_image)
    if ref.path is None or ref.data is not None:  # embedded media keep their path, for messages
        return io.BytesIO(_within(ref, ref.data or b"", most))
    check_allowed(ref)
    if storage.is_remote(ref.path):
        bounds = storage.Bounds(most, ref.rights.places, storage.retries_for(storage.store_name(ref.path)))
        return storage.open_read(ref.path, first_block, bounds)
    try:
        state = os.stat(storage.normalize(ref.path))
    except OSError as error:
        reason = "media_missing" if isinstance(error, (FileNotFoundError, NotADirectoryError)) else "media_unreadable"
        told = "there is no such file" if reason == "media_missing" else error.strerror or str(error)
        raise MediaProblem(reason, f"{label(ref)}: {told}") from error
    if not stat.S_ISREG(state.st_mode):  # opening a pipe would wait for its writer, and a device may have no end
        raise MediaProblem("media_unreadable", f"{label(ref)}: not a regular file")
    if state.st_size > most:
        raise MediaProblem("media_size", _too_large(ref, state.st_size, most))
    return storage.open_read(ref.path, first_block)


def _within(ref: MediaRef, data: bytes, most: int) -> bytes:
    if len(data) > most:
        raise MediaProblem("media_size", _too_large(ref, len(data), most))
    return data


def _too_large(ref: MediaRef, size: int, most: int) -> str:
    return f"{label(ref)}: {size:,} bytes; --max-media-bytes allows {most:,}"


def _told(ref: MediaRef, error: RemoteError) -> PacktoolError | MediaProblem:
    """A remote place's failure as that of a medium, or of the store as a whole."""
    assert ref.path is not None, "bytes come from no store"
    try:
        place = storage.store_name(ref.path)
    except StorageError:
        return MediaProblem("invalid_media", error.message)
    if isinstance(error, storage.TooLarge):
        return MediaProblem("media_size", f"{error.message}: --max-media-bytes allows more")
    if isinstance(error, storage.RedirectRefused):
        return MediaProblem(NOT_ALLOWED, f"{error.message}: --media-access any allows it")
    # A bucket refuses keys that are not there, and everything where credentials are wrong; a web server single files.
    if error.fault == "unreachable" or (error.fault == "refused" and not place.startswith("http")):
        count = storage.record_failure(place)
        if 0 < ref.rights.max_failures <= count:
            if ref.rights.max_failures == 1:
                return error
            return StoreDownError(
                f"{storage.origin(ref.path)}: {count} media in a row could not be had; the last: {error.message}",
                f"{error.remedy or 'Look at the store.'} --max-media-failures 0 drops such rows without end.",
            )
    else:
        storage.record_success(place)
    return MediaProblem(_REASONS.get(error.fault, "media_unreadable"), error.message)


def label(ref: MediaRef) -> str:
    """A medium's name for messages, without the secrets that a URL can carry."""
    return storage.masked(ref.path) if ref.path is not None else ref.name
