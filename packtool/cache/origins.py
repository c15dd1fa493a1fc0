"""Origins and contents of the samples of a cache, to match them with the samples of a re-exported cache."""

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
from packtool.encode.encoded import EncodedAudio, EncodedImage, EncodedVideo
from packtool.errors import MismatchError

_PART = ("turn", "num_turns", "response", "num_responses")


@dataclass(frozen=True, eq=False)
class Origins:
    """The files and rows of the N samples of a cache's split.

    Args:
        files: paths of the files of rows.
        digests: of their contents, which identify them.
        file: (N,), position of each sample's file in ``files``.
        row: int64 (N,), row in the file.
        part: (N, 4), part of the row, as in ``RowPart``; zeros for a whole row. None if all rows are whole.
    """

    files: tuple[str, ...]
    digests: tuple[str, ...]
    file: npt.NDArray[np.integer[Any]]
    row: npt.NDArray[np.int64]
    part: npt.NDArray[np.int32] | None

    def write(self, path: str) -> None:
        """Write a compressed file, of a few bits per sample if rows are consecutive."""
        sink = io.BytesIO()
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
        """Read a file of ``write``; raise a MismatchError if it is damaged."""
        try:
            with np.load(io.BytesIO(storage.read_bytes(path)), allow_pickle=False) as arrays:
                names = load_json(arrays["told"].tobytes())
                file, row = (np.cumsum(arrays[name], dtype=np.int64) for name in ("source", "row"))
                part = np.stack([arrays[name].astype(np.int32) for name in _PART], 1) if "turn" in arrays else None
        except (OSError, ValueError, KeyError) as error:
            raise MismatchError(
                f"{path} cannot be read: {error}", "Remove it; a checkpoint writes it again."
            ) from error
        return cls(tuple(names["files"]), tuple(names["digests"]), file, row, part)


def _small(values: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.integer[Any]]:
    """Return the numbers in the smallest integer type that holds all of them."""
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    types = (np.int8, np.int16, np.int32, np.int64)
    return values.astype(next(t for t in types if np.iinfo(t).min <= low and high <= np.iinfo(t).max))


def read_origins(reader: CacheReader, cache: int) -> Origins:
    """Return the origins of one of a reader's caches; reads three columns of all its shards."""
    shard, row_in_shard = reader.places(cache)
    names: dict[str, int] = {}
    num = len(shard)
    file, row = np.zeros(num, np.int64), np.zeros(num, np.int64)
    part: npt.NDArray[np.int32] | None = None
    for number in range(int(shard.max(initial=-1)) + 1):
        here = np.flatnonzero(shard == number)
        table = reader.shard_table(cache, number, ("source", "row", "part")).take(pa.array(row_in_shard[here]))
        sources = table.column("source").combine_chunks().dictionary_encode()
        codes = np.array([names.setdefault(name, len(names)) for name in sources.dictionary.to_pylist()], np.int64)
        file[here] = codes[sources.indices.to_numpy()]
        row[here] = table.column("row").to_numpy()
        if "part" in table.column_names:
            part = np.zeros((num, len(_PART)), np.int32) if part is None else part
            column = table.column("part").combine_chunks()
            part[here] = np.stack([column.field(name).fill_null(0).to_numpy() for name in _PART], 1)
    files, digests = [], []
    for name in names:
        # The name in samples is the path of the source, or a relative path, which is the end of it.
        tail = "/" + name.removeprefix("./").lstrip("/")
        same = [source for source in reader.manifests[cache].sources if source.path == name]
        ends = [source for source in reader.manifests[cache].sources if source.path.endswith(tail)]
        source = next(iter([*same, *ends]), None)
        files.append(name if source is None else source.path)
        digests.append(name if source is None else source.digest)  # the name identifies a file of unknown content
    return Origins(tuple(files), tuple(digests), file, row, None if part is None or not part.any() else part)


def read_contents(reader: CacheReader, positions: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return a key of each sample's tokens and media, uint64 (M,); reads the samples.

    Media are identified by their bytes or the names of their files without folders, and by their sizes.
    """
    digests = []
    for position in positions:
        sample = reader.sample(int(position))
        digest = blake2b(np.ascontiguousarray(sample.input_ids, "<i4").data, digest_size=8)
        for medium in sample.media:
            digest.update(_medium_key(medium).encode(errors="surrogatepass"))
        digests.append(digest.digest())
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)


def _medium_key(medium: EncodedImage | EncodedVideo | EncodedAudio) -> str:
    data = medium.data
    name = storage.name(medium.path) if medium.path else ""
    size = () if isinstance(medium, EncodedAudio) else (medium.height, medium.width)
    frames = [storage.name(path or "") for path, _ in medium.frames] if isinstance(medium, EncodedVideo) else []
    content = "" if data is None else blake2b(data, digest_size=8).hexdigest()
    return json.dumps([type(medium).__name__, name, content, size, medium.num_tokens, frames])
