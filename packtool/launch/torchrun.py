"""torchrun with the exit code of the process that failed first, and without its own traceback.

``python -m packtool.launch.torchrun`` takes the arguments of ``python -m torch.distributed.run``.

On several machines (nodes), the launchers wait for each other before they start torchrun, print what they wait for,
and notice when another one has ended. Node 0 serves a TCPStore at MASTER_ADDR:MASTER_PORT, which torchrun and the ranks
also use. Every second, each launcher writes its record to the store, and node 0 publishes all records:

    packtool/node/R   by node R: host, process, id, NNODES and NPROC_PER_NODE, a counter, and finally its exit code
    packtool/nodes    by node 0: all records with the seconds since the counter changed, and the ids of this run's nodes
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple

import psutil
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import get_args_parser, parse_min_max_nnodes
from torch.distributed.run import main as torchrun

from packtool.config.settings import load_json
from packtool.errors import EXIT_UNEXPECTED, ConfigError
from packtool.terminal import show

_SIGNAL_BASE = 128
# The terminal sends one Ctrl-C to a whole group of processes; a person is slower.
_SAME_KEY_SECONDS = 0.5
_FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_STUCK_SECONDS = 1.0
_MAX_SIGNALS = 64  # read at once
_RECORD_KEY, _STATE_KEY = "packtool/node/", "packtool/nodes"
_BEAT_SECONDS = 1.0
_SILENT_SECONDS = 5.0
_STORE_SECONDS = 3.0
_FIRST_LINE_SECONDS, _MAX_LINE_SECONDS = 5.0, 60.0
_GRACE_SECONDS = 30.0  # within which ranks should notice that another node has ended
_KILL_SECONDS = 30.0  # after SIGTERM
_LEAVE_SECONDS = 10.0
_OPTION = "--ddp-timeout"


class SignalForwarder:
    """Signal handlers that forward SIGTERM, SIGUSR1 and Ctrl-C to the ranks, which save a checkpoint and end.

    torchrun would kill them after 30 seconds, perhaps while they write a checkpoint. A second Ctrl-C ends all processes
    at once, and so does any of these signals before ranks are started.

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
        """Exit after a signal that ``_note`` does not handle within a second and without ranks; runs in a thread.

        Python runs signal handlers in the main thread, which may be waiting inside torch's store.
        """
        while numbers := wakeup.recv(_MAX_SIGNALS):
            received_at = time.monotonic()
            time.sleep(_STUCK_SECONDS)
            signals = [number for number in numbers if number in _FORWARDED]
            if signals and self._handled_at < received_at - _STUCK_SECONDS and not any(_ranks()):
                show(f"packtool: ended by {signal.Signals(signals[0]).name}", error=True)
                os._exit(_SIGNAL_BASE + signals[0])

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal to the ranks; raise a SignalException if there are none, or at the second Ctrl-C."""
        if os.getpid() != self._process:  # between fork and exec of a rank
            return
        now = time.monotonic()
        self._handled_at = now
        is_first = not self.received
        if not is_first and number == signal.SIGINT and now - self._at > _SAME_KEY_SECONDS:
            raise SignalException(f"process {self._process} was interrupted twice", signal.SIGINT)
        if is_first:
            self.received = number
            self._at = now
        has_ranks = _signal_ranks(number)
        if is_first and not has_ranks:
            problem = f"process {self._process} received a signal before any rank was started"
            raise SignalException(problem, signal.Signals(number))


def _ranks() -> Iterator[psutil.Process]:
    """Yield this machine's ranks: the child processes in other sessions, which a terminal's Ctrl-C does not reach."""
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


class LauncherGroup:
    """The connection of this machine's launcher to those of the other machines ("nodes"), by a store of node 0.

    Each launcher writes its record (processes, exit code) to the store, and node 0 publishes all of them there.

    Args:
        rank: number of this machine; node 0 creates the store.
        per_node: training processes on each machine.
        address, port: of the store.
        max_wait_seconds: for other machines, at the start or after a failure.
    """

    def __init__(
        self, num_nodes: int, rank: int, per_node: int, address: str, port: int, *, max_wait_seconds: float
    ) -> None:
        self.num_nodes = num_nodes
        self.rank = rank
        self.max_wait_seconds = max_wait_seconds
        self.address, self.port = address, port
        self.store_address = f"{address}:{port}"
        self._record = _new_record(num_nodes, per_node)
        # The state that node 0 publishes: "nodes", the records by number of the machine, and "met", the ids of these
        # records by the same numbers, once all launchers have met.
        self._state: dict[str, Any] = {"nodes": {}, "met": None}
        self._have_all_met = threading.Event()
        self._is_leaving = threading.Event()
        self._thread = threading.Thread(target=self._exchange_until_leaving, daemon=True)
        self._begin = time.monotonic()

        # The connection to the store:
        self._store: TCPStore | None = None  # None while disconnected
        self._store_error = "not connected yet"
        self._port_error: ConfigError | None = None  # on node 0, if the port is in use
        self._serves_store = False
        # On node 0, by number of the machine: (id, counter) of its record, and when these were first seen.
        self._beats: dict[str, tuple[tuple[str, int], float]] = {}

        # Failures of other machines, and lines about waiting for them:
        self._failure_seen_at: float | None = None
        self._has_started_ranks = False
        self._start_waiting(self._begin)
        self._printed_status = ""

    def _start_waiting(self, now: float) -> None:
        """Note the start of a wait for other machines; lines about it are printed less and less often."""
        self._waiting_since: float | None = now  # None without a wait
        self._line_interval = _FIRST_LINE_SECONDS
        self._next_line_at = now + self._line_interval

    @property
    def title(self) -> str:
        """Prefix of the log lines about this machine."""
        return f"packtool: node {self.rank} of {self.num_nodes}"

    def meet(self) -> None:
        """Wait for the launchers of all machines; raise a ConfigError after the limit, or if the port is in use."""
        self._thread.start()
        while not self._have_all_met.wait(0.1):
            if self._port_error:
                raise self._port_error
            if time.monotonic() - self._begin > self.max_wait_seconds:
                raise self.failure()
        show(f"{self.title}: {_names_of_ranks(self.rank, self._record)}, master {self.store_address}", error=True)

    def failure(self, reason: str = "") -> ConfigError:
        """Return the error of a launcher that gives up: the event that it waits for, or else ``reason``, and causes."""
        causes = (
            "Every machine needs the same NNODES, NPROC_PER_NODE, MASTER_ADDR and MASTER_PORT, and a NODE_RANK of its "
            f"own; a firewall may block port {self.port}. {_OPTION} sets the limit, now {self.max_wait_seconds:g} s."
        )
        if self._store is None:
            causes = "Is packtool running where NODE_RANK=0, and is MASTER_ADDR an address of that machine? " + causes
        return ConfigError(f"node {self.rank} of {self.num_nodes} gave up: {self._status() or reason}", causes)

    def leave(self, code: int, reason: str = "") -> None:
        """Publish this machine's exit code and the reason of its failure, and wait while the others need the store.

        If the reason is unknown, another machine may have failed first: its failure is awaited and printed. Waits at
        most ``_LEAVE_SECONDS``.
        """
        self._is_leaving.set()
        self._thread.join()
        if not self._have_all_met.is_set():
            return

        self._record["end"] = {"code": code, "reason": reason}  # ``_exchange`` publishes it
        is_unexplained = code == EXIT_UNEXPECTED and not reason
        deadline = time.monotonic() + _LEAVE_SECONDS
        while time.monotonic() < deadline:
            self._exchange()
            awaits_failure = is_unexplained and not self._failures()
            if not awaits_failure and not self._is_store_needed():
                break
            time.sleep(_BEAT_SECONDS / 2)

        if is_unexplained:
            self._print_new_failures()
        minutes = (time.monotonic() - self._begin) / 60
        show(f"{self.title}: ended with exit code {code} after {minutes:.1f} min", error=True)

    def _print_new_failures(self) -> None:
        """Print the failures of other machines, except one that was printed while waiting."""
        for failure in self._failures().values():
            if failure not in self._printed_status:
                show(f"{self.title}: {failure}", error=True)

    def _is_store_needed(self) -> bool:
        """Return whether this is node 0, which serves the store, and another launcher still runs and reads it."""
        num_succeeded = sum(_exit_code(record) == 0 for _, record in self._other_nodes())
        num_ended = num_succeeded + len(self._failures())
        return self.rank == 0 and num_ended < self.num_nodes - 1

    def _exchange_until_leaving(self) -> None:
        """Exchange records every second until ``leave`` is called; runs in a thread."""
        while not self._is_leaving.wait(_BEAT_SECONDS):
            self._exchange()
            self._print_status()
            if self._have_all_met.is_set():
                self._end_stuck_ranks()

    def _exchange(self) -> None:
        """Write this machine's record to the store of node 0, and update ``_state`` from it; connect if necessary.

        On node 0, ``_state`` is made from the records of all machines, and published for the others. After an error,
        the store is disconnected, and ``_store_error`` has the reason.
        """
        try:
            store = self._store or self._connect()
            self._record["beat"] += 1
            store.set(f"{_RECORD_KEY}{self.rank}", json.dumps(self._record))
            if self.rank == 0:
                self._update_state(store)
                store.set(_STATE_KEY, json.dumps(self._state))
            elif store.check([_STATE_KEY]):
                self._state = load_json(store.get(_STATE_KEY))
            self._store = store
        except (DistError, OSError, RuntimeError) as error:
            self._store = None  # the next call connects again
            message = getattr(error, "strerror", None) or str(error)
            self._store_error = message.splitlines()[0]
            return
        self._check_meeting()

    def _check_meeting(self) -> None:
        """Notice that all launchers have met, or that afterwards another run has taken the address."""
        id_by_node = self._state["met"] or {}
        if id_by_node.get(str(self.rank)) == self._record["id"]:
            self._have_all_met.set()
        elif self._have_all_met.is_set():
            self._store = None
            self._store_error = "another run uses this address now"

    def _connect(self) -> TCPStore:
        """Connect to the store of node 0, which creates it with its first connection.

        Plain sockets try the address before: if the port is in use or nobody answers, torch would print a stack trace.
        """
        is_server = self.rank == 0
        with contextlib.ExitStack() as sockets:
            if is_server and not self._serves_store:
                sockets.enter_context(self._listen())
            sockets.enter_context(socket.create_connection((self.address, self.port), _STORE_SECONDS))
        self._serves_store = is_server
        timeout = timedelta(seconds=_STORE_SECONDS)
        options = {"wait_for_workers": False, "multi_tenant": True}  # torchrun shares this server
        return TCPStore(self.address, self.port, is_master=is_server, timeout=timeout, **options)

    def _listen(self) -> socket.socket:
        """Listen on the store's port; if it is in use, set ``_port_error`` and raise an OSError."""
        try:
            return socket.create_server(("", self.port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                self._port_error = ConfigError(
                    f"the processes cannot meet: MASTER_PORT={self.port} is in use on this machine",
                    "Another job may have the port: set MASTER_PORT to a free port, the same on every machine.",
                )
            raise

    def _update_state(self, store: TCPStore) -> None:
        """Read all records on node 0; once all launchers are live with equal settings, the run begins with these."""
        nodes = {}
        for rank in map(str, range(self.num_nodes)):
            if store.check([_RECORD_KEY + rank]):
                record = load_json(store.get(_RECORD_KEY + rank))
                nodes[rank] = record | {"silent": self._silent_seconds(rank, record)}
        self._state["nodes"] = nodes
        has_begun = self._state["met"] is not None
        if not has_begun and not self._missing_nodes() and not self._unequal_settings():
            self._state["met"] = {rank: record["id"] for rank, record in nodes.items()}

    def _silent_seconds(self, rank: str, record: dict[str, Any]) -> float:
        """Return the seconds since a machine has written its record."""
        now = time.monotonic()
        beat = record["id"], record["beat"]
        last_beat, last_time = self._beats.get(rank, (None, now))
        if beat != last_beat:
            last_time = now
            self._beats[rank] = beat, now
        return now - last_time

    def _missing_nodes(self) -> list[int]:
        """Return the numbers of the machines without a live launcher."""
        nodes = self._state["nodes"]
        live = {rank for rank, record in nodes.items() if record["silent"] < _SILENT_SECONDS and not record["end"]}
        return [rank for rank in range(self.num_nodes) if str(rank) not in live]

    def _unequal_settings(self) -> str:
        """Describe a machine that was started with another number of machines or processes; empty for none."""
        nodes = self._state["nodes"]
        for rank, record in nodes.items():
            first = nodes.get("0", record)
            if record["processes"] != first["processes"]:
                own, zero = (f"NNODES={n} NPROC_PER_NODE={p}" for n, p in (record["processes"], first["processes"]))
                return f"node {rank} ({record['host']}) has {own}, node 0 ({first['host']}) has {zero}"
        return ""

    def _other_nodes(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the records of the other machines of this run."""
        met = self._state["met"] or {}
        return [(rank, each) for rank, each in self._state["nodes"].items() if int(rank) != self.rank and rank in met]

    def _failures(self) -> dict[str, str]:
        """Describe the other machines that failed or do not answer, by their numbers."""
        if self._store is None:
            return {} if self.rank == 0 else {"0": f"node 0 at {self.store_address} has ended: {self._store_error}"}
        failures = {}
        for rank, record in self._other_nodes():
            name = f"node {rank} ({record['host']}, {_names_of_ranks(int(rank), record)})"
            if record["id"] != self._state["met"][rank]:
                failures[rank] = f"{name} was started again"
            elif _exit_code(record):
                failures[rank] = f"{name} failed with exit code {_exit_code(record)}"
                failures[rank] += f": {record['end']['reason']}" if record["end"]["reason"] else ""
            elif not record["end"] and record["silent"] >= _SILENT_SECONDS:
                failures[rank] = f"{name} has not answered for {record['silent']:.0f} s: killed, or disconnected"
        return failures

    def _status(self) -> str:
        """Describe the event that this launcher waits for, or the failure of other machines; empty for none."""
        if self._have_all_met.is_set():
            return "; ".join(self._failures().values())
        if self._store is None and self.rank == 0:  # node 0 itself serves the store at its address
            return f"waiting for MASTER_ADDR={self.address} to lead to this machine: {self._store_error}"
        if self._store is None:
            return f"waiting for node 0 at {self.store_address}: {self._store_error}"
        if self._state["met"] is not None:  # all have met, but with another launcher in the place of this one
            record = self._state["nodes"][str(self.rank)]
            other_launcher = f"another NODE_RANK={self.rank} ({record['host']})"
            return f"waiting for the next run: the one at {self.store_address} has started with {other_launcher}"
        if unequal_settings := self._unequal_settings():
            return f"waiting for equal settings: {unequal_settings}"
        missing = self._missing_nodes()
        ranks = ", ".join(map(str, missing))
        return f"waiting at {self.store_address} for {len(missing)} of {self.num_nodes} nodes: NODE_RANK {ranks}"

    def _print_status(self) -> None:
        """Print what this launcher waits for, if anything: after 5 seconds, then less often, at least once a minute."""
        status, now = self._status(), time.monotonic()
        if not status:
            self._waiting_since = None
            return
        if self._waiting_since is None:
            self._start_waiting(now)
        elif now >= self._next_line_at:
            self._line_interval = min(2 * self._line_interval, _MAX_LINE_SECONDS)
            self._next_line_at = now + self._line_interval
            seconds = now - self._waiting_since
            limit = f"{seconds:.0f} s of at most {self.max_wait_seconds:g}: {_OPTION}"
            show(f"{self.title}: {status} ({limit})", error=True)
            self._printed_status = status

    def _end_stuck_ranks(self) -> None:
        """End this machine's ranks some time after another machine has failed, if they do not end themselves."""
        has_ranks = any(_ranks())
        self._has_started_ranks |= has_ranks
        if not self._failures():
            self._failure_seen_at = None
            return
        now = time.monotonic()
        if self._failure_seen_at is None:
            self._failure_seen_at = now
        deadline = self._failure_seen_at + self._patience(has_ranks=has_ranks)
        if now < deadline:
            return
        if has_ranks:
            _signal_ranks(signal.SIGTERM if now < deadline + _KILL_SECONDS else signal.SIGKILL)
        elif not self._has_started_ranks:  # the main thread may wait inside torch's store
            show(f"packtool: error: {self.failure()}", error=True)
            os._exit(ConfigError.exit_code)

    def _patience(self, *, has_ranks: bool) -> float:
        """Return the seconds from the failure of another machine until this one's ranks are ended."""
        has_exited = any(_exit_code(record) for _, record in self._other_nodes())
        may_recover = has_ranks and not has_exited  # the other machine does not answer: perhaps it will
        return self.max_wait_seconds if may_recover else min(_GRACE_SECONDS, self.max_wait_seconds)


def _new_record(num_nodes: int, per_node: int) -> dict[str, Any]:
    """Return the first record of this machine's launcher."""
    return {
        "id": uuid.uuid4().hex,
        "host": socket.gethostname(),
        "process": os.getpid(),
        "processes": [num_nodes, per_node],
        "beat": 0,  # number of writes: a machine whose beat stops is dead or disconnected
        "end": None,  # at the end: exit code and reason
    }


def _exit_code(record: dict[str, Any]) -> int | None:
    """Return the exit code in a launcher's record; None while it runs."""
    return record["end"]["code"] if record["end"] else None


def _names_of_ranks(rank: int, record: dict[str, Any]) -> str:
    """Describe the ranks on machine ``rank``, as in ``ranks 8 to 15 of 16``."""
    num_nodes, per_node = record["processes"]
    first, total = rank * per_node, num_nodes * per_node
    return f"rank {first} of {total}" if per_node == 1 else f"ranks {first} to {first + per_node - 1} of {total}"


def run_torchrun(arguments: Sequence[str]) -> int:
    """Run torchrun after all launchers have met; return the first failed process's exit code, 128 + n for signal n."""
    # The failed process has printed the problem; torchrun would add a table and a stack trace.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    forwarder = SignalForwarder()
    group = _launcher_group(arguments)
    try:
        if group is not None:
            group.meet()
        code, reason = _run_ranks(arguments, forwarder)
    except DistError as error:  # the processes could not connect
        problem = str(error).splitlines()[0]
        if group is not None:
            raise group.failure(problem) from error
        raise ConfigError(
            f"the processes cannot meet: {problem}",
            "Another job may have the port: set MASTER_PORT to a free port, or leave it out.",
        ) from error
    except SignalException as error:
        code, reason = _SIGNAL_BASE + int(error.sigval), signal.Signals(error.sigval).name
    if group is not None:
        group.leave(code, reason)
    return code


def _launcher_group(arguments: Sequence[str]) -> LauncherGroup | None:
    """Return the connection to the launchers of other machines, from the arguments of torchrun; None on one machine."""
    options = get_args_parser().parse_args(arguments)
    _, num_nodes = parse_min_max_nnodes(options.nnodes)
    if num_nodes == 1:
        return None
    max_wait_seconds = float(options.rdzv_conf.removeprefix("timeout="))  # as ``launch_command`` writes it
    per_node = int(options.nproc_per_node)
    address, port = options.master_addr, options.master_port
    return LauncherGroup(num_nodes, options.node_rank, per_node, address, port, max_wait_seconds=max_wait_seconds)


class RunResult(NamedTuple):
    """Exit code of this machine's ranks, as in a shell, and the reason of a failure that no rank has printed."""

    exit_code: int
    reason: str = ""


class _RankFailure(NamedTuple):
    """A training process that failed; ``exit_code`` is -n if signal n ended it."""

    rank: int
    pid: int
    exit_code: int

    def was_caused_by(self, signal_number: int) -> bool:
        """Return whether this signal ended the process, directly or by a handler that exits as in a shell."""
        return self.exit_code in (-signal_number, _SIGNAL_BASE + signal_number)


def _run_ranks(torchrun_arguments: Sequence[str], forwarder: SignalForwarder) -> RunResult:
    """Run this machine's training processes ("ranks") with torchrun, and wait until they have ended.

    ``forwarder`` passes SIGTERM, SIGUSR1 and Ctrl-C on to the ranks. The exit code is 128 + n after signal n. The
    reason is empty after success, and also if a rank exited with an error, because the rank has printed it.
    """
    try:
        # torchrun must not handle the signals of ``forwarder``.
        torchrun(["--signals-to-handle", "SIGHUP,SIGQUIT", *torchrun_arguments])
    except ChildFailedError as error:
        failure = _first_failure(error)
    else:
        return RunResult(exit_code=0)

    forwarded_signal = forwarder.received
    if forwarded_signal and failure.was_caused_by(forwarded_signal):
        return RunResult(_SIGNAL_BASE + forwarded_signal, reason=signal.Signals(forwarded_signal).name)
    if failure.exit_code >= 0:  # no signal ended the rank
        return RunResult(failure.exit_code or EXIT_UNEXPECTED)

    signal_number = -failure.exit_code
    signal_name = signal.Signals(signal_number).name
    reason = f"rank {failure.rank} (process {failure.pid}) was ended by {signal_name}"
    if signal_name == "SIGKILL":
        reason += " (out of memory?)"
    advice = "--resume-from-checkpoint true resumes from the newest checkpoint, if there is one."
    show(f"packtool: {reason}; all others were stopped.\n{advice}", error=True)
    return RunResult(_SIGNAL_BASE + signal_number, reason)


def _first_failure(error: ChildFailedError) -> _RankFailure:
    """Return the failure of a killed rank, or else of the rank that failed first."""
    # If a rank is killed, the others fail too, and torchrun may notice one of them first.
    sigterm = -signal.SIGTERM
    killed = [(rank, each) for rank, each in error.failures.items() if each.exitcode < 0 and each.exitcode != sigterm]
    rank, failure = killed[-1] if killed else error.get_first_failure()
    return _RankFailure(rank, failure.pid, int(failure.exitcode))


def run_launcher(arguments: Sequence[str]) -> int:
    """Run torchrun, print configuration errors, and return the exit code."""
    try:
        return run_torchrun(arguments)
    except ConfigError as refused:
        show(f"packtool: error: {refused}", error=True)
        return refused.exit_code
    except SignalException as error:  # a signal after the ranks have ended
        return _SIGNAL_BASE + int(error.sigval)


if __name__ == "__main__":
    sys.exit(run_launcher(sys.argv[1:]))
