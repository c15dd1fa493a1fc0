"""How a worker process begins: what a scheduler or a terminal sends to all processes of a job is for its parent."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator

_FOR_THE_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


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


def _end_when_told(parent: int | None) -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent:
        pass
    os._exit(0)
