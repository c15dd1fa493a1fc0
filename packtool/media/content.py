"""What media hold, told without decoding them, by as much reading as whoever asks can afford.

content_name     four pieces of a file: export groups media that may be the same, wherever they lie
content_digest   all of it: collation computes one of two such media for both
content_state    nothing but when it was changed: training finds again what it has kept of the one at this place
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import time
from functools import lru_cache

from packtool import storage
from packtool.errors import PacktoolError
from packtool.media.opening import MediaProblem, check_allowed, open_medium
from packtool.rows.rights import MediaRights
from packtool.rows.sample import MediaRef

SETTLED_SECONDS = 2.0
"""A file that was changed later than so long ago may change once more without its times telling."""
_PIECE_BYTES, _NUM_PIECES = 4096, 4
_CHUNK_BYTES = 1 << 20
_BYTES = 16


def content_name(path: str | None, data: bytes | None) -> str:
    """A name that media have in common which hold the same bytes, and files that are of one size and alike in pieces.

    What is not on this machine, and what cannot be read, is named by its address: fetching it would take longer than
    what it saves. Price: 30 us a file, once for each state of a file.

    Args:
        path, data: of a medium that has been measured, as in ``EncodedImage``.
    """
    if data is not None:
        return _name(len(data), [data[start:stop] for start, stop in _pieces(len(data))])
    try:
        if path is not None and (state := _state(path)) is not None:
            return _name_of_file(path, state)
    except (OSError, PacktoolError, ValueError):
        pass
    return f"at {path}"


def content_digest(path: str | None, data: bytes | None, rights: MediaRights) -> str | None:
    """A digest of all that a medium holds; None where it cannot be read, or is not on this machine.

    Args:
        path, data: as for ``content_name``.
        rights: which media may be read.
    """
    if data is not None:
        return hashlib.sha256(data).hexdigest()
    try:
        if path is not None and (state := _state(path)) is not None:
            return _digest_of_file(path, state, rights)
    except (OSError, PacktoolError, ValueError, MediaProblem):
        pass  # whoever loads it tells what is wrong with it
    return None


def content_state(path: str | None, data: bytes | None, rights: MediaRights, *, is_image: bool) -> str | None:
    """Another text whenever the content may be another; None where nothing tells, or it cannot be opened.

    Bytes are hashed. A file of this machine is known by its path, size and times, of which the system sets one by
    itself whenever it changes; a remote one by its address, size and entity tag (or date), for a short request.

    Args:
        path, data, rights: as for ``content_digest``.
    """
    if data is not None or path is None:
        return hashlib.sha256(data or b"").hexdigest()
    ref = MediaRef(path, rights=rights)
    try:
        check_allowed(ref)
        if storage.is_remote(path):
            with open_medium(ref, 1, is_image=is_image) as file:
                tag = getattr(getattr(file, "raw", None), "tag", "")
                return f"{path} {file.seek(0, io.SEEK_END)} {tag}" if tag else None
        found = _stat(path)
    except (OSError, PacktoolError, ValueError, MediaProblem):
        return None  # as above
    if found is None or found.st_size > rights.most_bytes(is_image):
        return None
    if time.time() - max(found.st_mtime, found.st_ctime) < SETTLED_SECONDS:
        return None
    # No numbers of the disk: another start of the machine may give it others.
    return f"{os.path.abspath(storage.normalize(path))} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"


_State = tuple[int, ...]
"""What changes with a file: its place on the disk, its size and its times."""


def _state(path: str) -> _State | None:
    if (found := _stat(path)) is None:
        return None
    return found.st_size, found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def _stat(path: str) -> os.stat_result | None:
    """What the system says of a file; None if it is not on this machine, or no file: a pipe waits for its writer."""
    found = None if storage.is_remote(path) else os.stat(storage.normalize(path))
    return found if found is not None and stat.S_ISREG(found.st_mode) else None


# Rows about one picture mostly lie side by side, and a state is some hundred bytes.
@lru_cache(maxsize=1 << 14)
def _name_of_file(path: str, state: _State) -> str:
    file = os.open(storage.normalize(path), os.O_RDONLY)
    try:
        return _name(state[0], [os.pread(file, stop - start, start) for start, stop in _pieces(state[0])])
    finally:
        os.close(file)


@lru_cache(maxsize=1 << 14)
def _digest_of_file(path: str, state: _State, rights: MediaRights) -> str:
    del state  # by which the answer is remembered
    digest = hashlib.sha256()
    with open_medium(MediaRef(path, rights=rights)) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _pieces(size: int) -> list[tuple[int, int]]:
    """Where the pieces of a file begin and end: from its first byte to its last one, evenly."""
    if size <= _PIECE_BYTES * _NUM_PIECES:
        return [(0, size)]
    starts = [(size - _PIECE_BYTES) * number // (_NUM_PIECES - 1) for number in range(_NUM_PIECES)]
    return [(start, start + _PIECE_BYTES) for start in starts]


def _name(size: int, pieces: list[bytes]) -> str:
    return f"{size} {hashlib.blake2b(b''.join(pieces), digest_size=_BYTES).hexdigest()}"
