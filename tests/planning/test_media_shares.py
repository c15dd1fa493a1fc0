"""Which rank looks at which picture, as far as an index tells."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtool.planning.pack_plan import PackPlan
from packtool.planning.skrull import SHARDED
from packtool.planning.steps import StepAssignment, StepPlan
from packtool.planning.towers import Media, MediaShares, assign_heaviest_first

MERGED = 4


def media_of(pictures: list[list[int]], videos: list[int] | None = None) -> Media:
    """What an index tells of samples with pictures of so many tokens."""
    numbers: dict[str, list[int]] = {
        "tokens": [sum(each) for each in pictures],
        "squares": [sum((MERGED * tokens) ** 2 for tokens in each) for each in pictures],
        "num_images": [len(each) for each in pictures],
    }
    arrays: dict[str, Any] = {name: np.array(values, np.int64) for name, values in numbers.items()}
    num_videos = np.array(videos or [0] * len(pictures))
    arrays["num_images"] -= num_videos
    return Media.of_samples(**arrays, num_videos=num_videos, patches_per_token=MERGED)


@given(st.lists(st.lists(st.integers(1, 5000), max_size=6), min_size=1, max_size=8))
def test_largest_image_does_not_exceed_the_estimate(pictures: list[list[int]]) -> None:
    media = media_of(pictures)
    for sample_index, each in enumerate(pictures):
        is_of_sample = media.samples == sample_index
        assert is_of_sample.sum() == len(each)
        if each:
            assert media.tokens[is_of_sample].sum() == pytest.approx(sum(each))
            assert media.squares[is_of_sample].sum() == pytest.approx(sum((MERGED * tokens) ** 2 for tokens in each))
            assert media.tokens[is_of_sample].max() >= max(each) - 1e-6
            assert media.tokens[is_of_sample].min() >= 0


def test_one_large_image_is_estimated_exactly() -> None:
    assert media_of([[5000, 250, 250]]).tokens.tolist() == pytest.approx([5000, 250, 250])
    assert media_of([[250] * 4]).tokens.tolist() == pytest.approx([250] * 4)
    assert media_of([[300, 7]], videos=[1]).tokens.tolist() == [306, 1], "squares are of frames, not of videos"
    assert media_of([[300]], videos=[1]).tokens.tolist() == [300]


@given(st.lists(st.tuples(st.lists(st.integers(1, 500), max_size=4), st.booleans()), min_size=1, max_size=6))
def test_longest_sound_does_not_exceed_the_estimate(samples: list[tuple[list[int], bool]]) -> None:
    """Of sounds by themselves, or of as many videos: the index tells their tokens together."""
    tokens = np.array([sum(each) for each, _ in samples], np.int64)
    num_audios, num_videos = (
        np.array([len(each) * (are_tracks == of_videos) for each, are_tracks in samples], np.int64)
        for of_videos in (False, True)
    )
    pictures = media_of([[7]] * len(samples))
    media = pictures.with_sounds(tokens, num_audios, num_videos)
    assert media.tokens.sum() == pictures.tokens.sum()
    for sample_index, (each, _) in enumerate(samples):
        sounds = media.sounds[(media.samples == sample_index) & (media.tokens == 0)]
        assert len(sounds) == len(each)
        assert sounds.sum() == sum(each)
        assert sounds.max(initial=0) >= max(each, default=0)


@given(st.data())
def test_all_micro_batches_at_once_equal_one_by_one(data: st.DataObject) -> None:
    pictures = data.draw(st.lists(st.lists(st.integers(1, 60), max_size=4), min_size=1, max_size=12))
    size, num = data.draw(st.integers(1, 4)), len(pictures)
    ends = sorted(data.draw(st.sets(st.integers(1, num), max_size=3)) | {num})
    sizes = np.diff([0, *ends])
    lengths = np.ones(num, np.int32)
    packs = PackPlan(np.array(data.draw(st.permutations(range(num)))), np.arange(num + 1), lengths, 1)
    order = np.array(data.draw(st.permutations(range(num))))
    assignment = StepAssignment(order, sizes, np.ones(len(sizes), np.int64))
    steps = StepPlan.of(packs, lengths, assignment, world_size=1)
    place = st.sampled_from([SHARDED, *range(size)])
    places = np.array(data.draw(st.lists(place, min_size=num, max_size=num)))
    media = media_of(pictures)
    result = MediaShares.of_plan(media, media.tokens, packs, steps, size, places).max_per_rank(media.tokens)
    for cell, (start, stop) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        loads, weights = np.zeros(size), list[float]()
        for position in range(start, stop):
            its_tokens = media.tokens[media.samples == packs.samples[order[position]]]
            if places[position] == SHARDED:
                weights += its_tokens.tolist()
            else:
                loads[places[position]] += its_tokens.sum()
        np.add.at(loads, assign_heaviest_first(weights, loads.tolist()), weights)
        # Equal weights in another order go to other ranks, which then have as much.
        assert result[cell] == pytest.approx(loads.max())
