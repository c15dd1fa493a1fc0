"""``OUTPUT_DIR/last`` and ``best`` are models that load by themselves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForImageTextToText, AutoProcessor

from packtool.progress import SilentProgress
from packtool.train.prepare.output_dir import best_checkpoint, point, remove_links
from packtool.train.run import train
from tests.train.test_resume import make_checkpoint
from tests.train.tiny import TinyWorld, export_rows


def test_last_and_best_can_be_loaded(tiny: TinyWorld, tmp_path: Path) -> None:
    export_rows(tiny, tmp_path / "cache", split_dataset_ratio=0.2)
    run_options: dict[str, Any] = {"cached_dataset": (str(tmp_path / "cache"),), "verify_packing": False}
    # A rate that makes every step worse than the one before: the best is the first, and outlives its limit.
    run_options |= {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 1,
        "save_total_limit": 1,
        "learning_rate": 0.3,
    }
    train(tiny.config(tmp_path / "out", **run_options, max_steps=3, warmup_ratio=0.0), SilentProgress())
    assert os.readlink(tmp_path / "out" / "last") == "checkpoint-3"
    best = os.readlink(tmp_path / "out" / "best")
    assert sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*")) == sorted({"checkpoint-3", best})
    assert best != "checkpoint-3"
    for name in ("last", "best"):
        model = AutoModelForImageTextToText.from_pretrained(tmp_path / "out" / name)
        assert model.num_parameters() > 0
        assert AutoProcessor.from_pretrained(tmp_path / "out" / name) is not None
        assert (tmp_path / "out" / name / "generation_config.json").exists()
        assert (tmp_path / "out" / name / "chat_template.jinja").exists()


def test_the_best_checkpoint_is_an_existing_one(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make_checkpoint(tmp_path, step)
    history: list[dict[str, Any]] = [{"step": 1, "loss": 0.1}, {"step": 4, "eval_loss": 0.1}]
    assert best_checkpoint(str(tmp_path), history) is None
    history += [{"step": 1, "eval_loss": None}, {"step": 2, "eval_loss": 0.5}, {"step": 3, "eval_loss": 0.7}]
    assert best_checkpoint(str(tmp_path), history) == str(tmp_path / "checkpoint-2")


def test_the_model_is_copied_on_file_systems_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("no links here")

    make_checkpoint(tmp_path, 1)
    for name in ("config.json", "model.safetensors", "optimizer.pt", "rng_state.pth"):
        (tmp_path / "checkpoint-1" / name).write_text(name)
    point(str(tmp_path), "last", str(tmp_path / "checkpoint-1"))
    monkeypatch.setattr(os, "symlink", refuse)
    for _ in range(2):
        point(str(tmp_path), "last", str(tmp_path / "checkpoint-1"))
        assert not (tmp_path / "last").is_symlink()
        assert {path.name for path in (tmp_path / "last").iterdir()} == {"config.json", "model.safetensors"}
    monkeypatch.undo()
    point(str(tmp_path), "last", str(tmp_path / "checkpoint-1"))
    assert (tmp_path / "last").is_symlink()
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "notes.txt").write_text("mine")
    remove_links(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "checkpoint-1"]
