"""Locks of output directories: one export, the parts of one export, or one training writes there at a time.

    OUTPUT_DIR/.lock-000001.json       of a whole export or a training; the largest number holds the directory
    OUTPUT_DIR/.lock-part-RUN.json     of a part of a job array

A lock names host, process and start time. It is created by a write that succeeds for only one of several processes, on
local disks and in object stores, and renewed every half minute. A lock is stale when its process on this machine has
ended, and on other machines after five minutes without a renewal. The next holder takes the next number, so that no
two processes take the same and nobody removes a new lock. A holder that was taken for dead sees the larger number at
its next check, and stops.
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
        run: random, unique to the run.
        host, space: name of the machine; boot and container, in which ``pid`` is unique.
        pid, started: of the process; its start time in ticks, because ids are reused.
        since, renewed: Unix time in seconds.
        part: "2 of 8" for a part of a job array.
        what: kind of the run, for messages.
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
        """Return the holder for a run of this process that starts now."""
        now = time.time()
        pid = os.getpid()
        started = _started(pid) or ""
        return cls(secrets.token_hex(8), socket.gethostname(), _space(), pid, started, now, now, part, what)

    @property
    def is_live(self) -> bool:
        """True unless the process that holds the lock is known to have ended."""
        if (self.host, self.space) == (socket.gethostname(), _space()):
            return _started(self.pid) == self.started
        return time.time() - self.renewed < _STALE_S

    def to_json(self) -> bytes:
        """Return the content of the lock's file."""
        return json.dumps(asdict(self)).encode()

    def __str__(self) -> str:
        what = f"part {self.part}" if self.part else self.what
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        ago = max(time.time() - self.renewed, 0.0)
        return f"{what} on host {self.host}, process {self.pid}, since {since} (last sign of life {ago:.0f} s ago)"


def _space() -> str:
    """Return an identifier of this boot of the machine and this container, in which process ids are unique."""
    parts = []
    with suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts.append(file.read().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _started(pid: int) -> str | None:
    """Return the start time of a local process in ticks; empty if it is unknown, None if the process has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, *fields = file.read().rpartition(")")[2].split()  # the name may hold anything
        return None if state in "ZX" else fields[18]
    except FileNotFoundError:
        if os.path.isdir("/proc/self"):
            return None
    except OSError:
        return ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass
    return ""


def is_lock(name: str) -> bool:
    """Return whether a file name is that of a lock."""
    return name.startswith(_PREFIX) and name.endswith(_SUFFIX)


def is_of_lock(name: str) -> bool:
    """Return whether a file name is that of a lock, finished or still being written."""
    return name.startswith(_PREFIX)


def holders(directory: str) -> dict[str, Holder]:
    """Return the readable locks of a directory by name, live and stale ones."""
    locks = {}
    for name in storage.list_names(directory):
        if is_lock(name):
            with suppress(StorageError, ValueError, TypeError):  # gone again, or broken
                locks[name] = Holder(**load_json(storage.read_bytes(storage.join(directory, name))))
    return locks


def refuse_if_busy(directory: str, *, is_part: bool = False, own: str = "") -> None:
    """Raise a MismatchError if a run with another lock than ``own`` writes there; parts do not exclude each other."""
    for name, holder in holders(directory).items():
        if name != own and holder.is_live and not (is_part and holder.part):
            raise MismatchError(
                f"{directory} is being written by another {holder}",
                "Wait for it, end it, or give another --output-dir. If that machine is gone for good, run again in "
                f"{_STALE_S / 60:.0f} minutes or remove {storage.join(directory, name)}.",
            )


def remove_stale(directory: str, *, own: str = "") -> bool:
    """Remove stale locks except ``own``; return whether nobody else is writing there."""
    alive = {name for name, holder in holders(directory).items() if holder.is_live}
    for name in storage.list_names(directory):
        if is_lock(name) and name != own and name not in alive:
            storage.remove(storage.join(directory, name))
    return not alive - {own}


class DirectoryLock:
    """The right to write to a directory, alone or with other parts of the same export; a context manager.

    Args:
        directory: normalized.
        part: "2 of 8" for a part of a job array; empty for a whole export.
        what: kind of this run, for the messages of others.

    Raises:
        MismatchError: on entering, if the directory is busy.
    """

    def __init__(self, directory: str, part: str = "", what: str = "export") -> None:
        self._directory = directory
        self._holder = Holder.this_process(part, what)
        self._name = f"{_PREFIX}part-{self._holder.run}{_SUFFIX}" if part else ""
        self._is_lost = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lock", daemon=True)

    @property
    def is_held(self) -> Callable[[], bool]:
        """A function that returns whether the lock still holds, for workers in other processes too."""
        return partial(_is_held, self._directory, self._name, self._holder.run)

    def __enter__(self) -> Self:
        storage.make_directory(self._directory)
        try:
            if self._holder.part:
                refuse_if_busy(self._directory, is_part=True)
                storage.publish(storage.join(self._directory, self._name), self._holder.to_json())
            while not self._name:
                refuse_if_busy(self._directory)
                numbers = [_number(name) for name in storage.list_names(self._directory) if is_lock(name)]
                name = f"{_PREFIX}{max(numbers, default=0) + 1:06d}{_SUFFIX}"
                if storage.publish_new(storage.join(self._directory, name), self._holder.to_json()):
                    self._name = name
            remove_stale(self._directory, own=self._name)
            # Parts and whole exports write different names, so that both may succeed at the same moment.
            refuse_if_busy(self._directory, is_part=bool(self._holder.part), own=self._name)
        except BaseException:
            self._release()
            raise
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._release()

    def check(self) -> None:
        """Raise a MismatchError if another run has taken the directory over, as after a long suspension."""
        self._is_lost = self._is_lost or not self.is_held()
        self.check_last_renewal()

    def check_last_renewal(self) -> None:
        """Raise as ``check`` does, by the result of the last renewal; costs nothing."""
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
            if self._name and not self._is_lost and _reads(self._directory, self._name, self._holder.run):
                storage.remove(storage.join(self._directory, self._name))


def _is_held(directory: str, name: str, run: str) -> bool:
    names = [name for name in storage.list_names(directory) if is_lock(name)]
    newer = any(_number(other) > _number(name) for other in names)
    return name in names and (not newer or _number(name) == 0) and _reads(directory, name, run)


def lost_error(directory: str) -> MismatchError:
    """Return the error of a lock that is no longer held."""
    return MismatchError(
        f"{directory} was taken over by another run while this one stood still: nothing more is written",
        "Run the same command again when the other one has ended, or give another --output-dir.",
    )


def _reads(directory: str, name: str, run: str) -> bool:
    try:
        return bool(Holder(**load_json(storage.read_bytes(storage.join(directory, name)))).run == run)
    except (ValueError, TypeError):
        return False


def _number(name: str) -> int:
    """Return the number of a lock; 0 for a part of an export."""
    digits = name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
    return int(digits) if digits.isdigit() else 0
