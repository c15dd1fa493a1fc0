"""LISA: which layers a step trains; training from random weights; ASFT's reference model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from packtool.errors import ConfigError
from packtool.progress import SilentProgress
from packtool.train.model.active_layers import ActiveLayers
from packtool.train.run import train
from tests.batch.reduced import reduced_model
from tests.train.tiny import TinyWorld, check_same_rest, read_metrics


def test_draws_depend_on_seed_and_interval_and_leave_other_weights_trained() -> None:
    model: Any = reduced_model("qwen3_vl", packed=False)
    layers = ActiveLayers(model, 1, 5, seed=3)
    draws = [layers.indices(step) for step in range(100)]
    assert all(draws[step] == draws[step - step % 5] for step in range(100))
    assert {index for draw in draws for index in draw} == set(range(len(model.model.language_model.layers)))
    (active,) = draws[0]
    with layers.active(0):
        model(input_ids=torch.arange(24)[None], labels=torch.arange(24)[None]).loss.backward()
    for name, weight in model.named_parameters():
        assert weight.requires_grad
        if ".visual." not in name:
            is_trained = ".layers." not in name or f".layers.{active}." in name
            assert (weight.grad is not None) == is_trained, name
    with pytest.raises(ConfigError, match="--lisa-activated-layers 99: the language model has"):
        ActiveLayers(model, 99, 5, seed=3)


def test_steps_change_only_active_layers_also_after_a_resume(tiny: TinyWorld, tmp_path: Path) -> None:
    settings = {"lisa_activated_layers": 1, "lisa_step_interval": 2, "max_steps": 4, "save_steps": 2}
    settings |= {"weight_decay": 0.0}
    train(tiny.config(tmp_path / "all", **settings), SilentProgress())
    checkpoint = str(tmp_path / "all" / "checkpoint-2")
    train(tiny.config(tmp_path / "resumed", resume_from_checkpoint=checkpoint, **settings), SilentProgress())
    check_same_rest(tmp_path / "all", tmp_path / "resumed", 2)
    layers = ActiveLayers(AutoModelForImageTextToText.from_pretrained(tiny.model), 1, 2, seed=42)
    weights = [
        load_file(path / "model.safetensors") for path in (Path(tiny.model), *(tmp_path / "all").glob("checkpoint-2"))
    ]
    changed = {name for name in weights[0] if not torch.equal(weights[0][name], weights[1][name])}
    (active,) = layers.indices(0)
    in_layers = {name for name in changed if "language_model.layers." in name}
    assert in_layers
    assert all(f"language_model.layers.{active}." in name for name in in_layers)
    assert any("embed_tokens" in name for name in changed)


def test_random_weights_are_those_of_the_seed(tiny: TinyWorld, tmp_path: Path) -> None:
    for name, extra in {"one": {}, "same": {}, "other": {"seed": 7}, "trained": {"train_from_scratch": False}}.items():
        settings: dict[str, Any] = {"train_from_scratch": True, "max_steps": 1, "samples_per_step": 40} | extra
        train(tiny.config(tmp_path / name, **settings), SilentProgress())
    first = {name: read_metrics(tmp_path / name)[0]["loss"] for name in ("one", "same", "other", "trained")}
    assert first["one"] == first["same"]
    assert len(set(first.values())) == 3
    saved: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "one" / "last")
    spread = float(saved.model.language_model.layers[0].mlp.up_proj.weight.detach().std())
    assert spread == pytest.approx(saved.config.text_config.initializer_range, rel=0.1)


def test_reference_is_the_initial_model_also_after_a_resume(tiny: TinyWorld, tmp_path: Path) -> None:
    settings = {"asft_alpha": 5.0, "max_steps": 4, "save_steps": 2}
    train(tiny.config(tmp_path / "all", **settings), SilentProgress())
    checkpoint = str(tmp_path / "all" / "checkpoint-2")
    train(tiny.config(tmp_path / "resumed", resume_from_checkpoint=checkpoint, **settings), SilentProgress())
    check_same_rest(tmp_path / "all", tmp_path / "resumed", 2)
    train(tiny.config(tmp_path / "free", enable_dft_loss=True, max_steps=4), SilentProgress())
    anchored, free = ([line["objective"] for line in read_metrics(tmp_path / name)] for name in ("all", "free"))
    assert anchored[0] == pytest.approx(free[0], abs=1e-5), "nothing diverges before the first step"
    assert anchored[1:] != pytest.approx(free[1:], abs=1e-5)
