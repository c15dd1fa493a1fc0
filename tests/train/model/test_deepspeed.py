"""DeepSpeed on two processes without GPUs: every stage learns what DDP learns, and goes on where it stopped."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.forked import run_ranks
from tests.train.alike import make_alike_world
from tests.train.jobs import Job, run_jobs
from tests.train.tiny import TinyWorld, check_same_rest, read_metrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
]

STAGES = ("zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
TREE_STAGES = ("zero2", "zero3")
# Pictures are loaded by another process, which makes the model that tells their positions.
STEPS: dict[str, Any] = {"max_steps": 3, "gradient_accumulation_steps": 2, "dataloader_num_workers": 1, "save_steps": 2}


@pytest.fixture(scope="module")
def runs(tiny: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DDP, every stage, and ZeRO-3 once more from its checkpoint."""
    root = tmp_path_factory.mktemp("deepspeed")
    jobs: list[Job] = [("train", root / "ddp", STEPS)]
    jobs += [("train", root / stage, STEPS | {"deepspeed": stage}) for stage in STAGES]
    resumed = STEPS | {"deepspeed": "zero3", "resume_from_checkpoint": str(root / "zero3" / "checkpoint-2")}
    jobs.append(("train", root / "resumed", resumed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        run_ranks(2, run_jobs, tiny, jobs, scratch=root)
    return root


@pytest.mark.parametrize("stage", STAGES)
def test_every_zero_stage_trains_like_ddp(stage: str, runs: Path) -> None:
    check_learns_the_same(runs / stage, runs / "ddp")


def check_learns_the_same(stage: Path, ddp: Path) -> None:
    lines, expected = read_metrics(stage), read_metrics(ddp)
    assert len(lines) == len(expected) == STEPS["max_steps"]
    for line, expected_line in zip(lines, expected, strict=True):
        assert line["loss"] == pytest.approx(expected_line["loss"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(expected_line["grad_norm"], rel=1e-5)
        assert line["tokens"] == expected_line["tokens"]
    weights, others = (load_file(run / "checkpoint-3" / "model.safetensors") for run in (stage, ddp))
    assert weights.keys() - {"lm_head.weight"} == others.keys()
    for name in others:
        torch.testing.assert_close(weights[name], others[name], rtol=0, atol=1e-5)


def test_shared_prefixes_train_like_ddp(tiny: TinyWorld, tmp_path: Path) -> None:
    """Samples that begin alike, with what they begin with once; with DDP, it is what whole samples learn."""
    alike_world = make_alike_world(tiny, tmp_path)
    job_settings = STEPS | {"share_prefix": "true", "num_train_epochs": 3.0}
    jobs: list[Job] = [("train", tmp_path / "ddp", job_settings)]
    jobs += [("train", tmp_path / stage, job_settings | {"deepspeed": stage}) for stage in TREE_STAGES]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        run_ranks(2, run_jobs, alike_world, jobs, scratch=tmp_path)
    for stage in TREE_STAGES:
        check_learns_the_same(tmp_path / stage, tmp_path / "ddp")


@pytest.mark.parametrize("stage", STAGES)
def test_sharded_parameters_are_counted_completely(stage: str, runs: Path) -> None:
    summary, expected = (json.loads((runs / name / "packtool_train.json").read_text()) for name in (stage, "ddp"))
    assert summary["num_parameters"] == expected["num_parameters"] > 0
    assert summary["num_trainable_parameters"] == expected["num_trainable_parameters"]


def test_zero3_resumes_exactly(runs: Path) -> None:
    check_same_rest(runs / "zero3", runs / "resumed", 2)
