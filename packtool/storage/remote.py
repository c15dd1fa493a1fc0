"""Requests to remote stores: the I/O thread, its connections, retries, and files read by ranges."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import io
import os
import random
import re
import threading
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from contextlib import AbstractAsyncContextManager
from queue import Empty, SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

from packtool.errors import StorageError
from packtool.storage.faults import is_temporary, storage_error
from packtool.storage.options import options

T = TypeVar("T")

_MAX_BLOCK = 8 * 2**20
_MAX_CACHED_BYTES = 16 * 2**20
_POLL_S = 0.5
_CLOSE_S = 2.0


_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_connections: dict[Hashable, asyncio.Future[Any]] = {}
_closing = contextlib.AsyncExitStack()
# After a fork: objects of the parent. They are kept, because deleting them would close the parent's connections.
_inherited: list[object] = []


class Request(Generic[T]):
    """A coroutine that runs on the I/O thread.

    Not a future of ``concurrent.futures``: a KeyboardInterrupt can leave its lock locked, because Python code releases
    it, and the I/O thread would wait for it forever.
    """

    task: asyncio.Task[T]

    def __init__(self, work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> None:
        self.ended: SimpleQueue[asyncio.Task[T]] = SimpleQueue()  # receives the task when it has ended
        self._loop = loop
        loop.call_soon_threadsafe(self._begin, work)

    def cancel(self) -> None:
        """Cancel the coroutine; may be called on any thread, also after its end."""
        self._loop.call_soon_threadsafe(lambda: self.task.cancel())

    def _begin(self, work: Coroutine[Any, Any, T]) -> None:
        self.task = self._loop.create_task(work)
        self.task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # asyncio would log an exception that nobody reads
        self.ended.put(task)


def start(work: Coroutine[Any, Any, T]) -> Request[T]:
    """Run a coroutine on the I/O thread of this process, which the first call starts."""
    global _loop
    with _lock:
        if _loop is None:
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="packtool-storage", daemon=True).start()
            atexit.register(forget_connections)
            _loop = loop  # last, because Ctrl-C may interrupt the lines before
        return Request(work, _loop)


async def connection(key: Hashable, connect: Callable[[], AbstractAsyncContextManager[T]]) -> T:
    """Return the pool of a key, open from the first use to ``forget_connections``; call this on the I/O thread."""
    if key not in _connections:
        _connections[key] = asyncio.ensure_future(_closing.enter_async_context(connect()))
    try:
        # Shielded, because other requests may wait for the same pool when this one is cancelled.
        connected: T = await asyncio.shield(_connections[key])
    except Exception:
        _connections.pop(key, None)
        raise
    return connected


def forget_connections() -> None:
    """Close all connections; the next requests open new ones with the options and credentials of that time."""
    global _closing
    if _loop is not None:
        closing, _closing = _closing, contextlib.AsyncExitStack()
        _connections.clear()
        with contextlib.suppress(Exception):
            start(closing.aclose()).ended.get(timeout=_CLOSE_S)


def _after_fork() -> None:
    global _lock, _loop, _connections, _closing
    _inherited.append((_loop, _connections, _closing))
    _lock, _loop, _connections, _closing = threading.Lock(), None, {}, contextlib.AsyncExitStack()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def wait(work: Coroutine[Any, Any, T] | Request[T]) -> T:
    """Wait for a coroutine on the I/O thread and return its result; Ctrl-C cancels it."""
    request = work if isinstance(work, Request) else start(work)
    try:
        while True:
            # With a timeout, because a signal that another thread receives does not interrupt the wait.
            with contextlib.suppress(Empty):
                return request.ended.get(timeout=_POLL_S).result()
    except BaseException:
        request.cancel()
        raise


def result_of(path: str, operation: str, work: Coroutine[Any, Any, T] | Request[T]) -> T:
    """Wait for a coroutine and return its result; raise every error as a StorageError with path and operation."""
    try:
        return wait(work)
    except StorageError:
        raise
    except Exception as error:
        # Not chained: libraries' messages may hold signed URLs, and --debug would print them.
        raise storage_error(path, operation, error) from None


async def with_retries(work: Callable[[], Awaitable[T]], num_bytes: int = 0, retries: int | None = None) -> T:
    """Make a request, and retry it if it fails for a temporary reason, as ``packtool.storage.options`` describes.

    ``num_bytes``: bytes that it transfers, for its time limit. ``retries``: None for the number in the options.
    """
    settings = options()
    retries = settings.retries if retries is None else retries
    for attempt in range(retries + 1):
        try:
            return await asyncio.wait_for(work(), settings.time_limit(num_bytes))
        except Exception as error:
            if attempt == retries or not is_temporary(error):
                error.__dict__["tries"] = attempt + 1  # ``storage_error`` puts it into the message
                raise
        # A random pause, so that processes do not repeat their requests at the same time.
        await asyncio.sleep(settings.pause_s(attempt) * random.uniform(0.5, 1.0))
    raise AssertionError("the last attempt returns or raises")


class Range(NamedTuple):
    """A range of bytes of a file of ``size`` bytes; ``tag`` changes when the file does, "" if there is none."""

    data: bytes
    size: int
    tag: str


def check_complete(data: bytes, begin: int, content_range: str) -> None:
    """Raise a ConnectionError, which is retried, if a body from ``begin`` on is not the range in ``Content-Range``.

    A proxy may truncate a body and change its length header to match.
    """
    match = re.match(r"bytes (\d+)-(\d+)/", content_range)
    if match and (int(match[1]), int(match[2]) + 1) != (begin, begin + len(data)):
        raise ConnectionError(f"the server sent {len(data):,} bytes and announced {content_range}")


class RemoteReader(io.RawIOBase):
    """A remote file read by ranges; wrap it into a BufferedReader. Every read may raise a StorageError.

    The first block is small, so that reading a header takes one short request. The blocks of a sequential read double
    in size up to 8 MiB, and the next one is fetched while one is used. After a seek, blocks are small again. At most
    24 MiB are kept in memory.
    """

    def __init__(
        self, path: str, fetch: Callable[[int, int], Coroutine[Any, Any, Range]], first_block: int, first: Range
    ) -> None:
        self._path, self._fetch, self._first_block = path, fetch, first_block
        self._process = os.getpid()
        self._position = 0
        self._size, self.tag = first.size, first.tag
        self._blocks: list[tuple[int, bytes]] = [(0, first.data)]
        self._next, self._step = len(first.data), first_block
        self._ahead: tuple[int, Request[Range]] | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position; nothing is fetched before the next read."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"position {base + offset} is before the file")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read bytes of one block; fetch it if it is not in memory."""
        view = memoryview(buffer).cast("B")
        if self._position >= self._size or not len(view):
            return 0
        begin, data = self._block_at(self._position)
        offset = self._position - begin
        count = min(len(view), len(data) - offset)
        view[:count] = memoryview(data)[offset : offset + count]
        self._position += count
        return count

    def close(self) -> None:
        if not self.closed:
            if self._ahead is not None and os.getpid() == self._process:
                self._ahead[1].cancel()
            self._ahead, self._blocks = None, []
        super().close()

    def _block_at(self, position: int) -> tuple[int, bytes]:
        """Return the begin and the data of the block that holds a position; fetch it if it is not in memory."""
        for i in reversed(range(len(self._blocks))):
            begin, data = self._blocks[i]
            if begin <= position < begin + len(data):
                self._blocks.append(self._blocks.pop(i))
                return begin, data
        is_sequential = position == self._next
        self._step = min(self._step * 2, _MAX_BLOCK) if is_sequential else self._first_block
        data = self._take_ahead(position) or self._checked(position, self._fetch(position, self._stop(position)))
        self._next = position + len(data)
        self._blocks.append((position, data))
        while len(self._blocks) > 1 and sum(len(block) for _, block in self._blocks) > _MAX_CACHED_BYTES:
            self._blocks.pop(0)
        if is_sequential and self._next < self._size:
            self._ahead = self._next, start(self._fetch(self._next, self._stop(self._next)))
        return position, data

    def _stop(self, position: int) -> int:
        """Return the end of a new block of the current size, cut where the file ends or a block in memory begins."""
        ends = [begin for begin, _ in self._blocks if begin > position]
        return min(position + self._step, self._size, *ends)

    def _take_ahead(self, position: int) -> bytes | None:
        """Return the data of the block that is being fetched ahead if it begins at ``position``; else cancel it."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or os.getpid() != self._process:
            return None
        if ahead[0] != position:
            ahead[1].cancel()
            return None
        return self._checked(position, ahead[1])

    def _checked(self, begin: int, work: Coroutine[Any, Any, Range] | Request[Range]) -> bytes:
        """Return the data of a request; raise a StorageError if it comes from another version of the file."""
        block = result_of(self._path, "reading", work)
        if (block.size, block.tag) != (self._size, self.tag) or (not block.data and begin < self._size):
            raise StorageError(
                f"{self._path} was replaced while it was being read", "Run again when no process writes to it."
            )
        return block.data


def open_ranges(
    path: str, fetch: Callable[[int, int], Coroutine[Any, Any, Range]], first_block: int
) -> io.BufferedReader:
    """Open a remote file for reading by range requests: seekable and buffered.

    The first block is fetched at once, so that a missing file raises a StorageError here.
    """
    first = result_of(path, "opening", fetch(0, first_block))
    return io.BufferedReader(RemoteReader(path, fetch, first_block, first), min(first_block, 2**17))
