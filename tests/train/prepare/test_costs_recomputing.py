"""Activations of large models are computed again unless somebody says otherwise; debug models keep them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from packtool.progress import SilentProgress
from packtool.train.prepare.costs import recomputing_lines, with_recomputing
from packtool.train.run import train
from tests.train.tiny import TinyWorld


class Noted(SilentProgress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, message: str) -> None:
        self.lines.append(message)


def test_recomputation_depends_on_the_size_of_the_model(tiny: TinyWorld, tmp_path: Path) -> None:
    assert with_recomputing(tiny.config("out")).gradient_checkpointing is False
    for path in Path(tiny.model).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config: dict[str, Any] = json.loads((tmp_path / "config.json").read_text())
    config["text_config"] |= {"hidden_size": 2048, "num_hidden_layers": 28, "intermediate_size": 6144}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for requested, decided in ((None, True), (False, False), (True, True)):
        train_config = tiny.config("out", model=str(tmp_path), gradient_checkpointing=requested)
        resolved_config = with_recomputing(train_config)
        assert resolved_config.gradient_checkpointing is decided
        assert bool(recomputing_lines(train_config, resolved_config)) == (requested is None)
    for requested, decided in ((None, "auto"), (False, False), (True, True)):
        train_config = tiny.config("out", model=str(tmp_path), gradient_checkpointing=requested)
        assert with_recomputing(train_config, knows_memory=True).gradient_checkpointing == decided
    assert with_recomputing(tiny.config("out"), knows_memory=True).gradient_checkpointing is False, "a small model"


@pytest.mark.parametrize("form", [{"n_embd": 1600, "n_layer": 48}, {"hidden_size": 64, "intermediate_size": [64, 128]}])
def test_model_of_unknown_size_uses_recomputation(form: dict[str, Any], tiny: TinyWorld, tmp_path: Path) -> None:
    for path in Path(tiny.model).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **form}))
    assert with_recomputing(tiny.config("out", model=str(tmp_path))).gradient_checkpointing is True


def test_a_run_reports_recomputation(tiny: TinyWorld, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("packtool.train.prepare.costs.MAX_PARAMETERS", 1000)
    progress = Noted()
    train(tiny.config(tmp_path, dry_run=True), progress)
    assert any("--gradient-checkpointing false keeps them" in line for line in progress.lines)
    planned = Noted()
    train(tiny.config(tmp_path, dry_run=True, hardware="h100"), planned)
    assert any("gradient checkpointing auto: 0 to 0 of 2 layers" in line for line in planned.lines)
    assert not any("--gradient-checkpointing false keeps them" in line for line in planned.lines)
