"""What was trained, how often: a ledger of samples by cache and row, of a few bits a sample.

Counts are kept as bits in planes, the lowest first, so that an epoch is one bit a sample whatever it is an epoch of::

    row       0 1 2 3 4 5 6 7
    trained   1 3 1 2 1 1 0 1     plane 0:  1 1 1 0 1 1 0 1     plane 1:  0 1 0 1 0 0 0 0

The epoch that is being trained is counted apart from those before it: what is left of it is what a run whose data have
changed must still train. Samples that could not be loaded were not trained; they are listed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.plan.epoch import EpochPlan
from packtool.plan.pack_plan import Int64Array

Plane = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class RowCounts:
    """How often each of N rows was trained.

    Args:
        num: N.
        planes: uint8 (ceil(N / 8),) each: bits of the counts, the lowest plane first, eight rows a byte as
            ``numpy.packbits`` has them. No plane where nothing was trained.
    """

    num: int
    planes: tuple[Plane, ...] = ()

    @classmethod
    def of(cls, counts: npt.NDArray[np.integer[Any]] | npt.NDArray[np.bool_]) -> RowCounts:
        """The counts of an array (N,) of numbers of 0 or more."""
        most = int(counts.max(initial=0))
        planes = (np.packbits((counts >> bit) & 1) for bit in range(most.bit_length()))
        return cls(len(counts), tuple(planes))

    @classmethod
    def of_rows(cls, num: int, rows: Int64Array) -> RowCounts:
        """The counts of rows (M,) of N, each as often as it is there. Price: that of sorting them."""
        found, times = np.unique(rows, return_counts=True)
        planes = []
        for bit in range(int(times.max(initial=0)).bit_length()):
            chosen = found[(times >> bit) & 1 > 0]
            plane = np.zeros(-(-num // 8), np.uint8)
            if len(chosen):
                byte = chosen >> 3
                starts = np.flatnonzero(np.diff(byte, prepend=-1))
                bits = (128 >> (chosen & 7)).astype(np.uint8)
                plane[byte[starts]] = np.bitwise_or.reduceat(bits, starts)
            planes.append(plane)
        return cls(num, tuple(planes))

    def __add__(self, other: RowCounts) -> RowCounts:
        """Both together: added bit by bit, as one does it on paper."""
        assert self.num == other.num
        nothing = np.zeros(-(-self.num // 8), np.uint8)
        planes, carry = [], nothing
        for number in range(max(len(self.planes), len(other.planes))):
            a, b = (counts.planes[number] if number < len(counts.planes) else nothing for counts in (self, other))
            planes.append(a ^ b ^ carry)
            carry = (a & b) | (carry & (a ^ b))
        return RowCounts(self.num, (*planes, carry) if carry.any() else tuple(planes))

    def counts(self) -> Counts:
        """The counts as numbers: uint32 (N,)."""
        found = np.zeros(self.num, np.uint32)
        for bit, plane in enumerate(self.planes):
            found += np.unpackbits(plane, count=self.num).astype(np.uint32) << np.uint32(bit)
        return found

    @property
    def num_rows(self) -> int:
        """Rows that were trained at least once."""
        seen = np.zeros(-(-self.num // 8), np.uint8)
        for plane in self.planes:
            seen |= plane
        return int(np.bitwise_count(seen).sum(dtype=np.int64))

    @property
    def total(self) -> int:
        """All counts added up."""
        return sum(int(np.bitwise_count(plane).sum(dtype=np.int64)) << bit for bit, plane in enumerate(self.planes))


@dataclass(frozen=True, eq=False, kw_only=True)
class SourceLedger:
    """What was trained of one cache.

    Args:
        directory: where the cache was.
        fingerprint: of the cache.
        before: how often each sample was trained in the epochs before, (N,).
        epoch: in the epoch that is being trained, (N,).
        skipped: rows that were left out because they could not be loaded, each as often as that happened, sorted.
        num_samples, tokens, target_tokens: that were trained from this cache, each sample as often as it was. Counts
            that a cache took over from the one that it was exported in place of are not in them.
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
        """Nothing of a cache of so many samples."""
        nothing = RowCounts(num)
        rows = np.zeros(0, np.int64)
        return cls(directory=directory, fingerprint=fingerprint, before=nothing, epoch=nothing, skipped=rows)

    @property
    def num(self) -> int:
        """Samples of the cache, N."""
        return self.epoch.num

    @property
    def trained(self) -> RowCounts:
        """How often each sample was trained in all epochs, (N,)."""
        return self.before + self.epoch

    def plus(
        self,
        rows: Int64Array,
        skipped: Int64Array,
        lengths: npt.NDArray[np.integer[Any]],
        target_tokens: npt.NDArray[np.integer[Any]],
    ) -> SourceLedger:
        """The ledger with further rows (M,), each as often as it was trained, and those (K,) that were left out."""
        return dataclasses.replace(
            self,
            epoch=self.epoch + RowCounts.of_rows(self.num, rows),
            skipped=np.sort(np.concatenate((self.skipped, skipped))),
            num_samples=self.num_samples + len(rows),
            tokens=self.tokens + int(lengths[rows].sum(dtype=np.int64)),
            target_tokens=self.target_tokens + int(target_tokens[rows].sum(dtype=np.int64)),
        )

    def in_next_epoch(self) -> SourceLedger:
        """The ledger when an epoch ends."""
        return dataclasses.replace(self, before=self.before + self.epoch, epoch=RowCounts(self.num))


