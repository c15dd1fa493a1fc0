"""Tasks of an export: each encodes a stretch of rows into one shard of each split.

The tasks and their bytes are the same for any number of processes, machines or interruptions. A task is independent of
the others and of the machine that runs it. At its end it writes a marker with its counts, its export and the digests of
its files; a task with a marker need not run again. Only shards are written durably: if a power failure leaves no
marker, or files that differ from it, the task runs again.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, count, groupby, islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packtool import storage
from packtool.cache.hygiene import HASHED_INDEX, HeldOut, hash_columns
from packtool.cache.index import prefix_batch
from packtool.cache.lock import lost_error
from packtool.cache.manifest import InputCounts, SampleCounts
from packtool.cache.shard import (
    PREFIXES,
    ShardWriter,
    arrow_bytes,
    embed_media,
    index_batch,
    index_columns,
)
from packtool.config.data import EncodeSpec, ExportConfig
from packtool.config.settings import load_json
from packtool.constants import MIN_SHARED, TRAIN_SPLIT, VAL_SPLIT
from packtool.encode.encoded import EncodedSample, left_out_of
from packtool.encode.encoder import Encoder, encode_samples
from packtool.encode.media_spans import MediaTokens
from packtool.encode.prefix_hashes import prefix_hashes
from packtool.rows.read import samples_of
from packtool.rows.sample import Dropped, Sample
from packtool.rows.source import RowBlocks, ScannedSource, Source

TASKS_DIR = ".tasks"
BATCH_ROWS = 128
_OBJECTS_PER_COLLECTION = 50_000  # instead of Python's 700
_MAX_KEPT_DROPS = 1000
_COUNTED = ("is_first", "length", "target_tokens", "media_tokens", "truncated")


@dataclass(frozen=True)
class Task:
    """Consecutive rows that are encoded together, into one shard of each split.

    Args:
        number: 0-based among all tasks.
        row_blocks: the blocks with the task's rows, by source; several sources if they are small.
        val_rows: ascending positions of the val split's rows among the task's rows. Without a train shard, all rows
            belong to the val split.
        shards: number and file name of the task's shard, for each split that it writes to.
    """

    number: int
    row_blocks: tuple[tuple[Source, RowBlocks], ...]
    val_rows: tuple[int, ...]
    shards: Mapping[str, tuple[int, str]]

    @property
    def shard_files(self) -> set[str]:
        """Paths of the task's shards below the cache's directory."""
        return {f"{split}/{file}" for split, (_, file) in self.shards.items()}

    @property
    def num_rows(self) -> int:
        return sum(blocks.num_rows for _, blocks in self.row_blocks)


@dataclass(frozen=True)
class TaskSettings:
    """Settings that all tasks of an export share.

    Args:
        directory: of the cache; None to count samples and write nothing.
        strict: raise an error at the first unusable row.
        has_parts: rows may become several samples.
        holds_lock: returns whether the lock is still held; called before shards are published. None without a lock.
        held_out: questions of ``--check-against``.
        finds_near_duplicates: for ``--near-duplicates``.
    """

    spec: EncodeSpec
    directory: str | None
    strict: bool
    has_parts: bool = False
    export: str = ""
    holds_lock: Callable[[], bool] | None = None
    held_out: HeldOut | None = None
    finds_near_duplicates: bool = False


@dataclass
class SplitResult:
    """The counts and files of a task in one split.

    Args:
        shard, file: number and file name of the shard.
        bytes, sha256, modified: of the shard; ``modified`` as the store returned it after writing.
        index_sha256: of the task's part of the index, with the columns ``HASHED_INDEX``.
        prefixes_sha256: of the task's part of the prefixes; empty if an older packtool wrote it.
        lengths: number of samples by length in tokens.
        left_out: positions in the shard of samples that ``without`` left out, ascending.
    """

    shard: int = 0
    file: str = ""
    bytes: int = 0
    sha256: str = ""
    modified: str = ""
    index_sha256: str = ""
    prefixes_sha256: str = ""
    counts: SampleCounts = field(default_factory=lambda: SampleCounts.total(()))
    lengths: dict[int, int] = field(default_factory=dict)
    left_out: list[int] = field(default_factory=list)

    def without(self, index: pa.RecordBatch, first_samples: npt.NDArray[np.int64]) -> SplitResult:
        """Return the result without R rows: their samples are no longer counted, but stay in the shard.

        Args:
            index: columns of the samples of the shard.
            first_samples: position of the first sample of each row to leave out, (R,).
        """
        columns = {name: index.column(name).to_numpy(zero_copy_only=False) for name in _COUNTED}
        row_numbers = np.cumsum(columns["is_first"])  # of each sample, from 1
        is_left_out = np.isin(row_numbers, row_numbers[first_samples])
        kept_columns = {name: column[~is_left_out] for name, column in columns.items()}
        lengths = dict(Counter(kept_columns["length"].tolist()))
        left_out = np.flatnonzero(is_left_out).tolist()
        return replace(self, counts=_count_samples(kept_columns), lengths=lengths, left_out=left_out)


@dataclass
class TaskResult:
    """The counts and files of a task, which its marker file stores.

    Args:
        dropped_sha256: of the task's part of ``dropped.jsonl``; empty if it dropped nothing.
        first_dropped: description of the first dropped row for each reason.
        channels: names; the task's part of the index stores their positions here.
        drops: lines for ``dropped.jsonl``: of rows dropped later, and at most 1,000 of a task that writes nothing.
        indexes: the task's part of the index by split, as an Arrow stream; only of tasks that write nothing.
    """

    number: int
    export: str = ""
    dropped_sha256: str = ""
    counts: InputCounts = field(default_factory=lambda: InputCounts.total(()))
    first_dropped: dict[str, str] = field(default_factory=dict)
    splits: dict[str, SplitResult] = field(default_factory=dict)
    channels: list[str] = field(default_factory=list)
    drops: list[str] = field(default_factory=list)
    indexes: dict[str, bytes] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """Return the content of the marker file."""
        values = asdict(self)
        del values["drops"], values["indexes"]  # in files of their own
        return json.dumps(values).encode()

    @classmethod
    def from_json(cls, data: bytes) -> TaskResult:
        """Return the result in a marker file."""
        raw = load_json(data)
        for split in raw["splits"].values():
            split["counts"] = SampleCounts(**split["counts"])
            split["lengths"] = {int(length): count for length, count in split["lengths"].items()}
        splits = {name: SplitResult(**split) for name, split in raw.pop("splits").items()}
        return cls(counts=InputCounts(**raw.pop("counts")), splits=splits, **raw)


def task_file(directory: str, number: int, suffix: str) -> str:
    """Return the path of a task's file in ``.tasks``; suffix ``json`` is the marker, ``SPLIT.arrow`` the index."""
    return storage.join(directory, TASKS_DIR, f"{number:05d}.{suffix}")


