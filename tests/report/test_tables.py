"""Tables of a terminal: columns stand below one another, whatever cells hold."""

from __future__ import annotations

import pytest

from packtool.report.tables import aligned, print_table


@pytest.mark.smoke
def test_columns_stand_below_one_another() -> None:
    rows = [("", "samples", "loss", ""), ("图片", "1,000", "0.5", "ok"), ("text only", "7", "12.25", "FAILED")]
    assert aligned(rows, "lrrl") == [
        "           samples   loss",
        "图片         1,000    0.5  ok",  # each of these letters is two columns wide
        "text only        7  12.25  FAILED",
    ]
    assert aligned([("1", "22", "3"), ("10", "2", "30")], "r") == [" 1  22   3", "10   2  30"]
    assert aligned([]) == []


def test_a_long_cell_pushes_its_own_line_only() -> None:
    long = "s3://bucket/" + "x" * 70
    assert aligned([("rows", "3"), (long, "4")], "l") == ["rows  3", f"{long}  4"]


def test_a_table_is_one_line_for_each_row(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("what\x1b[2J", [("a\nb\x1b]0;t\x07", "[/b]"), ("c", "x" * 300)])
    out = capsys.readouterr().out
    assert out.splitlines()[:2] == ["what\\x1b[2J", "a\\nb\\x1b]0;t\\x07  [/b]"]
    assert len(out.splitlines()) == 3
