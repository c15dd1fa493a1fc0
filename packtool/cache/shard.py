"""The columns of a cache's files, and the writer of shards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packtool import storage
from packtool.encode.encoded import EncodedAudio, EncodedImage, EncodedSample, EncodedVideo, files_of
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
"""The columns of a shard, which has a row for each sample: the fields of ``EncodedSample`` and of its media.

``turns``: start and end of each assistant turn that can be trained, [start, end, start, end, ...]. ``loss_scale``:
weight of each label; null if all are 1. ``truncated``: number of tokens removed.
"""

PARTS = pa.schema(
    [
        ("part", pa.struct([(name, pa.int32()) for name in ("turn", "num_turns", "response", "num_responses")])),
        ("borders", _INTS),
    ]
)
"""Additional columns if rows may become several samples, by ``--expand-turns`` or because they have several responses.

``part``: which part of its row a sample is; null for a whole row. ``borders``: where its turns begin and end.
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
        ("num_patches", pa.int32()),
    ]
)
"""The columns of an index, which has a row for each sample; ``channel`` is a position in the manifest's list, or -1.

Older caches lack the last column or the last three, from which the cost of vision and audio towers is estimated:
placeholder tokens of sounds, and the sums over frames of (patches of the frame)^2 and of patches.
"""

UNKNOWN = -1
"""Value in the columns ``ADDED_COLUMNS`` for a cache that lacks them."""
ADDED_COLUMNS = ("audio_tokens", "patch_squares", "num_patches")


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
"""A prefix of a sample: the fields of ``PrefixHashes``."""

OLD_PREFIX = pa.struct([field for field in PREFIX if field.name != "target_tokens"])
"""The fields of a prefix in older caches."""

PREFIXES = pa.schema([("prefixes", pa.list_(PREFIX))])
"""The column of ``prefixes.arrow``; a row holds prefixes of the sample in the same row of the index, shortest first."""


def with_added_columns(table: pa.RecordBatch | pa.Table) -> pa.RecordBatch | pa.Table:
    """Add the columns that the index of an older cache lacks, filled with ``UNKNOWN``."""
    for name in ADDED_COLUMNS:
        if name not in table.schema.names:
            field = INDEX.field(name)
            table = table.append_column(field, pa.repeat(pa.scalar(UNKNOWN, field.type), table.num_rows))
    return table


def _feature(kind: pa.DataType) -> dict[str, Any]:
    """Return the description of a column's type in ``dataset_info.json``."""
    if pa.types.is_list(kind):
        return {"feature": _feature(kind.value_type), "_type": "List"}
    if pa.types.is_struct(kind):
        return {kind.field(i).name: _feature(kind.field(i).type) for i in range(kind.num_fields)}
    return {"dtype": str(kind), "_type": "Value"}


def samples_schema(has_parts: bool) -> pa.Schema:
    """Return the columns of a shard; ``has_parts``: rows may become several samples."""
    return pa.schema([*SAMPLES, *PARTS]) if has_parts else SAMPLES


def write_dataset_files(directory: str, split: str, files: list[str], fingerprint: str, has_parts: bool) -> None:
    """Write the two files with which ``datasets.load_from_disk`` reads the shards ``files`` of a split."""
    features = {field.name: _feature(field.type) for field in samples_schema(has_parts)}
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    state: dict[str, Any] = {
        "_data_files": [{"filename": name} for name in files],
        "_fingerprint": fingerprint,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": split,
    }
    for name, content in (("dataset_info.json", info), ("state.json", state)):
        storage.publish(storage.join(directory, split, name), json.dumps(content, indent=1).encode())


