"""Readers of samples: of one or several caches without copying tokens, with other targets, and of a mixture."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packtool import storage
from packtool.cache.index import SplitPrefixes, read_index, read_prefixes, with_estimates
from packtool.cache.local import LocalCopies, MappedBlocks
from packtool.cache.manifest import Identity, Manifest
from packtool.cache.shard import MEDIA_COLUMNS
from packtool.constants import INDEX_NAME, PREFIXES_NAME, TRAIN_SPLIT
from packtool.encode.encoded import EncodedAudio, EncodedImage, EncodedSample, EncodedVideo, IntArray, files_of
from packtool.encode.targets import TargetChoice
from packtool.errors import MismatchError, PacktoolError
from packtool.rows.sample import RowPart

T = TypeVar("T")
Medium = TypeVar("Medium", EncodedImage, EncodedVideo, EncodedAudio)

# Each mapped shard holds a file descriptor.
_MAX_OPEN_SHARDS = 128
_TARGET_COLUMNS = ("input_ids", "labels", "turns", "truncated")
_FETCH_AGAIN = "It is a local copy of a remote shard: run again with --verify-cache always to fetch it again."


@dataclass(frozen=True)
class SplitIndex:
    """The index of N samples, from which planning works; arrays have the shape (N,).

    Args:
        length: tokens of each sample.
        target_tokens: its tokens with loss.
        media_tokens: its placeholder tokens for media.
        audio_tokens: those of its placeholder tokens that represent sounds.
        patch_squares: int64, sum over the frames of its media of (patches of the frame)^2, to which the cost of
            attention in a vision tower is proportional.
        num_patches: patches of its media in a vision tower, with padding and with those that have no tokens.
        num_images, num_videos, num_audios: its media by kind.
        channel: position of its channel in ``channels``; -1 for none.
    """

    length: IntArray
    target_tokens: IntArray
    media_tokens: IntArray
    audio_tokens: IntArray
    patch_squares: npt.NDArray[np.int64]
    num_patches: IntArray
    num_images: IntArray
    num_videos: IntArray
    num_audios: IntArray
    channel: IntArray
    channels: tuple[str, ...]

    @property
    def vision_tokens(self) -> IntArray:
        """Placeholder tokens of the pictures and videos of each sample, (N,)."""
        return self.media_tokens - self.audio_tokens

    @property
    def picture_squares(self) -> npt.NDArray[np.float64]:
        """(Patches of a picture or frame)^2 of each sample, (N,); the mean over its patches if these differ."""
        return np.square(self.patch_squares / np.maximum(self.num_patches, 1))


def _join_indexes(indexes: Sequence[dict[str, IntArray]], manifests: Sequence[Manifest]) -> SplitIndex:
    """Join the indexes of several caches, given as columns by name, into one; estimates fill missing columns.

    Channels are names of groups of samples. Each cache numbers its own; the joined index numbers those of all caches,
    in order of appearance: caches with channels (a, b) and (b, c) have the joined channels (a, b, c).
    """
    channels = tuple(dict.fromkeys(name for manifest in manifests for name in manifest.channels))
    estimated_indexes = []
    for index, manifest in zip(indexes, manifests, strict=True):
        columns = with_estimates(index, manifest.identity.media_limits)
        joined_numbers = [channels.index(name) for name in manifest.channels]
        # The number -1 of samples without a channel selects the last element, which is -1.
        columns["channel"] = np.array([*joined_numbers, -1], np.int32)[columns["channel"]]
        estimated_indexes.append(columns)
    joined: dict[str, Any] = {}
    for field in fields(SplitIndex):
        if field.name != "channels":
            joined[field.name] = np.concatenate([columns[field.name] for columns in estimated_indexes])
    return SplitIndex(channels=channels, **joined)


class CacheReader:
    """Samples of one split of one or several caches, numbered consecutively.

    It can be sent to other processes. Files are opened when they are first needed. A shard of a remote cache is then
    copied to this machine, once for all its processes.

    Args:
        directories: of the C caches.
        split: ``train`` or ``val``.
        copies: where remote caches are copied to, and whether files are verified.

    Attributes:
        offsets: int64 (C + 1,): cache ``c`` has the samples from ``offsets[c]`` up to ``offsets[c + 1]``.
    """

    def __init__(
        self, directories: Sequence[str], manifests: Sequence[Manifest], split: str, copies: LocalCopies | None = None
    ) -> None:
        self.directories = tuple(directories)
        self.manifests = tuple(manifests)
        self.split = split
        self.copies = copies or LocalCopies()
        indexes = [self._read_index(cache) for cache in range(len(self.directories))]  # columns by name, of each cache
        self.offsets = np.cumsum([0, *(len(index["length"]) for index in indexes)])
        self._shard = np.concatenate([index["shard"] for index in indexes])
        self._row_in_shard = np.concatenate([index["row_in_shard"] for index in indexes])
        self.index = _join_indexes(indexes, self.manifests)
        self._open: OrderedDict[tuple[int, int], ShardFile] = OrderedDict()  # by cache and shard, last used at the end
        self._prefixes: dict[int, pa.ChunkedArray | None] = {}  # by cache

    @classmethod
    def open(
        cls, directories: Sequence[str], split: str = TRAIN_SPLIT, copies: LocalCopies | None = None
    ) -> CacheReader:
        """Open caches and check that they can be trained together; reads manifests and indexes, but no shards.

        ``DIR/train`` is accepted for ``DIR``. Raises a MismatchError if a cache is unfinished, lacks the split, or has
        another model or media limits than the first.
        """
        roots = [_root(directory) for directory in directories]
        manifests = [Manifest.read(root) for root in roots]
        for root, manifest in zip(roots, manifests, strict=True):
            if split not in manifest.splits:
                message = f"{root} has no {split} split"
                raise MismatchError(message, "packtool export --split-dataset-ratio 0.01 creates one.")
            check_sizes(root, manifest, split)
            lines = _identity_differences(manifests[0].identity, manifest.identity)
            if lines:
                raise MismatchError(
                    f"{roots[0]} and {root} cannot be trained together: they were exported with different settings:\n"
                    + "\n".join(lines),
                    "Export one of them again with the settings of the other.",
                )
        copies = copies or LocalCopies()
        remote_manifests = [
            manifest for root, manifest in zip(roots, manifests, strict=True) if storage.is_remote(root)
        ]
        if remote_manifests:
            copies = copies.keeping(remote_manifests)  # raises a ConfigError if they cannot all be copied
        return cls(roots, manifests, split, copies)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the split and of all caches in their order."""
        names = [self.split, *(manifest.fingerprint for manifest in self.manifests)]
        return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def sample(self, position: int) -> EncodedSample:
        """Read the sample at a position of the joined numbering of all caches.

        Its arrays are views of the mapped file and must not be written to. A sample with local media files also has the
        hashes of its prefixes (beginnings), by which a changed media file can be noticed.
        """
        cache, position_in_cache = self.cache_of(position)
        shard = int(self._shard[position])
        row = int(self._row_in_shard[position])
        try:
            shard_file = self._shard_file(cache, shard)
        except MismatchError as error:
            raise MismatchError(f"{error.message} (when row {row} of it was read)", error.remedy) from error
        sample = shard_file.sample(row)
        if not _has_local_media(sample):
            return sample
        if cache not in self._prefixes:
            self._prefixes[cache] = self._map_prefixes(cache)
        prefixes_of_samples = self._prefixes[cache]
        if prefixes_of_samples is None:  # they cannot be read
            return sample
        prefixes = prefixes_of_samples[position_in_cache].as_py()
        return replace(sample, prefix_hashes={prefix["length"]: prefix["hash"] for prefix in prefixes})

    def locations(self, cache: int) -> tuple[IntArray, IntArray]:
        """Return the shard, and the row in the shard, of each of the N samples of a cache, (N,) each."""
        samples = slice(int(self.offsets[cache]), int(self.offsets[cache + 1]))
        return self._shard[samples], self._row_in_shard[samples]

    def cache_of(self, position: int) -> tuple[int, int]:
        """Return the number of the cache that has a sample, and the sample's position in that cache."""
        if not 0 <= position < len(self):
            raise IndexError(f"sample {position} of {len(self)}")
        cache = int(np.searchsorted(self.offsets, position, side="right")) - 1
        return cache, position - int(self.offsets[cache])

    def shard_table(self, cache: int, shard: int, names: Sequence[str]) -> pa.Table:
        """Return the columns ``names`` of a shard, without those that the shard lacks."""
        return self._shard_file(cache, shard).table(names)

    def _shard_file(self, cache: int, shard: int) -> ShardFile:
        """Return an open shard; the least recently used one of more than 128 is closed."""
        key = cache, shard
        if key not in self._open:
            is_copy = storage.is_remote(self.directories[cache])
            path, sums = self._local_shard(cache, shard)
            if is_copy and not os.path.exists(path):
                path, sums = self._local_shard(cache, shard)  # another run has just removed it for lack of space
            self._open[key] = ShardFile(path, sums, _FETCH_AGAIN if is_copy else None)
            if len(self._open) > _MAX_OPEN_SHARDS:
                self._open.popitem(last=False)
        self._open.move_to_end(key)
        return self._open[key]

    def _local_shard(self, cache: int, shard: int) -> tuple[str, bytes | None]:
        """Return the path of a shard or its copy on this machine, and its block checksums; None if not verified."""
        info = self.manifests[cache].splits[self.split].shards[shard]
        path = storage.join(self.directories[cache], self.split, info.file)
        fingerprint = self.manifests[cache].fingerprint
        if storage.is_remote(path):
            return self.copies.shard(path, fingerprint, info)
        return path, self.copies.check(path, fingerprint, info.sha256)

    def _read_file(self, cache: int, name: str, read: Callable[[str], T]) -> T:
        """Return ``read(path)`` for the path of a file of the split, or of its local copy if the cache is remote."""
        directory = self.directories[cache]
        if storage.is_remote(directory):
            return self.copies.index(directory, self.split, self.manifests[cache].fingerprint, read, name)
        return read(storage.join(directory, self.split, name))

    def _read_index(self, cache: int) -> dict[str, IntArray]:
        """Return the index columns of a cache, (N,) each, by name."""
        directory, manifest = self.directories[cache], self.manifests[cache]
        verify_checksum = self.copies.verify != "never"
        read = partial(read_index, directory, manifest, self.split, verify_checksum=verify_checksum)
        return self._read_file(cache, INDEX_NAME, read)

    def prefixes(self) -> SplitPrefixes | None:
        """Return the prefixes of all samples; None if one of the caches has no ``prefixes.arrow``."""
        digests = [manifest.splits[self.split].prefixes_sha256 for manifest in self.manifests]
        if not all(digests):
            return None
        lengths = np.split(self.index.length, self.offsets[1:-1])  # of the samples of each cache
        parts = []
        for cache, digest in enumerate(digests):
            path = storage.join(self.directories[cache], self.split, PREFIXES_NAME)
            expected = None if self.copies.verify == "never" else digest
            read = partial(read_prefixes, path, expected, lengths[cache])
            parts.append(self._read_file(cache, PREFIXES_NAME, read))
        return SplitPrefixes.joined(parts)

    def _map_prefixes(self, cache: int) -> pa.ChunkedArray | None:
        """Map the prefixes of a cache, a list per sample; None if they cannot be read: samples work without them."""
        manifest = self.manifests[cache]
        sha256 = manifest.splits[self.split].prefixes_sha256

        def read(path: str) -> pa.ChunkedArray | None:
            self.copies.check(path, manifest.fingerprint, sha256)
            if not sha256:
                return None
            return pa.ipc.open_file(pa.memory_map(storage.normalize(path))).read_all().column("prefixes")

        try:
            return self._read_file(cache, PREFIXES_NAME, read)
        except (PacktoolError, OSError, pa.ArrowException):
            return None

    def prefetch(self) -> threading.Thread | None:
        """Start a thread that copies the shards of remote caches; return it, or None if no cache is remote.

        One process of each machine calls this. After an error, the thread ends, and shards are copied when needed.
        """
        remote_shards = [
            (cache, shard)
            for cache, directory in enumerate(self.directories)
            if storage.is_remote(directory)
            for shard in range(len(self.manifests[cache].splits[self.split].shards))
        ]

        def fetch() -> None:
            try:
                for cache, shard in remote_shards:
                    self._local_shard(cache, shard)
            except PacktoolError:
                return  # the training raises the error if it needs the shard

        if not remote_shards:
            return None
        thread = threading.Thread(target=fetch, name="prefetch", daemon=True)
        thread.start()
        return thread

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict(), "_prefixes": {}}


