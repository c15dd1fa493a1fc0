"""Resuming a run on caches: the timeline from its checkpoint on, the ledger of what was trained, and changed caches.

Caches are identified by their fingerprints. Another export of the rows of a removed cache may have replaced it: its
samples are matched by file and row, or, where files have changed and the old cache can still be read, by content. The
training counts of matched samples go to the new cache.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

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
from packtool.train.prepare.inputs import Inputs
from packtool.train.prepare.output_dir import ResumePoint
from packtool.train.prepare.timeline import Timeline

_NOTHING = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class MatchedCounts:
    """Training counts of new caches, matched with those of removed caches that have the same samples.

    Args:
        before, epoch: by number of the new cache, counts (N,) of its samples before this epoch and in it.
        num_new: by number of the new cache, its samples without a match.
        is_gone: of each removed cache, bool (M,), its samples without a match.
    """

    before: dict[int, Int64Array]
    epoch: dict[int, Int64Array]
    num_new: dict[int, int]
    is_gone: list[npt.NDArray[np.bool_]]


def _pair_caches(
    sources: Sequence[SourceLedger], reader: CacheReader
) -> tuple[list[SourceLedger | None], list[SourceLedger]]:
    """Pair caches by fingerprint: the ledger of each cache of ``reader``, None for new ones; and the removed caches."""
    removed = list(sources)
    kept: list[SourceLedger | None] = []
    for manifest in reader.manifests:
        same = next((source for source in removed if source.fingerprint == manifest.fingerprint), None)
        kept.append(same)
        if same is not None:
            removed.remove(same)
    return kept, removed


def _match_counts(
    pool: Sequence[SourceLedger], num_leaving: int, reader: CacheReader, new: Sequence[int], history: str
) -> MatchedCounts:
    """Match the samples of new caches to those of removed ones, first by file and row, then by content.

    Args:
        pool: removed caches; the first ``num_leaving`` were removed since the checkpoint, the others earlier.
        new: numbers of the new caches in ``reader``.
    """
    if not new or not pool:
        sizes = np.diff(reader.offsets).tolist()
        zeros = {cache: np.zeros(sizes[cache], np.int64) for cache in new}
        gone = [np.ones(source.num, np.bool_) for source in pool]
        return MatchedCounts(zeros, zeros, {cache: sizes[cache] for cache in new}, gone)
    # Arrays of the joined pool: the samples of all its caches, one after the other.
    before, epoch = (concatenate_counts([getattr(source, name) for source in pool]) for name in ("before", "epoch"))
    # Samples of earlier removed caches that were matched then have no counts left, and are no candidates again.
    is_candidate = before + epoch > 0
    is_candidate[: sum(source.num for source in pool[:num_leaving])] = True
    candidates = np.flatnonzero(is_candidate)
    old_origins = [_old_origins(source, history) for source in pool]
    new_origins = {cache: read_origins(reader, cache) for cache in new}
    old_keys = np.concatenate([_row_keys(origins) for origins in old_origins], axis=1)[:, candidates]
    matches = {cache: match(old_keys, _row_keys(origins)) for cache, origins in new_origins.items()}
    unmatched = candidates[np.logical_and.reduce([by_row.is_gone for by_row in matches.values()])]
    by_content = _match_contents(pool, unmatched, before + epoch, reader, matches)
    if by_content is None:
        _check_rows_unchanged(pool, old_origins, new_origins)
    counts = MatchedCounts({}, {}, {}, [])
    is_gone = np.zeros(len(before), np.bool_)
    is_gone[unmatched] = True
    for cache, by_row in matches.items():
        samples, same = (_NOTHING, _NOTHING) if by_content is None else by_content[cache]
        counts.before[cache] = by_row.transfer(before[candidates])
        counts.epoch[cache] = by_row.transfer(epoch[candidates])
        counts.before[cache][samples], counts.epoch[cache][samples] = before[same], epoch[same]
        is_new = by_row.is_new.copy()
        is_new[samples] = False
        counts.num_new[cache] = int(is_new.sum())
        is_gone[same] = False
    counts.is_gone.extend(np.split(is_gone, np.cumsum([source.num for source in pool])[:-1]))
    return counts


def _match_contents(
    pool: Sequence[SourceLedger],
    missing: Int64Array,
    counts: Int64Array,
    reader: CacheReader,
    matches: dict[int, Match],
) -> dict[int, tuple[Int64Array, Int64Array]] | None:
    """Match samples by content that were not matched by row.

    Args:
        missing: positions in the joined pool of samples without a match, int64 (M,), ascending.
        counts: training count of each sample of the joined pool.
        matches: by number of the new cache, the matches by row.

    Returns:
        by number of the new cache, positions of matched samples in it and in the joined pool; None if a removed cache
        cannot be read.
    """
    starts = np.cumsum([0, *(source.num for source in pool)])
    unmatched = {cache: np.flatnonzero(each.is_new) for cache, each in matches.items()}
    if not len(missing) or not any(map(len, unmatched.values())):
        return dict.fromkeys(matches, (_NOTHING, _NOTHING))
    contents = np.zeros(len(missing), np.uint64)
    for number, source in enumerate(pool):
        here = (missing >= starts[number]) & (missing < starts[number + 1])
        if here.any():
            removed = _open_unchanged(source)
            if removed is None:
                return None
            contents[here] = hash_contents(removed, missing[here] - starts[number])
    old = content_keys(contents, counts[missing])
    by_cache = {}
    for cache, samples in unmatched.items():
        new = hash_contents(reader, samples + reader.offsets[cache])
        same = match(old, content_keys(new, np.zeros(len(new), np.int64))).same
        by_cache[cache] = samples[same >= 0], missing[same[same >= 0]]
    return by_cache


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


def _check_rows_unchanged(pool: Sequence[SourceLedger], old: Sequence[Origins], new: dict[int, Origins]) -> None:
    """Raise a MismatchError if a file of rows has changed, and a cache of its earlier rows is missing."""
    new_digests = {
        path: digest for origins in new.values() for path, digest in zip(origins.files, origins.digests, strict=True)
    }
    for source, origins in zip(pool, old, strict=True):
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
    of_files = np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)
    return row_keys(of_files[origins.file], origins.row, origins.part)


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


def change_lines(
    change: DataChange, sources: Sequence[SourceChange], steps_left: int, steps_before: str
) -> Iterator[str]:
    """Describe a change of the data and the steps left in its epoch; ``steps_before`` describes the whole run."""
    yield f"the data changed after step {change.step:,}, in epoch {change.epoch + 1:,}:"
    for source in sources:
        yield f"  {source.sentence}"
    left = sum(source.left for source in sources)
    yield (
        f"the rest of this epoch, {left:,} samples in {steps_left:,} steps, is planned again; samples trained in it "
        f"are not repeated; {steps_before}"
    )


def with_changed_data(
    ledger: Ledger,
    reader: CacheReader,
    count_samples: Callable[[Int64Array, Int64Array], Int64Array],
    history: str,
    max_length: int,
    stage: tuple[int, int] | None = None,
) -> tuple[Ledger, tuple[SourceChange, ...]]:
    """Transfer the ledger of a checkpoint to changed caches.

    Args:
        reader: of the caches of the resumed run.
        count_samples: returns how often the epoch has each of their samples, (N,), from how often each was trained
            before the epoch, and in it.
        history: folder of the run's history.

    Returns:
        the ledger of these caches, with the change; and the change of each cache, removed ones last.
    """
    kept, leaving = _pair_caches(ledger.sources, reader)
    new = [cache for cache, source in enumerate(kept) if source is None]
    # Caches that were removed earlier may come back under another export, if they have trained rows.
    pool = [*leaving, *(source for source in ledger.retired if source.trained.num_rows)]
    matched = _match_counts(pool, len(leaving), reader, new, history)
    removed_before = {source.fingerprint: source for source in reversed(ledger.retired)}
    sources = []
    for cache, (directory, manifest, source) in enumerate(zip(reader.directories, reader.manifests, kept, strict=True)):
        if source is None:
            num = len(matched.before[cache])
            source = removed_before.get(manifest.fingerprint) or SourceLedger.begin("", manifest.fingerprint, num)
            before, epoch = RowCounts.of(matched.before[cache]), RowCounts.of(matched.epoch[cache])
            source = dataclasses.replace(source, before=before, epoch=epoch)
        sources.append(dataclasses.replace(source, directory=storage.absolute(directory)))
    counts = concatenate_counts([source.epoch for source in sources])
    before_epoch = concatenate_counts([source.before for source in sources])
    remaining = np.maximum(count_samples(before_epoch, counts) - counts, 0)
    bounds = reader.offsets[1:-1]
    trained = () if stage is None else tuple(source.trained for source in sources)
    remaining_counts = tuple(map(RowCounts.of, np.split(remaining, bounds)))
    change = DataChange(ledger.step, ledger.epoch, remaining_counts, stage, trained)
    # Matched samples count for the new caches only; totals stay, because the old ones have trained them.
    retired = []
    for source, is_gone in zip(pool, matched.is_gone, strict=True):
        before, epoch = (RowCounts.of(np.where(is_gone, each.counts(), 0)) for each in (source.before, source.epoch))
        retired.append(dataclasses.replace(source, before=before, epoch=epoch))
    retired += [source for source in ledger.retired if not source.trained.num_rows]
    present = {manifest.fingerprint for manifest in reader.manifests}
    retired = [source for source in retired if source.fingerprint not in present]
    ledger = dataclasses.replace(ledger, sources=tuple(sources), retired=tuple(retired), change=change, stage=stage)
    to_train = np.where(reader.index.length <= max_length, remaining, 0)
    return ledger, _describe_changes(ledger, kept, leaving, matched, removed_before, np.split(to_train, bounds))


def _describe_changes(
    ledger: Ledger,
    kept: Sequence[SourceLedger | None],
    leaving: Sequence[SourceLedger],
    matched: MatchedCounts,
    removed_before: Mapping[str, SourceLedger],
    remaining: Sequence[Int64Array],
) -> tuple[SourceChange, ...]:
    """The change of each cache, those removed since the checkpoint last.

    Args:
        ledger: of the caches of the resumed run.
        kept: ledger of each cache in the checkpoint; None for a new cache.
        removed_before: caches that were removed earlier, by fingerprint.
        remaining: of each cache, how often the epoch has yet to train each sample, (N,).
    """
    changes = []
    for cache, (source, before) in enumerate(zip(ledger.sources, kept, strict=True)):
        status: SourceStatus = "back" if before is None else "as before"
        num_new = 0
        if before is None and source.fingerprint not in removed_before:
            num_new = matched.num_new[cache]
            status = "exported again" if num_new < source.num else "new"
        num_left = int(remaining[cache].sum())
        changes.append(
            SourceChange(source.directory, status, source.num, source.epoch.num_rows, left=num_left, new=num_new)
        )
    for source, is_gone in zip(leaving, matched.is_gone, strict=False):
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
_LENGTH = ("num_train_epochs", "max_steps")
_NOT_COMPARED = ("output_dir", "dataloader_num_workers", "data_change")


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

    Args:
        state: of a new run with these options and caches.
    """
    before, checkpoint, (config, _, reader) = resume_point.before, resume_point.checkpoint, inputs.for_training
    if before is None:
        return ResumedState(Timeline.of(inputs, ((0, *state.assignment),)), state, begin_ledger(reader))
    # packtool.Batches resumes without a checkpoint, and so without a ledger.
    ledger = begin_ledger(reader) if checkpoint is None else read_ledger(checkpoint)
    origin = checkpoint or "this state"
    if checkpoint is not None:
        trained = () if ledger is None else ledger.sources
        state.check_continues(
            checkpoint,
            before,
            data_may_change=config.data_change == "allow",
            other_data=lambda: cache_differences(trained, reader) if trained else [],
        )
        check_resumable(checkpoint, world.rank, world.size)
        if (state.cache, state.plan) != (before.cache, before.plan):
            return _with_other_data(checkpoint, before, state, inputs, ledger)
    assignments, notes = before.assignments or ((0, *before.assignment),), []
    if state.is_assigned_anew_after(before):
        notes.append(
            f"{origin} was trained by {before.world_size} data-parallel ranks, and now there are "
            f"{state.world_size}: the remaining packs of its epoch are assigned to them"
        )
        assignments = (*assignments, (before.step, *state.assignment))
    timeline = Timeline.of(inputs, assignments, None if ledger is None else ledger.change)
    if ledger is None:
        ledger = ledger_of_plan(timeline, before.step)
        notes.append(
            f"{origin} is from an older packtool and has no ledger: trained samples are taken from its plan, "
            "including any that --on-bad-media skip left out"
        )
    is_plain = len(assignments) == 1 and before.data_since == 0
    state = dataclasses.replace(state, assignments=() if is_plain else assignments, data_since=before.data_since)
    return ResumedState(timeline, state, ledger, notes=tuple(notes))


