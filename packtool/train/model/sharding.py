"""Sharding of weights, gradients and optimizer states over processes: expert parallelism, DeepSpeed and FSDP2.

Every process trains its own packs. With expert parallelism (transformers') N neighbouring processes together hold each
expert once, and exchange tokens and results in every layer; all other weights are sharded over all processes (FSDP2)::

    --expert-parallel-size 2, eight experts
    process         0         1         2         3
    experts         0 to 3    4 to 7    0 to 3    4 to 7      half of each weight on processes 0 and 2, and on 1 and 3
    other weights   a quarter each

transformers scales the gradients of experts, which see the tokens of N processes, to the mean over all processes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from transformers.core_model_loading import Transpose
from transformers.distributed.checkpoint import load_optimizer_distributed
from transformers.distributed.configuration_utils import DistributedConfig

from packtool.config.train import TrainConfig
from packtool.errors import ConfigError, MismatchError, UnsupportedModelError
from packtool.launch.world import World
from packtool.train.prepare.checkpoint import ONLY_MODEL
from packtool.train.prepare.parallelism import deepspeed_settings, zero_stage

OPTIMIZER_FOLDER = "optimizer_shards"
_EXPERTS_REMEDY = "Leave out --expert-parallel-size; --fsdp full_shard shards all weights."


def expert_sharding(model: nn.Module, config: TrainConfig, world: World, dtype: torch.dtype) -> DistributedConfig:
    """Return transformers' settings for sharding a model, computed in ``dtype``, while its weights are read."""
    layers = set(layers_of_model(model))  # listed, because transformers' plans have text layers only
    patterns = {_layer_pattern(name) for name, module in model.named_modules() if module in layers}
    return DistributedConfig(
        fsdp_size=world.size,
        ep_size=config.expert_parallel_size,
        ep_implementation="all_to_all",
        fsdp_mixed_precision=dtype == torch.bfloat16,
        fsdp_plan=dict.fromkeys(sorted(patterns), "free_full_weight"),
    )


def layers_of_model(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model whose weights are gathered and freed together."""
    class_names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in class_names]


@contextmanager
def experts_transposed_correctly() -> Iterator[None]:
    """Fix transformers inside ``with``: transpose experts while reading only if the checkpoint stores them transposed.

    transformers 5.23 transposes if the shapes of tensor and parameter differ. With expert parallelism they always do:
    the tensor has the experts of one rank, the parameter those of all ranks.
    """
    operation: Any = Transpose
    original_convert: Any = operation.convert

    def convert(self: Any, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any) -> Any:
        """Replace ``Transpose.convert``; ``input_dict`` has one entry."""
        (tensors,) = input_dict.values()
        tensor = tensors[0] if isinstance(tensors, list) else tensors
        if self.check_dims:  # otherwise it always transposes
            parameter = kwargs["model"].get_parameter(kwargs["full_layer_name"])
            # Compare all dimensions but the first one, the number of experts.
            is_stored_alike = tensor.shape[1:] == parameter.shape[1:]
            if is_stored_alike:
                target_name = self.get_target_pattern(input_dict, source_patterns, target_patterns)
                return {target_name: tensor}
        return original_convert(self, input_dict, source_patterns, target_patterns, **kwargs)

    operation.convert = convert
    try:
        yield
    finally:
        operation.convert = original_convert


def check_experts(model: nn.Module, config: TrainConfig) -> None:
    """Raise if transformers has no expert parallelism for a model, or ``--expert-parallel-size`` does not divide it."""
    if not config.shares_experts:
        return
    option = f"--expert-parallel-size {config.expert_parallel_size}"
    weights = expert_weights(model)
    if not weights:
        raise UnsupportedModelError(
            f"{option}: transformers {transformers.__version__} has no expert parallelism for a {type(model).__name__}",
            _EXPERTS_REMEDY,
        )
    for name, weight in weights.items():
        if weight.shape[0] % config.expert_parallel_size:
            raise ConfigError(
                f"{option}: {weight.shape[0]} experts ({name}) cannot be divided by {config.expert_parallel_size}",
                "Choose a size that divides the number of experts.",
            )


def expert_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the expert weights that transformers would divide among ranks, each (experts, ...), by name."""
    plan: dict[str, str] = getattr(model, "ep_plan", None) or {}
    if "ep_dispatch_experts" not in plan.values():
        return {}
    patterns = {name for name, style in plan.items() if style == "grouped_gemm"}
    return {name: weight for name, weight in model.named_parameters() if _layer_pattern(name) in patterns}


def _layer_pattern(name: str) -> str:
    """Replace layer numbers in a name by a star, as in ``layers.*.mlp``."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def copy_weight(parameter: Tensor, weight: Tensor) -> None:
    """Copy a full weight, of any shape, into a parameter, which may be a shard."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        replicated = distribute_tensor(weight.to(parameter.device), mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
        weight = replicated.redistribute(placements=parameter.placements)
    parameter.copy_(weight)


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: str) -> None:
    """Read this rank's shard of optimizer states, written by a run with expert parallelism on any number of ranks."""
    folder = os.path.join(checkpoint, OPTIMIZER_FOLDER)
    if not os.path.isdir(folder):
        raise MismatchError(
            f"{checkpoint} has no {OPTIMIZER_FOLDER}: it was saved by a run without expert parallelism", ONLY_MODEL
        )
    load_optimizer_distributed(model, optimizer, folder)


