"""Rows of binary files: parquet and Arrow tables, Megatron's indexed datasets, and packs in tar files.

Each format has a class with ``blocks``, ``digest``, ``rows`` and ``close``. Tables are read sequentially, a few rows at
a time. The two other formats are:

Megatron's indexed datasets
    Tokens of documents in a ``.bin`` file, and their positions in the ``.idx`` beside it. A row is a document; most
    have one sequence. The index, little-endian::

        9 bytes         MMIDIDX and two zeros
        u64             version, 1
        u8              code of the tokens' number type
        u64, u64        sequences n, document borders d
        int32[n]        tokens of each sequence
        int64[n]        first byte of each sequence in the .bin file
        int64[d]        number of the first sequence of each document, and n at the end

    Multimodal datasets have int8[n] after it and are not supported.

Packs in tar files, as ``packtool pack`` and WebDataset write them
    The members of a pack are consecutive and have the same name up to the first dot: ``000000007.json``,
    ``000000007.image0.jpg``. A row is the JSON object of a pack with the bytes of its files.
"""

from __future__ import annotations

import os
import shutil
import struct
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import blake2b
from itertools import groupby, islice, pairwise
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from packtool import storage
from packtool.errors import DataError, StorageError
from packtool.rows.forms.columns import NUMBER_COLUMNS, shown
from packtool.rows.open_files import HashedFile, changed_error, digest_of, open_text
from packtool.rows.sample import Dropped, guard_row
from packtool.rows.source import BLOCK_ROWS, NumberedRow, RowBlock, Source, equal_blocks
from packtool.rows.text_files import parse_row, too_large

_BATCH_BYTES = 1 << 23
_COPY_BYTES = 1 << 22  # in memory at once
_MAX_BATCH_ROWS = 1024
_ARROW_FILE_MAGIC = b"ARROW1"


