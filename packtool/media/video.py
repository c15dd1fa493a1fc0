"""Videos: measured by the container's header if it is reliable, decoded for training.

Only the needed frames are decoded, each from the keyframe before it, without the B-frames that nothing depends on::

    keyframes   K-----------K-----------K-----------K-----------
    needed          x                       x         x
    decoded     -----                   -----       ---

Frames are numbered from 0 in the order in which a decoder returns them. The number of a keyframe is the number of
packets before it, plus those after it that are shown before it (leading pictures of an open group). Packets are counted
in the table of contents (mp4, mov); Matroska and WebM are read once without decoding. Timestamps play no role.

This is exact if each packet is one frame, and each marked keyframe is one, which is checked wherever decoding begins.
Otherwise, and for other formats, ``FrameNumbersUnknown`` is raised, and the video must be decoded from the beginning.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain, islice, pairwise
from typing import Any, NamedTuple

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
_PER_SECOND = 1000.0

_DEFAULT_FPS = 24.0
# Since PyAV 17 colours are by default converted by as many threads as there are cores; before, always by one.
_ONE_THREAD = {"threads": 1} if int(av.__version__.split(".")[0]) >= 17 else {}

_Pixels = npt.NDArray[np.uint8]
_FrameReader = Callable[..., Iterator[tuple[int, Any]]]


@dataclass(frozen=True)
class VideoSize:
    """Measures of a video's first stream.

    Args:
        height, width: pixels of a frame after rotation.
        fps: average frames per second.
    """

    height: int
    width: int
    num_frames: int
    fps: float
    has_sound: bool


def measure_video(ref: MediaRef) -> VideoSize:
    """Measure the first video stream of a file, or a video that is a list of images.

    Frames are counted by the header if it is reliable, else by decoding around keyframes, else by decoding all. Raises
    a MediaProblem if the video cannot be used.
    """
    if ref.frames:  # a list of images
        return _measure_listed_frames(ref)
    with open_container(ref, check_length=True) as container:
        stream = _video_stream(container, ref)
        declared_fps = float(stream.average_rate or 0)
        first_frame, later_frames, is_start_intact = decode_from_start(container, stream)
        if first_frame is None:
            raise MediaProblem("media_unreadable", f"{label(ref)}: no frame can be decoded")
        num_frames = _declared_frames(container, stream) if is_start_intact else None
        if num_frames is not None:
            check_end(container, stream, ref)
        else:
            num_frames = _count_by_seeking(ref)
        if num_frames is None:
            num_frames = 1 + _count(later_frames)  # decodes all of them
        height, width = _upright_size(first_frame)
        fps = declared_fps or _mean_fps(stream, num_frames)
        return VideoSize(height, width, num_frames, fps, has_sound=bool(container.streams.audio))


def _mean_fps(stream: Any, num_frames: int) -> float:
    seconds = float(stream.duration * stream.time_base) if stream.duration and stream.time_base else 0.0
    return num_frames / seconds if seconds else _DEFAULT_FPS


def _count(frames: Iterable[Any]) -> int:
    return sum(1 for _ in frames)


def _measure_listed_frames(ref: MediaRef) -> VideoSize:
    """Measure a video whose frames are listed as images."""
    sizes = {measure_image(frame) for frame in ref.frames}
    if len(sizes) > 1:
        raise MediaProblem("media_size", f"{label(ref)}: its frames have different sizes: {sorted(sizes)}")
    height, width = sizes.pop()
    if not ref.milliseconds:
        return VideoSize(height, width, len(ref.frames), ref.fps or FRAMES_A_SECOND, has_sound=False)
    # Frames with times are some frames of a video of 1,000 frames per second, which lasts from the first time to one
    # mean interval after the last time.
    duration = ref.milliseconds[-1] - ref.milliseconds[0]
    num_intervals = len(ref.frames) - 1
    mean_interval = duration / num_intervals if num_intervals else _PER_SECOND / FRAMES_A_SECOND
    duration += round(mean_interval)
    return VideoSize(height, width, max(duration, 1), _PER_SECOND, has_sound=False)


def load_video(
    path: str | None,
    data: bytes | None,
    frames: Sequence[tuple[str | None, bytes | None]],
    indices: Sequence[int],
    policy: MediaPolicy = ANY,
    shape: tuple[int, int, int] | None = None,
) -> _Pixels:
    """Return the requested frames of a video, upright, uint8 (T, H, W, 3); MediaError if one cannot be loaded.

    Args:
        path, data: the file, or its embedded bytes.
        frames: (path, data) of each image if the video is a list of images; then the first T are returned.
        indices: frame numbers of the T requested frames, ascending, maybe with repetitions.
        policy: files that may be read.
        shape: number of frames of the measured video or clip, H and W; None if unknown. All frames get the size of the
            first requested frame if that is (H, W), else of the file's first frame.
    """
    if frames:
        return _load_listed_frames(frames[: len(indices)], policy)
    ref = MediaRef(path, data, policy=policy)
    distinct_indices = sorted(set(indices))
    try:
        pixels = _seek_frames(ref, distinct_indices, shape)
        if pixels is None:  # seeking has failed, or missed a frame
            pixels, missing = _decode_frames(ref, distinct_indices, all_frames, shape)
            if missing:
                raise changed_since_export(ref, f"a frame {distinct_indices[-1]}", f"no frame {missing[-1]}")
    except MediaProblem as problem:
        raise media_error(problem) from problem
    if len(distinct_indices) == len(indices):
        return pixels
    rows = np.searchsorted(distinct_indices, indices)  # of each requested frame in ``pixels``
    return pixels[rows]


def _seek_frames(ref: MediaRef, numbers: Sequence[int], shape: tuple[int, int, int] | None) -> _Pixels | None:
    """Decode frames by seeking to them, as ``_decode_frames``; None if seeking fails or misses a frame."""
    try:
        pixels, missing = _decode_frames(ref, numbers, needed_frames, shape)
    except MediaProblem as problem:
        if problem.reason != "media_unreadable":
            raise
        return None
    return None if missing else pixels


def _load_listed_frames(frames: Sequence[tuple[str | None, bytes | None]], policy: MediaPolicy) -> _Pixels:
    """Return images, (path, data) each, as the frames of a video, uint8 (T, H, W, 3); MediaError if sizes differ."""
    pictures = [np.asarray(load_image(path, data, policy)) for path, data in frames]
    for frame, picture in zip(frames, pictures, strict=True):
        if picture.shape != pictures[0].shape:
            before, now = (f"{each.shape[1]}x{each.shape[0]} pixels" for each in (pictures[0], picture))
            raise changed_since_export(MediaRef(*frame), before, now)
    return np.stack(pictures)


def _decode_frames(
    ref: MediaRef, numbers: Sequence[int], frame_reader: _FrameReader, shape: tuple[int, int, int] | None
) -> tuple[_Pixels, list[int]]:
    """Decode the frames of a video file with these numbers, ascending and distinct.

    Args:
        frame_reader: ``needed_frames``, which seeks, or ``all_frames``.
        shape: number of frames, height and width of the measured video; None if unknown.

    Returns:
        The frames, uint8 (T, H, W, 3), and the numbers of missing frames, whose pixels are undefined.
    """
    pixels: _Pixels | None = None  # created when the size of the first frame is known
    missing = set(numbers)
    row_by_number = {number: row for row, number in enumerate(numbers)}
    # ``shape`` may be that of a clip, part of a file, unless frame 0 is needed.
    num_file_frames = shape[0] if shape is not None and numbers[0] == 0 else None
    converter = VideoReformatter()  # creating it takes longer than converting a frame
    with open_container(ref) as container:
        stream = _video_stream(container, ref)
        for number, frame in frame_reader(container, stream, numbers, num_file_frames):
            if pixels is None:
                pixels = _empty_pixels(ref, len(numbers), frame, shape)
            pixels[row_by_number[number]] = _to_rgb(frame, pixels.shape[1:3], converter)
            missing.remove(number)
    if pixels is None:
        pixels = np.empty((0, 0, 0, 3), np.uint8)
    return pixels, sorted(missing)


def _empty_pixels(ref: MediaRef, num_frames: int, frame: Any, shape: tuple[int, int, int] | None) -> _Pixels:
    """Return an array (T, H, W, 3) of the size of ``frame``; if ``shape`` has another, of the file's first frame."""
    size = _upright_size(frame)
    if shape is not None and size != shape[1:]:
        with open_container(ref) as container:
            size = _upright_size(next(container.decode(_video_stream(container, ref))))
    return np.empty((num_frames, *size, 3), np.uint8)


