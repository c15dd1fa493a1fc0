"""A tokenized sample is held to ``max_length`` and given its labels.

Truncation that never cuts a medium.

Of the tokens that are not protected the last (``left``) or the first (``right``) ``max_length - protected`` are kept,
and the order stays. Protected are whole media spans (opening mark, placeholder tokens, closing mark, timestamps), so
that adjacent pictures cannot run into one. ``left`` is what ms-swift does, but for the marks, which it cuts off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from packtool.config.data import EncodeSpec
from packtool.constants import IGNORE_INDEX
from packtool.encode.encoded import EncodedAudio, EncodedImage, EncodedSample, EncodedVideo, IntArray
from packtool.encode.media_spans import Span
from packtool.errors import RowError
from packtool.rows.sample import Dropped, Sample

Side = Literal["left", "right"]


def kept_positions(protected: npt.NDArray[np.bool_], max_length: int, side: Side = "left") -> npt.NDArray[np.int64]:
    """Positions that stay, ascending.

    Args:
        protected: bool (L,), L > max_length, fewer than ``max_length`` of them set.
        max_length: most tokens afterwards.
        side: which end of the text is cut off.
    """
    room = max_length - int(protected.sum())
    assert room > 0, "the media leave room for text"
    keep = protected.copy()
    text = np.flatnonzero(~protected)
    keep[text[-room:] if side == "left" else text[:room]] = True
    return np.flatnonzero(keep)


def oldest_to_remove(spans: Sequence[Span], max_length: int) -> int:
    """How many media, from the first on, must go until those that stay leave room for text in ``max_length``."""
    left = sum(span.end - span.start for span in spans)
    for count, span in enumerate(spans):
        if left < max_length:
            return count
        left -= span.end - span.start
    return len(spans)


def moved_turns(turns: IntArray, kept: npt.NDArray[np.int64]) -> IntArray:
    """Turn spans after truncation; turns of which nothing is left are gone.

    Args:
        turns: int32 (2 * num_turns,), [start, end) pairs.
        kept: positions that stayed, ascending.
    """
    moved = np.searchsorted(kept, turns).astype(np.int32).reshape(-1, 2)
    # Nothing comes before the first token, so it cannot be a target.
    moved = np.maximum(moved, 1)
    return np.ascontiguousarray(moved[moved[:, 0] < moved[:, 1]].reshape(-1))


def moved_borders(borders: IntArray, kept: npt.NDArray[np.int64]) -> IntArray:
    """Places between tokens after truncation, int32 (B,), ascending.

    Args:
        borders: int32, ascending.
        kept: positions that stayed, ascending.
    """
    return np.unique(np.searchsorted(kept, borders)).astype(np.int32)


_NO_TARGET = "no_target_tokens"
_MAX_REMOVED = np.iinfo(np.int32).max  # what the cache's column can hold

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Tokenized:
    """A sample as tokens, of any length.

    Args:
        ids: int32 (L,).
        turns: int32 (2 * num_turns,), [start, end) of every assistant turn that may be trained.
        spans: of the media, ascending.
        images, videos, audios: in the order of their spans.
        weights: float32 (L,), of each token as a target, 0 for none; None if the tokens of ``turns`` weigh 1.
        num_removed: tokens that went before the sample is held to a length: with media, the middle of a long text, or
            of a medium that no sample can hold.
        borders: as those of ``EncodedSample``.
    """

    sample: Sample
    ids: IntArray
    turns: IntArray
    spans: Sequence[Span]
    images: tuple[EncodedImage, ...] = ()
    videos: tuple[EncodedVideo, ...] = ()
    audios: tuple[EncodedAudio, ...] = ()
    weights: npt.NDArray[np.float32] | None = None
    num_removed: int = 0
    borders: IntArray | None = None

    def in_media(self) -> npt.NDArray[np.bool_]:
        """Which tokens are a medium's, bool (L,)."""
        found = np.zeros(len(self.ids), bool)
        for span in self.spans:
            found[span.start : span.end] = True
        return found

    def taken(self, kept: Positions) -> Tokenized:
        """Some positions, ascending; each medium stays or goes as a whole."""
        spans, lists = [], {"image": list[Any](), "video": list[Any](), "audio": list[Any]()}
        old = {"image": self.images, "video": self.videos, "audio": self.audios}
        starts = np.searchsorted(kept, [span.start for span in self.spans])
        for span, start in zip(self.spans, starts.tolist(), strict=True):
            if start < len(kept) and kept[start] == span.start:
                spans.append(Span(span.kind, len(lists[span.kind]), start, start + span.end - span.start))
                lists[span.kind].append(old[span.kind][span.index])
        return replace(
            self,
            ids=self.ids[kept],
            turns=moved_turns(self.turns, kept),
            spans=spans,
            images=tuple(lists["image"]),
            videos=tuple(lists["video"]),
            audios=tuple(lists["audio"]),
            weights=self.weights[kept] if self.weights is not None else None,
            num_removed=self.num_removed + len(self.ids) - len(kept),
            borders=None if self.borders is None else moved_borders(self.borders, kept),
        )


