"""Worker processes: signal handling, and the pool that runs the jobs of exports, streams and packing.

Signals that go to all processes of a job are handled by the parent. Each worker has a pipe. The queues and process
pools of the standard library are not used, because their named semaphores stay in ``/dev/shm`` when the processes are
killed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from types import ModuleType
from typing import Any, Generic, Self, TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")
Report = Callable[..., None]
Message = tuple[str, Any]  # kind ("ready", "progress", "result" or "error") and content

_POLL_S = 0.5


@contextlib.contextmanager
def _worker_start() -> Iterator[None]:
    """Block signals and hide the main module while a worker starts, which inherits them until ``begin_worker``.

    The worker would import the main module, which is the command line or the user's script.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_worker(number: int = 0) -> None:
    """Ignore signals that go to all processes of a job, except SIGTERM from the parent.

    Called in each worker, by DataLoader with its number. Without its workers, the parent could not save a checkpoint.
    """
    for ignored in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(ignored, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if hasattr(signal, "sigwaitinfo") and parent is not None:  # macOS lacks the first
        # A handler would not know the sender, and would not run while a picture is decoded.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Thread(target=_end_at_sigterm, args=(parent.pid,), daemon=True).start()


def tokenize_in_one_thread() -> None:
    """Keep the tokenizers library from starting threads in this process, which is one of as many as there are cores."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _end_at_sigterm(parent: int | None) -> None:
    """Exit at the first SIGTERM from the parent process; runs in a thread."""
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent:
        pass
    os._exit(0)


class WorkerDied(Exception):
    """A worker process ended without a result, for example because memory ran out."""


class WorkerPool(Generic[Job, Result]):
    """Spawned processes that run one job at a time; a context manager that kills them at its end.

    A thread per process exchanges jobs and results with it. The caller shares only ``SimpleQueue`` with the threads: a
    KeyboardInterrupt can leave the lock of a future or a condition locked.

    Args:
        num_proc: maximum number of processes.
        make: function of a module, called once in each process as ``make(report, *arguments)``; returns the function
            that runs a job. ``report`` sends progress to the parent.
    """

    def __init__(self, num_proc: int, make: Callable[..., Callable[[Any], Result]], *arguments: object) -> None:
        self.num_proc = num_proc
        self._target = make, arguments
        self._workers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        # Each job with its number and the queue that receives its messages. None ends a thread.
        self._jobs: SimpleQueue[tuple[int, Job, SimpleQueue[tuple[int, Message]]] | None] = SimpleQueue()
        self._is_ready = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process, _pipe in self._workers:
            process.kill()
            self._jobs.put(None)
        for process, _pipe in self._workers:
            process.join()
        self._workers.clear()

    @property
    def has_started(self) -> bool:
        return bool(self._workers)

    def start(self, num: int) -> None:
        """Start processes until there are ``num``, at most ``num_proc``; ``map`` starts one per job if necessary."""
        # Forked workers would inherit locks that threads of this process may hold.
        context = multiprocessing.get_context("spawn")
        while len(self._workers) < min(num, self.num_proc):
            pipe, worker_end = context.Pipe()
            process = context.Process(target=_run_worker, args=(*self._target, worker_end), daemon=True)
            with _worker_start():  # a signal is handled when the process is in the list, so that it will be killed
                process.start()
                worker_end.close()  # so that the pipe is closed when the process ends
                self._workers.append((process, pipe))
                threading.Thread(target=self._run_jobs, args=(pipe,), daemon=True).start()

    def check_ready(self, wait_s: float | None = 0.0) -> None:
        """Raise the error of ``make`` in the first process, after ``wait_s`` seconds; None waits until it returns."""
        while self._workers and not self._is_ready:
            pipe = self._workers[0][1]
            if pipe.poll(_POLL_S if wait_s is None else wait_s):
                kind, content = _receive(pipe)
                if kind == "error":
                    raise content
                self._is_ready = True
            elif wait_s is not None:
                return

    def map(
        self, jobs: Iterable[Job], *, num_ahead: int = 0, in_order: bool = True, report: Report | None = None
    ) -> Iterator[Result]:
        """Run jobs and yield their results; raise the error of a job, or WorkerDied if its process ended.

        Args:
            jobs: may be endless; only ``num_ahead`` are taken ahead.
            num_ahead: maximum number of jobs whose results are not yet yielded; 0: twice the number of processes.
            in_order: yield results in the order of the jobs; otherwise as jobs finish.
            report: called in this thread with the progress that jobs report.
        """
        remaining_jobs = iter(jobs)
        max_pending = num_ahead or 2 * self.num_proc
        num_submitted = num_yielded = 0
        messages: SimpleQueue[tuple[int, Message]] = SimpleQueue()  # with the number of their job
        outcomes: dict[int, Message] = {}  # results and errors not yet yielded, by position in the results
        while True:
            num_pending = num_submitted - num_yielded
            for job in islice(remaining_jobs, max_pending - num_pending):
                self.start(len(self._workers) + 1)  # one more process, up to ``num_proc``
                self._jobs.put((num_submitted, job, messages))
                num_submitted += 1
            if num_yielded == num_submitted:
                return  # no jobs remain

            next_position = num_yielded
            while next_position not in outcomes:
                job_number, outcome = _next_outcome(messages, report)
                position = job_number if in_order else next_position
                outcomes[position] = outcome
            kind, content = outcomes.pop(next_position)
            if kind == "error":
                raise content
            num_yielded += 1
            yield content

    def _message_of(self, job: Job, *, is_first: bool) -> Any:
        """Return what the function of ``make`` receives for a job; ``is_first``: the first job of its process."""
        return job

    def _run_jobs(self, pipe: Connection) -> None:
        """Run jobs in one process, and pass its messages on; called in a thread."""
        is_first = True
        with pipe:
            while (item := self._jobs.get()) is not None:
                number, job, messages = item
                try:
                    with contextlib.suppress(OSError):  # the process has ended; its last messages are received next
                        pipe.send(self._message_of(job, is_first=is_first))
                    kind, is_first = "", False
                    while kind not in ("result", "error"):
                        kind, content = _receive(pipe)
                        if kind != "ready":
                            messages.put((number, (kind, content)))
                except Exception as error:  # the job cannot be pickled, or its result cannot be unpickled
                    messages.put((number, ("error", error)))


def _next_outcome(messages: SimpleQueue[tuple[int, Message]], report: Report | None) -> tuple[int, Message]:
    """Wait until a job is finished; return its number and outcome. Progress of jobs goes to ``report``."""
    while True:
        # With a timeout, because a signal that another thread receives does not interrupt the wait.
        with contextlib.suppress(Empty):
            number, (kind, content) = messages.get(timeout=_POLL_S)
            if kind != "progress":
                return number, (kind, content)
            if report is not None:
                report(*content)


def _receive(pipe: Connection) -> Message:
    """Return the next message of a worker, or the error WorkerDied if it has ended."""
    try:
        message: Message = pipe.recv()
    except (EOFError, OSError):
        return "error", WorkerDied()
    return message


def _run_worker(make: Callable[..., Callable[[Job], Result]], arguments: tuple[object, ...], pipe: Connection) -> None:
    """Run jobs until the pipe is closed; the main function of a worker process.

    ``make(report, *arguments)`` returns the function that runs a job. Sends pairs to the parent: ("ready", None) once,
    or ("error", error) if ``make`` fails; then for each job ("progress", ...) for every report, and a "result" or
    "error".
    """
    begin_worker()
    threading.Thread(target=end_with_parent, daemon=True).start()

    def report(*progress: object) -> None:
        pipe.send(("progress", progress))

    with contextlib.suppress(EOFError, OSError):  # the parent has closed the pipe
        try:
            run_job = make(report, *arguments)
        except Exception as error:
            pipe.send(("error", portable(error)))
            return
        pipe.send(("ready", None))
        while True:
            job = pipe.recv()
            try:
                message: Message = ("result", run_job(job))
            except Exception as error:
                message = ("error", portable(error))
            pipe.send(message)


def end_with_parent() -> None:
    """Exit when the parent process has ended; runs in a thread. A worker would otherwise wait for jobs forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def portable(error: Exception) -> Exception:
    """Return an error that can be pickled, to be sent to another process, with its traceback for ``--debug``."""
    error.add_note("".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
