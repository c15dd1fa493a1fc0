"""Who writes into an output directory: one export, the parts of one, or one training, and never two of them.

    OUTPUT_DIR/.lock-000001.json       a whole export's or a training's; the largest number holds the directory
    OUTPUT_DIR/.lock-part-RUN.json     one for each part of a job array that is at work

A lock tells host, process and since when. It is made by a write that only one of several processes succeeds with, on
this machine and in object stores. Each holder renews its own every half minute. A lock is stale when its process is
gone, for one of this machine, and otherwise after five minutes without a renewal. Who finds a stale one takes the next
number: no two can take the same, and nobody need remove what somebody else has just made. A holder that was believed
dead sees the larger number at its next look, and stops.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Self

from packtool import storage
from packtool.config.settings import load_json
from packtool.errors import MismatchError, StorageError

_PREFIX, _PART, _SUFFIX = ".lock-", "part-", ".json"
_RENEWED_S, _STALE_S = 30.0, 300.0


@dataclass(frozen=True)
class Holder:
    """What a lock says of its process.

    Args:
        run: of one run alone.
        host, space: the machine's name; its start and the container's processes, in which ``pid`` has a meaning.
        pid, started: of the process; its start in the system's ticks, since numbers are used again.
        since, renewed: Unix time in seconds.
        part: "2 of 8" for a part of a job array.
        what: the holder's work, for messages.
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
        """The holder that a run of this process would be, from now on."""
        now = time.time()
        pid = os.getpid()
        started = _started(pid) or ""
        return cls(secrets.token_hex(8), socket.gethostname(), _space(), pid, started, now, now, part, what)

    @property
    def is_live(self) -> bool:
        """Whether its process may still be at work."""
        if (self.host, self.space) == (socket.gethostname(), _space()):
            return _started(self.pid) == self.started
        return time.time() - self.renewed < _STALE_S

    def __str__(self) -> str:
        now = time.time()
        what = f"part {self.part}" if self.part else self.what
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        ago = max(now - self.renewed, 0.0)
        return f"{what} on host {self.host}, process {self.pid}, since {since} (last sign of life {ago:.0f} s ago)"


