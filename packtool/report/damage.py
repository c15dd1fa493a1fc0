"""``packtool inspect --verify``: every file of a cache held against the manifest."""

from __future__ import annotations

import time
from typing import Any

from packtool import storage
from packtool.cache.manifest import Manifest
from packtool.cache.verified import check_all
from packtool.progress import Progress
from packtool.train.prepare.check import repair_command


def find_damage(directory: str, progress: Progress) -> dict[str, Any]:
    """Read all files of a cache.

    Returns:
        directory, files, bytes, seconds, indexes without a checksum, damaged (file and problem), and the command that
        makes the cache anew where something is.

    Raises:
        MismatchError: if it is no finished cache, or its manifest is broken.
        StorageError: if it cannot be read.
    """
    directory = storage.normalize(directory)
    manifest = Manifest.read(directory)
    begin = time.perf_counter()
    progress.start("verify", sum(len(split.shards) + 1 for split in manifest.splits.values()))
    checks = []
    for check in check_all(directory, manifest):
        checks.append(check)
        progress.advance(1)
    progress.finish()
    damaged = [{"file": check.file, "problem": check.problem} for check in checks if check.problem]
    return {
        "directory": directory,
        "files": len(checks),
        "bytes": sum(check.bytes for check in checks),
        "seconds": round(time.perf_counter() - begin, 3),
        "without_checksum": [f"{name}/index.arrow" for name, info in manifest.splits.items() if not info.index_sha256],
        "damaged": damaged,
        "mend": repair_command(directory, manifest) if damaged else None,
    }


def lines(found: dict[str, Any]) -> list[str]:
    """What ``packtool inspect --verify`` prints of these figures, line by line."""
    rate = found["bytes"] / 1e9 / found["seconds"] if found["seconds"] else 0.0
    told = [f"{found['directory']}: {found['files']} files, {found['bytes'] / 1e6:,.1f} MB read at {rate:.1f} GB/s"]
    told += [f"  {one['file']} {one['problem']}" for one in found["damaged"]]
    if found["without_checksum"]:
        told.append(f"made before indexes had checksums, so these could only be read: {found['without_checksum']}")
    if not found["damaged"]:
        return [*told, "all files are as they were exported"]
    mend = "Copy these files again from where they are whole, or make them again from the rows:"
    return [*told, f"{len(found['damaged'])} files are damaged. {mend}", f"  {found['mend']}"]
