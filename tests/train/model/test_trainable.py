"""An adapter that was saved goes onto a model that has all of its places, and onto no other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict

from packtool.config.train import TrainConfig
from packtool.errors import ConfigError, MismatchError
from packtool.train.model.load import auto_class
from packtool.train.model.trainable import (
    adapter_lines,
    add_adapters,
    attach_adapter,
    load_adapter_weights,
    tower_prefixes,
)
from tests.attention.hybrids import hybrid_config
from tests.batch.reduced import reduced_model


def adapted(**settings: Any) -> PeftModel:
    """A small model with an adapter that has an effect."""
    options = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    return get_peft_model(reduced_model("qwen3"), LoraConfig(**options | settings))


@pytest.fixture(scope="module")
def saved_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapter")
    adapted().save_pretrained(directory)
    return directory


def test_adapter_that_fits_is_loaded_completely(saved_adapter: Path) -> None:
    attached, taking = attach_adapter(reduced_model("qwen3"), str(saved_adapter)), adapted()
    load_adapter_weights(taking, str(saved_adapter))
    peft_state, own_state = (
        get_peft_model_state_dict(model, save_embedding_layers=False) for model in (attached, taking)
    )
    assert peft_state.keys() == own_state.keys()
    assert all(torch.equal(weight, own_state[name]) for name, weight in peft_state.items())


@pytest.mark.parametrize(
    "settings", [{"r": 3}, {"target_modules": ["q_proj"]}, {"modules_to_save": ["lm_head"]}, {"use_dora": True}]
)
def test_adapter_that_does_not_fit_names_a_weight(saved_adapter: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(MismatchError, match=r"does not match the options: \d+ of its weights do not fit, such as "):
        load_adapter_weights(adapted(**settings), str(saved_adapter))


def test_modules_that_peft_confuses_with_experts_are_named() -> None:
    """The expert that all tokens share: peft adapts the routed ones in its place."""
    model: Any = auto_class(hybrid_config("qwen3_next")).from_config(hybrid_config("qwen3_next"))
    towers = tower_prefixes(model, "qwen3_next")
    run = TrainConfig(model="", cached_dataset=("",), output_dir="")
    names = {name.rpartition(".")[2] for name, _ in model.named_modules() if "shared_expert." in name}
    assert {"gate_proj", "up_proj", "down_proj"} <= names
    with pytest.raises(
        ConfigError, match="LoRA on down_proj, gate_proj, up_proj: peft would adapt the model's routed"
    ) as raised:
        add_adapters(model, towers, run)
    others = str(raised.value).partition("--target-modules ")[2].partition(";")[0]
    model_with_adapters = add_adapters(model, towers, replace(run, target_modules=tuple(others.split())))
    adapted_names = {name for name, module in model_with_adapters.named_modules() if hasattr(module, "lora_A")}
    assert adapted_names
    assert not any("experts" in name or "shared_expert." in name for name in adapted_names)
    model = auto_class(hybrid_config("qwen3_next")).from_config(hybrid_config("qwen3_next"))
    (line,) = adapter_lines(add_adapters(model, towers, replace(run, lora_dropout=0.0)), run)
    assert line == "adapters on parameters, such as those of all routed experts: down_proj, gate_up_proj"


def test_names_without_a_module_are_reported() -> None:
    """As in peft, they have no effect if another name has a module; a run whose names have none is refused."""
    model = reduced_model("qwen3")
    run = TrainConfig(model="", cached_dataset=("",), output_dir="", target_modules=("q_proj", "kv_proj", "qkv"))
    (line,) = adapter_lines(add_adapters(model, tower_prefixes(model, "qwen3"), run), run)
    assert line == "warning: --target-modules kv_proj qkv: no effect, because no trained part has such a module"
    model, run = reduced_model("qwen3"), replace(run, target_modules=("kv_proj",))
    with pytest.raises(ConfigError, match="--target-modules kv_proj: no linear module of an unfrozen part"):
        add_adapters(model, tower_prefixes(model, "qwen3"), run)
    run = replace(run, target_modules=("all-linear",))
    assert not [*adapter_lines(add_adapters(model, tower_prefixes(model, "qwen3"), run), run)]


def test_damaged_adapter_file_is_reported(saved_adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no adapter")
    with pytest.raises(MismatchError, match="cannot be read"):
        load_adapter_weights(adapted(), str(tmp_path))
