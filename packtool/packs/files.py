"""Files of packs for other trainers: Arrow and Parquet tables, Megatron's Parquet, tar files of JSON and media."""

from __future__ import annotations

import io
import json
import struct
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from packtool.batch.positions import sample_positions
from packtool.batch.spec import InputSpec
from packtool.cache.shard import SAMPLES, HashingSink, media_row
from packtool.config.plan import PacksFormat
from packtool.constants import IGNORE_INDEX
from packtool.encode.encoded import EncodedSample, IntArray
from packtool.errors import ConfigError
from packtool.media.suffix import suffix_of
from packtool.storage import AtomicFile


@dataclass(frozen=True, eq=False)
class Pack:
    """Samples laid end to end, L tokens in all.

    Args:
        number: of the pack in the plan.
        positions_in_cache: of its S samples, int64 (S,).
        samples: in their order.
        position_ids: (1, L) of a text model, (4, L) [text, t, h, w] with M-RoPE; each sample begins at 0. int64, or
            float32 where an Omni model's seconds are fractions.
    """

    number: int
    positions_in_cache: npt.NDArray[np.int64]
    samples: tuple[EncodedSample, ...]
    position_ids: npt.NDArray[Any]

    @classmethod
    def of(cls, number: int, places: npt.NDArray[np.int64], samples: Sequence[EncodedSample], spec: InputSpec) -> Pack:
        """Lay samples end to end.

        Raises:
            DataError: if an Omni model cannot place a sample's videos.
        """
        if spec.has_mrope:
            rows = np.concatenate([sample_positions(sample, spec) for sample in samples], axis=1)
        else:
            rows = np.concatenate([np.arange(sample.length) for sample in samples])[None]
        return cls(number, places, tuple(samples), rows)

    @property
    def input_ids(self) -> IntArray:
        """int32 (L,)."""
        return np.concatenate([sample.input_ids for sample in self.samples])

    @property
    def labels(self) -> IntArray:
        """int32 (L,): the token itself where it is a target, else -100. Not shifted; nothing predicts a first token."""
        labels = np.concatenate([sample.labels for sample in self.samples])
        labels[self.cu_seqlens[:-1]] = IGNORE_INDEX
        return labels

    @property
    def cu_seqlens(self) -> IntArray:
        """int32 (S + 1,): offset of each sample, and L."""
        lengths = [sample.length for sample in self.samples]
        return np.cumsum([0, *lengths]).astype(np.int32)

    @property
    def loss_scale(self) -> npt.NDArray[np.float32] | None:
        """float32 (L,), the weight of each label; None if all weigh 1."""
        if all(sample.loss_scale is None for sample in self.samples):
            return None
        ones = (np.ones(sample.length, np.float32) for sample in self.samples)
        scales = zip((sample.loss_scale for sample in self.samples), ones, strict=True)
        return np.concatenate([one if scale is None else scale for scale, one in scales])

    @property
    def loss_mask(self) -> npt.NDArray[np.uint8]:
        """uint8 (L,): whether the next token of the same sample is a target, as in Megatron's packed files."""
        trained = self.labels != IGNORE_INDEX
        return np.append(trained[1:], False).astype(np.uint8)

    def media(self) -> Iterator[tuple[str, list[Any]]]:
        """Kind and media of all samples, in the order of their placeholder tokens."""
        for kind in ("images", "videos", "audios"):
            yield kind, [medium for sample in self.samples for medium in getattr(sample, kind)]


SUFFIXES: dict[PacksFormat, str] = {
    "parquet": ".parquet",
    "arrow": ".arrow",
    "megatron": ".idx.parquet",
    "webdataset": ".tar",
    "energon": ".tar",
}
_INTS = pa.list_(pa.int32())
_MEDIA = ("images", "videos", "audios")


