"""What prefixes are not shared with: refused where sharing is asked for, told where it is left to packtool."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from packtool.cli.main import run
from packtool.errors import EXIT_USAGE
from tests.attention.hybrids import hybrid_config
from tests.cli.commands import run_here
from tests.train.alike import make_alike_world
from tests.train.tiny import TinyWorld, export_rows, make_tiny_text_world, make_tiny_world

REASONS = {
    "--packing false": "--packing false",
    "--packing false --dynamic-batch-tokens 300": "--dynamic-batch-tokens",
    "--schedule skrull --bucket-size 512": "--schedule skrull",
    "--max-samples-per-pack 9": "--max-samples-per-pack",
}
SHARED_BY_TWO = "--sequence-parallel-size 2"


@pytest.fixture(scope="module")
def alike_world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    root = tmp_path_factory.mktemp("alike")
    return make_alike_world(make_tiny_world(root), root)


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    """Text that is asked about three times, for a model with gated delta nets."""
    root = tmp_path_factory.mktemp("recurrent")
    world = make_tiny_text_world(root)
    config = hybrid_config("qwen3_next")
    config.vocab_size = 272
    AutoModelForCausalLM.from_config(config).save_pretrained(world.model)
    rows = []
    for text in "abcd":
        before = [{"role": "user", "content": text * 70}, {"role": "assistant", "content": "read"}]
        for question in "123":
            answered = [{"role": "user", "content": question}, {"role": "assistant", "content": "yes"}]
            rows.append({"messages": before + answered})
    Path(world.rows).write_text(json.dumps(rows))
    recurrent_world = dataclasses.replace(world, cache=str(root / "alike"))
    export_rows(recurrent_world, recurrent_world.cache, max_length=160)
    return recurrent_world


def command(verb: str, world: TinyWorld, folder: Path) -> list[str]:
    words = [verb, "--model", world.model, "--packing-length", "256"]
    if verb == "stream":
        rows = ["--dataset", world.rows, "--streaming", "true", "--max-steps", "2", "--max-length", "160"]
        return ["train", *words[1:], *rows, "--media-root", str(Path(world.rows).parent), "--output-dir", str(folder)]
    words += ["--cached-dataset", world.cache]
    if verb == "train":
        words += ["--output-dir", str(folder)]
    if verb == "eval":
        words = [word for word in words if word not in ("--packing-length", "256")]
        words += ["--output", str(folder / "found.parquet"), "--dataloader-num-workers", "0"]
    return words


def check(words: list[str], reason: str, code: int, capfd: Any) -> None:
    """Asked for, it is refused before anything is read; else every sample is computed in full, with the reason."""
    assert run([*words, "--share-prefix", "true"]) == code
    refused = capfd.readouterr().err
    assert "--share-prefix true" in refused
    assert reason in refused
    assert run(words) == 0
    output = "".join(capfd.readouterr())
    assert "each sample is computed in full: " in output
    assert reason in output.split("each sample is computed in full: ")[1]


# Others are tried in tests/train/prepare.
@pytest.mark.parametrize(
    ("verb", "words"), [("train", "--schedule skrull --bucket-size 512"), *(("plan", words) for words in REASONS)]
)
def test_options(verb: str, words: str, alike_world: TinyWorld, tmp_path: Path, capfd: Any) -> None:
    dry = ["--dry-run"] if verb == "train" else []
    check(
        [*command(verb, alike_world, tmp_path), *words.split(), *dry],
        f"combined with {REASONS[words]}",
        EXIT_USAGE,
        capfd,
    )


def test_trees_respect_the_media_budget(alike_world: TinyWorld, tmp_path: Path, capfd: Any) -> None:
    """Rows that begin with a text, each of which goes on with a picture of its own."""
    rows = []
    for index in range(12):
        turns = [{"role": "user", "content": "text" * 20}, {"role": "assistant", "content": "read"}]
        turns += [{"role": "user", "content": f"<image>{index}"}, {"role": "assistant", "content": "yes"}]
        rows.append({"messages": turns, "images": [f"pictures/{index:04d}.png"]})
    path = Path(alike_world.rows).parent / "pictures.json"
    path.write_text(json.dumps(rows))
    world = dataclasses.replace(alike_world, rows=str(path), cache=str(tmp_path / "cache"))
    export_rows(world, world.cache, max_length=200)
    savings = []
    for max_media_tokens in ("20", "256"):
        words = [*command("plan", world, tmp_path), "--max-media-tokens-per-pack", max_media_tokens, "--json"]
        assert run(words) == 0, capfd.readouterr().err
        savings.append(json.loads(capfd.readouterr().out)["shared_prefixes"]["tokens_saved"])
    assert 0 < savings[0] < savings[1]
    streamed = [*command("stream", world, tmp_path / "out"), "--max-media-tokens-per-pack", "20"]
    assert run([*streamed, "--per-device-train-batch-size", "30"]) == 0
    assert "tokens saved by shared prefixes" in capfd.readouterr().out


def test_options_of_streams_and_evaluation(alike_world: TinyWorld, tmp_path: Path, capfd: Any) -> None:
    streamed = [*command("stream", alike_world, tmp_path), "--max-samples-per-pack", "9", "--dry-run"]
    check(streamed, "combined with --max-samples-per-pack", EXIT_USAGE, capfd)
    evaluated = [*command("eval", alike_world, tmp_path), "--max-samples-per-micro-batch", "9"]
    check(evaluated, "combined with --max-samples-per-micro-batch", EXIT_USAGE, capfd)


def test_sequence_parallelism(alike_world: TinyWorld, tmp_path: Path, capfd: Any) -> None:
    words = [*command("eval", alike_world, tmp_path), *SHARED_BY_TWO.split(), "--share-prefix", "true"]
    assert run(words) == EXIT_USAGE
    assert "cannot be combined with sequence parallelism (--sequence-parallel-size)" in capfd.readouterr().err
    planned = [*command("plan", alike_world, tmp_path), *SHARED_BY_TWO.split(), "--world-size", "2", "--json"]
    assert run(planned) == 0
    assert json.loads(capfd.readouterr().out)["shared_prefixes"]["token_share_saved"] > 0.3
    for verb in ("train", "stream"):
        words = [*command(verb, alike_world, tmp_path), *SHARED_BY_TWO.split(), "--dry-run"]
        run_here(f"NPROC_PER_NODE=2 packtool {' '.join(words)}")
        output = "".join(capfd.readouterr())
        assert "each sample is computed in full" not in output
        assert verb == "stream" or "shared prefixes: computed once" in output


@pytest.mark.parametrize("verb", ["train", "stream", "plan", "eval", "verify"])
def test_recurrent_layers(verb: str, recurrent: TinyWorld, tmp_path: Path, capfd: Any) -> None:
    """A step, too: its losses and those of samples alone are compared before it."""
    steps = ["--train-type", "full", "--max-steps", "1"] if verb in ("train", "stream") else []
    assert run([*command(verb, recurrent, tmp_path), *steps, "--share-prefix", "true"]) == 0
    output = "".join(capfd.readouterr())
    assert "saved by shared prefixes" in output or "shared prefixes: computed once" in output
