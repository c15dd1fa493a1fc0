"""The benchmark of export runs on a small model, and both sides count the same tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from packtool.demo.model import make_model
from tests.scripts.loading import load_script


@pytest.fixture(scope="module")
def realdata(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like that of the real data: a model, rows of text, and rows with pictures."""
    folder = tmp_path_factory.mktemp("realdata")
    make_model(str(folder / "tokenizers" / "qwen3-vl"), 0)
    Image.new("RGB", (90, 70), "red").save(folder / "red.png")
    answer = {"role": "assistant", "content": "red"}
    with (folder / "texts.jsonl").open("w") as texts, (folder / "pictures.jsonl").open("w") as pictures:
        for number in range(8):
            question = {"role": "user", "content": f"Which color has number {number}?"}
            texts.write(json.dumps({"messages": [question, answer]}) + "\n")
            question = question | {"content": "<image>" + question["content"]}
            pictures.write(json.dumps({"messages": [question, answer], "images": ["red.png"]}) + "\n")
    return folder


@pytest.mark.parametrize(
    ("comparison", "ratios"),
    [
        ("pictures", ["whole rows", "the pictures alone"]),
        ("text", ["wall time", "cpu time"] * 2),
        ("files", ["wall time", "cpu time"]),
    ],
)
def test_ratios_are_printed(
    comparison: str,
    ratios: list[str],
    realdata: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = load_script("bench_export")
    monkeypatch.setattr(bench, "PICTURE_ROWS", ("pictures.jsonl",))
    monkeypatch.setattr(bench, "TEXT_ROWS", ("texts.jsonl",))
    options = ["--realdata", str(realdata), "--only", comparison, "--repeat", "2", "--copies", "1", "--num-proc", "1"]
    bench.main([*options, "--files", "5"])
    lines = re.findall(r"^ +(.*): [\d.]+ \([\d.]+ to [\d.]+ in 2 rounds\)$", capsys.readouterr().out, re.MULTILINE)
    assert lines == ratios
