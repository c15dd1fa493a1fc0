"""The end of an export: tasks' parts become one index, one ``dropped.jsonl`` and, last of all, the manifest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packtool import __version__, storage
from packtool.cache.manifest import Identity, Manifest, ShardInfo, SourceInfo, SplitInfo, fingerprint_of
from packtool.cache.schema import INDEX, dataset_info, dataset_state
from packtool.cache.task import TASKS_DIR, TaskResult, dropped_path, index_path
from packtool.constants import DROPPED_NAME, INDEX_NAME, MANIFEST_NAME
from packtool.errors import PacktoolError
from packtool.storage import AtomicFile

_HISTOGRAM_BINS = 64


def build_manifest(identity: Identity, sources: tuple[SourceInfo, ...], results: Sequence[TaskResult]) -> Manifest:
    """Add up the tasks' counts.

    Args:
        results: of all tasks, in the order of their numbers.

    Raises:
        PacktoolError: if the numbers do not add up.
    """
    channels = list(dict.fromkeys(name for result in results for name in result.channels))
    names = sorted({name for result in results for name in result.splits})
    dropped: Counter[str] = Counter()
    for result in results:
        dropped.update(result.dropped)
    manifest = Manifest(
        packtool_version=__version__,
        identity=identity,
        sources=sources,
        rows=sum(result.rows for result in results),
        dropped=dict(sorted(dropped.items())),
        marks_added=sum(result.marks_added for result in results),
        channels=tuple(channels),
        splits={name: _split_info(name, results, int(identity.spec["max_length"])) for name in names},
        fingerprint=fingerprint_of(identity, sources),
    )
    kept = sum(split.rows - split.pieces_added for split in manifest.splits.values())
    if manifest.rows != kept + sum(dropped.values()):
        raise PacktoolError(
            f"the numbers do not add up: {manifest.rows:,} rows went in, {kept:,} are kept and "
            f"{sum(dropped.values()):,} dropped",
            "This is a bug: the cache is not finished, do not train on it.",
        )
    return manifest


def _split_info(name: str, results: Sequence[TaskResult], max_length: int) -> SplitInfo:
    parts = [result.splits[name] for result in results if name in result.splits]
    histogram = np.zeros(_HISTOGRAM_BINS, np.int64)
    for length, count in length_counts(results, name).items():
        histogram[min((length - 1) * _HISTOGRAM_BINS // max_length, _HISTOGRAM_BINS - 1)] += count
    return SplitInfo(
        rows=sum(part.rows for part in parts),
        tokens=sum(part.tokens for part in parts),
        target_tokens=sum(part.target_tokens for part in parts),
        media_tokens=sum(part.media_tokens for part in parts),
        truncated=sum(part.truncated for part in parts),
        truncated_tokens=sum(part.truncated_tokens for part in parts),
        pieces_added=sum(part.pieces_added for part in parts),
        length_histogram=tuple(int(count) for count in histogram),
        shards=tuple(ShardInfo(part.file, part.rows, part.bytes, part.sha256) for part in parts),
    )


def length_counts(results: Sequence[TaskResult], split: str | None = None) -> Counter[int]:
    """Samples by exact length, of one split or of all."""
    counts: Counter[int] = Counter()
    for result in results:
        for name, part in result.splits.items():
            if split in (None, name):
                counts.update(part.lengths)
    return counts


def publish(directory: str, manifest: Manifest, results: Sequence[TaskResult]) -> None:
    """Write what is left to write, the manifest last, and clear away the tasks' parts.

    Raises:
        StorageError: if writing fails; the directory then stays unfinished.
    """
    for split, info in manifest.splits.items():
        folder = storage.join(directory, split)
        files = [shard.file for shard in info.shards]
        for name in storage.list_names(folder):
            if name not in files:  # what an interrupted run left half-written
                storage.remove(storage.join(folder, name))
        _merge_index(storage.join(folder, INDEX_NAME), directory, split, manifest.channels, results)
        storage.publish(storage.join(folder, "dataset_info.json"), dataset_info())
        storage.publish(
            storage.join(folder, "state.json"), dataset_state(files, split, f"{manifest.fingerprint}-{split}")
        )
    _merge_dropped(storage.join(directory, DROPPED_NAME), directory, results)
    storage.publish(storage.join(directory, MANIFEST_NAME), manifest.to_json())
    storage.remove(storage.join(directory, TASKS_DIR))


def _merge_index(
    path: str, directory: str, split: str, channels: tuple[str, ...], results: Sequence[TaskResult]
) -> None:
    codes = {name: code for code, name in enumerate(channels)}
    file = AtomicFile(path)
    try:
        sink = pa.PythonFile(_Sink(file), mode="w")
        with pa.ipc.new_file(sink, INDEX) as writer:
            for result in results:
                if split not in result.splits:
                    continue
                with storage.open_read(index_path(directory, result.number, split)) as part:
                    for batch in pa.ipc.open_stream(part):
                        writer.write_batch(_with_common_codes(batch, result.channels, codes))
        file.commit()
    except BaseException:
        file.discard()
        raise


def _with_common_codes(batch: pa.RecordBatch, names: list[str], channels: Mapping[str, int]) -> pa.RecordBatch:
    """A task numbers its channels by itself; the index numbers them for all."""
    if not names:
        return batch
    codes = pa.array([channels[name] for name in names], pa.int32())
    column = batch.column("channel")
    known = pc.if_else(pc.less(column, 0), None, column)
    common = pc.fill_null(pc.take(codes, known), -1)
    return batch.set_column(INDEX.get_field_index("channel"), INDEX.field("channel"), common)


class _Sink:
    """An ``AtomicFile`` as pyarrow wants it."""

    closed = False

    def __init__(self, file: AtomicFile) -> None:
        self._file = file

    def write(self, data: bytes) -> int:
        return self._file.write(data)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def _merge_dropped(path: str, directory: str, results: Sequence[TaskResult]) -> None:
    file = AtomicFile(path)
    try:
        for result in results:
            if result.dropped:
                with storage.open_read(dropped_path(directory, result.number)) as part:
                    file.write(part.read())
        file.commit()
    except BaseException:
        file.discard()
        raise
