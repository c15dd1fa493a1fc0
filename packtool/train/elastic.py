"""torchrun, ending with the exit code of the process that failed first, and without a traceback of its own.

``python -m packtool.train.elastic`` takes what ``python -m torch.distributed.run`` takes.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence

from torch.distributed import DistNetworkError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from packtool.errors import EXIT_UNEXPECTED, ConfigError
from packtool.visible import show

_SIGNAL_BASE = 128


def run(arguments: Sequence[str]) -> int:
    """Run torchrun to its end.

    Returns:
        0, the code of the first process that failed (128 + n for one that signal n ended), or 128 + n if signal n came.
    """
    # The failed process has said what was wrong; torchrun would add a table and a stack of its own.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # torchrun hands on SIGTERM and its like only; schedulers send this one before they take a machine away.
    signal.signal(signal.SIGUSR1, _hand_on)
    try:
        torchrun(list(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        # The others fail for want of one that was killed, perhaps before anybody notices that it is gone.
        for other, each in error.failures.items():
            if each.exitcode < 0 and each.exitcode != -signal.SIGTERM:
                rank, failure = other, each
        code = int(failure.exitcode)
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


def _hand_on(number: int, _frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # once is enough
    raise SignalException(f"signal {number}", signal.Signals(number))


if __name__ == "__main__":
    try:
        sys.exit(run(sys.argv[1:]))
    except ConfigError as refused:
        show(f"packtool: error: {refused}", error=True)
        sys.exit(refused.exit_code)