def _space() -> str:
    """Names the set of processes that a process id belongs to: this start of the machine, this container."""
    parts = []
    with suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts.append(file.read().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _started(pid: int) -> str | None:
    """When a process of this machine began, in the system's ticks; None if there is none, or only its remains."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, *fields = file.read().rpartition(")")[2].split()  # the name before may hold anything
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
    """Whether a name in an output directory is a lock's."""
    return name.startswith(_PREFIX) and name.endswith(_SUFFIX)


def is_of_lock(name: str) -> bool:
    """Return whether a file name is that of a lock, finished or still being written."""
    return name.startswith(_PREFIX)


def holders(directory: str) -> dict[str, Holder]:
    """Locks of a directory by name, of the living and the dead; what cannot be read is nobody's."""
    found = {}
    for name in storage.list_names(directory):
        if is_lock(name):
            with suppress(StorageError, ValueError, TypeError):  # gone again, or broken
                found[name] = Holder(**load_json(storage.read_bytes(storage.join(directory, name))))
    return found


def refuse_if_busy(directory: str, *, is_part: bool = False, own: str = "") -> None:
    """Tell at once that another run is writing there. Parts put up with parts.

    Args:
        own: name of the lock of who asks.

    Raises:
        MismatchError: naming host, process and since when.
    """
    for name, holder in holders(directory).items():
        if name != own and holder.is_live and not (is_part and holder.part):
            raise _busy(directory, name, holder)


def remove_stale(directory: str, *, own: str = "") -> bool:
    """Remove the locks of the dead; gives whether nobody else is at work there.

    Args:
        own: name of the lock of who asks.

    Raises:
        StorageError: if that fails.
    """
    alive = {name for name, holder in holders(directory).items() if holder.is_live}
    for name in storage.list_names(directory):
        if is_lock(name) and name != own and name not in alive:
            storage.remove(storage.join(directory, name))
    return not alive - {own}


def _busy(directory: str, name: str, holder: Holder) -> MismatchError:
    return MismatchError(
        f"{directory} is being written by another {holder}",
        "Wait for it, end it, or give another --output-dir. If that machine is gone for good, run again in "
        f"{_STALE_S / 60:.0f} minutes or remove {storage.join(directory, name)}.",
    )


class DirectoryLock:
    """A directory that this run alone, or it and other parts of the same export, may write to; a context manager.

    Args:
        directory: normalized.
        part: "2 of 8" for a part of a job array; empty for a whole export.
        what: this run's work, for the messages of others.

    Raises:
        MismatchError: on entering, if the directory is busy; from ``check``, if somebody has taken it over.
        StorageError: if nothing can be written there.
    """

    def __init__(self, directory: str, part: str = "", what: str = "export") -> None:
        self._directory = directory
        self._holder = Holder.this_process(part, what)
        self._name = f"{_PREFIX}{_PART}{self._holder.run}{_SUFFIX}" if part else ""
        self._is_lost = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lock", daemon=True)

    @property
    def stamp(self) -> LockStamp:
        """What workers need to look at the lock before they put a shard in its place."""
        return LockStamp(self._directory, self._name, self._holder.run)

    def __enter__(self) -> Self:
        storage.make_directory(self._directory)
        try:
            self._take()
            # Parts and whole exports write different names: who came at the same moment is seen here.
            refuse_if_busy(self._directory, is_part=bool(self._holder.part), own=self._name)
        except BaseException:
            self._release()
            raise
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()
        self._release()

    def check(self) -> None:
        """Make sure that nobody has taken the directory over, as after a long suspension.

        Raises:
            MismatchError: if somebody has.
        """
        if self._is_lost or not self.stamp.is_held():
            self._is_lost = True
            raise lost(self._directory)

    def check_soon(self) -> None:
        """Do what ``check`` does at no cost, by what the last renewal found.

        Raises:
            MismatchError: if somebody has.
        """
        if self._is_lost:
            raise lost(self._directory)

    def _take(self) -> None:
        content = _content(self._holder)
        if self._holder.part:
            refuse_if_busy(self._directory, is_part=True)
            storage.publish(storage.join(self._directory, self._name), content)
        while not self._name:
            refuse_if_busy(self._directory)
            numbers = [_number(name) for name in storage.list_names(self._directory) if is_lock(name)]
            name = f"{_PREFIX}{max(numbers, default=0) + 1:06d}{_SUFFIX}"
            if storage.publish_new(storage.join(self._directory, name), content):
                self._name = name
        remove_stale(self._directory, own=self._name)

    def _renew(self) -> None:
        while not self._end.wait(_RENEWED_S):
            with suppress(StorageError):  # the network may be back next time
                if not self.stamp.is_held():
                    self._is_lost = True
                    return
                self._holder = replace(self._holder, renewed=time.time())
                storage.publish(storage.join(self._directory, self._name), _content(self._holder))

    def _release(self) -> None:
        with suppress(StorageError):
            if self._name and not self._is_lost and _reads(self._directory, self._name, self._holder.run):
                storage.remove(storage.join(self._directory, self._name))


@dataclass(frozen=True)
class LockStamp:
    """What it takes to see whether a lock still holds; travels to workers.

    Args:
        directory, name: of the lock.
        run: its holder.
    """

    directory: str
    name: str
    run: str

    def is_held(self) -> bool:
        """Whether the lock still holds.

        Raises:
            StorageError: if that cannot be found out.
        """
        names = [name for name in storage.list_names(self.directory) if is_lock(name)]
        newer = any(_number(name) > _number(self.name) for name in names)
        return (
            self.name in names
            and (not newer or _number(self.name) == 0)
            and _reads(self.directory, self.name, self.run)
        )


def lost(directory: str) -> MismatchError:
    """What to raise where a lock is no longer held."""
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
    """Number of a whole export's lock; 0 for a part's."""
    digits = name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
    return int(digits) if digits.isdigit() else 0


def _content(holder: Holder) -> bytes:
    return json.dumps(asdict(holder)).encode()
