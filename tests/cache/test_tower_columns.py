"""What an index says of the towers' work, and caches of a packtool that did not keep it yet."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from packtool.cache import task as task_module
from packtool.cache.hygiene import HASHED_INDEX
from packtool.cache.index import with_estimates
from packtool.cache.manifest import ExportSummary
from packtool.cache.reader import CacheReader
from packtool.cache.shard import ADDED_COLUMNS, INDEX, UNKNOWN
from packtool.encode.encoded import EncodedAudio, EncodedImage, EncodedSample, EncodedVideo
from packtool.encode.families import ImageLimits, MediaLimits
from tests.cache.conftest import tree

Export = Callable[..., ExportSummary]
OLDER = pa.schema([field for field in INDEX if field.name not in ADDED_COLUMNS])


def _make_older(cache: Path, older: pa.Schema = OLDER) -> None:
    """The cache as a packtool without the added columns, or with this schema of an index, would have written it."""
    path = cache / "packtool.json"
    document = json.loads(path.read_text())
    for split, info in document["splits"].items():
        index = cache / split / "index.arrow"
        with pa.ipc.open_file(pa.BufferReader(index.read_bytes())) as file:
            batches = [file.get_batch(i).select(older.names) for i in range(file.num_record_batches)]
        with pa.OSFile(str(index), "wb") as sink, pa.ipc.new_file(sink, older) as writer:
            for batch in batches:
                writer.write_batch(batch)
        info["index_sha256"] = hashlib.sha256(index.read_bytes()).hexdigest()
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def test_the_index_has_the_cost_of_vision_and_audio_towers(run_export: Export, tmp_path: Path) -> None:
    run_export()
    reader = CacheReader.open([str(tmp_path / "cache")])
    samples = [reader.sample(i) for i in range(len(reader))]
    assert reader.index.patch_squares.tolist() == [sample.patch_squares for sample in samples]
    assert reader.index.patch_squares.dtype == np.int64
    image_samples = [sample for sample in samples if sample.images]
    assert image_samples
    assert reader.index.num_patches.tolist() == [4 * sample.num_media_tokens for sample in samples]
    assert all(sample.patch_squares == (4 * sample.num_media_tokens) ** 2 > 0 for sample in image_samples)
    assert not reader.index.audio_tokens.any()
    assert reader.index.vision_tokens.tolist() == reader.index.media_tokens.tolist()


def test_patch_squares_count_frames_and_audio_tracks() -> None:
    no_tokens = np.zeros(0, np.int32)
    track = EncodedAudio(None, None, 1, 1, 7)
    image = EncodedImage("a", None, 1, 1, (1, 4, 6), 6)
    video = EncodedVideo("b", None, (), 1, 1, 1, 1.0, (0,), (3, 4, 2), 1.0, 6, track)
    plain = EncodedImage("c", None, 1, 1, (), 5)  # of a family without grids
    sound = EncodedAudio("d", None, 1, 1, 3)
    sample = EncodedSample(
        no_tokens, no_tokens, no_tokens, (image, plain), None, "s", 0, videos=(video,), audios=(sound,)
    )
    assert sample.patch_squares == 24**2 + 3 * 8**2
    assert sample.num_patches == 24 + 3 * 8
    assert (sample.num_media_tokens, sample.num_audio_tokens) == (6 + 5 + 6 + 7 + 3, 10)


def test_older_and_new_caches_are_joined(run_export: Export, tmp_path: Path) -> None:
    for name in ("old", "new"):
        run_export(name)
    _make_older(tmp_path / "old")
    old, new = (CacheReader.open([str(tmp_path / name)]) for name in ("old", "new"))
    assert old.fingerprint == new.fingerprint
    # A picture a sample: what is guessed is what is true.
    assert old.index.patch_squares.tolist() == new.index.patch_squares.tolist()
    assert old.index.num_patches.tolist() == new.index.num_patches.tolist()
    both = CacheReader.open([str(tmp_path / "old"), str(tmp_path / "new")]).index
    assert both.patch_squares.tolist() == 2 * new.index.patch_squares.tolist()
    run_export("old")  # is finished already


@pytest.mark.parametrize("num_missing", [1, len(ADDED_COLUMNS)])
def test_repaired_older_index_is_identical(num_missing: int, run_export: Export, tmp_path: Path) -> None:
    run_export()
    _make_older(tmp_path / "cache", pa.schema(list(INDEX)[:-num_missing]))
    expected_files = tree(tmp_path / "cache")
    (tmp_path / "cache" / "train" / "index.arrow").unlink()
    run_export(repair=True)
    assert tree(tmp_path / "cache") == expected_files


def test_an_export_resumes_from_tasks_of_an_older_packtool(
    run_export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_export("whole")
    write = task_module.arrow_bytes

    def older(batches: list[pa.RecordBatch], schema: pa.Schema, new: Callable[..., pa.RecordBatchWriter]) -> bytes:
        if schema is HASHED_INDEX:
            return write([batch.select(OLDER.names) for batch in batches], OLDER, new)
        return write(batches, schema, new)

    with monkeypatch.context() as patched:
        patched.setattr(task_module, "arrow_bytes", older)
        run_export(num_tasks=2, task_index=0)
    run_export(num_tasks=2, task_index=1)
    resumed_index, full_index = (CacheReader.open([str(tmp_path / name)]).index for name in ("cache", "whole"))
    assert resumed_index.patch_squares.tolist() == full_index.patch_squares.tolist()
    with pa.ipc.open_file(pa.BufferReader((tmp_path / "cache/train/index.arrow").read_bytes())) as file:
        patch_squares = file.read_all().column("patch_squares").to_numpy()
    assert (patch_squares == UNKNOWN).any()
    assert (patch_squares > 0).any()


def test_unknown_columns_are_estimated_from_counts() -> None:
    limits = MediaLimits(image=ImageLimits(1, 1, patch_size=16, merge_size=2, temporal_patch_size=2))
    columns = {
        "media_tokens": np.array([0, 100, 1024, 60, 90, 7], np.int32),
        "num_images": np.array([0, 2, 0, 0, 1, 1], np.int32),
        "num_videos": np.array([0, 0, 1, 0, 0, 0], np.int32),
        "num_audios": np.array([0, 0, 0, 3, 2, 0], np.int32),
        "audio_tokens": np.array([-1, -1, -1, -1, -1, 0], np.int32),
        "patch_squares": np.array([-1, -1, -1, -1, -1, 5]),
        "num_patches": np.array([-1, -1, 2048, -1, -1, 7], np.int32),
    }
    estimates = with_estimates(columns, limits)
    assert estimates["audio_tokens"].tolist() == [0, 0, 0, 60, 60, 0]
    frames = 1024 / 256
    assert estimates["patch_squares"].tolist() == [0, 2 * 200**2, frames * 1024**2, 0, 120**2, 5]
    assert estimates["num_patches"].tolist() == [0, 2 * 200, 2048, 0, 120, 7]
    assert estimates["audio_tokens"].dtype == np.int32
    without = with_estimates(columns, MediaLimits())
    assert without["patch_squares"].tolist() == [0, 0, 0, 0, 0, 5]
