"""Resume, replace or keep the content of an export's output directory."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from packtool import storage
from packtool.cache.finish import has_parts, is_shard, tidy
from packtool.cache.lock import is_of_lock, remove_stale
from packtool.cache.manifest import PATH_SETTINGS, Identity, Manifest, SourceInfo, fingerprint_of
from packtool.cache.reader import check_sizes
from packtool.cache.task import TASKS_DIR, TaskResult
from packtool.config.data import ExportConfig
from packtool.constants import DROPPED_NAME, MANIFEST_NAME, TRAIN_SPLIT, VAL_SPLIT, VERSION
from packtool.encode.families import MediaLimits
from packtool.encode.loss_scale import loss_scale_of
from packtool.encode.model_files import ModelFiles, absolute_model
from packtool.encode.row_parts import expansion_of
from packtool.errors import ConfigError, MismatchError, StorageError
from packtool.rows.read import scan
from packtool.rows.source import SourceSpec

_PATHS = tuple(f"spec.{name}" for name in PATH_SETTINGS)
_STATE_NAME = "export.json"


def check_is_cache(directory: str) -> None:
    """Raise a ConfigError for ``--overwrite`` or ``--repair`` of a directory that holds no cache."""
    names = [name for name in storage.list_names(directory) if not is_of_lock(name)]
    if names and MANIFEST_NAME not in names and TASKS_DIR not in names and names != [DROPPED_NAME]:
        raise ConfigError(
            f"--output-dir {directory} holds {', '.join(names[:3])} and no cache: --overwrite replaces caches only",
            "Give another directory.",
        )


def clear(directory: str) -> None:
    """Remove a cache, finished or not, and nothing else; if interrupted, the next export can continue."""
    storage.make_directory(storage.join(directory, TASKS_DIR))
    _clear_tasks(directory)
    for name in (MANIFEST_NAME, TRAIN_SPLIT, VAL_SPLIT, DROPPED_NAME):
        storage.remove(storage.join(directory, name))


def forget_tasks(directory: str) -> None:
    """Remove the files of all tasks of an export that kept no row."""
    _clear_tasks(directory)
    for name in (TASKS_DIR, TRAIN_SPLIT, VAL_SPLIT):
        storage.remove(storage.join(directory, name))


def _clear_tasks(directory: str) -> None:
    """Remove the files of ``TASKS_DIR``, markers first, because none may outlive the files that it describes."""
    tasks = storage.join(directory, TASKS_DIR)
    for name in sorted(storage.list_names(tasks), key=_is_marker, reverse=True):
        storage.remove(storage.join(tasks, name))


def published(directory: str, identity: Identity, sources: tuple[SourceInfo, ...]) -> Manifest | None:
    """Return the manifest of this export, if another part of it has published it."""
    manifest = _read_manifest(directory)
    return manifest if manifest and manifest.fingerprint == fingerprint_of(identity, sources) else None


def _read_manifest(directory: str) -> Manifest | None:
    return Manifest.read(directory) if storage.exists(storage.join(directory, MANIFEST_NAME)) else None


def find_finished(directory: str, identity: Identity, specs: Sequence[SourceSpec]) -> Manifest | None:
    """Return the manifest of the finished cache of this export; None if there is no finished cache."""
    manifest = find_same(directory, identity, specs)
    if manifest is not None:
        for split in manifest.splits:
            check_sizes(directory, manifest, split)
        with suppress(StorageError):  # a finished cache may be read-only
            if remove_stale(directory):
                tidy(directory, manifest)  # for an export that was killed at its very end
    return manifest


def find_same(directory: str, identity: Identity, specs: Sequence[SourceSpec]) -> Manifest | None:
    """Return the manifest of the finished cache of this export, which may be damaged; None if there is none.

    Raises:
        MismatchError: if it has other settings, naming all of them.
    """
    if (manifest := _read_manifest(directory)) is None:
        return None
    different = differences(asdict(manifest.identity), asdict(identity))
    there = [(storage.absolute(source.path), source.settings) for source in manifest.sources]
    here = [(storage.absolute(storage.masked(spec.path)), spec.settings) for spec in specs]
    if there != here:
        shown = (", ".join(f"{path} {settings}".strip() for path, settings in sources) for sources in (there, here))
        different.append("dataset: {} there, {} here".format(*shown))
    else:
        pairs = zip(manifest.sources, specs, strict=True)
        different += [f"{source.path} has changed since" for source, spec in pairs if _has_changed(source, spec)]
    if different:
        lines = "\n".join(f"  - {line}" for line in different)
        raise MismatchError(
            f"{directory} holds a finished cache of other settings:\n{lines}",
            "Give another --output-dir; --overwrite would delete what is there.",
        )
    return manifest


def _has_changed(source: SourceInfo, spec: SourceSpec) -> bool:
    if not storage.exists(spec.path):
        return False  # only the cache remains
    state = storage.stat(spec.path)
    return state.size != source.size or (state.modified != source.modified and scan(spec).digest != source.digest)


def differences(there: Mapping[str, Any], here: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return a line for each value that differs, nested names with dots; paths of model and template are ignored."""
    lines = []
    for key in there.keys() | here.keys():
        a, b = there.get(key), here.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            lines += differences(a, b, f"{prefix}{key}.")
        elif a != b and f"{prefix}{key}" not in _PATHS:
            lines.append(f"{prefix}{key}: {a} there, {b} here")
    return sorted(lines)


