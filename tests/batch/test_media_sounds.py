"""Mel frames are the processor's, which pads every sound to minutes of silence."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import WhisperFeatureExtractor

from packtool.batch.media import _mel_frames
from packtool.batch.spec import InputSpec
from packtool.encode.encoded import EncodedAudio
from packtool.encode.families import MediaLimits
from packtool.encode.families.record import AudioLimits
from packtool.media.audio import load_audio
from packtool.rows.media_policy import MediaPolicy
from tests.media.clips import write_sound

RATE, LONGEST_S = 16_000, 3


@pytest.mark.parametrize("seconds", [0.002, 0.05, 0.8, 1.99, 2.003, 2.995, 3.5])
def test_one_second_of_silence_has_the_features_of_minutes(seconds: float, tmp_path: Path) -> None:
    """To the last bit, below the longest sound, near it, and above it, where the rest is cut off."""
    extractor: Any = WhisperFeatureExtractor(feature_size=128, chunk_length=LONGEST_S)
    extractor.save_pretrained(tmp_path / "model")
    path = str(write_sound(tmp_path / "a.wav", seconds, RATE))
    count = int(seconds * RATE)
    wave = load_audio(path, None, RATE, count, MediaPolicy())
    features = extractor(
        wave, sampling_rate=RATE, return_attention_mask=True, return_tensors="pt", padding="max_length"
    )
    num_frames = int(features["attention_mask"].sum())
    limits = MediaLimits(audio=AudioLimits(RATE, 160, LONGEST_S * 100, False, 25, 2))
    config: Any = SimpleNamespace()
    spec = InputSpec(str(tmp_path / "model"), config, limits, media_policy=MediaPolicy())
    sample: Any = SimpleNamespace(row=0, source="rows.jsonl")
    mel_frames = _mel_frames(EncodedAudio(path, None, count, num_frames, 1), path, None, sample, spec)
    assert mel_frames.shape == (128, num_frames)
    assert torch.equal(mel_frames, features["input_features"][0, :, :num_frames])
