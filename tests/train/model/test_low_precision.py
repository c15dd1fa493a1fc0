"""Rounding of --qat and products of --fp8: values, gradients, untouched weights, and what is refused."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForImageTextToText

from packtool.config.train import TrainConfig
from packtool.encode.families import family_of
from packtool.errors import ConfigError
from packtool.progress import SilentProgress
from packtool.train.model.load import model_without_weights
from packtool.train.model.low_precision import enable_rounding
from packtool.train.model.trainable import make_trainable
from packtool.train.run import train
from tests.batch.reduced import reduced_model
from tests.forked import run_ranks
from tests.train.jobs import Job, run_jobs
from tests.train.tiny import TinyWorld, check_same_rest, read_metrics

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
RECIPES = ("int8-int4", "int4", "fp8-int4", "fp8", "mxfp4", "nvfp4")
INPUTS = torch.arange(24).reshape(1, -1)


def config(**settings: Any) -> TrainConfig:
    return TrainConfig(model="m", cached_dataset=("c",), output_dir="o", **{"train_type": "full"} | settings)


def of_torchao(recipe: str) -> Any:
    """torchao's configurations that quantize a trained model as docs/training.md says."""
    from torchao.prototype import mx_formats
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        Float8DynamicActivationInt4WeightConfig,
        Int4WeightOnlyConfig,
        Int8DynamicActivationIntxWeightConfig,
        PerGroup,
        PerRow,
    )

    fp4 = torch.float4_e2m1fn_x2
    return {
        "int8-int4": lambda: Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4, weight_granularity=PerGroup(32)
        ),
        "int4": lambda: Int4WeightOnlyConfig(group_size=32),
        "fp8-int4": Float8DynamicActivationInt4WeightConfig,
        "fp8": lambda: Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()),
        "mxfp4": lambda: mx_formats.MXDynamicActivationMXWeightConfig(activation_dtype=fp4, weight_dtype=fp4),
        "nvfp4": mx_formats.NVFP4DynamicActivationNVFP4WeightConfig,
    }[recipe]()


@pytest.mark.parametrize("recipe", RECIPES)
def test_text_layers_round_and_pass_gradients_to_unchanged_weights(recipe: str) -> None:
    model = reduced_model("qwen3_vl", packed=False)
    names = {name for name, _ in model.named_parameters()}
    weights = {name: weight.clone() for name, weight in model.named_parameters()}
    exact = model(input_ids=INPUTS).logits
    group = {"qat_group_size": 16} if recipe.endswith("int4") else {}
    trained = make_trainable(model, config(qat=recipe, **group))
    rounded = trained(input_ids=INPUTS).logits
    assert not torch.equal(rounded, exact)
    assert torch.cosine_similarity(rounded.flatten(), exact.flatten(), dim=0) > 0.5
    rounded.square().sum().backward()
    assert {name for name, _ in trained.named_parameters()} == names
    towers = family_of({"model_type": "qwen3_vl"}).towers
    for name, module in trained.named_modules():
        if isinstance(module, nn.Linear):
            assert (type(module) is nn.Linear) == (towers.part_of(name) != "language model"), name
    for name, weight in trained.named_parameters():
        assert torch.equal(weight, weights[name]), name
        if towers.part_of(name) == "language model":
            assert weight.grad is not None, name
    enable_rounding(trained, False)
    assert torch.equal(trained(input_ids=INPUTS).logits, exact)


