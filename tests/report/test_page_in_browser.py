"""Pages of plans as a reader sees them, in headless Chromium where one is installed."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from packtool.cli.main import run
from packtool.report.plan import sweep_page
from packtool.report.plan_page import page
from packtool.report.tables import length_histogram, source_rows
from tests.report.browser import Browser, find, running_browser
from tests.report.contents import SWEEP_FIGURES, content, content_with_trees

DESK, PHONE, SMALL_PHONE = 1280, 390, 320  # CSS pixels

# Everything that has a place: drawings with what they hold, words with where they end, and the colours.
LOOK = """(() => {
    const box = e => { const b = e.getBoundingClientRect(); return [b.left, b.right, b.width, b.height]; };
    const all = (query, root = document) => [...root.querySelectorAll(query)];
    const colour = (query, name) => getComputedStyle(document.querySelector(query))[name];
    return {
        width: document.documentElement.scrollWidth,
        height: document.documentElement.scrollHeight,
        drawings: all('svg').map(e => ({kind: e.getAttribute('class'), box: box(e),
            shapes: all('rect, path', e).map(s => s.getBBox()).filter(b => b.width + b.height > 0).length})),
        // A phone has no headings of tables.
        boxes: all('body *:not(wbr)').filter(e => !e.closest('svg, .wide tr:first-child'))
            .map(e => [e.tagName + ' ' + e.textContent, ...box(e)]),
        labels: all('.plot').map(e => all('.x', e).map(box)),
        text: document.body.innerText,
        colours: {back: colour('section', 'backgroundColor'), body: colour('body', 'backgroundColor'),
            ink: colour('h1', 'color'), soft: colour('.note', 'color'), accent: colour('.tool', 'color')},
    };
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    path = find()
    if path is None:
        pytest.skip("no Chromium in PATH")
    profile = tmp_path_factory.mktemp("profile")
    with running_browser(path, profile) as opened_browser:
        yield opened_browser
    shutil.rmtree(profile, ignore_errors=True)


@pytest.fixture(scope="module")
def plan_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a plan of 20,000 lengths; some are too long."""
    folder = tmp_path_factory.mktemp("page")
    lengths = np.random.default_rng(0).lognormal(np.log(500), 1.0, 20_000).astype(int) + 1
    np.save(folder / "lengths.npy", lengths)
    words = ["plan", "--lengths", str(folder / "lengths.npy"), "--packing-length", "4096", "--world-size", "4"]
    assert run([*words, "--gradient-accumulation-steps", "2", "--html", str(folder / "plan.html"), "--json"]) == 0
    return folder / "plan.html"


@pytest.fixture
def layout_of(browser: Browser, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that opens a page and checks that it requests nothing else and logs nothing."""

    def look(page_or_path: Path | str, width: int, **options: Any) -> dict[str, Any]:
        path = page_or_path if isinstance(page_or_path, Path) else tmp_path / "page.html"
        if isinstance(page_or_path, str):
            path.write_text(page_or_path)
        browser.open(path.as_uri(), width, **options)
        layout = browser.evaluate(LOOK)
        assert browser.errors() == []
        assert browser.requests() == [path.as_uri()]
        return layout

    return look


@pytest.mark.parametrize("width", [DESK, PHONE])
def test_a_plan_is_drawn(
    width: int, plan_page: Path, browser: Browser, layout_of: Callable[..., dict[str, Any]]
) -> None:
    layout = layout_of(plan_page, width)
    kinds = [drawing["kind"] for drawing in layout["drawings"]]
    assert kinds == ["sign", "share", "drawn", "drawn", "packed", "padded", "drawn"]
    for drawing in layout["drawings"]:
        *_, wide, tall = drawing["box"]
        assert wide >= (10 if drawing["kind"] == "sign" else 200), drawing
        assert tall >= 10, drawing
        assert drawing["shapes"] >= 2, drawing
    assert layout["width"] <= width
    for words in ("20 packs to scale", "as many tokens to compute", "Fingerprint of the plan", "longer than"):
        assert words in layout["text"]
    picture = Image.open(io.BytesIO(browser.screenshot())).convert("RGB")
    assert picture.height >= layout["height"]
    colours = sorted(picture.getcolors(1 << 24) or [], reverse=True)
    painted = sum(count for count, _ in colours[2:]) / (picture.width * picture.height)
    assert 0.05 < painted < 0.9, "neither blank nor flooded"


CONTENTS = {
    "dropped": content(),
    "not packed": content(packs=[[900], [40], [700]], fills=[0, 1, 0, 0, 2], lengths=[1, 0, 0, 2, 0]),
    "one sample": content(packs=[[7]], fills=[1], lengths=[1], parts=[("in the plan", 1)], steps=0),
    "long words": content(title="/a/very/long/path" * 12, reason="x" * 80, command="packtool " + "y" * 300),
    "large numbers": content(scale=40_000_000),
    "hundreds of steps": content(steps=300),
    "trees": content_with_trees(),
    "logarithmic": content() | {"lengths": length_histogram(np.array([13, *[60] * 900, 700, 200_000]))},
    "mixture": content()
    | {
        "mixture": {
            "heading": source_rows({})[0],
            "rows": [("a/long/name", *["1,000,000"] * 7), ("b", *["> 99.99%"] * 7)],
            "shares": [[0.5, 0.5]],
            "unit": "tokens",
            "steps_per_interval": 1,
            "num_steps": 1,
            "stages": [],
            "of": "epoch",
        }
    },
}


@pytest.mark.parametrize("width", [DESK, PHONE, SMALL_PHONE])
@pytest.mark.parametrize("name", CONTENTS)
def test_nothing_overflows(name: str, width: int, browser: Browser, layout_of: Callable[..., dict[str, Any]]) -> None:
    layout = layout_of(page(CONTENTS[name]), width)
    assert layout["width"] <= width
    for words, left_edge, right, wide, _ in layout["boxes"]:
        assert left_edge >= -0.5, words
        assert right <= width + 0.5, words
        assert wide > 0, words
    assert browser.evaluate("[...document.querySelectorAll('.wide')].every(e => e.scrollWidth <= e.clientWidth)")
    for labels in layout["labels"]:
        for (_, end, *_), (start, *_) in pairwise(labels):
            assert end < start, "labels of an axis do not touch"


@pytest.mark.parametrize("width", [DESK, PHONE])
@pytest.mark.parametrize(
    "words", ["plan --lengths lengths.npy --sweep 2048,16384", "simulate --lengths lengths.npy --steps 1"]
)
def test_other_pages_fit(
    words: str,
    width: int,
    plan_page: Path,
    browser: Browser,
    monkeypatch: pytest.MonkeyPatch,
    layout_of: Callable[..., dict[str, Any]],
) -> None:
    monkeypatch.chdir(plan_page.parent)
    path = plan_page.parent / "other.html"
    assert run([*words.split(), "--html", str(path), "--json"]) == 0
    layout = layout_of(path, width)
    assert layout["width"] <= width
    for drawing in layout["drawings"]:
        assert drawing["shapes"] >= 2, drawing
    assert "This page was made by" in layout["text"]
    assert browser.evaluate("[...document.querySelectorAll('.wide')].every(e => e.scrollWidth <= e.clientWidth)")
    cells = browser.evaluate("[...document.querySelectorAll('.wide td')].map(e => e.getBoundingClientRect().right)")
    assert 0 < max(cells) <= width, "no cell is cut off"


def test_pages_are_readable_in_light_and_dark_mode(plan_page: Path, layout_of: Callable[..., dict[str, Any]]) -> None:
    light, dark = (layout_of(plan_page, DESK, dark=dark)["colours"] for dark in (False, True))
    assert luminance(light["body"]) > 0.8
    assert luminance(dark["body"]) < 0.05
    for colours in (light, dark):
        for name in ("ink", "soft", "accent"):
            for back in ("back", "body"):
                assert contrast(colours[name], colours[back]) >= 4.5, f"{name} on {back}: WCAG's AA for text"
    printed = layout_of(plan_page, DESK, dark=True, media="print")["colours"]
    assert luminance(printed["body"]) == pytest.approx(1)
    assert printed["ink"] == light["ink"]


def test_the_checks_of_pages_detect_mistakes(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "bad.html"
    path.write_text("<p style='width:2000px'>a</p><script>console.log(1); nowhere()</script><img src=gone.png>")
    browser.open(path.as_uri(), PHONE)
    assert browser.evaluate("document.documentElement.scrollWidth") > 2000
    assert any("nowhere is not defined" in error for error in browser.errors())
    assert any("console" in error or '"log"' in error for error in browser.errors())
    assert [url.rpartition("/")[2] for url in browser.requests()] == ["bad.html", "gone.png"]


EVIL = "<script>hit()</script><img src=x onerror=hit()>\"'><svg onload=hit()>\u202e\x1b]0;t\x07&lt;b&gt;"


def test_names_with_scripts_are_escaped(browser: Browser, layout_of: Callable[..., dict[str, Any]]) -> None:
    """Names of rows, caches and manifests are shown as text, and request nothing."""
    parts = content(title=EVIL, reason=EVIL, command=f"packtool plan {EVIL}")
    parts |= {"figures": [(EVIL, EVIL), *parts["figures"]], "headline": [(EVIL, EVIL, EVIL)]}
    rows = [dict.fromkeys(SWEEP_FIGURES, 1) | {"shared_prefixes": None}]
    for text in (page(parts), sweep_page(rows, EVIL, EVIL)):
        text = text.replace("<head>", "<head><script>window.hits = 0; window.hit = () => { hits += 1; };</script>")
        layout = layout_of(text, DESK)
        assert browser.evaluate("hits") == 0
        assert browser.evaluate("document.querySelectorAll('script, img').length") == 1, "the test's own"
        assert "<script>hit()</script>" in layout["text"]
        assert "\\u202e\\x1b]0;t\\x07&lt;b&gt;" in layout["text"]
        assert browser.evaluate("document.title").startswith("<script>hit()")


def test_words_are_not_split_across_lines(browser: Browser, layout_of: Callable[..., dict[str, Any]]) -> None:
    reasons = ["over_max_length", "media_over_limit", "no_target_tokens", "turns_not_found", "media_unsupported"]
    dropped = [(f"dropped at export: {reason}", 23_456) for reason in reasons]
    layout_of(page(content() | {"dropped": dropped}), PHONE)
    heights = browser.evaluate("[...document.querySelectorAll('.rows .word')].map(e => e.clientHeight)")
    assert len(heights) == len(reasons)
    assert len(set(heights)) == 1, "each on one line"


def luminance(colour: str) -> float:
    """Return the relative luminance of ``rgb(r, g, b)`` by WCAG 2."""
    shares = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(color: str, other_color: str) -> float:
    """Return the contrast ratio of two colors by WCAG 2."""
    low, high = sorted((luminance(color), luminance(other_color)))
    return (high + 0.05) / (low + 0.05)
