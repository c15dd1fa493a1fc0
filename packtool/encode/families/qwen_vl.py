"""Media of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: pictures and videos of any size, resized to whole tokens.

Pictures are resized as by ``Qwen2VLImageProcessor`` of transformers, which all these models use with different patch
sizes; videos as by ``Qwen2VLVideoProcessor`` (Qwen2-VL, Qwen2.5-VL, Omni) and ``Qwen3VLVideoProcessor``, without their
optional bound on a single frame. Users set other limits by the variables of Qwen's tools and ms-swift:
``VIDEO_MAX_PIXELS`` for one frame, ``VIDEO_TOTAL_PIXELS`` for all, ``FPS`` and its bounds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from packtool.config.data import MediaOptions
from packtool.encode.encoded import EncodedAudio, EncodedImage, EncodedVideo
from packtool.encode.families.record import (
    BoxForm,
    Family,
    ImageLimits,
    MediaEncoding,
    MediaLimits,
    MediaSegment,
    Medium,
    TokenRun,
    Towers,
    VideoLimits,
    encoded_video,
    image_limits_of,
    video_limits_of,
)
from packtool.encode.model_files import ModelFiles
from packtool.errors import ConfigError
from packtool.media.files import MediaProblem, label
from packtool.rows.sample import MediaKind, MediaRef

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
    num_checked_frames: int = 1,
) -> tuple[int, int]:
    """Return the new (height, width) of a picture or of video frames: multiples of ``factor``, within bounds.

    Sides are rounded to multiples. If the pixels of all frames together are then above ``max_pixels`` or below
    ``min_pixels``, the picture is resized with its aspect ratio. 100 x 300 pixels with factor 28 become 112 x 308.
    Rounds as transformers' function of the same name does. ValueError if one side is more than 200 times the other.

    Args:
        num_frames: determines how much they are resized.
        num_checked_frames: ``num_frames`` rounded to entire temporal patches; determines whether they are resized.
    """
    if max(height, width) / min(height, width) > _MAX_ASPECT:
        raise ValueError(f"{width}x{height} pixels: one side is more than {_MAX_ASPECT} times the other")
    new_height = round(height / factor) * factor
    new_width = round(width / factor) * factor
    num_pixels = num_checked_frames * new_height * new_width
    if num_pixels > max_pixels:
        shrink = math.sqrt(num_frames * height * width / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif num_pixels < min_pixels:
        grow = math.sqrt(min_pixels / (num_frames * height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


def resize_together(
    height: int, width: int, num_taken: int, limits: VideoLimits | ImageLimits, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Return the new height and width of the frames of a video whose bounds are for all frames together."""
    factor, step = limits.patch_size * limits.merge_size, limits.temporal_patch_size
    if num_taken < step:
        raise _too_few_frames(num_taken, step)
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    num_checked_frames = num_bounded_frames(num_taken, limits)
    return smart_resize(
        height, width, factor, min_pixels, max_pixels, num_frames=num_taken, num_checked_frames=num_checked_frames
    )


def num_bounded_frames(num_taken: int, limits: VideoLimits | ImageLimits) -> int:
    """Return the number of frames that transformers uses in comparisons with the bounds: a multiple of the step."""
    return round(num_taken / limits.temporal_patch_size) * limits.temporal_patch_size


def _too_few_frames(num_frames: int, step: int) -> ValueError:
    return ValueError(f"the video has {num_frames} frames; the model needs at least {step}")