def _has_local_media(sample: EncodedSample) -> bool:
    files = (file for medium in sample.media for file in files_of(medium))
    return any(data is None and path is not None and not storage.is_remote(path) for path, data in files)


class ShardFile:
    """A shard, mapped into memory; a remote one is read into memory. MismatchError if it or its rows are damaged.

    ``sums``: checksums of its blocks, which are compared at the first read; None skips the check. ``remedy``: how to
    fix a damaged file, for errors.
    """

    def __init__(self, path: str, sums: bytes | None = None, remedy: str | None = None) -> None:
        self._blocks: MappedBlocks | None = None  # of the file; None without checksums
        try:
            is_remote = storage.is_remote(path)
            data = pa.py_buffer(storage.read_bytes(path)) if is_remote else pa.memory_map(path).read_buffer()
            if sums is not None:
                self._blocks = MappedBlocks(path, data, sums, remedy)
            batch_messages = self._read_batches(data)
        except (OSError, ValueError, pa.ArrowException) as error:
            if self._blocks:
                raise self._blocks.damaged(f"it cannot be read ({error})") from error
            raise MismatchError(f"{path} cannot be read: {error}", "Export the cache again.") from error
        # Address and size of each batch's buffers in memory.
        self._bodies = [(message.body.address, message.body.size) for message in batch_messages]
        # Batch b has the rows from _starts[b] up to _starts[b + 1].
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])

    def _read_batches(self, data: pa.Buffer) -> list[pa.Message]:
        """Set ``_batches``, the record batches of the file, after their headers are verified; return their messages."""
        # A stream has a message with the schema, then one for each record batch: a header and the batch's buffers.
        schema_message, *batch_messages = pa.ipc.MessageReader.open_stream(data)
        if self._blocks:
            headers = [message.metadata for message in (schema_message, *batch_messages)]
            if not all(self._blocks.verify(header.address, header.size) for header in headers):
                raise self._blocks.damaged("the headers of its record batches changed after they were verified")
        schema = pa.ipc.read_schema(schema_message)
        self._batches = [pa.ipc.read_record_batch(message, schema) for message in batch_messages]
        for batch in self._batches:
            batch.validate()
        return batch_messages

    def __len__(self) -> int:
        return int(self._starts[-1])

    def table(self, names: Sequence[str]) -> pa.Table:
        """Return the columns ``names`` of the file, without those that it lacks."""
        batches = [batch.select([name for name in names if name in batch.schema.names]) for batch in self._batches]
        for number, batch in enumerate(batches):
            self._check(number, batch, 0, batch.num_rows)
        return pa.Table.from_batches(batches)

    def _check(self, number: int, columns: pa.RecordBatch, start: int, stop: int) -> None:
        """Verify the blocks that hold rows [start, stop) of some columns of the batch ``number``."""
        if self._blocks is None:
            return
        self._blocks.note_changes()
        if self._blocks.are_verified(*self._bodies[number]):
            return
        ranges = (memory for column in columns.columns for memory in _memory_ranges(column, start, stop))
        if not all(self._blocks.verify(address, num_bytes) for address, num_bytes in ranges):
            first = int(self._starts[number]) + start
            last = int(self._starts[number]) + stop - 1
            rows = f"row {first}" if first == last else f"rows {first} to {last}"
            raise self._blocks.damaged(f"{rows} changed after it was verified")

    def sample(self, row: int) -> EncodedSample:
        """Return the sample in a row."""
        batch_number = int(np.searchsorted(self._starts, row, side="right")) - 1  # the batch that holds the row
        batch = self._batches[batch_number]
        i = row - int(self._starts[batch_number])  # the row within the batch
        self._check(batch_number, batch, i, i + 1)
        return _build_sample(batch, i)


