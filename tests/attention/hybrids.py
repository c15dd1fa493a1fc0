"""Reduced hybrids: gated delta nets and attention in turns, with weights large enough that every token matters."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5MoeTextConfig,
    Qwen3NextConfig,
)

from tests.batch.reduced import IMAGE_PAD, VISION_END, VISION_START, VOCAB

HYBRIDS = ("qwen3_next", "qwen3_5_moe_text", "qwen3_5")
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}


def hybrid_config(name: str) -> PreTrainedConfig:
    """One of ``HYBRIDS``; the last one also sees."""
    if name == "qwen3_next":
        return Qwen3NextConfig(**_TEXT, **_EXPERTS)
    if name == "qwen3_5_moe_text":
        return Qwen3_5MoeTextConfig(**_TEXT, **_EXPERTS)
    rope = {
        "rope_type": "default",
        "mrope_section": [1, 1, 0],
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 8,
        "num_position_embeddings": 16,
    }
    ids = {"image_token_id": IMAGE_PAD, "video_token_id": 93}
    ids |= {"vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END}
    return Qwen3_5Config(text_config=_TEXT | {"rope_parameters": rope}, vision_config=vision, **ids)


def hybrid_model(name: str) -> PreTrainedModel:
    """In float32, as transformers loads it: nothing is isolated yet."""
    config = hybrid_config(name)
    auto: Any = AutoModelForImageTextToText if name == "qwen3_5" else AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation="sdpa")
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
        if "A_log" in parameter_name:
            # A state that fades slowly, so that a leak would be seen far into the next document.
            torch.nn.init.constant_(parameter, -3.0)
    return model.eval()
