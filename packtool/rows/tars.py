"""Packs in tar files, as ``packtool pack`` and WebDataset write them: each a JSON document and the files it names.

The members of a pack are neighbours whose names are equal up to the first dot: ``000000007.json``,
``000000007.image0.jpg``. A row is a pack's document with the bytes of its files.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Mapping
from itertools import groupby, islice
from typing import Any, BinaryIO

from packtool import storage
from packtool.errors import DataError, StorageError
from packtool.rows.lines import parse_row
from packtool.rows.open_files import changed_error, digest_of
from packtool.rows.sample import Dropped, guard_row
from packtool.rows.source import BLOCK_ROWS, NumberedRow, RowBlock, Source

_Members = dict[str, tarfile.TarInfo]
_EMPTY_BLOCK = bytes(tarfile.BLOCKSIZE)


class TarReader:
    """An open tar file. Nothing is extracted to disk, and only regular files are read.

    Raises:
        DataError: if the file is compressed; while reading, if it is no tar file or is truncated.
        StorageError: if it cannot be reached.
    """

    def __init__(self, source: Source) -> None:
        if source.compression is not None:
            raise DataError(f"{source.label}: a tar file is read where it lies", "Decompress it.")
        self._source = source
        self._file: BinaryIO = storage.open_read(source.path)

    def digest(self) -> str:
        return digest_of(self._source.path)

    def blocks(self) -> Iterator[RowBlock]:
        """Yield blocks of 64 packs, in order; their bounds are bytes of the file."""
        start = first = 0
        while True:
            # Opened again for each block: an open tar file keeps all members that it has read.
            offsets = [offset for offset, _ in islice(self._packs(start), BLOCK_ROWS + 1)]
            num_rows = min(len(offsets), BLOCK_ROWS)
            stop = offsets[-1] if len(offsets) > num_rows else self._source.size
            if num_rows:
                yield RowBlock(start, stop, first, num_rows)
            if len(offsets) == num_rows:
                return
            start, first = stop, first + num_rows

    def rows(self, block: RowBlock) -> Iterator[NumberedRow]:
        """Yield (number, document with the bytes of its files) of each pack of a block."""
        number = block.first_row
        for number, (_, members) in enumerate(islice(self._packs(block.start), block.num_rows), block.first_row):
            yield number, guard_row(self._source.label, number, self._row, number, members)
        if number < block.first_row + block.num_rows - 1:
            raise changed_error(self._source, f"it ends at pack {number}")

    def close(self) -> None:
        self._file.close()

    def _packs(self, start: int) -> Iterator[tuple[int, _Members]]:
        """Yield the first byte of each pack from byte ``start`` on, and its members by name after the first dot."""
        for _, group in groupby(self._members(start), key=lambda member: _split_name(member.name)[0]):
            members = list(group)
            yield members[0].offset, {_split_name(member.name)[1]: member for member in members}

    def _members(self, start: int) -> Iterator[tarfile.TarInfo]:
        """Yield the regular files from byte ``start`` on."""
        remedy = "Write it again, or copy it again if it is cut off."
        self._file.seek(start)
        try:
            with tarfile.open(fileobj=self._file, mode="r:") as archive:
                for member in archive:
                    if member.isreg() and not member.issparse():
                        yield member
                end = archive.offset
            self._file.seek(end)
            if self._file.read(tarfile.BLOCKSIZE) != _EMPTY_BLOCK:
                raise DataError(f"{self._source.label} is broken or cut off at byte {end:,}", remedy)
        except OSError as error:
            raise StorageError(
                f"{self._source.label} cannot be read: {error.strerror or error}", "Check the disk."
            ) from error
        except (tarfile.TarError, ValueError, RecursionError) as error:
            raise DataError(f"{self._source.label} cannot be read as a tar file: {error}", remedy) from error

    def _read(self, member: tarfile.TarInfo) -> bytes:
        self._file.seek(member.offset_data)
        return self._file.read(member.size)

    def _row(self, number: int, members: _Members) -> dict[str, Any] | Dropped:
        source, document = self._source, members.get("json")
        if document is None:
            names = ", ".join(sorted(members)[:8])
            return Dropped(source.label, number, "unknown_form", f"there is no .json in the group, but {names}")
        row = parse_row(source, number, None if document.size > source.max_row_bytes else self._read(document))
        if isinstance(row, Dropped):
            return row
        for entry in _media_entries(row):
            if isinstance(name := entry.pop("file", None), str):
                if name not in members:
                    detail = f"the pack names {name}, which is not in the file"
                    return Dropped(source.label, number, "media_missing", detail)
                entry["bytes"] = self._read(members[name])
        return row


def _split_name(name: str) -> tuple[str, str]:
    """Split a member's name into the part that its pack shares and the part after the first dot."""
    folder, slash, file = name.rpartition("/")
    stem, _, suffix = file.partition(".")
    return folder + slash + stem, suffix


def _media_entries(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a row's media and of the frames of its videos."""
    for kind in ("images", "videos", "audios"):
        media = row.get(kind)
        for medium in media if isinstance(media, list) else ():
            if isinstance(medium, dict):
                yield medium
                yield from (frame for frame in medium.get("frames") or () if isinstance(frame, dict))
