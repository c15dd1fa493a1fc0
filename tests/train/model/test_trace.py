"""The traced memory of a pass against that of the same pass computed, for every family."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AttentionInterface

from packtool.attention.features import towers_of_media
from packtool.attention.register import set_attention, set_text_attention
from packtool.batch.spec import auto_class
from packtool.train.model import trace
from packtool.train.model.head_loss import HeadLoss
from packtool.train.model.trace import run_pass, trace_pass
from tests.train.model.test_no_sync import ADAPTED, ON_TEXT, THAT_HEAR, THAT_SEE, config_of

TOKENS, MEDIA_TOKENS = 160, 60


def made(config: Any, *, adapters: bool, recomputes: bool) -> nn.Module:
    model: Any = auto_class(config).from_config(copy.deepcopy(config), attn_implementation="sdpa")
    if recomputes:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    if adapters:
        model = get_peft_model(model, LoraConfig(target_modules=ADAPTED, r=4), low_cpu_mem_usage=True)
    return model


def real_batch(config: Any) -> Any:
    batch = trace._batch(trace.InputSpec("", config, trace.MediaLimits()), TOKENS, MEDIA_TOKENS)
    return batch.map(lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor)


@pytest.mark.parametrize("name", [*ON_TEXT, *THAT_SEE, *THAT_HEAR])
@pytest.mark.parametrize(("adapters", "recomputes"), [(False, False), (True, False), (False, True)])
def test_a_trace_holds_what_the_pass_holds(
    name: str, adapters: bool, recomputes: bool, realdata: Path, tmp_path: Path
) -> None:
    config = config_of(name, realdata, tmp_path)
    with torch.device("meta"):
        model = made(config, adapters=adapters, recomputes=recomputes)
    told = trace_pass(model, config, num_tokens=TOKENS, num_media_tokens=MEDIA_TOKENS)
    real = made(config, adapters=False, recomputes=recomputes)
    set_attention(real)  # type: ignore[arg-type]
    # Attention that keeps what flash attention does: the CPU's keeps copies of its own.
    AttentionInterface.register("packtool_traced", trace._traced_attention)
    set_text_attention(real, "packtool_traced")  # type: ignore[arg-type]
    if adapters:
        real = get_peft_model(real, LoraConfig(target_modules=ADAPTED, r=4))  # type: ignore[arg-type]
    real.train()
    for parameter in real.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    batch = real_batch(config)
    found = run_pass(real, batch)
    assert told.kept == pytest.approx(found.kept, rel=0.05)
    assert told.peak == pytest.approx(found.peak, rel=0.05)


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5_vl", "qwen3_vl"])
def test_what_is_kept_is_what_autograd_saves(name: str, realdata: Path, tmp_path: Path) -> None:
    """Counted otherwise: by the hooks of saved tensors."""
    config = config_of(name, realdata, tmp_path)
    with torch.device("meta"):
        model = made(config, adapters=False, recomputes=False)
    told = trace_pass(model, config, num_tokens=TOKENS, num_media_tokens=MEDIA_TOKENS)
    real: Any = made(config, adapters=False, recomputes=False)
    set_attention(real)
    set_text_attention(real, "packtool_traced")
    for tower in towers_of_media(real):
        tower.config._attn_implementation = "packtool_flash_traced"
    real.train()
    batch = real_batch(config)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*real.parameters(), *real.buffers())}
    own |= {tensor.untyped_storage().data_ptr() for tensor in (batch.input_ids, batch.cu_seqlens)}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        HeadLoss(real).losses(real, batch)
    found = sum(tensor.untyped_storage().nbytes() for key, tensor in saved.items() if key not in own)
    assert told.kept == pytest.approx(found, rel=0.05)
