"""The memory of a pass of a reduced model: traced, computed, and as the hooks of saved tensors see it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AttentionInterface

from packtool.attention.features import towers_of_media
from packtool.attention.register import set_attention, set_text_attention
from packtool.batch.spec import auto_class
from packtool.train.model import trace
from packtool.train.model.head_loss import HeadLoss
from packtool.train.model.trace import PassBytes, run_pass, trace_pass
from tests.train.model.test_no_sync import ADAPTED

TOKENS, MEDIA_TOKENS = 160, 60


def made(config: Any, *, adapters: bool, recomputes: bool) -> nn.Module:
    """A model on the device of the moment."""
    model: Any = auto_class(config).from_config(copy.deepcopy(config), attn_implementation="sdpa")
    if recomputes:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    if adapters:
        model = get_peft_model(model, LoraConfig(target_modules=ADAPTED, r=4), low_cpu_mem_usage=True)
    return model


def traced_bytes(config: Any, *, adapters: bool = False, recomputes: bool = False) -> PassBytes:
    """Without computing anything."""
    with torch.device("meta"):
        model = made(config, adapters=adapters, recomputes=recomputes)
    return trace_pass(model, config, num_tokens=TOKENS, num_media_tokens=MEDIA_TOKENS)


def computed_bytes(config: Any, *, adapters: bool = False, recomputes: bool = False) -> PassBytes:
    """Of a real pass on the CPU, whose attention keeps what flash attention does: the CPU's keeps copies of its own."""
    real: Any = made(config, adapters=False, recomputes=recomputes)
    AttentionInterface.register("packtool_traced", trace._traced_attention)
    set_attention(real)
    set_text_attention(real, "packtool_traced")
    if adapters:
        real = get_peft_model(real, LoraConfig(target_modules=ADAPTED, r=4))
    real.train()
    for parameter in real.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    return run_pass(real, _real_batch(config))


def saved_bytes(config: Any) -> int:
    """What autograd keeps of a real forward pass, by the hooks of saved tensors."""
    real: Any = made(config, adapters=False, recomputes=False)
    AttentionInterface.register("packtool_traced", trace._traced_attention)
    AttentionInterface.register("packtool_flash_traced", trace._traced_attention)
    set_attention(real)
    set_text_attention(real, "packtool_traced")
    for tower in towers_of_media(real):
        tower.config._attn_implementation = "packtool_flash_traced"
    real.train()
    batch = _real_batch(config)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*real.parameters(), *real.buffers())}
    own |= {tensor.untyped_storage().data_ptr() for tensor in (batch.input_ids, batch.cu_seqlens)}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        HeadLoss(real).losses(real, batch)
    return sum(tensor.untyped_storage().nbytes() for key, tensor in saved.items() if key not in own)


def _real_batch(config: Any) -> Any:
    batch = trace._batch(trace.InputSpec("", config, trace.MediaLimits()), TOKENS, MEDIA_TOKENS)
    return batch.map(lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor)
