"""Families of models: one record (``record.Family``) for each, registered in ``FAMILIES``.

The other modules of this folder have the records, with the ``MediaEncoding`` classes that they use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packtool.config.data import MediaOptions
from packtool.encode.families import glm4v, processor, qwen_omni, qwen_vl
from packtool.encode.families.processor import OTHER, REFUSED
from packtool.encode.families.record import (
    Family,
    ImageLimits,
    MediaEncoding,
    MediaLimits,
    Towers,
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
    "Family",
    "ImageLimits",
    "MediaLimits",
    "Towers",
    "default_max_length",
    "family_of",
    "is_multimodal",
    "media_encoding",
    "pad_ids_of",
    "text_config_of",
    "thinker_of",
]

FAMILIES: tuple[Family, ...] = (*qwen_vl.FAMILIES, *qwen_omni.FAMILIES, glm4v.FAMILY, *processor.FAMILIES)
"""All families that can be trained and have a record of their own."""

TEXT = Family(title="text alone")
"""All other models of text alone."""

_BY_MODEL_TYPE = {model_type: family for family in (*FAMILIES, *REFUSED) for model_type in family.model_types}
_MODALITY_KEYS = ("vision_config", "audio_config", "thinker_config")


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the record for a ``config.json``; ``TEXT`` or ``OTHER`` for models without a record of their own."""
    other = OTHER if any(key in config for key in _MODALITY_KEYS) else TEXT
    return _BY_MODEL_TYPE.get(str(config.get("model_type")), other)


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Return whether the model of a ``config.json`` supports other inputs than text."""
    return family_of(config).encoding is not None


def media_encoding(files: ModelFiles, options: MediaOptions) -> MediaEncoding:
    """Return the media encoding of a model, with the user's limits."""
    family = family_of(files.config)
    return MediaEncoding() if family.encoding is None else family.encoding(files, options, family)