def collect_rarely() -> None:
    """Make garbage collections rare during tasks, which leave few cycles; they skip all objects that exist now."""
    gc.freeze()
    gc.set_threshold(_OBJECTS_PER_COLLECTION)


Report = Callable[[int, int, int], None]
"""Called with the numbers of rows, drops and tokens since its last call."""


def run_task(task: Task, encoder: Encoder, settings: TaskSettings, report: Report = lambda *_: None) -> TaskResult:
    """Encode the rows of a task, and write its files: the shard of each split, its parts of index and prefixes, drops.

    The marker file with the result is written last; files of a task that fails are discarded. ``report`` is called
    after every batch with its numbers of rows, drops and tokens.
    """
    embeds = encoder.spec.media == "embed"
    outputs = _Outputs(task, settings, encoder.media_tokens, embed=embeds)
    splits = _split_of_each_row(task)
    # Embedded media have masked URLs in the cache; other URLs must not hold secrets.
    samples_by_source = (samples_of(source, blocks, may_hold_secrets=embeds) for source, blocks in task.row_blocks)
    rows = chain.from_iterable(samples_by_source)
    try:
        while batch := tuple(islice(rows, BATCH_ROWS)):
            num_dropped_before = outputs.num_dropped
            rows_of_split = _encode_batch(batch, splits, encoder, outputs)
            num_tokens = sum(sample.length for row in chain(*rows_of_split.values()) for sample in row)
            outputs.count_rows(batch)
            outputs.write(rows_of_split)  # may drop more rows
            report(len(batch), outputs.num_dropped - num_dropped_before, num_tokens)
        return outputs.commit()
    except BaseException:
        outputs.discard()
        raise


