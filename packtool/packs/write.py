"""``packtool pack``: writes packs to files for other trainers, in parallel, and then a manifest.

Formats are Arrow and Parquet tables, Megatron's packed Parquet, and tar files of JSON and media.
"""

from __future__ import annotations

import io
import json
import struct
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from packtool import storage
from packtool.batch.positions import sample_positions
from packtool.batch.spec import InputSpec
from packtool.cache.local import LocalCopies
from packtool.cache.manifest import Manifest
from packtool.cache.plan_file import read_plan_of
from packtool.cache.reader import CacheReader
from packtool.cache.shard import SAMPLES, embed_media, media_row
from packtool.config.plan import PackConfig, PacksFormat
from packtool.constants import IGNORE_INDEX, PACKS_MANIFEST_NAME, VERSION
from packtool.encode.encoded import EncodedSample, IntArray, files_of
from packtool.encode.model_files import ModelFiles
from packtool.errors import ConfigError, DataError, MediaError, MismatchError
from packtool.media.suffix import is_media, suffix_of
from packtool.planning.packing import map_on_processes, pack
from packtool.progress import Progress
from packtool.rows.media_policy import policy_for_cache
from packtool.rows.sample import Dropped
from packtool.storage import AtomicFile

FORMAT = "packtool packs 1"

_UNSHARED = "Plan again with --share-prefix false: written packs contain full samples."
SUFFIXES: dict[PacksFormat, str] = {
    "parquet": ".parquet",
    "arrow": ".arrow",
    "megatron": ".idx.parquet",
    "webdataset": ".tar",
    "energon": ".tar",
}
_INTS = pa.list_(pa.int32())
_MEDIA = ("images", "videos", "audios")


@dataclass(frozen=True, eq=False)
class Pack:
    """S samples, at ``positions_in_cache`` (S,), that are concatenated to L tokens; ``number`` is that in the plan."""

    number: int
    positions_in_cache: npt.NDArray[np.int64]
    samples: tuple[EncodedSample, ...]
    spec: InputSpec

    @property
    def position_ids(self) -> npt.NDArray[Any]:
        """Positions, which begin at 0 in each sample: (1, L), or (4, L) [text, t, h, w] for models with M-RoPE.

        int64, or float32 for Omni models whose times are fractions of seconds.
        """
        if self.spec.has_mrope:
            return np.concatenate([sample_positions(sample, self.spec) for sample in self.samples], axis=1)
        return np.concatenate([np.arange(sample.length) for sample in self.samples])[None]

    @property
    def input_ids(self) -> IntArray:
        """Token ids, int32 (L,)."""
        return np.concatenate([sample.input_ids for sample in self.samples])

    @property
    def labels(self) -> IntArray:
        """Labels, int32 (L,), not shifted: the token itself if it is a target, otherwise -100."""
        labels = np.concatenate([sample.labels for sample in self.samples])
        # No token of a sample predicts its first token.
        labels[self.cu_seqlens[:-1]] = IGNORE_INDEX
        return labels

    @property
    def cu_seqlens(self) -> IntArray:
        """Offset of each sample, and L; int32 (S + 1,)."""
        return np.cumsum([0, *(sample.length for sample in self.samples)]).astype(np.int32)

    @property
    def loss_scale(self) -> npt.NDArray[np.float32] | None:
        """Weight of each label, float32 (L,); None if all weights are 1."""
        if all(sample.loss_scale is None for sample in self.samples):
            return None
        scales = ((sample.loss_scale, sample.length) for sample in self.samples)
        return np.concatenate([np.ones(length, np.float32) if scale is None else scale for scale, length in scales])

    def media(self) -> Iterator[tuple[str, list[Any]]]:
        """Yield each kind of media with the media of all samples, in the order of their placeholder tokens."""
        for kind in _MEDIA:
            yield kind, [medium for sample in self.samples for medium in getattr(sample, kind)]


def _schema(has_fractions: bool) -> pa.Schema:
    """Return the columns of Arrow and Parquet files, with one row per pack; fractional positions are float32."""
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
    """Return a pack as a row of an Arrow or Parquet file, or as a JSON document; media are dicts."""
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


