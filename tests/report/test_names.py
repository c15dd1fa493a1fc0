"""All JSON calls one thing by one name."""

from __future__ import annotations

from packtool.report.statistics import named


def test_counts_have_the_names_of_the_library() -> None:
    assert named({"samples": 3, "tokens": 9, "num_packs": 1, "packs": 1}) == {
        "num_samples": 3,
        "tokens": 9,
        "num_packs": 1,
    }


def test_lists_and_names_of_the_user_stay() -> None:
    figures = {"samples": [{"row": 1}], "channels": {"rows": {"samples": 2}}, "splits": {"train": {"rows": 5}}}
    assert named(figures) == {
        "samples": [{"row": 1}],
        "channels": {"rows": {"num_samples": 2}},
        "splits": {"train": {"num_samples": 5}},
    }
    assert named({"channels": ["rows", "samples"]}) == {"channels": ["rows", "samples"]}
