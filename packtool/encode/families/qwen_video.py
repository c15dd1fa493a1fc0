"""Videos for Qwen's families: which frames are taken, and how large they become.

Mirrors ``Qwen2VLVideoProcessor`` (Qwen2-VL, Qwen2.5-VL, Omni) and ``Qwen3VLVideoProcessor`` of transformers, without
their optional cap on a frame's share of a whole video. The variables that Qwen's tools and ms-swift read set other
limits: ``VIDEO_MAX_PIXELS`` for one frame, ``VIDEO_TOTAL_PIXELS`` for all, ``FPS`` and its bounds.

Sizes rounded to whole tokens, as Qwen's processors do it.
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


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Height and width in pixels that are multiples of ``factor`` with min_pixels <= h * w <= max_pixels.

    The aspect ratio is kept as well as that allows; the rounding is that of transformers' function of the same name.

    Raises:
        ValueError: if one side is more than 200 times the other.
    """
    if max(height, width) / min(height, width) > _MAX_ASPECT:
        raise ValueError(f"{width}x{height} pixels: one side is more than {_MAX_ASPECT} times the other")
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


_FPS = 2.0
_MIN_FRAMES, _MAX_FRAMES = 4, 768
# Processors of pictures for which one of videos has the same name; there is none for ...Fast.
_NAMED_ALIKE = ("Qwen2VLImageProcessor",)


