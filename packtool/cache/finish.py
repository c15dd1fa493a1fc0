"""The end of an export: merge the tasks' parts, publish the manifest last, and summarize."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pyarrow as pa

from packtool import storage
from packtool.cache.index import with_fields
from packtool.cache.local import sha256_of
from packtool.cache.manifest import (
    Identity,
    InputCounts,
    Manifest,
    SampleCounts,
    ShardInfo,
    SourceInfo,
    SplitInfo,
    fingerprint_of,
)
from packtool.cache.shard import (
    INDEX,
    PREFIX,
    PREFIXES,
    atomic_file,
    dataset_info,
    dataset_state,
    with_added_columns,
    write_arrow_file,
)
from packtool.cache.task import TASKS_DIR, SplitResult, TaskResult, task_file
from packtool.constants import DROPPED_NAME, INDEX_NAME, MANIFEST_NAME, PREFIXES_NAME, VERSION
from packtool.errors import DataError, MismatchError, PacktoolError, StorageError
from packtool.rows.sample import all_dropped

_HISTOGRAM_BINS = 64


def build_manifest(identity: Identity, sources: tuple[SourceInfo, ...], results: Sequence[TaskResult]) -> Manifest:
    """Add up the counts of all tasks, in the order of their numbers."""
    names = sorted({name for result in results for name in result.splits})
    manifest = Manifest(
        **vars(InputCounts.total(result.counts for result in results)),
        packtool_version=VERSION,
        identity=identity,
        sources=sources,
        channels=tuple(dict.fromkeys(name for result in results for name in result.channels)),
        splits={name: _split_info(name, results, int(identity.spec["max_length"])) for name in names},
        fingerprint=fingerprint_of(identity, sources),
    )
    kept = sum(split.rows - split.pieces_added for split in manifest.splits.values())
    dropped = sum(manifest.dropped.values())
    if manifest.rows != kept + dropped:
        raise PacktoolError(
            f"the numbers do not add up: {manifest.rows:,} rows went in, {kept:,} are kept and {dropped:,} dropped",
            "This is a bug: the cache is not finished, do not train on it.",
        )
    return manifest


def _split_info(name: str, results: Sequence[TaskResult], max_length: int) -> SplitInfo:
    parts = [result.splits[name] for result in results if name in result.splits]
    histogram = np.zeros(_HISTOGRAM_BINS, np.int64)
    for length, count in length_counts(results, name).items():
        histogram[min((length - 1) * _HISTOGRAM_BINS // max_length, _HISTOGRAM_BINS - 1)] += count
    return SplitInfo(
        **vars(SampleCounts.total(part.counts for part in parts)),
        length_histogram=tuple(int(count) for count in histogram),
        shards=tuple(ShardInfo(part.file, part.counts.rows, part.bytes, part.sha256) for part in parts),
        index_sha256="",  # known when it is written, like the other
    )


def length_counts(results: Sequence[TaskResult], split: str | None = None) -> Counter[int]:
    """Count samples by exact length, in one split or in all."""
    counts: Counter[int] = Counter()
    for result in results:
        for name, part in result.splits.items():
            if split in (None, name):
                counts.update(part.lengths)
    return counts


def publish_cache(
    directory: str,
    manifest: Manifest,
    results: Sequence[TaskResult],
    check: Callable[[], None] = lambda: None,
    has_parts: bool = False,
) -> None:
    """Write the merged files and then the manifest, and remove the tasks' parts.

    Args:
        check: raises if this run may no longer write there.
        has_parts: whether rows may become several samples.

    Raises:
        MismatchError: if another process changed the shards or published a cache.
    """
    splits = {}
    for split, info in manifest.splits.items():
        folder = storage.join(directory, split)
        files = [shard.file for shard in info.shards]
        batches = _index_batches(directory, split, manifest.channels, results)
        digest = write_arrow_file(storage.join(folder, INDEX_NAME), INDEX, batches)
        prefixes_digest = ""  # where tasks of an older packtool wrote no prefixes
        if all(result.splits[split].prefixes_sha256 for result in results if split in result.splits):
            batches = _prefix_batches(directory, split, results)
            prefixes_digest = write_arrow_file(storage.join(folder, PREFIXES_NAME), PREFIXES, batches)
        splits[split] = replace(info, index_sha256=digest, prefixes_sha256=prefixes_digest)
        storage.publish(storage.join(folder, "dataset_info.json"), dataset_info(has_parts))
        storage.publish(
            storage.join(folder, "state.json"), dataset_state(files, split, f"{manifest.fingerprint}-{split}")
        )
    merge_dropped(directory, results)
    check_written(directory, results)
    check()
    manifest = replace(manifest, splits=splits)
    if not storage.publish_new(storage.join(directory, MANIFEST_NAME), manifest.to_json()):
        raise MismatchError(
            f"{directory}: another cache was published there while this one was made",
            "Give each export an --output-dir of its own.",
        )
    tidy(directory, manifest)


def tidy(directory: str, manifest: Manifest) -> None:
    """Remove what a finished cache does not need: tasks' parts, and incomplete files of killed runs."""
    if TASKS_DIR not in storage.list_names(directory):
        return  # done before; other files there belong to somebody else
    for split, info in manifest.splits.items():
        folder = storage.join(directory, split)
        known = {INDEX_NAME, PREFIXES_NAME, "dataset_info.json", "state.json", *(shard.file for shard in info.shards)}
        for name in storage.list_names(folder):
            if name not in known:
                storage.remove(storage.join(folder, name))
    with suppress(StorageError):  # unlisted uploads cost money, but do no harm to the cache
        storage.discard_unfinished(directory)
    storage.remove(storage.join(directory, TASKS_DIR))


