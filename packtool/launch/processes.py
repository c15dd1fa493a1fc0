"""Start of train, eval and verify in several processes, as variables of the environment request.

NPROC_PER_NODE=8 packtool train ...                      8 processes on this machine
NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 NPROC_PER_NODE=8 packtool train ...
                                                         the first of two machines with 8 each
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import hashlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, NoReturn

from packtool.errors import ConfigError
from packtool.launch.world import World, is_launched

_LAUNCHER = "PACKTOOL_LAUNCHER"
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_POLL_SECONDS = 1.0
_DEFAULT_PORT = 29500
_MAX_PORT = 65535
_THIS_MACHINE = "127.0.0.1"
_DEFAULT_WAIT_SECONDS = 1800


@dataclass(frozen=True)
class Processes:
    """Number of processes on all machines, and the address of the first one, at which they meet."""

    per_node: int = 1
    num_nodes: int = 1
    node_rank: int = 0
    address: str = _THIS_MACHINE
    port: int | None = None

    @property
    def total(self) -> int:
        """Number of processes on all machines."""
        return self.per_node * self.num_nodes

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Processes:
        """Read the environment variables that request several processes, on one machine or on several.

        Without these variables, the result is one process. A ConfigError lists all wrong and missing values.
        """
        problems: list[str] = []  # ``_number_from`` appends a message for a wrong value, and returns the default
        per_node = _number_from(environ, "NPROC_PER_NODE", problems, default=1, minimum=1)
        num_nodes = _number_from(environ, "NNODES", problems, default=1, minimum=1)
        node_rank = _number_from(environ, "NODE_RANK", problems, default=0, minimum=0)
        port = _number_from(environ, "MASTER_PORT", problems, default=0, minimum=1, maximum=_MAX_PORT)
        # The name of a single machine is not used: it may not resolve.
        address = environ.get("MASTER_ADDR", "") if num_nodes > 1 else _THIS_MACHINE

        if node_rank >= num_nodes:
            problems.append(f"NODE_RANK={node_rank}: with NNODES={num_nodes} it must be below {num_nodes}")
        if num_nodes > 1 and not environ.get("NODE_RANK"):
            problems.append(f"NODE_RANK is missing: with NNODES={num_nodes} give each machine its number, from 0 on")
        if not address:
            problems.append(f"MASTER_ADDR is missing: with NNODES={num_nodes} it names the machine with NODE_RANK=0")
        if problems:
            raise ConfigError.from_problems(problems)
        return cls(per_node, num_nodes, node_rank, address, port=port or None)


def environment_of_one_process() -> dict[str, str]:
    """Return a copy of this process's environment without the variables that request several processes."""
    return {name: value for name, value in os.environ.items() if name not in ("NPROC_PER_NODE", "NNODES")}


def launch_command(arguments: Sequence[str], environ: Mapping[str, str], *, max_wait: int | None = None) -> list[str]:
    """Return the torchrun command that runs ``packtool ARGUMENTS`` in all processes of this machine."""
    processes = Processes.from_environment(environ)
    is_single_machine = processes.num_nodes == 1
    options = ["--nnodes", str(processes.num_nodes), "--nproc-per-node", str(processes.per_node)]
    if is_single_machine:
        options += ["--local-addr", processes.address]
    else:
        options += ["--rdzv-conf", f"timeout={max_wait or _DEFAULT_WAIT_SECONDS}"]
    if is_single_machine and processes.port is None:
        options.append("--standalone")  # torchrun chooses a free port, so that two jobs do not meet by accident
    else:
        options += ["--node-rank", str(processes.node_rank), "--master-addr", processes.address]
        options += ["--master-port", str(processes.port or _DEFAULT_PORT)]
    return [sys.executable, "-m", "packtool.launch.torchrun", *options, "--module", "packtool", *arguments]


