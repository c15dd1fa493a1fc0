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

from packtool.config.data import EncodeSpec
from packtool.encode.encoded import EncodedSample, IntArray
from packtool.encode.families.record import MediaEncoding, MediaSegment, Medium
from packtool.encode.loss_scale import Base, Weights, parse_loss_scale
from packtool.encode.media_spans import MediaTokens, MediumSpan, Span, media_spans
from packtool.encode.truncation import Tokenized
from packtool.rows.forms.columns import RowProblem, shown
from packtool.rows.forms.media import MEDIA_KINDS
from packtool.rows.sample import PreparedTokens, Sample

_TEXT = -1
_NOTHING = np.zeros(0, np.int32)
_PREPARED_LIMITS = "give the limits on media that the rows were prepared with"
# Sizes of media that rows give, and the fields with which they are compared.
_MEASURED = {name: name for name in ("height", "width", "grid", "indices")} | {"samples": "num_samples"}


class PreparedRows:
    """Reads rows that another tool has tokenized; ``num_ids`` counts the tokenizer's ids, including unused ones."""

    def __init__(
        self,
        spec: EncodeSpec,
        media: MediaEncoding,
        tokens: MediaTokens,
        control_ids: Mapping[str, int],
        num_ids: int,
    ) -> None:
        self._spec, self._media, self._tokens, self._num_ids = spec, media, tokens, num_ids
        self._ids = {token: control_ids[token] for token in media.control_tokens}
        self._pads = set(tokens.pads.values())

    def tokenized(self, sample: Sample, media: Mapping[str, Sequence[Medium]]) -> list[Tokenized]:
        """Return the samples of a row with ``tokens``; RowProblem if these do not match the model or the media."""
        assert sample.tokens is not None, "the row was tokenized elsewhere"
        loss_scale = sample.loss_scale or self._spec.loss_scale
        scale = parse_loss_scale(loss_scale)
        if scale.rules:
            detail = f"--loss-scale {loss_scale} has a rule for the assistant's text, and the row consists of tokens"
            raise RowProblem("labels_given", detail)
        ids = sample.tokens.ids
        if (wrong := (ids < 0) | (ids >= self._num_ids)).any():
            at = int(np.flatnonzero(wrong)[0])
            detail = f"token {at:,} is {ids[at]}, and the largest id of the model's tokenizer is {self._num_ids - 1:,}"
            raise RowProblem("token_out_of_range", detail)
        _check_unchanged(sample.tokens, media)
        spans = self._spans(ids.astype(np.int32), media)
        edges = [*sample.tokens.starts.tolist(), len(ids)]
        if any(span.start < edge < span.end for edge in edges for span in spans):
            detail = "the row is a pack of several samples, and a medium begins in one of them and ends in another"
            raise RowProblem("media_tokens", detail)
        row = Tokenized(sample, ids.astype(np.int32), _NOTHING, spans, media)
        channels = sample.tokens.channels or [sample.channel] * (len(edges) - 1)
        parts = []
        for (start, stop), channel in zip(pairwise(edges), channels, strict=True):
            turns, weights = _targets(sample.tokens, start, stop, scale.base)
            part = row.take(np.arange(start, stop))
            own_row = replace(sample, channel=channel)
            parts.append(replace(part, sample=own_row, turns=turns, weights=weights, num_removed=0))
        return parts

    def _spans(self, ids: IntArray, media: Mapping[str, Sequence[Medium]]) -> list[Span]:
        """Locate the media among the tokens, ascending; raise RowProblem if their numbers of tokens do not match."""
        groups: dict[str, Any] = {f"{kind}s": tuple(media[kind]) for kind in MEDIA_KINDS}
        sample = EncodedSample(ids, ids, _NOTHING, channel=None, source="", row=0, **groups)
        for kind in MEDIA_KINDS:
            pad = self._tokens.pads.get(kind)
            num_pads = 0 if pad is None else int((ids == pad).sum())
            same_pad = [other for other in MEDIA_KINDS if self._tokens.pads.get(other) == pad]
            kinds = same_pad if pad is not None else [kind]
            needed = [medium.num_tokens for other in kinds for medium in media[other]]
            if kind == "audio":
                needed += [video.audio.num_tokens for video in sample.videos if video.audio is not None]
            if pad is None and needed:
                detail = f"the model's config.json has no placeholder token for {kind}s, so they cannot be located"
                raise RowProblem("media_tokens", detail)
            if num_pads != sum(needed):
                raise RowProblem("media_tokens", _disagreement(kind, num_pads, needed))
        if not any(media.values()):
            return []
        if not self._tells_sounds_apart(sample):
            detail = "the opening tokens do not tell the row's sounds from the sound tracks of its videos"
            raise RowProblem("media_tokens", detail)
        spans, numbers = [], dict.fromkeys(MEDIA_KINDS, 0)
        for span in media_spans(sample, self._tokens):
            kind = next(kind for kind in MEDIA_KINDS if any(span.medium is medium for medium in media[kind]))
            parts = self._media.segments(span.medium, numbers[kind])
            expected: list[int] = []
            for part in parts:
                expected += [_TEXT] if isinstance(part, str) else [self._ids[part[0]]] * part[1]
            if self._pad_runs(ids[span.start : span.stop].tolist()) != self._pad_runs(expected):
                detail = f"the placeholder tokens of {kind} {numbers[kind]} differ in number or order from those needed"
                raise RowProblem("media_tokens", detail)
            spans.append(Span(kind, numbers[kind], *self._with_marks(ids, span, parts)))
            numbers[kind] += 1
        return spans

    def _tells_sounds_apart(self, sample: EncodedSample) -> bool:
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

    def _with_marks(self, ids: IntArray, span: MediumSpan, segments: Sequence[MediaSegment]) -> tuple[int, int]:
        """Return [start, end) of a medium, extended by the marks around its placeholder tokens."""
        is_pad = [not isinstance(segment, str) and self._ids[segment[0]] in self._pads for segment in segments]
        before, after = segments[: is_pad.index(True)], segments[len(segments) - is_pad[::-1].index(True) :]
        num_before = self._num_marks(ids[: span.start][::-1], before[::-1])
        return span.start - num_before, span.stop + self._num_marks(ids[span.stop :], after)

    def _num_marks(self, ids: IntArray, segments: Sequence[MediaSegment]) -> int:
        """Count the tokens at the beginning of ``ids`` that are a medium's marks, with the text between two marks."""
        at = num_marks = 0
        controls = set(self._ids.values())
        for segment in segments:
            if isinstance(segment, str):
                while at < len(ids) and int(ids[at]) not in controls:
                    at += 1
            elif (ids[at : at + segment[1]] == self._ids[segment[0]]).all() and at + segment[1] <= len(ids):
                at = num_marks = at + segment[1]
            else:
                break
        return num_marks


