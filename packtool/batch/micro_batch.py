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
        places: with Skrull, the placement of each sample, in the order of the packs; see ``EpochPlan.places``.
        towers: towers for which at least one rank has media in this micro-batch number; None if unknown.
        read_again: for each sample, True if the next epoch contains it too; None if all are, or if unknown.
        shared_by: sequence parallel size of this micro-batch; None for the run's default.
    """

    packs: Sequence[Sequence[Any]]
    places: Sequence[int] | None = None
    towers: frozenset[Tower] | None = None
    read_again: Sequence[bool] | None = None
    shared_by: int | None = None

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
        shared_by: sequence parallel size of each micro-batch; None for the run's default.
    """

    def __init__(
        self,
        plan: EpochPlan,
        has_media: Mapping[Tower, npt.NDArray[np.bool_] | None] | None = None,
        read_again: npt.NDArray[np.bool_] | None = None,
        shared_by: int | None = None,
    ) -> None:
        self.plan, self._read_again, self.shared_by = plan, read_again, shared_by
        # For each tower, the micro-batches in which it has media on some rank, bool (M,).
        self._has_media: dict[Tower, npt.NDArray[np.bool_]] | None = None
        if has_media is not None:
            num_micro_batches = int(plan.steps.step_offsets[-1]) // plan.steps.world_size
            self._has_media = {
                tower: np.ones(num_micro_batches, np.bool_)
                if samples is None
                else plan.steps.on_any_rank(plan.packs.sums_per_pack(samples[plan.packs.samples].astype(np.int64)) > 0)
                for tower, samples in has_media.items()
            }

    def micro_batch(self, step: int, rank: int, number: int) -> MicroBatch:
        """Return micro-batch ``number`` of a step on one data-parallel rank."""
        plan = self.plan
        packs = [pack.tolist() for pack in plan.samples(step, rank, number)]
        places = plan.placement_of(step, rank, number)
        index = int(plan.steps.step_offsets[step]) // plan.steps.world_size + number
        towers = None
        if self._has_media is not None:
            towers = frozenset(tower for tower, has_media in self._has_media.items() if has_media[index])
        again = None
        if self._read_again is not None:
            again = [bool(self._read_again[sample]) for pack in packs for sample in pack]
        return MicroBatch(packs, None if places is None else places.tolist(), towers, again, self.shared_by)

    def steps(self, rank: int, first: int = 0) -> Iterator[tuple[MicroBatch, ...]]:
        """Yield the micro-batches of each step from ``first`` on, for one data-parallel rank."""
        for step in range(first, self.plan.steps.num_steps):
            num = self.plan.steps.num_micro_batches(step)
            yield tuple(self.micro_batch(step, rank, number) for number in range(num))
