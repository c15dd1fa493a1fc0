from __future__ import annotations

import numpy as np
import pytest

from packtool.plan.cost import CostModel

QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
}


def test_a_dense_model_costs_six_flops_a_weight_and_token() -> None:
    cost = CostModel.of_config(QWEN3_8B)
    weights = 36 * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 12288)
    assert cost.per_token == 6 * weights
    assert cost.per_target_token == 6 * 4096 * 151936
    # Half of 4 * heads * size for each pair of positions, forward, and twice that backward.
    assert cost.per_square == 36 * 3 * 2 * 32 * 128


def test_experts_count_as_often_as_they_are_visited() -> None:
    moe = {**QWEN3_8B, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    per_layer = 6 * (4096 * 128 * 80 + 8 * 3 * 4096 * 768 + 4096 * 128)
    assert CostModel.of_config(moe).per_token == 36 * per_layer


def test_only_full_attention_is_quadratic() -> None:
    types = ["linear_attention", "linear_attention", "full_attention", "sliding_attention"]
    mixed = {**QWEN3_8B, "num_hidden_layers": 4, "layer_types": types, "sliding_window": 512}
    assert CostModel.of_config(mixed).per_square == 3 * 2 * 32 * 128


def test_a_media_token_stands_for_several_patches() -> None:
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 256, "spatial_merge_size": 2, "out_hidden_size": 128}
    config = {"text_config": QWEN3_8B, "vision_config": vision}
    per_patch = 2 * (2 * 4 * 64 * 64 + 2 * 2 * 64 * 256)
    assert CostModel.of_config(config).per_media_token == 3 * (4 * per_patch + 2 * 256 * (256 + 128))
    assert CostModel.of_config({"thinker_config": config}).per_media_token > 0


def test_costs_add_up() -> None:
    cost = CostModel(per_token=2, per_square=0.5, per_media_token=3, per_target_token=1)
    found = cost(np.array([10, 20]), np.array([100, 200]), np.array([0, 5]), np.array([1, 2]))
    assert found.tolist() == [20 + 50 + 1, 40 + 100 + 15 + 2]


def test_a_config_without_sizes_is_an_error() -> None:
    with pytest.raises(KeyError, match="hidden_size"):
        CostModel.of_config({"model_type": "x", "num_hidden_layers": 2})
