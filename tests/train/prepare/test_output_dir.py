"""A run writes into a directory of its own, or goes on in the one that it began in."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
import typer

from packtool import storage
from packtool.cli.main import run
from packtool.cli.train import _train
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError, MismatchError, PacktoolError, StorageError
from packtool.launch.world import World
from packtool.progress import SilentProgress
from packtool.train.loop.execute import RunCallback
from packtool.train.prepare.output_dir import METRICS_NAME, locked_output_dir, newest_checkpoint
from packtool.train.run import train
from tests.forked import forked_process
from tests.train.tiny import TinyWorld, check_same_rest, read_metrics
from tests.waiting import PATIENCE_S


@pytest.mark.parametrize("is_dry", [True, False])
@pytest.mark.parametrize("output_dir_option", ["", "FILE", "FILE/a/b", "/dev/null"])
def test_unusable_output_directories_are_refused_before_planning(
    output_dir_option: str, is_dry: bool, tiny: TinyWorld, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    output_dir = output_dir_option.replace("FILE", str(tmp_path / "file"))
    with pytest.raises(PacktoolError, match="--output-dir"):
        train(tiny.config(output_dir, dry_run=is_dry), SilentProgress())


def test_uncreatable_directory_is_an_error(tiny: TinyWorld) -> None:
    """Root may write anywhere, until it tries."""
    with pytest.raises(StorageError, match="--output-dir /proc/no-such/a cannot be created"):
        train(tiny.config("/proc/no-such/a"), SilentProgress())


@pytest.mark.parametrize(
    "settings",
    [{}, {"overwrite_output_dir": True}, {"resume_from_checkpoint": "true"}, {"dry_run": True}],
    ids=lambda settings: next(iter(settings), "plain"),
)
def test_the_directory_of_an_active_run_is_refused_before_loading(
    settings: dict[str, Any], tiny: TinyWorld, tmp_path: Path
) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    config = tiny.config(tmp_path, **settings, model="no such model")
    with locked_output_dir(tiny.config(tmp_path), World()):
        before = sorted(path.name for path in tmp_path.iterdir())
        with pytest.raises(MismatchError, match=r"another training on host .*, process \d+, since \d{4}-") as exc_info:
            train(config, SilentProgress())
        assert sorted(path.name for path in tmp_path.iterdir()) == before
        assert (exc_info.value.exit_code, run_command("train", config)) == (4, 4)
        with locked_output_dir(dataclasses.replace(config, dry_run=False), World(1, 2)) as (_, lock):
            assert lock is None, "only the first process of a run locks"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def run_command(name: str, config: TrainConfig) -> int:
    """Exit code of a command with these settings."""
    changed = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.default is dataclasses.MISSING or getattr(config, field.name) != field.default
    }
    words = [f"--set={key}={json.dumps(value)}" for key, value in changed.items()]
    return run([name, *words])


def test_versions_run_side_by_side_and_an_active_one_is_not_resumed(tiny: TinyWorld, tmp_path: Path) -> None:
    config = tiny.config(tmp_path, add_version=True, max_steps=1)
    done = train(config, SilentProgress())
    resumed = dataclasses.replace(config, resume_from_checkpoint="true")
    with locked_output_dir(resumed, World()) as (placed, _):
        assert placed.output_dir == done.output_dir
        with pytest.raises(MismatchError, match="another training"):
            train(resumed, SilentProgress())
        assert train(config, SilentProgress()).output_dir != done.output_dir


def test_the_lock_of_a_killed_run_is_ignored(tiny: TinyWorld, tmp_path: Path) -> None:
    with forked_process(_killed_while_holding, tiny.config(tmp_path)) as process:
        process.join(PATIENCE_S)
    assert process.exitcode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == [".lock-000001.json"]
    train(tiny.config(tmp_path, max_steps=1), SilentProgress())
    assert not list(tmp_path.glob(".lock*"))


def _killed_while_holding(config: TrainConfig) -> None:
    with locked_output_dir(config, World()):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_that_lost_its_lock_writes_no_checkpoint(
    tiny: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a suspension of minutes, with another run on another machine."""

    def take_over(self: RunCallback, *args: Any, **more: Any) -> Any:
        storage.publish_new(str(tmp_path / ".lock-000002.json"), b"{}")
        return real(self, *args, **more)

    real = RunCallback.on_step_end
    monkeypatch.setattr(RunCallback, "on_step_end", take_over)
    with pytest.raises(MismatchError, match="taken over by another run"):
        train(tiny.config(tmp_path, max_steps=2, save_steps=1), SilentProgress())
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.mark.parametrize("settings", [{"model": "no such model"}, {"cached_dataset": ("no-cache",)}])
def test_a_run_that_fails_before_training_leaves_no_directory(
    settings: dict[str, Any], tiny: TinyWorld, tmp_path: Path
) -> None:
    with pytest.raises(PacktoolError):
        train(tiny.config(tmp_path / "a" / "b", **settings), SilentProgress())
    assert not list(tmp_path.iterdir())


def steps_of(output_dir: Path) -> list[int]:
    return [line["step"] for line in read_metrics(output_dir)]