class TableReader:
    """An open table that is read sequentially; reading earlier rows starts again at their row group.

    A compressed file is decompressed once, into a temporary file. All methods raise a DataError for a damaged file.
    """

    kind = ""
    schema: pa.Schema

    def __init__(self, source: Source) -> None:
        self._source = source
        self._file = _seekable(source)
        with self._data_errors():
            self._open()
        names = self.schema.names
        if len(set(names)) < len(names):
            duplicate = next(name for name in names if names.count(name) > 1)
            raise DataError(f"{source.label} has two columns {shown(duplicate)}", "Give each column its own name.")
        self._batches_after: Iterator[pa.RecordBatch] = iter(())  # the batches after ``_batch``
        self._batch: pa.RecordBatch | None = None  # the last one read
        self._batch_start = self._batch_stop = 0  # its rows

    def _open(self) -> None:
        """Open ``self._file`` as a table, and set ``schema``."""
        raise NotImplementedError

    def num_rows(self) -> int:
        raise NotImplementedError

    def _batches_from(self, row: int) -> tuple[int, Iterator[pa.RecordBatch]]:
        """Return the number of the first row of the row group with ``row``, and the batches from there to the end.

        Formats without row groups return the whole table. Nothing is read before the iterator is used.
        """
        raise NotImplementedError

    def blocks(self) -> Iterator[RowBlock]:
        return equal_blocks(self.num_rows())

    def digest(self) -> str:
        """Return a digest of the content; for a remote file, of its schema, size and version."""
        source = self._source
        if not storage.is_remote(source.path):
            with open_text(source.path, None) as file:
                return HashedFile(file, source.label).digest
        digest = blake2b(digest_size=16)
        digest.update(self.schema.serialize().to_pybytes())
        digest.update(f"{self.num_rows()} {source.size} {source.modified}".encode())
        return digest.hexdigest()

    def rows(self, block: RowBlock) -> Iterator[NumberedRow]:
        """Yield (row number, row) for the rows of a block, or a ``Dropped`` in place of a row that cannot be read.

        Null values in nested objects are omitted: these formats cannot distinguish them from missing keys.
        """
        batch_start = block.start  # number of the first row of the batch
        for batch in self.read(block.start, block.stop):
            rows: Iterable[dict[str, Any] | Dropped] | None = None
            is_small = batch.nbytes < min(_BATCH_BYTES, self._source.max_row_bytes)  # so no row can be too large
            if is_small:
                with suppress(*_VALUE_ERRORS):
                    rows = _as_python(batch)  # all rows at once, which is faster
            if rows is None:
                rows = self._convert_each(batch, batch_start)
            yield from enumerate(rows, batch_start)
            batch_start += batch.num_rows

    def _convert_each(self, batch: pa.RecordBatch, first_row: int) -> Iterator[dict[str, Any] | Dropped]:
        """Yield the rows of a batch, converted one by one: only those with an error are dropped."""
        for position in range(batch.num_rows):
            number = first_row + position
            row = batch.slice(position, 1)
            yield guard_row(self._source.label, number, _convert_row, self._source, number, row)

    def read(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """Yield rows [start, stop) as record batches; raise DataError if the file has become shorter.

        A file is read forward in batches, the last of which is kept: ``_batch``, rows [_batch_start, _batch_stop). If
        the rows are before it or in a later row group (a section that can be read alone), reading starts at that group.
        """
        group_start, batches_from_group = self._batches_from(start)
        can_continue = self._batch_start <= start and group_start < self._batch_stop
        if self._batch is None or not can_continue:
            self._batches_after, self._batch = batches_from_group, None
            self._batch_start = self._batch_stop = group_start
        row = start  # the next one to yield
        while row < stop:
            while self._batch is None or row >= self._batch_stop:
                self._batch = self._next_batch()  # also moves _batch_start and _batch_stop
            part = self._batch.slice(row - self._batch_start, stop - row)  # ends with the batch if that is earlier
            yield part
            row += part.num_rows

    def _next_batch(self) -> pa.RecordBatch:
        """Read the batch after ``_batch``, and set the range of its rows."""
        with self._data_errors():
            batch = next(self._batches_after, None)
        if batch is None:
            raise changed_error(self._source, f"it ends at row {self._batch_stop}")
        self._batch_start = self._batch_stop
        self._batch_stop += batch.num_rows
        return batch

    def close(self) -> None:
        self._batches_after, self._batch = iter(()), None
        self._file.close()

    @contextmanager
    def _data_errors(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{self._source.label} cannot be read as {self.kind} file: {error}",
                "The file is damaged, truncated or in another format: write it again, or correct its suffix.",
            ) from error


class ParquetReader(TableReader):
    """An open parquet file."""

    kind = "a parquet"

    def _open(self) -> None:
        # Column chunks are read in pieces: a row group with images may be larger than the memory.
        self._table = pq.ParquetFile(self._file, pre_buffer=False, buffer_size=1 << 20)
        self.schema = self._table.schema_arrow
        self._groups = [self._table.metadata.row_group(group) for group in range(self._table.num_row_groups)]

    def num_rows(self) -> int:
        return int(self._table.metadata.num_rows)

    def _batches_from(self, row: int) -> tuple[int, Iterator[pa.RecordBatch]]:
        group_start = group_number = 0
        while group_number < len(self._groups) and row >= group_start + self._groups[group_number].num_rows:
            group_start += self._groups[group_number].num_rows
            group_number += 1
        return group_start, self._batches_of_groups(group_number)

    def _batches_of_groups(self, first_group: int) -> Iterator[pa.RecordBatch]:
        for number, group in enumerate(self._groups[first_group:], first_group):
            row_bytes = group.total_byte_size // max(group.num_rows, 1)
            size = max(1, min(_MAX_BATCH_ROWS, _BATCH_BYTES // max(row_bytes, 1)))
            yield from self._table.iter_batches(size, row_groups=[number], use_threads=False)


class ArrowReader(TableReader):
    """An open Arrow file or Arrow stream."""

    kind = "an Arrow"

    def _open(self) -> None:
        self._is_file = self._file.read(len(_ARROW_FILE_MAGIC)) == _ARROW_FILE_MAGIC
        self.schema = self._opened().schema

    def _opened(self) -> Any:
        self._file.seek(0)
        return pa.ipc.open_file(self._file) if self._is_file else pa.ipc.open_stream(self._file)

    def num_rows(self) -> int:
        with self._data_errors():
            return sum(batch.num_rows for batch in self._batches())

    def _batches_from(self, row: int) -> tuple[int, Iterator[pa.RecordBatch]]:
        return 0, self._batches()

    def _batches(self) -> Iterator[pa.RecordBatch]:
        reader = self._opened()
        yield from map(reader.get_batch, range(reader.num_record_batches)) if self._is_file else reader


def _seekable(source: Source) -> Any:
    """Open the file of a source as a seekable file of pyarrow.

    A local file is mapped into memory. A compressed one is first decompressed into a temporary file, which is deleted
    when it is closed.
    """
    if source.compression is not None:
        return pa.PythonFile(_decompressed_copy(source), mode="r")
    if storage.is_remote(source.path):
        return pa.PythonFile(storage.open_read(source.path), mode="r")
    path = storage.normalize(source.path)
    if source.size == 0:  # an empty file cannot be mapped
        return pa.OSFile(path)
    storage.stat(source.path)  # raises a clear error if the file is missing
    return pa.memory_map(path)


def _decompressed_copy(source: Source) -> BinaryIO:
    """Decompress the file of a source into a temporary file, which is returned open, at its beginning."""
    temporary_file = tempfile.TemporaryFile()  # noqa: SIM115
    try:
        with open_text(source.path, source.compression) as file:
            shutil.copyfileobj(file, temporary_file, length=_COPY_BYTES)
    except BaseException:
        temporary_file.close()
        raise
    temporary_file.seek(0)
    return temporary_file


# Raised for a value that has no Python equivalent, such as text that is not UTF-8.
_VALUE_ERRORS = (pa.ArrowException, ValueError, ArithmeticError)


def _as_python(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Convert a batch to rows; columns of tokens become numpy arrays, which is 100 times faster than Python objects."""
    token_columns = [
        name for name in NUMBER_COLUMNS if name in batch.schema.names and _is_list_of_numbers(batch.schema.field(name))
    ]
    if not token_columns:
        return [{name: _without_nulls(value) for name, value in row.items()} for row in batch.to_pylist()]
    others = batch.select([name for name in batch.schema.names if name not in token_columns])
    rows = _as_python(others) if others.num_columns else [{} for _ in range(batch.num_rows)]
    for name in token_columns:
        for row, value in zip(rows, batch.column(name), strict=True):
            row[name] = _array(value)
    return rows


def _is_list_of_numbers(field: pa.Field) -> bool:
    """Return whether the values of a column are lists of numbers, or lists of such lists."""
    if not _is_list(field.type):
        return False
    inner = field.type.value_type
    if _is_list(inner):
        inner = inner.value_type
    return pa.types.is_integer(inner) or pa.types.is_floating(inner) or pa.types.is_boolean(inner)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _array(value: pa.Scalar) -> Any:
    """Convert a list of numbers to an array, or to a list if it contains nulls or lists; convert null to None."""
    if not value.is_valid:
        return None
    if _is_list(value.type.value_type):
        return [_array(item) for item in value.values]
    return value.as_py() if value.values.null_count else value.values.to_numpy(zero_copy_only=False)


def _convert_row(source: Source, number: int, batch: pa.RecordBatch) -> dict[str, Any] | Dropped:
    """Convert a batch of one row, or return a ``Dropped`` if a value cannot be converted or the row is too large."""
    try:
        (row,) = _as_python(batch)
    except UnicodeDecodeError as error:
        return Dropped(source.label, number, "invalid_text", f"not UTF-8: {error}")
    except _VALUE_ERRORS as error:
        return Dropped(source.label, number, "invalid_row", f"a value cannot be read: {error}")
    return row if _text_bytes(row) <= source.max_row_bytes else too_large(source, number)


def _text_bytes(value: Any) -> int:
    """Return the number of characters of all texts in a row, without keys and embedded media."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_text_bytes, value.values()))
    return sum(map(_text_bytes, value)) if isinstance(value, list) else 0


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


_INDEX_MAGIC = b"MMIDIDX\x00\x00"
_INDEX_HEAD = struct.Struct("<QBQQ")
_HEAD_BYTES = len(_INDEX_MAGIC) + _INDEX_HEAD.size
_NUMBER_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class MegatronReader:
    """An open Megatron index and its file of tokens; DataError if the index is invalid or does not match the file."""

    def __init__(self, source: Source) -> None:
        if source.compression is not None:
            message = f"{source.label}: compressed Megatron datasets are not supported"
            raise DataError(message, "Decompress the .idx file and its .bin file.")
        self._source, self._tokens_path = source, source.path[: -len("idx")] + "bin"
        self._index, self._tokens = storage.open_read(source.path), storage.open_read(self._tokens_path)
        try:
            self._read_head()
        except BaseException:
            self.close()
            raise

    def blocks(self) -> Iterator[RowBlock]:
        """Return blocks of 64 documents. Reads the last document first, so that a truncated file is an error."""
        self.read(max(self._num_documents - 1, 0), self._num_documents)
        return equal_blocks(self._num_documents)

    def digest(self) -> str:
        """Return a digest of both files."""
        return digest_of(self._source.path, self._tokens_path)

    def rows(self, block: RowBlock) -> Iterator[NumberedRow]:
        """Yield (document number, ``{"input_ids": its tokens}``) for the documents of a block."""
        for number, tokens in enumerate(self.read(block.start, block.stop), block.start):
            if tokens.nbytes > self._source.max_row_bytes:
                yield number, too_large(self._source, number)
            else:
                yield number, {"input_ids": tokens}

    def read(self, start: int, stop: int) -> list[npt.NDArray[Any]]:
        """Return the tokens of documents [start, stop), each (L,), in the number type of the file."""
        if stop > self._num_documents:
            raise changed_error(self._source, f"it ends at document {self._num_documents}")
        if start == stop:
            return []
        borders = self._document_borders(start, stop)  # numbers of sequences; document i ends where i + 1 begins
        first_sequence = borders[0]
        sequences = self._sequences(first_sequence, borders[-1])
        documents = []
        for document_start, document_stop in pairwise(borders):
            parts = sequences[document_start - first_sequence : document_stop - first_sequence]
            if len(parts) == 1:  # not copied
                documents.append(parts[0])
            else:  # several sequences, or none
                documents.append(np.concatenate([np.zeros(0, self._token_type), *parts]))
        return documents

    def _document_borders(self, start: int, stop: int) -> list[int]:
        """Return the first sequence of each of the documents [start, stop), and the sequence after the last one."""
        num_sequences = self._num_sequences
        offset = (4 + 8) * num_sequences + 8 * start  # after the sizes (4 bytes) and offsets (8) of all sequences
        borders = self._index_numbers(offset, stop - start + 1, "<i8")
        if borders[0] < 0 or borders[-1] > num_sequences or (np.diff(borders) < 0).any():
            raise self._index_error(f"documents {start} to {stop} are outside of its {num_sequences} sequences")
        return [int(border) for border in borders]

    def _sequences(self, first: int, stop: int) -> list[npt.NDArray[Any]]:
        """Return the tokens of sequences [first, stop), each (L,)."""
        sizes = self._index_numbers(4 * first, stop - first, "<i4")
        offsets = self._index_numbers(4 * self._num_sequences + 8 * first, stop - first, "<i8")
        sequences = []
        for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True):
            if offset < 0 or size < 0:
                raise self._index_error(f"it has a sequence of {size} tokens at byte {offset}")
            sequences.append(self._read(self._tokens, offset, size, self._token_type))
        return sequences

    def close(self) -> None:
        self._index.close()
        self._tokens.close()

    def _read_head(self) -> None:
        """Read the numbers of sequences and documents and the type of tokens from the head of the index file.

        Raises DataError if the head is invalid, or if the size of the file is not the one that its head requires.
        """
        head = self._index.read(_HEAD_BYTES)
        if not head.startswith(_INDEX_MAGIC) or len(head) < _HEAD_BYTES:
            raise self._index_error("it does not begin with MMIDIDX")
        version, type_code, self._num_sequences, num_borders = _INDEX_HEAD.unpack_from(head, len(_INDEX_MAGIC))
        self._num_documents = max(num_borders - 1, 0)
        if version != 1 or type_code not in _NUMBER_TYPES:
            raise self._index_error(f"version {version} with number type {type_code} is not supported")
        self._token_type = np.dtype(_NUMBER_TYPES[type_code])

        # Each sequence has an int32 size and an int64 position, each border of documents is an int64.
        expected_size = _HEAD_BYTES + (4 + 8) * self._num_sequences + 8 * num_borders
        size = self._index.seek(0, os.SEEK_END)
        is_multimodal = self._num_sequences > 0 and size == expected_size + self._num_sequences  # an int8 for each
        if is_multimodal:
            raise self._index_error("it belongs to a multimodal dataset, which packtool cannot read")
        if size != expected_size:
            raise self._index_error(f"it has {size:,} bytes, but its head requires {expected_size:,}")

    def _index_numbers(self, offset: int, count: int, number_type: str) -> npt.NDArray[Any]:
        """Return ``count`` numbers of the index; ``offset`` is in bytes after its head."""
        return self._read(self._index, _HEAD_BYTES + offset, count, np.dtype(number_type))

    def _read(self, file: BinaryIO, offset: int, count: int, number_type: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return ``count`` numbers of a file from byte ``offset`` on; raise DataError if it ends before."""
        stop = offset + count * number_type.itemsize
        label = self._source.label
        try:
            file.seek(offset)
            data = file.read(stop - offset)
        except OSError as error:
            raise StorageError(f"{label} cannot be read: {error.strerror or error}", "Check the disk.") from error
        if len(data) != stop - offset:
            message = f"{label}: the .bin file ends before byte {stop:,}, which the index refers to"
            raise DataError(message, "Both files must come from the same run: copy them again.")
        return np.frombuffer(data, number_type)

    def _index_error(self, detail: str) -> DataError:
        message = f"{self._source.label} cannot be read as a Megatron index: {detail}"
        return DataError(message, "Create the .idx file and its .bin file again.")


_Members = dict[str, tarfile.TarInfo]
_EMPTY_BLOCK = bytes(tarfile.BLOCKSIZE)


class TarReader:
    """An open tar file of packs; nothing is extracted to disk, and only regular files are read.

    DataError if it is compressed; while reading, also if it is not a tar file or is truncated.
    """

    def __init__(self, source: Source) -> None:
        if source.compression is not None:
            raise DataError(f"{source.label}: compressed tar files are not supported", "Decompress the file.")
        self._source = source
        self._file: BinaryIO = storage.open_read(source.path)

    def digest(self) -> str:
        """Return a digest of the file."""
        return digest_of(self._source.path)

    def blocks(self) -> Iterator[RowBlock]:
        """Yield the position of every 64 packs of the file, in order; a pack is a row."""
        start = first_row = 0
        while True:
            # ``_packs`` opens the tar file again for each block, because an open one keeps all members in memory.
            # The last offset is that of the first pack of the next block, if there is one.
            offsets = [offset for offset, _ in islice(self._packs(start), BLOCK_ROWS + 1)]
            is_last_block = len(offsets) <= BLOCK_ROWS
            num_rows = min(len(offsets), BLOCK_ROWS)
            stop = self._source.size if is_last_block else offsets[-1]
            if num_rows:
                yield RowBlock(start, stop, first_row, num_rows)
            if is_last_block:
                return
            start = stop
            first_row += num_rows

    def rows(self, block: RowBlock) -> Iterator[NumberedRow]:
        """Yield (pack number, JSON object with the bytes of its files) for the packs of a block."""
        number = block.first_row
        for number, (_, members) in enumerate(islice(self._packs(block.start), block.num_rows), block.first_row):
            yield number, guard_row(self._source.label, number, self._read_pack, number, members)
        if number < block.first_row + block.num_rows - 1:
            raise changed_error(self._source, f"it ends at pack {number}")

    def close(self) -> None:
        self._file.close()

    def _packs(self, start: int) -> Iterator[tuple[int, _Members]]:
        """Yield byte offset and members of each pack from byte ``start`` on; members by name after the first dot."""
        for _, group in groupby(self._members(start), key=_pack_name):
            members = list(group)
            yield members[0].offset, {_split_name(member.name)[1]: member for member in members}

    def _members(self, start: int) -> Iterator[tarfile.TarInfo]:
        """Yield the regular files from byte ``start`` on; raise DataError at the end if the tar file is truncated."""
        remedy = "Write the file again, or copy it again if it is truncated."
        self._file.seek(start)
        try:
            with tarfile.open(fileobj=self._file, mode="r:") as archive:
                for member in archive:
                    if member.isreg() and not member.issparse():
                        yield member
                end = archive.offset  # after the last member
            # A complete tar file has an empty block after the last member; tarfile does not require it.
            self._file.seek(end)
            if self._file.read(tarfile.BLOCKSIZE) != _EMPTY_BLOCK:
                raise DataError(f"{self._source.label} is damaged or truncated at byte {end:,}", remedy)
        except OSError as error:
            message = f"{self._source.label} cannot be read: {error.strerror or error}"
            raise StorageError(message, "Check the disk.") from error
        except (tarfile.TarError, ValueError, RecursionError) as error:
            raise DataError(f"{self._source.label} cannot be read as a tar file: {error}", remedy) from error

    def _read(self, member: tarfile.TarInfo) -> bytes:
        self._file.seek(member.offset_data)
        return self._file.read(member.size)

    def _read_pack(self, number: int, members: _Members) -> dict[str, Any] | Dropped:
        """Read a pack as a row: its JSON object, with the bytes of its media.

        Media in the object name a ``file`` of the pack, which is replaced by the content of that file as ``bytes``.
        ``number`` is the pack's number in the tar file, ``members`` its files by name after the first dot. The row is
        dropped if a file is missing, or if the JSON is invalid or too large.
        """
        source = self._source
        json_file = members.get("json")
        if json_file is None:
            names = ", ".join(sorted(members)[:8])
            return Dropped(source.label, number, "unknown_form", f"the pack has no .json file; its files are {names}")
        if json_file.size > source.max_row_bytes:
            return too_large(source, number)
        row = parse_row(source, number, self._read(json_file))
        if isinstance(row, Dropped):
            return row
        for medium in _media_entries(row):
            file_name = medium.pop("file", None)
            if not isinstance(file_name, str):
                continue
            if file_name not in members:
                detail = f"the pack refers to {file_name}, which is not in the tar file"
                return Dropped(source.label, number, "media_missing", detail)
            medium["bytes"] = self._read(members[file_name])
        return row


def _pack_name(member: tarfile.TarInfo) -> str:
    return _split_name(member.name)[0]


def _split_name(name: str) -> tuple[str, str]:
    """Split a member's name into the name of its pack and the part after the first dot."""
    folder, slash, file = name.rpartition("/")
    stem, _, suffix = file.partition(".")
    return folder + slash + stem, suffix


def _media_entries(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the objects that describe a row's media and the frames of its videos."""
    for kind in ("images", "videos", "audios"):
        media = row.get(kind)
        for medium in media if isinstance(media, list) else ():
            if isinstance(medium, dict):
                yield medium
                yield from (frame for frame in medium.get("frames") or () if isinstance(frame, dict))


Reader = TableReader | MegatronReader | TarReader
READERS: dict[str, Callable[[Source], Reader]] = {
    "parquet": ParquetReader,
    "arrow": ArrowReader,
    "megatron": MegatronReader,
    "tar": TarReader,
}
"""Reader classes by file format."""
