from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtool.config.data import EncodeSpec
from packtool.encode.encoded import EncodedAudio, EncodedImage, EncodedSample, EncodedVideo
from packtool.encode.media_spans import MediumSpan
from packtool.encode.truncation import Tokenized, truncate
from packtool.errors import RowError
from packtool.rows.sample import Dropped, Sample, Turn

PAD = 7
MEDIA_TYPES = {"image": EncodedImage, "video": EncodedVideo, "audio": EncodedAudio}


def spec(limit: int, **settings: Any) -> EncodeSpec:
    return EncodeSpec(model="m", max_length=limit, **settings)


def medium(kind: str, num_tokens: int) -> Any:
    if kind == "image":
        return EncodedImage("a.png", None, 1, 1, (1, 2, 2), num_tokens)
    if kind == "audio":
        return EncodedAudio("a.wav", None, 1, 1, num_tokens)
    return EncodedVideo("a.mp4", None, (), 1, 1, 1, 1.0, (0,), (1, 2, 2), 1.0, num_tokens)


def tokenized(parts: list[tuple[str, int]], *, weights: bool = False, is_text: bool = False) -> Tokenized:
    """A sample of ``("user" | "assistant" | "image" | "video" | "audio", tokens)``; text ids are 100, 101, ..."""
    ids: list[int] = []
    turns: list[int] = []
    spans: list[MediumSpan] = []
    for kind, count in parts:
        start = len(ids)
        if kind in MEDIA_TYPES:
            ids += [1, *[PAD] * (count - 2), 2]
            spans.append(MediumSpan(medium(kind, count - 2), start, len(ids)))
            continue
        ids += range(100 + start, 100 + start + count)
        if kind == "assistant" and count:
            turns += [start, len(ids)]
    sample = Sample((Turn("user", "?"),), (), "rows.jsonl", 3, is_text=is_text)
    array = np.array(ids, np.int32)
    given_weights = np.zeros(len(ids), np.float32)
    for start, end in zip(turns[::2], turns[1::2], strict=True):
        given_weights[start:end] = 2.0
    return Tokenized(
        sample=sample,
        ids=array,
        turns=np.array(turns, np.int32),
        spans=spans,
        weights=given_weights if weights else None,
    )


PARTS = st.lists(
    st.tuples(st.sampled_from(["user", "assistant"]), st.integers(0, 12))
    | st.tuples(st.sampled_from(["image", "video", "audio"]), st.integers(3, 12)),
    min_size=1,
    max_size=10,
)


@settings(max_examples=400)
@given(PARTS, st.integers(2, 60), st.sampled_from(["left", "right"]), st.sampled_from(["drop", "trim"]), st.booleans())
def test_truncated_samples_keep_complete_media_in_order(
    parts: list[tuple[str, int]], limit: int, strategy: str, overflow: str, weights: bool
) -> None:
    item = tokenized(parts, weights=weights)
    result = truncate(item, spec(limit, truncation_strategy=strategy, media_overflow=overflow))
    num_media_tokens = int(item.in_media().sum())
    if isinstance(result, Dropped):
        assert result.reason in ("no_target_tokens", "media_over_limit")
        assert result.reason != "media_over_limit" or (overflow == "drop" and num_media_tokens >= limit)
        return
    (sample,) = result
    assert sample.length == min(limit, len(item.ids)) or overflow == "trim"
    assert sample.length <= limit
    assert sample.num_truncated == len(item.ids) - sample.length
    # A subsequence: text ids rise, and each medium is whole.
    text = sample.input_ids[sample.input_ids >= 100]
    assert (np.diff(text) > 0).all()
    assert int((sample.input_ids == PAD).sum()) == sample.num_media_tokens
    assert int((sample.input_ids == 1).sum()) == len(sample.images) + len(sample.videos) + len(sample.audios)
    for kind, media_type in MEDIA_TYPES.items():
        remaining = getattr(sample, f"{kind}s")
        before = [span.medium for span in item.spans if isinstance(span.medium, media_type)]
        assert [*remaining] == before[len(before) - len(remaining) :]  # the oldest went
        if num_media_tokens < limit:
            assert len(remaining) == len(before)
    labelled = sample.labels != -100
    assert (sample.labels[labelled] == sample.input_ids[labelled]).all()
    assert (sample.input_ids[labelled] >= 100).all()
    if sample.num_truncated:
        assert not labelled[0]
    if weights:
        assert sample.loss_scale is not None
        np.testing.assert_array_equal(sample.loss_scale, np.where(labelled, 2.0, 0.0))
    whole_text = item.ids[item.ids >= 100]
    kept_text = whole_text[-len(text) :] if strategy == "left" else whole_text[: len(text)]
    np.testing.assert_array_equal(text, kept_text if len(text) else whole_text[:0])


