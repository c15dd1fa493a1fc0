"""Sounds become mel frames, through the model's own feature extractor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoFeatureExtractor

from packtool.batch.spec import InputSpec
from packtool.encode.encoded import EncodedAudio, EncodedSample
from packtool.encode.media_spans import sounds_in_order
from packtool.errors import MediaError
from packtool.media.audio import load_audio
from packtool.media.measure import EXPORT_AGAIN


def load_sounds(samples: Sequence[EncodedSample], spec: InputSpec) -> dict[str, Tensor]:
    """Mel frames of all sounds of some samples, those of videos among them, in the order of their placeholder tokens.

    Returns:
        ``input_features`` float32 (sounds, bins, frames) and ``feature_attention_mask`` int64 (sounds, frames), padded
        to the longest; nothing if there is no sound.

    Raises:
        MediaError: naming a file that cannot be read, or is no longer as long as it was.
    """
    found = [
        _features(sound, path, data, sample, spec)
        for sample in samples
        for sound, path, data in sounds_in_order(sample, spec.media_tokens)
    ]
    if not found:
        return {}
    longest = max(features.shape[1] for features in found)
    input_features = torch.zeros(len(found), found[0].shape[0], longest)
    mask = torch.zeros(len(found), longest, dtype=torch.int64)
    for i, features in enumerate(found):
        input_features[i, :, : features.shape[1]] = features
        mask[i, : features.shape[1]] = 1
    return {"input_features": input_features, "feature_attention_mask": mask}


def _features(
    sound: EncodedAudio, path: str | None, data: bytes | None, sample: EncodedSample, spec: InputSpec
) -> Tensor:
    """Mel frames of one sound, float32 (bins, frames)."""
    limits = spec.limits.audio
    assert limits is not None, "a sample with sound for a model without limits"
    wave = load_audio(path, data, limits.sampling_rate, sound.num_samples, spec.media_policy)
    extractor = _extractor(spec.model)
    cut: dict[str, Any] = {"padding": True, "truncation": False}
    if limits.max_features is not None:
        # The processor pads to five minutes. Behind a second of silence more of it changes no frame that is kept.
        padded = -(-len(wave) // extractor.hop_length) * extractor.hop_length + limits.sampling_rate
        cut = {"padding": "max_length", "max_length": min(padded, extractor.n_samples), "truncation": True}
    made = extractor(wave, sampling_rate=limits.sampling_rate, return_attention_mask=True, return_tensors="pt", **cut)
    count = int(made["attention_mask"].sum())
    if count != sound.num_features:
        raise MediaError(
            f"{path or 'an embedded sound'} (row {sample.row} of {sample.source}) has changed since the export: "
            f"it had {sound.num_features} mel frames, now it has {count}",
            f"Put the file back, or {EXPORT_AGAIN}",
        )
    features: Tensor = made["input_features"][0, :, :count]
    return features


@lru_cache(maxsize=4)
def _extractor(model: str) -> Any:
    auto: Any = AutoFeatureExtractor
    return auto.from_pretrained(model)
