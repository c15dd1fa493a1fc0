"""Megatron's indexed datasets: tokens of documents in a ``.bin`` file, and their positions in the ``.idx`` beside it.

The index, little-endian::

    9 bytes         MMIDIDX and two zeros
    u64             version, 1
    u8              code of the tokens' number type
    u64, u64        sequences n, document borders d
    int32[n]        tokens of each sequence
    int64[n]        first byte of each sequence in the .bin file
    int64[d]        number of the first sequence of each document, and at the end n

Multimodal sets have int8[n] after it and are not supported. A row is a document; most have one sequence.
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
from packtool.rows.open_files import changed_error, digest_of
from packtool.rows.source import NumberedRow, RowBlock, Source, equal_blocks

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<QBQQ")
_NUMBER_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class MegatronReader:
    """An open index and its file of tokens.

    Raises:
        DataError: if the index cannot be read or does not fit the ``.bin`` file.
        StorageError: if one of the files cannot be reached.
    """

    def __init__(self, source: Source) -> None:
        if source.compression is not None:
            raise DataError(f"{source.label}: an index of tokens is read where it lies", "Decompress the two files.")
        self._source, self._tokens_path = source, source.path[: -len("idx")] + "bin"
        self._index, self._tokens = storage.open_read(source.path), storage.open_read(self._tokens_path)
        try:
            self._read_head()
        except BaseException:
            self.close()
            raise

    def blocks(self) -> Iterator[RowBlock]:
        """Return blocks of 64 documents, after reading the last one: that finds a truncated file."""
        self.read(max(self._num_documents - 1, 0), self._num_documents)
        return equal_blocks(self._num_documents)

    def digest(self) -> str:
        return digest_of(self._source.path, self._tokens_path)

    def rows(self, block: RowBlock) -> Iterator[NumberedRow]:
        """Yield (document number, ``{"input_ids": its tokens}``) of a block."""
        for number, tokens in enumerate(self.read(block.start, block.stop), block.start):
            if tokens.nbytes > self._source.max_row_bytes:
                yield number, too_large(self._source, number)
            else:
                yield number, {"input_ids": tokens}

    def read(self, start: int, stop: int) -> list[npt.NDArray[Any]]:
        """Return the tokens of documents [start, stop), each (L,), in the file's number type.

        Raises:
            DataError: if the file is broken there, or has no such documents any more.
        """
        if stop > self._num_documents:
            raise changed_error(self._source, f"it ends at document {self._num_documents}")
        if start == stop:
            return []
        n = self._num_sequences
        borders = self._numbers(12 * n + 8 * start, stop - start + 1, "<i8")
        first, last = int(borders[0]), int(borders[-1])
        if first < 0 or last > n or (np.diff(borders) < 0).any():
            raise self._broken(f"documents {start} to {stop} lie outside of its {n} sequences")
        sizes = self._numbers(4 * first, last - first, "<i4")
        offsets = self._numbers(4 * n + 8 * first, last - first, "<i8")
        sequences = []
        for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True):
            if offset < 0 or size < 0:
                raise self._broken(f"a sequence of {size} tokens at {offset}")
            sequences.append(self._read(self._tokens, offset, size, self._token_type))
        empty = np.zeros(0, self._token_type)
        bounds = (borders - first).tolist()
        return [sequences[a] if b == a + 1 else np.concatenate([empty, *sequences[a:b]]) for a, b in pairwise(bounds)]

    def close(self) -> None:
        self._index.close()
        self._tokens.close()

    def _read_head(self) -> None:
        head = self._index.read(len(_MAGIC) + _HEAD.size)
        if not head.startswith(_MAGIC) or len(head) < len(_MAGIC) + _HEAD.size:
            raise self._broken("it does not begin as Megatron's indexes do")
        version, code, self._num_sequences, num_borders = _HEAD.unpack_from(head, len(_MAGIC))
        self._num_documents = max(num_borders - 1, 0)
        if version != 1 or code not in _NUMBER_TYPES:
            raise self._broken(f"version {version} with numbers of kind {code} is not known")
        self._token_type = np.dtype(_NUMBER_TYPES[code])
        expected = len(head) + 12 * self._num_sequences + 8 * num_borders
        size = self._index.seek(0, 2)
        if size == expected + self._num_sequences and self._num_sequences:
            raise self._broken("it is of a multimodal set, whose pictures packtool does not read")
        if size != expected:
            raise self._broken(f"it has {size:,} bytes where its head tells of {expected:,}")

    def _numbers(self, offset: int, count: int, number_type: str) -> npt.NDArray[Any]:
        return self._read(self._index, len(_MAGIC) + _HEAD.size + offset, count, np.dtype(number_type))

    def _read(self, file: BinaryIO, offset: int, count: int, number_type: np.dtype[Any]) -> npt.NDArray[Any]:
        stop = offset + count * number_type.itemsize
        label = self._source.label
        try:
            file.seek(offset)
            data = file.read(stop - offset)
        except OSError as error:
            raise StorageError(f"{label} cannot be read: {error.strerror or error}", "Check the disk.") from error
        if len(data) != stop - offset:
            raise DataError(
                f"{label}: its .bin file ends before byte {stop:,}, which the index names",
                "Both files must come from one run: copy them again.",
            )
        return np.frombuffer(data, number_type)

    def _broken(self, detail: str) -> DataError:
        return DataError(
            f"{self._source.label} cannot be read as Megatron's index: {detail}", "Write it again, with its .bin file."
        )
