"""Packing over the histogram of lengths: which packer does it, and which sample takes which of a length's places."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from packtool.planning.best_fit import (
    MOST_BITS_FOR_PAIRS,
    Placements,
    falling_histogram,
    fill_slots,
    place_best_fit,
    place_exact_fit,
    reorder_groups,
)
from packtool.planning.pack_plan import Int32Array, Int64Array, PackPlan, in_cache_order, offsets_of, split_to
from packtool.planning.shuffle import RandomStream, seeded_order, seeded_uniform

Placer = Callable[[Sequence[int], Sequence[int]], Placements]
Noise = npt.NDArray[np.float64]

FEW_PER_LENGTH = 10
"""Samples per distinct length below which a strict order leaves little to chance: see ``_place_mixed``."""

GOOD = 1e-4
"""Share of packs over the fewest possible that is not worth a second attempt."""

_SLACK = 4e-4
_EVENNESS = (1.5, 2.0, 3.0, 1e9, 1.0, 0.0)


def pack_histogram(
    lengths: Int32Array,
    capacity: int,
    *,
    max_samples: int | None = None,
    shuffle: bool = True,
    seed: int,
    epoch: int,
    stream: int = 0,
) -> PackPlan:
    """Pack by best fit decreasing; what it gives and costs is told at ``packing.pack_best_fit``.

    Args:
        lengths: (N,), checked.
        capacity: tokens that a pack may hold.
        max_samples: samples that a pack may hold.
        shuffle: False fixes everything that is otherwise left to chance, and keeps to the order of the cache.
        seed, epoch: what chance depends on.
        stream: added to the numbers of the streams, see ``shuffle.RandomStream``.
    """
    distinct, counts = falling_histogram(lengths)
    if max_samples is not None and len(distinct) and capacity // int(distinct[-1]) <= max_samples:
        max_samples = None
    noise = None
    if shuffle and len(lengths) < FEW_PER_LENGTH * len(distinct):
        noise = seeded_uniform(len(distinct), seed=seed, epoch=epoch, stream=stream + RandomStream.JITTER)
    placements, order, num_packs = _place(distinct, counts, capacity, max_samples, noise)
    if not shuffle:
        by_length = np.argsort(-lengths, kind="stable").astype(np.int64, copy=False)
        return in_cache_order(_filled_slots(by_length, placements, np.arange(placements.num_packs_in_all), capacity))
    by_length = seeded_order(
        len(lengths), seed=seed, epoch=epoch, stream=stream + RandomStream.WITHIN_LENGTH, falling=lengths
    )
    if order is not None:
        by_length = reorder_groups(by_length, counts, order)
    pack_order = seeded_order(
        placements.num_packs_in_all, seed=seed, epoch=epoch, stream=stream + RandomStream.PACK_ORDER
    )
    return split_to(_filled_slots(by_length, placements, pack_order, capacity), num_packs)


def packs_needed(distinct: Int64Array, counts: Int64Array, capacity: int, max_samples: int | None = None) -> int:
    """A number of packs that no packing can do with fewer than.

    Martello and Toth 1990, "Lower bounds and reduction procedures for the bin packing problem" (their L2): samples
    longer than half a pack need one each; of the room beside them, none of the shorter samples from ``k`` tokens on
    can use that beside samples longer than ``capacity - k``; the best ``k`` is taken.

    Args:
        distinct: (L,), lengths, falling.
        counts: (L,), samples of each.
        capacity, max_samples: of a pack.
    """
    if len(distinct) == 0:
        return 0
    below = offsets_of(counts[::-1])  # samples, and below that tokens, of all lengths before
    tokens_below = offsets_of(distinct[::-1] * counts[::-1])
    rising = distinct[::-1]

    def up_to(length: npt.NDArray[np.int64], sums: Int64Array) -> Int64Array:
        return sums[np.searchsorted(rising, length, side="right")]

    half = np.array(capacity // 2)
    smallest = np.concatenate(([0], rising[rising <= capacity // 2]))
    alone = below[-1] - up_to(capacity - smallest, below)
    num_long = up_to(capacity - smallest, below) - up_to(half, below)
    beside = num_long * capacity - (up_to(capacity - smallest, tokens_below) - up_to(half, tokens_below))
    short = up_to(half, tokens_below) - up_to(smallest - 1, tokens_below)
    more = np.maximum(0, -((beside - short) // capacity))
    fewest = int((alone + num_long + more).max())
    return max(fewest, -(-int(below[-1]) // max_samples)) if max_samples else fewest


def _place(
    distinct: Int64Array, counts: Int64Array, capacity: int, max_samples: int | None, noise: Noise | None
) -> tuple[Placements, Int64Array | None, int]:
    """Best fit or, where that needs more packs, exact fit.

    Returns:
        Placements, (L,) the order in which they placed ``distinct`` (None for falling), and the packs of every epoch.
    """
    lengths, nums = distinct.tolist(), counts.tolist()

    def place(lengths: Sequence[int], nums: Sequence[int]) -> Placements:
        return place_best_fit(lengths, nums, capacity, max_samples)

    def place_exactly(evenness: float, noise: Sequence[float] = (0.0,)) -> Placements:
        return place_exact_fit(lengths, nums, capacity, max_samples=max_samples, evenness=evenness, noise=noise)

    fitted = best = place(lengths, nums)
    evenness = None
    good = int(packs_needed(distinct, counts, capacity, max_samples) * (1 + GOOD))
    if fitted.num_packs_in_all > good and (max_samples or lengths[0] <= MOST_BITS_FOR_PAIRS):
        for attempt in _EVENNESS if max_samples else (0.0,):
            tried = place_exactly(attempt)
            if tried.num_packs_in_all < best.num_packs_in_all:
                best, evenness = tried, attempt
            if best.num_packs_in_all <= good:
                break
    # With noise exact fit may need a few packs more than without; all epochs are given as many.
    num_packs = best.num_packs_in_all
    if noise is not None:
        num_packs += 1 + int(num_packs * _SLACK)
    if evenness is None or num_packs >= fitted.num_packs_in_all:
        num_packs = fitted.num_packs_in_all
        return (
            (fitted, None, num_packs)
            if noise is None
            else (*_place_mixed(place, distinct, counts, fitted, noise), num_packs)
        )
    if noise is not None:
        tried = place_exactly(evenness, noise.tolist())
        best = tried if tried.num_packs_in_all <= num_packs else best
    return best, None, num_packs


def _place_mixed(
    place: Placer, distinct: Int64Array, counts: Int64Array, strict: Placements, noise: Noise
) -> tuple[Placements, Int64Array | None]:
    """Place lengths in an order that is falling but for some noise: the most noise that needs no pack more or less.

    On 3,000 lognormal lengths, strictly falling order repeats 69 % of its packs in the next epoch, noise 7 %.

    Args:
        distinct: (L,), falling.
        counts: (L,).
        strict: what strictly falling order gave.
        noise: (L,), from 0 to 1.

    Returns:
        Placements, and (L,) the order in which they placed ``distinct``, None for falling.
    """
    # The more samples a length has, the less noise is needed, and the more packs it costs.
    rarity = len(counts) / int(counts.sum())
    most = 0.1 * rarity * rarity
    for jitter in (most, most / 4, most / 16):
        order = np.argsort(-distinct * (1 + jitter * noise), kind="stable")
        mixed = place(distinct[order].tolist(), counts[order].tolist())
        if mixed.num_packs_in_all == strict.num_packs_in_all:
            return mixed, order
    return strict, None


def _filled_slots(by_length: Int64Array, placements: Placements, order: Int64Array, capacity: int) -> PackPlan:
    """The plan that has the packs in ``order``."""
    sizes = placements.pack_sizes
    offsets = offsets_of(sizes[order])
    starts = np.empty(len(sizes), dtype=np.int64)
    starts[order] = offsets[:-1]
    samples, lengths = fill_slots(by_length, placements, starts)
    return PackPlan(samples, offsets, lengths, capacity)
