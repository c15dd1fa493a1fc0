"""Files of rows as streams of bytes, compressed or not, and the few that a process keeps open while it reads them.

Text files in another encoding than UTF-8: told once for the file, before each of its rows is dropped.
"""

from __future__ import annotations

import codecs
import io
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from typing import Any, BinaryIO, Protocol, TypeVar, cast

from packtool import storage
from packtool.errors import DataError, StorageError
from packtool.rows.source import Compression, Source

_MOST_OPEN = 4
_SKIP_BYTES = 1 << 22


def open_text(path: str, compression: Compression | None) -> BinaryIO:
    """A file's bytes, front to back; seekable only if it is not compressed.

    Raises:
        StorageError: if it cannot be opened; reading raises it too.
        DataError: while reading, if what is compressed is broken.
    """
    file = storage.open_read(path)
    if compression is None:
        return file
    return io.BufferedReader(_Decompressed(path, file, compression), 1 << 20)


class _Decompressed(io.RawIOBase):
    """The bytes that a compressed file stands for; several members in a row are one."""

    def __init__(self, path: str, file: BinaryIO, compression: Compression) -> None:
        import pyarrow as pa  # here, because plain text needs none of it

        self._path, self._file = path, file
        self._stream = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), compression)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read(len(buffer))
        except OSError as error:
            raise DataError(
                f"{storage.masked(self._path)}: cannot be decompressed: {error}",
                "The file is broken or cut off: copy it again, or name it without .gz or .zst if it is not compressed.",
            ) from error
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


class Hashed:
    """A file that is read front to back, and the digest of what has been read of it.

    Args:
        path: for messages.
    """

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._file, self._path, self._digest = file, path, blake2b(digest_size=16)
        self._head: bytes | None = None
        self._ahead = b""
        self._ended = False

    def peek(self, size: int) -> bytes:
        """What the next ``read`` will give: ``size`` bytes, fewer only of a smaller file."""
        self._ahead = self._ahead or self._read(size)
        return self._ahead

    def take_head(self) -> bytes:
        """What was read first, which is not held any longer then."""
        head, self._head = self._head or b"", b""
        return head

    def read(self, size: int = -1) -> bytes:
        """Read bytes like a binary file, but first, and by itself, what ``peek`` has shown.

        Raises:
            StorageError: if it cannot be read.
        """
        data, self._ahead = self._ahead or self._read(size), b""
        if self._head is None:
            self._head = data
        self._digest.update(data)
        return data

    def readline(self, size: int = -1) -> bytes:
        """Read a line like a binary file."""
        try:
            data = self._file.readline(size)
        except OSError as error:
            raise _unreadable(self._path, error) from error
        self._digest.update(data)
        return data

    @property
    def digest(self) -> str:
        """Digest of everything in the file; reads what is left of it."""
        while self.read(_SKIP_BYTES):
            pass
        return self._digest.hexdigest()

    def _read(self, size: int) -> bytes:
        if self._ended:
            return b""
        try:
            data = self._file.read(size)
        except OSError as error:
            raise _unreadable(self._path, error) from error
        self._ended = not data
        return data


def digest_of(*paths: str) -> str:
    """Digest of the content of files; of remote ones, of what their store says of them."""
    digest = blake2b(digest_size=16)
    for path in paths:
        if storage.is_remote(path):
            state = storage.stat(path)
            digest.update(f"{state.size} {state.modified}".encode())
        else:
            with storage.open_read(path) as file:
                digest.update(Hashed(file, path).digest.encode())
    return digest.hexdigest()


class Reader(Protocol):
    """Something open that belongs to a source."""

    def close(self) -> None:
        """Close what is open."""


