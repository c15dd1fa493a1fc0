"""Groups of like samples in groups of like packs: what histogram packers decide, and how samples get their places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packtool.plan.pack_plan import Int32Array, Int64Array
from packtool.plan.shuffle import CHUNK

PackRange = tuple[int, int, int]
"""Packs that are alike: (number of the first, how many, samples each holds). Their numbers follow one another."""


@dataclass(frozen=True, eq=False)
class Placements:
    """Which packs take how many samples, in the order in which the lengths were placed.

    Placement ``i`` gives ``per_pack[i]`` samples of ``length[i]`` tokens to each of the ``num_packs[i]`` packs from
    ``first_pack[i]`` on, behind the ``slot[i]`` samples that each of them holds already.

    Args:
        first_pack, num_packs, slot, per_pack, length: int64 (P,).
        pack_sizes: int64 (K,), samples in every pack.
    """

    first_pack: npt.NDArray[np.int64]
    num_packs: npt.NDArray[np.int64]
    slot: npt.NDArray[np.int64]
    per_pack: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    pack_sizes: npt.NDArray[np.int64]

    @classmethod
    def of_rows(cls, rows: Sequence[int], ranges: Sequence[PackRange]) -> Placements:
        """From a flat list of five numbers a placement, as above, and from all packs, in any order."""
        table = np.array(rows, dtype=np.int64).reshape(-1, 5)
        of_packs = np.array(sorted(ranges), dtype=np.int64).reshape(-1, 3)
        first_pack, num_packs, slot, per_pack, length = np.ascontiguousarray(table.T)
        return cls(first_pack, num_packs, slot, per_pack, length, np.repeat(of_packs[:, 2], of_packs[:, 1]))

    @property
    def num_packs_in_all(self) -> int:
        """The number K of packs."""
        return len(self.pack_sizes)


def falling_histogram(lengths: Int32Array) -> tuple[Int64Array, Int64Array]:
    """Distinct lengths, the longest first, and how many samples have each."""
    longest = int(lengths.max(initial=0))
    if longest > max(1 << 20, 4 * len(lengths)):
        # Few samples, long ones: an array as long as the longest would be mostly zeros.
        distinct, counts = np.unique(lengths, return_counts=True)
        return distinct[::-1].astype(np.int64), counts[::-1].astype(np.int64)
    bins = np.zeros(longest + 1, dtype=np.int64)
    # bincount copies what is not int64: a slice at a time keeps that copy small.
    step = max(CHUNK, len(bins))
    for start in range(0, len(lengths), step):
        bins += np.bincount(lengths[start : start + step], minlength=len(bins))
    values = np.flatnonzero(bins)[::-1].astype(np.int64)
    return values, bins[values]


def reorder_groups(values: Int64Array, counts: Int64Array, order: Int64Array) -> Int64Array:
    """Bring groups of ``counts[i]`` neighbours in ``values`` into another order."""
    starts = np.cumsum(counts) - counts
    new_counts = counts[order]
    new_starts = np.cumsum(new_counts) - new_counts
    where: Int64Array = np.repeat(starts[order] - new_starts, new_counts)
    where += np.arange(len(values))
    return values[where]


def fill_slots(by_length: Int64Array, placements: Placements, starts: Int64Array) -> tuple[Int64Array, Int32Array]:
    """Put the samples in the slots that the placements gave to their length.

    Args:
        by_length: (N,), sample numbers, grouped by length in the order of the placements.
        starts: (K,), where each pack of ``placements`` begins in the plan.

    Returns:
        ``samples`` and ``lengths`` of the plan.
    """
    num = len(by_length)
    samples = np.empty(num, dtype=np.int64)
    pack_lengths = np.empty(num, dtype=np.int32)
    first_item = np.zeros(len(placements.slot) + 1, dtype=np.int64)
    np.cumsum(placements.num_packs * placements.per_pack, out=first_item[1:])
    assert first_item[-1] == num
    for start in range(0, num, CHUNK):
        stop = min(start + CHUNK, num)
        first = int(np.searchsorted(first_item, start, side="right")) - 1
        last = int(np.searchsorted(first_item, stop, side="left"))
        edges = np.clip(first_item[first : last + 1], start, stop)
        repeats = edges[1:] - edges[:-1]
        here = slice(first, last)
        # Item i of a placement goes to its pack i // per_pack, there behind i % per_pack others of this placement.
        item = np.arange(start, stop) - np.repeat(first_item[here], repeats)
        per_pack = np.repeat(placements.per_pack[here], repeats)
        pack = item // per_pack
        item -= pack * per_pack
        item += np.repeat(placements.slot[here], repeats)
        pack += np.repeat(placements.first_pack[here], repeats)
        item += starts[pack]
        samples[item] = by_length[start:stop]
        pack_lengths[item] = np.repeat(placements.length[here], repeats)
    return samples, pack_lengths
