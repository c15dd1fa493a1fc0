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


def _read_table(place: str, sha256: str | None, copy: str | None) -> pa.Table:
    """Read an Arrow file, or its local copy, and compare it with its checksum if there is one."""
    data = storage.read_bytes(copy or place)
    if sha256 and hashlib.sha256(data).hexdigest() != sha256:
        raise MismatchError(
            f"{place} is damaged: it does not have the SHA-256 that the manifest says",
            "Copy the cache again. packtool inspect CACHE --verify finds all that is damaged.",
        )
    return pa.ipc.open_file(pa.BufferReader(data)).read_all()


@contextmanager
def _errors_of(place: str) -> Iterator[None]:
    try:
        yield
    except (StorageError, OSError, LookupError, ValueError, pa.ArrowException) as error:
        raise MismatchError(f"{place} cannot be read: {error}", "Export the cache again.") from error


def read_index(directory: str, manifest: Manifest, split: str, copy: str | None = None) -> dict[str, IntArray]:
    """Read the index columns of one split, (N,) each: int64 for ``patch_squares``, int32 for the others.

    Columns that an older cache lacks are ``UNKNOWN``.

    Args:
        copy: path of a local copy of the file.
    """
    place = storage.join(directory, split, INDEX_NAME)
    with _errors_of(place):
        table = with_added_columns(_read_table(place, manifest.splits[split].index_sha256, copy))
        table.validate(full=True)
        columns = {field.name: table.column(field.name).cast(field.type).to_numpy() for field in INDEX}
        if any(table.column(field.name).null_count for field in INDEX):
            raise ValueError("it has lines with nothing in them")
    # Somebody else may have written the cache: every row must point to an existing sample.
    info = manifest.splits[split]
    rows = np.array([shard.rows for shard in info.shards], np.int64)
    ends = {"shard": len(rows), "channel": len(manifest.channels), "patch_squares": _MAX_SQUARES}
    problem = "" if len(columns["length"]) == info.rows else f"it has {len(columns['length'])} lines, not {info.rows}"
    for name, column in columns.items():
        if not problem and len(column):
            lowest = {"channel": -1} | dict.fromkeys(ADDED, UNKNOWN)
            if column.min() < lowest.get(name, 0) or column.max() >= ends.get(name, 2**31):
                problem = f"{name} goes from {column.min()} to {column.max()}"
    if not problem and len(rows) and (columns["row_in_shard"] >= rows[columns["shard"]]).any():
        problem = "row_in_shard goes beyond a shard's rows"
    if problem:
        raise MismatchError(
            f"{place} is not the index of this cache: {problem}", "Copy the cache again, or export it again."
        )
    return columns


class SplitPrefixes(NamedTuple):
    """The prefixes of N samples: sample ``i`` has those from ``offsets[i]`` to ``offsets[i + 1]``.

    Args:
        offsets: int64 (N + 1,).
        prefixes: of all samples, concatenated.
    """

    offsets: npt.NDArray[np.int64]
    prefixes: PrefixHashes

    @classmethod
    def joined(cls, parts: Sequence[SplitPrefixes]) -> SplitPrefixes:
        """Concatenate the prefixes of several parts."""
        counts = [np.diff(part.offsets) for part in parts]
        columns = zip(*(part.prefixes for part in parts), strict=True)
        return cls(
            np.concatenate([[0], *counts]).cumsum(dtype=np.int64),
            PrefixHashes(*(np.concatenate(column) for column in columns)),
        )


def prefix_batch(counts: npt.NDArray[np.int64], prefixes: PrefixHashes) -> pa.RecordBatch:
    """Return the rows of S samples from the result of ``encode.prefix_hashes``; ``counts``: prefixes of each, (S,)."""
    offsets = pa.array(np.cumsum([0, *counts]), pa.int32())
    arrays = [pa.array(column, field.type) for column, field in zip(prefixes, PREFIX, strict=True)]
    entries = pa.StructArray.from_arrays(arrays, fields=list(PREFIX))
    return pa.record_batch([pa.ListArray.from_arrays(offsets, entries)], schema=PREFIXES)


