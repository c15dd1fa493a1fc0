"""Modules of language models without formulas, as counted in transformers' model, against that model's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from packtool.config.model import LearningOptions
from packtool.planning.cost import ALL_WEIGHTS, CostModel
from packtool.planning.layers import ModelLayers
from tests.small_texts import small_text_config


@pytest.mark.parametrize("name", ["jamba", "lfm2", "opt"])
def test_counted_modules_are_those_of_the_model(name: str) -> None:
    """Also those of layers that were not run, because they equal others."""
    config = small_text_config(name)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config)
    layers = ModelLayers.of_config(config.to_dict())
    modules = {module.name: module for module in layers.modules}
    for module_name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            counted = modules[module_name]
            assert (counted.inputs, counted.outputs) == (module.in_features, module.out_features)
            assert counted.has_bias == (module.bias is not None)
    named = {name.removesuffix(".weight") for name, _ in model.named_parameters() if not name.endswith(".bias")}
    assert named <= modules.keys()
    assert layers.is_tied == config.tie_word_embeddings


def test_trained_weights_of_counted_modules() -> None:
    config = small_text_config("lfm2").to_dict()
    full, frozen = (
        CostModel.of_config(config, learning)
        for learning in (ALL_WEIGHTS, LearningOptions(train_type="full", freeze_llm=True))
    )
    lora = CostModel.of_config(config, LearningOptions(target_modules=("out_proj",)))
    assert full.per_token == pytest.approx(3 * frozen.per_token)
    assert full.per_square == 3.5 * frozen.per_square
    assert frozen.per_token < lora.per_token < full.per_token


def test_windows_and_layers_of_a_model_with_pictures() -> None:
    """Sliding layers attend to windows; the names are those in the model with pictures."""
    text = small_text_config("gemma3n_text").to_dict()
    layers = ModelLayers.of_config({"text_config": text, "vision_config": {"model_type": "none"}})
    attention = [module for module in layers.language if module.kind == "attention"]
    assert [bool(module.flops_per_window) for module in attention] == [True, False, False]
    assert [bool(module.flops_per_square) for module in attention] == [False, True, True]
    assert "model.language_model.layers.0.mlp.up_proj" in {module.name for module in layers.language}


def test_experts_without_weights_are_chosen_as_often_as_others() -> None:
    config = small_text_config("longcat_flash").to_dict()
    experts = [
        sum(
            m.num_products
            for m in ModelLayers.of_config(config | {"zero_expert_num": n}).modules
            if ".experts." in m.name
        )
        for n in (0, 4)
    ]
    assert experts[1] == experts[0] / 2
