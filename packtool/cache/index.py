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
from packtool.cache.shard import ADDED_COLUMNS, INDEX, OLD_PREFIX, PREFIX, PREFIXES, UNKNOWN, with_added_columns
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
        message = f"{path} is damaged: its SHA-256 differs from the one in the manifest"
        raise MismatchError(message, "Copy the cache again. packtool inspect CACHE --verify lists all damaged files.")
    return pa.ipc.open_file(pa.BufferReader(data)).read_all()


@contextmanager
def _read_errors(path: str) -> Iterator[None]:
    """Raise every error of reading an Arrow file as a MismatchError that names the file."""
    try:
        yield
    except (StorageError, OSError, LookupError, ValueError, pa.ArrowException) as error:
        raise MismatchError(f"{path} cannot be read: {error}", "Export the cache again.") from error


def read_index(
    directory: str, manifest: Manifest, split: str, local_copy: str | None = None, *, verify_checksum: bool = True
) -> dict[str, IntArray]:
    """Read and validate the index of a cache split: a table with one row for each of its N samples.

    A row says where the sample is stored, and gives its number of tokens and media.

    Args:
        manifest: describes the files of the cache.
        local_copy: path of a copy of the index file, which is read instead of the one in ``directory``.
        verify_checksum: compare the SHA-256 of the file with that in the manifest, if the manifest has one.

    Returns:
        The columns by name, (N,) each: ``patch_squares`` is int64, the others are int32. Columns that an older cache
        lacks are filled with ``UNKNOWN``. MismatchError if the file is damaged or contradicts the manifest.
    """
    path = storage.join(directory, split, INDEX_NAME)
    with _read_errors(path):
        expected_sha256 = manifest.splits[split].index_sha256 if verify_checksum else None
        table = _read_table(path, expected_sha256, local_copy)
        columns = _index_columns(table)

    # The cache may be from an untrusted source: every row must refer to an existing sample.
    problem = _index_problem(columns, manifest, split)
    if problem:
        message = f"{path} is not the index of this cache: {problem}"
        raise MismatchError(message, "Copy the cache again, or export it again.")
    return columns


def _index_columns(stored_table: pa.Table) -> dict[str, IntArray]:
    """Return the columns of an index file by name; raise an error if values are missing or of another type."""
    table = with_added_columns(stored_table)
    table.validate(full=True)
    columns = {field.name: table.column(field.name).cast(field.type).to_numpy() for field in INDEX}
    if any(table.column(field.name).null_count for field in INDEX):
        raise ValueError("it has empty rows")
    return columns


def _index_problem(columns: Mapping[str, IntArray], manifest: Manifest, split: str) -> str:
    """Describe the first reason why the columns of an index do not belong to a split of a cache; "" if they do.

    Their number of rows, the range of their values, and the rows of shards to which they refer are compared with the
    manifest.
    """
    split_info = manifest.splits[split]
    num_rows = len(columns["length"])
    if num_rows != split_info.rows:
        return f"it has {num_rows} rows, not {split_info.rows}"
    if not num_rows:
        return ""
    minimums = {"channel": -1} | dict.fromkeys(ADDED_COLUMNS, UNKNOWN)  # of other columns 0
    # Exclusive maximums, of other columns 2**31.
    limits = {"shard": len(split_info.shards), "channel": len(manifest.channels), "patch_squares": _MAX_SQUARES}
    for name, column in columns.items():
        if column.min() < minimums.get(name, 0) or column.max() >= limits.get(name, 2**31):
            return f"{name} has values from {column.min()} to {column.max()}"
    rows_by_shard = np.array([shard.rows for shard in split_info.shards], np.int64)
    rows_in_its_shard = rows_by_shard[columns["shard"]]  # of each sample, (N,)
    if (columns["row_in_shard"] >= rows_in_its_shard).any():
        return "row_in_shard exceeds the number of rows of a shard"
    return ""


class SplitPrefixes(NamedTuple):
    """The prefixes of N samples; sample i has those from offsets[i] to offsets[i + 1]. ``offsets``: int64 (N + 1,)."""

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


def without_samples(batch: pa.RecordBatch, positions: Sequence[int]) -> pa.RecordBatch:
    """Return a batch of an index or of prefixes without the samples at these positions."""
    return batch.filter(pa.array(~np.isin(np.arange(len(batch)), positions))) if positions else batch


def with_prefix_fields(batch: pa.RecordBatch, prefix_type: pa.StructType) -> pa.RecordBatch:
    """Convert the prefixes of a batch to ``prefix_type``; fields that older caches lack become ``UNKNOWN``.

    Raises a KeyError if a field of ``OLD_PREFIX`` is missing. A batch with nulls, which no export writes, is kept.
    """
    lists = batch.column("prefixes")  # one list of prefixes for each sample
    if lists.type == pa.list_(prefix_type) or lists.null_count or lists.values.null_count:
        return batch
    prefixes = lists.flatten()
    known_names = {field.name for field in (*prefixes.type, *OLD_PREFIX)}
    columns = []
    for field in prefix_type:
        if field.name in known_names:
            columns.append(prefixes.field(field.name))
        else:
            columns.append(pa.repeat(pa.scalar(UNKNOWN, field.type), len(prefixes)))
    structs = pa.StructArray.from_arrays(columns, fields=list(prefix_type))
    first_offset = lists.offsets[0].as_py()  # not 0 if the batch is a slice
    offsets = pa.array(lists.offsets.to_numpy() - first_offset, pa.int32())
    return pa.record_batch([pa.ListArray.from_arrays(offsets, structs)], names=["prefixes"])


