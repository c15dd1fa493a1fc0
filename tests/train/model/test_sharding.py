"""Arguments of sharding; FSDP2 itself is tried by ``test_gradients``, in two processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from packtool.batch.collate import collate_packs
from packtool.config.train import TrainConfig
from packtool.train.model.loss import HeadLoss
from packtool.train.model.sharding import configure_fsdp, sharding_arguments
from tests.batch.reduced import mixed_samples, reduced_model, reduced_spec
from tests.forked import run_ranks


def config(**settings: Any) -> TrainConfig:
    return TrainConfig(model="m", cached_dataset=("c",), output_dir="o", **settings)


def test_arguments_of_the_trainer() -> None:
    assert sharding_arguments(config()) == {}
    full = sharding_arguments(config(fsdp=("full_shard", "offload")))
    assert full["fsdp"] is True
    assert (full["fsdp_config"]["reshard_after_forward"], full["fsdp_config"]["cpu_offload"]) == (True, True)
    assert sharding_arguments(config(fsdp=("shard_grad_op",)))["fsdp_config"]["reshard_after_forward"] is False


def test_contradictions() -> None:
    assert any("give only one" in line for line in config(fsdp=("full_shard",), deepspeed="zero2").problems())
    assert any("--fsdp no_shard: known are" in line for line in config(fsdp=("no_shard",)).problems())


def losses_of_shards(keeps: bool) -> None:
    """On each of two ranks: the losses of a model that FSDP computes in bfloat16, under accelerate's policy or ours."""
    dist.init_process_group("gloo")
    rounding = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)  # what accelerate makes of bf16
    plugin = SimpleNamespace(mixed_precision_policy=rounding)
    if keeps:
        accelerator: Any = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
        configure_fsdp(accelerator, torch.nn.Linear(1, 1), config(fsdp=("full_shard",)))
        assert plugin.mixed_precision_policy.reduce_dtype == torch.float32
    model = reduced_model("qwen3")
    head = HeadLoss(model)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=plugin.mixed_precision_policy)
    sharded: Any = fully_shard(model, mesh=mesh, mp_policy=plugin.mixed_precision_policy)
    head_losses = head.losses(sharded, collate_packs(mixed_samples("qwen3"), reduced_spec("qwen3")))
    head_losses.weighted_sum().backward()
    assert (head_losses.losses.dtype == torch.float32) is keeps
    assert torch.equal(head_losses.losses.bfloat16().to(head_losses.losses.dtype), head_losses.losses) is not keeps
    assert all(parameter.grad is not None for parameter in sharded.parameters())
    dist.destroy_process_group()


@pytest.mark.parametrize("keeps", [True, False])
def test_fsdp_does_not_round_losses(keeps: bool, tmp_path: Path) -> None:
    run_ranks(2, losses_of_shards, keeps, scratch=tmp_path)


def test_only_layers_in_the_model_are_wrapped() -> None:
    """Qwen3-Omni's thinker lists its talker's layers, and accelerate would refuse the model for them."""

    class Layer(torch.nn.Module):
        pass

    model = torch.nn.Sequential(Layer(), torch.nn.Linear(1, 1))
    model._no_split_modules = {"Layer", "LayerOfAnotherPart"}  # type: ignore[assignment]
    plugin = SimpleNamespace(transformer_cls_names_to_wrap=None, mixed_precision_policy=None)
    accelerator: Any = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    configure_fsdp(accelerator, model, config(fsdp=("full_shard",)))
    assert plugin.transformer_cls_names_to_wrap == ["Layer"]