def _to_rgb(frame: Any, size: tuple[int, ...], converter: VideoReformatter) -> _Pixels:
    """Return a frame as RGB, uint8 (H, W, 3), scaled and rotated so that it is upright with ``size`` (H, W)."""
    num_turns = _quarter_turns(frame)
    stored_height, stored_width = size[::-1] if num_turns % 2 else size
    rgb = converter.reformat(frame, stored_width, stored_height, "rgb24", **_ONE_THREAD).to_ndarray()
    return np.rot90(rgb, num_turns)


def _quarter_turns(frame: Any) -> int:
    """Return the number of counterclockwise quarter turns that make a frame upright; other angles are rounded."""
    return round(frame.rotation / 90) % 4


def _upright_size(frame: Any) -> tuple[int, int]:
    return (frame.width, frame.height) if _quarter_turns(frame) % 2 else (frame.height, frame.width)


def _count_by_seeking(ref: MediaRef) -> int | None:
    """Return the number of frames of a file without decoding all of them; None if that is not possible."""
    with open_container(ref) as container:
        stream = _video_stream(container, ref)
        try:
            return count_frames(container, stream)
        except FrameNumbersUnknown:
            return None


def _video_stream(container: Any, ref: MediaRef) -> Any:
    stream = first_stream(container, "video", ref)
    # Several processes load videos at the same time. More threads in each would decode frames ahead that seeking
    # discards: with 16 threads twice as many, for 64 frames of ten minutes with a keyframe every two seconds.
    # And with several threads, FFmpeg returns a frame even for a damaged packet of VP9, which one thread refuses.
    stream.codec_context.thread_count = 1
    return stream


