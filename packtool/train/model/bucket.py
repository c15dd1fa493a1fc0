"""``--bucket-size auto``: how many tokens a process can hold, from what the model keeps of each for its backward pass.

Memory is linear in tokens: weights, gradients and optimizer, which do not depend on them, and activations, which do.
What a token adds is measured in a second and without memory: the model runs forward twice on the meta device, with 256
and with 512 tokens, and the bytes of everything that autograd keeps are counted. Attention keeps what flash attention
does (q, k, v, the output and the lse). A model that cannot run there, as one of experts, is reckoned by its widths.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig

from packtool.attention.register import route
from packtool.batch.spec import model_config
from packtool.config.train import TrainConfig
from packtool.encode.families import is_multimodal
from packtool.errors import ConfigError
from packtool.launch.world import World, processes_of_machine
from packtool.progress import Progress
from packtool.simulate.cost import Constants
from packtool.simulate.model_sizes import ModelSizes
from packtool.simulate.run import read_hardware
from packtool.train.model.head_loss import CHUNK_LOGITS
from packtool.train.model.load import has_gpu, resolve_dtype
from packtool.train.model.memory import estimate_memory, model_without_weights
from packtool.train.model.quiet import quiet_transformers

_GIB = 2**30
_MEASURED = "packtool_measured"
_FEW, _MORE = 256, 512
_LOGIT_BYTES = 3 * 4  # itself, its probability and its gradient
_STEP = 128
"""Buckets are a multiple of it."""


def with_bucket(config: TrainConfig, world: World, progress: Progress) -> TrainConfig:
    """The run with a number in place of ``auto``.

    Raises:
        ConfigError: if the memory is used up before the first token, or what a picture needs would decide.
    """
    if config.bucket_size != "auto":
        return config
    on_gpu = has_gpu(config)
    model = model_config(config.model)
    if is_multimodal(model.to_dict()) and not config.freeze_vit:
        raise ConfigError(
            "--bucket-size auto measures tokens of text, and with --freeze-vit false the pictures' tower needs memory",
            "Give a number of tokens, as in --bucket-size 8192.",
        )
    dtype = resolve_dtype(model, config, on_gpu=on_gpu)
    per_token = bytes_per_token(config, model, dtype)
    if config.hardware is not None:
        memory = read_hardware(config.hardware).memory_gb * 1e9 * Constants().usable_memory
    else:
        memory = device_bytes(on_gpu=on_gpu) * Constants().usable_memory
    with quiet_transformers():
        empty = model_without_weights(config, model, dtype)
    bare = dataclasses.replace(config, bucket_size="1")
    fixed = estimate_memory(bare, empty, model, dtype=dtype, world_size=world.size).total * _GIB
    # Logits of all tokens, or, where these are many, of a chunk.
    room, logits = memory - fixed, _LOGIT_BYTES * int(model.get_text_config().vocab_size)
    most = max(room / (per_token + logits), (room - _LOGIT_BYTES * CHUNK_LOGITS) / per_token)
    size = int(most) // _STEP * _STEP
    if size < _STEP:
        raise ConfigError(
            f"--bucket-size auto: weights, gradients and optimizer need {fixed / _GIB:.1f} of {memory / _GIB:.1f} GiB",
            "Shard them with --fsdp full_shard, train adapters with --train-type lora, or give a number of tokens.",
        )
    progress.note(
        f"bucket size: {size:,} tokens a process; {fixed / _GIB:.2f} of {memory / _GIB:.2f} GiB are taken, and a token "
        f"keeps {per_token / 1024:,.1f} KiB"
    )
    return dataclasses.replace(config, bucket_size=str(size))


def device_bytes(*, on_gpu: bool) -> int:
    """Memory of this process's GPU, or its share of the machine's."""
    if on_gpu:
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return pages * size // processes_of_machine()


def bytes_per_token(config: TrainConfig, model: PreTrainedConfig, dtype: torch.dtype) -> float:
    """Activations that one more token keeps on its process."""
    text = model.get_text_config()
    layers = int(text.num_hidden_layers)
    plain = dataclasses.replace(config, gradient_checkpointing=False)
    try:
        kept = _measured(plain, model, dtype)
    except (NotImplementedError, RuntimeError, ValueError):
        # Routing to experts looks at numbers, which the meta device has none of.
        kept = ModelSizes.of_config(model.to_dict()).token_bytes(recompute=False) * dtype.itemsize / 2
    if config.num_sharing > 1:
        # Ulysses keeps the output by heads and by tokens.
        heads = int(text.num_attention_heads)
        size = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
        kept += layers * heads * size * dtype.itemsize
    if not config.gradient_checkpointing:
        return kept
    # Layers keep their input, and the one that is computed again keeps all it needs.
    return kept / layers + layers * dtype.itemsize * int(text.hidden_size)


def _measured(config: TrainConfig, model: PreTrainedConfig, dtype: torch.dtype) -> float:
    AttentionInterface.register(_MEASURED, _keeping_attention)
    with quiet_transformers():
        trained: Any = model_without_weights(config, copy.deepcopy(model), dtype)
    inner = trained.get_base_model() if hasattr(trained, "get_base_model") else trained
    inner.set_attn_implementation(route(inner.config, _MEASURED))
    # Weights kept in float32 are computed with in 16 bits, and so is what autograd keeps of the tokens.
    trained.to(dtype).train()
    return (_kept_bytes(trained, _MORE) - _kept_bytes(trained, _FEW)) / (_MORE - _FEW)


def _kept_bytes(model: nn.Module, num_tokens: int) -> int:
    """Bytes that autograd keeps of a forward pass up to the head, without the model's own weights."""
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    ids = torch.zeros(1, num_tokens, dtype=torch.int64, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        # Logits are made where targets are, some at a time: of one position here.
        model(input_ids=ids, position_ids=ids, use_cache=False, logits_to_keep=1)
    return sum(tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in own)


class _Keep(torch.autograd.Function):
    """Keeps what flash attention keeps, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise AssertionError("nobody goes backward here")


def _keeping_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    out: Tensor = _Keep.apply(query, key, value)
    return out.transpose(1, 2), None
