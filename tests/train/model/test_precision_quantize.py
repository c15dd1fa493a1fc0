"""Few bits under adapters: what is refused, what is saved, and gradients of the weights that the bits stand for."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel, PreTrainedConfig

from packtool.config.train import TrainConfig
from packtool.errors import ConfigError
from packtool.progress import SilentProgress
from packtool.train.model.load import load_model
from packtool.train.model.precision import bytes_saved_by_quantization, quantization_config, quantized_layers
from packtool.train.model.trainable import make_trainable
from packtool.train.run import train
from tests.batch.reduced import reduced_model
from tests.forked import run_ranks
from tests.train.jobs import Job, run_jobs
from tests.train.tiny import TinyWorld, check_same_rest, read_metrics

has_bitsandbytes = importlib.util.find_spec("bitsandbytes") is not None
needs_bitsandbytes = pytest.mark.skipif(not has_bitsandbytes, reason="needs bitsandbytes")


def config(**settings: Any) -> TrainConfig:
    return TrainConfig(model="m", cached_dataset=("c",), output_dir="o", **settings)


@pytest.mark.parametrize(
    ("settings", "expected_text"),
    [
        ({"quant_bits": 5}, "--quant-bits 5: use 4 or 8"),
        ({"quant_method": "bnb"}, "--quant-method bnb requires --quant-bits 4 or 8"),
        ({"quant_bits": 8, "bnb_4bit_quant_type": "fp4"}, "--bnb-4bit-quant-type fp4 requires --quant-bits 4"),
        ({"train_type": "full"}, "cannot be combined with --train-type full"),
        ({"init_weights": "pissa"}, "cannot be combined with --init-weights pissa"),
        ({"fsdp": ("full_shard",), "quant_bits": 8}, "cannot be combined with --fsdp: bitsandbytes does not shard"),
        ({"deepspeed": "zero3", "quant_bits": 8}, "cannot be combined with --deepspeed: bitsandbytes does not"),
    ],
)
def test_unsupported_options_of_quantization_are_refused(settings: dict[str, Any], expected_text: str) -> None:
    quantization = {} if "quant_method" in settings else {"quant_bits": 4}
    assert any(expected_text in problem for problem in config(**quantization | settings).problems())
    assert not config(quant_bits=4, quant_method="bnb").problems()


def test_sharding_of_four_bits_is_accepted(tmp_path: Path) -> None:
    for settings in ({"fsdp": ("full_shard",)}, {"deepspeed": "zero3"}, {"quant_bits": 8, "deepspeed": "zero2"}):
        assert config(**{"quant_bits": 4} | settings).problems() == []
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 3}}')
    with pytest.raises(ConfigError, match="bitsandbytes does not shard 8-bit weights"):
        quantization_config(
            config(quant_bits=8, deepspeed=str(tmp_path / "zero.json")), PreTrainedConfig(), torch.float32
        )


@needs_bitsandbytes
def test_sharded_weights_are_stored_in_the_type_of_the_computation() -> None:
    def storage(**settings: Any) -> Any:
        model_config = reduced_model("qwen3").config
        made = quantization_config(config(quant_bits=4, **settings), model_config, torch.float32, torch.bfloat16)
        assert made is not None
        return made.bnb_4bit_quant_storage

    assert storage() == storage(deepspeed="zero2") == torch.uint8
    assert storage(fsdp=("full_shard",)) == storage(deepspeed="zero3") == torch.bfloat16


@needs_bitsandbytes
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_processes_with_sharded_weights_train_like_one(dtype: str, tiny: TinyWorld, tmp_path: Path) -> None:
    """Also after a resume; in bfloat16 the stored bytes of some weights are those of NaN, and must stay as they are."""
    settings = {"train_type": "lora", "quant_bits": 4, "lora_dropout": 0.0, "freeze_vit": True, "freeze_aligner": True}
    settings |= {"torch_dtype": dtype, "max_steps": 3, "save_steps": 2, "samples_per_step": 8}
    names: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp": {"fsdp": ("full_shard",)}}
    names["resumed"] = names["fsdp"] | {"resume_from_checkpoint": str(tmp_path / "fsdp" / "checkpoint-2")}
    if importlib.util.find_spec("deepspeed") is not None:
        names |= {"zero2": {"deepspeed": "zero2"}, "zero3": {"deepspeed": "zero3"}}
    jobs: list[Job] = [("train", tmp_path / name, settings | extra) for name, extra in names.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        run_ranks(2, run_jobs, tiny, jobs, scratch=tmp_path)
    train(tiny.config(tmp_path / "alone", **settings), SilentProgress())
    expected = [line["loss"] for line in read_metrics(tmp_path / "alone")]
    assert len(expected) == 3
    for name in names:
        losses = [line["loss"] for line in read_metrics(tmp_path / name)]
        assert losses == pytest.approx(expected[-len(losses) :], rel=1e-5 if dtype == "float32" else 2e-3), name
    check_same_rest(tmp_path / "fsdp", tmp_path / "resumed", 2)


@pytest.mark.skipif(has_bitsandbytes, reason="is about its absence")
def test_missing_bitsandbytes_is_named() -> None:
    with pytest.raises(ConfigError, match="--quant-bits 4: bitsandbytes is not installed"):
        quantization_config(config(quant_bits=4), PreTrainedConfig(), torch.float32)


def test_towers_and_head_are_not_quantized() -> None:
    """And adapters, of which a model may have some already."""
    options = config(quant_bits=4, freeze_vit=False, freeze_aligner=False)
    model = reduced_model("qwen3_vl")
    bare = quantized_layers(model, "qwen3_vl", options)
    names = {name for name, module in model.named_modules() if any(module is layer for layer in bare)}
    assert {name.rpartition(".")[2] for name in names} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    assert all(".language_model." in name for name in names)
    assert len(quantized_layers(make_trainable(model, options), "qwen3_vl", options)) == len(bare)
    assert quantized_layers(model, "qwen3_vl", config()) == []


def test_saved_bytes_equal_a_count_by_hand() -> None:
    layers = [torch.nn.Linear(128, 64), torch.nn.Linear(64, 256)]
    numbers = 128 * 64 + 64 * 256
    assert bytes_saved_by_quantization(layers, config(quant_bits=8), 2) == numbers * 1 - 4 * (64 + 256)
    assert bytes_saved_by_quantization(layers, config(quant_bits=4, bnb_4bit_use_double_quant=False), 2) == numbers * (
        1.5 - 4 / 64
    )
    twice = bytes_saved_by_quantization(layers, config(quant_bits=4), 2) - numbers * (1.5 - 4 / 64)
    assert twice * 8 / numbers == pytest.approx(0.373, abs=1e-3), "the paper's 0.373 bits a weight"


@needs_bitsandbytes
@pytest.mark.parametrize("bits", [4, 8])
def test_gradients_equal_those_of_dequantized_weights(tmp_path: Path, bits: int) -> None:
    """Also after an evaluation, in which bitsandbytes would like to turn to an order without a backward pass."""
    options = config(quant_bits=bits, lora_dropout=0.0)
    reduced_model("qwen3").save_pretrained(tmp_path)
    settings = reduced_model("qwen3").config
    models = [
        load_model(str(tmp_path), settings, dtype=torch.float32, packing=False, quantization=quantization)
        for quantization in (options, None)
    ]
    for quantized_layer, full_layer in zip(
        *(quantized_layers(model, "qwen3", options) for model in models), strict=True
    ):
        restored = (
            quantized_layer(torch.eye(quantized_layer.in_features)).T.detach()
            if bits == 4
            else _restored(quantized_layer)
        )
        full_layer.weight.data.copy_(restored)
    inputs = torch.arange(24).reshape(1, -1)
    gradients_by_model = []
    for model in models:
        torch.manual_seed(0)
        adapted = make_trainable(model, options)
        adapted.eval()
        adapted(input_ids=inputs)
        adapted.train()
        adapted(input_ids=inputs, labels=inputs).loss.backward()
        gradients_by_model.append([weight.grad for weight in adapted.parameters() if weight.requires_grad])
    for gradient, expected_gradient in zip(*gradients_by_model, strict=True):
        # Eight bits round what comes in, too.
        torch.testing.assert_close(
            gradient, expected_gradient, rtol=0, atol=1e-5 if bits == 4 else 0.05 * float(expected_gradient.abs().max())
        )
    assert any(float(gradient.abs().max()) > 0 for gradient in gradients_by_model[0])


@needs_bitsandbytes
def test_stored_quantization_is_used_and_must_match_the_options(tmp_path: Path) -> None:
    reduced_model("qwen3").save_pretrained(tmp_path / "full")
    settings, options = reduced_model("qwen3").config, config(quant_bits=4)
    inputs = torch.arange(24).reshape(1, -1)

    def load(directory: Path, model_config: PreTrainedConfig) -> Any:
        return load_model(str(directory), model_config, dtype=torch.float32, packing=False, quantization=options)

    quantized_now = load(tmp_path / "full", settings)
    quantized_now.save_pretrained(tmp_path / "quantized")
    stored = AutoConfig.from_pretrained(tmp_path / "quantized")
    quantized_before = load(tmp_path / "quantized", stored)
    assert torch.equal(quantized_before(input_ids=inputs).logits, quantized_now(input_ids=inputs).logits)
    make_trainable(quantized_before, options)(input_ids=inputs, labels=inputs).loss.backward()
    for contradiction, expected_text in [
        (config(quant_bits=8), "already quantized .bitsandbytes.: load_in_8bit is False, not True"),
        (config(quant_bits=4, bnb_4bit_quant_type="fp4"), "bnb_4bit_quant_type is nf4, not fp4"),
        (config(quant_bits=4, fsdp=("full_shard",)), "bnb_4bit_quant_storage is uint8, not bfloat16"),
    ]:
        with pytest.raises(ConfigError, match=expected_text):
            quantization_config(contradiction, stored, torch.float32, torch.bfloat16)


@pytest.mark.parametrize("bits", [None, pytest.param(4, marks=needs_bitsandbytes)])
def test_transposed_linear_layers_are_adapted_quantized_and_merged(bits: int | None, tmp_path: Path) -> None:
    """GPT-2's layers are of the class Conv1D, whose weights are transposed."""
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=4, attn_pdrop=0, resid_pdrop=0))
    gpt2.save_pretrained(tmp_path)
    options = config(
        target_modules=("c_fc", "c_attn", "c_proj"), lora_dropout=0.0, init_weights="false", quant_bits=bits
    )
    if bits:
        assert len(quantized_layers(gpt2, "gpt2", options)) == 8
        assert (
            bytes_saved_by_quantization(quantized_layers(gpt2, "gpt2", config(quant_bits=8)), config(quant_bits=8), 2)
            > 0
        )
    model = load_model(
        str(tmp_path), gpt2.config, dtype=torch.float32, packing=False, quantization=options if bits else None
    )
    adapted = make_trainable(model, options).eval()
    inputs = torch.arange(24).reshape(1, -1)
    adapted(input_ids=inputs, labels=inputs).loss.backward()
    trained = [weight for weight in adapted.parameters() if weight.requires_grad]
    assert len(trained) == 16
    assert all(weight.grad is not None for weight in trained)
    if not bits:
        expected = adapted(input_ids=inputs).logits
        assert not torch.allclose(expected, gpt2.eval()(input_ids=inputs).logits)
        torch.testing.assert_close(adapted.merge_and_unload()(input_ids=inputs).logits, expected, rtol=0, atol=1e-4)


def _restored(layer: Any) -> torch.Tensor:
    scales = layer.weight.SCB if layer.weight.SCB is not None else layer.state.SCB
    return layer.weight.data.float() * scales[:, None] / 127
