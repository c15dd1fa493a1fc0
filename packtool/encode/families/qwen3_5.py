"""Qwen3.5, dense and with experts: three of four layers are gated delta nets, in its text-only models too."""

from __future__ import annotations

from packtool.encode.families.boxes import BoxForm
from packtool.encode.families.record import Family, Recurrence, Towers, encoded_by

FAMILY = Family(
    title="Qwen3.5",
    model_types=("qwen3_5", "qwen3_5_moe"),
    encoding=encoded_by("qwen_vl.QwenVL", is_qwen3=True),
    kinds=("image", "video"),
    towers=Towers(vision=("model.visual",), aligner=("model.visual.merger",)),
    recurrence=Recurrence(
        text_types=("qwen3_5_text", "qwen3_5_moe_text"), layers=("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
    ),
    boxes=BoxForm(spelling="lists", scale="thousandths"),
)
