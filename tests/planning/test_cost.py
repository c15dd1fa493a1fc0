from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from packtool.config.model import LearningOptions
from packtool.planning.cost import ALL_WEIGHTS, CostModel
from scripts.bench_balance import TOWER

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
    # Half of 4 * heads * size for each pair of positions, forward, and two and a half times that backward.
    assert cost.per_square == 36 * 3.5 * 2 * 32 * 128


def test_experts_count_once_per_routed_token() -> None:
    moe = {**QWEN3_8B, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    per_layer = 6 * (4096 * 128 * 80 + 8 * 3 * 4096 * 768 + 4096 * 128)
    assert CostModel.of_config(moe).per_token == 36 * per_layer


def test_only_full_attention_is_quadratic() -> None:
    types = ["linear_attention", "linear_attention", "full_attention", "sliding_attention"]
    mixed = {**QWEN3_8B, "num_hidden_layers": 4, "layer_types": types, "sliding_window": 512}
    assert CostModel.of_config(mixed).per_square == 3.5 * 2 * 32 * 128


@settings(max_examples=30)
@given(length=st.integers(1, 40), shared=st.integers(0, 40), window=st.integers(1, 30))
def test_sliding_layers_cost_the_tokens_in_their_windows(length: int, shared: int, window: int) -> None:
    shared = min(shared, length - 1)
    cost = CostModel(per_token=0, per_square=0, per_window=1, window=window)
    behind = np.arange(length)[:, None] - np.arange(length)
    pairs = ((behind >= 0) & (behind < window))[shared:].sum()
    result = float(cost.attention(np.array(length), np.array(shared)))
    # As in squares, what tokens see of themselves counts half.
    assert 2 * pairs - (min(length, window) - min(shared, window)) == result
    cost, chunk = dataclasses.replace(cost, in_chunks=True), np.arange(length) // window
    pairs = ((behind >= 0) & (chunk[:, None] == chunk))[shared:].sum()
    assert 2 * pairs - (length - shared) == float(cost.attention(np.array(length), np.array(shared)))


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("mistral", {"sliding_window": 512}),
        ("qwen2", {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 3}),
        ("qwen2", {"sliding_window": 512, "use_sliding_window": False}),
        ("gemma3_text", {"sliding_window": 512, "sliding_window_pattern": 6}),
        ("phi3", {"sliding_window": 512}),
        ("mistral", {"attention_chunk_size": 512, "layer_types": ["chunked_attention", "full_attention"] * 4}),
    ],
)
def test_sliding_layers_are_those_of_transformers(kind: str, layers: dict[str, Any]) -> None:
    sizes = {**QWEN3_8B, "model_type": kind, "num_hidden_layers": 8, **layers}
    config = AutoConfig.for_model(**sizes)
    cost = CostModel.of_config(sizes)
    kinds = ("sliding_attention", "chunked_attention")
    slides = [layer in kinds for layer in getattr(config, "layer_types", None) or []]
    slides = slides or [config.sliding_window is not None] * 8
    assert cost.per_square == 3.5 * 2 * 32 * 128 * (8 - sum(slides))
    assert cost.per_window == 3.5 * 2 * 32 * 128 * sum(slides)
    assert cost.window == 512


VISION = {"text_config": QWEN3_8B, "vision_config": TOWER}
FROZEN_TOWERS = LearningOptions(train_type="full")


def test_one_large_image_costs_more_than_small_ones_of_as_many_tokens() -> None:
    cost = CostModel.of_config(VISION, FROZEN_TOWERS)
    tokens = np.array([256, 1000, 5000])
    # Measured with torch's counter on the real tower, from a reduced width: TFLOP of a forward pass.
    assert cost.towers(tokens, (4 * tokens) ** 2) / 1e12 == pytest.approx([1.06, 5.61, 67.9], rel=0.005)
    twenty = cost.towers(np.array(20 * 250), np.array(20 * 1000**2))
    assert float(cost.towers(np.array(5000), np.array(20_000**2)) / twenty) == pytest.approx(3.3, rel=0.01)


