"""What ``packtool plan --model`` tells of memory is what a dry run tells."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from packtool.cli.main import run
from tests.train.alike import make_alike_world
from tests.train.tiny import TinyWorld

WORDS = ["--packing-length", "256", "--train-type", "full", "--freeze-vit", "false", "--hardware", "h100"]
SENTENCE = "estimated memory of a rank"


def memory_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert run(words) == 0
    captured = capsys.readouterr()
    (line,) = [line for line in (captured.out + captured.err).splitlines() if SENTENCE in line]
    return line[line.index(SENTENCE) :]


@pytest.mark.parametrize("parallelism", ["shared sequences", "shared prefixes"])
def test_plan_shows_the_memory_of_the_dry_run(
    parallelism: str,
    tiny: TinyWorld,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = ["--sequence-parallel-size", "2", "--fsdp", "full_shard"] * (parallelism == "shared sequences")
    cache = make_alike_world(tiny, tmp_path / "alike").cache if parallelism == "shared prefixes" else tiny.cache
    planned = memory_line(["plan", cache, "--model", tiny.model, "--world-size", "2", *WORDS, *shared], capsys)
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    train_options = [
        "--model",
        tiny.model,
        "--cached-dataset",
        cache,
        "--output-dir",
        str(tmp_path / "out"),
        "--dry-run",
    ]
    assert planned == memory_line(["train", *train_options, *WORDS, *shared], capsys)


def test_plan_of_lengths_and_unknown_models(
    tiny: TinyWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = tmp_path / "lengths.npy"
    np.save(lengths, np.full(20, 100))
    words = ["plan", "--lengths", str(lengths), "--packing-length", "256", "--json"]
    assert run([*words, "--model", tiny.model]) == 0
    assert json.loads(capsys.readouterr().out)["memory_gib"] > 0
    assert run(words) == 0
    assert "memory_gib" not in json.loads(capsys.readouterr().out)
    # Its 4 heads of Q cannot be shared by 3 ranks, which a plan alone need not mind.
    three = ["--world-size", "3", "--sequence-parallel-size", "3", "--sequence-parallel-type", "ulysses"]
    assert run([*words[:-1], "--model", tiny.model, *three]) == 0
    assert "memory per rank is unknown: the model has 4 heads" in capsys.readouterr().out
    assert run([*words, "--model", tiny.model, *three]) == 0
    assert json.loads(capsys.readouterr().out)["memory_gib"] is None
