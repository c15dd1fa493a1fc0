"""Tables are aligned whatever their cells contain; progress is a bar in a terminal and lines elsewhere."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from packtool.report import tables
from packtool.report.tables import TerminalProgress, aligned, filled_lines, print_table


@pytest.mark.smoke
def test_columns_are_aligned() -> None:
    rows = [("", "samples", "loss", ""), ("图片", "1,000", "0.5", "ok"), ("text only", "7", "12.25", "FAILED")]
    assert aligned(rows, "lrrl") == [
        "           samples   loss",
        "图片         1,000    0.5  ok",  # each of these letters is two columns wide
        "text only        7  12.25  FAILED",
    ]
    assert aligned([("1", "22", "3"), ("10", "2", "30")], "r") == [" 1  22   3", "10   2  30"]
    assert aligned([]) == []


def test_a_long_cell_shifts_only_its_own_line() -> None:
    long = "s3://bucket/" + "x" * 70
    assert aligned([("rows", "3"), (long, "4")], "l") == ["rows  3", f"{long}  4"]


def test_a_table_is_one_line_for_each_row(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("what\x1b[2J", [("a\nb\x1b]0;t\x07", "[/b]"), ("c", "x" * 300)])
    out = capsys.readouterr().out
    assert out.splitlines()[:2] == ["what\\x1b[2J", "a\\nb\\x1b]0;t\\x07  [/b]"]
    assert len(out.splitlines()) == 3


@given(start=st.integers(0, 20_000), gaps=st.lists(st.integers(5, 70), min_size=1, max_size=5))
def test_lines_seconds_apart_have_different_times(start: int, gaps: list[int]) -> None:
    times = [tables._elapsed(sum(gaps[:num_gaps], start)) for num_gaps in range(len(gaps) + 1)]
    assert len(set(times)) == len(times)


def test_a_line_without_figures_shows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_SECONDS_BETWEEN_LINES", 0.0)
    printed = io.StringIO()
    with TerminalProgress(Console(file=printed, width=200)) as progress:
        progress.start("train", 4)
        progress.line(2, loss=1.25)
        progress.advance(1)
    output_lines = printed.getvalue().splitlines()
    assert output_lines[0].startswith("train: 2 of 4")
    assert output_lines[0].endswith("  loss 1.25")
    assert output_lines[1].startswith("train: 3 of 4")
    assert "loss" not in output_lines[1]


def test_a_bar_names_the_step_of_its_figures() -> None:
    printed = io.StringIO()
    with TerminalProgress(Console(file=printed, width=200, force_terminal=True)) as progress:
        progress.start("train", 4)
        progress.line(2, loss=1.25)
        progress.advance(1)
        assert progress._bar is not None
        progress._bar.refresh()
    assert "3/4" in printed.getvalue()
    assert "at 2: loss 1.25" in printed.getvalue().split("3/4")[-1]


def test_lines_are_shown_for_their_figures() -> None:
    figures = {"num_repeats": 0, "not_drawn": 0, "filtered": 1200, "has_plan": True}
    assert filled_lines("train left out", figures) == [("  not in the plan", "1,200")]
    drawn = {"num_repeats": 3, "has_plan": False}
    expected = [("  repeated samples", "3"), ("  filtered by length", "1,200")]
    assert filled_lines("train left out", figures | drawn) == expected
