from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
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
from packtool.cache import executor as executor_module
from packtool.cache import export as export_module
from packtool.cache import output_dir
from packtool.cache.manifest import ExportSummary, Manifest
from packtool.cache.reader import CacheReader
from packtool.cli.main import run
from packtool.config.data import ExportConfig
from packtool.errors import ConfigError, DataError, MismatchError, RowError, StorageError
from packtool.progress import SilentProgress
from packtool.report.tables import export_lines
from packtool.rows import read as scan_module
from packtool.storage import local as local_storage
from tests.cache.conftest import RecordingProgress, tree
from tests.forked import forked_process
from tests.waiting import PATIENCE_S, wait_for

Export = Callable[..., ExportSummary]


@pytest.mark.smoke
def test_every_row_is_kept_or_listed_as_dropped(run_export: Export, tmp_path: Path) -> None:
    summary = run_export(split_dataset_ratio=0.1)
    lines = [json.loads(line) for line in (tmp_path / "cache" / "dropped.jsonl").read_text().splitlines()]
    assert summary.num_rows == 600 == summary.num_samples + len(lines)
    assert Counter(line["reason"] for line in lines) == Counter(summary.dropped)
    assert set(summary.dropped) == {"invalid_json", "media_missing", "over_max_length"}
    assert all(set(line) == {"source", "row", "reason", "detail", "code"} for line in lines)
    readers = [CacheReader.open([str(tmp_path / "cache")], split) for split in ("train", "val")]
    numbers = [reader.sample(i).row for reader in readers for i in range(len(reader))]
    assert sorted(numbers + [line["row"] for line in lines]) == list(range(600))


def test_datasets_reads_the_same_samples_as_the_reader(run_export: Export, tmp_path: Path) -> None:
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


@pytest.mark.smoke
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

    val_numbers = val_rows("a")
    dropped = [json.loads(line)["row"] for line in (tmp_path / "a" / "dropped.jsonl").read_text().splitlines()]
    assert 60 - len(dropped) <= len(val_numbers) <= 60
    assert val_rows("b", rows_per_shard=300) == val_numbers
    assert val_rows("c", seed=1) != val_numbers


def test_a_finished_cache_is_not_exported_again(run_export: Export, tmp_path: Path, rows: Path, model: Path) -> None:
    first_summary = run_export()
    before = tree(tmp_path / "cache")
    second_summary = run_export()
    assert second_summary.already_finished
    assert not first_summary.already_finished
    assert (second_summary.num_samples, second_summary.length, second_summary.dropped) == (
        first_summary.num_samples,
        first_summary.length,
        first_summary.dropped,
    )
    with pytest.raises(MismatchError, match=r"spec\.max_length: 200 there, 150 here"):
        run_export(max_length=150)
    os.utime(rows)  # touched but the same
    assert run_export().already_finished
    rows.write_text(rows.read_text() + rows.read_text().splitlines()[1] + "\n")
    with pytest.raises(MismatchError, match="has changed"):
        run_export()
    assert tree(tmp_path / "cache") == before
    assert run_export(overwrite=True).num_rows == 601


def test_folder_without_a_cache_is_never_changed(run_export: Export, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "thesis.txt").write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match=r"thesis\.txt"):
            run_export(overwrite=overwrite)
    assert list(tree(tmp_path / "cache")) == ["thesis.txt"]
    assert (tmp_path / "cache" / "thesis.txt").read_text() == "precious"


def test_strict_names_file_and_row_and_leaves_no_cache(run_export: Export, tmp_path: Path) -> None:
    with pytest.raises(RowError, match=r"rows\.jsonl, row 0: invalid_json"):
        run_export(strict=True)
    with pytest.raises(MismatchError, match="no finished cache"):
        CacheReader.open([str(tmp_path / "cache")])
    # A start that finished nothing does not stand in the way of another one.
    assert run_export(strict=False).num_rows == 600


