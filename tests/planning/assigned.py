"""Steps of packs, by the numbers that decide them."""

from __future__ import annotations

from typing import Any

from packtool.config.packing import Balance
from packtool.planning.options import PlanOptions
from packtool.planning.pack_plan import PackPlan
from packtool.planning.steps import StepPlan, assign_balanced


def plan_steps(
    packs: PackPlan,
    target_tokens: Any,
    *,
    world_size: int,
    gradient_accumulation_steps: int,
    packs_per_micro_batch: int,
    costs: Any = None,
    balance: Balance = "none",
) -> StepPlan:
    """The steps of packs, in turn or balanced; arguments as of ``PlanOptions`` and ``assign_balanced``."""
    options = PlanOptions(
        max_length=packs.capacity,
        packing_length=packs.capacity,
        world_size=world_size,
        gradient_accumulation_steps=gradient_accumulation_steps,
        per_device_train_batch_size=packs_per_micro_batch,
        balance=balance,
    )
    return StepPlan.of(packs, target_tokens, assign_balanced(packs, costs, options), world_size)
