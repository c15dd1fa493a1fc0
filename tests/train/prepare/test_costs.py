"""What a run's samples cost: by its options, and by what its cache says of pictures."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from packtool.config.model import LearningOptions
from packtool.config.plan import PlanConfig
from packtool.config.settings import part_of
from packtool.config.train import TrainConfig
from packtool.errors import MismatchError
from packtool.planning.cost import MODEL_PRESETS, CostModel, ModelSizes
from packtool.planning.options import PlanOptions, SkrullOptions
from packtool.simulate.hardware import HARDWARE_PRESETS as HARDWARE
from packtool.simulate.machine import Machine
from packtool.train.prepare.checkpoint import RunState
from packtool.train.prepare.costs import RunCosts, cost_of, with_costs

MODEL: dict[str, Any] = MODEL_PRESETS["qwen2.5-0.5b"]


def run_config(**settings: Any) -> TrainConfig:
    return TrainConfig(model="m", cached_dataset=("c",), output_dir="o", **settings)


def test_costs_depend_on_the_trained_weights() -> None:
    assert run_config().training_summary == "language model lora, towers frozen, aligner frozen"
    full = run_config(train_type="full", freeze_llm=True, freeze_vit=False, freeze_aligner=False)
    assert full.training_summary == "language model frozen, towers full, aligner full"
    lora_options: dict[str, Any] = {"target_modules": ("q_proj", "v_proj"), "modules_to_save": ("lm_head",)}
    summary = (
        "language model lora, towers frozen, aligner frozen, --target-modules q_proj v_proj, --modules-to-save lm_head"
    )
    assert run_config(**lora_options).training_summary == summary
    # A plan is made for the run that is trained with the same options.
    for options in ({}, lora_options):
        plan = PlanConfig(cached_dataset=("c",), **options)
        assert part_of(LearningOptions, plan) == part_of(LearningOptions, run_config(**options))
        assert not plan.problems()


def test_costs_of_a_resumed_adapter_are_those_of_its_modules(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 4, "target_modules": ["q_proj", "self_attn.v_proj"]}')
    expected_cost = cost_of(MODEL, run_config(target_modules=("q_proj", "v_proj"), lora_rank=4))
    assert cost_of(MODEL, run_config(adapters=(str(tmp_path),))) == expected_cost != cost_of(MODEL, run_config())
    assert cost_of(MODEL, run_config(adapters=(str(tmp_path / "none"),))) == cost_of(MODEL, run_config())


def test_module_names_of_unknown_families_are_accepted() -> None:
    assert cost_of(MODEL, run_config(target_modules=("qkv",))) == cost_of(MODEL, run_config())


def test_recomputation_counts_for_the_hardware_only() -> None:
    plain = RunCosts.of(run_config(gradient_checkpointing=False, packing_length=256), MODEL)
    recomputing = RunCosts.of(run_config(gradient_checkpointing=True, packing_length=256), MODEL)
    assert plain.without_recomputation == plain.with_recomputation == recomputing.without_recomputation
    assert recomputing.with_recomputation.per_token > recomputing.without_recomputation.per_token
    # 448 logits of 151,936 numbers are more than are made at a time.
    long, short = (RunCosts.of(run_config(packing_length=length), MODEL) for length in (448, 256))
    assert (
        long.with_recomputation.per_target_token
        > long.without_recomputation.per_target_token
        == short.with_recomputation.per_target_token
    )
    towers = RunCosts.of(
        run_config(gradient_checkpointing=False, vit_gradient_checkpointing=True, freeze_vit=False), _vision_config()
    )
    assert towers.with_recomputation.per_token == towers.without_recomputation.per_token
    assert towers.with_recomputation.per_patch_square > towers.without_recomputation.per_patch_square


def test_a_number_of_layers_costs_its_share() -> None:
    """HFU counts the layers that recompute, and no others."""
    none, two, every = (
        RunCosts.of(run_config(gradient_checkpointing=value, packing_length=256), MODEL).with_recomputation
        for value in (False, 2, True)
    )
    for name in ("per_token", "per_square"):
        per_layer = (getattr(every, name) - getattr(none, name)) / MODEL["num_hidden_layers"]
        assert getattr(two, name) == pytest.approx(getattr(none, name) + 2 * per_layer)


def _vision_config() -> dict[str, Any]:
    tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "patch_size": 14, "spatial_merge_size": 2}
    return {"text_config": MODEL, "vision_config": tower}


def test_a_model_of_unknown_form_has_the_costs_of_8b() -> None:
    assert cost_of({"model_type": "x"}, run_config()) == CostModel.of_8b()


def test_skrull_gets_the_speed_of_the_devices() -> None:
    options = PlanOptions(max_length=8, packing_length=8, skrull=SkrullOptions(bucket_size=8, sequence_parallel_size=4))
    skrull_options = {
        name: with_costs(options, MODEL, run_config(), HARDWARE[name]).skrull for name in ("h100", "a100")
    }
    for name, skrull in skrull_options.items():
        assert skrull is not None
        machine = Machine(sizes=ModelSizes.of_config(MODEL), hardware=HARDWARE[name], world_size=4)
        assert skrull.step_time == machine.step_time(4)
        assert skrull.step_time.device == HARDWARE[name].name
    plain = dataclasses.replace(options, skrull=None)
    assert with_costs(plain, MODEL, run_config(), HARDWARE["a100"]).skrull is None


def test_other_trained_parts_are_refused_if_packs_were_assigned_by_them() -> None:
    state_fields: dict[str, Any] = {"plan": "p", "cache": "c", "seed": 0, "train_type": "lora", "packing": True}
    state_fields |= {"max_length": 8, "packing_length": 8, "world_size": 1, "gradient_accumulation_steps": 1}
    state = RunState(**state_fields, per_device_train_batch_size=1, steps="s", learning="towers frozen")
    state.check_continues("checkpoint", dataclasses.replace(state, learning="towers lora"))
    other = dataclasses.replace(state, learning="towers lora", steps="t")
    with pytest.raises(MismatchError, match="learning: towers lora in the checkpoint, towers frozen now"):
        state.check_continues("checkpoint", other)
