"""Tasks of an export, and their executors: each task encodes a stretch of rows into one shard of each split.

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
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, groupby, islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packtool import storage
from packtool.cache.index import prefix_batch
from packtool.cache.lock import lost_error
from packtool.cache.manifest import InputCounts, SampleCounts
from packtool.cache.shard import (
    INDEX,
    PREFIXES,
    IndexColumns,
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
    def shard_files(self) -> set[str]:
        """Paths of the task's shards below the cache's directory."""
        return {f"{split}/{file}" for split, (_, file) in self.shards.items()}

    @property
    def num_rows(self) -> int:
        return sum(blocks.num_rows for _, blocks in self.stretches)


@dataclass(frozen=True)
class TaskSettings:
    """Settings that all tasks of an export share.

    Args:
        directory: of the cache; None to count samples and write nothing.
        strict: raise an error at the first unusable row.
        has_parts: rows may become several samples.
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


def run_task(task: Task, encoder: Encoder, settings: TaskSettings, report: Report = lambda *_: None) -> TaskResult:
    """Encode a task's rows; write its shards, its parts of index, prefixes and drops, and at the end its marker."""
    embeds = encoder.spec.media == "embed"
    outputs = _Outputs(task, settings, encoder.media_tokens, embed=embeds)
    val_rows = frozenset(task.val_rows)
    row_number = 0  # in the task
    # Secrets in URLs of media are harmless only if the media are embedded: the cache then has masked URLs.
    rows = chain.from_iterable(samples_of(source, blocks, may_hold_secrets=embeds) for source, blocks in task.stretches)
    try:
        while batch := tuple(islice(rows, BATCH_ROWS)):
            rows_of_split: dict[str, list[list[EncodedSample]]] = {split: [] for split in task.shards}
            num_dropped_before = outputs.num_dropped
            num_tokens = 0
            for result in encode_samples(batch, encoder):  # one for each row: its samples, or why it was dropped
                is_val = row_number in val_rows or TRAIN_SPLIT not in task.shards
                row_number += 1
                if isinstance(result, Dropped):
                    outputs.drop(result)
                    continue
                rows_of_split[VAL_SPLIT if is_val else TRAIN_SPLIT].append(result)
                num_tokens += sum(sample.length for sample in result)
                for dropped_part in left_out_of(result):
                    outputs.drop(dropped_part)
            num_marked = sum(isinstance(row, Sample) and row.num_marks_added > 0 for row in batch)
            outputs.result.counts += InputCounts(rows=len(batch), dropped={}, marks_added=num_marked)
            outputs.write(rows_of_split)
            report(len(batch), outputs.num_dropped - num_dropped_before, num_tokens)
        return outputs.commit()
    except BaseException:
        outputs.discard()
        raise


