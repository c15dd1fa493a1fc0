"""The packs of a plan on pages of samples: which are shown, in the order of their training, and in which steps."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.cache.plan_file import SavedPlan
from packtool.plan.branches import branches_of

Int64Array = npt.NDArray[np.int64]
_STEP, _RANK, _MICRO_BATCH = range(3)


class ShownPacks:
    """The packs that pages show: step by step and rank by rank where the plan says who trains them, else by number.

    Args:
        plan: that they are of.
        most: samples, about; packs are evenly chosen, by whole steps where one has no more than so many.

    Attributes:
        numbers: int64, of the packs in the plan, in the order of the pages.
    """

    def __init__(self, plan: SavedPlan, most: int) -> None:
        self._plan = plan
        self._sizes = np.diff(plan.offsets)
        self._places = None if plan.places is None else _places_of_packs(plan.places, plan.offsets)
        self.numbers = self._chosen(most)

    @property
    def samples(self) -> Int64Array:
        """Numbers of the samples of all packs that are shown, int64 (N,), ascending."""
        held = [self._plan.samples[self._held(pack)] for pack in self.numbers.tolist()]
        return np.unique(np.concatenate(held))

    def pack(self, number: int) -> dict[str, Any]:
        """What the page draws of a pack."""
        here = self._held(number)
        samples = self._plan.samples[here].tolist()
        shared = None if self._plan.shared is None else self._plan.shared[here]
        # A prefix of several samples is nobody's own.
        parts = [
            (samples[branch.first] if branch.num_samples == 1 else None, branch.num_tokens, branch.num_samples)
            for branch in branches_of(self._plan.lengths[here], shared)
        ]
        return {"number": number, "samples": len(samples), "parts": parts}

    def places(self) -> list[Int64Array]:
        """Step, rank and micro-batch, three arrays (K,), of packs that are shown; -1 for several; [] if unknown."""
        return [] if self._places is None else list(self._places[self.numbers].T)

    def steps(self) -> dict[str, Int64Array]:
        """Figures (S,) of the steps that are shown, in their order: of all their packs, also of those not shown."""
        if self._plan.places is None or self._places is None or not len(self.numbers):
            return {}
        step, rank, micro_batch = self._plan.places.T.astype(np.int64)
        num_steps, num_ranks = int(step.max()) + 1, int(rank.max()) + 1
        cells = np.bincount(step * num_ranks + rank, self._plan.lengths, num_steps * num_ranks)
        tokens = cells.astype(np.int64).reshape(num_steps, num_ranks)
        num_micro_batches = np.zeros(num_steps, np.int64)
        np.maximum.at(num_micro_batches, step, micro_batch + 1)
        shown = np.unique(self._places[self.numbers, _STEP])
        figures = {
            "packs": np.bincount(self._places[:, _STEP], minlength=num_steps),
            "microBatches": num_micro_batches,
            "tokens": tokens.sum(axis=1),
            "least": tokens.min(axis=1),
            "most": tokens.max(axis=1),
        }
        return {"number": shown, **{name: column[shown] for name, column in figures.items()}}

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks that have packs; 0 if that is not known."""
        return 0 if self._plan.places is None else int(self._plan.places[:, _RANK].max(initial=-1)) + 1

    def place_of(self, sample: int) -> list[int] | None:
        """Pack, and if they are known step, rank and micro-batch, of a sample; None if it is in no pack."""
        order = self._by_sample
        at = int(np.searchsorted(self._plan.samples, sample, sorter=order))
        if at == len(order) or self._plan.samples[order[at]] != sample:
            return None
        row = int(order[at])
        pack = int(np.searchsorted(self._plan.offsets, row, side="right")) - 1
        return [pack] if self._plan.places is None else [pack, *self._plan.places[row].tolist()]

    @cached_property
    def _by_sample(self) -> Int64Array:
        return np.argsort(self._plan.samples, kind="stable")

    def _held(self, pack: int) -> slice:
        return slice(int(self._plan.offsets[pack]), int(self._plan.offsets[pack + 1]))

    def _chosen(self, most: int) -> Int64Array:
        num_packs = len(self._sizes)
        share = min(1.0, most / max(len(self._plan.samples), 1))
        if self._places is None:
            return evenly(num_packs, max(int(num_packs * share), 1))
        steps = self._places[:, _STEP]
        num_steps = int(steps.max(initial=-1)) + 1
        shown = evenly(num_steps, max(int(num_steps * share), 1))
        packs = np.flatnonzero(np.isin(steps, shown))
        if len(shown) == 1 and (held := int(self._sizes[packs].sum())) > most:
            packs = packs[evenly(len(packs), max(int(len(packs) * most / held), 1))]
        step, rank, micro_batch = self._places[packs].T
        return packs[np.lexsort((packs, micro_batch, rank, step))]


def evenly(count: int, most: int) -> Int64Array:
    """At most so many of the numbers below ``count``, (N,), as far apart from each other as can be."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))


def _places_of_packs(places: npt.NDArray[np.int32], offsets: Int64Array) -> Int64Array:
    """Step, rank and micro-batch of each pack, (K, 3); -1 where its samples have several, as Skrull's may."""
    if len(offsets) == 1:
        return np.empty((0, 3), np.int64)
    first = places[offsets[:-1]]
    is_one = (first == np.maximum.reduceat(places, offsets[:-1])) & (first == np.minimum.reduceat(places, offsets[:-1]))
    return np.where(is_one, first, -1).astype(np.int64)