def read_prefixes(path: str, sha256: str | None, lengths: IntArray, copy: str | None = None) -> SplitPrefixes:
    """Read ``prefixes.arrow``, which has the hashes of beginnings that a sample may share with other samples.

    Args:
        sha256: expected checksum of the file; None to skip its check.
        lengths: tokens of each of the N samples of the index, (N,), to which the prefixes must belong.
        copy: path of a local copy to read instead.

    Raises:
        MismatchError: if the file is damaged or does not belong to the samples.
    """
    with _read_errors(path):
        table = _read_table(path, sha256, copy)
        table.validate(full=True)
        split = SplitPrefixes.joined([_prefixes_of_batch(batch) for batch in table.to_batches()])
    problem = _prefixes_problem(split, lengths)
    if problem:
        message = f"{path} does not belong to the index of this cache: {problem}"
        raise MismatchError(message, "Copy the cache again, or export it again.")
    return split


def _prefixes_of_batch(batch: pa.RecordBatch) -> SplitPrefixes:
    """Return the prefixes of the samples of a batch of ``prefixes.arrow``; raise a ValueError if it has nulls."""
    lists = with_prefix_fields(batch, PREFIX).column("prefixes")  # one list of prefixes for each sample
    prefixes = lists.flatten()
    if lists.null_count or prefixes.null_count:
        raise ValueError("it has empty rows")
    offsets = lists.offsets.to_numpy().astype(np.int64)
    # A column for each field of PREFIX, in the order of PrefixHashes.
    columns = [column.to_numpy(zero_copy_only=False) for column in prefixes.flatten()]
    return SplitPrefixes(offsets - offsets[0], PrefixHashes(*columns))


def _prefixes_problem(split: SplitPrefixes, lengths: IntArray) -> str:
    """Describe why prefixes do not belong to samples of these lengths, (N,); "" if they do."""
    num_prefixes = np.diff(split.offsets)  # of each sample, (N,)
    if len(num_prefixes) != len(lengths):
        return f"it has {len(num_prefixes)} rows, not {len(lengths)}"
    prefix_lengths = split.prefixes.lengths  # of the prefixes of all samples, one after the other
    sample_of_prefix = np.repeat(np.arange(len(num_prefixes)), num_prefixes)
    if ((prefix_lengths < 1) | (prefix_lengths > lengths[sample_of_prefix])).any():
        return "a prefix is longer than its sample"
    is_in_same_sample = np.diff(sample_of_prefix) == 0  # whether a prefix and the next one have the same sample
    is_ascending = np.diff(prefix_lengths) > 0  # whether the next prefix is longer
    if (is_in_same_sample & ~is_ascending).any():
        return "the prefixes of a sample are not in ascending order"
    return ""


Column = npt.NDArray[np.integer[Any]]

# Assumed tokens of a frame of a video; the index has neither the number nor the size of the frames.
_FRAME_TOKENS = 256


def with_estimates(columns: Mapping[str, Column], limits: MediaLimits) -> dict[str, Column]:
    """Return the columns of an index, (N,) each, with estimates for the columns that older caches lack.

    ``audio_tokens``, ``patch_squares``, the sum of (patches)^2 over images and video frames, and ``num_patches`` are
    estimated where they are ``UNKNOWN``. All media of a sample are assumed to have the same number of tokens, and
    frames 256 tokens.

    Args:
        limits: media limits of the cache, which give the number of patches per token.
    """
    columns = dict(columns)
    is_unknown = columns["audio_tokens"] == UNKNOWN
    if is_unknown.any():
        columns["audio_tokens"] = np.where(is_unknown, _estimate_audio_tokens(columns), columns["audio_tokens"])
    is_unknown = columns["patch_squares"] == UNKNOWN
    if is_unknown.any():
        estimate = _estimate_patch_squares(columns, limits)
        columns["patch_squares"] = np.where(is_unknown, estimate, columns["patch_squares"])
    is_unknown = columns["num_patches"] == UNKNOWN
    if is_unknown.any():  # patches of a video are underestimated
        estimate = np.sqrt(columns["patch_squares"] * np.maximum(columns["num_images"], 1.0))
        estimate = np.minimum(estimate, np.iinfo(np.int32).max).astype(np.int32)
        columns["num_patches"] = np.where(is_unknown, estimate, columns["num_patches"])
    return columns


def _estimate_audio_tokens(columns: Mapping[str, Column]) -> Column:
    """Return the part of the media tokens that the sounds have if all media are of equal size, (N,)."""
    num_audios = columns["num_audios"].astype(np.float64)
    num_media = columns["num_images"] + columns["num_videos"] + num_audios
    tokens_per_medium = columns["media_tokens"] / np.maximum(num_media, 1)
    return (tokens_per_medium * num_audios).astype(np.int32)


def _estimate_patch_squares(columns: Mapping[str, Column], limits: MediaLimits) -> Column:
    """Return the sum of (patches)^2 over images and video frames if all of them are of equal size, (N,)."""
    num_images = columns["num_images"].astype(np.float64)
    num_videos = columns["num_videos"].astype(np.float64)
    patches_per_token = limits.image.merge_size**2 if limits.image is not None else 0
    vision_tokens = columns["media_tokens"] - columns["audio_tokens"]
    patches_per_medium = vision_tokens / np.maximum(num_images + num_videos, 1) * patches_per_token
    patches_per_frame = np.minimum(patches_per_medium, _FRAME_TOKENS * patches_per_token)
    # Each patch attends to all patches of its image, or of its video frame.
    attended_patches = num_images * patches_per_medium + num_videos * patches_per_frame
    return (patches_per_medium * attended_patches).astype(np.int64)
