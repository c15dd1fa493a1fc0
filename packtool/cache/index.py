"""Read a split's index and ``prefixes.arrow``, checked against the manifest; older files get their missing columns."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
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


class SplitPrefixes(NamedTuple):
    """The M prefixes of N samples: sample ``i`` has those from ``offsets[i]`` to ``offsets[i + 1]``.

    Args:
        offsets: int64 (N + 1,).
        prefixes: of all samples, end to end.
    """

    offsets: npt.NDArray[np.int64]
    prefixes: PrefixHashes

    @classmethod
    def joined(cls, parts: Sequence[SplitPrefixes]) -> SplitPrefixes:
        """Those of the samples of several parts, one after the other."""
        counts = [np.diff(part.offsets) for part in parts]
        columns = zip(*(part.prefixes for part in parts), strict=True)
        return cls(
            np.concatenate([[0], *counts]).cumsum(dtype=np.int64),
            PrefixHashes(*(np.concatenate(column) for column in columns)),
        )


def prefix_batch(counts: npt.NDArray[np.int64], prefixes: PrefixHashes) -> pa.RecordBatch:
    """The lines of S samples.

    Args:
        counts: prefixes of each, (S,), as ``encode.prefix_hashes`` gives them, like the others.
    """
    offsets = pa.array(np.cumsum([0, *counts]), pa.int32())
    arrays = [pa.array(column, field.type) for column, field in zip(prefixes, PREFIX, strict=True)]
    entries = pa.StructArray.from_arrays(arrays, fields=list(PREFIX))
    return pa.record_batch([pa.ListArray.from_arrays(offsets, entries)], schema=PREFIXES)


def joined_batches(batches: Sequence[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """One batch of the lines of several; none if these have no lines."""
    return pa.Table.from_batches(batches, PREFIXES).combine_chunks().to_batches()


def with_fields(batch: pa.RecordBatch, wanted: pa.StructType) -> pa.RecordBatch:
    """Some lines with these fields of each prefix: ``UNKNOWN`` in one that an older packtool did not write."""
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
    """The prefixes of a split, held against its checksum and its index.

    Args:
        place: of the file.
        sha256: that it should have; None if nobody asks.
        lengths: (N,), those of the index, in tokens.
        copy: of the file on this machine.

    Raises:
        MismatchError: if the file is missing or broken, or does not belong to this index.
    """
    try:
        data = storage.read_bytes(copy or place)
        if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
            raise MismatchError(
                f"{place} is damaged: it does not have the SHA-256 that the manifest says",
                "Copy the cache again. packtool inspect CACHE --verify finds all that is damaged.",
            )
        table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
        table.validate(full=True)
        batches = [with_fields(batch, PREFIX) for batch in table.to_batches()]
        found = SplitPrefixes.joined([_part(batch.column("prefixes")) for batch in batches])
    except (StorageError, OSError, LookupError, ValueError, pa.ArrowException) as error:
        raise MismatchError(f"{place} cannot be read: {error}", "Export the cache again.") from error
    if problem := _problem(found, lengths):
        raise MismatchError(
            f"{place} does not belong to the index of this cache: {problem}",
            "Copy the cache again, or export it again.",
        )
    return found


def _part(lines: pa.ListArray) -> SplitPrefixes:
    if lines.null_count or lines.flatten().null_count:
        raise ValueError("it has lines with nothing in them")
    offsets = lines.offsets.to_numpy().astype(np.int64)
    columns = [column.to_numpy(zero_copy_only=False) for column in lines.flatten().flatten()]
    return SplitPrefixes(offsets - offsets[0], PrefixHashes(*columns))


def _problem(found: SplitPrefixes, lengths: IntArray) -> str:
    """What is wrong with prefixes of samples of these lengths: they rise, and none is longer than its sample."""
    sizes = np.diff(found.offsets)
    if len(sizes) != len(lengths):
        return f"it has {len(sizes)} lines, not {len(lengths)}"
    ends, owners = found.prefixes.lengths, np.repeat(np.arange(len(sizes)), sizes)
    if len(ends) and ((ends < 1) | (ends > lengths[owners])).any():
        return "a prefix is longer than its sample"
    if ((np.diff(ends) <= 0) & (np.diff(owners) == 0)).any():
        return "the prefixes of a sample do not rise"
    return ""


class MappedPrefixes:
    """The prefixes of a split, read one sample at a time.

    Args:
        path: of the file, on this machine.

    Raises:
        OSError, pa.ArrowException: if it cannot be read.
    """

    def __init__(self, path: str) -> None:
        self._lines = pa.ipc.open_file(pa.memory_map(path)).read_all().column("prefixes")

    def hashes(self, line: int) -> dict[int, int]:
        """Hashes of a sample's prefixes, by their lengths."""
        return {prefix["length"]: prefix["hash"] for prefix in self._lines[line].as_py()}


Column = npt.NDArray[np.integer[Any]]

# Of a step of a video's grid: neither how many steps a video has nor how large they are is known.
_FRAME_TOKENS = 256


def with_guesses(columns: Mapping[str, Column], limits: MediaLimits) -> dict[str, Column]:
    """The columns of an index with numbers in place of ``UNKNOWN``; the same where there is none.

    A sample's media are taken for equally large, and a video's frames for 256 tokens each.

    Args:
        limits: of the cache; they tell how many patches make a token.
    """
    found = dict(columns)
    pictures, videos = columns["num_images"].astype(np.float64), columns["num_videos"].astype(np.float64)
    sounds = columns["num_audios"].astype(np.float64)
    each = columns["media_tokens"] / np.maximum(pictures + videos + sounds, 1)
    if (unknown := columns["audio_tokens"] == UNKNOWN).any():
        heard = (each * sounds).astype(np.int32)
        found["audio_tokens"] = np.where(unknown, heard, columns["audio_tokens"])
    if (unknown := columns["patch_squares"] == UNKNOWN).any():
        patches = limits.image.merge_size**2 if limits.image is not None else 0
        seen = (columns["media_tokens"] - found["audio_tokens"]) / np.maximum(pictures + videos, 1) * patches
        squares = seen * (pictures * seen + videos * np.minimum(seen, _FRAME_TOKENS * patches))
        found["patch_squares"] = np.where(unknown, squares.astype(np.int64), columns["patch_squares"])
    return found