class TextReader:
    """Stretches of a text; a compressed one is decompressed once as long as stretches are asked for in order."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._file = open_text(source.path, source.compression)
        self._at = 0

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of the text.

        Raises:
            DataError: if the file has no such bytes any more.
        """
        if self._source.compression is None:
            self._file.seek(start)
        else:
            if start < self._at:
                self._file.close()
                self._file, self._at = open_text(self._source.path, self._source.compression), 0
            while self._at < start and (skipped := len(self._file.read(min(_SKIP_BYTES, start - self._at)))):
                self._at += skipped
        try:
            data = self._file.read(stop - start)
        except OSError as error:
            raise _unreadable(self._source.label, error) from error
        self._at = start + len(data)
        if len(data) < stop - start:
            raise changed(self._source, "it ends early")
        return data

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def read_text(source: Source, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of a text.

    Raises:
        DataError: if the file is no longer what was scanned.
        StorageError: if it cannot be read.
    """
    is_most = source.compression is None and 2 * (stop - start) > source.size > 0
    if is_most and not storage.is_remote(source.path):
        # Small files come in thousands, one after the other: there is nothing to keep open.
        with suppress(StorageError):  # said below
            data = storage.read_bytes(source.path)
            if len(data) == source.size:
                return data[start:stop]
    return opened(source, TextReader).read(start, stop)


R = TypeVar("R", bound=Reader)
_kept = threading.local()


def opened(source: Source, open_it: Callable[[Source], R]) -> R:
    """This thread's reader of a source, made on first use; the four last used stay open.

    Raises:
        DataError: if the file is no longer what was scanned.
        StorageError: if it cannot be opened.
    """
    readers: OrderedDict[Source, Reader] = _readers()
    if source not in readers:
        _check_unchanged(source)
        readers[source] = open_it(source)
        while len(readers) > _MOST_OPEN:
            readers.popitem(last=False)[1].close()
    readers.move_to_end(source)
    return cast(R, readers[source])


def close_readers() -> None:
    """Let go of all files that this thread keeps open."""
    readers = _readers()
    while readers:
        readers.popitem()[1].close()


def changed(source: Source, detail: str) -> DataError:
    """What to raise about a file that is no longer what was scanned."""
    return DataError(f"{source.label} has changed since it was scanned: {detail}", "Run the export again.")


def _unreadable(path: str, error: OSError) -> StorageError:
    remedy = "Check the disk that it lies on, or copy it to another."
    return StorageError(f"{path} cannot be read: {error.strerror or error}", remedy)


def _readers() -> OrderedDict[Source, Reader]:
    # A forked child shares the offsets of its parent's files and must open its own.
    if getattr(_kept, "pid", None) != os.getpid():
        _kept.pid, _kept.readers = os.getpid(), OrderedDict()
    return cast("OrderedDict[Source, Reader]", _kept.readers)


def _check_unchanged(source: Source) -> None:
    """Sizes and entity tags only: clocks of other machines say nothing."""
    if source.size < 0:
        return
    try:
        state = storage.stat(source.path)
    except StorageError as error:
        raise DataError(f"{source.label} was scanned and is gone: {error.message}", "Run the export again.") from error
    if state.size != source.size:
        raise changed(source, f"it had {source.size} bytes and has {state.size}")
    if storage.is_remote(source.path) and source.modified and state.modified not in ("", source.modified):
        raise changed(source, "its entity tag is another")


# The longer marks first: UTF-32's begins with UTF-16's.
_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
_HEAD = 1 << 17
_ROW_ENDS = re.compile(rb"\n|\}\s*,")
_LEAST_ROWS = 2
_HIGH = re.compile(rb"[\x80-\xff]+")


def check_encoding(path: str, head: bytes) -> None:
    """Look at the first bytes of a file of text.

    Single rows that are no UTF-8 are a matter of those rows; this is for files of which more than half of the rows are
    not.

    Raises:
        DataError: naming the encoding as far as it can be told, and the command that mends it.
    """
    head = head[:_HEAD]
    if b"\0" not in head and _is_utf8(head):
        return  # as nearly all files
    name = next((name for mark, name in _MARKS if head.startswith(mark)), None) or _without_mark(head)
    if name is None:
        try:
            head.decode()
            return
        except UnicodeDecodeError as error:
            if error.end == len(head) and error.start >= len(head) - 3:
                return  # a character that goes on behind this piece
        rows = [row for row in _ROW_ENDS.split(head) if row.strip()]
        num_broken = sum(not _is_utf8(row) for row in rows)
        if num_broken < _LEAST_ROWS or 2 * num_broken <= len(rows):
            return
        name = _legacy(head)
    known = name.startswith("UTF")
    sure = f"the file is {name}" if known else f"most of its rows are no UTF-8; by its bytes it may be {name}"
    raise DataError(
        f"{path}: {sure}, and rows are read as UTF-8",
        f"Convert it once: iconv -f {name} -t UTF-8 FILE > NEW_FILE"
        + ("" if known else " (file -i FILE may tell the encoding)"),
    )


def _without_mark(head: bytes) -> str | None:
    """UTF-16 and UTF-32 without a byte order mark, by the zeros that ASCII characters have in them."""
    if len(head) < 8 or head.count(0) < len(head) // 4:
        return None
    zeros = [head[place::4].count(0) * 4 > len(head) * 0.8 for place in range(4)]
    if sum(zeros) == 3:
        return "UTF-32LE" if not zeros[0] else "UTF-32BE"
    even, odd = head[::2].count(0), head[1::2].count(0)
    if max(even, odd) < 4 * (min(even, odd) + 1):
        return None
    return "UTF-16LE" if odd > even else "UTF-16BE"


def _is_utf8(row: bytes) -> bool:
    try:
        row.decode()
    except UnicodeDecodeError:
        return False
    return True


def _legacy(head: bytes) -> str:
    """A guess: letters with accents stand between plain ones, the others' come in runs of two bytes each."""
    runs = [len(run) for run in _HIGH.findall(head)]
    if sum(length == 1 for length in runs) * 2 > len(runs):
        return "WINDOWS-1252"
    for name in ("GB18030", "SHIFT_JIS", "EUC-KR", "BIG5"):
        try:
            codecs.getincrementaldecoder(name)().decode(head)
        except UnicodeDecodeError:
            continue
        return name
    return "WINDOWS-1252"
