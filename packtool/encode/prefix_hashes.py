"""Hashes of what a sample begins with, by which samples that begin alike are found without comparing them.

A prefix is told where others may begin to differ: behind each medium, with the token that closes it, and where each
turn of the assistant begins and ends. Two samples have the same hash where they have the same tokens and media so far,
and the same channel; media are the same if they are the same file, or the same bytes, and were measured alike.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from packtool.encode.encoded import EncodedAudio, EncodedImage, EncodedSample, EncodedVideo, IntArray, patch_squares
from packtool.encode.placed_media import MediaTokens, PlacedMedium, placed_media

_BYTES = 8


class PrefixHashes(NamedTuple):
    """Some prefixes of samples, one sample's after the other's, its shorter ones first; arrays of M numbers.

    Args:
        lengths: int32, tokens of each.
        hashes: uint64.
        media_tokens: int32, pads of its media.
        audio_tokens: int32, those of sounds and of videos' sound tracks among them.
        patch_squares: int64, sum over the frames of its pictures and videos of (patches of the frame)^2.
    """

    lengths: IntArray
    hashes: npt.NDArray[np.uint64]
    media_tokens: IntArray
    audio_tokens: IntArray
    patch_squares: npt.NDArray[np.int64]


def prefix_hashes(
    samples: Sequence[EncodedSample], tokens: MediaTokens, *, longer_than: int = 0
) -> tuple[npt.NDArray[np.int64], PrefixHashes]:
    """Hash the prefixes of S samples: BLAKE2b of 64 bits over tokens, media and channel.

    Args:
        tokens: by which their media are found; a sample with others has no prefixes, for nobody knows where these lie.
        longer_than: tokens of prefixes that are too short to be told.

    Returns:
        How many each sample has, int64 (S,), and those of all.
    """
    found = [_prefixes(sample, tokens, longer_than) for sample in samples]
    together = [prefix for of_sample in found for prefix in of_sample]
    lengths, digests, *others = zip(*together, strict=True) if together else ((), (), (), (), ())
    hashes = np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)
    media_tokens, audio_tokens = (np.array(column, np.int32) for column in others[:2])
    return np.array([len(of_sample) for of_sample in found], np.int64), PrefixHashes(
        np.array(lengths, np.int32), hashes, media_tokens, audio_tokens, np.array(others[2], np.int64)
    )


def _prefixes(sample: EncodedSample, tokens: MediaTokens, longer_than: int) -> list[tuple[int, bytes, int, int, int]]:
    """Tokens, digest, pads, pads of sound and squares of patches of each prefix of a sample."""
    media = placed_media(sample, tokens)
    if len(media) < len(sample.images) + len(sample.videos) + len(sample.audios):
        media, sample = [], dataclasses.replace(sample, turns=sample.turns[:0])
    inside = {end for placed in media for end in range(placed.start + 1, placed.stop + 1)}
    ends = {placed.stop + 1 for placed in media} | (set(sample.turns.tolist()) - inside)
    found: list[tuple[int, bytes, int, int, int]] = []
    sums = 0, 0, 0
    state, told = hashlib.blake2b(repr(sample.channel).encode(), digest_size=_BYTES), 0
    ids = np.ascontiguousarray(sample.input_ids, "<i4")
    for end in sorted(end for end in ends if 0 < end <= sample.length):
        while media and media[0].stop <= end:
            placed = media.pop(0)
            state.update(_identity(placed))
            own = _figures(placed.medium)
            sums = sums[0] + own[0], sums[1] + own[1], sums[2] + own[2]
        state.update(ids[told:end].data)
        told = end
        if end > longer_than:
            found.append((end, state.digest(), *sums))  # of what came so far: more may follow
    return found


def _figures(medium: EncodedImage | EncodedVideo | EncodedAudio) -> tuple[int, int, int]:
    """Pads of a medium, those of sound among them, and the squares of its patches."""
    if isinstance(medium, EncodedAudio):
        return medium.num_tokens, medium.num_tokens, 0
    track = medium.audio.num_tokens if isinstance(medium, EncodedVideo) and medium.audio is not None else 0
    return medium.num_tokens + track, track, patch_squares(medium.grid)


def _identity(placed: PlacedMedium) -> bytes:
    """A medium and its place, with digests instead of the bytes of files; each begins with its own length."""
    medium = placed.medium
    changes: dict[str, object] = {"data": _digest(medium.data)}
    if isinstance(medium, EncodedVideo):
        changes["frames"] = tuple((path, _digest(data)) for path, data in medium.frames)
    told = repr((placed.start, placed.stop, dataclasses.replace(medium, **changes))).encode()  # type: ignore[arg-type]
    return len(told).to_bytes(_BYTES, "little") + told


def _digest(data: bytes | None) -> str | None:
    return None if data is None else hashlib.sha256(data).hexdigest()
