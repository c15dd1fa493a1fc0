"""Sampled frames and resized sizes of pictures and videos of Qwen's families.

Mirrors ``Qwen2VLVideoProcessor`` (Qwen2-VL, Qwen2.5-VL, Omni) and ``Qwen3VLVideoProcessor`` of transformers, without
their optional cap on a frame's share of a video. The variables that Qwen's tools and ms-swift read set other limits:
``VIDEO_MAX_PIXELS`` for one frame, ``VIDEO_TOTAL_PIXELS`` for all, ``FPS`` and its bounds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from packtool.config.data import MediaOptions
from packtool.encode.families.record import ImageLimits, VideoLimits
from packtool.errors import ConfigError

_MAX_ASPECT = 200
_NAMED_ALIKE = "Qwen2VLImageProcessor"


def smart_resize(
    height: int,
    width: int,
    factor: int,
    min_pixels: int,
    max_pixels: int,
    *,
    num_frames: int = 1,
    num_counted: int = 1,
) -> tuple[int, int]:
    """Return height and width as multiples of ``factor`` with min_pixels <= frames * height * width <= max_pixels.

    The aspect ratio is kept as well as that allows; the rounding is that of transformers' function of the same name.

    Args:
        num_frames: frames that share the bounds.
        num_counted: frames by which the rounded size is compared with the bounds.

    Raises:
        ValueError: if one side is more than 200 times the other.
    """
    if max(height, width) / min(height, width) > _MAX_ASPECT:
        raise ValueError(f"{width}x{height} pixels: one side is more than {_MAX_ASPECT} times the other")
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if num_counted * new_height * new_width > max_pixels:
        shrink = math.sqrt(num_frames * height * width / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif num_counted * new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (num_frames * height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


def resize_together(
    height: int, width: int, num_taken: int, limits: VideoLimits | ImageLimits, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Return height and width such that all frames together have from ``min_pixels`` to ``max_pixels``."""
    factor, step = limits.patch_size * limits.merge_size, limits.temporal_patch_size
    if num_taken < step:
        raise _too_few_frames(num_taken, step)
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    num_counted = num_bounded_frames(num_taken, limits)
    return smart_resize(height, width, factor, min_pixels, max_pixels, num_frames=num_taken, num_counted=num_counted)


def num_bounded_frames(num_taken: int, limits: VideoLimits | ImageLimits) -> int:
    """Return the frames that transformers multiplies by a frame's pixels to compare with the bounds: rounded steps."""
    return round(num_taken / limits.temporal_patch_size) * limits.temporal_patch_size


def _too_few_frames(num_frames: int, step: int) -> ValueError:
    return ValueError(f"a video of {num_frames} frames; {step} are needed at least")


def video_limits(
    processor: Mapping[str, Any],
    options: MediaOptions,
    *,
    is_qwen3: bool,
    frame_tokens: tuple[int, int] | None = None,
) -> VideoLimits:
    """Return the limits of the processor's settings, overridden by the user's.

    Args:
        is_qwen3: frames are spread from the first to the last, and bounds are for all frames together, unless the
            settings are another processor's.
        frame_tokens: (min, max) tokens of a frame where the family's processor sets them itself (Omni).

    Raises:
        ConfigError: if limits contradict each other.
    """
    size = processor.get("size") or {}
    over_all = is_qwen3 and _bounds_all_frames(processor)
    patch_size = int(processor.get("patch_size", 16 if over_all else 14))
    merge_size = int(processor.get("merge_size", 2))
    per_token = (patch_size * merge_size) ** 2
    min_pixels, max_pixels = (tokens * per_token for tokens in frame_tokens or (128, 768))
    if frame_tokens is None:
        min_pixels = processor.get("min_pixels") or size.get("shortest_edge") or min_pixels
        max_pixels = processor.get("max_pixels") or size.get("longest_edge") or max_pixels
    frame_min, frame_max = options.video_min_pixels, options.video_max_pixels
    if frame_min is None and options.video_min_token_num is not None:
        frame_min = options.video_min_token_num * per_token
    if frame_max is None and options.video_max_token_num is not None:
        frame_max = options.video_max_token_num * per_token
    limits = VideoLimits(
        fps=float(options.fps or processor.get("fps") or 2.0),
        min_frames=options.fps_min_frames or int(processor.get("min_frames") or 4),
        max_frames=options.fps_max_frames or int(processor.get("max_frames") or 768),
        min_pixels=int(min_pixels if over_all else frame_min or min_pixels),
        max_pixels=int(options.video_total_pixels or max_pixels if over_all else frame_max or max_pixels),
        over_all_frames=over_all,
        frame_min_pixels=frame_min if over_all else None,
        frame_max_pixels=frame_max if over_all else None,
        total_pixels=None if over_all else options.video_total_pixels,
        even_ends=is_qwen3,
        patch_size=patch_size,
        merge_size=merge_size,
        temporal_patch_size=int(processor.get("temporal_patch_size", 2)),
    )
    for what, lowest, highest in (
        ("frames of a video", limits.min_frames, limits.max_frames),
        ("pixels of a frame", limits.frame_min_pixels or 0, limits.frame_max_pixels or math.inf),
        ("pixels of a video", limits.min_pixels, limits.max_pixels),
    ):
        if lowest > highest:
            raise ConfigError(
                f"the least {what} ({lowest}) are more than the most ({highest})",
                "Set both limits: what you leave out comes from the model's processor settings.",
            )
    return limits


