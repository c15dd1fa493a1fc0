"""What was trained, how often: a ledger of samples by cache and row, of a few bits a sample.

Counts are kept as bits in planes, the lowest first, so that an epoch is one bit a sample whatever it is an epoch of::

    row       0 1 2 3 4 5 6 7
    trained   1 3 1 2 1 1 0 1     plane 0:  1 1 1 0 1 1 0 1     plane 1:  0 1 0 1 0 0 0 0

The epoch that is being trained is counted apart from those before it: what is left of it is what a run whose data have
changed must still train. Samples that could not be loaded were not trained; they are listed.

Which samples of a cache are those of another: by the rows that they were made of, or by what they say.

A cache that is exported again has other samples at other places, and what was trained of the old one must be found in
it. Samples are told apart by 64-bit keys::

    old   row 0          row 1, turn 1 of 2   row 1, turn 2 of 2   row 3
    new   row 0          row 1 (whole)                             row 3   row 4
          the same       trained if both were                      same    new

Of a hundred million samples, two have the same key by chance in one of some four thousand runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.planning.epoch import EpochPlan
from packtool.planning.pack_plan import Int64Array

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


Keys = npt.NDArray[np.uint64]

_NEW = -1


@dataclass(frozen=True, eq=False)
class SampleKeys:
    """What N samples are known by.

    Args:
        samples: uint64 (N,), of each sample, which no other has.
        rows: uint64 (N,), of the row that it was made of, which others may have been made of, too.
    """

    samples: Keys
    rows: Keys

    def __len__(self) -> int:
        return len(self.samples)

    @classmethod
    def of_rows(cls, sources: Keys, rows: Int64Array, parts: npt.NDArray[np.integer[Any]] | None = None) -> SampleKeys:
        """Keys of rows of files.

        Samples of one row that nothing else tells apart, such as the pieces of a text, are numbered; pieces of a text
        that was cut into another number of them are others.

        Args:
            sources: (N,), a key of the file that each sample comes from.
            rows: (N,), its row in the file.
            parts: (N, 4), which part of its row it is, four zeros for a whole row; None where all are.
        """
        keys = mixed(sources, rows)
        samples = keys.copy()
        if parts is not None:
            some = np.flatnonzero(parts.any(axis=1))
            for column in parts[some].T:
                samples[some] = mixed(samples[some], column.astype(np.int64))
        number, count = _numbered(samples)
        return cls(mixed(mixed(samples, number), count), keys)

    @classmethod
    def of_contents(cls, contents: Keys, counts: npt.NDArray[np.integer[Any]]) -> SampleKeys:
        """Keys of what samples say; of those that say the same, the one that was trained most often comes first."""
        number, _ = _numbered(contents, -counts.astype(np.int64))
        return cls(mixed(contents, number), contents)

    def only(self, chosen: npt.NDArray[np.bool_] | Int64Array) -> SampleKeys:
        """Those of some samples."""
        return SampleKeys(self.samples[chosen], self.rows[chosen])

    @classmethod
    def joined(cls, parts: list[SampleKeys]) -> SampleKeys:
        """Those of all, one after the other."""
        none = np.zeros(0, np.uint64)
        samples = np.concatenate([none, *(part.samples for part in parts)])
        return cls(samples, np.concatenate([none, *(part.rows for part in parts)]))


def mixed(keys: Keys, values: npt.NDArray[np.integer[Any]]) -> Keys:
    """Other keys (N,), for each of ``keys`` and a number to go with it: the end of SplitMix64 (Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        found = keys * np.uint64(0x9E3779B97F4A7C15) + values.astype(np.uint64) + np.uint64(0x632BE59BD9B4E019)
        found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return found ^ (found >> np.uint64(31))


def _numbered(keys: Keys, order: Int64Array | None = None) -> tuple[Int64Array, Int64Array]:
    """Among samples of one key, the number of each and how many there are: int64 (N,) each.

    Args:
        order: (N,), what comes first among them; by default their places.
    """
    places = np.argsort(keys, kind="stable") if order is None else np.lexsort((order, keys))
    starts = np.flatnonzero(np.diff(keys[places], prepend=~keys[places[:1]]))
    counts = np.diff(np.append(starts, len(keys)))
    number, count = np.empty(len(keys), np.int64), np.empty(len(keys), np.int64)
    number[places] = np.arange(len(keys)) - np.repeat(starts, counts)
    count[places] = np.repeat(counts, counts)
    return number, count


@dataclass(frozen=True, eq=False)
class Match:
    """Which of M old samples are among N new ones.

    Args:
        same: int64 (N,), the old sample that each new one is; -1 where it is none.
        first, last: int64 (N,), the old samples of its row, from ``order[first]`` to ``order[last - 1]``; none where
            the row is new.
        order: int64 (M,), the old samples, row after row.
        is_gone: bool (M,), old samples of whose row nothing is left.
    """

    same: Int64Array
    first: Int64Array
    last: Int64Array
    order: Int64Array
    is_gone: npt.NDArray[np.bool_]

    @property
    def is_new(self) -> npt.NDArray[np.bool_]:
        """Which new samples are of rows that the old ones do not have, (N,)."""
        return self.first == self.last

    def carried(self, counts: npt.NDArray[np.integer[Any]]) -> Int64Array:
        """How often each new sample was trained, int64 (N,), from the counts (M,) of the old ones.

        A sample that is another part of its row than any of the old ones was trained as often as all of them were:
        what was left out of some of them would be lost otherwise.
        """
        found = np.zeros(len(self.same), np.int64)
        is_same = self.same != _NEW
        found[is_same] = counts[self.same[is_same]]
        others = np.flatnonzero(~is_same & ~self.is_new)
        if len(others):
            in_order = counts[self.order].astype(np.int64)
            # A number behind the last, so that the last row has an end, too.
            bounds = np.stack((self.first[others], self.last[others]), axis=1).reshape(-1)
            found[others] = np.minimum.reduceat(np.append(in_order, 0), bounds)[::2]
        return found


def match(old: SampleKeys, new: SampleKeys) -> Match:
    """Find new samples among old ones. Price: that of sorting both."""
    by_sample = np.argsort(old.samples, kind="stable")
    same = np.full(len(new), _NEW, np.int64)
    if len(old):
        places = np.minimum(np.searchsorted(old.samples[by_sample], new.samples), len(old) - 1)
        found = by_sample[places]
        same = np.where(old.samples[found] == new.samples, found, _NEW)
    order = np.argsort(old.rows, kind="stable")
    rows = old.rows[order]
    first, last = (np.searchsorted(rows, new.rows, side=side) for side in ("left", "right"))
    is_gone = ~np.isin(old.rows, new.rows, kind="sort")
    return Match(same, first, last, order, is_gone)