def _with_other_data(
    checkpoint: str, before: RunState, state: RunState, inputs: Inputs, ledger: Ledger | None
) -> ResumedState:
    """Resume with changed data (``--data-change allow``): the rest of the epoch is planned again."""
    if ledger is None:
        raise MismatchError(
            f"{checkpoint} is from an older packtool and has no ledger, so it is unknown which samples were trained",
            "Resume with its own caches until the next checkpoint, and change the data there.",
        )
    step, epoch = before.step, ledger.epoch
    count_samples, max_length, stage = inputs.epoch_to_resume(ledger, state.assignment)
    ledger, changes = with_changed_data(
        ledger, inputs.for_training[2], count_samples, history_of(checkpoint), max_length, stage
    )
    assert ledger.change is not None, "made with it"
    assignments = ((step, *state.assignment),)
    timeline = Timeline.of(inputs, assignments, ledger.change)
    state = dataclasses.replace(state, assignments=assignments, data_since=step)
    stretch, num_steps, num_before = timeline.stretch(step), timeline.num_steps, steps_planned(checkpoint)
    steps_left = stretch.stop - step if stretch.epoch == epoch else 0
    steps = f"the run ends after step {num_steps:,}"
    if stage is None:
        steps = f"later epochs have {timeline.steps_per_epoch:,} steps each, and {steps}"
    if num_before == num_steps:
        steps += ", as before"
    else:
        steps += (
            f" instead of {num_before:,}: {step / num_steps:.1%} of the learning rate schedule is done instead of "
            f"{step / num_before:.1%}"
        )
    return ResumedState(
        timeline, state, ledger, changes, tuple(change_lines(ledger.change, changes, steps_left, steps))
    )


