"""Open the media that rows and caches name, wherever they are, and report problems with them.

Nothing is opened that the media access policy does not allow. Any failure of a single medium (its address, its server
or its bytes) becomes a ``MediaProblem`` of that medium. Only a store that is down for all media raises StorageError.
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
from packtool.rows.media_policy import NOT_ALLOWED
from packtool.rows.parsing import Problem
from packtool.rows.sample import MediaRef

_REASONS = {"missing": "media_missing", "refused": "media_refused", "unreachable": "media_unreachable"}


class MediaProblem(Problem):
    """A medium that cannot be used; its detail names the file."""


@contextmanager
def open_medium(
    ref: MediaRef, first_block: int = storage.HEADER_BLOCK, *, is_image: bool = False
) -> Iterator[BinaryIO]:
    """Open the encoded file of a medium; errors of the code in the ``with`` block become MediaProblem too.

    Args:
        first_block: bytes of a remote file to fetch first.
        is_image: use the smaller size limit of pictures.

    Raises:
        MediaProblem: if the file may not be opened, does not exist, is not a regular file, is empty, too large or
            cannot be decoded.
        StorageError: if its store has failed ``policy.max_failures`` times in a row.
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
                _record_success(ref)  # the store works, whatever is wrong with the file
                raise
        _record_success(ref)
    except MediaProblem:
        raise
    except RemoteError as error:
        problem = _problem_of_store(ref, error)
        if problem is error:
            raise
        raise problem from error
    except StorageError as error:
        raise MediaProblem("media_unreadable", error.message) from error
    except PacktoolError:
        raise
    except Exception as error:  # decoders raise anything on damaged bytes
        text = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise MediaProblem("media_unreadable", f"{label(ref)}: {storage.scrubbed(text)}") from error


def _record_success(ref: MediaRef) -> None:
    if ref.path is not None and ref.data is None and storage.is_remote(ref.path):
        storage.record_success(storage.store_name(ref.path))


def check_allowed(ref: MediaRef) -> None:
    """Raise MediaProblem if the policy does not allow a medium.

    Raises:
        StorageError: if its path is invalid.
    """
    if ref.path is not None and (refusal := ref.policy.refusal(ref.path)) is not None:
        raise MediaProblem(NOT_ALLOWED, f"{label(ref)}: {refusal}")


def _opened(ref: MediaRef, first_block: int, is_image: bool) -> BinaryIO:
    max_bytes = ref.policy.max_file_bytes(is_image)
    if ref.path is None or ref.data is not None:  # embedded media keep their path, for messages
        data = ref.data or b""
        _check_size(ref, len(data), max_bytes)
        return io.BytesIO(data)
    check_allowed(ref)
    if storage.is_remote(ref.path):
        bounds = storage.Bounds(max_bytes, ref.policy.stores, storage.retries_for(storage.store_name(ref.path)))
        return storage.open_read(ref.path, first_block, bounds)
    try:
        state = os.stat(storage.normalize(ref.path))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MediaProblem("media_missing", f"{label(ref)}: there is no such file") from error
    except OSError as error:
        raise MediaProblem("media_unreadable", f"{label(ref)}: {error.strerror or error}") from error
    if not stat.S_ISREG(state.st_mode):  # opening a pipe would wait for its writer, and a device may have no end
        raise MediaProblem("media_unreadable", f"{label(ref)}: not a regular file")
    _check_size(ref, state.st_size, max_bytes)
    return storage.open_read(ref.path, first_block)


def _check_size(ref: MediaRef, num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        detail = f"{label(ref)}: {num_bytes:,} bytes; --max-media-bytes allows {max_bytes:,}"
        raise MediaProblem("media_size", detail)


def _problem_of_store(ref: MediaRef, error: RemoteError) -> PacktoolError | MediaProblem:
    """Return a remote failure as the problem of one medium, or as the failure of its whole store."""
    assert ref.path is not None, "bytes come from no store"
    try:
        store = storage.store_name(ref.path)
    except StorageError:
        return MediaProblem("invalid_media", error.message)
    if isinstance(error, storage.TooLarge):
        return MediaProblem("media_size", f"{error.message}: --max-media-bytes allows more")
    if isinstance(error, storage.RedirectRefused):
        return MediaProblem(NOT_ALLOWED, f"{error.message}: --media-access any allows it")
    # A bucket refuses missing keys, and everything if the credentials are wrong; a web server refuses single files.
    if error.fault == "unreachable" or (error.fault == "refused" and not store.startswith("http")):
        num_failures = storage.record_failure(store)
        if 0 < ref.policy.max_failures <= num_failures:
            if ref.policy.max_failures == 1:
                return error
            return StoreDownError(
                f"{storage.origin(ref.path)}: {num_failures} media in a row could not be had; the last: "
                f"{error.message}",
                f"{error.remedy or 'Look at the store.'} --max-media-failures 0 drops such rows without end.",
            )
    else:
        storage.record_success(store)
    return MediaProblem(_REASONS.get(error.fault, "media_unreadable"), error.message)


def label(ref: MediaRef) -> str:
    """Return the name of a medium for messages, without the secrets that a URL can carry."""
    return storage.masked(ref.path) if ref.path is not None else ref.name
