"""The estimate of memory, and what a run says of itself."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from packtool.progress import SilentProgress
from packtool.train.model import loss, memory
from packtool.train.model.load import model_without_weights
from packtool.train.model.memory import estimate_memory, traced_bytes
from packtool.train.model.precision import quantized_layers
from packtool.train.prepare.figures import RankTokens
from packtool.train.prepare.result import TrainResult, next_lines, settings_lines
from packtool.train.run import train
from tests.batch.reduced import reduced_config
from tests.train.tiny import TinyWorld

GIB = 2**30


def estimate(tiny: TinyWorld, world_size: int = 4, **settings: Any) -> Any:
    config, model_config = tiny.config("out", **settings), reduced_config("qwen3_vl")
    model = model_without_weights(config, model_config, torch.bfloat16)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    return estimate_memory(config, model, model_config, dtype=torch.bfloat16, world_size=world_size)


def test_full_training_and_its_sharding(tiny: TinyWorld) -> None:
    plain = estimate(tiny)
    assert plain.num_parameters == plain.num_trainable > 0
    assert plain.weights * GIB == plain.gradients * GIB == 4 * plain.num_parameters
    assert plain.optimizer == 2 * plain.weights
    full = estimate(tiny, fsdp=("full_shard",))
    assert (full.weights, full.gradients, full.optimizer) == tuple(
        part / 4 for part in (plain.weights, plain.gradients, plain.optimizer)
    )
    zero2 = estimate(tiny, deepspeed="zero2")
    assert (zero2.weights, zero2.gradients) == (plain.weights / 2, plain.gradients / 8)
    assert zero2.optimizer == plain.weights * 3 / 4
    kahan, none = (estimate(tiny, master_weights=master_weights) for master_weights in ("kahan", "none"))
    assert [
        memory_estimate.weights + memory_estimate.gradients + memory_estimate.optimizer
        for memory_estimate in (plain, kahan, none)
    ] == [bytes_per_parameter * plain.num_parameters / GIB for bytes_per_parameter in (16, 12, 8)]
    assert f"{plain.total:.2f} GiB" in plain.sentence()


def test_activation_memory_is_proportional_to_tokens(tiny: TinyWorld) -> None:
    short, middle, long = (estimate(tiny, packing_length=length) for length in (2048, 4096, 8192))
    assert long.activations - middle.activations == pytest.approx(2 * (middle.activations - short.activations))
    assert estimate(tiny, packing_length=8192, gradient_checkpointing=True).activations < long.activations
    batch = estimate(tiny, packing_length=2048, per_device_train_batch_size=4)
    assert (batch.num_tokens, batch.activations) == (8192, long.activations)


def test_adapters_have_few_trained_weights(tiny: TinyWorld) -> None:
    adapted = estimate(tiny, train_type="lora")
    assert 0 < adapted.num_trainable < 0.5 * adapted.num_parameters
    assert adapted.gradients < adapted.weights


def test_dry_run_counts_the_trained_parameters_of_a_run(tiny: TinyWorld, tmp_path: Path) -> None:
    dry = train(tiny.config(tmp_path, train_type="lora", dry_run=True), SilentProgress())
    real = train(tiny.config(tmp_path, train_type="lora", max_steps=1), SilentProgress())
    assert dry.num_trainable_parameters == real.num_trainable_parameters
    assert dry.num_parameters == real.num_parameters


def test_settings_are_shown_as_options(tiny: TinyWorld) -> None:
    (line,) = settings_lines(
        tiny.config("out", packing=False, fsdp=("full_shard", "offload"), training={"optim": "sgd"})
    )
    assert "--fsdp full_shard offload" in line
    assert "--packing false" in line
    assert "--freeze-vit false" in line
    assert "sgd" in line
    assert "--seed" not in line


@pytest.mark.parametrize(
    ("train_type", "sees", "expected_text"),
    [("lora", True, "PeftModel"), ("full", True, "ImageText"), ("full", False, "CausalLM")],
)
def test_errors_name_a_remedy(train_type: Any, sees: bool, expected_text: str, tiny: TinyWorld, tmp_path: Path) -> None:
    counts = dict.fromkeys(("num_samples", "filtered", "num_packs", "steps", "steps_without_packing"), 1)
    counts |= dict.fromkeys(("num_empty_micro_batches", "num_processes", "target_tokens"), 1)
    sizes: Any = {"max_length": 1, "packing_length": 1, "fill": 1.0, "samples_per_pack": 1.0, "packing": True}
    result = TrainResult(**counts, **sizes, output_dir="o", checkpoint="o/checkpoint 3")
    model = tiny.model
    if not sees:
        model = str(tmp_path)
        reduced_config("qwen3").save_pretrained(model)
    evaluate, load, *_ = next_lines(tiny.config("o", train_type=train_type, model=model), result)
    assert "packtool eval --model 'o/checkpoint 3'" in evaluate
    assert expected_text in load


def test_heads_with_all_logits_are_counted(tiny: TinyWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a model's logits are treated behind its head, they are made for all targets at once."""
    config, num_tokens = tiny.config("out"), 1 << 16
    plain = reduced_config("qwen3_vl")
    plain.get_text_config().vocab_size = 4096
    treated = copy.deepcopy(plain)
    treated.final_logit_softcapping = 30.0
    vocab_size = plain.get_text_config().vocab_size
    monkeypatch.setattr(loss, "CHUNK_LOGITS", 1000 * vocab_size)
    some_logits, all_at_once = (
        traced_bytes(config, each, torch.float32, RankTokens(computed=num_tokens)) for each in (plain, treated)
    )
    assert all_at_once - some_logits > 4 * vocab_size * num_tokens // 2


