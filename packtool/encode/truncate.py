"""Left truncation that never cuts a medium.

Of the tokens that are not protected the last ``max_length - protected`` are kept, the order stays, and the first label
is -100 (what ms-swift's ``left`` does). Protected are whole media spans (opening mark, pads, closing mark), so that
adjacent pictures cannot run into one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from packtool.encode.encoded import IntArray


def kept_positions(protected: npt.NDArray[np.bool_], max_length: int) -> npt.NDArray[np.int64] | None:
    """Positions that stay, ascending, or None if the protected ones alone leave no room for text.

    Args:
        protected: bool (L,), L > max_length.
        max_length: most tokens afterwards.
    """
    room = max_length - int(protected.sum())
    if room <= 0:
        return None
    keep = protected.copy()
    keep[np.flatnonzero(~protected)[-room:]] = True
    return np.flatnonzero(keep)


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