_MEGATRON_SCHEMA = pa.schema([("input_ids", _INTS), ("loss_mask", pa.list_(pa.uint8())), ("seq_start_id", _INTS)])
_MEGATRON_GROUP_SIZE = 500


def _megatron_row(pack: Pack) -> dict[str, Any]:
    """Return a pack as NeMo and Megatron Bridge read it; the mask is 1 where the *next* token is a target."""
    for sample in pack.samples:
        _check_weights(sample)
    is_target = pack.labels != IGNORE_INDEX  # never the first token of a sample
    weights = pack.loss_scale
    if weights is not None:
        is_target &= weights != 0
    loss_mask = np.append(is_target[1:], False).astype(np.uint8)
    return {"input_ids": pack.input_ids, "loss_mask": loss_mask, "seq_start_id": pack.cu_seqlens[:-1].tolist()}


def _check_weights(sample: EncodedSample) -> None:
    """Raise a ConfigError if a target has a loss weight other than 0 and 1."""
    if sample.loss_scale is None:
        return
    weights = sample.loss_scale[sample.labels != IGNORE_INDEX]
    unsupported = np.unique(weights[(weights != 0) & (weights != 1)])
    if len(unsupported):
        raise ConfigError(
            f"--format megatron does not support loss weights other than 0 and 1: row {sample.row} of "
            f"{sample.source} has {unsupported[0]:g}",
            "Export with a --loss-scale without weights, or choose another --format.",
        )


def _write_table(
    file: AtomicFile,
    packs: Iterable[Pack],
    schema: pa.Schema,
    make_row: Callable[[Pack], dict[str, Any]],
    *,
    is_arrow: bool = False,
    group_size: int = 1,
) -> None:
    """Write an Arrow or Parquet file with a row for each pack; readers load ``group_size`` rows at once."""
    make_writer: Any = pa.ipc.new_stream if is_arrow else partial(pq.ParquetWriter, compression="zstd")
    writer = make_writer(pa.PythonFile(file, mode="w"), schema)
    rows = map(make_row, packs)
    while group := list(islice(rows, group_size)):
        columns = [pa.array([row[field.name] for row in group], field.type) for field in schema]
        writer.write_batch(pa.record_batch(columns, schema=schema))
    writer.close()


def _write_tar(file: AtomicFile, packs: Iterable[Pack]) -> bytes:
    """Write the packs as a tar file, named as in WebDataset: ``000000007.json`` and the media files of pack 7.

    Returns the index that Megatron Energon reads: byte offsets of the packs and of the last one's end, uint64 each.
    """
    target: Any = file
    # Mode "w|" never seeks, as object stores require.
    tar = tarfile.open(fileobj=target, mode="w|", format=tarfile.PAX_FORMAT)  # noqa: SIM115
    offsets = []
    for each in packs:
        offsets.append(tar.offset)
        for name, data in _files_of_pack(each).items():
            header = tarfile.TarInfo(f"{each.number:09d}.{name}")
            header.size = len(data)
            tar.addfile(header, io.BytesIO(data))
    offsets.append(tar.offset)
    tar.close()
    return struct.pack(f"<{len(offsets)}Q", *offsets)


def _files_of_pack(pack: Pack) -> dict[str, bytes]:
    """Return the files of a pack in a tar file, by the part of their name after the first dot: JSON, then media."""
    row = _row(pack)
    media_files: dict[str, bytes] = {}
    for kind in _MEDIA:
        media_files.update(_extract_files(kind, row[kind]))  # replaces the bytes in the row by file names
    document = {name: value for name, value in row.items() if value is not None}
    return {"json": json.dumps(document, default=np.ndarray.tolist).encode(), **media_files}


def _json(value: object) -> bytes:
    return json.dumps(value, indent=1).encode()


def _extract_files(kind: str, media: Sequence[dict[str, Any]]) -> Iterator[tuple[str, bytes]]:
    """Yield names and bytes of embedded media files, and replace the bytes in ``media`` by these names."""
    for i, medium in enumerate(media):
        stem = f"{kind.removesuffix('s')}{i}"
        entries = [(stem, medium)]
        entries += [(f"{stem}frame{j}", frame) for j, frame in enumerate(medium.get("frames") or ())]
        for name, entry in entries:
            data = entry.pop("bytes")
            if data is not None:
                entry["file"] = f"{name}{suffix_of(entry['path'], data)}"
                yield entry["file"], data


