"""One small file for each family of models that sees or hears."""

from __future__ import annotations

from typing import Any

from packtool.encode.families import qwen_vl
from packtool.encode.families.base import Family, ImageLimits, ImageTokens
from packtool.errors import ConfigError

__all__ = ["Family", "ImageLimits", "ImageTokens", "family_of"]

_MODALITY_KEYS = ("vision_config", "audio_config", "thinker_config")


def family_of(config: dict[str, Any]) -> Family | None:
    """The family of a model's ``config.json``, None for a model of text alone.

    Raises:
        ConfigError: for a multimodal model whose family is not known.
    """
    model_type = config.get("model_type")
    if model_type in qwen_vl.MODEL_TYPES:
        return qwen_vl.QwenVL()
    if any(key in config for key in _MODALITY_KEYS):
        raise ConfigError(
            f"the model's type is {model_type!r}, a multimodal family that packtool does not know yet",
            f"Known are {', '.join(qwen_vl.MODEL_TYPES)}, and every model of text alone.",
        )
    return None
