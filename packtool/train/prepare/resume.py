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
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from packtool import storage
from packtool.cache.manifest import Manifest
from packtool.cache.origins import Origins, hash_contents, read_origins
from packtool.cache.reader import CacheReader
from packtool.config.settings import flag, load_json
from packtool.config.train import TrainConfig
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
from packtool.train.prepare.checkpoint import ONLY_MODEL, RunState, check_resumable, read_options
from packtool.train.prepare.history import (
    begin_ledger,
    history_of,
    ledger_of_plan,
    origins_path,
    read_ledger,
    recorded_options,
)
from packtool.train.prepare.inputs import EpochToResume, Inputs
from packtool.train.prepare.output_dir import ResumePoint
from packtool.train.prepare.timeline import Timeline

_NO_POSITIONS = np.zeros(0, np.int64)


class NewCacheCounts(NamedTuple):
    """Training counts of the N samples of a new cache, transferred from removed caches that have the same samples."""

    before: Int64Array  # in earlier epochs, (N,)
    in_epoch: Int64Array
    num_unmatched: int  # samples that no removed cache has


class MatchedCounts(NamedTuple):
    """The result of matching the samples of new and removed caches."""

    new: dict[int, NewCacheCounts]  # by number of the cache in the reader
    is_gone: list[npt.NDArray[np.bool_]]  # of each removed cache, (M,): samples that no new cache has


class ContentMatches(NamedTuple):
    """K pairs of equal samples: positions (K,) in a new cache, and in the joined samples of the removed caches."""

    new: Int64Array
    removed: Int64Array


def _pair_caches(
    sources: Sequence[SourceLedger], reader: CacheReader
) -> tuple[list[SourceLedger | None], list[SourceLedger]]:
    """Pair caches by fingerprint: the ledger of each cache of ``reader``, None for new ones; and the removed caches."""
    leaving = list(sources)
    kept: list[SourceLedger | None] = []
    for manifest in reader.manifests:
        same = next((source for source in leaving if source.fingerprint == manifest.fingerprint), None)
        kept.append(same)
        if same is not None:
            leaving.remove(same)
    return kept, leaving


def _match_counts(
    removed: Sequence[SourceLedger], num_leaving: int, reader: CacheReader, new: Sequence[int], history: str
) -> MatchedCounts:
    """Match the samples of new caches to those of removed ones, first by file and row, then by content.

    Args:
        removed: ledgers of removed caches; the first ``num_leaving`` were removed since the checkpoint, the others
            earlier. Their samples are joined to one sequence of M samples, one cache after the other.
        new: numbers of the new caches in ``reader``.
    """
    if not new or not removed:
        sizes = np.diff(reader.offsets).tolist()
        zeros = {cache: np.zeros(sizes[cache], np.int64) for cache in new}
        unmatched = {cache: NewCacheCounts(zeros[cache], zeros[cache], sizes[cache]) for cache in new}
        return MatchedCounts(unmatched, [np.ones(source.num, np.bool_) for source in removed])
    before = concatenate_counts([source.before for source in removed])  # (M,)
    in_epoch = concatenate_counts([source.epoch for source in removed])
    # A cache that was removed earlier has counts only for samples that no other cache took over then. The others must
    # not be matched a second time.
    is_candidate = before + in_epoch > 0
    is_candidate[: sum(source.num for source in removed[:num_leaving])] = True
    candidates = np.flatnonzero(is_candidate)
    # Match by file and row.
    old_origins = [_old_origins(source, history) for source in removed]
    new_origins = {cache: read_origins(reader, cache) for cache in new}
    old_keys = np.concatenate([_row_keys(origins) for origins in old_origins], axis=1)[:, candidates]
    row_matches = {cache: match(old_keys, _row_keys(origins)) for cache, origins in new_origins.items()}
    # Match by content the candidates whose row is in none of the new caches.
    is_unmatched = np.logical_and.reduce([row_match.is_gone for row_match in row_matches.values()])
    unmatched_by_row = candidates[is_unmatched]
    content_matches = _match_contents(removed, unmatched_by_row, before + in_epoch, reader, row_matches)
    if content_matches is None:
        _check_rows_unchanged(removed, old_origins, new_origins)
        content_matches = dict.fromkeys(new, ContentMatches(_NO_POSITIONS, _NO_POSITIONS))
    # Transfer the counts.
    is_gone = np.zeros(len(before), np.bool_)
    is_gone[unmatched_by_row] = True
    counts = {}
    for cache, row_match in row_matches.items():
        pairs = content_matches[cache]
        new_before = row_match.transfer(before[candidates])
        new_in_epoch = row_match.transfer(in_epoch[candidates])
        new_before[pairs.new] = before[pairs.removed]
        new_in_epoch[pairs.new] = in_epoch[pairs.removed]
        num_unmatched = int(row_match.is_new.sum()) - len(pairs.new)
        counts[cache] = NewCacheCounts(new_before, new_in_epoch, num_unmatched)
        is_gone[pairs.removed] = False
    ends = np.cumsum([source.num for source in removed])
    return MatchedCounts(counts, np.split(is_gone, ends[:-1]))


