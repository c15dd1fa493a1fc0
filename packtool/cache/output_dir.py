"""The output directory of an export: start or resume the export, merge the tasks' files, publish the manifest last.

Tasks leave markers and parts of the index in ``.tasks``. From these an interrupted export resumes.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pyarrow as pa

from packtool import storage
from packtool.cache import hygiene
from packtool.cache.index import with_prefix_fields, without_samples
from packtool.cache.local import sha256_of
from packtool.cache.lock import is_of_lock, remove_stale
from packtool.cache.manifest import (
    PATH_SETTINGS,
    Identity,
    InputCounts,
    Manifest,
    SampleCounts,
    ShardInfo,
    SourceInfo,
    SplitInfo,
    fingerprint_of,
)
from packtool.cache.reader import check_sizes
from packtool.cache.shard import INDEX, PREFIX, PREFIXES, with_added_columns, write_arrow_file, write_dataset_files
from packtool.cache.task import TASKS_DIR, SplitResult, TaskResult, collect_rarely, task_file
from packtool.config.data import ExportConfig
from packtool.constants import DROPPED_NAME, INDEX_NAME, MANIFEST_NAME, PREFIXES_NAME, TRAIN_SPLIT, VAL_SPLIT, VERSION
from packtool.encode.families import MediaLimits
from packtool.encode.loss_scale import loss_scale_of
from packtool.encode.model_files import ModelFiles, absolute_model
from packtool.encode.row_parts import expansion_of
from packtool.errors import ConfigError, MismatchError, PacktoolError, StorageError
from packtool.rows.read import scan
from packtool.rows.sample import Dropped, all_dropped
from packtool.rows.source import SourceSpec

_PATHS = tuple(f"spec.{name}" for name in PATH_SETTINGS)
_STATE_NAME = "export.json"


def check_is_ours(directory: str, *, may_be_finished: bool = False) -> None:
    """Raise a ConfigError unless the directory is empty, holds an unfinished export or, if allowed, a cache."""
    names = [name for name in storage.list_names(directory) if not is_of_lock(name)]
    # An export that kept no row leaves only its list of reasons.
    if not names or TASKS_DIR in names or names == [DROPPED_NAME] or (may_be_finished and MANIFEST_NAME in names):
        return
    shown = ", ".join(names[:3])
    if may_be_finished:
        problem = f"holds {shown} and no cache: --overwrite replaces caches only"
    else:
        problem = f"is not empty and holds no cache: {shown}"
    raise ConfigError(f"--output-dir {directory} {problem}", "Give another directory.")


def clear(directory: str) -> None:
    """Remove a finished or unfinished cache and no other files; if this is interrupted, the next export resumes it."""
    storage.make_directory(storage.join(directory, TASKS_DIR))
    _clear_tasks(directory)
    for name in (MANIFEST_NAME, TRAIN_SPLIT, VAL_SPLIT, DROPPED_NAME, hygiene.FILE_NAME):
        storage.remove(storage.join(directory, name))


def _clear_tasks(directory: str) -> None:
    """Remove the files in ``.tasks``, markers first, because a marker must not outlive the files that it describes."""
    tasks = storage.join(directory, TASKS_DIR)
    for name in sorted(storage.list_names(tasks), key=_is_marker, reverse=True):
        storage.remove(storage.join(tasks, name))


def read_published(directory: str, identity: Identity, sources: tuple[SourceInfo, ...]) -> Manifest | None:
    """Return the manifest of this export if another run has published it; else None."""
    manifest = _read_manifest(directory)
    return manifest if manifest and manifest.fingerprint == fingerprint_of(identity, sources) else None


def _read_manifest(directory: str) -> Manifest | None:
    return Manifest.read(directory) if storage.exists(storage.join(directory, MANIFEST_NAME)) else None


def find_finished(directory: str, identity: Identity, specs: Sequence[SourceSpec]) -> Manifest | None:
    """Return the manifest of this export's finished cache, or None; raise a MismatchError if it has other settings."""
    manifest = find_same(directory, identity, specs)
    if manifest is not None:
        for split in manifest.splits:
            check_sizes(directory, manifest, split)
        with suppress(StorageError):  # a finished cache may be read-only
            if remove_stale(directory):
                remove_leftovers(directory, manifest)  # of an export that was killed at its very end
    return manifest


