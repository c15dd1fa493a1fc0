"""``--torch-compile true``: the same runs, on one process and on two, sharded, shared, resumed and evaluated."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from packtool.errors import ConfigError
from packtool.progress import SilentProgress
from packtool.train.model.compiled import check_backend
from packtool.train.run import train
from tests.forked import run_ranks
from tests.train.jobs import Job, run_jobs
from tests.train.test_gradients import DESCENT, check_before, check_same_step
from tests.train.tiny import TinyWorld, check_same_rest, export_rows, read_metrics

COMPILED: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": "eager"}
WITH_AUTOGRAD: dict[str, Any] = COMPILED | {"torch_compile_backend": "aot_eager"}
ONCE = DESCENT | {"eval_strategy": "no"}
TWO: dict[str, Any] = {"sequence_parallel_size": 2, "per_device_train_batch_size": 8}
# All samples in one step of plain gradient descent: its weights tell the gradient.
STEPS: dict[str, dict[str, Any]] = {
    "fsdp": WITH_AUTOGRAD | {"gradient_accumulation_steps": 4, "fsdp": ["full_shard"], "gradient_checkpointing": True},
    "skrull": COMPILED | TWO | {"schedule": "skrull", "bucket_size": "96", "sequence_parallel_type": "ring"},
    "dynamic": COMPILED
    | {"packing": False, "per_device_train_batch_size": 20, "dynamic_batch_tokens": 300, "dynamic_max_batch_size": 9},
}
# 8 packs in steps of 3, two epochs; packs of 256 tokens, padded to multiples of 32.
RUN: dict[str, Any] = {"num_train_epochs": 2.0, "gradient_accumulation_steps": 3, "save_steps": 3}
LENGTHS = 9


class RecordingProgress(SilentProgress):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, message: str) -> None:
        self.lines.append(message)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny: TinyWorld) -> TinyWorld:
    """The tiny world with a cache that also has a val split."""
    cache = tmp_path_factory.mktemp("split") / "cache"
    export_rows(tiny, cache, val_dataset=(tiny.rows,))
    return dataclasses.replace(tiny, cache=str(cache))


@pytest.fixture(scope="module")
def two_processes(world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A first backward pass after torch's compiler is imported starts threads, which forks do not have.
    torch.ones(1, requires_grad=True).sum().backward()
    # Here once, and not in each rank: it takes seconds.
    check_backend("aot_eager", torch.device("cpu"))
    importlib.import_module("torch._inductor.pattern_matcher")
    root = tmp_path_factory.mktemp("two")
    jobs: list[Job] = [("train", root / name, ONCE | settings) for name, settings in STEPS.items()]
    run_ranks(2, run_jobs, world, [check_before(job, ("fsdp", "skrull")) for job in jobs], scratch=root)
    return root


@pytest.fixture(scope="module")
def reference(world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, and nothing compiled."""
    output_dir = tmp_path_factory.mktemp("reference")
    train(world.config(output_dir, **ONCE, per_device_train_batch_size=8), SilentProgress())
    return output_dir


@pytest.mark.parametrize("name", STEPS)
def test_two_processes(name: str, two_processes: Path, reference: Path) -> None:
    check_same_step(two_processes / name, reference)


def test_compiled_run_has_the_same_losses_and_few_lengths(world: TinyWorld, tmp_path: Path) -> None:
    """With images, accumulation and evaluations; padding is reported and not counted."""
    torch._dynamo.reset()
    counters.clear()
    progress = RecordingProgress()
    train(world.config(tmp_path / "plain", **RUN), SilentProgress())
    train(world.config(tmp_path / "compiled", **RUN | COMPILED), progress)
    assert "padded to multiples of 32 tokens, up to 288" in "\n".join(progress.lines)
    lines, expected = read_metrics(tmp_path / "compiled"), read_metrics(tmp_path / "plain")
    assert any("eval_loss" in line for line in lines)
    paddings = []
    for line, expected_line in zip(lines, expected, strict=True):
        paddings.append(line.pop("padding", 0.0))
        assert line == pytest.approx(expected_line, rel=1e-5)
    assert 0 < max(paddings) < 32 / 128
    # The function in four pieces, around the attention.
    assert 0 < counters["stats"]["unique_graphs"] <= 4 * LENGTHS


def test_compiled_run_resumes_bit_exactly(world: TinyWorld, tmp_path: Path) -> None:
    settings = RUN | COMPILED | {"train_type": "lora", "lora_dropout": 0.3, "eval_strategy": "no"}
    train(world.config(tmp_path / "whole", **settings), SilentProgress())
    resumed = {"resume_from_checkpoint": str(tmp_path / "whole" / "checkpoint-3")}
    train(world.config(tmp_path / "resumed", **settings | resumed), SilentProgress())
    check_same_rest(tmp_path / "whole", tmp_path / "resumed", 3)


def test_incompatible_options_are_refused(world: TinyWorld, tmp_path: Path) -> None:
    padded = world.config(tmp_path, torch_compile=True, packing=False)
    assert any("--torch-compile true requires packing" in problem for problem in padded.problems())
    fused = world.config(tmp_path, torch_compile=True, use_liger_kernel=True)
    assert any("fuse the same operations" in problem for problem in fused.problems())
    gathered = world.config(tmp_path, **COMPILED, deepspeed="zero3", dry_run=True)
    with pytest.raises(ConfigError, match="gathers weights inside the compiled layers"):
        train(gathered, SilentProgress())


def test_dry_run_reports_the_compiled_lengths(world: TinyWorld, tmp_path: Path) -> None:
    progress = RecordingProgress()
    train(world.config(tmp_path, **COMPILED, dry_run=True), progress)
    assert any(line.startswith("torch.compile (eager)") for line in progress.lines)
