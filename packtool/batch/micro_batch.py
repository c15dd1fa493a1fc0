"""Planned micro-batches: which samples each holds, before anything is loaded. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from packtool.planning.epoch import EpochPlan

Tower = Literal["vision", "sound"]
"""Encoder of images and videos, and encoder of audio; a model calls each at most once per micro-batch."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Samples of one micro-batch of one rank.

    Args:
        packs: the samples of each pack (or padded row): positions in the caches, or the samples of a stream.
        placement: with Skrull, the rank of each sample or ``SHARDED``, in the order of the packs; see ``EpochPlan``.
        towers: towers for which at least one rank has media in this micro-batch number; None if unknown.
        read_again: for each sample, True if the next epoch contains it too; None if all are, or if unknown.
        sequence_parallel_size: number of ranks that share the sequence; None for the run's default.
    """

    packs: Sequence[Sequence[Any]]
    placement: Sequence[int] | None = None
    towers: frozenset[Tower] | None = None
    read_again: Sequence[bool] | None = None
    sequence_parallel_size: int | None = None

    @property
    def samples(self) -> list[Any]:
        """The samples of all packs, in pack order."""
        return [sample for pack in self.packs for sample in pack]


class PlannedEpoch:
    """The micro-batches of an epoch by step, rank and number.

    Args:
        has_media: for each tower, whether each sample has media for it, bool (N,) by position in the cache, or None if
            any sample may. Without ``has_media`` the ``towers`` of micro-batches are None (unknown).
        read_again: whether the next epoch contains each sample too, bool (N,); None for all.
    """

    def __init__(
        self,
        plan: EpochPlan,
        has_media: Mapping[Tower, npt.NDArray[np.bool_] | None] | None = None,
        read_again: npt.NDArray[np.bool_] | None = None,
        sequence_parallel_size: int | None = None,
    ) -> None:
        self.plan, self._read_again, self._sequence_parallel_size = plan, read_again, sequence_parallel_size
        # For each tower, whether any rank has media for it in a micro-batch: bool (M,), micro-batches of all steps.
        self._runs_in: dict[Tower, npt.NDArray[np.bool_]] | None = None
        if has_media is not None:
            self._runs_in = {tower: self._micro_batches_with(samples) for tower, samples in has_media.items()}

    def _micro_batches_with(self, has_media: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.bool_]:
        """Return the micro-batches in which at least one rank has a sample with media: bool (M,); all for None."""
        packs, steps = self.plan.packs, self.plan.steps
        if has_media is None:
            return np.ones(int(steps.step_offsets[-1]) // steps.world_size, np.bool_)
        num_with_media = packs.sums_per_pack(has_media[packs.samples].astype(np.int64))
        return steps.on_any_rank(num_with_media > 0)

    def micro_batch(self, step: int, rank: int, number: int) -> MicroBatch:
        """Return micro-batch ``number`` of a step on one data-parallel rank."""
        packs = [pack.tolist() for pack in self.plan.samples(step, rank, number)]
        ranks = self.plan.placement_of(step, rank, number)
        placement = None if ranks is None else ranks.tolist()
        towers = None
        if self._runs_in is not None:
            steps = self.plan.steps
            num_earlier = int(steps.step_offsets[step]) // steps.world_size
            towers = frozenset(tower for tower, runs in self._runs_in.items() if runs[num_earlier + number])
        read_again = None
        if self._read_again is not None:
            read_again = [bool(self._read_again[sample]) for pack in packs for sample in pack]
        return MicroBatch(packs, placement, towers, read_again, self._sequence_parallel_size)

    def steps(self, rank: int, first: int = 0) -> Iterator[tuple[MicroBatch, ...]]:
        """Yield the micro-batches of each step from ``first`` on, for one data-parallel rank."""
        for step in range(first, self.plan.steps.num_steps):
            num_micro_batches = self.plan.steps.num_micro_batches(step)
            yield tuple(self.micro_batch(step, rank, number) for number in range(num_micro_batches))
