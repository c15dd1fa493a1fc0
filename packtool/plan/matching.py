"""Which samples of a cache are those of another: by the rows that they were made of, or by what they say.

A cache that is exported again has other samples at other places, and what was trained of the old one must be found in
it. Samples are told apart by 64-bit keys::

    old   row 0          row 1, turn 1 of 2   row 1, turn 2 of 2   row 3
    new   row 0          row 1 (whole)                             row 3   row 4
          the same       trained if both were                      same    new

Of a hundred million samples, two have the same key by chance in one of some four thousand runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.plan.pack_plan import Int64Array

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
