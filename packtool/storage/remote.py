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
from concurrent.futures import Future
from concurrent.futures import wait as futures_wait
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

from packtool.errors import StorageError
from packtool.storage.faults import is_passing, storage_error
from packtool.storage.options import options

T = TypeVar("T")

_LARGEST_BLOCK = 8 * 2**20
_KEPT_BYTES = 16 * 2**20
_POLL_S = 0.5
_CLOSE_S = 2.0


_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_connections: dict[Hashable, asyncio.Future[Any]] = {}
_closing = contextlib.AsyncExitStack()
# Of a forked process's parent: neither used nor closed here, for that would close the parent's connections.
_inherited: list[object] = []


def start(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Start requests on the I/O thread of this process."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="packtool-storage", daemon=True).start()
            atexit.register(forget_connections)
        return asyncio.run_coroutine_threadsafe(work, _loop)


async def connection(key: Hashable, connect: Callable[[], AbstractAsyncContextManager[T]]) -> T:
    """Return the connections that belong to a key, made when they are first needed; called on the I/O thread.

    Args:
        connect: makes them, to be kept until ``forget_connections``.
    """
    if key not in _connections:
        _connections[key] = asyncio.ensure_future(_closing.enter_async_context(connect()))
    try:
        # Another request may wait for it when this one is cancelled.
        connected: T = await asyncio.shield(_connections[key])
    except Exception:
        _connections.pop(key, None)
        raise
    return connected


def forget_connections() -> None:
    """Close all connections; the next requests make new ones, with the options and credentials of then."""
    global _closing
    if _loop is not None:
        closing, _closing = _closing, contextlib.AsyncExitStack()
        _connections.clear()
        with contextlib.suppress(Exception):
            start(closing.aclose()).result(_CLOSE_S)


def _after_fork() -> None:
    global _lock, _loop, _connections, _closing
    _inherited.append((_loop, _connections, _closing))
    _lock, _loop, _connections, _closing = threading.Lock(), None, {}, contextlib.AsyncExitStack()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def wait(work: Coroutine[Any, Any, T] | Future[T]) -> T:
    """Return the result of requests; Ctrl-C ends the waiting and the requests."""
    future = work if isinstance(work, Future) else start(work)
    try:
        # With a timeout, because a signal that another thread receives does not end the wait.
        while not futures_wait([future], timeout=_POLL_S).done:
            pass
        return future.result()
    except BaseException:
        future.cancel()
        raise


def answer(path: str, operation: str, work: Coroutine[Any, Any, T] | Future[T]) -> T:
    """Return the result of requests; every error becomes a StorageError that names path and operation."""
    try:
        return wait(work)
    except StorageError:
        raise
    except Exception as error:
        # Not chained: what libraries say may hold signed URLs, and --debug would print it.
        raise storage_error(path, operation, error) from None


async def with_retries(work: Callable[[], Awaitable[T]], num_bytes: int = 0, retries: int | None = None) -> T:
    """Do one request, and again while it fails for passing reasons: see ``packtool.storage.options``.

    Args:
        work: makes the request; called for each try.
        num_bytes: that it moves.
        retries: further tries, if not those of the options.
    """
    settings = options()
    retries = settings.retries if retries is None else retries
    for attempt in range(retries + 1):
        try:
            return await asyncio.wait_for(work(), settings.limit(num_bytes))
        except Exception as error:
            if attempt == retries or not is_passing(error):
                error.__dict__["tries"] = attempt + 1  # for the message
                raise
        await asyncio.sleep(settings.pause(attempt) * random.uniform(0.5, 1.0))
    raise AssertionError("the last try returns or raises")


@dataclass(frozen=True)
class Range:
    """A piece of a remote file.

    Args:
        data: its bytes.
        size: of the whole file.
        tag: changes when the file does; empty if the place does not say.
    """

    data: bytes
    size: int
    tag: str


def check_complete(data: bytes, begin: int, content_range: str) -> None:
    """Compare an answer's body with its ``Content-Range``: proxies may cut it and set a length to match.

    Args:
        begin: first byte that was requested.

    Raises:
        ConnectionError: which counts as passing.
    """
    found = re.match(r"bytes (\d+)-(\d+)/", content_range)
    if found and (int(found[1]), int(found[2]) + 1) != (begin, begin + len(data)):
        raise ConnectionError(f"the server sent {len(data):,} bytes and announced {content_range}")


class RemoteReader(io.RawIOBase):
    """A remote file, read by ranges; to be wrapped into a BufferedReader.

    The first block is small, so that a look into a header costs one short request. Where reading goes on, blocks double
    up to 8 MiB and the next is fetched while this one is used; after a jump they are small again. At most 24 MiB are
    held.

    Args:
        path: for messages.
        fetch: gives bytes [start, stop), fewer at the end of the file.
        first_block: bytes to fetch at first and after a jump.

    Raises:
        StorageError: from here and from every read.
    Attributes:
        tag: see ``Range``.
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
        self._ahead: tuple[int, Future[Range]] | None = None

    def readable(self) -> bool:
        """Always True."""
        return True

    def seekable(self) -> bool:
        """Always True: seeking costs nothing."""
        return True

    def tell(self) -> int:
        """The position in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a position; nothing is fetched until something is read."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"position {base + offset} is before the file")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read what is at hand, and fetch only if nothing is."""
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
        """Let go of the blocks."""
        if not self.closed:
            self._forget_ahead()
            self._blocks = []
        super().close()

    def _block_at(self, position: int) -> tuple[int, bytes]:
        for i in range(len(self._blocks) - 1, -1, -1):
            begin, data = self._blocks[i]
            if begin <= position < begin + len(data):
                self._blocks.append(self._blocks.pop(i))
                return begin, data
        goes_on = position == self._next
        self._step = min(self._step * 2, _LARGEST_BLOCK) if goes_on else self._first_block
        data = self._take_ahead(position) or self._read(position, self._stop(position))
        self._next = position + len(data)
        self._keep(position, data)
        if goes_on and self._next < self._size:
            self._ahead = self._next, start(self._fetch(self._next, self._stop(self._next)))
        return position, data

    def _stop(self, position: int) -> int:
        """End of a new block: of the size that is due, and never into one that is held."""
        ends = [begin for begin, _ in self._blocks if begin > position]
        return min(position + self._step, self._size, *ends)

    def _keep(self, position: int, data: bytes) -> None:
        self._blocks.append((position, data))
        while len(self._blocks) > 1 and sum(len(block) for _, block in self._blocks) > _KEPT_BYTES:
            self._blocks.pop(0)

    def _read(self, begin: int, stop: int) -> bytes:
        return self._checked(begin, answer(self._path, "reading", self._fetch(begin, stop)))

    def _take_ahead(self, position: int) -> bytes | None:
        """The block that was fetched ahead, if it is this one."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or os.getpid() != self._process:
            return None
        if ahead[0] != position:
            ahead[1].cancel()
            return None
        return self._checked(position, answer(self._path, "reading", ahead[1]))

    def _forget_ahead(self) -> None:
        if self._ahead is not None and os.getpid() == self._process:
            self._ahead[1].cancel()
        self._ahead = None

    def _checked(self, begin: int, piece: Range) -> bytes:
        if (piece.size, piece.tag) != (self._size, self.tag) or (not piece.data and begin < self._size):
            raise StorageError(
                f"{self._path} was replaced while it was being read", "Run again when nobody writes to it any more."
            )
        return piece.data


def open_ranges(
    path: str, fetch: Callable[[int, int], Coroutine[Any, Any, Range]], first_block: int
) -> io.BufferedReader:
    """A seekable, buffered file over range requests; the first is made here, so that a missing file is told now.

    Raises:
        StorageError: if the file cannot be opened.
    """
    first = answer(path, "opening", fetch(0, first_block))
    return io.BufferedReader(RemoteReader(path, fetch, first_block, first), min(first_block, 2**17))
