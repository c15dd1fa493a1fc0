"""Neighbours in a set of lengths, against looking at all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from packtool.planning.length_set import LengthSet


@given(
    lengths=st.sets(st.integers(1, 70_000) | st.integers(1, 30), max_size=40),
    num_removed=st.integers(0, 40),
    target_length=st.integers(0, 80_000) | st.integers(0, 40),
)
def test_nearest_lengths(lengths: set[int], num_removed: int, target_length: int) -> None:
    length_set = LengthSet(lengths)
    for length in sorted(lengths, key=lambda length: length * 7919 % 1009)[:num_removed]:
        length_set.remove(length)
        lengths.remove(length)
    assert (length_set.longest() >= 0) == bool(lengths)
    assert length_set.longest() == max(lengths, default=-1)
    assert length_set.longest_up_to(target_length) == max(
        (length for length in lengths if length <= target_length), default=-1
    )
    assert length_set.shortest_from(target_length) == min(
        (length for length in lengths if length >= target_length), default=-1
    )
    for longest in lengths:
        nearest = length_set.nearest(target_length, longest)
        assert nearest in lengths
        assert nearest <= longest
        assert abs(nearest - target_length) == min(
            abs(length - target_length) for length in lengths if length <= longest
        )
