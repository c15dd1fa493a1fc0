"""How many numbers a model has, however they are spread over processes."""

from __future__ import annotations

from torch import nn


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """The number of trainable parameters, and of all."""
    sizes = [(whole_size(parameter), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, trainable in sizes if trainable), sum(size for size, _ in sizes)


def whole_size(parameter: nn.Parameter) -> int:
    """Numbers in a parameter, of which ZeRO-3 leaves a process its share only."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))
