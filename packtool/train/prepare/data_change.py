"""A run goes on with other caches than it had: what is left of its epoch, and what becomes of what it had.

Caches are known by their fingerprints. In the place of one that is gone there may be another export of its rows: its
samples are found by file and row, or, where files have changed and the old cache can still be read, by what they say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from packtool import storage
from packtool.cache.reader import CacheReader
from packtool.plan.ledger import DataChange, Ledger, RowCounts, SourceLedger, joined_counts
from packtool.plan.pack_plan import Int64Array
from packtool.train.prepare.carried import Carried, carried_counts, paired_caches

Fate = Literal["as before", "new", "back", "exported again", "replaced", "gone"]


@dataclass(frozen=True)
class SourceChange:
    """What became of one cache.

    Args:
        directory: of the cache.
        fate: what it is to the run: a cache that is exported again has rows of one that is replaced, and one that is
            back was gone before.
        samples: that it has, or had.
        trained: of them in this epoch, by this cache or those that it was exported in place of.
        left: to be trained in this epoch.
        new: samples of rows that the run did not have.
        gone: samples that the run had and has no more; of a cache that is gone or replaced.
    """

    directory: str
    fate: Fate
    samples: int
    trained: int
    left: int = 0
    new: int = 0
    gone: int = 0

    @property
    def sentence(self) -> str:
        """One line of it."""
        if self.fate in ("gone", "replaced"):
            told = f"{self.fate}; {self.trained:,} of its {self.samples:,} samples were trained in this epoch"
            gone = f", and {self.gone:,} are in no cache of this run any more" if self.fate == "replaced" else ""
            return f"{self.directory}: {told}{gone}"
        fate = {"as before": "", "back": "back again; "}.get(self.fate, f"{self.fate}, {self.new:,} samples new; ")
        return f"{self.directory}: {fate}{self.trained:,} of {self.samples:,} trained in this epoch, {self.left:,} left"


@dataclass(frozen=True, eq=False)
class ChangedData:
    """A run with other data than its checkpoint.

    Args:
        ledger: of the caches that there are now, with the change.
        sources: what became of each cache, those that are gone last.
    """

    ledger: Ledger
    sources: tuple[SourceChange, ...]

    def lines(self, steps_left: int, steps_before: str) -> Iterator[str]:
        """What is to be said before it is paid for.

        Args:
            steps_left: steps that the rest of the epoch takes now.
            steps_before: how many steps the whole run had, and has.
        """
        change = self.ledger.change
        assert change is not None, "made with it"
        yield f"the data have changed after step {change.step:,}, in epoch {change.epoch + 1:,}:"
        for source in self.sources:
            yield f"  {source.sentence}"
        left = sum(source.left for source in self.sources)
        yield (
            f"what is left of this epoch, {left:,} samples, is planned anew in {steps_left:,} steps: none that was "
            f"trained in it comes again; {steps_before}"
        )


def with_changed_data(
    ledger: Ledger,
    reader: CacheReader,
    wanted: Callable[[Int64Array, Int64Array], Int64Array],
    history: str,
    most: int,
    stage: tuple[int, int] | None = None,
) -> ChangedData:
    """The ledger of a run that goes on with these caches, with what is left of its epoch.

    Args:
        ledger: of the checkpoint.
        reader: of the caches that there are now.
        wanted: how often the epoch has each of their samples, (N,), given how often each was trained before it, and in
            it.
        history: folder where origins of the caches of the run are kept.
        most: tokens of a sample; longer ones are left out.
        stage: that the run is in, as ``Ledger`` has it.

    Raises:
        MismatchError: if samples of a cache cannot be found again, because it is gone.
    """
    kept, leaving = paired_caches(ledger.sources, reader)
    new = [cache for cache, source in enumerate(kept) if source is None]
    # Of caches that were gone before, what was trained of rows that have not come back.
    pool = [*leaving, *(source for source in ledger.retired if source.trained.num_rows)]
    found = (
        carried_counts(pool, len(leaving), reader, new, history) if new and pool else Carried.nothing(pool, reader, new)
    )
    sources = tuple(
        dataclasses.replace(source, directory=storage.absolute(reader.directories[cache]))
        if source is not None
        else _begun(reader, cache, found, ledger.retired)
        for cache, source in enumerate(kept)
    )
    counts = joined_counts([source.epoch for source in sources])
    before = joined_counts([source.before for source in sources])
    left = np.maximum(wanted(before, counts) - counts, 0)
    bounds = reader.offsets[1:-1]
    known = () if stage is None else tuple(source.trained for source in sources)
    change = DataChange(ledger.step, ledger.epoch, tuple(map(RowCounts.of, np.split(left, bounds))), stage, known)
    now = {manifest.fingerprint for manifest in reader.manifests}
    retired = [_only(source, is_gone) for source, is_gone in zip(pool, found.is_gone, strict=True)]
    retired += [source for source in ledger.retired if not source.trained.num_rows]
    after = dataclasses.replace(
        ledger,
        sources=sources,
        retired=tuple(source for source in retired if source.fingerprint not in now),
        change=change,
        stage=stage,
    )
    is_left = np.split(np.where(reader.index.length <= most, left, 0), bounds)
    back = {source.fingerprint for source in ledger.retired}
    fates = [
        _what_became(source, kept[n], source.fingerprint in back, found, n, is_left[n])
        for n, source in enumerate(sources)
    ]
    fates += [_what_is_gone(source, is_gone) for source, is_gone in zip(leaving, found.is_gone, strict=False)]
    return ChangedData(after, tuple(fates))


def _what_became(
    source: SourceLedger, before: SourceLedger | None, is_back: bool, found: Carried, cache: int, left: Int64Array
) -> SourceChange:
    """What a cache is that the run has now."""
    trained, num_left = source.epoch.num_rows, int(left.sum())
    if before is not None:
        return SourceChange(source.directory, "as before", source.num, trained, num_left)
    if is_back:
        return SourceChange(source.directory, "back", source.num, trained, num_left)
    fate: Fate = "exported again" if found.is_again[cache] else "new"
    return SourceChange(source.directory, fate, source.num, trained, num_left, found.num_new[cache])


def _what_is_gone(source: SourceLedger, is_gone: npt.NDArray[np.bool_]) -> SourceChange:
    """What a cache was that the run had."""
    fate: Fate = "gone" if is_gone.all() else "replaced"
    return SourceChange(source.directory, fate, source.num, source.epoch.num_rows, gone=int(is_gone.sum()))


def cache_differences(sources: Sequence[SourceLedger], reader: CacheReader) -> list[str]:
    """Which caches a run had and has not, or has anew, a line for each."""
    kept, leaving = paired_caches(sources, reader)
    places = {source.directory for source in leaving}
    directories = [storage.absolute(directory) for directory in reader.directories]
    found = []
    for cache, source in enumerate(kept):
        directory = directories[cache]
        if source is None:
            found.append(f"{directory}: {'is another export now' if directory in places else 'was not there'}")
    found += [f"{each.directory}: is not there now" for each in leaving if each.directory not in directories]
    return found or ["the caches are in another order"]


def _begun(reader: CacheReader, cache: int, found: Carried, retired: Sequence[SourceLedger]) -> SourceLedger:
    """The ledger of a cache that was not there before the change, or not just before it."""
    fingerprint = reader.manifests[cache].fingerprint
    num = int(reader.offsets[cache + 1] - reader.offsets[cache])
    source = SourceLedger.begin(storage.absolute(reader.directories[cache]), fingerprint, num)
    back = next((each for each in retired if each.fingerprint == fingerprint), None)
    if back is not None:
        source = dataclasses.replace(back, directory=source.directory)
    before, epoch = RowCounts.of(found.before[cache]), RowCounts.of(found.epoch[cache])
    return dataclasses.replace(source, before=before, epoch=epoch)


def _only(source: SourceLedger, chosen: npt.NDArray[np.bool_]) -> SourceLedger:
    """The ledger with the counts of some samples, because others go on elsewhere; its totals stay."""
    before, epoch = (RowCounts.of(np.where(chosen, each.counts(), 0)) for each in (source.before, source.epoch))
    return dataclasses.replace(source, before=before, epoch=epoch)
