"""A lock file holds what determines the plan of a run; training refuses every difference by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from packtool.cli.main import run
from packtool.config.train import TrainConfig
from packtool.errors import EXIT_MISMATCH, EXIT_USAGE, MismatchError
from packtool.launch.world import World
from packtool.train.prepare.lock_file import read_lock
from packtool.train.prepare.run import Run
from tests.train.tiny import TinyWorld, export_rows


@pytest.fixture(scope="module")
def lock(tiny: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lock") / "packtool.lock"
    words = f"plan {tiny.cache} --packing-length 128 --model {tiny.model} --lock {path}"
    assert run(words.split()) == 0
    return path


def config(tiny: TinyWorld, lock: Path, output_dir: Path, **options: object) -> TrainConfig:
    values = {"model": tiny.model, "cached_dataset": (tiny.cache,), "packing_length": 128, **options}
    return TrainConfig(output_dir=str(output_dir), locked=str(lock), **values)  # type: ignore[arg-type]


def differences(config: TrainConfig, num_processes: int = 1) -> str:
    with pytest.raises(MismatchError) as error:
        Run.of(config, World(size=num_processes).shared_by(1))
    assert error.value.code == "P003"
    return str(error.value)


@pytest.mark.smoke
def test_an_unchanged_run_is_accepted(tiny: TinyWorld, lock: Path, tmp_path: Path) -> None:
    Run.of(config(tiny, lock, tmp_path / "run"), World())


def test_the_file_is_sorted_and_has_every_section(lock: Path) -> None:
    content = json.loads(lock.read_text())
    assert lock.read_text() == json.dumps(content, indent=2, sort_keys=True) + "\n"
    assert set(content) == {"format", "versions", "kernels", "options", "model", "caches", "plan"}
    assert content["options"] == {"packing_length": 128}
    assert content["caches"]["0"]["rows"]
    assert "config.json" in content["model"]
    assert "torch" in content["versions"]


def test_the_same_plan_writes_the_same_file(tiny: TinyWorld, lock: Path, tmp_path: Path) -> None:
    """The location of the cache and the options that do not matter leave no trace."""
    moved = tmp_path / "moved"
    shutil.copytree(tiny.cache, moved)
    words = f"plan {moved} --packing-length 128 --model {tiny.model} --lock {tmp_path / 'b.lock'} --verify-cache never"
    assert run(words.split()) == 0
    assert (tmp_path / "b.lock").read_text() == lock.read_text()


def test_options_and_ranks_are_named(tiny: TinyWorld, lock: Path, tmp_path: Path) -> None:
    text = differences(config(tiny, lock, tmp_path, packing_length=256, seed=7), num_processes=2)
    assert "- options.packing_length: 128 in packtool.lock, 256 in this run\n" in text
    assert "- options.seed: nothing in packtool.lock, 7 in this run\n" in text
    assert "- plan.world_size: 1 in packtool.lock, 2 in this run\n" in text
    assert "- plan.packs: " in text
    assert "caches" not in text


def test_rows_are_named(tiny: TinyWorld, lock: Path, tmp_path: Path) -> None:
    export_rows(tiny, tmp_path / "cache", loss_scale="last_round")
    text = differences(config(tiny, lock, tmp_path / "run", cached_dataset=(str(tmp_path / "cache"),)))
    assert "- caches.0.fingerprint: " in text
    assert "- caches.0.settings.loss_scale: default in packtool.lock, last_round in this run\n" in text
    assert "caches.0.rows" not in text


def test_files_of_the_model_are_named(tiny: TinyWorld, lock: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny.model, model)
    (model / "generation_config.json").write_text('{"temperature": 0.5}')
    text = differences(config(tiny, lock, tmp_path / "run", model=str(model)))
    assert "- model.generation_config.json: " in text
    assert len(text.splitlines()) == 3


def test_versions_are_named(tiny: TinyWorld, lock: Path, tmp_path: Path) -> None:
    content = json.loads(lock.read_text())
    content["versions"]["torch"] = "1.0"
    content["kernels"]["flash-attn"] = "9.9"
    changed = tmp_path / "changed.lock"
    changed.write_text(json.dumps(content))
    text = differences(config(tiny, changed, tmp_path / "run"))
    assert "- versions.torch: 1.0 in changed.lock, " in text
    assert "- kernels.flash-attn: 9.9 in changed.lock, nothing in this run\n" in text


@pytest.mark.parametrize(
    ("text", "problem"),
    [("{", "is not a lock file"), ("[]", "it has no format"), ("{}", "no format"), ('{"format": 99}', "format 99")],
)
def test_damaged_and_newer_files_are_refused(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "packtool.lock"
    path.write_text(text)
    with pytest.raises(MismatchError, match=problem) as error:
        read_lock(str(path))
    assert error.value.code == "P004"
    assert "packtool plan --lock" in str(error.value)


def test_training_refuses_before_it_starts(
    tiny: TinyWorld, lock: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"train --model {tiny.model} --cached-dataset {tiny.cache} --output-dir {tmp_path / 'run'} --locked {lock}"
    assert run([*words.split(), "--dry-run"]) == EXIT_MISMATCH
    assert "this run differs: [P003]\n  - options.packing_length: 128 in packtool.lock" in capsys.readouterr().err


def test_plans_without_content_cannot_be_locked(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--lengths", "lengths.txt", "--packing-length", "64", "--lock", "a.lock"]) == EXIT_USAGE
    assert "--lock requires caches" in capsys.readouterr().err
