"""What a run's samples cost: by its options, and by what its cache says of pictures."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from packtool.config.plan import PlanConfig
from packtool.config.train import TrainConfig
from packtool.errors import MismatchError
from packtool.plan.cost import CostModel, Learning
from packtool.plan.options import PlanOptions
from packtool.plan.skrull_steps import SkrullOptions
from packtool.simulate.cost import Machine
from packtool.simulate.hardware import HARDWARE_PRESETS as HARDWARE
from packtool.simulate.model_sizes import MODEL_PRESETS, ModelSizes
from packtool.train.prepare.checkpoint import RunState
from packtool.train.prepare.costs import RunCosts, cost_of, learning_of, with_model

MODEL: dict[str, Any] = MODEL_PRESETS["qwen2.5-0.5b"]


def run_config(**settings: Any) -> TrainConfig:
    return TrainConfig(model="m", cached_dataset=("c",), output_dir="o", **settings)


def test_options_say_what_learns() -> None:
    assert learning_of(run_config()) == Learning(language="lora", towers="frozen", aligner="frozen", lora_rank=8)
    full = learning_of(run_config(train_type="full", freeze_llm=True, freeze_vit=False, freeze_aligner=False))
    assert full == Learning(language="frozen", towers="full", aligner="full")
    # A plan is made for the run that is trained with the same options.
    assert learning_of(PlanConfig(cached_dataset=("c",))) == learning_of(run_config())


def test_recomputing_is_the_hardwares_work_and_not_the_models() -> None:
    plain = RunCosts.of(run_config(gradient_checkpointing=False), MODEL)
    again = RunCosts.of(run_config(gradient_checkpointing=True), MODEL)
    assert plain.model == plain.hardware == again.model
    assert again.hardware.per_token > again.model.per_token
    towers = RunCosts.of(
        run_config(gradient_checkpointing=False, vit_gradient_checkpointing=True, freeze_vit=False), _seeing()
    )
    assert towers.hardware.per_token == towers.model.per_token
    assert towers.hardware.per_patch_square > towers.model.per_patch_square


def _seeing() -> dict[str, Any]:
    tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "patch_size": 14, "spatial_merge_size": 2}
    return {"text_config": MODEL, "vision_config": tower}


def test_a_model_of_unknown_form_costs_what_one_of_8b_does() -> None:
    assert cost_of({"model_type": "x"}, Learning()) == CostModel.of_8b()


def test_skrull_is_told_of_the_devices_that_there_are() -> None:
    options = PlanOptions(max_length=8, packing_length=8, skrull=SkrullOptions(bucket_size=8, sequence_parallel_size=4))
    found = {name: with_model(options, MODEL, Learning(), HARDWARE[name]).skrull for name in ("h100", "a100")}
    for name, skrull in found.items():
        assert skrull is not None
        machine = Machine(sizes=ModelSizes.of_config(MODEL), hardware=HARDWARE[name], world_size=4)
        assert skrull.times == machine.step_time(4)
        assert skrull.times.device == HARDWARE[name].name
    plain = dataclasses.replace(options, skrull=None)
    assert with_model(plain, MODEL, Learning(), HARDWARE["a100"]).skrull is None


def test_what_learns_is_told_where_packs_were_assigned_by_it() -> None:
    given: dict[str, Any] = {"plan": "p", "cache": "c", "seed": 0, "train_type": "lora", "packing": True}
    given |= {"max_length": 8, "packing_length": 8, "world_size": 1, "gradient_accumulation_steps": 1}
    state = RunState(**given, per_device_train_batch_size=1, steps="s", learning="towers frozen")
    state.check_continues("checkpoint", dataclasses.replace(state, learning="towers lora"))
    other = dataclasses.replace(state, learning="towers lora", steps="t")
    with pytest.raises(MismatchError, match="learning: towers lora there, towers frozen now"):
        state.check_continues("checkpoint", other)
