"""Videos: measured from the container's header where it can be trusted, decoded for training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import av
import numpy as np
import numpy.typing as npt
from av.video.reformatter import VideoReformatter

from packtool.media.container import check_end, index_of, is_indexed, num_hidden, open_container
from packtool.media.measure import ANY, load_image, measure_image, media_error, unlike_the_export
from packtool.media.opening import MediaProblem, label
from packtool.media.seeking import Unnumbered, all_frames, count_frames, decode_all, needed_frames
from packtool.rows.rights import MediaRights
from packtool.rows.sample import MediaRef

FRAMES_A_SECOND = 2.0
"""Frames a second of a video that is given as pictures, when nothing says otherwise (as Qwen's tools have it)."""

_FALLBACK_RATE = 24.0
# Colours are converted by as many threads as there are cores otherwise, since PyAV 17; before, always by one.
_BY_ONE_THREAD = {"threads": 1} if int(av.__version__.split(".")[0]) >= 17 else {}


@dataclass(frozen=True)
class VideoSize:
    """What a container says of its first video stream.

    Args:
        height, width: pixels of a frame as it is shown, after rotation.
        num_frames: frames in it.
        fps: frames a second, on average.
        has_sound: whether there is an audio stream.
    """

    height: int
    width: int
    num_frames: int
    fps: float
    has_sound: bool


def measure_video(ref: MediaRef) -> VideoSize:
    """Look at a video, at its header if that tells the number of frames, else by decoding it.

    The first video stream counts, as for transformers' decoders. Only mp4 and mov files are believed about the number
    of frames, and only if it agrees with their duration: matroska files declare none, avi files often a wrong one.

    Raises:
        MediaProblem: if it is missing, no video, or cannot be decoded.
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
    rights: MediaRights = ANY,
    shape: tuple[int, int, int] | None = None,
) -> npt.NDArray[np.uint8]:
    """The frames that a training step sees, uint8 (T, H, W, 3), turned as they are shown.

    Frames are sought first, and decoded from the beginning where that fails or misses one.

    Args:
        path, data, frames: where the video lies, as in ``EncodedVideo``.
        indices: numbers of the frames, ascending.
        shape: frames (those of the clip, where only that is meant), H and W as measured. Frames that have another size
            than the file's first one are scaled to that; without a shape, to the first one that is needed.

    Raises:
        MediaError: if the file is gone, cannot be decoded, or has fewer frames, naming it.
    """
    if frames:
        pictures = [np.asarray(load_image(*frames[i], rights)) for i in indices]
        for number, picture in zip(indices, pictures, strict=True):
            if picture.shape != pictures[0].shape:
                before, now = (f"{each.shape[1]}x{each.shape[0]} pixels" for each in (pictures[0], picture))
                raise unlike_the_export(MediaRef(*frames[number]), before, now)
        return np.stack(pictures)
    ref, numbers = MediaRef(path, data, rights=rights), sorted(set(indices))
    pixels, missing = None, numbers
    for way in (needed_frames, all_frames):
        try:
            pixels, missing = _decoded(ref, numbers, way, shape)
        except MediaProblem as problem:
            if way is all_frames or problem.reason != "media_unreadable":
                raise media_error(problem) from problem
        if pixels is not None and not missing:
            return pixels if len(numbers) == len(indices) else pixels[np.searchsorted(numbers, indices)]
    raise unlike_the_export(ref, f"a frame {numbers[-1]}", f"no frame {missing[-1]}")


def _decoded(
    ref: MediaRef,
    numbers: Sequence[int],
    way: Callable[..., Iterator[tuple[int, Any]]],
    shape: tuple[int, int, int] | None,
) -> tuple[npt.NDArray[np.uint8] | None, list[int]]:
    """Frames by their numbers, found in one of the ways of ``seeking``, and the numbers that are not there.

    Returns:
        no frames if none is there, or if the way does not number them.
    """
    pixels: npt.NDArray[np.uint8] | None = None
    missing, places = set(numbers), {number: place for place, number in enumerate(numbers)}
    # A clip has frames of its own number, and mostly begins later.
    num_frames, size = (None, None) if shape is None else (None if numbers[0] else shape[0], shape[1:])
    # One for all frames: to set it up takes longer than to convert a frame.
    converter = VideoReformatter()
    with open_container(ref) as container:
        stream = _stream(container, ref)
        try:
            for number, frame in way(container, stream, numbers, num_frames):
                if pixels is None:
                    size = _shown_size(frame) if size in (None, _shown_size(frame)) else _first_size(ref)
                    pixels = np.empty((len(numbers), *size, 3), np.uint8)
                pixels[places[number]] = _converted(frame, pixels.shape[1:3], converter)
                missing.remove(number)
        except Unnumbered:
            return None, list(numbers)
    return pixels, sorted(missing)


def _converted(frame: Any, size: tuple[int, ...], converter: VideoReformatter) -> npt.NDArray[np.uint8]:
    """A frame's colours, uint8 (H, W, 3) of this size, turned as it is shown."""
    turns = _quarter_turns(frame)
    height, width = size[::-1] if turns % 2 else size
    return np.rot90(converter.reformat(frame, width, height, "rgb24", **_BY_ONE_THREAD).to_ndarray(), turns)


def _quarter_turns(frame: Any) -> int:
    """Quarter turns, counterclockwise, that show a frame upright; other angles are rounded."""
    return round(frame.rotation / 90) % 4


def _shown_size(frame: Any) -> tuple[int, int]:
    """(H, W) of a frame as it is shown."""
    return (frame.width, frame.height) if _quarter_turns(frame) % 2 else (frame.height, frame.width)


def _first_size(ref: MediaRef) -> tuple[int, int]:
    with open_container(ref) as container:
        return _shown_size(next(container.decode(_stream(container, ref))))


def _counted_frames(ref: MediaRef) -> int | None:
    """Number of frames without decoding all of them, None if that does not tell."""
    with open_container(ref) as container:
        stream = _stream(container, ref)
        try:
            return count_frames(container, stream)
        except Unnumbered:
            return None


def _stream(container: Any, ref: MediaRef) -> Any:
    if not container.streams.video:
        raise MediaProblem("media_unreadable", f"{label(ref)}: the file has no video stream")
    stream = container.streams.video[0]
    # Videos are loaded by several processes at a time. More threads in each decode frames ahead, which seeking throws
    # away: of ten minutes of which 64 frames are taken, a keyframe every two seconds, 16 threads decode twice as much.
    stream.codec_context.thread_count = 1
    return stream


def _declared_frames(container: Any, stream: Any) -> int | None:
    """Number of frames by the table of contents, None if there is none or the header says otherwise.

    What an edit list leaves out is in the table, and not shown.
    """
    count, rate = int(stream.frames or 0), float(stream.average_rate or 0)
    if not is_indexed(container) or not count or len(index_of(stream)) not in (0, count):
        return None
    if not stream.duration or not rate:
        return None
    expected = float(stream.duration * stream.time_base) * rate
    is_plausible = abs(count - expected) <= max(2.0, 0.05 * expected)
    return count - num_hidden(container, stream) if is_plausible else None
