"""Models that cannot be packed are refused from their configuration alone, and leaking inputs before a forward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    Gemma2Config,
    GptOssConfig,
    JambaConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    Mamba2Config,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3Config,
    Qwen3NextConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    StableLmConfig,
    ViTConfig,
)
from transformers.models.llama import modeling_llama

from packtool.attention import support
from packtool.attention.support import refuse_leaky_inputs, refuse_unsupported
from packtool.errors import EXIT_MISMATCH, MismatchError, UnsupportedModelError
from tests.attention.hybrids import HYBRIDS, hybrid_config
from tests.batch.reduced import TEXT_MODELS, VISION_MODELS, reduced_config

SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("name", [*TEXT_MODELS, *VISION_MODELS, *HYBRIDS])
def test_models_that_can_be_isolated_pass(name: str) -> None:
    config = hybrid_config(name) if name in HYBRIDS else reduced_config(name)
    before = config.to_json_string(use_diff=False)
    refuse_unsupported(config)
    assert config.to_json_string(use_diff=False) == before


@pytest.mark.parametrize(
    "config_class",
    [Qwen2Config, Qwen3Config, LlamaConfig, Qwen2VLConfig, Qwen2_5_VLConfig, Qwen3VLConfig, Qwen3VLMoeConfig],
)
def test_full_size_models_pass(config_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the trial, which takes half a second each."""
    monkeypatch.setattr("packtool.attention.support._refuse_leaks_in_trial", lambda *args: None)
    refuse_unsupported(config_class())
    for other in (Qwen3NextConfig(), Qwen3_5Config(), Llama4TextConfig()):
        refuse_unsupported(other)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (JambaConfig(), "carry a state along the sequence|recurrent"),
        (Lfm2Config(), "conv layers convolve along the sequence|conv_L_cache"),
        (Mamba2Config(), "recurrent|attention interface|carry a state"),
        (Gemma2Config(), "soft-capped"),
        (ViTConfig(), "no class"),
        (StableLmConfig(**SMALL), "attention interface"),
        (GptOssConfig(**SMALL, num_local_experts=2), "sinks"),
        (Qwen2Config(**SMALL, layer_types=["full_attention", "conv"]), "conv layers convolve along the sequence"),
        (Qwen2Config(**SMALL, is_causal=False), "both directions"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else "",
)
def test_unsupported_models_are_refused_with_reason_and_remedy(config: PreTrainedConfig, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason) as error:
        refuse_unsupported(config)
    assert error.value.exit_code == EXIT_MISMATCH
    assert "--packing false" in str(error.value.remedy) or reason == "no class"


def _forward_without_boundaries(self: Any, hidden_states: Any, position_embeddings: Any, **kwargs: Any) -> Any:
    kwargs.pop("cu_seq_lens_q")
    return _llama_attention(self, hidden_states, position_embeddings, **kwargs)


def _forward_of_its_own(self: Any, hidden_states: Any, position_embeddings: Any, **kwargs: Any) -> Any:
    return nn.functional.softmax(hidden_states.cumsum(1), dim=-1), None


_llama_attention = modeling_llama.LlamaAttention.forward


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (_forward_without_boundaries, "called without cu_seq_lens_q"),
        (_forward_of_its_own, "only 0 of the 2 layers"),
    ],
)
def test_trial_pass_detects_unsupported_models(forward: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_unsupported(LlamaConfig(**SMALL))
    monkeypatch.setattr(support, "_PASSED_TRIALS", set())
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    with pytest.raises(UnsupportedModelError, match=reason):
        refuse_unsupported(LlamaConfig(**SMALL))


def test_trial_pass_runs_once_per_model(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []
    monkeypatch.setattr(support, "_PASSED_TRIALS", set())
    monkeypatch.setattr(support, "_refuse_leaks_in_trial", lambda config, _: tried.append(config.hidden_size))
    for hidden_size in (32, 32, 64):
        refuse_unsupported(LlamaConfig(**SMALL | {"hidden_size": hidden_size}))
    assert tried == [32, 64]


def test_model_without_boundary_inputs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, input_ids: Any, use_cache: bool) -> Any:
        """No further arguments."""

    monkeypatch.setattr(support, "_PASSED_TRIALS", set())
    monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "forward", forward)
    with pytest.raises(UnsupportedModelError, match="cannot be told where packed samples end"):
        refuse_unsupported(LlamaConfig(**SMALL))