def _match_contents(
    removed: Sequence[SourceLedger],
    unmatched: Int64Array,
    counts: Int64Array,
    reader: CacheReader,
    row_matches: Mapping[int, Match],
) -> dict[int, ContentMatches] | None:
    """Match samples by content that were not matched by row.

    Args:
        removed: ledgers of the removed caches, whose samples are joined, one cache after the other.
        unmatched: positions in the joined samples, int64 (M,), ascending.
        counts: training count of each joined sample.
        row_matches: by number of the new cache, the matches by row.

    Returns:
        by number of the new cache, its matches; None if a removed cache cannot be read.
    """
    unmatched_new = {cache: np.flatnonzero(row_match.is_new) for cache, row_match in row_matches.items()}
    if not len(unmatched) or not any(len(positions) for positions in unmatched_new.values()):
        return dict.fromkeys(row_matches, ContentMatches(_NO_POSITIONS, _NO_POSITIONS))
    old_hashes = np.zeros(len(unmatched), np.uint64)
    stop = 0
    for source in removed:
        start = stop  # the samples of this cache are at start, ..., stop - 1 in the joined samples
        stop = start + source.num
        is_of_source = (unmatched >= start) & (unmatched < stop)
        if is_of_source.any():
            removed_cache = _open_unchanged(source)
            if removed_cache is None:
                return None
            old_hashes[is_of_source] = hash_contents(removed_cache, unmatched[is_of_source] - start)
    old_keys = content_keys(old_hashes, counts[unmatched])
    matches = {}
    for cache, positions in unmatched_new.items():
        new_hashes = hash_contents(reader, positions + reader.offsets[cache])
        new_keys = content_keys(new_hashes, np.zeros(len(positions), np.int64))  # trained 0 times
        # The index in ``unmatched`` of the equal old sample of each new one, -1 for none.
        equal_index = match(old_keys, new_keys).same
        is_matched = equal_index >= 0
        matches[cache] = ContentMatches(new=positions[is_matched], removed=unmatched[equal_index[is_matched]])
    return matches


