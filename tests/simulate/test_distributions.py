"""Lengths that are drawn have the published shares; lengths in a text file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from packtool.config.simulate import DistributionName
from packtool.errors import DataError
from packtool.simulate.run import POINTS, draw_lengths, quantiles, read_lengths


@pytest.mark.parametrize("name", POINTS)
def test_published_shares(name: DistributionName) -> None:
    lengths = draw_lengths(name, 200_000, seed=1)
    for share, tokens in POINTS[name]:
        assert np.mean(lengths <= tokens) == pytest.approx(share, abs=0.004)
        assert quantiles(name, np.array([share])).tolist() == [tokens]


@pytest.mark.parametrize("name", POINTS)
def test_quantiles_rise(name: DistributionName) -> None:
    assert (np.diff(quantiles(name, np.linspace(0, 1, 10_001))) >= 0).all()


def test_same_seed_gives_the_same_lengths_for_any_number() -> None:
    first_lengths, more_lengths = draw_lengths("wikipedia", 100, seed=3), draw_lengths("wikipedia", 1000, seed=3)
    assert (more_lengths[:100] == first_lengths).all()
    assert (draw_lengths("wikipedia", 100, seed=4) != first_lengths).any()
    assert first_lengths.dtype == np.int64


@pytest.mark.parametrize(
    ("text", "lengths"), [("3\n14\r\n\t5\n", [3, 14, 5]), ("+3 -14\x0b5", [3, -14, 5]), ("", []), (" \n", [])]
)
def test_lengths_are_read_from_a_text_file(tmp_path: Path, text: str, lengths: list[int]) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    array = read_lengths(str(path))
    assert array.tolist() == lengths
    assert array.dtype == np.int64


@pytest.mark.parametrize("text", ["3 4.5", "3,4", "3 four"])
def test_other_text_than_whole_numbers_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    with pytest.raises(DataError, match=r"--lengths .*lengths\.txt"):
        read_lengths(str(path))
