"""``s3://`` and ``oss://``: buckets with the S3 protocol, by single requests of aiobotocore.

s3fs's file operations do not pass the tests with faults: bodies that are cut are not requested again, answers that get
lost leave uploads behind or fail exclusive writes, opening a file takes two requests, and OSS does not take its request
that deletes many objects.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from packtool.errors import RemoteError, StorageError
from packtool.storage.faults import code_of, is_missing, status_of, storage_error
from packtool.storage.local import Bounds, FileState
from packtool.storage.options import StorageOptions, options
from packtool.storage.remote import Range, answer, check_complete, connection, open_ranges, start, wait, with_retries

PART_BYTES = 8 * 2**20
_PARTS_AT_ONCE = 3
# S3 allows 10,000 parts: from here on they are larger, which makes room for 350 GB.
_LARGE_FROM, _LARGE_PART_BYTES = 5000, 64 * 2**20
_ABORT_S = 10.0


class S3Writer:
    """A ``Writer`` to an object. What is smaller than a part is put whole on ``commit``.

    Three parts travel while the next is filled, so it holds 32 MiB at most.

    Args:
        store: that makes the requests.
        path: for messages.
        bucket, key: the place.

    Raises:
        StorageError: from write and commit; nothing is left behind then.
    """

    def __init__(self, store: S3Store, path: str, bucket: str, key: str) -> None:
        self._store, self._path = store, path
        self._place = {"Bucket": bucket, "Key": key}
        self._buffer = bytearray()
        self._upload: str | None = None
        self._num_begun = 0  # requests to begin: an answer that got lost leaves an upload that nobody knows
        self._under_way: deque[Future[str]] = deque()
        self._tags: list[str] = []
        self._tag = ""  # of the whole object
        self._num_parts = self._num_bytes = 0
        self._ended = False

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes; waits while too many parts are under way."""
        if self._ended:
            raise StorageError(f"{self._path}: written to after its end")
        view = memoryview(data).cast("B")
        position = 0
        while position < len(view):
            room = self._part_bytes - len(self._buffer)
            self._buffer += view[position : position + room]
            position += room
            if len(self._buffer) >= self._part_bytes:
                self._guarded(self._send)
        return len(view)

    def commit(self) -> FileState:
        """Finish the upload: the object appears under its name, whole."""
        if self._ended:
            raise StorageError(f"{self._path}: committed after its end")
        self._guarded(self._finish)
        self._ended = True
        return FileState(self._num_bytes, self._tag)

    def discard(self) -> None:
        """End the upload and let its parts go; tried for some seconds, for there may be no network left."""
        if self._ended:
            return
        self._ended = True
        self._buffer = bytearray()
        for future in self._under_way:
            future.cancel()
        if self._num_begun:
            with suppress(Exception):
                wait(asyncio.wait_for(self._abort(), _ABORT_S))

    @property
    def _part_bytes(self) -> int:
        return PART_BYTES if self._num_parts < _LARGE_FROM else _LARGE_PART_BYTES

    def _guarded(self, work: Any) -> None:
        try:
            work()
        except BaseException as error:
            self.discard()
            if isinstance(error, StorageError) or not isinstance(error, Exception):
                raise
            raise storage_error(self._path, "writing", error) from None

    def _send(self) -> None:
        """Let the filled part go."""
        if self._upload is None:
            self._upload = wait(self._begin())
        while len(self._under_way) >= _PARTS_AT_ONCE:
            self._tags.append(wait(self._under_way.popleft()))
        data, self._buffer = bytes(self._buffer), bytearray()
        self._num_parts += 1
        self._num_bytes += len(data)
        self._under_way.append(start(self._send_part(self._upload, self._num_parts, data)))

    async def _begin(self) -> str:
        async def once() -> str:
            self._num_begun += 1
            begun = await self._store.request_once("create_multipart_upload", **self._place)
            return str(begun["UploadId"])

        return await with_retries(once)

    async def _send_part(self, upload: str, number: int, data: bytes) -> str:
        part = {"UploadId": upload, "PartNumber": number, "Body": data}
        sent = await self._store.request("upload_part", len(data), **self._place, **part)
        return str(sent["ETag"])

    def _finish(self) -> None:
        if self._upload is None:
            data, self._buffer = bytes(self._buffer), bytearray()
            put = self._store.request("put_object", len(data), **self._place, Body=data)
            self._num_bytes, self._tag = len(data), _tag(answer(self._path, "writing", put))
            return
        if self._buffer:
            self._send()
        while self._under_way:
            self._tags.append(wait(self._under_way.popleft()))
        wait(self._complete(self._upload))
        if self._num_begun > 1:
            with suppress(Exception):  # the object is there; what could not be cleared is no reason to fail
                wait(asyncio.wait_for(self._abort_others(self._upload), _ABORT_S))

    async def _complete(self, upload: str) -> None:
        parts = [{"PartNumber": i, "ETag": tag} for i, tag in enumerate(self._tags, start=1)]
        num_tries = 0

        async def once() -> None:
            nonlocal num_tries
            num_tries += 1
            try:
                completed = await self._store.request_once(
                    "complete_multipart_upload", **self._place, UploadId=upload, MultipartUpload={"Parts": parts}
                )
                self._tag = _tag(completed)
            except Exception as error:
                # The first answer may have got lost on its way back.
                if code_of(error) != "NoSuchUpload" or num_tries == 1 or not await self._is_there():
                    raise

        # The server puts the parts together before it answers.
        await with_retries(once, self._num_bytes // 8)

    async def _is_there(self) -> bool:
        """Whether the object is the one that was uploaded: its size, and the tag of so many parts."""
        head = await self._store.request_once("head_object", **self._place)
        self._tag = _tag(head)
        return head["ContentLength"] == self._num_bytes and self._tag.endswith(f"-{len(self._tags)}")

    async def _abort(self) -> None:
        # A part that is still under way would outlive the abortion.
        await asyncio.gather(*(asyncio.wrap_future(future) for future in self._under_way), return_exceptions=True)
        if self._upload is not None:
            await self._store.abort_upload(self._place["Bucket"], self._place["Key"], self._upload)
        if self._num_begun > 1 or self._upload is None:
            await self._abort_others(self._upload)

    async def _abort_others(self, own: str | None) -> None:
        """End uploads to the same place whose beginning was not heard of."""
        key = self._place["Key"]
        await self._store.abort_uploads(self._place["Bucket"], key, lambda name, upload: name == key and upload != own)


_MOST_CONNECTIONS = 32
_DELETES_AT_ONCE = 16
# What servers answer to a conditional write whose object is there, or is being written.
_THERE = {"PreconditionFailed", "ConditionalRequestConflict", "FileAlreadyExists", "412", "409"}


def _connect(scheme: str) -> Any:
    from aiobotocore.config import AioConfig
    from aiobotocore.session import AioSession

    settings = connection_settings(scheme, options())
    config = AioConfig(**settings.pop("config"))
    session = AioSession()
    if scheme == "oss":
        session.register("before-call.s3.PutObject", _forbid_overwriting)
    return session.create_client("s3", config=config, **settings)


def connection_settings(scheme: str, settings: StorageOptions) -> dict[str, Any]:
    """Arguments of the S3 client; S3's credentials are not among them, for botocore finds them by itself.

    Args:
        scheme: ``s3`` or ``oss``.

    Raises:
        StorageError: if OSS is asked for and the environment does not say where it is.
    """
    config: dict[str, Any] = {
        "connect_timeout": min(settings.timeout, 10.0),
        "read_timeout": settings.timeout,
        "retries": {"total_max_attempts": 1, "mode": "standard"},  # ours are the only ones
        "max_pool_connections": _MOST_CONNECTIONS,
    }
    # Checksums behind the body, botocore's default, are Amazon's own: OSS and older servers refuse them.
    plain = {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}
    if scheme == "oss":
        if not settings.oss_endpoint:
            raise RemoteError(
                "oss:// needs to know where it is: OSS_ENDPOINT is not set",
                "For example OSS_ENDPOINT=https://oss-cn-hangzhou.aliyuncs.com, with OSS_ACCESS_KEY_ID and "
                "OSS_ACCESS_KEY_SECRET.",
                "unreachable",
            )
        if not settings.oss_access_key_id or not settings.oss_access_key_secret:
            raise RemoteError(
                "oss://: no credentials",
                "Set OSS_ACCESS_KEY_ID and OSS_ACCESS_KEY_SECRET in the environment.",
                "unreachable",
            )
        config |= plain | {"s3": {"addressing_style": "virtual"}, "signature_version": "s3v4"}
        if settings.oss_region:
            config["region_name"] = settings.oss_region
        return {
            "endpoint_url": settings.oss_endpoint,
            "aws_access_key_id": settings.oss_access_key_id,
            "aws_secret_access_key": settings.oss_access_key_secret,
            "aws_session_token": settings.oss_session_token,
            "config": config,
        }
    if settings.s3_endpoint:
        if "AWS_REQUEST_CHECKSUM_CALCULATION" not in os.environ:
            config |= plain
        if _needs_path_style(settings.s3_endpoint):
            config["s3"] = {"addressing_style": "path"}
    return {"config": config}


def _needs_path_style(endpoint: str) -> bool:
    """Whether the host can have no bucket's name in front: an address, or a name without a domain."""
    host = urlsplit(endpoint).hostname or ""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return "." not in host or host.endswith(".localhost")
    return True


def split(path: str) -> tuple[str, str]:
    """The bucket and the key of a path."""
    bucket, _, key = path.partition("://")[2].partition("/")
    return bucket, key


class S3Store:
    """Buckets of one scheme; a ``Store``."""

    def __init__(self, scheme: str) -> None:
        self.scheme = scheme

    async def request(self, method: str, num_bytes: int = 0, **arguments: Any) -> Any:
        """One request of S3's, with_retries."""
        return await with_retries(lambda: self.request_once(method, **arguments), num_bytes)

    async def request_once(self, method: str, **arguments: Any) -> Any:
        """One request of S3's."""
        client = await connection(self.scheme, lambda: _connect(self.scheme))
        return await getattr(client, method)(**arguments)

    def find(self, path: str) -> FileState | None:
        """Size and entity tag of an object."""
        bucket, key = split(path)
        if not key or key.endswith("/"):
            return None
        return answer(path, "looking", self._find(bucket, key))

    async def _find(self, bucket: str, key: str) -> FileState | None:
        try:
            head = await self.request("head_object", Bucket=bucket, Key=key)
        except Exception as error:
            if is_missing(error):
                return None
            raise
        return FileState(head["ContentLength"], _tag(head))

    def is_directory(self, path: str) -> bool:
        """Whether anything lies under it."""
        bucket, key = split(path)
        return answer(path, "looking", self._has_children(bucket, _prefix(key)))

    async def _has_children(self, bucket: str, prefix: str) -> bool:
        page = await self.request("list_objects_v2", Bucket=bucket, Prefix=prefix, MaxKeys=1)
        return bool(page.get("Contents")) or not prefix

    def open_read(self, path: str, first_block: int, bounds: Bounds | None = None) -> BinaryIO:
        """Open for reading by ranges."""
        bucket, key = split(path)

        async def fetch(begin: int, stop: int) -> Range:
            retries = bounds.retries if bounds else None
            return await with_retries(lambda: self._range(bucket, key, begin, stop), stop - begin, retries)

        return open_ranges(path, fetch, first_block)

    async def _range(self, bucket: str, key: str, begin: int, stop: int) -> Range:
        """Bytes [begin, stop) of an object, fewer at its end, by one request."""
        try:
            wanted = f"bytes={begin}-{stop - 1}"
            found = await self.request_once("get_object", Bucket=bucket, Key=key, Range=wanted)
        except Exception as error:
            if begin == 0 and (code_of(error) == "InvalidRange" or status_of(error) == 416):
                return Range(b"", 0, "")  # an empty object has no first byte
            raise
        async with found["Body"] as body:
            data = await body.read()
        content_range = found.get("ContentRange", "")
        check_complete(data, begin, content_range)
        return Range(data, int(content_range.rpartition("/")[2] or found["ContentLength"]), _tag(found))

    def entries(self, path: str) -> dict[str, FileState | None]:
        """Names in a directory, sorted, with None for directories."""
        bucket, key = split(path)
        prefix = _prefix(key)
        found: dict[str, FileState | None] = {}
        for page in self._listing(path, Bucket=bucket, Prefix=prefix, Delimiter="/"):
            for folder in page.get("CommonPrefixes", ()):
                found[folder["Prefix"][len(prefix) :].rstrip("/")] = None
            for item in page.get("Contents", ()):
                if item["Key"] != prefix:  # what consoles put there when they make a folder
                    found[item["Key"][len(prefix) :]] = FileState(item["Size"], _tag(item))
        return dict(sorted(found.items()))

    def list_names(self, path: str) -> list[str]:
        """Names in a directory, sorted."""
        return list(self.entries(path))

    def walk(self, path: str) -> Iterator[str]:
        """Paths of all objects under a directory, sorted by key."""
        bucket, key = split(path)
        for page in self._listing(path, Bucket=bucket, Prefix=_prefix(key)):
            for item in page.get("Contents", ()):
                if not item["Key"].endswith("/"):
                    yield f"{self.scheme}://{bucket}/{item['Key']}"

    def _listing(self, path: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        pages = self._pages("list_objects_v2", **arguments)

        async def next_page() -> dict[str, Any] | None:
            return await anext(pages, None)

        while page := answer(path, "listing", next_page()):
            yield page

    def make_directory(self, path: str) -> None:
        """Nothing to do: directories are where objects are."""

    def publish(self, path: str, data: bytes, to_stay: bool = True) -> None:
        """Put a whole object; nobody sees a part of it."""
        bucket, key = split(path)
        answer(path, "writing", self.request("put_object", len(data), Bucket=bucket, Key=key, Body=data))

    def publish_new(self, path: str, data: bytes) -> bool:
        """Put a whole object if there is none of that name; False if there is, with other content."""
        bucket, key = split(path)
        return answer(path, "writing", self._publish_new(bucket, key, data))

    async def _publish_new(self, bucket: str, key: str, data: bytes) -> bool:
        place = {"Bucket": bucket, "Key": key}
        try:
            await self.request("put_object", len(data), **place, Body=data, IfNoneMatch="*")
        except Exception as error:
            if code_of(error) in _THERE:
                return await self._holds(bucket, key, data)
            if code_of(error) != "NotImplemented" and status_of(error) != 501:
                raise
            # A server without conditional writes: the next best.
            if await self._find(bucket, key) is not None:
                return await self._holds(bucket, key, data)
            await self.request("put_object", len(data), **place, Body=data)
        # A server may have ignored the condition, and another process written behind this one.
        return await self._holds(bucket, key, data)

    async def _holds(self, bucket: str, key: str, data: bytes) -> bool:
        try:
            found = await with_retries(lambda: self._range(bucket, key, 0, len(data) + 1), len(data))
        except Exception as error:
            if is_missing(error):
                return False  # gone again
            raise
        return found.data == data

    def writer(self, path: str) -> S3Writer:
        """Begin an object that is uploaded while it is written."""
        return S3Writer(self, path, *split(path))

    def remove(self, path: str) -> None:
        """Remove an object and all under it; nothing there is fine."""
        bucket, key = split(path)
        if not key.strip("/"):
            raise StorageError(f"{path}: a whole bucket is not removed", "Name a directory in it.")
        answer(path, "removing", self._remove(bucket, key.rstrip("/")))

    async def _remove(self, bucket: str, key: str) -> None:
        # One by one: the request that deletes many needs a checksum that botocore no longer sends and OSS insists on.
        names = [key]
        async for page in self._pages("list_objects_v2", Bucket=bucket, Prefix=f"{key}/"):
            names += [item["Key"] for item in page.get("Contents", ())]
        for i in range(0, len(names), _DELETES_AT_ONCE):
            part = names[i : i + _DELETES_AT_ONCE]
            await asyncio.gather(*(self.request("delete_object", Bucket=bucket, Key=name) for name in part))

    def discard_unfinished(self, path: str) -> None:
        """End the uploads that killed processes left under a directory: they are invisible, and cost money."""
        bucket, key = split(path)
        answer(path, "clearing", self.abort_uploads(bucket, _prefix(key), lambda name, upload: True))

    async def abort_uploads(self, bucket: str, prefix: str, wanted: Callable[[str, str], bool]) -> None:
        """End unfinished uploads.

        Args:
            wanted: says so for a key and an upload id.
        """
        async for page in self._pages("list_multipart_uploads", Bucket=bucket, Prefix=prefix):
            for item in page.get("Uploads", ()):
                if wanted(item["Key"], item["UploadId"]):
                    await self.abort_upload(bucket, item["Key"], item["UploadId"])

    async def abort_upload(self, bucket: str, key: str, upload: str) -> None:
        """End one unfinished upload; one that is gone is fine."""
        try:
            await self.request("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload)
        except Exception as error:
            if code_of(error) != "NoSuchUpload" and not is_missing(error):
                raise

    async def _pages(self, method: str, **arguments: Any) -> AsyncIterator[dict[str, Any]]:
        """The pages of a listing."""
        position: dict[str, Any] = {}
        while True:
            page = await self.request(method, **arguments, **position)
            yield page
            if not page.get("IsTruncated"):
                return
            markers = ("ContinuationToken", "KeyMarker", "UploadIdMarker")
            position = {name: page[f"Next{name}"] for name in markers if page.get(f"Next{name}")}


def _forbid_overwriting(params: dict[str, Any], **_: Any) -> None:
    """A conditional write in OSS's words, which S3's do not reach in all its regions."""
    if params["headers"].get("If-None-Match") == "*":
        params["headers"]["x-oss-forbid-overwrite"] = "true"


def _prefix(key: str) -> str:
    key = key.strip("/")
    return f"{key}/" if key else ""


def _tag(found: dict[str, Any]) -> str:
    tag = found.get("ETag")
    return str(tag).strip('"') if tag else str(found.get("LastModified", ""))
