"""The driver: which commands it runs, what it makes of their numbers, and what it never deletes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packtool.demo import run
from packtool.demo.run import DemoResult, run_demo
from packtool.errors import ConfigError, PacktoolError
from packtool.progress import SilentProgress

TRAINED = {
    "num_packs": 11,
    "fill": 0.98,
    "steps": 11,
    "steps_without_packing": 96,
    "target_tokens_per_second": 321.0,
    "first_loss": 6.0,
    "last_loss": 0.1,
    "checkpoint": "somewhere/checkpoint-11",
}


class Notes(SilentProgress):
    """Keeps what was noted."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, message: str) -> None:
        self.lines.append(message)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replaces the commands and the evaluation by quick ones; the list fills with what would have been run."""
    ran: list[list[str]] = []

    def pretend(arguments: list[str], progress: Any) -> dict[str, Any]:
        ran.append(arguments)
        progress.note(" ".join(arguments))
        exported = {"num_rows": 100, "dropped": {"too_long": 3, "no_image": 1}}
        return dict(TRAINED) if arguments[0] == "train" else exported

    monkeypatch.setattr(run, "NUM_ROWS", 100)
    monkeypatch.setattr(run, "_run_command", pretend)
    monkeypatch.setattr(run, "exact_match", evaluation_with(0.95, 0.15))
    return ran


def evaluation_with(normal_share: float, swapped: float) -> Callable[..., list[tuple[int, int, bool]]]:
    """An evaluation with the given accuracies."""

    def evaluate(model: str, cached_dataset: str, **_: Any) -> list[tuple[int, int, bool]]:
        turns = num_questions(Path(cached_dataset).parent)
        share = swapped if cached_dataset.endswith("swapped") else normal_share
        return [(0, turn, turn < share * turns) for turn in range(turns)]

    return evaluate


def num_questions(folder: Path) -> int:
    return (folder / "data" / "held_out.json").read_text().count('"assistant"')


def test_figures_come_from_the_commands(commands: list[list[str]], tmp_path: Path) -> None:
    notes = Notes()
    result = run_demo(str(tmp_path / "demo"), 7, notes)
    assert [arguments[0] for arguments in commands] == ["export", "export", "export", "train"]
    assert (result.num_rows, result.dropped) == (100, 4)
    for name, value in TRAINED.items():
        assert getattr(result, name) == value
    assert result.num_questions == num_questions(tmp_path / "demo")
    assert result.accuracy == pytest.approx(0.95, abs=0.05)
    assert set(result.accuracy_by_kind) == {"shape", "backdrop", "whole"}
    assert result.passed


def test_a_second_run_replaces_only_its_own_files(commands: list[list[str]], tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    run_demo(str(folder), 7, SilentProgress())
    (folder / "mine.txt").write_text("keep")
    (folder / "cache").mkdir()
    (folder / "cache" / "left-over").touch()
    contents = (folder / "data" / "train.json").read_bytes()
    run_demo(str(folder), 7, SilentProgress())
    assert (folder / "mine.txt").read_text() == "keep"
    assert not (folder / "cache").exists()
    assert (folder / "data" / "train.json").read_bytes() == contents


def test_foreign_folder_is_refused(commands: list[list[str]], tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "precious").touch()
    with pytest.raises(ConfigError, match="was not made by the demo"):
        run_demo(str(tmp_path), 7, SilentProgress())
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError):
        run_demo(str(tmp_path / "file"), 7, SilentProgress())
    assert (tmp_path / "data" / "precious").exists()
    assert not commands


@pytest.mark.parametrize(
    ("accuracy", "swapped", "passed"),
    [(0.96, 0.15, True), (0.89, 0.15, False), (0.96, 0.3, False), (0.16, 0.15, False), (0.96, 0.96, False)],
)
def test_the_demo_passes_only_if_answers_depend_on_the_images(accuracy: float, swapped: float, passed: bool) -> None:
    result = DemoResult(
        num_rows=1,
        dropped=0,
        num_packs=1,
        fill=1.0,
        steps=1,
        steps_without_packing=1,
        target_tokens_per_second=1.0,
        first_loss=1.0,
        last_loss=0.0,
        num_questions=600,
        accuracy=accuracy,
        swapped_accuracy=swapped,
        chance=0.147,
        accuracy_by_kind={},
        seconds=1.0,
        checkpoint="",
    )
    assert result.passed is passed
    assert dataclasses.replace(result, chance=swapped, accuracy=0.95).passed


def test_a_missing_question_is_an_error(
    commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "exact_match", lambda *_, **__: [(0, 0, True)])
    with pytest.raises(PacktoolError, match="holds 1 of"):
        run_demo(str(tmp_path / "demo"), 7, SilentProgress())


def test_commands_are_printed_quoted_for_a_shell(tmp_path: Path) -> None:
    notes = Notes()
    with pytest.raises(PacktoolError, match="exit code"):
        run._run_command(["export", "--model", str(tmp_path / "no such model")], notes)
    assert notes.lines == [f"\n$ packtool export --model '{tmp_path}/no such model'"]
