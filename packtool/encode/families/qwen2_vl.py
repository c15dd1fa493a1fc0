"""Qwen2-VL, which writes boxes in pictures between control tokens."""

from __future__ import annotations

from packtool.encode.families.boxes import BoxForm
from packtool.encode.families.record import Family, Towers, encoded_by

FAMILY = Family(
    title="Qwen2-VL",
    model_types=("qwen2_vl",),
    encoding=encoded_by("qwen_vl.QwenVL", is_qwen3=False),
    kinds=("image", "video"),
    towers=Towers(vision=("model.visual",), aligner=("model.visual.merger",)),
    boxes=BoxForm(spelling="tokens", scale="thousandths"),
)
