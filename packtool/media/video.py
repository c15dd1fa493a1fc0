"""Videos: measured from the container's header where it can be trusted, decoded for training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.media.container import check_end, is_counted, is_indexed, open_container
from packtool.media.load import ANY, load_image, media_error, unlike_the_export
from packtool.media.measure import measure_image
from packtool.media.opening import MediaProblem, label
from packtool.media.seeking import Unnumbered, all_frames, needed_frames
from packtool.rows.rights import MediaRights
from packtool.rows.sample import MediaRef

FRAMES_A_SECOND = 2.0
"""Frames a second of a video that is given as pictures, when nothing says otherwise (as Qwen's tools have it)."""

_FALLBACK_RATE = 24.0

Pictures = dict[int, npt.NDArray[np.uint8]]


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
            num_frames = 1 + sum(1 for _ in container.decode(stream))
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
        found = _decoded(ref, numbers, needed_frames)
        if found is None:
            found = _decoded(ref, numbers, all_frames) or {}
    except MediaProblem as problem:
        raise media_error(problem) from problem
    if len(found) < len(numbers):
        raise unlike_the_export(ref, f"a frame {numbers[-1]}", f"no frame {max(set(numbers) - found.keys())}")
    return np.stack([found[i] for i in indices])


def _decoded(ref: MediaRef, numbers: Sequence[int], way: Callable[..., Iterator[tuple[int, Any]]]) -> Pictures | None:
    """Frames by their numbers, found in one of the ways of ``seeking``; None if it does not number them."""
    found: Pictures = {}
    with open_container(ref) as container:
        stream = _stream(container, ref)
        stream.thread_type = "AUTO"
        try:
            for number, frame in way(container, stream, numbers):
                picture: npt.NDArray[np.uint8] = frame.to_ndarray(format="rgb24")
                found[number] = np.rot90(picture, round(frame.rotation / 90)) if frame.rotation else picture
        except Unnumbered:
            return None
    return found


def _stream(container: Any, ref: MediaRef) -> Any:
    if not container.streams.video:
        raise MediaProblem("media_unreadable", f"{label(ref)}: the file has no video stream")
    return container.streams.video[0]


def _declared_frames(container: Any, stream: Any) -> int | None:
    """Number of frames by the header, None if it says nothing or nothing that can be true."""
    count, rate = int(stream.frames or 0), float(stream.average_rate or 0)
    if not count or not is_indexed(container) or not is_counted(container, stream):
        return None
    if not stream.duration or not rate:
        return None
    expected = float(stream.duration * stream.time_base) * rate
    return count if abs(count - expected) <= max(2.0, 0.05 * expected) else None
