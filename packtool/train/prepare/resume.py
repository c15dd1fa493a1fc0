"""Resuming a run on caches: the timeline from its checkpoint on, the ledger of what was trained, and changed caches.

Caches are identified by their fingerprints. Another export of the rows of a removed cache may have replaced it: its
samples are matched by file and row, or, where files have changed and the old cache can still be read, by content. The
training counts of matched samples go to the new cache.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from packtool import storage
from packtool.cache.manifest import Manifest
from packtool.cache.origins import Origins, hash_contents, read_origins
from packtool.cache.reader import CacheReader
from packtool.errors import MismatchError, PacktoolError
from packtool.launch.world import World
from packtool.planning.ledger import (
    DataChange,
    Keys,
    Ledger,
    Match,
    RowCounts,
    SourceLedger,
    concatenate_counts,
    content_keys,
    match,
    row_keys,
)
from packtool.planning.pack_plan import Int64Array
from packtool.train.prepare.checkpoint import Assignment, RunState, check_resumable, steps_planned
from packtool.train.prepare.history import begin_ledger, history_directory, ledger_of_plan, origins_path, read_ledger
from packtool.train.prepare.inputs import EpochToResume, Inputs
from packtool.train.prepare.output_dir import ResumePoint
from packtool.train.prepare.timeline import Timeline


class NewCacheCounts(NamedTuple):
    """Training counts of the N samples of a new cache, transferred from removed caches that have the same samples."""

    before_epoch: RowCounts
    in_epoch: RowCounts
    num_unmatched: int  # samples that no removed cache has

    @classmethod
    def of(cls, matched: Match, before_epoch: Int64Array, in_epoch: Int64Array) -> NewCacheCounts:
        """The counts of a new cache by its matches, and the counts of the K old samples, (K,)."""
        return cls(
            RowCounts.of(matched.transfer(before_epoch)),
            RowCounts.of(matched.transfer(in_epoch)),
            num_unmatched=int((matched.is_new & (matched.same < 0)).sum()),
        )


class MatchedCounts(NamedTuple):
    """The result of matching the samples of new and removed caches."""

    new: dict[int, NewCacheCounts]  # by the number of the new cache in the reader
    is_gone: list[npt.NDArray[np.bool_]]  # of each removed cache, (its samples,): those that no new cache has


def _match_counts(
    ledger: Ledger,
    removed_now: Sequence[SourceLedger],
    reader: CacheReader,
    new_caches: Sequence[int],
    history_dir: str,
) -> MatchedCounts:
    """Transfer training counts from removed caches to new caches that have the same samples.

    ``removed_now`` are caches removed since the checkpoint; those removed earlier are in ``ledger``. ``new_caches`` are
    numbers of caches in ``reader``. ``history_dir`` has records of the run's earlier caches.
    """
    removed_earlier = _retired_with_counts(ledger)
    removed = [*removed_now, *removed_earlier]
    if not new_caches or not removed:
        return _unmatched_counts(removed, reader, new_caches)

    # The samples of the removed caches are numbered consecutively, one cache after the other.
    candidates = _find_candidates(removed_now, removed_earlier)  # (K,), sorted
    matches = _match_samples(removed, candidates, reader, new_caches, history_dir)

    before_epoch = concatenate_counts([source.before for source in removed])[candidates]
    in_epoch = concatenate_counts([source.epoch for source in removed])[candidates]
    new_counts = {cache: NewCacheCounts.of(matched, before_epoch, in_epoch) for cache, matched in matches.items()}

    stops = np.cumsum([source.num for source in removed])  # the number after the last sample of each cache
    is_gone = np.zeros(stops[-1], np.bool_)
    is_gone[candidates] = _has_no_match(matches)
    is_gone_by_cache = np.split(is_gone, stops[:-1])
    return MatchedCounts(new_counts, is_gone_by_cache)


def _retired_with_counts(ledger: Ledger) -> list[SourceLedger]:
    """Caches removed before the checkpoint, of which no other cache has taken over all trained samples."""
    return [source for source in ledger.retired if source.trained.num_rows]


def _unmatched_counts(removed: Sequence[SourceLedger], reader: CacheReader, new_caches: Sequence[int]) -> MatchedCounts:
    """The result of a match without any equal samples: every new sample was trained 0 times."""
    sizes = np.diff(reader.offsets).tolist()
    zeros = {cache: RowCounts(sizes[cache]) for cache in new_caches}
    unmatched = {cache: NewCacheCounts(zero, zero, num_unmatched=zero.num) for cache, zero in zeros.items()}
    return MatchedCounts(unmatched, [np.ones(source.num, np.bool_) for source in removed])


def _find_candidates(removed_now: Sequence[SourceLedger], removed_earlier: Sequence[SourceLedger]) -> Int64Array:
    """Positions (K,), in the joined samples of removed caches, of those that new caches may match."""
    is_candidate = [np.ones(source.num, np.bool_) for source in removed_now]
    # Counts that another cache has taken over are 0.
    is_candidate += [source.trained.counts() > 0 for source in removed_earlier]
    return np.flatnonzero(np.concatenate(is_candidate))


def _match_samples(
    removed: Sequence[SourceLedger],
    candidates: Int64Array,
    reader: CacheReader,
    new_caches: Sequence[int],
    history_dir: str,
) -> dict[int, Match]:
    """Find the samples that a new cache and the removed caches have in common, for each new cache by its number.

    Samples are the same if they are the same row of equal files, or else if their contents are equal.

    Args:
        candidates: samples to find, (K,): their numbers among the samples of all removed caches.
        history_dir: has records of the run's earlier caches.
    """
    old_origins = [_old_origins(source, history_dir) for source in removed]
    new_origins = {cache: read_origins(reader, cache) for cache in new_caches}
    removed_keys = np.concatenate([_row_keys(origins) for origins in old_origins], axis=1)
    candidate_keys = removed_keys[:, candidates]
    row_matches = {cache: match(candidate_keys, _row_keys(origins)) for cache, origins in new_origins.items()}

    # Compare contents only if necessary, because this reads samples.
    unmatched = np.flatnonzero(_has_no_match(row_matches))  # indices of ``candidates``
    any_new_sample = any(row_match.is_new.any() for row_match in row_matches.values())
    if len(unmatched) == 0 or not any_new_sample:
        return row_matches

    old_keys = _content_keys_of_removed(removed, candidates[unmatched])
    if old_keys is None:  # a removed cache cannot be read, which matters only if files of rows have changed
        _check_rows_unchanged(removed, old_origins, new_origins)
        return row_matches
    return {cache: _add_content_matches(row_matches[cache], unmatched, old_keys, reader, cache) for cache in new_caches}


def _add_content_matches(row_match: Match, old: Int64Array, old_keys: Keys, reader: CacheReader, cache: int) -> Match:
    """Match the samples of a new cache whose row no removed cache has with ``old`` samples (U,), by content keys."""
    new = np.flatnonzero(row_match.is_new)
    new_hashes = hash_contents(reader, new + reader.offsets[cache])
    new_keys = content_keys(new_hashes, np.zeros(len(new), np.int64))
    indices = match(old_keys, new_keys).same  # of ``old``, -1 for none
    is_matched = indices >= 0
    return row_match.plus(old[indices[is_matched]], new[is_matched])


def _has_no_match(matches: Mapping[int, Match]) -> npt.NDArray[np.bool_]:
    """Mark the K candidates that no new cache has."""
    return np.all([matched.is_gone for matched in matches.values()], axis=0)


def _content_keys_of_removed(removed: Sequence[SourceLedger], positions: Int64Array) -> Keys | None:
    """Content keys of samples at ``positions`` (M,) of the joined removed caches; None if a cache cannot be read."""
    hashes = _hash_removed_samples(removed, positions)
    if hashes is None:
        return None
    # Of samples with equal contents, the most trained ones are matched first.
    training_counts = concatenate_counts([source.trained for source in removed])
    return content_keys(hashes, training_counts[positions])


def _hash_removed_samples(removed: Sequence[SourceLedger], positions: Int64Array) -> npt.NDArray[np.uint64] | None:
    """Hash the samples at ``positions`` (M,) of the joined caches, uint64 (M,); None if one of these cannot be read."""
    hashes = np.zeros(len(positions), np.uint64)
    stop = 0
    for source in removed:
        start = stop  # the samples of this cache are at start, ..., stop - 1 in the joined samples
        stop = start + source.num
        is_of_source = (positions >= start) & (positions < stop)
        if is_of_source.any():
            removed_cache = _open_unchanged(source)
            if removed_cache is None:
                return None
            hashes[is_of_source] = hash_contents(removed_cache, positions[is_of_source] - start)
    return hashes


def _old_origins(source: SourceLedger, history_dir: str) -> Origins:
    """Read files and rows of the samples of a removed cache, from the run's history or the cache itself."""
    path = origins_path(history_dir, source.fingerprint)
    if os.path.exists(path):
        return Origins.read(path)
    removed = _open_unchanged(source)
    if removed is not None:
        return read_origins(removed, 0)
    raise MismatchError(
        f"{source.directory} is no longer the cache {source.fingerprint} that was trained, and {history_dir} has no "
        "record of its rows, so its trained samples cannot be matched with those of the new caches",
        "Restore the old cache there and export into another directory, or use --resume-only-model true.",
    )


