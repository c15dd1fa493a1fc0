"""Strategies beside each other: how long their steps take, who waits, and what does not fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.config.simulate import StrategyName
from packtool.errors import DataError
from packtool.plan.balance import imbalance
from packtool.plan.shuffle import RandomStream, seeded_order
from packtool.plan.skrull import SHARDED
from packtool.simulate.cost import SimulatedSchedule, Timing
from packtool.simulate.strategies import TITLES, Sequences, SimulateOptions, schedule


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a strategy costs, over its simulated steps.

    Args:
        name: of the strategy.
        timing: of every micro-batch.
        num_tokens: true tokens, without padding.
        num_sequences: trained.
        flops: that they need, forward and backward.
        local_share: of its tokens, the part that no other device has a share of, 0 to 1.
        out_of_memory: bool (S,), steps in which a device holds more than it can.
        options: that were simulated.
    """

    name: StrategyName
    timing: Timing
    num_tokens: int
    num_sequences: int
    flops: float
    local_share: float
    out_of_memory: npt.NDArray[np.bool_]
    options: SimulateOptions

    @property
    def title(self) -> str:
        """The strategy's name for tables and pages."""
        return TITLES[self.name]

    @property
    def num_steps(self) -> int:
        """The number S of optimizer steps."""
        return self.timing.schedule.num_steps

    @property
    def seconds_per_token(self) -> float:
        """Seconds of the whole run divided by its true tokens."""
        return float(self.timing.step_seconds.sum()) / self.num_tokens

    def speedup_over(self, other: Outcome) -> float:
        """How many times as many tokens a second."""
        return other.seconds_per_token / self.seconds_per_token

    def figures(self, baseline: Outcome) -> dict[str, Any]:
        """All figures by name, as JSON has them; times in seconds, memory in GB of 10^9 bytes."""
        timing, machine = self.timing, self.options.machine
        steps = timing.step_seconds
        balance = imbalance(timing.busy)
        micro_batches = timing.sums(np.ones(len(timing.ranks)))
        computed = int(timing.schedule.tokens.sum())
        return {
            "strategy": self.name,
            "title": self.title,
            "steps": self.num_steps,
            "sequences_per_step": self.num_sequences / self.num_steps,
            "tokens_per_step": self.num_tokens / self.num_steps,
            "step_seconds": float(steps.mean()),
            "slowest_step_seconds": float(steps.max()),
            "tokens_per_second_per_device": 1 / self.seconds_per_token / machine.world_size,
            "speedup": self.speedup_over(baseline),
            "mfu": self.flops / (float(steps.sum()) * machine.world_size * machine.hardware.peak),
            "balance": float(balance.mean()),
            "worst_balance": float(balance.max()),
            "communication_share": float(timing.waited.sum() / steps.sum()),
            "shares": timing.shares,
            "local_share": self.local_share,
            "padding_share": 1 - self.num_tokens / computed,
            "micro_batches": float(micro_batches.max(axis=1).mean()),
            "peak_memory_gb": float(timing.memory.max()) / 1e9,
            "most_tokens_on_a_device": int(np.ceil(timing.tokens.max())),
            "out_of_memory_steps": int(self.out_of_memory.sum()),
        }


def arrange(
    lengths: npt.NDArray[np.integer[Any]],
    options: SimulateOptions,
    targets: npt.NDArray[np.integer[Any]] | None = None,
) -> tuple[Sequences, int]:
    """The sequences in an order drawn by the seed, without those that no strategy could train; how many these are.

    Args:
        lengths: (N,), tokens.
        targets: (N,), those with a label; None for all.

    Raises:
        DataError: if none is left, or one has no tokens.
    """
    if len(lengths) and int(lengths.min()) < 1:
        raise DataError(f"{int(np.count_nonzero(lengths < 1)):,} samples have no tokens.", "Remove them.")
    order = seeded_order(len(lengths), seed=options.seed, epoch=0, stream=RandomStream.SIMULATED_ORDER)
    kept = order[lengths[order] <= options.longest]
    if not len(kept):
        raise DataError(
            f"No sample is left to simulate: of {len(lengths):,}, none has at most {options.longest:,} tokens, which "
            f"{options.sequence_parallel_size} x {options.bucket_size:,} can hold.",
            "Raise --bucket-size or --sequence-parallel-size.",
        )
    labelled = lengths if targets is None else targets
    found = Sequences(lengths[kept].astype(np.int32), labelled[kept].astype(np.int64))
    return found, len(lengths) - len(kept)


def simulate(sequences: Sequences, names: Iterable[StrategyName], options: SimulateOptions) -> Iterator[Outcome]:
    """Plan and time each strategy, one after the other.

    Price: that of the planners, and O(sequences + micro-batches * N) to time them.

    Args:
        sequences: as ``arrange`` returns them.
        names: of the strategies.
        options: see ``SimulateOptions``.
    """
    for name in names:
        yield outcome(name, schedule(name, sequences, options), sequences, options)


def outcome(name: StrategyName, plan: SimulatedSchedule, sequences: Sequences, options: SimulateOptions) -> Outcome:
    """A schedule with its times, what it trains and where it would run out of memory."""
    machine = options.machine
    cost = machine.sizes.cost
    true, targets = sequences.lengths[plan.samples].astype(np.int64), sequences.targets[plan.samples]
    timing = machine.time(plan, targets)
    full = (timing.tokens > options.bucket_size) | (timing.memory > machine.usable_bytes)
    steps_over = np.zeros(plan.num_steps, dtype=np.bool_)
    steps_over[plan.cell_steps[plan.row_cells[full]]] = True
    return Outcome(
        name=name,
        timing=timing,
        num_tokens=int(true.sum()),
        num_sequences=len(true),
        flops=float(cost(true, cost.attention(true), target_tokens=targets).sum()),
        local_share=float(true[plan.places != SHARDED].sum() / true.sum()),
        out_of_memory=steps_over,
        options=options,
    )
