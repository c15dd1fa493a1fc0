"""What a rank will need of its device's memory, told before anything is loaded: an estimate, from sizes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from packtool.config.train import TrainConfig
from packtool.simulate.hardware import Hardware
from packtool.train.model.head_loss import CHUNK_LOGITS, HeadLoss
from packtool.train.model.load import make_trainable
from packtool.train.model.parameters import whole_size
from packtool.train.model.precision import loaded_dtype

FEW = 4
"""Samples that the check before the first step looks at, at most."""

CHECKED_POSITIONS = 32
"""Positions of a sample whose logits it compares; all of a long sample's would need gigabytes."""

_GIB = 2**30
# Bytes of a layer's activations for each token and unit of width, in 16 bits, with attention that keeps no scores:
# Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", equation 2.
_ACTIVATION_BYTES = 34


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of one rank in GiB.

    Args:
        weights, gradients, optimizer: after sharding.
        activations: of one micro-batch, with the logits that are made at a time.
        num_tokens: of that micro-batch.
        num_parameters, num_trainable: of the whole model.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    num_tokens: int
    num_parameters: int
    num_trainable: int

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations

    def sentence(self) -> str:
        """The estimate as one sentence."""
        parts = f"weights {self.weights:.2f}, gradients {self.gradients:.2f}, optimizer {self.optimizer:.2f}"
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
    config: TrainConfig, model: nn.Module, model_config: PreTrainedConfig, *, dtype: torch.dtype, world_size: int
) -> MemoryEstimate:
    """From a model that is made trainable, on whatever device; its tokens are those of a full micro-batch.

    Args:
        dtype: of the computation.
    """
    sizes = [
        (whole_size(parameter), parameter.element_size(), parameter.requires_grad) for parameter in model.parameters()
    ]
    weights = sum(count * size for count, size, _ in sizes)
    trained = sum(count * size for count, size, is_trained in sizes if is_trained)
    stage = _stage(config)
    tokens = (config.packing_length or config.max_length or 0) * config.per_device_train_batch_size
    if config.dynamic_batch_tokens is not None:
        tokens = config.dynamic_batch_tokens
    tokens = -(-tokens // config.num_sharing)
    if config.schedule == "skrull":
        tokens = config.bucket_tokens or tokens
    text = model_config.get_text_config()
    layer = _ACTIVATION_BYTES * dtype.itemsize / 2 * tokens * int(text.hidden_size)
    layers = int(text.num_hidden_layers)
    activations = layer * layers
    if config.gradient_checkpointing:
        activations = layer + layers * dtype.itemsize * tokens * int(text.hidden_size)
    logits = 3 * 4 * _num_logits(config, model, tokens, int(text.vocab_size))
    return MemoryEstimate(
        weights=weights / _GIB / (world_size if stage >= 3 else 1),
        gradients=trained / _GIB / (world_size if stage >= 2 else 1),
        optimizer=_optimizer_bytes(config, trained, dtype) / _GIB / (world_size if stage >= 1 else 1),
        activations=(activations + logits) / _GIB,
        num_tokens=tokens,
        num_parameters=sum(count for count, _, _ in sizes),
        num_trainable=sum(count for count, _, is_trained in sizes if is_trained),
    )


def _optimizer_bytes(config: TrainConfig, trained: int, dtype: torch.dtype) -> int:
    """AdamW's states for so many bytes of trained weights."""
    if config.deepspeed is not None and dtype.itemsize == 2:
        return 6 * trained  # float32: two moments and a copy of the weights
    return (4 if config.master_weights == "kahan" and config.train_type == "full" else 2) * trained


def _num_logits(config: TrainConfig, model: nn.Module, tokens: int, vocab_size: int) -> int:
    """The most logits that are there at a time: of the head's losses, or of the check before the first step."""
    in_step = tokens * vocab_size
    if HeadLoss.applies_to(model):
        in_step = min(max(CHUNK_LOGITS, vocab_size), in_step)
    checks = config.removes_padding and config.verify_packing
    in_check = min(FEW * CHECKED_POSITIONS, tokens) * vocab_size if checks else 0
    return max(in_step, in_check)


def model_without_weights(config: TrainConfig, model_config: PreTrainedConfig, dtype: torch.dtype) -> nn.Module:
    """The model as it would be trained, on the meta device: a second instead of minutes, and no memory.

    Raises:
        ConfigError, UnsupportedModelError: as ``train.model.make_trainable``.
    """
    auto: Any = (
        AutoModelForImageTextToText
        if type(model_config) in AutoModelForImageTextToText._model_mapping
        else AutoModelForCausalLM
    )
    with torch.device("meta"):
        model = auto.from_config(model_config, dtype=loaded_dtype(dtype, model_config, config))
        return make_trainable(model, config)


def _stage(config: TrainConfig) -> int:
    """What is sharded: nothing, optimizer states, gradients too, weights too."""
    if config.fsdp:
        return 3 if "shard_grad_op" not in config.fsdp else 2
    name = config.deepspeed or ""
    return int(name[4]) if name.startswith("zero") and name[4:5].isdigit() else 0
