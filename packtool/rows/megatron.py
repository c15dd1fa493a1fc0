"""Megatron's indexed datasets: tokens of documents in a ``.bin`` file, and where each lies in the ``.idx`` beside it.

The index, little-endian::

    9 bytes         MMIDIDX and two zeros
    u64             version, 1
    u8              kind of number that a token is
    u64, u64        sequences n, document borders d
    int32[n]        tokens of each sequence
    int64[n]        where each sequence begins in the .bin file, in bytes
    int64[d]        number of the first sequence of each document, and at the end n

Multimodal sets have int8[n] behind it, and are not read. A row is a document; most have one sequence.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from packtool import storage
from packtool.errors import DataError, StorageError
from packtool.rows.lines import too_large
from packtool.rows.opened import changed, digest_of, opened
from packtool.rows.source import BLOCK_ROWS, NumberedRow, RowBlock, Source

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<QBQQ")
_NUMBERS = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def find_documents(source: Source) -> tuple[str, Iterator[RowBlock]]:
    """Digest, and blocks of 64 documents.

    Raises:
        DataError: if the index is none, or does not fit the ``.bin`` file.
        StorageError: if one of the two cannot be reached.
    """
    reader = MegatronReader(source)
    try:
        num_rows = reader.num_documents
        reader.read(max(num_rows - 1, 0), num_rows)  # the end is where a file that was cut off shows
    finally:
        reader.close()
    return digest_of(source.path, tokens_path(source.path)), (
        RowBlock(start, min(start + BLOCK_ROWS, num_rows), start, min(BLOCK_ROWS, num_rows - start))
        for start in range(0, num_rows, BLOCK_ROWS)
    )


def read_documents(source: Source, block: RowBlock) -> Iterator[NumberedRow]:
    """(document number, ``{"input_ids": its tokens}``) of a block."""
    documents = opened(source, MegatronReader).read(block.start, block.stop)
    for number, tokens in enumerate(documents, block.start):
        if tokens.nbytes > source.max_row_bytes:
            yield number, too_large(source, number)
        else:
            yield number, {"input_ids": tokens}


class MegatronReader:
    """An open index and the file of its tokens.

    Raises:
        DataError: if the index is none that can be read.
        StorageError: if one of the files cannot be reached.
    """

    def __init__(self, source: Source) -> None:
        if source.compression is not None:
            raise DataError(f"{source.label}: an index of tokens is read where it lies", "Decompress the two files.")
        self._source = source
        self._index, self._tokens = storage.open_read(source.path), storage.open_read(tokens_path(source.path))
        try:
            self._read_head()
        except BaseException:
            self.close()
            raise

    @property
    def num_documents(self) -> int:
        """Documents in the file."""
        return max(self._num_borders - 1, 0)

    def read(self, start: int, stop: int) -> list[npt.NDArray[Any]]:
        """The tokens of documents [start, stop), each (L,), of the kind of number that the file has.

        Raises:
            DataError: if the file is broken there, or has no such documents any more.
        """
        if stop > self.num_documents:
            raise changed(self._source, f"it ends at document {self.num_documents}")
        if start == stop:
            return []
        n = self._num_sequences
        borders = self._numbers(12 * n + 8 * start, stop - start + 1, "<i8")
        first, last = int(borders[0]), int(borders[-1])
        if first < 0 or last > n or (np.diff(borders) < 0).any():
            raise self._broken(f"documents {start} to {stop} lie outside of its {n} sequences")
        sizes = self._numbers(4 * first, last - first, "<i4")
        places = self._numbers(4 * n + 8 * first, last - first, "<i8")
        sequences = [self._sequence(place, size) for place, size in zip(places.tolist(), sizes.tolist(), strict=True)]
        empty = np.zeros(0, self._number)
        bounds = (borders - first).tolist()
        return [sequences[a] if b == a + 1 else np.concatenate([empty, *sequences[a:b]]) for a, b in pairwise(bounds)]

    def close(self) -> None:
        """Let go of the files."""
        self._index.close()
        self._tokens.close()

    def _read_head(self) -> None:
        head = self._index.read(len(_MAGIC) + _HEAD.size)
        if not head.startswith(_MAGIC) or len(head) < len(_MAGIC) + _HEAD.size:
            raise self._broken("it does not begin as Megatron's indexes do")
        version, code, self._num_sequences, self._num_borders = _HEAD.unpack_from(head, len(_MAGIC))
        if version != 1 or code not in _NUMBERS:
            raise self._broken(f"version {version} with numbers of kind {code} is not known")
        self._number = np.dtype(_NUMBERS[code])
        size = len(head) + 12 * self._num_sequences + 8 * self._num_borders
        found = self._index.seek(0, 2)
        if found == size + self._num_sequences and self._num_sequences:
            raise self._broken("it is of a multimodal set, whose pictures packtool does not read")
        if found != size:
            raise self._broken(f"it has {found:,} bytes where its head tells of {size:,}")

    def _numbers(self, offset: int, count: int, kind: str) -> npt.NDArray[Any]:
        return _read(self._index, len(_MAGIC) + _HEAD.size + offset, count, np.dtype(kind), self._source)

    def _sequence(self, place: int, size: int) -> npt.NDArray[Any]:
        if place < 0 or size < 0:
            raise self._broken(f"a sequence of {size} tokens at {place}")
        return _read(self._tokens, place, size, self._number, self._source)

    def _broken(self, detail: str) -> DataError:
        return DataError(
            f"{self._source.label} cannot be read as Megatron's index: {detail}", "Write it again, with its .bin file."
        )


def tokens_path(path: str) -> str:
    """The ``.bin`` file of an ``.idx`` file."""
    return path[: -len("idx")] + "bin"


def _read(file: BinaryIO, offset: int, count: int, kind: np.dtype[Any], source: Source) -> npt.NDArray[Any]:
    try:
        file.seek(offset)
        data = file.read(count * kind.itemsize)
    except OSError as error:
        raise StorageError(f"{source.label} cannot be read: {error.strerror or error}", "Check the disk.") from error
    if len(data) != count * kind.itemsize:
        raise DataError(
            f"{source.label}: its .bin file ends before byte {offset + count * kind.itemsize:,}, which the index names",
            "Both files must come from one run: copy them again.",
        )
    return np.frombuffer(data, kind)
