"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: pictures of any size, resized to whole tokens.

Mirrors ``Qwen2VLImageProcessor`` of transformers, which all three families use with other patch sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from packtool.config import ImageOptions, MediaOptions
from packtool.encode.encoded import EncodedImage
from packtool.encode.families.base import ImageLimits, Kind, MediaLimits, Medium, Part
from packtool.encode.model_files import ModelFiles
from packtool.errors import ConfigError
from packtool.media.measure import MediaProblem, measure_image
from packtool.rows.sample import MediaRef

MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
_MAX_ASPECT = 200
# What the processor's class assumes when its settings name nothing.
_DEFAULT_MIN_PIXELS = 56 * 56
_DEFAULT_MAX_PIXELS = 28 * 28 * 1280


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


def image_limits(processor: Mapping[str, Any], options: ImageOptions) -> ImageLimits:
    """Limits from the processor's settings, overridden by the user's.

    Raises:
        ConfigError: if there are no settings, or the limits contradict each other.
    """
    if not processor:
        raise ConfigError(
            "the model has no image processor settings, so the patches of a picture cannot be counted",
            "Put the model's preprocessor_config.json beside config.json.",
        )
    size = processor.get("size") or {}
    patch_size = int(processor.get("patch_size", 14))
    merge_size = int(processor.get("merge_size", 2))
    per_token = (patch_size * merge_size) ** 2
    min_pixels = processor.get("min_pixels") or size.get("shortest_edge") or _DEFAULT_MIN_PIXELS
    max_pixels = processor.get("max_pixels") or size.get("longest_edge") or _DEFAULT_MAX_PIXELS
    if options.image_min_token_num is not None:
        min_pixels = options.image_min_token_num * per_token
    if options.image_max_token_num is not None:
        max_pixels = options.image_max_token_num * per_token
    min_pixels = options.min_pixels or min_pixels
    max_pixels = options.max_pixels or max_pixels
    if min_pixels > max_pixels:
        raise ConfigError(
            f"a picture would need at least {min_pixels} and at most {max_pixels} pixels",
            "Set both limits (--min-pixels/--max-pixels, or --image-min-token-num/--image-max-token-num): "
            "what you leave out comes from the model's processor settings.",
        )
    return ImageLimits(
        min_pixels=int(min_pixels),
        max_pixels=int(max_pixels),
        patch_size=patch_size,
        merge_size=merge_size,
        temporal_patch_size=int(processor.get("temporal_patch_size", 2)),
    )


def image_grid(height: int, width: int, limits: ImageLimits) -> tuple[int, int, int]:
    """(t, h, w) in patches of a picture of ``height`` x ``width`` pixels.

    Raises:
        ValueError: if the picture cannot be shown to the model.
    """
    factor = limits.patch_size * limits.merge_size
    new_height, new_width = smart_resize(height, width, factor, limits.min_pixels, limits.max_pixels)
    if not new_height or not new_width:
        raise ValueError(f"{width}x{height} pixels round to nothing at the limits given")
    return 1, new_height // limits.patch_size, new_width // limits.patch_size


class QwenVL:
    """The Qwen vision-language families.

    Args:
        files: the model's settings.
        options: the user's limits.
    """

    control_tokens = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
    content_as_list = False
    placeholders: Mapping[str, Kind] = MappingProxyType({})

    def __init__(self, files: ModelFiles, options: MediaOptions) -> None:
        self._image_limits = image_limits(files.processor, options)
        self.limits = MediaLimits(image=self._image_limits)

    def measure(self, kind: Kind, ref: MediaRef) -> Medium:
        """See ``Family``."""
        if kind != "image":
            raise MediaProblem("media_unsupported", f"{ref.name}: the model takes no {kind}")
        height, width = measure_image(ref)
        limits = self._image_limits
        try:
            grid = image_grid(height, width, limits)
        except ValueError as error:
            raise MediaProblem("media_size", f"{ref.name}: {error}") from error
        num_tokens = grid[0] * grid[1] * grid[2] // limits.merge_size**2
        return EncodedImage(ref.path, ref.data, height, width, grid, num_tokens)

    def parts(self, medium: Medium) -> list[Part]:
        """See ``Family``."""
        opening, pad, closing = self.control_tokens
        return [(opening, 1), (pad, medium.num_tokens), (closing, 1)]
