"""Tower columns for caches that were made before the index kept them, from what it kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.cache.schema import UNKNOWN
from packtool.encode.families import MediaLimits

Column = npt.NDArray[np.integer[Any]]

# Of a step of a video's grid: neither how many steps a video has nor how large they are is known.
_FRAME_TOKENS = 256


def with_guesses(columns: Mapping[str, Column], limits: MediaLimits) -> dict[str, Column]:
    """The columns of an index with numbers in place of ``UNKNOWN``; the same where there is none.

    A sample's media are taken for equally large, and a video's frames for 256 tokens each.

    Args:
        limits: of the cache; they tell how many patches make a token.
    """
    found = dict(columns)
    pictures, videos = columns["num_images"].astype(np.float64), columns["num_videos"].astype(np.float64)
    sounds = columns["num_audios"].astype(np.float64)
    each = columns["media_tokens"] / np.maximum(pictures + videos + sounds, 1)
    if (unknown := columns["audio_tokens"] == UNKNOWN).any():
        heard = (each * sounds).astype(np.int32)
        found["audio_tokens"] = np.where(unknown, heard, columns["audio_tokens"])
    if (unknown := columns["patch_squares"] == UNKNOWN).any():
        patches = limits.image.merge_size**2 if limits.image is not None else 0
        seen = (columns["media_tokens"] - found["audio_tokens"]) / np.maximum(pictures + videos, 1) * patches
        squares = seen * (pictures * seen + videos * np.minimum(seen, _FRAME_TOKENS * patches))
        found["patch_squares"] = np.where(unknown, squares.astype(np.int64), columns["patch_squares"])
    return found
