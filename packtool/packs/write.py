"""``packtool pack``: writes the packs of a plan to files, in parallel, and then a manifest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool import storage
from packtool.batch.spec import InputSpec
from packtool.cache.local import LocalCopies
from packtool.cache.manifest import Manifest
from packtool.cache.plan_file import read_plan_of
from packtool.cache.reader import CacheReader
from packtool.cache.shard import embedded
from packtool.config.plan import PackConfig
from packtool.constants import PACKS_MANIFEST_NAME, VERSION
from packtool.encode.encoded import EncodedSample
from packtool.encode.model_files import ModelFiles
from packtool.errors import ConfigError, DataError, MediaError, MismatchError
from packtool.media.suffix import is_media
from packtool.packs.files import SUFFIXES, Pack, energon_files, open_file
from packtool.planning.packing import map_on_processes, pack
from packtool.progress import Progress
from packtool.rows.media_policy import policy_for_cache
from packtool.rows.sample import Dropped
from packtool.storage import AtomicFile

FORMAT = "packtool packs 1"
_SHARED_REMEDY = "Plan it again with --share-prefix false: packs that are written out hold whole samples."


@dataclass(frozen=True)
class PacksSummary:
    """Figures of the written packs.

    Args:
        filtered: samples longer than ``max_length``, or missing in ``plan``.
    """

    output_dir: str
    format: str
    num_packs: int
    num_samples: int
    filtered: int
    tokens: int
    target_tokens: int
    packing_length: int
    num_files: int


_Part = tuple[PackConfig, str, int, list[npt.NDArray[np.int64]]]
"""Packs of one file: options, its name, the number of the first pack, and cache positions of each pack's samples."""


def write_packs(config: PackConfig, progress: Progress) -> PacksSummary:
    """Pack the samples of caches, or take a saved plan, and write the packs.

    Raises:
        ConfigError, DataError, MismatchError: caches, plan and options do not match (before anything is written), the
            format does not support a sample, or a medium cannot be read.
        StorageError: a file cannot be read or written.
    """
    reader = CacheReader.open(config.cached_dataset, config.split, copies=LocalCopies.of(config))
    _spec(config, reader.manifests[0])
    samples, offsets, capacity, num_filtered = _plan(config, reader)
    if config.format == "megatron" and (with_media := int((reader.index.media_tokens[samples] > 0).sum())):
        raise ConfigError(
            f"--format megatron has no place for media, which {with_media:,} of {len(samples):,} samples have.",
            "--format energon keeps them.",
        )
    directory = storage.normalize(config.output_dir)
    _check_empty(directory)
    num_packs = len(offsets) - 1
    starts = range(0, num_packs, config.packs_per_file)
    names = [f"packs-{i:05d}-of-{len(starts):05d}{SUFFIXES[config.format]}" for i in range(len(starts))]
    packs = np.split(samples, offsets[1:-1])
    parts: list[_Part] = [
        (config, name, first, packs[first : first + config.packs_per_file])
        for name, first in zip(names, starts, strict=True)
    ]
    storage.make_directory(directory)
    progress.start("writing packs", len(parts))
    try:
        files = map_on_processes(
            _write_file, parts, config.dataset_num_proc, on_progress=lambda num_done: progress.advance(1)
        )
    except BaseException:
        storage.discard_unfinished(directory)  # of processes that were ended
        raise
    progress.finish()
    if config.format == "energon":
        storage.make_directory(storage.join(directory, ".nv-meta"))
        for name, content in energon_files({file["file"]: file["packs"] for file in files}, config.split).items():
            storage.publish(storage.join(directory, name), content)
    summary = PacksSummary(
        output_dir=directory,
        format=config.format,
        num_packs=num_packs,
        num_samples=len(samples),
        filtered=num_filtered,
        tokens=int(reader.index.length[samples].sum()),
        target_tokens=int(reader.index.target_tokens[samples].sum()),
        packing_length=capacity,
        num_files=len(files),
    )
    storage.publish(storage.join(directory, PACKS_MANIFEST_NAME), _manifest(config, reader, summary, files))
    return summary


def _manifest(config: PackConfig, reader: CacheReader, summary: PacksSummary, files: list[dict[str, Any]]) -> bytes:
    manifest = {
        "format": FORMAT,
        "packtool": VERSION,
        "layout": config.format,
        "split": config.split,
        "cache": reader.fingerprint,
        "model": config.model or reader.manifests[0].identity.spec["model"],
        "model_type": reader.manifests[0].identity.model_type,
        "media": config.media_of([str(manifest.identity.spec["media"]) for manifest in reader.manifests]),
        "packs": summary.num_packs,
        "samples": summary.num_samples,
        "tokens": summary.tokens,
        "target_tokens": summary.target_tokens,
        "capacity": summary.packing_length,
        "files": files,
    }
    return json.dumps(manifest, indent=1).encode()


