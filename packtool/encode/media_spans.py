"""Media among the tokens of a sample: their tokens are inserted before tokenization, and located afterwards.

Text that belongs to a medium (a video's ``<1.5 seconds>``) is tokenized together with the text around it, as the
model's own processor does. A token that has characters of both belongs to the medium.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from packtool.encode.encoded import EncodedAudio, EncodedImage, EncodedSample, EncodedVideo, IntArray
from packtool.encode.families import family_of, thinker_of
from packtool.encode.families.record import MediaSegment, Medium, TokenRun
from packtool.encode.tokenize import Chunk
from packtool.rows.sample import MediaKind, Sample


class MediumSpan(NamedTuple):
    """Tokens [start, stop) of a medium, with or without its marks; a video's include those of its sound track."""

    medium: Medium
    start: int
    stop: int

    def moved(self, offset: int) -> MediumSpan:
        """Return the span ``offset`` tokens later."""
        return MediumSpan(self.medium, self.start + offset, self.stop + offset)


class _TextPosition(NamedTuple):
    """A position in an expanded chunk: after ``num_chars`` characters of its text; None: before its control tokens."""

    chunk_index: int
    num_chars: int | None


class _MediumRange(NamedTuple):
    """The positions between which the tokens and texts of a medium are."""

    medium: Medium
    begin: _TextPosition
    end: _TextPosition


class ExpandedChunks(NamedTuple):
    """The chunks of a rendered conversation after each medium was replaced by its tokens and texts.

    Args:
        chunks: the expanded chunks; a medium becomes several of them, or text at the end of the chunk before.
        index_of_rendered: for each rendered chunk, the index of its first expanded chunk.
        media_ranges: of each medium, in order.
        num_omitted_controls: control tokens left out of media that no sample can hold.
    """

    chunks: list[Chunk]
    index_of_rendered: list[int]
    media_ranges: list[_MediumRange]
    num_omitted_controls: int


def expand_media(
    rendered: Sequence[Chunk],
    media: Mapping[str, Sequence[Medium]],
    segments_of: Callable[[Medium, int], Sequence[MediaSegment]],
    max_length: int,
) -> ExpandedChunks:
    """Replace each rendered chunk that stands for a picture, video or sound by the tokens and texts of that medium.

    A chunk is a control token and the text after it. The n-th chunk of a kind of medium stands for its n-th medium.

    Args:
        rendered: the chunks of a conversation. The first one stands for no medium.
        media: of the conversation, by kind ("image").
        segments_of: returns the texts and runs of equal tokens that a medium consists of, given the medium and its
            index among those of its kind.
        max_length: of a sample, in tokens. Longer media, which no sample holds, keep ``max_length + 1`` tokens.
    """
    expanded: list[Chunk] = []
    index_of_rendered: list[int] = []
    media_ranges: list[_MediumRange] = []
    num_omitted_controls = 0
    next_media = {kind: enumerate(media_of_kind) for kind, media_of_kind in media.items()}  # iterators
    for chunk in rendered:
        index_of_rendered.append(len(expanded))
        if not chunk.media_kind:
            expanded.append(chunk)
            continue
        index_in_kind, medium = next(next_media[chunk.media_kind])
        segments = [segment for segment in segments_of(medium, index_in_kind) if not _is_empty_run(segment)]
        begin = _next_position(expanded, segments)
        num_omitted_controls += _append_segments(expanded, segments, max_controls=max_length + 1)
        end = _end_of_text(expanded)
        media_ranges.append(_MediumRange(medium, begin, end))
        _append_text(expanded, chunk.text)  # the text after the medium
    return ExpandedChunks(expanded, index_of_rendered, media_ranges, num_omitted_controls)


def _is_empty_run(segment: MediaSegment) -> bool:
    return isinstance(segment, TokenRun) and segment.length == 0


def _next_position(chunks: Sequence[Chunk], segments: Sequence[MediaSegment]) -> _TextPosition:
    """Return where a medium of these segments begins when it is appended to the chunks."""
    if segments and isinstance(segments[0], str):
        return _end_of_text(chunks)
    return _TextPosition(len(chunks), num_chars=None)


def _append_segments(chunks: list[Chunk], segments: Sequence[MediaSegment], max_controls: int) -> int:
    """Append the texts of a medium and up to ``max_controls`` of its control tokens; return the number of the others.

    A run of control tokens becomes a chunk even if none of them are left, so that the texts around it stay separate.
    """
    num_omitted = 0
    for segment in segments:
        if isinstance(segment, str):
            _append_text(chunks, segment)
        else:
            num_appended = min(segment.length, max_controls)
            max_controls -= num_appended
            num_omitted += segment.length - num_appended
            chunks.append(Chunk(segment.token, media_kind="", text="", num_controls=num_appended))
    return num_omitted


