"""Packing that keeps the order of the samples except for a look-ahead."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

import numpy as np

from packtool.planning.pack_plan import Int32Array, Int64Array, to_offsets

_MAX_ATTEMPTS = 16


def place_next_fit(lengths: Int32Array, capacity: int, max_samples: int | None = None) -> Int64Array:
    """Fill packs in order; a sample that does not fit starts a new pack.

    Returns:
        int64 (K,), samples in each pack.
    """
    ends = to_offsets(lengths)[1:].tolist()
    sizes, start, before = [], 0, 0
    while start < len(ends):
        stop = bisect_right(ends, before + capacity, start)
        if max_samples is not None:
            stop = min(stop, start + max_samples)
        sizes.append(stop - start)
        start, before = stop, ends[stop - 1]
    return np.array(sizes, dtype=np.int64)


def place_sequential(
    lengths: Int32Array,
    capacity: int,
    look_ahead: int,
    *,
    max_samples: int | None = None,
    media_tokens: Int32Array | None = None,
    max_media_tokens: int | None = None,
) -> tuple[Int64Array, Int64Array]:
    """Start each pack with the first waiting sample, and fill it from the ``look_ahead`` samples waiting after it.

    It takes the longest of these that fits, or, of the longest few, the one that leaves least space together with the
    longest that then still fits (Gupta and Ho 1999, as in exact fit). With ``look_ahead`` 0 it is next fit. When a
    sample is packed, at most ``look_ahead`` earlier samples still wait, and a sample waits for at most ``look_ahead +
    1`` packs.

    Cost: O(log look_ahead) searches a sample, about four microseconds.

    Args:
        lengths: (N,), from 1 to ``capacity``, in order.
        max_samples, max_media_tokens: of a pack; no single sample exceeds them.
        media_tokens: (N,), needed with ``max_media_tokens``.

    Returns:
        int64 (N,) the samples in pack order, and (K,) the number of samples in each pack.
    """
    if look_ahead == 0 and max_media_tokens is None:
        return np.arange(len(lengths)), place_next_fit(lengths, capacity, max_samples)
    media = media_tokens.tolist() if media_tokens is not None and max_media_tokens is not None else [0] * len(lengths)
    queue = _Queue(lengths.tolist(), media, look_ahead)
    order: list[int] = []
    sizes: list[int] = []
    while queue.refill():
        free, free_media, size = capacity, max_media_tokens or 0, 0
        index = queue.first()
        while index >= 0:
            sample = queue.take(index)
            order.append(sample)
            free -= queue.lengths[sample]
            free_media -= queue.media[sample]
            size += 1
            if size == max_samples:
                break
            if size > 1:
                queue.refill()
            index = queue.best(free, free_media)
        sizes.append(size)
    return np.array(order, dtype=np.int64), np.array(sizes, dtype=np.int64)


class _Queue:
    """The waiting samples: the first, and those after it that may be chosen, sorted by length.

    ``_waiting`` holds ``length * N + (N - 1 - sample)``: of equally long samples the earlier ones come last, where the
    search for the longest finds them first.
    """

    def __init__(self, lengths: list[int], media: list[int], look_ahead: int) -> None:
        self.lengths, self.media = lengths, media
        self._has_media = any(media)
        self._num = len(lengths)
        self._max_waiting = look_ahead + 1
        self._next = 0  # the first sample that is not waiting yet
        self._first = 0  # no sample before it waits
        self._packed = bytearray(self._num + 1)
        self._waiting: list[int] = []

    def refill(self) -> bool:
        """Let samples enter while there is space; return False if none waits."""
        while self._next < self._num and len(self._waiting) < self._max_waiting:
            insort(self._waiting, self._key(self._next))
            self._next += 1
        return bool(self._waiting)

    def first(self) -> int:
        """Find the place in ``_waiting`` of the sample that came first."""
        while self._packed[self._first]:
            self._first += 1
        return bisect_left(self._waiting, self._key(self._first))

    def take(self, index: int) -> int:
        """Remove and return the sample at a place in ``_waiting``."""
        sample = self._sample(index)
        del self._waiting[index]
        self._packed[sample] = 1
        return sample

    def best(self, free: int, free_media: int) -> int:
        """Find the place of the sample that best fills so many free tokens and media tokens, or -1."""
        waiting, num = self._waiting, self._num
        longest = self._last_fitting(bisect_right(waiting, (free + 1) * num - 1) - 1, free_media)
        if longest < 0:
            return -1
        best, least = longest, free - waiting[longest] // num
        index = longest
        for _ in range(_MAX_ATTEMPTS):
            if least == 0 or index < 0:
                break
            length = waiting[index] // num
            if 2 * length < free:
                break
            left = free - length
            second = bisect_right(waiting, (left + 1) * num - 1) - 1
            if second == index:
                second -= 1
            second = self._last_fitting(second, free_media - self.media[self._sample(index)])
            if second >= 0 and left - waiting[second] // num < least:
                best, least = index, left - waiting[second] // num
            index = self._last_fitting(index - 1, free_media)
        return best

    def _last_fitting(self, index: int, free_media: int) -> int:
        """Find the last place from ``index`` down whose sample's media tokens fit, or -1."""
        if self._has_media:
            while index >= 0 and self.media[self._sample(index)] > free_media:
                index -= 1
        return index

    def _key(self, sample: int) -> int:
        return self.lengths[sample] * self._num + self._num - 1 - sample

    def _sample(self, index: int) -> int:
        return self._num - 1 - self._waiting[index] % self._num