def _split_of_each_row(task: Task) -> Iterator[str]:
    """Yield the split of each row of the task, and further ones without end."""
    val_rows = frozenset(task.val_rows)
    for row in count():
        is_val = row in val_rows or TRAIN_SPLIT not in task.shards
        yield VAL_SPLIT if is_val else TRAIN_SPLIT


def _encode_batch(
    batch: Sequence[Sample | Dropped], splits: Iterator[str], encoder: Encoder, outputs: _Outputs
) -> dict[str, list[list[EncodedSample]]]:
    """Encode a batch of rows; return the samples of each kept row, by split. Drops are recorded in ``outputs``."""
    rows_of_split: dict[str, list[list[EncodedSample]]] = {split: [] for split in outputs.result.splits}
    # There is one result for each row: its samples, or why it was dropped.
    for result, split in zip(encode_samples(batch, encoder), splits, strict=False):
        if isinstance(result, Dropped):
            outputs.drop(result)
            continue
        rows_of_split[split].append(result)
        for dropped_part in left_out_of(result):
            outputs.drop(dropped_part)
    return rows_of_split


class _Outputs:
    """The files of one task and their counts, which ``commit`` publishes; only counts if there is no directory."""

    def __init__(self, task: Task, settings: TaskSettings, media_tokens: MediaTokens, embed: bool) -> None:
        self.result = TaskResult(task.number, settings.export)
        self._task = task
        self._settings = settings
        self._directory = settings.directory
        self._media_tokens = media_tokens
        self._embed = embed
        self._drops: list[str] = []
        self._channel_codes: dict[str, int] = {}
        self._policies = {source.label: source.media_policy for source, _ in task.row_blocks} if embed else {}
        self._index: dict[str, list[dict[str, npt.NDArray[Any]]]] = {name: [] for name in task.shards}
        self._prefixes: dict[str, list[pa.RecordBatch]] = {name: [] for name in task.shards}
        self._writers: dict[str, ShardWriter] = {}
        for split, (shard, name) in task.shards.items():
            self.result.splits[split] = SplitResult(shard=shard, file=name)
            if self._directory is not None:
                self._writers[split] = ShardWriter(storage.join(self._directory, split, name), settings.has_parts)

    @property
    def num_dropped(self) -> int:
        return sum(self.result.counts.dropped.values())

    def count_rows(self, rows: Sequence[Sample | Dropped]) -> None:
        """Count input rows, and those in which missing media marks were inserted."""
        num_marked = sum(isinstance(row, Sample) and row.num_marks_added > 0 for row in rows)
        self.result.counts += InputCounts(rows=len(rows), dropped={}, marks_added=num_marked)

    def drop(self, item: Dropped) -> None:
        """Record a dropped row, or a dropped turn or response of a kept row; raise a RowError in strict mode."""
        if self._settings.strict:
            raise item.as_error()
        if item.part is None:
            self.result.first_dropped.setdefault(item.reason, item.summary)
        self.result.counts += InputCounts.of_dropped(item)
        self._drops.append(item.to_json())

    def write(self, rows_of_split: Mapping[str, list[list[EncodedSample]]]) -> None:
        """Append the samples of each row, by split, to the shards and the task's parts of index and prefixes."""
        for split, rows in rows_of_split.items():
            if self._embed and self._directory is not None:
                for group in embed_media(rows, self._policies, self.drop):  # groups that fit into memory
                    self._write_group(split, group)
            else:
                self._write_group(split, rows)

    def _write_group(self, split: str, rows: list[list[EncodedSample]]) -> None:
        """Count the samples of some rows of a split and, unless the task only counts, write them."""
        result = self.result.splits[split]
        samples = [sample for row in rows for sample in row]
        index = index_columns(samples, result.shard, result.counts.rows, self._channel_codes)
        settings = self._settings
        hashes = hash_columns(rows, split, self._media_tokens, settings.held_out, settings.finds_near_duplicates)
        columns = index | hashes
        result.counts += _count_samples(columns)
        for length in index["length"].tolist():
            result.lengths[length] = result.lengths.get(length, 0) + 1
        self._index[split].append(columns)
        if self._directory is not None:
            num_prefixes, prefixes = prefix_hashes(samples, self._media_tokens, longer_than=MIN_SHARED)
            self._prefixes[split].append(prefix_batch(num_prefixes, prefixes))
            self._writers[split].write(samples)

    def commit(self) -> TaskResult:
        """Complete the result and return it; publish the files unless the task only counts."""
        self.result.channels = list(self._channel_codes)  # in the order of their codes
        if self._directory is None:
            self.result.drops = self._drops[:_MAX_KEPT_DROPS]
            self.result.indexes = {split: self._index_data(split) for split in self._index}
        else:
            self._publish_all(self._directory)
        return self.result

    def _publish_all(self, directory: str) -> None:
        """Publish the files and set their checksums; the marker is the last. MismatchError if the lock was lost."""
        holds_lock = self._settings.holds_lock
        if holds_lock is not None and not holds_lock():
            raise lost_error(directory)
        for split in self._writers:
            self._publish_split(directory, split)
        if self._drops:
            self.result.dropped_sha256 = self._publish(directory, "dropped.jsonl", "".join(self._drops).encode())
        self._publish(directory, "json", self.result.to_json())  # the marker

    def _publish_split(self, directory: str, split: str) -> None:
        """Publish the shard of a split and the task's parts of index and prefixes; set their checksums."""
        result = self.result.splits[split]
        result.sha256, state = self._writers[split].close()
        result.bytes = state.size
        result.modified = state.modified
        result.index_sha256 = self._publish(directory, f"{split}.arrow", self._index_data(split))
        prefix_batches = pa.Table.from_batches(self._prefixes[split], PREFIXES).combine_chunks().to_batches()
        data = arrow_bytes(prefix_batches, PREFIXES, pa.ipc.new_stream)
        result.prefixes_sha256 = self._publish(directory, f"{split}.prefixes.arrow", data)

    def _index_data(self, split: str) -> bytes:
        """Return the task's part of the index of a split: an Arrow stream of one batch, or of none without samples."""
        batches = []
        parts = self._index[split]
        if parts:
            columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            batches = [index_batch(columns, HASHED_INDEX)]
        return arrow_bytes(batches, HASHED_INDEX, pa.ipc.new_stream)

    def _publish(self, directory: str, suffix: str, data: bytes) -> str:
        """Write one of the task's files (``task_file``), not durably; return its SHA-256."""
        storage.publish(task_file(directory, self._task.number, suffix), data, durable=False)
        return hashlib.sha256(data).hexdigest()

    def discard(self) -> None:
        for writer in self._writers.values():
            writer.discard()


