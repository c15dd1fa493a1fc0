"""Tasks of an export, and their executors: each task encodes a stretch of rows into one shard of each split.

The tasks are the same for any number of processes, machines or interruptions. A task is independent of the others and
of the machine that runs it. At its end it writes a marker with its counts, its export and the digests of its files; a
task with a marker need not run again. Only shards are written durably: if a power failure leaves no marker, or files
that differ from it, the task runs again.

Tasks run in this process, in worker processes of this machine, or on actors of a Ray cluster, and always write the same
bytes. Each worker process and each actor has one encoder.
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, groupby, islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

from packtool import storage
from packtool.cache.index import prefix_batch
from packtool.cache.lock import lost_error
from packtool.cache.manifest import InputCounts, SampleCounts
from packtool.cache.shard import (
    INDEX,
    PREFIXES,
    IndexPart,
    ShardWriter,
    arrow_bytes,
    embed_media,
    index_batch,
    index_part,
)
from packtool.config.data import EncodeSpec, ExportConfig
from packtool.config.settings import load_json
from packtool.constants import MIN_SHARED, TRAIN_SPLIT, VAL_SPLIT
from packtool.encode.encoded import EncodedSample, left_out_of
from packtool.encode.encoder import Encoder, encode_samples, samples_of
from packtool.encode.media_spans import MediaTokens
from packtool.encode.model_files import ModelFiles
from packtool.encode.prefix_hashes import prefix_hashes
from packtool.errors import ConfigError, PacktoolError
from packtool.launch.worker import WorkerDied, WorkerPool, tokenize_in_one_thread
from packtool.rows.sample import Dropped, Sample
from packtool.rows.source import RowBlocks, ScannedSource, Source

TASKS_DIR = ".tasks"
BATCH_ROWS = 128


@dataclass(frozen=True)
class Task:
    """Consecutive rows that are encoded together, into one shard of each split.

    Args:
        number: 0-based among all tasks.
        stretches: source and blocks of rows; several if the sources are small.
        val_rows: ascending positions of the val split's rows among the task's rows. Without a train shard, all rows
            belong to the val split.
        shards: number and file name of the task's shard, for each split that it writes to.
    """

    number: int
    stretches: tuple[tuple[Source, RowBlocks], ...]
    val_rows: tuple[int, ...]
    shards: Mapping[str, tuple[int, str]]

    @property
    def num_rows(self) -> int:
        """Number of rows of the task."""
        return sum(blocks.num_rows for _, blocks in self.stretches)


@dataclass(frozen=True)
class Work:
    """Settings that all tasks of an export share.

    Args:
        directory: of the cache; None to count samples and write nothing.
        strict: raise an error at the first unusable row.
        has_parts: rows may become several samples.
        export: identifier of the export (``output_dir.export_id``).
        is_locked: returns whether the lock is still held; called before shards are published. None without a lock.
    """

    spec: EncodeSpec
    directory: str | None
    strict: bool
    has_parts: bool = False
    export: str = ""
    is_locked: Callable[[], bool] | None = None


@dataclass
class SplitResult:
    """The counts and files of a task in one split.

    Args:
        shard, file: number and file name of the shard.
        bytes, sha256, modified: of the shard; ``modified`` as the store returned it after writing.
        index_sha256: of the task's part of the index.
        prefixes_sha256: of the task's part of the prefixes; empty if an older packtool wrote it.
        lengths: number of samples by length in tokens.
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


@dataclass
class TaskResult:
    """The counts and files of a task, which its marker file stores.

    Args:
        export: identifier of the export.
        dropped_sha256: of the task's part of ``dropped.jsonl``; empty if it dropped nothing.
        first_dropped: description of the first dropped row for each reason.
        channels: names; the task's part of the index stores their positions here.
    """

    number: int
    export: str = ""
    dropped_sha256: str = ""
    counts: InputCounts = field(default_factory=lambda: InputCounts.total(()))
    first_dropped: dict[str, str] = field(default_factory=dict)
    splits: dict[str, SplitResult] = field(default_factory=dict)
    channels: list[str] = field(default_factory=list)

    def to_json(self) -> bytes:
        """Return the content of the marker file."""
        return json.dumps(asdict(self)).encode()

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
    """Return the path of a task's file in ``.tasks``.

    ``suffix``: ``json`` (marker), ``SPLIT.arrow`` (part of the index), ``SPLIT.prefixes.arrow`` or ``dropped.jsonl``.
    """
    return storage.join(directory, TASKS_DIR, f"{number:05d}.{suffix}")