def fit(item: Tokenized, spec: EncodeSpec) -> list[EncodedSample] | Dropped:
    """Hold a sample to ``spec.max_length`` and give it labels.

    Media that leave no room for any text are a matter of ``media_overflow``, all else of ``truncation_strategy``:
    with ``trim`` and ``delete`` a row loses its oldest media only if the media alone are too much, and is left out if
    what remains is still too long.

    Raises:
        RowError: if it does not fit and the strategy is ``raise``.
    """
    sample, limit = item.sample, spec.max_length
    if spec.truncation_strategy == "split":
        return _split(item, limit)
    if len(item.ids) > limit:
        if spec.truncation_strategy == "raise":
            over_long(sample, spec, str(len(item.ids) + item.num_removed))
        num_media_tokens = int(item.in_media().sum()) + (item.num_removed if item.spans else 0)
        if num_media_tokens >= limit:
            detail = f"{num_media_tokens} tokens of media leave no room for text in {limit}"
            if spec.media_overflow == "raise":
                raise _too_long(sample, detail)
            if spec.media_overflow == "drop":
                return Dropped(sample.source, sample.row, "media_over_limit", detail)
            item = _without_oldest(item, limit)
    if len(item.ids) > limit:
        if spec.truncation_strategy == "delete":
            return over_long(sample, spec, str(len(item.ids)))
        side: Side = "right" if spec.truncation_strategy == "right" else "left"
        item = item.taken(kept_positions(item.in_media(), limit, side))
    found = _labelled(item)
    if found is None:
        detail = "truncation left no target" if item.num_removed else "no assistant turn has tokens to learn"
        return Dropped(sample.source, sample.row, _NO_TARGET, detail)
    return [found]


def fit_all(parts: Sequence[Tokenized], spec: EncodeSpec) -> list[EncodedSample] | Dropped:
    """Hold the samples that a row is packed of to ``spec.max_length``, as ``fit`` does with one.

    Those without a target are left out, for they teach nothing, unless all are. One that is too long costs the row: of
    every row that goes in it is known whether it is kept.

    Raises:
        RowError: as ``fit``.
    """
    kept: list[EncodedSample] = []
    for number, part in enumerate(parts, 1):
        found = fit(part, spec)
        if not isinstance(found, Dropped):
            kept += found
        elif len(parts) == 1:
            return found
        elif found.reason != _NO_TARGET:
            return replace(found, detail=f"sample {number} of the {len(parts)} in the row: {found.detail}")
    if not kept:
        sample = parts[0].sample
        detail = f"none of the {len(parts)} samples in the row has tokens to learn"
        return Dropped(sample.source, sample.row, _NO_TARGET, detail)
    return kept


def over_long(sample: Sample, spec: EncodeSpec, length: str) -> Dropped:
    """What becomes of a row that is too long and is not cut.

    Args:
        length: its tokens, as far as they are known.

    Raises:
        RowError: if the strategy is ``raise``.
    """
    if spec.truncation_strategy == "raise":
        raise _too_long(sample, f"{length} tokens, at most {spec.max_length} are allowed")
    return Dropped(sample.source, sample.row, "over_max_length", f"{length} tokens, limit {spec.max_length}")


def _without_oldest(item: Tokenized, limit: int) -> Tokenized:
    keep = np.ones(len(item.ids), bool)
    for span in item.spans[: oldest_to_remove(item.spans, limit)]:
        keep[span.start : span.end] = False
    return item.taken(np.flatnonzero(keep))


def _split(item: Tokenized, limit: int) -> list[EncodedSample] | Dropped:
    """Pieces of a text, one behind the other; nothing is lost, but the first token of a piece has nothing before it."""
    sample = item.sample
    if not sample.is_text or item.spans:
        what = "has media" if item.spans else "is a conversation"
        detail = (
            f"--truncation-strategy split cuts texts for pretraining, and this row {what}; "
            "use --truncation-strategy delete, left or right"
        )
        return Dropped(sample.source, sample.row, "cannot_be_split", detail)
    pieces = [
        _labelled(replace(item.taken(np.arange(start, min(start + limit, len(item.ids)))), num_removed=0))
        for start in range(0, len(item.ids), limit)
    ]
    # A piece of one token alone has no target.
    kept = [piece for piece in pieces if piece is not None]
    return kept or Dropped(sample.source, sample.row, _NO_TARGET, "the text has fewer than two tokens")


def _labelled(item: Tokenized) -> EncodedSample | None:
    """The sample with its labels, None if no token is a target."""
    sample, ids, weights = item.sample, item.ids, item.weights
    if weights is None:
        labels = np.empty(len(ids), np.int32)
        labels.fill(IGNORE_INDEX)  # sooner than ``full``
        turns = item.turns.tolist()
        for start, end in zip(turns[::2], turns[1::2], strict=True):
            labels[start:end] = ids[start:end]
    else:
        labels = np.where(weights > 0, ids, np.int32(IGNORE_INDEX))
    for span in item.spans:
        labels[span.start : span.end] = IGNORE_INDEX
    # With nothing before it the first token cannot be predicted; the loss never looks at its label.
    if item.num_removed:
        labels[:1] = IGNORE_INDEX
    if len(ids) < 2 or labels[1:].max() < 0:
        return None
    loss_scale = None
    if weights is not None and not (weights[labels >= 0] == 1).all():
        loss_scale = np.where(labels >= 0, weights, np.float32(0))
    return EncodedSample(
        input_ids=ids,
        labels=labels,
        turns=item.turns,
        images=item.images,
        channel=sample.channel,
        source=sample.source,
        row=sample.row,
        num_truncated=min(item.num_removed, _MAX_REMOVED),
        videos=item.videos,
        audios=item.audios,
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
