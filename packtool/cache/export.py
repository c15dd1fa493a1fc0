"""Stage one: rows in, a token cache out."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from packtool import __version__, storage
from packtool.cache.finish import build_manifest, length_counts, publish
from packtool.cache.manifest import Identity, Manifest, SourceInfo, fingerprint_of
from packtool.cache.pool import Work, run_tasks
from packtool.cache.reader import check_sizes, read_index
from packtool.cache.task import TASKS_DIR, Task, TaskResult, marker_path
from packtool.config import ExportConfig
from packtool.constants import DROPPED_NAME, MANIFEST_NAME, TRAIN_SPLIT, VAL_SPLIT
from packtool.encode.encoder import Encoder
from packtool.encode.families import MediaLimits, family_of
from packtool.encode.model_files import ModelFiles
from packtool.errors import ConfigError, DataError, MismatchError
from packtool.progress import Progress
from packtool.rows.scan import scan, scan_sources
from packtool.rows.source import Blocks, ScannedSource, Source, SourceSpec
from packtool.rows.sources import sources_of

_LEAST_SHARD_ROWS, _MOST_SHARD_ROWS, _SHARDS = 256, 16384, 64
_EXPORT_NAME = "export.json"


@dataclass(frozen=True)
class ExportSummary:
    """What an export did.

    Args:
        lengths: p50, p90, p99 and max of the kept samples' tokens.
        num_reused: shards that an earlier, interrupted run had finished.
        already_finished: nothing was done, because the cache was there.
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


def export(config: ExportConfig, progress: Progress) -> ExportSummary:
    """Encode all rows of all datasets into ``config.output_dir``.

    Raises:
        ConfigError: if the model cannot be encoded for, or the output directory holds something else.
        DataError: if a source cannot be read or nothing is left of it.
        RowError: in strict mode.
        MismatchError: if the directory holds a cache of other settings.
        StorageError: if writing fails.
    """
    begin = time.perf_counter()
    files = ModelFiles.load(config.model)
    identity = _identity(config, files)
    specs = sources_of(config)
    directory = None if config.dry_run else config.output_dir
    if directory is not None:
        if config.overwrite:
            _check_is_cache(directory)
        elif (finished := _finished(directory, identity, specs)) is not None:
            return finished
    Encoder(config.encode_spec, files)  # refuses what cannot be encoded before anything is read
    scanned = scan_sources(specs, config.seed, progress.note)
    sources = tuple(
        SourceInfo(s.source.label, s.size, s.modified, s.digest, s.num_rows, s.spec.settings) for s in scanned
    )
    tasks = make_tasks(scanned, config)
    if not tasks:
        raise DataError(f"no rows in {', '.join(config.dataset)}")
    if directory is not None and config.overwrite:
        _clear(directory)  # only now: a mistake in the settings must not cost the old cache
    splits = {split for task in tasks for split in task.shards}
    done = _prepare(directory, identity, sources, splits) if directory is not None else {}
    results = _run(tasks, done, Work(config.encode_spec, directory, config.strict), files, config, progress)
    manifest = build_manifest(identity, sources, results)
    kept = sum(split.rows for split in manifest.splits.values())
    if not kept:
        reasons = ", ".join(f"{count} {reason}" for reason, count in manifest.dropped.items())
        raise DataError(f"none of {manifest.rows} rows is left: {reasons}", _look_at_drops(directory))
    if directory is not None:
        publish(directory, manifest, results)
    lengths = _percentiles(dict(length_counts(results)))
    seconds = time.perf_counter() - begin
    return _summary(manifest, lengths, seconds, config.output_dir, num_reused=len(done))


