"""Qwen2-VL to Qwen3.5, the thinkers of Qwen2.5-Omni and Qwen3-Omni, and Qwen3-Next, which takes text only."""

from __future__ import annotations

from dataclasses import replace

from packtool.encode.families.boxes import BoxForm
from packtool.encode.families.record import Family, Towers

_LISTS = BoxForm(notation="lists", scale="thousandths")
_PIXELS = BoxForm(notation="lists", scale="pixels")

QWEN2_VL = Family(
    title="Qwen2-VL",
    model_types=("qwen2_vl",),
    encoding="qwen_vl.QwenVL",
    kinds=("image", "video"),
    towers=Towers(vision=("model.visual",), aligner=("model.visual.merger",)),
    boxes=BoxForm(notation="tokens", scale="thousandths"),
)

QWEN2_5_VL = replace(QWEN2_VL, title="Qwen2.5-VL", model_types=("qwen2_5_vl",), boxes=_PIXELS)

QWEN3_VL = replace(
    QWEN2_VL,
    title="Qwen3-VL",
    model_types=("qwen3_vl", "qwen3_vl_moe"),
    is_qwen3=True,
    # Features of several levels of the tower go into the text (DeepStack).
    towers=Towers(vision=("model.visual",), aligner=("model.visual.merger", "model.visual.deepstack_merger_list")),
    boxes=_LISTS,
)

# Three of four layers are gated delta nets, in the text-only models too.
QWEN3_5 = replace(
    QWEN2_VL,
    title="Qwen3.5",
    model_types=("qwen3_5", "qwen3_5_moe"),
    is_qwen3=True,
    recurrent_types=("qwen3_5_text", "qwen3_5_moe_text"),
    recurrent_layers=("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"),
    boxes=_LISTS,
)

QWEN3_NEXT = Family(
    title="Qwen3-Next",
    model_types=("qwen3_next",),
    recurrent_types=("qwen3_next",),
    recurrent_layers=("Qwen3NextGatedDeltaNet",),
    has_joint_inputs=True,
)

QWEN2_5_OMNI = Family(
    title="Qwen2.5-Omni (its thinker)",
    model_types=("qwen2_5_omni", "qwen2_5_omni_thinker"),
    encoding="qwen_omni.QwenOmni",
    kinds=("image", "video", "audio"),
    towers=Towers(
        vision=("model.visual", "model.audio_tower"),
        aligner=("model.visual.merger",),
        unused=("model.audio_tower.audio_bos_eos_token",),
    ),
    positions="sound_seconds",
    mel_frames=4,
    sound_chunk=(4, 1),
    boxes=_PIXELS,
)

_OMNI_ALIGNER = ("visual.merger", "visual.merger_list", "audio_tower.proj1", "audio_tower.proj2")
QWEN3_OMNI = replace(
    QWEN2_5_OMNI,
    title="Qwen3-Omni (its thinker)",
    model_types=("qwen3_omni_moe", "qwen3_omni_moe_thinker"),
    is_qwen3=True,
    towers=Towers(
        vision=("model.visual", "model.audio_tower"), aligner=tuple(f"model.{name}" for name in _OMNI_ALIGNER)
    ),
    sound_chunk=(100, 13),
    boxes=_LISTS,
)

FAMILIES = (QWEN2_VL, QWEN2_5_VL, QWEN3_VL, QWEN3_5, QWEN3_NEXT, QWEN2_5_OMNI, QWEN3_OMNI)
