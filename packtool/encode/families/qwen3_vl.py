"""Qwen3-VL, dense and with experts: features of several levels of its tower go into the text (DeepStack)."""

from __future__ import annotations

from packtool.encode.families.boxes import BoxForm
from packtool.encode.families.record import Family, Towers, encoded_by

FAMILY = Family(
    title="Qwen3-VL",
    model_types=("qwen3_vl", "qwen3_vl_moe"),
    encoding=encoded_by("qwen_vl.QwenVL", is_qwen3=True),
    kinds=("image", "video"),
    towers=Towers(vision=("model.visual",), aligner=("model.visual.merger", "model.visual.deepstack_merger_list")),
    boxes=BoxForm(spelling="lists", scale="thousandths"),
)
