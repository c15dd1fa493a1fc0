"""Adapters other than LoRA: what is trained, saved, continued and merged, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from packtool.config.commands import MergeConfig
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError
from packtool.progress import SilentProgress
from packtool.train.model.load import model_without_weights
from packtool.train.model.memory import parameter_sizes
from packtool.train.model.merge import merge_adapter
from packtool.train.model.precision import raise_to_masters
from packtool.train.model.trainable import make_trainable
from packtool.train.run import train
from tests.batch.reduced import reduced_model
from tests.train.tiny import TinyWorld

ADAPTERS: dict[str, dict[str, Any]] = {
    "boft": {"boft_block_size": 8},
    "bone": {},
    "oft": {"oft_block_size": 8},
    "vera": {"r": 8},
}


def settings_of(kind: str, **others: Any) -> dict[str, Any]:
    return {"train_type": kind, "adapter_settings": ADAPTERS[kind], "learning_rate": 1e-2, "max_steps": 2, **others}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(40)[None]).logits


@pytest.mark.parametrize("kind", ADAPTERS)
def test_trained_adapter_is_loaded_continued_and_merged(kind: str, tiny: TinyWorld, tmp_path: Path) -> None:
    train(tiny.config(tmp_path / "first", **settings_of(kind)), SilentProgress())
    first = tmp_path / "first" / "last"
    base = logits(AutoModelForImageTextToText.from_pretrained(tiny.model))
    expected = logits(PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(tiny.model), first))
    assert (expected - base).abs().max() > 1e-3, "it has an effect"
    merge_adapter(MergeConfig(adapter=str(first), output=str(tmp_path / "merged")), SilentProgress())
    merged = logits(AutoModelForImageTextToText.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-4)

    train(tiny.config(tmp_path / "second", **settings_of(kind, adapters=(str(first),))), SilentProgress())
    before, after = (load_file(path / "adapter_model.safetensors") for path in (first, tmp_path / "second" / "last"))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(ConfigError, match=f"adapter, with --train-type lora\nUse --train-type {kind}"):
        train(tiny.config(tmp_path / "third", train_type="lora", adapters=(str(first),)), SilentProgress())


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_changes_only_weights_of_the_adapter(kind: str, dtype: torch.dtype) -> None:
    run = TrainConfig(model="", cached_dataset=("",), output_dir="", **settings_of(kind))
    model = reduced_model("qwen3_vl").to(dtype)
    adapted = make_trainable(model, run)
    raise_to_masters(adapted)
    before = {name: parameter.clone() for name, parameter in adapted.named_parameters()}
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    prefix = {"bone": "miss_", "vera": "vera_lambda_"}.get(kind, f"{kind}_")
    assert trained
    assert all(f".{prefix}" in name and ".language_model." in name for name in trained)
    assert {parameter.dtype for parameter in adapted.parameters() if parameter.requires_grad} == {torch.float32}
    optimizer = torch.optim.SGD([parameter for parameter in adapted.parameters() if parameter.requires_grad], lr=1.0)
    layer = next(module for name, module in adapted.named_modules() if name.endswith("layers.0.self_attn.q_proj"))
    torch.manual_seed(0)
    layer(torch.randn(3, layer.in_features, dtype=dtype)).square().sum().backward()
    optimizer.step()
    changed = {name for name, parameter in adapted.named_parameters() if not torch.equal(before[name], parameter)}
    assert changed
    assert changed <= trained


@pytest.mark.parametrize("kind", ADAPTERS)
def test_memory_is_estimated_without_weights(kind: str) -> None:
    run = TrainConfig(model="", cached_dataset=("",), output_dir="", **settings_of(kind))
    model = make_trainable(reduced_model("qwen3_vl"), run)
    empty = model_without_weights(run, reduced_model("qwen3_vl").config, torch.float32)
    assert [(name, weight.shape) for name, weight in empty.named_parameters()] == [
        (name, weight.shape) for name, weight in model.named_parameters()
    ]
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert parameter_sizes(empty) == parameter_sizes(model)
    num_permutations = sum(buffer.numel() for name, buffer in model.named_buffers() if name.endswith("boft_P"))
    assert (num_permutations > 0) == (kind == "boft")
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    assert sum(size.num_elements for size in parameter_sizes(model)) == num_weights + num_permutations


@pytest.mark.parametrize(
    ("settings", "expected_text"),
    [
        ({"train_type": "oft", "adapter_settings": {"r": 8.5}}, "--adapter-settings r: 8.5 is not a number as 0"),
        (
            {"train_type": "oft", "adapter_settings": {"block": 8}},
            "block: unknown with --train-type oft; use r,",
        ),
        ({"adapter_settings": {"r": 8}}, "unknown with --train-type lora; use options such as --lora-rank"),
        ({"train_type": "bone", "use_dora": True}, "--use-dora requires --train-type lora"),
        ({"train_type": "bone", "expert_parallel_size": 2}, "cannot be combined with --train-type bone"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], expected_text: str) -> None:
    config = TrainConfig(model="m", cached_dataset=("c",), output_dir="o", **settings)
    assert any(expected_text in problem for problem in config.problems())


def test_models_that_peft_cannot_adapt_are_refused() -> None:
    settings = settings_of("oft") | {"adapter_settings": {"r": 8, "oft_block_size": 8}}
    with pytest.raises(ConfigError, match="--train-type oft: peft cannot adapt this model"):
        make_trainable(reduced_model("qwen3"), TrainConfig(model="", cached_dataset=("",), output_dir="", **settings))