def export_state(identity: Identity, sources: tuple[SourceInfo, ...]) -> bytes:
    """Return the content of ``.tasks/export.json``, which identifies an unfinished export."""
    paths = [(source.path, source.settings) for source in sources]
    return json.dumps([VERSION, fingerprint_of(identity, sources), paths]).encode()


def export_id(state: bytes) -> str:
    """Return the identifier of an export in the markers of its tasks."""
    return hashlib.sha256(state).hexdigest()[:16]


def begin(directory: str, state: bytes, splits: Set[str], *, is_part: bool) -> dict[int, TaskResult]:
    """Make the directories; return the results of tasks that an interrupted run of the same export has finished.

    Args:
        state: of this export (``export_state``).
        splits: that will have shards.
        is_part: other machines may work on the same export, so nothing may be removed.

    Raises:
        MismatchError: if the directory holds another unfinished export.
    """
    check_is_ours(directory)
    started = storage.join(directory, TASKS_DIR, _STATE_NAME)
    there = storage.read_bytes(started) if storage.exists(started) else None
    if there != state:
        old = num_finished(directory)
        if old or (is_part and there is not None):
            raise _other_export(directory, old)
    if not is_part:
        if there != state:
            clear(directory)
        with suppress(StorageError):  # unlisted uploads cost money, but do no harm to the cache
            storage.discard_unfinished(directory)
    for name in (TASKS_DIR, *sorted(splits)):
        storage.make_directory(storage.join(directory, name))
    if there != state and not storage.publish_new(started, state):
        raise _other_export(directory, 0)  # a part of another export was quicker
    return finished_tasks(directory, export_id(state))


def _other_export(directory: str, num_finished: int) -> MismatchError:
    return MismatchError(
        f"{directory} holds {num_finished} finished shards of an export of other settings or other rows",
        "Give another --output-dir; --overwrite would delete what is there.",
    )


def check_is_ours(directory: str) -> None:
    """Raise a ConfigError unless the directory is empty or holds an unfinished export."""
    names = [name for name in storage.list_names(directory) if not is_of_lock(name)]
    # An export that kept no row leaves only its list of reasons.
    if names and TASKS_DIR not in names and names != [DROPPED_NAME]:
        raise ConfigError(
            f"--output-dir {directory} is not empty and holds no cache: {', '.join(names[:3])}",
            "Give another directory.",
        )


def finished_tasks(directory: str, export: str) -> dict[int, TaskResult]:
    """Return the results of tasks of this export that have a marker and intact shards and parts."""
    done = {}
    states: dict[str, dict[str, storage.FileState | None]] = {}
    for name in storage.list_names(storage.join(directory, TASKS_DIR)):
        if not _is_marker(name):
            continue
        try:
            result = TaskResult.from_json(storage.read_bytes(storage.join(directory, TASKS_DIR, name)))
        except (ValueError, LookupError, TypeError, AttributeError):
            continue  # broken, or of another version: the task runs again
        if result.export != export:
            continue
        for split in result.splits:
            if split not in states:
                states[split] = storage.entries(storage.join(directory, split))
        if has_parts(directory, result) and all(
            is_shard(storage.join(directory, split, part.file), states[split].get(part.file), part)
            for split, part in result.splits.items()
        ):
            done[result.number] = result
    return done


def num_finished(directory: str) -> int:
    """Count the tasks of an unfinished cache that have a marker."""
    return sum(_is_marker(name) for name in storage.list_names(storage.join(directory, TASKS_DIR)))


def _is_marker(name: str) -> bool:
    return name.endswith(".json") and name.removesuffix(".json").isdigit()


def identity_of(config: ExportConfig, files: ModelFiles, limits: MediaLimits) -> Identity:
    """Return the identity of an export's cache; ``limits``: of the model with the user's options."""
    return Identity(
        # The path of the model is absolute, so that it is found from any directory; the fingerprint ignores it.
        spec=replace(config.encode_spec, expand_turns=expansion_of(config.expand_turns, files)).recorded()
        | {
            "model": absolute_model(config.model),
            # Resolved, because the default depends on whether the model has hybrid thinking.
            "loss_scale": loss_scale_of(config.loss_scale, files.is_hybrid_thinking),
        },
        model_type=files.model_type,
        tokenizer_hash=files.tokenizer_hash,
        template_hash=files.template_hash,
        processor_hash=files.processor_hash,
        media_limits=limits,
        seed=config.seed,
        split_dataset_ratio=config.split_dataset_ratio,
        rows_per_shard=config.rows_per_shard,
    )


@contextlib.contextmanager
def delayed_gc() -> Iterator[Callable[[], None]]:
    """Disable garbage collection until the yielded function is called, which also excludes all objects so far.

    The descriptions of many thousand files all stay alive, and would be traversed by every collection. If garbage
    collection is disabled already, nothing changes.
    """
    if not gc.isenabled():
        yield lambda: None
        return

    def collect() -> None:
        gc.freeze()
        gc.enable()

    gc.disable()
    try:
        yield collect
    finally:
        gc.unfreeze()
        gc.enable()