def _open_unchanged(source: SourceLedger) -> CacheReader | None:
    """Open a removed cache; None if it cannot be read, or another cache has taken its place."""
    try:
        if Manifest.read(source.directory).fingerprint != source.fingerprint:
            return None
        return CacheReader.open([source.directory])
    except PacktoolError:
        return None


def _check_rows_unchanged(removed: Sequence[SourceLedger], old: Sequence[Origins], new: dict[int, Origins]) -> None:
    """Raise a MismatchError if a file of rows has changed, and a cache of its earlier rows is missing."""
    new_digests: dict[str, str] = {}
    for origins in new.values():
        new_digests |= zip(origins.files, origins.digests, strict=True)
    for source, origins in zip(removed, old, strict=True):
        for path, digest in zip(origins.files, origins.digests, strict=True):
            if new_digests.get(path, digest) != digest and _open_unchanged(source) is None:
                raise MismatchError(
                    f"{path} has changed since {source.directory} was exported, so its rows cannot be matched with "
                    "those that were trained: the old cache, which has their contents, is missing",
                    "Restore that cache, export the changed file into another directory, and resume with the new one.",
                )


def _row_keys(origins: Origins) -> Keys:
    """Keys of samples by content of their file, row, and part of the row, uint64 (2, N)."""
    digests = [blake2b(digest.encode(errors="surrogatepass"), digest_size=8).digest() for digest in origins.digests]
    file_keys = np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)
    return row_keys(file_keys[origins.file], origins.row, origins.part)


