"""Crowds in a mixture's packs: packs with so many samples of one source that no order of packs spreads it evenly.

The last packs of a packing hold what is left of the short samples. A source with one sample in every eighth pack may
have ten in one of them, and then any window of steps with that pack has too many, or the window before has too few.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from packtool.planning.mixture import Slots
from packtool.planning.options import PlanOptions
from packtool.planning.pack_plan import PackPlan, build_plan, invert_order, select_packs

_MAX_COUNT, _MAX_COUNT_PER_MEAN = 6, 16
"""A pack is crowded if it has more slots of a source than this number, and than this multiple of the mean pack."""
_MAX_TRIES = 256
"""Packs that are tried in a row for an exchange with a crowded one."""
_MAX_FAILURES = 8
"""Crowded packs in a row that stay crowded before the others of the source are left as they are."""


def relieve_crowds(packs: PackPlan, slots: Slots, options: PlanOptions) -> PackPlan:
    """Exchange slots of crowded packs for slots of other packs; the number and order of packs stay the same."""
    exchanges = _Exchanges(packs, slots, options)
    source_of = slots.sources[packs.samples]
    for source, max_count in enumerate(exchanges.max_counts):
        counts = packs.sums_per_pack(source_of == source)
        partners = itertools.cycle(range(packs.num_packs))
        num_failures = 0
        for crowded in np.flatnonzero(counts > max_count).tolist():
            num_failures = 0 if exchanges.relieve(crowded, source, partners) else num_failures + 1
            if num_failures == _MAX_FAILURES:
                break
    return exchanges.changed_plan()


class _Exchanges:
    """Packs of slots while slots are exchanged."""

    def __init__(self, packs: PackPlan, slots: Slots, options: PlanOptions) -> None:
        self._packs, self._slots, self._options = packs, slots, options
        self._changed: dict[int, list[int]] = {}  # the slots of each changed pack
        mean_counts = np.bincount(slots.sources) / max(packs.num_packs, 1)
        self.max_counts = np.maximum(mean_counts * _MAX_COUNT_PER_MEAN, _MAX_COUNT).astype(np.int64).tolist()

    def relieve(self, crowded: int, source: int, partners: Iterator[int]) -> bool:
        """Exchange slots of a crowded pack with ``partners`` until it is not crowded; return False if it still is."""
        num_tries = 0
        while self._count(self._slots_of(crowded), source) > self.max_counts[source]:
            if num_tries == _MAX_TRIES:
                return False
            num_tries = 0 if self._exchange(crowded, next(partners), source) else num_tries + 1
        return True

    def _exchange(self, crowded: int, partner: int, source: int) -> bool:
        """Move slots of ``source`` from a crowded pack to another pack, its partner; return False if none can move.

        The partner may give back one slot of another source, so that both packs stay within their limits.
        """
        crowded_slots, partner_slots = self._slots_of(crowded), self._slots_of(partner)
        # Afterwards the partner has at most half of the maximum. A crowded pack has more, so is never its own partner.
        max_moved = self.max_counts[source] // 2 - self._count(partner_slots, source)
        if max_moved <= 0:
            return False
        crowd = self._longest_first(slot for slot in crowded_slots if self._slots.sources[slot] == source)
        for returned in self._possible_returns(partner_slots, source):
            kept_by_partner = [slot for slot in partner_slots if slot not in returned]
            for moved in self._selections(crowd, kept_by_partner, max_moved):
                new_crowded = [slot for slot in crowded_slots if slot not in moved] + returned
                # It may still be crowded with ``source``, but must not be with the source of the returned slot.
                if self._fits(new_crowded) and not self._is_crowded(new_crowded, of_slots=returned):
                    self._changed[partner] = kept_by_partner + moved
                    self._changed[crowded] = new_crowded
                    return True
        return False

    def _possible_returns(self, pack: list[int], source: int) -> Iterator[list[int]]:
        """Yield what a pack may give for slots of ``source``: nothing, or one of its others, the shortest first."""
        yield []
        others = self._longest_first(slot for slot in pack if self._slots.sources[slot] != source)
        for slot in reversed(others):
            yield [slot]

    def _is_crowded(self, pack: list[int], of_slots: list[int]) -> bool:
        """Return whether a pack has too many slots of the source of one of these slots."""
        sources = self._slots.sources[of_slots].tolist()
        return any(self._count(pack, source) > self.max_counts[source] for source in sources)

    def _selections(self, crowd: list[int], pack: list[int], max_moved: int) -> Iterator[list[int]]:
        """Yield lists of slots of the crowd that fit into a pack together, each beginning with a shorter slot."""
        for start in range(len(crowd)):
            selection = self._select_fitting(crowd[start:], pack, max_moved)
            if selection:
                yield selection

    def _select_fitting(self, crowd: list[int], pack: list[int], max_moved: int) -> list[int]:
        """Select the first slots of the crowd that fit into a pack together."""
        free_tokens = self._packs.capacity - int(self._slots.lengths[pack].sum())
        moved: list[int] = []
        for slot in crowd:
            length = int(self._slots.lengths[slot])
            if length <= free_tokens and self._fits([*pack, *moved, slot]):
                moved.append(slot)
                free_tokens -= length
            if len(moved) == max_moved:
                break
        return moved

    def _longest_first(self, slots: Iterable[int]) -> list[int]:
        return sorted(slots, key=lambda slot: -self._slots.lengths[slot])

    def _fits(self, pack: list[int]) -> bool:
        """Check the slots of a pack against all budgets; a pack without slots does not fit."""
        max_media, max_samples = self._options.max_media_tokens_per_pack, self._options.max_samples_per_pack
        if not pack or (max_samples is not None and len(pack) > max_samples):
            return False
        if max_media is not None and self._slots.media_tokens[pack].sum() > max_media:
            return False
        return bool(self._slots.lengths[pack].sum() <= self._packs.capacity)

    def _count(self, pack: list[int], source: int) -> int:
        return int(np.count_nonzero(self._slots.sources[pack] == source))

    def _slots_of(self, pack: int) -> list[int]:
        return self._changed[pack] if pack in self._changed else self._packs.pack(pack).tolist()

    def changed_plan(self) -> PackPlan:
        """Return the packs after all exchanges."""
        if not self._changed:
            return self._packs
        changed = np.array(list(self._changed), np.int64)
        unchanged = np.setdiff1d(np.arange(self._packs.num_packs), changed)
        unchanged_sizes = np.diff(self._packs.offsets)[unchanged]
        changed_sizes = [len(pack) for pack in self._changed.values()]
        samples = np.concatenate((select_packs(self._packs, unchanged).samples, *self._changed.values()))
        sizes = np.concatenate((unchanged_sizes, changed_sizes))
        plan = build_plan(samples, sizes, self._slots.lengths, self._packs.capacity)
        return select_packs(plan, invert_order(np.concatenate((unchanged, changed))))
