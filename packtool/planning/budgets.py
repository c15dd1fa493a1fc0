"""Packing within two budgets, tokens and media tokens (and optionally samples).

    pack    tokens       media tokens   samples
    limit   10240        4096           16
    used     9870         4091           5       one budget used up, nearly all of the other

Vector packing is hard even to approximate; it helps to keep each pack on the diagonal: a pack with little space left
for media takes text, one with little space for text takes media. Samples are sorted into classes by their share of
media tokens, and a pack takes from the class that comes nearest to the share it has left.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right

import numpy as np

from packtool.errors import ConfigError, DataError
from packtool.planning.best_fit import GAP, HEAD_SPREAD, LengthSet
from packtool.planning.pack_plan import (
    Costs,
    Int32Array,
    Int64Array,
    IntArray,
    PackPlan,
    build_plan,
    digest_arrays,
    invert_order,
    select_packs,
    sort_by_sample,
    split_to_count,
)
from packtool.planning.shuffle import RandomStream, seeded_order, seeded_uniform

_NUM_CLASSES = 16
_NUM_TRIED = 20_000
_EVENNESS = (1.5, 2.0, 4.0, 1e9, 0.0)
_MAX_CLASSES_TRIED = 4
_SLACK = 3e-4
_HEAD_STREAMS = (RandomStream.JITTER, RandomStream.BUDGET_JITTER_2, RandomStream.BUDGET_JITTER_3)  # one an attempt

_num_packs_of_first_epoch: dict[str, int] = {}


def check_media_tokens(
    media_tokens: IntArray | None, lengths: Int32Array, max_media_tokens: int | None, capacity: int
) -> Int32Array | None:
    """Check media tokens; return int32 (N,), or None where no pack can exceed the limit. Arguments as for ``pack``."""
    if max_media_tokens is None or len(lengths) == 0:
        return None
    if media_tokens is None:
        raise ConfigError(
            f"--max-media-tokens-per-pack {max_media_tokens}: the media tokens of the samples are unknown.",
            "Plan from a cache, or remove the option.",
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
    if largest == 0 or (max_media_tokens >= capacity and bool((media_tokens <= lengths).all())):
        return None
    return media_tokens.astype(np.int32, copy=False)


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
    """Pack by best fit within ``limits``, maximum tokens, media tokens and samples of a pack; lengths (N,) are checked.

    All epochs have as many packs as the first and a few more, so that a random order can always be packed; the number
    depends on the seed, too. Further arguments are as for ``best_fit.pack_histogram``.
    """
    if not shuffle:
        order = np.arange(len(lengths), dtype=np.int64)
        return sort_by_sample(place_within_budgets(lengths, media_tokens, limits, order, noise=None))

    def draw(epoch: int, head_stream: int = _HEAD_STREAMS[0]) -> PackPlan:
        order = seeded_order(len(lengths), seed=seed, epoch=epoch, stream=stream + RandomStream.BUDGET_ORDER)
        noise = seeded_uniform(len(lengths), seed=seed, epoch=epoch, stream=stream + head_stream)
        return place_within_budgets(lengths, media_tokens, limits, order, noise)

    first = draw(0) if epoch == 0 else None
    key = digest_arrays(hashlib.sha256(f"{limits} {seed} {stream}".encode()), lengths, media_tokens)
    if key not in _num_packs_of_first_epoch:
        _num_packs_of_first_epoch[key] = (first or draw(0)).num_packs
    num_packs = _num_packs_of_first_epoch[key]
    num_packs = min(num_packs + 2 + int(num_packs * _SLACK), len(lengths))
    attempts = (draw(epoch, head_stream) for head_stream in _HEAD_STREAMS)
    plan = first or next((plan for plan in attempts if plan.num_packs <= num_packs), None) or draw(0)
    order = seeded_order(plan.num_packs, seed=seed, epoch=epoch, stream=stream + RandomStream.PACK_ORDER)
    return split_to_count(select_packs(plan, order), num_packs)


def place_within_budgets(
    lengths: Int32Array, media_tokens: Int32Array, limits: tuple[int, int, int], order: Int64Array, noise: Costs | None
) -> PackPlan:
    """Fill packs one after the other, within hard limits; return them in the order in which they were filled.

    Each pack takes the largest remaining sample (by the larger of its shares of the two budgets) and then, while there
    is space, the longest that fits of the class with the highest share of media that the pack can still afford; or one
    of any lower class that fills the pack to within a thousandth. Where sample slots are scarce, it takes samples of
    mean size (``evenness`` of ``place_exact_fit``), by the value that needs the fewest packs for 20,000 of the samples.
    Cost: about six microseconds a sample.

    ``limits`` are maximum tokens, media tokens and samples of a pack, and all arrays (N,): ``order`` is the precedence
    of samples that are alike; ``noise``, from 0 to 1, varies the first sample of packs.
    """
    capacity, max_media_tokens, max_samples = limits
    size = np.maximum(lengths / capacity, media_tokens / max_media_tokens)
    if noise is not None:
        size *= 1 - HEAD_SPREAD * noise
    evenness = 0.0
    if max_samples * int(lengths.min(initial=capacity)) < capacity and len(lengths):
        # Every k-th sample in order: the order is random, or that of the cache.
        tried = order[:: -(-len(order) // _NUM_TRIED)]
        heads = np.argsort(-size[tried], kind="stable")

        def num_packs(evenness: float) -> int:
            packer = _Packer(lengths[tried], media_tokens[tried], np.arange(len(tried)), limits, evenness)
            return len(packer.pack(heads)[1])

        evenness = min(_EVENNESS, key=num_packs)
    packer = _Packer(lengths, media_tokens, order, limits, evenness)
    return build_plan(*packer.pack(np.argsort(-size, kind="stable"), noise), lengths, capacity)


class _Packer:
    """Unpacked samples in *cells* of one class and length; classes ascend by share of media, at most ``_shares``."""

    def __init__(
        self,
        lengths: Int32Array,
        media_tokens: Int32Array,
        order: Int64Array,
        limits: tuple[int, int, int],
        evenness: float,
    ) -> None:
        self._limits = limits
        self._evenness = evenness
        self._lengths: list[int] = lengths.tolist()
        self._media: list[int] = media_tokens.tolist()
        self._num_left = len(lengths)
        self._tokens_left = int(lengths.sum(dtype=np.int64))
        self._is_used = bytearray(len(lengths))
        share = media_tokens / lengths
        edges = np.unique(np.quantile(share, np.linspace(0, 1, _NUM_CLASSES + 1), method="higher"))
        used_edges, classes = np.unique(np.searchsorted(edges, share), return_inverse=True)
        self._shares: list[float] = edges[used_edges].tolist()
        # Samples cell by cell, those first in ``order`` last: cells are used up from their ends.
        by_cell = np.lexsort((invert_order(order[::-1]), lengths, classes))
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
        self._shortest = [1] * len(self._shares)  # lower bound of each class's lengths; saves most vain searches

    def pack(self, heads: Int64Array, noise: Costs | None = None) -> tuple[Int64Array, Int64Array]:
        """Return samples in pack order and the sizes of packs, each beginning with the next unused of ``heads``."""
        packed: list[int] = []
        sizes: list[int] = []
        # Tokens that may stay free in a pack whose last sample is chosen; noise varies which gap is aimed at.
        gap = int(self._limits[0] * GAP)
        min_gaps = np.zeros(len(heads)) if noise is None else (gap + 1) * noise
        for head, min_gap in zip(heads.tolist(), min_gaps.astype(np.int64).tolist(), strict=True):
            if not self._is_used[head]:
                before = len(packed)
                self._fill(head, packed, min_gap, gap)
                sizes.append(len(packed) - before)
        return np.array(packed, dtype=np.int64), np.array(sizes, dtype=np.int64)

    def _fill(self, sample: int, packed: list[int], min_gap: int, max_gap: int) -> None:
        """Append the samples of one pack, ``sample`` first."""
        free, free_media, slots = self._limits
        while True:
            packed.append(sample)
            self._is_used[sample] = 1
            length = self._lengths[sample]
            cell = self._cell_of[sample]
            self._counts[cell] -= 1
            if not self._counts[cell]:
                self._sets[self._class_of[cell]].remove(length)
                del self._cells[self._class_of[cell]][length]
            self._num_left -= 1
            self._tokens_left -= length
            free -= length
            free_media -= self._media[sample]
            slots -= 1
            if not (free and slots and self._num_left):
                return
            cell = self._next_cell(free, free_media, slots, min_gap, max_gap)
            if cell < 0:
                return
            # The first samples of packs were taken from anywhere in their cells.
            while self._is_used[self._by_cell[self._ends[cell] - 1]]:
                self._ends[cell] -= 1
            sample = self._by_cell[self._ends[cell] - 1]

    def _next_cell(self, free: int, free_media: int, slots: int, min_gap: int, max_gap: int) -> int:
        """Choose the cell to take the next sample from, or -1."""
        is_scarce = slots > 1 and free * self._evenness * self._num_left >= self._tokens_left * slots
        nearest = bisect_right(self._shares, free_media / free) - 1
        if not is_scarce:
            for number in range(nearest, max(nearest - _MAX_CLASSES_TRIED, -1), -1):
                length = self._sets[number].at_most(max(free - min_gap, 0))
                if length >= max(free - max_gap, 1):
                    return self._cells[number][length]
        for number in (*range(nearest, -1, -1), *range(nearest + 1, len(self._shares))):
            limit = free if number <= nearest else int(free_media / self._shares[number])
            if limit < self._shortest[number]:
                continue
            length = self._sets[number].at_most(limit)
            if length > 0:
                if is_scarce:
                    length = self._sets[number].nearest(free // slots, length)
                return self._cells[number][length]
            self._shortest[number] = limit + 1
        return -1
