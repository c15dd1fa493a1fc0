"""The columns of a cache's files, and the writer of a shard with its part of the index."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packtool import storage
from packtool.encode.encoded import EncodedAudio, EncodedImage, EncodedSample, EncodedVideo, IntArray, files_of
from packtool.media.files import MediaProblem, open_medium
from packtool.rows.media_policy import MediaPolicy
from packtool.rows.sample import Dropped, MediaRef
from packtool.storage import AtomicFile, FileState

_INTS = pa.list_(pa.int32())
_FILE = [("path", pa.string()), ("bytes", pa.binary())]
_SIZE = [("height", pa.int32()), ("width", pa.int32())]
_SOUND = [("samples", pa.int64()), ("features", pa.int32()), ("tokens", pa.int32())]
_IMAGE = pa.struct([*_FILE, *_SIZE, ("grid", _INTS), ("tokens", pa.int32())])
_AUDIO = pa.struct([*_FILE, *_SOUND])
_VIDEO = pa.struct(
    [
        *_FILE,
        ("frames", pa.list_(pa.struct(_FILE))),
        *_SIZE,
        ("num_frames", pa.int32()),
        ("fps", pa.float64()),
        ("indices", _INTS),
        ("grid", _INTS),
        ("seconds_per_grid", pa.float64()),
        ("tokens", pa.int32()),
        ("audio", pa.struct(_SOUND)),
    ]
)

SAMPLES = pa.schema(
    [
        ("input_ids", _INTS),
        ("labels", _INTS),
        ("length", pa.int32()),
        ("turns", _INTS),
        ("loss_scale", pa.list_(pa.float32())),
        ("images", pa.list_(_IMAGE)),
        ("videos", pa.list_(_VIDEO)),
        ("audios", pa.list_(_AUDIO)),
        ("channel", pa.string()),
        ("source", pa.string()),
        ("row", pa.int64()),
        ("truncated", pa.int32()),
    ]
)
"""The columns of a shard, one row a sample: the fields of ``EncodedSample`` and of its media.

``turns``: [start, end) of each assistant turn that may be trained, flat. ``loss_scale``: null where all labels weigh 1.
``truncated``: tokens removed.
"""

PARTS = pa.schema(
    [
        ("part", pa.struct([(name, pa.int32()) for name in ("turn", "num_turns", "response", "num_responses")])),
        ("borders", _INTS),
    ]
)
"""Further columns if rows may become several samples, by ``--expand-turns`` or by their responses.

``part``: the part of its row that a sample is, null for a whole row. ``borders``: where its turns begin and end.
"""

INDEX = pa.schema(
    [
        ("shard", pa.int32()),
        ("row_in_shard", pa.int32()),
        ("length", pa.int32()),
        ("target_tokens", pa.int32()),
        ("media_tokens", pa.int32()),
        ("num_images", pa.int32()),
        ("num_videos", pa.int32()),
        ("num_audios", pa.int32()),
        ("channel", pa.int32()),
        ("audio_tokens", pa.int32()),
        ("patch_squares", pa.int64()),
    ]
)
"""The columns of an index, which planning reads; ``channel`` is -1 or a position in the manifest's list.