@dataclass(frozen=True)
class PacksSummary:
    """Figures of the written packs; ``filtered`` samples are in none: too long, or missing in ``--plan``."""

    output_dir: str
    format: str
    num_packs: int
    num_samples: int
    filtered: int
    tokens: int
    target_tokens: int
    packing_length: int
    num_files: int

    @classmethod
    def of(cls, packing: _Packing, reader: CacheReader, config: PackConfig, num_files: int) -> PacksSummary:
        """Count the samples and tokens of packs."""
        samples = packing.samples
        return cls(
            output_dir=storage.normalize(config.output_dir),
            format=config.format,
            num_packs=len(packing.offsets) - 1,
            num_samples=len(samples),
            filtered=packing.num_filtered,
            tokens=int(reader.index.length[samples].sum()),
            target_tokens=int(reader.index.target_tokens[samples].sum()),
            packing_length=packing.packing_length,
            num_files=num_files,
        )


class _FileJob(NamedTuple):
    """One file to write: its name, the number of its first pack, and positions of each pack's samples."""

    config: PackConfig
    name: str
    first_pack: int
    packs: list[npt.NDArray[np.int64]]


def write_packs(config: PackConfig, progress: Progress) -> PacksSummary:
    """Write packs (groups of samples for one sequence) to files, for trainers other than packtool's.

    The samples come from caches of tokens. They are packed here, or as in a saved plan (``--plan``). Mismatches of
    caches, plan and options raise an error before anything is written; the manifest is written last.
    """
    reader = CacheReader.open(config.cached_dataset, config.split, copies=LocalCopies.of(config))
    _load_spec(config, reader.manifests[0])  # the spec is not used here, but an error is raised before packing
    packing = _pack_samples(config, reader)
    if config.format == "megatron":
        _check_no_media(packing.samples, reader)
    directory = storage.normalize(config.output_dir)
    _check_empty(directory)

    jobs = _divide_into_files(packing, config)
    file_entries = _write_files(jobs, directory, config.dataset_num_proc, progress)
    if config.format == "energon":
        _write_energon_files(directory, config.split, file_entries)
    summary = PacksSummary.of(packing, reader, config, len(file_entries))
    manifest = _manifest(config, reader, summary, file_entries)
    storage.publish(storage.join(directory, PACKS_MANIFEST_NAME), manifest)
    return summary


def _write_files(
    jobs: Sequence[_FileJob], directory: str, num_processes: int, progress: Progress
) -> list[dict[str, Any]]:
    """Write files of packs in parallel; return their entries in the manifest."""
    storage.make_directory(directory)
    progress.start("writing packs", len(jobs))
    try:
        files = map_on_processes(_write_file, jobs, num_processes, on_progress=lambda num_done: progress.advance(1))
    except BaseException:
        storage.discard_unfinished(directory)  # left behind by processes that were stopped
        raise
    progress.finish()
    return files


def _check_no_media(samples: npt.NDArray[np.int64], reader: CacheReader) -> None:
    """Check that samples, positions in the caches, have no media."""
    num_with_media = int((reader.index.media_tokens[samples] > 0).sum())
    if num_with_media:
        raise ConfigError(
            f"--format megatron does not support media, which {num_with_media:,} of {len(samples):,} samples have",
            "Choose --format energon, which supports them.",
        )


def _divide_into_files(packing: _Packing, config: PackConfig) -> list[_FileJob]:
    """Divide packs into files of ``--packs-per-file`` packs, the last of which may have fewer."""
    packs = np.split(packing.samples, packing.offsets[1:-1])  # positions of the samples of each pack
    first_packs = range(0, len(packs), config.packs_per_file)  # of each file
    jobs = []
    for number, first_pack in enumerate(first_packs):
        name = f"packs-{number:05d}-of-{len(first_packs):05d}{SUFFIXES[config.format]}"
        jobs.append(_FileJob(config, name, first_pack, packs[first_pack : first_pack + config.packs_per_file]))
    return jobs