def test_empty_export_names_a_remedy_and_can_be_repeated(run_export: Export, rows: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none of 600 rows was kept: .* over_max_length(.|\n)*--max-length"):
        run_export(max_length=3)
    elsewhere = tmp_path / "elsewhere.jsonl"
    turns = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "!"}]
    elsewhere.write_text("".join(json.dumps({"messages": turns, "images": [f"{i}.png"]}) + "\n" for i in range(3)))
    (tmp_path / "pictures").mkdir()
    for i in range(3):
        (tmp_path / f"{i}.png").rename(tmp_path / "pictures" / f"{i}.png")
    with pytest.raises(DataError, match=r"none of 3 rows was kept: 3 media_missing(.|\n)*--media-root"):
        run_export(dataset=(str(elsewhere),))
    assert "media_missing" in (tmp_path / "cache" / "dropped.jsonl").read_text()
    assert run_export(dataset=(str(elsewhere),), media_root=str(tmp_path / "pictures")).num_samples == 3
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["dropped.jsonl", "packtool.json", "train"]


def test_small_files_share_shards(run_export: Export, rows: Path, tmp_path: Path) -> None:
    """As one file would be cut; a sample drawn of all stays the same."""
    (tmp_path / "small").mkdir()
    lines = rows.read_text().splitlines(keepends=True)
    for i in range(0, 600, 3):
        (tmp_path / "small" / f"{i:04d}.jsonl").write_text("".join(lines[i : i + 3]))
    for i in range(5):
        shutil.copy(tmp_path / f"{i}.png", tmp_path / "small")
    summary = run_export("many", dataset=(str(tmp_path / "small" / "*.jsonl"),), split_dataset_ratio=0.1)
    run_export("one", split_dataset_ratio=0.1)
    assert summary.num_rows == 600
    many_files, one = (CacheReader.open([str(tmp_path / name)]) for name in ("many", "one"))
    assert len(many_files.manifests[0].sources) == 200
    assert len(many_files.manifests[0].splits["train"].shards) == 12  # 600 rows, no less than 50 each
    np.testing.assert_array_equal(many_files.index.length, one.index.length)
    for position in range(0, len(one), 41):
        np.testing.assert_array_equal(many_files.sample(position).labels, one.sample(position).labels)


