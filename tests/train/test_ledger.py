"""What was trained, through changes of the data and kills, is what the batches say; and steps can be seen again."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtool.cache.reader import CacheReader
from packtool.cli.main import run
from packtool.errors import MismatchError
from packtool.progress import SilentProgress
from packtool.train.prepare.checkpoint import finished_checkpoints
from packtool.train.prepare.history import LEDGER_NAME, begin_ledger, read_ledger
from packtool.train.run import train
from tests.forked import forked_process, run_ranks, started_ranks
from tests.train.tiny import TinyWorld, export_rows, make_tiny_text_world
from tests.waiting import wait_for

Identity = tuple[str, int]
"""Name of a file and row."""

SETTINGS: dict[str, Any] = {"save_steps": 2, "num_train_epochs": 2.0, "verify_packing": False, "packing_length": 128}


class Killing(SilentProgress):
    """Kills the process after so many further steps, as a machine does that goes away."""

    def __init__(self, num_steps: int) -> None:
        self.left = num_steps

    def line(self, num_done: int, **fields: float | int | str) -> None:
        self.left -= num_done
        if self.left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)


class RecordingProgress(SilentProgress):
    """Records all notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


class World:
    """A model of text, rows of three files, and a run on their caches."""

    def __init__(self, root: Path) -> None:
        self.root, self.tiny = root, make_tiny_text_world(root)
        for name, num in (("a", 20), ("b", 14), ("c", 16)):
            self.write(name, num)
            self.export(name)

    def write(self, name: str, num: int) -> None:
        turns = (
            [
                {"role": "user", "content": f"{name}{i}" * (1 + i % 9)},
                {"role": "assistant", "content": "y" * (1 + i % 5)},
            ]
            for i in range(num)
        )
        (self.root / f"{name}.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))

    def export(self, name: str, folder: str | None = None, **settings: Any) -> None:
        rows = TinyWorld(self.tiny.model, "", str(self.root / f"{name}.jsonl"))
        export_rows(rows, self.root / (folder or name), **{"max_length": 96} | settings)

    def config(self, caches: str, output_dir: Path | None = None, **settings: Any) -> Any:
        directories = tuple(str(self.root / name) for name in caches.split())
        return self.tiny.config(
            output_dir or self.root / "out", **SETTINGS | {"cached_dataset": directories} | settings
        )

    def killed(self, config: Any, num_steps: int) -> None:
        """Train in a process of its own until it is killed."""
        with forked_process(logged, self.root, config, Killing(num_steps)) as process:
            process.join()
            assert process.exitcode == -signal.SIGKILL

    def rows_by_step(self, folder: str = ".") -> dict[int, list[Identity]]:
        """Of each step, the rows that the batches of its last run had, of which a process wrote into a folder."""
        rows_by_step: dict[int, list[Identity]] = {}
        for line in (self.root / folder / "batches").read_text().splitlines():
            if line.startswith("run "):
                readers = CacheReader.open(line.split()[1:])
                rows = [(Path(each.source).stem, each.row) for each in map(readers.sample, range(len(readers)))]
                begun: set[int] = set()
                continue
            step, sample_numbers = re.search(r"step (\d+), .*?packs of samples ([][0-9 ]+)", line).groups()  # type: ignore[union-attr]
            if int(step) not in begun:
                rows_by_step[int(step)] = []
                begun.add(int(step))
            rows_by_step[int(step)] += [
                rows[int(sample_number)] for sample_number in re.findall(r"\d+", sample_numbers)
            ]
        return rows_by_step


def logged(root: Path, config: Any, progress: SilentProgress) -> int:
    """Train, and note the batches as they are handed out."""
    handler = logging.FileHandler(root / "batches")
    logger = logging.getLogger("packtool.train.batches")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    with (root / "batches").open("a") as file:
        file.write(" ".join(["run", *config.cached_dataset]) + "\n")
    train(config, progress)
    return 0


def logged_rank(root: Path, config: Any, progress: SilentProgress) -> None:
    """The same of one process of several, each with a folder of its own."""
    folder = root / f"rank-{os.environ['RANK']}"
    folder.mkdir(exist_ok=True)
    logged(folder, config, progress)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Three caches; a run on two of them that is killed, goes on with others, is killed again, and ends."""
    world = World(tmp_path_factory.mktemp("ledger"))
    world.export("a", "first-a")  # what the first run trains of it, to be read when a is another
    world.killed(world.config("a b"), 3)
    return world


def test_ledger_equals_the_trained_batches(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    rows_by_step = world.rows_by_step()
    assert set(rows_by_step) == {1, 2, 3}
    with pytest.raises(MismatchError, match="--data-change allow: the rest of the epoch is planned again") as refused:
        train(world.config("c a", resume_from_checkpoint="true"), SilentProgress())
    assert f"{world.root}/c: is new" in refused.value.message
    before = read_ledger(str(world.root / "out" / "checkpoint-2"))
    assert before is not None
    # The same rows with another limit, over the old cache: some are shorter now, and the cache is another.
    world.export("a", max_length=60, overwrite=True)
    trained = Counter(row for step in (1, 2) for row in rows_by_step[step])
    capsys.readouterr()
    assert run(["plan", "--resume", str(world.root / "out"), *(str(world.root / name) for name in "ca"), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    fates = {Path(source["directory"]).name: source for source in figures["sources"][:2]}
    assert (fates["c"]["fate"], fates["a"]["fate"]) == ("new", "exported again")
    assert fates["a"]["trained"] == sum(1 for (name, _), count in trained.items() if name == "a")
    change = {"resume_from_checkpoint": "true"}
    world.killed(world.config("c a", **change, data_change="allow"), 5)
    with forked_process(logged, world.root, world.config("c a", **change), SilentProgress()) as process:
        process.join()
        assert process.exitcode == 0
    batches = world.root / "batches"
    batches.write_text(batches.read_text().replace(f"{world.root}/a ", f"{world.root}/first-a "))
    steps = world.rows_by_step()
    checkpoint = finished_checkpoints(str(world.root / "out"))[-1]
    ledger = read_ledger(checkpoint)
    assert ledger is not None
    assert set(steps) == set(range(1, ledger.step + 1)) == set(range(1, figures["steps"] + 1))
    counted = Counter(row for step in steps.values() for row in step)
    reader = CacheReader.open([str(world.root / name) for name in "ca"])
    rows = [(Path(sample.source).stem, sample.row) for sample in map(reader.sample, range(len(reader)))]
    times = np.concatenate([source.trained.counts() for source in ledger.sources])
    assert dict(zip(rows, times.tolist(), strict=True)) == {row: counted[row] for row in rows}
    # Two epochs: every row of the caches that there are twice, those of the one that went at most once.
    assert set(times.tolist()) == {2}
    (retired,) = [source for source in ledger.retired if source.directory.endswith("/b")]
    assert retired.trained.num_rows == retired.num_samples == sum(1 for name, _ in trained if name == "b")
    total = sum(source.num_samples for source in (*ledger.sources, *ledger.retired))
    assert total == sum(map(len, steps.values()))
    check_inspected_steps(world, steps, capsys)


def test_two_killed_processes_resume_with_other_sources(world: World) -> None:
    """Of three sources one goes and another comes; what both processes were handed out is what the ledger says."""
    world.write("d", 10)
    world.export("d")
    out = world.root / "two"
    settings = {"num_train_epochs": 1.0, "data_change": "allow"}
    config = world.config("a b c", out, **settings)
    with started_ranks(2, logged_rank, world.root, config, Killing(3), scratch=world.root) as processes:
        wait_for(lambda: processes[0].exitcode is not None)
        assert processes[0].exitcode == -signal.SIGKILL
    (checkpoint,) = finished_checkpoints(str(out))
    trained = Counter(row for rank in (0, 1) for step in (1, 2) for row in world.rows_by_step(f"rank-{rank}")[step])
    assert {name for name, _ in trained} == set("abc")
    resumed = world.config("d a b", out, **settings, resume_from_checkpoint=checkpoint)
    run_ranks(2, logged_rank, world.root, resumed, SilentProgress(), scratch=world.root)
    ranks = [world.rows_by_step(f"rank-{rank}") for rank in (0, 1)]
    ledger = read_ledger(finished_checkpoints(str(out))[-1])
    assert ledger is not None
    assert set(ranks[0]) == set(ranks[1]) == set(range(1, ledger.step + 1))
    counted = Counter(row for rows_by_step in ranks for step_rows in rows_by_step.values() for row in step_rows)
    assert set(counted.values()) == {1}
    counts_by_source = {
        Path(source.directory).name: source.trained.counts() for source in (*ledger.sources, *ledger.retired)
    }
    assert list(counts_by_source) == ["d", "a", "b", "c"]
    for name, times in counts_by_source.items():
        assert times.tolist() == [counted[name, row] for row in range(len(times))]
        assert times.all() == (name != "c")
    totals = {Path(each.directory).name: each.num_samples for each in (*ledger.sources, *ledger.retired)}
    assert totals == Counter(name for name, _ in counted)


def check_inspected_steps(world: World, steps: dict[int, list[Identity]], capsys: pytest.CaptureFixture[str]) -> None:
    """Steps since the change as they were, and when one of the samples was trained."""

    def inspected(*words: str, code: int = 0) -> Any:
        assert run(["inspect", *words, "--json"]) == code
        out = capsys.readouterr()
        return out.err if code else json.loads(out.out)

    out = str(world.root / "out")
    for step in (3, 6, max(steps)):
        figures = inspected(out, "--step", str(step))
        packs = [pack for rank in figures["ranks"] for packs in rank["micro_batches"] for pack in packs]
        packed_rows = [(Path(sample["source"]).stem, sample["row"]) for pack in packs for sample in pack]
        assert packed_rows == steps[step]
    assert "has changed since training" in inspected(out, "--step", "1", code=4)
    assert "the run has steps 1 to" in inspected(out, "--step", "999", code=2)
    trained_in = inspected(str(world.root / "c"), "--row", "3", "--run", out)["trained_in"]
    rows = [step for step, step_rows in steps.items() if ("c", 3) in step_rows]
    assert [each["step"] for each in trained_in["times"]] == rows
    assert "trained several caches" in inspected(out, "--row", "3", code=2)
    trained = inspected(out, "--trained")
    assert [Path(source["directory"]).name for source in trained["sources"][:2]] == ["c", "a"]
    assert [start["after_step"] for start in trained["starts"]] == [0, 2, 6]
    for words in (["--trained"], ["--step", "4"], ["--step", "4", "--model", world.tiny.model]):
        assert run(["inspect", out, *words]) == 0
    assert "with changed data" in capsys.readouterr().out
    assert "is the --output-dir of a run, not a cache" in inspected(out, code=2)
    assert "is not the --output-dir of a run" in inspected(str(world.root / "c"), "--trained", code=2)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_checkpoint_of_an_older_packtool_has_a_ledger_by_its_plan(mixed: bool, world: World, tmp_path: Path) -> None:
    """Also where a mixture takes samples more than once, and other ones in each epoch."""
    mixture = {"cached_dataset": (f"{world.root}/b#1.5x", f"{world.root}/c#50%")} if mixed else {}
    config = world.config("b c", tmp_path, max_steps=3, save_steps=1, **mixture)
    train(config, SilentProgress())
    ledger = read_ledger(str(tmp_path / "checkpoint-3"))
    assert ledger is not None
    state = tmp_path / "checkpoint-2" / "packtool_state.json"
    values = json.loads(state.read_text())
    del values["files"][LEDGER_NAME], values["digest"], values["data_since"]
    state.write_text(json.dumps(values))
    (tmp_path / "checkpoint-2" / LEDGER_NAME).unlink()
    on: dict[str, Any] = {"resume_from_checkpoint": str(tmp_path / "checkpoint-2"), "max_steps": 3}
    with pytest.raises(MismatchError, match="has no ledger, so it is unknown"):
        train(world.config("b", tmp_path, **on, data_change="allow"), SilentProgress())
    progress = RecordingProgress()
    train(world.config("b c", tmp_path, **on | mixture), progress)
    assert any("is from an older packtool and has no ledger" in note for note in progress.notes)
    read_back = read_ledger(str(tmp_path / "checkpoint-3"))
    assert read_back is not None
    for one, other in zip(ledger.sources, read_back.sources, strict=True):
        assert one.trained.counts().tolist() == other.trained.counts().tolist()
        assert (one.num_samples, one.tokens, one.target_tokens) == (
            other.num_samples,
            other.tokens,
            other.target_tokens,
        )


def test_unloadable_samples_are_not_counted_as_trained(tiny: TinyWorld, tmp_path: Path) -> None:
    reader = CacheReader.open([tiny.cache])
    bad = next(position for position in range(len(reader)) if reader.sample(position).images)
    picture = Path(tiny.rows).parent / str(reader.sample(bad).images[0].path)
    away = picture.rename(picture.with_suffix(".away"))
    try:
        train(
            tiny.config(tmp_path, on_bad_media="skip", gradient_accumulation_steps=8, verify_packing=False),
            SilentProgress(),
        )
    finally:
        away.rename(picture)
    ledger = read_ledger(finished_checkpoints(str(tmp_path))[-1])
    assert ledger is not None
    expected = np.ones(len(reader), int)
    expected[bad] = 0
    assert ledger.sources[0].trained.counts().tolist() == expected.tolist()
    assert ledger.sources[0].skipped.tolist() == [bad]
    assert begin_ledger(reader).sources[0].fingerprint == ledger.sources[0].fingerprint
