"""What an output directory already holds: a finished cache, the beginning of one, or something else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from typing import Any

from packtool import __version__, storage
from packtool.cache.manifest import PATH_SETTINGS, Identity, Manifest, SourceInfo, fingerprint_of
from packtool.cache.reader import check_sizes
from packtool.cache.task import TASKS_DIR, TaskResult, marker_path
from packtool.constants import DROPPED_NAME, MANIFEST_NAME, TRAIN_SPLIT, VAL_SPLIT
from packtool.errors import ConfigError, MismatchError
from packtool.rows.scan import scan
from packtool.rows.source import SourceSpec

_PATHS = tuple(f"spec.{name}" for name in PATH_SETTINGS)
_STATE_NAME = "export.json"


def check_is_cache(directory: str) -> None:
    """Hold ``--overwrite`` to caches.

    Raises:
        ConfigError: if the directory holds something else.
    """
    names = storage.list_names(directory)
    if names and MANIFEST_NAME not in names and TASKS_DIR not in names:
        raise ConfigError(
            f"--output-dir {directory} holds {', '.join(names[:3])} and no cache: --overwrite replaces caches only",
            "Give another directory, or empty this one yourself.",
        )


def clear(directory: str) -> None:
    """Remove a cache, finished or not, and nothing else. Interrupted, it leaves what another export can clear."""
    tasks = storage.join(directory, TASKS_DIR)
    storage.make_directory(tasks)
    # Markers first: none may outlive its shard.
    for name in storage.list_names(tasks):
        storage.remove(storage.join(tasks, name))
    for name in (MANIFEST_NAME, TRAIN_SPLIT, VAL_SPLIT, DROPPED_NAME):
        storage.remove(storage.join(directory, name))


def find_finished(directory: str, identity: Identity, specs: Sequence[SourceSpec]) -> Manifest | None:
    """The manifest of a finished cache in the directory, if it is the one that would be made.

    Raises:
        MismatchError: if it is another, naming every setting that differs, or is damaged.
    """
    if not storage.exists(storage.join(directory, MANIFEST_NAME)):
        return None
    manifest = Manifest.read(directory)
    different = differences(manifest.identity.as_dict(), identity.as_dict())
    there = [(source.path, source.settings) for source in manifest.sources]
    here = [(storage.masked(spec.path), spec.settings) for spec in specs]
    if there != here:
        shown = (", ".join(f"{path} {settings}".strip() for path, settings in sources) for sources in (there, here))
        different.append("dataset: {} there, {} here".format(*shown))
    else:
        different += [
            line for source, spec in zip(manifest.sources, specs, strict=True) for line in _changed(source, spec)
        ]
    if different:
        lines = "\n".join(f"  - {line}" for line in different)
        raise MismatchError(
            f"{directory} holds a finished cache of other settings:\n{lines}",
            "Give another --output-dir, or --overwrite to replace it.",
        )
    for split in manifest.splits:
        check_sizes(directory, manifest, split)
    storage.remove(storage.join(directory, TASKS_DIR))  # left when the export was killed at its very end
    return manifest


def _changed(source: SourceInfo, spec: SourceSpec) -> list[str]:
    if not storage.exists(spec.path):
        return []  # the cache is what is left of it
    state = storage.stat(spec.path)
    if (state.size, state.modified) == (source.size, source.modified):
        return []
    if state.size == source.size and scan(spec).digest == source.digest:
        return []
    return [f"{source.path} has changed since"]


def differences(there: Mapping[str, Any], here: Mapping[str, Any], prefix: str = "") -> list[str]:
    """One line for each value that differs, nested names with dots. A model's or a template's path alone is none."""
    lines = []
    for key in there.keys() | here.keys():
        a, b = there.get(key), here.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            lines += differences(a, b, f"{prefix}{key}.")
        elif a != b and f"{prefix}{key}" not in _PATHS:
            lines.append(f"{prefix}{key}: {a} there, {b} here")
    return sorted(lines)


def begin(
    directory: str, identity: Identity, sources: tuple[SourceInfo, ...], splits: Set[str], *, is_part: bool
) -> dict[int, TaskResult]:
    """Make the directories, or find what an interrupted run of the same export has finished.

    Args:
        splits: that will have shards.
        is_part: other machines work on the same export at this moment, so nothing may be cleared away.

    Raises:
        ConfigError: if the directory holds something else.
        MismatchError: if it holds the beginning of another export.
    """
    names = storage.list_names(directory)
    started = storage.join(directory, TASKS_DIR, _STATE_NAME)
    paths = [(source.path, source.settings) for source in sources]
    state = json.dumps([__version__, fingerprint_of(identity, sources), paths]).encode()
    if names and TASKS_DIR not in names:
        raise ConfigError(
            f"--output-dir {directory} is not empty and holds no cache: {', '.join(names[:3])}",
            "Give another directory, or empty this one.",
        )
    done = finished_tasks(directory) if names else {}
    there = storage.read_bytes(started) if names and storage.exists(started) else None
    if there != state and (done or (is_part and there is not None)):
        raise MismatchError(
            f"{directory} holds {len(done)} finished shards of an export of other settings or other rows",
            "Give another --output-dir, or --overwrite to replace it.",
        )
    if is_part:
        done = done if there == state else {}
    elif there != state:
        clear(directory)
    else:
        storage.discard_unfinished(directory)
    for name in (TASKS_DIR, *sorted(splits)):
        storage.make_directory(storage.join(directory, name))
    if there != state:
        storage.publish(started, state)
    return done


def finished_tasks(directory: str) -> dict[int, TaskResult]:
    """Results of the tasks whose marker is there, and the shards it tells of with the sizes it tells."""
    done = {}
    sizes: dict[str, dict[str, storage.FileState | None]] = {}
    for name in storage.list_names(storage.join(directory, TASKS_DIR)):
        stem = name.removesuffix(".json")
        if not stem.isdigit():
            continue
        result = TaskResult.from_json(storage.read_bytes(marker_path(directory, int(stem))))
        for split in result.splits:
            if split not in sizes:
                sizes[split] = storage.entries(storage.join(directory, split))
        if all(_has_size(sizes[split].get(part.file), part.bytes) for split, part in result.splits.items()):
            done[int(stem)] = result
    return done


def _has_size(state: storage.FileState | None, size: int) -> bool:
    return state is not None and state.size == size
