"""Experts spread over processes: the step of one process that has them all, checkpoints that anyone reads."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForImageTextToText, Qwen3VLMoeConfig
from transformers.core_model_loading import Transpose
from transformers.distributed.configuration_utils import DistributedConfig

from packtool.config.train import TrainConfig
from packtool.errors import ConfigError, MismatchError, UnsupportedModelError
from packtool.launch.world import World
from packtool.progress import SilentProgress
from packtool.train.model.sharding import (
    check_experts,
    expert_sharding,
    expert_weights,
    experts_transposed_correctly,
    load_optimizer,
)
from packtool.train.run import train
from tests.batch.reduced import reduced_model
from tests.forked import run_ranks
from tests.train.jobs import Job, run_jobs
from tests.train.model.test_router import mixture as text_mixture
from tests.train.test_gradients import DESCENT
from tests.train.tiny import TinyWorld, check_same_rest, export_rows, read_metrics

ROUTED: dict[str, Any] = {"router_aux_loss_coef": 0.1, "verify_packing": False, "gradient_checkpointing": False}
# Four packs of unequal loads on each of two ranks; some micro-batches have no pictures.
SPREAD: dict[str, Any] = ROUTED | {"expert_parallel_size": 2}
FEW: dict[str, Any] = {"max_steps": 2, "save_steps": 1}
spreads = pytest.mark.skipif(
    "ep_implementation" not in {field.name for field in dataclasses.fields(DistributedConfig)},
    reason="experts are spread by transformers 5.23 or newer",
)


@pytest.fixture(scope="module")
def mixture(tiny: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    """The tiny world with four experts in each layer, of which a token takes two."""
    root = tmp_path_factory.mktemp("mixture")
    shutil.copytree(tiny.model, root / "model")
    settings = json.loads((root / "model" / "config.json").read_text())
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
    settings["text_config"] |= experts | {"mlp_only_layers": [], "model_type": "qwen3_vl_moe_text"}
    settings["vision_config"]["model_type"] = "qwen3_vl_moe_vision"
    config = Qwen3VLMoeConfig(**settings | {"model_type": "qwen3_vl_moe"})
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.06)
    model.save_pretrained(root / "model")
    mixture_world = TinyWorld(str(root / "model"), str(root / "cache"), tiny.rows)
    export_rows(mixture_world, mixture_world.cache)
    return mixture_world


@pytest.fixture(scope="module")
def two_ranks(mixture: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two processes, of one step of plain descent, and of AdamW whole and resumed."""
    root = tmp_path_factory.mktemp("two")
    jobs: list[Job] = [
        ("train", root / "spread", DESCENT | SPREAD | {"gradient_accumulation_steps": 4}),
        ("train", root / "whole", SPREAD | FEW),
        ("train", root / "resumed", SPREAD | FEW | {"resume_from_checkpoint": f"{root}/whole/checkpoint-1"}),
    ]
    run_ranks(2, run_jobs, mixture, jobs, scratch=root)
    return root


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "model.safetensors")


@spreads
def test_step_equals_that_of_one_process(mixture: TinyWorld, two_ranks: Path, tmp_path: Path) -> None:
    train(mixture.config(tmp_path, **DESCENT, **ROUTED, gradient_accumulation_steps=8), SilentProgress())
    (line,), (expected,) = read_metrics(two_ranks / "spread"), read_metrics(tmp_path)
    assert line["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    before = weights_of(Path(mixture.model))
    weights, others = weights_of(two_ranks / "spread" / "checkpoint-1"), weights_of(tmp_path / "checkpoint-1")
    # The whole weights of a sharded model hold the tied head a second time.
    assert weights.keys() - {"lm_head.weight"} == others.keys() == before.keys()
    for name, weight in others.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=2e-6, msg=lambda text, n=name: f"{n}: {text}")
        assert not torch.equal(weight, before[name]), name


@spreads
def test_expert_parallel_run_resumes_exactly(two_ranks: Path) -> None:
    check_same_rest(two_ranks / "whole", two_ranks / "resumed", 1)


def config(**settings: Any) -> TrainConfig:
    defaults: dict[str, Any] = {"model": "m", "cached_dataset": ("c",), "output_dir": "o", "train_type": "full"}
    return TrainConfig(**defaults | {"expert_parallel_size": 2} | settings)


