"""Rows that another tool has tokenized: check their tokens, and give them the form of rows tokenized here.

The tokens must be the model's, and each medium must have as many placeholder tokens as the model's limits give it.
Truncation and labels are the same as for other rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.config.data import EncodeSpec
from packtool.encode.encoded import EncodedAudio, EncodedImage, EncodedSample, EncodedVideo, IntArray
from packtool.encode.families.record import MediaEncoding, MediaSegment, Medium
from packtool.encode.loss_scale import Base, Weights, parse_loss_scale
from packtool.encode.media_spans import MediaTokens, MediumSpan, media_spans
from packtool.encode.truncation import Tokenized
from packtool.rows.forms.columns import RowProblem, shown
from packtool.rows.forms.media import MEDIA_KINDS
from packtool.rows.sample import MediaKind, PreparedTokens, Sample

_TEXT = -1  # stands for any text in a list of ids
_NO_TURNS = np.zeros(0, np.int32)
_PREPARED_LIMITS = "give the limits on media that the rows were prepared with"
_KIND_BY_TYPE: Mapping[type, MediaKind] = {EncodedImage: "image", EncodedVideo: "video", EncodedAudio: "audio"}
# Sizes of media that rows give, and the fields with which they are compared.
_SIZE_FIELDS = {name: name for name in ("height", "width", "grid", "indices")} | {"samples": "num_samples"}


class PreparedRows:
    """Splits rows that another tool has tokenized into samples; ``num_ids`` is the tokenizer's maximum id plus 1."""

    def __init__(
        self, spec: EncodeSpec, media: MediaEncoding, tokens: MediaTokens, control_ids: Mapping[str, int], num_ids: int
    ) -> None:
        self._spec, self._media, self._tokens, self._num_ids = spec, media, tokens, num_ids
        self._control_ids = control_ids
        self._pads = set(tokens.pads.values())

    def split(self, row: Sample, media: Mapping[str, Sequence[Medium]]) -> list[Tokenized]:
        """Return the samples of a row, several if it is a pack; RowProblem if its tokens or media do not match."""
        tokens = row.tokens
        assert tokens is not None, "the row was tokenized elsewhere"
        loss_base = self._loss_base(row)
        self._check_ids(tokens.ids)
        _check_unchanged(tokens, media)
        spans = self._locate_media(tokens.ids.astype(np.int32), media)
        borders = [*tokens.starts.tolist(), len(tokens.ids)]  # where the packed samples begin and end
        _check_within_borders(spans, borders)
        channels = tokens.channels or [row.channel] * len(tokens.starts)
        return [
            _cut_sample(replace(row, channel=channel), slice(start, stop), spans, loss_base)
            for (start, stop), channel in zip(pairwise(borders), channels, strict=True)
        ]

    def match_images(self, tokens: PreparedTokens, images: Sequence[Medium], uncut: Sequence[Medium]) -> list[Medium]:
        """Return the pictures of a pack, ``uncut`` where several belong to one sample by its placeholder tokens.

        ``images`` and ``uncut`` are the same pictures, measured alone and with others in a sample.
        """
        matched: list[Medium] = []
        for ids in np.split(tokens.ids, tokens.starts[1:]):
            num_pads = int((ids == self._tokens.pads.get("image", -1)).sum())
            if num_pads in [image.num_tokens for image in images[len(matched) :][:1]]:
                matched.append(images[len(matched)])
                continue
            while num_pads > 0 and len(matched) < len(uncut):
                matched.append(uncut[len(matched)])
                num_pads -= matched[-1].num_tokens
        return [*matched, *uncut[len(matched) :]]

    def _loss_base(self, sample: Sample) -> Base:
        """Return the base of a row's loss scale; raise RowProblem for rules, which need the text of answers."""
        loss_scale = sample.loss_scale or self._spec.loss_scale
        scale = parse_loss_scale(loss_scale)
        if scale.rules:
            detail = f"--loss-scale {loss_scale} has a rule for the assistant's text, and the row consists of tokens"
            raise RowProblem("labels_given", detail)
        return scale.base

    def _check_ids(self, ids: npt.NDArray[np.int64]) -> None:
        """Raise RowProblem if the tokenizer does not have one of the ids."""
        is_unknown = (ids < 0) | (ids >= self._num_ids)
        if is_unknown.any():
            index = int(np.argmax(is_unknown))  # of the first unknown token
            max_id = f"{self._num_ids - 1:,}"
            detail = f"token {index:,} is {ids[index]}, and the largest id of the model's tokenizer is {max_id}"
            raise RowProblem("token_out_of_range", detail)

    def _locate_media(self, ids: IntArray, media: Mapping[str, Sequence[Medium]]) -> list[MediumSpan]:
        """Locate the media of a row that gives its tokens, by their placeholder tokens; ascending.

        Each span includes the marks around the medium. RowProblem if number or order of placeholder tokens does not
        match the media.
        """
        sample = _sample_of(ids, media)
        for kind in MEDIA_KINDS:
            self._check_num_placeholders(sample, kind)
        if not any(media.values()):
            return []
        if not self._can_distinguish_sounds(sample):
            detail = "the opening tokens do not tell the row's sounds from the sound tracks of its videos"
            raise RowProblem("media_tokens", detail)
        pad_spans = media_spans(sample, self._tokens)
        if not pad_spans:
            raise RowProblem("media_tokens", "the tokens around the row's videos do not match its pictures and videos")
        next_number = dict.fromkeys(MEDIA_KINDS, 0)  # index of the next medium of each kind
        spans = []
        for pad_span in pad_spans:
            kind = _KIND_BY_TYPE[type(pad_span.medium)]
            spans.append(self._with_delimiters(ids, pad_span, kind, next_number[kind]))
            next_number[kind] += 1
        return spans

    def _with_delimiters(self, ids: IntArray, span: MediumSpan, kind: MediaKind, number: int) -> MediumSpan:
        """Return the span of a kind's medium ``number`` with its delimiters; RowProblem if its placeholders differ."""
        segments = self._media.segments(span.medium, number)
        expected_ids = self._ids_of(segments)
        if self._pad_runs(ids[span.start : span.stop].tolist()) != self._pad_runs(expected_ids):
            detail = f"the placeholder tokens of {kind} {number} differ in number or order from those needed"
            raise RowProblem("media_tokens", detail)
        return self._extend_by_delimiters(ids, span, segments)

    def _ids_of(self, segments: Sequence[MediaSegment]) -> list[int]:
        """Return the ids of a medium's control tokens, with ``_TEXT`` for each text between them."""
        ids: list[int] = []
        for segment in segments:
            if isinstance(segment, str):
                ids.append(_TEXT)
            else:
                ids += [self._control_ids[segment.token]] * segment.length
        return ids

    def _check_num_placeholders(self, sample: EncodedSample, kind: MediaKind) -> None:
        """Raise RowProblem if a sample has more or fewer placeholder tokens than its media of a kind need."""
        pad = self._tokens.pads.get(kind)
        needed = self._needed_pads(sample, kind)
        if pad is None and needed:
            detail = f"the model's config.json has no placeholder token for {kind}s, so they cannot be located"
            raise RowProblem("media_tokens", detail)
        num_pads = 0 if pad is None else int((sample.input_ids == pad).sum())
        if num_pads != sum(needed):
            each = ", ".join(f"{number:,}" for number in needed[:8]) + (", ..." if len(needed) > 8 else "")
            needs = f"its {kind}s need {sum(needed):,} ({each}): {_PREPARED_LIMITS}" if needed else f"no {kind}s"
            raise RowProblem("media_tokens", f"the row has {num_pads:,} placeholder tokens for {kind}s, and {needs}")

    def _needed_pads(self, sample: EncodedSample, kind: MediaKind) -> list[int]:
        """Return the numbers of placeholder tokens of all media that have the same placeholder token as a kind."""
        pads = self._tokens.pads
        kinds = [each for each in MEDIA_KINDS if each == kind or pads.get(each) == pads.get(kind, -1)]
        needed: list[int] = []
        for each in kinds:
            needed += [medium.num_tokens for medium in getattr(sample, f"{each}s")]
        if kind == "audio":
            needed += [video.audio.num_tokens for video in sample.videos if video.audio is not None]
        return needed

    def _can_distinguish_sounds(self, sample: EncodedSample) -> bool:
        """Return whether the opening tokens match the numbers of the sample's sounds and of its sound tracks."""
        num_tracks = sum(video.audio is not None for video in sample.videos)
        if not num_tracks or not sample.audios:
            return True
        opens = np.flatnonzero(sample.input_ids == self._tokens.opening_sound)
        num_opened = int((sample.input_ids[opens - 1] == self._tokens.opening_vision).sum())
        return (num_opened, len(opens) - num_opened) == (num_tracks, len(sample.audios))

    def _pad_runs(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        """Return (token, length) of each run of placeholder tokens."""
        return [(token, sum(1 for _ in run)) for token, run in groupby(ids) if token in self._pads]

    def _extend_by_delimiters(self, ids: IntArray, span: MediumSpan, segments: Sequence[MediaSegment]) -> MediumSpan:
        """Return the span of a medium with the tokens that open and close it (``<|vision_start|>``)."""
        pad_segments = [
            i
            for i, segment in enumerate(segments)
            if not isinstance(segment, str) and self._control_ids[segment.token] in self._pads
        ]
        opening, closing = segments[: pad_segments[0]], segments[pad_segments[-1] + 1 :]
        num_before = self._num_delimiter_tokens(ids[: span.start][::-1], opening[::-1])
        num_after = self._num_delimiter_tokens(ids[span.stop :], closing)
        return MediumSpan(span.medium, span.start - num_before, span.stop + num_after)

    def _num_delimiter_tokens(self, ids: IntArray, segments: Sequence[MediaSegment]) -> int:
        """Count the tokens at the beginning of ``ids`` that are a medium's delimiters, with the text between two."""
        end = num_tokens = 0
        control_ids = set(self._control_ids.values())
        for segment in segments:
            if isinstance(segment, str):
                while end < len(ids) and int(ids[end]) not in control_ids:
                    end += 1
                continue
            delimiter = ids[end : end + segment.length]
            if len(delimiter) < segment.length or (delimiter != self._control_ids[segment.token]).any():
                break
            end = num_tokens = end + segment.length
        return num_tokens


def _sample_of(ids: IntArray, media: Mapping[str, Sequence[Medium]]) -> EncodedSample:
    """Return a row as a sample with only ids and media, which suffice to locate the media."""
    fields: dict[str, Any] = {f"{kind}s": tuple(media[kind]) for kind in MEDIA_KINDS}  # images, videos, audios
    return EncodedSample(input_ids=ids, labels=ids, turns=_NO_TURNS, channel=None, source="", row=0, **fields)


def _check_within_borders(spans: Sequence[MediumSpan], borders: Sequence[int]) -> None:
    """Raise RowProblem if a medium crosses a border between the samples of a row."""
    for border in borders:
        if any(span.start < border < span.stop for span in spans):
            detail = "the row is a pack of several samples, and a medium begins in one of them and ends in another"
            raise RowProblem("media_tokens", detail)


def _check_unchanged(tokens: PreparedTokens, media: Mapping[str, Sequence[Medium]]) -> None:
    """Raise RowProblem if the size of a medium differs from the one that the row gives."""
    for kind, described in tokens.measured.items():
        for number, (medium, expected) in enumerate(zip(media[kind], described, strict=False)):
            for key, name in _SIZE_FIELDS.items():
                size, row_size = getattr(medium, name, None), expected.get(key)
                if row_size is None or size is None or not np.size(row_size):  # older packs have empty grids of videos
                    continue
                if list(np.ravel(size)) != list(np.ravel(row_size)):
                    detail = f"{kind} {number} has {key} {size}, and the row was prepared with {shown(row_size)}"
                    raise RowProblem("media_changed", f"{detail}: {_PREPARED_LIMITS}")


def _cut_sample(row: Sample, part: slice, spans: Sequence[MediumSpan], loss_base: Base) -> Tokenized:
    """Return the tokens ``part`` of a row as a sample; ``spans`` are those of all media in the row."""
    tokens = row.tokens
    assert tokens is not None, "the row was tokenized elsewhere"
    ids = tokens.ids[part].astype(np.int32)
    is_trained = np.ones(len(ids), bool) if tokens.trained is None else tokens.trained[part]
    row_weights = None if tokens.weights is None else tokens.weights[part]
    turns = _runs(is_trained)
    weights = _target_weights(is_trained, row_weights, turns, loss_base)
    sample_spans = [span.moved(-part.start) for span in spans if part.start <= span.start < part.stop]
    return Tokenized(row, ids, turns=turns, spans=sample_spans, weights=weights)


def _runs(is_trained: npt.NDArray[np.bool_]) -> IntArray:
    """Return [start, end) of each run of trained tokens, flat."""
    changes = np.diff(is_trained, prepend=False, append=False)
    return np.flatnonzero(changes).astype(np.int32)


def _target_weights(
    is_trained: npt.NDArray[np.bool_], row_weights: Weights | None, turns: IntArray, base: Base
) -> Weights | None:
    """Return the weight of each token as a target, float32 (L,); None if all trained tokens weigh 1."""
    if base == "all":
        return np.ones(len(is_trained), np.float32)
    weights = is_trained.astype(np.float32)
    if row_weights is not None:
        weights = np.where(is_trained, row_weights, np.float32(0))
    if base == "last_round":
        earlier_turns = turns[:-2]  # without the start and the end of the last one
        if len(earlier_turns):
            weights[: earlier_turns[-1]] = 0
        return weights
    return None if (weights[is_trained] == 1).all() else weights
