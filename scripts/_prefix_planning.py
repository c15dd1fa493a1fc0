"""Caches of as many rows as one likes, of which planning sees the index and the prefixes, for ``bench_prefix.py``."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packtool.cache.shard import INDEX, PREFIX, PREFIXES
from packtool.constants import INDEX_NAME, MANIFEST_NAME, PREFIXES_NAME, TRAIN_SPLIT

_PREFIXES_A_ROW = 3  # behind the picture, and at both ends of the answer


def make_large_cache(source: Path, target: Path, num_rows: int, rows_per_picture: float) -> None:
    """Copy a cache, and give it an index and prefixes of so many rows; its shards have no such rows.

    Each row asks one question about a picture of 64 to 1,024 tokens.

    Args:
        source: a cache of rows with pictures, to take the identity from.
        rows_per_picture: on average; 1 for rows that share nothing.
    """
    shutil.copytree(source, target)
    generator = np.random.default_rng(0)
    shared = generator.integers(0, max(round(num_rows / rows_per_picture), 1), num_rows)
    pictures = np.arange(num_rows) if rows_per_picture == 1 else shared
    media = generator.integers(64, 1025, num_rows)[pictures]
    asked, answered = generator.integers(12, 60, num_rows), generator.integers(4, 60, num_rows)
    ends = np.stack([media + 4, media + asked + 4, media + asked + answered + 4], axis=1)
    hashes = generator.integers(0, 2**63, (num_rows, _PREFIXES_A_ROW))
    hashes[:, 0] = hashes[:, 0][pictures]
    squares = (4 * media) ** 2
    nothing = np.zeros(num_rows, np.int64)
    index = {
        "row_in_shard": np.arange(num_rows),
        "length": ends[:, -1] + 1,
        "target_tokens": answered,
        "media_tokens": media,
        "num_images": nothing + 1,
        "channel": nothing - 1,
        "patch_squares": squares,
    }
    prefixes = {
        "length": ends.ravel(),
        "hash": hashes.ravel(),
        "media_tokens": np.repeat(media, _PREFIXES_A_ROW),
        "patch_squares": np.repeat(squares, _PREFIXES_A_ROW),
    }
    lines = pa.StructArray.from_arrays(_columns(list(PREFIX), prefixes), fields=list(PREFIX))
    offsets = pa.array(np.arange(num_rows + 1) * _PREFIXES_A_ROW, pa.int32())
    split = target / TRAIN_SPLIT
    manifest = json.loads((target / MANIFEST_NAME).read_text())
    told = manifest["splits"][TRAIN_SPLIT]
    told["index_sha256"] = _write(split / INDEX_NAME, INDEX, _columns(list(INDEX), index))
    told["prefixes_sha256"] = _write(
        split / PREFIXES_NAME, PREFIXES, [pa.ListArray.from_arrays(offsets, lines).cast(PREFIXES[0].type)]
    )
    told["shards"] = [told["shards"][0] | {"rows": num_rows}]
    told |= {"rows": num_rows, "tokens": int(index["length"].sum()), "target_tokens": int(answered.sum())}
    told["media_tokens"] = int(media.sum())
    (target / MANIFEST_NAME).write_text(json.dumps(manifest))


def _columns(fields: list[pa.Field], values: dict[str, npt.NDArray[np.int64]]) -> list[pa.Array]:
    """Arrays of the fields; those that have no values are 0."""
    num = len(next(iter(values.values())))
    return [
        pa.array(values.get(field.name, np.zeros(num, np.int64)).astype(field.type.to_pandas_dtype()), field.type)
        for field in fields
    ]


def _write(path: Path, schema: pa.Schema, columns: list[pa.Array]) -> str:
    """Write one batch, and return the file's SHA-256 in hex."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_batch(pa.record_batch(columns, schema=schema))
    return hashlib.sha256(path.read_bytes()).hexdigest()