def steps_planned(checkpoint: str) -> int:
    """The number of steps that the run of a checkpoint was planned with."""
    with open(os.path.join(checkpoint, "trainer_state.json"), encoding="utf-8") as file:
        return int(load_json(file.read())["max_steps"])


def resume_lines(config: TrainConfig, resume_point: ResumePoint, state: RunState, num_steps: int) -> Iterator[str]:
    """Yield a line for a resumed run: checkpoint, steps done and left, changed settings; nothing for a new run.

    Raises:
        MismatchError: if a changed setting would have no effect, or would shift the learning rate schedule.
    """
    checkpoint, before = resume_point.checkpoint, resume_point.before
    if checkpoint is None or before is None:
        return
    options_before, options_now = read_options(checkpoint), recorded_options(config)
    changes = {
        field.name: (_option_text(field, options_before), _option_text(field, options_now))
        for field in dataclasses.fields(config)
        if options_before is not None  # an older packtool does not record them
        and field.name not in _NOT_COMPARED
        and options_before.get(field.name) != options_now.get(field.name)
    }
    num_planned = steps_planned(checkpoint)
    panels = {field.name: field.metadata["panel"] for field in dataclasses.fields(TrainConfig)}
    refused = [name for name in changes if panels[name] in _FIXED_PANELS and name != "adapters"]
    is_same_data = config.data_change == "refuse" and not state.is_assigned_anew_after(before)
    shifts = num_steps != num_planned and config.lr_scheduler_type != "constant"
    reasons = []
    is_length_set = config.data_change == "refuse" and any(name in changes for name in _LENGTH)
    if shifts and (is_same_data or is_length_set):
        refused += [name for name in _LENGTH if name in changes]
        reasons = [f"    the learning rate schedule would have {num_steps:,} steps instead of {num_planned:,}"]
    if refused or reasons:
        lines = [f"  - {flag(name)}: {changes[name][0]} in the checkpoint, {changes[name][1]} now" for name in refused]
        raise MismatchError(
            "\n".join([f"{checkpoint} cannot be resumed with other settings:", *lines, *reasons]),
            f"Resume with the settings of that run; or {ONLY_MODEL}",
        )
    settings = ", ".join(f"{flag(name)} {new} (was {old})" for name, (old, new) in changes.items())
    done = f"{before.step:,} of {num_steps:,} steps done, {max(num_steps - before.step, 0):,} left"
    yield f"resuming from {checkpoint}: {done}" + (f"; changed settings: {settings}" if settings else "")


def _option_text(field: dataclasses.Field[Any], values: Mapping[str, Any]) -> str:
    """A setting's value, or its default, as on a command line; ``values`` are those of ``recorded_options``."""
    value = values.get(field.name, field.default)
    if isinstance(value, list):
        return " ".join(map(str, value))
    if value is None or value is dataclasses.MISSING:
        return "none" if field.name in values else "default"
    return str(value).lower() if isinstance(value, bool) else str(value)
