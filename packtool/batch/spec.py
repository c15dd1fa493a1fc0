"""What collation must know of a model: picklable, so that DataLoader workers can have it, and without weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, PreTrainedConfig
from transformers.integrations import deepspeed as transformers_deepspeed

from packtool.config.rows import AccessOptions
from packtool.config.train import LossReduction
from packtool.encode.families import MediaLimits, is_multimodal
from packtool.encode.families.qwen_omni import MODEL_TYPES as OMNI_TYPES
from packtool.encode.families.qwen_vl import MODEL_TYPES as VISION_TYPES
from packtool.errors import ConfigError
from packtool.rows.rights import MediaRights, rights_of_cache

Tower = Literal["vision", "sound"]
"""What looks at pictures and videos, and what listens; a model runs each of them at most once for a micro-batch."""


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

    @property
    def towers(self) -> frozenset[Tower]:
        """Those that the model has."""
        found: list[Tower] = ["vision"] * self.sees
        found += ["sound"] * self.hears
        return frozenset(found)

    @cached_property
    def pad_ids(self) -> dict[str, int]:
        """The token that stands for a piece of a medium, by kind."""
        if not self.sees:
            return {}
        kinds = ("image", "video", "audio") if self.hears else ("image", "video")
        return {kind: _token_id(self.config, kind) for kind in kinds}

    @cached_property
    def rope_index(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """The model's ``get_rope_index``: a method, so the model is made without weights, once for each process."""
        auto: Any = AutoModel
        with weights_in_one_piece(), torch.device("meta"):
            found: Callable[..., tuple[Tensor, Tensor]] = auto.from_config(self.config).get_rope_index
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Without the model, which another process makes for itself."""
        return {name: value for name, value in vars(self).items() if name != "rope_index"}

    @property
    def image_pad_id(self) -> int | None:
        """The token that stands for a piece of a picture."""
        return self.pad_ids.get("image")

    @property
    def patch_dim(self) -> int:
        """Numbers in one row of ``pixel_values``."""
        vision = self.config.vision_config
        return int(vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)

    @property
    def num_mel_bins(self) -> int:
        """Numbers in one frame of ``input_features``, of a model that hears."""
        return int(self.config.audio_config.num_mel_bins)


def model_config(model: str) -> PreTrainedConfig:
    """The configuration of what is trained: of an Omni model its thinker, which reads; the talker is left alone."""
    config = AutoConfig.from_pretrained(model)
    thinker = getattr(config, "thinker_config", None)
    return thinker if isinstance(thinker, PreTrainedConfig) else config


@contextmanager
def weights_in_one_piece() -> Iterator[None]:
    """Inside, a model is made by this process alone: under ZeRO-3 transformers would have all of them make it."""
    hook: Any = transformers_deepspeed
    sharded = hook._hf_deepspeed_config_weak_ref
    hook._hf_deepspeed_config_weak_ref = None
    try:
        yield
    finally:
        hook._hf_deepspeed_config_weak_ref = sharded


def _token_id(config: Any, kind: str) -> int:
    for name in (f"{kind}_token_id", f"{kind}_token_index"):
        if getattr(config, name, None) is not None:
            return int(getattr(config, name))
    raise ConfigError(f"config.json names no {kind}_token_id", "Take config.json from the model's own repository.")
