"""Processes that load media beside the one of the model: how they begin, and what is said when one of them dies."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator

from packtool.errors import PacktoolError

RESUME = "--resume-from-checkpoint true goes on from the newest checkpoint, if there is one"


def begin_worker(number: int) -> None:
    """Leave signals that go to all processes of a job to the one that computes; DataLoader calls this in each worker.

    A scheduler that ends a job sends SIGTERM to every process of it. Workers that ended at once would take the
    checkpoint with them that is still to be saved. SIGTERM of the process that computes is how torch clears away.

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


@contextlib.contextmanager
def deaths_told(remedy: str = RESUME) -> Iterator[None]:
    """Around all that is done while workers load: torch tells of a dead one wherever this process happens to be.

    Args:
        remedy: what a user may do, beside doing without workers.

    Raises:
        PacktoolError: if a worker died.
    """
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise PacktoolError(
            f"a process that loads pictures died (killed, or out of memory?): {error}",
            f"{remedy}; --dataloader-num-workers 0 loads in the process of the model.",
        ) from error
