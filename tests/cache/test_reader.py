from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from packtool.cache.manifest import ExportSummary
from packtool.cache.reader import CacheReader
from packtool.errors import MismatchError

Export = Callable[..., ExportSummary]


@pytest.mark.smoke
def test_several_caches_are_one_sequence(run_export: Export, tmp_path: Path) -> None:
    run_export("a")
    run_export("b", max_length=150)
    a, b = (CacheReader.open([str(tmp_path / name)]) for name in "ab")
    both = CacheReader.open([str(tmp_path / "a"), str(tmp_path / "b" / "train")])
    assert len(both) == len(a) + len(b)
    np.testing.assert_array_equal(both.index.length, np.concatenate([a.index.length, b.index.length]))
    np.testing.assert_array_equal(both.sample(len(a) + 3).input_ids, b.sample(3).input_ids)
    assert both.fingerprint not in (a.fingerprint, b.fingerprint)
    with pytest.raises(IndexError):
        both.sample(len(both))
    with pytest.raises(IndexError):
        both.sample(-1)


def test_tokens_are_not_copied(run_export: Export, tmp_path: Path) -> None:
    run_export()
    reader = CacheReader.open([str(tmp_path / "cache")])
    sample = reader.sample(0)
    assert not sample.input_ids.flags.owndata
    assert not sample.input_ids.flags.writeable
    assert np.shares_memory(sample.input_ids, reader.sample(0).input_ids)


def test_a_reader_can_be_sent_to_another_process(run_export: Export, tmp_path: Path) -> None:
    run_export()
    reader = CacheReader.open([str(tmp_path / "cache")])
    reader.sample(0)
    copy = pickle.loads(pickle.dumps(reader))
    np.testing.assert_array_equal(copy.sample(5).labels, reader.sample(5).labels)


def test_samples_have_source_and_row(run_export: Export, tmp_path: Path, rows: Path) -> None:
    run_export()
    reader = CacheReader.open([str(tmp_path / "cache")])
    assert reader.sample(0).place == f"{rows}, row {reader.sample(0).row}"


def test_caches_with_other_settings_are_not_joined(run_export: Export, tmp_path: Path, model: Path) -> None:
    run_export("a")
    run_export("b", image_max_token_num=20)
    # Limits belong to a cache: each sample keeps the size that its tokens were counted for.
    assert len(CacheReader.open([str(tmp_path / "a"), str(tmp_path / "b")])) > 0
    other = tmp_path / "other-model"
    shutil.copytree(model, other)
    (other / "chat_template.jinja").write_text((model / "chat_template.jinja").read_text() + "{# other #}")
    run_export("c", model=str(other))
    with pytest.raises(MismatchError, match="chat template") as exc_info:
        CacheReader.open([str(tmp_path / "a"), str(tmp_path / "c")])
    assert str(exc_info.value).count("\n  - ") == 1, "only what differs is named"
    settings = json.loads((other / "preprocessor_config.json").read_text())
    (other / "preprocessor_config.json").write_text(json.dumps(settings | {"patch_size": 2 * settings["patch_size"]}))
    run_export("d", model=str(other))
    with pytest.raises(MismatchError, match=r"image patch_size: \d+ and \d+"):
        CacheReader.open([str(tmp_path / "c"), str(tmp_path / "d")])


@pytest.mark.smoke
def test_damage_is_noticed(run_export: Export, tmp_path: Path) -> None:
    run_export()
    shard = sorted((tmp_path / "cache" / "train").glob("data-*.arrow"))[2]
    data = shard.read_bytes()
    shard.write_bytes(data[:-10])
    with pytest.raises(MismatchError, match=f"has {len(data) - 10} bytes, the manifest says {len(data)}"):
        CacheReader.open([str(tmp_path / "cache")])
    shard.unlink()
    with pytest.raises(MismatchError, match="is missing"):
        CacheReader.open([str(tmp_path / "cache")])
    with pytest.raises(MismatchError, match="no val split"):
        CacheReader.open([str(tmp_path / "cache")], "val")


def test_other_formats_are_refused(run_export: Export, tmp_path: Path) -> None:
    run_export()
    path = tmp_path / "cache" / "packtool.json"
    manifest = json.loads(path.read_text())
    manifest["identity"]["format_version"] = 99
    path.write_text(json.dumps(manifest))
    with pytest.raises(MismatchError, match="format 99"):
        CacheReader.open([str(tmp_path / "cache")])
