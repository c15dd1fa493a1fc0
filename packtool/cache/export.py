"""Stage one: rows in, a token cache out."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from packtool import storage
from packtool.cache.finish import build_manifest, length_counts, publish
from packtool.cache.manifest import Identity, Manifest, SourceInfo
from packtool.cache.on_ray import run_tasks_on_ray
from packtool.cache.pool import Work, run_tasks
from packtool.cache.reader import read_index
from packtool.cache.restart import begin, check_is_cache, clear, find_finished, finished_tasks
from packtool.cache.task import TASKS_DIR, Task, TaskResult
from packtool.cache.tasks import make_tasks
from packtool.config.export import ExportConfig
from packtool.constants import DROPPED_NAME, MANIFEST_NAME
from packtool.encode.blocks import check_template, refused_at_first
from packtool.encode.encoder import Encoder
from packtool.encode.families import MediaLimits, family_of
from packtool.encode.model_files import ModelFiles, place_of
from packtool.errors import DataError, StorageError
from packtool.progress import Progress
from packtool.rows.boundary import unforeseen_note
from packtool.rows.opened import close_readers
from packtool.rows.rights import ALLOWED_BY, NOT_ALLOWED
from packtool.rows.scan import scan_sources
from packtool.rows.sources import sources_of

_LOOKED_AT = 8  # tasks whose first rows are looked at before the work begins


@dataclass(frozen=True)
class ExportSummary:
    """What an export did.

    Args:
        lengths: p50, p90, p99 and max of the kept samples' tokens.
        num_reused: shards that an earlier, interrupted run had finished.
        already_finished: nothing was done, because the cache was there.
        num_missing: shards that other parts of a job array have not finished; the counts are this part's then.
        pieces_added: samples beyond one a row, where texts were split.
    """

    rows: int
    kept: int
    kept_by_split: Mapping[str, int]
    truncated: int
    dropped: Mapping[str, int]
    marks_added: int
    tokens: int
    target_tokens: int
    media_tokens: int
    lengths: Mapping[str, int]
    seconds: float
    output_dir: str
    num_reused: int = 0
    already_finished: bool = False
    num_missing: int = 0
    pieces_added: int = 0


def export(config: ExportConfig, progress: Progress) -> ExportSummary:
    """Encode all rows of all datasets into ``config.output_dir``.

    Raises:
        ConfigError: if the model cannot be encoded for, or the output directory holds something else.
        DataError: if a source cannot be read or nothing is left of it.
        RowError: in strict mode.
        MismatchError: if the directory holds a cache of other settings.
        StorageError: if writing fails.
    """
    started = time.perf_counter()
    files = ModelFiles.load(config.model, config.chat_template)
    identity = identity_of(config, files)
    specs = sources_of(config)
    directory = None if config.dry_run else storage.normalize(config.output_dir)
    if directory is not None:
        if config.overwrite:
            check_is_cache(directory)
        elif (manifest := find_finished(directory, identity, specs)) is not None:
            return _summary(manifest, _lengths_of(directory, manifest), 0.0, directory, already_finished=True)
    encoder = Encoder(config.encode_spec, files)  # refuses what cannot be encoded before anything is read
    for remark in encoder.remarks:
        progress.note(remark)
    scanned = scan_sources(specs, config.seed, progress.note)
    sources = tuple(
        SourceInfo(s.source.label, s.size, s.modified, s.digest, s.num_rows, s.spec.settings) for s in scanned
    )
    check_template(config.model, encoder, ((found.source, found.blocks) for found in scanned))
    tasks = make_tasks(scanned, config)
    if not tasks:
        raise DataError(f"no rows in {', '.join(config.dataset)}")
    _note_refusals(tasks, progress)
    if directory is not None and config.overwrite:
        clear(directory)  # only now: a mistake in the settings must not cost the old cache
    splits = {split for task in tasks for split in task.shards}
    done = begin(directory, identity, sources, splits, is_part=config.is_part) if directory is not None else {}
    results = _run(tasks, done, config, directory, encoder, progress)
    if directory is not None and config.is_part:
        results = finished_tasks(directory)
    if missing := [task.number for task in tasks if task.number not in results]:
        return _part(config, tasks, results, missing, time.perf_counter() - started)
    ordered = [results[task.number] for task in tasks]
    manifest = build_manifest(identity, sources, ordered)
    if not any(split.rows for split in manifest.splits.values()):
        reasons = ", ".join(f"{count} {reason}" for reason, count in manifest.dropped.items())
        remedy = _look_at_drops(directory)
        if NOT_ALLOWED in manifest.dropped:
            remedy = f"{NOT_ALLOWED}: {ALLOWED_BY}. {remedy}"
        raise DataError(f"none of {manifest.rows} rows is left: {reasons}", remedy)
    if directory is not None:
        _publish(directory, manifest, ordered, config)
    told_in = storage.join(directory, DROPPED_NAME) if directory else f"{DROPPED_NAME} of a run without --dry-run"
    if note := unforeseen_note(manifest.dropped, told_in):
        progress.note(note)
    lengths = _percentiles(dict(length_counts(ordered)))
    seconds = time.perf_counter() - started
    return _summary(manifest, lengths, seconds, config.output_dir, num_reused=len(done))


def _note_refusals(tasks: Sequence[Task], progress: Progress) -> None:
    """Say before the work begins if rows name media that they may not."""
    lines = (refused_at_first(task.source, task.blocks) for task in tasks[:_LOOKED_AT])
    if (line := next(filter(None, lines), None)) is not None:
        progress.note(line)
    close_readers()  # workers have their own


def _publish(directory: str, manifest: Manifest, results: Sequence[TaskResult], config: ExportConfig) -> None:
    try:
        publish(directory, manifest, results)
    except StorageError:
        # Two parts that finish last at the same time both publish the same; the slower one finds its work done.
        if not config.is_part or not storage.exists(storage.join(directory, MANIFEST_NAME)):
            raise
        if Manifest.read(directory).fingerprint != manifest.fingerprint:
            raise


def _part(
    config: ExportConfig,
    tasks: Sequence[Task],
    results: Mapping[int, TaskResult],
    missing: Sequence[int],
    seconds: float,
) -> ExportSummary:
    """What is to be said of a part of an export whose other parts are not finished.

    Raises:
        DataError: with ``--finalize``, naming the missing shards.
    """
    if config.finalize:
        shown = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        raise DataError(
            f"{config.output_dir} cannot be finished: {len(missing)} of {len(tasks)} shards are missing ({shown})",
            "Run the parts that are missing: task n of --num-tasks N makes the shards whose number leaves n over N.",
        )
    mine = [result for number, result in results.items() if number % (config.num_tasks or 1) == config.task_index]
    splits = [split for result in mine for split in result.splits.values()]
    dropped: Counter[str] = Counter()
    for result in mine:
        dropped.update(result.dropped)
    return ExportSummary(
        rows=sum(result.rows for result in mine),
        kept=sum(split.rows for split in splits),
        kept_by_split={},
        truncated=sum(split.truncated for split in splits),
        dropped=dict(sorted(dropped.items())),
        marks_added=sum(result.marks_added for result in mine),
        tokens=sum(split.tokens for split in splits),
        target_tokens=sum(split.target_tokens for split in splits),
        media_tokens=sum(split.media_tokens for split in splits),
        lengths=_percentiles(dict(length_counts(mine))),
        seconds=seconds,
        output_dir=config.output_dir,
        num_missing=len(missing),
    )


def identity_of(config: ExportConfig, files: ModelFiles) -> Identity:
    """What decides the content of the cache that an export makes.

    Raises:
        ConfigError: if the limits on media contradict the model's.
    """
    family = family_of(files, config)
    return Identity(
        # What is looked up later must be found from any directory; the fingerprint leaves the model's place out.
        spec=config.encode_spec.recorded() | {"model": place_of(config.model)},
        model_type=files.model_type,
        tokenizer_hash=files.tokenizer_hash,
        template_hash=files.template_hash,
        processor_hash=files.processor_hash,
        media_limits=family.limits if family is not None else MediaLimits(),
        seed=config.seed,
        split_dataset_ratio=config.split_dataset_ratio,
        rows_per_shard=config.rows_per_shard,
    )


def _run(
    tasks: Sequence[Task],
    done: Mapping[int, TaskResult],
    config: ExportConfig,
    directory: str | None,
    encoder: Encoder,
    progress: Progress,
) -> dict[int, TaskResult]:
    """Results by task number, of all that are finished."""
    mine = [task for task in tasks if not config.is_part or task.number % (config.num_tasks or 1) == config.task_index]
    waiting = [] if config.finalize else [task for task in mine if task.number not in done]
    if done:
        progress.note(f"{len(done)} of {len(tasks)} shards were finished by an earlier run")
    progress.start("export", sum(task.num_rows for task in waiting))
    begin_time, totals = time.perf_counter(), [0, 0]

    def report(rows: int, dropped: int, tokens: int) -> None:
        totals[0] += dropped
        totals[1] += tokens
        seconds = max(time.perf_counter() - begin_time, 1e-9)
        progress.advance(rows, dropped=totals[0], tokens=totals[1], tokens_per_s=round(totals[1] / seconds))

    work = Work(config.encode_spec, directory, config.strict)
    if config.executor == "ray":
        found = run_tasks_on_ray(waiting, work, config.dataset_num_proc, config.ray_address, report)
    else:
        found = run_tasks(waiting, work, lambda: encoder, config.dataset_num_proc, report)
    results = dict(done)
    for result in found:
        results[result.number] = result
    progress.finish()
    return results


def _percentiles(counts: Mapping[int, int]) -> dict[str, int]:
    """The smallest lengths that 50, 90 and 99 % of the samples do not exceed, and the largest."""
    lengths = np.array(sorted(counts), np.int64)
    below = np.cumsum([counts[int(length)] for length in lengths])
    found = {f"p{p}": int(lengths[np.searchsorted(below, below[-1] * p / 100)]) for p in (50, 90, 99)}
    return {**found, "max": int(lengths[-1])}


def _lengths_of(directory: str, manifest: Manifest) -> dict[str, int]:
    lengths = np.concatenate([read_index(directory, split)["length"] for split in manifest.splits])
    values, counts = np.unique(lengths, return_counts=True)
    return _percentiles(dict(zip(values.tolist(), counts.tolist(), strict=True)))


def _summary(
    manifest: Manifest,
    lengths: Mapping[str, int],
    seconds: float,
    output_dir: str,
    num_reused: int = 0,
    already_finished: bool = False,
) -> ExportSummary:
    splits = manifest.splits
    return ExportSummary(
        rows=manifest.rows,
        kept=sum(split.rows for split in splits.values()),
        kept_by_split={name: split.rows for name, split in splits.items()},
        truncated=sum(split.truncated for split in splits.values()),
        dropped=manifest.dropped,
        marks_added=manifest.marks_added,
        tokens=sum(split.tokens for split in splits.values()),
        target_tokens=sum(split.target_tokens for split in splits.values()),
        media_tokens=sum(split.media_tokens for split in splits.values()),
        lengths=lengths,
        seconds=seconds,
        output_dir=output_dir,
        num_reused=num_reused,
        already_finished=already_finished,
        pieces_added=sum(split.pieces_added for split in splits.values()),
    )


def _look_at_drops(directory: str | None) -> str:
    if directory is None:
        return "Without --dry-run each row's detail is kept in the output directory."
    return f"Each row's detail is in {storage.join(directory, TASKS_DIR)}/*.dropped.jsonl."
