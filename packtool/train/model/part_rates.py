"""Learning rates that parts of a model have for themselves: ``--vit-lr`` and ``--aligner-lr``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from packtool.config.model import ModelPart
from packtool.config.train import TrainConfig
from packtool.encode.families import Towers
from packtool.train.model.towers import towers_of

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
