"""Sounds: measured by the container's header if it is reliable, decoded for training."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import av
import numpy as np
import numpy.typing as npt

from packtool.media.container import check_end, first_stream, index_of, is_indexed, num_hidden, open_container
from packtool.media.files import MediaProblem, label
from packtool.media.measure import ANY, changed_since_export, media_error
from packtool.rows.media_policy import MediaPolicy
from packtool.rows.sample import MediaRef

# Streams without a table of contents: FFmpeg estimates their duration from the bit rate.
_ESTIMATED_FORMATS = ("mp3", "aac", "ac3", "amr", "adts", "loas", "mpegts")
_TOLERANCE_SECONDS = 0.25
"""Allowed error of a header (an encoder's delay and padding); the sound is trimmed or padded to its measured length."""


def measure_audio(ref: MediaRef, sampling_rate: int) -> int:
    """Return the number of audio samples of the first audio stream at a sampling rate."""
    with open_container(ref, check_length=True) as container:
        stream = first_stream(container, "audio", ref)
        declared = _declared_seconds(container, stream)
        if declared is not None:
            if next(container.decode(stream), None) is None:
                raise MediaProblem("media_unreadable", f"{label(ref)}: no sound can be decoded")
            check_end(container, stream, ref)
            return round(declared * sampling_rate)
        num_samples = sum(len(chunk) for chunk in _decode_mono(container, stream, sampling_rate))
    if not num_samples:
        raise MediaProblem("media_unreadable", f"{label(ref)}: no sound can be decoded")
    return num_samples


def load_audio(
    path: str | None, data: bytes | None, sampling_rate: int, num_samples: int, policy: MediaPolicy = ANY
) -> npt.NDArray[np.float32]:
    """Return the first audio stream of a file as mono sound, float32 (num_samples,) from -1 to 1.

    ``num_samples`` is the length that was measured at the export, at ``sampling_rate`` samples per second. A difference
    of up to a quarter of a second is trimmed or padded. MediaError if it is larger, or if the file cannot be decoded.
    """
    ref = MediaRef(path, data, policy=policy)
    tolerance = int(_TOLERANCE_SECONDS * sampling_rate)
    max_samples = num_samples + tolerance
    try:
        sound = _decode_sound(ref, sampling_rate, max_samples)
    except MediaProblem as problem:
        raise media_error(problem) from problem
    num_decoded = len(sound)
    if abs(num_decoded - num_samples) > tolerance:
        before = f"{num_samples / sampling_rate:.2f} s of sound"
        now = f"{num_decoded / sampling_rate:.2f} s"
        if num_decoded > num_samples:  # decoding has stopped, so the length is unknown
            now = "more"
        raise changed_since_export(ref, before, now)
    num_missing = max(num_samples - num_decoded, 0)
    return np.pad(sound[:num_samples], (0, num_missing))


def _decode_sound(ref: MediaRef, sampling_rate: int, max_samples: int) -> npt.NDArray[np.float32]:
    """Return a sound as mono, float32 (samples,); decoding stops after more than ``max_samples``."""
    chunks = [np.zeros(0, np.float32)]  # so that a file without sound gives an empty array
    num_decoded = 0
    with open_container(ref) as container:
        stream = first_stream(container, "audio", ref)
        for chunk in _decode_mono(container, stream, sampling_rate):
            chunks.append(chunk)
            num_decoded += len(chunk)
            if num_decoded > max_samples:
                break
    return np.concatenate(chunks)


def _declared_seconds(container: Any, stream: Any) -> float | None:
    if any(name in container.format.name.split(",") for name in _ESTIMATED_FORMATS):
        return None
    num_packets = len(index_of(stream))
    is_incomplete = is_indexed(container) and 0 < num_packets < stream.frames
    if not stream.duration or not stream.time_base or is_incomplete:
        return None
    seconds = float(stream.duration * stream.time_base)
    hidden = seconds * num_hidden(container, stream) / max(num_packets, 1)
    return seconds if hidden < _TOLERANCE_SECONDS / 2 else None  # an edit list starts later than an encoder's delay


def _decode_mono(container: Any, stream: Any, sampling_rate: int) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the mono sound of a stream in chunks, float32 (samples,)."""
    resampler = av.AudioResampler(format="flt", layout="mono", rate=sampling_rate)
    for frame in chain(container.decode(stream), [None]):  # None flushes the resampler
        for chunk in resampler.resample(frame):
            yield chunk.to_ndarray().reshape(-1).astype(np.float32, copy=False)