def _declared_frames(container: Any, stream: Any) -> int | None:
    """Return the number of shown frames by the table of contents; None without one, or if the header contradicts."""
    num_packets, fps = int(stream.frames or 0), float(stream.average_rate or 0)
    if not is_indexed(container) or not num_packets or len(index_of(stream)) not in (0, num_packets):
        return None
    if not stream.duration or not fps:
        return None
    expected = float(stream.duration * stream.time_base) * fps
    is_plausible = abs(num_packets - expected) <= max(2.0, 0.05 * expected)
    return num_packets - num_hidden(container, stream) if is_plausible else None


MIN_SKIPPED = 4
"""Minimum number of frames that seeking must skip; about as many packets as a decoder reads before its first frame."""

# Packets after a keyframe among which its leading pictures are: H.264 and HEVC reorder at most 16 frames.
_MAX_REORDERED_PACKETS = 32
_NUM_CHECKED_FRAMES = 32
_NO_LIMIT = 2**62
_BEFORE_ALL_TIMES = -(2**62)
_MIN_KEYFRAMES = 3
# Codecs whose frames ``count_frames`` counts without decoding all. Their decoders hide damage: they return a frame even
# for a damaged packet. Decoders of other codecs find it, so export decodes all frames.
_COUNTED_CODECS = ("h264",)
_FORMATS_TO_SCAN = frozenset(("matroska", "webm"))  # without a table of contents; all packets are read to count them
# VP8 is not among them, because some of its packets show nothing.
_ONE_FRAME_PER_PACKET_CODECS = ("h264", "hevc", "vp9", "av1", "mpeg4", "mjpeg")


class _Packet(NamedTuple):
    """A packet of a video stream: its position in the file, and the time in units of the stream to seek it by."""

    file_position: int | None
    time: int | None
    is_keyframe: bool
    is_hidden: bool


class FrameNumbersUnknown(Exception):
    """Frames of a file cannot be numbered without decoding it from the beginning."""


def _lists_all_packets(container: Any, stream: Any) -> bool:
    """Return whether a file has a table of contents with all packets of the stream."""
    return is_indexed(container) and 0 < len(index_of(stream)) == stream.frames


def _listed_packets(stream: Any) -> Iterator[_Packet]:
    for entry in index_of(stream):
        yield _Packet(entry.pos, entry.timestamp, entry.is_keyframe, entry.is_discard)


def _read_packets(container: Any, stream: Any) -> Iterator[_Packet]:
    """Yield the packets of a file, which are read but not decoded; FrameNumbersUnknown for unsuitable formats."""
    seeks_by_decoding_time = is_indexed(container)  # mp4 and mov; Matroska and WebM seek by display time
    if not seeks_by_decoding_time and _FORMATS_TO_SCAN.isdisjoint(container.format.name.split(",")):
        raise FrameNumbersUnknown
    for packet in container.demux(stream):
        if packet.size:  # the last packet is empty
            time = packet.dts if seeks_by_decoding_time else packet.pts
            yield _Packet(packet.pos, time, packet.is_keyframe, packet.is_discard)


