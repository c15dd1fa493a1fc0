"""What a cache says of the beginnings of its samples: hashes that planning finds trees by."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from packtool import storage
from packtool.cache import export as export_module
from packtool.cache import task as task_module
from packtool.cache.index import SplitPrefixes, prefix_batch, with_prefix_fields
from packtool.cache.manifest import ExportSummary
from packtool.cache.reader import CacheReader
from packtool.cache.shard import OLD_PREFIX, PREFIXES
from packtool.encode.media_spans import MediaTokens
from packtool.encode.prefix_hashes import PrefixHashes, by_address, prefix_hashes
from packtool.errors import MismatchError
from tests.cache.conftest import CONTROL, tree

Export = Callable[..., ExportSummary]
PLACE = "train/prefixes.arrow"


@pytest.fixture(autouse=True)
def _short_prefixes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (task_module, export_module):
        monkeypatch.setattr(module, "MIN_SHARED", 3)


@pytest.fixture
def model_that_names_tokens(model: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "named"
    shutil.copytree(model, folder)
    ids = {f"{name}_token_id": 256 + CONTROL.index(f"<|{token}|>") for name, token in NAMES.items()}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "vision_config": {}} | ids))
    return folder


NAMES = {"image": "image_pad", "vision_start": "vision_start", "vision_end": "vision_end"}


@pytest.fixture
def ask(run_export: Export, model_that_names_tokens: Path, rows: Path) -> Export:
    """Exports rows in which each of three pictures is asked four questions."""
    lines = []
    for row_index in range(24):
        turns = [
            {"role": "user", "content": f"<image>{'abcd'[row_index % 4]}?"},
            {"role": "assistant", "content": "yes"},
        ]
        row = {"messages": turns, "images": [f"{row_index // 4 % 3}.png"], "channel": "c" if row_index >= 12 else None}
        lines.append(json.dumps(row))
    rows.write_text("\n".join(lines))

    def run(name: str = "cache", **settings: Any) -> ExportSummary:
        return run_export(name, **({"model": str(model_that_names_tokens), "rows_per_shard": 5} | settings))

    return run


def prefixes_of_cache(cache: Path) -> tuple[CacheReader, SplitPrefixes]:
    reader = CacheReader.open([str(cache)])
    prefixes = reader.prefixes()
    assert prefixes is not None
    return reader, prefixes


@pytest.mark.parametrize("media", ["reference", "embed"])
def test_each_sample_has_the_hashes_of_its_own_prefixes(ask: Export, tmp_path: Path, media: str) -> None:
    ask(media=media)
    reader, prefixes = prefixes_of_cache(tmp_path / "cache")
    config = json.loads((tmp_path / "named" / "config.json").read_text())
    samples = [reader.sample(i) for i in range(len(reader))]
    counts, expected = prefix_hashes(samples, MediaTokens.of(config), longer_than=3)
    assert np.diff(prefixes.offsets).tolist() == counts.tolist()
    for name, expected_column in expected._asdict().items():
        assert getattr(prefixes.prefixes, name).tolist() == expected_column.tolist()
        assert getattr(prefixes.prefixes, name).dtype == expected_column.dtype
    # The picture, the beginning of the answer and its end; a picture's hash is that of its rows, of both channels.
    assert set(np.diff(prefixes.offsets).tolist()) == {3}
    pictures = prefixes.prefixes.hashes[prefixes.offsets[:-1]]
    assert sorted(np.unique(pictures, return_counts=True)[1].tolist()) == [8] * 3
    assert (prefixes.prefixes.media_tokens == np.repeat(reader.index.media_tokens, 3)).all()
    assert (prefixes.prefixes.patch_squares == np.repeat(reader.index.patch_squares, 3)).all()


def test_samples_with_media_files_have_prefix_hashes(ask: Export, tmp_path: Path, bucket: str) -> None:
    ask("first", media="reference")
    ask("second", media="reference", max_length=500)
    ask("embedded", media="embed")
    for file in (tmp_path / "second").rglob("*.*"):
        storage.publish(f"{bucket}/{file.relative_to(tmp_path)}", file.read_bytes())
    reader = CacheReader.open([str(tmp_path / "first"), f"{bucket}/second", str(tmp_path / "embedded")])
    prefixes = reader.prefixes()
    assert prefixes is not None
    for sample_index, (start, stop) in enumerate(itertools.pairwise(prefixes.offsets)):
        here = slice(start, stop)
        hashes = dict(
            zip(prefixes.prefixes.lengths[here].tolist(), prefixes.prefixes.hashes[here].tolist(), strict=True)
        )
        assert reader.sample(sample_index).prefix_hashes == (hashes if reader.cache_of(sample_index)[0] < 2 else None)
    (tmp_path / "first" / PLACE).write_bytes(b"damaged")
    assert CacheReader.open([str(tmp_path / "first")]).sample(0).prefix_hashes is None


def test_prefixes_do_not_depend_on_the_number_of_shards(ask: Export, tmp_path: Path) -> None:
    for name, rows_per_shard in (("few", 100), ("many", 5)):
        ask(name, rows_per_shard=rows_per_shard)
    few_shards, many_shards = (prefixes_of_cache(tmp_path / name)[1] for name in ("few", "many"))
    assert few_shards.offsets.tolist() == many_shards.offsets.tolist()
    assert few_shards.prefixes.hashes.tolist() == many_shards.prefixes.hashes.tolist()


def test_several_caches_are_joined(ask: Export, run_export: Export, tmp_path: Path) -> None:
    ask("one")
    ask("other", split_dataset_ratio=0.3, seed=1)
    separate = [prefixes_of_cache(tmp_path / name)[1] for name in ("one", "other")]
    both = CacheReader.open([str(tmp_path / name) for name in ("one", "other")]).prefixes()
    assert both is not None
    assert both.offsets.tolist() == [*separate[0].offsets, *(separate[0].offsets[-1] + separate[1].offsets[1:])]
    assert both.prefixes.hashes.tolist() == [*separate[0].prefixes.hashes, *separate[1].prefixes.hashes]
    assert set(both.prefixes.hashes.tolist()) == set(separate[0].prefixes.hashes.tolist())


def write_rows(rows: Path, images: list[str]) -> None:
    """A row about each picture, all with the same question."""
    turns = [{"role": "user", "content": "<image>a?"}, {"role": "assistant", "content": "yes"}]
    rows.write_text("\n".join(json.dumps({"messages": turns, "images": [image]}) for image in images))


def test_image_hashes_do_not_depend_on_paths(
    run_export: Export, model_that_names_tokens: Path, rows: Path, tmp_path: Path
) -> None:
    """A copy, a link, an absolute path, and bytes in the row; one of another content, of the same size, is not."""
    picture = tmp_path / "0.png"
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(picture, tmp_path / "elsewhere" / "copy.png")
    (tmp_path / "link.png").symlink_to(picture)
    inline = f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"
    other = bytearray(picture.read_bytes())
    other[-30] ^= 1
    (tmp_path / "other.png").write_bytes(other)
    write_rows(rows, ["0.png", "elsewhere/copy.png", "link.png", str(picture), inline, "other.png", "0.png"])
    hashes_by_cache = []
    for media in ("reference", "embed"):
        run_export(media, model=str(model_that_names_tokens), media=media)
        _, prefixes = prefixes_of_cache(tmp_path / media)
        hashes = prefixes.prefixes.hashes.reshape(7, 3)
        assert (hashes[[0, 1, 2, 3, 4, 6]] == hashes[0]).all()
        assert (hashes[5] != hashes[0]).all()
        hashes_by_cache.append(hashes.tolist())
    assert hashes_by_cache[0] == hashes_by_cache[1], "rows of both caches share"


def test_changed_images_have_other_hashes(
    run_export: Export, model_that_names_tokens: Path, rows: Path, tmp_path: Path
) -> None:
    write_rows(rows, ["0.png"])
    for name in ("before", "after", "again"):
        run_export(name, model=str(model_that_names_tokens))
        data = bytearray((tmp_path / "0.png").read_bytes())
        data[-30] ^= 1
        (tmp_path / "0.png").write_bytes(data)
    before, after, unchanged = (
        prefixes_of_cache(tmp_path / name)[1].prefixes.hashes for name in ("before", "after", "again")
    )
    assert (before != after).all()
    assert before.tolist() == unchanged.tolist()


def _make_older(cache: Path) -> None:
    """The cache as a packtool without prefixes would have written it."""
    path = cache / "packtool.json"
    document = json.loads(path.read_text())
    for split, info in document["splits"].items():
        (cache / split / "prefixes.arrow").unlink()
        del info["prefixes_sha256"]
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def test_an_older_cache_has_no_prefixes(ask: Export, tmp_path: Path) -> None:
    ask("new")
    ask("old")
    _make_older(tmp_path / "old")
    assert CacheReader.open([str(tmp_path / "old")]).prefixes() is None
    assert CacheReader.open([str(tmp_path / "new"), str(tmp_path / "old")]).prefixes() is None
    ask("old")  # is finished already


def test_an_export_started_by_an_older_packtool_has_no_prefixes(
    ask: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = task_module.TaskResult.to_json

    def older(result: task_module.TaskResult) -> bytes:
        raw = json.loads(written(result))
        for split in raw["splits"].values():
            del split["prefixes_sha256"]
        return json.dumps(raw).encode()

    monkeypatch.setattr(task_module.TaskResult, "to_json", older)
    monkeypatch.setattr("packtool.cache.output_dir.publish_cache", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        ask()
    monkeypatch.undo()
    ask()
    assert not (tmp_path / "cache" / PLACE).exists()
    assert CacheReader.open([str(tmp_path / "cache")]).prefixes() is None


def _interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_damage_is_detected_and_repaired(ask: Export, tmp_path: Path) -> None:
    ask()
    expected_files = tree(tmp_path / "cache")
    file = tmp_path / "cache" / PLACE
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    for broken in (None, bytes(data)):
        if broken is None:
            file.unlink()
        else:
            file.write_bytes(broken)
        with pytest.raises(MismatchError, match=r"prefixes\.arrow"):
            CacheReader.open([str(tmp_path / "cache")]).prefixes()
        ask(repair=True)
        assert tree(tmp_path / "cache") == expected_files


def test_prefixes_of_an_older_packtool_have_unknown_targets(ask: Export, tmp_path: Path) -> None:
    ask()
    file, manifest = tmp_path / "cache" / PLACE, tmp_path / "cache" / "packtool.json"
    batches = pa.ipc.open_file(file).read_all().to_batches()
    _, expected = prefixes_of_cache(tmp_path / "cache")
    older = [with_prefix_fields(batch, OLD_PREFIX) for batch in batches]
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, older[0].schema) as writer:
        for batch in older:
            writer.write_batch(batch)
    document = json.loads(manifest.read_text())
    document["splits"]["train"]["prefixes_sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(document))
    _, prefixes = prefixes_of_cache(tmp_path / "cache")
    assert (prefixes.prefixes.target_tokens == -1).all()
    assert prefixes.prefixes.hashes.tolist() == expected.prefixes.hashes.tolist()
    contents = file.read_bytes()
    file.unlink()
    ask(repair=True)
    assert file.read_bytes() == contents


def test_prefixes_with_media_hashed_by_path_are_repaired(
    ask: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_module, "prefix_hashes", partial(prefix_hashes, medium_key=by_address))
    ask()
    monkeypatch.setattr(task_module, "prefix_hashes", prefix_hashes)
    ask("new")
    older, new = (prefixes_of_cache(tmp_path / name)[1] for name in ("cache", "new"))
    assert older.offsets.tolist() == new.offsets.tolist()
    assert not set(older.prefixes.hashes.tolist()) & set(new.prefixes.hashes.tolist())
    expected_files = tree(tmp_path / "cache")
    (tmp_path / "cache" / PLACE).unlink()
    ask(repair=True)
    assert tree(tmp_path / "cache") == expected_files


def test_prefixes_are_not_recreated_from_changed_media(ask: Export, tmp_path: Path) -> None:
    ask()
    (tmp_path / "cache" / PLACE).unlink()
    with (tmp_path / "0.png").open("ab") as file:
        file.write(b"more")
    with pytest.raises(MismatchError, match="media files have changed since the export"):
        ask(repair=True)
    assert not (tmp_path / "cache" / PLACE).exists()


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ([[5, 9]], "1 rows, not 24"),
        ([[5, 9]] * 23 + [[9, 5]], "not in ascending order"),
        ([[5, 9]] * 23 + [[5, 10_000]], "longer than its sample"),
        ([[0, 9]] * 24, "longer than its sample"),
    ],
)
def test_prefixes_of_another_index_are_refused(
    ask: Export, tmp_path: Path, changed: list[list[int]], problem: str
) -> None:
    ask()
    file, manifest = tmp_path / "cache" / PLACE, tmp_path / "cache" / "packtool.json"
    counts, ends = np.array([len(line) for line in changed]), np.concatenate(changed)
    prefixes = PrefixHashes(*(ends.astype(field.type.to_pandas_dtype()) for field in PREFIXES[0].type.value_type))
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, PREFIXES) as writer:
        writer.write_batch(prefix_batch(counts, prefixes))
    document = json.loads(manifest.read_text())
    document["splits"]["train"]["prefixes_sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(document))
    with pytest.raises(MismatchError, match=problem):
        CacheReader.open([str(tmp_path / "cache")]).prefixes()


def test_prefixes_with_unknown_hashes_cannot_be_repaired(
    ask: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in caches of an older packtool: the samples are sound, and the file says how to do without it."""
    ask()
    (tmp_path / "cache" / PLACE).unlink()
    monkeypatch.setattr(export_module, "MIN_SHARED", 1000)
    with pytest.raises(MismatchError, match=r"prefixes\.arrow cannot be recreated: packtool .* wrote it") as error:
        ask(repair=True)
    assert "--share-prefix false" in str(error.value.remedy)
    reader = CacheReader.open([str(tmp_path / "cache")])
    assert len(reader.sample(0).input_ids)