def _bounds_all_frames(processor: Mapping[str, Any]) -> bool:
    """Return whether transformers' processor for a Qwen3-VL model's settings bounds all frames together.

    In a folder without video settings, the picture settings stand for both. transformers then makes the video
    processor with the name of the picture processor, if there is one (none for ...Fast): Qwen2-VL's, which bounds each
    frame.
    """
    name = processor.get("video_processor_type")
    return not str(name).startswith("Qwen2") if name else processor.get("image_processor_type") != _NAMED_ALIKE


def sample_frames(num_frames: int, fps: float, limits: VideoLimits) -> tuple[int, ...]:
    """Return the numbers of the frames to take of a video.

    Raises:
        ValueError: if it has too few for one step of the model's time.
    """
    step = limits.temporal_patch_size
    wanted = num_frames / fps * limits.fps
    if limits.even_ends:
        count = min(max(int(wanted), limits.min_frames), limits.max_frames, num_frames)
        if count < step:
            raise _too_few_frames(num_frames, step)
        return tuple(np.linspace(0, num_frames - 1, count).round().astype(int).tolist())
    max_frames = min(limits.max_frames, num_frames) // step * step
    count = int(min(max(wanted, limits.min_frames), max_frames, num_frames)) // step * step
    if not count:
        raise _too_few_frames(num_frames, step)
    # The processor's torch.arange counts in float32, whose rounding decides which frame comes first.
    numbers = (np.arange(count) * (num_frames / count)).astype(np.float32)
    return tuple(numbers.astype(int).tolist())


def clip_frames(clip: tuple[float | None, float | None], num_frames: int, fps: float) -> tuple[int, int]:
    """Return (first frame, number of frames) of a clip in seconds, as Qwen's tools count them.

    The last frame belongs to it, and a clip that continues past the end of the video ends there.

    Raises:
        ValueError: if the clip begins after the end of the video, or has fewer than two frames.
    """
    seconds = num_frames / fps
    start, end = clip[0] or 0.0, seconds if clip[1] is None else clip[1]
    if start >= seconds:
        raise ValueError(f"a clip from {start:g} s on, and the video is {seconds:.2f} s long")
    first, last = math.ceil(start * fps), min(math.floor(min(end, seconds) * fps), num_frames - 1)
    if first >= last:
        raise ValueError(f"a clip from {start:g} to {end:g} s, in which there are no two of {fps:g} frames a second")
    return first, last - first + 1


def sample_clip(start: int, num_frames: int, fps: float, limits: VideoLimits) -> tuple[int, ...]:
    """Return the numbers of the frames to take of a clip.

    Processors know no clips: these are the frames of Qwen's tools, which take a multiple of the model's step and
    spread it from the first to the last one, whatever the family.
    """
    step = limits.temporal_patch_size
    even_steps = dataclasses.replace(limits, even_ends=False, min_frames=-(-limits.min_frames // step) * step)
    num_taken = len(sample_frames(num_frames, fps, even_steps))
    # Theirs is torch.linspace, which adds a float32 step from both ends, and whose rounding decides.
    gap = float(np.float32(num_frames - 1) / np.float32(num_taken - 1))
    steps = np.arange(num_taken)
    numbers = np.where(steps < num_taken // 2, start + gap * steps, start + num_frames - 1 - gap * steps[::-1])
    return tuple(numbers.astype(np.float32).round().astype(int).tolist())


def video_grid(
    height: int, width: int, num_taken: int, limits: VideoLimits, bounds: tuple[int, int] | None = None
) -> tuple[int, int, int]:
    """Return (t, h, w) in patches of ``num_taken`` frames of ``height`` x ``width`` pixels.

    Args:
        bounds: (min, max) pixels that the processor gets; by default those of the limits.

    Raises:
        ValueError: if the video cannot be shown to the model.
    """
    min_pixels, max_pixels = bounds or limits.bounds(num_taken)
    if limits.over_all_frames:
        new_height, new_width = resize_together(height, width, num_taken, limits, min_pixels, max_pixels)
    else:
        factor = limits.patch_size * limits.merge_size
        new_height, new_width = smart_resize(height, width, factor, min_pixels, max_pixels)
    if not new_height or not new_width:
        raise ValueError(f"{width}x{height} pixels round to nothing at the limits given")
    steps = -(-num_taken // limits.temporal_patch_size)
    return steps, new_height // limits.patch_size, new_width // limits.patch_size


def timestamps(indices: Sequence[int], fps: float, step: int) -> list[float]:
    """Return the seconds of each step of the grid: the middle between its first and last frame."""
    padded = [*indices, *[indices[-1]] * (-len(indices) % step)]
    seconds = [index / fps for index in padded]
    return [(seconds[i] + seconds[i + step - 1]) / 2 for i in range(0, len(seconds), step)]
