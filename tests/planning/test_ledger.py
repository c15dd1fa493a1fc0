"""Counts as bits, and a ledger of what a plan has trained."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtool.planning.epoch import plan_epoch
from packtool.planning.ledger import DataChange, Ledger, RowCounts, SourceLedger, concatenate_counts, remove_rows
from packtool.planning.options import PlanOptions

ROWS = st.lists(st.integers(0, 19), max_size=60)


def counts_of(rows: list[int]) -> list[int]:
    return [rows.count(row) for row in range(20)]


@pytest.mark.smoke
@given(ROWS, ROWS)
def test_counts_add_up(first_rows: list[int], more_rows: list[int]) -> None:
    a, b = (RowCounts.of_rows(20, np.array(rows, np.int64)) for rows in (first_rows, more_rows))
    assert (a + b).counts().tolist() == counts_of(first_rows + more_rows)
    assert (a + b).counts().sum() == len(first_rows + more_rows)
    assert (a + b).num_rows == len(set(first_rows + more_rows))
    recounted = RowCounts.of(np.array(counts_of(first_rows)))
    assert [plane.tolist() for plane in recounted.planes] == [plane.tolist() for plane in a.planes]


def test_count_planes_match_the_diagram() -> None:
    planes = RowCounts.of(np.array([1, 3, 1, 2, 1, 1, 0, 1])).planes
    assert [np.unpackbits(plane).tolist() for plane in planes] == [[1, 1, 1, 0, 1, 1, 0, 1], [0, 1, 0, 1, 0, 0, 0, 0]]


@given(ROWS, st.data())
def test_skipped_rows_are_removed_as_often_as_listed(rows: list[int], data: st.DataObject) -> None:
    places = data.draw(st.lists(st.sampled_from(range(len(rows))), unique=True) if rows else st.just([]))
    left_out = [rows[place] for place in places]
    result = remove_rows(np.sort(np.array(rows, np.int64)), np.sort(np.array(left_out, np.int64)))
    expected = [row for place, row in enumerate(rows) if place not in places]
    assert result.tolist() == sorted(expected)


@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 15), min_size=1, max_size=3),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 99),
    st.data(),
)
def test_ledger_equals_an_independent_count(
    sizes: list[int], world_size: int, packing: bool, seed: int, data: st.DataObject
) -> None:
    num = sum(sizes)
    lengths = np.random.default_rng(seed).integers(1, 30, num).astype(np.int32)
    options = PlanOptions(max_length=25, packing_length=40, packing=packing, world_size=world_size, balance="none")
    if (lengths > 25).all():
        lengths[0] = 25
    plan = plan_epoch(lengths, lengths // 2, options, seed=seed)
    ledger = Ledger(sources=tuple(SourceLedger.begin(f"/{n}", "", size) for n, size in enumerate(sizes)))
    first_step = data.draw(st.integers(0, plan.steps.num_steps))
    stop = data.draw(st.integers(first_step, plan.steps.num_steps))
    trained = [
        int(sample)
        for step in range(first_step, stop)
        for rank in range(world_size)
        for micro_batch in range(plan.steps.num_micro_batches(step))
        for pack in plan.samples(step, rank, micro_batch)
        for sample in pack
    ]
    skipped = trained[::3]
    result = ledger.plus(plan, range(first_step, stop), lengths, lengths // 2, skipped)
    counted = [sample for sample in trained if sample not in skipped]
    assert concatenate_counts([each.epoch for each in result.sources]).tolist() == [
        int(sample in counted) for sample in range(num)
    ]
    assert result.step == stop - first_step
    assert sum(source.tokens for source in result.sources) == lengths[counted].sum()
    assert sum(source.target_tokens for source in result.sources) == (lengths[counted] // 2).sum()
    starts = np.cumsum([0, *sizes])
    skipped_rows = [int(row) + starts[n] for n, source in enumerate(result.sources) for row in source.skipped]
    assert skipped_rows == sorted(skipped)
    later = result.in_next_epoch().plus(plan, range(first_step, stop), lengths, lengths)
    times = np.concatenate([source.trained.counts() for source in later.sources])
    assert times.tolist() == [(sample in counted) + (sample in trained) for sample in range(num)]


def test_remaining_counts_of_a_data_change() -> None:
    change = DataChange(3, 0, (RowCounts.of(np.array([0, 2])), RowCounts.of(np.array([1]))))
    assert change.samples().tolist() == [0, 2, 1]
