"""Byte streams of row files, compressed or not; the readers that each thread keeps open; detection of encodings.

A text file that is not UTF-8 is one error for the file, instead of a drop for each of its rows.
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
from typing import Any, BinaryIO, TypeVar

from packtool import storage
from packtool.errors import DataError, StorageError
from packtool.rows.source import Compression, Source

_MAX_OPEN_FILES = 4
_SKIP_BYTES = 1 << 22


def open_text(path: str, compression: Compression | None) -> BinaryIO:
    """Open a file as a stream of decompressed bytes, which is seekable only without compression.

    Reading raises StorageError, or DataError if the compressed data is damaged.
    """
    file = storage.open_read(path)
    if compression is None:
        return file
    return io.BufferedReader(_Decompressed(path, file, compression), 1 << 20)


class _Decompressed(io.RawIOBase):
    """The decompressed bytes of a file, all its gzip members or zstd frames concatenated."""

    def __init__(self, path: str, file: BinaryIO, compression: Compression) -> None:
        import pyarrow as pa  # here, because uncompressed text does not need it

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
                "The file is damaged or truncated: copy it again. If it is not compressed, remove .gz or .zst from its "
                "name.",
            ) from error
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


class HashedFile:
    """A file read once from beginning to end while the digest of its content is computed."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._file, self._path, self._digest = file, path, blake2b(digest_size=16)
        self._peeked = b""

    def peek(self, size: int) -> bytes:
        """Return the bytes that the next ``read`` will return: up to ``size``."""
        self._peeked = self._peeked or _read_or_raise(self._file.read, size, self._path)
        return self._peeked

    def read(self, size: int = -1) -> bytes:
        """Read up to ``size`` bytes; after ``peek``, exactly the bytes that it returned."""
        data, self._peeked = self._peeked or _read_or_raise(self._file.read, size, self._path), b""
        self._digest.update(data)
        return data

    def readline(self, size: int = -1) -> bytes:
        """Read up to the end of the line, at most ``size`` bytes."""
        data = _read_or_raise(self._file.readline, size, self._path)
        self._digest.update(data)
        return data

    @property
    def digest(self) -> str:
        """Digest of the whole file; reads the file to its end."""
        while self.read(_SKIP_BYTES):
            pass
        return self._digest.hexdigest()


def _read_or_raise(read: Callable[[int], bytes], size: int, label: str) -> bytes:
    try:
        return read(size)
    except OSError as error:
        remedy = "Check the disk, or copy the file to another disk."
        raise StorageError(f"{label} cannot be read: {error.strerror or error}", remedy) from error


def digest_of(*paths: str) -> str:
    """Return one digest of several files: of the content of local files, of size and version of remote files."""
    digest = blake2b(digest_size=16)
    for path in paths:
        if storage.is_remote(path):
            state = storage.stat(path)
            digest.update(f"{state.size} {state.modified}".encode())
        else:
            with storage.open_read(path) as file:
                digest.update(HashedFile(file, path).digest.encode())
    return digest.hexdigest()


class TextReader:
    """Reads byte ranges of a text; a compressed text is decompressed only once if the ranges are in order."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._file = open_text(source.path, source.compression)
        self._offset = 0

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of the decompressed text; raise DataError if it has become shorter."""
        if self._source.compression is None:
            self._file.seek(start)
        else:
            self._skip_to(start)
        data = _read_or_raise(self._file.read, stop - start, self._source.label)
        self._offset = start + len(data)
        if len(data) < stop - start:
            raise changed_error(self._source, "it ends early")
        return data

    def _skip_to(self, start: int) -> None:
        """Decompress a file up to byte ``start`` or its end; from its beginning if ``start`` is already passed."""
        if start < self._offset:
            self._file.close()
            self._file = open_text(self._source.path, self._source.compression)
            self._offset = 0
        while self._offset < start:
            skipped = self._file.read(min(_SKIP_BYTES, start - self._offset))
            if not skipped:  # the end of the file
                return
            self._offset += len(skipped)

    def close(self) -> None:
        self._file.close()


def read_text(source: Source, start: int, stop: int) -> bytes:
    """Return bytes [start, stop) of a source's decompressed text; raise the same errors as ``opened``."""
    is_most_of_file = source.compression is None and 2 * (stop - start) > source.size > 0
    if is_most_of_file and not storage.is_remote(source.path):
        # There may be thousands of small files, each of which is read once: do not keep them open.
        with suppress(StorageError):  # ``opened`` raises it again
            data = storage.read_bytes(source.path)
            if len(data) == source.size:
                return data[start:stop]
    return opened(source, TextReader).read(start, stop)


R = TypeVar("R")
_open = threading.local()


