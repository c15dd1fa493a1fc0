from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from packtool import storage
from packtool.cache import export as export_module
from packtool.cache.export import ExportSummary
from packtool.cache.manifest import Manifest
from packtool.cache.reader import CacheReader
from packtool.errors import ConfigError, DataError, MismatchError, RowError, StorageError
from tests.cache.conftest import tree

Export = Callable[..., ExportSummary]


def test_every_row_is_kept_or_has_its_line(run_export: Export, tmp_path: Path) -> None:
    summary = run_export(split_dataset_ratio=0.1)
    lines = [json.loads(line) for line in (tmp_path / "cache" / "dropped.jsonl").read_text().splitlines()]
    assert summary.rows == 600 == summary.kept + len(lines)
    assert Counter(line["reason"] for line in lines) == Counter(summary.dropped)
    assert set(summary.dropped) == {"invalid_json", "media_missing", "over_max_length"}
    assert all(set(line) == {"source", "row", "reason", "detail"} for line in lines)
    readers = [CacheReader.open([str(tmp_path / "cache")], split) for split in ("train", "val")]
    numbers = [reader.sample(i).row for reader in readers for i in range(len(reader))]
    assert sorted(numbers + [line["row"] for line in lines]) == list(range(600))


def test_datasets_opens_it_and_sees_what_the_reader_gives(run_export: Export, tmp_path: Path) -> None:
    import datasets

    run_export()
    dataset = datasets.load_from_disk(str(tmp_path / "cache" / "train"))
    reader = CacheReader.open([str(tmp_path / "cache")])
    assert len(dataset) == len(reader)
    for i in range(0, len(reader), 37):
        row, sample = dataset[i], reader.sample(i)
        assert row["input_ids"] == sample.input_ids.tolist()
        assert row["labels"] == sample.labels.tolist()
        assert row["turns"] == sample.turns.tolist()
        assert row["length"] == sample.length == reader.index.length[i]
        assert [image["grid"] for image in row["images"]] == [list(image.grid) for image in sample.images]
        assert (row["source"], row["row"], row["channel"]) == (sample.source, sample.row, sample.channel)
        assert reader.index.target_tokens[i] == int((sample.labels != -100).sum())
        assert reader.index.media_tokens[i] == sample.num_media_tokens
        code = reader.index.channel[i]
        assert (reader.index.channels[code] if code >= 0 else None) == sample.channel


def test_same_bytes_for_any_number_of_processes(run_export: Export, tmp_path: Path) -> None:
    for num_proc in (1, 2, 3):
        run_export(f"cache{num_proc}", dataset_num_proc=num_proc, split_dataset_ratio=0.05)
    assert tree(tmp_path / "cache1") == tree(tmp_path / "cache2") == tree(tmp_path / "cache3")
    assert len(tree(tmp_path / "cache1")) > 24


def test_the_split_is_exact_and_seeded(run_export: Export, tmp_path: Path) -> None:
    def val_rows(name: str, **settings: Any) -> list[int]:
        run_export(name, split_dataset_ratio=0.1, max_length=10_000, **settings)
        reader = CacheReader.open([str(tmp_path / name)], "val")
        return [reader.sample(i).row for i in range(len(reader))]

    first = val_rows("a")
    dropped = [json.loads(line)["row"] for line in (tmp_path / "a" / "dropped.jsonl").read_text().splitlines()]
    assert 60 - len(dropped) <= len(first) <= 60
    assert val_rows("b", rows_per_shard=300) == first
    assert val_rows("c", seed=1) != first


def test_a_finished_cache_is_not_made_again(run_export: Export, tmp_path: Path, rows: Path, model: Path) -> None:
    made = run_export()
    before = tree(tmp_path / "cache")
    again = run_export()
    assert again.already_finished
    assert not made.already_finished
    assert (again.kept, again.lengths, again.dropped) == (made.kept, made.lengths, made.dropped)
    with pytest.raises(MismatchError, match=r"spec\.max_length: 200 there, 150 here"):
        run_export(max_length=150)
    os.utime(rows)  # touched but the same
    assert run_export().already_finished
    rows.write_text(rows.read_text() + rows.read_text().splitlines()[1] + "\n")
    with pytest.raises(MismatchError, match="has changed"):
        run_export()
    assert tree(tmp_path / "cache") == before
    assert run_export(overwrite=True).rows == 601


def test_a_foreign_folder_is_never_touched(run_export: Export, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "thesis.txt").write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match=r"thesis\.txt"):
            run_export(overwrite=overwrite)
    assert tree(tmp_path / "cache") == {"thesis.txt": b"precious"}


def test_strict_names_file_and_row_and_leaves_no_cache(run_export: Export, tmp_path: Path) -> None:
    with pytest.raises(RowError, match=r"rows\.jsonl, row 0: invalid_json"):
        run_export(strict=True)
    with pytest.raises(MismatchError, match="no finished cache"):
        CacheReader.open([str(tmp_path / "cache")])
    # A start that finished nothing does not stand in the way of another one.
    assert run_export(strict=False).rows == 600


