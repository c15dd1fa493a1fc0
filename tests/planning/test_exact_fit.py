"""Filling pack by pack over a histogram: right, and nearly the fewest packs."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtool.planning import best_fit
from packtool.planning.best_fit import Placements, place_exact_fit


def pack_sums(placements: Placements) -> list[list[int]]:
    """Lengths in each pack, by slot; checks that every slot is given once."""
    packs: list[dict[int, int]] = [{} for _ in placements.pack_sizes]
    columns = (
        placements.first_pack,
        placements.num_packs,
        placements.first_slot,
        placements.samples_per_pack,
        placements.length,
    )
    for first_pack, num, slot, per_pack, length in zip(*(column.tolist() for column in columns), strict=True):
        for pack in packs[first_pack : first_pack + num]:
            for place in range(slot, slot + per_pack):
                assert place not in pack
                pack[place] = length
    assert [len(pack) for pack in packs] == placements.pack_sizes.tolist()
    assert all(sorted(pack) == list(range(len(pack))) for pack in packs)
    return [list(pack.values()) for pack in packs]


@given(
    capacity=st.integers(1, 60) | st.sampled_from([1024, 40_000]),
    parts=st.lists(st.floats(0, 1), max_size=100),
    max_samples=st.none() | st.integers(1, 6),
    scarcity_factor=st.sampled_from([0.0, 1.0, 2.0, 1e9]),
    noise=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=5),
)
def test_everything_is_placed_within_limits(
    capacity: int, parts: list[float], max_samples: int | None, scarcity_factor: float, noise: list[float]
) -> None:
    lengths = [max(1, round(part * capacity)) for part in parts]
    counts = Counter(lengths)
    placements = place_exact_fit(
        list(counts),
        list(counts.values()),
        capacity,
        max_samples=max_samples,
        scarcity_factor=scarcity_factor,
        noise=noise,
    )
    packs = pack_sums(placements)
    assert sorted(length for pack in packs for length in pack) == sorted(lengths)
    assert all(pack and sum(pack) <= capacity and len(pack) <= (max_samples or 100) for pack in packs)
    # Samples are handed out by falling length.
    assert placements.length.tolist() == sorted(placements.length.tolist(), reverse=True)


def test_pairs_fill_packs() -> None:
    # 6 + 3 and 6 + 2 + 2 is what best fit makes of it.
    assert sorted(map(sorted, pack_sums(place_exact_fit([6, 3, 2, 1], [2, 1, 2, 1], 10)))) == [[1, 3, 6], [2, 2, 6]]


def test_scarce_slots_are_filled_evenly() -> None:
    lengths = list(range(100, 0, -1))
    even = place_exact_fit(lengths, [1] * 100, 110, max_samples=2, scarcity_factor=1e9)
    assert even.total_packs <= 56
    tight = place_exact_fit([50, 10, 1], [10, 20, 60], 100, max_samples=3, scarcity_factor=1e9)
    assert tight.total_packs <= 31


@pytest.mark.parametrize("most_bits", [1 << 17, 1])
def test_pairs_are_not_needed(most_bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_fit, "MAX_BITS_FOR_PAIRS", most_bits)
    lengths = np.arange(999, 0, -1)
    placements = place_exact_fit(lengths.tolist(), [10] * 999, 1000)
    assert sum(map(sum, pack_sums(placements))) == 10 * lengths.sum()
    assert placements.total_packs <= 1.01 * 10 * lengths.sum() / 1000