def _pair_caches(
    sources: Sequence[SourceLedger], reader: CacheReader
) -> tuple[list[SourceLedger | None], list[SourceLedger]]:
    """The saved ledger of each cache of ``reader``, None for a new one; and the ledgers of the removed caches."""
    removed = list(sources)
    saved_sources = []
    for manifest in reader.manifests:
        saved_source = _find_source(removed, manifest.fingerprint)
        saved_sources.append(saved_source)
        if saved_source is not None:
            removed.remove(saved_source)
    return saved_sources, removed


def _find_source(sources: Sequence[SourceLedger], fingerprint: str) -> SourceLedger | None:
    """The first ledger of a cache with this fingerprint, if any."""
    return next((source for source in sources if source.fingerprint == fingerprint), None)


SourceStatus = Literal["as before", "new", "back", "exported again", "replaced", "gone"]


@dataclass(frozen=True)
class SourceChange:
    """The change of one cache since the checkpoint; its fields are keys of JSON.

    Args:
        fate: "exported again" if it has rows of one that was "replaced"; "back" if it was removed earlier.
        trained: samples trained in this epoch, from this cache or the one that it replaces.
        left: samples left to train in this epoch.
        new: samples that no earlier cache of the run had.
        gone: samples of a removed cache that no cache has any more.
    """

    directory: str
    fate: SourceStatus
    samples: int
    trained: int
    left: int = 0
    new: int = 0
    gone: int = 0

    @property
    def sentence(self) -> str:
        """One line for the log."""
        if self.fate in ("gone", "replaced"):
            trained = f"{self.fate}; {self.trained:,} of its {self.samples:,} samples were trained in this epoch"
            gone = f", and {self.gone:,} are no longer in any cache of this run" if self.fate == "replaced" else ""
            return f"{self.directory}: {trained}{gone}"
        status = {"as before": "", "back": "back again; "}.get(self.fate, f"{self.fate}, {self.new:,} samples new; ")
        trained = f"{self.trained:,} of {self.samples:,} trained in this epoch, {self.left:,} left"
        return f"{self.directory}: {status}{trained}"


