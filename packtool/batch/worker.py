"""Processes that load media beside the one of the model: how they begin, and what is said when one of them dies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from packtool.cache.pool import leave_signals_to_parent
from packtool.errors import PacktoolError

RESUME = "--resume-from-checkpoint true goes on from the newest checkpoint, if there is one"


def begin_worker(number: int) -> None:
    """Leave signals that go to all processes of a job to the one that computes; DataLoader calls this in each worker.

    Args:
        number: of the worker.
    """
    leave_signals_to_parent()


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