def _old_origins(source: SourceLedger, history: str) -> Origins:
    """Read files and rows of the samples of a removed cache, from the history or the cache itself."""
    path = origins_path(history, source.fingerprint)
    if os.path.exists(path):
        return Origins.read(path)
    removed = _open_unchanged(source)
    if removed is not None:
        return read_origins(removed, 0)
    raise MismatchError(
        f"{source.directory} is no longer the cache {source.fingerprint} that was trained, and {history} has no "
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
    """Keys of samples by content of their file, row, and part of the row."""
    digests = [blake2b(digest.encode(errors="surrogatepass"), digest_size=8).digest() for digest in origins.digests]
    file_keys = np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)
    return row_keys(file_keys[origins.file], origins.row, origins.part)


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
    ledger: Ledger, reader: CacheReader, epoch: EpochToResume, history: str
) -> tuple[Ledger, tuple[SourceChange, ...]]:
    """Transfer the ledger of a checkpoint to the changed caches of ``reader``; ``history`` is that of its run.

    Returns:
        the ledger of these caches, with the change; and the change of each cache, removed ones last.
    """
    # The ledger of each present cache, None for a new one; and those of the caches removed since the checkpoint.
    kept, leaving = _pair_caches(ledger.sources, reader)
    new = [cache for cache, source in enumerate(kept) if source is None]
    # Caches that were removed earlier may come back under another export, if they have trained rows.
    removed = [*leaving, *(source for source in ledger.retired if source.trained.num_rows)]
    matched = _match_counts(removed, len(leaving), reader, new, history)
    removed_earlier = {source.fingerprint: source for source in reversed(ledger.retired)}
    # The ledger of each cache of the resumed run.
    sources = []
    for cache, (directory, manifest, source) in enumerate(zip(reader.directories, reader.manifests, kept, strict=True)):
        if source is None:
            counts = matched.new[cache]
            source = removed_earlier.get(manifest.fingerprint)
            if source is None:
                source = SourceLedger.begin("", manifest.fingerprint, len(counts.before))
            source = dataclasses.replace(
                source, before=RowCounts.of(counts.before), epoch=RowCounts.of(counts.in_epoch)
            )
        sources.append(dataclasses.replace(source, directory=storage.absolute(directory)))
    # How often the epoch has yet to train each sample of all caches, (N,).
    before_epoch = concatenate_counts([source.before for source in sources])
    trained_in_epoch = concatenate_counts([source.epoch for source in sources])
    remaining = np.maximum(epoch.count_samples(before_epoch, trained_in_epoch) - trained_in_epoch, 0)
    bounds = reader.offsets[1:-1]  # between the caches
    change = DataChange(
        ledger.step,
        ledger.epoch,
        left=tuple(RowCounts.of(counts) for counts in np.split(remaining, bounds)),
        stage=epoch.stage,
        trained=() if epoch.stage is None else tuple(source.trained for source in sources),
    )
    new_ledger = dataclasses.replace(
        ledger,
        sources=tuple(sources),
        retired=_retired_ledgers(ledger, removed, matched.is_gone, reader),
        change=change,
        stage=epoch.stage,
    )
    to_train = np.where(reader.index.length <= epoch.max_length, remaining, 0)  # without samples that are too long
    num_left = [int(counts.sum()) for counts in np.split(to_train, bounds)]
    return new_ledger, _describe_changes(new_ledger, kept, leaving, matched, removed_earlier, num_left)


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


def _describe_changes(
    ledger: Ledger,
    kept: Sequence[SourceLedger | None],
    leaving: Sequence[SourceLedger],
    matched: MatchedCounts,
    removed_earlier: Mapping[str, SourceLedger],
    num_left: Sequence[int],
) -> tuple[SourceChange, ...]:
    """The change of each cache of the resumed run, then of those removed since the checkpoint.

    Args:
        ledger: of the resumed run.
        kept: ledger of each of its caches in the checkpoint; None for a new cache.
        leaving: ledgers of the caches removed since the checkpoint, which are the first ones in ``matched.is_gone``.
        removed_earlier: ledgers of the caches removed before the checkpoint, by fingerprint.
        num_left: samples of each cache of the resumed run that the epoch has yet to train.
    """
    changes = []
    for cache, (source, saved_source) in enumerate(zip(ledger.sources, kept, strict=True)):
        num_new = 0
        status: SourceStatus
        if saved_source is not None:
            status = "as before"
        elif source.fingerprint in removed_earlier:
            status = "back"
        else:
            num_new = matched.new[cache].num_unmatched
            status = "exported again" if num_new < source.num else "new"
        num_trained = source.epoch.num_rows
        changes.append(
            SourceChange(source.directory, status, source.num, num_trained, left=num_left[cache], new=num_new)
        )
    for source, is_gone in zip(leaving, matched.is_gone[: len(leaving)], strict=True):
        status = "gone" if is_gone.all() else "replaced"
        num_gone = int(is_gone.sum())
        changes.append(SourceChange(source.directory, status, source.num, source.epoch.num_rows, gone=num_gone))
    return tuple(changes)


