"""Qwen3-Next: text alone, with gated delta nets among its layers."""

from __future__ import annotations

from packtool.encode.families.record import Family, Recurrence

FAMILY = Family(
    title="Qwen3-Next",
    model_types=("qwen3_next",),
    recurrence=Recurrence(text_types=("qwen3_next",), layers=("Qwen3NextGatedDeltaNet",), has_joint_inputs=True),
)
