"""What a rank will need of its device's memory, told before anything is loaded."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig

from packtool.batch.spec import auto_class, weights_in_one_piece
from packtool.config.train import TrainConfig
from packtool.simulate.hardware import Hardware
from packtool.train.model.load import make_trainable
from packtool.train.model.parameters import whole_size
from packtool.train.model.precision import loaded_dtype
from packtool.train.model.quiet import quiet_transformers
from packtool.train.model.trace import trace_pass

FEW = 4
"""Samples that the check before the first step looks at, at most."""

CHECKED_POSITIONS = 32
"""Positions of a sample whose logits it compares; all of a long sample's would need gigabytes."""

_GIB = 2**30
_LONG = 1 << 17


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of one rank in GiB.

    Args:
        weights, gradients, optimizer: after sharding.
        activations: the most that a forward and backward pass of one micro-batch holds, traced; None where the model
            cannot be traced.
        gathered: weights that FSDP or ZeRO-3 bring together at a time, and gradients that are not sharded yet.
        num_tokens: of that micro-batch.
        num_parameters, num_trainable: of the whole model.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float | None
    gathered: float
    num_tokens: int
    num_parameters: int
    num_trainable: int

    @property
    def total(self) -> float:
        """GiB of a rank in all, as far as it is known."""
        return self.weights + self.gradients + self.optimizer + (self.activations or 0.0) + self.gathered

    def sentence(self) -> str:
        """The estimate as one sentence."""
        parts = f"weights {self.weights:.2f}, gradients {self.gradients:.2f}, optimizer {self.optimizer:.2f}"
        parts += f", gathered layers {self.gathered:.2f}" if self.gathered else ""
        if self.activations is None:
            return f"estimated memory of a rank: {self.total:.2f} GiB ({parts}) and activations, which cannot be traced"
        return (
            f"estimated memory of a rank: {self.total:.2f} GiB ({parts}, activations {self.activations:.2f} for "
            f"{self.num_tokens:,} tokens)"
        )

    def sentence_on(self, hardware: Hardware) -> str:
        """The estimate against a machine that is planned for, as one sentence."""
        room = hardware.memory_gb * 1e9 / _GIB
        verdict = f"has {room:.1f} GiB" if self.total <= room else f"has only {room:.1f} GiB: this will not fit"
        return f"planned for {hardware.name}, which {verdict}; what is installed there was not looked at"


def estimate_memory(
    config: TrainConfig,
    model: nn.Module,
    model_config: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    world_size: int,
    num_media_tokens: int = 0,
) -> MemoryEstimate:
    """The memory of a rank that trains a full micro-batch.

    Args:
        model: made trainable, on whatever device.
        dtype: of the computation.
        num_media_tokens: of the micro-batch's tokens, those that stand for pictures and videos.
    """
    sizes = [
        (whole_size(parameter), parameter.element_size(), parameter.requires_grad) for parameter in model.parameters()
    ]
    weights = sum(count * size for count, size, _ in sizes)
    trained = sum(count * size for count, size, is_trained in sizes if is_trained)
    stage = _stage(config)
    tokens = micro_batch_tokens(config)
    activations = traced_bytes(config, model_config, dtype, tokens, min(num_media_tokens, tokens - 1))
    checked = 3 * 4 * _checked_logits(config, tokens, int(model_config.get_text_config().vocab_size))
    gathered = _gathered_bytes(model, dtype) if stage >= 3 else 0
    return MemoryEstimate(
        weights=weights / _GIB / (world_size if stage >= 3 else 1),
        gradients=trained / _GIB / (world_size if stage >= 2 else 1),
        optimizer=_optimizer_bytes(config, trained, dtype) / _GIB / (world_size if stage >= 1 else 1),
        activations=None if activations is None else max(activations, checked) / _GIB,
        gathered=gathered / _GIB,
        num_tokens=tokens,
        num_parameters=sum(count for count, _, _ in sizes),
        num_trainable=sum(count for count, _, is_trained in sizes if is_trained),
    )