def _build_sample(batch: pa.RecordBatch, i: int) -> EncodedSample:
    """Build the sample in row ``i`` of a batch."""
    arrays = {name: _values(batch.column(name), i) for name in ("input_ids", "labels", "turns", "loss_scale")}
    origin = {name: batch.column(name)[i].as_py() for name in ("channel", "source", "row")}
    # None unless the row became several samples.
    part_fields = batch.column("part")[i].as_py() if "part" in batch.schema.names else None
    return EncodedSample(
        **arrays,
        **origin,
        images=_media(EncodedImage, batch.column("images")[i]),
        videos=_media(EncodedVideo, batch.column("videos")[i]),
        audios=_media(EncodedAudio, batch.column("audios")[i]),
        num_truncated=batch.column("truncated")[i].as_py(),
        part=None if part_fields is None else RowPart(**part_fields),
        borders=None if part_fields is None else _values(batch.column("borders"), i),
    )


def _memory_ranges(array: pa.Array, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield (address, size in bytes) of the memory of elements [start, stop) of an array, nested arrays included.

    The caller must verify each range before it asks for the next: the memory of offsets is yielded first, and the
    offsets are read then, to find the values. The array begins at the start of its buffers, and has no booleans.
    """
    if start == stop:
        return
    validity, *buffers = array.buffers()
    if validity is not None:  # a bitmap with one bit for each element
        first_byte, end_byte = start // 8, (stop + 7) // 8
        yield validity.address + first_byte, end_byte - first_byte
    if pa.types.is_struct(array.type):
        for number in range(array.type.num_fields):
            yield from _memory_ranges(array.field(number), start, stop)
    elif pa.types.is_primitive(array.type):
        element_bytes = array.type.bit_width // 8
        yield buffers[0].address + start * element_bytes, (stop - start) * element_bytes
    else:
        yield from _ranges_of_values(array, buffers, start, stop)


def _ranges_of_values(
    array: pa.Array, buffers: Sequence[pa.Buffer], start: int, stop: int
) -> Iterator[tuple[int, int]]:
    """Yield as ``_memory_ranges`` for lists, strings and bytes: their offsets, then their values."""
    yield buffers[0].address + 4 * start, 4 * (stop - start + 1)
    offsets = np.frombuffer(buffers[0], np.int32)
    values_start = int(offsets[start])
    values_stop = int(offsets[stop])
    if pa.types.is_list(array.type):
        yield from _memory_ranges(array.values, values_start, values_stop)
    elif values_start < values_stop:
        yield buffers[1].address + values_start, values_stop - values_start


def _values(column: pa.ListArray, i: int) -> Any:
    """Return the numbers of row ``i`` of a list column as an array; None for null."""
    if not column[i].is_valid:
        return None
    start, end = column.offsets[i].as_py(), column.offsets[i + 1].as_py()
    return column.values.to_numpy(zero_copy_only=True)[start:end]


def _media(kind: type[Medium], rows: pa.ListScalar) -> tuple[Medium, ...]:
    return tuple(_medium(kind, row) for row in rows.as_py() or ())


def _medium(kind: type[Medium], row: dict[str, Any]) -> Medium:
    """Build a medium of class ``kind`` from an element of its column: the inverse of ``shard.media_row``."""
    names = [field.name for field in fields(kind)]
    values: dict[str, Any] = {name: row.get(MEDIA_COLUMNS.get(name, name)) for name in names}
    values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    if kind is EncodedVideo:
        values["frames"] = tuple((frame["path"], frame["bytes"]) for frame in row["frames"])
        values["audio"] = None if row["audio"] is None else _medium(EncodedAudio, row["audio"])
    return kind(**values)


def _root(directory: str) -> str:
    """Return the normalized path of a cache; ``DIR/train`` stands for ``DIR``."""
    path = storage.normalize(directory.rstrip("/") or directory)
    if storage.name(path) == TRAIN_SPLIT and storage.exists(storage.join(path, INDEX_NAME)):
        return storage.parent(path)
    return path


def exported_model(directory: str) -> str:
    """Return the model that a cache was exported for: a directory or a hub id."""
    return str(Manifest.read(_root(directory)).identity.spec["model"])


def common_splits(directories: Sequence[str]) -> set[str]:
    """Return the names of the splits that all of these caches have."""
    return set.intersection(*(set(Manifest.read(_root(directory)).splits) for directory in directories))


def check_sizes(root: str, manifest: Manifest, split: str) -> None:
    """Raise a MismatchError if a shard is missing or has another size; not on web servers, which have no listings."""
    if root.startswith("http"):
        return
    states = storage.entries(storage.join(root, split))
    for shard in manifest.splits[split].shards:
        state = states.get(shard.file)
        if state is None or state.size != shard.bytes:
            problem = "is missing" if state is None else f"has {state.size} bytes, the manifest says {shard.bytes}"
            message = f"{storage.join(root, split, shard.file)} {problem}"
            raise MismatchError(message, "Copy the cache again, or export it again.")


class SampleReader(Protocol):
    """The interface of readers: ``CacheReader`` and its wrappers; picklable, because data workers have copies."""

    def sample(self, position: int) -> EncodedSample:
        """Return a sample by its position in the plan's numbering."""


def _identity_differences(first: Identity, other: Identity) -> list[str]:
    """Return a line for each setting by which two caches cannot be trained together."""
    pairs: dict[str, tuple[Any, Any]] = {
        "model type": (first.model_type, other.model_type),
        "tokenizer": (first.tokenizer_hash, other.tokenizer_hash),
        "chat template": (first.template_hash, other.template_hash),
    }
    first_limits, other_limits = first.media_limits.without_bounds, other.media_limits.without_bounds
    pairs |= {name: (first_limits.get(name), other_limits.get(name)) for name in first_limits | other_limits}
    return [f"  - {name}: {a} and {b}" for name, (a, b) in pairs.items() if a != b]


class RelabeledReader:
    """A reader of samples with other targets than the export's; ``choices``: of each cache, None keeps its labels."""

    def __init__(self, reader: CacheReader, choices: Sequence[TargetChoice | None]) -> None:
        self._reader, self._choices = reader, tuple(choices)

    def sample(self, position: int) -> EncodedSample:
        cache, _ = self._reader.cache_of(position)
        sample = self._reader.sample(position)
        choice = self._choices[cache]
        return sample if choice is None else choice(sample)

    def target_tokens(self) -> npt.NDArray[np.int32]:
        """Count the tokens with loss of each of the N samples, int32 (N,).

        Reads all samples of the caches with other targets, about 40,000 samples of 400 tokens per second.
        """
        counts = np.array(self._reader.index.target_tokens, np.int32)  # a copy
        offsets = self._reader.offsets
        for cache, choice in enumerate(self._choices):
            if choice is not None:
                counts[offsets[cache] : offsets[cache + 1]] = self._counts(cache, choice)
        return counts

    def _counts(self, cache: int, choice: TargetChoice) -> npt.NDArray[np.int32]:
        """Count the tokens with loss of each sample of a cache, from the columns that decide about them."""
        shards, rows = self._reader.locations(cache)
        counts = np.zeros(len(rows), np.int32)
        for shard in np.unique(shards):
            in_shard = np.flatnonzero(shards == shard)
            table = self._reader.shard_table(cache, int(shard), _TARGET_COLUMNS)
            counts_by_row = (np.count_nonzero(choice.targets(sample)[1:]) for sample in _bare_samples(table))
            counts[in_shard] = np.fromiter(counts_by_row, np.int32, len(table))[rows[in_shard]]
        return counts


def _bare_samples(table: pa.Table) -> Iterator[EncodedSample]:
    """Yield the samples of a table with ``_TARGET_COLUMNS``, without media and origin."""
    for batch in table.to_batches():
        columns = [batch.column(name).to_numpy(zero_copy_only=False) for name in ("input_ids", "labels", "turns")]
        truncated = batch.column("truncated").to_pylist()
        for ids, labels, turns, num_truncated in zip(*columns, truncated, strict=True):
            yield EncodedSample(
                ids, labels, turns, images=(), channel=None, source="", row=0, num_truncated=num_truncated
            )


class MixedSamples:
    """A reader of the samples of a mixture, with the name of their source as channel, and with loss weights.

    Args:
        offsets: int64 (S + 1,): source ``s`` has the samples from ``offsets[s]`` up to ``offsets[s + 1]``.
        loss_weights: factor of each source's losses.
        keeps_channels: samples that already have a channel keep it.
    """

    def __init__(
        self,
        reader: SampleReader,
        offsets: npt.NDArray[np.int64],
        names: Sequence[str],
        loss_weights: Sequence[float],
        *,
        keeps_channels: bool,
    ) -> None:
        self._reader, self._offsets, self._names = reader, offsets, tuple(names)
        self._loss_weights, self._keeps_channels = tuple(loss_weights), keeps_channels

    def sample(self, position: int) -> EncodedSample:
        source = int(np.searchsorted(self._offsets, position, side="right")) - 1
        sample = self._reader.sample(position)
        keeps_channel = self._keeps_channels and sample.channel is not None
        channel = sample.channel if keeps_channel else self._names[source]
        scale = sample.loss_scale
        weight = self._loss_weights[source]
        if weight != 1:
            scale = np.full(sample.length, weight, np.float32) if scale is None else scale * np.float32(weight)
        return replace(sample, channel=channel, loss_scale=scale)