def video_limits(
    processor: Mapping[str, Any],
    options: MediaOptions,
    *,
    is_qwen3: bool,
    frame_tokens: tuple[int, int] | None = None,
) -> VideoLimits:
    """Return the limits on videos: those of the processor's settings, overridden by the user's options.

    Args:
        is_qwen3: frames are sampled evenly from the first to the last, and bounds are for all frames together, unless
            the settings are those of another processor.
        frame_tokens: (min, max) tokens of a frame if the family's processor ignores its settings (Omni).
    """
    over_all_frames = is_qwen3 and _bounds_all_frames(processor)  # otherwise bounds are for each frame
    patch_size = int(processor.get("patch_size", 16 if over_all_frames else 14))
    merge_size = int(processor.get("merge_size", 2))
    pixels_per_token = (patch_size * merge_size) ** 2

    min_pixels, max_pixels = _processor_bounds(processor, frame_tokens, pixels_per_token)
    frame_min, frame_max = _frame_bounds(options, pixels_per_token)  # set by the user; None if not
    if over_all_frames:
        max_pixels = options.video_total_pixels or max_pixels
    else:
        min_pixels = frame_min or min_pixels
        max_pixels = frame_max or max_pixels

    limits = VideoLimits(
        fps=float(options.fps or processor.get("fps") or 2.0),
        min_frames=options.fps_min_frames or int(processor.get("min_frames") or 4),
        max_frames=options.fps_max_frames or int(processor.get("max_frames") or 768),
        min_pixels=int(min_pixels),
        max_pixels=int(max_pixels),
        over_all_frames=over_all_frames,
        frame_min_pixels=frame_min if over_all_frames else None,
        frame_max_pixels=frame_max if over_all_frames else None,
        total_pixels=None if over_all_frames else options.video_total_pixels,
        even_ends=is_qwen3,
        patch_size=patch_size,
        merge_size=merge_size,
        temporal_patch_size=int(processor.get("temporal_patch_size", 2)),
    )
    _check_video_limits(limits)
    return limits


def _processor_bounds(
    processor: Mapping[str, Any], frame_tokens: tuple[int, int] | None, pixels_per_token: int
) -> tuple[Any, Any]:
    """Return (min, max) pixels by the processor's settings, or by ``frame_tokens`` if it ignores them."""
    min_tokens, max_tokens = frame_tokens or (128, 768)
    min_pixels, max_pixels = min_tokens * pixels_per_token, max_tokens * pixels_per_token
    if frame_tokens is None:
        size = processor.get("size") or {}
        min_pixels = processor.get("min_pixels") or size.get("shortest_edge") or min_pixels
        max_pixels = processor.get("max_pixels") or size.get("longest_edge") or max_pixels
    return min_pixels, max_pixels


def _frame_bounds(options: MediaOptions, pixels_per_token: int) -> tuple[int | None, int | None]:
    """Return the user's (min, max) pixels of a frame: options in pixels override options in tokens."""
    min_pixels, max_pixels = options.video_min_pixels, options.video_max_pixels
    if min_pixels is None and options.video_min_token_num is not None:
        min_pixels = options.video_min_token_num * pixels_per_token
    if max_pixels is None and options.video_max_token_num is not None:
        max_pixels = options.video_max_token_num * pixels_per_token
    return min_pixels, max_pixels


def _check_video_limits(limits: VideoLimits) -> None:
    """Raise ConfigError if a minimum is above its maximum."""
    for what, lowest, highest in (
        ("frames of a video", limits.min_frames, limits.max_frames),
        ("pixels of a frame", limits.frame_min_pixels or 0, limits.frame_max_pixels or math.inf),
        ("pixels of a video", limits.min_pixels, limits.max_pixels),
    ):
        if lowest > highest:
            raise ConfigError(
                f"the minimum number of {what} ({lowest}) is above the maximum ({highest})",
                "Set both limits: one that you leave out comes from the model's processor settings.",
            )


def _bounds_all_frames(processor: Mapping[str, Any]) -> bool:
    """Return whether transformers' video processor for these settings of a Qwen3-VL model bounds all frames together.

    Without video settings, those of the image processor are used for both. transformers then takes the video processor
    that is named like the image processor, if there is one (none for ...Fast): Qwen2-VL's, which bounds each frame.
    """
    name = processor.get("video_processor_type")
    return not str(name).startswith("Qwen2") if name else processor.get("image_processor_type") != _NAMED_ALIKE


