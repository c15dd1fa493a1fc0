"""Rows that another tool has tokenized become what tokenizing them here would have given.

Nothing is tokenized; what can be checked is: that the model has such tokens, and that as many placeholder tokens stand
for each medium as the model's limits make of it. From there on (truncation, labels) such rows are like all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.config.data import EncodeSpec
from packtool.encode.encoded import EncodedSample, IntArray
from packtool.encode.families import MediaEncoding, MediaKind, Medium, Part
from packtool.encode.fit import Tokenized
from packtool.encode.loss_scale import Base, parse_loss_scale
from packtool.encode.media_spans import MediaTokens, PlacedMedium, Span, placed_media
from packtool.rows.forms.columns import shown
from packtool.rows.sample import Dropped, PreparedTokens, Sample

_KINDS: tuple[MediaKind, ...] = ("image", "video", "audio")
_TEXT = -1
_NOTHING = np.zeros(0, np.int32)
# What rows say of a medium's size, and the field that has it; the number of tokens is compared with the tokens.
_MEASURED = {name: name for name in ("height", "width", "grid", "indices")} | {"samples": "num_samples"}


class PreparedRows:
    """Reads rows that another tool has tokenized.

    Args:
        spec: what decides labels and limits.
        media: how the model's media are encoded.
        tokens: by which media are found.
        control_ids: of the tokens that mark media.
        num_ids: the tokenizer's tokens are the numbers below it.
    """

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

    def tokenized(self, sample: Sample, media: Mapping[str, Sequence[Medium]]) -> list[Tokenized] | Dropped:
        """The samples that a row is packed of, most often one.

        Args:
            sample: a row with ``tokens``.
            media: of the row, measured, by kind.
        """
        assert sample.tokens is not None, "the row was tokenized elsewhere"
        asked = sample.loss_scale or self._spec.loss_scale
        scale = parse_loss_scale(asked)
        if scale.rules:
            detail = f"--loss-scale {asked} has a rule for what the assistant says, and the row is tokens"
            return Dropped(sample.source, sample.row, "labels_given", detail)
        ids = sample.tokens.ids
        if (wrong := (ids < 0) | (ids >= self._num_ids)).any():
            at = int(np.flatnonzero(wrong)[0])
            detail = f"token {at:,} is {ids[at]}, and the model's tokenizer ends at {self._num_ids - 1:,}"
            return Dropped(sample.source, sample.row, "token_out_of_range", detail)
        if changed := _changed(sample.tokens, media):
            return Dropped(sample.source, sample.row, "media_changed", changed)
        found = self._spans(ids.astype(np.int32), media)
        if isinstance(found, str):
            return Dropped(sample.source, sample.row, "media_tokens", found)
        edges = [*sample.tokens.starts.tolist(), len(ids)]
        if any(span.start < edge < span.end for edge in edges for span in found):
            detail = "a medium begins in one of the samples that the row is packed of and ends in another"
            return Dropped(sample.source, sample.row, "media_tokens", detail)
        parts = [_part(sample, sample.tokens, found, media, edge) for edge in pairwise(edges)]
        if (channels := sample.tokens.channels) is not None:
            parts = [
                replace(part, sample=replace(sample, channel=channel))
                for part, channel in zip(parts, channels, strict=True)
            ]
        return parts if scale.base == "default" else [_rescaled(part, scale.base) for part in parts]

    def _spans(self, ids: IntArray, media: Mapping[str, Sequence[Medium]]) -> list[Span] | str:
        """Where media lie, ascending; or why they do not agree with the tokens."""
        groups: dict[str, Any] = {f"{kind}s": tuple(media[kind]) for kind in _KINDS}
        sample = EncodedSample(ids, ids, _NOTHING, channel=None, source="", row=0, **groups)
        for kind in _KINDS:
            pad = self._tokens.pads.get(kind)
            count = 0 if pad is None else int((ids == pad).sum())
            alike = [other for other in _KINDS if self._tokens.pads.get(other) == pad]
            needed = [medium.num_tokens for other in (alike if pad is not None else [kind]) for medium in media[other]]
            if kind == "audio":
                needed = [*needed, *(video.audio.num_tokens for video in sample.videos if video.audio is not None)]
            if pad is None and needed:
                return f"the model's config.json names no token that stands for {kind}s, so they cannot be found"
            if count != sum(needed):
                return _disagree(kind, count, needed)
        if not any(media.values()):
            return []
        if not self._tells_sounds_apart(sample):
            return "the sounds and the videos' sound tracks are not opened by tokens that tell them apart"
        spans, numbers = [], dict.fromkeys(_KINDS, 0)
        for placed in placed_media(sample, self._tokens):
            kind = next(kind for kind in _KINDS if any(placed.medium is medium for medium in media[kind]))
            parts = self._media.parts(placed.medium, numbers[kind])
            if not self._agrees(ids[placed.start : placed.stop], parts):
                return f"{kind} {numbers[kind]} has not the placeholder tokens, in number or order, that it needs here"
            start, stop = self._with_marks(ids, placed, parts)
            spans.append(Span(kind, numbers[kind], start, stop))
            numbers[kind] += 1
        return spans

    def _tells_sounds_apart(self, sample: EncodedSample) -> bool:
        """Whether the tokens that open sounds and sound tracks are as many as there are of both."""
        num_tracks = sum(video.audio is not None for video in sample.videos)
        if not num_tracks or not sample.audios:
            return True
        opens = np.flatnonzero(sample.input_ids == self._tokens.opening_sound)
        opened = int((sample.input_ids[opens - 1] == self._tokens.opening_vision).sum())
        return (opened, len(opens) - opened) == (num_tracks, len(sample.audios))

    def _agrees(self, inside: IntArray, parts: Sequence[Part]) -> bool:
        """Whether the placeholder tokens of a medium come in the runs in which it is spelled."""
        pads = set(self._tokens.pads.values())
        told: list[int] = []
        for part in parts:
            told += [_TEXT] if isinstance(part, str) else [self._ids[part[0]]] * part[1]
        return _runs(inside.tolist(), pads) == _runs(told, pads)

    def _with_marks(self, ids: IntArray, placed: PlacedMedium, parts: Sequence[Part]) -> tuple[int, int]:
        """First token of a medium and what is behind its last, with the marks around its placeholder tokens."""
        pads = set(self._tokens.pads.values())
        places = [i for i, part in enumerate(parts) if not isinstance(part, str) and self._ids[part[0]] in pads]
        before, behind = parts[: places[0]], parts[places[-1] + 1 :]
        num_before = self._num_marks(ids[: placed.start][::-1], before[::-1])
        return placed.start - num_before, placed.stop + self._num_marks(ids[placed.stop :], behind)

    def _num_marks(self, ids: IntArray, parts: Sequence[Part]) -> int:
        """How many tokens, from the first on, are a medium's marks; text between two marks counts with the second."""
        at = counted = 0
        controls = set(self._ids.values())
        for part in parts:
            if isinstance(part, str):
                while at < len(ids) and int(ids[at]) not in controls:
                    at += 1
            elif (ids[at : at + part[1]] == self._ids[part[0]]).all() and at + part[1] <= len(ids):
                at = counted = at + part[1]
            else:
                break
        return counted


