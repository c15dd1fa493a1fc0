"""``--quant-bits``: the linear layers of a language model in 4 or 8 bits, with adapters trained in float32.

QLoRA (Dettmers et al. 2023, arXiv 2305.14314), by bitsandbytes while transformers reads weights. Media towers, the
head and the experts of mixtures, which are no linear layers in transformers, keep the precision of the other weights.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedConfig

from packtool.config.model import QuantizationOptions
from packtool.encode.families import family_of
from packtool.errors import ConfigError

_HEAD = "lm_head"
_ADAPTER_PARTS = ("base_model.model.", ".base_layer")
# bitsandbytes: a float32 scale for 64 weights of 4 bits; doubly quantized, an 8-bit scale and a float32 for 256 scales.
_BLOCK, _SCALE_BLOCK = 64, 256


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return the number of trainable parameters, and of all."""
    sizes = [(full_size(parameter), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, trainable in sizes if trainable), sum(size for size, _ in sizes)


def full_size(parameter: Tensor) -> int:
    """Return the elements of a parameter of any shape, even if ZeRO-3 shards it or 4 bits pack two in a byte."""
    packed = getattr(parameter, "quant_state", None)
    if packed is not None:
        return int(packed.shape.numel())
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def quantization_config(
    options: QuantizationOptions, config: PreTrainedConfig, dtype: torch.dtype
) -> BitsAndBytesConfig | None:
    """Return the quantization for ``from_pretrained``; None without ``--quant-bits``.

    Raises:
        ConfigError: without bitsandbytes, or for a checkpoint that is quantized itself.
    """
    if options.quant_bits is None:
        return None
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"--quant-bits {options.quant_bits}: bitsandbytes is not installed", "pip install bitsandbytes"
        )
    if getattr(config, "quantization_config", None):
        raise ConfigError(
            f"--quant-bits {options.quant_bits}: the weights of --model are quantized already",
            "Give the model in 16 bits.",
        )
    is_four = options.quant_bits == 4
    return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=is_four,
        load_in_8bit=not is_four,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_type=options.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=options.bnb_4bit_use_double_quant,
        llm_int8_skip_modules=list(_unquantized(config.model_type)),
    )


def keep_backward_pass(model: nn.Module) -> None:
    """Keep bitsandbytes, on a CPU with AVX512-BF16, from a layout of 4-bit weights that has no backward pass.

    It would switch to that layout in the first evaluation, or the check before the first step, and never switch back:
    the gradients of all layers below would be missing, without an error.
    """
    modules: Any = model.modules()
    for module in modules:
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def _unquantized(model_type: str) -> tuple[str, ...]:
    towers = family_of({"model_type": model_type}).towers
    return (*towers.vision, *towers.aligner, _HEAD)


def quantized_layers(model: nn.Module, model_type: str, options: QuantizationOptions) -> list[nn.Linear]:
    """Return the layers that are or would be quantized, of a model with or without adapters."""
    if options.quant_bits is None:
        return []
    unquantized = _unquantized(model_type)
    layers = []
    for name, module in model.named_modules():
        for part in _ADAPTER_PARTS:
            name = name.replace(part, "")
        is_unquantized = any(name == part or name.startswith(f"{part}.") for part in unquantized)
        is_unquantized = is_unquantized or name.endswith(_HEAD) or "lora_" in name
        if isinstance(module, nn.Linear) and not is_unquantized:
            layers.append(module)
    return layers


def saved_bytes(layers: list[nn.Linear], options: QuantizationOptions, kept: int) -> int:
    """Return the bytes that quantization saves.

    Args:
        layers: the quantized ones.
        kept: bytes of a weight that is not quantized.
    """
    numbers = sum(full_size(layer.weight) for layer in layers)
    if options.quant_bits == 8:  # a float32 scale for each row
        return numbers * (kept - 1) - sum(4 * layer.out_features for layer in layers)
    scales = 1 / _BLOCK + 4 / _BLOCK / _SCALE_BLOCK if options.bnb_4bit_use_double_quant else 4 / _BLOCK
    return int(numbers * (kept - 0.5 - scales))


def quantization_line(model: nn.Module, model_type: str, options: QuantizationOptions) -> list[str]:
    """Return one line with the number of quantized weights; nothing without ``--quant-bits``."""
    if options.quant_bits is None:
        return []
    num_quantized = sum(full_size(layer.weight) for layer in quantized_layers(model, model_type, options))
    num_weights = sum(map(full_size, model.parameters()))
    kind = f"4 bits, {options.bnb_4bit_quant_type}" if options.quant_bits == 4 else "8 bits"
    return [
        f"quantized: {num_quantized:,} of {num_weights:,} weights ({kind}); towers of media, head and experts are not"
    ]
