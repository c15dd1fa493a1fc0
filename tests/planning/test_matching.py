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


def whole(*rows: int, file: int = 7) -> list[Sample]:
    return [(file, row, (0, 0)) for row in rows]


@given(st.lists(st.integers(0, 9), unique=True), st.lists(st.integers(0, 9), unique=True))
def test_rows_are_found_wherever_they_are(old: list[int], new: list[int]) -> None:
    found = match(keys(whole(*old)), keys(whole(*new)))
    assert [None if same < 0 else old[same] for same in found.same] == [row if row in old else None for row in new]
    assert found.is_new.tolist() == [row not in old for row in new]
    assert found.is_gone.tolist() == [row not in new for row in old]
    counts = np.array([row % 3 for row in old], np.int64)
    assert found.transfer(counts).tolist() == [row % 3 if row in old else 0 for row in new]


def test_the_same_row_of_another_file_is_another() -> None:
    assert match(keys(whole(1)), keys(whole(1, file=8))).is_new.all()


def test_parts_of_a_row_are_found_by_their_number() -> None:
    old: list[Sample] = [*whole(0), (7, 1, (1, 2)), (7, 1, (2, 2)), *whole(3)]
    found = match(keys(old), keys([(7, 1, (2, 2)), (7, 1, (1, 2))]))
    assert found.same.tolist() == [2, 1]


def test_other_parts_of_a_row_were_trained_as_often_as_all_of_it() -> None:
    old: list[Sample] = [*whole(0), (7, 1, (1, 2)), (7, 1, (2, 2)), *whole(3)]
    found = match(keys(old), keys(whole(0, 1, 3, 4)))
    assert found.same.tolist() == [0, -1, 3, -1]
    assert found.transfer(np.array([1, 1, 0, 2])).tolist() == [1, 0, 2, 0]
    assert found.transfer(np.array([1, 1, 2, 2])).tolist() == [1, 1, 2, 0]
    turned = match(keys(whole(0, 1)), keys(old))
    assert turned.transfer(np.array([0, 1])).tolist() == [0, 1, 1, 0]


def test_pieces_of_a_text_are_numbered() -> None:
    old = keys([*whole(5), *whole(5), *whole(6)])
    assert match(old, keys(whole(5, 6, 5))).same.tolist() == [0, 2, 1]
    # Cut into another number of pieces, none is what one of them was.
    assert match(old, keys(whole(5, 5, 5))).transfer(np.array([1, 0, 0])).tolist() == [0, 0, 0]


def test_of_alike_contents_as_many_were_trained_as_were() -> None:
    contents = np.array([4, 4, 4, 9], np.uint64)
    counts = np.array([0, 1, 1, 0])
    found = match(content_keys(contents, counts), content_keys(contents[[0, 3, 1]], np.zeros(3)))
    assert sorted(found.transfer(counts)[[0, 2]].tolist()) == [1, 1]
    assert found.transfer(counts)[1] == 0
