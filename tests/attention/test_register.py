"""The adapter to transformers refuses every call in which samples could see each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3VLConfig

from packtool.attention.reference import reference_attention
from packtool.attention.register import ATTENTION_NAME, attention_for, packed_attention, register
from packtool.errors import UnsupportedModelError


class Layer(nn.Module):
    is_causal = True


def call(layer: nn.Module | None = None, **changes: Any) -> torch.Tensor:
    torch.manual_seed(0)
    arguments: dict[str, Any] = {
        "query": torch.randn(1, 4, 6, 8),
        "key": torch.randn(1, 2, 6, 8),
        "value": torch.randn(1, 2, 6, 8),
        "attention_mask": None,
        "cu_seq_lens_q": torch.tensor([0, 4, 6], dtype=torch.int32),
        "max_length_q": 4,
    }
    out, weights = packed_attention(layer or Layer(), **(arguments | changes))
    assert weights is None
    return out


def test_returns_tokens_before_heads_as_transformers_wants() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    heads = [tensor[0].transpose(0, 1) for tensor in (q, k, v)]
    expected, _ = reference_attention(*heads, torch.tensor([0, 4, 6]), scale=0.3)
    torch.testing.assert_close(call(scaling=0.3)[0].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seq_lens_q": None}, "without cu_seq_lens_q"),
        ({"attention_mask": torch.ones(1, 6)}, "given a mask"),
        ({"query": torch.randn(2, 4, 6, 8)}, "2 rows"),
        ({"key": torch.randn(1, 2, 9, 8)}, "key-value cache"),
    ],
)
def test_refuses_calls_that_could_leak(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"softcap": 50.0}, "soft-capped"),
        ({"s_aux": torch.zeros(4)}, "sinks"),
        ({"position_bias": torch.zeros(1)}, "biases"),
        ({"is_causal": False}, "both directions"),
    ],
)
def test_refuses_what_it_would_leave_out(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        call(**changes)


def test_refuses_a_sliding_layer_without_a_window() -> None:
    layer = Layer()
    layer.layer_type = "sliding_attention"  # type: ignore[assignment]
    with pytest.raises(UnsupportedModelError, match="how wide"):
        call(layer)
    assert call(layer, sliding_window=2).shape == (1, 6, 4, 8)


def test_only_the_text_tower_is_routed() -> None:
    assert attention_for(Qwen2Config()) == ATTENTION_NAME
    assert attention_for(Qwen3VLConfig()) == {"text_config": ATTENTION_NAME, "vision_config": "sdpa"}


def test_a_model_run_without_boundaries_fails_instead_of_leaking() -> None:
    register()
    config = Qwen2Config(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention_for(config))
    with pytest.raises(RuntimeError, match="without cu_seq_lens_q"):
        model(input_ids=torch.arange(6).unsqueeze(0), use_cache=False)