def joined_batches(batches: Sequence[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """Join batches of prefixes into one; none if they are empty."""
    return pa.Table.from_batches(batches, PREFIXES).combine_chunks().to_batches()


def with_fields(batch: pa.RecordBatch, wanted: pa.StructType) -> pa.RecordBatch:
    """Return prefixes with these fields each: ``UNKNOWN`` in a field that an older cache lacks."""
    lines = batch.column("prefixes")
    if lines.type == pa.list_(wanted) or lines.null_count or lines.values.null_count:
        return batch
    entries = lines.flatten()
    columns = [
        entries.field(field.name)
        if entries.type.get_field_index(field.name) >= 0 or PREFIX_BEFORE.get_field_index(field.name) >= 0
        else pa.repeat(pa.scalar(UNKNOWN, field.type), len(entries))
        for field in wanted
    ]
    offsets = lines.offsets.to_numpy() - lines.offsets[0].as_py()
    entries = pa.StructArray.from_arrays(columns, fields=list(wanted))
    return pa.record_batch([pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), entries)], names=["prefixes"])


def read_prefixes(place: str, sha256: str | None, lengths: IntArray, copy: str | None = None) -> SplitPrefixes:
    """Read the prefixes of a split and compare them with their checksum and the index.

    Args:
        place: of the file.
        sha256: that it should have; None to skip the check.
        lengths: (N,), of the samples in the index, in tokens.
        copy: path of a local copy of the file.

    Raises:
        MismatchError: if the file is missing or broken, or does not belong to this index.
    """
    with _errors_of(place):
        table = _read_table(place, sha256, copy)
        table.validate(full=True)
        parts = []
        for batch in table.to_batches():
            lines = with_fields(batch, PREFIX).column("prefixes")
            entries = lines.flatten()
            if lines.null_count or entries.null_count:
                raise ValueError("it has lines with nothing in them")
            starts = lines.offsets.to_numpy().astype(np.int64)
            columns = [column.to_numpy(zero_copy_only=False) for column in entries.flatten()]
            parts.append(SplitPrefixes(starts - starts[0], PrefixHashes(*columns)))
        split = SplitPrefixes.joined(parts)
    sizes = np.diff(split.offsets)
    ends, owners = split.prefixes.lengths, np.repeat(np.arange(len(sizes)), sizes)
    problem = ""
    if len(sizes) != len(lengths):
        problem = f"it has {len(sizes)} lines, not {len(lengths)}"
    elif len(ends) and ((ends < 1) | (ends > lengths[owners])).any():
        problem = "a prefix is longer than its sample"
    elif ((np.diff(ends) <= 0) & (np.diff(owners) == 0)).any():
        problem = "the prefixes of a sample do not rise"
    if problem:
        raise MismatchError(
            f"{place} does not belong to the index of this cache: {problem}",
            "Copy the cache again, or export it again.",
        )
    return split


Column = npt.NDArray[np.integer[Any]]

# Assumed tokens of a step of a video's grid, since neither number nor size of the steps is known.
_FRAME_TOKENS = 256


def with_estimates(columns: Mapping[str, Column], limits: MediaLimits) -> dict[str, Column]:
    """Replace ``UNKNOWN`` in the columns of an index by estimates.

    All media of a sample are assumed to be equally large, and frames of videos to have 256 tokens each.

    Args:
        limits: of the cache, which determine the patches of a token.
    """
    columns = dict(columns)
    pictures, videos, sounds = (columns[f"num_{kind}"].astype(np.float64) for kind in ("images", "videos", "audios"))
    if (unknown := columns["audio_tokens"] == UNKNOWN).any():
        tokens = columns["media_tokens"] / np.maximum(pictures + videos + sounds, 1) * sounds
        columns["audio_tokens"] = np.where(unknown, tokens.astype(np.int32), columns["audio_tokens"])
    if (unknown := columns["patch_squares"] == UNKNOWN).any():
        patches = limits.image.merge_size**2 if limits.image is not None else 0
        each = (columns["media_tokens"] - columns["audio_tokens"]) / np.maximum(pictures + videos, 1) * patches
        squares = each * (pictures * each + videos * np.minimum(each, _FRAME_TOKENS * patches))
        columns["patch_squares"] = np.where(unknown, squares.astype(np.int64), columns["patch_squares"])
    return columns
