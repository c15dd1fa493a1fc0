"""What decides the plan of an epoch."""

from __future__ import annotations

from dataclasses import dataclass

from packtool.config.packing import Balance, PackingAlgorithm
from packtool.plan.cost import CostModel
from packtool.plan.packing import PackOptions
from packtool.plan.skrull_steps import SkrullOptions


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What decides a plan, besides lengths, seed and epoch.

    Args:
        max_length: longer samples are left out and counted.
        packing_length: tokens that a pack may hold.
        packing: False makes every sample a pack of its own, for padded batches.
        packing_num_proc: processes that pack windows; the plan is the same for any number.
        packing_algorithm, packing_window, packing_batch_size, look_ahead, max_samples_per_pack,
            max_media_tokens_per_pack, shuffle: how samples are packed, see ``packing.PackOptions``.
        world_size: data-parallel ranks, W.
        gradient_accumulation_steps: micro-batches of a step on each rank, G.
        packs_per_micro_batch: packs (or padded rows) of a micro-batch, B: ``--per-device-train-batch-size``.
        balance: how packs are dealt to ranks, see ``plan_steps``.
        cost: what a pack costs to train; needed for balancing, and for figures.
        group_by_length: without packing, rows of about one length share a batch.
        dynamic_batch_tokens: without packing, micro-batches by tokens instead of by count, see ``dynamic``.
        dynamic_max_batch_size: most samples of such a micro-batch.
        skrull: the samples of each step are dealt by Skrull, see ``skrull``; what packs decide is who shares a step.
    """

    max_length: int
    packing_length: int
    packing: bool = True
    packing_num_proc: int = 1
    world_size: int = 1
    gradient_accumulation_steps: int = 1
    packs_per_micro_batch: int = 1
    balance: Balance = "none"
    cost: CostModel | None = None
    group_by_length: bool = False
    dynamic_batch_tokens: int | None = None
    dynamic_max_batch_size: int | None = None
    skrull: SkrullOptions | None = None
    packing_algorithm: PackingAlgorithm = "best_fit"
    packing_window: int | None = None
    packing_batch_size: int = 1000
    look_ahead: int = 64
    max_samples_per_pack: int | None = None
    max_media_tokens_per_pack: int | None = None
    shuffle: bool = True

    @property
    def pack_options(self) -> PackOptions:
        """The part that decides which samples share a pack."""
        return PackOptions(
            capacity=self.packing_length,
            algorithm=self.packing_algorithm,
            window=self.packing_window,
            num_proc=self.packing_num_proc,
            batch_size=self.packing_batch_size,
            look_ahead=self.look_ahead,
            max_samples=self.max_samples_per_pack,
            max_media_tokens=self.max_media_tokens_per_pack,
            shuffle=self.shuffle,
        )

    @property
    def packs_per_step(self) -> int:
        """Packs (or padded rows) of a full optimizer step over all ranks, W * G * B."""
        return self.world_size * self.gradient_accumulation_steps * self.packs_per_micro_batch
