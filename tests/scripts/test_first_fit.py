"""First fit over a histogram, against placing one sample after the other: the same packs, sample by sample."""

from __future__ import annotations

from collections import Counter

from hypothesis import example, given
from hypothesis import strategies as st

from scripts._first_fit import place_first_fit
from tests.planning.test_best_fit import contents


def one_by_one(lengths: list[int], capacity: int, max_samples: int) -> list[list[int]]:
    """Packs of plain first-fit decreasing in the order in which they were opened."""
    packs: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        for pack in packs:
            if sum(pack) + length <= capacity and len(pack) < max_samples:
                pack.append(length)
                break
        else:
            packs.append([length])
    return packs


@given(
    capacity=st.integers(1, 40) | st.sampled_from([1023, 1024, 1025]),
    parts=st.lists(st.floats(0, 1), max_size=100),
    max_samples=st.integers(1, 8) | st.just(1000),
)
@example(capacity=7, parts=[0.1] * 100, max_samples=1000)
@example(capacity=11, parts=[0.2] * 9 + [0.1] * 9, max_samples=3)
def test_packing_equals_placing_samples_one_by_one(capacity: int, parts: list[float], max_samples: int) -> None:
    lengths = [max(1, round(part * capacity)) for part in parts]
    counts = sorted(Counter(lengths).items(), reverse=True)
    placements = place_first_fit(
        [length for length, _ in counts], [count for _, count in counts], capacity, max_samples
    )
    assert contents(placements) == one_by_one(lengths, capacity, max_samples)
