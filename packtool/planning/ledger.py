"""Training counts of samples, a few bits a sample, and the matching of samples between exports.

The current epoch is counted apart from those before it: a run whose data has changed must still train the rest of it.
Samples that could not be loaded were not trained; they are listed.

Samples of a re-exported cache are matched by 64-bit keys of their rows, or of their contents::

    old   row 0          row 1, turn 1 of 2   row 1, turn 2 of 2   row 3
    new   row 0          row 1 (complete)                          row 3   row 4
          the same       trained if both were                      same    new

Of a hundred million samples, two have the same key by chance in one of about four thousand runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from packtool.planning.epoch import EpochPlan
from packtool.planning.pack_plan import Int64Array, IntArray


@dataclass(frozen=True, eq=False)
class RowCounts:
    """Training counts of ``num`` rows, N.

    ``planes``, uint8 (ceil(N / 8),) each, are the bits of the counts, the lowest plane first, eight rows a byte as in
    ``numpy.packbits``. There is no plane where nothing was trained.
    """

    num: int
    planes: tuple[npt.NDArray[np.uint8], ...] = ()

    @classmethod
    def of(cls, counts: IntArray | npt.NDArray[np.bool_]) -> RowCounts:
        """Convert counts (N,) of 0 or more."""
        num_planes = int(counts.max(initial=0)).bit_length()
        return cls(len(counts), tuple(np.packbits((counts >> bit) & 1) for bit in range(num_planes)))

    @classmethod
    def of_rows(cls, num: int, rows: Int64Array) -> RowCounts:
        """Count rows (M,) of N, which may repeat. Costs no more memory than the rows and the planes."""
        distinct, times = np.unique(rows, return_counts=True)
        planes = []
        for bit in range(int(times.max(initial=0)).bit_length()):
            selected = distinct[(times >> bit) & 1 > 0]
            plane = np.zeros(-(-num // 8), np.uint8)
            if len(selected):
                byte = selected >> 3
                starts = np.flatnonzero(np.diff(byte, prepend=-1))
                bits = (128 >> (selected & 7)).astype(np.uint8)
                plane[byte[starts]] = np.bitwise_or.reduceat(bits, starts)
            planes.append(plane)
        return cls(num, tuple(planes))

    def __add__(self, other: RowCounts) -> RowCounts:
        """Add bit by bit, with carries."""
        assert self.num == other.num
        zeros = np.zeros(-(-self.num // 8), np.uint8)
        planes, carry = [], zeros
        for number in range(max(len(self.planes), len(other.planes))):
            a, b = (counts.planes[number] if number < len(counts.planes) else zeros for counts in (self, other))
            planes.append(a ^ b ^ carry)
            carry = (a & b) | (carry & (a ^ b))
        return RowCounts(self.num, (*planes, carry) if carry.any() else tuple(planes))

    def counts(self) -> npt.NDArray[np.uint32]:
        """Convert the counts to numbers: uint32 (N,)."""
        counts = np.zeros(self.num, np.uint32)
        for bit, plane in enumerate(self.planes):
            counts += np.unpackbits(plane, count=self.num).astype(np.uint32) << np.uint32(bit)
        return counts

    @property
    def num_rows(self) -> int:
        """Rows that were trained at least once."""
        is_trained = np.zeros(-(-self.num // 8), np.uint8)
        for plane in self.planes:
            is_trained |= plane
        return int(np.bitwise_count(is_trained).sum(dtype=np.int64))


@dataclass(frozen=True, eq=False, kw_only=True)
class SourceLedger:
    """Training counts of one cache.

    Args:
        before, epoch: counts of each sample in earlier epochs, and in the current one, (N,).
        skipped: rows that could not be loaded, one entry each time, sorted.
        num_samples, tokens, target_tokens: trained from this cache, repeated samples counted each time. Counts
            transferred from another cache are not included.
    """

    directory: str
    fingerprint: str
    before: RowCounts
    epoch: RowCounts
    skipped: Int64Array
    num_samples: int = 0
    tokens: int = 0
    target_tokens: int = 0

    @classmethod
    def begin(cls, directory: str, fingerprint: str, num: int) -> SourceLedger:
        """Return the ledger of an untrained cache of ``num`` samples."""
        zero, skipped = RowCounts(num), np.zeros(0, np.int64)
        return cls(directory=directory, fingerprint=fingerprint, before=zero, epoch=zero, skipped=skipped)

    @property
    def num(self) -> int:
        return self.epoch.num

    @property
    def trained(self) -> RowCounts:
        """Counts of each sample in all epochs, (N,)."""
        return self.before + self.epoch

    def plus(self, rows: Int64Array, skipped: Int64Array, lengths: IntArray, target_tokens: IntArray) -> SourceLedger:
        """Add trained rows (M,), which may repeat, and skipped rows (K,)."""
        return replace(
            self,
            epoch=self.epoch + RowCounts.of_rows(self.num, rows),
            skipped=np.sort(np.concatenate((self.skipped, skipped))),
            num_samples=self.num_samples + len(rows),
            tokens=self.tokens + int(lengths[rows].sum(dtype=np.int64)),
            target_tokens=self.target_tokens + int(target_tokens[rows].sum(dtype=np.int64)),
        )

    def in_next_epoch(self) -> SourceLedger:
        return replace(self, before=self.trained, epoch=RowCounts(self.num))


@dataclass(frozen=True, eq=False)
class DataChange:
    """The last change of a run's data.

    Args:
        step, epoch: the first step that was planned with the new data, and its epoch.
        left: of each cache, the remaining counts of its samples in that epoch.
        stage: as in ``Ledger``, of a run with stages.
        trained: of a run with stages, training counts of each cache's samples until then.
    """

    step: int
    epoch: int
    left: tuple[RowCounts, ...]
    stage: tuple[int, int] | None = None
    trained: tuple[RowCounts, ...] = ()

    def samples(self) -> Int64Array:
        """Return the remaining counts of the samples of all caches, by position; int64 (N,)."""
        return concatenate_counts(self.left)


@dataclass(frozen=True, eq=False, kw_only=True)
class Ledger:
    """Training counts of all caches of a run.

    Args:
        epoch: the current one, 0-based.
        sources: the run's caches, in their order.
        retired: caches of earlier data.
        stage: the 0-based number of the next stage, and the epoch that it began with; None without stages.
    """

    step: int = 0
    epoch: int = 0
    sources: tuple[SourceLedger, ...]
    retired: tuple[SourceLedger, ...] = ()
    change: DataChange | None = None
    stage: tuple[int, int] | None = None

    def plus(
        self,
        plan: EpochPlan,
        steps: range,
        lengths: IntArray,
        target_tokens: IntArray,
        skipped: Sequence[int] | Int64Array = (),
    ) -> Ledger:
        """Return a ledger (training counts of all caches) to which the rows of some steps are added.

        Rows are numbered through all caches: those of the first, then those of the second, and so on.

        Args:
            steps: numbers of the trained steps in ``plan``, which are consecutive.
            lengths, target_tokens: tokens, and those that carry loss, of all rows, (N,).
            skipped: rows of these steps that were not trained, as often as they were skipped.
        """
        skipped_rows = np.sort(np.asarray(skipped, np.int64))
        planned_rows = np.sort(plan.samples_of(steps.start, steps.stop))
        trained_rows = remove_rows(planned_rows, skipped_rows)
        source_bounds = pairwise(accumulate((source.num for source in self.sources), initial=0))
        sources = []
        for source, (start, end) in zip(self.sources, source_bounds, strict=True):
            source_trained = _rows_between(trained_rows, start, end)
            source_skipped = _rows_between(skipped_rows, start, end)
            sources.append(source.plus(source_trained, source_skipped, lengths[start:end], target_tokens[start:end]))
        return replace(self, step=self.step + len(steps), sources=tuple(sources))

    def in_next_epoch(self) -> Ledger:
        sources = tuple(source.in_next_epoch() for source in self.sources)
        retired = tuple(source.in_next_epoch() for source in self.retired)
        return replace(self, epoch=self.epoch + 1, sources=sources, retired=retired)


def _rows_between(rows: Int64Array, start: int, end: int) -> Int64Array:
    """Return the ``rows``, ascending, from ``start`` to ``end`` - 1, relative to ``start``."""
    first, last = np.searchsorted(rows, (start, end))
    return rows[first:last] - start


def concatenate_counts(counts: Sequence[RowCounts]) -> Int64Array:
    """Concatenate the counts of several caches: int64 (N,)."""
    return np.concatenate([np.zeros(0, np.int64), *(each.counts().astype(np.int64) for each in counts)])


def remove_rows(rows: Int64Array, removed: Int64Array) -> Int64Array:
    """Remove rows (M,), each as often as it is listed, from rows (N,); both and the result are sorted."""
    if not len(removed):
        return rows
    distinct, times = np.unique(removed, return_counts=True)
    first = np.searchsorted(rows, distinct)
    positions = np.repeat(first - np.cumsum(times) + times, times) + np.arange(len(removed))
    assert (rows[positions] == removed).all(), "skipped rows were planned"
    return np.delete(rows, positions)


Keys = npt.NDArray[np.uint64]


def row_keys(sources: Keys, rows: Int64Array, parts: IntArray | None = None) -> Keys:
    """Compute keys of samples by their rows of files: uint64 (2, N), unique keys of samples, and keys of their rows.

    Samples of one row with equal parts, such as the pieces of a text, are numbered; pieces of a text that was divided
    into another number of them have other keys. ``sources`` and ``rows``, (N,), are a key of each sample's file, and
    its row there; ``parts``, (N, 4), its part of the row, zeros for a complete one; None where all are complete.
    """
    keys = combine_keys(sources, rows)
    samples = keys.copy()
    if parts is not None:
        is_part = np.flatnonzero(parts.any(axis=1))
        for column in parts[is_part].T:
            samples[is_part] = combine_keys(samples[is_part], column.astype(np.int64))
    number, count = _number_equal_keys(samples)
    return np.stack((combine_keys(combine_keys(samples, number), count), keys))


def content_keys(contents: Keys, counts: IntArray) -> Keys:
    """Compute keys of samples by keys of their contents (N,), as in ``row_keys``; of equals, the most trained first."""
    number, _ = _number_equal_keys(contents, -counts.astype(np.int64))
    return np.stack((combine_keys(contents, number), contents))


def combine_keys(keys: Keys, values: IntArray) -> Keys:
    """Combine keys (N,) and numbers (N,) into other keys: the end of SplitMix64 (Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        bits = keys * np.uint64(0x9E3779B97F4A7C15) + values.astype(np.uint64) + np.uint64(0x632BE59BD9B4E019)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return bits ^ (bits >> np.uint64(31))


def _number_equal_keys(keys: Keys, order: Int64Array | None = None) -> tuple[Int64Array, Int64Array]:
    """Number samples of equal keys by ``order`` (N,), or positions; return numbers and how many are equal, (N,)."""
    places = np.argsort(keys, kind="stable") if order is None else np.lexsort((order, keys))
    starts = np.flatnonzero(np.diff(keys[places], prepend=~keys[places[:1]]))
    counts = np.diff(np.append(starts, len(keys)))
    number, count = np.empty(len(keys), np.int64), np.empty(len(keys), np.int64)
    number[places] = np.arange(len(keys)) - np.repeat(starts, counts)
    count[places] = np.repeat(counts, counts)
    return number, count


@dataclass(frozen=True, eq=False)
class Match:
    """M old samples matched with N new ones.

    Args:
        same: int64 (N,), the old sample that each new one is; -1 for none.
        first, last: int64 (N,), the old samples of its row, from ``order[first]`` to ``order[last - 1]``; none where
            the row is new.
        order: int64 (M,), the old samples, row after row.
        is_gone: bool (M,), old samples that are no new sample, and whose row has none.
    """

    same: Int64Array
    first: Int64Array
    last: Int64Array
    order: Int64Array
    is_gone: npt.NDArray[np.bool_]

    @property
    def is_new(self) -> npt.NDArray[np.bool_]:
        """bool (N,): new samples of rows without old samples."""
        return self.first == self.last

    def plus(self, old: Int64Array, new: Int64Array) -> Match:
        """Add K pairs of equal samples: ``old`` and ``new``, (K,) each."""
        same, is_gone = self.same.copy(), self.is_gone.copy()
        same[new] = old
        is_gone[old] = False
        return replace(self, same=same, is_gone=is_gone)

    def transfer(self, counts: IntArray) -> Int64Array:
        """Convert training counts of the old samples, (M,), to those of the new ones, int64 (N,).

        A sample that is another part of its row than any of the old ones has the minimum of their counts, so that less
        trained parts are not lost.
        """
        transferred = np.zeros(len(self.same), np.int64)
        is_same = self.same >= 0
        transferred[is_same] = counts[self.same[is_same]]
        others = np.flatnonzero(~is_same & ~self.is_new)
        if len(others):
            # A number after the last one gives the last row an end, too.
            in_order = np.append(counts[self.order].astype(np.int64), 0)
            bounds = np.stack((self.first[others], self.last[others]), axis=1).reshape(-1)
            transferred[others] = np.minimum.reduceat(in_order, bounds)[::2]
        return transferred


def match(old: Keys, new: Keys) -> Match:
    """Match samples by their keys, uint64 (2, M) and (2, N), see ``row_keys``. Cost: that of sorting both."""
    (old_samples, old_rows), (new_samples, new_rows) = old, new
    by_sample = np.argsort(old_samples, kind="stable")
    same = np.full(len(new_samples), -1, np.int64)
    if len(old_samples):
        places = np.searchsorted(old_samples[by_sample], new_samples)
        candidates = by_sample[np.minimum(places, len(old_samples) - 1)]
        same = np.where(old_samples[candidates] == new_samples, candidates, -1)
    order = np.argsort(old_rows, kind="stable")
    first, last = (np.searchsorted(old_rows[order], new_rows, side=side) for side in ("left", "right"))
    return Match(same, first, last, order, ~np.isin(old_rows, new_rows, kind="sort"))