def test_the_check_before_training_is_counted(tiny: TinyWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "traced_bytes", lambda *_: 0)
    checked, unchecked = (estimate(tiny, verify_packing=on).activations * GIB for on in (True, False))
    assert (checked, unchecked) == (3 * 4 * 96 * 4 * 32, 0)


def test_gathered_layers_are_counted_with_sharded_weights(tiny: TinyWorld) -> None:
    assert estimate(tiny).gathered == estimate(tiny, deepspeed="zero2").gathered == 0
    full = estimate(tiny, fsdp=("full_shard",))
    assert 0 < full.gathered * GIB <= 2 * 3 * full.num_parameters
    assert "gathered layers" in full.sentence()
    shard_grad_op = estimate(tiny, fsdp=("shard_grad_op",))
    assert shard_grad_op.gathered * GIB >= 2 * shard_grad_op.num_parameters
    assert shard_grad_op.gathered > full.gathered
    assert (shard_grad_op.weights, shard_grad_op.gradients, shard_grad_op.optimizer) == (
        full.weights,
        full.gradients,
        full.optimizer,
    )


def test_sharded_weights_of_four_bits_are_counted(tiny: TinyWorld) -> None:
    """Each rank holds its share of the weights, all scales, and gathers layers in four bits."""
    settings = {"train_type": "lora", "quant_bits": 4, "freeze_vit": True, "freeze_aligner": True}
    plain, full = estimate(tiny, **settings), estimate(tiny, **settings, fsdp=("full_shard",))
    config = tiny.config("out", **settings)
    model = model_without_weights(config, reduced_config("qwen3_vl"), torch.bfloat16)
    num_weights = sum(layer.weight.numel() for layer in quantized_layers(model, "qwen3_vl", config))
    scales = round(num_weights * (1 / 64 + 4 / 64 / 256))
    assert full.weights * GIB == pytest.approx((plain.weights * GIB - scales) / 4 + scales)
    unquantized = estimate(tiny, **settings | {"quant_bits": None}, fsdp=("full_shard",))
    # The two layers of the model are gathered at the same time.
    assert (unquantized.gathered - full.gathered) * GIB == num_weights * 1.5
    assert estimate(tiny, **settings, deepspeed="zero3").weights == full.weights


def test_buckets_of_gradients_are_counted(tiny: TinyWorld) -> None:
    """Data-parallel ranks exchange copies; one process, and ranks that shard, have none."""
    plain = estimate(tiny)
    assert plain.buckets == plain.gradients
    assert "gradient buckets" in plain.sentence()
    assert estimate(tiny, world_size=1).buckets == 0
    assert estimate(tiny, deepspeed="zero2").buckets == estimate(tiny, fsdp=("full_shard",)).buckets == 0


def test_zero_stage_is_read_from_a_file(tiny: TinyWorld, tmp_path: Path) -> None:
    path = tmp_path / "stages.json"
    path.write_text('{"zero_optimization": {"stage": 2}}')
    assert estimate(tiny, deepspeed=str(path)) == estimate(tiny, deepspeed="zero2")


def test_estimate_without_activations_says_so(tiny: TinyWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    def asks_for_numbers(*_: Any, **__: Any) -> None:
        raise RuntimeError("a number is needed on the host")

    monkeypatch.setattr(memory, "trace_pass", asks_for_numbers)
    estimated = estimate(tiny)
    assert estimated.activations is None
    assert estimated.sentence().endswith("plus activations, which cannot be estimated for this model")
