"""Kinds of files, told from their names."""

from __future__ import annotations

from packtool import storage
from packtool.rows.source import Compression, FileFormat

_KINDS: dict[str, FileFormat] = {
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "txt",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}

KNOWN_FORMATS = f"{', '.join(_KINDS)}, each also with {' or '.join(_COMPRESSIONS)}"
"""What messages call each kind."""


def format_of(path: str) -> tuple[FileFormat, Compression | None] | None:
    """FileFormat and compression of a file, None if its name says neither."""
    stem, compression = storage.name(path).lower(), None
    for suffix, found in _COMPRESSIONS.items():
        if stem.endswith(suffix):
            stem, compression = stem.removesuffix(suffix), found
    kind = next((kind for suffix, kind in _KINDS.items() if stem.endswith(suffix)), None)
    return None if kind is None else (kind, compression)
