"""Origins and content keys of the samples of a cache, by which they are found again in a re-exported cache."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packtool import storage
from packtool.cache.reader import CacheReader
from packtool.config.settings import load_json
from packtool.encode.encoded import EncodedAudio, EncodedVideo
from packtool.errors import MismatchError

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
        except (OSError, ValueError, KeyError) as error:
            raise MismatchError(
                f"{path} cannot be read: {error}", "Remove it; the next checkpoint writes it again."
            ) from error
        return cls(tuple(names["files"]), tuple(names["digests"]), file, row, part)


def _small(values: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.integer[Any]]:
    """Return the numbers in the smallest integer type that holds all of them."""
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    types = (np.int8, np.int16, np.int32, np.int64)
    return values.astype(next(t for t in types if np.iinfo(t).min <= low and high <= np.iinfo(t).max))


def read_origins(reader: CacheReader, cache: int) -> Origins:
    """Return the origins of the samples of cache number ``cache``; reads three columns of all its shards."""
    shard_of_sample, row_in_shard = reader.locations(cache)
    file_numbers: dict[str, int] = {}  # position in ``Origins.files`` by the source's name in the samples
    num_samples = len(shard_of_sample)
    file, row = np.zeros(num_samples, np.int64), np.zeros(num_samples, np.int64)
    part = np.zeros((num_samples, len(_PART_FIELDS)), np.int32)
    for shard in range(int(shard_of_sample.max(initial=-1)) + 1):
        in_shard = np.flatnonzero(shard_of_sample == shard)
        table = reader.shard_table(cache, shard, ("source", "row", "part")).take(pa.array(row_in_shard[in_shard]))
        sources = table.column("source").combine_chunks().dictionary_encode()
        numbers = [file_numbers.setdefault(name, len(file_numbers)) for name in sources.dictionary.to_pylist()]
        file[in_shard] = np.array(numbers, np.int64)[sources.indices.to_numpy()]
        row[in_shard] = table.column("row").to_numpy()
        if "part" in table.column_names:
            parts = table.column("part").combine_chunks()
            part[in_shard] = np.stack([parts.field(name).fill_null(0).to_numpy() for name in _PART_FIELDS], 1)
    files, digests = [], []
    for name in file_numbers:
        # Samples have the absolute path of the source, or a relative one, which is its end.
        tail = "/" + name.removeprefix("./").lstrip("/")
        same_path = [source for source in reader.manifests[cache].sources if source.path == name]
        same_end = [source for source in reader.manifests[cache].sources if source.path.endswith(tail)]
        if matching := same_path or same_end:
            files.append(matching[0].path)
            digests.append(matching[0].digest)
        else:
            files.append(name)
            digests.append(name)  # without a digest, the name identifies it
    return Origins(tuple(files), tuple(digests), file, row, part if part.any() else None)


def hash_contents(reader: CacheReader, positions: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return a hash of the tokens and media of each of M samples, uint64 (M,); reads the samples.

    Media are identified by file name (without folder), embedded bytes, and size.
    """
    digests = []
    for position in positions:
        sample = reader.sample(int(position))
        digest = blake2b(np.ascontiguousarray(sample.input_ids, "<i4").data, digest_size=8)
        for medium in sample.media:
            name = storage.name(medium.path) if medium.path else ""
            size = () if isinstance(medium, EncodedAudio) else (medium.height, medium.width)
            frames = [storage.name(path or "") for path, _ in medium.frames] if isinstance(medium, EncodedVideo) else []
            content = "" if medium.data is None else blake2b(medium.data, digest_size=8).hexdigest()
            key = json.dumps([type(medium).__name__, name, content, size, medium.num_tokens, frames])
            digest.update(key.encode(errors="surrogatepass"))
        digests.append(digest.digest())
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)
