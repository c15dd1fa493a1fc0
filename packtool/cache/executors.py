"""Executors of an export's tasks: worker processes of this machine, or actors of a Ray cluster.

Both write the same bytes. Each worker process and each actor has one encoder.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Self

import pyarrow as pa

from packtool.cache.task import Report, Task, TaskResult, Work, run_task
from packtool.config.data import EncodeSpec
from packtool.encode.encoder import Encoder
from packtool.encode.model_files import ModelFiles
from packtool.errors import ConfigError, PacktoolError
from packtool.launch.worker import WorkerDied, WorkerPool, tokenize_in_one_thread

_REPORT_EVERY_S = 0.25
_CHECK_EVERY_S = 0.5
_MAX_ATTEMPTS = 3


class Executor:
    """Runs an export's tasks on worker processes of this machine; a context manager that kills them at its end.

    Workers may start before there are tasks, because loading a tokenizer takes a second.

    Args:
        spec: of all tasks.
        num_proc: number of processes; one works in this process.
        start_at_rows: expected rows at which workers start.
    """

    def __init__(self, spec: EncodeSpec, num_proc: int, start_at_rows: int) -> None:
        self._pool = WorkerPool[tuple[Task, Work], TaskResult](num_proc, _run_tasks, spec)
        self._missing_rows = start_at_rows
        self._next_check = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.__exit__()

    @property
    def has_started(self) -> bool:
        """True if worker processes were started; these refuse unsupported models themselves."""
        return self._pool.has_started

    def start(self) -> None:
        """Start all workers."""
        if self._pool.num_proc > 1:
            self._pool.start(self._pool.num_proc)

    def expect(self, num_rows: int) -> None:
        """Announce rows, so that workers may start before there are tasks."""
        self._missing_rows -= num_rows
        if self.has_started:
            # Called for each of many thousand files.
            if (now := time.monotonic()) >= self._next_check:
                self._next_check = now + _CHECK_EVERY_S
                self._check_ready(0.0)
        elif self._missing_rows <= 0:
            self.start()

    def wait(self) -> None:
        """Wait until started workers can encode."""
        self._check_ready(None)

    def _check_ready(self, wait_s: float | None) -> None:
        try:
            self._pool.check_ready(wait_s)
        except WorkerDied:
            raise _death("0") from None

    def run(
        self, tasks: Sequence[Task], work: Work, encoder: Callable[[], Encoder], report: Report
    ) -> Iterator[TaskResult]:
        """Run tasks and yield their results as they finish, in any order.

        Args:
            encoder: makes one for this process, if the tasks run here.
            report: called with rows, drops and tokens while tasks run.

        Raises:
            PacktoolError: if a worker died; the errors of tasks pass through, and the other tasks are stopped.
        """
        if self._pool.num_proc == 1 or len(tasks) <= 1:
            for task in tasks:
                yield run_task(task, encoder(), work, report)
            return
        num_done = 0
        try:
            for result in self._pool.map(((task, work) for task in tasks), in_order=False, report=report):
                num_done += 1
                yield result
        except WorkerDied:
            raise _death(f"{num_done} of {len(tasks)}") from None


def _death(num_done: str) -> PacktoolError:
    return PacktoolError(
        f"a worker process died after {num_done} shards (killed, or out of memory?)",
        "Run the same command again to go on after the finished shards; fewer --dataset-num-proc need less memory.",
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
    """Keep pyarrow from importing pandas in this process, as if it were not installed.

    pyarrow imports it with the first array, only to check the type of the values. That takes a quarter of the start-up
    time of a worker.
    """

    def find_spec(name: str, *_: object) -> None:
        if name == "pandas":
            raise ImportError(f"{name} is not looked for")

    finder = SimpleNamespace(find_spec=find_spec)
    sys.meta_path.insert(0, finder)
    pa.array([])  # tries the import once
    sys.meta_path.remove(finder)


class RayExecutor(Executor):
    """Runs tasks on actors of a Ray cluster, one core each; no worker process starts here.

    Tasks are idempotent, so that a task whose actor or machine died runs again on another.

    Args:
        spec, num_actors: as of ``Executor``.
        address: of a running cluster; None for ``RAY_ADDRESS``, or a Ray started on this machine for this run.
    """

    def __init__(self, spec: EncodeSpec, num_actors: int, address: str | None) -> None:
        super().__init__(spec, num_actors, sys.maxsize)
        self._address = address

    def run(
        self, tasks: Sequence[Task], work: Work, encoder: Callable[[], Encoder], report: Report
    ) -> Iterator[TaskResult]:
        """Run tasks, and report each at its end.

        Raises:
            ConfigError: if Ray is not installed or the cluster is not there.
        """
        try:
            import ray
        except ImportError as error:
            raise ConfigError("--executor ray: Ray is not installed", "pip install packtool[ray]") from error
        started = not ray.is_initialized()
        if started:
            _connect(ray, self._address, self._pool.num_proc)
        try:
            yield from _run(ray, tasks, work, self._pool.num_proc, report)
        finally:
            if started:
                ray.shutdown()


def _connect(ray: Any, address: str | None, num_actors: int) -> None:
    settings: dict[str, Any] = {"address": address} if address else {"num_cpus": num_actors, "include_dashboard": False}
    try:
        ray.init(log_to_driver=False, logging_level="error", **settings)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"--ray-address {address}: {error}", "Start the cluster, or check its address.") from error


def _run(ray: Any, tasks: Sequence[Task], work: Work, num_actors: int, report: Report) -> Iterator[TaskResult]:
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
                    "Run the same command again to go on after the finished shards, on machines with more memory.",
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
    """A process of the cluster."""

    def __init__(self, work: Work) -> None:
        tokenize_in_one_thread()
        self._work = work
        self._encoder = Encoder(work.spec, ModelFiles.load(work.spec.model, work.spec.chat_template))

    def run(self, task: Task) -> TaskResult:
        return run_task(task, self._encoder, self._work)
