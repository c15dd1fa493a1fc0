"""One pass over each source that finds where its rows lie, so that any stretch of them can be read alone.

Nothing is kept of the rows but one entry for each block of them; a source of any size needs a few bytes a block.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from packtool import storage
from packtool.errors import DataError
from packtool.rows.json_array import find_elements
from packtool.rows.lines import find_lines
from packtool.rows.opened import Hashed, open_text
from packtool.rows.source import Blocks, Compression, Kind, ScannedSource, Source, SourceSpec


def scan_sources(
    specs: Sequence[SourceSpec], seed: int, note: Callable[[str], None] = lambda line: None
) -> list[ScannedSource]:
    """Scan all sources, and draw the samples that were asked for.

    Args:
        seed: of the samples.
        note: told of each source as it is found.

    Raises:
        DataError: if one is missing, broken or of no known kind or form.
        StorageError: if one cannot be read.
    """
    scanned = []
    for spec in specs:
        source = scan(spec, seed)
        note(f"{source.source.label}: {source.num_rows:,} rows, {source.size / 1e6:,.1f} MB")
        scanned.append(source)
    return scanned


def scan(spec: SourceSpec, seed: int = 42) -> ScannedSource:
    """Find the rows of one source.

    Raises:
        DataError: if the file is missing, or its JSON array is broken (a broken line of a .jsonl costs that row only).
        StorageError: if it cannot be read.
    """
    path = spec.path
    shown = storage.masked(path)
    if not storage.exists(path):
        raise DataError(f"--dataset {shown}: there is no such file")
    if storage.is_directory(path):
        raise DataError(f"--dataset {shown} is a directory", "Give the .json or .jsonl files in it.")
    state = storage.stat(path)
    kind, compression = _kind(path)
    source = Source(
        path=path,
        kind=kind,
        compression=compression,
        size=state.size,
        modified=state.modified,
        split=spec.split,
        tags=spec.tags,
        media_root=spec.media_root,
        system=spec.system,
        loss_scale=spec.loss_scale,
    )
    with open_text(path, compression) as file:
        hashed = Hashed(file)
        finder = find_lines(shown, hashed) if kind == "jsonl" else find_elements(shown, hashed)
        blocks = Blocks.of(finder)
        digest = hashed.digest
    return ScannedSource(spec, source, state.size, state.modified, digest, blocks)


def _kind(path: str) -> tuple[Kind, Compression | None]:
    name = storage.name(path)
    if name.endswith((".jsonl", ".ndjson")):
        return "jsonl", None
    if not name.endswith(".json"):
        raise DataError(
            f"--dataset {storage.masked(path)}: neither .json nor .jsonl", "Convert the file to one of these."
        )
    # Many tools write one object a line and call it .json.
    with open_text(path, None) as file:
        start = file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()
    return ("jsonl" if start.startswith(b"{") else "json"), None