class _FrameNumbers:
    """Numbers frames from ``first_number`` on, in the order of their times."""

    def __init__(self, first_number: int) -> None:
        self._next_number = first_number
        self._packets: list[tuple[int, bool]] = []  # a heap of (time, is skipped), without those of numbered frames

    def add(self, time: int, *, is_skipped: bool) -> None:
        """Add a packet that is shown; a skipped one is not decoded, but its frame counts."""
        heappush(self._packets, (time, is_skipped))

    def number_of(self, frame: Any) -> int:
        """Return the number of the next decoded frame; FrameNumbersUnknown unless it has the time of its packet."""
        while self._packets:
            time, is_skipped = heappop(self._packets)
            number = self._next_number
            self._next_number += 1
            if not is_skipped:
                if time != frame.pts:
                    break
                return number
        raise FrameNumbersUnknown


class _KeyframeDecoder:
    """Decodes a video from its keyframes, and numbers the frames.

    Args:
        container: an opened file at its beginning.
        last_needed: number of the last needed frame; packets after the keyframe that follows it are not counted.

    Attributes:
        min_keyframe_numbers: minimum frame number of each keyframe, ascending: the number of shown packets before it.
        num_shown: number of counted packets that are shown.
        first_number: frame number of the first frame of ``frames``.
        frames: iterator over (number, frame), ascending, from the keyframe where decoding began.
        next_needed: frame number of the next needed frame, set by the caller. Long before it, frames that no other
            frame depends on are not decoded.

    All methods raise FrameNumbersUnknown if frames cannot be numbered.
    """

    def __init__(self, container: Any, stream: Any, last_needed: int) -> None:
        self._container, self._stream = container, stream
        self.min_keyframe_numbers: list[int] = []
        self._min_number_by_position: dict[int, int] = {}  # by a keyframe's position in the file
        self._seek_times: list[int] = []  # seeking to the n-th time finds the n-th keyframe
        self.num_shown = 0
        self.first_number = 0
        self.next_needed = 0
        self.frames: Iterator[tuple[int, Any]] = iter(())
        self._unit_prefix_bytes = _unit_prefix_bytes(stream)
        if stream.codec_context.codec.canonical_name not in _ONE_FRAME_PER_PACKET_CODECS:
            raise FrameNumbersUnknown
        if _lists_all_packets(container, stream):
            self._find_keyframes(_listed_packets(stream), last_needed)
        else:
            self._find_keyframes(_read_packets(container, stream), last_needed)
            self._seek(self._seek_times[0])  # reading has moved away from the first keyframe

    def _find_keyframes(self, packets: Iterable[_Packet], last_needed: int) -> None:
        """Find the keyframes of a video, from which decoding can begin, and count its shown packets.

        Reads the packets, in file order, up to a keyframe that is surely after frame number ``last_needed``. Raises
        FrameNumbersUnknown if a packet has no time, or if packets come before the first keyframe.
        """
        keyframe_times: list[int] = []
        latest_time = _BEFORE_ALL_TIMES
        for packet in packets:
            if packet.time is None:
                raise FrameNumbersUnknown
            if packet.is_keyframe:
                keyframe_times.append(packet.time)
                self._add_keyframe(packet.file_position)  # its frame number follows from ``num_shown`` so far
            elif not keyframe_times:  # decoders show nothing before the first keyframe
                raise FrameNumbersUnknown
            if not packet.is_hidden:
                self.num_shown += 1
            latest_time = max(latest_time, packet.time)
            if packet.is_keyframe and self.num_shown > last_needed + _MAX_REORDERED_PACKETS:
                break
        if not keyframe_times:
            raise FrameNumbersUnknown
        # Seeking to a time finds the last keyframe up to it, so a keyframe is found just before the next one's time.
        times_before_next = [next_time - 1 for next_time in keyframe_times[1:]]
        self._seek_times = [*times_before_next, latest_time]

    def _add_keyframe(self, file_position: int | None) -> None:
        """Add the keyframe after the packets counted so far, to be recognized by its position in the file."""
        if file_position is None or file_position < 0 or file_position in self._min_number_by_position:
            raise FrameNumbersUnknown
        self.min_keyframe_numbers.append(self.num_shown)
        self._min_number_by_position[file_position] = self.num_shown

    def _seek(self, time: int) -> None:
        """Move to the last keyframe at or before a time, in units of the stream."""
        try:
            self._container.seek(time, stream=self._stream)
        except OSError as error:  # FFmpeg's errors are OSErrors: the file is not seekable
            raise FrameNumbersUnknown from error

    def start(self) -> None:
        """Decode from the current position, a known keyframe; sets ``first_number``, ``next_needed`` and ``frames``."""
        packets = self._container.demux(self._stream)
        first_packets = list(islice(packets, _MAX_REORDERED_PACKETS))
        keyframe = first_packets[0]
        if keyframe.pts is None or keyframe.pos not in self._min_number_by_position:
            raise FrameNumbersUnknown
        num_leading = sum(1 for packet in first_packets if _is_shown(packet) and packet.pts < keyframe.pts)
        self.first_number = self.next_needed = self._min_number_by_position[keyframe.pos] + num_leading
        self.frames = self._decode(chain(first_packets, packets), keyframe.pts, self.first_number)

    def start_at_beginning(self) -> None:
        """Decode from the current position; FrameNumbersUnknown unless the first packet gives frame 0."""
        self.start()
        first_frame = next(self.frames, None)
        if self.first_number != 0 or first_frame is None:  # the file begins with pictures that decoders leave out
            raise FrameNumbersUnknown
        self.frames = chain([first_frame], self.frames)

    def start_before(self, keyframe_index: int, number: int) -> None:
        """Decode from the keyframe at this index, or an earlier one if frame ``number`` is shown before it."""
        for index in range(keyframe_index, -1, -1):
            self._seek(self._seek_times[index])
            self.start()
            if self.first_number <= number:
                return
        raise FrameNumbersUnknown

    def _decode(self, packets: Iterable[Any], first_time: int, first_number: int) -> Iterator[tuple[int, Any]]:
        """Decode packets that begin with a keyframe, and yield (frame number, frame) from the keyframe's frame on.

        ``first_time`` and ``first_number`` are those of the keyframe's frame. Frames that nothing depends on are left
        out long before ``next_needed``, but numbered. FrameNumbersUnknown if a frame is damaged or does not fit.
        """
        numbers = _FrameNumbers(first_number)
        for packet_number, packet in enumerate(packets, first_number):
            is_skipped = self._can_skip(packet, packet_number)
            if _is_shown(packet) and packet.pts >= first_time:
                numbers.add(packet.pts, is_skipped=is_skipped)
            if is_skipped:
                continue
            for frame in packet.decode():
                if frame.pts is not None and frame.pts < first_time:  # it belongs to the keyframe before
                    continue
                is_false_keyframe = frame.pts == first_time and not frame.key_frame
                if frame.is_corrupt or is_false_keyframe:  # the decoder may have dropped frames
                    raise FrameNumbersUnknown
                yield numbers.number_of(frame), frame

    def _can_skip(self, packet: Any, packet_number: int) -> bool:
        """Return whether a packet comes long before the next needed frame, and no other frame depends on it."""
        # The number of a packet's frame differs from ``packet_number`` by less than this margin.
        is_early = packet_number + _MAX_REORDERED_PACKETS < self.next_needed
        return is_early and _is_unreferenced(packet, self._unit_prefix_bytes)


