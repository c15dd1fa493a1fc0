"""A split's index: read, held against its checksum and against the manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from packtool import storage
from packtool.cache.manifest import Manifest
from packtool.cache.schema import ADDED, INDEX, UNKNOWN, with_added_columns
from packtool.constants import INDEX_NAME
from packtool.encode.encoded import IntArray
from packtool.errors import MismatchError, StorageError

_MOST_SQUARES = 2**53  # sums of a step's worth of them are still exact


def read_index(directory: str, manifest: Manifest, split: str, copy: str | None = None) -> dict[str, IntArray]:
    """The index columns of one split, (N,) each: int64 for ``patch_squares``, int32 for the others.

    Those that an older packtool did not write are ``UNKNOWN``.

    Args:
        copy: of the file on this machine.

    Raises:
        MismatchError: if the file is missing or broken, or is not what the manifest says.
    """
    place = storage.join(directory, split, INDEX_NAME)
    info = manifest.splits[split]
    try:
        data = storage.read_bytes(copy or place)
        if info.index_sha256 and hashlib.sha256(data).hexdigest() != info.index_sha256:
            raise MismatchError(
                f"{place} is damaged: it does not have the SHA-256 that the manifest says",
                "Copy the cache again. packtool inspect CACHE --verify finds all that is damaged.",
            )
        table = with_added_columns(pa.ipc.open_file(pa.BufferReader(data)).read_all())
        table.validate(full=True)
        columns = {field.name: table.column(field.name).cast(field.type).to_numpy() for field in INDEX}
        if any(table.column(field.name).null_count for field in INDEX):
            raise ValueError("it has lines with nothing in them")
    except (StorageError, OSError, LookupError, ValueError, pa.ArrowException) as error:
        raise MismatchError(f"{place} cannot be read: {error}", "Export the cache again.") from error
    _check_index(place, columns, manifest, split)
    return columns


def _check_index(place: str, columns: Mapping[str, IntArray], manifest: Manifest, split: str) -> None:
    """Every line of an index points to a row that is there: a cache may be somebody else's.

    Raises:
        MismatchError: naming the first column that does not.
    """
    info = manifest.splits[split]
    rows = np.array([shard.rows for shard in info.shards], np.int64)
    ends = {"shard": len(rows), "channel": len(manifest.channels), "patch_squares": _MOST_SQUARES}
    problem = "" if len(columns["length"]) == info.rows else f"it has {len(columns['length'])} lines, not {info.rows}"
    for name, column in columns.items():
        if not problem and len(column):
            least = {"channel": -1} | dict.fromkeys(ADDED, UNKNOWN)
            if column.min() < least.get(name, 0) or column.max() >= ends.get(name, 2**31):
                problem = f"{name} goes from {column.min()} to {column.max()}"
    if not problem and len(rows) and (columns["row_in_shard"] >= rows[columns["shard"]]).any():
        problem = "row_in_shard goes beyond a shard's rows"
    if problem:
        raise MismatchError(
            f"{place} is not the index of this cache: {problem}", "Copy the cache again, or export it again."
        )
