"""Truncate tokenized samples to ``max_length``, and label them. Media are kept or removed as a whole.

Truncation removes text tokens from the beginning (``left``) or from the end (``right``). Media spans (opening mark,
placeholder tokens, closing mark, timestamps) stay, so adjacent pictures cannot merge. ``left`` does the same as
ms-swift, except that ms-swift also removes the marks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from packtool.config.data import EncodeSpec
from packtool.constants import IGNORE_INDEX
from packtool.encode.encoded import EncodedSample, IntArray, media_fields
from packtool.encode.media_spans import MediaTokens, MediumSpan, finds_order
from packtool.errors import RowError
from packtool.rows.sample import Dropped, Sample

_TOO_SHORT = "under_min_length"
_NO_TARGET = "no_target_tokens"
_NO_ORDER = (
    "this model's tokens do not show the order of the row's pictures and videos: put pictures before videos, or give "
    "rows with one of the two kinds"
)
_MAX_REMOVED = np.iinfo(np.int32).max  # maximum of the cache's column


@dataclass(frozen=True, eq=False)
class Tokenized:
    """A sample as L tokens, of any length and without labels.

    Args:
        ids: int32 (L,).
        turns: int32 (2 * num_turns,): [start, end) of every assistant turn that may be trained, flat.
        spans: of the media with their marks, ascending.
        weights: float32 (L,): weight of each token as a target, 0 for none; None if the tokens of ``turns`` weigh 1.
        num_removed: tokens removed so far: the middle of a very long text, tokens of a medium that no sample can hold,
            or entire media.
        borders: int32 (B,), ascending, as in ``EncodedSample``.
    """

    sample: Sample
    ids: IntArray
    turns: IntArray
    spans: Sequence[MediumSpan]
    weights: npt.NDArray[np.float32] | None = None
    num_removed: int = 0
    borders: IntArray | None = None

    @property
    def original_length(self) -> int:
        """Number of tokens before any were removed."""
        return len(self.ids) + self.num_removed

    def in_media(self) -> npt.NDArray[np.bool_]:
        """Return bool (L,), set for the tokens of media."""
        mask = np.zeros(len(self.ids), bool)
        for span in self.spans:
            mask[span.start : span.stop] = True
        return mask

    def take(self, kept: npt.NDArray[np.int64]) -> Tokenized:
        """Return the sample with only the tokens at ``kept``, int64 (K,), ascending; all of a medium's or none."""
        return replace(
            self,
            ids=self.ids[kept],
            turns=self._kept_turns(kept),
            spans=self._kept_spans(kept),
            weights=None if self.weights is None else self.weights[kept],
            num_removed=self.original_length - len(kept),
            borders=None if self.borders is None else np.unique(_moved(self.borders, kept)),
        )

    def _kept_turns(self, kept: npt.NDArray[np.int64]) -> IntArray:
        turns = _moved(self.turns, kept).reshape(-1, 2)  # (start, end) of each turn
        turns = np.maximum(turns, 1)  # nothing predicts the first token, so it is no target
        has_tokens = turns[:, 0] < turns[:, 1]
        return turns[has_tokens].reshape(-1)

    def _kept_spans(self, kept: npt.NDArray[np.int64]) -> list[MediumSpan]:
        new_starts = np.searchsorted(kept, [span.start for span in self.spans]).tolist()
        return [
            MediumSpan(span.medium, new_start, new_start + span.stop - span.start)
            for span, new_start in zip(self.spans, new_starts, strict=True)
            if new_start < len(kept) and kept[new_start] == span.start
        ]


def _moved(positions: IntArray, kept: npt.NDArray[np.int64]) -> IntArray:
    """Return positions among the tokens at ``kept``; those of removed tokens move to the next kept one."""
    return np.searchsorted(kept, positions).astype(np.int32)


