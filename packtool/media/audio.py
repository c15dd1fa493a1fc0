"""Sounds: measured from the container's header where it can be trusted, decoded for training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import av
import numpy as np
import numpy.typing as npt

from packtool import storage
from packtool.errors import MediaError
from packtool.media.opening import MediaProblem, label, open_medium
from packtool.rows.sample import MediaRef

# Streams without a table of contents: their duration is guessed from the bit rate.
_GUESSED_FORMATS = ("mp3", "aac", "ac3", "amr", "adts", "loas", "mpegts")
_TOLERANCE_SECONDS = 0.25
"""What a header may be off by, an encoder's delay and padding: the sound is cut or padded to what was measured."""


def measure_audio(ref: MediaRef, sampling_rate: int) -> int:
    """Samples of the first audio stream at a sampling rate.

    Raises:
        MediaProblem: if it is missing, holds no sound, or cannot be decoded.
    """
    with _container(ref) as container:
        stream = _stream(container, ref)
        declared = _declared_seconds(container, stream)
        if declared is not None:
            if next(container.decode(stream), None) is None:
                raise MediaProblem("media_unreadable", f"{label(ref)}: no sound can be decoded")
            return round(declared * sampling_rate)
        count = sum(part.shape[0] for part in _decoded(container, stream, sampling_rate))
    if not count:
        raise MediaProblem("media_unreadable", f"{label(ref)}: no sound can be decoded")
    return count


def load_audio(
    path: str | None, data: bytes | None, sampling_rate: int, num_samples: int | None = None
) -> npt.NDArray[np.float32]:
    """The first audio stream as mono, float32 (num_samples,) from -1 to 1.

    Args:
        num_samples: as measured; the sound is cut or padded by a quarter of a second at most. None takes what comes.

    Raises:
        MediaError: if the file is gone, cannot be decoded, or is not as long as it was, naming it.
    """
    ref = MediaRef(path, data)
    try:
        with _container(ref) as container:
            parts = list(_decoded(container, _stream(container, ref), sampling_rate))
    except MediaProblem as problem:
        raise MediaError(
            f"{problem.detail} ({problem.reason})",
            "The file was readable when the cache was made: restore it, or export again.",
        ) from problem
    sound = np.concatenate(parts) if parts else np.zeros(0, np.float32)
    if num_samples is None:
        return sound
    if abs(len(sound) - num_samples) > _TOLERANCE_SECONDS * sampling_rate:
        raise MediaError(
            f"{label(ref)} has changed since the export: it had {num_samples / sampling_rate:.2f} s of sound, "
            f"now it has {len(sound) / sampling_rate:.2f} s",
            "Put the file back, or run packtool export again with --overwrite.",
        )
    return np.pad(sound[:num_samples], (0, max(num_samples - len(sound), 0)))


@contextlib.contextmanager
def _container(ref: MediaRef) -> Iterator[Any]:
    with open_medium(ref, storage.ROWS_BLOCK) as file:
        try:
            with av.open(file) as container:
                yield container
        except av.error.FFmpegError as error:
            raise MediaProblem("media_unreadable", f"{label(ref)}: {error.strerror or error}") from error


def _stream(container: Any, ref: MediaRef) -> Any:
    if not container.streams.audio:
        raise MediaProblem("media_unreadable", f"{label(ref)}: the file has no audio stream")
    return container.streams.audio[0]


def _declared_seconds(container: Any, stream: Any) -> float | None:
    """Duration by the header, None if it is a guess."""
    if any(name in container.format.name.split(",") for name in _GUESSED_FORMATS):
        return None
    if not stream.duration or not stream.time_base:
        return None
    return float(stream.duration * stream.time_base)


def _decoded(container: Any, stream: Any, sampling_rate: int) -> Iterator[npt.NDArray[np.float32]]:
    resampler = av.AudioResampler(format="flt", layout="mono", rate=sampling_rate)
    for frame in container.decode(stream):
        for part in resampler.resample(frame):
            yield part.to_ndarray().reshape(-1).astype(np.float32, copy=False)
    for part in resampler.resample(None):
        yield part.to_ndarray().reshape(-1).astype(np.float32, copy=False)
