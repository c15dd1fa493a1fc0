"""Samples of a cache that is exported again are found by their rows, or by what they say."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from packtool.planning.ledger import Keys, content_keys, match, row_keys

Sample = tuple[int, int, tuple[int, int]]
"""File, row, and turn of how many; zeros for a whole row."""


def keys(samples: list[Sample]) -> Keys:
    files, rows = (np.array([sample[i] for sample in samples], np.int64) for i in (0, 1))
    parts = np.array([[*sample[2], 0, 0] for sample in samples], np.int64).reshape(-1, 4)
    return row_keys(files.astype(np.uint64), rows, parts if parts.any() else None)


def complete_rows(*rows: int, file: int = 7) -> list[Sample]:
    return [(file, row, (0, 0)) for row in rows]


@given(st.lists(st.integers(0, 9), unique=True), st.lists(st.integers(0, 9), unique=True))
def test_rows_are_matched_in_any_order(old: list[int], new: list[int]) -> None:
    result = match(keys(complete_rows(*old)), keys(complete_rows(*new)))
    assert [None if same < 0 else old[same] for same in result.same] == [row if row in old else None for row in new]
    assert result.is_new.tolist() == [row not in old for row in new]
    assert result.is_gone.tolist() == [row not in new for row in old]
    counts = np.array([row % 3 for row in old], np.int64)
    assert result.transfer(counts).tolist() == [row % 3 if row in old else 0 for row in new]


def test_rows_of_different_files_do_not_match() -> None:
    assert match(keys(complete_rows(1)), keys(complete_rows(1, file=8))).is_new.all()


def test_parts_of_a_row_are_found_by_their_number() -> None:
    old: list[Sample] = [*complete_rows(0), (7, 1, (1, 2)), (7, 1, (2, 2)), *complete_rows(3)]
    result = match(keys(old), keys([(7, 1, (2, 2)), (7, 1, (1, 2))]))
    assert result.same.tolist() == [2, 1]


def test_other_parts_of_a_row_get_its_minimum_count() -> None:
    old: list[Sample] = [*complete_rows(0), (7, 1, (1, 2)), (7, 1, (2, 2)), *complete_rows(3)]
    result = match(keys(old), keys(complete_rows(0, 1, 3, 4)))
    assert result.same.tolist() == [0, -1, 3, -1]
    assert result.transfer(np.array([1, 1, 0, 2])).tolist() == [1, 0, 2, 0]
    assert result.transfer(np.array([1, 1, 2, 2])).tolist() == [1, 1, 2, 0]
    swapped = match(keys(complete_rows(0, 1)), keys(old))
    assert swapped.transfer(np.array([0, 1])).tolist() == [0, 1, 1, 0]


def test_pieces_of_a_text_are_numbered() -> None:
    old = keys([*complete_rows(5), *complete_rows(5), *complete_rows(6)])
    assert match(old, keys(complete_rows(5, 6, 5))).same.tolist() == [0, 2, 1]
    # Cut into another number of pieces, none is what one of them was.
    assert match(old, keys(complete_rows(5, 5, 5))).transfer(np.array([1, 0, 0])).tolist() == [0, 0, 0]


def test_equal_contents_keep_their_number_of_trained_samples() -> None:
    contents = np.array([4, 4, 4, 9], np.uint64)
    counts = np.array([0, 1, 1, 0])
    result = match(content_keys(contents, counts), content_keys(contents[[0, 3, 1]], np.zeros(3)))
    assert sorted(result.transfer(counts)[[0, 2]].tolist()) == [1, 1]
    assert result.transfer(counts)[1] == 0
