"""Packs in tar files, as ``packtool pack`` and WebDataset have them: each a JSON document, and files that it names.

The members of one pack follow one another and have a name in common up to the first dot: ``000000007.json``,
``000000007.image0.jpg``. A row is a pack's document, with the bytes of its files.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from itertools import groupby, islice
from typing import Any, BinaryIO

from packtool import storage
from packtool.errors import DataError, StorageError
from packtool.rows.lines import too_large
from packtool.rows.opened import changed, digest_of, opened
from packtool.rows.parsing import JsonProblem, parse_json
from packtool.rows.sample import Dropped, held
from packtool.rows.source import BLOCK_ROWS, NumberedRow, RowBlock, Source

_Members = dict[str, tarfile.TarInfo]
_EMPTY_BLOCK = bytes(tarfile.BLOCKSIZE)


def find_packs(source: Source) -> tuple[str, Iterator[RowBlock]]:
    """Digest, and blocks of 64 packs; their bounds are bytes of the file.

    Raises:
        DataError: if the file is no tar file, or is cut off.
        StorageError: if it cannot be reached.
    """
    with closing(TarReader(source)) as reader:
        blocks = list(reader.blocks())
    return digest_of(source.path), iter(blocks)


def read_packs(source: Source, block: RowBlock) -> Iterator[NumberedRow]:
    """(number, document with the bytes of its files) of each pack of a block."""
    reader = opened(source, TarReader)
    packs = islice(reader.packs(block.start), block.num_rows)
    number = block.first_row
    for number, (_, members) in enumerate(packs, block.first_row):
        yield number, held(source.label, number, _row, source, number, members, reader)
    if number < block.first_row + block.num_rows - 1:
        raise changed(source, f"it ends at pack {number}")


class TarReader:
    """An open tar file. Nothing is written to disk, and only plain files are read.

    Raises:
        DataError: if it is compressed.
        StorageError: if it cannot be reached.
    """

    def __init__(self, source: Source) -> None:
        if source.compression is not None:
            raise DataError(f"{source.label}: a tar file is read where it lies", "Decompress it.")
        self._source = source
        self._file: BinaryIO = storage.open_read(source.path)

    def blocks(self) -> Iterator[RowBlock]:
        """Blocks of 64 packs, in order."""
        start = first = 0
        while True:
            # Opened anew for each block: an open tar file keeps all members that it has met.
            offsets = [offset for offset, _ in islice(self.packs(start), BLOCK_ROWS + 1)]
            num_rows = min(len(offsets), BLOCK_ROWS)
            stop = offsets[-1] if len(offsets) > num_rows else self._source.size
            if num_rows:
                yield RowBlock(start, stop, first, num_rows)
            if len(offsets) == num_rows:
                return
            start, first = stop, first + num_rows

    def packs(self, start: int) -> Iterator[tuple[int, _Members]]:
        """Where each pack from byte ``start`` on begins, and its members by the part of their names behind the dot."""
        for _, group in groupby(self._members(start), key=lambda member: _split_name(member.name)[0]):
            members = list(group)
            yield members[0].offset, {_split_name(member.name)[1]: member for member in members}

    def read(self, member: tarfile.TarInfo) -> bytes:
        """The bytes of a member."""
        self._file.seek(member.offset_data)
        return self._file.read(member.size)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def _members(self, start: int) -> Iterator[tarfile.TarInfo]:
        """Plain files from byte ``start`` on."""
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


def _split_name(name: str) -> tuple[str, str]:
    """What the members of a pack have in common, and what each has of its own."""
    folder, slash, file = name.rpartition("/")
    stem, _, suffix = file.partition(".")
    return folder + slash + stem, suffix


def _row(source: Source, number: int, members: _Members, reader: TarReader) -> dict[str, Any] | Dropped:
    document = members.get("json")
    if document is None:
        names = ", ".join(sorted(members)[:8])
        return Dropped(source.label, number, "unknown_form", f"there is no .json in the group, but {names}")
    if document.size > source.max_row_bytes:
        return too_large(source, number)
    try:
        row = parse_json(reader.read(document))
    except JsonProblem as problem:
        return Dropped(source.label, number, problem.reason, problem.detail)
    if not isinstance(row, dict):
        return Dropped(source.label, number, "invalid_row", f"a {type(row).__name__}, not an object")
    for entry in _entries(row):
        if isinstance(name := entry.pop("file", None), str):
            if name not in members:
                return Dropped(
                    source.label, number, "media_missing", f"the pack names {name}, which is not in the file"
                )
            entry["bytes"] = reader.read(members[name])
    return row


def _entries(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The objects of a row's media, and those of the frames of its videos."""
    for kind in ("images", "videos", "audios"):
        media = row.get(kind)
        for medium in media if isinstance(media, list) else ():
            if isinstance(medium, dict):
                yield medium
                frames = medium.get("frames")
                yield from (frame for frame in frames or () if isinstance(frame, dict))
