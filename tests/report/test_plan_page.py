from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtool.planning.pack_plan import PackPlan
from packtool.report import plan_page
from packtool.report.drawing import Box, Drawing, Note
from packtool.report.plan import sweep_page
from packtool.report.plan_page import (
    balance_chart,
    blocks_drawing,
    histogram,
    packs_drawing,
    page,
    plain_batches,
    shares_chart,
    tree_drawing,
)
from packtool.report.tables import length_histogram
from tests.report.contents import SWEEP_FIGURES, branches, content, content_with_trees

HOSTILE = ("<b>'", "<i onload", "\u202e", "\x1b", "\x07")


def widths(drawing: Drawing, style: str) -> float:
    """Return the total width of all rectangles of a style, in thousandths of a line."""
    boxes = [shape for shape in drawing.shapes if isinstance(shape, Box)]
    return sum(box.width for box in boxes if box.style.startswith(style))


@given(st.lists(st.lists(st.integers(1, 500), min_size=1, max_size=9), min_size=1, max_size=9), st.integers(1, 20))
def test_plain_batches_have_the_same_samples(packs: list[list[int]], each: int) -> None:
    stretches = plain_batches([branches(pack) for pack in packs], each)
    samples = [stretch for stretch in stretches if stretch[1] is not None]
    expected = [(length, f"c{i % 5}") for pack in packs for i, length in enumerate(pack)]
    assert sorted(samples) == sorted(expected)
    padded = sum(
        max(tokens for tokens, _ in samples[start : start + each]) * len(samples[start : start + each])
        for start in range(0, len(samples), each)
    )
    assert sum(tokens for tokens, _ in stretches) == padded


@given(st.lists(st.integers(1, 400_000), min_size=1, max_size=80))
def test_every_length_is_in_its_bin(lengths: list[int]) -> None:
    length_bins = length_histogram(np.array(lengths))
    assert length_bins.is_log == (max(lengths) >= 100 * min(lengths))
    assert len(length_bins.counts) <= 48
    counted = [
        sum(low < length <= high for length in lengths)
        for low, high in itertools.pairwise(map(float, length_bins.edges))
    ]
    assert list(length_bins.counts) == counted
    assert sum(counted) == len(lengths)
    boxes = [shape for shape in histogram(length_bins, "samples", "tokens").shapes if isinstance(shape, Box)]
    assert len(boxes) == sum(map(bool, counted))
    assert all(box.x >= 0 and box.width > 0 and box.x + box.width <= 1000 * (1 + 1e-9) for box in boxes)


def test_long_tails_leave_several_visible_bins() -> None:
    lengths = np.random.default_rng(0).lognormal(np.log(60), 0.5, 5000).astype(int) + 1
    counts = length_histogram(np.append(lengths, 100_000)).counts
    assert sum(count > 0.02 * len(lengths) for count in counts) >= 8, "not a single bar"


@pytest.mark.smoke
def test_packs_are_to_scale() -> None:
    drawing = packs_drawing([branches([500, 250]), branches([1000])], 1000)
    assert widths(drawing, "s c") == pytest.approx(1750)
    assert widths(drawing, "room") == pytest.approx(250)
    assert [box.hint for box in drawing.shapes if isinstance(box, Box)][2] == "250 tokens free"


def test_a_prefix_is_drawn_once_in_a_pack_and_with_every_sample_without_packing() -> None:
    tree = branches([500, 120, 50], [0, 400, 500])
    drawing = packs_drawing([tree], 1000)
    assert widths(drawing, "s prefix") == pytest.approx(400 + 100)
    assert widths(drawing, "s c") == pytest.approx(100 + 20 + 50)
    assert widths(drawing, "room") == pytest.approx(330)
    plain = plain_batches([tree], 3)
    assert sorted(tokens for tokens, style in plain if style == "prefix") == [400, 500, 500]
    assert sum(tokens for tokens, _ in plain) == 3 * 550


