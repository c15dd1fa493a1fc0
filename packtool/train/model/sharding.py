"""Weights, gradients and optimizer states spread over processes: DeepSpeed or FSDP2, driven by accelerate."""

from __future__ import annotations

import re
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from packtool.config.train import TrainConfig
from packtool.config.yaml_values import load_json
from packtool.errors import ConfigError


def sharding_arguments(config: TrainConfig) -> dict[str, Any]:
    """DeepSpeed or FSDP2, as transformers and accelerate drive them."""
    if config.deepspeed is not None:
        return {"deepspeed": deepspeed_settings(config.deepspeed)}
    if not config.fsdp:
        return {}
    settings: dict[str, Any] = {"reshard_after_forward": "shard_grad_op" not in config.fsdp}
    settings["cpu_offload"] = "offload" in config.fsdp
    settings["state_dict_type"] = "FULL_STATE_DICT"
    return {"fsdp": True, "fsdp_config": settings}


def deepspeed_settings(given: str) -> dict[str, Any]:
    """DeepSpeed's settings: a file's, or those behind a name.

    ``zeroN`` shards optimizer states (1), gradients too (2), weights too (3); ``_offload`` keeps optimizer states (and
    with 3 weights) in the machine's memory.

    Raises:
        ConfigError: for neither.
    """
    match = re.fullmatch(r"zero([0-3])(_offload)?", given)
    if match is None:
        return _file(given)
    stage, offload = int(match[1]), match[2] is not None
    if offload and stage < 2:
        raise ConfigError(f"--deepspeed {given}: only zero2 and zero3 can be offloaded")
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": False, "contiguous_gradients": True}
    if stage == 3:
        zero |= {"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
        zero |= {"stage3_param_persistence_threshold": "auto", "stage3_gather_16bit_weights_on_model_save": True}
    if offload:
        zero |= {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
        zero |= {"offload_param": {"device": "cpu", "pin_memory": True}} if stage == 3 else {}
    settings: dict[str, Any] = {"zero_optimization": zero, "zero_allow_untested_optimizer": True}
    settings |= {name: {"enabled": "auto"} for name in ("bf16", "fp16")}
    automatic = (
        "gradient_accumulation_steps",
        "gradient_clipping",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
    )
    return settings | dict.fromkeys(automatic, "auto")


def _file(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            return dict(load_json(file.read()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"--deepspeed {path}: {error}", "Give zero0, zero1, zero2, zero3, or a JSON file of DeepSpeed's settings."
        ) from error


def shard_on_cpus(config: TrainConfig) -> None:
    """Let accelerate shard over processes without GPUs, too: it only looks for FSDP where it sees accelerators.

    To be called between the arguments and the Trainer. The processes are said to have accelerators, until the Trainer
    says that they have FSDP; their devices stay what they are.
    """
    if config.fsdp and PartialState().distributed_type == DistributedType.MULTI_CPU:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU


def keep_digits_of_outputs(accelerator: Accelerator, config: TrainConfig) -> None:
    """Let FSDP round weights and inputs for the computation alone, and neither losses nor sums of gradients.

    accelerate has it round what the model returns, too, which are float32 losses here: 11.906 instead of 11.914.

    To be called between the Trainer and its first step.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if config.fsdp and plugin is not None and plugin.mixed_precision_policy is not None:
        policy = MixedPrecisionPolicy(plugin.mixed_precision_policy.param_dtype, reduce_dtype=torch.float32)
        plugin.mixed_precision_policy = policy


def shard_layers_that_are_there(accelerator: Accelerator, model: nn.Module, config: TrainConfig) -> None:
    """Name the layers that FSDP shards one by one: of those that the model's class lists, the ones that it has.

    Classes list layers of parts that are trained without them, as Qwen3-Omni's thinker does its talker's, and
    accelerate looks for each.

    To be called between the Trainer and its first step.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if config.fsdp and plugin is not None:
        there = {type(module).__name__ for module in model.modules()}
        listed = getattr(model, "_no_split_modules", None) or ()
        plugin.transformer_cls_names_to_wrap = sorted(there & set(listed))


def meet_on_cpus(config: TrainConfig) -> None:
    """Tell DeepSpeed of the processes that torch knows, where there are no GPUs: accelerate leaves it to the caller.

    To be called between the arguments and the model.
    """
    if config.deepspeed and PartialState().distributed_type == DistributedType.MULTI_CPU:
        import deepspeed  # an extra, and slow to import

        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)


def is_zero3(config: TrainConfig) -> bool:
    """Whether DeepSpeed shards weights, which it does as soon as they are read."""
    if config.deepspeed is None:
        return False
    zero = deepspeed_settings(config.deepspeed).get("zero_optimization") or {}
    return bool(zero.get("stage") == 3)
