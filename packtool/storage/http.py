"""``http://`` and ``https://``: single files to read."""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Iterator
from typing import Any, BinaryIO, NoReturn, cast

from packtool.errors import StorageError
from packtool.storage.faults import HttpStatus, is_missing
from packtool.storage.options import options
from packtool.storage.paths import masked
from packtool.storage.remote import Range, answer, open_ranges, patiently
from packtool.storage.store import FileState

_IN_MEMORY = 16 * 2**20
_CHUNK = 2**20

_connection: list[Any] = []
_inherited: list[Any] = []  # see packtool.storage.s3
_lock = threading.Lock()


def forget_connections() -> None:
    """Make new ones from now on, with the options of then."""
    with _lock:
        _connection.clear()


def _after_fork() -> None:
    global _lock
    _inherited.append(list(_connection))
    _connection.clear()
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _files() -> Any:
    with _lock:
        if not _connection:
            import aiohttp
            import fsspec

            wait = options().timeout
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=min(wait, 10.0), sock_read=wait)
            # Compressed on the way, a file would have other offsets.
            settings = {"timeout": timeout, "trust_env": True, "headers": {"Accept-Encoding": "identity"}}
            _connection.append(fsspec.filesystem("http", client_kwargs=settings, skip_instance_cache=True))
        return _connection[0]


class _NoRanges(StorageError):
    """The server sends whole files only."""


class HttpStore:
    """Files on web servers; a ``Store`` that only reads."""

    def find(self, path: str) -> FileState | None:
        """Size and entity tag, or date, of a file."""
        return answer(path, "looking", self._find(path))

    async def _find(self, path: str) -> FileState | None:
        # Not HEAD: addresses signed for reading refuse it.
        async def once() -> FileState | None:
            async with await self._get(path, "bytes=0-0") as response:
                if response.status == 416:
                    return FileState(0, _tag(response))
                _check(response)
                size = _size(response)
                if size is None:  # the server does not say: count
                    size = sum([len(chunk) async for chunk in response.content.iter_chunked(_CHUNK)])
                return FileState(size, _tag(response))

        try:
            return await patiently(once)
        except HttpStatus as error:
            if is_missing(error):
                return None
            raise

    def is_directory(self, path: str) -> bool:
        """Never."""
        return False

    def open_read(self, path: str, first_block: int) -> BinaryIO:
        """Open for reading by ranges, or whole where the server has no ranges."""

        async def fetch(begin: int, stop: int) -> Range:
            async def once() -> Range:
                async with await self._get(path, f"bytes={begin}-{stop - 1}") as response:
                    if response.status == 416 and begin == 0:
                        return Range(b"", 0, _tag(response))
                    _check(response)
                    size = _size(response)
                    if response.status != 206 or size is None:
                        raise _NoRanges(f"{masked(path)}: the server sends whole files only")
                    return Range(await response.read(), size, _tag(response))

            return await patiently(once, stop - begin)

        try:
            return open_ranges(path, fetch, first_block)
        except _NoRanges:
            return answer(path, "reading", self._whole(path))

    async def _whole(self, path: str) -> BinaryIO:
        async def once() -> BinaryIO:
            copy = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115
            try:
                async with await self._get(path) as response:
                    _check(response)
                    async for chunk in response.content.iter_chunked(_CHUNK):
                        copy.write(chunk)
            except BaseException:
                copy.close()
                raise
            copy.seek(0)
            return cast(BinaryIO, copy)

        # Of unknown size: only silence ends it.
        return await patiently(once, 2**60)

    async def _get(self, path: str, wanted: str | None = None) -> Any:
        import yarl

        session = await _files().set_session()
        # Signed addresses must arrive as they are, letter by letter.
        url = yarl.URL(path, encoded=re.search(r"[^!-~]", path) is None)
        return session.get(url, headers={"Range": wanted} if wanted else {})

    def entries(self, path: str) -> dict[str, FileState | None]:
        """Not possible."""
        raise StorageError(f"{masked(path)}: a web server lists no files", "Name the files, or use s3:// or oss://.")

    def list_names(self, path: str) -> list[str]:
        """Not possible."""
        return list(self.entries(path))

    def walk(self, path: str) -> Iterator[str]:
        """Not possible."""
        return iter(self.entries(path))

    def make_directory(self, path: str) -> None:
        """Not possible."""
        _refuse(path)

    def publish(self, path: str, data: bytes) -> None:
        """Not possible."""
        _refuse(path)

    def publish_new(self, path: str, data: bytes) -> bool:
        """Not possible."""
        _refuse(path)

    def writer(self, path: str) -> NoReturn:
        """Not possible."""
        _refuse(path)

    def remove(self, path: str) -> None:
        """Not possible."""
        _refuse(path)

    def discard_unfinished(self, path: str) -> None:
        """Nothing to do: nothing is written there."""


def _refuse(path: str) -> NoReturn:
    raise StorageError(
        f"{masked(path)}: web addresses can only be read", "Write to a directory, to s3:// or to oss://."
    )


def _check(response: Any) -> None:
    if response.status >= 400:
        raise HttpStatus(response.status, response.reason or "")


def _size(response: Any) -> int | None:
    """Of the whole file, if the server says it."""
    text = response.headers.get("Content-Range", "").rpartition("/")[2] or response.headers.get("Content-Length", "")
    return int(text) if text.isdecimal() else None


def _tag(response: Any) -> str:
    tag = response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
    return str(tag).strip('"')
