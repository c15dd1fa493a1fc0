"""Placements that shard the longest sequences, against all of their kind."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtool.plan.skrull import Falling
from packtool.plan.step_time import Exchange, Load, StepTime

TIMES = StepTime(flops_per_second=1.0, exchanges=(Exchange(1, 2.0, 0.0, behind_local=0.5),))


def falling(sizes: list[int], num_ranks: int, bucket_size: int) -> Falling:
    sizes = sorted(sizes, reverse=True)
    work = [Load(float(size), size / 2) for size in sizes]
    # Short chunks lose: two ranks' worth of queries.
    shared = [Load(size + 2.0, size / 2 + 2.0) for size in sizes]
    return Falling(sizes, sizes, work, shared, num_ranks, bucket_size * num_ranks)


def test_the_example_of_the_module() -> None:
    found = falling([100, 9, 8, 7, 6, 5, 4], 2, 80).best(TIMES, math.inf)
    assert found is not None
    assert (found.num_sharded, found.ranks) == (1, [0, 1, 1, 0, 0, 1])
    assert found.seconds == 20 + 51
    assert falling([100, 9, 8, 7, 6, 5, 4], 2, 80).best(TIMES, found.seconds) is None


def test_what_has_no_room_is_not_placed() -> None:
    assert falling([9, 9, 9], 2, 10).best(TIMES, math.inf) is None
    found = falling([9, 9, 2], 2, 10).best(TIMES, math.inf)
    assert found is not None
    assert found.num_sharded == 3


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(2, 4), st.integers(20, 100))
def test_none_of_its_kind_is_faster(sizes: list[int], num_ranks: int, bucket_size: int) -> None:
    problem = falling(sizes, num_ranks, bucket_size)
    found = problem.best(TIMES, math.inf)
    seconds = []
    for num in range(len(sizes) + 1):
        room = problem.room - sum(problem.padded[:num])
        placed = problem._assigned(num, room) if room >= 0 else None
        if placed is not None:
            ranks, loads = placed
            tokens = [0] * num_ranks
            for size, rank in zip(problem.sizes[num:], ranks, strict=True):
                tokens[rank] += size
            assert max(tokens) * num_ranks <= room
            shared = Load.sum(problem.sharded[:num])
            seconds.append(TIMES.micro_batch(loads, shared, sum(problem.padded[:num]), num_ranks))
    assert (found is None) == (not seconds)
    if found is not None:
        assert found.seconds == pytest.approx(min(seconds))
