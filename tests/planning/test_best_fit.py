"""Best fit over a histogram: the groups' bookkeeping, against packing one sample after the other."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter

from hypothesis import example, given
from hypothesis import strategies as st

from packtool.planning.best_fit import Placements, place_best_fit


def one_by_one(lengths: list[int], capacity: int) -> list[int]:
    """Free tokens of each pack after plain best-fit decreasing, ascending."""
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        tightest = bisect_left(free, length)
        room = free.pop(tightest) if tightest < len(free) else capacity
        insort(free, room - length)
    return free


def contents(placements: Placements) -> list[list[int]]:
    """Lengths in each pack; checks that slots are filled from the front, and only once."""
    packs: list[list[int]] = [[] for _ in placements.pack_sizes]
    columns = zip(
        placements.first_pack.tolist(),
        placements.num_packs.tolist(),
        placements.first_slot.tolist(),
        placements.samples_per_pack.tolist(),
        placements.length.tolist(),
        strict=True,
    )
    for first_pack, num, slot, per_pack, length in columns:
        assert num > 0
        assert per_pack > 0
        for pack in range(first_pack, first_pack + num):
            assert len(packs[pack]) == slot
            packs[pack] += [length] * per_pack
    assert [len(pack) for pack in packs] == placements.pack_sizes.tolist()
    return packs


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int]:
    capacity = draw(st.one_of(st.integers(1, 40), st.sampled_from([1023, 1024, 1025, 4097])))
    lengths = draw(st.lists(st.integers(1, capacity), max_size=120))
    return lengths, capacity


@given(problems())
@example(([1] * 100, 7))
@example(([3] * 10 + [2] * 9, 11))
@example(([1025, 1024, 1, 3072], 4097))
def test_same_packs_as_placing_samples_one_by_one(problem: tuple[list[int], int]) -> None:
    lengths, capacity = problem
    counts = sorted(Counter(lengths).items(), reverse=True)
    placements = place_best_fit([length for length, _ in counts], [count for _, count in counts], capacity)
    packs = contents(placements)
    assert sorted(length for pack in packs for length in pack) == sorted(lengths)
    assert sorted(capacity - sum(pack) for pack in packs) == one_by_one(lengths, capacity)


def test_placements_are_in_falling_order_of_length() -> None:
    placements = place_best_fit([9, 4, 3, 1], [2, 5, 5, 5], 10)
    assert placements.length.tolist() == sorted(placements.length.tolist(), reverse=True)


def test_number_of_placements_does_not_grow_with_the_samples() -> None:
    lengths = list(range(400, 0, -1))
    num_few, num_many = (len(place_best_fit(lengths, [count] * 400, 1000).first_slot) for count in (100, 10_000))
    assert num_many < 2 * num_few
