"""The adapter to transformers refuses every call in which samples could see each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3VLConfig

from packtool.attention.choose import KERNELS
from packtool.attention.kernel import Varlen
from packtool.attention.register import (
    ATTENTION_NAME,
    GatherTokens,
    attention_name,
    packed_attention,
    register_kernels,
    set_attention,
    text_attention,
)
from packtool.errors import ConfigError, UnsupportedModelError


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


def test_output_has_tokens_before_heads() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    heads = [tensor[0].transpose(0, 1) for tensor in (q, k, v)]
    expected = KERNELS["reference"].attend(*heads, Varlen.of_lengths([4, 2]), scale=0.3)
    torch.testing.assert_close(call(scaling=0.3)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seq_lens_q": None}, "without cu_seq_lens_q"),
        ({"attention_mask": torch.ones(1, 6)}, "given a mask"),
        ({"query": torch.randn(2, 4, 6, 8)}, "2 sequences"),
        ({"key": torch.randn(1, 2, 9, 8)}, "key-value cache"),
    ],
)
def test_leaking_calls_are_refused(changes: dict[str, Any], message: str) -> None:
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
def test_unsupported_arguments_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        call(**changes)


def test_sliding_layer_without_window_is_refused() -> None:
    layer = Layer()
    layer.layer_type = "sliding_attention"  # type: ignore[assignment]
    with pytest.raises(UnsupportedModelError, match="how wide"):
        call(layer)
    assert call(layer, sliding_window=2).shape == (1, 6, 4, 8)


def test_only_the_text_tower_is_routed() -> None:
    assert text_attention(Qwen2Config(), ATTENTION_NAME) == ATTENTION_NAME
    assert text_attention(Qwen3VLConfig(), ATTENTION_NAME) == {"text_config": ATTENTION_NAME, "vision_config": "sdpa"}


def test_a_model_run_without_boundaries_fails_instead_of_leaking() -> None:
    register_kernels()
    config = Qwen2Config(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=text_attention(config, ATTENTION_NAME))
    with pytest.raises(RuntimeError, match="without cu_seq_lens_q"):
        model(input_ids=torch.arange(6).unsqueeze(0), use_cache=False)


def tiny_model(**settings: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
    }
    return AutoModelForCausalLM.from_config(Qwen2Config(**sizes, num_attention_heads=2, **settings))


@pytest.mark.parametrize("impl", ["auto", "sdpa", "reference"])
def test_an_unmodified_model_runs_through_the_kernel_of_that_name(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    set_attention(model, impl)
    used = []
    for kernel in KERNELS.values():
        monkeypatch.setattr(kernel, "attend", _noted(kernel.name, kernel.attend, used))
    inputs = {"input_ids": torch.arange(6)[None], "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1]])}
    bounds = {"cu_seq_lens_q": torch.tensor([0, 4, 6], dtype=torch.int32), "max_length_q": 4}
    packed = model(**inputs, **bounds, use_cache=False).logits[0]
    assert used == ["sdpa" if impl == "auto" else impl] * 2
    model.set_attn_implementation("sdpa")
    expected = [model(input_ids=torch.arange(6)[None, part]).logits[0] for part in (slice(0, 4), slice(4, 6))]
    torch.testing.assert_close(packed, torch.cat(expected), rtol=0, atol=1e-6)


def _noted(name: str, attend: Any, used: list[str]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        used.append(name)
        return attend(*args, **kwargs)

    return call


@pytest.mark.parametrize("impl", ["sdpa", "reference"])
def test_a_shared_prefix_is_computed_once(impl: str) -> None:
    """Three tokens and two continuations of them, one token shorter than the other."""
    model = tiny_model()
    set_attention(model, impl)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    tree = {
        "position_ids": torch.tensor([[0, 1, 2, 3, 4, 3]]),
        "cu_seq_lens_q": torch.tensor([0, 3, 5, 6], dtype=torch.int32),
        "max_length_q": 3,
        "key_index": torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5]),
        "cu_seq_lens_k": torch.tensor([0, 3, 8, 12], dtype=torch.int32),
        "max_length_k": 5,
    }
    together = model(input_ids=ids, **tree, use_cache=False).logits[0]
    model.set_attn_implementation("sdpa")
    first_logits = model(input_ids=torch.tensor([[5, 6, 7, 8, 9]])).logits[0]
    second_logits = model(input_ids=torch.tensor([[5, 6, 7, 10]])).logits[0]
    torch.testing.assert_close(together, torch.cat([first_logits, second_logits[3:]]), rtol=0, atol=1e-6)


def test_kernel_names_do_not_clash_with_transformers() -> None:
    """A name with "flash" in it would bring flash attention's masks; one with a slash, a kernel from the hub."""
    names = [attention_name(impl) for impl in ("auto", *KERNELS)]
    assert len(set(names)) == len(names)
    assert not any(part in name for name in names for part in ("flash", "/", "|"))
    with pytest.raises(ConfigError, match="no such attention"):
        attention_name("fastest")


def test_missing_kernel_is_named_by_its_option() -> None:
    model = tiny_model()
    set_attention(model, "varlen")
    with pytest.raises(ConfigError, match="--attn-impl varlen"):
        model(input_ids=torch.arange(6)[None], cu_seq_lens_q=torch.tensor([0, 6]), max_length_q=6, use_cache=False)


def test_dropout_is_passed_to_kernels_that_support_it() -> None:
    model = tiny_model(attention_dropout=0.5).train()
    set_attention(model)
    inputs = {"input_ids": torch.arange(6)[None], "cu_seq_lens_q": torch.tensor([0, 6]), "max_length_q": 6}
    first_logits, second_logits = (model(**inputs, use_cache=False).logits for _ in range(2))
    assert not torch.equal(first_logits, second_logits)
    set_attention(model, "reference")
    with pytest.raises(ConfigError, match="attention_dropout"):
        model(**inputs, use_cache=False)


def test_autocast_reaches_the_kernel() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert call().dtype == torch.bfloat16
    assert call().dtype == torch.float32


def token_gradients(
    index: torch.Tensor, weights: torch.Tensor, num_tokens: int, *, plain: bool = False
) -> torch.Tensor:
    """Gradients (T, D) of tokens of which ``index`` takes copies, with these gradients (T', D) of the copies."""
    tokens = torch.zeros(num_tokens, weights.shape[1], dtype=weights.dtype, requires_grad=True)
    copies = tokens.index_select(0, index) if plain else GatherTokens.apply(index, tokens)[0]
    return torch.autograd.grad(copies, tokens, weights)[0]


@given(
    index=st.lists(st.integers(0, 11), min_size=1, max_size=60),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
    seed=st.integers(0, 99),
)
def test_gradients_of_gathered_tokens_are_rounded_once(index: list[int], dtype: torch.dtype, seed: int) -> None:
    weights = torch.randn(len(index), 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    gradients = token_gradients(torch.tensor(index), weights, 12)
    wide = torch.promote_types(dtype, torch.float32)
    expected = token_gradients(torch.tensor(index), weights.to(wide), 12, plain=True)
    assert gradients.dtype == dtype
    assert torch.equal(gradients, expected.to(dtype)), "the sum in order, of float32 numbers, rounded at the end"


def test_sixteen_branches_in_bfloat16_are_rounded_once() -> None:
    index = torch.arange(64).repeat(16)
    weights = torch.randn(len(index), 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = token_gradients(index, weights.double(), 64)
    errors = (token_gradients(index, weights, 64).double() - exact) / exact.abs().clamp(min=1)
    assert errors.abs().max() <= 2**-8, "half a unit in the last place of bfloat16, which has 8 bits"
