"""The frames of a video that are needed, decoded from the keyframes before them.

Of an hour of which 64 frames are taken, a keyframe every ten seconds, a fifth is decoded or less:

    keyframes   K-----------K-----------K-----------K-----------
    needed          x                       x         x
    decoded     -----                   -----       ---

Frames are numbered in the order in which a decoder gives them, from the file's first one on, so a keyframe's number has
to be known before decoding can begin there: it is the number of packets before it, and of those behind it that are
shown before it (the leading pictures of an open group). Packets are counted in the table of contents, where the format
has one (mp4, mov); Matroska and WebM are read once without decoding, also to know how many frames of H.264 they have.
Times are not asked, so frames may be as unevenly spaced as they like.

Of H.264, what no other frame is decoded from (most B-frames) is left out on the way to a frame, too.

That each packet is one frame, and that what is marked as a keyframe is one, is not taken on trust: at the beginning and
wherever decoding goes, the frames have to be those of the packets, one by one. Where they are not, and for other
formats, ``Unnumbered`` says that only decoding from the beginning tells.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain, islice
from typing import Any

from packtool.media.container import index_of, is_indexed

LEAST_SKIPPED = 4
"""Frames that must be saved by going to a keyframe: about what a decoder takes in before the first comes out of it."""

# Packets behind a keyframe among which its leading pictures lie: H.264 and HEVC keep 16 frames for reordering at most.
_MOST_REORDERED = 32
_ALL = 2**62
_FEW = 3  # keyframes
# Whose decoder makes a frame of every packet, also of a damaged one; others give up, which is to be found at export.
_CONCEALED = ("h264",)
_READ_ONCE = ("matroska", "webm")
# One packet, one frame. VP8 is not among them: it has packets that show nothing.
_CODECS = ("h264", "hevc", "vp9", "av1", "mpeg4", "mjpeg")


class Unnumbered(Exception):
    """The frames of a file cannot be numbered but by decoding it from the beginning."""


@dataclass
class _Keyframes:
    """Where decoding may begin.

    Args:
        numbers: ascending, packets that are shown before each keyframe in the order of decoding: the least number that
            its frame can have.
        times: to go to, in the stream's time base: the last before the next keyframe.
        at: number by the position in the file.
        num_packets: packets that are shown, as far as they were counted.
    """

    numbers: list[int]
    times: list[int]
    at: dict[int, int]
    num_packets: int = 0


@dataclass
class _Run:
    """Frames from a keyframe on.

    Args:
        start: number of the first.
        frames: (number, frame), ascending.
        needed: number of the frame that is to come; of those well before it, only what others are decoded from comes.
    """

    start: int
    frames: Iterator[tuple[int, Any]] = iter(())
    needed: int = 0


def needed_frames(
    container: Any, stream: Any, numbers: Sequence[int], num_frames: int | None = None
) -> Iterator[tuple[int, Any]]:
    """(number, frame) of the frames that are needed, as far as they are there.

    Args:
        container: at its beginning.
        numbers: ascending, each once.
        num_frames: frames of the file by the export; where packets are not as many, these do not number the frames.

    Raises:
        Unnumbered: at any time; the container is spent then.
    """
    if not any(after - before > LEAST_SKIPPED for before, after in zip((0, *numbers), numbers, strict=False)):
        yield from all_frames(container, stream, numbers)
        return
    keys = _keyframes(container, stream, numbers[-1] if num_frames is None else _ALL)
    if num_frames not in (None, keys.num_packets):
        raise Unnumbered
    run = _run(container, stream, keys)
    if run.start != 0:  # a decoder does not show what leads the first keyframe
        raise Unnumbered
    if (first := next(run.frames, None)) is None:
        raise Unnumbered
    run.frames = chain([first], run.frames)
    position = 0
    for number in numbers:
        place = bisect_right(keys.numbers, number) - 1
        if keys.numbers[place] - position >= LEAST_SKIPPED:
            run = _run_before(container, stream, keys, place, number)
        run.needed = number
        for found, frame in run.frames:
            position = found + 1
            if found == number:
                yield number, frame
                break


def decode_all(container: Any, stream: Any) -> tuple[Any, Iterator[Any], bool]:
    """Decode a container from its beginning.

    Returns:
        the first frame (None if there is none), an iterator over the others, and whether the first one is that of the
        first packet to be shown, and a keyframe if nothing comes before it: not where a file begins within a group.
    """
    packets = container.demux(stream)
    ahead = list(islice(packets, _MOST_REORDERED))
    times = [packet.pts for packet in ahead if packet.size and not packet.is_discard]
    frames = (frame for packet in chain(ahead, packets) for frame in packet.decode())
    first = next(frames, None)
    if first is None or not times or None in times or first.pts != min(times):
        return first, frames, False
    return first, frames, bool(first.key_frame or ahead[0].is_discard)


def count_frames(container: Any, stream: Any) -> int:
    """How many frames a decoder gives: packets are counted, and the first and the last frames decoded.

    At the beginning and at the end frames have to be those of the packets, one by one; a file that is cut off has as
    many as its last keyframe's decoding gives.

    Args:
        container: at its beginning.

    Raises:
        Unnumbered: if only decoding all of it tells; the container is spent then.
    """
    if stream.codec_context.codec.canonical_name not in _CONCEALED:
        raise Unnumbered
    keys = _keyframes(container, stream, _ALL)
    if len(keys.numbers) < _FEW:
        raise Unnumbered  # nothing would be saved
    run = _run(container, stream, keys)
    if run.start != 0 or len(list(islice(run.frames, _MOST_REORDERED))) < _MOST_REORDERED:
        raise Unnumbered
    last = keys.numbers[-1]
    run = _run_before(container, stream, keys, len(keys.numbers) - 1, last)
    num_frames = run.start + sum(1 for _ in run.frames)
    if num_frames <= last:
        raise Unnumbered
    return num_frames


def all_frames(container: Any, stream: Any, numbers: Sequence[int], _: int | None = None) -> Iterator[tuple[int, Any]]:
    """What ``needed_frames`` gives, by decoding from the beginning to the last one."""
    wanted = set(numbers)
    for number, frame in enumerate(container.decode(stream)):
        if number in wanted:
            yield number, frame
        if number >= numbers[-1]:
            return


def _keyframes(container: Any, stream: Any, last: int) -> _Keyframes:
    """The keyframes up to a frame's number; the container is at its beginning then.

    Raises:
        Unnumbered: if they cannot be told.
    """
    if stream.codec_context.codec.canonical_name not in _CODECS:
        raise Unnumbered
    by_contents = is_indexed(container)
    if by_contents and 0 < len(index := index_of(stream)) == stream.frames:
        packets = ((entry.pos, entry.timestamp, entry.is_keyframe, entry.is_discard) for entry in index)
        return _counted(packets, last)
    if not by_contents and not any(name in container.format.name.split(",") for name in _READ_ONCE):
        raise Unnumbered
    # Tables of contents go by the order of decoding, and so does seeking in them.
    read = (packet for packet in container.demux(stream) if packet.size)  # the last one is empty
    packets = ((p.pos, p.dts if by_contents else p.pts, p.is_keyframe, p.is_discard) for p in read)
    keys = _counted(packets, last)
    _go_to(container, stream, keys.times[0])
    return keys


def _counted(packets: Iterable[tuple[int | None, int | None, bool, bool]], last: int) -> _Keyframes:
    """Keyframes of packets: of each its position in the file, its time, whether it is one, whether it is not shown.

    Args:
        last: number of the last frame that is needed.
    """
    keys = _Keyframes([], [], {})
    shown, latest = 0, -(2**62)
    for position, time, is_key, is_discarded in packets:
        if time is None:
            raise Unnumbered
        if is_key:
            if position is None or position < 0 or position in keys.at:
                raise Unnumbered  # nothing to know it by again
            if keys.numbers:
                keys.times.append(time - 1)
            keys.numbers.append(shown)
            keys.at[position] = shown
        elif not keys.numbers:  # a decoder shows nothing of what comes before the first keyframe
            raise Unnumbered
        shown, latest = shown + (not is_discarded), max(latest, time)
        if shown > last + _MOST_REORDERED and is_key:
            break
    keys.times.append(latest)
    keys.num_packets = shown
    if not keys.numbers:
        raise Unnumbered
    return keys


def _run_before(container: Any, stream: Any, keys: _Keyframes, place: int, number: int) -> _Run:
    """Decoding that begins at the last keyframe from which a frame can be had.

    Raises:
        Unnumbered: if there is none.
    """
    for before in range(place, -1, -1):
        _go_to(container, stream, keys.times[before])
        run = _run(container, stream, keys)
        if run.start <= number:
            return run
    raise Unnumbered


def _go_to(container: Any, stream: Any, time: int) -> None:
    try:
        container.seek(time, stream=stream)
    except OSError as error:  # FFmpeg's errors are OSErrors: here, a file that cannot be sought in
        raise Unnumbered from error


def _run(container: Any, stream: Any, keys: _Keyframes) -> _Run:
    """Decoding that begins where the container is.

    Raises:
        Unnumbered: if that is no keyframe that is known; the frames, when one is not its packet's.
    """
    packets = container.demux(stream)
    ahead = list(islice(packets, _MOST_REORDERED))
    first = ahead[0]
    if first.pts is None or first.pos not in keys.at:
        raise Unnumbered
    leading = sum(1 for packet in ahead if _is_shown(packet) and packet.pts < first.pts)
    start = keys.at[first.pos] + leading
    run = _Run(start)
    run.frames = _frames(chain(ahead, packets), first.pts, run, _length_prefix(stream))
    return run


def _frames(packets: Iterable[Any], first: int, run: _Run, prefix: int) -> Iterator[tuple[int, Any]]:
    """(number, frame) of packets that begin at a keyframe.

    Args:
        first: time of the first frame that counts.
        run: says which frame is needed; asked again and again.
        prefix: see ``_length_prefix``.
    """
    number = run.start
    awaited: list[tuple[int, bool]] = []
    for place, packet in enumerate(packets):
        # Neither decoded nor waited for. The frame that is needed is in none of the packets well before its place.
        is_left_out = place < run.needed - run.start - _MOST_REORDERED and _is_leaf(packet, prefix)
        if _is_shown(packet) and packet.pts >= first:
            heappush(awaited, (packet.pts, is_left_out))
        for frame in () if is_left_out else packet.decode():
            if frame.pts is not None and frame.pts < first:
                continue
            while awaited and awaited[0][1]:
                heappop(awaited)
                number += 1
            if not awaited or frame.pts != heappop(awaited)[0] or frame.is_corrupt:
                raise Unnumbered
            if frame.pts == first and not frame.key_frame:
                raise Unnumbered
            yield number, frame
            number += 1


def _length_prefix(stream: Any) -> int:
    """Bytes of the length before each unit in a packet of H.264 (ISO/IEC 14496-15, avcC); 0 where there is none."""
    extra = stream.codec_context.extradata or b""
    is_known = stream.codec_context.codec.canonical_name == "h264" and len(extra) > 4 and extra[0] == 1
    return (extra[4] & 3) + 1 if is_known else 0


def _is_leaf(packet: Any, prefix: int) -> bool:
    """Whether nothing is decoded from a packet of H.264: none of its units is referred to (nal_ref_idc is 0).

    Slices say so of their frame. Parameter sets always have another number (ISO/IEC 14496-10, 7.4.1), so a packet that
    brings some is none.
    """
    data, at, found = bytes(packet), 0, False
    while 0 < prefix < len(data) - at:
        unit = data[at + prefix]
        if unit >> 5 & 3:
            return False
        found |= 1 <= unit & 31 <= 5
        at += prefix + int.from_bytes(data[at : at + prefix], "big")
    return found


def _is_shown(packet: Any) -> bool:
    if not packet.size:
        return False
    if packet.pts is None:
        raise Unnumbered
    return not packet.is_discard
