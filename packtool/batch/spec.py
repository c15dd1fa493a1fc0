"""A model's configuration as collation needs it: picklable for DataLoader workers, and without weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.integrations import deepspeed as transformers_deepspeed
from transformers.utils import logging

from packtool.batch.media_cache import MediaCache
from packtool.batch.micro_batch import Tower
from packtool.config.data import AccessOptions, MediaCacheOptions
from packtool.config.model import LearningOptions
from packtool.config.train import LossReduction
from packtool.encode.families import FAMILIES, Family, MediaLimits, family_of, is_multimodal
from packtool.encode.media_spans import MediaTokens
from packtool.errors import ConfigError
from packtool.planning.cost import CostModel
from packtool.rows.media_policy import MediaPolicy, policy_for_cache
from packtool.rows.sample import MediaKind


@dataclass(frozen=True)
class InputSpec:
    """A model as collation needs it.

    Args:
        model: directory (or hub id) of its processors.
        config: the model's configuration; of an Omni model its thinker's.
        limits: bounds on media that the cache was exported with.
        loss_reduction: ``sample`` weights labels so that each sample's mean counts once.
    """

    model: str
    config: PreTrainedConfig
    limits: MediaLimits
    loss_reduction: LossReduction = "token"
    media_policy: MediaPolicy = policy_for_cache(AccessOptions())
    media_cache: MediaCache | None = field(default=None, compare=False)

    @classmethod
    def load(cls, model: str, limits: MediaLimits, access: AccessOptions | None = None) -> InputSpec:
        """Read the configuration of ``model``; ConfigError for a multimodal model that packtool cannot train."""
        config = model_config(model)
        if is_multimodal(config.to_dict()) and not (family := family_of(config.to_dict())).kinds:
            known = [model_type for family in FAMILIES if family.kinds for model_type in family.model_types]
            raise ConfigError(
                f"the model's type is {config.model_type!r}, a multimodal family that packtool can export for, but not "
                f"train{f': {family.refused}' if family.refused else ' yet'}",
                f"Those it can train are {', '.join(known)}, and every model of text alone.",
            )
        return cls(model, config, limits, media_policy=policy_for_cache(access or AccessOptions()))

    def with_media_cache(self, options: MediaCacheOptions, name: str) -> InputSpec:
        """Return this specification with the media cache of the options, or itself if they name none.

        ``name`` identifies the token caches whose media are read (``MediaCache``).
        """
        directory = options.media_cache
        if directory is None:
            return self
        if os.path.exists(directory) and not os.path.isdir(directory):
            raise ConfigError(f"--media-cache {directory} is a file: give a directory, which need not be there yet")
        if self.family.processor_inputs:
            raise ConfigError(
                f"--media-cache keeps what is resized to the size that the export counted, and pictures of models of "
                f"this family ({self.family.title}) are made by their own processor",
                "Leave it out.",
            )
        return replace(self, media_cache=MediaCache.of(options, name))

    @cached_property
    def family(self) -> Family:
        """The record of the model's family."""
        return family_of(self.config.to_dict())

    @property
    def has_vision(self) -> bool:
        """True if the model accepts images."""
        return "image" in self.family.kinds

    @property
    def has_mrope(self) -> bool:
        """True if its position ids have four rows [text, t, h, w]."""
        return self.has_vision and self.family.positions != "counted"

    @property
    def whole_pictures(self) -> Literal["", "all", "windows"]:
        """The layers in which the tokens of a picture see each other in both directions."""
        text_config: Any = self.config.get_text_config()
        layers = self.family.whole_pictures
        is_set = getattr(text_config, "use_bidirectional_attention", None) == "vision"
        return "" if layers == "windows" and not is_set else layers

    @property
    def has_audio(self) -> bool:
        """True if the model accepts audio."""
        return "audio" in self.family.kinds

    @property
    def towers(self) -> frozenset[Tower]:
        """The towers of the model."""
        towers: dict[Tower, bool] = {"vision": self.has_vision, "sound": self.has_audio}
        return frozenset(tower for tower, is_present in towers.items() if is_present)

    @cached_property
    def tower_costs(self) -> CostModel:
        """Cost model of the towers."""
        return CostModel.of_config(self.config.to_dict(), LearningOptions())

    @cached_property
    def pad_ids(self) -> dict[MediaKind, int]:
        """The placeholder token of each kind of medium."""
        named = self.family.pads_in(self.config.to_dict())
        is_optional = {"video"} if self.family.processor_inputs else set()  # rows with videos are dropped
        if missing := [kind for kind in self.family.kinds if kind not in named and kind not in is_optional]:
            remedy = "Take config.json from the model's own repository."
            raise ConfigError(f"config.json names no {missing[0]}_token_id", remedy)
        return named

    def model_ids(self, input_ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return token ids (L,) for the model's forward: those of pictures for videos that it gets as pictures."""
        pad_id = self.pad_ids.get("video") if self.family.video_outputs else None
        if pad_id is None:
            return input_ids
        return np.where(input_ids == pad_id, self.pad_ids["image"], input_ids).astype(input_ids.dtype)

    @cached_property
    def media_tokens(self) -> MediaTokens:
        """The tokens that mark media in a sample."""
        return MediaTokens.of(self.config.to_dict())

    @cached_property
    def meta_model(self) -> Any:
        """The model without its head, on the meta device, for its methods and sizes; made once per process."""
        auto: Any = AutoModel
        with without_zero3(), torch.device("meta"):
            return auto.from_config(self.config)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the model and the family record, which another process creates itself."""
        return {name: value for name, value in vars(self).items() if name not in ("meta_model", "family")}

    @property
    def patch_dim(self) -> int:
        """Number of values in one row of ``pixel_values``."""
        vision = self.config.vision_config
        return int(vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)

    @property
    def num_mel_bins(self) -> int:
        """Number of values in one frame of ``input_features``, for models that accept audio."""
        return int(self.config.audio_config.num_mel_bins)


def model_config(model: str) -> PreTrainedConfig:
    """Return the configuration of the trained model: for an Omni model that of its thinker, without the talker."""
    logs: Any = logging
    verbosity = logs.get_verbosity()
    if "thinker_config" in PreTrainedConfig.get_config_dict(model)[0]:
        # transformers warns about every talker's token ids, and about rope settings that it reads itself.
        logs.set_verbosity_error()
    try:
        config = AutoConfig.from_pretrained(model)
    finally:
        logs.set_verbosity(verbosity)
    thinker = getattr(config, "thinker_config", None)
    return thinker if isinstance(thinker, PreTrainedConfig) else config


def auto_class(config: PreTrainedConfig) -> Any:
    """Return transformers' auto class that loads a model of this configuration with its language head."""
    takes_images = type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if takes_images else AutoModelForCausalLM


@contextmanager
def without_zero3() -> Iterator[None]:
    """Build models without ZeRO-3 inside the context: in this process only, with complete weights."""
    hook: Any = transformers_deepspeed
    sharded = hook._hf_deepspeed_config_weak_ref
    hook._hf_deepspeed_config_weak_ref = None
    try:
        yield
    finally:
        hook._hf_deepspeed_config_weak_ref = sharded
