"""An object uploaded in parts while it is written: nothing on disk, little in memory, not to be seen before its end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol

from packtool.errors import StorageError
from packtool.storage.faults import code_of, storage_error
from packtool.storage.remote import answer, patiently, result_of, start, wait
from packtool.storage.store import FileState

PART_BYTES = 8 * 2**20
_PARTS_AT_ONCE = 3
# S3 allows 10,000 parts: from here on they are larger, which makes room for 350 GB.
_LARGE_FROM, _LARGE_PART_BYTES = 5000, 64 * 2**20
_ABORT_S = 10.0


class Requests(Protocol):
    """The requests of an S3 store that an upload is made of; ``S3Store`` documents each."""

    async def request(self, method: str, num_bytes: int = 0, **arguments: Any) -> Any:
        """One request, repeated while it fails for passing reasons."""

    async def request_once(self, method: str, **arguments: Any) -> Any:
        """One request, tried once."""

    async def abort_upload(self, bucket: str, key: str, upload: str) -> None:
        """End one unfinished upload."""

    async def abort_uploads(self, bucket: str, prefix: str, wanted: Callable[[str, str], bool]) -> None:
        """End the unfinished uploads that are wanted, by key and upload id."""


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

    def __init__(self, store: Requests, path: str, bucket: str, key: str) -> None:
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
            self._tags.append(result_of(self._under_way.popleft()))
        data, self._buffer = bytes(self._buffer), bytearray()
        self._num_parts += 1
        self._num_bytes += len(data)
        self._under_way.append(start(self._send_part(self._upload, self._num_parts, data)))

    async def _begin(self) -> str:
        async def once() -> str:
            self._num_begun += 1
            begun = await self._store.request_once("create_multipart_upload", **self._place)
            return str(begun["UploadId"])

        return await patiently(once)

    async def _send_part(self, upload: str, number: int, data: bytes) -> str:
        part = {"UploadId": upload, "PartNumber": number, "Body": data}
        sent = await self._store.request("upload_part", len(data), **self._place, **part)
        return str(sent["ETag"])

    def _finish(self) -> None:
        if self._upload is None:
            data, self._buffer = bytes(self._buffer), bytearray()
            put = self._store.request("put_object", len(data), **self._place, Body=data)
            self._num_bytes, self._tag = len(data), _plain(answer(self._path, "writing", put)["ETag"])
            return
        if self._buffer:
            self._send()
        while self._under_way:
            self._tags.append(result_of(self._under_way.popleft()))
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
                whole = await self._store.request_once(
                    "complete_multipart_upload", **self._place, UploadId=upload, MultipartUpload={"Parts": parts}
                )
                self._tag = _plain(whole["ETag"])
            except Exception as error:
                # The first answer may have got lost on its way back.
                if code_of(error) != "NoSuchUpload" or num_tries == 1 or not await self._is_there():
                    raise

        # The server puts the parts together before it answers.
        await patiently(once, self._num_bytes // 8)

    async def _is_there(self) -> bool:
        """Whether the object is the one that was uploaded: its size, and the tag of so many parts."""
        head = await self._store.request_once("head_object", **self._place)
        self._tag = _plain(head["ETag"])
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


def _plain(tag: str) -> str:
    """An entity tag as listings are made to show it."""
    return str(tag).strip('"')