def _count_samples(columns: Mapping[str, npt.NDArray[Any]]) -> SampleCounts:
    """Return the counts of S samples from their columns ``_COUNTED``, (S,) each."""
    num_samples = len(columns["length"])
    return SampleCounts(
        rows=num_samples,
        tokens=int(columns["length"].sum()),
        target_tokens=int(columns["target_tokens"].sum()),
        media_tokens=int(columns["media_tokens"].sum()),
        truncated=int(np.count_nonzero(columns["truncated"])),
        truncated_tokens=int(columns["truncated"].sum()),
        pieces_added=num_samples - int(np.count_nonzero(columns["is_first"])),
    )


SourceBlocks = tuple[tuple[Source, RowBlocks], ...]
"""Rows as some blocks of one source, or of several small ones: (source, blocks) for each."""

MIN_SHARD_ROWS = 256
"""Minimum rows of a shard, unless ``--rows-per-shard`` is given or there are fewer."""
_MAX_SHARD_ROWS, _NUM_SHARDS = 16384, 64  # shards have a 64th of all rows, within these limits


_TaskRows = tuple[SourceBlocks, tuple[int, ...], tuple[str, ...]]
"""Rows of a task whose shards have no names so far: ``row_blocks``, ``val_rows``, and the splits with such rows."""