class _Outputs:
    """The files of one task and their counts, which ``commit`` publishes; only counts if there is no directory."""

    def __init__(self, task: Task, settings: TaskSettings, media_tokens: MediaTokens, embed: bool) -> None:
        self.result = TaskResult(task.number, settings.export)
        self._embed, self._strict, self._media_tokens = embed, settings.strict, media_tokens
        self._task, self._directory, self._is_locked = task, settings.directory, settings.is_locked
        self._drops: list[str] = []
        self._channel_codes: dict[str, int] = {}
        self._policies = {source.label: source.media_policy for source, _ in task.stretches} if embed else {}
        self._index: dict[str, list[IndexColumns]] = {name: [] for name in task.shards}
        self._prefixes: dict[str, list[pa.RecordBatch]] = {name: [] for name in task.shards}
        self._writers: dict[str, ShardWriter] = {}
        for split, (shard, name) in task.shards.items():
            self.result.splits[split] = SplitResult(shard=shard, file=name)
            if settings.directory is not None:
                self._writers[split] = ShardWriter(storage.join(settings.directory, split, name), settings.has_parts)

    @property
    def num_dropped(self) -> int:
        return sum(self.result.counts.dropped.values())

    def drop(self, item: Dropped) -> None:
        """Record a dropped row, or a dropped turn or response of a kept row; raise a RowError in strict mode."""
        if self._strict:
            raise item.as_error()
        if item.part is None:
            self.result.first_dropped.setdefault(item.reason, item.summary)
        self.result.counts += InputCounts.of_dropped(item)
        self._drops.append(item.to_json())

    def write(self, rows_of_split: Mapping[str, list[list[EncodedSample]]]) -> None:
        """Append the samples of each row, by split, to the shards and the task's parts of index and prefixes."""
        for split, all_rows in rows_of_split.items():
            result = self.result.splits[split]
            groups: Iterable[list[list[EncodedSample]]] = [all_rows]  # without embedded media, one group of all rows
            if self._embed and self._directory is not None:
                groups = embed_media(all_rows, self._policies, self.drop)  # groups that fit into memory
            for rows in groups:
                samples = [sample for row in rows for sample in row]
                index = index_columns(samples, result.shard, result.counts.rows, self._channel_codes)
                truncated_tokens = [sample.num_truncated for sample in samples]
                result.counts += SampleCounts(
                    rows=len(samples),
                    tokens=int(index["length"].sum()),
                    target_tokens=int(index["target_tokens"].sum()),
                    media_tokens=int(index["media_tokens"].sum()),
                    truncated=sum(num_tokens > 0 for num_tokens in truncated_tokens),
                    truncated_tokens=sum(truncated_tokens),
                    pieces_added=len(samples) - len(rows),
                )
                for length in index["length"].tolist():
                    result.lengths[length] = result.lengths.get(length, 0) + 1
                if self._directory is not None:
                    self._index[split].append(index)
                    num_prefixes, prefixes = prefix_hashes(samples, self._media_tokens, longer_than=MIN_SHARED)
                    self._prefixes[split].append(prefix_batch(num_prefixes, prefixes))
                    self._writers[split].write(samples)

    def commit(self) -> TaskResult:
        """Publish the files, and last the marker, by which the task counts as finished; return the complete result.

        Raises a MismatchError if the directory's lock was lost.
        """
        directory = self._directory
        self.result.channels = list(self._channel_codes)
        if directory is None:
            return self.result
        if self._is_locked is not None and not self._is_locked():
            raise lost_error(directory)

        def publish(suffix: str, data: bytes) -> str:
            """Write one of the task's files, not durably; return its SHA-256."""
            storage.publish(task_file(directory, self._task.number, suffix), data, durable=False)
            return hashlib.sha256(data).hexdigest()

        for split, writer in self._writers.items():
            result = self.result.splits[split]
            result.sha256, state = writer.close()
            result.bytes = state.size
            result.modified = state.modified
            index_batches = []  # one for all batches of samples; none without samples
            if parts := self._index[split]:
                columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
                index_batches = [index_batch(columns)]
            data = arrow_bytes(index_batches, INDEX, pa.ipc.new_stream)
            result.index_sha256 = publish(f"{split}.arrow", data)
            prefix_batches = pa.Table.from_batches(self._prefixes[split], PREFIXES).combine_chunks().to_batches()
            data = arrow_bytes(prefix_batches, PREFIXES, pa.ipc.new_stream)
            result.prefixes_sha256 = publish(f"{split}.prefixes.arrow", data)
        if self._drops:
            self.result.dropped_sha256 = publish("dropped.jsonl", "".join(self._drops).encode())
        publish("json", self.result.to_json())
        return self.result

    def discard(self) -> None:
        for writer in self._writers.values():
            writer.discard()


Stretches = tuple[tuple[Source, RowBlocks], ...]
"""Rows of a task: some blocks of one source, or of several small ones."""

MIN_SHARD_ROWS = 256
"""Minimum rows of a shard, unless ``--rows-per-shard`` is given or there are fewer."""
_MAX_SHARD_ROWS, _NUM_SHARDS = 16384, 64  # shards have a 64th of all rows, within these limits


