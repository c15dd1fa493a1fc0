"""Worker processes: how they begin, and how their parent speaks with them.

What a scheduler or a terminal sends to all processes of a job is for the parent. Workers speak with it through one pipe
each, and nothing outlives them: queues and shared counters of the standard library, and so its pools of processes, hold
semaphores with a name, which stay behind in ``/dev/shm`` when a whole group is killed.
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
from collections.abc import Callable, Iterator
from multiprocessing.context import SpawnContext, SpawnProcess
from types import ModuleType

_FOR_THE_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Around the start of a worker, which runs none of the program's own module then.

    Spawned processes run it again for what it may define; workers run packtool's functions only, and would import the
    whole command line for nothing, or a script of a user's that calls packtool.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Around the start of a worker, which inherits that signals wait until ``begin_worker`` has run in it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_PARENT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_worker(number: int = 0) -> None:
    """Leave signals that go to all processes of a job to the parent; called in each worker, by DataLoader too.

    A scheduler that ends a job sends SIGTERM to every process of it. Workers that ended at once would take the
    checkpoint with them that is still to be saved. SIGTERM of the parent is how it clears away.

    Args:
        number: of the worker.
    """
    for ignored in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(ignored, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if hasattr(signal, "sigwaitinfo") and parent is not None:  # the first is not there on macOS
        # Blocked and waited for: a handler would learn nothing of the sender, and wait while a picture is decoded.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Thread(target=_end_when_told, args=(parent.pid,), daemon=True).start()


def tokenize_in_one_thread() -> None:
    """Let the tokenizers library start no threads in this process, of which there are as many as cores."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _end_when_told(parent: int | None) -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent:
        pass
    os._exit(0)


class PipeWorker:
    """A process that this one speaks with through a pipe.

    Args:
        target: what it does, called with its end of the pipe behind ``arguments``.
    """

    def __init__(self, context: SpawnContext, target: Callable[..., None], *arguments: object) -> None:
        self.pipe, theirs = context.Pipe()
        self._process: SpawnProcess = context.Process(target=target, args=(*arguments, theirs), daemon=True)
        # What reaches the whole group is the parent's to answer: targets call ``begin_worker``.
        with _without_main(), signals_wait():
            self._process.start()
        theirs.close()  # so that its end is heard

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.join()
        self.pipe.close()


def end_with_parent() -> None:
    """A worker whose parent was killed would wait for its next task for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def portable(error: Exception) -> Exception:
    """The error as another process can have it; ``--debug`` shows where it was raised."""
    error.add_note("".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
