"""The kept losses of a stream are those of its samples alone, found by file, row and number in the row."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packtool.batch import dataset
from packtool.batch.spec import InputSpec
from packtool.cache.reader import CacheReader
from packtool.cli import inspect as cli_inspect
from packtool.cli.main import run
from packtool.config.commands import InspectConfig
from packtool.encode.encoded import EncodedSample
from packtool.errors import EXIT_MISMATCH, EXIT_USAGE, MediaError, MismatchError
from packtool.progress import SilentProgress
from packtool.report.losses import RunLosses, losses_lines
from packtool.report.samples import Pages
from packtool.rows.sample import RowPart
from packtool.train.prepare import sample_losses
from packtool.train.prepare.sample_losses import stream_losses
from packtool.train.run import train
from tests.forked import run_ranks
from tests.report.test_samples import ints, page_data
from tests.train.alike import make_alike_world
from tests.train.jobs import Job, run_jobs
from tests.train.test_gradients import DESCENT, write_lines
from tests.train.test_resume import BrokenOffError, Interrupting
from tests.train.test_sample_losses import Losses, losses_alone
from tests.train.tiny import TinyWorld, read_metrics


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are stored before they are rounded to 16 bits, so that they can be compared closely."""
    monkeypatch.setattr(sample_losses, "_DTYPE", np.float32)


def kept(output_dir: Path) -> pa.Table:
    """The stored losses of a stream."""
    table = stream_losses(str(output_dir / "history"))
    assert table is not None
    return table


def check_alone(output_dir: Path, world: TinyWorld, alone: Losses) -> None:
    """One step, whose losses are those of the samples of the world's cache alone."""
    table = kept(output_dir)
    reader = CacheReader.open([world.cache])
    samples = sorted((reader.sample(number).row, loss) for number, loss in enumerate(alone))
    assert table["row"].to_pylist() == [row for row, _ in samples]
    np.testing.assert_allclose(table["loss"].to_numpy(), [loss for _, loss in samples], rtol=1e-5)
    assert set(table["source"].to_pylist()) == {world.rows}
    assert {*table["step"].to_pylist(), *table["epoch"].to_pylist(), *table["sample"].to_pylist()} == {0}
    assert sum(table["target_tokens"].to_pylist()) == read_metrics(output_dir)[0]["target_tokens"]
    assert sum(table["tokens"].to_pylist()) == reader.index.length.sum()


def test_loss_is_that_of_the_sample_alone(tiny: TinyWorld, tmp_path: Path) -> None:
    """In packs and, on two processes, of each process's rows and of sequences that both share."""
    alone = losses_alone(tiny, tmp_path / "alone")
    one_step = DESCENT | tiny.streamed() | {"gradient_accumulation_steps": 12}
    train(tiny.config(tmp_path / "packed", **one_step, dataloader_num_workers=1), SilentProgress())
    jobs: list[Job] = [
        ("train", tmp_path / "ranks", one_step),
        ("train", tmp_path / "ring", one_step | {"sequence_parallel_size": 2, "sequence_parallel_type": "ring"}),
    ]
    run_ranks(2, run_jobs, tiny, jobs, scratch=tmp_path)
    for name in ("packed", "ranks", "ring"):
        check_alone(tmp_path / name, tiny, alone)


def test_target_of_a_shared_prefix_counts_for_each_sample(tiny: TinyWorld, tmp_path: Path) -> None:
    world = make_alike_world(tiny, tmp_path)
    alone = losses_alone(world, tmp_path / "alone")
    shared = DESCENT | world.streamed() | {"max_length": 160, "packing_interval": 40, "share_prefix": "true"}
    result = train(world.config(tmp_path / "tree", **shared, gradient_accumulation_steps=16), SilentProgress())
    assert result.num_shared_tokens > 0
    check_alone(tmp_path / "tree", world, alone)
    assert set(kept(tmp_path / "tree")["channel"].to_pylist()) == {"a", "b", None}


