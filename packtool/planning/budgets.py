"""Packs with a budget of media tokens beside that of tokens: vectors instead of numbers.

    pack    tokens       media tokens   samples
    limit   10240        4096           16
    used     9870         4091           5       full in what is scarce, nearly full in the rest

Vector packing is hard even to approximate; what helps is to keep each pack on the diagonal: a pack that has little room
for media left takes text, one with little room for text takes media. Samples are sorted into classes by their share of
media tokens, and a pack takes from the class that comes nearest to the share it has left.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.errors import ConfigError, DataError
from packtool.planning.best_fit import LengthSet
from packtool.planning.pack_plan import (
    Int32Array,
    Int64Array,
    PackPlan,
    digest_arrays,
    in_cache_order,
    inverse_of,
    plan_of,
    split_to,
    with_packs_in_order,
)
from packtool.planning.shuffle import RandomStream, seeded_order, seeded_uniform

Noise = npt.NDArray[np.float64]

_NUM_CLASSES = 16
_NUM_TRIED = 20_000
_EVENNESS = (1.5, 2.0, 4.0, 1e9, 0.0)
_HEAD_SPREAD = 0.02
_GAP = 1e-3
_CLASSES_LOOKED_AT = 4
_SLACK = 3e-4

# Noise of as many attempts.
_HEADS = (RandomStream.JITTER, RandomStream.BUDGET_JITTER_2, RandomStream.BUDGET_JITTER_3)


def check_media_tokens(
    media_tokens: npt.NDArray[np.integer[Any]] | None, lengths: Int32Array, max_media_tokens: int | None, capacity: int
) -> Int32Array | None:
    """Media tokens as int32 (N,), or None where no pack can have too many; arguments as for ``packing.pack``.

    Raises:
        ConfigError: there is a limit, but nobody knows the samples' media tokens.
        DataError: samples that alone have more than the limit.
    """
    if max_media_tokens is None or len(lengths) == 0:
        return None
    if media_tokens is None:
        raise ConfigError(
            f"--max-media-tokens-per-pack {max_media_tokens}: the media tokens of the samples are not known.",
            "Plan from a cache, or leave it out.",
        )
    assert media_tokens.shape == lengths.shape
    largest = int(media_tokens.max())
    if largest > max_media_tokens:
        num_over = int(np.count_nonzero(media_tokens > max_media_tokens))
        raise DataError(
            f"{num_over:,} of {len(lengths):,} samples have more media tokens than a pack may hold, "
            f"{max_media_tokens:,}; the largest has {largest:,}.",
            f"Raise --max-media-tokens-per-pack to {largest}, or export with smaller media (--max-pixels).",
        )
    if max_media_tokens >= capacity and bool((media_tokens <= lengths).all()):
        return None
    return media_tokens.astype(np.int32, copy=False) if largest else None


def pack_within_budgets(
    lengths: Int32Array,
    media_tokens: Int32Array,
    limits: tuple[int, int, int],
    *,
    shuffle: bool,
    seed: int,
    epoch: int,
    stream: int,
) -> PackPlan:
    """Best fit with several budgets; the other arguments as for ``histogram.pack_histogram``.

    All epochs have as many packs as the first and a few more, of which they make use as chance will have it; the
    number depends on the seed, too.

    Args:
        lengths: (N,), checked.
        media_tokens: (N,), checked.
        limits: tokens, media tokens and samples that a pack may hold.
    """
    drawn = partial(_drawn_packs, lengths, media_tokens, limits, seed=seed, stream=stream)
    if not shuffle:
        order = np.arange(len(lengths), dtype=np.int64)
        placed = place_within_budgets(lengths, media_tokens, limits=limits, order=order)
        return in_cache_order(plan_of(*placed, lengths, limits[0]))
    first = drawn(epoch=0) if epoch == 0 else None
    key = digest_arrays(hashlib.sha256(f"{limits} {seed} {stream}".encode()), lengths, media_tokens)
    if key not in _packs_of_first_epoch:
        _packs_of_first_epoch[key] = (first or drawn(epoch=0)).num_packs
    num_packs = _packs_of_first_epoch[key]
    num_packs = min(num_packs + 2 + int(num_packs * _SLACK), len(lengths))
    attempts = (drawn(epoch=epoch, heads=heads) for heads in _HEADS)
    plan = first or next((plan for plan in attempts if plan.num_packs <= num_packs), None) or drawn(epoch=0)
    order = seeded_order(plan.num_packs, seed=seed, epoch=epoch, stream=stream + RandomStream.PACK_ORDER)
    return split_to(with_packs_in_order(plan, order), num_packs)


_packs_of_first_epoch: dict[str, int] = {}


def _drawn_packs(
    lengths: Int32Array,
    media_tokens: Int32Array,
    limits: tuple[int, int, int],
    *,
    seed: int,
    epoch: int,
    stream: int,
    heads: int = _HEADS[0],
) -> PackPlan:
    """Packs in the order in which they were filled; ``heads`` is the stream of what the packs begin with."""
    order = seeded_order(len(lengths), seed=seed, epoch=epoch, stream=stream + RandomStream.BUDGET_ORDER)
    noise = seeded_uniform(len(lengths), seed=seed, epoch=epoch, stream=stream + heads)
    placed = place_within_budgets(lengths, media_tokens, limits=limits, order=order, noise=noise)
    return plan_of(*placed, lengths, limits[0])


def place_within_budgets(
    lengths: Int32Array,
    media_tokens: Int32Array,
    *,
    limits: tuple[int, int, int],
    order: Int64Array,
    noise: Noise | None = None,
) -> tuple[Int64Array, Int64Array]:
    """Fill packs one after the other, within hard limits.

    Each pack takes the largest sample that is left (the larger of its shares of the two budgets) and then, as long as
    there is room, the longest that fits of the class whose share of media is the highest that the pack can still
    afford; or one of any class below that fills it but for a thousandth. Where places are scarce, it takes samples of
    average size instead, see ``evenness`` in ``exact_fit``: the rule that packs 20,000 of the samples best is used.

    Price: some six microseconds a sample.

    Args:
        lengths: (N,), from 1 to the pack's tokens.
        media_tokens: (N,), from 0 to the pack's media tokens.
        limits: tokens, media tokens and samples that a pack may hold.
        order: (N,), which of like samples comes first.
        noise: (N,), from 0 to 1: varies which samples the packs begin with.

    Returns:
        int64 (N,) the samples in pack order, and (K,) how many are in each pack.
    """
    capacity, max_media_tokens, max_samples = limits
    size = np.maximum(lengths / capacity, media_tokens / max_media_tokens)
    if noise is not None:
        size *= 1 - _HEAD_SPREAD * noise
    heads = np.argsort(-size, kind="stable")
    evenness = 0.0
    if max_samples * int(lengths.min(initial=capacity)) < capacity and len(lengths):
        # Every k-th sample in order: they are drawn by chance, or lie all over the cache.
        tried = order[:: -(-len(order) // _NUM_TRIED)]
        turns = np.arange(len(tried))
        first = np.argsort(-size[tried], kind="stable")

        def num_packs(evenness: float) -> int:
            packer = _Packer(lengths[tried], media_tokens[tried], turns, limits=limits, evenness=evenness)
            return len(packer.pack(first)[1])

        evenness = min(_EVENNESS, key=num_packs)
    return _Packer(lengths, media_tokens, order, limits=limits, evenness=evenness).pack(heads, noise)


class _Packer:
    """The samples that are left, by class and length, and the rule that takes them.

    A *cell* holds the samples of one class and length. Classes ascend by the share of media among a sample's tokens;
    ``_shares`` are the highest of each.
    """

    def __init__(
        self,
        lengths: Int32Array,
        media_tokens: Int32Array,
        order: Int64Array,
        *,
        limits: tuple[int, int, int],
        evenness: float,
    ) -> None:
        self._limits = limits
        self._evenness = evenness
        self._gaps = 0, 0
        self._lengths: list[int] = lengths.tolist()
        self._media: list[int] = media_tokens.tolist()
        self._num_left = len(lengths)
        self._tokens_left = int(lengths.sum(dtype=np.int64))
        self._used = bytearray(len(lengths))
        classes, shares = _classes(lengths, media_tokens)
        self._shares: list[float] = shares.tolist()
        # Samples cell by cell, those first in ``order`` last: cells are used up from their ends.
        by_cell = np.lexsort((inverse_of(order[::-1]), lengths, classes))
        keys = classes[by_cell].astype(np.int64) << 32 | lengths[by_cell]
        starts = np.flatnonzero(np.diff(keys, prepend=-1))
        cell_of = np.empty(len(lengths), dtype=np.int64)
        cell_of[by_cell] = np.cumsum(np.bincount(starts, minlength=len(lengths))) - 1
        self._by_cell: list[int] = by_cell.tolist()
        self._cell_of: list[int] = cell_of.tolist()
        self._ends: list[int] = np.append(starts[1:], len(lengths)).tolist()
        self._counts: list[int] = np.diff(np.append(starts, len(lengths))).tolist()
        self._class_of: list[int] = (keys[starts] >> 32).tolist()
        self._cells: list[dict[int, int]] = [{} for _ in self._shares]
        for cell, key in enumerate(keys[starts].tolist()):
            self._cells[key >> 32][key & 0xFFFFFFFF] = cell
        self._sets = [LengthSet(cells) for cells in self._cells]
        self._shortest = [1] * len(self._shares)  # no sample of a class is shorter; saves most of the vain searches

    def pack(self, heads: Int64Array, noise: Noise | None = None) -> tuple[Int64Array, Int64Array]:
        """Samples in pack order and how many are in each pack; packs begin with ``heads`` (N,) that are left."""
        packed: list[int] = []
        sizes: list[int] = []
        # How much may stay free in a pack whose last sample is chosen; with noise, not always the tightest is.
        gap = int(self._limits[0] * _GAP)
        spared = np.zeros(len(heads)) if noise is None else (gap + 1) * noise
        for head, aimed_at in zip(heads.tolist(), spared.astype(np.int64).tolist(), strict=True):
            if not self._used[head]:
                before = len(packed)
                self._gaps = aimed_at, gap
                self._fill(head, packed)
                sizes.append(len(packed) - before)
        return np.array(packed, dtype=np.int64), np.array(sizes, dtype=np.int64)

    def _fill(self, sample: int, packed: list[int]) -> None:
        """Take the samples of one pack, ``sample`` first."""
        free, room, places = self._limits
        while True:
            packed.append(sample)
            self._used[sample] = 1
            length = self._lengths[sample]
            cell = self._cell_of[sample]
            self._counts[cell] -= 1
            if not self._counts[cell]:
                self._sets[self._class_of[cell]].remove(length)
                del self._cells[self._class_of[cell]][length]
            self._num_left -= 1
            self._tokens_left -= length
            free -= length
            room -= self._media[sample]
            places -= 1
            if not (free and places and self._num_left):
                return
            cell = self._next_cell(free, room, places)
            if cell < 0:
                return
            # Samples that packs began with lie among the others.
            while self._used[self._by_cell[self._ends[cell] - 1]]:
                self._ends[cell] -= 1
            sample = self._by_cell[self._ends[cell] - 1]

    def _next_cell(self, free: int, room: int, places: int) -> int:
        """The cell to take the next sample from, or -1."""
        scarce = places > 1 and free * self._evenness * self._num_left >= self._tokens_left * places
        nearest = bisect_right(self._shares, room / free) - 1
        if not scarce:
            least, most = self._gaps
            for number in range(nearest, max(nearest - _CLASSES_LOOKED_AT, -1), -1):
                length = self._sets[number].at_most(max(free - least, 0))
                if length >= max(free - most, 1):
                    return self._cells[number][length]
        for number in (*range(nearest, -1, -1), *range(nearest + 1, len(self._shares))):
            limit = free if number <= nearest else int(room / self._shares[number])
            if limit < self._shortest[number]:
                continue
            length = self._sets[number].at_most(limit)
            if length > 0:
                if scarce:
                    length = self._sets[number].nearest(free // places, length)
                return self._cells[number][length]
            self._shortest[number] = limit + 1
        return -1


def _classes(lengths: Int32Array, media_tokens: Int32Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The class of each sample, and the highest share of media tokens in each class, ascending."""
    share = media_tokens / lengths
    edges = np.unique(np.quantile(share, np.linspace(0, 1, _NUM_CLASSES + 1), method="higher"))
    classes = np.searchsorted(edges, share)
    used, classes = np.unique(classes, return_inverse=True)
    return classes, edges[used]
