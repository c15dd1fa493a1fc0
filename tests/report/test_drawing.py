from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtool.report.drawing import Stretch, _ticks, num_lines, packs_svg, steps_svg, stretches_svg
from packtool.report.page import page, plain_batches
from tests.report.contents import content


def widths(svg: str, kind: str) -> float:
    """Thousandths of a line that all rectangles of a kind take."""
    return sum(float(wide) for wide in re.findall(rf'<rect class="{kind}[^>]* width="([\d.]+)"', svg))


@given(st.lists(st.lists(st.integers(1, 500), min_size=1, max_size=9), min_size=1, max_size=9), st.integers(1, 20))
def test_plain_batches_have_the_same_samples(packs: list[list[int]], each: int) -> None:
    found = plain_batches(packs, each)
    samples = [stretch for stretch in found if stretch.colour is not None]
    wanted = [(length, i % 5) for pack in packs for i, length in enumerate(pack)]
    assert sorted((sample.tokens, sample.colour) for sample in samples) == sorted(wanted)
    padded = sum(
        max(sample.tokens for sample in samples[start : start + each]) * len(samples[start : start + each])
        for start in range(0, len(samples), each)
    )
    assert sum(stretch.tokens for stretch in found) == padded


def test_packs_are_to_scale() -> None:
    svg = packs_svg([[500, 250], [1000]], 1000)
    assert widths(svg, "s c") == pytest.approx(1750)
    assert widths(svg, "room") == pytest.approx(250)
    assert svg.count("250 tokens free") == 1


def test_stretches_wrap_to_scale() -> None:
    stretches = [Stretch(700, 0), Stretch(800, None), Stretch(600, 1)]
    assert num_lines(stretches, 1000) == 3
    svg = stretches_svg(stretches, 1000, most_lines=10)
    assert widths(svg, "s c") == pytest.approx(1300)
    assert widths(svg, "waste") == pytest.approx(800)
    assert widths(stretches_svg(stretches, 1000, most_lines=1), "waste") == pytest.approx(300)


@given(st.floats(0.01, 1e9), st.integers(3, 6), st.booleans())
def test_ticks(high: float, most: int, inside: bool) -> None:
    ticks = _ticks(0, high, most, inside=inside)
    assert 2 <= len(ticks) <= most + 2
    assert ticks[-1] <= high * (1 + 1e-6) if inside else ticks[-1] >= high * (1 - 1e-6)
    steps = [later - earlier for earlier, later in pairwise(ticks)]
    assert steps == pytest.approx([steps[0]] * len(steps))
    assert all(tick == int(tick) for tick in _ticks(0, max(round(high), 1), most, whole=True))


def test_one_far_step_does_not_press_the_others_flat() -> None:
    near = steps_svg([1.1, 1.2, 1.1], [1.0, 1.1, 1.0])
    far = steps_svg([1.1, 1.2, 1.1, 9.0], [1.0, 1.1, 1.0, 9.0])
    assert "↑" not in near
    assert "9.00 ↑" in far
    for svg in (near, far):
        assert '<span class="y" style="bottom:100.00%">1.20</span>' in svg
    assert steps_svg([2.0], [2.0]).count("dot-") == 1, "drawn once where nothing changed"


def test_words_of_others_are_no_markup() -> None:
    text = page(content(title="<b>&", reason="<i>", command="packtool '<script>'"))
    for tag in ("<b>", "<i>", "<script"):
        assert tag not in text


def test_shares_are_never_rounded_to_all_or_nothing() -> None:
    text = page(content(rows=[("in the plan", 10_000_000), ("dropped", 1)]))
    assert "> 99.99%" in text.replace("&gt;", ">")
    assert "< 0.01%" in text.replace("&lt;", "<")