def _plan(config: PackConfig, reader: CacheReader) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int, int]:
    """Return samples in pack order, (N,), offsets of packs, (K + 1,), their capacity, and samples left out."""
    if config.plan is not None:
        saved = read_plan_of(reader, config.plan)
        if saved.shared is not None:
            raise ConfigError(f"--plan {config.plan} shares prefixes among samples.", _SHARED_REMEDY)
        return saved.samples, saved.offsets, saved.capacity, len(reader) - len(np.unique(saved.samples))
    lengths = reader.index.length
    longest = min(config.max_length or int(lengths.max()), config.packing_length or int(lengths.max()))
    kept = np.flatnonzero(lengths <= longest)
    if not len(kept):
        raise DataError(
            f"all {len(lengths):,} samples are longer than {longest:,} tokens (--packing-length, --max-length)."
        )
    capacity = config.packing_length or longest
    media = reader.index.media_tokens[kept]
    plan = pack(lengths[kept], capacity, config, seed=config.seed, media_tokens=media)
    return kept[plan.samples], plan.offsets, capacity, len(lengths) - len(kept)


def _spec(config: PackConfig, manifest: Manifest) -> InputSpec:
    identity = manifest.identity
    model = config.model or str(identity.spec["model"])
    try:
        ModelFiles.load(model)
        return InputSpec.load(model, identity.media_limits, config)
    except ConfigError as error:
        if config.model is not None:
            raise
        raise ConfigError(
            f"the cache was exported for {model}, which cannot be read here: {error.message}",
            error.remedy or "Say where that model is now: --model DIR.",
        ) from error


def _check_empty(directory: str) -> None:
    names = storage.list_names(directory)
    if PACKS_MANIFEST_NAME in names:
        raise MismatchError(f"{directory} holds finished packs already.", "Name another directory.")
    if unknown := [name for name in names if not name.startswith("packs-") and name != ".nv-meta"]:
        raise ConfigError(f"--output-dir {directory} is not empty: it has {unknown[0]}.", "Name a new directory.")
    for name in names:  # of a run that was interrupted
        if name != ".nv-meta":
            storage.remove(storage.join(directory, name))


def _write_file(part: _Part) -> dict[str, Any]:
    """Write one file atomically; return its entry in the manifest."""
    config, name, first, packs = part
    reader = CacheReader.open(config.cached_dataset, config.split, copies=LocalCopies.of(config))
    spec = _spec(config, reader.manifests[0])
    path = storage.join(config.output_dir, name)
    file = AtomicFile(path)
    sink, writer = open_file(file, config.format, has_fractions=spec.sees and spec.hears)
    try:
        for number, positions in enumerate(packs, start=first):
            samples = [reader.sample(int(position)) for position in positions]
            if config.embeds:
                samples = list(_embedded(samples, config))
            elif config.media == "reference":
                samples = [_referenced(sample) for sample in samples]
            writer.write(Pack.of(number, positions, samples, spec))
        for suffix, content in writer.close().items():
            storage.publish(path + suffix, content)
        state = file.commit()
    except BaseException:
        sink.discard()
        raise
    return {"file": name, "packs": len(packs), "bytes": state.size, "sha256": sink.digest.hexdigest()}


def _embedded(samples: list[EncodedSample], config: PackConfig) -> Iterator[EncodedSample]:
    policy = policy_for_cache(config)
    alone = [[sample] for sample in samples]
    for group in embedded(alone, {sample.source: policy for sample in samples}, _refuse):
        for sample in (sample for row in group for sample in row):
            _check_media(sample)
            yield sample


def _referenced(sample: EncodedSample) -> EncodedSample:
    """Remove the bytes of media, which a cache may hold, from a sample.

    Raises:
        ConfigError: a medium is not a file of its own.
    """

    def without_bytes(medium: Any) -> Any:
        frames = getattr(medium, "frames", ())
        if None in (path for path, _ in frames or [(medium.path, None)]):
            raise ConfigError(
                f"--media reference: row {sample.row} of {sample.source} has a medium that is no file of its own",
                "--media embed writes it into the packs.",
            )
        if frames:
            return replace(medium, frames=tuple((path, None) for path, _ in frames))
        return replace(medium, data=None)

    return replace(
        sample,
        images=tuple(map(without_bytes, sample.images)),
        videos=tuple(map(without_bytes, sample.videos)),
        audios=tuple(map(without_bytes, sample.audios)),
    )


def _check_media(sample: EncodedSample) -> None:
    """Refuse to copy a file that is not a medium: a foreign cache may name any file of this machine."""
    media: list[Any] = [*sample.images, *sample.audios, *sample.videos]
    files = [(medium.path, medium.data) for medium in media]
    for path, data in (*files, *(frame for video in sample.videos for frame in video.frames)):
        if data is not None and not is_media(data):
            raise MediaError(
                f"row {sample.row} of {sample.source}: {path or 'a medium'} does not begin as a picture, video or "
                "sound does, and is not copied",
                "--media reference writes no media.",
            )


def _refuse(lost: Dropped) -> None:
    raise MediaError(
        f"row {lost.row} of {lost.source}: {lost.detail} ({lost.reason})",
        "Restore the file, or export again without it; --media reference writes no media.",
    )
