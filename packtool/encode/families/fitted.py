"""The bounds that gave a medium its size, found from what a cache keeps of it, whatever limits it was exported at.

A processor that is given these bounds makes the very patches that the export counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from packtool.encode.families.base import ImageLimits, VideoLimits
from packtool.encode.families.qwen_video import grid_within, num_bounded_frames
from packtool.encode.families.qwen_vl import image_grid

Grid = tuple[int, ...]
Bounds = tuple[int, int]
_MOST = 1 << 40


@lru_cache(maxsize=65536)
def image_bounds(height: int, width: int, grid: Grid, limits: ImageLimits) -> Bounds:
    """(least, most) pixels that make a grid of a picture: the limits' own, unless it was exported at others.

    Args:
        height, width: of the picture.
        grid: (1, h, w) in patches.
        limits: of the run.
    """

    def grid_of(least: int, most: int) -> Grid:
        return image_grid(height, width, replace(limits, min_pixels=least, max_pixels=most))

    try:
        whole = math.prod(grid_of(1, _MOST)) * limits.patch_size**2
    except ValueError:
        whole = None
    return _fitted(grid_of, grid, (limits.min_pixels, limits.max_pixels), whole)


@lru_cache(maxsize=65536)
def video_bounds(height: int, width: int, num_taken: int, grid: Grid, limits: VideoLimits) -> Bounds:
    """(least, most) pixels that make a grid of ``num_taken`` frames of a video; as ``image_bounds``."""

    def grid_of(least: int, most: int) -> Grid:
        return grid_within(height, width, num_taken, limits, least, most)

    try:
        _, rows, columns = grid_of(1, _MOST)
    except ValueError:
        whole = None
    else:
        whole = rows * columns * limits.patch_size**2
        if limits.over_all_frames:
            whole *= num_bounded_frames(num_taken, limits)
    return _fitted(grid_of, grid, limits.bounds(num_taken), whole)


def _fitted(grid_of: Callable[[int, int], Grid], grid: Grid, own: Bounds, whole: int | None = None) -> Bounds:
    """Bounds for which ``grid_of`` gives a grid; the limits' own where none do, for who loads it tells of that.

    Both sides of a grid grow with the most pixels that there may be, and with the least.

    Args:
        whole: pixels of a picture that nothing bounds, whose sides are rounded. Those that bounds shrink may be longer,
            and those that they stretch shorter, so fewer and more pixels are searched each for itself.
    """

    def tried(least: int, most: int) -> Grid | None:
        try:
            return grid_of(least, most)
        except ValueError:
            return None

    for bounds in (own, (1, _MOST)):
        if tried(*bounds) == grid:
            return bounds
    for is_most in (True, False):
        low, high = (1, _MOST) if whole is None else (1, whole - 1) if is_most else (whole + 1, _MOST)
        while low <= high:
            middle = (low + high) // 2
            bounds = (1, middle) if is_most else (middle, _MOST)
            found = tried(*bounds)
            if found == grid:
                return bounds
            if found is None or any(side < wanted for side, wanted in zip(found, grid, strict=True)):
                low = middle + 1
            else:
                high = middle - 1
    return own
