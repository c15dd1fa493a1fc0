"""Golden records: how outputs are written as text, what of them is normalised, and how two records are compared.

A record is a directory of text files. A file has sections, each of which begins with a line ``=== TITLE``.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

MAX_DIFF_LINES = 20

_TIMES = frozenset({"plan_seconds", "seconds", "saved_at", "began"})
_MEASURED = _TIMES | {
    "target_tokens_per_second",
    "tokens_per_second",
    "samples_per_second",
    "data_wait",
    "log_wait",
    "memory_gib",
    "trainer_state.json",  # its checksum
}
"""Keys of JSON that time or memory of this machine decides. What plan and simulate estimate is not measured."""

_ESTIMATING = ("plan", "simulate")
_NUMBER = r"\d[\d,]*(?:\.\d+)?"
_MEASURED_TEXTS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (rf"\b((?:targets|tokens|rows|samples)/s) {_NUMBER}", r"\1 <rate>"),
        (rf"{_NUMBER} ((?:target tokens|targets|tokens|rows|samples|MB|GB|KB)(?:/s| a second))", r"<rate> \1"),
        (r"\bwaiting \d+/\d+%", "waiting <share>"),
        (rf"\bmemory {_NUMBER} GiB", "memory <size>"),
        (rf"{_NUMBER} (?:ms|s|min|h)\b(?:ours|inutes|econds)?", "<time>"),
        (r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?(?:\.\d+)?", "<date>"),
    )
)
_PROGRESS = re.compile(r"(?!train: )[^:]*: [\d,]+(?: of [\d,]+)? after [\d.,]+ (?:s|min|h)\b")
"""Lines that come every few seconds; those of training come with its steps."""

_MARKS = ("<measured>", "<time>", "<rate>", "<date>")
_TEXT_SUFFIXES = (".txt", ".yaml", ".yml", ".csv", ".md", ".jinja")


def normalize_json(value: Any, command: str) -> Any:
    """Replace what was measured on this machine; everything else stays.

    Args:
        command: the command that wrote it, as ``train``: estimates of ``plan`` and ``simulate`` are kept.
    """
    if isinstance(value, Mapping):
        measured = _TIMES if command in _ESTIMATING else _MEASURED
        if "saved_at" in value:
            measured |= {"digest"}  # of a checkpoint's state, with the time
        return {
            key: "<measured>" if key in measured and item is not None else normalize_json(item, command)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [normalize_json(item, command) for item in value]
    return value


def normalize_text(text: str, command: str, places: Mapping[str, str]) -> str:
    """Replace times, rates, memory and paths in what a command wrote for people, line by line.

    Args:
        places: directories and the names that stand for them, longest first.
    """
    lines = []
    for line in text.splitlines():
        if _PROGRESS.match(line):
            continue
        parsed = _parsed(line)
        if parsed is not None:
            line = format_json(normalize_json(parsed, command))
        elif command not in _ESTIMATING:
            for pattern, replacement in _MEASURED_TEXTS:
                line = pattern.sub(replacement, line)
        else:
            line = re.sub(rf"(planning time) +{_NUMBER} (?:ms|s)\b", r"\1 <time>", line)
        lines.append(line.rstrip())
    text = "\n".join(lines)
    for directory, name in places.items():
        text = text.replace(directory, name)
    return text


def _parsed(line: str) -> Any:
    if not line.startswith(("{", "[")):
        return None
    try:
        return json.loads(line)
    except ValueError:
        return None


def format_json(value: Any) -> str:
    """JSON with a line for each key, so that a diff shows the keys that differ; lists of numbers stay on one line."""
    return _format(value, "")


def _format(value: Any, indent: str) -> str:
    inner = indent + " "
    if isinstance(value, dict) and value:
        lines = (f"{inner}{json.dumps(str(key))}: {_format(item, inner)}" for key, item in value.items())
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        return "[\n" + ",\n".join(f"{inner}{_format(item, inner)}" for item in value) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False)


def describe_files(root: Path, paths: tuple[str, ...], command: str, places: Mapping[str, str]) -> dict[str, str]:
    """Sections for files that a command wrote: checksums of all, and the contents of those that are readable.

    Args:
        paths: files or directories below ``root``.

    Returns:
        title -> text; the first one lists every file with its SHA-256. Of files with measured figures that is the
        checksum of the normalised contents.
    """
    sections: dict[str, str] = {}
    checksums = []
    for path in _files(root, paths):
        name = str(path.relative_to(root))
        if path.is_symlink():
            checksums.append(f"link to {path.readlink()}  {name}")
            continue
        if path.name == "curves.png":
            checksums.append(f"with measured rates  {name}")
            continue
        contents = _contents(path, command, places)
        raw = path.read_bytes()
        if contents is None:
            checksums.append(f"{hashlib.sha256(raw).hexdigest()}  {name}")
        else:
            sections[name] = contents
            data = contents.encode() if any(mark in contents for mark in _MARKS) else raw
            checksums.append(f"{hashlib.sha256(data).hexdigest()}  {name}")
    return {"files": "\n".join(checksums), **sections}


def _files(root: Path, paths: tuple[str, ...]) -> Iterator[Path]:
    for path in paths:
        place = root / path
        if place.is_dir() and not place.is_symlink():
            yield from sorted(file for file in place.rglob("*") if file.is_symlink() or file.is_file())
        elif place.exists():
            yield place


def _contents(path: Path, command: str, places: Mapping[str, str]) -> str | None:
    """What a readable file says, or None."""
    if path.suffix == ".json":
        return _replace_places(format_json(normalize_json(json.loads(path.read_text()), command)), places)
    if path.suffix == ".jsonl":
        lines = [normalize_json(json.loads(line), command) for line in path.read_text().splitlines()]
        return _replace_places("\n".join(json.dumps(line, ensure_ascii=False) for line in lines), places)
    if path.suffix == ".npz":
        return _arrays(path)
    if path.suffix == ".parquet":
        return _table(path)
    if path.suffix in _TEXT_SUFFIXES:
        return normalize_text(path.read_text(), command, places)
    return None


def _replace_places(text: str, places: Mapping[str, str]) -> str:
    for directory, name in places.items():
        text = text.replace(directory, name)
    return text


def _arrays(path: Path) -> str | None:
    if not zipfile.is_zipfile(path):
        return None
    with np.load(path, allow_pickle=False) as arrays:
        return "\n".join(
            f"{name}: {array.dtype}{list(array.shape)} {array.tolist()}" for name, array in sorted(arrays.items())
        )


def _table(path: Path) -> str:
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    rows = [json.dumps(row, default=lambda value: f"{len(value)} bytes") for row in table.to_pylist()]
    metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    columns = ", ".join(f"{field.name} {field.type}" for field in table.schema)
    return "\n".join((f"columns: {columns}", f"metadata: {json.dumps(metadata)}", *rows))


def format_sections(sections: Mapping[str, str]) -> str:
    """The text of a record's file."""
    return "".join(f"=== {title}\n{text.rstrip()}\n" for title, text in sections.items())