def set_passive_omp_wait() -> None:
    """Let waiting OpenMP threads sleep, unless ``OMP_WAIT_POLICY`` is set; call it before torch is imported.

    Spinning made CPU training ten times slower on a shared machine.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def end_with_launcher() -> None:
    """Kill this process when its launcher ends, even if that is killed; does nothing outside torchrun."""
    if not is_launched():
        return
    parent = os.getppid()

    def kill_after_parent() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=kill_after_parent, daemon=True).start()
    # The launcher may have ended before the kernel or the thread watched it.
    if os.getppid() != parent or _has_launcher_ended():
        os.kill(os.getpid(), signal.SIGKILL)


def _has_launcher_ended() -> bool:
    """Return whether no process has the id of the launcher, which the environment names if packtool started it."""
    launcher_id = os.environ.get(_LAUNCHER, "")
    if not launcher_id.isdecimal():
        return False
    try:
        os.kill(int(launcher_id), 0)  # sends no signal, only checks that the process exists
    except ProcessLookupError:
        return True
    except OSError:
        pass  # it exists, but may not receive signals from this process
    return False


def exec_torchrun(arguments: Sequence[str], *, max_wait: int | None = None) -> NoReturn:
    """Replace this process by torchrun, which runs ``packtool ARGUMENTS`` in all processes of this machine."""
    command = launch_command(arguments, os.environ, max_wait=max_wait)
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_threads = max(1, num_cores // Processes.from_environment(os.environ).per_node)
    # exec keeps the process id.
    environ = {"OMP_NUM_THREADS": str(num_threads), **os.environ, _LAUNCHER: str(os.getpid())}
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(command[0], command, environ)


def _number_from(
    environ: Mapping[str, str], name: str, problems: list[str], default: int, minimum: int, maximum: int | None = None
) -> int:
    """Return a whole number from the environment, or the default; append a problem if it is out of bounds."""
    text = environ.get(name)
    if not text:
        return default
    if not text.strip().isdecimal() or int(text) < minimum or (maximum is not None and int(text) > maximum):
        bounds = f"from {minimum} to {maximum}" if maximum is not None else f"of at least {minimum}"
        problems.append(f"{name}={text}: expected a whole number {bounds}")
        return default
    return int(text)


def begins_run() -> bool:
    """Return whether this process starts a run: it is not a rank of torchrun, and this is the first machine."""
    return not is_launched() and Processes.from_environment(os.environ).node_rank == 0


def launch_ranks(
    arguments: Sequence[str],
    sequence_parallel_size: int,
    prepare: Callable[[World], object],
    *,
    torchrun: Literal["auto", "always", "never"] = "auto",
    max_wait: int | None = None,
) -> World:
    """Return the rank of this process; if torchrun must be started first, this process becomes torchrun instead.

    Args:
        prepare: called with rank 0 before processes are started, to report problems once.
        torchrun: ``auto`` starts it if the environment requests several processes, ``always`` also for one. With
            ``never``, this process is rank 0 of the requested number, for previews and work of a single process.
        max_wait: seconds to wait for other machines; None for the default.
    """
    set_passive_omp_wait()
    world = World.from_environment()
    if is_launched():
        return world
    num_processes = Processes.from_environment(os.environ).total
    first_rank = World(rank=0, size=num_processes).shared_by(sequence_parallel_size)
    if torchrun == "always" or (torchrun == "auto" and num_processes > 1):
        prepare(first_rank)
        exec_torchrun(arguments, max_wait=max_wait)
    return first_rank


_STORE_SECONDS = 2.0


def is_printed_elsewhere(message: str, environ: Mapping[str, str] | None = None) -> bool:
    """Return whether another process of this run prints a message; if not, record that this one prints it.

    The record is in the key-value store of torchrun, at MASTER_ADDR:MASTER_PORT of ``environ`` (None: of this process).
    Without a store, or if it does not respond, returns False, so that every process prints its messages.
    """
    environ = os.environ if environ is None else environ
    has_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if environ.get("WORLD_SIZE") == "1" or not has_store:
        return False
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined] # here, because it takes seconds

    rank = environ.get("RANK", "")
    try:
        host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        # Connect a plain socket first, because torch would print a stack trace if the store is gone.
        socket.create_connection((host, port), _STORE_SECONDS).close()
        timeout = timedelta(seconds=_STORE_SECONDS)
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        # Set the key to this rank if it is new; the result is the rank that set it first.
        key = _message_key(message, environ)
        first_rank = store.compare_set(key, "", rank)
        return bool(first_rank != rank.encode())
    except (DistError, RuntimeError, KeyError, ValueError, OSError):
        return False  # better printed twice than never


def _message_key(message: str, environ: Mapping[str, str]) -> str:
    """Return the key of a message in torchrun's store; after a restart, messages are printed again."""
    attempt = f"{environ.get('TORCHELASTIC_RUN_ID', '')}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return f"packtool/said/{attempt}/{hashlib.sha256(message.encode()).hexdigest()}"


@contextlib.contextmanager
def imported_at_once() -> Iterator[None]:
    """Disable garbage collection while torch and transformers are imported; it would take a third of that time."""
    if "transformers" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # libraries that count their objects at exit would complain
