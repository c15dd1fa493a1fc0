"""Micro-batches as lists of samples, before anything is read; without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from packtool.planning.epoch import EpochPlan

Tower = Literal["vision", "sound"]
"""Encoder of pictures and videos, and encoder of sounds; a model runs each at most once per micro-batch."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Samples of one micro-batch of one rank.

    Args:
        packs: the samples of each pack (or padded row): positions in the caches, or the samples of a stream.
        places: with Skrull, the placement of each sample, in the order of the packs; see ``EpochPlan.places``.
        towers: those for which some rank has media in its micro-batch of the same number; None if unknown.
        read_again: for each sample, True if the next epoch has it, too; None if all are, or if unknown.
        shared_by: ranks that share it; None for the run's default.
    """

    packs: Sequence[Sequence[Any]]
    places: Sequence[int] | None = None
    towers: frozenset[Tower] | None = None
    read_again: Sequence[bool] | None = None
    shared_by: int | None = None

    @property
    def samples(self) -> list[Any]:
        """The samples of all packs, one pack after the other."""
        return [sample for pack in self.packs for sample in pack]


class PlannedEpoch:
    """The micro-batches of an epoch by step, rank and number.

    Args:
        has_media: for each tower, the samples that have media for it, bool (N,) by position in the cache; None for
            possibly all. Without it the towers of micro-batches are unknown.
        read_again: the samples that the next epoch has, too, bool (N,); None for all.
        shared_by: ranks that share each micro-batch; None for the run's default.
    """

    def __init__(
        self,
        plan: EpochPlan,
        has_media: Mapping[Tower, npt.NDArray[np.bool_] | None] | None = None,
        read_again: npt.NDArray[np.bool_] | None = None,
        shared_by: int | None = None,
    ) -> None:
        self.plan, self._read_again, self.shared_by = plan, read_again, shared_by
        self._runs = {tower: _on_any_rank(plan, samples) for tower, samples in (has_media or {}).items()}
        self._knows_towers = has_media is not None

    def micro_batch(self, step: int, rank: int, number: int) -> MicroBatch:
        """One micro-batch of one data-parallel rank."""
        plan = self.plan
        packs = [pack.tolist() for pack in plan.samples(step, rank, number)]
        places = plan.placement_of(step, rank, number)
        index = int(plan.steps.step_offsets[step]) // plan.steps.world_size + number
        towers = frozenset(tower for tower, runs in self._runs.items() if runs[index]) if self._knows_towers else None
        again = None
        if self._read_again is not None:
            again = [bool(self._read_again[sample]) for pack in packs for sample in pack]
        return MicroBatch(packs, None if places is None else places.tolist(), towers, again, self.shared_by)

    def steps(self, rank: int, first: int = 0) -> Iterator[tuple[MicroBatch, ...]]:
        """The micro-batches of one data-parallel rank in each step from ``first`` on."""
        for step in range(first, self.plan.steps.num_steps):
            num = self.plan.steps.num_micro_batches(step)
            yield tuple(self.micro_batch(step, rank, number) for number in range(num))


def _on_any_rank(plan: EpochPlan, samples: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.bool_]:
    """The micro-batches of the epoch in which a tower has media on some rank, bool (M,)."""
    if samples is None:
        return np.ones(int(plan.steps.step_offsets[-1]) // plan.steps.world_size, np.bool_)
    return plan.steps.on_any_rank(plan.packs.sums_per_pack(samples[plan.packs.samples].astype(np.int64)) > 0)
