"""Truncation that never cuts a medium.

Of the tokens that are not protected the last (``left``) or the first (``right``) ``max_length - protected`` are kept,
and the order stays. Protected are whole media spans (opening mark, placeholder tokens, closing mark, timestamps), so
that adjacent pictures cannot run into one. ``left`` is what ms-swift does, but for the marks, which it cuts off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from packtool.encode.assemble import Span
from packtool.encode.encoded import IntArray

Side = Literal["left", "right"]


def kept_positions(protected: npt.NDArray[np.bool_], max_length: int, side: Side = "left") -> npt.NDArray[np.int64]:
    """Positions that stay, ascending.

    Args:
        protected: bool (L,), L > max_length, fewer than ``max_length`` of them set.
        max_length: most tokens afterwards.
        side: which end of the text is cut off.
    """
    room = max_length - int(protected.sum())
    assert room > 0, "the media leave room for text"
    keep = protected.copy()
    text = np.flatnonzero(~protected)
    keep[text[-room:] if side == "left" else text[:room]] = True
    return np.flatnonzero(keep)


def oldest_to_remove(spans: Sequence[Span], max_length: int) -> int:
    """How many media, from the first on, must go until those that stay leave room for text in ``max_length``."""
    left = sum(span.end - span.start for span in spans)
    for count, span in enumerate(spans):
        if left < max_length:
            return count
        left -= span.end - span.start
    return len(spans)


def moved_turns(turns: IntArray, kept: npt.NDArray[np.int64]) -> IntArray:
    """Turn spans after truncation; turns of which nothing is left are gone.

    Args:
        turns: int32 (2 * num_turns,), [start, end) pairs.
        kept: positions that stayed, ascending.
    """
    moved = np.searchsorted(kept, turns).astype(np.int32).reshape(-1, 2)
    # Nothing comes before the first token, so it cannot be a target.
    moved = np.maximum(moved, 1)
    return np.ascontiguousarray(moved[moved[:, 0] < moved[:, 1]].reshape(-1))


def moved_borders(borders: IntArray, kept: npt.NDArray[np.int64]) -> IntArray:
    """Places between tokens after truncation, int32 (B,), ascending.

    Args:
        borders: int32, ascending.
        kept: positions that stayed, ascending.
    """
    return np.unique(np.searchsorted(kept, borders)).astype(np.int32)