def _unit_prefix_bytes(stream: Any) -> int:
    """Return the bytes of the length before each unit in a packet of H.264 (ISO/IEC 14496-15, avcC); 0 if none."""
    if stream.codec_context.codec.canonical_name != "h264":
        return 0
    avcc = stream.codec_context.extradata or b""
    return (avcc[4] & 3) + 1 if len(avcc) > 4 and avcc[0] == 1 else 0


def needed_frames(
    container: Any, stream: Any, numbers: Sequence[int], num_frames: int | None = None
) -> Iterator[tuple[int, Any]]:
    """Yield (number, frame) of the needed frames of a video, decoding from the keyframe before each.

    Missing frames are left out. The container cannot be used afterwards.

    Args:
        numbers: frame numbers, ascending and distinct.
        num_frames: number of frames that the file must have, checked if seeking skips frames; None if unknown.
            FrameNumbersUnknown if it has another, or if its frames cannot be numbered without decoding all.
    """
    gaps = [number - previous for previous, number in pairwise([0, *numbers])]
    if max(gaps) <= MIN_SKIPPED:  # seeking would skip nothing
        yield from all_frames(container, stream, numbers)
        return
    last_needed = numbers[-1] if num_frames is None else _NO_LIMIT  # without a limit, all packets are counted
    decoder = _KeyframeDecoder(container, stream, last_needed)
    if num_frames is not None and decoder.num_shown != num_frames:
        raise FrameNumbersUnknown
    decoder.start_at_beginning()
    yield from _seek_each(decoder, numbers)


