"""Grids of videos against the processor that transformers makes of the same folder, whatever sizes and limits."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoVideoProcessor

from packtool.config.data import MediaOptions
from packtool.encode.families.qwen_vl import clip_frames, sample_clip, video_grid, video_limits

PATCHES = {"temporal_patch_size": 2, "merge_size": 2, "size": {"shortest_edge": 784, "longest_edge": 40000}}
PICTURES = {"plain": "Qwen2VLImageProcessor", "fast": "Qwen2VLImageProcessorFast", "unnamed": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processors")


def write(path: Path, value: dict[str, Any]) -> dict[str, Any]:
    path.write_text(json.dumps(value))
    return value


@cache
def processor(folder: Path, model_type: str, patch_size: int, pictures: str, videos: str | None) -> tuple[Any, Any]:
    """The settings that packtool reads, and what transformers makes of them."""
    place = folder / f"{model_type}-{patch_size}-{pictures}-{videos}"
    place.mkdir()
    write(place / "config.json", {"model_type": model_type})
    patches = PATCHES | {"patch_size": patch_size}
    named = {"image_processor_type": PICTURES[pictures]} if PICTURES[pictures] else {}
    preprocessor_config = write(place / "preprocessor_config.json", patches | named)
    if videos is not None:
        preprocessor_config = write(
            place / "video_preprocessor_config.json", patches | {"video_processor_type": videos}
        )
    processor_class: Any = AutoVideoProcessor
    return preprocessor_config, processor_class.from_pretrained(place)


@settings(max_examples=60)
@given(
    model_type=st.sampled_from(["qwen2_5_vl", "qwen3_vl"]),
    patch_size=st.sampled_from([14, 16]),
    pictures=st.sampled_from(sorted(PICTURES)),
    videos=st.sampled_from([None, "Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor"]),
    frames=st.integers(2, 9),
    height=st.integers(1, 300),
    width=st.integers(1, 300),
    total=st.none() | st.integers(1000, 200_000),
    max_pixels=st.none() | st.integers(800, 40_000),
)
def test_grids_equal_those_of_the_processor(folder: Path, **settings_drawn: Any) -> None:
    wants = {"qwen2_5_vl": "Qwen2VLVideoProcessor", "qwen3_vl": None}[settings_drawn["model_type"]]
    videos = settings_drawn["videos"] if settings_drawn["videos"] is None or wants is None else wants
    place = settings_drawn["model_type"], settings_drawn["patch_size"], settings_drawn["pictures"], videos
    config_values, video_processor = processor(folder, *place)
    options = MediaOptions(video_total_pixels=settings_drawn["total"], video_max_pixels=settings_drawn["max_pixels"])
    limits = video_limits(config_values, options, is_qwen3=settings_drawn["model_type"] == "qwen3_vl")
    min_pixels, max_pixels = limits.bounds(settings_drawn["frames"])
    pixels = torch.zeros(
        settings_drawn["frames"], 3, settings_drawn["height"], settings_drawn["width"], dtype=torch.uint8
    )
    processor_options = {"do_sample_frames": False, "cap_pixels_per_frame": False, "return_tensors": "pt"}
    try:
        grid = video_grid(settings_drawn["height"], settings_drawn["width"], settings_drawn["frames"], limits)
    except ValueError:
        with pytest.raises((ValueError, RuntimeError, ZeroDivisionError)):
            video_processor(
                videos=[pixels], size={"shortest_edge": min_pixels, "longest_edge": max_pixels}, **processor_options
            )
        return
    inputs = video_processor(
        videos=[pixels], size={"shortest_edge": min_pixels, "longest_edge": max_pixels}, **processor_options
    )
    assert grid == tuple(inputs["video_grid_thw"][0].tolist())


@pytest.mark.parametrize(
    ("num_frames", "fps", "clip", "indices"),
    # As qwen-vl-utils 0.0.14 takes them.
    [
        (50, 25.0, (0.5, 1.5), [13, 21, 29, 37]),
        (900, 29.97, (3.0, 7.25), [90, 108, 126, 144, 163, 181, 199, 217]),
        (250, 25.0, (None, 4.2), [0, 15, 30, 45, 60, 75, 90, 105]),
        (250, 25.0, (8.0, 99.0), [200, 216, 233, 249]),
    ],
)
@pytest.mark.parametrize("is_qwen3", [False, True])
def test_clip_frames_equal_those_of_qwen_tools(
    num_frames: int, fps: float, clip: tuple[float | None, float | None], indices: list[int], is_qwen3: bool
) -> None:
    limits = video_limits({}, MediaOptions(), is_qwen3=is_qwen3)
    assert list(sample_clip(*clip_frames(clip, num_frames, fps), fps, limits)) == indices


def test_invalid_clips_are_refused() -> None:
    with pytest.raises(ValueError, match=r"from 10 s on begins after the end of the video \(10\.00 s\)"):
        clip_frames((10.0, None), 250, 25.0)
    with pytest.raises(ValueError, match=r"from 9\.95 to 10 s has fewer than two frames \(at 25 per second\)"):
        clip_frames((9.95, None), 250, 25.0)
