"""Locks of output directories: one export, the parts of one export, or one training writes there at a time.

    OUTPUT_DIR/.lock-000001.json       of a whole export or a training; the largest number holds the directory
    OUTPUT_DIR/.lock-part-RUN.json     of a part of a job array

A lock is created by a write that succeeds for only one of several processes, on local disks and in object stores. Once
it is stale (see ``Holder.is_live``), the next holder creates one with the next number, so that two processes cannot
take the same lock, and none removes a new one. A holder whose lock was considered stale, for example after a
suspension, sees the larger number at its next check and stops.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Self

from packtool import storage
from packtool.config.settings import load_json
from packtool.errors import MismatchError, StorageError

_PREFIX, _SUFFIX = ".lock-", ".json"
_RENEWED_S, _STALE_S = 30.0, 300.0


@dataclass(frozen=True)
class Holder:
    """The content of a lock.

    Args:
        run: random identifier of the run.
        space: boot and container, within which ``pid`` is unique.
        started: start time of the process in ticks, because process ids are reused.
        since, renewed: when the lock was taken and last renewed, Unix time in seconds.
        part: "2 of 8" for a part of a job array, else empty.
        what: kind of run ("export", "training"), for messages.
    """

    run: str
    host: str
    space: str
    pid: int
    started: str
    since: float
    renewed: float
    part: str = ""
    what: str = "export"

    @classmethod
    def this_process(cls, part: str = "", what: str = "export") -> Holder:
        """Return the lock content of a run that starts now in this process."""
        now = time.time()
        pid = os.getpid()
        started = _start_ticks(pid) or ""
        return cls(secrets.token_hex(8), socket.gethostname(), _pid_space(), pid, started, now, now, part, what)

    @property
    def is_live(self) -> bool:
        """True unless the process has ended, or on another machine has not renewed the lock for five minutes."""
        if (self.host, self.space) == (socket.gethostname(), _pid_space()):
            return _start_ticks(self.pid) == self.started
        return time.time() - self.renewed < _STALE_S

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def __str__(self) -> str:
        what = f"part {self.part}" if self.part else self.what
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        ago = max(time.time() - self.renewed, 0.0)
        return f"{what} on host {self.host}, process {self.pid}, since {since} (last renewed {ago:.0f} s ago)"


def _pid_space() -> str:
    """Return an identifier of this boot of the machine and this container, within which process ids are unique."""
    parts = []
    with suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts.append(file.read().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _start_ticks(pid: int) -> str | None:
    """Return the start time of a local process in clock ticks; "" if it is unknown, None if the process has ended."""
    if not os.path.isdir("/proc/self"):
        import psutil  # here, because it is needed only on systems without ``/proc``

        return "" if psutil.pid_exists(pid) else None
    try:
        with open(f"/proc/{pid}/stat") as file:
            text = file.read()
    except OSError as error:
        return None if isinstance(error, FileNotFoundError) else ""
    fields = text.rpartition(")")[2].split()  # after the name of the process, which may hold anything; see proc(5)
    state, start_ticks = fields[0], fields[19]
    is_ended = state in "ZX"  # a zombie or dead
    return None if is_ended else start_ticks


def is_lock(name: str) -> bool:
    """Return whether a file name is that of a lock."""
    return name.startswith(_PREFIX) and name.endswith(_SUFFIX)


def is_of_lock(name: str) -> bool:
    """Return whether a file name is that of a lock, or of a temporary file that becomes one."""
    return name.startswith(_PREFIX)


def holders(directory: str) -> dict[str, Holder]:
    """Return the content of all readable locks of a directory by file name, live and stale."""
    locks = {}
    for name in storage.list_names(directory):
        if is_lock(name):
            with suppress(StorageError, ValueError, TypeError):  # removed meanwhile, or damaged
                locks[name] = Holder(**load_json(storage.read_bytes(storage.join(directory, name))))
    return locks


def refuse_if_busy(directory: str, *, is_part: bool = False, own: str = "") -> None:
    """Raise a MismatchError if another run writes to a directory, unless both are parts of a job array.

    ``own``: file name of this run's lock, which is ignored.
    """
    for name, holder in holders(directory).items():
        if name != own and holder.is_live and not (is_part and holder.part):
            raise MismatchError(
                f"{directory} is being written by another {holder}",
                "Wait for it, end it, or give another --output-dir. If that machine is gone for good, run again in "
                f"{_STALE_S / 60:.0f} minutes or remove {storage.join(directory, name)}.",
            )


def remove_stale(directory: str, *, own: str = "") -> bool:
    """Remove stale locks except ``own``; return whether no other run is writing to the directory."""
    live = {name for name, holder in holders(directory).items() if holder.is_live}
    for name in storage.list_names(directory):
        if is_lock(name) and name != own and name not in live:
            storage.remove(storage.join(directory, name))
    return not live - {own}


class DirectoryLock:
    """A context manager that holds a directory's lock, alone or together with other parts of the same export.

    Entering raises a MismatchError if the directory is busy. A thread renews the lock every half minute.
    """

    def __init__(self, directory: str, part: str = "", what: str = "export") -> None:
        self._directory = directory
        self._holder = Holder.this_process(part, what)
        self._name = ""  # of the lock's file, once it is taken
        self._is_lost = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lock", daemon=True)

    @property
    def is_held(self) -> Callable[[], bool]:
        """A function that returns whether the lock is still held; it can be sent to other processes."""
        return partial(_is_held, self._directory, self._name, self._holder.run)

    def __enter__(self) -> Self:
        is_part = bool(self._holder.part)
        storage.make_directory(self._directory)
        try:
            if is_part:
                refuse_if_busy(self._directory, is_part=True)
                self._name = f"{_PREFIX}part-{self._holder.run}{_SUFFIX}"
                storage.publish(storage.join(self._directory, self._name), self._holder.to_json())
            else:
                self._name = self._create_numbered()
            remove_stale(self._directory, own=self._name)
            # Check again: a whole export and a part, whose locks have different names, may have begun together.
            refuse_if_busy(self._directory, is_part=is_part, own=self._name)
        except BaseException:
            self._release()
            raise
        self._thread.start()
        return self

    def _create_numbered(self) -> str:
        """Create a lock with a number above those of the existing locks; return its name."""
        while True:
            refuse_if_busy(self._directory)
            numbers = [_number(name) for name in storage.list_names(self._directory) if is_lock(name)]
            name = f"{_PREFIX}{max(numbers, default=0) + 1:06d}{_SUFFIX}"
            if storage.publish_new(storage.join(self._directory, name), self._holder.to_json()):
                return name  # else another process was faster

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._release()

    def check(self) -> None:
        """Read the lock; raise a MismatchError if another run has taken over the directory."""
        self._is_lost = self._is_lost or not self.is_held()
        self.check_last_renewal()

    def check_last_renewal(self) -> None:
        """Raise a MismatchError if the last renewal or check found that another run has taken over; reads nothing."""
        if self._is_lost:
            raise lost_error(self._directory)

    def _renew(self) -> None:
        while not self._end.wait(_RENEWED_S):
            with suppress(StorageError):  # the network may be back next time
                if not self.is_held():
                    self._is_lost = True
                    return
                self._holder = replace(self._holder, renewed=time.time())
                storage.publish(storage.join(self._directory, self._name), self._holder.to_json())

    def _release(self) -> None:
        with suppress(StorageError):
            if self._name and not self._is_lost and _is_lock_of(self._directory, self._name, self._holder.run):
                storage.remove(storage.join(self._directory, self._name))


def _is_held(directory: str, name: str, run: str) -> bool:
    """Return whether the lock ``name`` belongs to ``run``, and no other run has created a lock with a larger number."""
    names = [name for name in storage.list_names(directory) if is_lock(name)]
    newer = any(_number(other) > _number(name) for other in names)
    return name in names and (not newer or _number(name) == 0) and _is_lock_of(directory, name, run)


def lost_error(directory: str) -> MismatchError:
    """Return the error of a lock that is no longer held."""
    return MismatchError(
        f"{directory} was taken over by another run while this one was suspended: nothing more is written",
        "Run the same command again when the other one has ended, or give another --output-dir.",
    )


def _is_lock_of(directory: str, name: str, run: str) -> bool:
    """Read a lock and return whether it belongs to a run; a StorageError passes through."""
    try:
        return bool(Holder(**load_json(storage.read_bytes(storage.join(directory, name)))).run == run)
    except (ValueError, TypeError):
        return False


def _number(name: str) -> int:
    """Return the number in a lock's file name; 0 for the lock of a part of an export."""
    digits = name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
    return int(digits) if digits.isdigit() else 0