def _changed(tokens: PreparedTokens, media: Mapping[str, Sequence[Medium]]) -> str:
    """A line on how a medium differs from what the row says of it; "" if none does."""
    for kind, described in tokens.measured.items():
        for number, (medium, expected) in enumerate(zip(media[kind], described, strict=False)):
            for key, name in _MEASURED.items():
                size, old = getattr(medium, name, None), expected.get(key)
                if old is not None and size is not None and list(np.ravel(size)) != list(np.ravel(old)):
                    remedy = "give the limits on media that the rows were prepared with"
                    return f"{kind} {number} has {key} {size} here, and {shown(old)} where the row was made: {remedy}"
    return ""


def _part(
    sample: Sample,
    tokens: PreparedTokens,
    spans: Sequence[Span],
    media: Mapping[str, Sequence[Medium]],
    edges: tuple[int, int],
) -> Tokenized:
    """One of the samples that a row is packed of: tokens [start, stop)."""
    start, stop = edges
    inside = [span for span in spans if start <= span.start < stop]
    own: dict[str, Any] = {kind: [span.index for span in inside if span.kind == kind] for kind in _KINDS}
    trained = np.ones(stop - start, bool) if tokens.trained is None else tokens.trained[start:stop]
    weights = None if tokens.weights is None else np.where(trained, tokens.weights[start:stop], np.float32(0))
    if weights is not None and (weights[trained] == 1).all():
        weights = None
    return Tokenized(
        sample=sample,
        ids=tokens.ids[start:stop].astype(np.int32),
        turns=_stretches(trained),
        spans=[
            Span(span.kind, own[span.kind].index(span.index), span.start - start, span.end - start) for span in inside
        ],
        images=tuple(media["image"][i] for i in own["image"]),
        videos=tuple(media["video"][i] for i in own["video"]),
        audios=tuple(media["audio"][i] for i in own["audio"]),
        weights=weights,
    )


def _rescaled(item: Tokenized, base: Base) -> Tokenized:
    """The sample with the last stretch of targets only (``last_round``), or with every token as a target (``all``)."""
    weights = np.full(len(item.ids), float(base == "all"), np.float32)
    if base == "last_round" and len(item.turns):
        start, stop = item.turns[-2:]
        weights[start:stop] = 1 if item.weights is None else item.weights[start:stop]
    return replace(item, weights=weights)


def _stretches(trained: npt.NDArray[np.bool_]) -> IntArray:
    """[start, end) of each stretch of targets, flat."""
    return np.flatnonzero(np.diff(trained, prepend=False, append=False)).astype(np.int32)


def _runs(ids: Sequence[int], pads: set[int]) -> list[tuple[int, int]]:
    """(token, times) of each run of placeholder tokens."""
    return [(token, sum(1 for _ in run)) for token, run in groupby(ids) if token in pads]


def _disagree(kind: str, count: int, needed: Sequence[int]) -> str:
    if not needed:
        return f"{count:,} placeholder tokens stand for {kind}s, and the row has no {kind}s"
    each = ", ".join(f"{number:,}" for number in needed[:8]) + (", ..." if len(needed) > 8 else "")
    return (
        f"{count:,} placeholder tokens stand for {kind}s, and the row's {kind}s need {sum(needed):,} here ({each}): "
        "give the limits on media that the rows were prepared with"
    )
