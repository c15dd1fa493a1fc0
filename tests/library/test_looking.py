"""Caches, plans and what the commands do, as objects and functions."""

from __future__ import annotations

import html
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import packtool
from packtool.cli.main import run
from packtool.encode.encoded import EncodedSample
from packtool.errors import ConfigError, MismatchError
from packtool.launch.world import World
from packtool.train.prepare.run import Run
from tests.library.conftest import PLAN
from tests.train.tiny import MAX_LENGTH, TinyWorld


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command prints."""
    assert run(list(words)) == 0
    return capsys.readouterr().out


@pytest.mark.smoke
def test_cache(tiny: TinyWorld, capsys: pytest.CaptureFixture[str]) -> None:
    cache = packtool.Cache(tiny.cache)
    assert len(cache) == len(list(cache)) == 40
    assert [sample.length for sample in cache] == cache.lengths.tolist()
    assert int(cache.target_tokens.sum()) == cache.statistics["splits"]["train"]["target_tokens"]
    assert np.flatnonzero(cache.media_tokens).tolist() == [n for n in range(40) if cache[n].images]
    assert isinstance(cache[-1], EncodedSample)
    assert cache[-1].row == cache[39].row == 39
    for missing in (40, -41):
        with pytest.raises(IndexError, match=f"sample {missing} of 40"):
            cache[missing]
    assert repr(cache).endswith("40 samples, 1,925 tokens")
    assert json.loads(json.dumps(cache.statistics)) == json.loads(printed(capsys, "inspect", tiny.cache, "--json"))
    assert printed(capsys, "inspect", tiny.cache, "--row", "3").endswith(cache.text(3) + "\n")
    assert "<td" in cache._repr_html_()
    with pytest.raises(ConfigError, match="samples 0 to 39"):
        cache.text(40)
    with pytest.raises(MismatchError, match="no val split"):
        packtool.Cache(tiny.cache, "val")


def test_plan_equals_that_of_the_command(tiny: TinyWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--packing-length", "256", "--gradient-accumulation-steps", "2"]
    plan = packtool.plan(packtool.Cache(tiny.cache), **PLAN)
    output = json.loads(printed(capsys, "plan", tiny.cache, *words, "--json"))
    clock = {"plan_seconds": None}
    assert plan.summary | clock == output | clock
    printed_plan = printed(capsys, "plan", tiny.cache, *words)
    assert all(line in printed_plan for line in str(plan).splitlines() if "planning time" not in line)
    # Every sample once, in packs that are as full as they may be.
    assert len(plan.steps) == plan.summary["steps_per_epoch"] == 4
    packs = [pack for step in plan.steps for rank in step.micro_batches for micro in rank for pack in micro]
    assert sorted(sample_index for pack in packs for sample_index in pack) == list(range(40))
    lengths = packtool.Cache(tiny.cache).lengths
    assert all(lengths[list(pack)].sum() <= 256 for pack in packs)
    assert plan.steps[-1].number == plan.steps[3].number == 3
    assert [step.number for step in plan.steps[1:3]] == [1, 2]
    with pytest.raises(IndexError):
        plan.steps[4]


def test_plan_is_saved_and_shown_as_a_page(tiny: TinyWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = packtool.plan([tiny.cache], **PLAN)
    plan.save(tmp_path / "plan.arrow")
    config = tiny.config(tmp_path / "output", plan=str(tmp_path / "plan.arrow"), gradient_accumulation_steps=2)
    trained = Run.of(config, World()).timeline.first_plan
    assert trained.fingerprint == plan.fingerprint
    plan.page(tmp_path / "plan.html")
    (command,) = re.findall(r"made by</h3><pre>(.*?)</pre>", (tmp_path / "plan.html").read_text(), re.DOTALL)
    arguments = shlex.split(html.unescape(re.sub("<[^>]*>", "", command)).replace("\\\n", " "))
    assert json.loads(printed(capsys, *arguments[1:], "--json"))["plan_fingerprint"] == plan.fingerprint
    framed = plan._repr_html_()
    assert framed.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert framed.count("<") == framed.count("</") + 1 == 2
    assert repr(plan) == "Plan of cache: 8 packs in 4 steps of 1 ranks"


def test_options_are_checked_like_those_of_the_command(tiny: TinyWorld, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^unknown setting 'packing_lenght'; did you mean 'packing_length'"):
        packtool.plan(tiny.cache, packing_lenght=256)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="2 settings are wrong") as raised:
        packtool.plan(tiny.cache, packing_length="much", balance="none", world_size=0)
    assert "--packing-length" in str(raised.value)
    assert packtool.plan(tiny.cache, packing_length="1K").summary["packing_length"] == 1024
    with pytest.raises(ConfigError, match="save is not supported here: use Plan"):
        packtool.plan(tiny.cache, save=str(tmp_path / "plan"), packing_length=256)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="give either caches"):
        packtool.plan()
    with pytest.raises(ConfigError, match="--output-dir is missing"):
        packtool.export(model=tiny.model, dataset=tiny.rows)


def test_exporting_verifying_and_evaluating(tiny: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_PIXELS", str(80 * 80))  # as the command has it
    summary = packtool.export(model=tiny.model, dataset=tiny.rows, output_dir=tmp_path / "c", max_length=MAX_LENGTH)
    assert (summary.num_rows, summary.num_samples) == (40, 40)
    cache = packtool.Cache(tmp_path / "c")
    assert cache.statistics["media_limits"]["image"]["max_pixels"] == 80 * 80
    monkeypatch.delenv("MAX_PIXELS")
    report = packtool.verify(model=tiny.model, cached_dataset=cache, num_packs=1, packing_length=128)
    assert report.passed
    result = packtool.evaluate(
        model=tiny.model, cached_dataset=[cache], output=tmp_path / "eval.parquet", dataloader_num_workers=0
    )
    assert result.evaluation.total.samples == 40
    assert (tmp_path / "eval.parquet").exists()
