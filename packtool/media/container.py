"""Containers of videos and sounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import av

from packtool import storage
from packtool.media.opening import MediaProblem, label, open_medium
from packtool.rows.sample import MediaRef

_TOLERANCE_SECONDS = 0.25
_LAST_SECONDS = 1.0
# Playlists name further files and addresses, which FFmpeg would open by itself: no protocol is one that it may use.
_ALONE = {"protocol_whitelist": "none"}
_LAST_ENTRIES = 1000


@contextmanager
def open_container(ref: MediaRef) -> Iterator[Any]:
    """A container for as long as it is read.

    Raises:
        MediaProblem, StorageError: as ``open_medium``.
    """
    with open_medium(ref, storage.ROWS_BLOCK) as file, av.open(file, container_options=_ALONE) as container:
        yield container


def check_end(container: Any, stream: Any, ref: MediaRef) -> None:
    """See that a stream is there as far as its header says: a file may have been cut off behind it.

    By the table of contents where the format has one, for mp4 and mov do; else by decoding the last second. The
    container cannot be decoded from the beginning any more.

    Raises:
        MediaProblem: if something is missing.
    """
    if is_indexed(container):
        needed = max((entry.pos + entry.size for entry in index_of(stream)[-_LAST_ENTRIES:]), default=0)
        if needed > container.size:
            detail = f"cut off: its table of contents reaches to byte {needed:,}, and it has {container.size:,}"
            raise MediaProblem("media_unreadable", f"{label(ref)}: {detail}")
        return
    declared = float(stream.duration * stream.time_base)
    start = float((stream.start_time or 0) * stream.time_base)
    reached = 0.0
    container.seek(int(max(start + declared - _LAST_SECONDS, start) / stream.time_base), stream=stream)
    for frame in container.decode(stream):
        if frame.pts is not None:
            reached = float(frame.pts * frame.time_base) - start + frame.samples / frame.sample_rate
    if reached < declared - _TOLERANCE_SECONDS:
        detail = f"cut off: its header declares {declared:.2f} s, and there are {reached:.2f} s"
        raise MediaProblem("media_unreadable", f"{label(ref)}: {detail}")


def is_indexed(container: Any) -> bool:
    """Whether the format begins or ends with a table of contents, without which nothing can be found in it."""
    return any(name in container.format.name.split(",") for name in ("mov", "mp4"))


def is_counted(container: Any, stream: Any) -> bool:
    """Whether the header can be believed about how much of a stream there is: its table of contents is complete."""
    return not is_indexed(container) or not index_of(stream) or len(index_of(stream)) >= stream.frames


def index_of(stream: Any) -> Any:
    """A stream's table of contents: the packets that the container's header names, in the order of decoding."""
    return getattr(stream, "index_entries", ())  # of PyAV since 18