Report = Callable[[int, int, int], None]
"""Called with the numbers of rows, drops and tokens since its last call."""


def run_task(task: Task, encoder: Encoder, work: Work, report: Report = lambda *_: None) -> TaskResult:
    """Encode a task's rows; write its shards, its parts of index, prefixes and drops, and at the end its marker."""
    embeds = encoder.spec.media == "embed"
    outputs = _Outputs(task, work, encoder.media_tokens, embed=embeds)
    val_rows = frozenset(task.val_rows)
    position = 0  # of a row in the task
    rows = chain.from_iterable(samples_of(*stretch, may_hold_secrets=embeds) for stretch in task.stretches)
    try:
        while group := tuple(islice(rows, BATCH_ROWS)):
            samples_of_rows: dict[str, list[list[EncodedSample]]] = {name: [] for name in task.shards}
            num_dropped_before = outputs.num_dropped
            for item in encode_samples(group, encoder):  # the samples of a row, or a Dropped
                split = VAL_SPLIT if position in val_rows or TRAIN_SPLIT not in task.shards else TRAIN_SPLIT
                position += 1
                if isinstance(item, Dropped):
                    outputs.drop(item)
                    continue
                samples_of_rows[split].append(item)
                for part in left_out_of(item):
                    outputs.drop(part)
            num_marked = sum(isinstance(item, Sample) and item.num_marks_added > 0 for item in group)
            outputs.result.counts += InputCounts(rows=len(group), dropped={}, marks_added=num_marked)
            outputs.write(samples_of_rows)
            samples = (sample for of_split in samples_of_rows.values() for row in of_split for sample in row)
            num_tokens = sum(sample.length for sample in samples)
            report(len(group), outputs.num_dropped - num_dropped_before, num_tokens)
        return outputs.commit()
    except BaseException:
        outputs.discard()
        raise


class _Outputs:
    """The files of one task and their counts, which ``commit`` publishes; only counts if there is no directory."""

    def __init__(self, task: Task, work: Work, media_tokens: MediaTokens, embed: bool) -> None:
        self.result = TaskResult(task.number, work.export)
        self._embed, self._strict, self._media_tokens = embed, work.strict, media_tokens
        self._task, self._directory, self._is_locked = task, work.directory, work.is_locked
        self._drops: list[str] = []
        self._channel_codes: dict[str, int] = {}
        self._policies = {source.label: source.media_policy for source, _ in task.stretches} if embed else {}
        self._index: dict[str, list[IndexPart]] = {name: [] for name in task.shards}
        self._prefixes: dict[str, list[pa.RecordBatch]] = {name: [] for name in task.shards}
        self._writers: dict[str, ShardWriter] = {}
        for split, (shard, name) in task.shards.items():
            self.result.splits[split] = SplitResult(shard=shard, file=name)
            if work.directory is not None:
                self._writers[split] = ShardWriter(storage.join(work.directory, split, name), work.has_parts)

    @property
    def num_dropped(self) -> int:
        """Number of rows dropped so far."""
        return sum(self.result.counts.dropped.values())

    def drop(self, item: Dropped) -> None:
        """Record a dropped row, or a dropped turn or response of a kept row; raise a RowError in strict mode."""
        if self._strict:
            raise item.as_error()
        if item.part is None:
            self.result.first_dropped.setdefault(item.reason, item.summary)
        self.result.counts += InputCounts.of_dropped(item)
        self._drops.append(item.to_json())

    def write(self, samples_of_rows: Mapping[str, list[list[EncodedSample]]]) -> None:
        """Append the samples of rows, given by split, to the shards and to the parts of index and prefixes."""
        for split, of_split in samples_of_rows.items():
            result = self.result.splits[split]
            embeds = self._embed and self._directory is not None
            # With their media, rows come in groups that fit into memory.
            for rows in embed_media(of_split, self._policies, self.drop) if embeds else (of_split,):
                samples = [sample for row in rows for sample in row]
                index = index_part(samples, result.shard, result.counts.rows, self._channel_codes)
                num_removed = [sample.num_truncated for sample in samples]  # tokens
                result.counts += SampleCounts(
                    rows=len(samples),
                    tokens=int(index["length"].sum()),
                    target_tokens=int(index["target_tokens"].sum()),
                    media_tokens=int(index["media_tokens"].sum()),
                    truncated=sum(num > 0 for num in num_removed),
                    truncated_tokens=sum(num_removed),
                    pieces_added=len(samples) - len(rows),
                )
                for length in index["length"].tolist():
                    result.lengths[length] = result.lengths.get(length, 0) + 1
                if self._directory is not None:
                    self._index[split].append(index)
                    hashes = prefix_hashes(samples, self._media_tokens, longer_than=MIN_SHARED)
                    self._prefixes[split].append(prefix_batch(*hashes))
                    self._writers[split].write(samples)

    def commit(self) -> TaskResult:
        """Publish the files, the marker last; raise a MismatchError if the directory's lock was lost."""
        self.result.channels = list(self._channel_codes)
        if self._directory is None:
            return self.result
        if self._is_locked is not None and not self._is_locked():
            raise lost_error(self._directory)
        directory, number = self._directory, self._task.number

        def publish(suffix: str, data: bytes) -> str:
            """Write one of the task's files, not durably; return its SHA-256."""
            storage.publish(task_file(directory, number, suffix), data, durable=False)
            return hashlib.sha256(data).hexdigest()

        for split, writer in self._writers.items():
            result = self.result.splits[split]
            result.sha256, state = writer.close()
            result.bytes, result.modified = state.size, state.modified
            parts = self._index[split]
            columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else None
            index = arrow_bytes([] if columns is None else [index_batch(columns)], INDEX, pa.ipc.new_stream)
            result.index_sha256 = publish(f"{split}.arrow", index)
            prefixes = pa.Table.from_batches(self._prefixes[split], PREFIXES).combine_chunks().to_batches()
            data = arrow_bytes(prefixes, PREFIXES, pa.ipc.new_stream)
            result.prefixes_sha256 = publish(f"{split}.prefixes.arrow", data)
        if self._drops:
            self.result.dropped_sha256 = publish("dropped.jsonl", "".join(self._drops).encode())
        publish("json", self.result.to_json())
        return self.result

    def discard(self) -> None:
        """Remove the unfinished shards."""
        for writer in self._writers.values():
            writer.discard()


