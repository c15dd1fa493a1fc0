"""Tasks on worker processes of this machine.

Workers speak with this process through one pipe each. There is nothing that outlives them: queues and shared counters
of the standard library hold semaphores with a name, which stay behind in ``/dev/shm`` when a whole group is killed.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess

from packtool.cache.task import Report, Task, TaskResult, Work, run_task
from packtool.encode.encoder import Encoder
from packtool.encode.model_files import ModelFiles
from packtool.errors import PacktoolError

_TOLD_EVERY_S = 0.25
_GLANCE_S = 0.5


def run_tasks(
    tasks: Sequence[Task], work: Work, encoder: Callable[[], Encoder], num_proc: int, report: Report
) -> Iterator[TaskResult]:
    """Run tasks and give their results as they finish, in any order.

    Args:
        encoder: makes one for this process, if the tasks run here.
        report: told of rows, drops and tokens while tasks run.

    Raises:
        PacktoolError: whatever a task raised; the others are stopped. Or a worker died.
    """
    if num_proc == 1 or len(tasks) <= 1:
        if tasks:
            here = encoder()
            for task in tasks:
                yield run_task(task, here, work, report)
        return
    # Forked workers would inherit locks that the tokenizer's or Arrow's threads may hold.
    context = multiprocessing.get_context("spawn")
    waiting = list(reversed(tasks))
    workers: dict[Connection, _Worker] = {}
    try:
        for _ in range(min(num_proc, len(tasks))):
            worker = _Worker(context, work)
            workers[worker.pipe] = worker
            worker.give(waiting.pop())
        num_done = 0
        while workers:
            # Looked up now and then: a signal that another thread receives does not wake this one.
            for pipe in multiprocessing.connection.wait(list(workers), timeout=_GLANCE_S):
                assert isinstance(pipe, Connection)
                told = workers[pipe].hear(f"{num_done} of {len(tasks)}")
                if isinstance(told, TaskResult):
                    num_done += 1
                    # The next task first: whoever takes the result may take his time.
                    if waiting:
                        workers[pipe].give(waiting.pop())
                    else:
                        workers.pop(pipe).end()
                    yield told
                else:
                    report(*told)
    finally:
        for worker in workers.values():
            worker.kill()


class PipeWorker:
    """A process that this one speaks with through a pipe.

    Args:
        target: what it does, called with its end of the pipe behind ``arguments``.
    """

    def __init__(self, context: SpawnContext, target: Callable[..., None], *arguments: object) -> None:
        self.pipe, theirs = context.Pipe()
        self._process: SpawnProcess = context.Process(target=target, args=(*arguments, theirs), daemon=True)
        # What reaches a whole group is answered by the parent, also while the worker starts.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()  # so that its end is heard

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.join()
        self.pipe.close()


class _Worker(PipeWorker):
    """A process that runs one task after the other; what it was writing when it ended has no marker."""

    def __init__(self, context: SpawnContext, work: Work) -> None:
        super().__init__(context, _work, work)

    def give(self, task: Task | None) -> None:
        """A task to run, or None to end."""
        with suppress(OSError):  # it died, which is heard next
            self.pipe.send(task)

    def hear(self, done: str) -> TaskResult | tuple[int, int, int]:
        """What it says: a task is done, or rows, drops and tokens of one under way.

        Args:
            done: shards, for the message.

        Raises:
            PacktoolError: that it met, or that it died.
        """
        try:
            told: TaskResult | tuple[int, int, int] | BaseException = self.pipe.recv()
        except (EOFError, OSError):
            raise PacktoolError(
                f"a worker process died after {done} shards (killed, or out of memory?)",
                "Run the same command again to go on after the finished shards; fewer --dataset-num-proc need less "
                "memory.",
            ) from None
        if isinstance(told, BaseException):
            raise told
        return told

    def end(self) -> None:
        """Let it go; there is nothing left to do."""
        self.give(None)
        self._process.join()
        self.pipe.close()


def leave_signals_to_parent() -> None:
    """Let signals that go to all processes of a job be the business of the one that this one works for.

    A scheduler that ends a job sends SIGTERM to every process of it. Workers that ended at once would take what is
    still to be saved with them. SIGTERM of the parent is how multiprocessing and torch clear away, and is heeded.
    """
    for ignored in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(ignored, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if hasattr(signal, "sigwaitinfo") and parent is not None:  # the first is not there on macOS
        # Blocked and waited for: a handler would learn nothing of the sender, and wait while a picture is decoded.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Thread(target=_end_when_told, args=(parent.pid,), daemon=True).start()
    else:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def _end_when_told(parent: int | None) -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent:
        pass
    os._exit(0)


def end_with_parent() -> None:
    """A worker whose parent was killed would wait for its next task for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _work(work: Work, pipe: Connection) -> None:
    """A worker's life."""
    leave_signals_to_parent()
    threading.Thread(target=end_with_parent, daemon=True).start()
    # The workers are the parallelism.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    teller = _Teller(pipe)
    try:
        encoder = Encoder(work.spec, ModelFiles.load(work.spec.model, work.spec.chat_template))
        while (task := pipe.recv()) is not None:
            result = run_task(task, encoder, work, teller)
            teller.tell()
            pipe.send(result)
    except Exception as error:
        with suppress(OSError):  # nobody listens any more
            pipe.send(portable(error))


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
        """Now."""
        self._pipe.send(tuple(self._counts))
        self._counts, self._told = [0, 0, 0], time.monotonic()


def portable(error: Exception) -> Exception:
    """The error as another process can have it; ``--debug`` shows where it was raised."""
    error.add_note("".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
