"""What a step holds, over all ranks: the denominators of everything that is logged."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.plan.cost import CostModel
from packtool.plan.epoch import EpochPlan, pack_costs
from packtool.plan.skrull_steps import SkrullSteps, computed_tokens

_PEAKS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L20": 119.5,
    "A10": 125.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "V100": 125.0,
}
"""TFLOP/s of dense bf16 (fp16 where there is no bf16) matrix products, by the makers' data sheets."""


@dataclass(frozen=True)
class StepFigures:
    """Figures of one optimizer step, or of several added up.

    Args:
        target_tokens: labels that carry loss.
        units: what the loss is divided by: target tokens, or samples with ``--loss-reduction sample``.
        tokens: of all samples.
        computed_tokens: that the model runs over, or that the packs would hold: ``tokens`` over this is the fill.
        attended: sum of len^2 over samples.
        attended_dense: the same if every pack were one text.
        flops: forward and backward, by the model's sizes; 0 if they are not known.
    """

    target_tokens: int = 0
    units: int = 0
    tokens: int = 0
    computed_tokens: int = 0
    attended: int = 0
    attended_dense: int = 0
    flops: float = 0.0

    def __add__(self, other: StepFigures) -> StepFigures:
        return StepFigures(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def logged(self) -> dict[str, float]:
        """The figures under the names of a log line."""
        found: dict[str, float] = {"target_tokens": self.target_tokens, "tokens": self.tokens}
        found["fill"] = self.tokens / max(self.computed_tokens, 1)
        found["efficient_attn_ratio"] = self.attended / max(self.attended_dense, 1)
        return found


@dataclass(frozen=True, eq=False)
class SampleFigures:
    """What is known of the samples of a cache beforehand; arrays by cache position.

    Args:
        target_tokens: labels that carry loss.
        media_tokens: pads of media.
        units: what each sample adds to the loss's denominator.
        cost: FLOPs, None if nobody knows.
        is_seen: whether a sample has pictures or videos; None for perhaps.
        is_heard: whether it has sounds, or videos with one; None for perhaps.
    """

    target_tokens: npt.NDArray[np.integer[Any]]
    media_tokens: npt.NDArray[np.integer[Any]]
    units: npt.NDArray[np.integer[Any]]
    cost: CostModel | None
    is_seen: npt.NDArray[np.bool_] | None = None
    is_heard: npt.NDArray[np.bool_] | None = None


def figures_of_steps(plan: EpochPlan, samples: SampleFigures, *, is_dynamic: bool) -> Iterator[StepFigures]:
    """The figures of every step of an epoch.

    Args:
        is_dynamic: micro-batches hold no padding although nothing is packed.
    """
    packs, steps = plan.packs, plan.steps
    tokens = packs.tokens_per_pack()
    if plan.places is not None and plan.summary.skrull is not None:
        dealt = SkrullSteps(packs, steps, plan.places)
        computed = steps.sums_per_step(computed_tokens(dealt, plan.summary.skrull.options.alignment))
    elif plan.summary.packing:
        computed = steps.sums_per_step(np.full(packs.num_packs, packs.capacity))
    elif is_dynamic:
        computed = steps.sums_per_step(tokens)
    else:
        computed = _padded(plan)
    flops = np.zeros(packs.num_packs)
    if samples.cost is not None:
        flops = pack_costs(packs, samples.cost, samples.target_tokens, samples.media_tokens)
    columns: tuple[npt.NDArray[Any], ...] = (
        steps.target_tokens_per_step,
        steps.sums_per_step(packs.sums_per_pack(samples.units[packs.samples])),
        steps.sums_per_step(tokens),
        computed,
        steps.sums_per_step(packs.sum_squares_per_pack()),
        steps.sums_per_step(np.square(tokens.astype(np.int64))),
    )
    counts = zip(*(column.tolist() for column in columns), strict=True)
    for numbers, cost in zip(counts, steps.sums_per_step(flops).tolist(), strict=True):
        targets, units, true, ran, attended, dense = numbers
        yield StepFigures(targets, units, true, ran, attended, dense, cost)


def peak_tflops(device_name: str) -> float | None:
    """Peak dense TFLOP/s in 16 bits of a GPU by its name, or None if it is not known."""
    return next((peak for name, peak in _PEAKS.items() if name in device_name), None)


def _padded(plan: EpochPlan) -> npt.NDArray[np.int64]:
    """Tokens that every step's rows have, each padded to the longest of its micro-batch, (S,)."""
    steps = plan.steps
    sizes = steps.cell_sizes()
    longest = np.zeros(len(sizes), np.int64)
    lengths = plan.packs.tokens_per_pack()[steps.order]
    longest[sizes > 0] = np.maximum.reduceat(lengths, steps.cell_offsets[:-1][sizes > 0])
    before = np.concatenate(([0], np.cumsum(longest * sizes)))
    return np.diff(before[steps.step_offsets])
