"""Qwen2.5-VL, which writes boxes in pixels and is else as Qwen2-VL."""

from __future__ import annotations

from packtool.encode.families.boxes import BoxForm
from packtool.encode.families.record import Family, Towers, encoded_by

FAMILY = Family(
    title="Qwen2.5-VL",
    model_types=("qwen2_5_vl",),
    encoding=encoded_by("qwen_vl.QwenVL", is_qwen3=False),
    kinds=("image", "video"),
    towers=Towers(vision=("model.visual",), aligner=("model.visual.merger",)),
    boxes=BoxForm(spelling="lists", scale="pixels"),
)
