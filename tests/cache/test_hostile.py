"""Caches that somebody else wrote: nothing in them leads out of their directories, and what is wrong is named."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packtool.cache.local import LocalCopies
from packtool.cache.manifest import Manifest
from packtool.cache.reader import CacheReader
from packtool.cache.shard import INDEX
from packtool.errors import MismatchError, PacktoolError
from tests.cache.conftest import export_rows, write_rows


@pytest.fixture(scope="module")
def exported(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with a validation split, not to be written to."""
    folder = tmp_path_factory.mktemp("hostile")
    dataset = (str(write_rows(folder)),)
    export_rows(folder / "cache", model=str(model), dataset=dataset, split_dataset_ratio=0.1)
    return folder / "cache"


@pytest.fixture
def cache(exported: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(exported, tmp_path / "cache"))


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where each value of a JSON document lies."""
    if at:
        yield at
    if isinstance(value, dict):
        for name, child in value.items():
            yield from _places(child, (*at, name))
    elif isinstance(value, list):
        for i, child in enumerate(value):
            yield from _places(child, (*at, i))


def _put(document: Any, at: tuple[Any, ...], value: Any) -> None:
    for step in at[:-1]:
        document = document[step]
    document[at[-1]] = value


_NAMES = ["/etc/passwd", "../..", "/abs", "..", ".", "", "a/b", "x\x00y", "file:///etc/passwd", "http://h/x", "é", "\n"]
_VALUES = st.one_of(
    st.sampled_from(_NAMES),
    st.sampled_from([None, True, -1, -2, 2**63, 10**400, 0.5, float("nan"), float("inf"), [], {}, [[]], {"a": 1}]),
    st.text(max_size=20),
    st.integers(),
)


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_manifest_is_read_or_refused(cache: Path, data: st.DataObject, tmp_path: Path) -> None:
    """Any value anywhere: an error that names the file, or names and numbers as an export writes them."""
    path = cache / "packtool.json"
    keep = cache.parent / "kept.json"
    if not keep.exists():
        keep.write_bytes(path.read_bytes())
    document = json.loads(keep.read_text())
    for _ in range(data.draw(st.integers(1, 2))):
        changed = copy.deepcopy(document)
        at = data.draw(st.sampled_from(list(_places(changed))))
        _put(changed, at, data.draw(_VALUES))
        document = changed
    path.write_text(json.dumps(document))
    before = {one for one in tmp_path.rglob("*") if "copies" not in one.parts}
    copies = LocalCopies(str(tmp_path / "copies"))
    try:
        manifest = Manifest.read(str(cache))
        reader = CacheReader.open([str(cache)], copies=copies)
        if len(reader):
            reader.sample(0)
    except PacktoolError as error:
        assert str(cache) in error.message  # noqa: PT017
    else:
        for name, split in manifest.splits.items():
            assert name in ("train", "val")
            assert all(shard.file.startswith("data-") and "/" not in shard.file for shard in split.shards)
        assert "/" not in manifest.fingerprint
        assert "." not in manifest.fingerprint
    assert {one for one in tmp_path.rglob("*") if "copies" not in one.parts} == before


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (("fingerprint",), "../..", r"fingerprint is '\.\./\.\.'"),
        (("fingerprint",), "/abs", "fingerprint is '/abs'"),
        (("splits", "train", "shards", 1, "file"), "/etc/passwd", r"splits\.train\.shards\[1\]\.file is '/etc/passwd'"),
        (("splits", "train", "shards", 0, "sha256"), "../x", r"splits\.train\.shards\[0\]\.sha256"),
        (("splits", "train", "rows"), 7000, r"splits\.train\.rows is 7000"),
        (("splits", "../../x"), {}, r"splits\.\.\./\.\./x"),
        (("identity", "spec", "max_length"), -5, r"identity\.spec\.max_length is -5"),
        (("sources", 0, "size"), "many", r"sources\[0\]\.size is 'many', not a count"),
        (("surprise",), 1, "surprise is unknown"),
    ],
)
def test_errors_name_the_wrong_field(cache: Path, at: tuple[Any, ...], value: Any, message: str) -> None:
    path = cache / "packtool.json"
    document = json.loads(path.read_text())
    _put(document, at, value)
    path.write_text(json.dumps(document))
    with pytest.raises(MismatchError, match=rf"packtool\.json is broken: {message}"):
        Manifest.read(str(cache))


def test_a_deeply_nested_manifest_is_an_error(cache: Path) -> None:
    (cache / "packtool.json").write_text('{"identity":' + "[" * 100_000)
    with pytest.raises(MismatchError, match="is broken"):
        Manifest.read(str(cache))


@pytest.mark.parametrize(
    ("column", "value"), [("shard", 99), ("shard", -1), ("row_in_shard", 10**6), ("channel", 2), ("length", -1)]
)
def test_an_index_must_refer_to_existing_rows(cache: Path, column: str, value: int) -> None:
    index, manifest = cache / "train" / "index.arrow", cache / "packtool.json"
    document = json.loads(manifest.read_text())
    document["splits"]["train"].pop("index_sha256")  # of a cache that was made before it was kept
    manifest.write_text(json.dumps(document))
    CacheReader.open([str(cache)])
    with pa.memory_map(str(index)) as file:
        table = pa.ipc.open_file(file).read_all()
        columns = {name: table.column(name).to_numpy().copy() for name in table.column_names}
    columns[column][3] = value
    with pa.OSFile(str(index), "wb") as sink, pa.ipc.new_file(sink, INDEX) as writer:
        writer.write_table(pa.table({name: np.asarray(values) for name, values in columns.items()}, schema=INDEX))
    with pytest.raises(MismatchError, match=rf"is not the index of this cache: {column} (has|exceeds)"):
        CacheReader.open([str(cache)])