@pytest.mark.parametrize("recipe", RECIPES)
def test_layer_computes_what_torchao_prepares(recipe: str) -> None:
    """Values and gradients are those of torchao's QATConfig with the configuration that quantizes later."""
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    torch.manual_seed(0)
    model = reduced_model("qwen3", packed=False)
    proj: Any = model.model.layers[0].mlp.down_proj
    size = 128 if recipe == "fp8-int4" else 64
    proj.weight, proj.in_features = nn.Parameter(torch.randn(32, size)), size
    expected_layer = nn.Sequential(nn.Linear(size, 32, bias=False))
    expected_layer[0].weight.data = proj.weight.data.clone()
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and module is not proj and size == 128:
            model.set_submodule(name, nn.Identity())
    group = {"qat_group_size": 32} if recipe in ("int8-int4", "int4") else {}
    if recipe == "nvfp4":  # its layer of torchao needs a Blackwell GPU; tokens have scales of their own here
        weight = proj.weight.detach()
        scale = weight.abs().max() / (448 * 6)
        rounded = NVFP4Tensor.to_nvfp4(weight, 16, scale).dequantize(torch.float32)
        expected_layer[0].weight.data = rounded
    else:
        base = of_torchao(recipe)
        if recipe == "int4":
            base.int4_packing_format = "plain"
        if recipe == "mxfp4":
            base.kernel_preference = KernelPreference.EMULATED
        quantize_(expected_layer, QATConfig(base, step="prepare"))
    layer = make_trainable(model, config(qat=recipe, **group)).model.layers[0].mlp.down_proj
    values = torch.randn(5, size)
    inputs, expected_inputs = (values.clone().requires_grad_() for _ in range(2))
    rounded_inputs = expected_inputs
    if recipe == "nvfp4":
        tokens = [NVFP4Tensor.to_nvfp4(token[None], 16, token.abs().max() / (448 * 6)) for token in values]
        exact_inputs = torch.cat([token.dequantize(torch.float32) for token in tokens])
        rounded_inputs = expected_inputs + (exact_inputs - values)
    output, expected_output = layer(inputs), expected_layer(rounded_inputs)
    torch.testing.assert_close(output, expected_output, rtol=1e-4, atol=1e-4)
    for each in (output, expected_output):
        each.sum().backward()
    torch.testing.assert_close(inputs.grad, expected_inputs.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recipe", RECIPES)
def test_tokens_do_not_depend_on_their_neighbours(recipe: str) -> None:
    group = {"qat_group_size": 16} if recipe.endswith("int4") else {}
    model = make_trainable(reduced_model("qwen3", packed=False), config(qat=recipe, **group))
    layer: Any = model.model.layers[0].mlp.up_proj
    inputs = torch.randn(6, layer.in_features)
    inputs[3:] *= 100
    torch.testing.assert_close(layer(inputs)[:3], layer(inputs[:3]), rtol=0, atol=1e-6)


def test_resumed_run_rounds_from_the_same_step(tiny: TinyWorld, tmp_path: Path) -> None:
    settings = {"qat": "int8-int4", "qat_group_size": 16, "qat_start_step": 3, "max_steps": 4, "save_steps": 2}
    train(tiny.config(tmp_path / "all", **settings), SilentProgress())
    checkpoint = str(tmp_path / "all" / "checkpoint-2")
    train(tiny.config(tmp_path / "resumed", resume_from_checkpoint=checkpoint, **settings), SilentProgress())
    check_same_rest(tmp_path / "all", tmp_path / "resumed", 2)
    train(tiny.config(tmp_path / "exact", max_steps=4), SilentProgress())
    losses, exact = ([line["loss"] for line in read_metrics(tmp_path / name)] for name in ("all", "exact"))
    assert losses[:3] == exact[:3]
    assert losses[3] != exact[3]
    saved = AutoModelForImageTextToText.from_pretrained(tmp_path / "all" / "last")
    assert not hasattr(saved.model.language_model.layers[0].mlp.up_proj, "weight_fake_quantizer")


@pytest.mark.parametrize("compiled", [False, True])
def test_float8_is_close_to_exact_training(compiled: bool, tiny: TinyWorld, tmp_path: Path) -> None:
    settings = {"max_steps": 4, "torch_compile": compiled, "torch_dtype": "bfloat16"}
    settings |= {"torch_compile_backend": "eager"} if compiled else {}
    for fp8 in (True, False):
        train(tiny.config(tmp_path / str(fp8), fp8=fp8, verify_packing=True, **settings), SilentProgress())
    losses, exact = ([line["loss"] for line in read_metrics(tmp_path / name)] for name in ("True", "False"))
    assert losses != exact
    assert losses == pytest.approx(exact, rel=0.05)


def test_float8_spares_head_and_odd_sizes() -> None:
    model: Any = make_trainable(reduced_model("qwen3_vl", packed=False), config(fp8=True))
    kinds = {name: type(module).__name__ for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert kinds["lm_head"] == "Linear"
    assert {kind for name, kind in kinds.items() if "visual" in name} == {"Linear"}
    assert "Float8Linear" in kinds.values()
    exact = reduced_model("qwen3_vl", packed=False)(input_ids=INPUTS).logits
    assert torch.cosine_similarity(model(input_ids=INPUTS).logits.flatten(), exact.flatten(), dim=0) > 0.98


def test_unsupported_combinations_are_refused() -> None:
    for settings, expected_text in [
        ({"qat": "int4", "train_type": "lora"}, "--qat int4 requires --train-type full"),
        ({"fp8": True, "train_type": "lora"}, "requires --train-type full"),
        ({"qat": "int4", "fp8": True}, "give only one"),
        ({"qat": "nvfp4", "qat_group_size": 32}, "whose format fixes the groups"),
        ({"qat_start_step": 3}, "--qat-start-step 3 requires --qat"),
        ({"fp8": True, "torch_dtype": "float16"}, "--fp8 true requires --torch-dtype bfloat16"),
    ]:
        assert any(expected_text in problem for problem in config(**settings).problems()), settings
    with pytest.raises(ConfigError, match="which groups of 48 do not divide"):
        make_trainable(reduced_model("qwen3", packed=False), config(qat="int4", qat_group_size=48))


def test_tied_weights_stay_tied_without_weights() -> None:
    settings = reduced_model("qwen3", packed=False).config
    settings.tie_word_embeddings = True
    model: Any = model_without_weights(config(qat="mxfp4"), settings, torch.bfloat16)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("settings", [{"qat": "int8-int4", "qat_group_size": 16}, {"fp8": True}], ids=str)
def test_two_processes_with_sharded_weights_train_like_one(
    settings: dict[str, Any], tiny: TinyWorld, tmp_path: Path
) -> None:
    settings = settings | {"max_steps": 3, "samples_per_step": 8}
    names: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp": {"fsdp": ("full_shard",)}}
    if importlib.util.find_spec("deepspeed") is not None:
        names |= {"zero2": {"deepspeed": "zero2"}, "zero3": {"deepspeed": "zero3"}}
    jobs: list[Job] = [("train", tmp_path / name, settings | extra) for name, extra in names.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        run_ranks(2, run_jobs, tiny, jobs, scratch=tmp_path)
    train(tiny.config(tmp_path / "alone", **settings), SilentProgress())
    expected = [line["loss"] for line in read_metrics(tmp_path / "alone")]
    for name in names:
        losses = [line["loss"] for line in read_metrics(tmp_path / name)]
        assert losses == pytest.approx(expected, rel=1e-4), name
