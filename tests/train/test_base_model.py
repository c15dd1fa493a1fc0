"""A base model from texts to a checkpoint: no chat template anywhere, or one that is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from packtool.cli.main import run
from packtool.launch.world import World
from packtool.progress import SilentProgress
from packtool.train.run import train
from tests.train.tiny import TEMPLATE, TinyWorld, export_rows, make_tiny_text_world


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    """The tiny text model without its template, and rows of plain text."""
    tiny = make_tiny_text_world(tmp_path_factory.mktemp("base"))
    (Path(tiny.model) / "chat_template.jinja").unlink()
    return tiny


def trained_checkpoint(tiny: TinyWorld, cache: Path, output: Path, **settings: Any) -> Path:
    config = tiny.config(output, cached_dataset=(str(cache),), max_steps=2, **settings)
    result = train(config, SilentProgress(), World(0, 1))
    assert result.steps == 2
    return Path(str(result.checkpoint))


def test_texts_train_and_are_evaluated(base: TinyWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join(json.dumps({"text": "once upon a time " * (i % 4 + 1)}) for i in range(30)))
    export_rows(base, tmp_path / "cache", dataset=(str(texts),))
    checkpoint = trained_checkpoint(base, tmp_path / "cache", tmp_path / "output")
    assert not (checkpoint / "chat_template.jinja").exists()
    words = ["--cached-dataset", str(tmp_path / "cache")]
    assert run(["eval", "--model", str(checkpoint), *words, "--output", str(tmp_path / "e.parquet")]) == 0
    assert run(["inspect", str(tmp_path / "cache"), "--row", "1"]) == 0
    assert "once upon a time" in capsys.readouterr().out
    assert run(["verify", "--model", base.model, *words, "--packing-length", "128"]) == 0


def test_a_checkpoint_keeps_the_template_it_was_trained_with(base: TinyWorld, tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text(TEMPLATE)
    export_rows(base, tmp_path / "cache", chat_template=str(template))
    checkpoint = trained_checkpoint(base, tmp_path / "cache", tmp_path / "output")
    assert (checkpoint / "chat_template.jinja").read_text() == TEMPLATE
    words = ["--cached-dataset", str(tmp_path / "cache"), "--output", str(tmp_path / "e.parquet")]
    assert run(["eval", "--model", str(checkpoint), *words]) == 0


def test_stream_of_conversations_needs_a_template(
    base: TinyWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--model", base.model, "--dataset", base.rows, "--streaming", "--packing", "--max-length", "128"]
    words += ["--max-steps", "2", "--output-dir", str(tmp_path / "out"), "--dry-run"]
    assert run(words) == 2
    assert "has no chat template" in capsys.readouterr().err
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    assert run([*words, "--chat-template", str(tmp_path / "mine.jinja")]) == 0
    assert (
        run(["train", "--model", base.model, "--cached-dataset", "x", "--output-dir", "y", "--chat-template", "z"]) == 2
    )
    assert "--chat-template requires --dataset" in capsys.readouterr().err
