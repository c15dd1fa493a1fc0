"""Families of models: a file with one record (``record.Family``) for each, registered in ``FAMILIES``.

The other files of this folder are what several families share: how they count and spell their media.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packtool.config.data import MediaOptions
from packtool.encode.families import by_processor, glm4v, omni, qwen
from packtool.encode.families.by_processor import REFUSED, UNPROVEN
from packtool.encode.families.record import (
    BY_PROCESSOR,
    TEXT_ONLY,
    AudioLimits,
    Family,
    ImageLimits,
    MediaEncoding,
    MediaKind,
    MediaLimits,
    Medium,
    Part,
    Towers,
    VideoLimits,
    default_max_length,
    pad_ids_of,
    text_config_of,
    thinker_of,
)
from packtool.encode.model_files import ModelFiles

__all__ = [
    "FAMILIES",
    "OTHER",
    "REFUSED",
    "TEXT",
    "AudioLimits",
    "Family",
    "ImageLimits",
    "MediaEncoding",
    "MediaKind",
    "MediaLimits",
    "Medium",
    "Part",
    "Towers",
    "VideoLimits",
    "default_max_length",
    "family_of",
    "is_multimodal",
    "media_encoding",
    "pad_ids_of",
    "text_config_of",
    "thinker_of",
]

FAMILIES: tuple[Family, ...] = (
    *qwen.FAMILIES,
    *omni.FAMILIES,
    glm4v.FAMILY,
    *by_processor.FAMILIES,
)
"""All that packtool trains, but for models of text alone, by themselves."""

TEXT = Family(title="text alone")
"""Every other model of text alone."""

OTHER = Family(title="other models with pictures", encoding=BY_PROCESSOR, refused=UNPROVEN)
"""Every other multimodal model: its rows can be exported, through its own processor, but it is not trained."""

_BY_MODEL_TYPE = {model_type: family for family in (*FAMILIES, *REFUSED) for model_type in family.model_types}
_MODALITY_KEYS = ("vision_config", "audio_config", "thinker_config")


def family_of(config: Mapping[str, Any]) -> Family:
    """The record of a model with this ``config.json``; ``TEXT`` or ``OTHER`` for those that have none of their own."""
    other = OTHER if any(key in config for key in _MODALITY_KEYS) else TEXT
    return _BY_MODEL_TYPE.get(str(config.get("model_type")), other)


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Whether a model of this ``config.json`` takes more than text."""
    return family_of(config).encoding is not TEXT_ONLY


def media_encoding(files: ModelFiles, options: MediaOptions) -> MediaEncoding:
    """How a model's media are encoded with the user's limits.

    Raises:
        ConfigError: for a multimodal model whose processor cannot be used, or limits that contradict each other.
    """
    return family_of(files.config).encoding(files, options)
