"""Samples know where they came from, and are known by what they say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtool.cache.origins import Origins, hash_contents, read_origins
from packtool.cache.reader import CacheReader
from packtool.errors import MismatchError


def test_origins_match_the_samples_and_files_are_small(
    run_export: Callable[..., Any], rows: Path, tmp_path: Path
) -> None:
    lines = rows.read_text().splitlines(keepends=True)
    (tmp_path / "more.jsonl").write_text("".join(lines[200:300]))
    run_export(dataset=(str(rows), str(tmp_path / "more.jsonl")))
    reader = CacheReader.open([str(tmp_path / "cache")])
    origins = read_origins(reader, 0)
    samples = [reader.sample(position) for position in range(len(reader))]
    assert [origins.files[file_index] for file_index in origins.file] == [sample.source for sample in samples]
    assert origins.row.tolist() == [sample.row for sample in samples]
    digests = {source.path: source.digest for source in reader.manifests[0].sources}
    assert dict(zip(origins.files, origins.digests, strict=True)) == digests
    assert origins.part is None
    origins.write(str(tmp_path / "origins.npz"))
    assert (tmp_path / "origins.npz").stat().st_size < len(reader) + 2048
    read_back = Origins.read(str(tmp_path / "origins.npz"))
    assert (read_back.files, read_back.digests, read_back.part) == (origins.files, origins.digests, None)
    assert np.array_equal(read_back.file, origins.file)
    assert np.array_equal(read_back.row, origins.row)
    (tmp_path / "origins.npz").write_bytes(b"no archive")
    with pytest.raises(MismatchError, match=r"origins\.npz cannot be read"):
        Origins.read(str(tmp_path / "origins.npz"))


def test_parts_of_rows_are_kept(tmp_path: Path) -> None:
    part = np.array([[0, 0, 0, 0], [1, 2, 0, 0], [2, 2, 1, 3]], np.int32)
    numbers = np.zeros(3, np.int64)
    Origins(("a",), ("digest",), numbers, np.array([0, 70_000, 70_000]), part).write(str(tmp_path / "o.npz"))
    origins = Origins.read(str(tmp_path / "o.npz"))
    assert origins.row.tolist() == [0, 70_000, 70_000]
    assert origins.part is not None
    assert origins.part.tolist() == part.tolist()


def test_content_keys_do_not_depend_on_the_order_of_rows(
    run_export: Callable[..., Any], rows: Path, tmp_path: Path
) -> None:
    run_export("old")
    lines = rows.read_text().splitlines(keepends=True)
    (tmp_path / "turned.jsonl").write_text("".join(lines[::-1]))
    run_export("new", dataset=(str(tmp_path / "turned.jsonl"),))
    old, new = (CacheReader.open([str(tmp_path / name)]) for name in ("old", "new"))
    keys = [hash_contents(reader, range(len(reader))) for reader in (old, new)]
    assert len(keys[0]) == len(old) == len(new)
    assert set(keys[0].tolist()) == set(keys[1].tolist())
    assert len(set(keys[0].tolist())) == len(old), "questions are numbered"
    assert keys[1].tolist() == keys[0].tolist()[::-1]