def arrow_bytes(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, new: Callable[..., pa.RecordBatchWriter] = pa.ipc.new_file
) -> bytes:
    """Return record batches as the bytes of an Arrow file; of an Arrow stream if ``new`` is ``pa.ipc.new_stream``."""
    sink = pa.BufferOutputStream()
    with new(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def write_arrow_file(path: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> str:
    """Write record batches as one Arrow file and return its SHA-256."""
    with AtomicFile(path) as file, pa.ipc.new_file(pa.PythonFile(file, mode="w"), schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return file.digest.hexdigest()


IndexColumns = dict[str, npt.NDArray[np.integer[Any]]]
"""The index columns of some samples, (S,) each."""


class ShardWriter:
    """A shard that is written in batches of samples and appears under its path on ``close``."""

    def __init__(self, path: str, has_parts: bool = False) -> None:
        self._file = AtomicFile(path)
        self._schema = samples_schema(has_parts)
        self._writer = pa.ipc.new_stream(pa.PythonFile(self._file, mode="w"), self._schema)

    def write(self, samples: Sequence[EncodedSample]) -> None:
        """Append samples as one record batch."""
        if samples:
            self._writer.write_batch(_batch(samples, self._schema))

    def close(self) -> tuple[str, FileState]:
        """Finish the file; return its SHA-256, and its size and modification time as the store has them."""
        self._writer.close()
        return self._file.digest.hexdigest(), self._file.commit()

    def discard(self) -> None:
        self._file.discard()


MEDIA_COLUMNS = {"data": "bytes", "num_samples": "samples", "num_features": "features", "num_tokens": "tokens"}
"""Columns of media whose names differ from those of the fields."""


def media_row(medium: EncodedImage | EncodedVideo | EncodedAudio) -> dict[str, Any]:
    """Return a medium as an element of the column ``images``, ``videos`` or ``audios``."""
    row = {MEDIA_COLUMNS.get(name, name): value for name, value in vars(medium).items()}
    if isinstance(medium, EncodedVideo):
        row["frames"] = [{"path": path, "bytes": data} for path, data in medium.frames]
        row["audio"] = None if medium.audio is None else media_row(medium.audio)
    return row


def _batch(samples: Sequence[EncodedSample], schema: pa.Schema) -> pa.RecordBatch:
    """Return one or more samples as rows of a shard with this schema: ``SAMPLES``, perhaps with ``PARTS``."""
    arrays = []
    for column in schema:
        name = "num_truncated" if column.name == "truncated" else column.name
        values: list[Any] = [getattr(sample, name) for sample in samples]
        if name in ("input_ids", "labels", "turns"):
            offsets = np.cumsum([0, *map(len, values)], dtype=np.int32)
            flat = pa.array(np.concatenate(values), pa.int32())
            arrays.append(pa.ListArray.from_arrays(pa.array(offsets), flat))
            continue
        if name in ("images", "videos", "audios"):
            values = [list(map(media_row, media)) for media in values]
        elif name == "part":
            values = [None if part is None else vars(part) for part in values]
        arrays.append(pa.array(values, column.type))
    return pa.record_batch(arrays, schema=schema)


def num_targets(sample: EncodedSample) -> int:
    """Count the tokens with loss: labels from the second token on, because no token predicts the first."""
    return int(np.count_nonzero(sample.labels[1:] >= 0))


def _targets_of(samples: Sequence[EncodedSample]) -> npt.NDArray[np.int32]:
    """Return ``num_targets`` of S samples with at least one token each, int32 (S,)."""
    if not samples:
        return np.empty(0, np.int32)
    labels = [sample.labels for sample in samples]
    starts = np.cumsum([0, *map(len, labels[:-1])])  # of the samples, in their joined labels
    is_target = np.concatenate(labels) >= 0
    is_target[starts] = False  # no token predicts the first one
    return np.add.reduceat(is_target, starts, dtype=np.int32)


def index_columns(
    samples: Sequence[EncodedSample], shard: int, first_row: int, channel_codes: dict[str, int]
) -> IndexColumns:
    """Return the index columns of S consecutive samples of a shard, (S,) each; ``first_row``: row of the first one.

    ``channel_codes``: number of each channel by name, to which new channels are added.
    """
    num_samples = len(samples)
    return {
        "shard": np.full(num_samples, shard, np.int32),
        "row_in_shard": np.arange(first_row, first_row + num_samples, dtype=np.int32),
        "length": np.array([sample.length for sample in samples], np.int32),
        "target_tokens": _targets_of(samples),
        "media_tokens": np.array([sample.num_media_tokens for sample in samples], np.int32),
        "num_images": np.array([len(sample.images) for sample in samples], np.int32),
        "num_videos": np.array([len(sample.videos) for sample in samples], np.int32),
        "num_audios": np.array([len(sample.audios) for sample in samples], np.int32),
        "channel": _number_channels(samples, channel_codes),
        "audio_tokens": np.array([sample.num_audio_tokens for sample in samples], np.int32),
        "patch_squares": np.array([sample.patch_squares for sample in samples], np.int64),
        "num_patches": np.array([sample.num_patches for sample in samples], np.int32),
    }


def _number_channels(samples: Sequence[EncodedSample], channel_codes: dict[str, int]) -> npt.NDArray[np.int32]:
    """Return the number of each sample's channel, (S,), -1 for none; new channels are added to ``channel_codes``."""
    names = [sample.channel for sample in samples]
    numbers = [-1 if name is None else channel_codes.setdefault(name, len(channel_codes)) for name in names]
    return np.array(numbers, np.int32)


def index_batch(columns: Mapping[str, npt.NDArray[Any]], schema: pa.Schema = INDEX) -> pa.RecordBatch:
    """Return index columns, (S,) each, as a record batch."""
    return pa.record_batch([pa.array(columns[field.name], field.type) for field in schema], schema=schema)


# Size of media after which a group of rows ends, so that long videos do not fill the memory.
_GROUP_BYTES = 64 << 20


def embed_media(
    rows: Sequence[list[EncodedSample]], policies: Mapping[str, MediaPolicy], drop: Callable[[Dropped], None]
) -> Iterator[list[list[EncodedSample]]]:
    """Read the media files of samples and yield the rows with their bytes, in groups of about 64 MiB.

    ``drop`` is called for each row with a medium that cannot be read, which is left out.
    """
    group: list[list[EncodedSample]] = []
    num_bytes = 0  # of the media in the group
    for samples in rows:
        try:
            embedded_samples = [_with_bytes(sample, policies[sample.source]) for sample in samples]
        except MediaProblem as problem:
            drop(Dropped(samples[0].source, samples[0].row, problem.reason, problem.detail))
            continue
        group.append(embedded_samples)
        files = [file for sample in embedded_samples for medium in sample.media for file in files_of(medium)]
        num_bytes += sum(len(data) for _, data in files if data is not None)
        if num_bytes > _GROUP_BYTES:
            yield group
            group = []
            num_bytes = 0
    if group:
        yield group


def _with_bytes(sample: EncodedSample, policy: MediaPolicy) -> EncodedSample:
    """Return a sample with the bytes of its media files; raise a MediaProblem if one cannot be read."""
    return replace(
        sample,
        images=tuple(_embedded(image, policy) for image in sample.images),
        audios=tuple(_embedded(audio, policy) for audio in sample.audios),
        videos=tuple(_embedded(video, policy) for video in sample.videos),
    )


def _embedded(medium: Any, policy: MediaPolicy) -> Any:
    """Return an image, sound or video with its bytes, or with those of its frames if these are separate files."""
    if isinstance(medium, EncodedVideo) and medium.frames:
        frames = tuple((_masked(path), _read_medium(path, data, policy)) for path, data in medium.frames)
        return replace(medium, path=_masked(medium.path), data=None, frames=frames)
    return replace(medium, path=_masked(medium.path), data=_read_medium(medium.path, medium.data, policy))


def _read_medium(path: str | None, data: bytes | None, policy: MediaPolicy) -> bytes:
    """Return the bytes of a media file: ``data`` if they are known."""
    if data is not None:
        return data
    with open_medium(MediaRef(path, policy=policy), storage.ROWS_BLOCK) as file:
        return file.read()


def _masked(path: str | None) -> str | None:
    return None if path is None else storage.masked(path)