def _end_of_text(chunks: Sequence[Chunk]) -> _TextPosition:
    return _TextPosition(len(chunks) - 1, len(chunks[-1].text))


def _append_text(chunks: list[Chunk], text: str) -> None:
    """Append a text to that of the last chunk: the two are tokenized together."""
    chunks[-1] = chunks[-1]._replace(text=chunks[-1].text + text)


class JoinedTokens(NamedTuple):
    """The tokens of a conversation.

    Args:
        ids: of all control tokens and texts, in order.
        text_starts: for each expanded chunk, the index in ``ids`` where its text begins, after its control tokens.
        spans: of the media with their marks.
        chunks: the expanded chunks.
    """

    ids: array[int]
    text_starts: list[int]
    spans: list[MediumSpan]
    chunks: list[Chunk]


def join_tokens(
    expanded: ExpandedChunks,
    ids_by_chunk: Sequence[array[int]],
    control_ids: Mapping[str, int],
    encode_text: Callable[[Chunk], Sequence[int]],
) -> JoinedTokens:
    """Concatenate the token ids of a conversation, and locate its pictures, videos and sounds among them.

    Args:
        expanded: the chunks of the conversation: each is a control token, repeated or absent, and the text after it.
        ids_by_chunk: the ids of each chunk's text.
        control_ids: the id of each control token.
        encode_text: tokenizes the text of a chunk; used for part of a text if a medium begins or ends within it.
    """
    ids = array("i")
    text_starts: list[int] = []
    for chunk, text_ids in zip(expanded.chunks, ids_by_chunk, strict=True):
        if chunk.control:
            ids.extend([control_ids[chunk.control]] * chunk.num_controls)
        text_starts.append(len(ids))
        ids += text_ids

    spans = []
    for medium, begin, end in expanded.media_ranges:
        first, last = begin.chunk_index, end.chunk_index
        # Offsets from the start of a chunk's text; negative if the medium begins with the control tokens before it.
        begin_offset = _begin_offset(expanded.chunks[first], begin, ids_by_chunk[first], encode_text)
        end_offset = _end_offset(expanded.chunks[last], end, ids_by_chunk[last], encode_text)
        start = text_starts[first] + begin_offset
        stop = text_starts[last] + end_offset
        spans.append(MediumSpan(medium, start, stop))
    return JoinedTokens(ids, text_starts, spans, expanded.chunks)


# A medium may begin or end within a chunk's text. The tokens outside of it are then those that the text before or
# after the medium has when it is tokenized alone, too; a token with characters of both belongs to the medium.
def _begin_offset(
    chunk: Chunk, begin: _TextPosition, text_ids: Sequence[int], encode_text: Callable[[Chunk], Sequence[int]]
) -> int:
    """Return the number of ids of a chunk's text before the medium that begins in it."""
    if begin.num_chars is None:
        return -chunk.num_controls
    text_before = chunk.text[: begin.num_chars]
    ids_before = encode_text(chunk._replace(text=text_before)) if text_before else []
    return common_prefix_length(ids_before, text_ids)


def _end_offset(
    chunk: Chunk, end: _TextPosition, text_ids: Sequence[int], encode_text: Callable[[Chunk], Sequence[int]]
) -> int:
    """Return the number of ids of a chunk's text up to the end of the medium that ends in it."""
    if not end.num_chars:  # the medium ends before the chunk's text
        return 0
    text_after = chunk.text[end.num_chars :]
    ids_after = encode_text(chunk._replace(text=text_after)) if text_after else []
    return len(text_ids) - common_prefix_length(ids_after[::-1], text_ids[::-1])


def common_prefix_length(a: Sequence[object], b: Sequence[object]) -> int:
    """Return the length of the common prefix of two sequences."""
    for count, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return count
    return min(len(a), len(b))


@dataclass(frozen=True)
class MediaTokens:
    """Ids of the tokens by which media are located in a sample.

    Args:
        pads: placeholder token by kind of medium.
        opening_vision, opening_sound: open a picture or a video, and a sound; None if the model has no such token.
        video_marks: the tokens before and after a video's frames, if these have the placeholder token of pictures.
    """

    pads: Mapping[MediaKind, int]
    opening_vision: int | None = None
    opening_sound: int | None = None
    video_marks: tuple[int | None, ...] = ()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> MediaTokens:
        """Read the tokens from ``config.json``, for the kinds of media that the model can be trained on."""
        family, settings = family_of(config), thinker_of(config)
        opening_vision, opening_sound = (settings.get(marks[0]) for marks in (family.image_marks, family.sound_marks))
        video_marks = tuple(map(settings.get, family.video_marks))
        return cls(family.pads_in(config), opening_vision, opening_sound, video_marks)

    def has_mixed_pads(self, sample: Sample | EncodedSample) -> bool:
        """Return whether a sample has pictures and videos, and frames of videos have the placeholder of pictures."""
        return bool(sample.images and sample.videos) and self.pads.get("image") == self.pads.get("video", -1)


