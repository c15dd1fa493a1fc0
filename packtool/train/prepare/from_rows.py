"""Caches that ``packtool train`` makes from rows, once for each set of rows, model and options.

CACHE_DIR/exports/<fingerprint of rows, model and options>/       a cache like any other
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from packtool import storage
from packtool.cache.export import export
from packtool.cache.local import LocalCopies, locked
from packtool.cache.manifest import PATH_SETTINGS, ExportSummary
from packtool.cache.output_dir import identity_of
from packtool.config.data import AccessOptions, ExportConfig, RowOptions
from packtool.config.train import TrainConfig
from packtool.constants import MANIFEST_NAME
from packtool.encode.families import default_max_length, media_encoding
from packtool.encode.model_files import ModelFiles
from packtool.progress import Progress
from packtool.rows.sample import drop_notes
from packtool.rows.source import SourceSpec
from packtool.rows.sources import sources_of

_EXPORTS = "exports"


def length_of_rows(config: TrainConfig, files: ModelFiles) -> int:
    """Maximum tokens of a sample: ``--max-length``, else ``--packing-length``, else the model's, but at most 8,192."""
    return config.max_length or config.packing_length or default_max_length(files.config)


def with_cache(config: TrainConfig, progress: Progress, check: Callable[[TrainConfig], None]) -> TrainConfig:
    """Replace the rows of a run by their cache, which is made if it does not exist; other runs stay unchanged.

    One process of the machine makes the cache while the others wait; an interrupted export is resumed. ``check`` is
    called before rows are read, and raises errors that do not depend on them.
    """
    if not config.dataset or config.streaming:
        return config
    exports = _exports_of(config)
    caches = [each.output_dir for each in exports]
    if not all(os.path.exists(os.path.join(cache, MANIFEST_NAME)) for cache in caches):
        check(config)
    for each in exports:
        _make_cache(each, progress)
    return _with_cached_dataset(config, caches)


def _exports_of(config: TrainConfig) -> list[ExportConfig]:
    """The exports that make the caches of a run's rows; the name of a cache is the fingerprint of its export."""
    files = ModelFiles.load(config.model, config.chat_template, config.chat_template_kwargs)
    export_config = config.export_config("", length_of_rows(config, files))
    root = os.path.join(config.cache_dir or LocalCopies().directory, _EXPORTS)
    # Datasets of a mixture get a cache each, because samples are mixed by cache.
    datasets = [(name,) for name in config.dataset] if config.interleaves else [config.dataset]
    exports = []
    for dataset in datasets:
        each = dataclasses.replace(export_config, dataset=dataset)
        fingerprint = rows_fingerprint(each, files, sources_of(each))
        exports.append(dataclasses.replace(each, output_dir=os.path.join(root, fingerprint)))
    return exports


def _make_cache(export_config: ExportConfig, progress: Progress) -> None:
    """Export a cache unless it exists, and report its samples and dropped rows."""
    cache = export_config.output_dir
    os.makedirs(os.path.dirname(cache), exist_ok=True)
    with locked(cache + ".lock"):
        summary = export(export_config, progress)  # keeps a finished cache
    for note in drop_notes(summary.dropped, summary.num_rows):
        progress.note(note)
    progress.note(_cache_line(cache, summary))


def _with_cached_dataset(config: TrainConfig, caches: Sequence[str]) -> TrainConfig:
    """Replace the options of rows by ``caches``, except the options that training needs to read media."""
    kept = {"media_root", *(field.name for field in dataclasses.fields(AccessOptions))}
    row_defaults: dict[str, Any] = {
        field.name: field.default for field in dataclasses.fields(RowOptions) if field.name not in kept
    }
    return dataclasses.replace(config, **row_defaults, chat_template=None, cached_dataset=tuple(caches))


def _cache_line(cache: str, summary: ExportSummary) -> str:
    """A log line with the numbers of samples and rows of a cache, and its dropped rows by reason, most first."""
    by_count = sorted(summary.dropped.items(), key=lambda reason_and_count: -reason_and_count[1])
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in by_count)
    dropped = f"{sum(summary.dropped.values()):,} dropped"
    if reasons:
        dropped += f": {reasons}"
    status = "found" if summary.already_finished else "made"
    return f"cache {status}: {cache} ({summary.num_samples:,} samples of {summary.num_rows:,} rows, {dropped})"


def rows_fingerprint(
    export_config: ExportConfig, files: ModelFiles, specs: Sequence[SourceSpec], *, with_times: bool = True
) -> str:
    """Fingerprint of an export: its options, the model, and each file's path, size and, ``with_times``, time."""
    identity = dataclasses.asdict(identity_of(export_config, files, media_encoding(files, export_config).limits))
    identity["spec"] = {name: value for name, value in identity["spec"].items() if name not in PATH_SETTINGS}
    states = [(spec, storage.stat(spec.path)) for spec in specs]
    plain = [
        (spec.path, spec.settings, state.size, state.modified if with_times or storage.is_remote(spec.path) else "")
        for spec, state in states
    ]
    return hashlib.sha256(json.dumps([identity, plain], sort_keys=True).encode()).hexdigest()[:16]
