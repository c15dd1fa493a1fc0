"""The example scripts run as they stand."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cache.conftest import model as model  # a fixture
from tests.waiting import PATIENCE_S


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """One in which ``packtool`` is this checkout's."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    command = bin_folder / "packtool"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m packtool "$@"\n')
    command.chmod(0o755)
    return {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHONPATH": os.getcwd()}


def write_rows(path: Path, count: int) -> Path:
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes"}]
    path.write_text((json.dumps({"messages": turns}) + "\n") * count)
    return path


def test_loop_skips_finished_datasets(repository: Path, tmp_path: Path, model: Path, environ: dict[str, str]) -> None:
    rows = [str(write_rows(tmp_path / f"{name}.jsonl", 40)) for name in "ab"]
    rows.insert(1, str(tmp_path / "gone.jsonl"))
    command = ["bash", str(repository / "scripts" / "export_all.sh"), *rows]
    environ |= {"MODEL": str(model), "MAX_LENGTH": "200", "NUM_PROC": "1", "EXPORT_OPTIONS": "--strict true"}
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PATIENCE_S)
    assert result.returncode == 3, result.stderr  # one dataset is missing, the others are made
    for name in "ab":
        assert (tmp_path / f"{name}_cached_len200" / "packtool.json").exists()
    second_run = subprocess.run(command[:3], env=environ, capture_output=True, text=True, timeout=PATIENCE_S)
    assert second_run.returncode == 0
    assert "already finished" in second_run.stdout


def test_a_job_array_makes_one_cache(repository: Path, tmp_path: Path, model: Path, environ: dict[str, str]) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 600)
    script = [
        str(repository / "scripts" / "slurm_export.sbatch"),
        str(model),
        str(rows),
        str(tmp_path / "cache"),
        "200",
    ]
    for index in range(2):
        environ |= {"SLURM_ARRAY_TASK_ID": str(index), "SLURM_ARRAY_TASK_COUNT": "2", "SLURM_CPUS_PER_TASK": "1"}
        subprocess.run(["bash", *script], env=environ, check=True, capture_output=True, timeout=PATIENCE_S)
        assert (tmp_path / "cache" / "packtool.json").exists() == (index == 1)


def test_commands_of_the_ci_job_are_valid(repository: Path) -> None:
    from packtool.cli.options import option_kinds, rewrite_arguments
    from packtool.config.data import ExportConfig

    job = yaml.safe_load((repository / "scripts" / "ci_export.yml").read_text())["jobs"]["export"]
    commands = [shlex.split(step["run"]) for step in job["steps"] if "run" in step]
    export = next(command for command in commands if command[:2] == ["packtool", "export"])
    kinds = option_kinds(ExportConfig)
    options = [word for word in export[2:] if word.startswith("--")]
    assert set(options) <= kinds.keys()
    rewrite_arguments(export[2 : export.index(">")], kinds, None, lambda name, value: None)


def test_slurm_starts_every_node_and_resumes_after_a_checkpoint(repository: Path, tmp_path: Path) -> None:
    """Slurm's own commands are stood in for, and packtool prints what it was called with."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    commands = "$NNODES $NODE_RANK $MASTER_ADDR $MASTER_PORT $NPROC_PER_NODE $*"
    stand_ins = {
        "packtool": f'echo "{commands}"',
        "scontrol": "printf 'first\\nsecond\\n'",
        "srun": 'for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done',
    }
    for name, text in stand_ins.items():
        (bin_folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (bin_folder / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8"}
    environ = {**os.environ, **slurm, "PATH": f"{bin_folder}:{os.environ['PATH']}"}
    environ.pop("MASTER_PORT", None)
    output = tmp_path / "out put"
    command = ["bash", str(repository / "scripts" / "slurm_train.sbatch"), "--output-dir", str(output)]

    def run() -> list[str]:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    commands = [f"2 {rank} first 29500 8 train --output-dir {output}" for rank in (0, 1)]
    lines = [line + " --overwrite-output-dir true" for line in commands]
    assert run() == lines
    (output / "checkpoint-5").mkdir(parents=True)
    assert run() == lines
    (output / "checkpoint-5" / "packtool_state.json").write_text("{}")
    assert run() == [line + " --resume-from-checkpoint true" for line in commands]
