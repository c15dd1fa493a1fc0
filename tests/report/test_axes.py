from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from packtool.report.drawing import AXIS_LENGTH, Axis


@given(st.floats(0.01, 1e9), st.integers(3, 6), st.booleans())
def test_numbers_are_round_and_evenly_spaced(high: float, max_ticks: int, extend: bool) -> None:
    numbers = [value for value, _ in Axis.linear("", 0, high, max_ticks, extend=extend).ticks]
    assert 2 <= len(numbers) <= max_ticks + 2
    assert numbers[-1] >= high * (1 - 1e-6) if extend else numbers[-1] <= high * (1 + 1e-6)
    steps = [later - earlier for earlier, later in pairwise(numbers)]
    assert steps == pytest.approx([steps[0]] * len(steps))
    assert f"{steps[0]:e}".rstrip("0123456789").rstrip("+-e").rstrip("0") in ("1.", "2.", "2.5", "5.")
    axis = Axis.linear("", 0, max(round(high), 1), max_ticks, integers=True)
    assert all(value == int(value) for value, _ in axis.ticks)


@pytest.mark.parametrize(
    ("low", "high", "settings", "expected"),
    [
        (0, 1.04e-4, {}, ["0", "2.5e-5", "5e-5", "7.5e-5", "1e-4"]),
        (90, 100, {"suffix": "%"}, ["90%", "92%", "94%", "96%", "98%", "100%"]),
        (0, 363, {"integers": True}, ["0", "100", "200", "300"]),
        (1, 3, {"integers": True}, ["1", "2", "3"]),
        (0, 21_000, {}, ["0", "5,000", "10,000", "15,000", "20,000"]),
        (0, 2_600_000, {}, ["0", "1M", "2M"]),
        (-1.5, 2.2, {}, ["-1", "0", "1", "2"]),
        (1, 1.17, {"extend": True}, ["1.00", "1.05", "1.10", "1.15", "1.20"]),
    ],
)
def test_labels(low: float, high: float, settings: dict[str, Any], expected: list[str]) -> None:
    axis = Axis.linear("", low, high, 5, **settings)
    assert [label for _, label in axis.ticks] == expected
    assert axis.position(low) == 0
    assert axis.position(axis.high) == AXIS_LENGTH
    assert axis.high == (pytest.approx(1.2) if "extend" in settings else high)


def test_a_single_number_is_labelled() -> None:
    assert Axis.linear("", 2.6, 3.4, 5, integers=True).ticks == [(3.0, "3")]


@example(low=0.5, span=200.0)
@given(low=st.floats(0.5, 1e5), span=st.floats(100, 1e6))
def test_a_logarithmic_axis_has_a_few_round_numbers(low: float, span: float) -> None:
    axis = Axis.logarithmic("", low, low * span)
    assert [axis.position(axis.low), axis.position(axis.high)] == pytest.approx([0, AXIS_LENGTH])
    assert axis.position(low * span**0.5) == pytest.approx(AXIS_LENGTH / 2)
    places = [place for place, _ in axis.tick_positions]
    assert 1 <= len(places) <= AXIS_LENGTH / 100
    assert -1e-6 <= places[0] <= places[-1] <= AXIS_LENGTH * (1 + 1e-9)
    assert all(later - earlier > 100 for earlier, later in pairwise(places))
    assert {f"{value:.0e}"[0] for value, _ in axis.ticks} <= set("1235")
