"""Qwen2.5-Omni: its thinker is what is trained.

Qwen3-Omni: its thinker is what is trained.
"""

from __future__ import annotations

from packtool.encode.families.boxes import BoxForm
from packtool.encode.families.record import Family, Towers, encoded_by

QWEN2_5_OMNI = Family(
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


QWEN3_OMNI = Family(
    title="Qwen3-Omni (its thinker)",
    model_types=("qwen3_omni_moe", "qwen3_omni_moe_thinker"),
    encoding=encoded_by("qwen_omni.QwenOmni", is_qwen3=True),
    kinds=("image", "video", "audio"),
    towers=Towers(
        vision=("model.visual", "model.audio_tower"),
        aligner=(
            "model.visual.merger",
            "model.visual.merger_list",
            "model.audio_tower.proj1",
            "model.audio_tower.proj2",
        ),
    ),
    positions="sound_seconds",
    mel_frames=4,
    sound_chunk=(100, 13),
    boxes=BoxForm(spelling="lists", scale="thousandths"),
)

FAMILIES = (QWEN2_5_OMNI, QWEN3_OMNI)
