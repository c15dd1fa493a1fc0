"""Sounds: measured from the container's header where it can be trusted, decoded for training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import av
import numpy as np
import numpy.typing as npt

from packtool.media.container import check_end, index_of, is_counted, num_hidden, open_container
from packtool.media.measure import ANY, media_error, unlike_the_export
from packtool.media.opening import MediaProblem, label
from packtool.rows.rights import MediaRights
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
    with open_container(ref, check_length=True) as container:
        stream = _stream(container, ref)
        declared = _declared_seconds(container, stream)
        if declared is not None:
            if next(container.decode(stream), None) is None:
                raise MediaProblem("media_unreadable", f"{label(ref)}: no sound can be decoded")
            check_end(container, stream, ref)
            return round(declared * sampling_rate)
        count = sum(part.shape[0] for part in _decoded(container, stream, sampling_rate))
    if not count:
        raise MediaProblem("media_unreadable", f"{label(ref)}: no sound can be decoded")
    return count


def load_audio(
    path: str | None,
    data: bytes | None,
    sampling_rate: int,
    num_samples: int | None = None,
    rights: MediaRights = ANY,
) -> npt.NDArray[np.float32]:
    """The first audio stream as mono, float32 (num_samples,) from -1 to 1.

    Args:
        num_samples: as measured; the sound is cut or padded by a quarter of a second at most. None takes what comes.

    Raises:
        MediaError: if the file is gone, cannot be decoded, or is not as long as it was, naming it.
    """
    ref = MediaRef(path, data, rights=rights)
    tolerance = int(_TOLERANCE_SECONDS * sampling_rate)
    most = None if num_samples is None else num_samples + tolerance
    parts, found = [], 0
    try:
        with open_container(ref) as container:
            for part in _decoded(container, _stream(container, ref), sampling_rate):
                parts.append(part)
                found += len(part)
                if most is not None and found > most:
                    break
    except MediaProblem as problem:
        raise media_error(problem) from problem
    sound = np.concatenate(parts) if parts else np.zeros(0, np.float32)
    if num_samples is None:
        return sound
    if abs(found - num_samples) > tolerance:
        more = "more" if found > num_samples else f"{found / sampling_rate:.2f} s"
        raise unlike_the_export(ref, f"{num_samples / sampling_rate:.2f} s of sound", more)
    return np.pad(sound[:num_samples], (0, max(num_samples - len(sound), 0)))


def _stream(container: Any, ref: MediaRef) -> Any:
    if not container.streams.audio:
        raise MediaProblem("media_unreadable", f"{label(ref)}: the file has no audio stream")
    return container.streams.audio[0]


def _declared_seconds(container: Any, stream: Any) -> float | None:
    """Duration by the header, None if it is a guess."""
    if any(name in container.format.name.split(",") for name in _GUESSED_FORMATS):
        return None
    if not stream.duration or not stream.time_base or not is_counted(container, stream):
        return None
    seconds = float(stream.duration * stream.time_base)
    hidden = seconds * num_hidden(container, stream) / max(len(index_of(stream)), 1)
    return seconds if hidden < _TOLERANCE_SECONDS / 2 else None  # an edit list begins later than an encoder's delay


def _decoded(container: Any, stream: Any, sampling_rate: int) -> Iterator[npt.NDArray[np.float32]]:
    resampler = av.AudioResampler(format="flt", layout="mono", rate=sampling_rate)
    for frame in container.decode(stream):
        for part in resampler.resample(frame):
            yield part.to_ndarray().reshape(-1).astype(np.float32, copy=False)
    for part in resampler.resample(None):
        yield part.to_ndarray().reshape(-1).astype(np.float32, copy=False)