@dataclass(frozen=True, eq=False)
class DataChange:
    """Where the data of a run last changed.

    Args:
        step: the first that was planned with the data that there are since.
        epoch: that it lies in.
        left: of each cache, how often each of its samples was still to be trained in that epoch.
        stage: as ``Ledger`` has it, of a run with stages.
        trained: of each cache, how often each of its samples was trained until then; of a run with stages, whose later
            ones begin with what was trained least.
    """

    step: int
    epoch: int
    left: tuple[RowCounts, ...]
    stage: tuple[int, int] | None = None
    trained: tuple[RowCounts, ...] = ()

    def samples(self) -> Int64Array:
        """How often each sample of all caches was still to be trained, by position; int64 (N,)."""
        return joined_counts(self.left)


@dataclass(frozen=True, eq=False, kw_only=True)
class Ledger:
    """What was trained of all caches of a run.

    Args:
        step: optimizer steps that it tells of.
        epoch: that is being trained, 0-based.
        sources: the run's caches, in their order.
        retired: caches that it had before.
        change: the last change of the data; None where they are what they were.
        stage: the 0-based number of the stage that comes next, and the epoch that it began with; None without stages.
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
        lengths: npt.NDArray[np.integer[Any]],
        target_tokens: npt.NDArray[np.integer[Any]],
        skipped: Sequence[int] | Int64Array = (),
    ) -> Ledger:
        """The ledger with some steps of the epoch that is being trained.

        Args:
            plan: of that epoch, or of what was left of it when it was planned anew.
            steps: numbers in that plan.
            lengths, target_tokens: (N,) of all samples of the caches, by position.
            skipped: samples of these steps that were left out, by position.
        """
        rows = np.sort(plan.samples_of(steps.start, steps.stop))
        left_out = np.sort(np.asarray(skipped, np.int64))
        rows = without(rows, left_out)
        ends = np.cumsum([0, *(source.num for source in self.sources)])
        found = []
        for source, start, end in zip(self.sources, ends[:-1].tolist(), ends[1:].tolist(), strict=True):
            here, out = (each[slice(*np.searchsorted(each, (start, end)))] - start for each in (rows, left_out))
            found.append(source.plus(here, out, lengths[start:end], target_tokens[start:end]))
        return dataclasses.replace(self, step=self.step + len(steps), sources=tuple(found))

    def in_next_epoch(self) -> Ledger:
        """The ledger when an epoch ends."""
        sources = tuple(source.in_next_epoch() for source in self.sources)
        retired = tuple(source.in_next_epoch() for source in self.retired)
        return dataclasses.replace(self, epoch=self.epoch + 1, sources=sources, retired=retired)

    def in_epoch(self) -> Int64Array:
        """How often each sample of the caches was trained in this epoch, by position; int64 (N,)."""
        return joined_counts([source.epoch for source in self.sources])


def joined_counts(counts: Sequence[RowCounts]) -> Int64Array:
    """The counts of several caches, one after the other: int64 (N,)."""
    return np.concatenate([np.zeros(0, np.int64), *(each.counts().astype(np.int64) for each in counts)])


def without(rows: Int64Array, left_out: Int64Array) -> Int64Array:
    """Rows (N,) without others (M,), each taken away as often as it is there; both sorted, and so is what is left."""
    if not len(left_out):
        return rows
    some, times = np.unique(left_out, return_counts=True)
    first = np.searchsorted(rows, some)
    taken = np.repeat(first - np.cumsum(times) + times, times) + np.arange(len(left_out))
    assert (rows[taken] == left_out).all(), "what is left out was to be trained"
    return np.delete(rows, taken)
