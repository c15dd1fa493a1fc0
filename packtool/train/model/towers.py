"""Parts of a model that are frozen, adapted and trained at a rate of their own: tower, aligner, language model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from packtool.config.model import ModelPart
from packtool.config.train import TrainConfig
from packtool.encode.families import Towers, family_of
from packtool.errors import UnsupportedModelError


def towers_of(model: nn.Module, model_type: str) -> Towers:
    """Where the parts of a model lie; everything is language model in one of text alone.

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
    return dataclasses.replace(towers, unused=(*towers.unused, *_left_out(model), *_behind_features(model, towers)))


def _left_out(model: nn.Module) -> Iterator[str]:
    """The modules that settings of the model leave out, as MiniCPM's do that keep four times as many tokens."""
    if getattr(model.config, "downsample_mode", None) == "4x":
        yield from (name for name, _ in model.named_modules() if name.endswith(".vit_merger"))


def _behind_features(model: nn.Module, towers: Towers) -> Iterator[str]:
    """The modules of a vision tower that are behind the layer whose output is taken for features, as LLaVA has it."""
    # VipLLaVA's has the other name before transformers 5.23.
    chosen = getattr(model.config, "vision_feature_layer", getattr(model.config, "vision_feature_layers", None))
    if chosen is None or not towers.vision:
        return
    chosen = [chosen] if isinstance(chosen, int) else list(chosen)
    for name, module in model.get_submodule(towers.vision[0]).named_modules(prefix=towers.vision[0]):
        if name.endswith(".post_layernorm"):
            yield name
        elif isinstance(module, nn.ModuleList):
            # Outputs are counted from the embeddings on, which are number 0.
            used = max(layer if layer >= 0 else len(module) + 1 + layer for layer in chosen)
            yield from (f"{name}.{number}" for number in range(used, len(module)))


# What peft puts before the names of a model's own parameters.
_ADAPTED = "base_model.model."


@dataclass(frozen=True)
class PartRates:
    """Where the parts lie, and their peak learning rates.

    Args:
        towers: of the model.
        rates: of the parts that do not have ``--learning-rate``.
    """

    towers: Towers
    rates: Mapping[ModelPart, float]

    @classmethod
    def of(cls, config: TrainConfig, model: nn.Module) -> PartRates | None:
        """What the options say of a model, bare or adapted; None if all parts learn at one rate."""
        given: dict[ModelPart, float | None] = {"vision tower": config.vit_lr, "aligner": config.aligner_lr}
        rates = {part: rate for part, rate in given.items() if rate is not None}
        if not rates:
            return None
        inner: Any = model
        if hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        return cls(towers_of(inner, inner.config.model_type), rates)


def split_groups(
    groups: Sequence[dict[str, Any]], names: Mapping[int, str], part_rates: PartRates
) -> Iterator[dict[str, Any]]:
    """An optimizer's groups, each split by the part of the model that its parameters belong to.

    Args:
        names: of parameters by their ``id``.
    """
    for group in groups:
        by_rate: dict[float | None, list[Any]] = {}
        for parameter in group["params"]:
            part = part_rates.towers.part_of(names[id(parameter)].removeprefix(_ADAPTED))
            by_rate.setdefault(part_rates.rates.get(part), []).append(parameter)
        for rate, parameters in by_rate.items():
            yield {**group, "params": parameters} | ({} if rate is None else {"lr": rate})
