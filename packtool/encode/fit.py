"""A tokenized sample is held to ``max_length`` and given its labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from packtool.config import EncodeSpec
from packtool.constants import IGNORE_INDEX
from packtool.encode.assemble import Span
from packtool.encode.encoded import EncodedAudio, EncodedImage, EncodedSample, EncodedVideo, IntArray
from packtool.encode.truncate import kept_positions, moved_turns
from packtool.errors import RowError
from packtool.rows.sample import Dropped, Sample


@dataclass(frozen=True, eq=False)
class Tokenized:
    """A sample as tokens, of any length.

    Args:
        ids: int32 (L,).
        turns: int32 (2 * num_turns,), [start, end) of every assistant turn that may be trained.
        spans: of the media.
        images, videos, audios: in the order of their spans.
    """

    sample: Sample
    ids: IntArray
    turns: IntArray
    spans: Sequence[Span]
    images: tuple[EncodedImage, ...] = ()
    videos: tuple[EncodedVideo, ...] = ()
    audios: tuple[EncodedAudio, ...] = ()


def fit(item: Tokenized, spec: EncodeSpec) -> list[EncodedSample] | Dropped:
    """Hold a sample to ``spec.max_length`` and give it labels.

    Raises:
        RowError: if it is too long and the strategy is ``raise``.
    """
    sample, limit, length = item.sample, spec.max_length, len(item.ids)
    in_media = np.zeros(length, bool)
    for span in item.spans:
        in_media[span.start : span.end] = True
    ids, turns, kept = item.ids, item.turns, None
    if length > limit:
        if spec.truncation_strategy == "raise":
            raise RowError(
                sample.source,
                sample.row,
                "over_max_length",
                f"{length} tokens, at most {limit} are allowed",
                "Raise --max-length, or use --truncation-strategy delete or left.",
            )
        kept = kept_positions(in_media, limit)
        if kept is None:
            detail = f"{int(in_media.sum())} tokens of media leave no room for text in {limit}"
            return Dropped(sample.source, sample.row, "media_over_limit", detail)
        if spec.truncation_strategy == "delete":
            return Dropped(sample.source, sample.row, "over_max_length", f"{length} tokens, limit {limit}")
        ids, turns, in_media = ids[kept], moved_turns(turns, kept), in_media[kept]
    labels = np.full(len(ids), IGNORE_INDEX, np.int32)
    for start, end in turns.reshape(-1, 2):
        labels[start:end] = ids[start:end]
    labels[in_media] = IGNORE_INDEX
    if not (labels[1:] != IGNORE_INDEX).any():
        detail = "truncation left no target" if length > limit else "no assistant turn has tokens to learn"
        return Dropped(sample.source, sample.row, "no_target_tokens", detail)
    return [
        EncodedSample(
            input_ids=ids,
            labels=labels,
            turns=turns,
            images=item.images,
            channel=sample.channel,
            source=sample.source,
            row=sample.row,
            num_truncated=length - len(ids),
            videos=item.videos,
            audios=item.audios,
        )
    ]
