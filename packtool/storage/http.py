"""Files on ``http://`` and ``https://`` servers, which can only be read."""

from __future__ import annotations

import ipaddress
import re
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, BinaryIO, cast

from packtool.errors import RemoteError, StorageError
from packtool.storage.faults import HttpStatus, is_missing
from packtool.storage.local import Bounds, FileState, RedirectRefused, TooLarge
from packtool.storage.options import options
from packtool.storage.paths import masked, origin
from packtool.storage.remote import Range, check_complete, connection, open_ranges, result_of, with_retries

_IN_MEMORY = 16 * 2**20
_CHUNK = 2**20
_UNLIMITED = 2**60


def _connect(any_server: bool) -> Any:
    """Open a session; unless ``any_server``, host names with addresses in private networks are refused."""
    import aiohttp

    timeout = options().timeout
    tracing = aiohttp.TraceConfig()
    tracing.on_request_redirect.append(_check_redirect)
    # A proxy resolves host names itself, and may be in a private network.
    resolver: Any = None if any_server or urllib.request.getproxies() else _PublicNames(aiohttp.ThreadedResolver())
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(resolver=resolver),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=min(timeout, 10.0), sock_read=timeout),
        trust_env=True,
        headers={"Accept-Encoding": "identity"},  # compression would change the offsets of bytes
        trace_configs=[tracing],
    )


class _PublicNames:
    """A resolver that refuses host names with addresses in private networks, since a row may name any host.

    The session connects to the addresses that were checked. Hosts given as addresses are not resolved.
    """

    def __init__(self, resolver: Any) -> None:
        self._resolver = resolver

    async def resolve(self, host: str, *settings: Any, **more: Any) -> Any:
        addresses = await self._resolver.resolve(host, *settings, **more)
        hosts = [address["host"] for address in addresses]
        private = [name for name in hosts if not ipaddress.ip_address(name.partition("%")[0]).is_global]
        if private and host != "localhost":
            raise RedirectRefused(f"{host}: the name resolves to {private[0]}, an address in a private network")
        return addresses

    async def close(self) -> None:
        await self._resolver.close()


def server_of(address: str) -> str:
    """Return host and, unless it is the default one, port of an address; raise a StorageError if it is invalid."""
    try:
        return _server_of_url(_url(address))
    except ValueError as error:
        raise RemoteError(f"{masked(address)}: invalid address: {error}", "Check the address.") from None


def _url(address: str) -> Any:
    import yarl

    # Signed addresses must be sent unchanged.
    return yarl.URL(address, encoded=re.search(r"[^!-~]", address) is None)


def _server_of_url(url: Any) -> str:
    if not url.host:
        raise ValueError("it names no host")
    return f"http://{url.host}" if url.is_default_port() else f"http://{url.host}:{url.port}"


async def _check_redirect(session: Any, context: Any, redirect: Any) -> None:
    """Raise RedirectRefused for a redirect to a server outside the request's bounds; aiohttp calls this before it."""
    import yarl

    bounds: Bounds | None = context.trace_request_ctx
    if bounds is None or bounds.stores is None:
        return
    target = redirect.url.join(yarl.URL(redirect.response.headers.get("Location", ""), encoded=True))
    if _server_of_url(target) not in bounds.stores:
        redirect.response.close()
        raise RedirectRefused(f"{masked(str(redirect.url))}: redirects to another server, {origin(str(target))}")


class _NoRanges(StorageError):
    """The server does not support range requests."""


