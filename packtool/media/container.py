"""Containers of videos and sounds: opened with PyAV, and checked for truncation."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import av

from packtool import storage
from packtool.media.files import MediaProblem, label, open_medium
from packtool.rows.sample import MediaRef

_TOLERANCE_SECONDS = 0.25
_LAST_SECONDS = 1.0
# FFmpeg would open the files and addresses that a playlist names, so no protocol is allowed.
_NO_PROTOCOLS = {"protocol_whitelist": "none"}
_LAST_ENTRIES = 1000
# Bytes that files may lack: some programs count the header of RIFF, or tags of an mp3 file that were removed.
_RIFF_SLACK, _MP3_SLACK = 64, 256
_MIN_UNKNOWN_RIFF = 0x7FFFF000  # programs that write to a pipe declare the maximum, as the length is unknown
_MAX_OGG_PAGE = 65_307
_EBML_HEADER, _SEGMENT = b"\x1aE\xdf\xa3", b"\x18S\x80g"  # first bytes of Matroska's header and segment
_BOXES = frozenset(
    b"ftyp styp moov mdat moof mfra sidx ssix emsg prft pdin free skip wide junk uuid meta udta pnot PICT".split()
)
"""Names of the outermost boxes of mp4 and mov; anything else after them is tags or padding."""


@contextmanager
def open_container(ref: MediaRef, *, check_length: bool = False) -> Iterator[Any]:
    """Open the container of a medium; raises as ``open_medium``, with ``check_length`` also for a truncated file."""
    with open_medium(ref, storage.ROWS_BLOCK) as file:
        if check_length:
            size = file.seek(0, os.SEEK_END)
            declared = declared_bytes(file, size)
            if declared > size:
                detail = f"the file is truncated: it declares {declared:,} bytes and has {size:,}"
                raise MediaProblem("media_unreadable", f"{label(ref)}: {detail}")
            file.seek(0)
        with av.open(file, container_options=_NO_PROTOCOLS) as container:
            yield container


def first_stream(container: Any, kind: str, ref: MediaRef) -> Any:
    """Return a container's first stream of a kind (``video`` or ``audio``); raise MediaProblem if there is none."""
    streams = getattr(container.streams, kind)
    if not streams:
        raise MediaProblem("media_unreadable", f"{label(ref)}: the file has no {kind} stream")
    return streams[0]


def declared_bytes(file: BinaryIO, size: int) -> int:
    """Return the minimum length in bytes that a file of ``size`` bytes declares; 0 if it declares none."""
    head = _read_at(file, 0, 16)
    if head.startswith(b"RIFF"):  # avi and wav
        return _end_of_chunks(file, size) - _RIFF_SLACK
    if head[4:8] in _BOXES:  # mp4 and mov
        return _end_of_boxes(file, size)
    if head.startswith(b"OggS"):
        return _end_of_last_page(file, size)
    if head.startswith(_EBML_HEADER):  # Matroska and WebM
        return _end_of_segment(file, head)
    return _end_by_xing(file, head) - _MP3_SLACK  # mp3, or a format that declares nothing


def _end_of_segment(file: BinaryIO, head: bytes) -> int:
    """Return the declared end of the segment in a Matroska or WebM file, after its EBML header; 0 if unknown."""
    header_start, header_size, _ = _ebml_number(head, 4)  # the size is behind the four bytes of the header's mark
    segment_start = header_start + header_size
    segment = _read_at(file, segment_start, 16)
    content_start, content_size, is_known = _ebml_number(segment, 4)
    is_known = is_known and segment.startswith(_SEGMENT)
    return segment_start + content_start + content_size if is_known else 0


def _read_at(file: BinaryIO, at: int, count: int) -> bytes:
    file.seek(at)
    return file.read(count)


def _end_of_chunks(file: BinaryIO, size: int) -> int:
    """Return the declared end, in bytes, of the last outermost chunk of a RIFF file."""
    at = 0
    while at + 8 <= size:
        head = _read_at(file, at, 8)
        length = int.from_bytes(head[4:], "little")
        if not head.startswith(b"RIFF") or not length or length >= _MIN_UNKNOWN_RIFF:
            return 0
        at += 8 + length
    return at


