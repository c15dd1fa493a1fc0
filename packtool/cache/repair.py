"""``packtool export --repair``: recreate only the damaged files of a finished cache.

An export is a function of rows, settings and model: the task that wrote a shard writes the same bytes again, which the
manifest's checksum proves. Index and prefixes are rebuilt from the shards.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence

import pyarrow as pa

from packtool import storage
from packtool.cache.index import prefix_batch, with_fields
from packtool.cache.manifest import Manifest
from packtool.cache.reader import ShardFile
from packtool.cache.shard import ADDED, INDEX, PREFIX, PREFIX_BEFORE, arrow_bytes, atomic_file, index_batch, index_part
from packtool.cache.task import TASKS_DIR, Task, TaskResult
from packtool.constants import INDEX_NAME, MIN_SHARED, PREFIXES_NAME
from packtool.encode.encoded import EncodedSample
from packtool.encode.media_spans import MediaTokens
from packtool.encode.prefix_hashes import by_address, by_content, prefix_hashes
from packtool.errors import MismatchError

_SCRATCH = "repair"
_CHUNK_BYTES = 4 * 2**20


def repair(
    directory: str,
    manifest: Manifest,
    damaged: Sequence[str],
    tasks: Sequence[Task],
    media_tokens: MediaTokens,
    run: Callable[[Sequence[Task], str], Mapping[int, TaskResult]],
) -> None:
    """Recreate damaged files.

    Args:
        tasks: all tasks of the export.
        media_tokens: of the model.
        run: runs tasks that write below a directory; returns results by task number.

    Raises:
        MismatchError: if a recreated file differs, as with another version of a library.
    """
    scratch = storage.join(directory, TASKS_DIR, _SCRATCH)
    storage.remove(scratch)
    wanted = [task for task in tasks if any(f"{split}/{name}" in damaged for split, (_, name) in task.shards.items())]
    try:
        for name in (TASKS_DIR, *manifest.splits):
            storage.make_directory(storage.join(scratch, name))
        results = run(wanted, scratch) if wanted else {}
        made = {
            f"{split}/{part.file}": part.sha256 for result in results.values() for split, part in result.splits.items()
        }
        for split, info in manifest.splits.items():
            for shard in info.shards:
                file = f"{split}/{shard.file}"
                if file in damaged:
                    if made.get(file) != shard.sha256:
                        raise _not_the_same(directory, file)
                    with (
                        storage.open_read(storage.join(scratch, file)) as source,
                        atomic_file(storage.join(directory, file)) as target,
                    ):
                        shutil.copyfileobj(source, target, _CHUNK_BYTES)
            if f"{split}/{INDEX_NAME}" in damaged:
                _rebuild_index(directory, manifest, split)
            if f"{split}/{PREFIXES_NAME}" in damaged:
                _rebuild_prefixes(directory, manifest, split, media_tokens)
    finally:
        storage.remove(storage.join(directory, TASKS_DIR))


def _not_the_same(directory: str, file: str) -> MismatchError:
    return MismatchError(
        f"{storage.join(directory, file)}: what is made of the rows now is not what was there, perhaps since another "
        "version of a library makes other tokens",
        "Export into another --output-dir; --overwrite instead of --repair would delete this cache first.",
    )


def _rebuild_index(directory: str, manifest: Manifest, split: str) -> None:
    info = manifest.splits[split]
    codes = {name: code for code, name in enumerate(manifest.channels)}
    batches = [
        index_batch(index_part(samples, number, 0, codes))
        for number, samples in enumerate(_samples_of_shards(directory, manifest, split))
    ]
    # Older caches have fewer columns.
    older = pa.schema([field for field in INDEX if field.name not in ADDED])
    for schema in (INDEX, older):
        data = arrow_bytes([batch.select(schema.names) for batch in batches], schema)
        if info.index_sha256 in ("", hashlib.sha256(data).hexdigest()):
            storage.publish(storage.join(directory, split, INDEX_NAME), data)
            return
    raise _not_the_same(directory, f"{split}/{INDEX_NAME}")


def _rebuild_prefixes(directory: str, manifest: Manifest, split: str, media_tokens: MediaTokens) -> None:
    # Older caches identify media by their addresses, or have fewer fields.
    for medium_key in (by_content, by_address):
        batches = [
            prefix_batch(*prefix_hashes(samples, media_tokens, longer_than=MIN_SHARED, medium_key=medium_key))
            for samples in _samples_of_shards(directory, manifest, split)
            if samples
        ]
        for fields in (PREFIX, PREFIX_BEFORE):
            schema = pa.schema([("prefixes", pa.list_(fields))])
            data = arrow_bytes([with_fields(batch, fields) for batch in batches], schema)
            if hashlib.sha256(data).hexdigest() == manifest.splits[split].prefixes_sha256:
                storage.publish(storage.join(directory, split, PREFIXES_NAME), data)
                return
    made_by = manifest.packtool_version
    raise MismatchError(
        f"{storage.join(directory, split, PREFIXES_NAME)} cannot be made as it was: packtool {made_by} wrote it, and "
        "older versions hashed what rows with a channel or a long system prompt begin with in another way; or files of "
        "media have changed since",
        "The samples themselves are sound: train with --share-prefix false, which does not read this file; or "
        "export into another --output-dir. --overwrite instead of --repair would delete this cache first.",
    )


def _samples_of_shards(directory: str, manifest: Manifest, split: str) -> Iterator[list[EncodedSample]]:
    for shard in manifest.splits[split].shards:
        rows = ShardFile(storage.join(directory, split, shard.file))
        yield [rows.sample(row) for row in range(len(rows))]
