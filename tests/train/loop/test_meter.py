"""The shares of a log line: what is counted as waiting, and that nothing is counted twice."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packtool.train.loop import meter
from packtool.train.loop.meter import Meter
from packtool.train.prepare.figures import StepFigures

ACCELERATOR = SimpleNamespace(num_processes=1, device=torch.device("cpu"))
seconds = st.integers(0, 1000).map(float)


class Clock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@given(lines=st.lists(st.lists(seconds, min_size=7, max_size=7), min_size=1, max_size=5))
def test_waits_of_a_line_and_the_rest_are_its_time(lines: list[list[float]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr(meter, "time", clock)
        measured = Meter(by_channel=False)
        written = 0.0
        for load, compute, unlogged, evaluate, reach, make, write in lines:

            def loaded(load: float = load) -> Iterator[str]:
                clock.now += load
                yield "a micro-batch"

            assert list(measured.waited_for(loaded())) == ["a micro-batch"]
            clock.now += compute
            measured.add(StepFigures())
            # A step without a line of its own.
            measured.begin_log()
            clock.now += unlogged
            clock.now += evaluate
            measured.leave_out(evaluate)
            measured.begin_log()
            clock.now += reach
            line = measured.logged(0.0, ACCELERATOR, copying=None)
            assert "copy_wait" not in line
            assert line["seconds"] == written + load + compute + unlogged + reach
            assert line["data_wait"] * line["seconds"] == pytest.approx(load)
            assert line["log_wait"] * line["seconds"] == pytest.approx(written + reach)
            clock.now += write
            measured.end_log()
            # An evaluation between two lines is none of either.
            clock.now += make
            measured.leave_out(make)
            written = write


def test_copies_are_a_share_of_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(meter, "time", clock)
    measured = Meter(by_channel=False)
    measured.add(StepFigures())
    clock.now += 8.0
    measured.begin_log()
    assert measured.logged(0.0, ACCELERATOR, copying=2.0)["copy_wait"] == 0.25
