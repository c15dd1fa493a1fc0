"""``http://`` and ``https://``: single files to read."""

from __future__ import annotations

import ipaddress
import re
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator
from typing import Any, BinaryIO, cast

from packtool.errors import RemoteError, StorageError
from packtool.storage.faults import HttpStatus, is_missing
from packtool.storage.local import Bounds, FileState, LedElsewhere, TooLarge
from packtool.storage.options import options
from packtool.storage.paths import masked, origin
from packtool.storage.remote import Range, answer, check_complete, connection, open_ranges, with_retries

_IN_MEMORY = 16 * 2**20
_CHUNK = 2**20


def _connect(anywhere: bool) -> Any:
    """Make a session; unless ``anywhere``, names that lead into private networks are refused."""
    import aiohttp

    silence = options().timeout
    tracing = aiohttp.TraceConfig()
    tracing.on_request_redirect.append(_on_redirect)
    # A proxy looks names up by itself, and may well lie in a private network.
    resolver: Any = None if anywhere or urllib.request.getproxies() else _PublicNames(aiohttp.ThreadedResolver())
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(resolver=resolver),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=min(silence, 10.0), sock_read=silence),
        trust_env=True,
        headers={"Accept-Encoding": "identity"},  # compressed on the way, a file would have other offsets
        trace_configs=[tracing],
    )


class _PublicNames:
    """Looks up names, and refuses one that leads into a private network: whoever owns a name decides where it leads.

    The addresses that it gives are those that are connected to. Hosts that are addresses themselves never come here.
    """

    def __init__(self, names: Any) -> None:
        self._names = names

    async def resolve(self, host: str, *settings: Any, **more: Any) -> Any:
        found = await self._names.resolve(host, *settings, **more)
        private = [one["host"] for one in found if not ipaddress.ip_address(one["host"].partition("%")[0]).is_global]
        if private and host != "localhost":
            raise LedElsewhere(f"{host}: the name leads to {private[0]}, an address of a private network")
        return found

    async def close(self) -> None:
        await self._names.close()


def server_of(address: str) -> str:
    """The web server of an address: its host, and its port if that is not the usual one.

    Raises:
        StorageError: if the address is none.
    """
    try:
        return _place(_url(address))
    except ValueError as error:
        raise RemoteError(f"{masked(address)}: no valid address: {error}", "Check the address.") from None


def _url(address: str) -> Any:
    import yarl

    # Signed addresses must arrive as they are, letter by letter.
    return yarl.URL(address, encoded=re.search(r"[^!-~]", address) is None)


def _place(url: Any) -> str:
    if not url.host:
        raise ValueError("it names no host")
    return f"http://{url.host}" if url.is_default_port() else f"http://{url.host}:{url.port}"


async def _on_redirect(session: Any, context: Any, asked: Any) -> None:
    """Called before a redirect is followed."""
    import yarl

    bounds: Bounds | None = context.trace_request_ctx
    if bounds is None or bounds.places is None:
        return
    target = asked.url.join(yarl.URL(asked.response.headers.get("Location", ""), encoded=True))
    if _place(target) not in bounds.places:
        asked.response.close()
        raise LedElsewhere(f"{masked(str(asked.url))}: redirects to another server, {origin(str(target))}")


class _NoRanges(StorageError):
    """The server sends whole files only."""


class HttpStore:
    """Files on web servers, which are only read."""

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
            return await with_retries(once)
        except HttpStatus as error:
            if is_missing(error):
                return None
            raise

    def is_directory(self, path: str) -> bool:
        """Always False: web servers list no directories."""
        return False

    def open_read(self, path: str, first_block: int, bounds: Bounds | None = None) -> BinaryIO:
        """Open for reading by ranges, or whole where the server has no ranges."""

        async def fetch(begin: int, stop: int) -> Range:
            async def once() -> Range:
                async with await self._get(path, f"bytes={begin}-{stop - 1}", bounds) as response:
                    if response.status == 416 and begin == 0:
                        return Range(b"", 0, _tag(response))
                    _check(response)
                    size = _size(response)
                    if response.status != 206 or size is None:
                        raise _NoRanges(f"{masked(path)}: the server sends whole files only")
                    data = await _body(path, response, stop - begin)
                    check_complete(data, begin, response.headers.get("Content-Range", ""))
                    return Range(data, size, _tag(response))

            return await with_retries(once, stop - begin, bounds.retries if bounds else None)

        try:
            return open_ranges(path, fetch, first_block)
        except _NoRanges:
            return answer(path, "reading", self._whole(path, bounds))

    async def _whole(self, path: str, bounds: Bounds | None) -> BinaryIO:
        async def once() -> BinaryIO:
            copy = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115
            try:
                async with await self._get(path, None, bounds) as response:
                    _check(response)
                    async for chunk in _chunks(path, response, bounds.most_bytes if bounds else None):
                        copy.write(chunk)
            except BaseException:
                copy.close()
                raise
            copy.seek(0)
            return cast(BinaryIO, copy)

        # Of unknown size: silence or a crawl ends it.
        return await with_retries(once, 2**60, bounds.retries if bounds else None)

    async def _get(self, path: str, wanted: str | None = None, bounds: Bounds | None = None) -> Any:
        anywhere = bounds is None or bounds.places is None
        session = await connection(("http", anywhere), lambda: _connect(anywhere))
        return session.get(_url(path), headers={"Range": wanted} if wanted else {}, trace_request_ctx=bounds)


def _check(response: Any) -> None:
    if response.status >= 400:
        raise HttpStatus(response.status, response.reason or "")


async def _body(path: str, response: Any, most: int) -> bytes:
    return b"".join([chunk async for chunk in _chunks(path, response, most)])


async def _chunks(path: str, response: Any, most: int | None) -> AsyncIterator[bytes]:
    """An answer's body, of at most so many bytes, as long as they come at the slowest rate of a request."""
    begun, count = time.monotonic(), 0
    async for chunk in response.content.iter_chunked(_CHUNK):
        count += len(chunk)
        if most is not None and count > most:
            raise TooLarge(f"{masked(path)}: more than {most:,} bytes, and the server sends on")
        if time.monotonic() - begun > options().limit(count):
            raise TimeoutError
        yield chunk


def _size(response: Any) -> int | None:
    """Size of the whole file in bytes, if the server tells it."""
    text = response.headers.get("Content-Range", "").rpartition("/")[2] or response.headers.get("Content-Length", "")
    return int(text) if text.isdecimal() else None


def _tag(response: Any) -> str:
    tag = response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
    return str(tag).strip('"')
