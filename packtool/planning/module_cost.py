"""A module of a model and its work in the forward pass, for ``layers``, ``counted_layers`` and ``tower_layers``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from packtool.config.model import ModelPart

ModuleKind = Literal["linear", "convolution", "tensor", "no_matmul", "attention"]
"""Linear modules, convolutions, weights without a torch module of their own (experts, routers), modules without
products (norms, embeddings), and attention, which has no weights."""


@dataclass(frozen=True, kw_only=True)
class ModuleCost:
    """A module and its forward work for one unit of its part.

    Args:
        uses_per_unit: uses for a unit of work: a token, or a tile of a picture.
        shares_input: its input is that of the module before.
        layer: number of its layer; None outside of layers.
        flops_per_unit: FLOPs of attention for each unit, whatever the length: states, and windows of towers.
        flops_per_square: FLOPs of attention per unit of the sum of squares, halved for causal attention.
        flops_per_window: FLOPs of attention in windows per unit of ``CostModel.window_squares``.
        flops_per_cross: FLOPs of cross-attention per unit of ``CostModel.per_cross``.
    """

    name: str
    part: ModelPart
    kind: ModuleKind = "linear"
    inputs: int = 0
    outputs: int = 0
    uses_per_unit: float = 1.0
    num_experts: int = 1
    has_bias: bool = False
    shares_input: bool = False
    layer: int | None = None
    flops_per_unit: float = 0.0
    flops_per_square: float = 0.0
    flops_per_window: float = 0.0
    flops_per_cross: float = 0.0

    @property
    def num_products(self) -> float:
        """Multiply-adds with weights for one unit."""
        return 0.0 if self.kind == "no_matmul" else self.uses_per_unit * self.inputs * self.outputs

    @property
    def num_weights(self) -> int:
        """Number of weights without biases."""
        return self.inputs * self.outputs * self.num_experts

    @property
    def weight(self) -> str:
        """Name of the parameter."""
        return self.name if self.kind == "tensor" and ".experts." in self.name else f"{self.name}.weight"


class LanguageModules(NamedTuple):
    """The parts of ``ModelLayers`` that are the language model."""

    language: tuple[ModuleCost, ...]
    head: ModuleCost
    is_tied: bool


def new_module(prefix: str, name: str, inputs: int = 0, outputs: int = 0, **rest: Any) -> ModuleCost:
    """Return a module with a name after the prefix; ``rest`` are other fields of ``ModuleCost``."""
    return ModuleCost(name=prefix + name, inputs=inputs, outputs=outputs, **rest)


def first_setting(config: Mapping[str, Any], *names: str) -> int:
    """Return the first of these settings that is not zero, or its value for the first layer; 0 if none is."""
    value = next((config[name] for name in names if config.get(name)), 0)
    return int(value[0] if isinstance(value, list | tuple) else value)