def cache_differences(sources: Sequence[SourceLedger], reader: CacheReader) -> list[str]:
    """A line for each difference between the caches of a checkpoint and those of this run."""
    kept, leaving = _pair_caches(sources, reader)
    replaced = {source.directory for source in leaving}
    directories = [storage.absolute(directory) for directory in reader.directories]
    lines = [
        f"{directory}: {'is another export now' if directory in replaced else 'is new'}"
        for directory, source in zip(directories, kept, strict=True)
        if source is None
    ]
    lines += [f"{each.directory}: is no longer given" for each in leaving if each.directory not in directories]
    return lines or ["the caches are in another order"]


_FIXED_PANELS = ("Optimizer", "Parameters")
"""Panels of the options that a checkpoint's optimizer fixes."""
_LENGTH_OPTIONS = ("num_train_epochs", "max_steps")
_OPTIONS_WITHOUT_EFFECT = ("output_dir", "dataloader_num_workers", "data_change")


@dataclass(frozen=True, eq=False)
class ResumedState:
    """Timeline, state and ledger of a run at its resume point.

    Args:
        state: with all assignments of packs so far.
        ledger: of all samples trained before.
        changes: of each cache; empty if the data are the same.
    """

    timeline: Timeline
    state: RunState
    ledger: Ledger
    changes: tuple[SourceChange, ...] = ()
    notes: tuple[str, ...] = ()


def resume(resume_point: ResumePoint, state: RunState, world: World, inputs: Inputs) -> ResumedState:
    """Check that a run may resume, and locate it in its timeline; a new run starts at step 0.

    ``state`` is that of a new run with these options and caches.
    """
    config, _, reader = inputs.for_training
    checkpoint, saved = resume_point.checkpoint, resume_point.before
    if saved is None:
        return ResumedState(Timeline.of(inputs, ((0, *state.batch_shape),)), state, begin_ledger(reader))
    if checkpoint is None:
        ledger: Ledger | None = begin_ledger(reader)  # packtool.Batches resumes without a checkpoint or a ledger
    else:
        ledger = read_ledger(checkpoint)
        sources = () if ledger is None else ledger.sources
        state.check_continues(
            checkpoint,
            saved,
            data_may_change=config.data_change == "allow",
            cache_differences=lambda: cache_differences(sources, reader) if sources else [],
        )
        check_resumable(checkpoint, world.rank, world.size)
        if (state.cache, state.plan) != (saved.cache, saved.plan):
            return _resume_with_changed_data(checkpoint, saved, state, inputs, ledger)
    notes = []
    assignments = saved.assignments or ((0, *saved.batch_shape),)  # first step and batch shape of each
    origin = checkpoint or "this state"
    if state.needs_reassignment(saved):
        notes.append(
            f"{origin} was trained by {saved.world_size} data-parallel ranks, and now there are "
            f"{state.world_size}: the remaining packs of its epoch are assigned to them"
        )
        assignments = (*assignments, (saved.step, *state.batch_shape))
    timeline = Timeline.of(inputs, assignments, None if ledger is None else ledger.change)
    if ledger is None:
        ledger = ledger_of_plan(timeline, saved.step)
        notes.append(
            f"{origin} is from an older packtool and has no ledger: trained samples are taken from its plan, "
            "including any that --on-bad-media skip left out"
        )
    # States leave out a single assignment from step 0.
    if len(assignments) == 1 and saved.data_since == 0:
        assignments = ()
    state = dataclasses.replace(state, assignments=assignments, data_since=saved.data_since)
    return ResumedState(timeline, state, ledger, notes=tuple(notes))