def make_tasks(scanned: Sequence[ScannedSource], config: ExportConfig) -> list[Task]:
    """Divide the rows of all sources into tasks, the same for any number of processes.

    ``--split-dataset-ratio`` of the rows of ``--dataset``, drawn at random from all, belong to the val split.
    """
    num_rows = sum(source.num_rows for source in scanned)
    even_rows = math.ceil(num_rows / _NUM_SHARDS)
    shard_rows = config.rows_per_shard or min(max(even_rows, MIN_SHARD_ROWS), _MAX_SHARD_ROWS)
    num_dataset_rows = sum(source.num_rows for source in scanned if source.spec.split == TRAIN_SPLIT)
    val_rows = _draw_val_rows(num_dataset_rows, config.split_dataset_ratio, config.seed)
    # First divide the rows: stretches, positions of val rows within the task, and splits of each task.
    divided: list[tuple[Stretches, tuple[int, ...], list[str]]] = []
    first_row = 0  # position of the task's first row among the rows of --dataset
    for split, sources in groupby(scanned, key=lambda scanned_source: scanned_source.spec.split):
        blocks_of_sources = [(scanned_source.source, scanned_source.blocks) for scanned_source in sources]
        for stretches in _divide(blocks_of_sources, shard_rows):
            if split == VAL_SPLIT:  # rows of --val-dataset
                divided.append((stretches, (), [VAL_SPLIT]))
                continue
            end_row = first_row + sum(blocks.num_rows for _, blocks in stretches)
            low, high = np.searchsorted(val_rows, (first_row, end_row))  # val_rows[low:high] are rows of this task
            positions = tuple((val_rows[low:high] - first_row).tolist())
            divided.append((stretches, positions, [TRAIN_SPLIT, VAL_SPLIT] if positions else [TRAIN_SPLIT]))
            first_row = end_row
    # Then name the shards, which are numbered within their split. Names contain the number of shards.
    num_shards = Counter(split for *_, splits in divided for split in splits)
    next_shard = dict.fromkeys(num_shards, 0)
    tasks: list[Task] = []
    for number, (stretches, positions, splits) in enumerate(divided):
        shards = {}
        for split in splits:
            shard = next_shard[split]
            shards[split] = shard, f"data-{shard:05d}-of-{num_shards[split]:05d}.arrow"
            next_shard[split] += 1
        tasks.append(Task(number, stretches, val_rows=positions, shards=shards))
    return tasks


def _draw_val_rows(num_rows: int, ratio: float, seed: int) -> npt.NDArray[np.int64]:
    """Draw the rows of the val split, ascending; at least one if ``ratio`` is not 0 and two rows exist."""
    num_val = max(round(num_rows * ratio), 1) if ratio and num_rows > 1 else 0
    return np.sort(np.random.default_rng(seed).choice(num_rows, num_val, replace=False, shuffle=False))


def _divide(sources: Sequence[tuple[Source, RowBlocks]], shard_rows: int) -> Iterator[Stretches]:
    """Divide the blocks of all sources, in order, into tasks of at least ``shard_rows`` rows; the last may have fewer.

    A block is never divided. A task continues in the next source if the present one is too small.
    """
    stretches: list[tuple[Source, RowBlocks]] = []  # of the present task, up to the previous source
    num_rows = 0  # of the present task
    for source, blocks in sources:
        if len(blocks) and num_rows + blocks.num_rows < shard_rows:  # fast path for thousands of small files
            stretches.append((source, blocks))
            num_rows += blocks.num_rows
            continue
        first_block = 0  # of this source in the present task
        for i, num_block_rows in enumerate(blocks.rows_of_each.tolist()):
            num_rows += num_block_rows
            if num_rows >= shard_rows:
                yield (*stretches, (source, blocks[first_block : i + 1]))
                stretches, num_rows = [], 0
                first_block = i + 1
        if first_block < len(blocks):
            stretches.append((source, blocks[first_block:]))
    if stretches:
        yield tuple(stretches)


_REPORT_EVERY_S = 0.25
_CHECK_EVERY_S = 0.5
_MAX_ATTEMPTS = 3


class Executor(WorkerPool[tuple[Task, TaskSettings], TaskResult]):
    """Worker processes of this machine that run an export's tasks; a context manager that kills them at its end.

    Workers may start before there are tasks, because loading a tokenizer takes a second.

    Args:
        num_proc: number of processes; with 1, tasks run in this process.
        start_at_rows: number of announced rows at which the workers start.
    """

    def __init__(self, spec: EncodeSpec, num_proc: int, start_at_rows: int) -> None:
        super().__init__(num_proc, _make_run_task, spec)
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
        self, tasks: Sequence[Task], settings: TaskSettings, encoder: Callable[[], Encoder], report: Report
    ) -> Iterator[TaskResult]:
        """Run tasks and yield their results as they finish, in any order.

        Args:
            encoder: returns the encoder of this process, for tasks that run here.

        Raises:
            PacktoolError: if a worker died. An error of a task passes through and stops the other tasks.
        """
        if self.num_proc == 1 or len(tasks) <= 1:
            for task in tasks:
                yield run_task(task, encoder(), settings, report)
            return
        num_done = 0
        jobs = ((task, settings) for task in tasks)
        try:
            for result in self.map(jobs, in_order=False, report=report):
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