def make_tasks(scanned: Sequence[ScannedSource], config: ExportConfig) -> list[Task]:
    """Cut all sources into tasks; the same for any number of processes."""
    total = sum(source.num_rows for source in scanned)
    shard_rows = config.rows_per_shard or min(max(-(-total // _SHARDS), _LEAST_SHARD_ROWS), _MOST_SHARD_ROWS)
    num_train = sum(source.num_rows for source in scanned if source.spec.split == TRAIN_SPLIT)
    val_rows = _val_rows(num_train, config.split_dataset_ratio, config.seed)
    first = 0  # among the rows of --dataset
    parts: list[tuple[Source, Blocks, tuple[int, ...], list[str]]] = []
    for found in scanned:
        for blocks in _stretches(found.blocks, shard_rows):
            if found.spec.split == VAL_SPLIT:
                parts.append((found.source, blocks, (), [VAL_SPLIT]))
                continue
            low, high = np.searchsorted(val_rows, (first, first + blocks.num_rows))
            val = tuple(int(row) for row in val_rows[low:high] - first)
            parts.append((found.source, blocks, val, [TRAIN_SPLIT, VAL_SPLIT] if val else [TRAIN_SPLIT]))
            first += blocks.num_rows
    num_shards = {split: sum(split in splits for *_, splits in parts) for split in (TRAIN_SPLIT, VAL_SPLIT)}
    next_shard = dict.fromkeys(num_shards, 0)
    tasks: list[Task] = []
    for number, (source, blocks, val, splits) in enumerate(parts):
        shards = {}
        for split in splits:
            shards[split] = (next_shard[split], _shard_name(next_shard[split], num_shards[split]))
            next_shard[split] += 1
        tasks.append(Task(number, source, blocks, val, shards))
    return tasks


def _stretches(blocks: Blocks, shard_rows: int) -> list[Blocks]:
    """Neighbouring blocks, each stretch of about ``shard_rows`` rows."""
    stretches: list[Blocks] = []
    begin = rows = 0
    for i, count in enumerate(blocks.rows_of_each.tolist()):
        rows += count
        if rows >= shard_rows:
            stretches.append(blocks[begin : i + 1])
            begin, rows = i + 1, 0
    return [*stretches, blocks[begin:]] if begin < len(blocks) else stretches


def _val_rows(total: int, ratio: float, seed: int) -> np.ndarray:
    count = max(round(total * ratio), 1) if ratio and total > 1 else 0
    return np.sort(np.random.default_rng(seed).choice(total, count, replace=False, shuffle=False))


def _shard_name(number: int, total: int) -> str:
    return f"data-{number:05d}-of-{total:05d}.arrow"


def _identity(config: ExportConfig, files: ModelFiles) -> Identity:
    family = family_of(files, config)
    return Identity(
        spec=dataclasses.asdict(config.encode_spec),
        model_type=files.model_type,
        tokenizer_hash=files.tokenizer_hash,
        template_hash=files.template_hash,
        media_limits=family.limits if family is not None else MediaLimits(),
        seed=config.seed,
        split_dataset_ratio=config.split_dataset_ratio,
        rows_per_shard=config.rows_per_shard,
    )


def _check_is_cache(directory: str) -> None:
    names = storage.list_names(directory)
    if names and MANIFEST_NAME not in names and TASKS_DIR not in names:
        raise ConfigError(
            f"--output-dir {directory} holds {', '.join(names[:3])} and no cache: --overwrite replaces caches only",
            "Give another directory, or empty this one yourself.",
        )


def _clear(directory: str) -> None:
    """Remove a cache, finished or not, and nothing else. Interrupted, it leaves what another export can clear."""
    tasks = os.path.join(directory, TASKS_DIR)
    storage.make_directory(tasks)
    # Markers first: none may outlive its shard.
    for name in storage.list_names(tasks):
        storage.remove(os.path.join(tasks, name))
    for name in (MANIFEST_NAME, TRAIN_SPLIT, VAL_SPLIT, DROPPED_NAME):
        storage.remove(os.path.join(directory, name))


def _finished(directory: str, identity: Identity, specs: Sequence[SourceSpec]) -> ExportSummary | None:
    """The summary of a finished cache in the directory, if it is the one that would be made."""
    if not storage.exists(os.path.join(directory, MANIFEST_NAME)):
        return None
    manifest = Manifest.read(directory)
    different = differences(manifest.identity.as_dict(), identity.as_dict())
    there = [(source.path, source.settings) for source in manifest.sources]
    here = [(storage.masked(spec.path), spec.settings) for spec in specs]
    if there != here:
        shown = (", ".join(f"{path} {settings}".strip() for path, settings in sources) for sources in (there, here))
        different.append("dataset: {} there, {} here".format(*shown))
    else:
        different += [
            line for source, spec in zip(manifest.sources, specs, strict=True) for line in _changed(source, spec)
        ]
    if different:
        lines = "\n".join(f"  - {line}" for line in different)
        raise MismatchError(
            f"{directory} holds a finished cache of other settings:\n{lines}",
            "Give another --output-dir, or --overwrite to replace it.",
        )
    for split in manifest.splits:
        check_sizes(directory, manifest, split)
    lengths = _lengths_of(directory, manifest)
    storage.remove(os.path.join(directory, TASKS_DIR))  # left when the export was killed at its very end
    return _summary(manifest, lengths, 0.0, directory, already_finished=True)


def _changed(source: SourceInfo, spec: SourceSpec) -> list[str]:
    if not storage.exists(spec.path):
        return []  # the cache is what is left of it
    state = storage.stat(spec.path)
    if (state.size, state.modified) == (source.size, source.modified):
        return []
    if state.size == source.size and scan(spec).digest == source.digest:
        return []
    return [f"{source.path} has changed since"]


def differences(there: Mapping[str, Any], here: Mapping[str, Any], prefix: str = "") -> list[str]:
    """One line for each value that differs, nested names with dots. The model's path alone is no difference."""
    lines = []
    for key in there.keys() | here.keys():
        a, b = there.get(key), here.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            lines += differences(a, b, f"{prefix}{key}.")
        elif a != b and f"{prefix}{key}" != "spec.model":
            lines.append(f"{prefix}{key}: {a} there, {b} here")
    return sorted(lines)


def _prepare(
    directory: str, identity: Identity, sources: tuple[SourceInfo, ...], splits: Set[str]
) -> dict[int, TaskResult]:
    """Make the directories, or find what an interrupted run of the same export has finished."""
    names = storage.list_names(directory)
    started = os.path.join(directory, TASKS_DIR, _EXPORT_NAME)
    paths = [(source.path, source.settings) for source in sources]
    state = json.dumps([__version__, fingerprint_of(identity, sources), paths]).encode()
    if names and TASKS_DIR not in names:
        raise ConfigError(
            f"--output-dir {directory} is not empty and holds no cache: {', '.join(names[:3])}",
            "Give another directory, or empty this one.",
        )
    done = _finished_tasks(directory)
    same = False
    if storage.exists(started):
        with storage.open_read(started) as file:
            same = file.read() == state
    if done and not same:
        raise MismatchError(
            f"{directory} holds {len(done)} finished shards of an export of other settings or other rows",
            "Give another --output-dir, or --overwrite to replace it.",
        )
    if not same:
        _clear(directory)
    for name in (TASKS_DIR, *sorted(splits)):
        storage.make_directory(os.path.join(directory, name))
    if not same:
        storage.publish(started, state)
    return done


def _finished_tasks(directory: str) -> dict[int, TaskResult]:
    """Results of the tasks whose marker is there, and the shards it tells of."""
    done = {}
    for name in storage.list_names(os.path.join(directory, TASKS_DIR)):
        stem = name.removesuffix(".json")
        if stem.isdigit():
            with storage.open_read(marker_path(directory, int(stem))) as file:
                result = TaskResult.from_json(file.read())
            shards = [(os.path.join(directory, name, part.file), part.bytes) for name, part in result.splits.items()]
            if all(storage.exists(path) and storage.stat(path).size == size for path, size in shards):
                done[int(stem)] = result
    return done


def _run(
    tasks: Sequence[Task],
    done: Mapping[int, TaskResult],
    work: Work,
    files: ModelFiles,
    config: ExportConfig,
    progress: Progress,
) -> list[TaskResult]:
    """Results of all tasks, in order."""
    if done:
        progress.note(f"{len(done)} of {len(tasks)} shards were finished by an earlier run")
    progress.start("export", sum(task.num_rows for task in tasks))
    results = dict(done)
    for result in done.values():
        progress.advance(result.rows)
    num_dropped = tokens = 0
    waiting = [task for task in tasks if task.number not in done]
    for result in run_tasks(waiting, work, files, config.dataset_num_proc):
        results[result.number] = result
        num_dropped += sum(result.dropped.values())
        tokens += sum(split.tokens for split in result.splits.values())
        progress.advance(result.rows, dropped=num_dropped, tokens=tokens)
    progress.finish()
    return [results[task.number] for task in tasks]


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
    )


def _look_at_drops(directory: str | None) -> str:
    if directory is None:
        return "Without --dry-run each row's detail is kept in the output directory."
    return f"Each row's detail is in {os.path.join(directory, TASKS_DIR)}/*.dropped.jsonl."