def sample_frames(num_frames: int, fps: float, limits: VideoLimits) -> tuple[int, ...]:
    """Return the indexes of the frames to sample from a video; ValueError if there are fewer than a temporal patch."""
    step = limits.temporal_patch_size
    desired = num_frames / fps * limits.fps
    if limits.even_ends:
        count = min(max(int(desired), limits.min_frames), limits.max_frames, num_frames)
        if count < step:
            raise _too_few_frames(num_frames, step)
        return tuple(np.linspace(0, num_frames - 1, count).round().astype(int).tolist())
    max_frames = min(limits.max_frames, num_frames) // step * step
    count = int(min(max(desired, limits.min_frames), max_frames, num_frames)) // step * step
    if not count:
        raise _too_few_frames(num_frames, step)
    # The processor uses torch.arange in float32, whose rounding determines the indexes.
    numbers = (np.arange(count) * (num_frames / count)).astype(np.float32)
    return tuple(numbers.astype(int).tolist())


def clip_frames(clip: tuple[float | None, float | None], num_frames: int, fps: float) -> tuple[int, int]:
    """Return (first frame, number of frames) of a clip, counted as in Qwen's tools.

    ``clip`` is (start, end) in seconds, inclusive; an end after that of the video is moved there. ValueError if it
    begins after the end of the video, or has fewer than two frames.
    """
    seconds = num_frames / fps
    start, end = clip[0] or 0.0, seconds if clip[1] is None else clip[1]
    if start >= seconds:
        raise ValueError(f"the clip from {start:g} s on begins after the end of the video ({seconds:.2f} s)")
    first, last = math.ceil(start * fps), min(math.floor(min(end, seconds) * fps), num_frames - 1)
    if first >= last:
        raise ValueError(f"the clip from {start:g} to {end:g} s has fewer than two frames (at {fps:g} per second)")
    return first, last - first + 1


