"""Packing in order: how far a sample may stray, and what looking ahead is worth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtool.planning.budgets import PackLimits
from packtool.planning.packing import place_sequential
from tests.planning.test_packing import lognormal_lengths, next_fit


@given(
    parts=st.lists(st.floats(0, 1), max_size=80),
    look_ahead=st.integers(0, 12),
    max_samples=st.none() | st.integers(1, 5),
    max_media=st.none() | st.integers(60, 100),
)
def test_bounded_displacement(
    parts: list[float], look_ahead: int, max_samples: int | None, max_media: int | None
) -> None:
    lengths = np.array([1 + round(99 * part) for part in parts], dtype=np.int32)
    media = (lengths * 7 % 60).astype(np.int32)
    limits = PackLimits(100, max_media or 0, max_samples or 100)
    order, sizes = place_sequential(lengths, media if max_media else None, limits, look_ahead)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    waiting = set(range(len(lengths)))
    reachable: dict[int, int] = {}
    packs = np.split(order, np.cumsum(sizes)[:-1]) if len(sizes) else []
    for pack_index, pack in enumerate(packs):
        assert pack[0] == min(waiting)
        assert lengths[pack].sum() <= 100
        assert len(pack) <= (max_samples or len(lengths))
        assert media[pack].sum() <= (max_media or media.sum())
        for sample in pack.tolist():
            earlier = sorted(waiting)[: look_ahead + 1]
            assert sample in earlier
            for reached in earlier:
                reachable.setdefault(reached, pack_index)
            assert pack_index <= reachable[sample] + look_ahead
            waiting.remove(sample)


@given(
    parts=st.lists(st.floats(0, 1), max_size=80),
    max_samples=st.none() | st.integers(1, 5),
    max_media=st.none() | st.integers(60, 100),
)
def test_no_look_ahead_equals_next_fit(parts: list[float], max_samples: int | None, max_media: int | None) -> None:
    lengths = np.array([1 + round(99 * part) for part in parts], dtype=np.int32)
    media = (lengths * 7 % 60).astype(np.int32)
    order, sizes = place_sequential(
        lengths, media if max_media else None, PackLimits(100, max_media or 0, max_samples or 100), look_ahead=0
    )
    assert order.tolist() == list(range(len(lengths)))
    start = 0
    for size in sizes.tolist():
        stop = start + size
        tokens, media_tokens = lengths[start:stop].sum(), media[start:stop].sum()
        assert tokens <= 100
        assert not max_media or media_tokens <= max_media
        is_full = size == max_samples or stop == len(lengths) or tokens + lengths[stop] > 100
        assert is_full or (max_media and media_tokens + media[stop] > max_media)
        start = stop
    assert start == len(lengths)
    if max_samples is None and max_media is None:
        assert len(sizes) == next_fit(lengths, 100)


@pytest.mark.parametrize(
    ("median", "sigma", "reached"), [(1500, 1.0, (0.004, 0.001, 0.0006)), (4300, 0.7, (0.035, 0.018, 0.016))]
)
def test_looking_ahead_fills_packs(median: float, sigma: float, reached: tuple[float, ...]) -> None:
    lengths = lognormal_lengths(50_000, median=median, sigma=sigma)
    bound = -(-int(lengths.sum(dtype=np.int64)) // 10240)
    assert next_fit(lengths, 10240) > 1.2 * bound
    for look_ahead, over in zip((16, 64, 256), reached, strict=True):
        _, sizes = place_sequential(lengths, None, PackLimits(10240, 0, 10240), look_ahead)
        assert len(sizes) <= (1 + over) * bound