def change_lines(change: DataChange, sources: Sequence[SourceChange], steps_left: int, run_end: str) -> Iterator[str]:
    """Describe a change of the data and the steps left in its epoch; ``run_end`` describes the end of the run."""
    yield f"the data changed after step {change.step:,}, in epoch {change.epoch + 1:,}:"
    for source in sources:
        yield f"  {source.sentence}"
    left = sum(source.left for source in sources)
    yield (
        f"the rest of this epoch, {left:,} samples in {steps_left:,} steps, is planned again; samples trained in it "
        f"are not repeated; {run_end}"
    )


def ledger_for_new_caches(
    saved_ledger: Ledger, reader: CacheReader, epoch: EpochToResume, history_dir: str
) -> tuple[Ledger, tuple[SourceChange, ...]]:
    """Return the ledger of a run that resumes with other caches, and how each cache has changed.

    A ledger counts how often each sample was trained. New caches inherit the counts of removed caches for the samples
    that they have in common, so that these are not repeated in this epoch.

    Args:
        saved_ledger: that of the checkpoint, with the caches of that time.
        reader: the caches to resume with.
        epoch: the epoch of the next step, with the number of times that it trains each sample.
        history_dir: has records of the run's earlier caches.

    Returns:
        The changes are in the order of the caches in ``reader``; removed caches are last.
    """
    saved_sources, removed = _pair_caches(saved_ledger.sources, reader)  # None for a new cache
    new_caches = [number for number, saved_source in enumerate(saved_sources) if saved_source is None]
    matched = _match_counts(saved_ledger, removed, reader, new_caches, history_dir)

    sources = _current_ledgers(reader, saved_sources, matched, saved_ledger.retired)
    remaining_counts = _remaining_counts(reader, sources, epoch)
    new_ledger = dataclasses.replace(
        saved_ledger,
        sources=tuple(sources),
        retired=_retired_ledgers(saved_ledger, removed, matched.is_gone, reader),
        change=_data_change(saved_ledger, sources, remaining_counts, epoch.stage),
        stage=epoch.stage,
    )

    num_remaining = _num_remaining(reader, remaining_counts, epoch.max_length)
    changes = _current_changes(sources, saved_sources, matched, saved_ledger.retired, num_remaining)
    is_gone_by_cache = matched.is_gone[: len(removed)]  # caches removed before the checkpoint follow
    for removed_source, is_gone in zip(removed, is_gone_by_cache, strict=True):
        changes.append(_removal(removed_source, is_gone))
    return new_ledger, tuple(changes)


