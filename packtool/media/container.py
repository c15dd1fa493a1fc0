"""Containers of videos and sounds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import av

from packtool import storage
from packtool.media.opening import MediaProblem, label, open_medium
from packtool.rows.sample import MediaRef

_TOLERANCE_SECONDS = 0.25
_LAST_SECONDS = 1.0
# Playlists name further files and addresses, which FFmpeg would open by itself: no protocol is one that it may use.
_ALONE = {"protocol_whitelist": "none"}
_LAST_ENTRIES = 1000
# Bytes too many that programs declare: the header of RIFF, or tags of an mp3 file that are not there any more.
_RIFF_SLACK, _MP3_SLACK = 64, 256
_MIN_UNKNOWN_RIFF = 0x7FFFF000  # and what writes to a pipe declares as much as it can
_MAX_OGG_PAGE = 65_307
_BOXES = frozenset(
    b"ftyp styp moov mdat moof mfra sidx ssix emsg prft pdin free skip wide junk uuid meta udta pnot PICT".split()
)
"""Outermost boxes of mp4 and mov; what else lies behind them are tags or padding."""


@contextmanager
def open_container(ref: MediaRef, *, check_length: bool = False) -> Iterator[Any]:
    """A container for as long as it is read.

    Args:
        check_length: refuse a file that is shorter than it declares.

    Raises:
        MediaProblem, StorageError: as ``open_medium``.
    """
    with open_medium(ref, storage.ROWS_BLOCK) as file:
        if check_length:
            size = file.seek(0, os.SEEK_END)
            declared = declared_bytes(file, size)
            if declared > size:
                detail = f"cut off: it declares {declared:,} bytes, and it has {size:,}"
                raise MediaProblem("media_unreadable", f"{label(ref)}: {detail}")
            file.seek(0)
        with av.open(file, container_options=_ALONE) as container:
            yield container


def declared_bytes(file: BinaryIO, size: int) -> int:
    """The least length in bytes that a file declares; 0 if it declares none.

    mp4 and mov do so by their boxes, avi and wav by their chunks, Matroska and WebM by their segment, mp3 by a Xing
    header, Ogg by its last page.

    Args:
        size: its length.
    """
    head = _read_at(file, 0, 16)
    if head.startswith(b"RIFF"):
        return _end_of_chunks(file, size) - _RIFF_SLACK
    if head[4:8] in _BOXES:
        return _end_of_boxes(file, size)
    if head.startswith(b"OggS"):
        return _end_of_last_page(file, size)
    if head.startswith(b"\x1aE\xdf\xa3"):
        start, length, _ = _vint(head, 4)
        segment = _read_at(file, start + length, 16)
        data, length, is_known = _vint(segment, 4)
        return file.tell() - len(segment) + data + length if segment.startswith(b"\x18S\x80g") and is_known else 0
    return _end_by_xing(file, head) - _MP3_SLACK


def _read_at(file: BinaryIO, at: int, count: int) -> bytes:
    file.seek(at)
    return file.read(count)


def _end_of_chunks(file: BinaryIO, size: int) -> int:
    """Declared end, in bytes, of the last outermost chunk of a RIFF file."""
    at = 0
    while at + 8 <= size:
        head = _read_at(file, at, 8)
        length = int.from_bytes(head[4:], "little")
        if not head.startswith(b"RIFF") or not length or length >= _MIN_UNKNOWN_RIFF:
            return 0
        at += 8 + length
    return at


def _end_of_boxes(file: BinaryIO, size: int) -> int:
    """Where the last outermost box should end (ISO/IEC 14496-12, 4.2), or one that has to follow it begins."""
    at, name = 0, b""
    while at + 8 <= size:
        head = _read_at(file, at, 16)
        length = int.from_bytes(head[:4], "big")
        length = int.from_bytes(head[8:], "big") if length == 1 else length
        name = head[4:8]
        if length < 8 or name not in _BOXES:  # a length of 0 means the end of the file, wherever that is
            return 0
        at += length
    return at + 8 if name == b"moof" else at


def _end_of_last_page(file: BinaryIO, size: int) -> int:
    """Declared end, in bytes, of the last page of an Ogg file (RFC 3533, 6)."""
    start = max(0, size - _MAX_OGG_PAGE)
    page = _read_at(file, start, _MAX_OGG_PAGE)
    if (at := page.rfind(b"OggS\0")) < 0:
        return 0
    page = page[at:]
    lengths = page[27 : 27 + page[26]] if len(page) > 26 else b""
    if len(page) <= 26 or len(lengths) < page[26]:
        return size + 1  # its header goes on
    return start + at + 27 + len(lengths) + sum(lengths)


def _vint(data: bytes, at: int) -> tuple[int, int, bool]:
    """A number of EBML (RFC 8794, 4): where it ends, its value, and whether it is one, for all ones mean unknown."""
    width = 9 - data[at].bit_length() if len(data) > at and data[at] else 8
    most = (1 << 7 * width) - 1
    value = int.from_bytes(data[at : at + width], "big") & most
    return at + width, value, len(data) >= at + width and value != most


def _end_by_xing(file: BinaryIO, head: bytes) -> int:
    """Where an mp3 file should end by the Xing header in its first frame; 0 if it has none.

    Args:
        head: its first bytes: an ID3 tag may come before the frame.
    """
    tag = sum((byte & 127) << 7 * (3 - place) for place, byte in enumerate(head[6:10]))
    start = 10 + tag if head.startswith(b"ID3") else 0
    frame = _read_at(file, start, 64)
    mark = max(frame.find(b"Xing", 4), frame.find(b"Info", 4))
    if frame[:1] != b"\xff" or mark < 0 or len(frame) < mark + 16 or not frame[mark + 7] & 2:
        return 0
    place = mark + 8 + 4 * (frame[mark + 7] & 1)
    return start + int.from_bytes(frame[place : place + 4], "big")


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


def num_hidden(container: Any, stream: Any) -> int:
    """Packets of a table of contents that an edit list hides, or that hold nothing; 0 for formats without such a table.

    What FFmpeg has for these is made for seeking, without sizes.
    """
    return sum(entry.is_discard or not entry.size for entry in index_of(stream)) if is_indexed(container) else 0
