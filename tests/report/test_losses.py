"""Samples with unusual losses are found, listed, shown with their media and exported."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import pytest

from packtool.cache.manifest import Manifest
from packtool.cache.reader import CacheReader
from packtool.cli.main import run
from packtool.config.commands import InspectConfig
from packtool.errors import EXIT_MISMATCH, EXIT_USAGE
from packtool.progress import SilentProgress
from packtool.report.losses import RunLosses, losses_lines
from packtool.report.samples import Pages
from packtool.train.run import train
from tests.report.test_page_in_browser import DESK, Browser
from tests.report.test_page_in_browser import browser as browser
from tests.report.test_samples import ints, page_data, wait_for_script
from tests.train.conftest import tiny as tiny
from tests.train.tiny import TinyWorld, export_rows

NAN = float("nan")


@pytest.fixture(scope="module")
def trained(tiny: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TinyWorld]:
    """A run of two epochs on two caches, whose losses are known: those of the second cache are all 1, then 0.5."""
    root = tmp_path_factory.mktemp("trained")
    world = dataclasses.replace(tiny, cache=str(root / "second"))
    export_rows(world, world.cache, image_max_token_num=6)
    settings = {"cached_dataset": (tiny.cache, world.cache), "num_train_epochs": 2.0}
    train(tiny.config(root / "output", **settings, gradient_accumulation_steps=16), SilentProgress())
    for epoch in range(2):
        path = root / "output" / "history" / f"losses-{epoch}.npz"
        with np.load(path) as arrays:
            losses = {name: np.full_like(values, 1 - epoch / 2) for name, values in arrays.items()}
        losses[Manifest.read(tiny.cache).fingerprint][:6] = known_losses()[epoch]
        np.savez(path, **losses)  # type: ignore[arg-type]
    return root / "output", tiny


def known_losses() -> npt.NDArray[Any]:
    """Of the first six samples in both epochs: near zero twice, twice not improved, highest, untrained."""
    return np.array([[0.01, 0.05, 1.0, 2.0, 9.0, NAN], [0.001, 0.04, 1.5, 4.0, 8.0, NAN]], np.float16)


def test_groups_of_unusual_samples(trained: tuple[Path, TinyWorld]) -> None:
    losses = RunLosses(str(trained[0]))
    assert {name: each.tolist()[:4] for name, each in losses.groups.items()} == {
        "highest": [4, 3, 2, 6],  # 5 % of 79 samples
        "not_improved": [3, 2],
        "near_zero": [0, 1],
    }
    assert list(losses.losses) == [1, 2]


def test_lists_and_counts(trained: tuple[Path, TinyWorld], capsys: pytest.CaptureFixture[str]) -> None:
    output_dir, tiny = trained
    assert run(["inspect", str(output_dir), "--losses", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["epochs"] == [1, 2]
    highest = figures["groups"]["highest"]
    assert highest["num_samples"] == len(highest["samples"]) == 4
    sample = CacheReader.open([tiny.cache]).sample(4)
    assert highest["samples"][0] == {
        "cache": tiny.cache,
        "sample": 4,
        "source": sample.source,
        "row": sample.row,
        "part": None,
        "channel": None,
        "tokens": sample.length,
        "target_tokens": int((sample.labels[1:] != -100).sum()),
        "loss_1": 9.0,
        "loss_2": 8.0,
    }
    (source,) = figures["by_source"]
    assert (source["num_samples"], source["highest"], source["not_improved"], source["near_zero"]) == (79, 4, 2, 2)
    assert source["loss_1"] == pytest.approx((0.01 + 0.05 + 1 + 2 + 9 + 74) / 79, rel=1e-3)
    by_length = figures["by_length"]
    assert sum(row["num_samples"] for row in by_length) == 79
    assert [row["name"] for row in by_length] == sorted(row["name"] for row in by_length)
    lines = "\n".join(losses_lines(figures))
    assert f"{tiny.cache} --row 4  row {sample.row} of {sample.source}" in lines
    assert "9.000 → 8.000" in lines
    (checkpoint,) = output_dir.glob("checkpoint-*")
    assert run(["inspect", str(checkpoint), "--losses"]) == 0
    assert capsys.readouterr().out.strip() == lines.strip()


def test_export_has_a_row_for_each_sample(trained: tuple[Path, TinyWorld], tmp_path: Path) -> None:
    path = str(tmp_path / "losses.parquet")
    assert run(["inspect", str(trained[0]), "--export-losses", path]) == 0
    table = pq.read_table(path).to_pydict()
    reader = CacheReader.open([*dict.fromkeys(table["cache"])])
    assert table["sample"] == [*range(40), *range(40)]
    assert table["row"] == [reader.sample(number).row for number in range(80)]
    assert table["tokens"] == reader.index.length.tolist()
    assert table["loss_1"][:6] == pytest.approx([*known_losses()[0, :5].tolist(), None])
    assert table["loss_2"][39:42] == [0.5, 0.5, 0.5]


def test_pages_show_unusual_samples_with_media(trained: tuple[Path, TinyWorld], tmp_path: Path) -> None:
    pages = Pages(InspectConfig(directory=str(trained[0]), losses=True, max_samples=6), shows_all=False)
    assert pages.numbers.tolist() == [0, 1, 2, 3, 4]
    shown = page_data(pages.content("data/cache.js"))["losses"]
    assert ints(shown["groups"]).tolist() == [4, 4, 3, 3, 1]
    assert [ints(each).tolist() for each in shown["epochs"]] == [[10, 50, 1000, 2000, 9000], [1, 40, 1500, 4000, 8000]]
    everything = Pages(InspectConfig(directory=str(trained[0]), losses=True, serve=True), shows_all=True)
    assert len(everything.numbers) == 80
    assert ints(page_data(everything.content("data/cache.js"))["losses"]["epochs"][0])[5] == -1
    assert run(["inspect", str(trained[0]), "--losses", "--html", str(tmp_path / "site"), "--max-samples", "6"]) == 0
    assert list((tmp_path / "site" / "media").glob("*.jpg"))


def test_highest_losses_come_first_on_the_page(
    trained: tuple[Path, TinyWorld], browser: Browser, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    assert run(["inspect", str(trained[0]), "--losses", "--html", str(site)]) == 0
    browser.open((site / "index.html").as_uri(), DESK)
    texts = wait_for_script(browser, "[...document.querySelectorAll('.entry')].map(entry => entry.textContent)")
    assert [text.rpartition("loss ")[2] for text in texts[:2]] == ["9.000 → 8.000", "2.000 → 4.000"]
    browser.evaluate("document.querySelector('.entry').click()")
    assert "9.000 → 8.000" in wait_for_script(browser, "document.querySelector('#detail dl')?.textContent")
    filters = "document.getElementById('filters')"
    browser.evaluate(f"{filters}.elements.loss.value = '4', {filters}.dispatchEvent(new Event('input'))")
    wait_for_script(browser, "document.getElementById('told').textContent.startsWith('2 samples of')")
    assert browser.errors() == []


@pytest.mark.parametrize("option", ["--losses", "--export-losses=x.parquet"])
def test_a_cache_has_no_losses(option: str, tiny: TinyWorld, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", tiny.cache, option]) == EXIT_USAGE
    assert f"--losses: {tiny.cache} is not the --output-dir of a run" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--trained"], ["--step", "1"], ["--html", "x", "--serve"]])
def test_options_that_show_different_things(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", "output", "--losses", *options]) == EXIT_USAGE
    assert "show different things" in capsys.readouterr().err


def test_a_run_without_losses_says_why(tiny: TinyWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tiny.config(tmp_path, gradient_accumulation_steps=16, sample_losses=False), SilentProgress())
    assert run(["inspect", str(tmp_path), "--losses"]) == EXIT_MISMATCH
    assert "unless --sample-losses is false" in capsys.readouterr().err
