"""Parts of a model that are frozen, adapted or trained at their own rate: vision tower, aligner, language model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from packtool.config.train import TrainConfig
from packtool.encode.families import Towers, family_of
from packtool.errors import UnsupportedModelError


def base_model(model: Any) -> Any:
    """Return the transformers model inside an adapter, or the model itself if it has none."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Switch a model to evaluation mode; restore each module's mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training


def towers_of(model: nn.Module, model_type: str) -> Towers:
    """Return the names of a model's parts; a text model is all language model.

    Raises:
        UnsupportedModelError: if a part is not where this version of transformers is expected to have it.
    """
    towers = family_of({"model_type": model_type}).towers
    names = {name for named in (model.named_modules(), model.named_parameters()) for name, _ in named}
    for prefix in (*towers.vision, *towers.aligner):
        if prefix not in names:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no module {prefix}: --freeze-vit and --freeze-aligner would miss it",
                "Install a supported version of transformers (see pyproject.toml), or report the model's name.",
            )
    return dataclasses.replace(towers, unused=(*towers.unused, *_unused_modules(model, towers)))


def _unused_modules(model: nn.Module, towers: Towers) -> Iterator[str]:
    """Yield the modules that a model's settings leave out of its forward."""
    # MiniCPM's merger, where the settings keep four times as many tokens.
    if getattr(model.config, "downsample_mode", None) == "4x":
        yield from (name for name, _ in model.named_modules() if name.endswith(".vit_merger"))
    # Vision layers after the one whose output becomes the features, as in LLaVA.
    layers = getattr(model.config, "vision_feature_layer", None)
    if layers is None or not towers.vision:
        return
    feature_layers = [layers] if isinstance(layers, int) else layers
    for name, module in model.get_submodule(towers.vision[0]).named_modules(prefix=towers.vision[0]):
        if name.endswith(".post_layernorm"):
            yield name
        elif isinstance(module, nn.ModuleList):
            # Outputs are counted from the embeddings, which are number 0.
            used = max(layer if layer >= 0 else len(module) + 1 + layer for layer in feature_layers)
            yield from (f"{name}.{number}" for number in range(used, len(module)))


# What peft puts before the names of a model's own parameters.
_ADAPTED = "base_model.model."


def split_by_rate(optimizer: torch.optim.Optimizer, trained: nn.Module, model: nn.Module, config: TrainConfig) -> None:
    """Split an optimizer's parameter groups by ``--vit-lr`` and ``--aligner-lr``, where these are set.

    Args:
        trained: whose parameters the optimizer has; perhaps sharded.
        model: bare or adapted.
    """
    rates = {"vision tower": config.vit_lr, "aligner": config.aligner_lr}
    if set(rates.values()) == {None}:
        return
    base = base_model(model)
    towers = towers_of(base, base.config.model_type)
    names = {id(parameter): name.removeprefix(_ADAPTED) for name, parameter in trained.named_parameters()}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        by_rate: dict[float | None, list[Any]] = {}
        for parameter in group["params"]:
            by_rate.setdefault(rates.get(towers.part_of(names[id(parameter)])), []).append(parameter)
        for rate, parameters in by_rate.items():
            groups.append({**group, "params": parameters} | ({} if rate is None else {"lr": rate}))
    optimizer.param_groups[:] = groups
