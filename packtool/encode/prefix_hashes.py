"""Hashes of the prefixes of samples, to find samples that share a prefix without comparing them.

Prefixes end where samples may diverge: after each medium and its closing token, where each turn of the assistant begins
and ends, and after a long system prompt with its tools. Two prefixes have the same hash if their tokens are equal, and
their media have equal content (``media.files``) and equal measures, in whatever files.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from packtool.constants import IGNORE_INDEX, MIN_PROMPT
from packtool.encode.encoded import EncodedAudio, EncodedSample, EncodedVideo, IntArray, files_of, patch_squares
from packtool.encode.families.record import Medium
from packtool.encode.media_spans import MediaTokens, MediumSpan, media_spans
from packtool.media.files import content_name

_HASH_BYTES = 8
# Older caches began a hash with the channel. Rows without a channel still share prefixes with new ones this way.
_HASH_SEED = b"None"


class PrefixHashes(NamedTuple):
    """M prefixes, in the order of their samples and by ascending length; each field is an array (M,).

    Args:
        lengths: int32, number of tokens.
        hashes: uint64.
        media_tokens: int32, number of placeholder tokens of media.
        audio_tokens: int32, those of sounds and of videos' sound tracks among them.
        patch_squares: int64, sum over the frames of pictures and videos of (patches of the frame)^2.
        target_tokens: int32, number of labels that are targets; -1 in caches without this number.
    """

    lengths: IntArray
    hashes: npt.NDArray[np.uint64]
    media_tokens: IntArray
    audio_tokens: IntArray
    patch_squares: npt.NDArray[np.int64]
    target_tokens: IntArray


_PrefixDigest = tuple[int, list[Medium], int]
"""Length of a prefix in tokens, the media that the previous prefix does not contain, and its hash."""

MediumKey = Callable[[str | None, bytes | None], tuple[str | None, str | None]]
"""Returns the two texts that are hashed instead of a medium's path and bytes."""


def by_content(path: str | None, data: bytes | None) -> tuple[str | None, str | None]:
    """Return the content's name: media are equal if their bytes are."""
    return None, content_name(path, data)


def by_address(path: str | None, data: bytes | None) -> tuple[str | None, str | None]:
    """Return path and hash of the bytes: media are equal if they are in the same file. For hashes of older caches."""
    return path, None if data is None else hashlib.sha256(data).hexdigest()


def prefix_hashes(
    samples: Sequence[EncodedSample], tokens: MediaTokens, *, longer_than: int = 0, medium_key: MediumKey = by_content
) -> tuple[npt.NDArray[np.int64], PrefixHashes]:
    """Hash the prefixes of S samples of more than ``longer_than`` tokens: BLAKE2b of 64 bits over tokens and media.

    Return int64 (S,), the number of prefixes of each sample, 0 if its media cannot be located; and all prefixes.
    """
    prefixes_by_sample = [_prefixes_of(sample, tokens, longer_than, medium_key) for sample in samples]
    counts = np.array([len(prefixes) for prefixes in prefixes_by_sample], np.int64)
    table = np.array(list(chain.from_iterable(prefixes_by_sample)), _PREFIX)
    columns = {name: np.ascontiguousarray(table[name]) for name in _PREFIX.names or ()}
    return counts, PrefixHashes(**columns, target_tokens=_count_targets(samples, counts, columns["lengths"]))


_Prefix = tuple[int, int, int, int, int]
_PREFIX = np.dtype(
    [
        ("lengths", np.int32),
        ("hashes", np.uint64),
        ("media_tokens", np.int32),
        ("audio_tokens", np.int32),
        ("patch_squares", np.int64),
    ]
)
"""The fields of a ``_Prefix``: those of ``PrefixHashes`` except its target tokens."""


def _prefixes_of(sample: EncodedSample, tokens: MediaTokens, longer_than: int, medium_key: MediumKey) -> list[_Prefix]:
    """Return the prefixes of a sample that other samples may share, by ascending length.

    Each prefix has its length, hash, tokens of all media, tokens of sounds, and sum of squared patch counts of pictures
    and videos. Returns [] if a medium cannot be located among the tokens.

    Args:
        longer_than: shorter prefixes and those of this length are left out, in tokens.
        medium_key: identifies a medium by its path and bytes.
    """
    if sample.length <= longer_than:
        return []
    spans = media_spans(sample, tokens)
    if len(spans) != len(sample.media):  # not all are located
        return []
    ends = _prefix_ends(sample, spans, _prompt_ends(sample))
    if not ends or ends[-1] <= longer_than:
        return []

    prefixes: list[_Prefix] = []
    # Of the media in the current prefix, which contains all shorter ones:
    num_visual_tokens = num_audio_tokens = num_patch_squares = 0
    for end, new_media, digest in _digests(sample, spans, ends, medium_key, _HASH_SEED):
        for medium in new_media:
            num_audio_tokens += _num_audio_tokens(medium)  # of a sound, or of a video's sound track
            if not isinstance(medium, EncodedAudio):
                num_visual_tokens += medium.num_tokens
                num_patch_squares += patch_squares(medium.grid)
        if end > longer_than:
            num_media_tokens = num_visual_tokens + num_audio_tokens
            # In the order of ``_PREFIX``:
            prefixes.append((end, digest, num_media_tokens, num_audio_tokens, num_patch_squares))
    return prefixes


def _count_targets(samples: Sequence[EncodedSample], counts: npt.NDArray[np.int64], lengths: IntArray) -> IntArray:
    """Return the number of targets in each of the M prefixes, int32 (M,); ``counts``: prefixes of each sample, (S,)."""
    labels = [sample.labels for sample in samples]
    bounds = np.cumsum([0, *map(len, labels)])  # of the samples, in their joined labels
    is_target = np.concatenate([np.array([IGNORE_INDEX], np.int32), *labels]) != IGNORE_INDEX
    num_before = np.cumsum(is_target, dtype=np.int32)  # targets before each position
    starts = np.repeat(bounds[:-1], counts)
    num_targets: IntArray = num_before[starts + lengths] - num_before[starts]
    return num_targets