def sample_clip(start: int, num_frames: int, fps: float, limits: VideoLimits) -> tuple[int, ...]:
    """Return the indexes in the video of the frames to sample from a clip, which processors do not support.

    As Qwen's tools for all families: a multiple of the temporal patch size, evenly from the first to the last frame.
    """
    step = limits.temporal_patch_size
    even_steps = dataclasses.replace(limits, even_ends=False, min_frames=-(-limits.min_frames // step) * step)
    num_taken = len(sample_frames(num_frames, fps, even_steps))
    # They use torch.linspace, which adds a float32 step from both ends, and whose rounding determines the indexes.
    gap = float(np.float32(num_frames - 1) / np.float32(num_taken - 1))
    steps = np.arange(num_taken)
    numbers = np.where(steps < num_taken // 2, start + gap * steps, start + num_frames - 1 - gap * steps[::-1])
    return tuple(numbers.astype(np.float32).round().astype(int).tolist())


def video_grid(
    height: int, width: int, num_taken: int, limits: VideoLimits, bounds: tuple[int, int] | None = None
) -> tuple[int, int, int]:
    """Return (t, h, w) in patches of ``num_taken`` frames of ``height`` x ``width`` pixels.

    ``bounds`` are (min, max) pixels that are passed to the processor; those of the limits if None.
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
    """Return the time in seconds of each temporal step of ``step`` frames: the middle of its first and last frame."""
    padded = [*indices, *[indices[-1]] * (-len(indices) % step)]
    seconds = [index / fps for index in padded]
    return [(seconds[i] + seconds[i + step - 1]) / 2 for i in range(0, len(seconds), step)]


# Defaults of the processor's class.
_DEFAULT_MIN_PIXELS = 56 * 56
_DEFAULT_MAX_PIXELS = 28 * 28 * 1280


def image_limits(processor: Mapping[str, Any], options: MediaOptions) -> ImageLimits:
    """Return the limits on pictures: those of the processor's settings, overridden by the user's options."""
    if not processor:
        message = "the model has no image processor settings, so the patches of a picture cannot be counted"
        raise ConfigError(message, "Put the model's preprocessor_config.json beside config.json.")
    patch_size = int(processor.get("patch_size", 14))
    merge_size = int(processor.get("merge_size", 2))
    min_pixels, max_pixels = _pixel_bounds(processor, options, pixels_per_token=(patch_size * merge_size) ** 2)
    if min_pixels > max_pixels:
        raise ConfigError(
            f"the minimum number of pixels of a picture ({min_pixels}) is above the maximum ({max_pixels})",
            "Set both limits (--min-pixels/--max-pixels, or --image-min-token-num/--image-max-token-num): "
            "one that you leave out comes from the model's processor settings.",
        )
    return ImageLimits(
        min_pixels=int(min_pixels),
        max_pixels=int(max_pixels),
        patch_size=patch_size,
        merge_size=merge_size,
        temporal_patch_size=int(processor.get("temporal_patch_size", 2)),
    )


def _pixel_bounds(processor: Mapping[str, Any], options: MediaOptions, pixels_per_token: int) -> tuple[Any, Any]:
    """Return (min, max) pixels of a picture: by options in pixels, else in tokens, else by the settings."""
    size = processor.get("size") or {}
    min_pixels = processor.get("min_pixels") or size.get("shortest_edge") or _DEFAULT_MIN_PIXELS
    max_pixels = processor.get("max_pixels") or size.get("longest_edge") or _DEFAULT_MAX_PIXELS
    if options.image_min_token_num is not None:
        min_pixels = options.image_min_token_num * pixels_per_token
    if options.image_max_token_num is not None:
        max_pixels = options.image_max_token_num * pixels_per_token
    return options.min_pixels or min_pixels, options.max_pixels or max_pixels


def image_grid(height: int, width: int, limits: ImageLimits) -> tuple[int, int, int]:
    """Return (t, h, w) in patches of a picture of ``height`` x ``width`` pixels."""
    factor = limits.patch_size * limits.merge_size
    new_height, new_width = smart_resize(height, width, factor, limits.min_pixels, limits.max_pixels)
    if not new_height or not new_width:
        raise ValueError(f"{width}x{height} pixels round to nothing at the limits given")
    return 1, new_height // limits.patch_size, new_width // limits.patch_size


class QwenVL(MediaEncoding):
    """Media of the Qwen-VL families; the family's ``is_qwen3`` determines how videos are sampled and timestamped."""

    def __init__(self, files: ModelFiles, options: MediaOptions, family: Family) -> None:
        if options.use_audio_in_video:
            message = f"--use-audio-in-video (USE_AUDIO_IN_VIDEO): {files.model_type} models do not support sound"
            raise ConfigError(message, "Leave it out, or give an Omni model.")
        self._images = image_limits(files.processor, options)
        self._videos = video_limits(files.video_processor, options, is_qwen3=family.is_qwen3)
        self.limits = MediaLimits(self._images, self._videos)
        self._opening, self._closing = "<|vision_start|>", "<|vision_end|>"
        self._pads = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
        if self._pads["video"] not in files.tokenizer_json:
            del self._pads["video"]
        self.control_tokens = (self._opening, self._closing, *self._pads.values())

    def measure(self, kind: MediaKind, ref: MediaRef) -> Medium:
        if kind == "image":
            return self._measure_image(ref)
        if kind == "video" and kind in self._pads:
            return self._measure_video(ref)
        missing = "the tokenizer has no token for videos" if kind == "video" else "the model does not support sound"
        raise MediaProblem("media_unsupported", f"{label(ref)}: {missing}")

    def _measure_image(self, ref: MediaRef) -> EncodedImage:
        from packtool.media.measure import measure_image  # here, because rows of text need no PIL

        height, width = measure_image(ref)
        try:
            grid = self._picture_grid(height, width, ref)
        except ValueError as error:
            raise MediaProblem("media_size", f"{label(ref)}: {error}") from error
        num_tokens = grid[0] * grid[1] * grid[2] // self._images.merge_size**2
        return EncodedImage(ref.path, ref.data, height, width, grid, num_tokens)

    def _picture_grid(self, height: int, width: int, ref: MediaRef) -> tuple[int, int, int]:
        """Return (t, h, w) in patches of a picture, at the limits of its row."""
        return image_grid(height, width, image_limits_of(ref, self._images))

    def _measure_video(self, ref: MediaRef) -> EncodedVideo:
        """Measure a video by its header, and determine the frames to sample and their grid (t, h, w) in patches.

        MediaProblem if the limits of its row or of the model are impossible for it.
        """
        from packtool.media.video import measure_video  # here, because most rows need no PyAV

        size = measure_video(ref)
        try:
            limits = video_limits_of(ref, self._videos)
            num_clip_frames, indices = _sample_video_or_clip(ref, size.num_frames, size.fps, limits)
            grid = video_grid(size.height, size.width, len(indices), limits)
        except ValueError as error:
            raise MediaProblem("media_size", f"{label(ref)}: {error}") from error
        sampled_fps = self._sampled_fps(num_clip_frames, size.fps, len(indices), limits)
        return encoded_video(
            ref,
            size,
            num_frames=num_clip_frames,
            indices=indices,
            grid=grid,
            seconds_per_grid=limits.temporal_patch_size / sampled_fps,
            num_tokens=math.prod(grid) // limits.merge_size**2,
            audio=self._sound_track(ref) if size.has_sound else None,
        )

    def _sampled_fps(self, num_frames: int, fps: float, num_taken: int, limits: VideoLimits) -> float:
        """Return the frame rate of the sampled frames, by which positions in time are counted."""
        return num_taken / num_frames * fps

    def _sound_track(self, ref: MediaRef) -> EncodedAudio | None:
        """Return the measured sound track of a video, if it is interleaved with the frames."""
        return None

    def segments(self, medium: Medium, number: int = 0) -> list[MediaSegment]:
        assert not isinstance(medium, EncodedAudio), "measure refuses sounds"
        pad = self._pads["image" if isinstance(medium, EncodedImage) else "video"]
        opening, closing = TokenRun(self._opening), TokenRun(self._closing)
        if isinstance(medium, EncodedImage) or not self._videos.even_ends:
            return [opening, TokenRun(pad, medium.num_tokens), closing]
        # As in its processor, Qwen3-VL has a timestamp and marks for each temporal step, and marks around the video.
        pads_of_step = TokenRun(pad, medium.num_tokens // medium.grid[0])
        segments: list[MediaSegment] = [opening]
        for seconds in timestamps(medium.indices, medium.fps, self._videos.temporal_patch_size):
            segments += [f"<{seconds:.1f} seconds>", opening, pads_of_step, closing]
        return [*segments, closing]


Grid = tuple[int, ...]
Bounds = tuple[int, int]
_UNBOUNDED = (1, 1 << 40)


@lru_cache(maxsize=65536)
def image_bounds(height: int, width: int, grid: Grid, limits: ImageLimits) -> Bounds:
    """Infer (min, max) pixels at which a picture is resized to ``grid`` (1, h, w); ``limits`` are tried first."""

    def grid_of(bounds: Bounds) -> Grid:
        return image_grid(height, width, replace(limits, min_pixels=bounds[0], max_pixels=bounds[1]))

    return _find_bounds(grid_of, grid, (limits.min_pixels, limits.max_pixels), limits.patch_size**2)


@lru_cache(maxsize=65536)
def video_bounds(height: int, width: int, num_taken: int, grid: Grid, limits: VideoLimits) -> Bounds:
    """Infer (min, max) pixels at which ``num_taken`` frames are resized to ``grid`` (t, h, w), as ``image_bounds``."""

    def grid_of(bounds: Bounds) -> Grid:
        return video_grid(height, width, num_taken, limits, bounds)

    num_frames = num_bounded_frames(num_taken, limits) if limits.over_all_frames else 1
    return _find_bounds(grid_of, grid, limits.bounds(num_taken), limits.patch_size**2 * num_frames)


def _sample_video_or_clip(
    ref: MediaRef, num_frames: int, fps: float, limits: VideoLimits
) -> tuple[int, tuple[int, ...]]:
    """Return the number of frames of a video, or of the clip that its row selects, and the indexes to sample."""
    if ref.clip is not None:
        first_frame, num_clip_frames = clip_frames(ref.clip, num_frames, fps)
        return num_clip_frames, sample_clip(first_frame, num_clip_frames, fps, limits)
    if ref.frames:  # frames that the row gives as pictures are sampled already
        return num_frames, ref.frame_indices
    return num_frames, sample_frames(num_frames, fps, limits)


def _find_bounds(
    grid_of: Callable[[Bounds], Grid], grid: Grid, default_bounds: Bounds, pixels_per_patch: int
) -> Bounds:
    """Find bounds (min, max) in pixels at which a picture or video is resized to ``grid``.

    Tries the default bounds, then no bounds, then only a maximum, then only a minimum. If none of them gives the grid,
    returns the default bounds.

    Args:
        grid_of: returns the grid (t, h, w), in patches, at the bounds it is given; ValueError if these are impossible.
        pixels_per_patch: of one frame, or of all frames if the bounds are for all together.
    """
    if _grid_or_none(grid_of, default_bounds) == grid:
        return default_bounds
    unbounded_grid = _grid_or_none(grid_of, _UNBOUNDED)
    if unbounded_grid == grid:
        return _UNBOUNDED

    no_min, no_max = _UNBOUNDED
    largest_max, smallest_min = no_max, no_min
    if unbounded_grid is not None:
        _, rows, columns = unbounded_grid
        num_pixels = rows * columns * pixels_per_patch
        # A maximum has an effect only below the size without bounds, a minimum only above.
        largest_max, smallest_min = num_pixels - 1, num_pixels + 1

    max_pixels = _bisect(lambda pixels: _grid_or_none(grid_of, (no_min, pixels)), grid, no_min, largest_max)
    if max_pixels is not None:
        return no_min, max_pixels
    min_pixels = _bisect(lambda pixels: _grid_or_none(grid_of, (pixels, no_max)), grid, smallest_min, no_max)
    if min_pixels is not None:
        return min_pixels, no_max
    return default_bounds


def _grid_or_none(grid_of: Callable[[Bounds], Grid], bounds: Bounds) -> Grid | None:
    """Return ``grid_of(bounds)``, or None if it raises a ValueError."""
    try:
        return grid_of(bounds)
    except ValueError:
        return None


def _bisect(grid_at: Callable[[int], Grid | None], grid: Grid, low: int, high: int) -> int | None:
    """Return a number of pixels from ``low`` to ``high`` at which ``grid_at`` returns ``grid``; None if there is none.

    The sides of the grid grow with the number of pixels; None counts as smaller than any grid.
    """
    while low <= high:
        middle = (low + high) // 2
        candidate = grid_at(middle)
        if candidate == grid:
            return middle
        is_smaller = candidate is None or any(size < target for size, target in zip(candidate, grid, strict=True))
        if is_smaller:
            low = middle + 1
        else:
            high = middle - 1
    return None


QWEN2_VL = Family(
    title="Qwen2-VL",
    model_types=("qwen2_vl",),
    encoding=QwenVL,
    kinds=("image", "video"),
    towers=Towers(vision=("model.visual",), aligner=("model.visual.merger",)),
    boxes=BoxForm("tokens", "thousandths"),
)

QWEN2_5_VL = replace(QWEN2_VL, title="Qwen2.5-VL", model_types=("qwen2_5_vl",), boxes=BoxForm("lists", "pixels"))

QWEN3_VL = replace(
    QWEN2_VL,
    title="Qwen3-VL",
    model_types=("qwen3_vl", "qwen3_vl_moe"),
    is_qwen3=True,
    # Features of several levels of the tower go into the text (DeepStack).
    towers=Towers(vision=("model.visual",), aligner=("model.visual.merger", "model.visual.deepstack_merger_list")),
    boxes=BoxForm("lists", "thousandths"),
)

# Three of four layers are gated delta nets, in the text-only models too.
QWEN3_5 = replace(
    QWEN2_VL,
    title="Qwen3.5",
    model_types=("qwen3_5", "qwen3_5_moe"),
    is_qwen3=True,
    recurrent_types=("qwen3_5_text", "qwen3_5_moe_text"),
    recurrent_layers=("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"),
    boxes=BoxForm("lists", "thousandths"),
)

QWEN3_NEXT = Family(
    title="Qwen3-Next",
    model_types=("qwen3_next",),
    recurrent_types=("qwen3_next",),
    recurrent_layers=("Qwen3NextGatedDeltaNet",),
    has_joint_inputs=True,
)

FAMILIES = (QWEN2_VL, QWEN2_5_VL, QWEN3_VL, QWEN3_5, QWEN3_NEXT)