def read_sections(text: str) -> dict[str, str]:
    """The sections of a record's file; equal titles are numbered."""
    sections: dict[str, str] = {}
    for block in re.split(r"^=== ", text, flags=re.MULTILINE)[1:]:
        title, _, body = block.partition("\n")
        number = 1
        while title in sections:
            number += 1
            title = f"{block.partition(chr(10))[0]} ({number})"
        sections[title] = body
    return sections


def read_record(directory: Path) -> dict[tuple[str, str], str]:
    """(file, section title) -> text, of every file of a record."""
    files = sorted(path for path in directory.rglob("*.txt") if path.is_file())
    return {
        (str(path.relative_to(directory)), title): text
        for path in files
        for title, text in read_sections(path.read_text()).items()
    }


def compare_records(old: Path, new: Path) -> list[str]:
    """A text for each entry that differs: its file and title, and at most ``MAX_DIFF_LINES`` lines of unified diff."""
    before, after = read_record(old), read_record(new)
    differences = []
    for file, title in sorted(before.keys() | after.keys()):
        old_text, new_text = before.get((file, title)), after.get((file, title))
        if old_text == new_text:
            continue
        heading = f"--- {file}: {title}"
        if old_text is None or new_text is None:
            differences.append(f"{heading}\nonly in the {'new' if old_text is None else 'old'} record")
            continue
        lines = [*difflib.unified_diff(old_text.splitlines(), new_text.splitlines(), "old", "new", lineterm="", n=1)]
        shown = lines[2 : 2 + MAX_DIFF_LINES]
        if more := len(lines) - 2 - len(shown):
            shown.append(f"... {more} more lines")
        differences.append("\n".join((heading, *shown)))
    return differences