def _optimizer_bytes(config: TrainConfig, trained: int, dtype: torch.dtype) -> int:
    """AdamW's states for so many bytes of trained weights."""
    if config.deepspeed is not None and dtype.itemsize == 2:
        return 6 * trained  # float32: two moments and a copy of the weights
    return (4 if config.master_weights == "kahan" and config.train_type == "full" else 2) * trained


def _checked_logits(config: TrainConfig, tokens: int, vocab_size: int) -> int:
    """Logits that the check before the first step holds."""
    checks = config.removes_padding and config.verify_packing
    return min(FEW * CHECKED_POSITIONS, tokens) * vocab_size if checks else 0


def _gathered_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """What is not sharded for a while: all that lies in no layer, and two layers, of which one's gradients wait."""
    listed = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in listed]
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    outside = sum(whole_size(parameter) for parameter in model.parameters() if id(parameter) not in inside)
    sizes = [
        (sum(map(whole_size, layer.parameters())), sum(whole_size(p) for p in layer.parameters() if p.requires_grad))
        for layer in layers
    ]
    largest, trained = max(sizes, default=(0, 0))
    return (outside + 2 * largest + trained) * dtype.itemsize


def micro_batch_tokens(config: TrainConfig) -> int:
    """Tokens of a full micro-batch that one process computes on."""
    if config.schedule == "skrull" and config.bucket_tokens:
        return config.bucket_tokens
    tokens = (config.packing_length or config.max_length or 0) * config.per_device_train_batch_size
    if config.dynamic_batch_tokens is not None:
        tokens = config.dynamic_batch_tokens
    return max(-(-tokens // config.sequence_parallel_ranks), 2)


def traced_bytes(
    config: TrainConfig, model_config: PreTrainedConfig, dtype: torch.dtype, num_tokens: int, num_media_tokens: int = 0
) -> int | None:
    """The most that a forward and backward pass holds beside weights and gradients; None where it cannot be traced."""
    try:
        if num_tokens <= 2 * _LONG:
            return _traced(config, model_config, dtype, num_tokens, num_media_tokens)
        # What is held is linear in tokens, and positions of a billion would be held on this machine.
        share = num_media_tokens / num_tokens
        few, more = (_traced(config, model_config, dtype, n, int(share * n)) for n in (_LONG, 2 * _LONG))
        return few + int((more - few) / _LONG * (num_tokens - _LONG))
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return None  # a model that asks for numbers on its way, or does not take what batches have


def _traced(
    config: TrainConfig, model_config: PreTrainedConfig, dtype: torch.dtype, num_tokens: int, num_media_tokens: int
) -> int:
    model = model_without_weights(config, copy.deepcopy(model_config), dtype)
    shards = bool(config.fsdp or config.deepspeed)
    if shards:
        model.to(dtype)  # which computes with weights of this precision, whatever it keeps
    autocast = dtype if dtype.itemsize == 2 and not shards else None
    with quiet_transformers():
        found = trace_pass(
            model, model_config, num_tokens=num_tokens, num_media_tokens=num_media_tokens, autocast=autocast
        ).peak
    if config.sequence_parallel_ranks > 1:
        # Ulysses keeps the output of attention by heads and by tokens.
        text = model_config.get_text_config()
        heads = int(text.num_attention_heads)
        size = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
        layers = 1 if config.gradient_checkpointing else int(text.num_hidden_layers)
        found += layers * heads * size * dtype.itemsize * num_tokens
    return found


def model_without_weights(config: TrainConfig, model_config: PreTrainedConfig, dtype: torch.dtype) -> nn.Module:
    """The model as it would be trained, on the meta device: a second instead of minutes, and no memory.

    Raises:
        ConfigError, UnsupportedModelError: as ``train.model.load.make_trainable``.
    """
    with weights_in_one_piece(), torch.device("meta"):
        model = auto_class(model_config).from_config(model_config, dtype=loaded_dtype(dtype, model_config, config))
        return make_trainable(model, config)


def _stage(config: TrainConfig) -> int:
    """What is sharded: nothing, optimizer states, gradients too, weights too."""
    if config.fsdp:
        return 3 if "shard_grad_op" not in config.fsdp else 2
    name = config.deepspeed or ""
    return int(name[4]) if name.startswith("zero") and name[4:5].isdigit() else 0
