"""LISA: which layers a step trains; training from random weights; ASFT's reference model."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from packtool.config.train import TrainConfig
from packtool.errors import ConfigError
from packtool.progress import SilentProgress
from packtool.train.model.active_layers import ActiveLayers
from packtool.train.run import train
from tests.batch.reduced import reduced_model
from tests.train.tiny import TinyWorld, check_same_rest, read_metrics


def config(**settings: Any) -> TrainConfig:
    return TrainConfig(model="m", cached_dataset=("c",), output_dir="o", **{"train_type": "full"} | settings)


def test_draws_depend_on_seed_and_interval_and_leave_other_weights_trained() -> None:
    model: Any = reduced_model("qwen3_vl", packed=False)
    layers = ActiveLayers(model, config(lisa_activated_layers=1, lisa_step_interval=5, seed=3))
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
        ActiveLayers(model, config(lisa_activated_layers=99))


def test_steps_change_only_active_layers_also_after_a_resume(tiny: TinyWorld, tmp_path: Path) -> None:
    settings = {"lisa_activated_layers": 1, "lisa_step_interval": 2, "max_steps": 4, "save_steps": 2}
    settings |= {"weight_decay": 0.0}
    train(tiny.config(tmp_path / "all", **settings), SilentProgress())
    checkpoint = str(tmp_path / "all" / "checkpoint-2")
    train(tiny.config(tmp_path / "resumed", resume_from_checkpoint=checkpoint, **settings), SilentProgress())
    check_same_rest(tmp_path / "all", tmp_path / "resumed", 2)
    options = config(lisa_activated_layers=1, lisa_step_interval=2)
    layers = ActiveLayers(AutoModelForImageTextToText.from_pretrained(tiny.model), options)
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


def test_badam_trains_one_layer_after_the_other(tiny: TinyWorld, tmp_path: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(tiny.model)
    orders = {mode: ActiveLayers(model, config(badam_switch_interval=2, badam_switch_mode=mode)) for mode in _MODES}
    turns = {mode: [next(iter(layers.indices(step))) for step in range(8)] for mode, layers in orders.items()}
    assert turns["ascending"] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert turns["descending"] == [1, 1, 0, 0, 1, 1, 0, 0]
    assert all(set(turns["random"][begin : begin + 4]) == {0, 1} for begin in (0, 4))
    settings = {"badam_switch_interval": 2, "max_steps": 4, "save_steps": 2}
    train(tiny.config(tmp_path / "all", **settings), SilentProgress())
    checkpoint = tmp_path / "all" / "checkpoint-2"
    train(tiny.config(tmp_path / "resumed", resume_from_checkpoint=str(checkpoint), **settings), SilentProgress())
    check_same_rest(tmp_path / "all", tmp_path / "resumed", 2)
    before, after = (load_file(path / "model.safetensors") for path in (Path(tiny.model), checkpoint))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all("language_model.layers.0." in name for name in changed)
    optimizer = torch.load(tmp_path / "all" / "last" / "optimizer.pt", weights_only=True)
    assert {int(state["step"]) for state in optimizer["state"].values()} == {2}, "the state of the second layer alone"


_MODES = ("ascending", "descending", "random")


@pytest.mark.skipif(importlib.util.find_spec("adam_mini") is None, reason="needs adam-mini")
def test_adam_mini_takes_the_steps_of_its_library(tiny: TinyWorld, tmp_path: Path) -> None:
    from adam_mini import Adam_mini

    settings: dict[str, Any] = {"optim": "adam_mini", "max_steps": 4, "save_steps": 2, "warmup_ratio": 0.0}
    with pytest.raises(ConfigError, match=r"--optim adam_mini: .*patch_embed.proj.weight is trained"):
        train(tiny.config(tmp_path / "refused", **settings), SilentProgress())
    settings |= {"freeze_vit": True, "freeze_aligner": True}
    train(tiny.config(tmp_path / "all", **settings), SilentProgress())
    checkpoint = tmp_path / "all" / "checkpoint-2"
    train(tiny.config(tmp_path / "resumed", resume_from_checkpoint=str(checkpoint), **settings), SilentProgress())
    check_same_rest(tmp_path / "all", tmp_path / "resumed", 2)
    saved = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    model: Any = AutoModelForImageTextToText.from_pretrained(tiny.model)
    text = model.config.text_config
    sizes = {"dim": text.hidden_size, "n_heads": text.num_attention_heads, "n_kv_heads": text.num_key_value_heads}
    model.model.visual.requires_grad_(False)
    expected = Adam_mini(model.named_parameters(), lr=1e-3, verbose=False, **sizes)
    for name, weight in model.named_parameters():
        weight.grad = None if ".visual." in name else torch.zeros_like(weight)
    expected.step()
    shapes, saved_shapes = (
        [{name: getattr(value, "shape", None) for name, value in state.items()} for state in states]
        for states in (expected.state_dict()["state"].values(), saved["state"].values())
    )
    assert shapes == saved_shapes
