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

_PART = ("turn", "num_turns", "response", "num_responses")


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
            columns |= {name: _small(column) for name, column in zip(_PART, self.part.T, strict=True)}
        np.savez_compressed(sink, **columns)  # type: ignore[arg-type]
        storage.publish(path, sink.getvalue())

    @classmethod
    def read(cls, path: str) -> Origins:
        """Read a file that ``write`` wrote; raise a MismatchError if it is damaged."""
        try:
            with np.load(io.BytesIO(storage.read_bytes(path)), allow_pickle=False) as arrays:
                names = load_json(arrays["told"].tobytes())
                file, row = (np.cumsum(arrays[name], dtype=np.int64) for name in ("source", "row"))
                part = np.stack([arrays[name].astype(np.int32) for name in _PART], 1) if "turn" in arrays else None
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
    shard, row_in_shard = reader.locations(cache)
    names: dict[str, int] = {}  # of source files as samples name them, with their position in ``files``
    num_samples = len(shard)
    file, row = np.zeros(num_samples, np.int64), np.zeros(num_samples, np.int64)
    part: npt.NDArray[np.int32] | None = None
    for number in range(int(shard.max(initial=-1)) + 1):
        in_shard = np.flatnonzero(shard == number)
        table = reader.shard_table(cache, number, ("source", "row", "part")).take(pa.array(row_in_shard[in_shard]))
        sources = table.column("source").combine_chunks().dictionary_encode()
        codes = np.array([names.setdefault(name, len(names)) for name in sources.dictionary.to_pylist()], np.int64)
        file[in_shard] = codes[sources.indices.to_numpy()]
        row[in_shard] = table.column("row").to_numpy()
        if "part" in table.column_names:
            part = np.zeros((num_samples, len(_PART)), np.int32) if part is None else part
            column = table.column("part").combine_chunks()
            part[in_shard] = np.stack([column.field(name).fill_null(0).to_numpy() for name in _PART], 1)
    files, digests = [], []
    for name in names:
        # Samples have the absolute path of the source, or a relative one, which is its end.
        tail = "/" + name.removeprefix("./").lstrip("/")
        same_path = [source for source in reader.manifests[cache].sources if source.path == name]
        same_end = [source for source in reader.manifests[cache].sources if source.path.endswith(tail)]
        source = next(iter([*same_path, *same_end]), None)
        files.append(name if source is None else source.path)
        digests.append(name if source is None else source.digest)  # without a digest, the name identifies it
    return Origins(tuple(files), tuple(digests), file, row, None if part is None or not part.any() else part)


def read_contents(reader: CacheReader, positions: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
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