def make_tasks(scanned: Sequence[ScannedSource], config: ExportConfig) -> list[Task]:
    """Divide the rows of all sources into tasks, the same for any number of processes.

    A task writes one shard (data file) of each split. ``--split-dataset-ratio`` draws the rows of ``--dataset`` that
    belong to the val split instead of the train split.
    """
    num_rows = sum(source.num_rows for source in scanned)
    default_shard_rows = min(max(math.ceil(num_rows / _NUM_SHARDS), MIN_SHARD_ROWS), _MAX_SHARD_ROWS)
    min_shard_rows = config.rows_per_shard or default_shard_rows
    num_dataset_rows = sum(source.num_rows for source in scanned if source.spec.split == TRAIN_SPLIT)
    num_val = 0
    if config.split_dataset_ratio and num_dataset_rows > 1:
        num_val = max(round(num_dataset_rows * config.split_dataset_ratio), 1)
    random = np.random.default_rng(config.seed)
    val_rows = np.sort(random.choice(num_dataset_rows, num_val, replace=False, shuffle=False))
    return _with_shards(list(_rows_of_tasks(scanned, min_shard_rows, val_rows)))


def _with_shards(rows_of_tasks: Sequence[_TaskRows]) -> list[Task]:
    """Return the tasks with their shards, which are numbered within their split; names contain the number of shards."""
    num_shards = Counter(split for *_, splits in rows_of_tasks for split in splits)
    counters = {split: count() for split in num_shards}
    tasks: list[Task] = []
    for number, (row_blocks, val_rows, splits) in enumerate(rows_of_tasks):
        shards = {}
        for split in splits:
            shard = next(counters[split])
            shards[split] = shard, f"data-{shard:05d}-of-{num_shards[split]:05d}.arrow"
        tasks.append(Task(number, row_blocks, val_rows, shards))
    return tasks


def _rows_of_tasks(
    scanned: Sequence[ScannedSource], shard_rows: int, val_rows: npt.NDArray[np.int64]
) -> Iterator[_TaskRows]:
    """Yield the rows of each task, at least ``shard_rows``, either of ``--dataset`` or of ``--val-dataset``.

    ``val_rows``: positions of the rows of ``--dataset`` that belong to the val split, ascending.
    """
    first_row = 0  # position of the task's first row among the rows of --dataset
    for split, sources in groupby(scanned, key=lambda scanned_source: scanned_source.spec.split):
        blocks_by_source = [(item.source, item.blocks) for item in sources if len(item.blocks)]
        for row_blocks in _divide(blocks_by_source, shard_rows):
            if split == VAL_SPLIT:  # rows of --val-dataset, all for the val shard
                yield row_blocks, (), (VAL_SPLIT,)
                continue
            stop_row = first_row + sum(blocks.num_rows for _, blocks in row_blocks)
            start, stop = np.searchsorted(val_rows, (first_row, stop_row))  # of the task in ``val_rows``
            val_rows_of_task = tuple((val_rows[start:stop] - first_row).tolist())  # positions in the task
            splits = (TRAIN_SPLIT, VAL_SPLIT) if val_rows_of_task else (TRAIN_SPLIT,)
            yield row_blocks, val_rows_of_task, splits
            first_row = stop_row


def _divide(sources: Sequence[tuple[Source, RowBlocks]], shard_rows: int) -> Iterator[SourceBlocks]:
    """Divide the blocks of all sources, in order, into tasks of at least ``shard_rows`` rows; the last may have fewer.

    A block is never divided. A task has blocks of several sources if they are small.
    """
    row_blocks: list[tuple[Source, RowBlocks]] = []  # of the unfinished task, from earlier sources
    num_rows = 0  # of the unfinished task
    for source, blocks in sources:
        if num_rows + blocks.num_rows < shard_rows:  # fast path for thousands of small files
            row_blocks.append((source, blocks))
            num_rows += blocks.num_rows
            continue
        first_block = 0  # of this source in the unfinished task
        for i, num_block_rows in enumerate(blocks.rows_of_each.tolist()):
            num_rows += num_block_rows
            if num_rows >= shard_rows:
                yield (*row_blocks, (source, blocks[first_block : i + 1]))
                row_blocks, num_rows = [], 0
                first_block = i + 1
        if first_block < len(blocks):
            row_blocks.append((source, blocks[first_block:]))
    if row_blocks:
        yield tuple(row_blocks)