@pytest.fixture(scope="module")
def rows(tiny: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> str:
    """42 rows, of which the first becomes three samples and the second is broken."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    write_lines(tiny, path, 1)
    turns = [{"role": role, "content": f"{role} {turn}"} for turn in range(3) for role in ("user", "assistant")]
    path.write_text(json.dumps({"messages": turns, "images": []}) + "\n{broken\n" + path.read_text())
    return str(path)


def epochs(tiny: TinyWorld, rows: str, **changes: Any) -> dict[str, Any]:
    """Two epochs, whose samples mix in the shuffle buffer."""
    options = {"num_train_epochs": 2.0, "save_steps": 1, "expand_turns": "true"}
    return tiny.streamed(rows) | options | {"gradient_accumulation_steps": 3} | changes


@pytest.fixture(scope="module")
def full_run(tiny: TinyWorld, rows: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output_dir = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sample_losses, "_DTYPE", np.float32)
        train(tiny.config(output_dir, **epochs(tiny, rows)), SilentProgress())
    return output_dir


def test_losses_are_those_of_the_step_and_epoch(full_run: Path, rows: str) -> None:
    """Their mean over the targets of a step is the logged loss; every sample is there once in each epoch."""
    table = kept(full_run)
    steps, losses, targets = (table[name].to_numpy() for name in ("step", "loss", "target_tokens"))
    lines = read_metrics(full_run)
    assert set(steps) == set(range(len(lines)))
    for step, line in enumerate(lines):
        in_step = steps == step
        assert np.average(losses[in_step], weights=targets[in_step]) == pytest.approx(line["loss"], rel=1e-5)
    samples = [(row["epoch"], row["row"], row["sample"]) for row in table.to_pylist()]
    first = [(0, number) for number in range(3)]
    others = [(row, number) for epoch, row, number in samples if epoch == 0 and row > 0]
    assert sorted(samples) == sorted((epoch, *name) for epoch in (0, 1) for name in (*first, *others))
    assert {row for row, _ in others} == set(range(2, 42))
    assert table["part"].to_pylist()[:2] == [{"turn": 1, "num_turns": 3, "response": 0, "num_responses": 0}] * 2


def test_pieces_of_a_text_are_numbered(tiny: TinyWorld, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"{number} abc" * 100}) + "\n" for number in range(2)))
    options = tiny.streamed(str(rows)) | {"truncation_strategy": "split"}
    train(tiny.config(tmp_path / "run", **options), SilentProgress())
    table = kept(tmp_path / "run")
    num_pieces = table["row"].to_pylist().count(0)
    assert num_pieces > 2
    assert table["sample"].to_pylist()[:num_pieces] == list(range(num_pieces))
    assert set(table["part"].to_pylist()) == {None}


def test_resumed_run_keeps_what_an_uninterrupted_one_keeps(
    full_run: Path, tiny: TinyWorld, rows: str, tmp_path: Path
) -> None:
    whole = kept(full_run)
    for step in (1, 4):
        changes = {"resume_from_checkpoint": str(full_run / f"checkpoint-{step}"), "dataset_num_proc": 2}
        train(tiny.config(tmp_path / f"resumed-{step}", **epochs(tiny, rows, **changes)), SilentProgress())
        assert kept(tmp_path / f"resumed-{step}").equals(whole)
    # In the same directory, losses of steps after the checkpoint are discarded when the run begins.
    output_dir = tmp_path / "resumed-1"
    changes = {"resume_from_checkpoint": str(output_dir / "checkpoint-4"), "sample_losses": False}
    with pytest.raises(BrokenOffError):
        train(tiny.config(output_dir, **epochs(tiny, rows, **changes)), Interrupting(4))
    assert kept(output_dir).equals(whole.filter(pa.array(whole["step"].to_numpy() < 4)))


def _two_resumed_ranks(tiny: TinyWorld, rows: str, root: Path) -> None:
    settings = epochs(tiny, rows)
    train(tiny.config(root / "whole", **settings), SilentProgress())
    settings["resume_from_checkpoint"] = str(root / "whole" / "checkpoint-2")
    train(tiny.config(root / "resumed", **settings), SilentProgress())
    if os.environ["RANK"] == "0":
        assert kept(root / "resumed").equals(kept(root / "whole"))
        for path in (root / "resumed" / "history").glob("stream-losses-*.parquet"):
            path.write_bytes(b"damaged")
    settings["resume_from_checkpoint"] = str(root / "resumed" / "checkpoint-3")
    with pytest.raises(MismatchError, match=r"stream-losses-\d+\.parquet cannot be read"):
        train(tiny.config(root / "resumed", **settings), SilentProgress())


def test_two_processes_resume_exactly_and_report_damaged_losses(tiny: TinyWorld, tmp_path: Path) -> None:
    """Rows of several blocks, of which each process reads its own."""
    rows = tmp_path / "rows.jsonl"
    write_lines(tiny, rows, 4)
    run_ranks(2, _two_resumed_ranks, tiny, str(rows), tmp_path, scratch=tmp_path)
    table = kept(tmp_path / "whole")
    samples = [(row["epoch"], row["row"], row["sample"]) for row in table.to_pylist()]
    assert len(samples) == len(set(samples))
    assert {sample[:2] for sample in samples} == {(epoch, row) for epoch in (0, 1) for row in range(160)}


def test_a_file_that_was_written_between_checkpoints_is_cut(
    tiny: TinyWorld, rows: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Long runs write losses before a checkpoint, too, so that those after it are removed from the file."""
    train(tiny.config(tmp_path, **epochs(tiny, rows, save_steps=2)), SilentProgress())
    whole = kept(tmp_path)
    pieces = sorted((tmp_path / "history").glob("stream-losses-*.parquet"))
    assert [piece.name for piece in pieces][:2] == ["stream-losses-0.parquet", "stream-losses-2.parquet"]
    joined = pa.concat_tables([pq.read_table(piece) for piece in pieces])
    for piece in pieces[1:]:
        piece.unlink()
    pq.write_table(joined, pieces[0])
    changes = {"resume_from_checkpoint": str(tmp_path / "checkpoint-2")}
    train(tiny.config(tmp_path, **epochs(tiny, rows, save_steps=2, **changes)), SilentProgress())
    assert kept(tmp_path).equals(whole)


def test_skipped_sample_has_no_loss(tiny: TinyWorld, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And those behind it in its pack have their own."""
    settings = DESCENT | tiny.streamed() | {"gradient_accumulation_steps": 12, "on_bad_media": "skip"}
    train(tiny.config(tmp_path / "whole", **settings), SilentProgress())

    def check_unchanged(samples: Sequence[EncodedSample], spec: InputSpec) -> None:
        if any(sample.row == 7 for sample in samples):
            raise MediaError("changed", "Put it back.")

    monkeypatch.setattr(dataset, "check_unchanged", check_unchanged)
    result = train(tiny.config(tmp_path / "skipped", **settings), SilentProgress())
    assert result.num_skipped == 1
    (line,) = (tmp_path / "skipped" / "skipped.jsonl").read_text().splitlines()
    assert json.loads(line).keys() == {"source", "row", "message", "num_target_tokens", "sample"}
    whole, skipped = kept(tmp_path / "whole"), kept(tmp_path / "skipped")
    assert skipped["row"].to_pylist() == [row for row in range(40) if row != 7]
    np.testing.assert_allclose(skipped["loss"].to_numpy(), np.delete(whole["loss"].to_numpy(), 7), rtol=1e-5)


def test_losses_are_listed_and_exported_by_file_and_row(
    full_run: Path, rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = RunLosses(str(full_run))
    assert list(losses.losses) == [1, 2]
    stored = {(row["epoch"], row["row"], row["sample"]): row for row in kept(full_run).to_pylist()}
    exported = str(tmp_path / "losses.parquet")
    assert run(["inspect", str(full_run), "--export-losses", exported, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    table = pq.read_table(exported)
    names = ["sample", "source", "row", "part", "channel", "tokens", "target_tokens", "loss_1", "loss_2"]
    assert table.column_names == names
    assert 2 * table.num_rows == len(stored)
    for row in table.to_pylist():
        for epoch in (0, 1):
            expected = stored[epoch, row["row"], row["sample"]]
            assert row[f"loss_{epoch + 1}"] == pytest.approx(expected["loss"], rel=1e-6)
            assert (row["tokens"], row["target_tokens"]) == (expected["tokens"], expected["target_tokens"])
    (source,) = figures["by_source"]
    assert (source["name"], source["num_samples"]) == (rows, table.num_rows)
    highest = figures["groups"]["highest"]["samples"][0]
    assert highest["loss_2"] == max(row["loss_2"] for row in table.to_pylist())
    assert f"row {highest['row']} of {rows}" in "\n".join(losses_lines(figures))


def test_pages_show_the_rows_with_their_media(full_run: Path, rows: str, tmp_path: Path) -> None:
    config = InspectConfig(directory=str(full_run), losses=True, max_samples=9)
    losses = RunLosses(str(full_run))
    pages = Pages(config, shows_all=True)
    assert pages.numbers.tolist() == sorted({number for group in losses.groups.values() for number in group[:3]})
    assert pages.notes == []
    overview = page_data(pages.content("data/cache.js"))
    trained = losses.stream.take(pages.numbers).to_pylist()
    assert overview["total"] == losses.stream.num_rows
    assert ints(overview["lengths"]).tolist() == [row["tokens"] for row in trained]
    expected = np.round(losses.losses[2][pages.numbers] * 1000)
    assert ints(overview["losses"]["epochs"][1]).tolist() == expected.tolist()
    samples = page_data(pages.content("data/samples-0.js"))
    lines = Path(rows).read_text().splitlines()
    for number, sample, row in zip(pages.numbers.tolist(), samples, trained, strict=True):
        assert (sample["source"], sample["row"], sample["number"]) == (rows, row["row"], number)
        assert sample["part"] == ("" if row["part"] is None else f", {RowPart(**row['part'])}")
        text = "".join(part["text"] for part in sample["parts"])
        turns = json.loads(lines[row["row"]])["messages"]
        assert turns[0]["content"].replace("<image>", "").strip() in text
        images = [part["seen"] for part in sample["parts"] if "seen" in part]
        assert len(images) == len(json.loads(lines[row["row"]])["images"])
        assert all((pages.content(name) or b"").startswith(b"\xff\xd8") for name in images)
    assert pages.content("media/999-0.jpg") is None


def write_rows_in_many_files(tiny: TinyWorld, folder: Path) -> list[str]:
    """Write the tiny rows to a.jsonl and b.jsonl, and two of them to other files; return all as arguments."""
    for name in ("a.jsonl", "b.jsonl"):
        write_lines(tiny, folder / name, 1)
    rows = [json.loads(line) for line in (folder / "a.jsonl").read_text().splitlines()[1:3]]
    shutil.copy(rows[0]["images"][0], folder / "own.png")
    rows[0]["images"] = [str(folder / "own.png")]
    (folder / "c").mkdir()
    not_utf8 = str(folder / os.fsdecode(b"f\xff.jsonl"))
    for name in ("c/c.jsonl", "d.jsonl", "e.jsonl", not_utf8, "g.jsonl"):
        (folder / name).write_text("\n".join(map(json.dumps, rows)))
    (folder / "dataset_info.json").write_text(json.dumps({"named": {"file_name": "d.jsonl"}}))
    absolute = [str(folder / name) for name in ("a.jsonl", "b.jsonl", "c")]
    return [*absolute, "named", "e.jsonl", not_utf8, str(folder / "g.jsonl")]


def change_rows(folder: Path) -> None:
    """Remove files in all ways an argument can name them, and a picture; change rows of a.jsonl and all of g.jsonl."""
    lines = (folder / "a.jsonl").read_text().splitlines()
    for row, answer in ((3, "x"), (5, "x" * 1000)):  # shorter than in training, and longer than allowed
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": answer}]
        lines[row] = json.dumps({"messages": turns})
    (folder / "a.jsonl").write_text("\n".join(lines))
    for name in ("b.jsonl", "c/c.jsonl", "d.jsonl", "own.png"):
        (folder / name).unlink()
    (folder / "g.jsonl").write_text(json.dumps({"frage": "x", "antwort": "y"}))


def test_pages_leave_out_rows_that_changed_or_are_gone(
    tiny: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files named by path, folder, relative path or --dataset-info, one with a name that is not UTF-8."""
    monkeypatch.chdir(tmp_path)
    options = tiny.streamed(*write_rows_in_many_files(tiny, tmp_path)) | {"truncation_strategy": "raise"}
    train(tiny.config("run", **options, dataset_info=str(tmp_path)), SilentProgress())
    (path,) = (tmp_path / "run" / "history").glob("stream-losses-*.parquet")
    table = pq.read_table(path)
    near_zero = pa.array(np.full(len(table), 0.05, np.float32))
    pq.write_table(table.set_column(table.column_names.index("loss"), "loss", near_zero), path)
    words = ["inspect", str(tmp_path / "run"), "--losses", "--html", str(tmp_path / "site")]
    assert run([*words, "--plan", "a.plan"]) == EXIT_USAGE
    assert "streamed rows has no plan" in capsys.readouterr().err
    assert run(words) == 0
    assert "index.html, 89 of 89 samples\n" in capsys.readouterr().out
    change_rows(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert run(words) == 0
    out = capsys.readouterr().out
    assert "50 samples left out: their rows or media have changed or are no longer there\n" in out
    assert "index.html, 39 of 89 samples\n" in out
    assert "--dataset e.jsonl: there is no such file" in out
    assert f"(relative paths start in {os.getcwd()})" in out
    shown = page_data((tmp_path / "site" / "data" / "samples-0.js").read_bytes())
    not_utf8 = str(tmp_path / r"f\udcff.jsonl")
    expected = [(str(tmp_path / "a.jsonl"), row) for row in range(40) if row not in (3, 5)]
    assert sorted((sample["source"], sample["row"]) for sample in shown) == [*expected, (not_utf8, 1)]
    assert run([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples_left_out"] == 50
    stopped = Mock(wait=Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(cli_inspect, "threading", Mock(Event=lambda: stopped))
    assert run(["inspect", str(tmp_path / "run"), "--losses", "--serve", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples_left_out"] == 50
    assert run([*words, "--max-samples", "9"]) == 0, "although files are gone of which no sample is chosen"
    out = capsys.readouterr().out
    assert "index.html, 3 of 89 samples (--max-samples)\n" in out
    assert "left out" not in out


def test_few_bytes_per_sample_and_epoch(
    tiny: TinyWorld,
    monkeypatch: pytest.MonkeyPatch,
    full_run: Path,
    rows: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sample_losses, "_DTYPE", np.float16)
    train(tiny.config(tmp_path, **epochs(tiny, rows, save_strategy="no")), SilentProgress())
    table, expected = kept(tmp_path), kept(full_run)
    assert table.schema.field("loss").type == pa.float16()
    np.testing.assert_allclose(table["loss"].to_numpy(), expected["loss"].to_numpy(), rtol=1e-3)
    assert RunLosses(str(tmp_path)).losses[2].dtype == np.float32
    assert run(["inspect", str(tmp_path), "--losses"]) == 0, "also without a checkpoint"
    assert run(["inspect", str(tmp_path), "--losses", "--html", str(tmp_path / "site")]) == EXIT_MISMATCH
    assert "has no checkpoint with the options" in capsys.readouterr().err


def test_losses_can_be_disabled(tiny: TinyWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = DESCENT | tiny.streamed() | {"gradient_accumulation_steps": 12, "sample_losses": False}
    train(tiny.config(tmp_path, **settings), SilentProgress())
    assert not (tmp_path / "history").exists()
    assert run(["inspect", str(tmp_path), "--losses"]) != 0
    assert "unless --sample-losses is false" in capsys.readouterr().err