def find_same(directory: str, identity: Identity, specs: Sequence[SourceSpec]) -> Manifest | None:
    """Return the manifest of the cache, even a damaged one, or None; raise a MismatchError if it has other settings."""
    manifest = _read_manifest(directory)
    if manifest is None:
        return None
    lines = differences(asdict(manifest.identity), asdict(identity)) + _source_differences(manifest.sources, specs)
    if lines:
        list_of_differences = "\n".join(f"  - {line}" for line in lines)
        message = f"{directory} holds a finished cache with other settings:\n{list_of_differences}"
        raise MismatchError(message, "Give another --output-dir; --overwrite would delete the existing files.")
    return manifest


def _source_differences(sources: Sequence[SourceInfo], specs: Sequence[SourceSpec]) -> list[str]:
    """Return a line for each difference between the sources of a cache and those of this export."""
    exported = [(storage.absolute(source.path), source.settings) for source in sources]
    current = [(storage.absolute(storage.masked(spec.path)), spec.settings) for spec in specs]
    if exported != current:
        exported_list = ", ".join(f"{path} {settings}".strip() for path, settings in exported)
        current_list = ", ".join(f"{path} {settings}".strip() for path, settings in current)
        return [f"dataset: {exported_list} there, {current_list} here"]
    pairs = zip(sources, specs, strict=True)
    return [f"{source.path} has changed since the export" for source, spec in pairs if _has_changed(source, spec)]


def _has_changed(source: SourceInfo, spec: SourceSpec) -> bool:
    """Return whether a source file has another content than at the time of the export; False if it was removed."""
    if not storage.exists(spec.path):
        return False
    state = storage.stat(spec.path)
    if state.size != source.size:
        return True
    # Comparing the digest reads the file, so only if just its time differs.
    return state.modified != source.modified and scan(spec).digest != source.digest