def _data_change(
    ledger: Ledger,
    sources: Sequence[SourceLedger],
    remaining_counts: Sequence[Int64Array],
    stage: tuple[int, int] | None,
) -> DataChange:
    """The change of the data from those of ``ledger`` to ``sources``."""
    trained: tuple[RowCounts, ...] = ()
    if stage is not None:  # later stages draw the least trained samples first
        trained = tuple(source.trained for source in sources)
    left = tuple(RowCounts.of(counts) for counts in remaining_counts)
    return DataChange(ledger.step, ledger.epoch, left, stage, trained)


def _current_ledgers(
    reader: CacheReader,
    saved_sources: Sequence[SourceLedger | None],
    matched: MatchedCounts,
    retired: Sequence[SourceLedger],
) -> list[SourceLedger]:
    """The ledger of each cache of a resumed run; ``saved_sources`` are those in the checkpoint, None for new caches."""
    sources = []
    for number, source in enumerate(saved_sources):
        if source is None:
            source = _ledger_of_new_cache(reader.manifests[number].fingerprint, matched.new[number], retired)
        directory = storage.absolute(reader.directories[number])  # the cache may have moved
        sources.append(dataclasses.replace(source, directory=directory))
    return sources


def _ledger_of_new_cache(fingerprint: str, counts: NewCacheCounts, retired: Sequence[SourceLedger]) -> SourceLedger:
    """A ledger, without its directory, with these counts; if the cache was removed before, its totals continue."""
    ledger = _find_source(retired, fingerprint) or SourceLedger.begin("", fingerprint, counts.in_epoch.num)
    return dataclasses.replace(ledger, before=counts.before_epoch, epoch=counts.in_epoch)


def _remaining_counts(reader: CacheReader, sources: Sequence[SourceLedger], epoch: EpochToResume) -> list[Int64Array]:
    """Times that the epoch has yet to train each sample: one array for each cache, (samples of the cache,)."""
    before_epoch = concatenate_counts([source.before for source in sources])
    trained_in_epoch = concatenate_counts([source.epoch for source in sources])
    epoch_counts = epoch.count_samples(before_epoch, trained_in_epoch)
    remaining = np.maximum(epoch_counts - trained_in_epoch, 0)
    return np.split(remaining, reader.offsets[1:-1])


def _num_remaining(reader: CacheReader, remaining: Sequence[Int64Array], max_length: int) -> list[int]:
    """The samples of each cache that the epoch has yet to train, without those longer than ``max_length`` tokens."""
    lengths_by_cache = np.split(reader.index.length, reader.offsets[1:-1])
    return [
        int(counts[lengths <= max_length].sum()) for counts, lengths in zip(remaining, lengths_by_cache, strict=True)
    ]


def _retired_ledgers(
    ledger: Ledger, removed_now: Sequence[SourceLedger], is_gone: Sequence[npt.NDArray[np.bool_]], reader: CacheReader
) -> tuple[SourceLedger, ...]:
    """The ledgers of all caches that the run had and has no longer; ``is_gone`` as in ``MatchedCounts``."""
    retired = []
    # Matched samples count for the new caches only; totals stay, because the old caches have trained them.
    for source, mask in zip([*removed_now, *_retired_with_counts(ledger)], is_gone, strict=True):
        before = RowCounts.of(np.where(mask, source.before.counts(), 0))
        in_epoch = RowCounts.of(np.where(mask, source.epoch.counts(), 0))
        retired.append(dataclasses.replace(source, before=before, epoch=in_epoch))
    retired += [source for source in ledger.retired if not source.trained.num_rows]
    present = {manifest.fingerprint for manifest in reader.manifests}
    return tuple(source for source in retired if source.fingerprint not in present)


