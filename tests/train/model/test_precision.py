"""What weights are kept, computed with and saved in: nothing of an update is lost on the way."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen3MoeConfig, Qwen3MoeForCausalLM

from packtool.attention.register import set_attention
from packtool.batch.collate import collate_packs
from packtool.config.train import TrainConfig
from packtool.progress import SilentProgress
from packtool.train.model.loss import HeadLoss
from packtool.train.model.precision import MASTER_NAME, KahanAdamW
from packtool.train.model.trainable import make_trainable
from packtool.train.run import train
from tests.batch.reduced import VISION_MODELS, mixed_samples, reduced_model, reduced_spec, save_image_processor
from tests.train.tiny import TinyWorld, check_same_rest, export_rows, make_tiny_text_world

FEW_STEPS: dict[str, Any] = {
    "learning_rate": 1e-5,
    "warmup_ratio": 0.0,
    "lr_scheduler_type": "constant",
    "num_train_epochs": 10.0,
    "max_steps": 10,
    "verify_packing": False,
}


@pytest.fixture(scope="module")
def bfloat16_world(tiny: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    """The tiny world with a checkpoint in bfloat16."""
    model = tmp_path_factory.mktemp("short") / "model"
    shutil.copytree(tiny.model, model)
    AutoModelForImageTextToText.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(model)
    return dataclasses.replace(tiny, model=str(model))


def update_of(short: TinyWorld, checkpoint: Path) -> torch.Tensor:
    """All that training added to the weights, one after the other."""
    before = load_file(Path(short.model) / "model.safetensors")
    file = checkpoint / MASTER_NAME
    after = load_file(file if file.exists() else checkpoint / "model.safetensors")
    return torch.cat([(after[name].float() - before[name].float()).flatten() for name in sorted(before)])


def test_ten_small_bfloat16_steps_equal_those_in_float32(bfloat16_world: TinyWorld, tmp_path: Path) -> None:
    updates = {}
    for name, settings in {
        "exact": {"torch_dtype": "float32"},
        "masters": {"torch_dtype": "bfloat16"},
        "none": {"torch_dtype": "bfloat16", "master_weights": "none"},
    }.items():
        train(bfloat16_world.config(tmp_path / name, **FEW_STEPS | settings), SilentProgress())
        updates[name] = update_of(bfloat16_world, tmp_path / name / "checkpoint-10")
    size = updates["exact"].norm()
    assert (updates["masters"] - updates["exact"]).norm() < 0.1 * size
    assert (updates["none"] - updates["exact"]).norm() > 0.8 * size
    for name in updates:
        saved = load_file(tmp_path / name / "checkpoint-10" / "model.safetensors")
        assert {weight.dtype for weight in saved.values()} == {torch.bfloat16}
        config = json.loads((tmp_path / name / "checkpoint-10" / "config.json").read_text())
        assert config["dtype"] == "bfloat16"
        assert saved.keys() == load_file(Path(bfloat16_world.model) / "model.safetensors").keys()


@pytest.mark.parametrize("settings", [{}, {"master_weights": "kahan"}, {"freeze_vit": True, "freeze_aligner": True}])
def test_resumed_run_has_all_digits(settings: dict[str, Any], bfloat16_world: TinyWorld, tmp_path: Path) -> None:
    run_options = {
        "torch_dtype": "bfloat16",
        "save_steps": 2,
        "max_steps": 4,
        "gradient_accumulation_steps": 2,
    } | settings
    train(bfloat16_world.config(tmp_path / "whole", **run_options), SilentProgress())
    resumed = {"resume_from_checkpoint": str(tmp_path / "whole" / "checkpoint-2")}
    train(bfloat16_world.config(tmp_path / "resumed", **run_options, **resumed), SilentProgress())
    check_same_rest(tmp_path / "whole", tmp_path / "resumed", 2)
    masters = sorted((tmp_path / "whole").glob("*/" + MASTER_NAME))
    assert bool(masters) == ("master_weights" not in settings)


def test_compensated_steps_equal_those_in_float32() -> None:
    """Both are given the same gradients; without compensation nearly nothing would be left of so small a rate."""
    torch.manual_seed(0)
    start = (0.05 * torch.randn(64, 64)).bfloat16()
    exact, kahan, none = (
        torch.nn.Parameter(start.to(dtype, copy=True)) for dtype in (torch.float32, *[torch.bfloat16] * 2)
    )
    settings: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.999), "weight_decay": 0.1}
    optimizers = [torch.optim.AdamW([exact], **settings), KahanAdamW([kahan], **settings)]
    optimizers.append(torch.optim.AdamW([none], **settings))
    for _ in range(200):
        gradient = (torch.randn(64, 64) + 0.5).bfloat16()
        for parameter, optimizer in zip((exact, kahan, none), optimizers, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
            optimizer.step()
    change = exact.detach() - start.float()
    change_in_weights = kahan.detach().float() + optimizers[1].state[kahan]["lost"].float() - start.float()
    assert (change_in_weights - change).norm() < 0.02 * change.norm()
    assert (none.detach().float() - start.float() - change).norm() > 0.5 * change.norm()


@pytest.mark.parametrize("name", VISION_MODELS)
def test_frozen_and_trained_parts_may_differ_in_precision(name: str, tmp_path: Path) -> None:
    save_image_processor(name, str(tmp_path))
    spec = reduced_spec(name, str(tmp_path))
    batch = collate_packs(mixed_samples(name), spec)
    losses = []
    for frozen in itertools.product((False, True), repeat=3):
        if all(frozen):
            continue
        model = reduced_model(name).to(torch.bfloat16)
        set_attention(model)
        flags = dict(zip(("freeze_vit", "freeze_aligner", "freeze_llm"), frozen, strict=True))
        run = TrainConfig(model="m", cached_dataset=("c",), output_dir="o", train_type="full", **flags)
        make_trainable(model, run)
        with torch.autocast("cpu", torch.bfloat16):
            loss = HeadLoss(model).losses(model, batch).weighted_sum()
        loss.backward()
        losses.append(loss.item())
        for parameter in model.parameters():
            assert parameter.dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16)
    assert max(losses) - min(losses) < 0.02 * max(losses)


def test_options_without_effect_are_refused() -> None:
    def problems(**settings: Any) -> list[str]:
        options = {"model": "m", "cached_dataset": ("c",), "output_dir": "o", "master_weights": "kahan"}
        return TrainConfig(**options | settings).problems()

    assert any("adapters are always float32" in line for line in problems())
    assert any("FSDP and DeepSpeed" in line for line in problems(train_type="full", fsdp=("full_shard",)))
    assert any("has its own AdamW" in line for line in problems(train_type="full", optim="sgd"))
    assert problems(train_type="full") == []


def test_experts_saved_one_by_one_are_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """transformers' Trainer would go on with those that training began with: the saved file has other names."""
    (tmp_path / "world").mkdir()
    tiny = make_tiny_text_world(tmp_path / "world")
    text = AutoConfig.from_pretrained(tiny.model)
    kept_names = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    sizes = {name: getattr(text, name) for name in kept_names} | {"num_hidden_layers": 1, "moe_intermediate_size": 32}
    mixture = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2))
    mixture.save_pretrained(tiny.model)
    tiny = dataclasses.replace(tiny, cache=str(tmp_path / "cache"))
    export_rows(tiny, tiny.cache)
    run_options: dict[str, Any] = {"gradient_accumulation_steps": 1, "save_steps": 1, "max_steps": 2}
    run_options |= {"freeze_vit": True, "freeze_aligner": True, "num_train_epochs": 2.0}
    train(tiny.config(tmp_path / "whole", **run_options), SilentProgress())
    resumed = {"resume_from_checkpoint": str(tmp_path / "whole" / "checkpoint-1")}
    logger = logging.getLogger("transformers.trainer")
    logger.addHandler(caplog.handler)
    train(tiny.config(tmp_path / "resumed", **run_options, **resumed), SilentProgress())
    logger.removeHandler(caplog.handler)
    assert not [record for record in caplog.records if "keys in the checkpoint" in record.getMessage()]
    check_same_rest(tmp_path / "whole", tmp_path / "resumed", 1)


def test_weights_trained_beside_adapters_are_float32(bfloat16_world: TinyWorld, tmp_path: Path) -> None:
    """Biases and whole modules that a LoRA run trains; the weights that stay keep the checkpoint's 16 bits."""
    run_options: dict[str, Any] = {"train_type": "lora", "lora_bias": "all", "modules_to_save": ("lm_head",)}
    config = bfloat16_world.config(tmp_path, **run_options | {"max_steps": 2, "bf16": True})
    model = AutoModelForImageTextToText.from_pretrained(bfloat16_world.model, dtype=torch.bfloat16)
    trained = make_trainable(model, config)
    assert {weight.dtype for weight in trained.parameters() if weight.requires_grad} == {torch.float32}
    # Scales of norms go along with their biases.
    frozen = [weight for weight in trained.parameters() if not weight.requires_grad and weight.ndim > 1]
    assert frozen
    assert {weight.dtype for weight in frozen} == {torch.bfloat16}
    train(config, SilentProgress())
    weights = load_file(tmp_path / "checkpoint-2" / "adapter_model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