def test_media_alone_over_the_limit() -> None:
    parts = [("image", 30), ("user", 5), ("image", 30), ("assistant", 5)]
    dropped = truncate(tokenized(parts), spec(50))
    assert isinstance(dropped, Dropped)
    assert dropped.reason == "media_over_limit"
    assert "its media have 60 tokens, so no text fits into --max-length 50" in dropped.detail
    with pytest.raises(RowError, match=r"rows\.jsonl, row 3: .*media have 60 tokens"):
        truncate(tokenized(parts), spec(50, media_overflow="raise"))
    (sample,) = truncate(tokenized(parts), spec(50, media_overflow="trim"))
    assert isinstance(sample, EncodedSample)
    assert (sample.length, sample.num_truncated, len(sample.images)) == (40, 30, 1)
    # What the media leave must still fit: delete leaves the row out, left cuts it.
    still_long = [("image", 30), ("user", 30), ("image", 30), ("assistant", 5)]
    assert isinstance(truncate(tokenized(still_long), spec(50, media_overflow="trim")), Dropped)
    (truncated,) = truncate(tokenized(still_long), spec(50, media_overflow="trim", truncation_strategy="left"))
    assert isinstance(truncated, EncodedSample)
    assert (truncated.length, truncated.num_truncated) == (50, 45)


@settings(max_examples=100)
@given(st.integers(0, 100), st.integers(2, 20))
def test_split_text_keeps_all_tokens(length: int, limit: int) -> None:
    item = tokenized([("assistant", length)], is_text=True)
    pieces = truncate(item, spec(limit, truncation_strategy="split"))
    if isinstance(pieces, Dropped):
        assert length < 2
        return
    joined = np.concatenate([piece.input_ids for piece in pieces])
    # A last piece of a single token would have nothing to learn.
    assert len(joined) in (length, length - 1)
    np.testing.assert_array_equal(joined, item.ids[: len(joined)])
    assert all(piece.length <= limit for piece in pieces)
    for piece in pieces:
        np.testing.assert_array_equal(piece.labels[1:], piece.input_ids[1:])


def test_split_drops_samples_that_are_not_texts() -> None:
    conversation = truncate(tokenized([("user", 3), ("assistant", 3)]), spec(100, truncation_strategy="split"))
    image_result = truncate(
        tokenized([("image", 3), ("assistant", 3)], is_text=True), spec(100, truncation_strategy="split")
    )
    for dropped, description in ((conversation, "this row is a conversation"), (image_result, "this row has media")):
        assert isinstance(dropped, Dropped)
        assert (dropped.reason, description in dropped.detail) == ("cannot_be_split", True)


@settings(max_examples=100)
@given(PARTS, st.integers(2, 60), st.integers(0, 60), st.sampled_from(["left", "right", "delete"]))
def test_samples_of_too_few_tokens_are_dropped(
    parts: list[tuple[str, int]], limit: int, minimum: int, strategy: str
) -> None:
    """The length before truncation counts; all others are as without a minimum."""
    item = tokenized(parts)
    result = truncate(item, spec(limit, truncation_strategy=strategy, min_length=minimum))
    if len(item.ids) < minimum:
        assert isinstance(result, Dropped)
        assert (result.reason, result.detail) == ("under_min_length", f"{len(item.ids)} tokens, minimum {minimum}")
        return
    expected = truncate(item, spec(limit, truncation_strategy=strategy))
    if isinstance(result, Dropped) or isinstance(expected, Dropped):
        assert result == expected
    else:
        assert [sample.length for sample in result] == [sample.length for sample in expected]