def _end_of_boxes(file: BinaryIO, size: int) -> int:
    """Return the declared end of the last outermost box and the next header (ISO/IEC 14496-12, 4.2); 0 if unknown."""
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
    """Return the declared end, in bytes, of the last page of an Ogg file (RFC 3533, 6)."""
    start = max(0, size - _MAX_OGG_PAGE)
    page = _read_at(file, start, _MAX_OGG_PAGE)
    if (at := page.rfind(b"OggS\0")) < 0:
        return 0
    page = page[at:]
    lengths = page[27 : 27 + page[26]] if len(page) > 26 else b""
    if len(page) <= 26 or len(lengths) < page[26]:
        return size + 1  # the page's header is truncated
    return start + at + 27 + len(lengths) + sum(lengths)


def _ebml_number(data: bytes, at: int) -> tuple[int, int, bool]:
    """Read an EBML number (RFC 8794, 4) that begins at ``data[at]``.

    Return the position after it, its value, and whether the value is known: all ones mean unknown.
    """
    # The number of leading zero bits tells the width in bytes; the first one bit is not part of the value.
    width = 9 - data[at].bit_length() if len(data) > at and data[at] else 8
    mask = (1 << 7 * width) - 1
    value = int.from_bytes(data[at : at + width], "big") & mask
    return at + width, value, len(data) >= at + width and value != mask


def _end_by_xing(file: BinaryIO, head: bytes) -> int:
    """Return the end of an mp3 file by the Xing header in its first frame, maybe after an ID3 tag; 0 without one."""
    tag = sum((byte & 127) << 7 * (3 - position) for position, byte in enumerate(head[6:10]))
    start = 10 + tag if head.startswith(b"ID3") else 0
    frame = _read_at(file, start, 64)
    mark = max(frame.find(b"Xing", 4), frame.find(b"Info", 4))
    if frame[:1] != b"\xff" or mark < 0 or len(frame) < mark + 16 or not frame[mark + 7] & 2:
        return 0
    field = mark + 8 + 4 * (frame[mark + 7] & 1)
    return start + int.from_bytes(frame[field : field + 4], "big")


def check_end(container: Any, stream: Any, ref: MediaRef) -> None:
    """Raise MediaProblem if a stream is shorter than its header declares, because the file was truncated.

    In formats other than mp4 and mov, it must be a sound, whose last second is decoded: the container's position moves.
    """
    if is_indexed(container):
        last_entries = index_of(stream)[-_LAST_ENTRIES:]  # the last bytes belong to one of these packets
        listed_end = max((entry.pos + entry.size for entry in last_entries), default=0)
        expected, actual = f"its table of contents ends at byte {listed_end:,}", f"{container.size:,}"
        is_truncated = listed_end > container.size
    else:
        declared = float(stream.duration * stream.time_base)
        seconds = _seconds_by_end(container, stream, declared)
        expected, actual = f"its header declares {declared:.2f} s", f"{seconds:.2f} s"
        is_truncated = seconds < declared - _TOLERANCE_SECONDS
    if is_truncated:
        raise MediaProblem("media_unreadable", f"{label(ref)}: the file is truncated: {expected}, and it has {actual}")


def _seconds_by_end(container: Any, stream: Any, declared: float) -> float:
    """Return the length of a sound in seconds, by decoding the last of the ``declared`` seconds and what follows."""
    start = float((stream.start_time or 0) * stream.time_base)
    seek_time = max(start + declared - _LAST_SECONDS, start)
    container.seek(int(seek_time / stream.time_base), stream=stream)
    end = 0.0
    for frame in container.decode(stream):
        if frame.pts is not None:
            end = float(frame.pts * frame.time_base) - start + frame.samples / frame.sample_rate
    return end


def is_indexed(container: Any) -> bool:
    """Return whether the format has a table of contents of all packets (mp4 and mov)."""
    return any(name in container.format.name.split(",") for name in ("mov", "mp4"))


def index_of(stream: Any) -> Any:
    """Return a stream's table of contents: the packets that the header lists, in decoding order."""
    return getattr(stream, "index_entries", ())  # since PyAV 18


def num_hidden(container: Any, stream: Any) -> int:
    """Return how many packets of a table of contents are empty or hidden by an edit list; 0 in other formats."""
    return sum(entry.is_discard or not entry.size for entry in index_of(stream)) if is_indexed(container) else 0