def test_workers_start_while_many_files_are_scanned(
    run_export: Export, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    start, scan = executor_module.Executor.start, scan_module._existing_source
    monkeypatch.setattr(
        executor_module.Executor, "start", lambda self, num: events.append(f"start {num}") or start(self, num)
    )
    monkeypatch.setattr(scan_module, "_existing_source", lambda spec: events.append("file") or scan(spec))
    lines = rows.read_text().splitlines(keepends=True)
    paths = [str(tmp_path / f"{name}.jsonl") for name in "abc"]
    for i, path in enumerate(paths):
        Path(path).write_text("".join(lines[80 * i : 80 * i + 80]))
    run_export("few", dataset=tuple(paths[:1]), dataset_num_proc=2)  # of 80 rows, at 50 in a shard
    assert events == ["file", "start 1", "start 2"]
    events.clear()
    run_export("many", dataset=tuple(paths), dataset_num_proc=2)
    assert events[:4] == ["file", "file", "start 2", "file"]
    assert not multiprocessing.active_children()
    Path(paths[2]).write_text('{"unknown": 1}\n')
    with pytest.raises(DataError, match=r"c\.jsonl: the rows have no known form"):
        run_export("broken", dataset=tuple(paths), dataset_num_proc=2)
    assert not multiprocessing.active_children()  # those that had begun for nothing have ended


def test_workers_refuse_unsupported_models(
    run_export: Export, model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they begin before the files are looked through, this process makes no encoder of its own."""
    (tmp_path / "small").mkdir()
    for i in range(100):  # as many as two shards have rows
        shutil.copy(rows, tmp_path / "small" / f"{i:03d}.jsonl")
    shutil.copytree(model, tmp_path / "broken")
    (tmp_path / "broken" / "chat_template.jinja").write_text("{% for %}")
    monkeypatch.setattr(export_module, "Encoder", lambda *_: pytest.fail("made here"))
    with pytest.raises(ConfigError, match="the chat template is not valid Jinja"):
        run_export(
            model=str(tmp_path / "broken"),
            dataset=(str(tmp_path / "small"),),
            dataset_num_proc=2,
        )
    assert not (tmp_path / "cache").exists()
    assert not multiprocessing.active_children()


def test_scripts_need_no_guard_around_an_export(model: Path, rows: Path, tmp_path: Path) -> None:
    """Workers do not run the program's own module again, as processes that are spawned do."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys; from packtool.cache.export import export; from packtool.config.data import ExportConfig;"
        "from packtool.progress import SilentProgress; print('begins');"
        "given = dict(zip(('model', 'dataset', 'output_dir'), (sys.argv[1], (sys.argv[2],), sys.argv[3])));"
        "config = ExportConfig(max_length=200, rows_per_shard=300, dataset_num_proc=2, **given);"
        "print(export(config, SilentProgress()).num_rows)"
    )
    command = [sys.executable, str(script), str(model), str(rows), str(tmp_path / "cache")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "begins\n600\n"


class _RecordingProgress(SilentProgress):
    """What was noted, and how far it went."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.started: list[tuple[str, int | None]] = []

    def note(self, message: str) -> None:
        self.notes.append(message)

    def start(self, title: str, total: int | None) -> None:
        self.started.append((title, total))


def test_many_files_are_counted_but_not_listed(model: Path, rows: Path, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    for i in range(30):
        shutil.copy(rows, tmp_path / "small" / f"{i}.jsonl")
    progress = _RecordingProgress()
    options = {"model": str(model), "dataset": (str(tmp_path / "small"),), "output_dir": str(tmp_path / "cache")}
    export_module.export(ExportConfig(max_length=200, dry_run=True, **options), progress)
    assert len(progress.notes) <= 3
    assert any(note.startswith("30 files: 18,000 rows") for note in progress.notes)
    assert progress.started[0] == ("scan files", 30)


def test_speed_counts_only_rows_of_this_run(run_export: Export, tmp_path: Path) -> None:
    assert run_export("whole").rows_made == 600
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output_dir, "publish_cache", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_export()
    (tmp_path / "cache" / ".tasks" / "00003.json").unlink()
    summary = run_export()
    assert (summary.num_reused, summary.num_rows, summary.rows_made) == (9, 600, 64)


def test_files_lost_in_a_power_failure_are_recreated(
    run_export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a task, only its shards are waited for until the disk has them."""
    with monkeypatch.context() as patch:
        patch.setattr(output_dir, "publish_cache", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_export()
    tasks = tmp_path / "cache" / ".tasks"
    (tasks / "00001.json").write_bytes(b"")
    (tasks / "00003.train.arrow").write_bytes(b"")
    (tasks / "00005.train.prefixes.arrow").unlink()
    (tasks / "00007.train.arrow").write_bytes(bytes((tasks / "00007.train.arrow").stat().st_size))
    assert run_export().num_reused == 6
    run_export("undisturbed")
    assert tree(tmp_path / "cache") == tree(tmp_path / "undisturbed")


def test_a_full_disk_while_the_index_is_merged(
    run_export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = local_storage.LocalWriter.__init__

    class _Full:
        def __init__(self, file: Any) -> None:
            self._file = file

        def write(self, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    def begin(writer: Any, path: str) -> None:
        real(writer, path)
        if path.endswith("index.arrow"):
            writer._file = _Full(writer._file)

    with monkeypatch.context() as patch:
        patch.setattr(local_storage.LocalWriter, "__init__", begin)
        with pytest.raises(StorageError, match=r"index\.arrow: No space left(.|\n)*free space"):
            run_export()
    run_export()
    run_export("undisturbed")
    assert tree(tmp_path / "cache") == tree(tmp_path / "undisturbed")


def test_workers_leave_no_semaphores(run_export: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    """A semaphore with a name stays in ``/dev/shm`` when the whole group is killed."""
    import multiprocessing.synchronize

    def refuse_semaphore(*_: object, **__: object) -> None:
        raise AssertionError("a semaphore was made")

    monkeypatch.setattr(multiprocessing.synchronize.SemLock, "__init__", refuse_semaphore)
    assert run_export(dataset_num_proc=2).num_rows == 600


def test_rows_with_forbidden_media_cause_warnings_before_and_after(run_export: Export, tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "rows").mkdir()
    Image.new("RGB", (80, 60)).save(tmp_path / "a.png")
    turns = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "!"}]
    lines = [json.dumps({"messages": turns, "images": [str(tmp_path / "a.png")]})] * 100
    (tmp_path / "rows" / "far.jsonl").write_text("\n".join(lines))
    dataset, progress = (str(tmp_path / "rows" / "far.jsonl"),), RecordingProgress()
    with pytest.raises(DataError, match="none of 100 rows was kept: 100 media_not_allowed") as exc_info:
        run_export(dataset=dataset, progress=progress)
    assert "--media-root DIR" in str(exc_info.value.remedy)
    assert ["the first 64 rows with media will be dropped" in line for line in progress.notes] == [False, True]
    for name, allowed in {"a": {"media_root": str(tmp_path)}, "b": {"media_access": "local"}}.items():
        assert run_export(name, dataset=dataset, **allowed).num_samples == 100
    # What the rows could reach is told to whoever asks how the cache was made, and decides which cache it is.
    (source,) = Manifest.read(str(tmp_path / "b")).sources
    assert json.loads(source.settings) == {"media_access": "local"}


def test_a_dry_run_counts_and_writes_nothing(run_export: Export, tmp_path: Path) -> None:
    counted = run_export(dry_run=True)
    assert not (tmp_path / "cache").exists()
    summary = run_export()
    assert (counted.num_samples, counted.tokens, counted.dropped) == (
        summary.num_samples,
        summary.tokens,
        summary.dropped,
    )
    assert counted.length == summary.length


def test_truncated_rows_are_counted_with_their_tokens(run_export: Export, tmp_path: Path) -> None:
    summary = run_export(truncation_strategy="left")
    reader = CacheReader.open([str(tmp_path / "cache")])
    removed = np.array([reader.sample(i).num_truncated for i in range(len(reader))])
    assert summary.truncated == int((removed > 0).sum()) > 0
    assert reader.manifests[0].splits["train"].truncated_tokens == int(removed.sum())
    assert int(reader.index.length.max()) == 200
    assert reader.manifests[0].num_shortened == summary.truncated


@pytest.mark.parametrize("fails_at", [0, 1, 2, 5, 11, 23, 30])
def test_a_full_disk_leaves_no_finished_cache(
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
        patch.setattr(local_storage, "open", failing_open, raising=False)
        with pytest.raises(StorageError, match="No space left"):
            run_export()
        with pytest.raises(MismatchError):
            Manifest.read(str(tmp_path / "cache"))
    run_export()
    run_export("undisturbed")
    assert tree(tmp_path / "cache") == tree(tmp_path / "undisturbed")


def test_the_manifest_is_written_last(run_export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    for name in ("publish", "publish_new"):
        real = getattr(storage, name)
        recorded = lambda path, data, real=real, **options: (order.append(path), real(path, data, **options))[1]  # noqa: E731
        monkeypatch.setattr(storage, name, recorded)
    run_export()
    assert order[-1] == str(tmp_path / "cache" / "packtool.json")


def _words(model: Path, rows: Path, output: Path) -> list[str]:
    words = ["export", "--model", str(model), "--dataset", str(rows), "--output-dir", str(output)]
    return [*words, "--max-length", "200", "--rows-per-shard", "20"]


def _command(model: Path, rows: Path, output: Path) -> list[str]:
    return [sys.executable, "-m", "packtool", *_words(model, rows, output)]


def test_export_killed_at_random_times_resumes_exactly(model: Path, rows: Path, tmp_path: Path) -> None:
    """``kill -9`` at any moment: the same command goes on, and ends with the same bytes."""
    assert run(_words(model, rows, tmp_path / "whole")) == 0
    expected_files = tree(tmp_path / "whole")
    dice = random.Random(0)
    round_number = moments_inside = 0
    for _ in range(12):
        output = tmp_path / f"killed{round_number}"
        words = [*_words(model, rows, output), "--dataset-num-proc", str(dice.choice((1, 2)))]
        with forked_process(run, words) as process:
            if dice.random() < 0.8:  # from the first file on; else at any time
                wait_for(lambda output=output, process=process: output.exists() or not process.is_alive())
            time.sleep(dice.uniform(0.0, 0.4))
        if (output / "packtool.json").exists():
            # Killed behind its end: nothing may be missing, and another one begins.
            round_number += 1
        elif output.exists():
            moments_inside += 1
    assert moments_inside, "no moment was inside the work"
    for index in range(round_number + 1):
        output = tmp_path / f"killed{index}"
        assert run(_words(model, rows, output)) == 0
        assert tree(output) == expected_files


def test_a_dead_worker_ends_the_run(tmp_path: Path, model: Path, rows: Path) -> None:
    big = tmp_path / "big.jsonl"
    big.write_text(rows.read_text() * 40)
    command = [*_command(model, big, tmp_path / "dead"), "--dataset-num-proc", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    marker = tmp_path / "dead" / ".tasks" / "00000.json"
    wait_for(marker.exists, lambda: process.poll() is not None)
    workers = [child for child in psutil.Process(process.pid).children() if "spawn_main" in " ".join(child.cmdline())]
    assert workers, "no worker was seen"
    workers[0].kill()
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "a worker process died" in stderr
    assert "Run the same command again" in stderr


def test_ctrl_c_ends_immediately_and_says_how_to_resume(model: Path, rows: Path, tmp_path: Path) -> None:
    big = tmp_path / "big.jsonl"
    big.write_text(rows.read_text() * 40)
    command = [*_command(model, big, tmp_path / "stopped"), "--dataset-num-proc", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    marker = tmp_path / "stopped" / ".tasks" / "00000.json"
    wait_for(marker.exists, lambda: process.poll() is not None)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "repeat the command to resume" in " ".join(stderr.split())
    assert "Traceback" not in stderr


def test_sigterm_ends_like_ctrl_c_and_frees_the_directory(model: Path, rows: Path, tmp_path: Path) -> None:
    big = tmp_path / "big.jsonl"
    big.write_text(rows.read_text() * 40)
    command = [*_command(model, big, tmp_path / "stopped"), "--dataset-num-proc", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    marker = tmp_path / "stopped" / ".tasks" / "00000.json"
    wait_for(marker.exists, lambda: process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 143
    assert "repeat the command to resume" in " ".join(stderr.split())
    assert "resource_tracker" not in stderr
    assert not list((tmp_path / "stopped").glob(".lock-*"))


def test_tasks_do_not_depend_on_anything_but_rows_and_settings(run_export: Export, monkeypatch: Any) -> None:
    tasks_by_run: list[list[Any]] = []
    real = export_module.make_tasks
    monkeypatch.setattr(export_module, "make_tasks", lambda *args: tasks_by_run.append(real(*args)) or tasks_by_run[-1])
    run_export("a", dataset_num_proc=1)
    run_export("b", dataset_num_proc=1)
    assert tasks_by_run[0] == tasks_by_run[1]
    assert sum(task.num_rows for task in tasks_by_run[0]) == 600


def _python(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_settings_are_checked_before_the_old_cache_is_removed(run_export: Export, tmp_path: Path) -> None:
    run_export()
    before = tree(tmp_path / "cache")
    with pytest.raises(DataError):
        run_export(dataset=(str(tmp_path / "gone.jsonl"),), overwrite=True)
    with pytest.raises(ConfigError):
        run_export(model=str(tmp_path), overwrite=True)
    assert tree(tmp_path / "cache") == before


def test_a_marker_without_its_shard_is_ignored(run_export: Export, tmp_path: Path) -> None:
    run_export("whole")
    with pytest.raises(RowError):
        run_export(strict=True)
    cache = tmp_path / "cache"
    run_export()
    shutil.rmtree(cache)
    damage_finished_export(run_export, cache)
    assert tree(cache) == tree(tmp_path / "whole")


def damage_finished_export(run_export: Export, cache: Path) -> None:
    """Interrupt an export at its end, and damage what it left: one shard gone, one cut off."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output_dir, "publish_cache", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_export()
    shards = sorted((cache / "train").glob("data-*.arrow"))
    shards[1].unlink()
    shards[3].write_bytes(shards[3].read_bytes()[:-1])
    summary = run_export()
    assert summary.num_reused == len(shards) - 2


def test_a_broken_manifest_is_an_error(run_export: Export, tmp_path: Path) -> None:
    run_export()
    manifest = tmp_path / "cache" / "packtool.json"
    manifest.write_text(manifest.read_text()[:-40])
    with pytest.raises(MismatchError, match=r"packtool\.json is broken"):
        run_export()


def test_parts_of_a_job_array_make_the_same_cache(run_export: Export, tmp_path: Path) -> None:
    run_export("whole")
    first_summary = run_export(task_index=0, num_tasks=3)
    assert first_summary.num_missing_shards
    assert not (tmp_path / "cache" / "packtool.json").exists()
    with pytest.raises(DataError, match=r"cannot be finished: \d+ of 10 shards are missing \(1, 2, 4"):
        run_export(finalize=True)
    again_summary = run_export(task_index=0, num_tasks=3)
    assert (again_summary.num_rows, again_summary.num_missing_shards) == (
        first_summary.num_rows,
        first_summary.num_missing_shards,
    )
    assert (first_summary.rows_made, again_summary.rows_made) == (first_summary.num_rows, 0)
    assert run_export(task_index=2, num_tasks=3).num_missing_shards == 3
    last = run_export(task_index=1, num_tasks=3)
    assert last.num_missing_shards == 0
    assert last.num_rows == 600
    assert tree(tmp_path / "cache") == tree(tmp_path / "whole")
    with pytest.raises(MismatchError):
        run_export(task_index=1, num_tasks=3, max_length=100)


@pytest.mark.parametrize("name", ["compare_rows", "publish_cache"])
def test_parts_that_finish_at_the_same_time(
    run_export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The slower part finds that the other one has published the cache and removed the results."""
    run_export("whole")
    original = getattr(output_dir, name)

    def publish_first(*args: Any) -> Any:
        monkeypatch.setattr(output_dir, name, original)
        run_export(finalize=True)
        return original(*args)

    run_export(task_index=0, num_tasks=2)
    monkeypatch.setattr(output_dir, name, publish_first)
    summary = run_export(task_index=1, num_tasks=2)
    assert summary.num_missing_shards == 0
    assert (summary.num_rows, summary.num_samples) == (600, len(CacheReader.open([str(tmp_path / "cache")])))
    assert tree(tmp_path / "cache") == tree(tmp_path / "whole")


def test_a_part_of_a_job_array_may_have_no_rows(run_export: Export, tmp_path: Path) -> None:
    run_export("whole")
    first_summary, *_, last = [run_export(task_index=index, num_tasks=15) for index in reversed(range(15))]
    assert (first_summary.num_rows, first_summary.num_samples, first_summary.length["max"]) == (0, 0, 0)
    assert dict(export_lines(first_summary))["tokens"] == "0"
    assert last.num_missing_shards == 0
    assert tree(tmp_path / "cache") == tree(tmp_path / "whole")


def test_finalize_publishes_exported_parts_later(run_export: Export, tmp_path: Path) -> None:
    run_export("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output_dir, "publish_cache", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        run_export(task_index=0, num_tasks=2)
        with pytest.raises(KeyboardInterrupt):
            run_export(task_index=1, num_tasks=2)
    assert run_export(finalize=True).num_rows == 600
    assert tree(tmp_path / "cache") == tree(tmp_path / "whole")


def test_embedded_images_need_no_files(run_export: Export, tmp_path: Path) -> None:
    run_export("linked")
    run_export(media="embed")
    linked = CacheReader.open([str(tmp_path / "linked")])
    reader = CacheReader.open([str(tmp_path / "cache")])
    for position in range(len(reader)):
        sample, other = reader.sample(position), linked.sample(position)
        np.testing.assert_array_equal(sample.input_ids, other.input_ids)
        for image, plain in zip(sample.images, other.images, strict=True):
            assert plain.data is None
            assert image.path == plain.path
            assert image.data == Path(str(plain.path)).read_bytes()


def test_rows_of_val_datasets_and_split_texts(run_export: Export, tmp_path: Path) -> None:
    (tmp_path / "more.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}) + "\n"
    )
    summary = run_export("val", val_dataset=(str(tmp_path / "more.jsonl"),))
    assert summary.num_samples_by_split["val"] == 1
    (tmp_path / "long.txt").write_text("word " * 100 + "\n" + "short\n")
    split = run_export("split", dataset=(str(tmp_path / "long.txt"),), truncation_strategy="split", max_length=150)
    assert (split.num_rows, split.num_samples, split.pieces_added) == (2, 5, 3)


def test_workers_for_text_import_no_media_libraries(model: Path, rows: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from packtool.cache import executor; from packtool.config.data import EncodeSpec;"
        "from packtool.encode.encoder import Encoder; from packtool.encode.model_files import ModelFiles;"
        "import pyarrow; executor.block_pandas(); pyarrow.array(['a']);"
        "spec = EncodeSpec(model=sys.argv[1], max_length=100); Encoder(spec, ModelFiles.load(sys.argv[1]));"
        "heavy = 'torch', 'transformers', 'datasets', 'fsspec', 'av', 'pandas';"
        "print([name for name in heavy if name in sys.modules]);"
        "assert not pyarrow.array([1]).to_pandas().empty"
    )
    assert _python(code, str(model)).strip() == "[]"


def test_export_command_does_not_import_pandas(model: Path, rows: Path, tmp_path: Path) -> None:
    code = "import sys; from packtool.cli.main import run; run(sys.argv[1:]); print('pandas' in sys.modules)"
    output = _python(code, *_words(model, rows, tmp_path / "cache"), "--dataset-num-proc", "1")
    assert output.endswith("False\n")
    assert (tmp_path / "cache" / "packtool.json").exists()


def test_memory_does_not_grow_with_the_rows(model: Path, tmp_path: Path) -> None:
    """Ten times the rows in the same memory, all processes together."""
    line = json.dumps({"messages": [{"role": "user", "content": "q" * 50}, {"role": "assistant", "content": "a" * 50}]})
    peaks = []
    for count in (1_000, 10_000):
        rows = tmp_path / f"{count}.jsonl"
        rows.write_text((line + "\n") * count)
        command = [*_command(model, rows, tmp_path / f"cache{count}"), "--dataset-num-proc", "2"]
        command[command.index("--rows-per-shard") + 1] = "500"
        process = psutil.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        peak = 0
        while process.poll() is None:
            try:
                family = [process, *process.children(recursive=True)]
                peak = max(peak, sum(one.memory_info().rss for one in family))
            except psutil.NoSuchProcess:
                pass
            time.sleep(0.05)
        assert process.returncode == 0
        peaks.append(peak)
    assert peaks[1] < peaks[0] + 30e6, peaks


def test_media_in_a_store_are_measured_and_embedded_without_secrets(
    run_export: Export, tmp_path: Path, model: Path
) -> None:
    import functools
    import http.server
    import threading

    from PIL import Image

    Image.new("RGB", (80, 60)).save(tmp_path / "far.png")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_port}"
        turns = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "!"}]
        urls = [f"{base}/far.png", f"{base}/far.png?token=geheim", f"{base}/gone.png"]
        lines = [json.dumps({"messages": turns, "images": [url]}) for url in urls]
        (tmp_path / "far.jsonl").write_text("\n".join(lines))
        linked = run_export("linked", dataset=(str(tmp_path / "far.jsonl"),), media_access="any")
        assert linked.dropped == {"media_missing": 1, "media_secret": 1}
        embedded = run_export("embedded", dataset=(str(tmp_path / "far.jsonl"),), media="embed", media_access="any")
        assert embedded.dropped == {"media_missing": 1}
        server.shutdown()
    reader = CacheReader.open([str(tmp_path / "embedded")])
    assert [reader.sample(i).images[0].data for i in range(2)] == [(tmp_path / "far.png").read_bytes()] * 2
    for name in ("linked", "embedded"):
        for file in tree(tmp_path / name):
            assert b"geheim" not in (tmp_path / name / file).read_bytes()


def test_other_processor_settings_need_another_cache(run_export: Export, tmp_path: Path, model: Path) -> None:
    run_export()
    other = tmp_path / "other"
    shutil.copytree(model, other)
    settings = json.loads((other / "preprocessor_config.json").read_text())
    (other / "preprocessor_config.json").write_text(json.dumps({**settings, "image_mean": [0.1, 0.1, 0.1]}))
    with pytest.raises(MismatchError, match="processor_hash"):
        run_export(model=str(other))