def test_a_used_directory_is_refused_replaced_or_resumed(tiny: TinyWorld, tmp_path: Path) -> None:
    def run(**settings: Any) -> Any:
        run_options = {"train_type": "lora", "max_steps": 2, "save_steps": 1} | settings
        return train(tiny.config(tmp_path, **run_options), SilentProgress())

    run()
    before = (tmp_path / METRICS_NAME).read_text()
    for settings in ({}, {"dry_run": True}, {"seed": 1}):
        with pytest.raises(
            ConfigError, match=r"already contains a run: checkpoint-1, checkpoint-2, metrics"
        ) as exc_info:
            run(**settings)
    for option in ("--resume-from-checkpoint true", "--overwrite-output-dir true", "--add-version true"):
        assert option in str(exc_info.value.remedy)
    assert (tmp_path / METRICS_NAME).read_text() == before
    with pytest.raises(ConfigError, match="checkpoint-2, from which this run resumes"):
        run(resume_from_checkpoint="true", overwrite_output_dir=True)
    run(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert steps_of(tmp_path) == [1, 2]
    (tmp_path / "notes.txt").write_text("mine")
    run(overwrite_output_dir=True, max_steps=1)
    assert steps_of(tmp_path) == [1]
    assert not (tmp_path / "checkpoint-2").exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_metrics_of_a_run_without_checkpoints_are_protected(tiny: TinyWorld, tmp_path: Path) -> None:
    (tmp_path / METRICS_NAME).write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="already contains a run") as exc_info:
        train(tiny.config(tmp_path), SilentProgress())
    assert "--resume-from-checkpoint" not in str(exc_info.value.remedy)
    assert (tmp_path / METRICS_NAME).read_text() == '{"step": 1}\n'


def test_every_version_has_a_folder_and_is_resumed_there(tiny: TinyWorld, tmp_path: Path) -> None:
    config = tiny.config(tmp_path, add_version=True, train_type="lora", max_steps=2, save_steps=1)
    first_result, second_result = (train(config, SilentProgress()) for _ in range(2))
    names = [Path(result.output_dir).name for result in (first_result, second_result)]
    assert [name.split("-")[0] for name in names] == ["v0", "v1"]
    assert {path.name for path in tmp_path.iterdir()} == set(names)
    assert Path(str(second_result.checkpoint)).parent == Path(second_result.output_dir)
    assert second_result.checkpoint is not None
    assert second_result.checkpoint == newest_checkpoint(config)
    resumed = dataclasses.replace(config, resume_from_checkpoint=f"{first_result.output_dir}/checkpoint-1")
    assert train(resumed, SilentProgress()).output_dir == first_result.output_dir
    check_same_rest(Path(second_result.output_dir), Path(first_result.output_dir), 0)
    newest = train(dataclasses.replace(config, resume_from_checkpoint="true", dry_run=True), SilentProgress())
    assert newest.output_dir == second_result.output_dir
    assert len(list(tmp_path.iterdir())) == 2


def test_the_next_number_follows_the_largest(tiny: TinyWorld, tmp_path: Path) -> None:
    for name in ("v2-20260101-000000", "v10-20260101-000000", "v11", "x"):
        (tmp_path / name).mkdir()
    config = tiny.config(tmp_path, add_version=True)
    with (
        locked_output_dir(config, World()) as (first_placement, _),
        locked_output_dir(config, World()) as (second_placement, _),
    ):
        for placed, version in ((first_placement, 11), (second_placement, 12)):
            assert Path(placed.output_dir).name.startswith(f"v{version}-")
            assert Path(placed.output_dir).is_dir()
    assert not Path(second_placement.output_dir).exists(), "nothing was written there"


def test_messages_after_ctrl_c_are_correct(
    tiny: TinyWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tiny.config(tmp_path, max_steps=1), SilentProgress())

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("packtool.train.run.train", interrupted)
    no_progress: Any = None
    messages = []
    for folder in (tmp_path / "none", tmp_path):
        with pytest.raises(typer.Exit):
            _train(tiny.config(folder), no_progress, World())
        messages.append("".join(capsys.readouterr()).replace("\n", " "))
    assert "--resume" not in messages[0]
    assert f"to resume from {tmp_path}/checkpoint-1, repeat the command" in messages[1]
    assert "--resume-from-checkpoint true" in messages[1]


@pytest.mark.parametrize("overwrites", [False, True])
def test_a_lost_process_names_the_newest_checkpoint_and_the_command_that_resumes(
    tiny: TinyWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str], overwrites: bool
) -> None:
    config = tiny.config(tmp_path, max_steps=1)
    words = [
        "train",
        "--model",
        config.model,
        "--cached-dataset",
        *config.cached_dataset,
        "--output-dir",
        str(tmp_path),
    ]
    words += ["--freeze-vit", "false", "--freeze-aligner", "false", "--learning-rate", str(config.learning_rate)]
    words += ["--train-type", config.train_type, "--packing-length", str(config.packing_length), "--max-steps", "1"]
    words += ["--overwrite-output-dir", "true"] if overwrites else []

    def lose(*_: object) -> None:
        raise RuntimeError("[gloo] Connection closed by peer [::1]:29500")

    def error_lines() -> list[str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LOCAL_RANK", "0")
            patch.setattr("packtool.train.run.train", lose)
            assert run(words) == 1
        return capsys.readouterr().err.splitlines()

    assert error_lines()[-1] == "No checkpoint was finished: start the run again."
    train(config, SilentProgress())
    *_, newest, command = error_lines()
    assert newest.startswith(f"The newest checkpoint is {tmp_path}/checkpoint-1. To resume, on every machine")
    resuming = shlex.split(command)
    assert resuming[: len(words) + 1] == ["packtool", *words]
    assert run([*resuming[1:], "--dry-run"]) == 0
