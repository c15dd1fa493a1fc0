"""Which models can be packed without leaks, told from their configuration before any weight is read."""

from __future__ import annotations

import re
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from packtool.errors import UnsupportedModelError

ISOLATED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
"""Layers whose only mixing along the sequence is attention that ``packed_attention`` computes."""

_RECURRENT_SETTING = re.compile(
    r"(^|_)(mamba|ssm|conv_l_cache|linear_(num|key|value|conv)|lru|rwkv|block_types?)", re.I
)
_REMEDY = "Train it with --packing false, or another model."


def refuse_unsupported(config: PreTrainedConfig) -> None:
    """Raise if packed samples of this model could not be kept apart.

    Raises:
        UnsupportedModelError: with the setting of ``config`` that stands in the way.
    """
    name = config.model_type
    model_class = _model_class(config)
    if model_class is None:
        raise UnsupportedModelError(
            f"transformers has no class for a {name!r} model with a language head",
            "Update transformers, or check model_type in the model's config.json.",
        )
    text = config.get_text_config()
    settings: dict[str, Any] = text.to_dict()
    foreign = sorted(set(settings.get("layer_types") or ()) - ISOLATED_LAYER_TYPES)
    if foreign:
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(foreign)}, which mix along the whole row and would leak from one "
            "packed sample into the next",
            _REMEDY,
        )
    recurrent = sorted(key for key in settings if _RECURRENT_SETTING.search(key))
    if recurrent:
        raise UnsupportedModelError(
            f"{name} has recurrent or convolutional layers ({recurrent[0]}), which would leak from one packed sample "
            "into the next",
            _REMEDY,
        )
    if not getattr(model_class, "_supports_attention_backend", False):
        raise UnsupportedModelError(
            f"{model_class.__name__} does not take its attention function from transformers' attention interface, "
            "so packed samples cannot be kept apart",
            _REMEDY,
        )
    if settings.get("is_causal") is False or settings.get("use_bidirectional_attention"):
        raise UnsupportedModelError(f"{name} attends in both directions; packed attention is causal", _REMEDY)
    if settings.get("attn_logit_softcapping"):
        raise UnsupportedModelError(f"{name} uses soft-capped scores, which packed attention does not compute", _REMEDY)


def _model_class(config: PreTrainedConfig) -> type | None:
    """The class with a language head that ``config`` belongs to."""
    for auto in (AutoModelForImageTextToText, AutoModelForCausalLM):
        if type(config) in auto._model_mapping:
            found = auto._model_mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    return None
