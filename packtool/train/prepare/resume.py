"""Resuming a run on caches: the timeline from its checkpoint on, the ledger of what was trained, and changed caches.

Caches are identified by their fingerprints. Another export of the rows of a removed cache may have replaced it: its
samples are matched by file and row, or, where files have changed and the old cache can still be read, by content. The
training counts of matched samples go to the new cache.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from packtool.train.prepare.history import begin_ledger, history_of, ledger_of_plan, origins_path, read_ledger
from packtool.train.prepare.inputs import EpochToResume, Inputs
from packtool.train.prepare.output_dir import ResumePoint
from packtool.train.prepare.timeline import Timeline


class NewCacheCounts(NamedTuple):
    """Training counts of the N samples of a new cache, transferred from removed caches that have the same samples."""

    before_epoch: RowCounts
    in_epoch: RowCounts
    num_unmatched: int  # samples that no removed cache has


class MatchedCounts(NamedTuple):
    """The result of matching the samples of new and removed caches."""

    new: dict[int, NewCacheCounts]  # by the number of the new cache in the reader
    is_gone: list[npt.NDArray[np.bool_]]  # of each removed cache, (its samples,): those that no new cache has


class ContentMatches(NamedTuple):
    """K pairs of equal samples: positions (K,) in a new cache, and in the joined samples of the removed caches."""

    new: Int64Array
    removed: Int64Array


_NO_MATCHES = ContentMatches(np.zeros(0, np.int64), np.zeros(0, np.int64))


def _match_counts(
    removed_now: Sequence[SourceLedger],
    removed_earlier: Sequence[SourceLedger],
    reader: CacheReader,
    new_caches: Sequence[int],
    history_dir: str,
) -> MatchedCounts:
    """Match the samples of new caches to those of removed caches, by file and row, else by content.

    ``removed_now`` are caches removed since the checkpoint. The samples of all removed caches are joined to one
    sequence of M samples, in the order of the arguments. ``new_caches`` are numbers of caches in ``reader``.
    """
    removed = [*removed_now, *removed_earlier]
    if not new_caches or not removed:
        return _unmatched_counts(removed, reader, new_caches)
    before_epoch = concatenate_counts([source.before for source in removed])  # training counts (M,)
    in_epoch = concatenate_counts([source.epoch for source in removed])  # (M,)
    training_counts = before_epoch + in_epoch
    matchable = _matchable_samples(training_counts, removed_now)
    old_origins = [_old_origins(source, history_dir) for source in removed]
    new_origins = {cache: read_origins(reader, cache) for cache in new_caches}
    row_matches = _match_rows(old_origins, new_origins, matchable)
    rowless = _without_new_row(matchable, row_matches.values())
    content_matches = _match_contents(removed, rowless, training_counts[rowless], reader, row_matches)
    if content_matches is None:
        # Without the contents, samples of unchanged files can still be matched, and were matched by row.
        _check_rows_unchanged(removed, old_origins, new_origins)
        content_matches = dict.fromkeys(new_caches, _NO_MATCHES)
    new_counts = {}
    for cache, row_match in row_matches.items():
        pairs = content_matches[cache]
        new_counts[cache] = _transfer_counts(before_epoch, in_epoch, matchable, row_match, pairs)
    is_gone = _mark_gone(removed, rowless, content_matches.values())
    return MatchedCounts(new_counts, is_gone)


def _unmatched_counts(removed: Sequence[SourceLedger], reader: CacheReader, new_caches: Sequence[int]) -> MatchedCounts:
    """The result of a match without any equal samples: every new sample was trained 0 times."""
    sizes = np.diff(reader.offsets).tolist()
    zeros = {cache: RowCounts(sizes[cache]) for cache in new_caches}
    unmatched = {cache: NewCacheCounts(zero, zero, num_unmatched=zero.num) for cache, zero in zeros.items()}
    return MatchedCounts(unmatched, [np.ones(source.num, np.bool_) for source in removed])


def _mark_gone(
    removed: Sequence[SourceLedger], rowless: Int64Array, content_matches: Iterable[ContentMatches]
) -> list[npt.NDArray[np.bool_]]:
    """Mark the samples of each removed cache that no new cache has, neither by row nor by content."""
    ends = np.cumsum([source.num for source in removed])
    is_gone = np.zeros(ends[-1], np.bool_)
    is_gone[rowless] = True
    for pairs in content_matches:
        is_gone[pairs.removed] = False
    return np.split(is_gone, ends[:-1])


def _matchable_samples(training_counts: Int64Array, removed_now: Sequence[SourceLedger]) -> Int64Array:
    """Positions (K,) of the samples of removed caches that new caches may match, by their training counts (M,)."""
    # Of a cache that was removed earlier, only samples that no other cache took over then have counts above 0. The
    # others must not be matched a second time.
    is_matchable = training_counts > 0
    num_removed_now = sum(source.num for source in removed_now)  # these samples come first
    is_matchable[:num_removed_now] = True
    return np.flatnonzero(is_matchable)


def _match_rows(
    old_origins: Sequence[Origins], new_origins: Mapping[int, Origins], matchable: Int64Array
) -> dict[int, Match]:
    """Match the ``matchable`` samples of removed caches with each new cache, by file and row."""
    old_keys = np.concatenate([_row_keys(origins) for origins in old_origins], axis=1)  # (2, M)
    matchable_keys = old_keys[:, matchable]
    return {cache: match(matchable_keys, _row_keys(origins)) for cache, origins in new_origins.items()}


def _without_new_row(matchable: Int64Array, row_matches: Iterable[Match]) -> Int64Array:
    """The ``matchable`` samples of removed caches whose row is in no new cache."""
    is_in_no_cache = np.ones(len(matchable), np.bool_)
    for row_match in row_matches:
        is_in_no_cache &= row_match.is_gone
    return matchable[is_in_no_cache]


def _transfer_counts(
    before_epoch: Int64Array, in_epoch: Int64Array, matchable: Int64Array, row_match: Match, pairs: ContentMatches
) -> NewCacheCounts:
    """Transfer training counts (M,) of removed caches to a new cache; ``row_match`` matches the ``matchable``."""
    new_before_epoch = row_match.transfer(before_epoch[matchable])
    new_before_epoch[pairs.new] = before_epoch[pairs.removed]
    new_in_epoch = row_match.transfer(in_epoch[matchable])
    new_in_epoch[pairs.new] = in_epoch[pairs.removed]
    num_unmatched = int(row_match.is_new.sum()) - len(pairs.new)
    return NewCacheCounts(RowCounts.of(new_before_epoch), RowCounts.of(new_in_epoch), num_unmatched)


def _match_contents(
    removed: Sequence[SourceLedger],
    rowless: Int64Array,
    training_counts: Int64Array,
    reader: CacheReader,
    row_matches: Mapping[int, Match],
) -> dict[int, ContentMatches] | None:
    """Match samples by content that were not matched by row; results are by number of the new cache.

    ``rowless`` (K,) are the unmatched samples of the ``removed`` caches, with their ``training_counts`` (K,). Returns
    None if one of their caches cannot be read.
    """
    unmatched_new = {cache: np.flatnonzero(row_match.is_new) for cache, row_match in row_matches.items()}
    if not len(rowless) or not any(len(positions) for positions in unmatched_new.values()):
        return dict.fromkeys(row_matches, _NO_MATCHES)
    old_hashes = _hash_removed_samples(removed, rowless)
    if old_hashes is None:
        return None
    # The keys number samples of equal contents, the most trained ones first, which are matched first.
    old_keys = content_keys(old_hashes, training_counts)
    matches = {}
    for cache, positions in unmatched_new.items():
        new_hashes = hash_contents(reader, positions + reader.offsets[cache])
        new_keys = content_keys(new_hashes, np.zeros(len(positions), np.int64))  # numbered in their order
        old_indices = match(old_keys, new_keys).same  # of the equal sample in ``rowless``, -1 for none
        is_matched = old_indices >= 0
        matches[cache] = ContentMatches(new=positions[is_matched], removed=rowless[old_indices[is_matched]])
    return matches


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
        fate: its status: one that was "exported again" has rows of one that was "replaced"; one that is "back" was
            removed earlier.
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


def with_changed_data(
    ledger: Ledger, reader: CacheReader, epoch: EpochToResume, history_dir: str
) -> tuple[Ledger, tuple[SourceChange, ...]]:
    """Return the ledger of a run that resumes with other caches, and the change of each cache, removed ones last.

    ``ledger`` is that of the checkpoint, and ``history_dir`` the history of its run, with the rows of its caches.
    """
    saved_sources, removed_now = _pair_caches(ledger.sources, reader)
    new_caches = [cache for cache, saved_source in enumerate(saved_sources) if saved_source is None]
    # A new cache may be another export of the rows of a cache that was removed before the checkpoint.
    removed_earlier = [source for source in ledger.retired if source.trained.num_rows]
    matched_counts = _match_counts(removed_now, removed_earlier, reader, new_caches, history_dir)
    sources = _present_ledgers(reader, saved_sources, matched_counts, ledger.retired)
    remaining_counts = _remaining_counts(reader, sources, epoch)
    change = DataChange(
        ledger.step,
        ledger.epoch,
        left=tuple(map(RowCounts.of, remaining_counts)),
        stage=epoch.stage,
        # Only stages need it: the next ones draw the least trained samples first.
        trained=() if epoch.stage is None else tuple(source.trained for source in sources),
    )
    retired = _retired_ledgers(ledger, [*removed_now, *removed_earlier], matched_counts.is_gone, reader)
    new_ledger = dataclasses.replace(ledger, sources=tuple(sources), retired=retired, change=change, stage=epoch.stage)
    num_remaining = _num_remaining(reader, remaining_counts, epoch.max_length)
    present_changes = _describe_present(sources, saved_sources, matched_counts, ledger.retired, num_remaining)
    removed_changes = map(_describe_removed, removed_now, matched_counts.is_gone)
    return new_ledger, (*present_changes, *removed_changes)


def _present_ledgers(
    reader: CacheReader,
    saved_sources: Sequence[SourceLedger | None],
    matched: MatchedCounts,
    retired: Sequence[SourceLedger],
) -> list[SourceLedger]:
    """The ledger of each cache of a resumed run.

    ``saved_sources`` are those in the checkpoint, None for new caches; ``retired`` those of caches removed before.
    """
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
    ledger: Ledger, removed: Sequence[SourceLedger], is_gone: Sequence[npt.NDArray[np.bool_]], reader: CacheReader
) -> tuple[SourceLedger, ...]:
    """The ledgers of all caches that the run had and has no longer; ``is_gone`` as in ``MatchedCounts``."""
    retired = []
    # Matched samples count for the new caches only; totals stay, because the old caches have trained them.
    for source, mask in zip(removed, is_gone, strict=True):
        before = RowCounts.of(np.where(mask, source.before.counts(), 0))
        in_epoch = RowCounts.of(np.where(mask, source.epoch.counts(), 0))
        retired.append(dataclasses.replace(source, before=before, epoch=in_epoch))
    retired += [source for source in ledger.retired if not source.trained.num_rows]
    present = {manifest.fingerprint for manifest in reader.manifests}
    return tuple(source for source in retired if source.fingerprint not in present)


def _describe_present(
    sources: Sequence[SourceLedger],
    saved_sources: Sequence[SourceLedger | None],
    matched: MatchedCounts,
    retired: Sequence[SourceLedger],
    num_remaining: Sequence[int],
) -> list[SourceChange]:
    """The change of each cache of a resumed run; ``num_remaining`` are the samples left to train in the epoch."""
    changes = []
    for number, source in enumerate(sources):
        num_new = 0
        status: SourceStatus = "as before"
        if saved_sources[number] is None:
            if _find_source(retired, source.fingerprint) is not None:
                status = "back"
            else:
                num_new = matched.new[number].num_unmatched
                has_matches = num_new < source.num
                status = "exported again" if has_matches else "new"
        changes.append(
            SourceChange(
                source.directory,
                status,
                samples=source.num,
                trained=source.epoch.num_rows,
                left=num_remaining[number],
                new=num_new,
            )
        )
    return changes


def _describe_removed(source: SourceLedger, is_gone: npt.NDArray[np.bool_]) -> SourceChange:
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
    notes: tuple[str, ...] = ()


def find_position(resume_point: ResumePoint, new_state: RunState, world: World, inputs: Inputs) -> RunPosition:
    """Check that a run may resume, and find its position in its timeline; a new run starts at step 0.

    ``new_state`` is that of a new run with the same options and caches.
    """
    checkpoint, saved_state = resume_point.checkpoint, resume_point.saved_state
    reader = inputs.for_training.reader
    if saved_state is None:
        return RunPosition(Timeline.of(inputs, new_state.all_assignments), new_state, begin_ledger(reader))
    if checkpoint is None:
        # packtool.Batches resumes without a checkpoint or a ledger.
        return _resume_with_same_data("this state", saved_state, new_state, inputs, begin_ledger(reader))
    ledger = read_ledger(checkpoint)  # None in checkpoints of an older packtool
    new_state.check_continues(
        checkpoint,
        saved_state,
        data_may_change=inputs.for_training.config.data_change == "allow",
        cache_differences=() if ledger is None else cache_differences(ledger.sources, reader),
    )
    check_resumable(checkpoint, world.rank, world.size)
    if new_state.has_same_data(saved_state):
        return _resume_with_same_data(checkpoint, saved_state, new_state, inputs, ledger)
    return _resume_with_changed_data(checkpoint, saved_state, new_state, inputs, ledger)


def _resume_with_same_data(
    origin: str, saved_state: RunState, new_state: RunState, inputs: Inputs, ledger: Ledger | None
) -> RunPosition:
    """Resume with the caches of the checkpoint, possibly on another number of ranks; ``origin`` names it in notes."""
    notes = []
    assignments = saved_state.all_assignments
    if new_state.needs_reassignment(saved_state):
        notes.append(
            f"{origin} was trained by {saved_state.world_size} data-parallel ranks, and now there are "
            f"{new_state.world_size}: the remaining packs of its epoch are assigned to them"
        )
        assignments = (*assignments, Assignment.of(saved_state.step, new_state.batch_shape))
    last_change = None if ledger is None else ledger.change
    timeline = Timeline.of(inputs, assignments, last_change)
    if ledger is None:
        ledger = ledger_of_plan(timeline, saved_state.step)
        notes.append(
            f"{origin} is from an older packtool and has no ledger: trained samples are taken from its plan, "
            "including any that --on-bad-media skip left out"
        )
    state = new_state.with_assignments(assignments, saved_state.data_since)
    return RunPosition(timeline, state, ledger, notes=tuple(notes))


def _resume_with_changed_data(
    checkpoint: str, saved_state: RunState, new_state: RunState, inputs: Inputs, saved_ledger: Ledger | None
) -> RunPosition:
    """Resume with changed data (``--data-change allow``): the rest of the epoch is planned again."""
    if saved_ledger is None:
        raise MismatchError(
            f"{checkpoint} is from an older packtool and has no ledger, so it is unknown which samples were trained",
            "Resume with its own caches until the next checkpoint, and change the data there.",
        )
    step = saved_state.step
    epoch_to_resume = inputs.epoch_to_resume(saved_ledger, new_state.batch_shape)
    reader = inputs.for_training.reader
    ledger, cache_changes = with_changed_data(saved_ledger, reader, epoch_to_resume, history_of(checkpoint))
    assert ledger.change is not None, "with_changed_data adds it"
    assignments = (Assignment.of(step, new_state.batch_shape),)
    timeline = Timeline.of(inputs, assignments, ledger.change)
    span = timeline.span_at(step)
    is_epoch_finished = span.epoch != ledger.epoch
    num_steps_left = 0 if is_epoch_finished else span.stop_step - step
    notes = change_lines(ledger.change, cache_changes, num_steps_left, _run_end(timeline, step, checkpoint))
    return RunPosition(
        timeline, new_state.with_assignments(assignments, data_since=step), ledger, cache_changes, tuple(notes)
    )


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