def video_limits(
    processor: Mapping[str, Any],
    options: MediaOptions,
    *,
    is_qwen3: bool,
    frame_tokens: tuple[int, int] | None = None,
) -> VideoLimits:
    """Limits from the processor's settings, overridden by the user's.

    Args:
        is_qwen3: frames are spread from the first to the last, and bounds are for all frames together, unless the
            settings are another processor's.
        frame_tokens: least and most tokens of a frame where the family's processor sets them itself (Omni).

    Raises:
        ConfigError: if limits contradict each other.
    """
    size = processor.get("size") or {}
    of_all = is_qwen3 and _bounds_all_frames(processor)
    patch_size = int(processor.get("patch_size", 16 if of_all else 14))
    merge_size = int(processor.get("merge_size", 2))
    per_token = (patch_size * merge_size) ** 2
    low, high = frame_tokens or (128, 768)
    least, most = low * per_token, high * per_token
    if frame_tokens is None:
        least = processor.get("min_pixels") or size.get("shortest_edge") or least
        most = processor.get("max_pixels") or size.get("longest_edge") or most
    frame_least = _pixels(options.video_min_pixels, options.video_min_token_num, per_token)
    frame_most = _pixels(options.video_max_pixels, options.video_max_token_num, per_token)
    limits = VideoLimits(
        fps=float(options.fps or processor.get("fps") or _FPS),
        min_frames=options.fps_min_frames or int(processor.get("min_frames") or _MIN_FRAMES),
        max_frames=options.fps_max_frames or int(processor.get("max_frames") or _MAX_FRAMES),
        min_pixels=int(least if of_all else frame_least or least),
        max_pixels=int(options.video_total_pixels or most if of_all else frame_most or most),
        over_all_frames=of_all,
        frame_min_pixels=frame_least if of_all else None,
        frame_max_pixels=frame_most if of_all else None,
        total_pixels=None if of_all else options.video_total_pixels,
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
    """Whether the processor that transformers makes of a Qwen3-VL model's settings bounds all frames together.

    In a folder without settings for videos the pictures' stand for both, and transformers makes the video processor
    that is named as the pictures' is, if there is one: Qwen2-VL's, which bounds each frame.
    """
    named = processor.get("video_processor_type")
    return not str(named).startswith("Qwen2") if named else processor.get("image_processor_type") not in _NAMED_ALIKE


def _pixels(pixels: int | None, tokens: int | None, per_token: int) -> int | None:
    return pixels if pixels is not None else None if tokens is None else tokens * per_token


def sample_frames(num_frames: int, fps: float, limits: VideoLimits) -> tuple[int, ...]:
    """Numbers of the frames to take of a video.

    Raises:
        ValueError: if it has too few for one step of the model's time.
    """
    step = limits.temporal_patch_size
    wanted = num_frames / fps * limits.fps
    if limits.even_ends:
        count = min(max(int(wanted), limits.min_frames), limits.max_frames, num_frames)
        if count < step:
            raise ValueError(f"a video of {num_frames} frames; {step} are needed at least")
        return tuple(np.linspace(0, num_frames - 1, count).round().astype(int).tolist())
    most = min(limits.max_frames, num_frames) // step * step
    count = int(min(max(wanted, limits.min_frames), most, num_frames)) // step * step
    if not count:
        raise ValueError(f"a video of {num_frames} frames; {step} are needed at least")
    # The processor's torch.arange counts in float32, whose rounding decides which frame comes first.
    places = (np.arange(count) * (num_frames / count)).astype(np.float32)
    return tuple(places.astype(int).tolist())


def clip_frames(clip: tuple[float | None, float | None], num_frames: int, fps: float) -> tuple[int, int]:
    """(first frame, number of frames) from one second of a video to another, as Qwen's tools count them.

    The last frame belongs to it, and a clip that goes on behind the end of the video ends there.

    Raises:
        ValueError: if the clip begins behind the end of the video, or has no two frames.
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
    """Numbers of the frames to take of a clip.

    Processors know no clips: these are the frames of Qwen's tools, which take a multiple of the model's step and
    spread it from the first to the last one, whatever the family.

    Raises:
        ValueError: if it has too few for one step of the model's time.
    """
    step = limits.temporal_patch_size
    whole = dataclasses.replace(limits, even_ends=False, min_frames=-(-limits.min_frames // step) * step)
    taken = len(sample_frames(num_frames, fps, whole))
    # Theirs is torch.linspace, which goes by a step in float32 from both ends, and whose rounding decides.
    gap = float(np.float32(num_frames - 1) / np.float32(taken - 1))
    numbers = np.arange(taken)
    places = np.where(numbers < taken // 2, start + gap * numbers, start + num_frames - 1 - gap * numbers[::-1])
    return tuple(places.astype(np.float32).round().astype(int).tolist())


def video_grid(height: int, width: int, num_taken: int, limits: VideoLimits) -> tuple[int, int, int]:
    """(t, h, w) in patches of ``num_taken`` frames of ``height`` x ``width`` pixels.

    Raises:
        ValueError: if the video cannot be shown to the model.
    """
    return grid_within(height, width, num_taken, limits, *limits.bounds(num_taken))


def grid_within(
    height: int, width: int, num_taken: int, limits: VideoLimits, least: int, most: int
) -> tuple[int, int, int]:
    """``video_grid`` with other bounds on the pixels, as the processor is given them."""
    factor = limits.patch_size * limits.merge_size
    if limits.over_all_frames:
        new_height, new_width = resize_together(height, width, num_taken, limits, least, most)
    else:
        new_height, new_width = smart_resize(height, width, factor, least, most)
    if not new_height or not new_width:
        raise ValueError(f"{width}x{height} pixels round to nothing at the limits given")
    steps = -(-num_taken // limits.temporal_patch_size)
    return steps, new_height // limits.patch_size, new_width // limits.patch_size


def resize_together(
    height: int, width: int, num_taken: int, limits: VideoLimits | ImageLimits, least: int, most: int
) -> tuple[int, int]:
    """Height and width such that all frames together have from ``least`` to ``most`` pixels.

    Raises:
        ValueError: for too few frames, or if one side is more than 200 times the other.
    """
    factor, step = limits.patch_size * limits.merge_size, limits.temporal_patch_size
    if num_taken < step:
        raise ValueError(f"a video of {num_taken} frames; {step} are needed at least")
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) / min(height, width) > 200:
        raise ValueError(f"{width}x{height} pixels: one side is more than 200 times the other")
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    num_shown = num_bounded_frames(num_taken, limits)
    if num_shown * new_height * new_width > most:
        shrink = math.sqrt(num_taken * height * width / most)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif num_shown * new_height * new_width < least:
        grow = math.sqrt(least / (num_taken * height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


def num_bounded_frames(num_taken: int, limits: VideoLimits | ImageLimits) -> int:
    """Frames that transformers multiplies by a frame's pixels to compare them with the bounds: whole steps, rounded."""
    return round(num_taken / limits.temporal_patch_size) * limits.temporal_patch_size


def timestamps(indices: Sequence[int], fps: float, step: int) -> list[float]:
    """Seconds of each step of the grid: the middle between its first and last frame."""
    filled = [*indices, *[indices[-1]] * (-len(indices) % step)]
    seconds = [index / fps for index in filled]
    return [(seconds[i] + seconds[i + step - 1]) / 2 for i in range(0, len(seconds), step)]
