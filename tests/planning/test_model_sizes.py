"""Sizes of models, against what is known of them."""

from __future__ import annotations

import pytest

from packtool.planning.cost import MODEL_PRESETS, ModelSizes


@pytest.mark.parametrize(("name", "billions"), [("8b", 8.19), ("qwen2.5-0.5b", 0.494), ("qwen2.5-7b", 7.62)])
def test_weights(name: str, billions: float) -> None:
    """Their makers' figures; norms and biases are not counted."""
    assert ModelSizes.of_config(MODEL_PRESETS[name]).num_parameters / 1e9 == pytest.approx(billions, rel=0.005)


def test_states_are_sharded_but_for_the_weights() -> None:
    sizes = ModelSizes.of_config(MODEL_PRESETS["8b"])
    assert sizes.state_bytes(1) == 16 * sizes.num_parameters
    assert sizes.state_bytes(10**9) == pytest.approx(2 * sizes.num_parameters)


def test_recomputation_keeps_layers_inputs_and_one_layer() -> None:
    sizes = ModelSizes.of_config(MODEL_PRESETS["qwen2.5-0.5b"])
    assert sizes.kept_bytes == 2 * (5 * 896 + 3 * 896 + 3 * 128 + 4 * 4864)
    assert sizes.token_bytes(recompute=False) == 24 * sizes.kept_bytes
    assert sizes.token_bytes(recompute=True) == 24 * 2 * 896 + sizes.kept_bytes
    assert sizes.kv_bytes == 2 * 2 * 128


def test_memory_counts_all_experts_and_activations_the_routed_ones() -> None:
    dense = MODEL_PRESETS["qwen2.5-0.5b"]
    sparse = {**dense, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 4864}
    one, sparse_sizes = ModelSizes.of_config(dense), ModelSizes.of_config(sparse)
    assert sparse_sizes.num_parameters - one.num_parameters == 7 * 24 * 3 * 896 * 4864
    assert sparse_sizes.kept_bytes - one.kept_bytes == 2 * 4 * 4864
