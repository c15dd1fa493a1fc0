"""Executors of an export's tasks: worker processes of this machine, or actors of a Ray cluster."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from packtool.cache.task import Report, Task, TaskResult, TaskSettings, collect_rarely, run_task
from packtool.config.data import EncodeSpec
from packtool.encode.encoder import Encoder, worker_encoder
from packtool.errors import ConfigError, PacktoolError
from packtool.launch.worker import WorkerDied, WorkerPool

_CHECK_EVERY_S = 0.5
_MAX_ATTEMPTS = 3


class Executor(WorkerPool[Task, TaskResult]):
    """Worker processes of this machine that run an export's tasks; a context manager that kills them at its end.

    Workers may start before there are tasks, because loading a tokenizer takes a second. They get the settings of all
    tasks, which may hold the hashes of many questions, with their first task.

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
        """Run tasks and yield their results as they finish, in any order; to be called once.

        ``encoder`` returns the encoder of this process, for tasks that run here.
        """
        if self.num_proc == 1 or len(tasks) <= 1:
            for task in tasks:
                yield run_task(task, encoder(), settings, report)
            return
        num_done = 0
        self._settings = settings
        try:
            for result in self.map(tasks, in_order=False, report=report):
                num_done += 1
                yield result
        except WorkerDied:
            raise _worker_died_error(f"{num_done} of {len(tasks)}") from None

    def _message_of(self, job: Task, *, is_first: bool) -> tuple[Task, TaskSettings | None]:
        return job, self._settings if is_first else None


def _worker_died_error(num_done: str) -> PacktoolError:
    return PacktoolError(
        f"a worker process died after {num_done} shards (killed, or out of memory?)",
        "Run the same command again to resume after the finished shards. A smaller --dataset-num-proc needs less "
        "memory.",
    )


def _make_run_task(report: Report, spec: EncodeSpec) -> Callable[[tuple[Task, TaskSettings | None]], TaskResult]:
    """Load the tokenizer in a worker process, and return the function that runs a task there."""
    block_pandas()  # its import would only delay the start
    encoder = worker_encoder(spec)
    collect_rarely()
    settings: TaskSettings | None = None

    def run(job: tuple[Task, TaskSettings | None]) -> TaskResult:
        nonlocal settings
        task, new_settings = job
        if new_settings is not None:
            settings = new_settings
        assert settings is not None, "a worker's first task comes with the settings of all tasks"
        return run_task(task, encoder, settings, report)

    return run


def block_pandas() -> None:
    """Keep pyarrow from importing pandas when it makes its first array, a quarter of the start-up time.

    For processes of the command line only: afterwards pyarrow treats a pandas series as any other sequence.
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
    new_actor = partial(ray.remote(num_cpus=1, max_restarts=0)(_Actor).remote, settings)
    waiting = list(reversed(tasks))  # a stack: the next task is the last element
    num_deaths = Counter[int]()  # of actors, by task number
    running: dict[Any, tuple[Any, Task]] = {}  # actor and task, by Ray's reference to the future result

    def start_next(actor: Any) -> None:
        """Start the next task, if any, on an actor that is idle."""
        if waiting:
            task = waiting.pop()
            running[actor.run.remote(task)] = actor, task

    for _ in range(min(num_actors, len(tasks))):
        start_next(new_actor())
    while running:
        finished, _ = ray.wait(list(running), num_returns=1)
        actor, task = running.pop(finished[0])
        result = _result_of(ray, finished[0])
        if isinstance(result, TaskResult):
            _report_all_rows(result, report)
            yield result
        else:  # the actor or its machine died
            num_deaths[task.number] += 1
            if num_deaths[task.number] == _MAX_ATTEMPTS:
                raise _actor_died_error(task, result) from result
            waiting.append(task)  # runs next, on a new actor
            actor = new_actor()
        start_next(actor)


def _report_all_rows(result: TaskResult, report: Report) -> None:
    num_tokens = sum(split.counts.tokens for split in result.splits.values())
    report(result.counts.rows, sum(result.counts.dropped.values()), num_tokens)


def _result_of(ray: Any, reference: Any) -> Any:
    """Return the result of a task that has ended, or the error of an actor that died; raise the task's exception."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayActorError as error:
        return error
    except ray.exceptions.RayTaskError as error:  # without a cause if Ray could not send that
        raise error.cause if isinstance(error.cause, Exception) else error from None


def _actor_died_error(task: Task, error: Exception) -> PacktoolError:
    return PacktoolError(
        f"the Ray actor of shard {task.number} died {_MAX_ATTEMPTS} times: {error}",
        "Run the same command again on machines with more memory to resume after the finished shards.",
    )


class _Actor:
    """A Ray actor with one encoder, which runs a task at a time."""

    def __init__(self, settings: TaskSettings) -> None:
        self._settings, self._encoder = settings, worker_encoder(settings.spec)

    def run(self, task: Task) -> TaskResult:
        return run_task(task, self._encoder, self._settings)
