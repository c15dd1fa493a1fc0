"""Models whose layers mix along the packed row are refused from their configuration alone."""

from __future__ import annotations

import pytest
from transformers import (
    Gemma2Config,
    JambaConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    Mamba2Config,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3Config,
    Qwen3NextConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    ViTConfig,
)

from packtool.attention.support import refuse_unsupported
from packtool.errors import UnsupportedModelError


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(),
        Qwen2Config(use_sliding_window=True, sliding_window=8, max_window_layers=1, num_hidden_layers=3),
        Qwen3Config(),
        LlamaConfig(),
        Qwen2VLConfig(),
        Qwen2_5_VLConfig(),
        Qwen3VLConfig(),
        Qwen3VLMoeConfig(),
    ],
    ids=lambda config: config.model_type,
)
def test_attention_only_models_pass(config: PreTrainedConfig) -> None:
    refuse_unsupported(config)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Qwen3NextConfig(), "linear_attention"),
        (Llama4TextConfig(), "chunked_attention"),
        (JambaConfig(), "mamba|recurrent"),
        (Lfm2Config(), "conv_L_cache"),
        (Mamba2Config(), "recurrent|attention interface"),
        (Gemma2Config(), "soft-capped"),
        (ViTConfig(), "no class"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else "",
)
def test_others_are_refused_with_the_reason(config: PreTrainedConfig, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        refuse_unsupported(config)
