"""The memory of a pass of a reduced model: traced, computed, and as the hooks of saved tensors see it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from packtool.attention.parallel.axes import Axes
from packtool.attention.parallel.mesh import SequenceParallel
from packtool.batch.batch import Batch
from packtool.batch.spec import InputSpec, auto_class
from packtool.encode.families import MediaLimits
from packtool.train.model.loss import HeadLoss
from packtool.train.model.trace import PassBytes, run_pass, set_traced_attention, trace_pass, traced_batch
from packtool.train.model.trainable import enable_checkpointing
from packtool.train.prepare.figures import RankTokens
from tests.train.real_models import ADAPTED

TOKENS = RankTokens(computed=160, vision=60)
HEARD = RankTokens(computed=160, vision=30, audio=60)
"""Those of a model that hears."""


def tokens_of(config: Any) -> RankTokens:
    """The micro-batch that a model is measured with."""
    return HEARD if InputSpec("", config, MediaLimits()).has_audio else TOKENS


def measured_model(config: Any, *, adapters: bool, recomputes: bool) -> nn.Module:
    """A model on the device of the moment."""
    model: Any = auto_class(config).from_config(copy.deepcopy(config), attn_implementation="sdpa")
    if recomputes:
        enable_checkpointing(model)
    if adapters:
        model = get_peft_model(model, LoraConfig(target_modules=ADAPTED, r=4), low_cpu_mem_usage=True)
    return model


def traced_bytes(
    config: Any,
    *,
    adapters: bool = False,
    recomputes: bool = False,
    tokens: RankTokens | None = None,
    axes: Axes | None = None,
) -> PassBytes:
    """Without computing anything."""
    with torch.device("meta"):
        model = measured_model(config, adapters=adapters, recomputes=recomputes)
    return trace_pass(model, InputSpec("", config, MediaLimits()), tokens or tokens_of(config), axes)


def computed_bytes(
    config: Any,
    *,
    adapters: bool = False,
    recomputes: bool = False,
    batch: Batch | None = None,
    parallel: SequenceParallel | None = None,
) -> PassBytes:
    """Of a real pass on the CPU, whose attention keeps what flash attention does: the CPU's keeps copies of its own."""
    real: Any = measured_model(config, adapters=False, recomputes=recomputes)
    if adapters:
        real = get_peft_model(real, LoraConfig(target_modules=ADAPTED, r=4))
    set_traced_attention(real, parallel)
    real.train()
    for parameter in real.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    return run_pass(real, batch or _real_batch(config))


def saved_bytes(config: Any, batch: Batch | None = None, parallel: SequenceParallel | None = None) -> int:
    """What autograd keeps of a real forward pass, by the hooks of saved tensors."""
    real: Any = measured_model(config, adapters=False, recomputes=False)
    set_traced_attention(real, parallel)
    real.train()
    batch = batch or _real_batch(config)
    model_storages = {tensor.untyped_storage().data_ptr() for tensor in (*real.parameters(), *real.buffers())}
    model_storages |= {
        value.untyped_storage().data_ptr() for value in vars(batch).values() if isinstance(value, Tensor)
    }
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        HeadLoss(real).losses(real, batch)
    return sum(tensor.untyped_storage().nbytes() for key, tensor in saved.items() if key not in model_storages)


def _real_batch(config: Any) -> Any:
    batch = traced_batch(InputSpec("", config, MediaLimits()), tokens_of(config), Axes())
    return batch.map(lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor)
