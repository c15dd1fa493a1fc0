"""How many numbers a model has, however they are spread over processes."""

from __future__ import annotations

from torch import Tensor, nn


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