def differences(exported: Mapping[str, Any], current: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return a line for each value that differs, sorted; nested names begin with ``prefix``. Paths are ignored."""
    lines = []
    for key in exported.keys() | current.keys():
        a, b = exported.get(key), current.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            lines += differences(a, b, f"{prefix}{key}.")
        elif a != b and f"{prefix}{key}" not in _PATHS:
            lines.append(f"{prefix}{key}: {a} there, {b} here")
    return sorted(lines)


def export_state(identity: Identity, sources: tuple[SourceInfo, ...]) -> bytes:
    """Return the content of ``.tasks/export.json``: version, fingerprint and sources of an unfinished export."""
    # What is done with duplicates and overlaps may still change: tasks do not depend on it.
    spec = {name: value for name, value in identity.spec.items() if name not in hygiene.POLICIES}
    identity = replace(identity, spec=spec)
    paths = [(source.path, source.settings) for source in sources]
    return json.dumps([VERSION, fingerprint_of(identity, sources), paths]).encode()


def export_id(state: bytes) -> str:
    """Return the identifier by which markers of tasks refer to their export; ``state``: result of ``export_state``."""
    return hashlib.sha256(state).hexdigest()[:16]


def begin(directory: str, state: bytes, splits: Set[str], *, is_part: bool) -> dict[int, TaskResult]:
    """Prepare the directory of an export, and return the results of an interrupted run of the same export.

    Args:
        state: result of ``export_state``, which is stored in the directory and identifies the export.
        splits: names of the splits to be written.
        is_part: this is a part of a job array; others may be working on the same export, so a part removes nothing.

    Returns:
        The results of finished tasks, by task number. MismatchError if the directory has shards of another export.
    """
    check_is_ours(directory)
    state_path = storage.join(directory, TASKS_DIR, _STATE_NAME)
    old_state = storage.read_bytes(state_path) if storage.exists(state_path) else None
    is_resumed = old_state == state
    if not is_resumed:
        num_old_shards = num_finished(directory)
        # Finished shards are never removed. A part of a job array removes no unfinished export either.
        if num_old_shards or (is_part and old_state is not None):
            raise _other_export_error(directory, num_old_shards)
        if not is_part:
            clear(directory)
    if not is_part:
        _discard_unfinished_uploads(directory)
    for name in (TASKS_DIR, *sorted(splits)):
        storage.make_directory(storage.join(directory, name))
    if not is_resumed:
        is_published = storage.publish_new(state_path, state)
        if not is_published:  # a part of another export has just written its state
            raise _other_export_error(directory, num_shards=0)
    return finished_tasks(directory, export_id(state))


def _discard_unfinished_uploads(directory: str) -> None:
    with suppress(StorageError):  # they cost money, but do not harm the cache
        storage.discard_unfinished(directory)


def _other_export_error(directory: str, num_shards: int) -> MismatchError:
    message = f"{directory} holds {num_shards} finished shards of an export with other settings or rows"
    return MismatchError(message, "Give another --output-dir; --overwrite would delete the existing files.")


def finished_tasks(directory: str, export: str) -> dict[int, TaskResult]:
    """Return the results of finished tasks by task number: those whose files are all intact.

    A task has a marker file with its result, which is written last. ``export`` is the identifier of the export
    (``export_id``); markers of others are ignored.
    """
    results = []
    tasks_dir = storage.join(directory, TASKS_DIR)
    for name in filter(_is_marker, storage.list_names(tasks_dir)):
        try:
            result = TaskResult.from_json(storage.read_bytes(storage.join(tasks_dir, name)))
        except (ValueError, LookupError, TypeError, AttributeError):
            continue  # damaged, or of another version: the task runs again
        # The small files are checked first, because checking a shard may read all of it.
        if result.export == export and _has_intact_files(directory, result):
            results.append(result)
    changed_tasks = {number for number, _ in _changed_shards(directory, results)}
    return {result.number: result for result in results if result.number not in changed_tasks}


def _changed_shards(directory: str, results: Sequence[TaskResult]) -> list[tuple[int, str]]:
    """Return (task number, path below the directory) of the shards that are not those that the tasks wrote."""
    changed = []
    for split in sorted({split for result in results for split in result.splits}):
        folder = storage.join(directory, split)
        states = storage.entries(folder)
        for result in results:
            shard = result.splits.get(split)
            if shard is not None and not is_shard(storage.join(folder, shard.file), states.get(shard.file), shard):
                changed.append((result.number, f"{split}/{shard.file}"))
    return changed


def num_finished(directory: str) -> int:
    """Count the tasks of an unfinished cache that have a marker."""
    return sum(_is_marker(name) for name in storage.list_names(storage.join(directory, TASKS_DIR)))


def _is_marker(name: str) -> bool:
    return name.endswith(".json") and name.removesuffix(".json").isdigit()


def identity_of(config: ExportConfig, files: ModelFiles, limits: MediaLimits) -> Identity:
    """Return the identity of an export's cache; ``limits`` on media include the user's options."""
    encode_spec = replace(config.encode_spec, expand_turns=expansion_of(config.expand_turns, files))
    settings = encode_spec.recorded()
    # An absolute path, so that the model is found from any directory; the fingerprint ignores it.
    settings["model"] = absolute_model(config.model)
    # Recorded as resolved, because the default depends on whether the model has hybrid thinking.
    settings["loss_scale"] = loss_scale_of(config.loss_scale, files.is_hybrid_thinking)
    settings |= hygiene.identity_settings(config)
    return Identity(
        spec=settings,
        model_type=files.model_type,
        tokenizer_hash=files.tokenizer_hash,
        template_hash=files.template_hash,
        processor_hash=files.processor_hash,
        media_limits=limits,
        seed=config.seed,
        split_dataset_ratio=config.split_dataset_ratio,
        rows_per_shard=config.rows_per_shard,
    )


@contextmanager
def delayed_gc() -> Iterator[Callable[[], None]]:
    """Disable garbage collection until the yielded function is called; later ones skip the objects made before."""
    if not gc.isenabled():
        yield lambda: None
        return

    thresholds = gc.get_threshold()

    def enable() -> None:
        collect_rarely()
        gc.enable()

    gc.disable()
    try:
        yield enable
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()  # has no effect unless ``enable`` was called
        gc.enable()


_HISTOGRAM_BINS = 64


def build_manifest(identity: Identity, sources: tuple[SourceInfo, ...], results: Sequence[TaskResult]) -> Manifest:
    """Return the manifest with the counts of all tasks; ``publish_cache`` adds checksums of indexes and prefixes."""
    split_names = sorted({name for result in results for name in result.splits})
    channels = dict.fromkeys(name for result in results for name in result.channels)  # in order of appearance
    max_length = int(identity.spec["max_length"])
    manifest = Manifest(
        **vars(InputCounts.total(result.counts for result in results)),
        packtool_version=VERSION,
        identity=identity,
        sources=sources,
        channels=tuple(channels),
        splits={name: _split_info(name, results, max_length) for name in split_names},
        fingerprint=fingerprint_of(identity, sources),
    )
    _check_sum(manifest)
    return manifest


def _check_sum(manifest: Manifest) -> None:
    """Raise an error unless every row of the export was either kept or dropped."""
    num_kept = sum(split.rows - split.pieces_added for split in manifest.splits.values())
    num_dropped = sum(manifest.dropped.values())
    if manifest.rows != num_kept + num_dropped:
        raise PacktoolError(
            f"the counts do not add up: {manifest.rows:,} rows were read, {num_kept:,} kept and "
            f"{num_dropped:,} dropped",
            "This is a bug: the cache is not finished, do not train on it.",
        )


def _split_info(name: str, results: Sequence[TaskResult], max_length: int) -> SplitInfo:
    """Return counts and files of a split; its histogram of lengths has 64 equal bins up to ``max_length``."""
    shards = [result.splits[name] for result in results if name in result.splits]
    histogram = np.zeros(_HISTOGRAM_BINS, np.int64)
    for length, count in length_counts(results, name).items():
        histogram[min((length - 1) * _HISTOGRAM_BINS // max_length, _HISTOGRAM_BINS - 1)] += count
    return SplitInfo(
        **vars(SampleCounts.total(shard.counts for shard in shards)),
        length_histogram=tuple(histogram.tolist()),
        shards=tuple(ShardInfo(s.file, s.counts.rows + len(s.left_out), s.bytes, s.sha256) for s in shards),
    )


def length_counts(results: Sequence[TaskResult], split: str | None = None) -> Counter[int]:
    """Count samples by length in tokens, in one split or in all."""
    counts: Counter[int] = Counter()
    for result in results:
        for name, shard in result.splits.items():
            if split in (None, name):
                counts.update(shard.lengths)
    return counts


def compare_rows(
    directory: str | None,
    results: Sequence[TaskResult],
    held_out: hygiene.HeldOut | None,
    config: ExportConfig,
    check_lock: Callable[[], None] = lambda: None,
) -> tuple[list[TaskResult], dict[str, int]]:
    """Compare the rows of all tasks: find duplicates, conflicts and overlaps, and drop those that the options name.

    Args:
        directory: of the tasks' files and ``hygiene.jsonl``; None if nothing is written.
        results: of all tasks, in order. They are not changed.
        held_out: questions of ``--check-against``.
        check_lock: raises an error if this process has lost the lock of the directory.

    Returns:
        The results without dropped rows, and the number of findings by kind. DataError for ``--on-overlap fail``.
    """
    # Copies, which ``_drop_rows`` changes.
    results = [replace(result, splits=dict(result.splits), drops=list(result.drops)) for result in results]
    index_parts = _index_parts(directory, results)
    index = pa.Table.from_batches([batch for _, _, batch in index_parts], hygiene.HASHED_INDEX)
    counts, lines, drops = hygiene.compare(index, held_out, config)
    shown_directory = "--output-dir" if directory is None else directory
    path = storage.join(shown_directory, hygiene.FILE_NAME)
    if directory is not None and counts:
        check_lock()
        storage.publish(path, "".join(lines).encode())
    hygiene.refuse_overlaps(config, counts, path)
    _drop_rows(index_parts, drops)
    return results, counts


_IndexPart = tuple[str, TaskResult, pa.RecordBatch]
"""A split, the result of a task, and a batch of the task's part of the split's index."""


def _index_parts(directory: str | None, results: Sequence[TaskResult]) -> list[_IndexPart]:
    """Return the parts of the index that have hashes of rows; those of an older packtool have none."""
    parts = []
    for split in (TRAIN_SPLIT, VAL_SPLIT):
        for result, batch in _batches_of(directory, split, results):
            if "content" in batch.schema.names:
                if "signature" not in batch.schema.names:
                    batch = batch.append_column("signature", pa.nulls(len(batch), pa.binary()))
                parts.append((split, result, batch.select(hygiene.HASHED_INDEX.names)))
    return parts


def _drop_rows(parts: Sequence[_IndexPart], drops: Sequence[tuple[int, Dropped]]) -> None:
    """Drop rows from the results of their tasks, in place.

    Args:
        parts: split, result of the task, and the index of the task's samples in the split.
        drops: rows to drop, each after the position of its first sample in the joined indexes; ascending.
    """
    positions = np.array([position for position, _ in drops], np.int64)
    part_start = 0  # position of the part's first sample in the joined indexes
    for split, result, batch in parts:
        part_stop = part_start + len(batch)
        first_drop, stop_drop = np.searchsorted(positions, [part_start, part_stop])
        if first_drop < stop_drop:
            first_samples = positions[first_drop:stop_drop] - part_start
            dropped_rows = [row for _, row in drops[first_drop:stop_drop]]
            result.splits[split] = result.splits[split].without(batch, first_samples)
            result.counts += InputCounts.total(map(InputCounts.of_dropped, dropped_rows))
            result.drops += [row.to_json() for row in dropped_rows]
        part_start = part_stop


def publish_cache(
    directory: str, manifest: Manifest, results: Sequence[TaskResult], check_lock: Callable[[], None], has_parts: bool
) -> None:
    """Finish a cache: merge the files of all tasks, write the manifest as the last file, and remove ``.tasks``.

    Args:
        manifest: with the counts of all tasks; the checksums of merged files are added.
        results: of all tasks, in order.
        check_lock: raises an error if this process has lost the lock of the directory.
        has_parts: rows may have become several samples, so that shards have two more columns.

    Raises:
        MismatchError: if a shard is not the one that its task wrote, or if another export has published a cache.
    """
    splits = {}
    for split, info in manifest.splits.items():
        index_sha256 = _merge_index(directory, split, manifest.channels, results)
        prefixes_sha256 = _merge_prefixes(directory, split, results)
        splits[split] = replace(info, index_sha256=index_sha256, prefixes_sha256=prefixes_sha256)
        files = [shard.file for shard in info.shards]
        write_dataset_files(directory, split, files, f"{manifest.fingerprint}-{split}", has_parts)
    merge_dropped(directory, results)
    check_written(directory, results)
    check_lock()
    manifest = replace(manifest, splits=splits)
    if not storage.publish_new(storage.join(directory, MANIFEST_NAME), manifest.to_json()):
        message = f"{directory}: another export published a cache there at the same time"
        raise MismatchError(message, "Give each export an --output-dir of its own.")
    remove_leftovers(directory, manifest)


def _merge_index(directory: str, split: str, channels: Sequence[str], results: Sequence[TaskResult]) -> str:
    """Write ``index.arrow`` of a split from the tasks' parts; return its SHA-256. ``channels``: of the cache."""
    channel_positions = {name: position for position, name in enumerate(channels)}
    batches = (
        _with_cache_channels(with_added_columns(batch).select(INDEX.names), result.channels, channel_positions)
        for result, batch in _batches_of(directory, split, results)
    )
    return write_arrow_file(storage.join(directory, split, INDEX_NAME), INDEX, batches)


def _merge_prefixes(directory: str, split: str, results: Sequence[TaskResult]) -> str:
    """Write ``prefixes.arrow`` and return its SHA-256; nothing and "" if a task of an older packtool wrote none."""
    if not all(result.splits[split].prefixes_sha256 for result in results if split in result.splits):
        return ""
    parts = _batches_of(directory, split, results, of_prefixes=True)
    batches = (with_prefix_fields(batch, PREFIX) for _, batch in parts)
    return write_arrow_file(storage.join(directory, split, PREFIXES_NAME), PREFIXES, batches)


def remove_leftovers(directory: str, manifest: Manifest) -> None:
    """Remove the tasks' files and the incomplete files of killed runs from a finished cache."""
    if TASKS_DIR not in storage.list_names(directory):
        return  # removed before; other files in the directory are not the export's
    for split, info in manifest.splits.items():
        folder = storage.join(directory, split)
        known = {INDEX_NAME, PREFIXES_NAME, "dataset_info.json", "state.json", *(shard.file for shard in info.shards)}
        for name in storage.list_names(folder):
            if name not in known:
                storage.remove(storage.join(folder, name))
    _discard_unfinished_uploads(directory)
    storage.remove(storage.join(directory, TASKS_DIR))


def check_written(directory: str, results: Sequence[TaskResult]) -> None:
    """Raise a MismatchError that names the shards which are not those that the tasks wrote."""
    changed = [path for _, path in _changed_shards(directory, results)]
    if changed:
        shown = ", ".join(changed[:5]) + (", ..." if len(changed) > 5 else "")
        raise MismatchError(
            f"{directory}: {len(changed)} shards differ from those that this export wrote ({shown}): another process "
            "writes there too, and nothing was published",
            "Run the same command again to recreate those shards. Give each export an --output-dir of its own.",
        )


def is_shard(path: str, state: storage.FileState | None, shard: SplitResult) -> bool:
    """Return whether a file is the shard that a task wrote, by size and time, or by SHA-256 if the time differs."""
    if state is None or state.size != shard.bytes:
        return False
    return state.modified == shard.modified or sha256_of(path) == shard.sha256  # a copied file has another time


def _batches_of(
    directory: str | None, split: str, results: Sequence[TaskResult], *, of_prefixes: bool = False
) -> Iterator[tuple[TaskResult, pa.RecordBatch]]:
    """Yield the result of each task, and the batches of its index (or prefixes) of a split without dropped samples."""
    for result in results:
        split_result = result.splits.get(split)
        if split_result is None:
            continue
        if directory is None:  # the task wrote nothing
            data = result.indexes[split]
        else:
            suffix = "prefixes.arrow" if of_prefixes else "arrow"
            sha256 = split_result.prefixes_sha256 if of_prefixes else split_result.index_sha256
            data = _read_task_file(task_file(directory, result.number, f"{split}.{suffix}"), sha256)
        for batch in pa.ipc.open_stream(data):
            yield result, without_samples(batch, split_result.left_out)


def _has_intact_files(directory: str, result: TaskResult) -> bool:
    """Return whether a task's index, prefixes and drops are intact: local disks may lose them in a power failure."""
    if storage.is_remote(directory):
        return True
    files = [("dropped.jsonl", result.dropped_sha256)] if result.dropped_sha256 else []
    for split, split_result in result.splits.items():
        files.append((f"{split}.arrow", split_result.index_sha256))
        if split_result.prefixes_sha256:
            files.append((f"{split}.prefixes.arrow", split_result.prefixes_sha256))
    paths = ((task_file(directory, result.number, suffix), sha256) for suffix, sha256 in files)
    return all(storage.exists(path) and sha256_of(path) == sha256 for path, sha256 in paths)


def _read_task_file(path: str, sha256: str) -> bytes:
    """Read a task's part of a file; raise a MismatchError if another process has changed it."""
    data = storage.read_bytes(path)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise MismatchError(
            f"{path} differs from the file that this export wrote: another process writes there too, and nothing was "
            "published",
            "Give each export an --output-dir of its own; --overwrite would delete the files of both.",
        )
    return data


def _with_cache_channels(batch: pa.RecordBatch, names: list[str], positions: Mapping[str, int]) -> pa.RecordBatch:
    """Replace positions in a task's channels ``names`` by those in the manifest's; -1 stands for no channel."""
    if not names:
        return batch
    import pyarrow.compute as pc  # here, because most rows have no channel

    new_positions = pa.array([positions[name] for name in names], pa.int32())
    column = batch.column("channel")
    old_positions = pc.if_else(pc.less(column, 0), None, column)
    new_column = pc.fill_null(pc.take(new_positions, old_positions), -1)
    return batch.set_column(INDEX.get_field_index("channel"), INDEX.field("channel"), new_column)


def merge_dropped(directory: str, results: Sequence[TaskResult]) -> None:
    """Write ``dropped.jsonl``: the tasks' parts, each followed by its rows that were dropped after the task."""
    with storage.AtomicFile(storage.join(directory, DROPPED_NAME)) as file:
        for result in results:
            if result.dropped_sha256:
                file.write(_read_task_file(task_file(directory, result.number, "dropped.jsonl"), result.dropped_sha256))
            file.write("".join(result.drops).encode())


def refuse_empty(manifest: Manifest, results: Sequence[TaskResult], directory: str | None) -> None:
    """Raise a DataError if an export kept no row; its directory, if any, is reduced to ``dropped.jsonl``."""
    if any(split.rows for split in manifest.splits.values()):
        return
    where = "Without --dry-run, the output directory lists each row with its reason."
    if directory is not None:
        merge_dropped(directory, results)
        _clear_tasks(directory)
        for name in (TASKS_DIR, TRAIN_SPLIT, VAL_SPLIT, hygiene.FILE_NAME):
            storage.remove(storage.join(directory, name))
        where = f"Each row's reason is in {storage.join(directory, DROPPED_NAME)}."
    firsts: dict[str, str] = {}
    for result in results:
        firsts = result.first_dropped | firsts
    raise all_dropped(f"none of {manifest.rows:,} rows was kept", manifest.dropped, firsts, where)


def percentiles(counts: Mapping[int, int]) -> dict[str, int]:
    """Return p50, p90, p99 and max of sample lengths, from the number of samples by length; zeros without samples."""
    if not counts:
        return {"p50": 0, "p90": 0, "p99": 0, "max": 0}
    lengths = np.array(sorted(counts), np.int64)
    num_up_to = np.cumsum([counts[int(length)] for length in lengths])
    quantiles = {f"p{p}": int(lengths[np.searchsorted(num_up_to, num_up_to[-1] * p / 100)]) for p in (50, 90, 99)}
    return {**quantiles, "max": int(lengths[-1])}
