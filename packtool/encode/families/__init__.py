"""Families of models: one record (``record.Family``) for each, registered in ``FAMILIES``.

The other modules of this folder have the records, with the ``MediaEncoding`` classes that they use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packtool.config.data import MediaOptions
from packtool.encode.families import glm4v, processed, qwen_omni, qwen_vl
from packtool.encode.families.record import Family as Family
from packtool.encode.families.record import ImageLimits as ImageLimits
from packtool.encode.families.record import MediaEncoding as MediaEncoding
from packtool.encode.families.record import MediaLimits as MediaLimits
from packtool.encode.families.record import Towers as Towers
from packtool.encode.families.record import default_max_length as default_max_length
from packtool.encode.families.record import pad_ids_of as pad_ids_of
from packtool.encode.families.record import text_config_of as text_config_of
from packtool.encode.families.record import thinker_of as thinker_of
from packtool.encode.families.refused import OTHER as OTHER
from packtool.encode.families.refused import REFUSED as REFUSED
from packtool.encode.model_files import ModelFiles

FAMILIES: tuple[Family, ...] = (*qwen_vl.FAMILIES, *qwen_omni.FAMILIES, glm4v.FAMILY, *processed.FAMILIES)
"""All families that can be trained and have a record of their own."""

TEXT = Family(title="text models")
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