def sounds_in_order(sample: EncodedSample, tokens: MediaTokens) -> list[tuple[EncodedAudio, str | None, bytes | None]]:
    """Return (sound, path, bytes) of sounds and of videos' sound tracks (their video's file), in token order."""
    audios = [(audio, audio.path, audio.data) for audio in sample.audios]
    tracks = [(video.audio, video.path, video.data) for video in sample.videos if video.audio is not None]
    if not audios or not tracks:
        return [*audios, *tracks]
    # A track's first mark directly follows the mark that opens its video.
    opens = np.flatnonzero(sample.input_ids == tokens.opening_sound)
    is_track = sample.input_ids[opens - 1] == tokens.opening_vision
    return [tracks.pop(0) if track else audios.pop(0) for track in is_track]


def media_spans(sample: EncodedSample, tokens: MediaTokens) -> list[MediumSpan]:
    """Locate a sample's media by their placeholder tokens, in the order of these; a video's include its sound track's.

    Media whose kind the model cannot be trained on have no placeholder tokens, and no span. If pictures and frames of
    videos have the same placeholder token and cannot be distinguished, the result is empty.
    """
    if not (sample.images or sample.videos or sample.audios):
        return []
    if tokens.has_mixed_pads(sample):
        return _mixed_spans(sample, tokens)
    sounds = [sound for sound, _, _ in sounds_in_order(sample, tokens)]
    media: dict[MediaKind, Sequence[Medium]] = {"image": sample.images, "video": sample.videos, "audio": sounds}
    spans: list[MediumSpan] = []
    for kind, pad in tokens.pads.items():
        spans += _pad_spans(sample.input_ids == pad, media[kind])
    return sorted(_with_tracks(spans), key=lambda span: span.start)


def visual_media(sample: EncodedSample, tokens: MediaTokens) -> list[EncodedImage | EncodedVideo]:
    """Return a sample's pictures and videos in the order of their placeholder tokens."""
    if not (sample.images and sample.videos):
        return [*sample.images, *sample.videos]
    return [span.medium for span in media_spans(sample, tokens) if not isinstance(span.medium, EncodedAudio)]


def finds_order(sample: EncodedSample, spans: Sequence[MediumSpan], tokens: MediaTokens) -> bool:
    """Return whether ``media_spans`` finds the kinds of a sample's pictures and videos in the order of ``spans``."""
    if not tokens.has_mixed_pads(sample):
        return True
    return [type(span.medium) for span in media_spans(sample, tokens)] == [type(span.medium) for span in spans]


def _mixed_spans(sample: EncodedSample, tokens: MediaTokens) -> list[MediumSpan]:
    """Locate pictures and videos that have the same placeholder token, in order; [] if that is not possible."""
    is_pad = sample.input_ids == tokens.pads["image"]
    if tokens.video_marks:
        is_frame = is_pad & _is_between(sample.input_ids, *tokens.video_marks)
    else:
        is_frame = _is_frame_by_text(sample, is_pad)
    num_frame_pads = sum(video.num_tokens for video in sample.videos)
    if (is_frame.sum(), is_pad.sum()) != (num_frame_pads, sample.num_media_tokens):
        return []
    spans = _pad_spans(is_pad & ~is_frame, sample.images) + _pad_spans(is_frame, sample.videos)
    return sorted(spans, key=lambda span: span.start)


def _is_between(ids: IntArray, opening: int | None, closing: int | None) -> npt.NDArray[np.bool_]:
    """Return bool (L,), true from an ``opening`` token to the next ``closing`` one.

    A sample may begin or end between the two, as does part of one that shares a prefix with others.
    """
    marks = np.flatnonzero((ids == opening) | (ids == closing))
    is_opening = np.array([False, *(ids[marks] == opening), True])  # before the first mark, and after the last
    next_mark = np.searchsorted(marks, np.arange(len(ids)), side="right")  # of each token, by number
    return is_opening[next_mark] | ~is_opening[next_mark + 1]


_NUM_COMPARED = 3  # tokens after a frame: ``</img>``, a new line and ``Frame``


