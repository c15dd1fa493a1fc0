"""Seeded orders: permutations, sorted where asked, the same for ever."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import packtool
from packtool.errors import ConfigError
from packtool.planning import shuffle
from packtool.planning.shuffle import RandomStream, of_window, seeded_order


@given(num=st.integers(0, 200), seed=st.integers(0, 2**70), epoch=st.integers(0, 2**33))
def test_every_number_occurs_once(num: int, seed: int, epoch: int) -> None:
    order = seeded_order(num, seed=seed, epoch=epoch, stream=0)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(num))


@given(values=st.lists(st.integers(0, 2**31 - 1), max_size=60), seed=st.integers(0, 5))
def test_falling_comes_first(values: list[int], seed: int) -> None:
    falling = np.array(values, dtype=np.int32)
    order = seeded_order(len(values), seed=seed, epoch=0, stream=0, descending_by=falling)
    assert sorted(order.tolist()) == list(range(len(values)))
    assert falling[order].tolist() == sorted(values, reverse=True)


def test_the_order_is_pinned() -> None:
    # A resumed run must find these orders again, whatever numpy it has.
    assert seeded_order(8, seed=42, epoch=3, stream=1).tolist() == [2, 4, 1, 5, 3, 6, 7, 0]
    falling = np.array([5, 1, 5, 1, 5, 1, 5, 1])
    assert seeded_order(8, seed=42, epoch=3, stream=1, descending_by=falling).tolist() == [2, 4, 6, 0, 1, 5, 3, 7]


def test_order_does_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    falling = np.arange(1000) % 7
    expected = seeded_order(1000, seed=1, epoch=2, stream=3, descending_by=falling)
    monkeypatch.setattr(shuffle, "CHUNK", 64)
    assert np.array_equal(seeded_order(1000, seed=1, epoch=2, stream=3, descending_by=falling), expected)


def test_seed_epoch_and_stream_are_independent() -> None:
    orders = {
        tuple(seeded_order(50, seed=seed, epoch=epoch, stream=stream).tolist())
        for seed in range(4)
        for epoch in range(4)
        for stream in range(4)
    }
    assert len(orders) == 64


def test_all_orders_are_equally_likely() -> None:
    counts = Counter(tuple(seeded_order(3, seed=7, epoch=epoch, stream=0).tolist()) for epoch in range(1200))
    assert len(counts) == 6
    assert max(abs(count - 200) for count in counts.values()) < 60  # over four standard deviations


@pytest.mark.parametrize(("seed", "epoch"), [(-1, 0), (0, -1)])
def test_negative_seeds_and_epochs_are_errors(seed: int, epoch: int) -> None:
    with pytest.raises(ConfigError):
        seeded_order(3, seed=seed, epoch=epoch, stream=0)


def test_streams_keep_their_numbers() -> None:
    """Saved plans and checkpoints hold orders that these numbers drew; ``unique`` sees to it that no two are alike."""
    assert [stream.value for stream in RandomStream] == [  # 13 drew something that is no more
        *(*range(13), 14, 15),
        *((1 << 40) + (purpose << 20) for purpose in range(7)),
    ]
    assert RandomStream.WITHIN_LENGTH == 0
    assert RandomStream.SHUFFLE_BUFFER == 12
    assert [of_window(window) for window in range(3)] == [16, 32, 48]


def test_all_random_numbers_use_a_stream() -> None:
    """Who draws from the seed names a ``RandomStream``: a bare number would be one that another may have."""
    keys = re.compile(r"stream=([^,)]+)|default_rng\(([\[(][^)\]]*)[)\]]\)")
    result = [
        key
        for folder in ("planning", "simulate", "stream")
        for path in (Path(packtool.__file__).parent / folder).glob("*.py")
        for match in keys.finditer(path.read_text())
        for key in match.groups()
        if key is not None
    ]
    assert len(result) > 10
    assert not [key for key in result if not re.search(r"RandomStream\.|stream\b|of_window", key)]
