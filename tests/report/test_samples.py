"""Pages to leaf through a cache: all that is in it, as text and nothing else, and for nobody else's eyes."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import time
import urllib.error
import urllib.request
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import packtool
from packtool.cache.plan_file import SavedPlan, write_plan
from packtool.cache.reader import CacheReader
from packtool.cli.main import run
from packtool.config.commands import InspectConfig
from packtool.encode.encoded import EncodedAudio, EncodedImage, EncodedVideo
from packtool.errors import MismatchError
from packtool.progress import SilentProgress
from packtool.report import samples
from packtool.report.samples import Pages, serving, write_pages
from packtool.rows.media_policy import MediaPolicy
from tests.cache.conftest import model as model
from tests.cache.conftest import rows as rows
from tests.cache.conftest import run_export as run_export
from tests.report.test_page_in_browser import DESK, PHONE, Browser
from tests.report.test_page_in_browser import browser as browser
from tests.test_terminal import control_characters
from tests.waiting import PATIENCE_S

EVIL = "</script><script>window.evil = 1</script><img src=x onerror='window.evil = 2'>\u202e\x1b[2J"


@pytest.fixture
def cache(run_export: Callable[..., Any], rows: Path, tmp_path: Path) -> str:
    """A cache of about 500 samples and some dropped rows; the last rows contain markup and control characters."""
    with rows.open("a") as file:
        for i in range(20):
            turns = [{"role": "user", "content": f"{EVIL} {i}"}, {"role": "assistant", "content": EVIL}]
            file.write(json.dumps({"messages": turns, "channel": EVIL[:40]}) + "\n")
        file.write(json.dumps({"messages": turns, "images": [EVIL + ".png"]}) + "\n")
    run_export(max_length=250)
    return str(tmp_path / "cache")


def page_data(content: bytes | None) -> Any:
    """Return the value that a data script passes to the page."""
    assert content is not None
    match = re.fullmatch(r"packtool\.give\(\"[\w-]+\", (.*)\);\n", content.decode(), re.DOTALL)
    assert match is not None
    assert control_characters(match[1]) == []
    return json.loads(match[1])


class Counted(SilentProgress):
    """Adds up what is done."""

    num_done = 0

    def advance(self, num_done: int, **fields: float | int | str) -> None:
        self.num_done += num_done


def ints(packed: str) -> Any:
    """Decode base64 integers."""
    return np.frombuffer(base64.b64decode(packed), "<i4")


@pytest.mark.parametrize("max_samples", [7, 10_000])
def test_pages_have_the_content_of_the_cache(cache: str, max_samples: int, tmp_path: Path) -> None:
    site, reader, counted = tmp_path / "site", CacheReader.open([cache]), Counted()
    pages = Pages(InspectConfig(directory=cache, max_samples=max_samples), shows_all=False)
    assert write_pages(pages, str(site), counted) == 0
    assert counted.num_done == len(pages.numbers)
    names = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    entries = [sample for block in sorted(site.glob("data/samples-*.js")) for sample in page_data(block.read_bytes())]
    assert len(entries) == min(max_samples, len(reader))
    for entry in entries:
        sample = reader.sample(entry["number"])
        assert (entry["tokens"], entry["row"]) == (sample.length, sample.row)
        trained = sum(len(part["text"]) for part in entry["parts"] if part["look"] == "trained")
        assert bool(trained) == bool(entry["trained"])
        media_urls = [part["seen"] for part in entry["parts"] if part["look"] == "media"]
        assert len(media_urls) == len(sample.images)
        assert names >= set(media_urls)
        for place, image in zip(media_urls, sample.images, strict=True):
            assert Image.open(site / place).size == (image.width, image.height)
    dropped = page_data((site / "data/dropped.js").read_bytes())
    assert len(dropped) == sum(reader.manifests[0].dropped.values())
    # Another time fewer are written, and nothing is left of these.
    smaller_pages = Pages(InspectConfig(directory=cache, max_samples=3), shows_all=False)
    write_pages(smaller_pages, str(site), SilentProgress())
    assert len(list(site.glob("media/*"))) <= 3


def test_all_samples_of_a_pack_are_shown(cache: str, run_export: Callable[..., Any], tmp_path: Path) -> None:
    plan = str(tmp_path / "a.plan")
    assert run(["plan", cache, "--packing-length", "400", "--save", plan]) == 0
    pages = Pages(InspectConfig(directory=cache, plan=plan, max_samples=40), shows_all=False)
    packs = page_data(pages.content("data/packs-0.js"))
    sample_indices = {sample_index for pack in packs for sample_index, _, _ in pack["parts"]}
    assert sample_indices == set(pages.numbers.tolist())
    assert 20 < len(sample_indices) < 80
    all_pages = Pages(InspectConfig(directory=cache, plan=plan), shows_all=True)
    assert len(all_pages.numbers) == all_pages.num_cached
    plan_result = packtool.plan(cache, packing_length=400, world_size=2, gradient_accumulation_steps=3)
    plan_result.save(plan)
    pages = Pages(InspectConfig(directory=cache, plan=plan, max_samples=40), shows_all=False)
    cached = page_data(pages.content("data/cache.js"))["packs"]
    places = np.stack([ints(column) for column in cached["places"]], axis=1).tolist()
    packs = iter([pack for i in range(2) for pack in page_data(pages.content(f"data/packs-{i}.js"))])
    steps = {name: ints(column).tolist() for name, column in cached["steps"].items()}
    rows = zip(*(steps[name] for name in ("number", "packs", "microBatches", "tokens", "least", "most")), strict=True)
    for step_index, *figures in rows:
        step = plan_result.steps[step_index]
        tokens = []
        for rank, micro_batches in enumerate(step.micro_batches):
            for micro_batch, sample_indices in enumerate(micro_batches):
                for members in sample_indices:
                    assert places.pop(0) == [step_index, rank, micro_batch]
                    pack = next(packs)
                    assert {part[0] for part in pack["parts"]} - {None} == set(members)
                    place = [pack["number"], step_index, rank, micro_batch]
                    assert pages._sample(members[-1])["place"] == place
                    tokens.append((rank, sum(part[1] for part in pack["parts"])))
        of_ranks = [sum(num for rank, num in tokens if rank == r) for r in range(2)]
        assert figures == [len(tokens), len(step.micro_batches[0]), sum(of_ranks), min(of_ranks), max(of_ranks)]
    assert next(packs, None) is None
    assert not places
    # A step alone that is too large has fewer of its packs shown.
    first_pages = Pages(InspectConfig(directory=cache, plan=plan, max_samples=4), shows_all=False)
    assert 1 <= len(page_data(first_pages.content("data/packs-0.js"))) < 6
    run_export("other")
    with pytest.raises(MismatchError, match="was made for the cache"):
        Pages(InspectConfig(directory=str(tmp_path / "other"), plan=plan), shows_all=False)


def test_other_files_in_the_directory_are_kept(cache: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = tmp_path / "site"
    (site / "data").mkdir(parents=True)
    (site / "data" / "mine.csv").write_text("mine")
    assert run(["inspect", cache, "--html", str(site)]) == 2
    assert "contains other files than pages" in capsys.readouterr().err
    assert (site / "data" / "mine.csv").read_text() == "mine"
    # What a command that was killed has left of its own is no reason to stop.
    partial_file = site / "data" / "samples-0.js.4711-0a1b2c3d.partial"
    (site / "data" / "mine.csv").rename(partial_file)
    assert run(["inspect", cache, "--html", str(site), "--max-samples", "5"]) == 0
    capsys.readouterr()
    assert not partial_file.exists()
    assert run(["inspect", cache, "--html", str(tmp_path / "new"), "--max-samples", "5"]) == 0
    assert "5 of 5" in capsys.readouterr().out
    plan = str(tmp_path / "a.plan")
    assert run(["plan", cache, "--packing-length", "400", "--save", plan]) == 0
    capsys.readouterr()
    assert run(["inspect", cache, "--plan", plan, "--html", str(tmp_path / "few"), "--max-samples", "4"]) == 0
    assert f"those of the steps that are shown of --plan {plan}" in capsys.readouterr().out
    for words in (["--html", "x", "--serve"], ["--serve", "--row", "1"], ["--verify", "--html", "x"]):
        assert run(["inspect", cache, *words]) == 2
        assert "show different things" in capsys.readouterr().err


def test_interrupted_pages_have_no_index(cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    pages = Pages(InspectConfig(directory=cache, max_samples=5), shows_all=False)
    write_pages(pages, str(site), SilentProgress())

    class Interrupted(SilentProgress):
        def advance(self, num_done: int, **fields: float | int | str) -> None:
            raise KeyboardInterrupt

    partial_file = site / "data" / "samples-0.js.4711-0a1b2c3d.partial"
    with monkeypatch.context() as patched:
        patched.setattr(pages, "media_names", lambda sample_index: partial_file.touch() or [])
        with pytest.raises(KeyboardInterrupt):
            write_pages(pages, str(site), Interrupted())
    assert not partial_file.exists()
    assert not (site / "index.html").exists()
    write_pages(pages, str(site), SilentProgress())
    assert (site / "index.html").exists()


def test_unreadable_media_are_left_out(tmp_path: Path) -> None:
    sound = io.BytesIO()
    with wave.open(sound, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(bytes(3200))
    (tmp_path / "a.WAV").write_bytes(sound.getvalue())
    inline_audio = EncodedAudio(None, sound.getvalue(), 1600, 10, 3)
    named = EncodedAudio(str(tmp_path / "a.WAV"), None, 1600, 10, 3)
    assert samples._media_files(4, 1, inline_audio) == samples._media_files(4, 1, named) == {"played": "media/4-1.wav"}
    for medium in (inline_audio, named):
        assert samples._playable(medium, MediaPolicy()) == sound.getvalue()
    (tmp_path / "secret.wav").write_text("what a cache of somebody else's calls a sound")
    assert samples._playable(EncodedAudio(str(tmp_path / "secret.wav"), None, 1600, 10, 3), MediaPolicy()) is None
    of_pictures = EncodedVideo(None, None, (("a.png", None),), 8, 8, 1, 1.0, (0,), (1, 2, 2), 1.0, 1)
    assert samples._media_files(0, 0, of_pictures) == {"seen": "media/0-0.jpg"}
    elsewhere = EncodedImage("http://127.0.0.1:1/x.png", None, 8, 8, (1, 2, 2), 1)
    with pytest.raises(samples.MediaError, match="--media-access any"):
        samples._thumbnail(elsewhere, MediaPolicy(stores=frozenset()))


def fetched(address: str, **headers: str) -> tuple[int, bytes, Any]:
    """Return status, body and headers of a response."""
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers)) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read(), error.headers


def test_requests_need_the_token(cache: str, capsys: pytest.CaptureFixture[str]) -> None:
    pages = Pages(InspectConfig(directory=cache), shows_all=True)
    with serving(pages.content) as address:
        base, token = address.rstrip("/").rsplit("/", 1)
        assert base.startswith("http://127.0.0.1:")
        status, body, headers = fetched(address)
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert b"samples.js" in body
        assert fetched(f"{address}samples.js")[2]["Content-Type"].startswith("text/javascript")
        assert len(page_data(fetched(f"{address}data/samples-1.js")[1])) == 50
        picture = next(name for sample_index in range(9) for name in pages.media_names(sample_index))
        assert Image.open(io.BytesIO(fetched(address + picture)[1])).format == "JPEG"
        for invalid_path in ("media/99999-0.jpg", "media/1-77.jpg", "data/../../x", "nothing", "data/packs-0.js/x"):
            assert fetched(address + invalid_path)[0] == 404
        for invalid_path in ("", token[:-1], token + "x", "%2e%2e/" + token, f"x/{token}"):
            assert fetched(f"{base}/{invalid_path}/")[0] == 403
        assert fetched(address, Host="evil.example:80")[0] == 403
        port = int(base.rsplit(":", 1)[1])
        assert run(["inspect", cache, "--serve", "--port", str(port)]) == 2
    assert "cannot be used" in capsys.readouterr().err


def wait_for_script(browser: Browser, script: str) -> Any:
    """Run a script until its result is truthy; return it."""
    end = time.monotonic() + PATIENCE_S
    while not (value := browser.evaluate(script)) and time.monotonic() < end:
        time.sleep(0.05)
    assert value, f"{script}: {browser.errors()}"
    return value


def test_pages_in_a_browser(cache: str, browser: Browser, tmp_path: Path) -> None:
    """Opened from disk, on a desktop and a phone: nothing overflows, and markup in rows has no effect."""
    plan, site = str(tmp_path / "a.plan"), tmp_path / "site"
    assert run(["plan", cache, "--packing-length", "400", "--world-size", "2", "--save", plan]) == 0
    pages = Pages(InspectConfig(directory=cache, plan=plan), shows_all=False)
    write_pages(pages, str(site), SilentProgress())
    shutil.rmtree(cache)
    for width in (DESK, PHONE):
        browser.open((site / "index.html").as_uri(), width)
        wait_for_script(browser, "document.querySelectorAll('.entry').length === 25")
        type_in = "(n, v) => { const f = document.getElementById('filters'); f.elements[n].value = v; "
        type_in = f"({type_in} f.dispatchEvent(new Event('input')); }})"
        browser.evaluate(f"{type_in}('text', 'WINDOW.EVIL')")
        status_text = "document.getElementById('told').textContent"
        wait_for_script(browser, f"{status_text}.startsWith('20 samples with this text')")
        browser.evaluate("document.querySelector('.entry').click()")
        wait_for_script(browser, "document.querySelectorAll('#text .found').length > 1")
        assert EVIL.split("\u202e")[0] in wait_for_script(browser, "document.getElementById('text').textContent")
        assert browser.evaluate("window.evil === undefined && document.scripts.length === 1")
        browser.evaluate(f"{type_in}('text', ''), {type_in}('media', '1'), {type_in}('order', 'down')")
        num_with_images = sum(bool(pages._sample_at(i).images) for i in range(pages.num_cached))
        wait_for_script(browser, f"{status_text}.startsWith('{num_with_images} samples of')")
        lengths = "[...document.querySelectorAll('.entry > :last-child')].map(e => parseInt(e.textContent))"
        shown_lengths = wait_for_script(browser, f"document.querySelectorAll('.entry').length === 25 && {lengths}")
        assert shown_lengths == sorted(shown_lengths, reverse=True)
        wait_for_script(browser, "document.querySelectorAll('.entry .thumb img').length === 25")
        wait_for_script(browser, "document.querySelector('.entry .thumb img').naturalWidth > 0")
        browser.evaluate("document.querySelectorAll('.entry')[20].click()")
        wait_for_script(browser, "document.querySelector('#text img')?.naturalWidth > 0")
        assert browser.evaluate("document.querySelectorAll('.entry')[20].nextElementSibling.id") == "detail"
        top = "document.querySelector('#detail').getBoundingClientRect().top"
        assert 0 <= browser.evaluate(top) < 400, "what was opened is in sight, below its line"
        browser.evaluate("document.querySelectorAll('.entry')[20].click()")
        wait_for_script(browser, "document.getElementById('detail').hidden")
        buttons = "[...document.querySelectorAll('#pager button')]"
        assert browser.evaluate(f"{buttons}.map(e => e.textContent)") == ["Previous", "Next"]
        browser.evaluate(f"{buttons}[1].click()")
        wait_for_script(browser, "document.getElementById('pager').textContent.includes('page 2 of')")
        browser.evaluate("document.querySelector('.entry').click()")
        wait_for_script(browser, "!document.getElementById('detail').hidden")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        browser.evaluate("document.querySelector('#views [value=dropped]').click()")
        wait_for_script(browser, f"{status_text}.includes('rows were dropped')")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        browser.evaluate("document.querySelector('#views [value=packs]').click()")
        wait_for_script(browser, "document.querySelectorAll('.pack').length > 5")
        wait_for_script(browser, "document.querySelector('.step p')?.textContent.startsWith('2 packs, ')")
        browser.evaluate(f"{type_in}('step', '3'), {type_in}('rank', '1')")
        wait_for_script(browser, "document.querySelectorAll('h4').length === 1")
        assert browser.evaluate("document.querySelector('h4').textContent").startswith("rank 1, micro-batch 0, pack ")
        browser.evaluate("document.querySelector('.pack button').click()")
        wait_for_script(browser, "!document.getElementById('detail').hidden")
        assert browser.evaluate("document.querySelector('.pack').nextElementSibling.id") == "detail"
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.errors() == []
        assert all(address.startswith("file:") for address in browser.requests())
        assert browser.evaluate("location.hash").startswith("#sample=")
        last = pages.numbers.tolist()[-1]
        browser.open("about:blank", width)
        browser.open((site / "index.html").as_uri() + f"#sample={last}", width)
        wait_for_script(browser, f"document.querySelector('#detail h2')?.textContent === 'Sample {last}'")
        assert browser.evaluate("document.querySelectorAll('#list > #detail').length") == 1, "on its page of the list"


@pytest.mark.parametrize("width", [DESK, PHONE])
def test_boxes_are_drawn_at_their_position(
    width: int, run_export: Callable[..., Any], rows: Path, browser: Browser, tmp_path: Path
) -> None:
    """An image that is stored rotated: the box of the row covers its dark part on the page."""
    image, exif = Image.new("RGB", (640, 480), (240, 240, 240)), Image.Exif()
    image.paste((20, 20, 20), (100, 80, 300, 240))
    exif[0x0112] = 6
    image.rotate(90, expand=True).save(tmp_path / "turned.jpg", exif=exif)
    answer = '[{"bbox_2d": <bbox>, "label": "<ref-object>"}] and <bbox>'
    row = {
        "messages": [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": answer}],
        "images": ["turned.jpg"],
        "objects": {"ref": [EVIL], "bbox": [[100, 80, 300, 240], [200, 160, 640, 480, 200, 480]]},
    }
    rows.write_text(json.dumps(row) + "\n")
    run_export(max_length=2000)
    site = tmp_path / "site"
    pages = Pages(InspectConfig(directory=str(tmp_path / "cache")), shows_all=False)
    write_pages(pages, str(site), SilentProgress())
    browser.open((site / "index.html").as_uri() + "#sample=0", width)
    wait_for_script(browser, "document.querySelector('.seen img')?.naturalWidth > 0")
    rect = "(e => { const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; })"
    left_edge, top, wide, high = browser.evaluate(f"{rect}(document.querySelector('.seen img'))")
    assert browser.evaluate(f"{rect}(document.querySelector('.seen svg'))") == [left_edge, top, wide, high]
    assert abs(wide / high - 640 / 480) < 0.02
    polygons = browser.evaluate(f"[...document.querySelectorAll('.seen polygon')].map({rect})")
    for polygon, expected in zip(polygons, [(100, 80, 200, 160), (200, 160, 440, 320)], strict=True):
        place = (polygon[0] - left_edge, polygon[1] - top, polygon[2], polygon[3])
        assert place == pytest.approx([coordinate / 640 * wide for coordinate in expected], abs=2)
    with Image.open(site / pages.media_names(0)[0]) as small:
        dark = small.convert("L").point(lambda value: 255 * (value < 128)).getbbox()
        assert dark == pytest.approx([coordinate / 640 * small.width for coordinate in (100, 80, 300, 240)], abs=2)
    items = browser.evaluate("[...document.querySelectorAll('.seen ~ ol li')].map(e => e.textContent)")
    assert items[0].startswith(EVIL[:9])
    assert [text.rpartition(", ")[2][-40:] for text in items] == [
        "box 100,80 300,240 of image 0",
        "polygon 200,160 640,480 200,480 of image 0"[-40:],
    ]
    assert browser.evaluate("window.evil === undefined && document.documentElement.scrollWidth") <= width
    assert browser.errors() == []


def test_a_pack_with_shared_prefixes_is_drawn_in_its_order(cache: str, tmp_path: Path) -> None:
    reader, path = CacheReader.open([cache]), str(tmp_path / "tree.plan")
    lengths = reader.index.length[:3]
    shared = np.array([0, 20, 25], np.int32)
    plan = SavedPlan(
        samples=np.arange(3),
        offsets=np.array([0, 3]),
        lengths=(lengths - shared).astype(np.int32),
        shared_tokens=shared,
        capacity=4000,
        max_length=4000,
        seed=0,
        cache=reader.fingerprint,
        plan="",
        num_cached=len(reader),
    )
    write_plan(path, plan)
    pages = Pages(InspectConfig(directory=cache, plan=path), shows_all=False)
    (pack,) = page_data(pages.content("data/packs-0.js"))
    num_first, num_second, third = lengths.tolist()
    parts = [[None, 20, 3], [0, num_first - 20, 1], [None, 5, 2], [1, num_second - 25, 1], [2, third - 25, 1]]
    assert pack == {"number": 0, "samples": 3, "parts": parts}
    assert page_data(pages.content("data/cache.js"))["packs"]["sharesPrefixes"]