def truncate(item: Tokenized, spec: EncodeSpec, tokens: MediaTokens | None = None) -> list[EncodedSample] | Dropped:
    """Shorten a tokenized sample to at most ``max_length`` tokens, and label it; or drop it, with the reason.

    The result has one sample, or several with the strategy ``split``. A sample is dropped if it is too short, too long
    for the strategy ``delete``, or without targets. RowError if it is too long for the strategy ``raise``.

    Args:
        tokens: the placeholder tokens of the model's media; with them, a sample is also dropped if its media could not
            be located again in their order.
    """
    sample = item.sample
    if item.original_length < spec.min_length:
        detail = f"{item.original_length} tokens, minimum {spec.min_length}"
        return Dropped(sample.source, sample.row, _TOO_SHORT, detail)
    if spec.truncation_strategy == "split":
        return _split(item, spec.max_length)

    if len(item.ids) > spec.max_length:
        shortened = _shorten(item, spec)
        if isinstance(shortened, Dropped):
            return shortened
        item = shortened

    encoded = _make_sample(item)  # None without a target
    if encoded is None:
        detail = "truncation removed all targets" if item.num_removed else "no assistant turn has a token to train"
        return Dropped(sample.source, sample.row, _NO_TARGET, detail)
    if tokens is not None and not finds_order(encoded, item.spans, tokens):
        return Dropped(sample.source, sample.row, "media_unsupported", _NO_ORDER)
    return [encoded]


def _shorten(item: Tokenized, spec: EncodeSpec) -> Tokenized | Dropped:
    """Shorten a sample of more than ``max_length`` tokens, or drop it; RowError if the strategy is ``raise``."""
    if spec.truncation_strategy == "raise":
        drop_too_long(item.sample, spec, str(item.original_length))  # raises RowError
    fitted = _fit_media(item, spec)
    if isinstance(fitted, Dropped) or len(fitted.ids) <= spec.max_length:
        return fitted
    if spec.truncation_strategy == "delete":
        return drop_too_long(item.sample, spec, str(len(fitted.ids)))
    is_kept = fitted.in_media()
    text_indices = np.flatnonzero(~is_kept)
    num_kept = spec.max_length - int(is_kept.sum())  # text tokens that fit beside the media
    assert num_kept > 0, "media that fill the sample were removed or rejected above"
    kept_text = text_indices[:num_kept] if spec.truncation_strategy == "right" else text_indices[-num_kept:]
    is_kept[kept_text] = True
    return fitted.take(np.flatnonzero(is_kept))


def _fit_media(item: Tokenized, spec: EncodeSpec) -> Tokenized | Dropped:
    """Remove the oldest media (``media_overflow`` "trim"), drop or raise if the media leave no room for text."""
    # Encoding may have removed tokens before, but from a sample with media only tokens of media.
    num_media_tokens = int(item.in_media().sum()) + (item.num_removed if item.spans else 0)
    if num_media_tokens < spec.max_length:
        return item
    detail = f"its media have {num_media_tokens} tokens, so no text fits into --max-length {spec.max_length}"
    if spec.media_overflow == "raise":
        raise _too_long_error(item.sample, detail)
    if spec.media_overflow == "drop":
        return Dropped(item.sample.source, item.sample.row, "media_over_limit", detail)
    return _without_oldest_media(item, spec.max_length)


def truncate_all(samples: Sequence[Tokenized], spec: EncodeSpec) -> list[EncodedSample] | Dropped:
    """Truncate and label the samples of a row that another tool has tokenized and packed; see ``truncate``.

    Samples that are too short or without a target are left out. The row is dropped if no sample is left, or if one is
    dropped for another reason.
    """
    kept: list[EncodedSample] = []
    for number, tokenized in enumerate(samples, 1):
        result = truncate(tokenized, spec)
        if not isinstance(result, Dropped):
            kept += result  # one sample, or several with ``split``
        elif len(samples) == 1:
            return result
        elif result.reason not in (_NO_TARGET, _TOO_SHORT):
            return replace(result, detail=f"sample {number} of {len(samples)} in the row: {result.detail}")
    if not kept:
        row = samples[0].sample
        detail = f"none of the {len(samples)} samples in the row has a token to train"
        return Dropped(row.source, row.row, _NO_TARGET, detail)
    return kept


def drop_too_long(sample: Sample, spec: EncodeSpec, length: str) -> Dropped:
    """Return the drop of a sample of ``length`` tokens ("at least 9000"); RowError if the strategy is ``raise``."""
    if spec.truncation_strategy == "raise":
        raise _too_long_error(sample, f"{length} tokens, and --max-length allows {spec.max_length}")
    return Dropped(sample.source, sample.row, "over_max_length", f"{length} tokens, limit {spec.max_length}")