def _schema(has_fractions: bool) -> pa.Schema:
    """Columns of the Arrow and Parquet files, one row per pack; positions of Omni models may have fractions."""
    positions = pa.list_(pa.list_(pa.float32() if has_fractions else pa.int32()))
    return pa.schema(
        [
            ("input_ids", _INTS),
            ("labels", _INTS),
            ("loss_scale", pa.list_(pa.float32())),
            ("position_ids", positions),
            ("cu_seqlens", _INTS),
            *((kind, SAMPLES.field(kind).type) for kind in _MEDIA),
            ("sample", pa.list_(pa.int64())),
            ("source", pa.list_(pa.string())),
            ("row", pa.list_(pa.int64())),
            ("channel", pa.list_(pa.string())),
        ]
    )


def _row(pack: Pack) -> dict[str, Any]:
    return {
        "input_ids": pack.input_ids,
        "labels": pack.labels,
        "loss_scale": pack.loss_scale,
        "position_ids": list(pack.position_ids),
        "cu_seqlens": pack.cu_seqlens,
        **{kind: list(map(media_row, media)) for kind, media in pack.media()},
        "sample": pack.positions_in_cache,
        "source": [sample.source for sample in pack.samples],
        "row": [sample.row for sample in pack.samples],
        "channel": [sample.channel for sample in pack.samples],
    }


class PacksFile(Protocol):
    """A file to which packs are written one after the other."""

    def write(self, pack: Pack) -> None:
        """Append a pack."""

    def close(self) -> dict[str, bytes]:
        """Finish writing to the sink; return companion files by suffix."""


class TableFile:
    """An Arrow or Parquet file with one row per group, so that packs are read one at a time."""

    def __init__(self, sink: HashingSink, kind: PacksFormat, has_fractions: bool) -> None:
        self._schema = _schema(has_fractions)
        target = pa.PythonFile(sink, mode="w")
        self._writer: Any = (
            pq.ParquetWriter(target, self._schema, compression="zstd")
            if kind == "parquet"
            else pa.ipc.new_stream(target, self._schema)
        )

    def write(self, pack: Pack) -> None:
        """See ``PacksFile``."""
        row = _row(pack)
        columns = [pa.array([row[field.name]], field.type) for field in self._schema]
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))

    def close(self) -> dict[str, bytes]:
        """See ``PacksFile``."""
        self._writer.close()
        return {}


class MegatronFile:
    """Packed Parquet as NeMo and Megatron Bridge read it: tokens, their mask and where samples begin.

    Masks are shifted as in their files: 1 where the *next* token is a target. Their readers drop each sample's last
    token, which predicts nothing, count positions from 0 in each sample, and support neither media nor weights.
    """

    SCHEMA = pa.schema([("input_ids", _INTS), ("loss_mask", pa.list_(pa.uint8())), ("seq_start_id", _INTS)])
    _ROWS_AT_ONCE = 500

    def __init__(self, sink: HashingSink) -> None:
        self._writer = pq.ParquetWriter(pa.PythonFile(sink, mode="w"), self.SCHEMA, compression="zstd")
        self._rows: list[dict[str, Any]] = []

    def write(self, pack: Pack) -> None:
        """See ``PacksFile``.

        Raises:
            ConfigError: if a sample has weights other than 0 and 1.
        """
        for sample in pack.samples:
            if sample.loss_scale is not None:
                weights = np.unique(sample.loss_scale[sample.labels != IGNORE_INDEX])
                if len(others := weights[~np.isin(weights, (0, 1))]):
                    raise ConfigError(
                        f"--format megatron has no place for weights of the loss: row {sample.row} of {sample.source} "
                        f"has {others[0]:g}",
                        "Export with a --loss-scale without weights, or take another format.",
                    )
        scale = pack.loss_scale
        mask = pack.loss_mask if scale is None else pack.loss_mask * np.append(scale[1:] != 0, False).astype(np.uint8)
        self._rows.append(
            {"input_ids": pack.input_ids, "loss_mask": mask, "seq_start_id": pack.cu_seqlens[:-1].tolist()}
        )
        if len(self._rows) == self._ROWS_AT_ONCE:
            self._flush()

    def close(self) -> dict[str, bytes]:
        """See ``PacksFile``."""
        self._flush()
        self._writer.close()
        return {}

    def _flush(self) -> None:
        columns = [pa.array([row[field.name] for row in self._rows], field.type) for field in self.SCHEMA]
        if self._rows:
            self._writer.write_batch(pa.record_batch(columns, schema=self.SCHEMA))
        self._rows = []


