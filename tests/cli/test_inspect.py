from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtool.cache.plan_file import SavedPlan, write_plan
from packtool.cache.reader import CacheReader
from packtool.cli.inspect import _COLOURS
from packtool.cli.main import run
from packtool.planning.packing import pack
from packtool.report.inspect import Decoder, model_of_cache
from packtool.report.tables import histogram_lines
from packtool.terminal import show_styled
from tests.cache.conftest import model as model
from tests.cache.conftest import rows as rows
from tests.cache.conftest import run_export as run_export
from tests.test_terminal import control_characters


@pytest.fixture
def cache(run_export: Callable[..., Any], tmp_path: Path) -> str:
    run_export(split_dataset_ratio=0.1)
    return str(tmp_path / "cache")


def test_figures(cache: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", cache]) == 0
    message = capsys.readouterr().out
    for words in (
        "qwen3_vl",
        "input rows",
        "train",
        "val",
        "target tokens",
        "dropped",
        "invalid_json",
        "gone.png",
        "█",
    ):
        assert words in message
    assert run(["inspect", "--json", "true", cache]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["num_rows"] == 600
    assert figures["num_rows"] == sum(split["num_samples"] for split in figures["splits"].values()) + sum(
        figures["dropped"].values()
    )
    assert all(1 <= len(examples) <= 2 for examples in figures["dropped_examples"].values())


def test_a_sample_is_shown_as_text(cache: str, capsys: pytest.CaptureFixture[str]) -> None:
    reader = CacheReader.open([cache])
    with_picture = next(i for i in range(len(reader)) if reader.sample(i).images)
    image = reader.sample(with_picture).images[0]
    assert run(["inspect", cache, "--row", str(with_picture)]) == 0
    message = capsys.readouterr().out
    assert f"[image {image.width}x{image.height} -> {image.num_tokens} tokens]" in message
    assert "<|image_pad|>" not in message
    row_number = reader.sample(with_picture).row
    assert f"question {row_number}<|im_end|>" in message
    assert re.search(r"assistant\n«(word )*<\|im_end\|>»", message)
    assert run(["inspect", cache, "--row", "3", "--split", "val", "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)["parts"]
    assert {part["look"] for part in parts} <= {"plain", "trained", "media"}
    truncated = dataclasses.replace(reader.sample(with_picture), num_truncated=1234)
    for spec, at, words in (
        ({"truncation_strategy": "left"}, 0, "1,234 tokens of its beginning were truncated"),
        (
            {"truncation_strategy": "right", "media_overflow": "trim"},
            -1,
            "of its end, or of its oldest media were truncated",
        ),
        (
            {"truncation_strategy": "delete", "media_overflow": "trim"},
            0,
            "1,234 tokens of its oldest media were truncated",
        ),
    ):
        identity = reader.manifests[0].identity
        part = Decoder(model_of_cache(reader), {**identity.spec, **spec}, identity.media_limits).parts(truncated)[at]
        assert part.style == "truncated"
        assert words in part.text


def test_a_pack_is_shown(cache: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reader = CacheReader.open([cache])
    plan = pack(reader.index.length, 400, seed=0)
    path = str(tmp_path / "a.plan")
    saved = SavedPlan(
        samples=plan.samples,
        offsets=plan.offsets,
        lengths=plan.lengths,
        capacity=400,
        max_length=200,
        seed=0,
        cache=reader.fingerprint,
        plan=plan.fingerprint,
        num_cached=len(reader),
    )
    write_plan(path, saved)
    assert run(["inspect", cache, "--plan", path, "--pack", "3", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [sample["sample"] for sample in figures["samples"]] == plan.pack(3).tolist()
    assert [sample["start"] for sample in figures["samples"]] == [0, *(s["end"] for s in figures["samples"][:-1])]
    for sample in figures["samples"]:
        labels = reader.sample(sample["sample"]).labels
        trained = np.zeros(len(labels), bool)
        for a, b in sample["trained"]:
            trained[a - sample["start"] : b - sample["start"]] = True
        np.testing.assert_array_equal(trained, labels != -100)
    assert run(["inspect", cache, "--plan", path, "--pack", "3"]) == 0
    assert "positions 0-" in capsys.readouterr().out
    assert run(["inspect", cache, "--plan", path, "--pack", "100000"]) == 2


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--row", "100000"], 2, "has samples 0 to"),
        (["--split", "test", "--row", "1"], 4, "no test split"),
        (["--plan", "x"], 2, "--plan requires --pack, --html or --serve"),
    ],
)
def test_wrong_options(
    cache: str, words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["inspect", cache, *words]) == code
    assert message in capsys.readouterr().err


def test_no_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(tmp_path / "nowhere")]) == 4
    assert "no finished cache" in capsys.readouterr().err
    assert run(["inspect", str(tmp_path / "nowhere#20%")]) == 4
    assert "Leave out #20%." in capsys.readouterr().err
    assert run(["inspect"]) == 2


def test_hostile_rows_are_harmless(
    run_export: Callable[..., Any], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What rows, channels, file names and dropped details hold of controls is shown, not obeyed."""
    evil = "\x1b]52;c;cm0=\x07\x1b]0;t\x07\x1b[2J\x1b[8m\x9b1m\r\u202e<script>"
    rows = [
        {
            "messages": [{"role": "user", "content": evil + str(i)}, {"role": "assistant", "content": evil}],
            "channel": evil,
        }
        for i in range(8)
    ]
    rows.append({"messages": [{"role": "user", "content": "a"}, {"role": evil, "content": "b"}]})
    rows.append({"messages": rows[0]["messages"], "images": [evil + ".png"]})
    path = tmp_path / "a\x1b[2J\u202eb.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    run_export("evil", dataset=(str(path),), rows_per_shard=64)
    cache = str(tmp_path / "evil")
    plan, html = str(tmp_path / "a.plan"), tmp_path / "plan.html"
    commands = [
        ["inspect", cache],
        ["inspect", cache, "--row", "1"],
        ["plan", cache, "--world-size", "2", "--save", plan, "--html", str(html)],
        ["inspect", cache, "--plan", plan, "--pack", "0"],
        ["inspect", cache, "--row", "1" + evil],
        ["inspect", cache + evil],
        ["export", "--model", str(model), "--dataset", str(path), "--max-length", "200", "--strict", "--dry-run"],
        ["export", "--model", str(model), "--dataset", str(path), "--max-length", "200", "--dry-run"],
    ]
    for words in commands:
        run(words)
        message = capsys.readouterr()
        assert control_characters(message.out + message.err) == [], words
        if words == commands[1]:
            assert r"\x1b]52;c;cm0=\x07" in message.out
            assert "channel  \\x1b]52" in message.out
        if words == commands[0]:
            assert r"a\x1b[2J\u202eb.jsonl" in message.out
    assert control_characters(html.read_text()) == []
    assert "<script" not in html.read_text()
    for words in commands[:4]:
        assert run([*words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)


def test_bars_fit_their_width() -> None:
    lines = histogram_lines([5, 0, 1000, 1] + [0] * 60, range(100, 6401, 100), 60)
    assert max(map(len, lines)) <= 60
    assert lines[0].endswith("1,006")


def test_every_part_of_a_sample_has_a_style(capsys: pytest.CaptureFixture[str]) -> None:
    show_styled([("a", colour) for colour in _COLOURS.values()])
    assert capsys.readouterr().out.count("\x1b[0m") == len(_COLOURS)
