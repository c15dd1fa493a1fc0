"""Linear layers that compute in few bits, by torchao: ``--qat`` and ``--fp8``. Weights stay as they are.

``--qat`` (quantization-aware training) rounds weights and inputs in the forward pass to the values that the quantized
model will have. In the backward pass, gradients pass the rounding unchanged. ``--fp8`` multiplies matrices in float8.

Inputs are always scaled token by token: scales for several tokens would make a sample depend on others of its pack.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from packtool.config.train import TrainConfig
from packtool.encode.families import Towers
from packtool.errors import ConfigError

_MIN_CAPABILITY = (8, 9)
_FLOAT8_MULTIPLE = 16  # float8 products need sizes that are multiples of this
_MX_BLOCK, _NV_BLOCK = 32, 16
_DEFAULT_GROUP_SIZES = {"int8-int4": 32, "int4": 128, "fp8-int4": 128, "fp8": 1, "mxfp4": _MX_BLOCK, "nvfp4": _NV_BLOCK}


def _text_layers(model: nn.Module, towers: Towers) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers of the language model and its head, with their names."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and towers.part_of(name) == "language model":
            yield name, module


def simulate_quantization(model: nn.Module, towers: Towers, run: TrainConfig) -> None:
    """Replace the language model's linear layers in place by rounding ones (``--qat``), with the same parameters."""
    from torchao.quantization.qat.linear import FakeQuantizedLinear

    assert run.qat is not None, "the run has --qat"
    group_size = run.qat_group_size or _DEFAULT_GROUP_SIZES[run.qat]
    for name, linear in _text_layers(model, towers):
        if linear.in_features % group_size:
            raise ConfigError(
                f"--qat {run.qat}: {name} has {linear.in_features} inputs, which groups of {group_size} do not divide",
                "Change --qat-group-size, or choose another --qat.",
            )
        layer = FakeQuantizedLinear.from_linear(linear)
        layer.weight, layer.bias = linear.weight, linear.bias  # in place of new parameters on the meta device
        layer.activation_fake_quantizer, layer.weight_fake_quantizer = _quantizers(run.qat, group_size)
        model.set_submodule(name, layer)


def enable_rounding(model: nn.Module, enabled: bool) -> None:
    """Switch the rounding of all layers made by ``simulate_quantization`` on or off."""
    for module in model.modules():
        if hasattr(module, "weight_fake_quantizer"):
            for quantizer in module.children():
                quantizer.enabled = enabled  # type: ignore[assignment]


def _quantizers(recipe: str, group_size: int) -> tuple[nn.Module | None, nn.Module]:
    """Return two modules: one rounds the inputs of a linear layer, None if they are not rounded; one its weights.

    ``recipe`` is a value of ``--qat``, such as int8-int4: inputs in int8, weights in int4. Weights in int4 share a
    scale in groups of ``group_size`` inputs; the recipes fp8, mxfp4 and nvfp4 do not use it.
    """
    from torchao.quantization.qat import IntxFakeQuantizeConfig
    from torchao.quantization.qat.fake_quantize_config import Float8FakeQuantizeConfig, Int4WeightFakeQuantizeConfig
    from torchao.quantization.qat.fake_quantizer import FakeQuantizerBase

    if recipe == "mxfp4":
        return BlockRounding(_round_mxfp4), BlockRounding(_round_mxfp4)
    if recipe == "nvfp4":
        return BlockRounding(_round_nvfp4_tokens), BlockRounding(_round_nvfp4_weight)

    quantizer_of: Any = FakeQuantizerBase.from_config
    float8 = Float8FakeQuantizeConfig()  # one scale for each row, which for inputs is a token
    if recipe == "int4":
        int4_beside_bfloat16 = Int4WeightFakeQuantizeConfig(group_size, torch.bfloat16)
        return None, quantizer_of(int4_beside_bfloat16)
    if recipe == "int8-int4":
        int8 = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
        int4 = IntxFakeQuantizeConfig(torch.int4, group_size=group_size)  # type: ignore[attr-defined]
        return quantizer_of(int8), quantizer_of(int4)
    if recipe == "fp8-int4":
        int4_beside_float8 = Int4WeightFakeQuantizeConfig(group_size, torch.float8_e4m3fn)
        return quantizer_of(float8), quantizer_of(int4_beside_float8)
    assert recipe == "fp8", "the only other value of --qat"
    return quantizer_of(float8), quantizer_of(float8)