def test_frozen_tower_has_no_backward_pass_and_adapters_no_weight_gradients() -> None:
    full, frozen = (CostModel.of_config(VISION, learning) for learning in (ALL_WEIGHTS, FROZEN_TOWERS))
    assert full.per_patch_square == 3.5 * frozen.per_patch_square
    assert full.per_vision_token == pytest.approx(3 * frozen.per_vision_token, rel=0.01)  # no gradients of pixels
    lora = CostModel.of_config(VISION, LearningOptions(lora_rank=1))
    assert lora.per_token == pytest.approx(frozen.per_token * 2 / 3, rel=0.01)
    assert lora.per_target_token == frozen.per_target_token * 2 / 3
    assert lora.per_square == frozen.per_square


def test_frozen_layers_below_the_first_trained_one_have_no_backward_pass() -> None:
    lowest_layers = CostModel.of_config(QWEN3_8B, dataclasses.replace(ALL_WEIGHTS, freeze_llm=True))
    behind = CostModel.of_config(VISION, LearningOptions(train_type="full", freeze_llm=True, freeze_aligner=False))
    assert behind.per_token == 2 * lowest_layers.per_token == 4 * sum(_weights())
    assert behind.per_square == 3.5 * lowest_layers.per_square


def _weights() -> list[int]:
    return [4096 * 128 * 80 + 3 * 4096 * 12288] * 36


def test_recomputation_costs_one_more_forward_pass_of_layers_with_a_backward_pass() -> None:
    model = CostModel.of_config(VISION, FROZEN_TOWERS)
    hardware = CostModel.of_config(VISION, FROZEN_TOWERS, recomputes_language=True, recomputes_towers=True)
    assert hardware.per_token == model.per_token * 4 / 3
    assert hardware.per_square == model.per_square * 4.5 / 3.5
    assert hardware.per_target_token == model.per_target_token  # the head is no layer
    assert hardware.per_vision_token == model.per_vision_token


def test_a_tower_of_fixed_image_size_costs_the_same_per_image() -> None:
    siglip = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 256, "patch_size": 14, "image_size": 56}
    config = {"text_config": QWEN3_8B, "vision_config": siglip, "mm_tokens_per_image": 4}
    cost = CostModel.of_config(config, FROZEN_TOWERS)
    layers = 16 * 2 * (2 * (4 * 64 * 64 + 2 * 64 * 256) + 4 * 64 * 16)
    embedding, projection = 16 * 2 * 3 * 14 * 14 * 64, 2 * 4 * (64 * 64 + 64 * 4096)
    assert float(cost.towers(np.array(4), np.array(0))) == layers + embedding + projection


def test_padding_of_pictures_counts_as_tokens() -> None:
    """Two pictures of 40 patches each, a video without squares, a picture and a video, and text."""
    cost = CostModel(2, 0.5, 1, per_vision_token=3, padded_merge=4)
    tokens, num_images = np.array([17, 30, 38, 0]), np.array([2, 0, 1, 0])
    samples = tokens, 1600 * num_images, np.where(num_images, 1600, 0)
    assert cost.padded_tokens(*samples).tolist() == [20, 30, 38, 0]
    assert dataclasses.replace(cost, padded_merge=0).padded_tokens(*samples) is tokens


def test_frames_of_gemma_4_attend_to_their_frame() -> None:
    """Of 70 tokens: caches have their tokens, and no squares."""
    config = AutoConfig.for_model("gemma4", vision_config={}).to_dict()
    cost = CostModel.of_config(config)
    tokens = np.array(10 * 70)
    assert cost.towers(tokens, np.array(0)) == pytest.approx(cost.towers(tokens, np.array(10 * (70 * 9) ** 2)))


def test_costs_add_up() -> None:
    cost = CostModel(2, 0.5, 1, per_vision_token=3, per_patch_square=0.25, per_audio_token=4)
    towers = cost.towers(np.array([0, 5]), np.array([0, 400]), np.array([0, 6]))
    assert towers.tolist() == [0, 15 + 100 + 24]
    result = cost(np.array([10, 20]), cost.attention(np.array([10, 20])), np.array([1, 2]), towers)
    assert result.tolist() == [20 + 50 + 1, 40 + 200 + 2 + 139]


def test_a_config_without_sizes_is_an_error() -> None:
    with pytest.raises(KeyError, match="hidden_size"):
        CostModel.of_config({"model_type": "x", "num_hidden_layers": 2})
