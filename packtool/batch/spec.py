"""What collation must know of a model: picklable, so that DataLoader workers can have it, and without weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from packtool.config.rows import AccessOptions
from packtool.config.train import LossReduction
from packtool.encode.families import MediaLimits, is_multimodal
from packtool.encode.families.qwen_omni import MODEL_TYPES as OMNI_TYPES
from packtool.encode.families.qwen_vl import MODEL_TYPES as VISION_TYPES
from packtool.errors import ConfigError
from packtool.rows.rights import MediaRights, rights_of_cache


@dataclass(frozen=True)
class InputSpec:
    """A model as seen by collation.

    Args:
        model: directory (or hub id) whose processors make pixels and mel frames.
        config: the model's configuration; of an Omni model its thinker's.
        limits: bounds on media that the cache was made with.
        loss_reduction: ``sample`` makes labels weigh so that each sample's mean counts once.
        media_rights: which media may be read.
    """

    model: str
    config: PreTrainedConfig
    limits: MediaLimits
    loss_reduction: LossReduction = "token"
    media_rights: MediaRights = rights_of_cache(AccessOptions())

    @classmethod
    def load(cls, model: str, limits: MediaLimits, access: AccessOptions | None = None) -> InputSpec:
        """Read the configuration of ``model``.

        Args:
            access: which media may be read.

        Raises:
            ConfigError: for a multimodal model whose inputs packtool cannot make.
        """
        config = model_config(model)
        known = (*VISION_TYPES, *OMNI_TYPES)
        if is_multimodal(config.to_dict()) and config.model_type not in known:
            raise ConfigError(
                f"the model's type is {config.model_type!r}, a multimodal family that packtool can export for, but not "
                "train yet",
                f"Those it can train are {', '.join(known)}, and every model of text alone.",
            )
        return cls(model, config, limits, media_rights=rights_of_cache(access or AccessOptions()))

    @cached_property
    def sees(self) -> bool:
        """Whether the model takes pictures; then its position ids have four rows [text, t, h, w]."""
        return is_multimodal(self.config.to_dict())

    @property
    def hears(self) -> bool:
        """Whether the model takes sounds."""
        return self.config.model_type in OMNI_TYPES

    @cached_property
    def pad_ids(self) -> dict[str, int]:
        """The token that stands for a piece of a medium, by kind."""
        if not self.sees:
            return {}
        kinds = ("image", "video", "audio") if self.hears else ("image", "video")
        return {kind: _token_id(self.config, kind) for kind in kinds}

    @property
    def image_pad_id(self) -> int | None:
        """The token that stands for a piece of a picture."""
        return self.pad_ids.get("image")

    @property
    def patch_dim(self) -> int:
        """Numbers in one row of ``pixel_values``."""
        vision = self.config.vision_config
        return int(vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)


def model_config(model: str) -> PreTrainedConfig:
    """The configuration of what is trained: of an Omni model its thinker, which reads; the talker is left alone."""
    config = AutoConfig.from_pretrained(model)
    thinker = getattr(config, "thinker_config", None)
    return thinker if isinstance(thinker, PreTrainedConfig) else config


def _token_id(config: Any, kind: str) -> int:
    for name in (f"{kind}_token_id", f"{kind}_token_index"):
        if getattr(config, name, None) is not None:
            return int(getattr(config, name))
    raise ConfigError(f"config.json names no {kind}_token_id", "Take config.json from the model's own repository.")
