"""Damaged checkpoints are passed over or refused by name; what a run does not read may be anything."""

from __future__ import annotations

import errno
import json
import re
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Trainer

from packtool.errors import ConfigError, MismatchError, StorageError
from packtool.progress import SilentProgress
from packtool.train.model.precision import MASTER_NAME
from packtool.train.prepare.checkpoint import STATE_NAME, checksums_of, find_checkpoint, finished_checkpoints, saving
from packtool.train.run import train
from tests.train.tiny import TinyWorld, check_same_rest, read_metrics

GIVEN: dict[str, Any] = {"gradient_accumulation_steps": 2, "save_steps": 1, "verify_packing": False}


class Noted(SilentProgress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, message: str) -> None:
        self.lines.append(message)


@pytest.fixture(scope="module")
def full_run(tiny: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps, each with a checkpoint."""
    output_dir = tmp_path_factory.mktemp("whole")
    assert train(tiny.config(output_dir, **GIVEN), SilentProgress()).steps == 4
    return output_dir


def linked(full_run: Path, target: Path) -> Path:
    """A copy without the last checkpoint, as of a run that was broken off; its files are links, to be replaced."""
    shutil.copytree(full_run, target, copy_function=lambda source, to: Path(to).hardlink_to(source))
    shutil.rmtree(target / "checkpoint-4")
    return target


def damage(file: Path, damage_kind: str, at: int) -> None:
    """Truncate, delete, or change bytes, leaving other links to the file alone."""
    data = file.read_bytes()
    file.unlink()
    at %= len(data)
    if damage_kind == "truncate":
        file.write_bytes(data[:at])
    elif damage_kind == "garbage":
        file.write_bytes(data[:at] + bytes(byte ^ 0x5A for byte in data[at : at + 16]) + data[at + 16 :])


@settings(max_examples=40)
@given(data=st.data())
def test_the_newest_intact_checkpoint_is_found_and_damaged_ones_are_named(
    data: Any, full_run: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    output_dir = linked(full_run, tmp_path_factory.mktemp("damaged") / "out")
    step = data.draw(st.sampled_from([1, 2, 3]))
    checkpoint = output_dir / f"checkpoint-{step}"
    read = [*checksums_of(str(checkpoint)), STATE_NAME]
    name = data.draw(st.sampled_from(sorted(path.name for path in checkpoint.iterdir())))
    damage_kind = data.draw(st.sampled_from(["truncate", "delete", "garbage"]))
    damage(checkpoint / name, damage_kind, data.draw(st.integers(0, 2**20)))
    newest, messages = find_checkpoint("true", str(output_dir))
    if name not in read or (step < 3 and name != STATE_NAME):
        assert newest == str(output_dir / "checkpoint-3")
        assert messages == []
    else:
        assert newest == str(output_dir / ("checkpoint-2" if step == 3 else "checkpoint-3"))
        assert len(messages) == 2
        assert f"checkpoint-{step}" in messages[0]
        assert name in messages[0]
    if name in read:
        with pytest.raises(MismatchError, match=name):
            find_checkpoint(str(checkpoint), str(output_dir))
    shutil.rmtree(output_dir)


def test_a_run_resumes_from_the_newest_intact_checkpoint(full_run: Path, tiny: TinyWorld, tmp_path: Path) -> None:
    """Weights of the last checkpoint, the optimizer of the one before; what no run reads, in the first."""
    output_dir = linked(full_run, tmp_path / "out")
    damage(output_dir / "checkpoint-3" / "model.safetensors", "truncate", 1000)
    damage(output_dir / "checkpoint-2" / "optimizer.pt", "garbage", 30_000)
    read = checksums_of(str(output_dir / "checkpoint-1"))
    for path in (output_dir / "checkpoint-1").iterdir():
        if path.name not in read and path.name != STATE_NAME:
            damage(path, "garbage", 0)
    progress = Noted()
    result = train(tiny.config(output_dir, **GIVEN, resume_from_checkpoint="true"), progress)
    assert result.resumed_from == str(output_dir / "checkpoint-1")
    output = "\n".join(progress.lines)
    assert "checkpoint-3 is damaged: model.safetensors has 1,000 bytes" in output
    assert "checkpoint-2 is damaged: optimizer.pt has changed" in output
    assert read_metrics(output_dir) == read_metrics(full_run)
    check_same_rest(full_run, output_dir, 0)


def test_checkpoints_of_older_versions_have_no_checksums(full_run: Path, tiny: TinyWorld, tmp_path: Path) -> None:
    output_dir = linked(full_run, tmp_path / "out")
    for checkpoint in finished_checkpoints(str(output_dir)):
        state = json.loads((Path(checkpoint) / STATE_NAME).read_text())
        (Path(checkpoint) / STATE_NAME).unlink()
        remaining_state = {
            name: value for name, value in state.items() if name not in ("files", "digest", "master_weights")
        }
        (Path(checkpoint) / STATE_NAME).write_text(json.dumps(remaining_state))
    assert find_checkpoint("true", str(output_dir))[0] == str(output_dir / "checkpoint-3")
    config = tiny.config(output_dir, **GIVEN, resume_from_checkpoint="true")
    for name, content in (("model.safetensors", "the weights"), ("optimizer.pt", "the optimizer's states")):
        kept_bytes = (output_dir / "checkpoint-3" / name).read_bytes()
        damage(output_dir / "checkpoint-3" / name, "truncate", 1000)
        with pytest.raises(MismatchError, match=f"{content}.* of .*checkpoint-3 cannot be read"):
            train(config, SilentProgress())
        (output_dir / "checkpoint-3" / name).write_bytes(kept_bytes)
    train(config, SilentProgress())
    assert read_metrics(output_dir) == read_metrics(full_run)


@pytest.mark.parametrize("train_type", ["full", "lora"])
def test_weights_only_checkpoints_cannot_be_resumed(train_type: str, tiny: TinyWorld, tmp_path: Path) -> None:
    run_options: dict[str, Any] = GIVEN | {
        "train_type": train_type,
        "training": {"save_only_model": True},
        "max_steps": 2,
    }
    train(tiny.config(tmp_path, **run_options), SilentProgress())
    on = {"max_steps": 4, "output_dir": str(tmp_path), "resume_from_checkpoint": "true", "training": {}}
    config = tiny.config(**run_options | on)
    with pytest.raises(MismatchError, match="the optimizer's states, the schedule, the random states") as exc_info:
        train(config, SilentProgress())
    assert "--resume-only-model true" in str(exc_info.value)
    progress = Noted()
    begun = {"resume_only_model": True, "output_dir": str(tmp_path / "new")}
    begun["resume_from_checkpoint"] = str(tmp_path / "checkpoint-2")
    train(tiny.config(**run_options | on | begun), progress)
    assert any("optimizer, schedule and data start from the beginning" in line for line in progress.lines)
    original, resumed_lines = read_metrics(tmp_path), read_metrics(tmp_path / "new")
    assert [line["step"] for line in resumed_lines] == [1, 2, 3, 4]
    assert resumed_lines[0]["loss"] < original[0]["loss"]


def test_a_full_disk_keeps_older_checkpoints(tiny: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = Trainer._save_optimizer_and_scheduler

    def full(self: Trainer, output_dir: str) -> None:
        if output_dir.endswith("checkpoint-2"):
            raise OSError(errno.ENOSPC, "No space left on device")
        save(self, output_dir)

    monkeypatch.setattr(Trainer, "_save_optimizer_and_scheduler", full)
    with pytest.raises(StorageError, match=r"checkpoint-2 could not be written: .*No space left") as exc_info:
        train(tiny.config(tmp_path, **GIVEN, save_total_limit=1), SilentProgress())
    assert "--save-total-limit" in str(exc_info.value)
    assert finished_checkpoints(str(tmp_path)) == [str(tmp_path / "checkpoint-1")]
    assert not (tmp_path / "checkpoint-2").exists()
    assert find_checkpoint("true", str(tmp_path))[0] == str(tmp_path / "checkpoint-1")


def test_a_limit_on_file_size_ends_the_run_and_is_named(
    full_run: Path, tiny: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch alone would say ``enforce fail at inline_container.cc``."""
    save, before = Trainer._save_optimizer_and_scheduler, resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = (full_run / "checkpoint-1" / "optimizer.pt").stat().st_size // 2

    def limited(self: Trainer, output_dir: str) -> None:
        if output_dir.endswith("checkpoint-2"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        save(self, output_dir)

    monkeypatch.setattr(Trainer, "_save_optimizer_and_scheduler", limited)
    try:
        with pytest.raises(
            StorageError, match=r"checkpoint-2 could not be written: File too large: .*ulimit"
        ) as exc_info:
            train(tiny.config(tmp_path, **GIVEN), SilentProgress())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "inline_container" not in str(exc_info.value)
    assert exc_info.value.exit_code == 5
    assert finished_checkpoints(str(tmp_path)) == [str(tmp_path / "checkpoint-1")]
    assert (tmp_path / "last").resolve().name == "checkpoint-1"


@pytest.mark.parametrize("num_bytes", [None, 5_000_000])
def test_a_full_disk_is_reported_with_the_needed_space(num_bytes: int | None, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint-1"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(bytes(1_200_000))
    needed = "more than 1.2 MB" if num_bytes is None else "about 5.0 MB"
    room = f"it needs {needed}, and {re.escape(str(tmp_path))} had [0-9,.]+ MB free"
    with (
        pytest.raises(StorageError, match=f"checkpoint-1 could not be written: No space left on device: {room}"),
        saving(str(directory), num_bytes=num_bytes),
    ):
        raise RuntimeError("[enforce fail at inline_container.cc:671] . unexpected pos 576000 vs 575892")
    assert not directory.exists()


def test_damaged_checkpoints_are_all_named_if_none_is_intact(full_run: Path, tmp_path: Path) -> None:
    output_dir = linked(full_run, tmp_path / "out")
    for step in (1, 2, 3):
        damage(output_dir / f"checkpoint-{step}" / "scheduler.pt", "delete", 0)
    with pytest.raises(ConfigError) as exc_info:
        find_checkpoint("true", str(output_dir))
    assert all(f"checkpoint-{step} is damaged: scheduler.pt is missing" in str(exc_info.value) for step in (1, 2, 3))
    assert not (output_dir / "checkpoint-1" / MASTER_NAME).exists()
    assert find_checkpoint("true", str(output_dir), only_model=True)[0] == str(output_dir / "checkpoint-3")