def _is_frame_by_text(sample: EncodedSample, is_pad: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return bool (L,), true for placeholder tokens of frames; all false if media and tokens do not match.

    A picture is one run of placeholder tokens, a video one run for each frame. All frames of a video have the same
    number of tokens, and the same tokens after each but the last. If that allows several orders, pictures come first.
    """
    runs = np.flatnonzero(np.diff(is_pad, prepend=False, append=False)).reshape(-1, 2)  # (start, stop) of each
    lengths = (runs[:, 1] - runs[:, 0]).tolist()
    next_tokens = [sample.input_ids[stop : stop + _NUM_COMPARED].tobytes() for stop in runs[:, 1]]
    is_frame_run = _find_frames(sample, lengths, next_tokens) or (False,) * len(runs)  # of each run
    is_frame = is_pad.copy()
    is_frame[is_pad] = np.repeat(is_frame_run, lengths)
    return is_frame


class _Matching(NamedTuple):
    """The first pictures and videos of a sample, matched to its first runs of placeholder tokens.

    ``is_frame`` has an item for each matched run: whether it is a frame of a video.
    """

    num_images: int = 0
    num_videos: int = 0
    is_frame: tuple[bool, ...] = ()


def _find_frames(sample: EncodedSample, run_lengths: list[int], next_tokens: list[bytes]) -> tuple[bool, ...] | None:
    """Match a sample's pictures and videos to its runs of placeholder tokens, by a depth-first search.

    A picture is one run, a video one run for each sampled frame. Pictures are in order, and so are videos; only how
    they alternate is unknown. Returns for each run whether it is a frame, or None if no order of the media matches.

    Args:
        run_lengths: number of tokens in each run.
        next_tokens: the first tokens after each run, as bytes; they only need to be equal or not.
    """
    visited: set[tuple[int, int, int]] = set()
    stack = [_Matching()]
    while stack:
        matching = stack.pop()
        num_images, num_videos, is_frame = matching
        first_run = len(is_frame)  # the first run that is not matched
        counts = (first_run, num_images, num_videos)
        if counts == (len(run_lengths), len(sample.images), len(sample.videos)):
            return is_frame
        if counts in visited:
            continue
        visited.add(counts)
        if num_videos < len(sample.videos):
            video = sample.videos[num_videos]
            num_frames = len(video.indices)
            runs = slice(first_run, first_run + num_frames)
            if _are_frames(video, run_lengths[runs], next_tokens[runs]):
                stack.append(_Matching(num_images, num_videos + 1, is_frame + (True,) * num_frames))
        if num_images < len(sample.images):
            image = sample.images[num_images]
            if run_lengths[first_run : first_run + 1] == [image.num_tokens]:
                # Pushed last, so that it is tried first: pictures come first if several orders match.
                stack.append(_Matching(num_images + 1, num_videos, (*is_frame, False)))
    return None


def _are_frames(video: EncodedVideo, run_lengths: list[int], next_tokens: list[bytes]) -> bool:
    """Return whether runs of placeholder tokens may be a video's frames: equally long, with equal texts between."""
    num_frames = len(video.indices)
    tokens_per_frame = video.num_tokens // num_frames
    if run_lengths != [tokens_per_frame] * num_frames:
        return False
    return len(set(next_tokens[:-1])) <= 1


def _with_tracks(spans: Sequence[MediumSpan]) -> list[MediumSpan]:
    """Extend the span of each video by that of its sound track, which gets no span of its own."""
    tracks = iter([span for span in spans if _is_track(span.medium)])  # in the order of their videos
    extended = []
    for span in spans:
        if _is_track(span.medium):
            continue
        if isinstance(span.medium, EncodedVideo) and span.medium.audio is not None:
            track = next(tracks)
            span = MediumSpan(span.medium, min(span.start, track.start), max(span.stop, track.stop))
        extended.append(span)
    return extended


def _is_track(medium: Medium) -> bool:
    """Return whether a medium is a video's sound track, which has no file of its own."""
    return isinstance(medium, EncodedAudio) and medium.path is None and medium.data is None


def _pad_spans(is_pad: npt.NDArray[np.bool_], media: Sequence[Medium]) -> list[MediumSpan]:
    """Return the span of each medium, from its first placeholder token to its last; ``is_pad`` is (L,)."""
    if not media:
        return []
    counts = [medium.num_tokens for medium in media]
    positions, ends = np.flatnonzero(is_pad), np.cumsum(counts)
    starts, stops = positions[ends - counts], positions[ends - 1] + 1
    return list(map(MediumSpan, media, starts.tolist(), stops.tolist()))