def inputs(**changes: Any) -> dict[str, Any]:
    model_inputs: dict[str, Any] = {
        "input_ids": torch.zeros(1, 6, dtype=torch.int64),
        "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1]]).expand(4, 1, 6),
        "use_cache": False,
        "cu_seq_lens_q": torch.tensor([0, 4, 6], dtype=torch.int32),
        "max_length_q": 4,
        "document_lengths": (4, 2),
    }
    return model_inputs | changes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_cache": True}, "cache is on"),
        ({"use_cache": None}, "cache is on"),
        ({"past_key_values": object()}, "past_key_values"),
        ({"attention_mask": torch.ones(1, 6)}, "attention_mask, even of ones"),
        ({"cu_seq_lens_q": None}, "cu_seq_lens_q is missing"),
        ({"cu_seq_lens_q": torch.tensor([0, 4])}, "runs from 0 to 4 for 6 tokens"),
        ({"cu_seq_lens_q": torch.tensor([0, 5, 4, 6])}, "runs from"),
        ({"max_length_q": 3}, "max_length_q is 3"),
        ({"document_lengths": (2, 4)}, "document_lengths"),
        ({"input_ids": torch.zeros(2, 6)}, "2 sequences"),
        ({"position_ids": None}, "position_ids are missing"),
        ({"position_ids": torch.arange(6)[None]}, "do not begin at 0"),
        ({"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1]]).expand(3, 1, 6)}, "three they leak"),
    ],
)
def test_leaking_inputs_are_refused(changes: dict[str, Any], reason: str) -> None:
    refuse_leaky_inputs(inputs())
    with pytest.raises(MismatchError, match=reason):
        refuse_leaky_inputs(inputs(**changes))


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(MismatchError) as error:
        refuse_leaky_inputs(inputs(use_cache=True, attention_mask=torch.ones(1, 6), max_length_q=1))
    assert str(error.value).count("  - ") == 3


def tree_inputs(**changes: Any) -> dict[str, Any]:
    """A prefix of two tokens, and two continuations of two."""
    defaults: dict[str, Any] = {
        "position_ids": torch.tensor([[0, 1, 2, 3, 2, 3]]).expand(4, 1, 6),
        "cu_seq_lens_q": torch.tensor([0, 2, 4, 6], dtype=torch.int32),
        "max_length_q": 2,
        "document_lengths": (2, 2, 2),
        "key_index": torch.tensor([0, 1, 0, 1, 2, 3, 0, 1, 4, 5]),
        "cu_seq_lens_k": torch.tensor([0, 2, 6, 10], dtype=torch.int32),
        "max_length_k": 4,
        "key_lengths": (2, 4, 4),
    }
    return inputs(**(defaults | changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cu_seq_lens_k": torch.tensor([0, 2, 10])}, "2 documents for the 10 tokens of key_index and 3 documents"),
        ({"key_index": torch.tensor([0, 1, 0, 1, 2, 3])}, "runs from 0 to 10"),
        ({"max_length_k": 2}, "max_length_k is 2"),
        ({"key_lengths": (2, 2, 2)}, "key_lengths"),
        ({"key_index": torch.tensor([0, 1, 0, 1, 2, 3, 0, 1, 2, 3])}, "keys of document 2 do not end"),
        ({"cu_seq_lens_k": torch.tensor([0, 2, 3, 10]), "max_length_k": 7, "key_lengths": None}, "keys of document 1"),
        ({"key_index": torch.tensor([0, 1, 0, 1, 2, 3, 2, 3, 4, 5])}, "do not count from 0"),
        ({"position_ids": torch.tensor([[0, 1, 0, 1, 0, 1]]).expand(4, 1, 6)}, "do not count from 0"),
    ],
)
def test_prefixes_of_other_documents_are_refused(changes: dict[str, Any], reason: str) -> None:
    refuse_leaky_inputs(tree_inputs())
    with pytest.raises(MismatchError, match=reason):
        refuse_leaky_inputs(tree_inputs(**changes))
