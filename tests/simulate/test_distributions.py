"""Lengths that are drawn have the published shares."""

from __future__ import annotations

import numpy as np
import pytest

from packtool.simulate.run import POINTS, DistributionName, draw_lengths, quantiles


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
