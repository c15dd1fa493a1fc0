"""The whole plan of an epoch, from the cache's lengths to its steps: what training starts from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.errors import DataError
from packtool.plan.packing import PackPlan, pack_best_fit, pack_singletons
from packtool.plan.steps import StepPlan, plan_steps


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What decides a plan, besides lengths, seed and epoch.

    Args:
        max_length: longer samples are left out and counted.
        packing_length: tokens that a pack may hold.
        packing: False makes every sample a pack of its own, for padded batches.
        packing_num_proc: shown in the summary; the plan is made in one process and is the same for any number.
        world_size: data-parallel ranks, W.
        gradient_accumulation_steps: micro-batches of a step on each rank, G.
        packs_per_micro_batch: packs (or padded rows) of a micro-batch, B: ``--per-device-train-batch-size``.
    """

    max_length: int
    packing_length: int
    packing: bool = True
    packing_num_proc: int = 1
    world_size: int = 1
    gradient_accumulation_steps: int = 1
    packs_per_micro_batch: int = 1


@dataclass(frozen=True, kw_only=True)
class PlanSummary:
    """What is worth printing before an epoch starts.

    Args:
        num_cached: samples in the cache.
        num_filtered: those longer than ``max_length``, left out.
        num_samples: those in the plan, one length each.
        num_tokens: tokens of the samples in the plan.
        num_target_tokens: labels that carry loss among them.
        longest: tokens of the longest sample in the plan.
        packing: as in ``PlanOptions``.
        max_length, packing_length, packing_num_proc: as in ``PlanOptions``.
        num_packs: packs; without packing, padded rows.
        lower_bound: packs of ``packing_length`` that the tokens need at least.
        fill: true tokens over all tokens computed, 0 to 1. With packing over ``num_packs * packing_length``; without,
            over the batches, each padded to its longest row.
        num_steps: optimizer steps.
        num_steps_without_packing: steps if each pack were one sample: ceil(num_samples / (B * G * W)).
        num_empty_micro_batches: micro-batches of the last step that carry no sample.
    """

    num_cached: int
    num_filtered: int
    num_samples: int
    num_tokens: int
    num_target_tokens: int
    longest: int
    packing: bool
    max_length: int
    packing_length: int
    packing_num_proc: int
    num_packs: int
    lower_bound: int
    fill: float
    num_steps: int
    num_steps_without_packing: int
    num_empty_micro_batches: int

    @property
    def samples_per_pack(self) -> float:
        """Mean."""
        return self.num_samples / self.num_packs


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """Packs, steps and figures of an epoch; ``packs.samples`` are positions in the cache."""

    packs: PackPlan
    steps: StepPlan
    summary: PlanSummary

    @cached_property
    def fingerprint(self) -> str:
        """sha256 in hex over packs and steps: ranks whose fingerprints are equal will train the same epoch."""
        return hashlib.sha256(f"{self.packs.fingerprint} {self.steps.fingerprint}".encode()).hexdigest()

    def samples(self, step: int, rank: int, micro_batch: int) -> tuple[npt.NDArray[np.int64], ...]:
        """Cache positions of the samples of each pack of a micro-batch."""
        return tuple(self.packs.pack(int(pack)) for pack in self.steps.packs(step, rank, micro_batch))


def plan_epoch(
    lengths: npt.NDArray[np.integer[Any]],
    target_tokens: npt.NDArray[np.integer[Any]],
    options: PlanOptions,
    *,
    seed: int,
    epoch: int = 0,
) -> EpochPlan:
    """Filter, pack and deal: a pure function, the same on every rank and machine.

    The number of packs and steps depends on the lengths and options only; every epoch has as many as the first.

    Args:
        lengths: (N,), tokens of each sample of the cache.
        target_tokens: (N,), labels of each that carry loss.
        options: see ``PlanOptions``.
        seed: of the run.
        epoch: 0-based; every epoch has new companions and a new order.

    Raises:
        ConfigError: an option is not positive.
        DataError: no sample is left, or some are longer than a pack.
    """
    assert len(lengths) == len(target_tokens)
    kept = np.flatnonzero(lengths <= options.max_length).astype(np.int64)
    if len(kept) == 0:
        raise DataError(
            f"No sample is left to train on: the cache holds {len(lengths):,}, "
            f"and all are longer than --max-length {options.max_length}."
            if len(lengths)
            else "No sample is left to train on: the cache is empty.",
            "Raise --max-length, or export other rows.",
        )
    if len(kept) == len(lengths):
        packs = _pack(lengths, options, seed, epoch)
    else:
        packs = _pack(lengths[kept], options, seed, epoch)
        packs = PackPlan(kept[packs.samples], packs.offsets, packs.lengths, packs.capacity)
    steps = plan_steps(
        packs,
        target_tokens,
        world_size=options.world_size,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        packs_per_micro_batch=options.packs_per_micro_batch,
    )
    return EpochPlan(packs, steps, _summarize(packs, steps, options, num_cached=len(lengths)))


def padded_fill(packs: PackPlan, steps: StepPlan) -> float:
    """True tokens over all tokens of batches in which each row is padded to the longest of its micro-batch, 0 to 1."""
    sizes = steps.cell_sizes()
    used = sizes > 0
    longest = np.maximum.reduceat(packs.tokens_per_pack()[steps.order], steps.cell_offsets[:-1][used])
    return packs.num_tokens / int((longest * sizes[used]).sum())


def _pack(lengths: npt.NDArray[np.integer[Any]], options: PlanOptions, seed: int, epoch: int) -> PackPlan:
    if options.packing:
        return pack_best_fit(lengths, options.packing_length, seed=seed, epoch=epoch)
    return pack_singletons(lengths, options.packing_length, seed=seed, epoch=epoch)


def _summarize(packs: PackPlan, steps: StepPlan, options: PlanOptions, num_cached: int) -> PlanSummary:
    samples_per_step = options.world_size * options.gradient_accumulation_steps * options.packs_per_micro_batch
    return PlanSummary(
        num_cached=num_cached,
        num_filtered=num_cached - packs.num_samples,
        num_samples=packs.num_samples,
        num_tokens=packs.num_tokens,
        num_target_tokens=int(steps.target_tokens_per_step.sum()),
        longest=int(packs.lengths.max()),
        packing=options.packing,
        max_length=options.max_length,
        packing_length=options.packing_length,
        packing_num_proc=options.packing_num_proc,
        num_packs=packs.num_packs,
        lower_bound=packs.lower_bound,
        fill=packs.fill if options.packing else padded_fill(packs, steps),
        num_steps=steps.num_steps,
        num_steps_without_packing=-(-packs.num_samples // samples_per_step),
        num_empty_micro_batches=steps.num_empty_micro_batches,
    )
