"""Tasks on worker processes of this machine.

Workers speak with this process through one pipe each: see ``launch.worker``.

Tasks on a Ray cluster: the same tasks, the same bytes, wherever they run.

Every actor holds one encoder, so that a tokenizer is loaded once. A task is idempotent, so one whose actor or machine
died is given to another.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from types import SimpleNamespace
from typing import Any, Self

import pyarrow as pa

from packtool.cache.task import Report, Task, TaskResult, Work, run_task
from packtool.config.data import EncodeSpec
from packtool.encode.encoder import Encoder
from packtool.encode.model_files import ModelFiles
from packtool.errors import ConfigError, PacktoolError
from packtool.launch.worker import PipeWorker, begin_worker, end_with_parent, portable, tokenize_in_one_thread

_TOLD_EVERY_S = 0.25
_GLANCE_S = 0.5


def run_tasks(
    tasks: Sequence[Task], work: Work, encoder: Callable[[], Encoder], workers: Workers, report: Report
) -> Iterator[TaskResult]:
    """Run tasks and give their results as they finish, in any order.

    Args:
        encoder: makes one for this process, if the tasks run here.
        workers: of which as many are taken as there is work for; they have ended afterwards.
        report: told of rows, drops and tokens while tasks run.

    Raises:
        PacktoolError: whatever a task raised; the others are stopped. Or a worker died.
    """
    if workers.num_proc == 1 or len(tasks) <= 1:
        if tasks:
            here = encoder()
            for task in tasks:
                yield run_task(task, here, work, report)
        return
    waiting = list(reversed(tasks))
    busy: dict[Connection, _Worker] = {}
    try:
        for worker in workers.take(len(tasks)):
            busy[worker.pipe] = worker
            worker.give(work)
            worker.give(waiting.pop())
        num_done = 0
        while busy:
            # Looked up now and then: a signal that another thread receives does not wake this one.
            for pipe in multiprocessing.connection.wait(list(busy), timeout=_GLANCE_S):
                assert isinstance(pipe, Connection)
                told = busy[pipe].hear(f"{num_done} of {len(tasks)}")
                if isinstance(told, TaskResult):
                    num_done += 1
                    # The next task first: whoever takes the result may take his time.
                    if waiting:
                        busy[pipe].give(waiting.pop())
                    else:
                        busy.pop(pipe).kill()  # at once: it holds nothing, and clearing up would take it a while
                    yield told
                elif told is not None:
                    report(*told)
    finally:
        for worker in busy.values():
            worker.kill()


class Workers:
    """The processes of an export. Loading a tokenizer takes them a second, so they may begin before there are tasks.

    Args:
        spec: of all tasks.
        num_proc: how many processes; one works in this process.
        enough: expected rows with which they begin.
    """

    def __init__(self, spec: EncodeSpec, num_proc: int, enough: int) -> None:
        self._spec, self.num_proc, self._missing = spec, num_proc, enough
        self._idle: list[_Worker] = []
        self._can_encode = False
        self._next_glance = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._idle:
            self._idle.pop().kill()

    def begin(self) -> None:
        """Start all of them, because there will be work for all."""
        if self.num_proc > 1:
            self._start(self.num_proc)

    @property
    def have_begun(self) -> bool:
        """Whether they make their encoders, or have them."""
        return bool(self._idle)

    def expect(self, num_rows: int) -> None:
        """Begin if there are rows enough for several workers with so many more.

        Raises:
            ConfigError: if workers that have begun found out that the model cannot be encoded for.
            PacktoolError: if one died.
        """
        self._missing -= num_rows
        if self.have_begun:
            # Asked for each of many thousand files.
            if (now := time.monotonic()) >= self._next_glance:
                self._next_glance = now + _GLANCE_S
                self._hear_first(0.0)
        elif self._missing <= 0:
            self.begin()

    def wait(self) -> None:
        """Wait until workers that have begun can encode.

        Raises:
            ConfigError, PacktoolError: as ``expect``.
        """
        while self.have_begun and not self._can_encode:
            self._hear_first(_GLANCE_S)

    def _hear_first(self, wait_s: float) -> None:
        if not self._can_encode and self._idle[0].pipe.poll(wait_s):
            self._idle[0].hear("0")
            self._can_encode = True

    def take(self, most: int) -> Iterator[_Worker]:
        """Take up to ``most`` workers, started if they are not; they are the caller's to end."""
        most = min(most, self.num_proc)
        self._start(most)
        for _ in range(most):
            yield self._idle.pop()

    def _start(self, num: int) -> None:
        # Forked workers would inherit locks that the tokenizer's or Arrow's threads may hold.
        context = multiprocessing.get_context("spawn")
        while len(self._idle) < num:
            self._idle.append(_Worker(context, self._spec))