def check_written(directory: str, results: Sequence[TaskResult]) -> None:
    """Raise a MismatchError naming the shards that differ from the tasks' by size, or by time and bytes."""
    wrong = []
    for split in sorted({split for result in results for split in result.splits}):
        folder = storage.join(directory, split)
        states = storage.entries(folder)
        for result in results:
            part = result.splits.get(split)
            if part is not None and not is_shard(storage.join(folder, part.file), states.get(part.file), part):
                wrong.append(f"{split}/{part.file}")
    if wrong:
        shown = ", ".join(wrong[:5]) + (", ..." if len(wrong) > 5 else "")
        raise MismatchError(
            f"{directory}: {len(wrong)} shards are not those that this export wrote ({shown}): another process writes "
            "there too, and nothing was published",
            "Run the same command again: it makes those shards anew. Give each export an --output-dir of its own.",
        )


def is_shard(path: str, state: storage.FileState | None, part: SplitResult) -> bool:
    """Return whether a file is the shard that a task wrote; ``state`` is None if there is no file."""
    if state is None or state.size != part.bytes:
        return False
    return state.modified == part.modified or sha256_of(path) == part.sha256  # a copied file has another time


def _index_batches(
    directory: str, split: str, channels: tuple[str, ...], results: Sequence[TaskResult]
) -> Iterator[pa.RecordBatch]:
    """Yield the tasks' parts of an index, with the cache's codes of channels."""
    codes = {name: code for code, name in enumerate(channels)}
    for result in results:
        if split in result.splits:
            part = _read_part(task_file(directory, result.number, f"{split}.arrow"), result.splits[split].index_sha256)
            for batch in pa.ipc.open_stream(part):
                yield _with_common_codes(with_added_columns(batch), result.channels, codes)


def _prefix_batches(directory: str, split: str, results: Sequence[TaskResult]) -> Iterator[pa.RecordBatch]:
    """Yield the tasks' parts of ``prefixes.arrow``."""
    for result in results:
        if split in result.splits:
            path = task_file(directory, result.number, f"{split}.prefixes.arrow")
            for batch in pa.ipc.open_stream(_read_part(path, result.splits[split].prefixes_sha256)):
                yield with_fields(batch, PREFIX)


def has_parts(directory: str, result: TaskResult) -> bool:
    """Return whether the parts that a task wrote for the end of the export are intact.

    Local disks may have lost some of them in a power failure; object stores lose nothing.
    """
    if storage.is_remote(directory):
        return True
    parts = [("dropped.jsonl", result.dropped_sha256)] if result.dropped_sha256 else []
    for split, counts in result.splits.items():
        parts.append((f"{split}.arrow", counts.index_sha256))
        if counts.prefixes_sha256:
            parts.append((f"{split}.prefixes.arrow", counts.prefixes_sha256))
    paths = ((task_file(directory, result.number, suffix), sha256) for suffix, sha256 in parts)
    return all(storage.exists(path) and sha256_of(path) == sha256 for path, sha256 in paths)


def _read_part(path: str, sha256: str) -> bytes:
    """Read a task's part, which must be the one that the task wrote."""
    data = storage.read_bytes(path)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise MismatchError(
            f"{path} is not what this export wrote: another process writes there too, and nothing was published",
            "Give each export an --output-dir of its own; --overwrite would delete what both wrote here.",
        )
    return data


def _with_common_codes(batch: pa.RecordBatch, names: list[str], channels: Mapping[str, int]) -> pa.RecordBatch:
    """Replace a task's codes of channels by those of the whole cache."""
    if not names:
        return batch
    import pyarrow.compute as pc  # here, because most rows have no channel

    codes = pa.array([channels[name] for name in names], pa.int32())
    column = batch.column("channel")
    known = pc.if_else(pc.less(column, 0), None, column)
    common = pc.fill_null(pc.take(codes, known), -1)
    return batch.set_column(INDEX.get_field_index("channel"), INDEX.field("channel"), common)


def merge_dropped(directory: str, results: Sequence[TaskResult]) -> None:
    """Write ``dropped.jsonl`` from the tasks' parts."""
    with atomic_file(storage.join(directory, DROPPED_NAME)) as file:
        for result in results:
            if result.dropped_sha256:
                file.write(_read_part(task_file(directory, result.number, "dropped.jsonl"), result.dropped_sha256))


def empty_export_error(manifest: Manifest, results: Sequence[TaskResult], where: str) -> DataError:
    """Return the error of an export that keeps no row; ``where``: a sentence about where each row's reason is kept."""
    firsts: dict[str, str] = {}
    for result in results:
        firsts = result.first_dropped | firsts
    return all_dropped(f"none of {manifest.rows:,} rows is left", manifest.dropped, firsts, where)


def percentiles(counts: Mapping[int, int]) -> dict[str, int]:
    """Return the lengths that 50, 90 and 99 % of the samples do not exceed, and the largest; 0 without samples."""
    if not counts:
        return {"p50": 0, "p90": 0, "p99": 0, "max": 0}
    lengths = np.array(sorted(counts), np.int64)
    below = np.cumsum([counts[int(length)] for length in lengths])
    quantiles = {f"p{p}": int(lengths[np.searchsorted(below, below[-1] * p / 100)]) for p in (50, 90, 99)}
    return {**quantiles, "max": int(lengths[-1])}
