"""Hashes of what a sample begins with, by which samples that begin alike are found without comparing them.

A prefix is told where others may begin to differ: behind each medium, with the token that closes it, where each turn of
the assistant begins and ends, and behind a long system prompt with its tools. Two samples have the same hash where they
have the same tokens and media so far; media are the same if they hold the same, wherever they lie
(``media.content``), and were measured alike.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from packtool.constants import IGNORE_INDEX, LEAST_PROMPT
from packtool.encode.encoded import (
    EncodedAudio,
    EncodedImage,
    EncodedSample,
    EncodedVideo,
    IntArray,
    files_of,
    patch_squares,
)
from packtool.encode.media_spans import MediaTokens, PlacedMedium, placed_media
from packtool.media.content import content_name

_BYTES = 8
# Older caches hashed the channel first: their rows without one, which began so, go on sharing with new ones.
_BEGINNING = b"None"


class PrefixHashes(NamedTuple):
    """Some prefixes of samples, one sample's after the other's, its shorter ones first; arrays of M numbers.

    Args:
        lengths: int32, tokens of each.
        hashes: uint64.
        media_tokens: int32, pads of its media.
        audio_tokens: int32, those of sounds and of videos' sound tracks among them.
        patch_squares: int64, sum over the frames of its pictures and videos of (patches of the frame)^2.
        target_tokens: int32, labels that carry loss; -1 in caches that do not tell.
    """

    lengths: IntArray
    hashes: npt.NDArray[np.uint64]
    media_tokens: IntArray
    audio_tokens: IntArray
    patch_squares: npt.NDArray[np.int64]
    target_tokens: IntArray


MediumTold = Callable[[str | None, bytes | None], tuple[str | None, str | None]]
"""What stands for the path and the bytes of a medium in a hash."""


def by_content(path: str | None, data: bytes | None) -> tuple[str | None, str | None]:
    """Media are the same if they hold the same bytes."""
    return None, content_name(path, data)


def by_address(path: str | None, data: bytes | None) -> tuple[str | None, str | None]:
    """Media are the same if they lie in the same place: the hashes of older caches."""
    return path, None if data is None else hashlib.sha256(data).hexdigest()


def prefix_hashes(
    samples: Sequence[EncodedSample], tokens: MediaTokens, *, longer_than: int = 0, told: MediumTold = by_content
) -> tuple[npt.NDArray[np.int64], PrefixHashes]:
    """Hash the prefixes of S samples: BLAKE2b of 64 bits over tokens and media.

    Args:
        tokens: by which their media are found; a sample with others has no prefixes, for nobody knows where these lie.
        longer_than: tokens of prefixes that are too short to be told.
        told: which media are the same.

    Returns:
        How many each sample has, int64 (S,), and those of all.
    """
    found = [_prefixes(sample, tokens, longer_than, told) for sample in samples]
    together = [prefix for of_sample in found for prefix in of_sample]
    lengths, digests, *others = zip(*together, strict=True) if together else ((),) * len(PrefixHashes._fields)
    hashes = np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)
    media_tokens, audio_tokens, target_tokens = (np.array(others[i], np.int32) for i in (0, 1, 3))
    squares = np.array(others[2], np.int64)
    prefixes = PrefixHashes(np.array(lengths, np.int32), hashes, media_tokens, audio_tokens, squares, target_tokens)
    return np.array([len(of_sample) for of_sample in found], np.int64), prefixes


_Medium = EncodedImage | EncodedVideo | EncodedAudio
_Prefix = tuple[int, bytes, int, int, int, int]


def _prefixes(sample: EncodedSample, tokens: MediaTokens, longer_than: int, told: MediumTold) -> list[_Prefix]:
    """Tokens, digest, pads, pads of sound, squares of patches and targets of each prefix of a sample."""
    media = placed_media(sample, tokens)
    if len(media) < len(sample.images) + len(sample.videos) + len(sample.audios):
        media, sample = [], dataclasses.replace(sample, turns=sample.turns[:0], borders=None)
    found: list[_Prefix] = []
    targets = np.cumsum(sample.labels != IGNORE_INDEX)
    sums = 0, 0, 0
    ends = _ends(sample, media, _ends_before(sample))
    for end, passed, digest in _digests(sample, media, ends, told, _BEGINNING):
        for own in map(_figures, passed):
            sums = sums[0] + own[0], sums[1] + own[1], sums[2] + own[2]
        if end > longer_than:
            found.append((end, digest, *sums, int(targets[end - 1])))
    return found


def _ends(sample: EncodedSample, media: Sequence[PlacedMedium], ends_before: set[int]) -> list[int]:
    """Where prefixes of a sample end, ascending; ``ends_before`` as the function of that name gives them."""
    inside = {end for placed in media for end in range(placed.start + 1, placed.stop + 1)}
    turns = {*sample.turns.tolist(), *(() if sample.borders is None else sample.borders.tolist())}
    ends = {placed.stop + 1 for placed in media} | ((turns | ends_before) - inside)
    return sorted(end for end in ends if 0 < end <= sample.length)


def changed_files(sample: EncodedSample, tokens: MediaTokens, hashes: Mapping[int, int]) -> list[str]:
    """Files of media, at least one of which holds other bytes than when a sample's prefixes were hashed.

    Compared are the size of a file and four pieces of it (``content_name``). Files on other machines are not, nor files
    that cannot be read, nor those of samples that have no prefix behind their media.

    Args:
        hashes: of the sample's prefixes, by their lengths.
    """
    media = placed_media(sample, tokens)
    if len(media) < len(sample.images) + len(sample.videos) + len(sample.audios):
        return []
    changed: list[_Medium] | None = None
    # Older caches began with the channel, named media by their addresses, or knew no ends of system prompts.
    beginnings, ends_before = (_BEGINNING, repr(sample.channel).encode()), (_ends_before(sample), set[int]())
    for told, beginning, before in product((by_content, by_address), beginnings, ends_before):
        unproven: list[_Medium] = []
        ends = sorted({*hashes, *_ends(sample, media, before)})
        for end, passed, digest in _digests(sample, media, ends, told, beginning):
            unproven += passed
            if end in hashes:
                if int.from_bytes(digest, "little") != hashes[end]:
                    break
                unproven = []
        else:
            return []
        changed = unproven if changed is None else changed
    paths = dict.fromkeys(path for medium in changed or () for path, data in files_of(medium) if path and data is None)
    return [path for path in paths if content_name(path, None) != f"at {path}"]


def _digests(
    sample: EncodedSample, media: Sequence[PlacedMedium], ends: Sequence[int], told: MediumTold, beginning: bytes
) -> Iterator[tuple[int, list[_Medium], bytes]]:
    """(length, media since the one before, digest) of a sample's prefixes.

    Args:
        media: of the sample, in order.
        ends: lengths of the prefixes in tokens, ascending.
        beginning: what is hashed first.
    """
    state, start, coming = hashlib.blake2b(beginning, digest_size=_BYTES), 0, deque(media)
    ids = np.ascontiguousarray(sample.input_ids, "<i4")
    for end in ends:
        passed = []
        while coming and coming[0].stop <= end:
            placed = coming.popleft()
            state.update(_identity(placed, told))
            passed.append(placed.medium)
        state.update(ids[start:end].data)
        start = end
        yield end, passed, state.digest()


def _ends_before(sample: EncodedSample) -> set[int]:
    """Where turns end before the assistant's first, such as a system prompt with its tools; not those close to it.

    They are known by the token that ends the assistant's, so they are found where a template ends all turns alike. The
    last of them asks what the assistant answers, and ends where that begins.
    """
    if not len(sample.turns):
        return set()
    start, stop = sample.turns[:2].tolist()
    is_end = sample.input_ids[:stop] == sample.input_ids[stop - 1]
    if is_end[start : stop - 1].any():
        return set()  # a turn that truncation cut ends with any token
    ends = np.flatnonzero(is_end[:start]) + 1
    return {end for end in ends[:-1].tolist() if end >= LEAST_PROMPT}


def _figures(medium: EncodedImage | EncodedVideo | EncodedAudio) -> tuple[int, int, int]:
    """Pads of a medium, those of sound among them, and the squares of its patches."""
    if isinstance(medium, EncodedAudio):
        return medium.num_tokens, medium.num_tokens, 0
    track = medium.audio.num_tokens if isinstance(medium, EncodedVideo) and medium.audio is not None else 0
    return medium.num_tokens + track, track, patch_squares(medium.grid)


def _identity(placed: PlacedMedium, told: MediumTold) -> bytes:
    """A medium and its place; it begins with its own length."""
    medium = placed.medium
    path, data = told(medium.path, medium.data)
    changes: dict[str, Any] = {"path": path, "data": data}
    if isinstance(medium, EncodedVideo):
        changes["frames"] = tuple(told(*frame) for frame in medium.frames)
    found = repr((placed.start, placed.stop, dataclasses.replace(medium, **changes))).encode()
    return len(found).to_bytes(_BYTES, "little") + found