def _check_unchanged(tokens: PreparedTokens, media: Mapping[str, Sequence[Medium]]) -> None:
    """Raise RowProblem if the size of a medium differs from the one that the row gives."""
    for kind, described in tokens.measured.items():
        for number, (medium, expected) in enumerate(zip(media[kind], described, strict=False)):
            for key, name in _MEASURED.items():
                size, old = getattr(medium, name, None), expected.get(key)
                if old is not None and size is not None and list(np.ravel(size)) != list(np.ravel(old)):
                    detail = f"{kind} {number} has {key} {size}, and the row was prepared with {shown(old)}"
                    raise RowProblem("media_changed", f"{detail}: {_PREPARED_LIMITS}")


def _targets(tokens: PreparedTokens, start: int, stop: int, base: Base) -> tuple[IntArray, Weights | None]:
    """Return the runs [start, end) of targets in [start, stop), flat; and their weights, None if all are 1."""
    trained = np.ones(stop - start, bool) if tokens.trained is None else tokens.trained[start:stop]
    weights = None if tokens.weights is None else np.where(trained, tokens.weights[start:stop], np.float32(0))
    if weights is not None and (weights[trained] == 1).all():
        weights = None
    runs = np.flatnonzero(np.diff(trained, prepend=False, append=False)).astype(np.int32)
    if base == "default":
        return runs, weights
    base_weights = np.full(stop - start, float(base == "all"), np.float32)
    if base == "last_round" and len(runs):
        last = slice(*runs[-2:])
        base_weights[last] = 1 if weights is None else weights[last]
    return runs, base_weights


def _disagreement(kind: str, num_pads: int, needed: Sequence[int]) -> str:
    """Return the message for a row with ``num_pads`` placeholder tokens, whose media need other numbers."""
    if not needed:
        return f"the row has {num_pads:,} placeholder tokens for {kind}s, and no {kind}s"
    each = ", ".join(f"{number:,}" for number in needed[:8]) + (", ..." if len(needed) > 8 else "")
    needs = f"its {kind}s need {sum(needed):,} ({each})"
    return f"the row has {num_pads:,} placeholder tokens for {kind}s, and {needs}: {_PREPARED_LIMITS}"
