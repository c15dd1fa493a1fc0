"""torchrun with the exit code of the process that failed first, and without its own traceback.

``python -m packtool.launch.torchrun`` takes the arguments of ``python -m torch.distributed.run``.
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
_FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_STUCK_SECONDS = 1.0
_MAX_SIGNALS = 64  # read at once


class SignalForwarder:
    """Forwards SIGTERM, SIGUSR1 and Ctrl-C to the ranks, which save a checkpoint and end.

    torchrun would kill them after 30 seconds, in the middle of a checkpoint. A second Ctrl-C ends all processes at
    once, and so does any of these signals before there are ranks. After SIGKILL, which cannot be forwarded, the ranks
    end by ``packtool.launch.processes.end_with_launcher``.

    Attributes:
        received: number of the first signal, 0 for none.
    """

    def __init__(self) -> None:
        self.received = 0
        self._at = self._handled_at = 0.0
        self._process = os.getpid()
        for number in _FORWARDED:
            signal.signal(number, self._note)
        wakeup, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._end_if_stuck, args=(wakeup,), daemon=True).start()

    def _end_if_stuck(self, wakeup: socket.socket) -> None:
        """End after a signal that arrives while the main thread is inside torch's store, where ``_note`` cannot run."""
        while numbers := wakeup.recv(_MAX_SIGNALS):
            received_at = time.monotonic()
            time.sleep(_STUCK_SECONDS)
            signals = [number for number in numbers if number in _FORWARDED]
            if signals and self._handled_at < received_at - _STUCK_SECONDS and not any(_ranks()):
                show(f"packtool: ended by {signal.Signals(signals[0]).name}", error=True)
                os._exit(_SIGNAL_BASE + signals[0])

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
    """Yield the children in other sessions, which the terminal's Ctrl-C does not reach."""
    for child in psutil.Process().children():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(child.pid) != os.getsid(0):
                yield child


def _signal_ranks(number: int) -> bool:
    """Send a signal to all ranks of this machine; return whether there are any."""
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
    # The failed process has printed the problem; torchrun would add a table and a stack.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    passed, nodes = SignalForwarder(), _nodes(arguments)
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
    """Return the launchers of all machines that torchrun's arguments name; None for a single machine."""
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


def _run(arguments: Sequence[str], passed: SignalForwarder) -> tuple[int, str]:
    """Run torchrun; return the exit code, and the reason if the rank could not print it."""
    try:
        torchrun(["--signals-to-handle", "SIGHUP,SIGQUIT", *arguments])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        # The other ranks fail because one was killed, perhaps before torchrun notices that one.
        for other, each in error.failures.items():
            if each.exitcode < 0 and each.exitcode != -signal.SIGTERM:
                rank, failure = other, each
        code = int(failure.exitcode)
        if passed.received and code in (-passed.received, _SIGNAL_BASE + passed.received):
            return _SIGNAL_BASE + passed.received, signal.Signals(passed.received).name  # as asked for
        if code >= 0:
            return code or EXIT_UNEXPECTED, ""
        # The killed rank could not print anything.
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
    """Run torchrun, print configuration errors, and return the exit code."""
    try:
        return run_torchrun(arguments)
    except ConfigError as refused:
        show(f"packtool: error: {refused}", error=True)
        return refused.exit_code
    except SignalException as error:  # at the very end
        return _SIGNAL_BASE + int(error.sigval)


if __name__ == "__main__":
    sys.exit(run_launcher(sys.argv[1:]))