class HttpStore:
    """The functions of ``packtool.storage`` for files on web servers, which can only be read."""

    def find(self, path: str) -> FileState | None:
        return result_of(path, "looking", self._find(path))

    async def _find(self, path: str) -> FileState | None:
        """Return size and entity tag of a file, by reading its first byte; None if it does not exist.

        Not by a HEAD request, because addresses that are signed for reading refuse it.
        """

        async def read_state() -> FileState:
            async with await self._get(path, "bytes=0-0") as response:
                if response.status == 416:  # the file has no first byte
                    return FileState(0, _tag(response))
                _check_status(response)
                size = _size(response)
                if size is None:  # the server does not send the size
                    size = 0
                    async for chunk in response.content.iter_chunked(_CHUNK):
                        size += len(chunk)
                return FileState(size, _tag(response))

        try:
            return await with_retries(read_state)
        except HttpStatus as error:
            if is_missing(error):
                return None
            raise

    def is_directory(self, path: str) -> bool:
        return False

    def open_read(self, path: str, first_block: int, bounds: Bounds | None = None) -> BinaryIO:
        """Open a file for reading by range requests; download it if the server does not support them."""
        retries = bounds.retries if bounds else None

        async def fetch(begin: int, stop: int) -> Range:
            attempt = partial(self._read_range, path, begin, stop, bounds)
            return await with_retries(attempt, num_bytes=stop - begin, retries=retries)

        try:
            return open_ranges(path, fetch, first_block)
        except _NoRanges:
            download = with_retries(partial(self._download, path, bounds), num_bytes=_UNLIMITED, retries=retries)
            return result_of(path, "reading", download)

    async def _read_range(self, path: str, begin: int, stop: int, bounds: Bounds | None) -> Range:
        """Request the bytes [begin, stop) of a file; raise _NoRanges if the server sends all of it."""
        async with await self._get(path, f"bytes={begin}-{stop - 1}", bounds) as response:
            if response.status == 416 and begin == 0:  # the file is empty
                return Range(b"", 0, _tag(response))
            _check_status(response)
            size = _size(response)
            if response.status != 206 or size is None:
                raise _NoRanges(f"{masked(path)}: the server sends whole files only")
            data = b"".join([chunk async for chunk in _chunks(path, response, stop - begin)])
            check_complete(data, begin, response.headers.get("Content-Range", ""))
            return Range(data, size, _tag(response))

    async def _download(self, path: str, bounds: Bounds | None) -> BinaryIO:
        """Request a file, and return a temporary file with its content, which is in memory up to 16 MiB."""
        copy = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115
        try:
            async with await self._get(path, None, bounds) as response:
                _check_status(response)
                async for chunk in _chunks(path, response, bounds.max_bytes if bounds else None):
                    copy.write(chunk)
        except BaseException:
            copy.close()
            raise
        copy.seek(0)
        return cast(BinaryIO, copy)

    async def _get(self, path: str, byte_range: str | None = None, bounds: Bounds | None = None) -> Any:
        """Return aiohttp's context manager of a GET request."""
        any_server = bounds is None or bounds.stores is None
        session = await connection(("http", any_server), lambda: _connect(any_server))
        return session.get(_url(path), headers={"Range": byte_range} if byte_range else {}, trace_request_ctx=bounds)


def _check_status(response: Any) -> None:
    if response.status >= 400:
        raise HttpStatus(response.status, response.reason or "")


async def _chunks(path: str, response: Any, max_bytes: int | None) -> AsyncIterator[bytes]:
    """Yield a response's body in chunks; raise TooLarge above ``max_bytes``, TimeoutError below the minimum speed."""
    start, num_bytes = time.monotonic(), 0
    async for chunk in response.content.iter_chunked(_CHUNK):
        num_bytes += len(chunk)
        if max_bytes is not None and num_bytes > max_bytes:
            raise TooLarge(f"{masked(path)}: the server sends more than the limit of {max_bytes:,} bytes")
        if time.monotonic() - start > options().time_limit(num_bytes):
            raise TimeoutError
        yield chunk


def _size(response: Any) -> int | None:
    """Return the size of the file in bytes, from a response's headers; None if the server does not send it."""
    text = response.headers.get("Content-Range", "").rpartition("/")[2] or response.headers.get("Content-Length", "")
    return int(text) if text.isdecimal() else None


def _tag(response: Any) -> str:
    """Return the entity tag or the time of the last change from a response's headers; "" if it has neither."""
    tag = response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
    return str(tag).strip('"')