The last two determine the cost of towers: tokens of sounds, and the sum over frames of (patches of the frame)^2. Older
caches lack them.
"""

UNKNOWN = -1
"""Value in the columns ``ADDED`` for a cache that lacks them."""
ADDED = ("audio_tokens", "patch_squares")


PREFIX = pa.struct(
    [
        ("length", pa.int32()),
        ("hash", pa.uint64()),
        ("media_tokens", pa.int32()),
        ("audio_tokens", pa.int32()),
        ("patch_squares", pa.int64()),
        ("target_tokens", pa.int32()),
    ]
)
"""One prefix of a sample: the fields of ``PrefixHashes``."""

PREFIX_BEFORE = pa.struct([field for field in PREFIX if field.name != "target_tokens"])
"""The fields of a prefix in older caches."""

PREFIXES = pa.schema([("prefixes", pa.list_(PREFIX))])
"""One row for each row of the index: some prefixes of the sample, the shorter ones first."""


def with_added_columns(table: pa.RecordBatch | pa.Table) -> pa.RecordBatch | pa.Table:
    """Add the columns that an index, or a part of one, lacks, filled with ``UNKNOWN``."""
    for name in ADDED:
        if name not in table.schema.names:
            field = INDEX.field(name)
            table = table.append_column(field, pa.repeat(pa.scalar(UNKNOWN, field.type), table.num_rows))
    return table


def _feature(kind: pa.DataType) -> dict[str, Any]:
    if pa.types.is_list(kind):
        return {"feature": _feature(kind.value_type), "_type": "List"}
    if pa.types.is_struct(kind):
        return {kind.field(i).name: _feature(kind.field(i).type) for i in range(kind.num_fields)}
    return {"dtype": str(kind), "_type": "Value"}


def samples_schema(has_parts: bool) -> pa.Schema:
    """Return the columns of a shard; ``has_parts``: rows may become several samples."""
    return pa.schema([*SAMPLES, *PARTS]) if has_parts else SAMPLES


def dataset_info(has_parts: bool) -> bytes:
    """Return ``dataset_info.json``, from which ``datasets.load_from_disk`` reads the types of the columns."""
    features = {field.name: _feature(field.type) for field in samples_schema(has_parts)}
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    return json.dumps(info, indent=1).encode()


def dataset_state(files: list[str], split: str, fingerprint: str) -> bytes:
    """Return ``state.json``, from which ``datasets.load_from_disk`` reads the names of the shards."""
    state: dict[str, Any] = {
        "_data_files": [{"filename": name} for name in files],
        "_fingerprint": fingerprint,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": split,
    }
    return json.dumps(state, indent=1).encode()


@contextmanager
def atomic_file(path: str) -> Iterator[AtomicFile]:
    """Open a file that appears under its path at the end of the block, and not at all after an error."""
    file = AtomicFile(path)
    try:
        yield file
        file.commit()
    except BaseException:
        file.discard()
        raise


def arrow_bytes(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, new: Callable[..., pa.RecordBatchWriter] = pa.ipc.new_file
) -> bytes:
    """Return record batches in the form of an Arrow file, or of a stream with ``pa.ipc.new_stream`` for ``new``."""
    sink = pa.BufferOutputStream()
    with new(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def write_arrow_file(path: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> str:
    """Write record batches as one Arrow file and return its SHA-256."""
    with atomic_file(path) as file:
        sink = HashingSink(file)
        with pa.ipc.new_file(pa.PythonFile(sink, mode="w"), schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
    return sink.digest.hexdigest()


IndexPart = dict[str, npt.NDArray[np.integer[Any]]]
"""The index columns of some samples, (S,) each."""


class ShardWriter:
    """Writes samples in batches; the file appears on ``close``.

    Args:
        path: of the data file.
        has_parts: whether rows may become several samples.
    """

    def __init__(self, path: str, has_parts: bool = False) -> None:
        self._file = AtomicFile(path)
        self._sink = HashingSink(self._file)
        self._schema = samples_schema(has_parts)
        self._writer = pa.ipc.new_stream(pa.PythonFile(self._sink, mode="w"), self._schema)

    def write(self, samples: Sequence[EncodedSample]) -> None:
        """Append samples as one record batch."""
        if samples:
            self._writer.write_batch(_batch(samples, self._schema))

    def close(self) -> tuple[str, FileState]:
        """Finish the file; return its SHA-256, and its size and time as the store has them."""
        self._writer.close()
        return self._sink.digest.hexdigest(), self._file.commit()

    def discard(self) -> None:
        """Remove the unfinished file."""
        self._file.discard()


class HashingSink:
    """A file for pyarrow to write to, which computes the SHA-256 on the way."""

    closed = False

    def __init__(self, file: AtomicFile) -> None:
        self._file: AtomicFile | None = file
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        """Append bytes to the file and to the hash."""
        view = memoryview(data)
        self.digest.update(view)
        if self._file is not None:
            self._file.write(view)
        return view.nbytes

    def discard(self) -> None:
        """Remove the unfinished file; what a garbage-collected writer still writes is ignored."""
        if self._file is not None:
            self._file.discard()
        self._file = None

    def flush(self) -> None:
        """Do nothing: writes are not buffered. pyarrow calls it."""

    def close(self) -> None:
        """Mark as closed; the owner of the file commits it."""
        self.closed = True


def _ints(arrays: Sequence[IntArray]) -> pa.ListArray:
    offsets = np.zeros(len(arrays) + 1, np.int32)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    values = np.concatenate(arrays) if arrays else np.zeros(0, np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, pa.int32()))


MEDIA_COLUMNS = {"data": "bytes", "num_samples": "samples", "num_features": "features", "num_tokens": "tokens"}
"""Columns of media whose fields have other names."""


def media_row(medium: EncodedImage | EncodedVideo | EncodedAudio) -> dict[str, Any]:
    """Return a medium as a row of its column."""
    row = {MEDIA_COLUMNS.get(name, name): value for name, value in vars(medium).items()}
    if isinstance(medium, EncodedVideo):
        row["frames"] = [{"path": path, "bytes": data} for path, data in medium.frames]
        row["audio"] = None if medium.audio is None else media_row(medium.audio)
    return row


def _batch(samples: Sequence[EncodedSample], schema: pa.Schema) -> pa.RecordBatch:
    arrays = []
    for column in schema:
        name = "num_truncated" if column.name == "truncated" else column.name
        values: list[Any] = [getattr(sample, name) for sample in samples]
        if name in ("input_ids", "labels", "turns"):
            arrays.append(_ints(values))
            continue
        if name in ("images", "videos", "audios"):
            values = [list(map(media_row, media)) for media in values]
        elif name == "part":
            values = [None if part is None else vars(part) for part in values]
        arrays.append(pa.array(values, column.type))
    return pa.record_batch(arrays, schema=schema)


def num_targets(sample: EncodedSample) -> int:
    """Count the tokens with loss: labels from the second position on, since nothing predicts the first."""
    return int(np.count_nonzero(sample.labels[1:] >= 0))


def index_part(
    samples: Sequence[EncodedSample], shard: int, first_row: int, channel_codes: dict[str, int]
) -> IndexPart:
    """Return the index columns of consecutive samples of a shard, (S,) each; new channels get the next code."""
    codes = [
        -1 if sample.channel is None else channel_codes.setdefault(sample.channel, len(channel_codes))
        for sample in samples
    ]
    count = len(samples)
    return {
        "shard": np.full(count, shard, np.int32),
        "row_in_shard": np.arange(first_row, first_row + count, dtype=np.int32),
        "length": np.array([sample.length for sample in samples], np.int32),
        "target_tokens": np.array([num_targets(sample) for sample in samples], np.int32),
        "media_tokens": np.array([sample.num_media_tokens for sample in samples], np.int32),
        "num_images": np.array([len(sample.images) for sample in samples], np.int32),
        "num_videos": np.array([len(sample.videos) for sample in samples], np.int32),
        "num_audios": np.array([len(sample.audios) for sample in samples], np.int32),
        "channel": np.array(codes, np.int32),
        "audio_tokens": np.array([sample.num_audio_tokens for sample in samples], np.int32),
        "patch_squares": np.array([sample.patch_squares for sample in samples], np.int64),
    }


def index_batch(columns: IndexPart) -> pa.RecordBatch:
    """Return index columns, (S,) each, as a record batch."""
    return pa.record_batch([pa.array(columns[field.name], field.type) for field in INDEX], schema=INDEX)


# A batch of long videos must not fill the memory.
_GROUP_BYTES = 64 << 20


def embedded(
    rows: Sequence[list[EncodedSample]], policies: Mapping[str, MediaPolicy], drop: Callable[[Dropped], None]
) -> Iterator[list[list[EncodedSample]]]:
    """Yield rows with the bytes of their samples' media, in groups of bounded size; paths stay, for messages.

    Args:
        rows: the samples of each row.
        policies: media access policy of each source, by the source's label.
        drop: called with each row that has a medium which became unreadable after it was measured.
    """
    group: list[list[EncodedSample]] = []
    size = 0
    for row in rows:
        try:
            group.append([_with_bytes(sample, policies[sample.source]) for sample in row])
        except MediaProblem as problem:
            drop(Dropped(row[0].source, row[0].row, problem.reason, problem.detail))
            continue
        files = (file for sample in group[-1] for medium in sample.media for file in files_of(medium))
        size += sum(len(data) for _, data in files if data is not None)
        if size > _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _with_bytes(sample: EncodedSample, policy: MediaPolicy) -> EncodedSample:
    def read(path: str | None, data: bytes | None) -> bytes:
        if data is not None:
            return data
        with open_medium(MediaRef(path, policy=policy), storage.ROWS_BLOCK) as file:
            return file.read()

    def files(medium: Any) -> dict[str, Any]:
        path = None if medium.path is None else storage.masked(medium.path)
        if not isinstance(medium, EncodedVideo) or not medium.frames:
            return {"path": path, "data": read(medium.path, medium.data)}
        frames = [(None if name is None else storage.masked(name), read(name, data)) for name, data in medium.frames]
        return {"path": path, "data": None, "frames": tuple(frames)}

    kinds: dict[str, tuple[Any, ...]] = {"images": sample.images, "audios": sample.audios, "videos": sample.videos}
    embedded_media: dict[str, Any] = {
        kind: tuple(replace(medium, **files(medium)) for medium in media) for kind, media in kinds.items()
    }
    return replace(sample, **embedded_media)
