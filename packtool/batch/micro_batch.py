"""What one rank computes at once, before anything of it is read; no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from packtool.planning.epoch import EpochPlan

Tower = Literal["vision", "sound"]
"""What looks at pictures and videos, and what listens; a model runs each of them at most once for a micro-batch."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Samples of one micro-batch of one rank.

    Args:
        packs: of each pack (or padded row) its samples: positions in the caches, or the samples of a stream.
        places: with Skrull, where each sample is computed, in the order of the packs; see ``EpochPlan.places``.
        towers: those that some rank has something for in its micro-batch of the same number; None if nobody knows.
        read_again: of each sample, whether the next epoch has it, too; None if all are, or nobody knows.
        shared_by: ranks that share it; None for as many as in the whole run.
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
        brings: for each tower, whether a sample has something for it, bool (N,) by position in the cache; None for
            perhaps. Without it nobody knows of any.
        read_again: whether the next epoch has a sample, too, bool (N,); None for all.
        shared_by: ranks that share each micro-batch; None for as many as in the whole run.
    """

    def __init__(
        self,
        plan: EpochPlan,
        brings: Mapping[Tower, npt.NDArray[np.bool_] | None] | None = None,
        read_again: npt.NDArray[np.bool_] | None = None,
        shared_by: int | None = None,
    ) -> None:
        self.plan, self._read_again, self.shared_by = plan, read_again, shared_by
        self._runs = None if brings is None else {tower: _on_any_rank(plan, found) for tower, found in brings.items()}

    def micro_batch(self, step: int, rank: int, number: int) -> MicroBatch:
        """One micro-batch of one data-parallel rank."""
        plan = self.plan
        packs = [pack.tolist() for pack in plan.samples(step, rank, number)]
        places = plan.placement_of(step, rank, number)
        index = int(plan.steps.step_offsets[step]) // plan.steps.world_size + number
        towers = None
        if self._runs is not None:
            towers = frozenset(tower for tower, found in self._runs.items() if found[index])
        again = None
        if self._read_again is not None:
            again = [bool(self._read_again[sample]) for pack in packs for sample in pack]
        return MicroBatch(packs, None if places is None else places.tolist(), towers, again, self.shared_by)

    def steps(self, rank: int, first: int = 0) -> Iterator[tuple[MicroBatch, ...]]:
        """The micro-batches of one data-parallel rank in each step from ``first`` on."""
        for step in range(first, self.plan.steps.num_steps):
            num = self.plan.steps.num_micro_batches(step)
            yield tuple(self.micro_batch(step, rank, number) for number in range(num))


def _on_any_rank(plan: EpochPlan, found: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.bool_]:
    """Whether a tower has something to do on some rank, for each micro-batch of the epoch, (M,)."""
    if found is None:
        return np.ones(int(plan.steps.step_offsets[-1]) // plan.steps.world_size, np.bool_)
    return plan.steps.on_any_rank(plan.packs.sums_per_pack(found[plan.packs.samples].astype(np.int64)) > 0)