def _resume_with_changed_data(
    checkpoint: str, saved: RunState, state: RunState, inputs: Inputs, ledger: Ledger | None
) -> ResumedState:
    """Resume with changed data (``--data-change allow``): the rest of the epoch is planned again."""
    if ledger is None:
        raise MismatchError(
            f"{checkpoint} is from an older packtool and has no ledger, so it is unknown which samples were trained",
            "Resume with its own caches until the next checkpoint, and change the data there.",
        )
    step = saved.step
    epoch = inputs.epoch_to_resume(ledger, state.batch_shape)
    ledger, changes = with_changed_data(ledger, inputs.for_training.reader, epoch, history_of(checkpoint))
    assert ledger.change is not None, "with_changed_data adds it"
    assignments = ((step, *state.batch_shape),)
    timeline = Timeline.of(inputs, assignments, ledger.change)
    state = dataclasses.replace(state, assignments=assignments, data_since=step)
    # Describe what is left of the epoch and of the run.
    stretch = timeline.stretch(step)
    steps_left = stretch.stop - step if stretch.epoch == ledger.epoch else 0
    num_steps, num_steps_before = timeline.num_steps, steps_planned(checkpoint)
    run_end = f"the run ends after step {num_steps:,}"
    if epoch.stage is None:
        run_end = f"later epochs have {timeline.steps_per_epoch:,} steps each, and {run_end}"
    if num_steps_before == num_steps:
        run_end += ", as before"
    else:
        run_end += (
            f" instead of {num_steps_before:,}: {step / num_steps:.1%} of the learning rate schedule is done instead "
            f"of {step / num_steps_before:.1%}"
        )
    notes = tuple(change_lines(ledger.change, changes, steps_left, run_end))
    return ResumedState(timeline, state, ledger, changes, notes)


def steps_planned(checkpoint: str) -> int:
    """The number of steps that the run of a checkpoint was planned with."""
    with open(os.path.join(checkpoint, "trainer_state.json"), encoding="utf-8") as file:
        return int(load_json(file.read())["max_steps"])


def resume_lines(config: TrainConfig, resume_point: ResumePoint, state: RunState, num_steps: int) -> Iterator[str]:
    """Yield a line for a resumed run: checkpoint, steps done and left, changed settings; nothing for a new run.

    Raises:
        MismatchError: if a changed setting would have no effect, or would shift the learning rate schedule.
    """
    checkpoint, saved = resume_point.checkpoint, resume_point.before
    if checkpoint is None or saved is None:
        return
    changes: dict[str, tuple[str, str]] = {}  # values of changed options as text, before and now
    saved_options = read_options(checkpoint)
    new_options = recorded_options(config)
    if saved_options is not None:  # an older packtool does not record its options
        for field in dataclasses.fields(config):
            name = field.name
            if name not in _OPTIONS_WITHOUT_EFFECT and saved_options.get(name) != new_options.get(name):
                changes[name] = (_option_text(field, saved_options), _option_text(field, new_options))
    panels = {field.name: field.metadata["panel"] for field in dataclasses.fields(TrainConfig)}
    # The checkpoint has the weights of ``adapters``, which may therefore name another directory.
    refused = [name for name in changes if panels[name] in _FIXED_PANELS and name != "adapters"]
    # The number of steps decides the learning rate schedule. Options must not change it; data and ranks may.
    schedule_lines = []
    num_planned = steps_planned(checkpoint)
    if num_steps != num_planned and config.lr_scheduler_type != "constant" and config.data_change == "refuse":
        changed_length_options = [name for name in _LENGTH_OPTIONS if name in changes]
        if changed_length_options or not state.needs_reassignment(saved):
            refused += changed_length_options
            line = f"    the learning rate schedule would have {num_steps:,} steps instead of {num_planned:,}"
            schedule_lines.append(line)
    if refused or schedule_lines:
        lines = [f"  - {flag(name)}: {changes[name][0]} in the checkpoint, {changes[name][1]} now" for name in refused]
        raise MismatchError(
            "\n".join([f"{checkpoint} cannot be resumed with other settings:", *lines, *schedule_lines]),
            f"Resume with the settings of that run; or {ONLY_MODEL}",
        )
    settings = ", ".join(f"{flag(name)} {new} (was {old})" for name, (old, new) in changes.items())
    done = f"{saved.step:,} of {num_steps:,} steps done, {max(num_steps - saved.step, 0):,} left"
    yield f"resuming from {checkpoint}: {done}" + (f"; changed settings: {settings}" if settings else "")


def _option_text(field: dataclasses.Field[Any], values: Mapping[str, Any]) -> str:
    """A setting's value, or its default, as on a command line; ``values`` are those of ``recorded_options``."""
    value = values.get(field.name, field.default)
    if isinstance(value, list):
        return " ".join(map(str, value))
    if value is None or value is dataclasses.MISSING:
        return "none" if field.name in values else "default"
    return str(value).lower() if isinstance(value, bool) else str(value)