def test_a_tree_is_drawn_to_scale() -> None:
    boxes = [box for box in tree_drawing(branches([800, 140, 50], [0, 400, 500])).shapes if isinstance(box, Box)]
    places = [(box.style, box.x, box.width) for box in boxes]
    assert places == [
        ("s prefix", 0, 500),
        ("s c0", 500, 500),
        ("s prefix", 500, 125),
        ("s c1", 625, 50),
        ("s c2", 625, 62.5),
    ]
    assert [box.hint for box in boxes][:2] == ["400 tokens shared by 3 samples", "400 tokens of one sample"]
    assert [box.height for box in boxes[:3]] == [31, 9, 20]
    text = page(content_with_trees())
    for words in ("Shared prefixes are computed once", "61.10%", "The tree that saves most", "656 tokens instead of"):
        assert words in text
    assert "hared prefixes" not in page(content())


def test_a_plan_without_samples_has_no_trees() -> None:
    nothing = np.zeros(0, np.int32)
    plan = PackPlan(nothing.astype(np.int64), np.zeros(1, np.int64), nothing, 9, shared_tokens=nothing)
    assert plan_page._example_trees(plan, nothing) == []


def test_blocks_wrap_to_scale() -> None:
    stretches = [(700, "c0"), (800, None), (600, "c1")]
    drawing = blocks_drawing(stretches, 1000, max_lines=10)
    assert widths(drawing, "s c") == pytest.approx(1300)
    assert widths(drawing, "waste") == pytest.approx(800)
    assert widths(blocks_drawing(stretches, 1000, max_lines=1), "waste") == pytest.approx(300)


def test_an_outlier_does_not_compress_the_other_steps() -> None:
    near = balance_chart([1.1, 1.2, 1.1], [1.0, 1.1, 1.0])
    far = balance_chart([1.1, 1.2, 1.1, 9.0], [1.0, 1.1, 1.0, 9.0])
    assert near.notes == []
    assert far.notes == [Note(875, [("c0", "9.00 ↑")])]
    assert near.y.high == far.y.high == pytest.approx(1.2)
    assert [shape.style for shape in balance_chart([2.0], [2.0]).shapes] == ["dot-after"], "drawn once: nothing changed"


def test_shares_are_drawn_at_their_steps() -> None:
    """Ten steps in intervals of three: the last interval has one step."""
    parts = [[1.0, 0.0]] * 2 + [[0.0, 1.0]] * 2
    mixture = {
        "rows": [("a",), ("b",)],
        "shares": parts,
        "unit": "tokens",
        "steps_per_interval": 3,
        "num_steps": 10,
        "stages": [],
    }
    boxes = [shape for shape in shares_chart(mixture | {"of": "epoch"}).shapes if isinstance(shape, Box)]
    assert [(round(box.x), round(box.width)) for box in boxes] == [(0, 300), (300, 300), (600, 300), (900, 100)]


def test_foreign_text_is_escaped() -> None:
    evil = "<b>'\"&\u202e\x1b]0;t\x07_<i onload=hit()>"
    parts = content(title=evil, reason=evil, command=f"packtool {evil}")
    parts = parts | {"figures": [(evil, evil)], "headline": [(evil, evil, evil)]}
    row = dict.fromkeys(SWEEP_FIGURES, 1) | {"shared_prefixes": None}
    for text in (page(parts), sweep_page([row], evil, evil)):
        assert [part for part in HOSTILE if part in text] == []
        assert "&lt;b&gt;&#39;&#34;&amp;\\u202e\\x1b]0;t\\x07_" in text.replace("<wbr>", "")


def test_shares_are_never_rounded_to_0_or_100_percent() -> None:
    text = page(content(parts=[("in the plan", 10_000_000), ("longer", 1)]))
    assert "> 99.99%" in text.replace("&gt;", ">")
    assert "< 0.01%" in text.replace("&lt;", "<")
