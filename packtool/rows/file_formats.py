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
    ".idx": "megatron",
    ".tar": "tar",
}
_COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}

KNOWN_FORMATS = (
    f"{', '.join(suffix for suffix in _KINDS if suffix not in ('.idx', '.tar'))}, each also with "
    f"{' or '.join(_COMPRESSIONS)}, .tar of packs, and .idx with Megatron's .bin beside it"
)
"""What messages call each kind."""


def format_of(path: str) -> tuple[FileFormat, Compression | None] | None:
    """FileFormat and compression of a file, None if its name says neither."""
    stem, dot, suffix = storage.name(path).lower().rpartition(".")
    if suffix == "idx" and stem.endswith(".tar"):  # where the members of a tar file begin
        return None
    compression = _COMPRESSIONS.get(dot + suffix)
    if compression is not None:
        _, dot, suffix = stem.rpartition(".")
    kind = _KINDS.get(dot + suffix)
    return None if kind is None else (kind, compression)
