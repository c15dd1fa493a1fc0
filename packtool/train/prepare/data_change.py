"""A run goes on with other caches than it had: what is left of its epoch, and what becomes of what it had.

Caches are known by their fingerprints. In the place of one that is gone there may be another export of its rows: its
samples are found by file and row, or, where files have changed and the old cache can still be read, by what they say.

What caches take over from those of which they are other exports: how often each of their samples was trained.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import numpy as np
import numpy.typing as npt

from packtool import storage
from packtool.cache.manifest import Manifest
from packtool.cache.origins import Origins, read_contents, read_origins
from packtool.cache.reader import CacheReader
from packtool.errors import MismatchError, PacktoolError
from packtool.planning.ledger import (
    DataChange,
    Ledger,
    Match,
    RowCounts,
    SampleKeys,
    SourceLedger,
    joined_counts,
    match,
)
from packtool.planning.pack_plan import Int64Array

HISTORY = "history"
"""Folder of an output directory for what checkpoints do not hold."""


@dataclass(frozen=True, eq=False)
class Carried:
    """What caches take over from others.

    Args:
        before, epoch: by cache, counts (N,) of its samples.
        num_new: by cache, samples of rows that were not there.
        is_again: by cache, whether it has some that were.
        is_gone: of each cache of the pool, bool (M,), samples that no cache has any more.
    """

    before: dict[int, Int64Array]
    epoch: dict[int, Int64Array]
    num_new: dict[int, int]
    is_again: dict[int, bool]
    is_gone: list[npt.NDArray[np.bool_]]

    @classmethod
    def nothing(cls, pool: Sequence[SourceLedger], reader: CacheReader, new: Sequence[int]) -> Carried:
        """Where there are none to take over from, or none that take over."""
        sizes = np.diff(reader.offsets).tolist()
        none = {cache: np.zeros(sizes[cache], np.int64) for cache in new}
        gone = [np.ones(source.num, np.bool_) for source in pool]
        return cls(none, none, {cache: sizes[cache] for cache in new}, dict.fromkeys(new, False), gone)


def paired_caches(
    sources: Sequence[SourceLedger], reader: CacheReader
) -> tuple[list[SourceLedger | None], list[SourceLedger]]:
    """What was trained of each cache that there is now, None for a new one; and the caches that are not there now."""
    unused = list(sources)
    kept: list[SourceLedger | None] = []
    for manifest in reader.manifests:
        same = next((source for source in unused if source.fingerprint == manifest.fingerprint), None)
        kept.append(same)
        if same is not None:
            unused.remove(same)
    return kept, unused


def carried_counts(
    pool: Sequence[SourceLedger], num_leaving: int, reader: CacheReader, new: Sequence[int], history: str
) -> Carried:
    """What new caches take over.

    Args:
        pool: caches that are gone now, the first ``num_leaving`` of them since the checkpoint.
        new: numbers of the caches that were not there.
    """
    before, epoch = (joined_counts([getattr(source, name) for source in pool]) for name in ("before", "epoch"))
    # Of those that were gone before, rows that others went on with count there.
    counts = np.concatenate([np.ones(source.num, np.bool_) for source in pool[:num_leaving]] + [np.zeros(0, np.bool_)])
    considered = np.append(counts, (before + epoch)[len(counts) :] > 0)
    old_origins = [_old_origins(source, history) for source in pool]
    new_origins = {cache: read_origins(reader, cache) for cache in new}
    places = np.flatnonzero(considered)
    old = SampleKeys.joined([_keys(origins) for origins in old_origins]).only(places)
    matches = {cache: match(old, _keys(origins)) for cache, origins in new_origins.items()}
    found = Carried({}, {}, {}, {}, [])
    is_gone = np.logical_and.reduce([each.is_gone for each in matches.values()])
    by_content = _by_contents(pool, places, is_gone, before + epoch, reader, matches)
    _refuse_untold(pool, old_origins, new_origins, by_content is not None)
    for cache, each in matches.items():
        found.before[cache], found.epoch[cache] = each.carried(before[places]), each.carried(epoch[places])
        is_new = each.is_new
        if by_content is not None:
            is_old, which = by_content.of[cache]
            found.before[cache][is_old], found.epoch[cache][is_old] = before[which], epoch[which]
            is_new = is_new.copy()
            is_new[is_old] = False
        found.num_new[cache], found.is_again[cache] = int(is_new.sum()), not is_new.all()
    gone = np.zeros(len(considered), np.bool_)
    gone[places] = is_gone
    if by_content is not None:
        gone[by_content.found] = False
    found.is_gone.extend(np.split(gone, np.cumsum([source.num for source in pool])[:-1]))
    return found


@dataclass(frozen=True, eq=False)
class _ByContents:
    """Samples that were found by what they say.

    Args:
        of: by cache, its samples that were found, and the samples of the pool that these are.
        found: all of the latter.
    """

    of: dict[int, tuple[Int64Array, Int64Array]]
    found: Int64Array


def _by_contents(
    pool: Sequence[SourceLedger],
    places: Int64Array,
    is_gone: npt.NDArray[np.bool_],
    counts: Int64Array,
    reader: CacheReader,
    matches: dict[int, Match],
) -> _ByContents | None:
    """Look for what no row tells of among what is gone; None where some of that cannot be read any more.

    Args:
        places: of the samples that are considered, in the pool.
        is_gone: which of these no cache has by its row.
        counts: how often each of the pool was trained.
    """
    starts = np.cumsum([0, *(source.num for source in pool)])
    missing = places[is_gone]
    nothing = np.zeros(0, np.int64)
    wanted = {cache: np.flatnonzero(each.is_new) for cache, each in matches.items()}
    if not len(missing) or not any(map(len, wanted.values())):
        return _ByContents(dict.fromkeys(matches, (nothing, nothing)), nothing)
    contents = np.zeros(len(missing), np.uint64)
    for number, source in enumerate(pool):
        here = (missing >= starts[number]) & (missing < starts[number + 1])
        if here.any():
            there = _still_there(source)
            if there is None:
                return None
            contents[here] = read_contents(there, missing[here] - starts[number])
    old = SampleKeys.of_contents(contents, counts[missing])
    of = {}
    for cache, rows in wanted.items():
        found = read_contents(reader, rows + reader.offsets[cache])
        same = match(old, SampleKeys.of_contents(found, np.zeros(len(found), np.int64))).same
        of[cache] = rows[same >= 0], missing[same[same >= 0]]
    return _ByContents(of, np.concatenate([which for _, which in of.values()]))


def _old_origins(source: SourceLedger, history: str) -> Origins:
    """Where the samples of a cache came from that the run no longer has.

    Raises:
        MismatchError: if nothing tells.
    """
    path = origins_path(history, source.fingerprint)
    if os.path.exists(path):
        return Origins.read(path)
    there = _still_there(source)
    if there is not None:
        return read_origins(there, 0)
    raise MismatchError(
        f"{source.directory} is no longer the cache {source.fingerprint} that was trained, and nothing in {history} "
        "tells which rows its samples were: what was trained of it cannot be found in the new caches",
        "Bring it back where it was, and export into another directory; or begin anew with --resume-only-model true.",
    )


def _still_there(source: SourceLedger) -> CacheReader | None:
    """The cache as it was, if it can be read."""
    try:
        if Manifest.read(source.directory).fingerprint != source.fingerprint:
            return None
        return CacheReader.open([source.directory])
    except PacktoolError:
        return None


def _refuse_untold(
    pool: Sequence[SourceLedger], old: Sequence[Origins], new: dict[int, Origins], knows_contents: bool
) -> None:
    """Where a file of rows has changed, its rows are not what they were, and only the samples can tell which is which.

    Raises:
        MismatchError: if they cannot, because the old cache is gone.
    """
    if knows_contents:
        return
    now = {
        path: digest for origins in new.values() for path, digest in zip(origins.files, origins.digests, strict=True)
    }
    for source, origins in zip(pool, old, strict=True):
        for path, digest in zip(origins.files, origins.digests, strict=True):
            if now.get(path, digest) != digest and _still_there(source) is None:
                raise MismatchError(
                    f"{path} has changed since {source.directory} was exported, so its rows are not those that were "
                    "trained; and the old cache, which could tell which is which, is gone",
                    "Bring that cache back, export the changed file into another directory, and resume with that one.",
                )


def _keys(origins: Origins) -> SampleKeys:
    digests = [blake2b(digest.encode(errors="surrogatepass"), digest_size=8).digest() for digest in origins.digests]
    of_files = np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)
    return SampleKeys.of_rows(of_files[origins.file], origins.row, origins.part)


def origins_path(history: str, fingerprint: str) -> str:
    """The file in a run's history that tells where the samples of a cache came from."""
    return os.path.join(history, f"rows-{fingerprint}.npz")


def history_of(checkpoint: str) -> str:
    """The folder with the history of a checkpoint's run."""
    return os.path.join(os.path.dirname(os.path.abspath(checkpoint)), HISTORY)


def keep_origins(reader: CacheReader, history: str) -> None:
    """Write down where the samples of caches on this machine came from, so that they are found when these are gone.

    Those of remote caches are read when they are needed: it would copy all of their shards at once.
    """
    for cache, (directory, manifest) in enumerate(zip(reader.directories, reader.manifests, strict=True)):
        path = origins_path(history, manifest.fingerprint)
        if not storage.is_remote(directory) and not os.path.exists(path):
            storage.make_directory(history)
            read_origins(reader, cache).write(path)


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
