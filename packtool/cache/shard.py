"""One shard of a cache: an Arrow stream of samples, and its part of the index."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packtool.cache.schema import INDEX, samples_schema
from packtool.encode.encoded import EncodedAudio, EncodedImage, EncodedSample, EncodedVideo, IntArray
from packtool.storage import AtomicFile, FileState

IndexPart = dict[str, npt.NDArray[np.integer[Any]]]
"""The index columns of some samples, (S,) each."""


class ShardWriter:
    """Writes samples in batches; the file appears whole on ``close`` or not at all.

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
        """Finish the file: its SHA-256, and size and time as the place has them."""
        self._writer.close()
        state = self._file.commit()
        return self._sink.digest.hexdigest(), state

    def discard(self) -> None:
        """Forget what was written."""
        self._file.discard()


class HashingSink:
    """What pyarrow writes to: hashes on the way to the file."""

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
        """Forget the file. A writer that is cleared away afterwards may still write its end, to nowhere."""
        if self._file is not None:
            self._file.discard()
        self._file = None

    def flush(self) -> None:
        """Do nothing; pyarrow calls it, and every write goes to the file at once."""

    def close(self) -> None:
        """The file is committed by whoever made it."""
        self.closed = True


def _ints(arrays: Sequence[IntArray]) -> pa.ListArray:
    offsets = np.zeros(len(arrays) + 1, np.int32)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    values = np.concatenate(arrays) if arrays else np.zeros(0, np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, pa.int32()))


def _image(image: EncodedImage) -> dict[str, object]:
    return {
        "path": image.path,
        "bytes": image.data,
        "height": image.height,
        "width": image.width,
        "grid": list(image.grid),
        "tokens": image.num_tokens,
    }


def _audio(audio: EncodedAudio) -> dict[str, object]:
    sound = {"samples": audio.num_samples, "features": audio.num_features, "tokens": audio.num_tokens}
    return {"path": audio.path, "bytes": audio.data, **sound}


def _video(video: EncodedVideo) -> dict[str, object]:
    return {
        "path": video.path,
        "bytes": video.data,
        "frames": [{"path": path, "bytes": data} for path, data in video.frames],
        "height": video.height,
        "width": video.width,
        "num_frames": video.num_frames,
        "fps": video.fps,
        "indices": list(video.indices),
        "grid": list(video.grid),
        "seconds_per_grid": video.seconds_per_grid,
        "tokens": video.num_tokens,
        "audio": _audio(video.audio) if video.audio is not None else None,
    }


def media_columns(media: Mapping[str, Sequence[Any]]) -> dict[str, list[dict[str, object]]]:
    """Media as the columns ``images``, ``videos`` and ``audios`` hold them, by these names."""
    makers: dict[str, Callable[[Any], dict[str, object]]] = {"images": _image, "videos": _video, "audios": _audio}
    return {kind: [makers[kind](medium) for medium in found] for kind, found in media.items()}


def _batch(samples: Sequence[EncodedSample], schema: pa.Schema) -> pa.RecordBatch:
    def column(name: str, values: Sequence[object]) -> pa.Array:
        return pa.array(values, schema.field(name).type)

    columns = {
        "input_ids": _ints([sample.input_ids for sample in samples]),
        "labels": _ints([sample.labels for sample in samples]),
        "length": pa.array([sample.length for sample in samples], pa.int32()),
        "turns": _ints([sample.turns for sample in samples]),
        "loss_scale": column("loss_scale", [sample.loss_scale for sample in samples]),
        "images": column("images", [[_image(image) for image in sample.images] for sample in samples]),
        "videos": column("videos", [[_video(video) for video in sample.videos] for sample in samples]),
        "audios": column("audios", [[_audio(audio) for audio in sample.audios] for sample in samples]),
        "channel": pa.array([sample.channel for sample in samples], pa.string()),
        "source": pa.array([sample.source for sample in samples], pa.string()),
        "row": pa.array([sample.row for sample in samples], pa.int64()),
        "truncated": pa.array([sample.num_truncated for sample in samples], pa.int32()),
    }
    if "part" in schema.names:
        columns["part"] = column("part", [None if sample.part is None else vars(sample.part) for sample in samples])
        columns["borders"] = column("borders", [sample.borders for sample in samples])
    return pa.record_batch([columns[name] for name in schema.names], schema=schema)


def num_targets(sample: EncodedSample) -> int:
    """Tokens that carry loss: labels from the second position on, since nothing comes before the first."""
    return int(np.count_nonzero(sample.labels[1:] >= 0))


def index_part(
    samples: Sequence[EncodedSample], shard: int, first_row: int, channel_codes: dict[str, int]
) -> IndexPart:
    """The index columns of samples that follow one another in a shard, (S,) each; new channels get the next code."""
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
    """Index columns, (S,) each, as a record batch in the schema's types."""
    arrays = [pa.array(columns[field.name], field.type) for field in INDEX]
    return pa.record_batch(arrays, schema=INDEX)