def _seek_each(decoder: _KeyframeDecoder, numbers: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """Yield (number, frame) of the needed frames from a started decoder; seek to keyframes where that skips frames."""
    next_number = 0  # of the frame that the decoder would return next
    for needed_number in numbers:
        keyframe_index = bisect_right(decoder.min_keyframe_numbers, needed_number) - 1  # the last possible one
        if decoder.min_keyframe_numbers[keyframe_index] - next_number >= MIN_SKIPPED:
            decoder.start_before(keyframe_index, needed_number)
        decoder.next_needed = needed_number  # the decoder skips frames before it where possible
        for number, frame in decoder.frames:
            next_number = number + 1
            if number == needed_number:
                yield number, frame
                break


def decode_from_start(container: Any, stream: Any) -> tuple[Any, Iterator[Any], bool]:
    """Decode a container from its beginning.

    Return the first frame (None if there is none), an iterator over the others, and whether the start is intact: the
    first shown packet gives the first frame, which is a keyframe unless hidden packets come before it.
    """
    packets = container.demux(stream)
    first_packets = list(islice(packets, _MAX_REORDERED_PACKETS))
    shown_times = [packet.pts for packet in first_packets if packet.size and not packet.is_discard]
    frames = (frame for packet in chain(first_packets, packets) for frame in packet.decode())
    first_frame = next(frames, None)
    if first_frame is None or not shown_times or None in shown_times or first_frame.pts != min(shown_times):
        return first_frame, frames, False
    is_start_intact = bool(first_frame.key_frame or first_packets[0].is_discard)
    return first_frame, frames, is_start_intact


def count_frames(container: Any, stream: Any) -> int:
    """Count the frames of a video by decoding only its first frames, as a check, and those from the last keyframe on.

    FrameNumbersUnknown if all frames must be decoded to count them. The container cannot be used afterwards.
    """
    if stream.codec_context.codec.canonical_name not in _COUNTED_CODECS:
        raise FrameNumbersUnknown
    decoder = _KeyframeDecoder(container, stream, last_needed=_NO_LIMIT)
    num_keyframes = len(decoder.min_keyframe_numbers)
    if num_keyframes < _MIN_KEYFRAMES:  # counting would not be faster than decoding
        raise FrameNumbersUnknown

    decoder.start_at_beginning()
    first_frames = islice(decoder.frames, _NUM_CHECKED_FRAMES)
    if _count(first_frames) < _NUM_CHECKED_FRAMES:
        raise FrameNumbersUnknown

    num_before_last_keyframe = decoder.min_keyframe_numbers[-1]
    decoder.start_before(keyframe_index=num_keyframes - 1, number=num_before_last_keyframe)
    num_frames = decoder.first_number + _count(decoder.frames)
    if num_frames <= num_before_last_keyframe:  # truncated: nothing from the last keyframe on can be decoded
        raise FrameNumbersUnknown
    return num_frames


def all_frames(container: Any, stream: Any, numbers: Sequence[int], _: int | None = None) -> Iterator[tuple[int, Any]]:
    """Yield the same as ``needed_frames``, but decode from the beginning."""
    needed = set(numbers)
    for number, frame in enumerate(container.decode(stream)):
        if number in needed:
            yield number, frame
        if number >= numbers[-1]:
            return


def _is_unreferenced(packet: Any, prefix_bytes: int) -> bool:
    """Return whether no other frame depends on a packet of H.264: nal_ref_idc is 0 in all its units.

    In parameter sets it is never 0 (ISO/IEC 14496-10, 7.4.1), so packets with these are never left out. Each unit
    follows its length in ``prefix_bytes`` bytes; 0 if unknown, for which the result is False.
    """
    data, offset, has_slice = bytes(packet), 0, False
    while 0 < prefix_bytes < len(data) - offset:
        unit_header = data[offset + prefix_bytes]
        nal_ref_idc, nal_unit_type = unit_header >> 5 & 3, unit_header & 31
        if nal_ref_idc:
            return False
        has_slice |= 1 <= nal_unit_type <= 5
        offset += prefix_bytes + int.from_bytes(data[offset : offset + prefix_bytes], "big")
    return has_slice


def _is_shown(packet: Any) -> bool:
    """Return whether a packet's frame is shown; raise FrameNumbersUnknown if its time is unknown."""
    if not packet.size:
        return False
    if packet.pts is None:
        raise FrameNumbersUnknown
    return not packet.is_discard
