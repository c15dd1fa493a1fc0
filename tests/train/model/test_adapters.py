"""Adapters other than LoRA: what is trained, saved, continued and merged, and what is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from packtool.batch.collate import collate_packs
from packtool.config.commands import MergeConfig
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError
from packtool.progress import SilentProgress
from packtool.train.model.load import auto_class, model_without_weights
from packtool.train.model.loss import HeadLoss, target_losses
from packtool.train.model.memory import parameter_sizes
from packtool.train.model.merge import merge_adapter
from packtool.train.model.precision import convert_trained_to_float32
from packtool.train.model.trainable import make_trainable, split_by_rate
from packtool.train.run import train
from tests.attention.hybrids import hybrid_config
from tests.batch.reduced import mixed_samples, reduced_model, reduced_spec, save_image_processor
from tests.train.model.test_experts import mixture  # noqa: F401
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
    convert_trained_to_float32(adapted)
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


EXPERTS: dict[str, Any] = {"target_parameters": ("experts.gate_up_proj", "experts.down_proj"), "lora_dropout": 0.0}


class NotedProgress(SilentProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, line: str) -> None:
        self.notes.append(line)


def test_adapters_on_routed_experts_are_trained_loaded_and_merged(mixture: TinyWorld, tmp_path: Path) -> None:  # noqa: F811
    settings = {"train_type": "lora", "target_modules": (), "learning_rate": 1e-2, "max_steps": 2} | EXPERTS
    lines = NotedProgress()
    train(mixture.config(tmp_path, **settings), lines)
    assert any("adapters on parameters" in line and "experts.down_proj, experts.gate" in line for line in lines.notes)
    state = load_file(tmp_path / "last" / "adapter_model.safetensors")
    assert all(".experts." in name for name in state)
    assert all(weight.abs().sum() > 0 for weight in state.values()), "every expert's B matrix was trained"
    base = logits(AutoModelForImageTextToText.from_pretrained(mixture.model))
    model = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(mixture.model), tmp_path / "last")
    expected = logits(model)
    assert (expected - base).abs().max() > 1e-3
    merge_adapter(MergeConfig(adapter=str(tmp_path / "last"), output=str(tmp_path / "merged")), SilentProgress())
    merged = logits(AutoModelForImageTextToText.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_moe_text"])
def test_gradients_of_adapters_on_experts_are_those_of_their_weights(kind: str) -> None:
    """With B = 0 and scale s, the gradient of B is s times the gradient of the weight times A transposed."""
    settings = EXPERTS | {"target_modules": (), "gradient_checkpointing": False}
    run = TrainConfig(model="", cached_dataset=("",), output_dir="", **settings)
    torch.manual_seed(0)
    model: Any = auto_class(hybrid_config(kind)).from_config(hybrid_config(kind))
    weight = model.model.layers[0].mlp.experts.down_proj
    ids = torch.arange(40)[None]
    model.train()(input_ids=ids, labels=ids).loss.backward()
    full = weight.grad.clone()
    adapted = make_trainable(model, run)
    adapted.zero_grad()
    adapted.train()(input_ids=ids, labels=ids).loss.backward()
    named = {name: each for name, each in adapted.named_modules() if getattr(each, "parameter_name", "") == "down_proj"}
    wrapper = named[next(name for name in named if ".layers.0." in name)]
    rank, scale = run.lora_rank, wrapper.scaling["default"]
    num_experts, hidden, inner = full.shape
    lora_a = wrapper.lora_A["default"].weight.view(num_experts, rank, inner)
    expected = scale * torch.einsum("eoi,eri->oer", full, lora_a)
    gradient = wrapper.lora_B["default"].weight.grad.view(hidden, rank, num_experts).transpose(1, 2)
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-6)


def test_parameters_that_cannot_be_adapted_are_refused() -> None:
    config = TrainConfig(model="m", cached_dataset=("c",), output_dir="o", target_parameters=("experts.down_proj",))
    assert any("requires --lora-dropout 0" in problem for problem in config.problems())
    with pytest.raises(ConfigError, match=r"--target-parameters experts\.down: the model has no matrix of this name"):
        make_trainable(reduced_model("qwen3"), replace(config, target_parameters=("experts.down",), lora_dropout=0.0))


def test_pissa_adapters_load_onto_the_base_model_and_merge(tiny: TinyWorld, tmp_path: Path) -> None:
    settings = {"train_type": "lora", "init_weights": "pissa", "learning_rate": 1e-2, "max_steps": 2}
    train(tiny.config(tmp_path, **settings), SilentProgress())
    adapter, base = tmp_path / "last", AutoModelForImageTextToText.from_pretrained(tiny.model)
    before = logits(base)
    expected = logits(PeftModel.from_pretrained(base, adapter))
    assert 1e-3 < (expected - before).abs().max() < 1, "training has changed it a little"
    merge_adapter(MergeConfig(adapter=str(adapter), output=str(tmp_path / "merged")), SilentProgress())
    merged = logits(AutoModelForImageTextToText.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(merged, expected, rtol=1e-3, atol=1e-3)


ENDS: dict[str, Any] = {"train_type": "lora", "target_modules": ("all-linear", "embed_tokens", "lm_head")}


@pytest.mark.parametrize("tied", [True, False])
def test_adapters_on_embeddings_and_head_are_trained_and_merged(tied: bool, tiny: TinyWorld, tmp_path: Path) -> None:
    """Also where head and embeddings share their weights: each then has weights of its own."""
    world = tiny
    if not tied:
        model = AutoModelForImageTextToText.from_pretrained(tiny.model)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 1.5)
        model.config.tie_word_embeddings = model.config.text_config.tie_word_embeddings = False
        shutil.copytree(tiny.model, tmp_path / "model")
        model.save_pretrained(tmp_path / "model")
        world = replace(tiny, model=str(tmp_path / "model"))
    train(world.config(tmp_path / "run", **ENDS, learning_rate=1e-2, max_steps=2), SilentProgress())
    adapter = tmp_path / "run" / "last"
    state = load_file(adapter / "adapter_model.safetensors")
    for name in ("lm_head.lora_B.weight", "embed_tokens.lora_embedding_B"):
        assert any(key.endswith(name) and weight.abs().sum() > 0 for key, weight in state.items()), name
    expected = logits(PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(world.model), adapter))
    merge_adapter(MergeConfig(adapter=str(adapter), output=str(tmp_path / "merged")), SilentProgress())
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged")
    assert merged.lm_head.weight.data_ptr() != merged.get_input_embeddings().weight.data_ptr()
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)


def test_losses_in_the_head_include_its_adapter() -> None:
    """And so do the gradients, in chunks or not; without the adapter, the losses would be others."""
    model = reduced_model("qwen3")
    run = TrainConfig(model="", cached_dataset=("",), output_dir="", **ENDS, lora_dropout=0.0)
    adapted: Any = make_trainable(model, run)
    head = adapted.get_base_model().lm_head
    torch.manual_seed(0)
    torch.nn.init.normal_(head.lora_B["default"].weight, std=0.1)
    batch = collate_packs(mixed_samples("qwen3"), reduced_spec("qwen3"))
    results = []
    for chunk_logits in (None, 200):
        adapted.zero_grad()
        head_loss = HeadLoss(adapted, chunk_logits)
        losses = head_loss.losses(adapted, batch)
        losses.losses.sum().backward()
        head_loss.remove()
        results.append((losses.losses.detach(), head.lora_B["default"].weight.grad.clone()))
    adapted.zero_grad()
    expected = target_losses(adapted, batch, label_logits_only=False)
    expected.losses.sum().backward()
    with adapted.disable_adapter():
        without = target_losses(adapted, batch, label_logits_only=False)
    assert (without.losses - expected.losses).abs().max() > 1e-2
    for values, gradient in results:
        torch.testing.assert_close(values, expected.losses.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(gradient, head.lora_B["default"].weight.grad, rtol=1e-3, atol=1e-5)


TOWERS: dict[str, Any] = {"train_type": "lora", "modules_to_save": ("vision-tower", "aligner"), "lora_dropout": 0.0}


def test_towers_in_full_beside_adapters_have_the_gradients_of_full_training(tmp_path: Path) -> None:
    """New adapters have no effect, so the first step's gradients are equal; each part has its own learning rate."""
    save_image_processor("qwen3_vl", str(tmp_path))
    batch = collate_packs(mixed_samples("qwen3_vl"), reduced_spec("qwen3_vl", str(tmp_path)))
    full = {"train_type": "full", "freeze_vit": False, "freeze_aligner": False, "freeze_llm": True}
    gradients = []
    for settings in (full, TOWERS | {"vit_lr": 1e-3, "aligner_lr": 1e-2, "learning_rate": 1e-1}):
        run = TrainConfig(model="", cached_dataset=("",), output_dir="", **settings)
        model: Any = make_trainable(reduced_model("qwen3_vl"), run)
        target_losses(model, batch, label_logits_only=False).weighted_sum().backward()
        trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        gradients.append({name: weight.grad for name, weight in trained.items() if "lora_" not in name})
    expected, actual = gradients
    prefix, infix = "base_model.model.model.visual.", "modules_to_save.default."
    assert actual.keys() == {name.replace("model.visual.", prefix + infix, 1) for name in expected}
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name.replace("model.visual.", prefix + infix, 1)], gradient)
    optimizer = torch.optim.SGD(trained.values(), lr=1e-1)
    split_by_rate(optimizer, model, model, run)
    rates = {id(weight): group["lr"] for group in optimizer.param_groups for weight in group["params"]}
    for name, weight in trained.items():
        is_aligner = ".merger." in name or ".deepstack_merger_list." in name
        assert rates[id(weight)] == (1e-1 if "lora_" in name else 1e-2 if is_aligner else 1e-3), name


