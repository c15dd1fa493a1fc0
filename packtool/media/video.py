"""Videos: measured from the container's header where it is reliable, decoded for training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import av
import numpy as np
import numpy.typing as npt
from av.video.reformatter import VideoReformatter

from packtool.media.container import check_end, first_stream, index_of, is_indexed, num_hidden, open_container
from packtool.media.measure import ANY, changed_since_export, load_image, measure_image, media_error
from packtool.media.opening import MediaProblem, label
from packtool.media.seeking import Unnumbered, all_frames, count_frames, decode_all, needed_frames
from packtool.rows.media_policy import MediaPolicy
from packtool.rows.sample import MediaRef

FRAMES_A_SECOND = 2.0
"""Default frames per second of a video that is given as pictures (as in Qwen's tools)."""

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
    """Measure a video by its header if that gives the number of frames, else by decoding it.

    The first video stream counts, as for transformers' decoders. The number of frames is taken only from mp4 and mov
    headers, and only if it agrees with the duration: matroska files declare none, avi files often a wrong one.

    Raises:
        MediaProblem: if the file is missing, is no video, or cannot be decoded.
    """
    if ref.frames:
        sizes = {measure_image(frame) for frame in ref.frames}
        if len(sizes) > 1:
            raise MediaProblem("media_size", f"{label(ref)}: the frames have different sizes: {sorted(sizes)}")
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

    Seeks to the frames, and decodes from the beginning if that fails or misses one.

    Args:
        path, data, frames: the video, as in ``EncodedVideo``.
        indices: numbers of the frames, ascending.
        shape: number of frames (of the clip, if there is one), H and W as measured. Frames of another size than the
            file's first one are scaled to that; without a shape, to the first requested one.

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
    """Return frames by their numbers, read by a function of ``seeking``, and the missing numbers.

    Returns:
        None for the frames if there is none, or if ``read_frames`` cannot number them.
    """
    pixels: npt.NDArray[np.uint8] | None = None
    missing, rows = set(numbers), {number: row for row, number in enumerate(numbers)}
    # The frames of a clip are not those of the file; it mostly begins later.
    num_frames, size = (None, None) if shape is None else (None if numbers[0] else shape[0], shape[1:])
    # One for all frames: setting it up takes longer than converting a frame.
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
    """Return a frame's colours, uint8 (H, W, 3) of this size, upright."""
    turns = _quarter_turns(frame)
    height, width = size[::-1] if turns % 2 else size
    return np.rot90(converter.reformat(frame, width, height, "rgb24", **_ONE_THREAD).to_ndarray(), turns)


def _quarter_turns(frame: Any) -> int:
    """Return the counterclockwise quarter turns that show a frame upright; other angles are rounded."""
    return round(frame.rotation / 90) % 4


def _shown_size(frame: Any) -> tuple[int, int]:
    """Return (H, W) of a frame after rotation."""
    return (frame.width, frame.height) if _quarter_turns(frame) % 2 else (frame.height, frame.width)


def _first_size(ref: MediaRef) -> tuple[int, int]:
    with open_container(ref) as container:
        return _shown_size(next(container.decode(_stream(container, ref))))


def _counted_frames(ref: MediaRef) -> int | None:
    """Return the number of frames without decoding all of them, None if that is not possible."""
    with open_container(ref) as container:
        stream = _stream(container, ref)
        try:
            return count_frames(container, stream)
        except Unnumbered:
            return None


def _stream(container: Any, ref: MediaRef) -> Any:
    stream = first_stream(container, "video", ref)
    # Several processes load videos at a time. More threads in each would decode frames ahead that seeking discards:
    # twice as many with 16 threads, for 64 frames of ten minutes with a keyframe every two seconds.
    stream.codec_context.thread_count = 1
    return stream


def _declared_frames(container: Any, stream: Any) -> int | None:
    """Return the number of frames by the table of contents, None if there is none or it contradicts the header.

    Frames that an edit list hides are in the table but not counted.
    """
    count, rate = int(stream.frames or 0), float(stream.average_rate or 0)
    if not is_indexed(container) or not count or len(index_of(stream)) not in (0, count):
        return None
    if not stream.duration or not rate:
        return None
    expected = float(stream.duration * stream.time_base) * rate
    is_plausible = abs(count - expected) <= max(2.0, 0.05 * expected)
    return count - num_hidden(container, stream) if is_plausible else None
