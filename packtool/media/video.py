"""Videos: measured by the container's header if it is reliable, decoded for training.

Only the needed frames are decoded, each from the keyframe before it. For 64 frames of an hour with a keyframe every ten
seconds, that is at most a fifth of the video:

    keyframes   K-----------K-----------K-----------K-----------
    needed          x                       x         x
    decoded     -----                   -----       ---

Frames are numbered from 0 in the order in which a decoder returns them. Decoding can begin at a keyframe only if its
number is known: the number of packets before it, plus those after it that are shown before it (the leading pictures of
an open group). Packets are counted in the table of contents (mp4, mov); Matroska and WebM are read once without
decoding. Timestamps are not used for numbers, so frames may be unevenly spaced.

On the way to a needed frame, H.264 frames that no other frame depends on (most B-frames) are not decoded.

The numbers are exact if each packet is one frame, and each marked keyframe is one. This is checked at the beginning and
wherever decoding begins: the frames must match the packets one by one. Otherwise, and for other formats, ``Unnumbered``
is raised, and the video must be decoded from the beginning.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain, islice
from typing import Any

import av
import numpy as np
import numpy.typing as npt
from av.video.reformatter import VideoReformatter

from packtool.media.container import check_end, first_stream, index_of, is_indexed, num_hidden, open_container
from packtool.media.files import MediaProblem, label
from packtool.media.measure import ANY, changed_since_export, load_image, measure_image, media_error
from packtool.rows.media_policy import MediaPolicy
from packtool.rows.sample import MediaRef

FRAMES_A_SECOND = 2.0
"""Default frame rate of a video that is given as pictures (as in Qwen's tools)."""

_FALLBACK_RATE = 24.0
# Since PyAV 17 colours are by default converted by as many threads as there are cores; before, always by one.
_ONE_THREAD = {"threads": 1} if int(av.__version__.split(".")[0]) >= 17 else {}


@dataclass(frozen=True)
class VideoSize:
    """Measures of a video's first stream.

    Args:
        height, width: pixels of a frame after rotation.
        fps: average frames per second.
        has_sound: whether the file has an audio stream.
    """

    height: int
    width: int
    num_frames: int
    fps: float
    has_sound: bool


def measure_video(ref: MediaRef) -> VideoSize:
    """Measure the first video stream of a file: by its header if that gives the number of frames, else by decoding.

    The number of frames is taken only from headers of mp4 and mov, and only if it matches the duration: Matroska files
    declare none, and avi files often a wrong one.
    """
    if ref.frames:
        sizes = {measure_image(frame) for frame in ref.frames}
        if len(sizes) > 1:
            raise MediaProblem("media_size", f"{label(ref)}: its frames have different sizes: {sorted(sizes)}")
        height, width = sizes.pop()
        return VideoSize(height, width, len(ref.frames), ref.fps or FRAMES_A_SECOND, has_sound=False)
    with open_container(ref, check_length=True) as container:
        stream = _stream(container, ref)
        rate = float(stream.average_rate or 0)
        first, others, is_numbered = decode_all(container, stream)
        if first is None:
            raise MediaProblem("media_unreadable", f"{label(ref)}: no frame can be decoded")
        num_frames = _declared_frames(container, stream) if is_numbered else None
        if num_frames is not None:
            check_end(container, stream, ref)
        else:
            num_frames = _counted_frames(ref) or 1 + sum(1 for _ in others)
        seconds = float(stream.duration * stream.time_base) if stream.duration and stream.time_base else 0.0
        rate = rate or (num_frames / seconds if seconds else _FALLBACK_RATE)
        return VideoSize(*_shown_size(first), num_frames, rate, has_sound=bool(container.streams.audio))


def load_video(
    path: str | None,
    data: bytes | None,
    frames: Sequence[tuple[str | None, bytes | None]],
    indices: Sequence[int],
    policy: MediaPolicy = ANY,
    shape: tuple[int, int, int] | None = None,
) -> npt.NDArray[np.uint8]:
    """Return the requested frames, uint8 (T, H, W, 3), upright.

    Seeks to the frames. If that fails or misses a frame, decodes from the beginning.

    Args:
        path, data, frames: the video, as in ``EncodedVideo``.
        indices: indexes of the T frames, ascending.
        shape: measured number of frames (of the clip, if there is one), H and W. Frames that differ in size from the
            first one of the file are scaled to that; without a shape, to the first requested one.

    Raises:
        MediaError: if the file is missing, cannot be decoded, or has fewer frames.
    """
    if frames:
        pictures = [np.asarray(load_image(*frames[i], policy)) for i in indices]
        for number, picture in zip(indices, pictures, strict=True):
            if picture.shape != pictures[0].shape:
                before, now = (f"{each.shape[1]}x{each.shape[0]} pixels" for each in (pictures[0], picture))
                raise changed_since_export(MediaRef(*frames[number]), before, now)
        return np.stack(pictures)
    ref, numbers = MediaRef(path, data, policy=policy), sorted(set(indices))
    pixels, missing = None, numbers
    for read_frames in (needed_frames, all_frames):
        try:
            pixels, missing = _decoded(ref, numbers, read_frames, shape)
        except MediaProblem as problem:
            if read_frames is all_frames or problem.reason != "media_unreadable":
                raise media_error(problem) from problem
        if pixels is not None and not missing:
            return pixels if len(numbers) == len(indices) else pixels[np.searchsorted(numbers, indices)]
    raise changed_since_export(ref, f"a frame {numbers[-1]}", f"no frame {missing[-1]}")


def _decoded(
    ref: MediaRef,
    numbers: Sequence[int],
    read_frames: Callable[..., Iterator[tuple[int, Any]]],
    shape: tuple[int, int, int] | None,
) -> tuple[npt.NDArray[np.uint8] | None, list[int]]:
    """Decode frames of a video by ``needed_frames`` or ``all_frames``; ``numbers`` ascend.

    Returns:
        the frames, uint8 (T, H, W, 3), and the numbers of those that are missing. The frames are None if the file has
        none of them, or ``read_frames`` cannot number them.
    """
    pixels: npt.NDArray[np.uint8] | None = None
    missing, rows = set(numbers), {number: row for row, number in enumerate(numbers)}
    # The measured number of frames may be that of a clip, which mostly begins later than the file.
    num_frames, size = (None, None) if shape is None else (None if numbers[0] else shape[0], shape[1:])
    # One converter for all frames: creating it takes longer than converting a frame.
    converter = VideoReformatter()
    with open_container(ref) as container:
        stream = _stream(container, ref)
        try:
            for number, frame in read_frames(container, stream, numbers, num_frames):
                if pixels is None:
                    size = _shown_size(frame) if size in (None, _shown_size(frame)) else _first_size(ref)
                    pixels = np.empty((len(numbers), *size, 3), np.uint8)
                pixels[rows[number]] = _converted(frame, pixels.shape[1:3], converter)
                missing.remove(number)
        except Unnumbered:
            return None, list(numbers)
    return pixels, sorted(missing)


def _converted(frame: Any, size: tuple[int, ...], converter: VideoReformatter) -> npt.NDArray[np.uint8]:
    """Return a frame as RGB, uint8 (H, W, 3), scaled to ``size`` (H, W) and upright."""
    turns = _quarter_turns(frame)
    height, width = size[::-1] if turns % 2 else size
    return np.rot90(converter.reformat(frame, width, height, "rgb24", **_ONE_THREAD).to_ndarray(), turns)


def _quarter_turns(frame: Any) -> int:
    """Return the number of counterclockwise quarter turns that make a frame upright; other angles are rounded."""
    return round(frame.rotation / 90) % 4


def _shown_size(frame: Any) -> tuple[int, int]:
    """Return (H, W) of a frame after rotation."""
    return (frame.width, frame.height) if _quarter_turns(frame) % 2 else (frame.height, frame.width)


def _first_size(ref: MediaRef) -> tuple[int, int]:
    """Return (H, W) of the first frame of a file, after rotation."""
    with open_container(ref) as container:
        return _shown_size(next(container.decode(_stream(container, ref))))


def _counted_frames(ref: MediaRef) -> int | None:
    """Return the number of frames of a file without decoding all of them; None if that is not possible."""
    with open_container(ref) as container:
        stream = _stream(container, ref)
        try:
            return count_frames(container, stream)
        except Unnumbered:
            return None


def _stream(container: Any, ref: MediaRef) -> Any:
    """Return the first video stream, decoded by a single thread."""
    stream = first_stream(container, "video", ref)
    # Several processes load videos at the same time. More threads in each would decode frames ahead that seeking
    # discards: with 16 threads twice as many, for 64 frames of ten minutes with a keyframe every two seconds.
    stream.codec_context.thread_count = 1
    return stream


def _declared_frames(container: Any, stream: Any) -> int | None:
    """Return the number of shown frames by the table of contents; None without one, or if the header contradicts."""
    count, rate = int(stream.frames or 0), float(stream.average_rate or 0)
    if not is_indexed(container) or not count or len(index_of(stream)) not in (0, count):
        return None
    if not stream.duration or not rate:
        return None
    expected = float(stream.duration * stream.time_base) * rate
    is_plausible = abs(count - expected) <= max(2.0, 0.05 * expected)
    return count - num_hidden(container, stream) if is_plausible else None


MIN_SKIPPED = 4
"""Minimum number of frames that seeking must skip; about as many packets as a decoder reads before its first frame."""

# Packets after a keyframe among which its leading pictures are: H.264 and HEVC reorder at most 16 frames.
_MAX_REORDERED = 32
_ALL = 2**62
_MIN_KEYFRAMES = 3
# Codecs whose decoder returns a frame even for a damaged packet. Videos of others are decoded completely by export,
# which finds the damage.
_CONCEALED = ("h264",)
_READ_ONCE = ("matroska", "webm")
# Codecs with one frame per packet. VP8 is not among them, because some of its packets show nothing.
_CODECS = ("h264", "hevc", "vp9", "av1", "mpeg4", "mjpeg")


class Unnumbered(Exception):
    """Frames of a file cannot be numbered without decoding it from the beginning."""


class _KeyframeDecoder:
    """Decodes a video from its keyframes, and numbers the frames.

    Args:
        container: an opened file at its beginning.
        last: number of the last needed frame; packets long after it need not be counted.

    Attributes:
        keyframes: for each keyframe in decoding order, the number of shown packets before it, ascending: the minimum
            number that its frame can have.
        first: number of the first frame of ``frames``.
        frames: iterator over (number, frame), ascending, from the keyframe where decoding began.
        needed: number of the next needed frame, set by the caller. Long before it, frames that no other frame depends
            on are not decoded.

    Raises:
        Unnumbered: by all methods, if frames cannot be numbered.
    """

    def __init__(self, container: Any, stream: Any, last: int) -> None:
        self._container, self._stream = container, stream
        self.keyframes: list[int] = []
        self._times: list[int] = []  # where to seek for each keyframe: just before the next one
        self._number_at: dict[int, int] = {}  # of a keyframe, by its position in the file
        self.num_packets = self.first = self.needed = 0
        self.frames: Iterator[tuple[int, Any]] = iter(())
        if stream.codec_context.codec.canonical_name not in _CODECS:
            raise Unnumbered
        has_index = is_indexed(container)
        if has_index and 0 < len(index := index_of(stream)) == stream.frames:
            packets = ((entry.pos, entry.timestamp, entry.is_keyframe, entry.is_discard) for entry in index)
            self._find_keyframes(packets, last)
            return
        if not has_index and not any(name in container.format.name.split(",") for name in _READ_ONCE):
            raise Unnumbered
        # Tables of contents and seeking in them use decoding time.
        read = (packet for packet in container.demux(stream) if packet.size)  # the last one is empty
        packets = ((p.pos, p.dts if has_index else p.pts, p.is_keyframe, p.is_discard) for p in read)
        self._find_keyframes(packets, last)
        self._seek(self._times[0])

    def _find_keyframes(self, packets: Iterable[tuple[int | None, int | None, bool, bool]], last: int) -> None:
        """Find keyframes and count shown packets; each is (position in the file, time, is keyframe, is hidden)."""
        num_shown, latest = 0, -(2**62)
        for position, time, is_key, is_hidden in packets:
            if time is None:
                raise Unnumbered
            if is_key:
                if position is None or position < 0 or position in self._number_at:
                    raise Unnumbered  # it could not be recognized after seeking
                if self.keyframes:
                    self._times.append(time - 1)
                self.keyframes.append(num_shown)
                self._number_at[position] = num_shown
            elif not self.keyframes:  # decoders show nothing before the first keyframe
                raise Unnumbered
            num_shown, latest = num_shown + (not is_hidden), max(latest, time)
            if num_shown > last + _MAX_REORDERED and is_key:
                break
        self._times.append(latest)
        self.num_packets = num_shown
        if not self.keyframes:
            raise Unnumbered

    def _seek(self, time: int) -> None:
        """Move to the last keyframe at or before a time, in units of the stream."""
        try:
            self._container.seek(time, stream=self._stream)
        except OSError as error:  # FFmpeg's errors are OSErrors: the file is not seekable
            raise Unnumbered from error

    def start(self) -> None:
        """Decode from the current position, which must be a known keyframe; sets ``first`` and ``frames``."""
        packets = self._container.demux(self._stream)
        ahead = list(islice(packets, _MAX_REORDERED))
        key = ahead[0]
        if key.pts is None or key.pos not in self._number_at:
            raise Unnumbered
        num_leading = sum(1 for packet in ahead if _is_shown(packet) and packet.pts < key.pts)
        self.first = self.needed = self._number_at[key.pos] + num_leading
        self.frames = self._decoded(chain(ahead, packets), key.pts, self.first)

    def start_before(self, keyframe: int, number: int) -> None:
        """Decode from a keyframe at or before an index in ``keyframes``, so that frame ``number`` will be decoded."""
        for index in range(keyframe, -1, -1):
            self._seek(self._times[index])
            self.start()
            if self.first <= number:
                return
        raise Unnumbered

    def _decoded(self, packets: Iterable[Any], first_time: int, first: int) -> Iterator[tuple[int, Any]]:
        """Yield (number, frame) of packets that begin with a keyframe, from its frame (``first``) on."""
        codec, extra = self._stream.codec_context.codec.canonical_name, self._stream.codec_context.extradata or b""
        has_prefix = codec == "h264" and len(extra) > 4 and extra[0] == 1
        # Bytes of the length before each unit in a packet of H.264 (ISO/IEC 14496-15, avcC); 0 if there is none.
        number, prefix = first, (extra[4] & 3) + 1 if has_prefix else 0
        awaited: list[tuple[int, bool]] = []  # (time, is skipped)
        for position, packet in enumerate(packets):
            # Reordering moves a frame by a few packets only, so the needed one is not among those skipped.
            is_skipped = position < self.needed - first - _MAX_REORDERED and _is_leaf(packet, prefix)
            if _is_shown(packet) and packet.pts >= first_time:
                heappush(awaited, (packet.pts, is_skipped))
            for frame in () if is_skipped else packet.decode():
                if frame.pts is not None and frame.pts < first_time:
                    continue
                while awaited and awaited[0][1]:
                    heappop(awaited)
                    number += 1
                if not awaited or frame.pts != heappop(awaited)[0] or frame.is_corrupt:
                    raise Unnumbered
                if frame.pts == first_time and not frame.key_frame:
                    raise Unnumbered
                yield number, frame
                number += 1


def needed_frames(
    container: Any, stream: Any, numbers: Sequence[int], num_frames: int | None = None
) -> Iterator[tuple[int, Any]]:
    """Yield (number, frame) of the needed frames, decoding from the keyframe before each; missing ones are left out.

    Args:
        container: an opened file at its beginning.
        numbers: frame numbers, ascending, each once.
        num_frames: number of frames at export, which must equal the number of packets; None if it is unknown.

    Raises:
        Unnumbered: if frames cannot be numbered this way; the container cannot be used afterwards.
    """
    if not any(after - before > MIN_SKIPPED for before, after in zip((0, *numbers), numbers, strict=False)):
        yield from all_frames(container, stream, numbers)
        return
    decoder = _KeyframeDecoder(container, stream, numbers[-1] if num_frames is None else _ALL)
    if num_frames not in (None, decoder.num_packets):
        raise Unnumbered
    decoder.start()
    if decoder.first != 0:  # decoders leave out the leading pictures of the first keyframe
        raise Unnumbered
    if (frame := next(decoder.frames, None)) is None:
        raise Unnumbered
    decoder.frames = chain([frame], decoder.frames)
    position = 0
    for needed in numbers:
        keyframe = bisect_right(decoder.keyframes, needed) - 1
        if decoder.keyframes[keyframe] - position >= MIN_SKIPPED:
            decoder.start_before(keyframe, needed)
        decoder.needed = needed
        for number, frame in decoder.frames:
            position = number + 1
            if number == needed:
                yield number, frame
                break


def decode_all(container: Any, stream: Any) -> tuple[Any, Iterator[Any], bool]:
    """Decode a container from its beginning.

    Returns:
        the first frame (None if there is none), an iterator over the others, and whether the packets of the header can
        be used to count frames. They cannot if the file begins in the middle of a group: then the first frame does not
        belong to the first shown packet, or is no keyframe although no hidden packets come before it.
    """
    packets = container.demux(stream)
    ahead = list(islice(packets, _MAX_REORDERED))
    times = [packet.pts for packet in ahead if packet.size and not packet.is_discard]
    frames = (frame for packet in chain(ahead, packets) for frame in packet.decode())
    first = next(frames, None)
    if first is None or not times or None in times or first.pts != min(times):
        return first, frames, False
    return first, frames, bool(first.key_frame or ahead[0].is_discard)


def count_frames(container: Any, stream: Any) -> int:
    """Count the frames of a video by its packets; only the first and the last frames are decoded.

    There the frames must match the packets one by one. Of a truncated file, the frames that can be decoded are counted.

    Args:
        container: an opened file at its beginning.

    Raises:
        Unnumbered: if all frames must be decoded to count them; the container cannot be used afterwards.
    """
    if stream.codec_context.codec.canonical_name not in _CONCEALED:
        raise Unnumbered
    decoder = _KeyframeDecoder(container, stream, _ALL)
    if len(decoder.keyframes) < _MIN_KEYFRAMES:
        raise Unnumbered  # with so few keyframes, counting would not be faster than decoding
    decoder.start()
    if decoder.first != 0 or len(list(islice(decoder.frames, _MAX_REORDERED))) < _MAX_REORDERED:
        raise Unnumbered
    last = decoder.keyframes[-1]
    decoder.start_before(len(decoder.keyframes) - 1, last)
    num_frames = decoder.first + sum(1 for _ in decoder.frames)
    if num_frames <= last:
        raise Unnumbered
    return num_frames


def all_frames(container: Any, stream: Any, numbers: Sequence[int], _: int | None = None) -> Iterator[tuple[int, Any]]:
    """Yield the same as ``needed_frames``, but decode from the beginning."""
    needed = set(numbers)
    for number, frame in enumerate(container.decode(stream)):
        if number in needed:
            yield number, frame
        if number >= numbers[-1]:
            return


def _is_leaf(packet: Any, prefix: int) -> bool:
    """Return whether no other frame depends on a packet of H.264: nal_ref_idc is 0 in all its units.

    In parameter sets it is never 0 (ISO/IEC 14496-10, 7.4.1), so packets with these are never left out.

    Args:
        prefix: bytes of the length before each unit; 0 if unknown, for which the result is False.
    """
    data, at, has_slice = bytes(packet), 0, False
    while 0 < prefix < len(data) - at:
        unit = data[at + prefix]
        if unit >> 5 & 3:
            return False
        has_slice |= 1 <= unit & 31 <= 5
        at += prefix + int.from_bytes(data[at : at + prefix], "big")
    return has_slice


def _is_shown(packet: Any) -> bool:
    """Return whether a packet's frame is shown; raise Unnumbered if its time is unknown."""
    if not packet.size:
        return False
    if packet.pts is None:
        raise Unnumbered
    return not packet.is_discard
