"""Qwen2-VL, which writes boxes in pictures between control tokens.

Qwen2.5-VL, which writes boxes in pixels and is else as Qwen2-VL.

Qwen3-VL, dense and with experts: features of several levels of its tower go into the text (DeepStack).

Qwen3.5, dense and with experts: three of four layers are gated delta nets, in its text-only models too.

Qwen3-Next: text alone, with gated delta nets among its layers.
"""

from __future__ import annotations

from packtool.encode.families.boxes import BoxForm
from packtool.encode.families.record import Family, Recurrence, Towers, encoded_by

QWEN2_VL = Family(
    title="Qwen2-VL",
    model_types=("qwen2_vl",),
    encoding=encoded_by("qwen_vl.QwenVL", is_qwen3=False),
    kinds=("image", "video"),
    towers=Towers(vision=("model.visual",), aligner=("model.visual.merger",)),
    boxes=BoxForm(spelling="tokens", scale="thousandths"),
)


QWEN2_5_VL = Family(
    title="Qwen2.5-VL",
    model_types=("qwen2_5_vl",),
    encoding=encoded_by("qwen_vl.QwenVL", is_qwen3=False),
    kinds=("image", "video"),
    towers=Towers(vision=("model.visual",), aligner=("model.visual.merger",)),
    boxes=BoxForm(spelling="lists", scale="pixels"),
)


QWEN3_VL = Family(
    title="Qwen3-VL",
    model_types=("qwen3_vl", "qwen3_vl_moe"),
    encoding=encoded_by("qwen_vl.QwenVL", is_qwen3=True),
    kinds=("image", "video"),
    towers=Towers(vision=("model.visual",), aligner=("model.visual.merger", "model.visual.deepstack_merger_list")),
    boxes=BoxForm(spelling="lists", scale="thousandths"),
)


QWEN3_5 = Family(
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


QWEN3_NEXT = Family(
    title="Qwen3-Next",
    model_types=("qwen3_next",),
    recurrence=Recurrence(text_types=("qwen3_next",), layers=("Qwen3NextGatedDeltaNet",), has_joint_inputs=True),
)

FAMILIES = (QWEN2_VL, QWEN2_5_VL, QWEN3_VL, QWEN3_5, QWEN3_NEXT)
