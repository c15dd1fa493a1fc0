"""Sizes rounded to whole tokens, as Qwen's processors do it."""

from __future__ import annotations

import math

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
