"""torchrun, ending with the exit code of the process that failed first, and without a traceback of its own.

``python -m packtool.launch.torchrun`` takes what ``python -m torch.distributed.run`` takes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType

import psutil
from torch.distributed import DistNetworkError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from packtool.errors import EXIT_UNEXPECTED, ConfigError
from packtool.visible import show

_SIGNAL_BASE = 128
# The terminal sends one Ctrl-C to a whole group of processes; a person is slower.
_SAME_KEY_SECONDS = 0.5


class PassOn:
    """Hands SIGTERM, SIGUSR1 and Ctrl-C on to the ranks, which save a checkpoint and end by themselves.

    torchrun would kill them after 30 seconds, in the middle of a checkpoint. A second Ctrl-C ends all at once, and so
    does any of them before there are ranks. What no process can hand on, SIGKILL, is seen to by the ranks themselves:
    ``packtool.launch.processes.end_with_launcher``.

    Attributes:
        received: number of the first signal, 0 for none.
    """

    def __init__(self) -> None:
        self.received = 0
        self._at = 0.0
        self._process = os.getpid()
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # between fork and exec of a rank
            return
        again, now = bool(self.received), time.monotonic()
        if again and number == signal.SIGINT and now - self._at > _SAME_KEY_SECONDS:
            raise SignalException(f"process {self._process} was interrupted twice", signal.SIGINT)
        if not again:
            self.received, self._at = number, now
        ranks = list(_ranks())
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(number)
        if not (ranks or again):
            raise SignalException(
                f"process {self._process} was told to end before there were ranks", signal.Signals(number)
            )


def _ranks() -> Iterator[psutil.Process]:
    """Children in sessions of their own, which the terminal's Ctrl-C does not reach."""
    for child in psutil.Process().children():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(child.pid) != os.getsid(0):
                yield child


def run_torchrun(arguments: Sequence[str]) -> int:
    """Run torchrun to its end.

    Returns:
        0, the code of the first process that failed (128 + n for one that signal n ended), or 128 + n if signal n came.
    """
    # The failed process has said what was wrong; torchrun would add a table and a stack of its own.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    passed = PassOn()
    try:
        torchrun(["--signals-to-handle", "SIGHUP,SIGQUIT", *arguments])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        # The others fail for want of one that was killed, perhaps before anybody notices that it is gone.
        for other, each in error.failures.items():
            if each.exitcode < 0 and each.exitcode != -signal.SIGTERM:
                rank, failure = other, each
        code = int(failure.exitcode)
        if passed.received and code in (-passed.received, _SIGNAL_BASE + passed.received):
            return _SIGNAL_BASE + passed.received  # as asked for
        if code < 0:
            # It had no time to say anything.
            name = signal.Signals(-code).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            show(
                f"packtool: rank {rank} (process {failure.pid}) was ended by {name}{hint}; all others were stopped.\n"
                "--resume-from-checkpoint true goes on from the newest checkpoint, if there is one.",
                error=True,
            )
        return _SIGNAL_BASE - code if code < 0 else code or EXIT_UNEXPECTED
    except DistNetworkError as error:
        raise ConfigError(
            f"the processes cannot meet: {str(error).splitlines()[0]}",
            "Another job may have the port: give a free MASTER_PORT, or, on one machine, leave it out.",
        ) from error
    except SignalException as error:
        return _SIGNAL_BASE + int(error.sigval)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(run_torchrun(sys.argv[1:]))
    except ConfigError as refused:
        show(f"packtool: error: {refused}", error=True)
        sys.exit(refused.exit_code)
    except SignalException as error:  # at the very end
        sys.exit(_SIGNAL_BASE + int(error.sigval))