def _current_changes(
    sources: Sequence[SourceLedger],
    saved_sources: Sequence[SourceLedger | None],
    matched: MatchedCounts,
    retired: Sequence[SourceLedger],
    num_remaining: Sequence[int],
) -> list[SourceChange]:
    """Describe how each current cache of a resumed run differs from the checkpoint.

    ``saved_sources`` are the same caches in the checkpoint, None for those it did not have. ``retired`` are caches that
    were removed before. ``num_remaining``: samples of each cache left to train in the epoch.
    """
    changes = []
    for number, (source, saved_source) in enumerate(zip(sources, saved_sources, strict=True)):
        status: SourceStatus = "as before"
        num_new = 0
        if saved_source is None and _find_source(retired, source.fingerprint) is not None:
            status = "back"
        elif saved_source is None:
            num_new = matched.new[number].num_unmatched
            status = "new" if num_new == source.num else "exported again"
        num_trained = source.epoch.num_rows
        changes.append(
            SourceChange(source.directory, status, source.num, num_trained, left=num_remaining[number], new=num_new)
        )
    return changes


def _removal(source: SourceLedger, is_gone: npt.NDArray[np.bool_]) -> SourceChange:
    """The change of a removed cache; ``is_gone`` (M,) marks its samples that no new cache has."""
    status: SourceStatus = "gone" if is_gone.all() else "replaced"
    num_gone = int(is_gone.sum())
    return SourceChange(source.directory, status, source.num, source.epoch.num_rows, gone=num_gone)


def cache_differences(sources: Sequence[SourceLedger], reader: CacheReader) -> list[str]:
    """A line for each difference between the caches of a checkpoint and those of this run."""
    saved_sources, removed = _pair_caches(sources, reader)
    replaced = {source.directory for source in removed}
    directories = [storage.absolute(directory) for directory in reader.directories]
    lines = [
        f"{directory}: {'is another export now' if directory in replaced else 'is new'}"
        for directory, saved_source in zip(directories, saved_sources, strict=True)
        if saved_source is None
    ]
    lines += [f"{each.directory}: is no longer given" for each in removed if each.directory not in directories]
    return lines or ["the caches are in another order"]


@dataclass(frozen=True, eq=False)
class RunPosition:
    """Timeline, state and ledger of a run at its resume point; and changes of its caches, empty if there are none."""

    timeline: Timeline
    state: RunState
    ledger: Ledger
    changes: tuple[SourceChange, ...] = ()
    messages: tuple[str, ...] = ()


def find_position(resume_point: ResumePoint, new_state: RunState, world: World, inputs: Inputs) -> RunPosition:
    """Return the position at which a run begins: its first step, or the step of the checkpoint that it resumes.

    ``new_state`` describes a new run with these options and caches. Raises a MismatchError if the checkpoint is of a
    run with other options; its caches may differ with ``--data-change allow``.
    """
    checkpoint = resume_point.checkpoint
    saved_state = resume_point.saved_state
    reader = inputs.for_training.reader
    if saved_state is None:
        timeline = Timeline.of(inputs, new_state.all_assignments)
        return RunPosition(timeline, new_state, begin_ledger(reader))
    if checkpoint is None:
        # The user of packtool.Batches keeps its state in a variable, so there is no checkpoint with a ledger.
        return _resume_with_same_data("this state", saved_state, new_state, inputs, begin_ledger(reader))

    saved_ledger = read_ledger(checkpoint)  # None in checkpoints of an older packtool
    new_state.check_continues(
        checkpoint,
        saved_state,
        data_may_change=inputs.for_training.config.data_change == "allow",
        cache_differences=() if saved_ledger is None else cache_differences(saved_ledger.sources, reader),
    )
    check_resumable(checkpoint, world.rank, world.size)
    if new_state.has_same_data(saved_state):
        return _resume_with_same_data(checkpoint, saved_state, new_state, inputs, saved_ledger)
    return _resume_with_changed_data(checkpoint, saved_state, new_state, inputs, saved_ledger)