def changed_files(sample: EncodedSample, tokens: MediaTokens, hashes: Mapping[int, int]) -> list[str]:
    """Return media files of which at least one has changed since a sample's prefixes were hashed; empty if none has.

    Compares the size and four pieces of each file (``content_name``). Files on other machines, files that cannot be
    read, and media after the last hashed prefix are not checked. ``hashes``: the hash of each prefix by its length.
    """
    media = media_spans(sample, tokens)
    if len(media) < len(sample.media):
        return []
    changed_by_form: list[list[Medium]] = []
    for medium_key, seed, prompt_ends in _hash_forms(sample):
        ends = sorted({*hashes.keys(), *_prefix_ends(sample, media, prompt_ends)})
        changed_media = _changed_media(_digests(sample, media, ends, medium_key, seed), hashes)
        if changed_media is None:
            return []
        changed_by_form.append(changed_media)
    return _readable_paths(changed_by_form[0])


def _readable_paths(media: Iterable[Medium]) -> list[str]:
    """Return the local files of media that can be read, each once."""
    files = [file for medium in media for file in files_of(medium)]
    paths = dict.fromkeys(path for path, data in files if path and data is None)
    # ``content_name`` names a file that cannot be read by its address, "at PATH".
    return [path for path in paths if content_name(path, None) != f"at {path}"]


def _hash_forms(sample: EncodedSample) -> Iterator[tuple[MediumKey, bytes, set[int]]]:
    """Yield today's form of hashes, then those of older caches: key of a medium, seed, and ends of prompts.

    Older caches identified media by address, began hashes with the channel, or had no prefixes of system prompts.
    """
    seeds = _HASH_SEED, repr(sample.channel).encode()
    return product((by_content, by_address), seeds, (_prompt_ends(sample), set()))


def _changed_media(digests: Iterable[_PrefixDigest], hashes: Mapping[int, int]) -> list[Medium] | None:
    """Return the media between the last prefix with an equal hash and the first with another; None if all are equal."""
    unconfirmed: list[Medium] = []
    for end, new_media, digest in digests:
        unconfirmed += new_media
        if end in hashes:
            if digest != hashes[end]:
                return unconfirmed
            unconfirmed = []
    return None


def _prefix_ends(sample: EncodedSample, media: Sequence[MediumSpan], prompt_ends: set[int]) -> list[int]:
    """Return the lengths of a sample's prefixes, ascending."""
    text_ends = {*sample.turns.tolist(), *prompt_ends}
    if sample.borders is not None:
        text_ends.update(sample.borders.tolist())
    inside_media = {end for span in media for end in range(span.start + 1, span.stop + 1)}
    media_ends = {span.stop + 1 for span in media}  # after the closing token
    return sorted(end for end in media_ends | (text_ends - inside_media) if 0 < end <= sample.length)


def _prompt_ends(sample: EncodedSample) -> set[int]:
    """Return the ends of the turns before the assistant's first, such as a system prompt; ends of short ones left out.

    These turns are found by the token that ends the assistant's turns, if the template ends all turns with it. The last
    of them, the question, is left out: its end is where the answer begins.
    """
    if not len(sample.turns):
        return set()
    start, stop = sample.turns[:2].tolist()
    if start <= MIN_PROMPT:
        return set()  # only a longer prompt has a turn of ``MIN_PROMPT`` tokens before the question
    is_end = sample.input_ids[:stop] == sample.input_ids[stop - 1]
    if is_end[start : stop - 1].any():
        return set()  # the turn was truncated, so its last token is not the one that ends turns
    ends = np.flatnonzero(is_end[:start]) + 1
    return {end for end in ends[:-1].tolist() if end >= MIN_PROMPT}


def _digests(
    sample: EncodedSample, media: Sequence[MediumSpan], ends: Sequence[int], medium_key: MediumKey, seed: bytes
) -> Iterator[_PrefixDigest]:
    """Yield the prefixes that end at ``ends``, ascending; each adds its new media and token ids to the running hash."""
    state = hashlib.blake2b(seed, digest_size=_HASH_BYTES)
    start = 0
    remaining = deque(media)
    ids = np.ascontiguousarray(sample.input_ids, "<i4")
    for end in ends:
        new_media = []
        while remaining and remaining[0].stop <= end:  # media that end within this prefix
            span = remaining.popleft()
            state.update(medium_identity(span, medium_key))
            new_media.append(span.medium)
        state.update(ids[start:end].data)
        start = end
        yield end, new_media, int.from_bytes(state.digest(), "little")


def _num_audio_tokens(medium: Medium) -> int:
    """Return the tokens of a sound or a video's sound track; 0 for other media."""
    sound = medium.audio if isinstance(medium, EncodedVideo) else medium
    return sound.num_tokens if isinstance(sound, EncodedAudio) else 0


def medium_identity(span: MediumSpan, medium_key: MediumKey) -> bytes:
    """Return the bytes that are hashed for a medium, with its position; they begin with their own length."""
    medium = span.medium
    path, data = medium_key(medium.path, medium.data)
    changes: dict[str, Any] = {"path": path, "data": data}
    if isinstance(medium, EncodedVideo):
        changes["frames"] = tuple(medium_key(*frame) for frame in medium.frames)
    identity = repr((span.start, span.stop, dataclasses.replace(medium, **changes))).encode()
    return len(identity).to_bytes(_HASH_BYTES, "little") + identity
