"""Where the parts of a model lie that are frozen and adapted as one: vision tower, aligner, language model."""

from __future__ import annotations

from torch import nn

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
    return towers
