"""A run writes into a directory of its own, or goes on in the one that it began in."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from packtool.cli.train import _after_interrupt
from packtool.errors import ConfigError, PacktoolError, StorageError
from packtool.launch.world import World
from packtool.progress import SilentProgress
from packtool.train.prepare.place import METRICS_NAME, make_place
from packtool.train.run import train
from tests.train.tiny import TinyWorld, check_same_rest, read_metrics


@pytest.mark.parametrize("is_dry", [True, False])
@pytest.mark.parametrize("given", ["", "FILE", "FILE/a/b", "/dev/null"])
def test_what_can_be_no_directory_is_told_before_anything_is_planned(
    given: str, is_dry: bool, tiny: TinyWorld, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    output_dir = given.replace("FILE", str(tmp_path / "file"))
    with pytest.raises(PacktoolError, match="--output-dir"):
        train(tiny.config(output_dir, dry_run=is_dry), SilentProgress())


def test_a_directory_that_cannot_be_made_after_all_is_told(tiny: TinyWorld) -> None:
    """Root may write anywhere, until it tries."""
    with pytest.raises(StorageError, match="--output-dir /proc/no-such/a cannot be made"):
        make_place(tiny.config("/proc/no-such/a"), World())


def steps_of(output_dir: Path) -> list[int]:
    return [line["step"] for line in read_metrics(output_dir)]


def test_a_used_directory_is_refused_replaced_or_gone_on_with(tiny: TinyWorld, tmp_path: Path) -> None:
    def run(**settings: Any) -> Any:
        given = {"train_type": "lora", "max_steps": 2, "save_steps": 1} | settings
        return train(tiny.config(tmp_path, **given), SilentProgress())

    run()
    before = (tmp_path / METRICS_NAME).read_text()
    for settings in ({}, {"dry_run": True}, {"seed": 1}):
        with pytest.raises(ConfigError, match=r"holds another run: checkpoint-1, checkpoint-2, metrics") as caught:
            run(**settings)
    for option in ("--resume-from-checkpoint true", "--overwrite-output-dir true", "--add-version true"):
        assert option in str(caught.value.remedy)
    assert (tmp_path / METRICS_NAME).read_text() == before
    with pytest.raises(ConfigError, match="checkpoint-2, which this run is to go on from"):
        run(resume_from_checkpoint="true", overwrite_output_dir=True)
    run(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert steps_of(tmp_path) == [1, 2]
    (tmp_path / "notes.txt").write_text("mine")
    run(overwrite_output_dir=True, max_steps=1)
    assert steps_of(tmp_path) == [1]
    assert not (tmp_path / "checkpoint-2").exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_lines_of_a_run_that_saved_nothing_are_kept_too(tiny: TinyWorld, tmp_path: Path) -> None:
    (tmp_path / METRICS_NAME).write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="holds another run") as caught:
        train(tiny.config(tmp_path), SilentProgress())
    assert "--resume-from-checkpoint" not in str(caught.value.remedy)
    assert (tmp_path / METRICS_NAME).read_text() == '{"step": 1}\n'


def test_every_version_has_a_folder_and_is_gone_on_with_there(tiny: TinyWorld, tmp_path: Path) -> None:
    config = tiny.config(tmp_path, add_version=True, train_type="lora", max_steps=2, save_steps=1)
    first, second = (train(config, SilentProgress()) for _ in range(2))
    names = [Path(result.output_dir).name for result in (first, second)]
    assert [name.split("-")[0] for name in names] == ["v0", "v1"]
    assert {path.name for path in tmp_path.iterdir()} == set(names)
    assert Path(str(second.checkpoint)).parent == Path(second.output_dir)
    assert second.checkpoint is not None
    assert second.checkpoint in _after_interrupt(config)
    resumed = dataclasses.replace(config, resume_from_checkpoint=f"{first.output_dir}/checkpoint-1")
    assert train(resumed, SilentProgress()).output_dir == first.output_dir
    check_same_rest(Path(second.output_dir), Path(first.output_dir), 0)
    newest = train(dataclasses.replace(config, resume_from_checkpoint="true", dry_run=True), SilentProgress())
    assert newest.output_dir == second.output_dir
    assert len(list(tmp_path.iterdir())) == 2


def test_the_next_number_follows_the_largest(tiny: TinyWorld, tmp_path: Path) -> None:
    for name in ("v2-20260101-000000", "v10-20260101-000000", "v11", "x"):
        (tmp_path / name).mkdir()
    placed = make_place(tiny.config(tmp_path, add_version=True), World())
    assert Path(placed.output_dir).name.startswith("v11-")
    assert Path(placed.output_dir).is_dir()


def test_what_is_said_after_ctrl_c_is_true(tiny: TinyWorld, tmp_path: Path) -> None:
    config = tiny.config(tmp_path / "none")
    assert "--resume" not in _after_interrupt(config)
    train(tiny.config(tmp_path, max_steps=1), SilentProgress())
    told = _after_interrupt(tiny.config(tmp_path))
    assert f"--resume-from-checkpoint true goes on from {tmp_path}/checkpoint-1" in told
