"""Sounds become mel frames, through the model's own feature extractor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoFeatureExtractor

from packtool.batch.spec import InputSpec
from packtool.encode.encoded import EncodedAudio, EncodedSample
from packtool.errors import MediaError
from packtool.media.audio import load_audio


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
        for sound, path, data in sounds_in_order(sample, spec)
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


def sounds_in_order(sample: EncodedSample, spec: InputSpec) -> list[tuple[EncodedAudio, str | None, bytes | None]]:
    """(sound, path, bytes) of a sample in the order of their pads: a video's track comes where the video does."""
    audios = [(audio, audio.path, audio.data) for audio in sample.audios]
    tracks = [(video.audio, video.path, video.data) for video in sample.videos if video.audio is not None]
    if not audios or not tracks:
        return [*audios, *tracks]
    # A track's first mark stands right behind the mark that opens its video.
    opening_sound, opening_video = (
        getattr(spec.config, marks[0]) for marks in (spec.family.sound_marks, spec.family.image_marks)
    )
    opens = np.flatnonzero(sample.input_ids == opening_sound)
    is_track = sample.input_ids[opens - 1] == opening_video
    return [tracks.pop(0) if track else audios.pop(0) for track in is_track]


def _features(
    sound: EncodedAudio, path: str | None, data: bytes | None, sample: EncodedSample, spec: InputSpec
) -> Tensor:
    """Mel frames of one sound, float32 (bins, frames)."""
    limits = spec.limits.audio
    assert limits is not None, "a sample with sound for a model without limits"
    wave = load_audio(path, data, limits.sampling_rate, sound.num_samples, spec.media_rights)
    cut = {"padding": True, "truncation": False} if limits.max_features is None else {"padding": "max_length"}
    made = _extractor(spec.model)(
        wave, sampling_rate=limits.sampling_rate, return_attention_mask=True, return_tensors="pt", **cut
    )
    count = int(made["attention_mask"].sum())
    if count != sound.num_features:
        raise MediaError(
            f"{path or 'an embedded sound'} (row {sample.row} of {sample.source}) has changed since the export: "
            f"it had {sound.num_features} mel frames, now it has {count}",
            "Put the file back, or run packtool export again with --overwrite.",
        )
    features: Tensor = made["input_features"][0, :, :count]
    return features


@lru_cache(maxsize=4)
def _extractor(model: str) -> Any:
    auto: Any = AutoFeatureExtractor
    return auto.from_pretrained(model)