def _write_energon_files(directory: str, split: str, files: list[dict[str, Any]]) -> None:
    """Write the metadata of a crude dataset of Megatron Energon; ``files`` are the manifest's entries of tar files."""
    num_packs = {file["file"]: file["packs"] for file in files}
    split_files: dict[str, list[str]] = {"train": [], "val": [], "test": []}
    split_files[split if split in split_files else "train"] = list(num_packs)
    kind = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset", "subflavors": {"packtool": "packs"}}
    metadata: dict[str, object] = {
        ".info.json": {"shard_counts": num_packs},
        "split.yaml": {"exclude": [], "split_parts": split_files},  # JSON is YAML
        "dataset.yaml": kind,
    }
    storage.make_directory(storage.join(directory, ".nv-meta"))
    for name, content in metadata.items():
        storage.publish(storage.join(directory, ".nv-meta", name), _json(content))


def _manifest(
    config: PackConfig, reader: CacheReader, summary: PacksSummary, file_entries: list[dict[str, Any]]
) -> bytes:
    """Return the manifest of written packs as JSON: where they come from, how many they are, and their files.

    ``file_entries`` has name, number of packs, size and checksum of each file.
    """
    identity = reader.manifests[0].identity  # the model and settings that the first cache was exported for
    media_of_caches = [str(manifest.identity.spec["media"]) for manifest in reader.manifests]
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "packtool": VERSION,
        "layout": config.format,
        "split": config.split,
        "cache": reader.fingerprint,
        "model": config.model or identity.spec["model"],
        "model_type": identity.model_type,
        "media": config.media_of(media_of_caches),
        "packs": summary.num_packs,
        "samples": summary.num_samples,
        "tokens": summary.tokens,
        "target_tokens": summary.target_tokens,
        "capacity": summary.packing_length,
        "files": file_entries,
    }
    return _json(manifest)


class _Packing(NamedTuple):
    """Positions of samples in pack order, (N,), offsets of packs, (K + 1,), and the samples that are in no pack."""

    samples: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    packing_length: int
    num_filtered: int


def _pack_samples(config: PackConfig, reader: CacheReader) -> _Packing:
    """Take the packs of ``--plan``, or pack all samples that are not too long."""
    if config.plan is not None:
        saved = read_plan_of(reader, config.plan)
        if saved.shared_tokens is not None:
            raise ConfigError(f"--plan {config.plan} has shared prefixes, which packs in files cannot have", _UNSHARED)
        return _Packing(saved.samples, saved.offsets, saved.capacity, len(reader) - len(np.unique(saved.samples)))
    lengths = reader.index.length
    max_length = min(limit or int(lengths.max()) for limit in (config.max_length, config.packing_length))
    kept = np.flatnonzero(lengths <= max_length)  # positions in the caches
    if not len(kept):
        problem = f"all {len(lengths):,} samples are longer than {max_length:,} tokens"
        raise DataError(problem, "Raise --packing-length and --max-length.")
    capacity = config.packing_length or max_length
    plan = pack(lengths[kept], capacity, config, seed=config.seed, media_tokens=reader.index.media_tokens[kept])
    return _Packing(kept[plan.samples], plan.offsets, capacity, num_filtered=len(lengths) - len(kept))


def _load_spec(config: PackConfig, manifest: Manifest) -> InputSpec:
    """Read the inputs of ``--model``, or of the model that the cache was exported for."""
    identity = manifest.identity
    model = config.model or str(identity.spec["model"])
    try:
        ModelFiles.load(model)
        return InputSpec.load(model, identity.media_limits, config)
    except ConfigError as error:
        if config.model is not None:
            raise
        problem = f"the cache was exported for {model}, which cannot be read here: {error.message}"
        raise ConfigError(problem, error.remedy or "Give the model's present directory: --model DIR.") from error


def _check_empty(directory: str) -> None:
    """Remove files of an interrupted command from the output directory; raise if it has other files."""
    names = storage.list_names(directory)
    if PACKS_MANIFEST_NAME in names:
        raise MismatchError(f"--output-dir {directory} already contains finished packs", "Choose another directory.")
    if unknown := [name for name in names if not name.startswith("packs-") and name != ".nv-meta"]:
        problem = f"--output-dir {directory} is not empty: it contains {unknown[0]}"
        raise ConfigError(problem, "Choose a new or empty directory.")
    for name in names:
        if name != ".nv-meta":
            storage.remove(storage.join(directory, name))


