"""``--quant-bits``: the linear layers of a language model in 4 or 8 bits, under adapters that learn in float32.

QLoRA (Dettmers et al. 2023, arXiv 2305.14314), done by bitsandbytes as transformers reads weights. Towers of media,
the head and the experts of mixtures, which are no linear layers in transformers, stay in the precision of the rest.

How many numbers a model has, however they are spread over processes.
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


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """The number of trainable parameters, and of all."""
    sizes = [(whole_size(parameter), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, trainable in sizes if trainable), sum(size for size, _ in sizes)


def whole_size(parameter: Tensor) -> int:
    """Numbers in a parameter of any shape; under ZeRO-3 a process has its share only, in 4 bits two share a byte."""
    packed = getattr(parameter, "quant_state", None)
    if packed is not None:
        return int(packed.shape.numel())
    return int(getattr(parameter, "ds_numel", parameter.numel()))


_HEAD = "lm_head"
_OF_ADAPTERS = ("base_model.model.", ".base_layer")
# bitsandbytes: a float32 scale for 64 weights of 4 bits, or one of 8 bits and a float32 for 256 of those.
_BLOCK, _BLOCK_OF_SCALES = 64, 256


def quantization_of(
    options: QuantizationOptions, config: PreTrainedConfig, dtype: torch.dtype
) -> BitsAndBytesConfig | None:
    """What ``from_pretrained`` is told; None where weights stay as they are.

    Raises:
        ConfigError: without bitsandbytes, or where the checkpoint itself is quantized.
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
        llm_int8_skip_modules=list(_skipped(config.model_type)),
    )


def stay_trainable(model: nn.Module) -> None:
    """Keep bitsandbytes, on a CPU with AVX512-BF16, from an order of four-bit weights that has no backward pass.

    It would turn to that order in the first evaluation, or the check before the first step, and never turn back: the
    gradients of all that lies below would be left out, without an error.
    """
    modules: Any = model.modules()
    for module in modules:
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def _skipped(model_type: str) -> tuple[str, ...]:
    towers = family_of({"model_type": model_type}).towers
    return (*towers.vision, *towers.aligner, _HEAD)


def quantized_layers(model: nn.Module, model_type: str, options: QuantizationOptions) -> list[nn.Linear]:
    """The layers that are in few bits, of a model that is or would be loaded so, with adapters or without."""
    if options.quant_bits is None:
        return []
    skipped = _skipped(model_type)
    found = []
    for name, module in model.named_modules():
        for part in _OF_ADAPTERS:
            name = name.replace(part, "")
        is_skipped = any(name == each or name.startswith(f"{each}.") or name.endswith(_HEAD) for each in skipped)
        if isinstance(module, nn.Linear) and "lora_" not in name and not is_skipped:
            found.append(module)
    return found


def saved_bytes(layers: list[nn.Linear], options: QuantizationOptions, kept: int) -> int:
    """Bytes that few bits save.

    Args:
        layers: in few bits.
        kept: bytes of a weight that is not.
    """
    numbers = sum(whole_size(layer.weight) for layer in layers)
    if options.quant_bits == 8:  # a float32 scale for each row
        return numbers * (kept - 1) - sum(4 * layer.out_features for layer in layers)
    scales = 1 / _BLOCK + 4 / _BLOCK / _BLOCK_OF_SCALES if options.bnb_4bit_use_double_quant else 4 / _BLOCK
    return int(numbers * (kept - 0.5 - scales))


def quantization_line(model: nn.Module, model_type: str, options: QuantizationOptions) -> list[str]:
    """How many weights are in few bits, for people; nothing where none are asked for."""
    layers = quantized_layers(model, model_type, options)
    if options.quant_bits is None:
        return []
    few = sum(whole_size(layer.weight) for layer in layers)
    whole = sum(map(whole_size, model.parameters()))
    kind = f"4 bits, {options.bnb_4bit_quant_type}" if options.quant_bits == 4 else "8 bits"
    return [f"quantized: {few:,} of {whole:,} weights ({kind}); towers of media, head and experts are not"]
