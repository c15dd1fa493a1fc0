"""The bounds that gave a medium its size, found from what a cache keeps of it, whatever limits it was exported at.

A processor that is given these bounds makes the very patches that the export counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from packtool.encode.families.base import ImageLimits, VideoLimits
from packtool.encode.families.qwen_video import grid_within
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

    return _fitted(grid_of, grid, (limits.min_pixels, limits.max_pixels))


@lru_cache(maxsize=65536)
def video_bounds(height: int, width: int, num_taken: int, grid: Grid, limits: VideoLimits) -> Bounds:
    """(least, most) pixels that make a grid of ``num_taken`` frames of a video; as ``image_bounds``."""

    def grid_of(least: int, most: int) -> Grid:
        return grid_within(height, width, num_taken, limits, least, most)

    return _fitted(grid_of, grid, limits.bounds(num_taken))


def _fitted(grid_of: Callable[[int, int], Grid], grid: Grid, own: Bounds) -> Bounds:
    """Bounds for which ``grid_of`` gives a grid; the limits' own where none do, for who loads it tells of that.

    Both sides of a grid grow with the most pixels that there may be, and with the least.
    """

    def tried(least: int, most: int) -> Grid | None:
        try:
            return grid_of(least, most)
        except ValueError:
            return None

    if tried(*own) == grid:
        return own
    for is_most in (True, False):
        low, high = 1, _MOST
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