def _make_run_task(report: Report, spec: EncodeSpec) -> Callable[[tuple[Task, TaskSettings]], TaskResult]:
    """Load the tokenizer in a worker process, and return the function that runs a task there.

    ``report`` sends numbers of rows, drops and tokens to the main process.
    """
    tokenize_in_one_thread()
    block_pandas()
    encoder = Encoder(spec, ModelFiles.load(spec.model, spec.chat_template, spec.chat_template_kwargs))
    gc.freeze()  # garbage collections skip the loaded files, which stay alive

    def run(job: tuple[Task, TaskSettings]) -> TaskResult:
        unreported = np.zeros(3, np.int64)  # rows, drops and tokens since the last report
        reported_at = time.monotonic()

        def report_sometimes(*counts: int) -> None:
            """Add the counts to ``unreported``, and report these at most four times a second."""
            nonlocal reported_at
            unreported[:] += counts
            if time.monotonic() - reported_at >= _REPORT_EVERY_S:
                report(*unreported.tolist())
                unreported[:] = 0
                reported_at = time.monotonic()

        task, settings = job
        result = run_task(task, encoder, settings, report_sometimes)
        report(*unreported.tolist())
        return result

    return run


def block_pandas() -> None:
    """Keep pyarrow from importing pandas when it makes its first array, as if pandas were not installed.

    It would only check the type of the values. The import takes a quarter of the start-up time. For processes of the
    command line only: afterwards pyarrow treats a pandas series as any other sequence.
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
        self, tasks: Sequence[Task], settings: TaskSettings, encoder: Callable[[], Encoder], report: Report
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
            yield from _run_on_actors(ray, tasks, settings, self.num_proc, report)
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


def _run_on_actors(
    ray: Any, tasks: Sequence[Task], settings: TaskSettings, num_actors: int, report: Report
) -> Iterator[TaskResult]:
    """Run tasks on actors of a connected cluster; replace actors that died and run their tasks again."""
    actor_class = ray.remote(num_cpus=1, max_restarts=0)(_Actor)
    waiting = list(reversed(tasks))  # a stack: the next task is the last element
    num_attempts = Counter[int]()  # by task number
    running: dict[Any, tuple[Any, Task]] = {}  # actor and task, by Ray's reference to the future result

    def start_next(actor: Any) -> None:
        """Start the next task, if any, on an actor that is idle."""
        if waiting:
            task = waiting.pop()
            num_attempts[task.number] += 1
            running[actor.run.remote(task)] = actor, task

    for _ in range(min(num_actors, len(tasks))):
        start_next(actor_class.remote(settings))
    while running:
        (reference,), _ = ray.wait(list(running), num_returns=1)
        actor, task = running.pop(reference)
        try:
            result = ray.get(reference)
        except ray.exceptions.RayActorError as error:  # the actor or its machine died
            if num_attempts[task.number] == _MAX_ATTEMPTS:
                raise PacktoolError(
                    f"the Ray actor of shard {task.number} died {_MAX_ATTEMPTS} times: {error}",
                    "Run the same command again on machines with more memory to resume after the finished shards.",
                ) from error
            waiting.append(task)  # runs next, on a new actor
            start_next(actor_class.remote(settings))
            continue
        except ray.exceptions.RayTaskError as error:
            # The exception that the task raised, if Ray could send it.
            raise error.cause if isinstance(error.cause, Exception) else error from None
        num_tokens = sum(split.counts.tokens for split in result.splits.values())
        report(result.counts.rows, sum(result.counts.dropped.values()), num_tokens)
        yield result
        start_next(actor)


class _Actor:
    """A Ray actor with one encoder, which runs a task at a time."""

    def __init__(self, settings: TaskSettings) -> None:
        tokenize_in_one_thread()
        self._settings = settings
        spec = settings.spec
        self._encoder = Encoder(spec, ModelFiles.load(spec.model, spec.chat_template, spec.chat_template_kwargs))

    def run(self, task: Task) -> TaskResult:
        return run_task(task, self._encoder, self._settings)