def _resume_with_same_data(
    origin: str, saved_state: RunState, new_state: RunState, inputs: Inputs, saved_ledger: Ledger | None
) -> RunPosition:
    """Return the position of a run that resumes with the caches of its checkpoint.

    If the number of ranks has changed, the packs left in the epoch are assigned to the new ranks.

    Args:
        origin: name of the checkpoint in messages.
        saved_ledger: training counts of all samples; None in checkpoints of an older packtool.
    """
    messages = []
    # Each assignment of packs to ranks is valid from its step on.
    assignments = saved_state.all_assignments
    if new_state.needs_reassignment(saved_state):
        assignments = (*assignments, Assignment.of(saved_state.step, new_state.batch_shape))
        messages.append(
            f"{origin} was trained by {saved_state.world_size} data-parallel ranks, and now there are "
            f"{new_state.world_size}: the remaining packs of its epoch are assigned to them"
        )

    last_data_change = None if saved_ledger is None else saved_ledger.change
    timeline = Timeline.of(inputs, assignments, last_data_change)
    state = new_state.with_assignments(assignments, saved_state.data_since)
    if saved_ledger is not None:
        return RunPosition(timeline, state, saved_ledger, messages=tuple(messages))

    messages.append(
        f"{origin} is from an older packtool and has no ledger: trained samples are taken from its plan, "
        "including any that --on-bad-media skip left out"
    )
    return RunPosition(timeline, state, ledger_of_plan(timeline, saved_state.step), messages=tuple(messages))


def _resume_with_changed_data(
    checkpoint: str, saved_state: RunState, new_state: RunState, inputs: Inputs, saved_ledger: Ledger | None
) -> RunPosition:
    """Return the position of a run that resumes with other training data than its checkpoint.

    The rest of the current epoch is planned again with the new data, without samples that it has already trained.

    Args:
        saved_state: step and settings of the run in the checkpoint.
        new_state: settings of a new run with the new data.
        saved_ledger: how often the run has trained each sample; None in checkpoints of an older packtool.
    """
    if saved_ledger is None:
        raise MismatchError(
            f"{checkpoint} is from an older packtool and has no ledger, so it is unknown which samples were trained",
            "Resume with its own caches until the next checkpoint, and change the data there.",
        )
    num_steps_done = saved_state.step
    reader = inputs.for_training.reader
    epoch = inputs.epoch_to_resume(saved_ledger, new_state.batch_shape)
    ledger, cache_changes = ledger_for_new_caches(saved_ledger, reader, epoch, history_directory(checkpoint))

    # Earlier assignments of packs to ranks were for packs of the old data.
    new_assignment = Assignment.of(num_steps_done, new_state.batch_shape)
    timeline = Timeline.of(inputs, (new_assignment,), ledger.change)
    state = new_state.with_assignments((new_assignment,), data_changed_at=num_steps_done)

    messages = _change_messages(ledger, cache_changes, timeline, num_steps_done, checkpoint)
    return RunPosition(timeline, state, ledger, cache_changes, messages)


def _change_messages(
    ledger: Ledger, changes: Sequence[SourceChange], timeline: Timeline, num_steps_done: int, checkpoint: str
) -> tuple[str, ...]:
    """Describe changed caches, and the rest of the run after ``num_steps_done`` steps."""
    assert ledger.change is not None, "the data have changed"
    next_steps = timeline.span_at(num_steps_done)  # the next step, and others of its epoch
    is_in_same_epoch = next_steps.epoch == ledger.epoch
    steps_left = next_steps.stop_step - num_steps_done if is_in_same_epoch else 0
    run_end = _run_end(timeline, num_steps_done, checkpoint)
    return tuple(change_lines(ledger.change, changes, steps_left, run_end))


def _run_end(timeline: Timeline, step: int, checkpoint: str) -> str:
    """Describe the end of a run resumed at ``step`` of a checkpoint, in comparison with the end planned before."""
    num_steps, num_steps_before = timeline.num_steps, steps_planned(checkpoint)
    run_end = f"the run ends after step {num_steps:,}"
    if not timeline.inputs.stages:
        run_end = f"later epochs have {timeline.steps_per_epoch:,} steps each, and {run_end}"
    if num_steps_before == num_steps:
        return f"{run_end}, as before"
    return (
        f"{run_end} instead of {num_steps_before:,}: {step / num_steps:.1%} of the learning rate schedule is done "
        f"instead of {step / num_steps_before:.1%}"
    )