class _Worker(PipeWorker):
    """A process that runs one task after the other; what it was writing when it ended has no marker."""

    def __init__(self, context: SpawnContext, spec: EncodeSpec) -> None:
        super().__init__(context, _work, spec)

    def give(self, item: Work | Task) -> None:
        """First what all its tasks share, then a task at a time."""
        with suppress(OSError):  # it died, which is heard next
            self.pipe.send(item)

    def hear(self, done: str) -> TaskResult | tuple[int, int, int] | None:
        """What it says: a task is done, rows, drops and tokens of one under way, or None at first: it can encode.

        Args:
            done: shards, for the message.

        Raises:
            PacktoolError: that it met, or that it died.
        """
        try:
            told: TaskResult | tuple[int, int, int] | BaseException | None = self.pipe.recv()
        except (EOFError, OSError):
            raise PacktoolError(
                f"a worker process died after {done} shards (killed, or out of memory?)",
                "Run the same command again to go on after the finished shards; fewer --dataset-num-proc need less "
                "memory.",
            ) from None
        if isinstance(told, BaseException):
            raise told
        return told


def _work(spec: EncodeSpec, pipe: Connection) -> None:
    """Encode tasks as they come, until it is killed: the main function of a worker process."""
    begin_worker()
    threading.Thread(target=end_with_parent, daemon=True).start()
    tokenize_in_one_thread()
    _leave_pandas_out()
    teller = _Teller(pipe)
    try:
        encoder = Encoder(spec, ModelFiles.load(spec.model, spec.chat_template))
        gc.freeze()  # what was loaded stays: it need not be looked through for garbage again and again
        pipe.send(None)
        work = pipe.recv()
        while True:
            result = run_task(pipe.recv(), encoder, work, teller)
            teller.tell()
            pipe.send(result)
    except Exception as error:
        with suppress(OSError):  # nobody listens any more
            pipe.send(portable(error))


def _leave_pandas_out() -> None:
    """Let pyarrow find no pandas in this process, as where none is installed.

    With the first array that it makes it imports pandas, only to ask whether it was given one of its kinds: a quarter
    of the time that a worker needs to begin.
    """
    finder = SimpleNamespace(find_spec=_no_pandas)
    sys.meta_path.insert(0, finder)
    pa.array([])  # looks for it, this once
    sys.meta_path.remove(finder)


def _no_pandas(name: str, *_: object) -> None:
    if name == "pandas":
        raise ImportError(f"{name} is not looked for")


class _Teller:
    """Hands counts on, a few times a second."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._counts = [0, 0, 0]
        self._told = time.monotonic()

    def __call__(self, rows: int, dropped: int, tokens: int) -> None:
        self._counts = [count + more for count, more in zip(self._counts, (rows, dropped, tokens), strict=True)]
        if time.monotonic() - self._told >= _TOLD_EVERY_S:
            self.tell()

    def tell(self) -> None:
        """Send the counts that were not sent yet."""
        self._pipe.send(tuple(self._counts))
        self._counts, self._told = [0, 0, 0], time.monotonic()


_MOST_TRIES = 3


def run_tasks_on_ray(
    tasks: Sequence[Task], work: Work, num_actors: int, address: str | None, report: Report
) -> Iterator[TaskResult]:
    """Run tasks on actors and give their results as they finish, in any order.

    Args:
        num_actors: one core each.
        address: of a running cluster; None for ``RAY_ADDRESS``, or a Ray started on this machine for this run.
        report: told of each finished task.

    Raises:
        ConfigError: if Ray is not installed or the cluster is not there.
        PacktoolError: whatever a task raised; or a task's actor died three times.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError("--executor ray: Ray is not installed", "pip install packtool[ray]") from error
    started = not ray.is_initialized()
    if started:
        _connect(ray, address, num_actors)
    try:
        yield from _run(ray, tasks, work, num_actors, report)
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
    waiting, tries = list(reversed(tasks)), dict.fromkeys((task.number for task in tasks), 0)
    running: dict[Any, tuple[Any, Task]] = {}

    def give(actor: Any) -> None:
        if waiting:
            task = waiting.pop()
            tries[task.number] += 1
            running[actor.run.remote(task)] = actor, task

    for _ in range(min(num_actors, len(tasks))):
        give(actor_class.remote(work))
    while running:
        (done, *_), _ = ray.wait(list(running), num_returns=1)
        actor, task = running.pop(done)
        try:
            result = ray.get(done)
        except ray.exceptions.RayActorError as error:
            if tries[task.number] == _MOST_TRIES:
                raise PacktoolError(
                    f"the Ray actor of shard {task.number} died {_MOST_TRIES} times: {error}",
                    "Run the same command again to go on after the finished shards, on machines with more memory.",
                ) from error
            waiting.append(task)
            give(actor_class.remote(work))
            continue
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from None
        report(result.rows, sum(result.dropped.values()), sum(split.tokens for split in result.splits.values()))
        yield result
        give(actor)


class _Actor:
    """One process of the cluster."""

    def __init__(self, work: Work) -> None:
        tokenize_in_one_thread()
        self._work = work
        self._encoder = Encoder(work.spec, ModelFiles.load(work.spec.model, work.spec.chat_template))

    def run(self, task: Task) -> TaskResult:
        return run_task(task, self._encoder, self._work)