def sharding_arguments(config: TrainConfig) -> dict[str, Any]:
    """Return the Trainer's arguments for DeepSpeed or FSDP2; none without sharding."""
    if config.deepspeed is not None:
        return {"deepspeed": deepspeed_settings(config.deepspeed)}
    if not config.fsdp:
        return {}
    settings = {
        "reshard_after_forward": "shard_grad_op" not in config.fsdp,
        "cpu_offload": "offload" in config.fsdp,
        "state_dict_type": "FULL_STATE_DICT",
    }
    return {"fsdp": True, "fsdp_config": settings}


def shards_weights(config: TrainConfig) -> bool:
    """Return whether each process holds only a part of the weights, as with FSDP, ZeRO-3 and expert parallelism."""
    return bool(config.fsdp) or config.shares_experts or zero_stage(config) == 3


def connect_deepspeed_on_cpus(config: TrainConfig) -> None:
    """Start DeepSpeed's communication where accelerate does not, on CPUs; call it between arguments and model."""
    if config.deepspeed and PartialState().distributed_type == DistributedType.MULTI_CPU:
        import deepspeed  # an extra, and slow to import

        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)


def shard_on_cpus(config: TrainConfig) -> None:
    """Let accelerate use FSDP on processes without GPUs, which it allows only with accelerators.

    Call it after the Trainer's arguments are created and before the Trainer is. It pretends that processes have
    accelerators until the Trainer sets its own type; devices do not change.
    """
    if config.fsdp and PartialState().distributed_type == DistributedType.MULTI_CPU:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU


def configure_fsdp(accelerator: Accelerator, model: nn.Module, config: TrainConfig) -> None:
    """Correct accelerate's FSDP settings; call it after the Trainer is created and before its first step.

    Outputs are not rounded: accelerate would also round the model's outputs, which are float32 losses here (11.906
    instead of 11.914). And only layer classes that the model contains are wrapped: accelerate fails on others, and
    Qwen3-Omni's thinker, for example, also lists layers of the talker.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if not config.fsdp or plugin is None:
        return
    if plugin.mixed_precision_policy is not None:
        dtype = plugin.mixed_precision_policy.param_dtype
        plugin.mixed_precision_policy = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32)
    plugin.transformer_cls_names_to_wrap = sorted({type(layer).__name__ for layer in layers_of_model(model)})
