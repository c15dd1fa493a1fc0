"""Llama 4: attention within chunks of each document, and a temperature that depends on the position in it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Llama4TextConfig

from packtool.attention.kernel import ReferenceKernel, Varlen
from packtool.attention.parallel.axes import refuse_unshareable_sequences
from packtool.attention.register import set_attention
from packtool.attention.support import refuse_unsupported
from packtool.batch.batch import TreeBatch
from packtool.batch.spec import InputSpec
from packtool.config.train import TrainConfig
from packtool.encode.families import MediaLimits
from packtool.errors import UnsupportedModelError
from packtool.train.model.trainable import make_trainable
from packtool.train.verify.checks import (
    PackUnderTest,
    check_gradients,
    check_isolation,
    check_logits,
    check_prefixes,
)
from tests.batch.reduced import make_sample, prefix_samples

TEXT: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "intermediate_size_mlp": 48}
TEXT |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
TEXT |= {"num_local_experts": 2, "no_rope_layers": [1, 0, 1], "attention_chunk_size": 6}


@given(
    documents=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5),
    chunk_size=st.integers(1, 12),
    has_prefixes=st.booleans(),
)
@settings(deadline=None)
def test_chunks_have_the_keys_of_their_definition(
    documents: list[tuple[int, int]], chunk_size: int, has_prefixes: bool
) -> None:
    """Documents of (own tokens, tokens of a prefix before them)."""
    lengths = [own for own, _ in documents]
    key_lengths = [own + (prefix if has_prefixes else 0) for own, prefix in documents]
    varlen = Varlen.of_lengths(lengths)
    if has_prefixes:
        varlen = Varlen(varlen.cu_seqlens, varlen.max_seqlen, tuple(lengths), keys=Varlen.of_lengths(key_lengths))
    positions = [torch.arange(keys - own, keys) for own, keys in zip(lengths, key_lengths, strict=True)]
    assert torch.equal(varlen.positions(sum(lengths)), torch.cat(positions))
    q, k = torch.ones(sum(lengths), 1, 1), torch.ones(sum(key_lengths), 1, 1)
    visible = ReferenceKernel.scores(q, k, varlen, 1.0)[0] > 0
    key_positions = torch.cat([torch.arange(keys) for keys in key_lengths])
    visible &= torch.cat(positions)[:, None] // chunk_size == key_positions // chunk_size
    chunks, kept = varlen.cut_into_chunks(chunk_size)
    kept = torch.arange(len(k)) if kept is None else kept
    of_chunks = torch.zeros_like(visible)
    of_chunks[:, kept] = ReferenceKernel.scores(q, k[kept], chunks, 1.0)[0] > 0
    assert torch.equal(of_chunks, visible)
    assert all(chunks.host_lengths()) or chunks is varlen


@pytest.mark.parametrize("impl", ["sdpa", "reference"])
@pytest.mark.parametrize("min_shared", [None, 4])
def test_packed_samples_equal_single_samples(impl: str, min_shared: int | None) -> None:
    """Chunks and steps of the temperature are shorter than a sample, and begin in the middle of continuations."""
    config = Llama4TextConfig(**TEXT, floor_scale=4, attn_scale=0.7)
    refuse_unsupported(config)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.08)
    set_attention(model, impl)
    samples = prefix_samples(None)
    if min_shared is None:
        samples = [make_sample(length, seed=length) for length in (21, 5, 13)]
    pack = PackUnderTest(model, samples, InputSpec("", config, MediaLimits()), torch.float32, min_shared=min_shared)
    assert isinstance(pack.batch, TreeBatch) == (min_shared is not None)
    for check in (check_isolation(pack), check_logits(pack), check_prefixes(pack), check_gradients(pack)):
        assert check.error <= check.allowed, check
    # Without chunks, or with another temperature, it is another model.
    before = pack.packed_logits(pack.batch)
    whole = copy.deepcopy(config)
    whole.attention_chunk_size = 99
    for layer in model.model.layers:
        attention = layer.self_attn
        name, value = ("config", whole) if attention.use_rope else ("floor_scale", 99)
        own = getattr(attention, name)
        setattr(attention, name, value)
        logits = pack.packed_logits(pack.batch)
        setattr(attention, name, own)
        assert max((a - b).abs().max() for a, b in zip(logits, before, strict=True)) > 1e-3


def test_sequences_are_not_shared() -> None:
    with pytest.raises(UnsupportedModelError, match="in a llama4_text model, tokens attend to those of their chunk"):
        refuse_unshareable_sequences(Llama4TextConfig(**TEXT).to_dict(), 2)


def test_routers_get_no_adapter() -> None:
    """They are linear modules, but return a tuple, which peft's layers cannot."""
    model = AutoModelForCausalLM.from_config(Llama4TextConfig(**TEXT))
    adapted = make_trainable(model, TrainConfig(model="m", cached_dataset=("c",), output_dir="o", train_type="lora"))
    names = [name for name, _ in adapted.named_parameters() if "lora_A" in name]
    assert any("shared_expert" in name for name in names)
    assert not any("router" in name for name in names)
    assert adapted(input_ids=torch.arange(4)[None]).logits.isfinite().all()