def test_towers_in_full_beside_adapters_load_and_merge(tiny: TinyWorld, tmp_path: Path) -> None:
    frozen = {"freeze_vit": True, "freeze_aligner": True}
    train(tiny.config(tmp_path, **TOWERS, **frozen, learning_rate=1e-3, max_steps=2), SilentProgress())
    adapter = tmp_path / "last"
    base = AutoModelForImageTextToText.from_pretrained(tiny.model)
    before = {name: weight.clone() for name, weight in base.named_parameters()}
    adapted: Any = PeftModel.from_pretrained(base, adapter)
    merge_adapter(MergeConfig(adapter=str(adapter), output=str(tmp_path / "merged")), SilentProgress())
    merged = dict(AutoModelForImageTextToText.from_pretrained(tmp_path / "merged").named_parameters())
    unloaded = dict(adapted.merge_and_unload().named_parameters())
    assert merged.keys() == unloaded.keys() == before.keys()
    for name, weight in merged.items():
        torch.testing.assert_close(weight, unloaded[name], rtol=1e-4, atol=1e-5)
    changed = {name for name, weight in merged.items() if (weight - before[name]).abs().max() > 1e-4}
    assert {name for name in before if ".visual." in name and name.endswith("proj.weight")} <= changed
    continued = TOWERS | frozen | {"adapters": (str(adapter),), "modules_to_save": (), "max_steps": 2}
    train(tiny.config(tmp_path / "continued", **continued), SilentProgress())
    states = [load_file(each / "adapter_model.safetensors") for each in (adapter, tmp_path / "continued" / "last")]
    assert states[0].keys() == states[1].keys()
    assert any(".visual." in name and not torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_towers_that_a_model_lacks_are_named() -> None:
    run = TrainConfig(model="", cached_dataset=("",), output_dir="", **TOWERS)
    with pytest.raises(ConfigError, match="--modules-to-save vision-tower: the model has no module of this name"):
        make_trainable(reduced_model("qwen3"), run)


@pytest.mark.parametrize("kind", [*ADAPTERS, "towers", "head"])
def test_resumed_runs_have_the_weights_of_uninterrupted_ones(kind: str, tiny: TinyWorld, tmp_path: Path) -> None:
    frozen = {"freeze_vit": True, "freeze_aligner": True}
    settings = settings_of(kind) if kind in ADAPTERS else (TOWERS | frozen if kind == "towers" else ENDS)
    settings |= {"learning_rate": 1e-2, "max_steps": 3, "save_steps": 2}
    train(tiny.config(tmp_path / "whole", **settings), SilentProgress())
    checkpoint = {"resume_from_checkpoint": str(tmp_path / "whole" / "checkpoint-2")}
    train(tiny.config(tmp_path / "resumed", **settings | checkpoint), SilentProgress())
    whole, resumed = (
        load_file(tmp_path / name / "last" / "adapter_model.safetensors") for name in ("whole", "resumed")
    )
    assert whole.keys() == resumed.keys()
    for name, weight in whole.items():
        torch.testing.assert_close(resumed[name], weight, rtol=1e-5, atol=1e-6)
    only_model = checkpoint | {"resume_only_model": True, "max_steps": 1}
    train(tiny.config(tmp_path / "again", **settings | only_model), SilentProgress())
    assert load_file(tmp_path / "again" / "last" / "adapter_model.safetensors").keys() == whole.keys()
