"""torchrun, ending with the exit code of the process that failed first, and without a traceback of its own.

``python -m packtool.launch.torchrun`` takes what ``python -m torch.distributed.run`` takes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType

import psutil
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import get_args_parser, parse_min_max_nnodes
from torch.distributed.run import main as torchrun

from packtool.errors import EXIT_UNEXPECTED, ConfigError
from packtool.launch.nodes import Nodes
from packtool.terminal import show

_SIGNAL_BASE = 128
# The terminal sends one Ctrl-C to a whole group of processes; a person is slower.
_SAME_KEY_SECONDS = 0.5
_PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_STUCK_SECONDS = 1.0
_MAX_SIGNALS = 64  # read at once


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
        self._at = self._handled_at = 0.0
        self._process = os.getpid()
        for number in _PASSED_ON:
            signal.signal(number, self._note)
        wakeup, self._told = socket.socketpair()
        self._told.setblocking(False)
        signal.set_wakeup_fd(self._told.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._end_if_stuck, args=(wakeup,), daemon=True).start()

    def _end_if_stuck(self, wakeup: socket.socket) -> None:
        """End by a signal that comes while the main thread is inside torch's store, where ``_note`` cannot run."""
        while numbers := wakeup.recv(_MAX_SIGNALS):
            heard_at = time.monotonic()
            time.sleep(_STUCK_SECONDS)
            asked = [number for number in numbers if number in _PASSED_ON]
            if asked and self._handled_at < heard_at - _STUCK_SECONDS and not any(_ranks()):
                show(f"packtool: ended by {signal.Signals(asked[0]).name}", error=True)
                os._exit(_SIGNAL_BASE + asked[0])

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # between fork and exec of a rank
            return
        again, now = bool(self.received), time.monotonic()
        self._handled_at = now
        if again and number == signal.SIGINT and now - self._at > _SAME_KEY_SECONDS:
            raise SignalException(f"process {self._process} was interrupted twice", signal.SIGINT)
        if not again:
            self.received, self._at = number, now
        if not (_signal_ranks(number) or again):
            raise SignalException(
                f"process {self._process} was told to end before there were ranks", signal.Signals(number)
            )


def _ranks() -> Iterator[psutil.Process]:
    """Children in sessions of their own, which the terminal's Ctrl-C does not reach."""
    for child in psutil.Process().children():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(child.pid) != os.getsid(0):
                yield child


def _signal_ranks(number: int) -> bool:
    """Send a signal to all ranks of this machine; False if there are none."""
    ranks = list(_ranks())
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.send_signal(number)
    return bool(ranks)


def run_torchrun(arguments: Sequence[str]) -> int:
    """Run torchrun to its end, on several machines once their launchers have met.

    Returns:
        0, the code of the first process that failed (128 + n for one that signal n ended), or 128 + n if signal n came.
    """
    # The failed process has said what was wrong; torchrun would add a table and a stack of its own.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    passed, nodes = PassOn(), _nodes(arguments)
    try:
        if nodes is not None:
            nodes.meet()
        code, reason = _run(arguments, passed)
    except DistError as error:
        if nodes is not None:
            raise nodes.failure(str(error).splitlines()[0]) from error
        raise ConfigError(
            f"the processes cannot meet: {str(error).splitlines()[0]}",
            "Another job may have the port: give a free MASTER_PORT, or leave it out.",
        ) from error
    except SignalException as error:
        code, reason = _SIGNAL_BASE + int(error.sigval), signal.Signals(error.sigval).name
    if nodes is not None:
        nodes.leave(code, reason)
    return code


def _nodes(arguments: Sequence[str]) -> Nodes | None:
    """The launchers that torchrun's arguments speak of; None for those of a single machine."""
    options = get_args_parser().parse_args(arguments)
    _, num_nodes = parse_min_max_nnodes(options.nnodes)
    if num_nodes == 1:
        return None
    return Nodes(
        num_nodes,
        options.node_rank,
        int(options.nproc_per_node),
        options.master_addr,
        options.master_port,
        limit=float(options.rdzv_conf.removeprefix("timeout=")),
        signal_ranks=_signal_ranks,
    )


def _run(arguments: Sequence[str], passed: PassOn) -> tuple[int, str]:
    """Run torchrun and return the exit code, with the reason where a rank could not give it itself."""
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
            return _SIGNAL_BASE + passed.received, signal.Signals(passed.received).name  # as asked for
        if code >= 0:
            return code or EXIT_UNEXPECTED, ""
        # It had no time to say anything.
        name = signal.Signals(-code).name
        reason = f"rank {rank} (process {failure.pid}) was ended by {name}"
        reason += " (out of memory?)" if name == "SIGKILL" else ""
        show(
            f"packtool: {reason}; all others were stopped.\n"
            "--resume-from-checkpoint true goes on from the newest checkpoint, if there is one.",
            error=True,
        )
        return _SIGNAL_BASE - code, reason
    return 0, ""


def run_launcher(arguments: Sequence[str]) -> int:
    """Run torchrun, print what it refuses, and return the exit code."""
    try:
        return run_torchrun(arguments)
    except ConfigError as refused:
        show(f"packtool: error: {refused}", error=True)
        return refused.exit_code
    except SignalException as error:  # at the very end
        return _SIGNAL_BASE + int(error.sigval)


if __name__ == "__main__":
    sys.exit(run_launcher(sys.argv[1:]))
