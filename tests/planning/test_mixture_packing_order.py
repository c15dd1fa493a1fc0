from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtool.planning.mixture_packing import order_mixture_packs
from packtool.planning.pack_plan import PackPlan, select_packs
from packtool.planning.packing import pack, pack_singletons
from packtool.planning.shuffle import RandomStream, seeded_order

_WINDOW = 100


def worst_windows(packs: PackPlan, source_of: np.ndarray, amounts: np.ndarray, packs_per_step: int) -> np.ndarray:
    """By source, the most that a window of 100 steps has more or less than its share, over that share."""
    num_sources = int(source_of.max()) + 1
    sums_by_source = [packs.sums_per_pack(np.where(source_of == source, amounts, 0)) for source in range(num_sources)]
    num_steps = packs.num_packs // packs_per_step
    steps = np.stack(sums_by_source, 1)[: num_steps * packs_per_step].reshape(num_steps, packs_per_step, -1).sum(1)
    until = np.concatenate((np.zeros((1, num_sources)), steps.cumsum(0)))
    windows = until[_WINDOW:] - until[:-_WINDOW]
    shares = windows / windows.sum(axis=1, keepdims=True)
    return np.abs(shares / (np.stack(sums_by_source, 1).sum(0) / amounts.sum()) - 1).max(axis=0)


def ordered(packs: PackPlan, sources: np.ndarray, values: np.ndarray, seed: int = 0) -> PackPlan:
    source_of, amounts = sources[packs.samples], values[packs.samples]
    return select_packs(packs, order_mixture_packs(packs, source_of, amounts, seed=seed, epoch=0))


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("by_tokens", [True, False])
@settings(max_examples=4)
@given(seed=st.integers(0, 10**6), shares=st.lists(st.integers(1, 6), min_size=2, max_size=6))
def test_every_window_of_100_steps_has_each_source_within_a_tenth(
    is_packed: bool, by_tokens: bool, seed: int, shares: list[int]
) -> None:
    rng = np.random.default_rng(seed)
    num = 12_000
    sources = rng.choice(len(shares), num, p=np.array(shares) / sum(shares))
    middle = np.linspace(4.5, 6.5, len(shares))[sources]  # sources are of unlike lengths
    lengths = np.clip(rng.lognormal(middle, 0.7), 5, 2048).astype(np.int32)
    packs = pack(lengths, 2048, seed=seed) if is_packed else pack_singletons(lengths, 2048, seed=seed)
    values = lengths.astype(np.int64) if by_tokens else np.ones(num, np.int64)
    each = packs.num_packs // 250
    even = ordered(packs, sources, values, seed)
    assert np.array_equal(np.sort(even.samples), np.arange(num))
    assert worst_windows(even, sources[even.samples], values[even.samples], each).max() < 0.1


def test_random_order_is_less_even() -> None:
    """The property above is one that the order makes: packs by chance do not have it."""
    rng = np.random.default_rng(0)
    sources = (rng.random(6000) < 0.05).astype(np.int64)
    lengths = np.where(sources == 1, rng.integers(1500, 2048, 6000), rng.integers(100, 600, 6000)).astype(np.int32)
    packs, values = pack(lengths, 2048, seed=0), np.ones(6000, np.int64)
    chance = select_packs(packs, seeded_order(packs.num_packs, seed=1, epoch=0, stream=RandomStream.PACK_ORDER))
    even = ordered(packs, sources, values)
    assert worst_windows(chance, sources[chance.samples], values[chance.samples], 3).max() > 0.15
    assert worst_windows(even, sources[even.samples], values[even.samples], 3).max() < 0.1


def test_many_packs_are_divided_into_windows_first() -> None:
    rng = np.random.default_rng(0)
    num = 20_000
    sources = rng.choice(3, num, p=[0.05, 0.25, 0.7])
    lengths = rng.integers(10, 300, num).astype(np.int32)
    packs = pack_singletons(lengths, 300, seed=0)
    even = ordered(packs, sources, lengths.astype(np.int64))
    assert worst_windows(even, sources[even.samples], even.lengths.astype(np.int64), 16).max() < 0.05


@pytest.mark.parametrize("num", [1, 2, 3, 5, 64])
def test_few_packs(num: int) -> None:
    lengths = np.full(num, 10, np.int32)
    packs, sources = pack_singletons(lengths, 10, seed=0), np.arange(num) % 2
    orders = [order_mixture_packs(packs, sources, np.ones(num, np.int64), seed=0, epoch=epoch) for epoch in (0, 0, 1)]
    assert all(np.array_equal(np.sort(order), np.arange(num)) for order in orders)
    assert np.array_equal(orders[0], orders[1])
    assert num < 5 or not np.array_equal(orders[0], orders[2])
