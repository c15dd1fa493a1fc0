"""Qwen2.5-Omni: its thinker is what is trained."""

from __future__ import annotations

from packtool.encode.families.boxes import BoxForm
from packtool.encode.families.record import Family, Towers, encoded_by

FAMILY = Family(
    title="Qwen2.5-Omni (its thinker)",
    model_types=("qwen2_5_omni", "qwen2_5_omni_thinker"),
    encoding=encoded_by("qwen_omni.QwenOmni", is_qwen3=False),
    kinds=("image", "video", "audio"),
    towers=Towers(
        vision=("model.visual", "model.audio_tower"),
        aligner=("model.visual.merger",),
        unused=("model.audio_tower.audio_bos_eos_token",),
    ),
    positions="sound_seconds",
    mel_frames=4,
    sound_chunk=(4, 1),
    boxes=BoxForm(spelling="lists", scale="pixels"),
)
