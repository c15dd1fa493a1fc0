"""Read a split's index and ``prefixes.arrow``, checked against the manifest; older files get their missing columns."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packtool import storage
from packtool.cache.manifest import Manifest
from packtool.cache.shard import ADDED, INDEX, PREFIX, PREFIX_BEFORE, PREFIXES, UNKNOWN, with_added_columns
from packtool.constants import INDEX_NAME
from packtool.encode.encoded import IntArray
from packtool.encode.families import MediaLimits
from packtool.encode.prefix_hashes import PrefixHashes
from packtool.errors import MismatchError, StorageError

_MAX_SQUARES = 2**53  # float64 sums over a step are still exact


def _read_table(path: str, sha256: str | None, copy: str | None) -> pa.Table:
    """Read an Arrow file, or its local copy; raise a MismatchError if its SHA-256 is another than a given one."""
    data = storage.read_bytes(copy or path)
    if sha256 and hashlib.sha256(data).hexdigest() != sha256:
        raise MismatchError(
            f"{path} is damaged: its SHA-256 differs from the one in the manifest",
            "Copy the cache again. packtool inspect CACHE --verify lists all damaged files.",
        )
    return pa.ipc.open_file(pa.BufferReader(data)).read_all()


@contextmanager
def _read_errors(path: str) -> Iterator[None]:
    """Raise every error of reading an Arrow file as a MismatchError that names the file."""
    try:
        yield
    except (StorageError, OSError, LookupError, ValueError, pa.ArrowException) as error:
        raise MismatchError(f"{path} cannot be read: {error}", "Export the cache again.") from error


def read_index(directory: str, manifest: Manifest, split: str, copy: str | None = None) -> dict[str, IntArray]:
    """Read the index of a split of N samples; raise a MismatchError if it is damaged or not that of this cache.

    Args:
        copy: path of a local copy of the file, which is read instead.

    Returns:
        columns by name, (N,) each: int64 for ``patch_squares``, int32 for the others. ``UNKNOWN`` fills columns that an
        older cache lacks.
    """
    path = storage.join(directory, split, INDEX_NAME)
    with _read_errors(path):
        table = with_added_columns(_read_table(path, manifest.splits[split].index_sha256, copy))
        table.validate(full=True)
        columns = {field.name: table.column(field.name).cast(field.type).to_numpy() for field in INDEX}
        if any(table.column(field.name).null_count for field in INDEX):
            raise ValueError("it has empty rows")
    # A cache may come from anyone: every row must refer to an existing sample.
    info = manifest.splits[split]
    shard_rows = np.array([shard.rows for shard in info.shards], np.int64)
    minimums = {"channel": -1} | dict.fromkeys(ADDED, UNKNOWN)
    limits = {"shard": len(shard_rows), "channel": len(manifest.channels), "patch_squares": _MAX_SQUARES}
    problem = "" if len(columns["length"]) == info.rows else f"it has {len(columns['length'])} rows, not {info.rows}"
    for name, column in columns.items():
        if problem or not len(column):
            continue
        if column.min() < minimums.get(name, 0) or column.max() >= limits.get(name, 2**31):
            problem = f"{name} has values from {column.min()} to {column.max()}"
    if not problem and len(shard_rows) and (columns["row_in_shard"] >= shard_rows[columns["shard"]]).any():
        problem = "row_in_shard exceeds the number of rows of a shard"
    if problem:
        raise MismatchError(
            f"{path} is not the index of this cache: {problem}", "Copy the cache again, or export it again."
        )
    return columns


class SplitPrefixes(NamedTuple):
    """The prefixes of N samples: sample ``i`` has those from ``offsets[i]`` up to ``offsets[i + 1]``.

    Args:
        offsets: int64 (N + 1,).
        prefixes: of all samples, concatenated.
    """

    offsets: npt.NDArray[np.int64]
    prefixes: PrefixHashes

    @classmethod
    def joined(cls, parts: Sequence[SplitPrefixes]) -> SplitPrefixes:
        """Concatenate the prefixes of several groups of samples."""
        counts = [np.diff(part.offsets) for part in parts]
        columns = zip(*(part.prefixes for part in parts), strict=True)
        return cls(
            np.concatenate([[0], *counts]).cumsum(dtype=np.int64),
            PrefixHashes(*(np.concatenate(column) for column in columns)),
        )


def prefix_batch(counts: npt.NDArray[np.int64], prefixes: PrefixHashes) -> pa.RecordBatch:
    """Return S samples as rows of ``prefixes.arrow``; ``counts``: number of prefixes of each sample, (S,)."""
    offsets = pa.array(np.cumsum([0, *counts]), pa.int32())
    arrays = [pa.array(column, field.type) for column, field in zip(prefixes, PREFIX, strict=True)]
    entries = pa.StructArray.from_arrays(arrays, fields=list(PREFIX))
    return pa.record_batch([pa.ListArray.from_arrays(offsets, entries)], schema=PREFIXES)


def with_fields(batch: pa.RecordBatch, prefix_type: pa.StructType) -> pa.RecordBatch:
    """Convert a batch of ``prefixes.arrow`` so that each prefix has the fields of ``prefix_type``.

    Fields that only newer caches have are ``UNKNOWN``. A batch with nulls is returned as it is.
    """
    rows = batch.column("prefixes")
    if rows.type == pa.list_(prefix_type) or rows.null_count or rows.values.null_count:
        return batch
    entries = rows.flatten()
    columns = [
        entries.field(field.name)
        if entries.type.get_field_index(field.name) >= 0 or PREFIX_BEFORE.get_field_index(field.name) >= 0
        else pa.repeat(pa.scalar(UNKNOWN, field.type), len(entries))
        for field in prefix_type
    ]
    offsets = rows.offsets.to_numpy() - rows.offsets[0].as_py()
    entries = pa.StructArray.from_arrays(columns, fields=list(prefix_type))
    return pa.record_batch([pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), entries)], names=["prefixes"])


def read_prefixes(path: str, sha256: str | None, lengths: IntArray, copy: str | None = None) -> SplitPrefixes:
    """Read ``prefixes.arrow`` of N samples; raise a MismatchError if it is damaged or does not belong to the index.

    Args:
        sha256: expected checksum; None to skip its check.
        lengths: tokens of each sample in the index, (N,).
        copy: path of a local copy of the file, which is read instead.
    """
    with _read_errors(path):
        table = _read_table(path, sha256, copy)
        table.validate(full=True)
        parts = []
        for batch in table.to_batches():
            rows = with_fields(batch, PREFIX).column("prefixes")
            entries = rows.flatten()
            if rows.null_count or entries.null_count:
                raise ValueError("it has empty rows")
            starts = rows.offsets.to_numpy().astype(np.int64)
            columns = [column.to_numpy(zero_copy_only=False) for column in entries.flatten()]
            parts.append(SplitPrefixes(starts - starts[0], PrefixHashes(*columns)))
        split = SplitPrefixes.joined(parts)
    counts = np.diff(split.offsets)
    prefix_lengths, samples = split.prefixes.lengths, np.repeat(np.arange(len(counts)), counts)
    problem = ""
    if len(counts) != len(lengths):
        problem = f"it has {len(counts)} rows, not {len(lengths)}"
    elif len(samples) and ((prefix_lengths < 1) | (prefix_lengths > lengths[samples])).any():
        problem = "a prefix is longer than its sample"
    elif ((np.diff(prefix_lengths) <= 0) & (np.diff(samples) == 0)).any():
        problem = "the prefixes of a sample are not in ascending order"
    if problem:
        raise MismatchError(
            f"{path} does not belong to the index of this cache: {problem}", "Copy the cache again, or export it again."
        )
    return split


Column = npt.NDArray[np.integer[Any]]

# Assumed tokens of a frame of a video; the index has neither the number nor the size of the frames.
_FRAME_TOKENS = 256


def with_estimates(columns: Mapping[str, Column], limits: MediaLimits) -> dict[str, Column]:
    """Return the columns of an index, (N,) each, with estimates in place of ``UNKNOWN``.

    All media of a sample are assumed to have the same number of tokens, and video frames 256 tokens each. ``limits``
    of the cache give the number of patches per token.
    """
    columns = dict(columns)
    images, videos, audios = (columns[f"num_{kind}"].astype(np.float64) for kind in ("images", "videos", "audios"))
    if (unknown := columns["audio_tokens"] == UNKNOWN).any():
        tokens = columns["media_tokens"] / np.maximum(images + videos + audios, 1) * audios
        columns["audio_tokens"] = np.where(unknown, tokens.astype(np.int32), columns["audio_tokens"])
    if (unknown := columns["patch_squares"] == UNKNOWN).any():
        patches_per_token = limits.image.merge_size**2 if limits.image is not None else 0
        tokens_per_medium = (columns["media_tokens"] - columns["audio_tokens"]) / np.maximum(images + videos, 1)
        patches = tokens_per_medium * patches_per_token  # of each picture or video
        # A picture attends over all its patches, a video frame over its own.
        squares = patches * (images * patches + videos * np.minimum(patches, _FRAME_TOKENS * patches_per_token))
        columns["patch_squares"] = np.where(unknown, squares.astype(np.int64), columns["patch_squares"])
    return columns
