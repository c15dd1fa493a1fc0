"""Origins and content keys of the samples of a cache, by which they are found again in a re-exported cache."""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packtool import storage
from packtool.cache.manifest import SourceInfo
from packtool.cache.reader import CacheReader
from packtool.config.settings import load_json
from packtool.encode.encoded import EncodedAudio, EncodedImage, EncodedVideo
from packtool.errors import MismatchError

# Errors of reading a damaged archive of numpy arrays: a zip file that is shortened, or has other bytes or flags.
DAMAGE_ERRORS = (OSError, ValueError, KeyError, TypeError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)
_PART_FIELDS = ("turn", "num_turns", "response", "num_responses")


@dataclass(frozen=True, eq=False)
class Origins:
    """The source file and row of each of the N samples of a cache's split.

    Args:
        files: paths of the source files.
        digests: hashes of their contents.
        file: (N,), position of each sample's file in ``files``.
        row: int64 (N,), 0-based row in the file.
        part: (N, 4), part of the row: the fields of ``RowPart``, zeros for a whole row. None if all rows are whole.
    """

    files: tuple[str, ...]
    digests: tuple[str, ...]
    file: npt.NDArray[np.integer[Any]]
    row: npt.NDArray[np.int64]
    part: npt.NDArray[np.int32] | None

    def write(self, path: str) -> None:
        """Write a compressed file, of a few bits per sample where rows are consecutive."""
        sink = io.BytesIO()
        # Differences of neighbours are small and repetitive, so that they compress well.
        names = json.dumps({"files": self.files, "digests": self.digests}).encode()
        columns: dict[str, npt.NDArray[Any]] = {
            "told": np.frombuffer(names, np.uint8),
            "source": _small(np.diff(self.file, prepend=0)),
            "row": _small(np.diff(self.row, prepend=0)),
        }
        if self.part is not None:
            columns |= {name: _small(column) for name, column in zip(_PART_FIELDS, self.part.T, strict=True)}
        np.savez_compressed(sink, **columns)  # type: ignore[arg-type]
        storage.publish(path, sink.getvalue())

    @classmethod
    def read(cls, path: str) -> Origins:
        """Read a file that ``write`` wrote; raise a MismatchError if it is damaged."""
        try:
            with np.load(io.BytesIO(storage.read_bytes(path)), allow_pickle=False) as arrays:
                names = load_json(arrays["told"].tobytes())
                file, row = (np.cumsum(arrays[name], dtype=np.int64) for name in ("source", "row"))
                part = None
                if "turn" in arrays:
                    part = np.stack([arrays[name].astype(np.int32) for name in _PART_FIELDS], 1)
        except DAMAGE_ERRORS as error:
            message = f"{path} cannot be read: {error}"
            raise MismatchError(message, "Remove it; the next checkpoint writes it again.") from error
        return cls(tuple(names["files"]), tuple(names["digests"]), file, row, part)


def _small(values: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.integer[Any]]:
    """Return the numbers in the smallest integer type that holds all of them."""
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    types = (np.int8, np.int16, np.int32, np.int64)
    return values.astype(next(t for t in types if np.iinfo(t).min <= low and high <= np.iinfo(t).max))


def read_origins(reader: CacheReader, cache: int) -> Origins:
    """Return the origins of the samples of cache number ``cache``; reads three columns of all its shards."""
    num_samples = len(reader.locations(cache)[0])
    file_numbers: dict[str, int] = {}  # number of each source file by its name in the samples, in order of appearance
    file = np.zeros(num_samples, np.int64)  # number of each sample's source file
    row = np.zeros(num_samples, np.int64)  # row of each sample in its source file
    part = np.zeros((num_samples, len(_PART_FIELDS)), np.int32)  # part of that row; zeros for a whole row
    for in_shard, table in _read_shards(reader, cache):
        file[in_shard] = number_names(table.column("source"), file_numbers)  # adds new names
        row[in_shard] = table.column("row").to_numpy()
        if "part" in table.column_names:
            part[in_shard] = _part_fields(table.column("part"))
    sources_by_name = [_source_of(name, reader.manifests[cache].sources) for name in file_numbers]
    return Origins(
        files=tuple(path for path, _ in sources_by_name),
        digests=tuple(digest for _, digest in sources_by_name),
        file=file,
        row=row,
        part=part if part.any() else None,
    )


def _read_shards(reader: CacheReader, cache: int) -> Iterator[tuple[npt.NDArray[np.int64], pa.Table]]:
    """Yield the samples of each shard, as positions in the cache, and a table of their origins."""
    shard_of_sample, position_in_shard = reader.locations(cache)
    for shard in np.unique(shard_of_sample).tolist():
        in_shard = np.flatnonzero(shard_of_sample == shard)
        table = reader.shard_table(cache, shard, ("source", "row", "part"))
        yield in_shard, table.take(pa.array(position_in_shard[in_shard]))


def number_names(column: pa.ChunkedArray, numbers: dict[str, int]) -> npt.NDArray[np.int64]:
    """Return the number of each of M names, (M,); new names are added to ``numbers`` with the next number."""
    # Dictionary encoding gives the distinct names, and for each element the position of its name among them.
    encoded = column.combine_chunks().dictionary_encode()
    number_of_distinct = [numbers.setdefault(name, len(numbers)) for name in encoded.dictionary.to_pylist()]
    number_of_element: npt.NDArray[np.int64] = np.array(number_of_distinct, np.int64)[encoded.indices.to_numpy()]
    return number_of_element


def _part_fields(column: pa.ChunkedArray) -> npt.NDArray[np.integer[Any]]:
    """Return the fields ``_PART_FIELDS`` of M parts of rows, (M, 4), with zeros for a whole row."""
    parts = column.combine_chunks()
    return np.stack([parts.field(name).fill_null(0).to_numpy() for name in _PART_FIELDS], 1)


def _source_of(name: str, sources: Sequence[SourceInfo]) -> tuple[str, str]:
    """Return path and digest of the source that samples call ``name``; both are ``name`` if the manifest lacks it."""
    tail = "/" + name.removeprefix("./").lstrip("/")
    same_path = [source for source in sources if source.path == name]
    same_end = [source for source in sources if source.path.endswith(tail)]
    matching = same_path or same_end
    return (matching[0].path, matching[0].digest) if matching else (name, name)


def hash_contents(reader: CacheReader, positions: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return a hash of the tokens and media of each of M samples, uint64 (M,); reads the samples.

    Media are identified by file name (without folder), embedded bytes, and size.
    """
    hashes = []
    for position in positions:
        sample = reader.sample(int(position))
        sample_hash = blake2b(np.ascontiguousarray(sample.input_ids, "<i4").data, digest_size=8)
        for medium in sample.media:
            sample_hash.update(_medium_key(medium).encode())
        hashes.append(sample_hash.digest())
    return np.frombuffer(b"".join(hashes), "<u8").astype(np.uint64)


def _medium_key(medium: EncodedImage | EncodedVideo | EncodedAudio) -> str:
    """Return a text that identifies a medium, wherever its file is."""
    name = storage.name(medium.path) if medium.path else ""
    size = () if isinstance(medium, EncodedAudio) else (medium.height, medium.width)
    frames = medium.frames if isinstance(medium, EncodedVideo) else ()
    frame_names = [storage.name(path or "") for path, _ in frames]
    content = "" if medium.data is None else blake2b(medium.data, digest_size=8).hexdigest()
    return json.dumps([type(medium).__name__, name, content, size, medium.num_tokens, frame_names])
