"""Placements that shard the longest sequences, against all of their kind."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtool.planning.cost import Exchange, Load, StepTime
from packtool.planning.skrull import SHARDED, _Step

TIMES = StepTime(flops_per_second=1.0, exchanges=(Exchange(1, 2.0, 0.0, overlap_local=0.5),))


def sequences(sizes: list[int], num_ranks: int, bucket_size: int) -> _Step:
    sizes = sorted(sizes)
    work = [Load(float(size), size / 2) for size in sizes]
    # Short chunks lose: two ranks' worth of queries.
    shared = [Load(size + 2.0, size / 2 + 2.0) for size in sizes]
    return _Step(sizes, sizes, work, shared, num_ranks, bucket_size * num_ranks, TIMES)


def test_example_of_the_paper() -> None:
    step = sequences([100, 9, 8, 7, 6, 5, 4], 2, 80)
    placed = step.shard_longest(list(range(7)), math.inf)
    assert placed is not None
    assert placed.placement == [1, 0, 0, 1, 1, 0, SHARDED]
    assert placed.seconds == 20 + 51
    assert step.shard_longest(list(range(7)), placed.seconds) is None


def test_sequences_that_do_not_fit_are_not_placed() -> None:
    assert sequences([9, 9, 9], 2, 10).shard_longest([0, 1, 2], math.inf) is None
    placed = sequences([9, 9, 2], 2, 10).shard_longest([0, 1, 2], math.inf)
    assert placed is not None
    assert placed.placement == [SHARDED] * 3


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(2, 4), st.integers(20, 100))
def test_no_number_of_sharded_sequences_is_faster(sizes: list[int], num_ranks: int, bucket_size: int) -> None:
    step = sequences(sizes, num_ranks, bucket_size)
    falling = list(range(len(sizes)))[::-1]
    best = step.shard_longest(falling[::-1], math.inf)
    seconds = []
    for num in range(len(sizes) + 1):
        free = step.capacity - sum(step.padded_sizes[i] for i in falling[:num])
        placed = step.assign_local(falling[num:], free) if free >= 0 else None
        if placed is not None:
            ranks, loads = placed
            tokens = [0] * num_ranks
            for sequence, rank in zip(falling[num:], ranks, strict=True):
                tokens[rank] += step.sizes[sequence]
            assert max(tokens) * num_ranks <= free
            shared = Load.sum(step.sharded_loads[i] for i in falling[:num])
            seconds.append(
                TIMES.micro_batch(loads, shared, sum(step.padded_sizes[i] for i in falling[:num]), num_ranks)
            )
    assert (best is None) == (not seconds)
    if best is not None:
        assert best.seconds == pytest.approx(min(seconds))