def _write_file(job: _FileJob) -> dict[str, Any]:
    """Write one file of packs, in a worker process; return its entry in the manifest.

    The file appears under its name when it is complete; after an error it is discarded.
    """
    config = job.config
    reader = CacheReader.open(config.cached_dataset, config.split, copies=LocalCopies.of(config))
    spec = _load_spec(config, reader.manifests[0])
    path = storage.join(config.output_dir, job.name)
    file = AtomicFile(path)
    packs = _read_packs(job, reader, spec)
    try:
        if config.format in ("webdataset", "energon"):
            index = _write_tar(file, packs)
            if config.format == "energon":
                storage.publish(f"{path}.idx", index)  # before the tar file, which is never without it
        elif config.format == "megatron":
            _write_table(file, packs, _MEGATRON_SCHEMA, _megatron_row, group_size=_MEGATRON_GROUP_SIZE)
        else:
            has_fractional_positions = spec.has_vision and spec.has_audio  # in Omni models
            schema = _schema(has_fractions=has_fractional_positions)
            _write_table(file, packs, schema, _row, is_arrow=config.format == "arrow")
        state = file.commit()
    except BaseException:
        file.discard()
        raise
    return {"file": job.name, "packs": len(job.packs), "bytes": state.size, "sha256": file.digest.hexdigest()}


def _read_packs(job: _FileJob, reader: CacheReader, spec: InputSpec) -> Iterator[Pack]:
    """Yield the packs of a file; ``--media`` decides whether their samples have the bytes of their media."""
    for pack_number, positions in enumerate(job.packs, start=job.first_pack):
        samples = [reader.sample(int(position)) for position in positions]
        if job.config.embeds:
            samples = list(_embed_media(samples, job.config))
        elif job.config.media == "reference":
            samples = [_strip_media_bytes(sample) for sample in samples]
        yield Pack(pack_number, positions, tuple(samples), spec)


def _embed_media(samples: list[EncodedSample], config: PackConfig) -> Iterator[EncodedSample]:
    """Yield samples with the bytes of their media; raise a MediaError if a file is missing or is not a media file."""
    policy = policy_for_cache(config)
    policies = {sample.source: policy for sample in samples}
    rows = [[sample] for sample in samples]  # one sample in each row
    for group in embed_media(rows, policies, drop=_refuse):
        for (sample,) in group:
            _check_media_files(sample)
            yield sample


def _check_media_files(sample: EncodedSample) -> None:
    """Raise a MediaError for other files: a cache from elsewhere could name any file of this machine."""
    for path, data in chain.from_iterable(map(files_of, sample.media)):
        if data is not None and not is_media(data):
            raise MediaError(
                f"row {sample.row} of {sample.source}: {path or 'a medium'} is not an image, video or audio file, so "
                "it is not copied into the packs",
                "Use --media reference, which copies no media.",
            )


def _strip_media_bytes(sample: EncodedSample) -> EncodedSample:
    """Return a sample whose media are only named, without bytes; media that were embedded in the rows are refused."""

    def without_bytes(medium: Any) -> Any:
        frames = getattr(medium, "frames", ())  # of a video given as images: paths and bytes
        paths = [path for path, _ in frames] if frames else [medium.path]
        if None in paths:
            problem = f"--media reference: row {sample.row} of {sample.source} has a medium without a file path"
            raise ConfigError(problem, "Use --media embed, which copies media into the packs.")
        if frames:
            return replace(medium, frames=tuple((path, None) for path in paths))
        return replace(medium, data=None)

    media: dict[str, Any] = {kind: tuple(map(without_bytes, getattr(sample, kind))) for kind in _MEDIA}
    return replace(sample, **media)


def _refuse(dropped: Dropped) -> None:
    raise MediaError(
        f"row {dropped.row} of {dropped.source}: {dropped.detail} ({dropped.reason})",
        "Restore the file, export again without it, or use --media reference, which copies no media.",
    )
