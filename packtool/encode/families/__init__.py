"""One small file for each family of models that sees or hears."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packtool.config.rows import MediaOptions
from packtool.encode.families import qwen_omni, qwen_vl
from packtool.encode.families.base import (
    AudioLimits,
    Family,
    ImageLimits,
    Kind,
    MediaLimits,
    Medium,
    Part,
    VideoLimits,
)
from packtool.encode.model_files import ModelFiles

__all__ = [
    "AudioLimits",
    "Family",
    "ImageLimits",
    "Kind",
    "MediaLimits",
    "Medium",
    "Part",
    "VideoLimits",
    "family_of",
    "is_multimodal",
]

_MODALITY_KEYS = ("vision_config", "audio_config", "thinker_config")


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Whether a model of this ``config.json`` takes more than text."""
    known = (*qwen_vl.MODEL_TYPES, *qwen_omni.MODEL_TYPES)
    return config.get("model_type") in known or any(key in config for key in _MODALITY_KEYS)


def family_of(files: ModelFiles, options: MediaOptions) -> Family | None:
    """The family of a model with the user's limits, None for a model of text alone.

    Raises:
        ConfigError: for a multimodal model whose processor cannot be used, or limits that contradict each other.
    """
    if not is_multimodal(files.config):
        return None
    if files.model_type in qwen_vl.MODEL_TYPES:
        return qwen_vl.QwenVL(files, options)
    if files.model_type in qwen_omni.MODEL_TYPES:
        return qwen_omni.QwenOmni(files, options)
    # Here, because it needs transformers.
    from packtool.encode.families.processor import ProcessorFamily

    return ProcessorFamily(files, options)
