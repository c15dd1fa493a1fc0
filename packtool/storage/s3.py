"""Buckets with the S3 protocol, ``s3://`` and ``oss://``, by single requests of aiobotocore.

s3fs is not used because it fails the fault tests: it does not retry truncated bodies, lost responses leave uploads
behind or make exclusive writes fail, opening a file takes two requests, and OSS rejects its bulk deletes.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from packtool.errors import RemoteError, StorageError
from packtool.storage.faults import code_of, is_missing, status_of, storage_error
from packtool.storage.local import Bounds, FileState
from packtool.storage.options import StorageOptions, options
from packtool.storage.remote import (
    Range,
    Request,
    check_complete,
    connection,
    open_ranges,
    result_of,
    start,
    wait,
    with_retries,
)

PART_BYTES = 8 * 2**20
_MAX_PARTS_IN_FLIGHT = 3
# S3 allows 10,000 parts; the larger ones after the first 5,000 allow objects of 350 GB.
_LARGE_FROM, _LARGE_PART_BYTES = 5000, 64 * 2**20
_ABORT_S = 10.0


class S3Writer:
    """An object that is uploaded in parts while it is written; one smaller than a part is uploaded on ``commit``.

    Up to three parts are uploaded while the next is filled, so at most 32 MiB are in memory. If ``write`` or ``commit``
    raises a StorageError, the upload is removed. ``path`` is for messages.
    """

    def __init__(self, store: S3Store, path: str, bucket: str, key: str) -> None:
        self._store, self._path = store, path
        self._object = {"Bucket": bucket, "Key": key}
        self._buffer = bytearray()
        self._upload: str | None = None
        self._num_begun = 0  # attempts to begin an upload: a lost response leaves an upload whose id is unknown
        self._in_flight: deque[Request[str]] = deque()
        self._part_tags: list[str] = []
        self._object_tag = ""  # of the whole object
        self._num_parts = self._num_bytes = 0
        self._ended = False

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes; return their number. Waits while three parts are being uploaded."""
        if self._ended:
            raise StorageError(f"{self._path}: written to after its end")
        view = memoryview(data).cast("B")
        position = 0
        while position < len(view):
            num_missing = self._part_bytes - len(self._buffer)
            self._buffer += view[position : position + num_missing]
            position += num_missing
            if len(self._buffer) >= self._part_bytes:
                self._guarded(self._send)
        return len(view)

    def commit(self) -> FileState:
        """Complete the upload, so that the object appears; return its size and entity tag."""
        if self._ended:
            raise StorageError(f"{self._path}: committed after its end")
        self._guarded(self._finish)
        self._ended = True
        return FileState(self._num_bytes, self._object_tag)

    def discard(self) -> None:
        """Abort the upload; gives up after 10 seconds, because the network may be down. Never raises."""
        if self._ended:
            return
        self._ended = True
        self._buffer = bytearray()
        for request in self._in_flight:
            request.cancel()
        if self._num_begun:
            with suppress(Exception):
                wait(asyncio.wait_for(self._abort(), _ABORT_S))

    @property
    def _part_bytes(self) -> int:
        return PART_BYTES if self._num_parts < _LARGE_FROM else _LARGE_PART_BYTES

    def _guarded(self, work: Any) -> None:
        """Call ``work``; abort the upload if it fails, and raise errors of requests as StorageError."""
        try:
            work()
        except BaseException as error:
            self.discard()
            if isinstance(error, StorageError) or not isinstance(error, Exception):
                raise
            raise storage_error(self._path, "writing", error) from None

    def _send(self) -> None:
        """Start the upload of the buffer as the next part; wait while three parts are being uploaded."""
        if self._upload is None:
            self._upload = wait(with_retries(self._begin))
        while len(self._in_flight) >= _MAX_PARTS_IN_FLIGHT:
            self._part_tags.append(wait(self._in_flight.popleft()))
        data, self._buffer = bytes(self._buffer), bytearray()
        self._num_parts += 1
        self._num_bytes += len(data)
        self._in_flight.append(start(self._send_part(self._upload, self._num_parts, data)))

    async def _begin(self) -> str:
        self._num_begun += 1
        begun = await self._store.request_once("create_multipart_upload", **self._object)
        return str(begun["UploadId"])

    async def _send_part(self, upload: str, number: int, data: bytes) -> str:
        part = {"UploadId": upload, "PartNumber": number, "Body": data}
        sent = await self._store.request("upload_part", len(data), **self._object, **part)
        return str(sent["ETag"])

    def _finish(self) -> None:
        """Upload the rest and complete the upload, or put the whole object if no upload was begun."""
        if self._upload is None:
            data, self._buffer = bytes(self._buffer), bytearray()
            put = self._store.request("put_object", len(data), **self._object, Body=data)
            self._num_bytes, self._object_tag = len(data), _entity_tag(result_of(self._path, "writing", put))
            return
        if self._buffer:
            self._send()
        while self._in_flight:
            self._part_tags.append(wait(self._in_flight.popleft()))
        wait(self._complete(self._upload))
        if self._num_begun > 1:
            with suppress(Exception):  # the object is complete even if the clean-up fails
                wait(asyncio.wait_for(self._abort_others(self._upload), _ABORT_S))

    async def _complete(self, upload: str) -> None:
        """Complete the upload with the id ``upload`` from its parts, and set ``_object_tag``."""
        parts = [{"PartNumber": i, "ETag": tag} for i, tag in enumerate(self._part_tags, start=1)]
        num_attempts = 0

        async def attempt() -> None:
            nonlocal num_attempts
            num_attempts += 1
            try:
                completed = await self._store.request_once(
                    "complete_multipart_upload", **self._object, UploadId=upload, MultipartUpload={"Parts": parts}
                )
                self._object_tag = _entity_tag(completed)
            except Exception as error:
                # An earlier attempt may have succeeded although its response was lost.
                may_be_complete = code_of(error) == "NoSuchUpload" and num_attempts > 1
                is_complete = may_be_complete and await self._is_complete()
                if not is_complete:
                    raise

        # The server joins the parts before it answers: allow the time of transferring an eighth of the bytes.
        await with_retries(attempt, num_bytes=self._num_bytes // 8)

    async def _is_complete(self) -> bool:
        """Set ``_object_tag``; return whether the object is the uploaded one, by its size and its tag's part count."""
        head = await self._store.request_once("head_object", **self._object)
        self._object_tag = _entity_tag(head)
        return head["ContentLength"] == self._num_bytes and self._object_tag.endswith(f"-{len(self._part_tags)}")

    async def _abort(self) -> None:
        """Abort this writer's uploads, after its parts have ended: a part that is being uploaded outlives an abort."""
        await asyncio.gather(*(request.task for request in self._in_flight), return_exceptions=True)
        if self._upload is not None:
            await self._store.abort_upload(self._object["Bucket"], self._object["Key"], self._upload)
        if self._num_begun > 1 or self._upload is None:
            await self._abort_others(self._upload)

    async def _abort_others(self, own: str | None) -> None:
        """Abort all uploads to the same key but ``own``: a lost response leaves an upload whose id is unknown."""
        key = self._object["Key"]
        await self._store.abort_uploads(self._object["Bucket"], key, lambda name, upload: name == key and upload != own)


_MAX_CONNECTIONS = 32
_MAX_CONCURRENT_DELETES = 16
# Error codes of a conditional write if the object exists or is being written.
_EXISTS = {"PreconditionFailed", "ConditionalRequestConflict", "FileAlreadyExists", "412", "409"}


def _connect(scheme: str) -> Any:
    from aiobotocore.config import AioConfig
    from aiobotocore.session import AioSession

    settings = connection_settings(scheme, options())
    config = AioConfig(**settings.pop("config"))
    session = AioSession()
    if scheme == "oss":
        session.register("before-call.s3.PutObject", _forbid_overwriting)
    return session.create_client("s3", config=config, **settings)


# OSS and older servers reject the trailing checksums that botocore sends by default.
_NO_CHECKSUMS = {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}


def connection_settings(scheme: str, settings: StorageOptions) -> dict[str, Any]:
    """Return the arguments of the client for ``s3`` or ``oss``; raise a StorageError if settings of OSS are missing."""
    config: dict[str, Any] = {
        "connect_timeout": min(settings.timeout, 10.0),
        "read_timeout": settings.timeout,
        "retries": {"total_max_attempts": 1, "mode": "standard"},  # ``with_retries`` retries instead
        "max_pool_connections": _MAX_CONNECTIONS,
    }
    if scheme == "oss":
        config |= _NO_CHECKSUMS | {"s3": {"addressing_style": "virtual"}, "signature_version": "s3v4"}
        if settings.oss_region:
            config["region_name"] = settings.oss_region
        return {**_oss_credentials(settings), "config": config}
    if settings.s3_endpoint:
        if "AWS_REQUEST_CHECKSUM_CALCULATION" not in os.environ:
            config |= _NO_CHECKSUMS
        if _needs_path_style(settings.s3_endpoint):
            config["s3"] = {"addressing_style": "path"}
    return {"config": config}


def _oss_credentials(settings: StorageOptions) -> dict[str, Any]:
    """Return endpoint and credentials of OSS as arguments of the client; raise an error if they are not set."""
    if not settings.oss_endpoint:
        raise RemoteError(
            "oss://: OSS_ENDPOINT is not set",
            "Set it, for example OSS_ENDPOINT=https://oss-cn-hangzhou.aliyuncs.com, with OSS_ACCESS_KEY_ID and "
            "OSS_ACCESS_KEY_SECRET.",
            "unreachable",
        )
    if not settings.oss_access_key_id or not settings.oss_access_key_secret:
        raise RemoteError(
            "oss://: no credentials",
            "Set OSS_ACCESS_KEY_ID and OSS_ACCESS_KEY_SECRET in the environment.",
            "unreachable",
        )
    return {
        "endpoint_url": settings.oss_endpoint,
        "aws_access_key_id": settings.oss_access_key_id,
        "aws_secret_access_key": settings.oss_access_key_secret,
        "aws_session_token": settings.oss_session_token,
    }


def _needs_path_style(endpoint: str) -> bool:
    """Return whether an endpoint has no sub-domains for buckets: an IP address, or a host name without domain."""
    host = urlsplit(endpoint).hostname or ""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return "." not in host or host.endswith(".localhost")
    return True


def split(path: str) -> tuple[str, str]:
    """Return bucket and key of a path."""
    bucket, _, key = path.partition("://")[2].partition("/")
    return bucket, key


class S3Store:
    """The functions of ``packtool.storage`` for the buckets of one scheme."""

    def __init__(self, scheme: str) -> None:
        self.scheme = scheme

    async def request(self, method: str, num_bytes: int = 0, **arguments: Any) -> Any:
        """Make a request with retries."""
        return await with_retries(lambda: self.request_once(method, **arguments), num_bytes)

    async def request_once(self, method: str, **arguments: Any) -> Any:
        """Make one attempt of a request."""
        client = await connection(self.scheme, lambda: _connect(self.scheme))
        return await getattr(client, method)(**arguments)

    def find(self, path: str) -> FileState | None:
        bucket, key = split(path)
        if not key or key.endswith("/"):
            return None
        return result_of(path, "looking", self._find(bucket, key))

    async def _find(self, bucket: str, key: str) -> FileState | None:
        try:
            head = await self.request("head_object", Bucket=bucket, Key=key)
        except Exception as error:
            if is_missing(error):
                return None
            raise
        return FileState(head["ContentLength"], _entity_tag(head))

    def is_directory(self, path: str) -> bool:
        bucket, key = split(path)
        prefix = _prefix(key)
        page = result_of(path, "looking", self.request("list_objects_v2", Bucket=bucket, Prefix=prefix, MaxKeys=1))
        return bool(page.get("Contents")) or not prefix

    def open_read(self, path: str, first_block: int, bounds: Bounds | None = None) -> BinaryIO:
        """Open an object for reading by range requests."""
        bucket, key = split(path)

        async def fetch(begin: int, stop: int) -> Range:
            retries = bounds.retries if bounds else None
            return await with_retries(lambda: self._range(bucket, key, begin, stop), stop - begin, retries)

        return open_ranges(path, fetch, first_block)

    async def _range(self, bucket: str, key: str, begin: int, stop: int) -> Range:
        """Read bytes [begin, stop) of an object, fewer at its end, in one attempt."""
        try:
            byte_range = f"bytes={begin}-{stop - 1}"
            response = await self.request_once("get_object", Bucket=bucket, Key=key, Range=byte_range)
        except Exception as error:
            if begin == 0 and (code_of(error) == "InvalidRange" or status_of(error) == 416):
                return Range(b"", 0, "")  # an empty object has no first byte
            raise
        async with response["Body"] as body:
            data = await body.read()
        content_range = response.get("ContentRange", "")
        check_complete(data, begin, content_range)
        return Range(data, int(content_range.rpartition("/")[2] or response["ContentLength"]), _entity_tag(response))

    def entries(self, path: str) -> dict[str, FileState | None]:
        bucket, key = split(path)
        prefix = _prefix(key)
        states: dict[str, FileState | None] = {}
        for page in self._listing(path, Bucket=bucket, Prefix=prefix, Delimiter="/"):
            for folder in page.get("CommonPrefixes", ()):
                states[folder["Prefix"][len(prefix) :].rstrip("/")] = None
            for item in page.get("Contents", ()):
                if item["Key"] != prefix:  # the empty object that web consoles create as a folder
                    states[item["Key"][len(prefix) :]] = FileState(item["Size"], _entity_tag(item))
        return dict(sorted(states.items()))

    def list_names(self, path: str) -> list[str]:
        return list(self.entries(path))

    def walk(self, path: str) -> Iterator[str]:
        bucket, key = split(path)
        for page in self._listing(path, Bucket=bucket, Prefix=_prefix(key)):
            for item in page.get("Contents", ()):
                if not item["Key"].endswith("/"):
                    yield f"{self.scheme}://{bucket}/{item['Key']}"

    def _listing(self, path: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        pages = self._pages("list_objects_v2", **arguments)

        async def next_page() -> dict[str, Any] | None:
            return await anext(pages, None)

        while page := result_of(path, "listing", next_page()):
            yield page

    def make_directory(self, path: str) -> None:
        """Do nothing: buckets have no directories."""

    def publish(self, path: str, data: bytes, durable: bool = True) -> None:
        bucket, key = split(path)
        result_of(path, "writing", self.request("put_object", len(data), Bucket=bucket, Key=key, Body=data))

    def publish_new(self, path: str, data: bytes) -> bool:
        bucket, key = split(path)
        return result_of(path, "writing", self._publish_new(bucket, key, data))

    async def _publish_new(self, bucket: str, key: str, data: bytes) -> bool:
        """Write an object unless it exists; return whether it then has this content."""
        new = {"Bucket": bucket, "Key": key, "Body": data}
        try:
            await self.request("put_object", len(data), **new, IfNoneMatch="*")
        except Exception as error:
            if code_of(error) in _EXISTS:
                return await self._has_content(bucket, key, data)
            if code_of(error) != "NotImplemented" and status_of(error) != 501:
                raise
            # The server does not support conditional writes: check before writing.
            if await self._find(bucket, key) is not None:
                return await self._has_content(bucket, key, data)
            await self.request("put_object", len(data), **new)
        # A server may have ignored the condition, and another process may have written after this one.
        return await self._has_content(bucket, key, data)

    async def _has_content(self, bucket: str, key: str, data: bytes) -> bool:
        try:
            content = await with_retries(lambda: self._range(bucket, key, 0, len(data) + 1), len(data))
        except Exception as error:
            if is_missing(error):
                return False  # removed since
            raise
        return content.data == data

    def writer(self, path: str) -> S3Writer:
        return S3Writer(self, path, *split(path))

    def remove(self, path: str) -> None:
        bucket, key = split(path)
        if not key.strip("/"):
            raise StorageError(f"{path}: packtool does not remove a whole bucket", "Name a directory in it.")
        result_of(path, "removing", self._remove(bucket, key.rstrip("/")))

    async def _remove(self, bucket: str, key: str) -> None:
        """Remove an object and all objects below ``key/``."""
        # One by one: a bulk delete needs a checksum that OSS requires and botocore no longer sends.
        names = [key]
        async for page in self._pages("list_objects_v2", Bucket=bucket, Prefix=f"{key}/"):
            names += [item["Key"] for item in page.get("Contents", ())]
        for i in range(0, len(names), _MAX_CONCURRENT_DELETES):
            part = names[i : i + _MAX_CONCURRENT_DELETES]
            await asyncio.gather(*(self.request("delete_object", Bucket=bucket, Key=name) for name in part))

    def discard_unfinished(self, path: str) -> None:
        bucket, key = split(path)
        result_of(path, "clearing", self.abort_uploads(bucket, _prefix(key), lambda name, upload: True))

    async def abort_uploads(self, bucket: str, prefix: str, matches: Callable[[str, str], bool]) -> None:
        """Abort the unfinished uploads below a prefix for which ``matches(key, upload id)`` is true."""
        async for page in self._pages("list_multipart_uploads", Bucket=bucket, Prefix=prefix):
            for item in page.get("Uploads", ()):
                if matches(item["Key"], item["UploadId"]):
                    await self.abort_upload(bucket, item["Key"], item["UploadId"])

    async def abort_upload(self, bucket: str, key: str, upload: str) -> None:
        """Abort an unfinished upload if it still exists."""
        try:
            await self.request("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload)
        except Exception as error:
            if code_of(error) != "NoSuchUpload" and not is_missing(error):
                raise

    async def _pages(self, method: str, **arguments: Any) -> AsyncIterator[dict[str, Any]]:
        position: dict[str, Any] = {}
        while True:
            page = await self.request(method, **arguments, **position)
            yield page
            if not page.get("IsTruncated"):
                return
            markers = ("ContinuationToken", "KeyMarker", "UploadIdMarker")
            position = {name: page[f"Next{name}"] for name in markers if page.get(f"Next{name}")}


def _forbid_overwriting(params: dict[str, Any], **_: Any) -> None:
    """Add OSS's own header to a conditional write, because some of its regions ignore that of S3."""
    if params["headers"].get("If-None-Match") == "*":
        params["headers"]["x-oss-forbid-overwrite"] = "true"


def _prefix(key: str) -> str:
    """Return the prefix of all keys below a key: ``a/b/`` for ``a/b``, "" for a whole bucket."""
    key = key.strip("/")
    return f"{key}/" if key else ""


def _entity_tag(response: dict[str, Any]) -> str:
    """Return the entity tag in a response, or else the time of the last change, or else ""."""
    tag = response.get("ETag")
    return str(tag).strip('"') if tag else str(response.get("LastModified", ""))