Stretches = tuple[tuple[Source, RowBlocks], ...]

MIN_SHARD_ROWS = 256
"""Minimum rows of a shard, unless ``--rows-per-shard`` is given or there are fewer."""
_MAX_SHARD_ROWS, _NUM_SHARDS = 16384, 64  # shards have a 64th of all rows, within these limits


def make_tasks(scanned: Sequence[ScannedSource], config: ExportConfig) -> list[Task]:
    """Divide the rows of all sources into tasks, the same for any number of processes.

    ``--split-dataset-ratio`` of the rows of ``--dataset``, drawn at random from all, belong to the val split.
    """
    total = sum(source.num_rows for source in scanned)
    shard_rows = config.rows_per_shard or min(max(-(-total // _NUM_SHARDS), MIN_SHARD_ROWS), _MAX_SHARD_ROWS)
    num_train = sum(source.num_rows for source in scanned if source.spec.split == TRAIN_SPLIT)
    ratio = config.split_dataset_ratio
    num_val = max(round(num_train * ratio), 1) if ratio and num_train > 1 else 0
    val_rows = np.sort(np.random.default_rng(config.seed).choice(num_train, num_val, replace=False, shuffle=False))
    first = 0  # position of the task's first row among the rows of --dataset
    plans: list[tuple[Stretches, tuple[int, ...], list[str]]] = []  # stretches, val rows and splits of each task
    for split, sources in groupby(scanned, key=lambda scanned_source: scanned_source.spec.split):
        for stretches in _divide([(each.source, each.blocks) for each in sources], shard_rows):
            if split == VAL_SPLIT:
                plans.append((stretches, (), [VAL_SPLIT]))
                continue
            num_rows = sum(blocks.num_rows for _, blocks in stretches)
            low, high = np.searchsorted(val_rows, (first, first + num_rows))
            task_val_rows = tuple(int(row) for row in val_rows[low:high] - first)
            plans.append((stretches, task_val_rows, [TRAIN_SPLIT, VAL_SPLIT] if task_val_rows else [TRAIN_SPLIT]))
            first += num_rows
    num_shards = {split: sum(split in splits for *_, splits in plans) for split in (TRAIN_SPLIT, VAL_SPLIT)}
    next_shard = dict.fromkeys(num_shards, 0)
    tasks: list[Task] = []
    for number, (stretches, task_val_rows, splits) in enumerate(plans):
        shards = {}
        for split in splits:
            shard = next_shard[split]
            shards[split] = shard, f"data-{shard:05d}-of-{num_shards[split]:05d}.arrow"
            next_shard[split] += 1
        tasks.append(Task(number, stretches, task_val_rows, shards))
    return tasks


def _divide(sources: Sequence[tuple[Source, RowBlocks]], shard_rows: int) -> Iterator[Stretches]:
    """Divide the blocks of all sources, in order, into stretches of at least ``shard_rows`` rows; the last has fewer.

    A block is never divided. A stretch continues in the next source if the present one is too small.
    """
    stretches: list[tuple[Source, RowBlocks]] = []
    rows = 0
    for source, blocks in sources:
        if len(blocks) and rows + blocks.num_rows < shard_rows:  # fast path for thousands of small files
            stretches.append((source, blocks))
            rows += blocks.num_rows
            continue
        begin = 0
        for i, count in enumerate(blocks.rows_of_each.tolist()):
            rows += count
            if rows >= shard_rows:
                yield (*stretches, (source, blocks[begin : i + 1]))
                stretches, begin, rows = [], i + 1, 0
        if begin < len(blocks):
            stretches.append((source, blocks[begin:]))
    if stretches:
        yield tuple(stretches)


_REPORT_EVERY_S = 0.25
_CHECK_EVERY_S = 0.5
_MAX_ATTEMPTS = 3


class Executor(WorkerPool[tuple[Task, Work], TaskResult]):
    """Worker processes of this machine that run an export's tasks; a context manager that kills them at its end.

    Workers may start before there are tasks, because loading a tokenizer takes a second.

    Args:
        num_proc: number of processes; with 1, tasks run in this process.
        start_at_rows: number of announced rows at which the workers start.
    """

    def __init__(self, spec: EncodeSpec, num_proc: int, start_at_rows: int) -> None:
        super().__init__(num_proc, _run_tasks, spec)
        self._missing_rows = start_at_rows
        self._next_check = 0.0

    def expect(self, num_rows: int) -> None:
        """Announce rows: the workers start once enough rows are announced. Raises what prevents them from encoding."""
        self._missing_rows -= num_rows
        if self.has_started:
            # At intervals, because this is called for each of many thousand files.
            if (now := time.monotonic()) >= self._next_check:
                self._next_check = now + _CHECK_EVERY_S
                self.check_ready()
        elif self._missing_rows <= 0 and self.num_proc > 1:
            self.start(self.num_proc)

    def check_ready(self, wait_s: float | None = 0.0) -> None:
        """Raise the error of a worker that cannot encode; ``wait_s``: as in ``WorkerPool.check_ready``."""
        try:
            super().check_ready(wait_s)
        except WorkerDied:
            raise _worker_died_error("0") from None

    def run(
        self, tasks: Sequence[Task], work: Work, encoder: Callable[[], Encoder], report: Report
    ) -> Iterator[TaskResult]:
        """Run tasks and yield their results as they finish, in any order.

        Args:
            encoder: returns the encoder of this process, for tasks that run here.
            report: called while tasks run.

        Raises:
            PacktoolError: if a worker died. An error of a task passes through and stops the other tasks.
        """
        if self.num_proc == 1 or len(tasks) <= 1:
            for task in tasks:
                yield run_task(task, encoder(), work, report)
            return
        num_done = 0
        try:
            for result in self.map(((task, work) for task in tasks), in_order=False, report=report):
                num_done += 1
                yield result
        except WorkerDied:
            raise _worker_died_error(f"{num_done} of {len(tasks)}") from None


def _worker_died_error(num_done: str) -> PacktoolError:
    return PacktoolError(
        f"a worker process died after {num_done} shards (killed, or out of memory?)",
        "Run the same command again to resume after the finished shards. A smaller --dataset-num-proc needs less "
        "memory.",
    )


def _run_tasks(report: Callable[..., None], spec: EncodeSpec) -> Callable[[tuple[Task, Work]], TaskResult]:
    """Load the tokenizer, and return the function that runs a task in a worker process."""
    tokenize_in_one_thread()
    _block_pandas()
    encoder = Encoder(spec, ModelFiles.load(spec.model, spec.chat_template))
    gc.freeze()  # garbage collections skip the loaded files, which stay alive

    def run(job: tuple[Task, Work]) -> TaskResult:
        counts, reported_at = [0, 0, 0], time.monotonic()

        def add(rows: int, dropped: int, tokens: int) -> None:
            """Add to the counts that are not yet reported; report them four times a second."""
            nonlocal counts, reported_at
            counts = [count + more for count, more in zip(counts, (rows, dropped, tokens), strict=True)]
            if time.monotonic() - reported_at >= _REPORT_EVERY_S:
                report(*counts)
                counts, reported_at = [0, 0, 0], time.monotonic()

        task, work = job
        result = run_task(task, encoder, work, add)
        report(*counts)
        return result

    return run


def _block_pandas() -> None:
    """Keep pyarrow from importing pandas when it makes its first array, as if pandas were not installed.

    It would only check the type of the values. The import takes a quarter of the start-up time of a worker.
    """

    def find_spec(name: str, *_: object) -> None:
        if name == "pandas":
            raise ImportError("pandas is blocked")

    finder = SimpleNamespace(find_spec=find_spec)
    sys.meta_path.insert(0, finder)
    pa.array([])  # pyarrow tries the import once
    sys.meta_path.remove(finder)


class RayExecutor(Executor):
    """Actors of a Ray cluster that run an export's tasks, with one core each; no worker process starts here.

    A task whose actor or machine died runs again on another one, at most three times.

    Args:
        address: of a running cluster; None for ``RAY_ADDRESS``, or else a cluster on this machine for this run.
    """

    def __init__(self, spec: EncodeSpec, num_actors: int, address: str | None) -> None:
        super().__init__(spec, num_actors, sys.maxsize)
        self._address = address

    def run(
        self, tasks: Sequence[Task], work: Work, encoder: Callable[[], Encoder], report: Report
    ) -> Iterator[TaskResult]:
        """Run tasks and yield their results as they finish; ``report`` is called at the end of each."""
        try:
            import ray
        except ImportError as error:
            raise ConfigError("--executor ray: Ray is not installed", "pip install packtool[ray]") from error
        started = not ray.is_initialized()
        if started:
            _connect(ray, self._address, self.num_proc)
        try:
            yield from _run(ray, tasks, work, self.num_proc, report)
        finally:
            if started:
                ray.shutdown()


def _connect(ray: Any, address: str | None, num_actors: int) -> None:
    """Connect to a cluster, or start one on this machine; raise a ConfigError if that fails."""
    settings: dict[str, Any] = {"address": address} if address else {"num_cpus": num_actors, "include_dashboard": False}
    try:
        ray.init(log_to_driver=False, logging_level="error", **settings)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"--ray-address {address}: {error}", "Start the cluster, or check its address.") from error


def _run(ray: Any, tasks: Sequence[Task], work: Work, num_actors: int, report: Report) -> Iterator[TaskResult]:
    """Run tasks on actors of a connected cluster; replace actors that died and run their tasks again."""
    actor_class = ray.remote(num_cpus=1, max_restarts=0)(_Actor)
    waiting, attempts = list(reversed(tasks)), dict.fromkeys((task.number for task in tasks), 0)
    running: dict[Any, tuple[Any, Task]] = {}

    def assign(actor: Any) -> None:
        if waiting:
            task = waiting.pop()
            attempts[task.number] += 1
            running[actor.run.remote(task)] = actor, task

    for _ in range(min(num_actors, len(tasks))):
        assign(actor_class.remote(work))
    while running:
        (done, *_), _ = ray.wait(list(running), num_returns=1)
        actor, task = running.pop(done)
        try:
            result = ray.get(done)
        except ray.exceptions.RayActorError as error:
            if attempts[task.number] == _MAX_ATTEMPTS:
                raise PacktoolError(
                    f"the Ray actor of shard {task.number} died {_MAX_ATTEMPTS} times: {error}",
                    "Run the same command again on machines with more memory to resume after the finished shards.",
                ) from error
            waiting.append(task)
            assign(actor_class.remote(work))
            continue
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from None
        report(
            result.counts.rows,
            sum(result.counts.dropped.values()),
            sum(split.counts.tokens for split in result.splits.values()),
        )
        yield result
        assign(actor)


class _Actor:
    """A Ray actor with one encoder, which runs a task at a time."""

    def __init__(self, work: Work) -> None:
        tokenize_in_one_thread()
        self._work = work
        self._encoder = Encoder(work.spec, ModelFiles.load(work.spec.model, work.spec.chat_template))

    def run(self, task: Task) -> TaskResult:
        return run_task(task, self._encoder, self._work)
