"""Videos: measured from the container's header where it can be trusted, decoded for training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import av
import numpy as np
import numpy.typing as npt
from av.video.reformatter import VideoReformatter

from packtool.media.container import check_end, is_counted, is_indexed, open_container
from packtool.media.load import ANY, load_image, media_error, unlike_the_export
from packtool.media.measure import measure_image
from packtool.media.opening import MediaProblem, label
from packtool.media.seeking import Unnumbered, all_frames, count_frames, needed_frames
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
    with open_container(ref) as container:
        stream = _stream(container, ref)
        rate = float(stream.average_rate or 0)
        num_frames = _declared_frames(container, stream)
        first = next(container.decode(stream), None)
        if first is None:
            raise MediaProblem("media_unreadable", f"{label(ref)}: no frame can be decoded")
        if num_frames is not None:
            check_end(container, stream, ref)
        else:
            num_frames = _counted_frames(ref) or 1 + sum(1 for _ in container.decode(stream))
        seconds = float(stream.duration * stream.time_base) if stream.duration and stream.time_base else 0.0
        rate = rate or (num_frames / seconds if seconds else _FALLBACK_RATE)
        height, width = first.height, first.width
        if first.rotation % 180:
            height, width = width, height
        return VideoSize(height, width, num_frames, rate, has_sound=bool(container.streams.audio))


def load_video(
    path: str | None,
    data: bytes | None,
    frames: Sequence[tuple[str | None, bytes | None]],
    indices: Sequence[int],
    rights: MediaRights = ANY,
) -> npt.NDArray[np.uint8]:
    """The frames that a training step sees, uint8 (T, H, W, 3), turned as they are shown.

    Args:
        path, data, frames: where the video lies, as in ``EncodedVideo``.
        indices: numbers of the frames, ascending.

    Raises:
        MediaError: if the file is gone, cannot be decoded, or has fewer frames, naming it.
    """
    if frames:
        return np.stack([np.asarray(load_image(*frames[i], rights)) for i in indices])
    ref = MediaRef(path, data, rights=rights)
    numbers = sorted(set(indices))
    try:
        found, missing = _decoded(ref, numbers, needed_frames) or _decoded(ref, numbers, all_frames) or (None, numbers)
    except MediaProblem as problem:
        raise media_error(problem) from problem
    if found is None or missing:
        raise unlike_the_export(ref, f"a frame {numbers[-1]}", f"no frame {missing[-1]}")
    return found if len(numbers) == len(indices) else found[np.searchsorted(numbers, indices)]


def _decoded(
    ref: MediaRef, numbers: Sequence[int], way: Callable[..., Iterator[tuple[int, Any]]]
) -> tuple[npt.NDArray[np.uint8] | None, list[int]] | None:
    """Frames by their numbers, found in one of the ways of ``seeking``, and the numbers that are not there.

    Returns:
        None if the way does not number them; no frames if none is there.
    """
    found: npt.NDArray[np.uint8] | None = None
    missing, places = set(numbers), {number: place for place, number in enumerate(numbers)}
    # One for all frames: to set it up takes longer than to convert a frame.
    converter = VideoReformatter()
    with open_container(ref) as container:
        stream = _stream(container, ref)
        try:
            for number, frame in way(container, stream, numbers):
                picture = converter.reformat(frame, format="rgb24", **_BY_ONE_THREAD).to_ndarray()
                if frame.rotation:
                    picture = np.rot90(picture, round(frame.rotation / 90))
                if found is None:
                    found = np.empty((len(numbers), *picture.shape), np.uint8)
                if found.shape[1:] != picture.shape:
                    detail = f"frame {number} has another size than those before it"
                    raise MediaProblem("media_size", f"{label(ref)}: {detail}")
                found[places[number]] = picture
                missing.remove(number)
        except Unnumbered:
            return None
    return found, sorted(missing)


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
    """Number of frames by the header, None if it says nothing or nothing that can be true."""
    count, rate = int(stream.frames or 0), float(stream.average_rate or 0)
    if not count or not is_indexed(container) or not is_counted(container, stream):
        return None
    if not stream.duration or not rate:
        return None
    expected = float(stream.duration * stream.time_base) * rate
    return count if abs(count - expected) <= max(2.0, 0.05 * expected) else None
