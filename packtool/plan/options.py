"""What decides the plan of an epoch."""

from __future__ import annotations

from dataclasses import dataclass, field

from packtool.config.packing import StepOptions
from packtool.plan.cost import CostModel
from packtool.plan.skrull_steps import SkrullOptions


@dataclass(frozen=True, kw_only=True)
class PlanOptions(StepOptions):
    """What decides a plan, besides lengths, seed and epoch: the options as they were declared, and what they come to.

    ``--per-device-train-batch-size`` is B here, packs (or padded rows) of a micro-batch, and
    ``--gradient-accumulation-steps`` is G, micro-batches of a step on each rank.

    Args:
        max_length: longer samples are left out and counted.
        packing_length: tokens that a pack may hold.
        packing: False makes every sample a pack of its own, for padded batches.
        world_size: data-parallel ranks, W.
        cost: what a pack costs to train; needed for balancing, and for figures.
        skrull: the samples of each step are assigned by Skrull, see ``skrull``; what packs decide is who shares a step.
    """

    max_length: int = field()
    packing_length: int = field()
    packing: bool = True
    world_size: int = 1
    cost: CostModel | None = None
    skrull: SkrullOptions | None = None

    @property
    def packs_per_step(self) -> int:
        """Packs (or padded rows) of a full optimizer step over all ranks, W * G * B."""
        return self.world_size * self.gradient_accumulation_steps * self.per_device_train_batch_size

    @property
    def samples_per_plain_step(self) -> int:
        """Samples of a full optimizer step over all ranks where nothing is packed."""
        return self.samples_per_step or self.packs_per_step
