"""``path#1000``: a seeded choice among the rows of one or several sources, in the rows' own order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from packtool.rows.source import RowBlocks

_CHUNK_BLOCKS = 4096
# numpy's hypergeometric draws know no more.
_MOST_ROWS = 10**9


def draw_rows(sources: Sequence[RowBlocks], num_rows: int, seed: Sequence[int]) -> list[RowBlocks]:
    """Take ``num_rows`` rows of all sources together, each alike likely and without replacement.

    More rows than there are: each is taken ``num_rows // rows`` times, and the rest is drawn. The choice is first how
    many rows of each block, then which: a few bytes a block and two a picked row, however many rows there are.

    Args:
        seed: the choice is a function of it and of the blocks.
    """
    rng = np.random.default_rng(seed)
    rows = np.concatenate([blocks.rows_of_each for blocks in sources])
    total = int(rows.sum())
    if not total:
        return list(sources)
    times, rest = divmod(num_rows, total)
    counts = _counts(rows, rest, rng)
    parts = [
        _positions(rows[low : low + _CHUNK_BLOCKS], counts[low : low + _CHUNK_BLOCKS], times, rng)
        for low in range(0, len(rows), _CHUNK_BLOCKS)
    ]
    picks, counts = np.concatenate(parts), counts + times * rows
    drawn, first_block, first_pick = [], 0, 0
    for blocks in sources:
        own = counts[first_block : first_block + len(blocks)]
        num_picks = int(own.sum())
        drawn.append(blocks.picked(own, picks[first_pick : first_pick + num_picks]))
        first_block, first_pick = first_block + len(blocks), first_pick + num_picks
    return drawn


def _counts(rows: np.ndarray, num_rows: int, rng: np.random.Generator) -> np.ndarray:
    """How many of ``num_rows`` rows, drawn without replacement, lie in each block; int64."""
    if rows.sum() >= _MOST_ROWS:
        chosen = rng.choice(int(rows.sum()), num_rows, replace=False, shuffle=False)
        return np.bincount(np.searchsorted(np.cumsum(rows), chosen, side="right"), minlength=len(rows))
    return rng.multivariate_hypergeometric(rows, num_rows, method="marginals")


def _positions(rows: np.ndarray, counts: np.ndarray, times: int, rng: np.random.Generator) -> np.ndarray:
    """Positions in each block, ascending: all of them ``times`` times, and ``counts`` drawn ones once more; int16."""
    width = int(rows.max())
    keys = rng.random((len(rows), width))
    keys[np.arange(width) >= rows[:, None]] = 2.0  # no row
    ranks = keys.argsort(axis=1).argsort(axis=1)
    repeats = (ranks < counts[:, None]) + times * (np.arange(width) < rows[:, None])
    positions = np.broadcast_to(np.arange(width, dtype=np.int16), repeats.shape)
    return np.repeat(positions.ravel(), repeats.ravel())
