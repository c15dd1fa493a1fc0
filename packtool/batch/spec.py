"""What collation must know of a model: picklable, so that DataLoader workers can have it, and without weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from transformers import AutoConfig, PreTrainedConfig

from packtool.encode.families import ImageLimits, is_multimodal
from packtool.encode.families.qwen_vl import MODEL_TYPES
from packtool.errors import ConfigError


@dataclass(frozen=True)
class InputSpec:
    """A model as seen by collation.

    Args:
        model: directory (or hub id) whose image processor makes the pixels.
        config: the model's configuration.
        limits: bounds on a picture's size that the cache was made with; None for a model of text alone.
    """

    model: str
    config: PreTrainedConfig
    limits: ImageLimits | None

    @classmethod
    def load(cls, model: str, limits: ImageLimits | None) -> InputSpec:
        """Read the configuration of ``model``.

        Raises:
            ConfigError: for a multimodal model whose inputs packtool cannot make.
        """
        config = AutoConfig.from_pretrained(model)
        if is_multimodal(config.to_dict()) and config.model_type not in MODEL_TYPES:
            raise ConfigError(
                f"the model's type is {config.model_type!r}, a multimodal family that packtool cannot train yet",
                f"Known are {', '.join(MODEL_TYPES)}, and every model of text alone.",
            )
        return cls(model, config, limits)

    @cached_property
    def sees(self) -> bool:
        """Whether the model takes pictures; then its position ids have four rows [text, t, h, w]."""
        return is_multimodal(self.config.to_dict())

    @property
    def image_pad_id(self) -> int | None:
        """The token that stands for a piece of a picture."""
        return int(self.config.image_token_id) if self.sees else None

    @property
    def patch_dim(self) -> int:
        """Numbers in one row of ``pixel_values``."""
        vision = self.config.vision_config
        return int(vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)
