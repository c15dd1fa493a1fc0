"""Options that determine the plan of an epoch, besides lengths, seed and epoch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from packtool.config.packing import StepOptions
from packtool.errors import ConfigError
from packtool.planning.cost import CostModel, StepTime
from packtool.planning.pack_plan import IntArray


@dataclass(frozen=True, kw_only=True)
class SkrullOptions:
    """Options of Skrull.

    Args:
        bucket_size: maximum tokens of a rank in a micro-batch, C.
        sequence_parallel_size: ranks that share a micro-batch, N; with one, every sequence is local.
        alignment: a sharded sequence is padded to a multiple of it, and takes an N-th of that on every rank.
    """

    bucket_size: int
    sequence_parallel_size: int = 1
    alignment: int = 1
    step_time: StepTime = StepTime()

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence that fits, local or sharded."""
        if self.sequence_parallel_size == 1:
            return self.bucket_size
        return max(self.bucket_size, self.bucket_size * self.sequence_parallel_size // self.alignment * self.alignment)

    def check(self, lengths: IntArray) -> None:
        """Raise a ConfigError if the bucket size is not positive, or sequences of ``lengths`` (n,) do not fit."""
        if self.bucket_size < 1:
            raise ConfigError(f"--bucket-size is {self.bucket_size}; it must be 1 or more.")
        longest, limit, num_ranks = int(np.max(lengths, initial=0)), self.max_length, self.sequence_parallel_size
        if longest <= limit:
            return
        num_over = int(np.count_nonzero(np.asarray(lengths) > limit))
        padded = -(-longest // self.alignment) * self.alignment
        shared = "" if num_ranks == 1 else f", sharded over {num_ranks} ranks"
        raise ConfigError(
            f"--bucket-size {self.bucket_size}: {num_over:,} samples have more than {limit:,} tokens, the most that fit"
            f"{shared}; the longest has {longest:,}",
            f"Raise it to {min(longest, -(-padded // num_ranks))}, let more processes share a micro-batch "
            f"(--sequence-parallel-size), or leave those samples out with --max-length {limit}.",
        )


@dataclass(frozen=True, kw_only=True)
class PlanOptions(StepOptions):
    """Options of an epoch's plan with their resolved values.

    Args:
        max_length: longer samples are left out.
        packing: False makes every sample a pack of its own, for padded batches.
        world_size: number of data-parallel ranks.
        cost: needed for balancing, and for figures.
        skrull: if given, Skrull assigns the samples of each step, and packs only group samples into steps.
    """

    max_length: int = field()
    packing_length: int = field()
    packing: bool = True
    world_size: int = 1
    cost: CostModel | None = None
    skrull: SkrullOptions | None = None

    @property
    def packs_per_step(self) -> int:
        """Packs (or padded rows) of a full optimizer step over all ranks."""
        return self.world_size * self.gradient_accumulation_steps * self.per_device_train_batch_size

    @property
    def samples_per_unpacked_step(self) -> int:
        """Samples of a full optimizer step over all ranks without packing."""
        return self.samples_per_step or self.packs_per_step

    @property
    def packs_before_steps(self) -> bool:
        """False if steps take single samples, to pack each step's own or without packing."""
        return self.packing and self.samples_per_step is None