@spreads
def test_run_without_expert_parallelism_cannot_resume_with_it(
    mixture: TinyWorld, two_ranks: Path, tmp_path: Path
) -> None:
    checkpoint = f"{two_ranks}/whole/checkpoint-1"
    settings = ROUTED | FEW | {"resume_from_checkpoint": checkpoint, "gradient_accumulation_steps": 2}
    with pytest.raises(MismatchError, match="shares_experts: True in the checkpoint, False now"):
        train(mixture.config(tmp_path, **settings), SilentProgress())
    with pytest.raises(MismatchError, match="has no optimizer_shards"):
        load_optimizer(nn.Linear(1, 1), torch.optim.SGD([nn.Parameter(torch.ones(1))]), str(tmp_path))
    # Weights alone anyone takes, and with all their digits.
    only = DESCENT | ROUTED | {"resume_from_checkpoint": checkpoint, "resume_only_model": True}
    train(mixture.config(tmp_path, **only, gradient_accumulation_steps=2), SilentProgress())


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed")
def test_balance_under_deepspeed_equals_that_of_ddp(mixture: TinyWorld, tmp_path: Path) -> None:
    settings = {"router_aux_loss_coef": 1.0, "max_steps": 3, "samples_per_step": 8, "gradient_checkpointing": False}
    kinds: dict[str, dict[str, Any]] = {"ddp": {}, "zero2": {"deepspeed": "zero2"}}
    jobs: list[Job] = [("train", tmp_path / name, settings | extra) for name, extra in kinds.items()]
    jobs.append(("train", tmp_path / "unbalanced", settings | {"router_aux_loss_coef": 0.0}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        run_ranks(2, run_jobs, mixture, jobs, scratch=tmp_path)
    lines = {name: read_metrics(tmp_path / name) for name in (*kinds, "unbalanced")}
    for name in kinds:
        for line, expected in zip(lines[name], lines["ddp"], strict=True):
            for figure in ("loss", "grad_norm", "router_balance"):
                assert line[figure] == pytest.approx(expected[figure], rel=1e-4), (name, figure)
    assert lines["ddp"][-1]["loss"] != pytest.approx(lines["unbalanced"][-1]["loss"], rel=1e-4)


def test_conflicting_options_are_refused() -> None:
    assert config().problems() == []
    assert config(expert_parallel_size=1, fsdp=("full_shard",)).problems() == []
    others: list[dict[str, Any]] = [
        {"fsdp": ("full_shard",)},
        {"deepspeed": "zero2"},
        {"train_type": "lora"},
        {"fp16": True},
        {"master_weights": "kahan"},
        {"torch_compile": True},
        {"use_liger_kernel": True},
    ]
    for other in others:
        problems = config(**other).problems()
        assert any("--expert-parallel-size 2 cannot be combined with --" in problem for problem in problems), other
    with pytest.raises(ConfigError, match="--expert-parallel-size 2: 1 process cannot be divided into groups of 2"):
        World().check_shards(config())
    World(0, 4).check_shards(config())


@spreads
def test_models_without_divisible_experts_are_refused() -> None:
    experts = text_mixture()
    check_experts(experts, config())
    assert len(expert_weights(experts)) == 2 * experts.config.num_hidden_layers
    with pytest.raises(ConfigError, match=r"4 experts \(model.layers.0.*\) cannot be divided by 3"):
        check_experts(experts, config(expert_parallel_size=3))
    with pytest.raises(UnsupportedModelError, match="has no expert parallelism for a Qwen3ForCausalLM"):
        check_experts(reduced_model("qwen3"), config())


@spreads
def test_layers_are_sharded_individually() -> None:
    sharding = expert_sharding(text_mixture(), config(), World(0, 4), torch.bfloat16)
    assert (sharding.fsdp_size, sharding.ep_size, sharding.efsdp_size) == (4, 2, 2)
    assert sharding.fsdp_mixed_precision
    assert sharding.fsdp_plan == {"model.layers.*": "free_full_weight"}


def test_experts_are_transposed_only_if_stored_transposed() -> None:
    """The first half of four experts of 3 x 5; transformers itself turns what is right, a reason for the context."""
    owner: Any = SimpleNamespace(get_parameter=lambda name: torch.empty(4, 3, 5))
    right, other = torch.rand(2, 3, 5), torch.rand(2, 5, 3)

    def read(stored: torch.Tensor) -> torch.Tensor:
        turn = Transpose(1, 2, check_dims=True)
        return turn.convert({"w": [stored]}, ["w"], ["w"], model=owner, full_layer_name="w")["w"]

    with experts_transposed_correctly():
        assert torch.equal(read(right), right)
        assert torch.equal(read(other), other.transpose(1, 2))
    assert read(right).shape == (2, 5, 3), "experts_transposed_correctly is needed no more with this transformers"
