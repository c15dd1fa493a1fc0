"""The estimate of memory, from sizes alone, and what a run says of itself."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import packtool.train.model.head_loss as head_loss
from packtool.progress import SilentProgress
from packtool.train.loop.result import TrainResult, next_lines, settings_lines
from packtool.train.model.memory import estimate_memory, model_without_weights
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
    second = estimate(tiny, deepspeed="zero2")
    assert (second.weights, second.gradients) == (plain.weights / 2, plain.gradients / 8)
    assert second.optimizer == plain.weights * 3 / 4
    kahan, none = (estimate(tiny, master_weights=way) for way in ("kahan", "none"))
    assert [way.weights + way.gradients + way.optimizer for way in (plain, kahan, none)] == [
        number * plain.num_parameters / GIB for number in (16, 12, 8)
    ]
    assert f"{plain.total:.2f} GiB" in plain.sentence()


def test_activations_follow_the_tokens(tiny: TinyWorld) -> None:
    short, long = (estimate(tiny, packing_length=length) for length in (1024, 4096))
    assert long.activations == pytest.approx(4 * short.activations)
    assert estimate(tiny, packing_length=4096, gradient_checkpointing=True).activations < long.activations
    batch = estimate(tiny, packing_length=1024, per_device_train_batch_size=4)
    assert (batch.num_tokens, batch.activations) == (4096, long.activations)


def test_adapters_train_little(tiny: TinyWorld) -> None:
    adapted = estimate(tiny, train_type="lora")
    assert 0 < adapted.num_trainable < 0.5 * adapted.num_parameters
    assert adapted.gradients < adapted.weights


def test_a_dry_run_counts_what_a_run_trains(tiny: TinyWorld, tmp_path: Path) -> None:
    dry = train(tiny.config(tmp_path, train_type="lora", dry_run=True), SilentProgress())
    real = train(tiny.config(tmp_path, train_type="lora", max_steps=1), SilentProgress())
    assert dry.num_trainable_parameters == real.num_trainable_parameters
    assert dry.num_parameters == real.num_parameters


def test_settings_are_told_as_options(tiny: TinyWorld) -> None:
    (line,) = settings_lines(tiny.config("out", fsdp=("full_shard", "offload"), training={"optim": "sgd"}))
    assert "--fsdp full_shard offload" in line
    assert "--packing true" in line
    assert "--freeze-vit false" in line
    assert "sgd" in line
    assert "--seed" not in line


@pytest.mark.parametrize(("train_type", "sees", "told"), [("lora", True, "PeftModel"), ("full", True, "ImageText")])
def test_what_to_do_next(train_type: Any, sees: bool, told: str, tiny: TinyWorld) -> None:
    counts = dict.fromkeys(("num_samples", "filtered", "num_packs", "steps", "steps_without_packing"), 1)
    counts |= dict.fromkeys(("num_empty_micro_batches", "num_processes", "target_tokens"), 1)
    sizes: Any = {"max_length": 1, "packing_length": 1, "fill": 1.0, "samples_per_pack": 1.0, "packing": True}
    result = TrainResult(**counts, **sizes, output_dir="o", checkpoint="o/checkpoint 3")
    evaluate, load, *_ = next_lines(tiny.config("o", train_type=train_type), result, sees=sees)
    assert "packtool eval --model 'o/checkpoint 3'" in evaluate
    assert told in load
    assert "CausalLM" in list(next_lines(tiny.config("o"), result, sees=False))[1]


def test_the_check_before_training_and_heads_that_make_all_logits_are_counted(tiny: TinyWorld) -> None:
    """Where a model's logits are treated behind its head, they are made for all tokens."""
    config = tiny.config("out", packing_length=1 << 20)
    model_config = reduced_config("qwen3_vl")
    vocab_size = model_config.get_text_config().vocab_size

    def logits(**settings: Any) -> float:
        model = model_without_weights(config, copy.deepcopy(model_config), torch.float32)
        vars(model.config).update(settings.get("model", {}))
        asked = dataclasses.replace(config, **settings.get("run", {}))
        found = estimate_memory(asked, model, model_config, dtype=torch.float32, world_size=1)
        return found.activations * GIB

    plain, treated = logits(), logits(model={"final_logit_softcapping": 30.0})
    assert treated - plain == pytest.approx(3 * 4 * ((vocab_size << 20) - head_loss.CHUNK_LOGITS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("packtool.train.model.memory.CHUNK_LOGITS", vocab_size)
        checked, unchecked = logits(), logits(run={"verify_packing": False})
    assert checked - unchecked == pytest.approx(3 * 4 * vocab_size * (4 * 32 - 1))