def opened(source: Source, open_reader: Callable[[Source], R]) -> R:
    """Return this thread's reader of a source, opened on first use; the four used last stay open.

    DataError if the file has changed since it was scanned.
    """
    readers = _readers()
    if source not in readers:
        _check_unchanged(source)
        readers[source] = open_reader(source)
        while len(readers) > _MAX_OPEN_FILES:
            _, oldest_reader = readers.popitem(last=False)
            oldest_reader.close()
    readers.move_to_end(source)
    reader: R = readers[source]
    return reader


def close_readers() -> None:
    """Close all readers that this thread keeps open."""
    readers = _readers()
    while readers:
        readers.popitem()[1].close()


def changed_error(source: Source, detail: str) -> DataError:
    """Return the error for a file that has changed since it was scanned; ``detail`` says how."""
    return DataError(f"{source.label} has changed since it was scanned: {detail}", "Run the export again.")


def _readers() -> OrderedDict[Source, Any]:
    """Return the open readers of this thread by source, the one used last at the end."""
    # A forked child shares file offsets with its parent, so it must open its own files.
    if getattr(_open, "pid", None) != os.getpid():
        _open.pid, _open.readers = os.getpid(), OrderedDict()
    readers: OrderedDict[Source, Any] = _open.readers
    return readers


def _check_unchanged(source: Source) -> None:
    if source.size < 0:
        return
    try:
        state = storage.stat(source.path)
    except StorageError as error:
        message = f"{source.label} was deleted after its scan: {error.message}"
        raise DataError(message, "Run the export again.") from error
    if state.size != source.size:
        raise changed_error(source, f"it had {source.size} bytes and now has {state.size}")
    if storage.is_remote(source.path) and source.modified and state.modified not in ("", source.modified):
        raise changed_error(source, "its entity tag is different")


# Byte order marks; UTF-32 comes first, because its mark begins with that of UTF-16.
_ENCODING_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
_HEAD_BYTES = 1 << 17
_ROW_ENDS = re.compile(rb"\n|\}\s*,")
_MIN_BROKEN_ROWS = 2
_HIGH_BYTES = re.compile(rb"[\x80-\xff]+")


def check_encoding(path: str, head: bytes) -> None:
    """Check that a text file is UTF-8; otherwise raise a DataError with its encoding and a command for conversion.

    A file passes if at most half of its rows are invalid; these rows are dropped later.

    Args:
        path: name of the file in messages.
        head: beginning of the file, of which the first 128 KiB are checked.
    """
    head = head[:_HEAD_BYTES]
    if b"\0" not in head and _is_utf8(head):  # the usual case
        return
    encoding = _utf_by_mark(head) or _utf_by_zeros(head)  # UTF-16 or UTF-32, or None
    if encoding is not None:
        problem = f"the file is {encoding}"
        hint = ""
    elif _is_mostly_utf8(head):
        return
    else:
        encoding = _probable_encoding(head)
        problem = f"most rows are not UTF-8; the encoding may be {encoding}"
        hint = " (file -i FILE may identify the encoding)"
    remedy = f"Convert the file: iconv -f {encoding} -t UTF-8 FILE > NEW_FILE{hint}"
    raise DataError(f"{path}: {problem}. Rows must be UTF-8", remedy)


def _is_mostly_utf8(head: bytes) -> bool:
    """Return whether at most half of the rows, or only one, are no UTF-8; ``head`` may end inside a character."""
    try:
        head.decode()
        return True
    except UnicodeDecodeError as error:
        ends_in_character = error.end == len(head) and error.start >= len(head) - 3
        if ends_in_character:  # UTF-8 up to there
            return True
    rows = [row for row in _ROW_ENDS.split(head) if row.strip()]
    num_broken = sum(not _is_utf8(row) for row in rows)
    return num_broken < _MIN_BROKEN_ROWS or 2 * num_broken <= len(rows)


def _utf_by_mark(head: bytes) -> str | None:
    """Return the name of UTF-16 or UTF-32 text with a byte order mark; else None."""
    return next((name for mark, name in _ENCODING_MARKS if head.startswith(mark)), None)


def _utf_by_zeros(head: bytes) -> str | None:
    """Return the name of UTF-16 or UTF-32 text without a byte order mark, by the zero bytes of ASCII; else None."""
    if len(head) < 8 or head.count(0) < len(head) // 4:
        return None
    is_zero = [head[offset::4].count(0) * 4 > len(head) * 0.8 for offset in range(4)]
    if sum(is_zero) == 3:
        return "UTF-32LE" if not is_zero[0] else "UTF-32BE"
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


def _probable_encoding(head: bytes) -> str:
    """Return the likely legacy encoding: bytes above 127 are single in Western text, and in runs in East Asian text."""
    runs = [len(run) for run in _HIGH_BYTES.findall(head)]
    if sum(length == 1 for length in runs) * 2 > len(runs):
        return "WINDOWS-1252"
    for name in ("GB18030", "SHIFT_JIS", "EUC-KR", "BIG5"):
        try:
            codecs.getincrementaldecoder(name)().decode(head)
        except UnicodeDecodeError:
            continue
        return name
    return "WINDOWS-1252"