class BlockRounding(nn.Module):
    """Rounding to a 4-bit format with a scale for each block; gradients pass unchanged.

    torchao's own layers for these formats need a Blackwell GPU (NVFP4), or cannot be switched off.
    """

    def __init__(self, round_values: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.enabled = True
        self._round_values = round_values

    def forward(self, values: Tensor) -> Tensor:
        """Return rounded ``values``, (..., features), in the same type."""
        if not self.enabled:
            return values
        # The second term is zero, with the gradient of ``values``.
        return self._round_values(values.detach()) + (values - values.detach())


def _round_mxfp4(values: Tensor) -> Tensor:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    mode = ScaleCalculationMode.RCEIL  # the default of torchao's MXDynamicActivationMXWeightConfig
    return MXTensor.to_mx(values.contiguous(), torch.float4_e2m1fn_x2, _MX_BLOCK, mode).dequantize(values.dtype)


def _round_nvfp4_weight(weight: Tensor) -> Tensor:
    """Round a weight (rows, columns) with torchao's scale for the complete matrix beside those of blocks."""
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    scale = per_tensor_amax_to_scale(weight.abs().max())
    return NVFP4Tensor.to_nvfp4(weight.contiguous(), _NV_BLOCK, scale).dequantize(weight.dtype)


def _round_nvfp4_tokens(inputs: Tensor) -> Tensor:
    """Round inputs (..., features) as NVFP4 does, but with a scale for each token in place of one for all of them."""
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    tokens = inputs.float().flatten(0, -2)
    scales = per_tensor_amax_to_scale(tokens.abs().amax(-1, keepdim=True)).clamp(min=torch.finfo(torch.float32).tiny)
    rounded = NVFP4Tensor.to_nvfp4(tokens / scales, _NV_BLOCK).dequantize(torch.float32) * scales
    return rounded.view(inputs.shape).to(inputs.dtype)


def use_float8(model: Any, towers: Towers) -> None:
    """Let linear layers of the language model multiply in float8, in place; not its head. A CPU emulates it.

    A layer stays as it is if a dimension of its weight is no multiple of 16. Raise a ConfigError if this GPU cannot
    multiply float8 numbers.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    on_gpu = torch.cuda.is_available()
    if on_gpu and torch.cuda.get_device_capability() < _MIN_CAPABILITY:
        raise ConfigError(
            f"--fp8 true: {torch.cuda.get_device_name()} cannot multiply float8 numbers",
            "It needs compute capability 8.9 or higher (Ada, Hopper, Blackwell); leave --fp8 out.",
        )
    if next(model.parameters()).is_meta:  # for estimates of memory, which float8 does not change
        return

    head = model.get_output_embeddings()
    float8_layers = set()
    for _, linear in _text_layers(model, towers):
        has_valid_shape = all(size % _FLOAT8_MULTIPLE == 0 for size in linear.weight.shape)
        if linear is not head and has_valid_shape:
            float8_layers.add(linear)
    recipe: Any = Float8LinearConfig.from_recipe_name("rowwise")  # rows and columns have their own scales
    # ``pad_inner_dim`` pads the number of tokens to a multiple of 16, in the product for a weight's gradient.
    float8_config = dataclasses.replace(recipe, pad_inner_dim=True, emulate=not on_gpu)
    convert_to_float8_training(model, config=float8_config, module_filter_fn=lambda module, _: module in float8_layers)
