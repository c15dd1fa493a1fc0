"""Hold a tokenized sample to ``max_length``, never cutting a medium, and give it its labels.

Truncation keeps the last (``left``) or the first (``right``) ``max_length - protected`` tokens that are not protected,
in their order. Protected are entire media spans (opening mark, placeholder tokens, closing mark, timestamps), so that
adjacent pictures cannot merge. ``left`` is what ms-swift does, except that ms-swift cuts the marks off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.config.data import EncodeSpec
from packtool.constants import IGNORE_INDEX
from packtool.encode.encoded import EncodedSample, IntArray
from packtool.encode.families.record import Medium
from packtool.encode.media_spans import Span
from packtool.errors import RowError
from packtool.rows.sample import Dropped, Sample

_NO_TARGET = "no_target_tokens"
_MAX_REMOVED = np.iinfo(np.int32).max  # maximum of the cache's column


@dataclass(frozen=True, eq=False)
class Tokenized:
    """A sample as tokens, of any length.

    Args:
        ids: int32 (L,).
        turns: int32 (2 * num_turns,), [start, end) of every assistant turn that may be trained.
        spans: of the media, ascending.
        media: by kind, in the order of their spans.
        weights: float32 (L,), of each token as a target, 0 for none; None if the tokens of ``turns`` weigh 1.
        num_removed: tokens removed before truncation: with media, the middle of a long text, or of a medium that no
            sample can hold.
        borders: as those of ``EncodedSample``.
    """

    sample: Sample
    ids: IntArray
    turns: IntArray
    spans: Sequence[Span]
    media: Mapping[str, Sequence[Medium]]
    weights: npt.NDArray[np.float32] | None = None
    num_removed: int = 0
    borders: IntArray | None = None

    def in_media(self) -> npt.NDArray[np.bool_]:
        """Return bool (L,), set for the tokens of media."""
        mask = np.zeros(len(self.ids), bool)
        for span in self.spans:
            mask[span.start : span.end] = True
        return mask

    def take(self, kept: npt.NDArray[np.int64]) -> Tokenized:
        """Return the sample with the tokens at some positions, ascending; none cuts a medium."""
        spans: list[Span] = []
        media: dict[str, list[Medium]] = {kind: [] for kind in self.media}
        starts = np.searchsorted(kept, [span.start for span in self.spans])
        for span, start in zip(self.spans, starts.tolist(), strict=True):
            if start < len(kept) and kept[start] == span.start:
                spans.append(Span(span.kind, len(media[span.kind]), start, start + span.end - span.start))
                media[span.kind].append(self.media[span.kind][span.number])
        # Nothing comes before the first token, so it cannot be a target; turns without tokens are gone.
        turns = np.maximum(np.searchsorted(kept, self.turns).astype(np.int32).reshape(-1, 2), 1)
        borders = self.borders
        return replace(
            self,
            ids=self.ids[kept],
            turns=np.ascontiguousarray(turns[turns[:, 0] < turns[:, 1]].reshape(-1)),
            spans=spans,
            media=media,
            weights=self.weights[kept] if self.weights is not None else None,
            num_removed=self.num_removed + len(self.ids) - len(kept),
            borders=None if borders is None else np.unique(np.searchsorted(kept, borders)).astype(np.int32),
        )


def fit(item: Tokenized, spec: EncodeSpec) -> list[EncodedSample] | Dropped:
    """Hold a sample to ``spec.max_length`` and give it labels.

    ``media_overflow`` decides about media that leave no room for any text, ``truncation_strategy`` about all else:
    with ``trim`` and ``delete`` a row loses its oldest media only if the media alone are too much, and is dropped if
    what remains is still too long.

    Raises:
        RowError: if it does not fit and the strategy is ``raise``.
    """
    sample, limit = item.sample, spec.max_length
    if spec.truncation_strategy == "split":
        return _split(item, limit)
    if len(item.ids) > limit:
        if spec.truncation_strategy == "raise":
            drop_too_long(sample, spec, str(len(item.ids) + item.num_removed))
        num_media_tokens = int(item.in_media().sum()) + (item.num_removed if item.spans else 0)
        if num_media_tokens >= limit:
            detail = f"{num_media_tokens} tokens of media leave no room for text in {limit}"
            if spec.media_overflow == "raise":
                raise _too_long(sample, detail)
            if spec.media_overflow == "drop":
                return Dropped(sample.source, sample.row, "media_over_limit", detail)
            item = _without_oldest_media(item, limit)
    if len(item.ids) > limit:
        if spec.truncation_strategy == "delete":
            return drop_too_long(sample, spec, str(len(item.ids)))
        keep = item.in_media()
        room = limit - int(keep.sum())
        assert room > 0, "the media leave room for text"
        text = np.flatnonzero(~keep)
        keep[text[:room] if spec.truncation_strategy == "right" else text[-room:]] = True
        item = item.take(np.flatnonzero(keep))
    encoded = _labelled(item)
    if encoded is None:
        detail = "truncation left no target" if item.num_removed else "no assistant turn has tokens to learn"
        return Dropped(sample.source, sample.row, _NO_TARGET, detail)
    return [encoded]


def fit_all(parts: Sequence[Tokenized], spec: EncodeSpec) -> list[EncodedSample] | Dropped:
    """Hold the samples that a row is packed of to ``spec.max_length``, as ``fit`` does with one.

    Samples without a target are left out, unless all are. If one is too long, the row is dropped: every input row is
    either kept or dropped.
    """
    kept: list[EncodedSample] = []
    for number, part in enumerate(parts, 1):
        result = fit(part, spec)
        if not isinstance(result, Dropped):
            kept += result
        elif len(parts) == 1:
            return result
        elif result.reason != _NO_TARGET:
            return replace(result, detail=f"sample {number} of the {len(parts)} in the row: {result.detail}")
    if not kept:
        sample = parts[0].sample
        detail = f"none of the {len(parts)} samples in the row has tokens to learn"
        return Dropped(sample.source, sample.row, _NO_TARGET, detail)
    return kept


def drop_too_long(sample: Sample, spec: EncodeSpec, length: str) -> Dropped:
    """Drop a row that is too long and is not cut.

    Args:
        length: its tokens, as far as they are known.

    Raises:
        RowError: if the strategy is ``raise``.
    """
    if spec.truncation_strategy == "raise":
        raise _too_long(sample, f"{length} tokens, at most {spec.max_length} are allowed")
    return Dropped(sample.source, sample.row, "over_max_length", f"{length} tokens, limit {spec.max_length}")


def _without_oldest_media(item: Tokenized, limit: int) -> Tokenized:
    """Remove media, from the first on, until the others leave room for text."""
    keep = np.ones(len(item.ids), bool)
    num_media_tokens = sum(span.end - span.start for span in item.spans)
    for span in item.spans:
        if num_media_tokens < limit:
            break
        num_media_tokens -= span.end - span.start
        keep[span.start : span.end] = False
    return item.take(np.flatnonzero(keep))


def _split(item: Tokenized, limit: int) -> list[EncodedSample] | Dropped:
    """Split a text into pieces; no token is lost, but the first token of a piece has none before it."""
    sample = item.sample
    if not sample.is_text or item.spans:
        problem = "has media" if item.spans else "is a conversation"
        detail = (
            f"--truncation-strategy split cuts texts for pretraining, and this row {problem}; "
            "use --truncation-strategy delete, left or right"
        )
        return Dropped(sample.source, sample.row, "cannot_be_split", detail)
    pieces = [
        _labelled(replace(item.take(np.arange(start, min(start + limit, len(item.ids)))), num_removed=0))
        for start in range(0, len(item.ids), limit)
    ]
    # A piece of one token alone has no target.
    kept = [piece for piece in pieces if piece is not None]
    return kept or Dropped(sample.source, sample.row, _NO_TARGET, "the text has fewer than two tokens")


def _labelled(item: Tokenized) -> EncodedSample | None:
    """Return the sample with its labels, None if no token is a target."""
    sample, ids, weights = item.sample, item.ids, item.weights
    if weights is None:
        labels = np.empty(len(ids), np.int32)
        labels.fill(IGNORE_INDEX)  # faster than ``full``
        turns = item.turns.tolist()
        for start, end in zip(turns[::2], turns[1::2], strict=True):
            labels[start:end] = ids[start:end]
    else:
        labels = np.where(weights > 0, ids, np.int32(IGNORE_INDEX))
    for span in item.spans:
        labels[span.start : span.end] = IGNORE_INDEX
    # The first token has none before it to predict it; the loss ignores its label.
    if item.num_removed:
        labels[:1] = IGNORE_INDEX
    if len(ids) < 2 or labels[1:].max() < 0:
        return None
    loss_scale = None
    if weights is not None and not (weights[labels >= 0] == 1).all():
        loss_scale = np.where(labels >= 0, weights, np.float32(0))
    media: Any = {f"{kind}s": tuple(of_kind) for kind, of_kind in item.media.items()}
    return EncodedSample(
        input_ids=ids,
        labels=labels,
        turns=item.turns,
        **media,
        channel=sample.channel,
        source=sample.source,
        row=sample.row,
        num_truncated=min(item.num_removed, _MAX_REMOVED),
        loss_scale=loss_scale,
        part=sample.part,
        borders=item.borders,
    )


def _too_long(sample: Sample, detail: str) -> RowError:
    return RowError(
        sample.source,
        sample.row,
        "over_max_length",
        detail if sample.part is None else f"{sample.part}: {detail}",
        "Raise --max-length, lower the media's limits, or use --truncation-strategy delete, left or right "
        "(and --media-overflow drop or trim).",
    )
