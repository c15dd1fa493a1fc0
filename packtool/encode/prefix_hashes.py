"""Hashes of the prefixes of samples, by which samples with equal prefixes are found without comparing them.

Prefixes end where samples may begin to differ: after each medium, with the token that closes it, where each turn of
the assistant begins and ends, and after a long system prompt with its tools. Two samples have the same hash where they
have the same tokens and media so far; media are the same if they hold the same, wherever they lie
(``media.files``), and were measured alike.
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

from packtool.constants import IGNORE_INDEX, MIN_PROMPT
from packtool.encode.encoded import EncodedAudio, EncodedSample, EncodedVideo, IntArray, files_of, patch_squares
from packtool.encode.families.record import Medium
from packtool.encode.media_spans import MediaTokens, MediumSpan, media_spans
from packtool.media.files import content_name

_BYTES = 8
# Older caches hashed the channel first; rows without one, which began so, still share prefixes with new ones.
_BEGINNING = b"None"


class PrefixHashes(NamedTuple):
    """Prefixes of samples, sample by sample, shorter prefixes first; arrays of M numbers.

    Args:
        lengths: int32, tokens of each.
        hashes: uint64.
        media_tokens: int32, pads of its media.
        audio_tokens: int32, those of sounds and of videos' sound tracks among them.
        patch_squares: int64, sum over the frames of its pictures and videos of (patches of the frame)^2.
        target_tokens: int32, labels that carry loss; -1 in caches without this number.
    """

    lengths: IntArray
    hashes: npt.NDArray[np.uint64]
    media_tokens: IntArray
    audio_tokens: IntArray
    patch_squares: npt.NDArray[np.int64]
    target_tokens: IntArray


MediumKey = Callable[[str | None, bytes | None], tuple[str | None, str | None]]
"""Returns what is hashed in place of a medium's path and bytes."""


def by_content(path: str | None, data: bytes | None) -> tuple[str | None, str | None]:
    """Media are the same if they hold the same bytes."""
    return None, content_name(path, data)


def by_address(path: str | None, data: bytes | None) -> tuple[str | None, str | None]:
    """Media are the same if they lie in the same place: the hashes of older caches."""
    return path, None if data is None else hashlib.sha256(data).hexdigest()


def prefix_hashes(
    samples: Sequence[EncodedSample], tokens: MediaTokens, *, longer_than: int = 0, medium_key: MediumKey = by_content
) -> tuple[npt.NDArray[np.int64], PrefixHashes]:
    """Hash the prefixes of S samples: BLAKE2b of 64 bits over tokens and media.

    Args:
        tokens: by which their media are found; a sample with media of other kinds has no prefixes, for their places
            are unknown.
        longer_than: prefixes of at most so many tokens are left out.
        medium_key: decides which media are the same.

    Returns:
        int64 (S,), number of prefixes of each sample; and the prefixes of all.
    """
    counts, rows = [], list[tuple[int, bytes, int, int, int, int]]()
    for sample in samples:
        num_before = len(rows)
        media = media_spans(sample, tokens)
        if len(media) < len(sample.media):
            media, sample = [], dataclasses.replace(sample, turns=sample.turns[:0], borders=None)
        num_targets = np.cumsum(sample.labels != IGNORE_INDEX)
        pads = sound_pads = squares = 0
        ends = _prefix_ends(sample, media, _prompt_ends(sample))
        for end, new_media, digest in _digests(sample, media, ends, medium_key, _BEGINNING):
            for medium in new_media:
                own_pads, own_sound_pads, own_squares = _work_of(medium)
                pads, sound_pads, squares = pads + own_pads, sound_pads + own_sound_pads, squares + own_squares
            if end > longer_than:
                rows.append((end, digest, pads, sound_pads, squares, int(num_targets[end - 1])))
        counts.append(len(rows) - num_before)
    lengths, digests, *sums = zip(*rows, strict=True) if rows else ((),) * len(PrefixHashes._fields)
    media_tokens, audio_tokens, target_tokens = (np.array(sums[i], np.int32) for i in (0, 1, 3))
    return np.array(counts, np.int64), PrefixHashes(
        lengths=np.array(lengths, np.int32),
        hashes=np.frombuffer(b"".join(digests), "<u8").astype(np.uint64),
        media_tokens=media_tokens,
        audio_tokens=audio_tokens,
        patch_squares=np.array(sums[2], np.int64),
        target_tokens=target_tokens,
    )


