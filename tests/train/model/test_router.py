"""The load-balancing loss of routers: of the step's tokens, whatever shares a micro-batch with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM, load_balancing_loss_func

from packtool.batch.batch import Batch
from packtool.batch.collate import collate_packs, collate_padded
from packtool.errors import ConfigError
from packtool.train.model.load import route_attention
from packtool.train.model.loss import RouterBalance, load_balance
from packtool.train.model.trainable import enable_checkpointing
from tests.batch.reduced import make_sample, reduced_config, reduced_model, reduced_spec

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def mixture(**settings: Any) -> Qwen3MoeForCausalLM:
    config = reduced_config("qwen3").to_dict() | {"model_type": "qwen3_moe"} | EXPERTS | settings
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**config))


def gradients(batches: list[Batch], step_tokens: int, *, recomputed: bool = False, packed: bool = True) -> list[Tensor]:
    """Of the balance alone, over the micro-batches of a step; the balance itself is the last one."""
    model = mixture()
    if packed:
        route_attention(model, packing=True)
    if recomputed:
        enable_checkpointing(model)
        model.train()
    balance = RouterBalance(model, 0.5)
    for batch in batches:
        with balance.added_to_gradients(batch, step_tokens, world_size=1):
            (model(**batch.model_inputs()).logits.sum() * 0.0).backward()
    weight_gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    return [*weight_gradients, balance.take_step_loss()]


def test_loss_of_one_layer_equals_that_of_transformers() -> None:
    torch.manual_seed(1)
    logits, tokens = torch.randn(50, 8), torch.rand(50) > 0.3
    balance_loss = load_balance(logits, logits.topk(2).indices, tokens)
    torch.testing.assert_close(balance_loss, load_balancing_loss_func((logits,), 8, 2, tokens[None].long()))


def test_padding_fillers_and_recomputation_change_nothing() -> None:
    """A step of two micro-batches: packed, packed with padding, padded, with a filler beside, recomputed."""
    spec = reduced_spec("qwen3")
    first_pack, second_pack = [make_sample(7, seed=1), make_sample(5, seed=2)], [make_sample(9, seed=3)]
    reference = gradients([collate_packs(first_pack, spec), collate_packs(second_pack, spec)], 21)
    assert 0.9 < float(reference[-1]) < 4
    assert any(float(weight.abs().max()) > 1e-5 for weight in reference[:-1])
    fuller = [
        collate_packs(first_pack, spec, pad_to_multiple_of=16),
        collate_packs(second_pack, spec),
        collate_packs([], spec),
    ]
    others = [
        gradients(fuller, 21),
        gradients([collate_padded(first_pack, spec), collate_padded(second_pack, spec)], 21, packed=False),
        gradients([collate_packs(first_pack, spec), collate_packs(second_pack, spec)], 21, recomputed=True),
    ]
    for other in others:
        for gradient, other_gradient in zip(reference, other, strict=True):
            torch.testing.assert_close(gradient, other_gradient, rtol=1e-4, atol=1e-7)


def test_model_without_routers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--router-aux-loss-coef 0.1: \w+ has no routers"):
        RouterBalance(reduced_model("qwen3"), 0.1)
