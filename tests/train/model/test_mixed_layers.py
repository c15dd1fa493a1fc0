"""Some layers recompute and others keep their activations: losses and gradients stay the same, bit for bit."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from packtool.attention.register import set_attention
from packtool.batch.collate import collate_packs, collate_tree
from packtool.batch.spec import InputSpec
from packtool.encode.families import MediaLimits
from packtool.train.model.compiled import compile_layers
from packtool.train.model.loss import LossFunction, base_model
from packtool.train.model.recompute import LayerSwitch
from tests.batch.reduced import reduced_limits, samples_with_prefixes, save_image_processor
from tests.forked import run_ranks
from tests.train.jobs import Job, run_jobs
from tests.train.model.switched import NUM_LAYERS, deep_config, switched_model
from tests.train.model.test_experts import mixture, spreads  # noqa: F401  # a fixture
from tests.train.tiny import TinyWorld, read_metrics

COMBINED = {
    "packs": {},
    "trees": {"tree": True},
    "bf16": {"autocast": torch.bfloat16},
    "compiled": {"backend": "aot_eager"},
    "trees, bf16, compiled": {"tree": True, "autocast": torch.bfloat16, "backend": "aot_eager"},
}


@pytest.mark.parametrize("options", COMBINED.values(), ids=COMBINED)
@pytest.mark.parametrize("name", ["qwen3", "qwen3_vl"])
def test_losses_and_gradients_are_bit_identical(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    config = deep_config(name)
    if name == "qwen3_vl":
        save_image_processor(name, str(tmp_path))
    spec = InputSpec(str(tmp_path), config, MediaLimits(reduced_limits(config)))
    samples = samples_with_prefixes(name)
    batch = (collate_tree if options.get("tree") else collate_packs)(samples, spec)
    results = []
    for num_layers in (0, 1, 4, NUM_LAYERS):
        torch.manual_seed(0)
        model = switched_model(config, num_layers, in_towers=num_layers == NUM_LAYERS).train()
        set_attention(base_model(model))
        if backend := options.get("backend"):
            compile_layers(model, backend)
        autocast = options.get("autocast")
        with torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext():
            loss = LossFunction(model)(model, batch).weighted_sum()
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for result in results[1:]:
        assert all(torch.equal(mixed, kept) for mixed, kept in zip(result, results[0], strict=True))


STEPS: dict[str, Any] = {"max_steps": 2, "gradient_accumulation_steps": 2, "save_strategy": "no"}
AUTO: dict[str, Any] = {"gradient_checkpointing": "auto", "memory_budget": 10**9}


def run_with_one_layer(world: TinyWorld, jobs: list[Job]) -> None:
    """Every rank recomputes the first layer of two, in every micro-batch."""

    def set_for(switch: Any, _: Any) -> int:
        for index, layer in enumerate(switch._layers):
            layer.gradient_checkpointing = index == 0
        return 1

    LayerSwitch.set_for = set_for  # type: ignore[method-assign,assignment]  # in a forked process
    run_jobs(world, jobs)


def check_the_same_runs(world: TinyWorld, folder: Path, options: dict[str, dict[str, Any]]) -> None:
    """Runs of two ranks whose layers communicate, without recomputation and with one layer that recomputes."""
    jobs: list[Job] = []
    for name, each in options.items():
        jobs.append(("train", folder / name / "none", STEPS | each | {"gradient_checkpointing": False}))
        jobs.append(("train", folder / name / "auto", STEPS | each | AUTO))
    run_ranks(2, run_with_one_layer, world, jobs, scratch=folder)
    for name in options:
        none, mixed = (read_metrics(folder / name / kind) for kind in ("none", "auto"))
        for key in ("loss", "grad_norm"):
            assert [line[key] for line in mixed] == [line[key] for line in none], name


def test_ranks_that_share_sequences(tiny: TinyWorld, tmp_path: Path) -> None:
    shared = {"sequence_parallel_size": 2}
    options = {kind: shared | {"sequence_parallel_type": kind} for kind in ("ulysses", "ring", "allgather")}
    check_the_same_runs(tiny, tmp_path, options)


@spreads
def test_ranks_with_different_experts(mixture: TinyWorld, tmp_path: Path) -> None:  # noqa: F811
    check_the_same_runs(mixture, tmp_path, {"experts": {"expert_parallel_size": 2, "verify_packing": False}})


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_deepspeed(tiny: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    check_the_same_runs(tiny, tmp_path, {stage: {"deepspeed": stage} for stage in ("zero1", "zero2", "zero3")})