def changed_files(sample: EncodedSample, tokens: MediaTokens, hashes: Mapping[int, int]) -> list[str]:
    """Return files of media, at least one of which has changed since a sample's prefixes were hashed.

    Compares the size of a file and four pieces of it (``content_name``); not files on other machines, nor files that
    cannot be read, nor those of samples without a prefix after their media.

    Args:
        hashes: of the sample's prefixes, by their lengths.
    """
    media = media_spans(sample, tokens)
    if len(media) < len(sample.media):
        return []
    changed: list[Medium] | None = None
    # Older caches began with the channel, named media by their addresses, or knew no ends of system prompts.
    beginnings, prompt_ends = (_BEGINNING, repr(sample.channel).encode()), (_prompt_ends(sample), set[int]())
    for medium_key, beginning, ends_before in product((by_content, by_address), beginnings, prompt_ends):
        unproven: list[Medium] = []
        ends = sorted({*hashes, *_prefix_ends(sample, media, ends_before)})
        for end, new_media, digest in _digests(sample, media, ends, medium_key, beginning):
            unproven += new_media
            if end in hashes:
                if int.from_bytes(digest, "little") != hashes[end]:
                    break
                unproven = []
        else:
            return []
        changed = unproven if changed is None else changed
    paths = dict.fromkeys(path for medium in changed or () for path, data in files_of(medium) if path and data is None)
    return [path for path in paths if content_name(path, None) != f"at {path}"]


def _prefix_ends(sample: EncodedSample, media: Sequence[MediumSpan], prompt_ends: set[int]) -> list[int]:
    """Return where the prefixes of a sample end, ascending; ``prompt_ends`` from ``_prompt_ends``."""
    inside = {end for span in media for end in range(span.start + 1, span.stop + 1)}
    turns = {*sample.turns.tolist(), *(() if sample.borders is None else sample.borders.tolist())}
    ends = {span.stop + 1 for span in media} | ((turns | prompt_ends) - inside)
    return sorted(end for end in ends if 0 < end <= sample.length)


def _prompt_ends(sample: EncodedSample) -> set[int]:
    """Return where turns before the assistant's first end, such as a system prompt with its tools, but for short ones.

    They are known by the token that ends the assistant's turns, so they are found where a template ends all turns
    alike. The last of them is the question that the assistant answers, and ends where the answer begins.
    """
    if not len(sample.turns):
        return set()
    start, stop = sample.turns[:2].tolist()
    is_end = sample.input_ids[:stop] == sample.input_ids[stop - 1]
    if is_end[start : stop - 1].any():
        return set()  # a truncated turn ends with any token
    ends = np.flatnonzero(is_end[:start]) + 1
    return {end for end in ends[:-1].tolist() if end >= MIN_PROMPT}


def _digests(
    sample: EncodedSample, media: Sequence[MediumSpan], ends: Sequence[int], medium_key: MediumKey, beginning: bytes
) -> Iterator[tuple[int, list[Medium], bytes]]:
    """Yield (length, media since the previous prefix, digest) of a sample's prefixes.

    Args:
        media: of the sample, in order.
        ends: lengths of the prefixes in tokens, ascending.
        beginning: hashed first.
    """
    state, start, remaining = hashlib.blake2b(beginning, digest_size=_BYTES), 0, deque(media)
    ids = np.ascontiguousarray(sample.input_ids, "<i4")
    for end in ends:
        new_media = []
        while remaining and remaining[0].stop <= end:
            span = remaining.popleft()
            state.update(_identity(span, medium_key))
            new_media.append(span.medium)
        state.update(ids[start:end].data)
        start = end
        yield end, new_media, state.digest()


def _work_of(medium: Medium) -> tuple[int, int, int]:
    """Return the pads of a medium, those of sound among them, and the squares of its patches."""
    if isinstance(medium, EncodedAudio):
        return medium.num_tokens, medium.num_tokens, 0
    track = medium.audio.num_tokens if isinstance(medium, EncodedVideo) and medium.audio is not None else 0
    return medium.num_tokens + track, track, patch_squares(medium.grid)


def _identity(span: MediumSpan, medium_key: MediumKey) -> bytes:
    """Return the bytes hashed for a medium and its place; they begin with their own length."""
    medium = span.medium
    path, data = medium_key(medium.path, medium.data)
    changes: dict[str, Any] = {"path": path, "data": data}
    if isinstance(medium, EncodedVideo):
        changes["frames"] = tuple(medium_key(*frame) for frame in medium.frames)
    identity = repr((span.start, span.stop, dataclasses.replace(medium, **changes))).encode()
    return len(identity).to_bytes(_BYTES, "little") + identity