def test_nothing_left_is_an_error(run_export: Export) -> None:
    with pytest.raises(DataError, match="none of 600 rows is left"):
        run_export(max_length=3)


def test_a_dry_run_counts_and_writes_nothing(run_export: Export, tmp_path: Path) -> None:
    counted = run_export(dry_run=True)
    assert not (tmp_path / "cache").exists()
    made = run_export()
    assert (counted.kept, counted.tokens, counted.dropped) == (made.kept, made.tokens, made.dropped)
    assert counted.lengths == made.lengths


def test_truncated_rows_are_counted_with_their_tokens(run_export: Export, tmp_path: Path) -> None:
    summary = run_export(truncation_strategy="left")
    reader = CacheReader.open([str(tmp_path / "cache")])
    removed = np.array([reader.sample(i).num_truncated for i in range(len(reader))])
    assert summary.truncated == int((removed > 0).sum()) > 0
    assert reader.manifests[0].splits["train"].truncated_tokens == int(removed.sum())
    assert int(reader.index.length.max()) == 200
    assert reader.manifests[0].num_shortened == summary.truncated


@pytest.mark.parametrize("fails_at", [0, 1, 2, 5, 11, 23, 30])
def test_a_full_disk_leaves_nothing_that_looks_whole(
    run_export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    import builtins

    opened = 0
    real_open = builtins.open

    def failing_open(path: Any, mode: str = "r", **options: Any) -> Any:
        nonlocal opened
        if "w" in mode and str(path).startswith(str(tmp_path / "cache")):
            opened += 1
            if opened > fails_at:
                raise OSError(28, "No space left on device")
        return real_open(path, mode, **options)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "open", failing_open, raising=False)
        with pytest.raises(StorageError, match="No space left"):
            run_export()
        with pytest.raises(MismatchError):
            Manifest.read(str(tmp_path / "cache"))
    run_export()
    run_export("undisturbed")
    assert tree(tmp_path / "cache") == tree(tmp_path / "undisturbed")


def test_the_manifest_is_written_last(run_export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    real = storage.publish
    monkeypatch.setattr(storage, "publish", lambda path, data: (order.append(path), real(path, data))[1])
    run_export()
    assert order[-1] == str(tmp_path / "cache" / "packtool.json")


def _command(model: Path, rows: Path, output: Path) -> list[str]:
    command = [sys.executable, "-m", "packtool", "export", "--model", str(model), "--dataset", str(rows)]
    return [*command, "--output-dir", str(output), "--max-length", "200", "--rows-per-shard", "20"]


def test_kill_and_go_on(model: Path, rows: Path, tmp_path: Path) -> None:
    """``kill -9`` in the middle, many times; then the same command ends with the same bytes."""
    output = tmp_path / "killed"
    command = [*_command(model, rows, output), "--dataset-num-proc", "2"]
    dice = random.Random(0)
    for _ in range(6):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        time.sleep(dice.uniform(0.3, 2.5))
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    subprocess.run(_command(model, rows, tmp_path / "whole"), check=True, capture_output=True, timeout=60)
    assert tree(output) == tree(tmp_path / "whole")


def test_a_dead_worker_ends_the_run(tmp_path: Path, model: Path, rows: Path) -> None:
    big = tmp_path / "big.jsonl"
    big.write_text(rows.read_text() * 40)
    command = [*_command(model, big, tmp_path / "dead"), "--dataset-num-proc", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    marker = tmp_path / "dead" / ".tasks" / "00000.json"
    while not marker.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    workers = [child for child in psutil.Process(process.pid).children() if "spawn_main" in " ".join(child.cmdline())]
    assert workers, "no worker was seen"
    workers[0].kill()
    _, told = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "a worker process died" in told
    assert "Run the same command again" in told


def test_ctrl_c_ends_at_once_and_says_how_to_go_on(model: Path, rows: Path, tmp_path: Path) -> None:
    big = tmp_path / "big.jsonl"
    big.write_text(rows.read_text() * 40)
    command = [*_command(model, big, tmp_path / "stopped"), "--dataset-num-proc", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    marker = tmp_path / "stopped" / ".tasks" / "00000.json"
    deadline = time.monotonic() + 60
    while not marker.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "goes on" in told
    assert "Traceback" not in told


def test_tasks_do_not_depend_on_anything_but_rows_and_settings(run_export: Export, monkeypatch: Any) -> None:
    seen: list[list[Any]] = []
    real = export_module.make_tasks
    monkeypatch.setattr(export_module, "make_tasks", lambda *args: seen.append(real(*args)) or seen[-1])
    run_export("a", dataset_num_proc=1)
    run_export("b", dataset_num_proc=1)
    assert seen[0] == seen[1]
    assert sum(task.num_rows for task in seen[0]) == 600
