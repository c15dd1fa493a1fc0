from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from packtool.encode.families.qwen_vl import image_bounds, image_grid, video_bounds, video_grid
from packtool.encode.families.record import ImageLimits, VideoLimits, image_limits_of, video_limits_of
from packtool.rows.sample import MediaRef

OWN = ImageLimits(min_pixels=56 * 56, max_pixels=640 * 640, patch_size=14, merge_size=2, temporal_patch_size=2)


def videos(over_all_frames: bool) -> VideoLimits:
    return VideoLimits(
        fps=2.0,
        min_frames=4,
        max_frames=8,
        min_pixels=3000,
        max_pixels=200_000,
        over_all_frames=over_all_frames,
        frame_min_pixels=None,
        frame_max_pixels=None,
        total_pixels=None,
        even_ends=over_all_frames,
        patch_size=16,
        merge_size=2,
        temporal_patch_size=2,
    )


@settings(max_examples=60)
@given(
    sides=st.tuples(st.integers(20, 3000), st.integers(20, 3000)),
    bounds=st.tuples(st.integers(4 * 784, 10**6), st.integers(0, 10**6)),
)
@example(sides=(20, 252), bounds=(3136, 3087))  # shrunk, it is wider than unbounded
@example(sides=(204, 2530), bounds=(253_190, 492_832))  # stretched, it would be narrower
def test_image_bounds_reproduce_the_size_under_other_limits(sides: tuple[int, int], bounds: tuple[int, int]) -> None:
    there = replace(OWN, min_pixels=bounds[0], max_pixels=sum(bounds))
    try:
        grid = image_grid(*sides, there)
    except ValueError:
        return
    min_pixels, max_pixels = image_bounds(*sides, grid, OWN)
    assert image_grid(*sides, replace(OWN, min_pixels=min_pixels, max_pixels=max_pixels)) == grid
    assert image_bounds(*sides, image_grid(*sides, OWN), OWN) == (OWN.min_pixels, OWN.max_pixels)


@pytest.mark.parametrize("over_all_frames", [True, False])
@settings(max_examples=40)
@given(
    sides=st.tuples(st.integers(40, 1200), st.integers(40, 1200)),
    num_frames=st.integers(2, 9),
    max_pixels=st.integers(20_000, 10**6),
)
@example(
    sides=(195, 299), num_frames=3, max_pixels=200_348
)  # shrunk as three frames, larger than as the four it is counted as
def test_video_bounds_reproduce_the_size_under_other_limits(
    over_all_frames: bool, sides: tuple[int, int], num_frames: int, max_pixels: int
) -> None:
    limits = videos(over_all_frames)
    try:
        grid = video_grid(*sides, num_frames, replace(limits, max_pixels=max_pixels))
    except ValueError:
        return
    assert video_grid(*sides, num_frames, limits, video_bounds(*sides, num_frames, grid, limits)) == grid


def test_limits_of_one_medium() -> None:
    def ref(**limits: float) -> MediaRef:
        return MediaRef("a", limits=tuple(limits.items()))

    assert image_limits_of(ref(), OWN) is OWN
    assert image_limits_of(ref(max_pixels=1000), OWN) == replace(OWN, min_pixels=1000, max_pixels=1000)
    assert image_limits_of(ref(min_pixels=10**6), OWN) == replace(OWN, min_pixels=10**6, max_pixels=10**6)
    with pytest.raises(ValueError, match="at least 9 and at most 5 pixels"):
        image_limits_of(ref(min_pixels=9, max_pixels=5), OWN)
    limits, each = videos(over_all_frames=True), videos(over_all_frames=False)
    assert video_limits_of(ref(fps=1, max_frames=2), limits) == replace(limits, fps=1.0, min_frames=2, max_frames=2)
    assert video_limits_of(ref(max_pixels=900, total_pixels=5000), limits) == replace(
        limits, frame_max_pixels=900, max_pixels=5000
    )
    assert video_limits_of(ref(max_pixels=900, total_pixels=5000), each) == replace(
        each, min_pixels=900, max_pixels=900, total_pixels=5000
    )


def test_impossible_size_keeps_the_original_limits() -> None:
    assert image_bounds(200, 100, (1, 7, 9), OWN) == (OWN.min_pixels, OWN.max_pixels)