def _without_oldest_media(item: Tokenized, max_length: int) -> Tokenized:
    """Remove media, the first ones first, until the others have fewer than ``max_length`` tokens."""
    keep = np.ones(len(item.ids), bool)
    num_media_tokens = sum(span.stop - span.start for span in item.spans)
    for span in item.spans:
        if num_media_tokens < max_length:
            break
        num_media_tokens -= span.stop - span.start
        keep[span.start : span.stop] = False
    return item.take(np.flatnonzero(keep))


def _split(item: Tokenized, max_length: int) -> list[EncodedSample] | Dropped:
    """Split a pretraining text into samples of at most ``max_length`` tokens; the first of each is no target."""
    sample = item.sample
    if not sample.is_text or item.spans:
        problem = "has media" if item.spans else "is a conversation"
        detail = (
            f"--truncation-strategy split is for pretraining texts, and this row {problem}: "
            "use --truncation-strategy delete, left or right"
        )
        return Dropped(sample.source, sample.row, "cannot_be_split", detail)
    kept: list[EncodedSample] = []
    for start in range(0, len(item.ids), max_length):
        window = item.take(np.arange(start, min(start + max_length, len(item.ids))))
        encoded = _make_sample(replace(window, num_removed=0))
        if encoded is not None:  # a window of a single token has no target
            kept.append(encoded)
    return kept or Dropped(sample.source, sample.row, _NO_TARGET, "the text has fewer than two tokens")


def _make_sample(item: Tokenized) -> EncodedSample | None:
    """Return the sample with its labels, None if no token is a target."""
    sample = item.sample
    labels = _labels(item)
    if not _has_target(item, labels):
        return None
    return EncodedSample(
        input_ids=item.ids,
        labels=labels,
        turns=item.turns,
        channel=sample.channel,
        source=sample.source,
        row=sample.row,
        num_truncated=min(item.num_removed, _MAX_REMOVED),
        loss_scale=None if item.weights is None else _target_weights(labels, item.weights),
        part=sample.part,
        borders=item.borders,
        **media_fields([span.medium for span in item.spans]),
    )


def _labels(item: Tokenized) -> IntArray:
    """Return the label of each token, int32 (L,)."""
    if item.weights is None:
        labels = _labels_of_turns(item)
    else:
        labels = np.where(item.weights > 0, item.ids, np.int32(IGNORE_INDEX))
    for span in item.spans:  # media are no targets
        labels[span.start : span.stop] = IGNORE_INDEX
    if item.num_removed:  # then the first token may be inside a turn, but nothing predicts it
        labels[:1] = IGNORE_INDEX
    return labels


def _target_weights(labels: IntArray, weights: npt.NDArray[np.float32]) -> npt.NDArray[np.float32] | None:
    """Return the weights of targets, and 0 for other tokens, float32 (L,); None if all targets weigh 1."""
    is_target = labels >= 0  # IGNORE_INDEX is negative
    return np.where(is_target, weights, np.float32(0)) if (weights[is_target] != 1).any() else None


def _labels_of_turns(item: Tokenized) -> IntArray:
    """Return new labels, int32 (L,), in which all tokens of all turns are targets."""
    labels = np.empty(len(item.ids), np.int32)
    labels.fill(IGNORE_INDEX)  # faster than ``np.full``
    flat_turns = item.turns.tolist()
    for start, end in zip(flat_turns[::2], flat_turns[1::2], strict=True):
        labels[start:end] = item.ids[start:end]
    return labels


def _has_target(item: Tokenized, labels: IntArray) -> bool:
    """Return whether a token after the first is a target; ``labels``, (L,), are those of the sample."""
    if item.weights is None and not item.spans:
        # All tokens of turns are targets. Most turns end after the first token, and numpy would take longer.
        return len(item.turns) > 0 and int(item.turns[-1]) > 1
    return len(labels) >= 2 and bool(labels[1:].max() >= 0)  # token ids are at least 0, IGNORE_INDEX is negative


def _too_long_error(sample: Sample, detail: str) -> RowError:
    return RowError(
        sample.source,
        sample.row,
        "over_max_length",
        detail if sample.part is None else f"{sample.part}: {detail}",
        "Raise --max-length, lower the media's limits, or use --truncation-strategy delete, left or right "
        "(and --media-overflow drop or trim).",
    )