class TarFile:
    """A tar file in which each pack has a JSON document and, where they are embedded, the files of its media.

    Members of one pack have equal names up to the first dot, as in WebDataset: ``000000007.json``,
    ``000000007.image0.jpg``. A medium's entry in the document has the rest of its file's name.

    Args:
        is_indexed: write offsets of the packs beside the file, for Megatron Energon.
    """

    def __init__(self, sink: HashingSink, is_indexed: bool) -> None:
        # A stream without seeking, as object stores require.
        target: Any = sink
        self._tar = tarfile.open(fileobj=target, mode="w|", format=tarfile.PAX_FORMAT)  # noqa: SIM115
        self._offsets: list[int] = []
        self._is_indexed = is_indexed

    def write(self, pack: Pack) -> None:
        """See ``PacksFile``."""
        self._offsets.append(self._tar.offset)
        row = _row(pack)
        files = {name: data for kind in _MEDIA for name, data in _extract_files(kind, row[kind])}
        document = {name: value for name, value in row.items() if value is not None}
        self._add(f"{pack.number:09d}.json", json.dumps(document, default=np.ndarray.tolist).encode())
        for name, data in files.items():
            self._add(f"{pack.number:09d}.{name}", data)

    def close(self) -> dict[str, bytes]:
        """See ``PacksFile``."""
        end = self._tar.offset
        self._tar.close()
        return {".idx": struct.pack(f"<{len(self._offsets) + 1}Q", *self._offsets, end)} if self._is_indexed else {}

    def _add(self, name: str, data: bytes) -> None:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        self._tar.addfile(info, io.BytesIO(data))


def open_file(file: AtomicFile, kind: PacksFormat, has_fractions: bool) -> tuple[HashingSink, PacksFile]:
    """Open a new file of packs; return the sink of its bytes, and its writer."""
    sink = HashingSink(file)
    if kind == "megatron":
        return sink, MegatronFile(sink)
    if kind in ("webdataset", "energon"):
        return sink, TarFile(sink, is_indexed=kind == "energon")
    return sink, TableFile(sink, kind, has_fractions)


def energon_files(num_packs: dict[str, int], split: str) -> dict[str, bytes]:
    """Metadata of a crude dataset of Megatron Energon, as files by name.

    Args:
        num_packs: of each tar file.
        split: of all of them.
    """
    parts: dict[str, list[str]] = {"train": [], "val": [], "test": []}
    parts[split if split in parts else "train"] = list(num_packs)
    kind = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset", "subflavors": {"packtool": "packs"}}
    return {
        ".nv-meta/.info.json": _json({"shard_counts": num_packs}),
        ".nv-meta/split.yaml": _json({"exclude": [], "split_parts": parts}),  # JSON is YAML
        ".nv-meta/dataset.yaml": _json(kind),
    }


def _json(value: object) -> bytes:
    return json.dumps(value, indent=1).encode()


def _extract_files(kind: str, media: Sequence[dict[str, Any]]) -> Iterator[tuple[str, bytes]]:
    """Replace the bytes of embedded files by names; yield names and bytes."""
    for i, medium in enumerate(media):
        stem = f"{kind.removesuffix('s')}{i}"
        entries = [(stem, medium)]
        entries += [(f"{stem}frame{j}", frame) for j, frame in enumerate(medium.get("frames") or ())]
        for name, entry in entries:
            data = entry.pop("bytes")
            if data is not None:
                entry["file"] = f"{name}{suffix_of(entry['path'], data)}"
                yield entry["file"], data
