"""Experts of a mixture spread over processes, by transformers' expert parallelism.

Every process trains packs of its own. N processes next to each other hold each expert once; in every layer they send
each other those tokens that go to the others' experts, and get back what comes of them. All that is no expert is
sharded over all processes (FSDP2), and so are experts where there are more than N:

    --expert-parallel-size 2, eight experts
    process      0         1         2         3
    packs        its own   its own   its own   its own
    experts      0 to 3    4 to 7    0 to 3    4 to 7      processes 0 and 2 have half of each, and so have 1 and 3
    the rest     a quarter each

transformers scales the gradients of experts, which see the tokens of N processes, to the mean over all processes.

Weights, gradients and optimizer states spread over processes: DeepSpeed or FSDP2, driven by accelerate.
"""

from __future__ import annotations

import dataclasses
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
from transformers.distributed.configuration_utils import DistributedConfig

from packtool.config.settings import load_json
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError, MismatchError, UnsupportedModelError
from packtool.launch.world import World
from packtool.train.prepare.checkpoint import ONLY_MODEL

OPTIMIZER_FOLDER = "optimizer_shards"
_NEEDED_FIELDS = frozenset(("ep_size", "fsdp_size", "ep_implementation"))
_PATTERNS = ("source_patterns", "target_patterns")
_LEAVE_OUT = "Leave out --expert-parallel-size; --fsdp full_shard shards all weights."


def expert_sharding(model: nn.Module, config: TrainConfig, world: World, dtype: torch.dtype) -> DistributedConfig:
    """How transformers is to shard a model while it reads the weights.

    Args:
        model: of that class, on whatever device: it lists its layers, and transformers' plans those of text alone.
        dtype: of the computation.
    """
    listed = set(getattr(model, "_no_split_modules", None) or ())
    layers = {_in_general(name) for name, module in model.named_modules() if type(module).__name__ in listed}
    return DistributedConfig(
        fsdp_size=world.size,
        ep_size=config.expert_parallel_size,
        ep_implementation="all_to_all",
        fsdp_mixed_precision=dtype == torch.bfloat16,
        fsdp_plan=dict.fromkeys(sorted(layers), "free_full_weight"),
    )


@contextmanager
def experts_turned_rightly() -> Iterator[None]:
    """Inside, experts that are read are transposed if their checkpoint has them the other way round, and not always.

    transformers 5.23 compares the experts of one rank with the shape of all of them, which is never the same.
    """
    operation: Any = Transpose
    theirs: Any = operation.convert

    def convert(self: Any, input_dict: dict[str, Any], *args: Any, **others: Any) -> Any:
        (tensors,) = input_dict.values()
        tensor = tensors[0] if isinstance(tensors, list) else tensors
        wanted = others["model"].get_parameter(others["full_layer_name"]) if self.check_dims else None
        if wanted is None or tensor.shape[1:] != wanted.shape[1:]:
            return theirs(self, input_dict, *args, **others)
        target = self.get_target_pattern(input_dict, *args, *(others[n] for n in _PATTERNS if n in others))
        return {target: tensor}

    operation.convert = convert
    try:
        yield
    finally:
        operation.convert = theirs


def refuse_other_experts(model: nn.Module, config: TrainConfig) -> None:
    """Raise for a model whose experts cannot be spread as it is asked for.

    Args:
        model: on whatever device.

    Raises:
        ConfigError: if they cannot be divided so, or with a transformers that cannot do it.
        UnsupportedModelError: for a model without experts, or of whose experts transformers does not know enough.
    """
    if not config.shares_experts:
        return
    given = f"--expert-parallel-size {config.expert_parallel_size}"
    if lacking := _NEEDED_FIELDS - {field.name for field in dataclasses.fields(DistributedConfig)}:
        raise ConfigError(
            f"{given}: transformers {transformers.__version__} has no {', '.join(sorted(lacking))} in its "
            "DistributedConfig",
            "Install transformers 5.23 or newer.",
        )
    weights = expert_weights(model)
    if not weights:
        raise UnsupportedModelError(
            f"{given}: transformers {transformers.__version__} has no plan for experts of a {type(model).__name__}",
            _LEAVE_OUT,
        )
    for name, weight in weights.items():
        if weight.shape[0] % config.expert_parallel_size:
            raise ConfigError(
                f"{given}: {weight.shape[0]} experts ({name}) cannot be divided by {config.expert_parallel_size}",
                "Give a number that divides them.",
            )


def expert_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of a model's experts that transformers would spread, (experts, ...), by their names."""
    plan: dict[str, str] = getattr(model, "ep_plan", None) or {}
    if "ep_dispatch_experts" not in plan.values():
        return {}
    spread = {name for name, style in plan.items() if style == "grouped_gemm"}
    named = model.named_parameters()
    return {name: weight for name, weight in named if _in_general(name) in spread}


def _in_general(name: str) -> str:
    """A name in a layer as it is in all of them: ``layers.*.mlp``."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def forget_sharding(model: Any) -> None:
    """Let a model that was sharded while it was read be saved like any other: its config names no processes."""
    model.config.__dict__.pop("distributed_config", None)


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """All weights in one piece, of any shape, on the first rank's host; nothing on the others. All ranks call this."""
    from transformers.distributed.utils import gather_full_state_dict  # not in each version that others can use

    found: dict[str, Tensor] = gather_full_state_dict(model)
    return found


def put(parameter: Tensor, whole: Tensor) -> None:
    """Copy a weight in one piece, of any shape, into a parameter, which may be a shard of it."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        everywhere = distribute_tensor(whole.to(parameter.device), mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
        whole = everywhere.redistribute(placements=parameter.placements)
    parameter.copy_(whole)


def save_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: str) -> None:
    """Write this rank's part of the optimizer's states; every rank calls this."""
    from transformers.distributed.checkpoint import save_optimizer_distributed  # as above

    save_optimizer_distributed(model, optimizer, os.path.join(checkpoint, OPTIMIZER_FOLDER))


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: str) -> None:
    """Read this rank's part of what any number of ranks wrote.

    Raises:
        MismatchError: if a run without spread experts wrote it.
    """
    folder = os.path.join(checkpoint, OPTIMIZER_FOLDER)
    if not os.path.isdir(folder):
        raise MismatchError(f"{checkpoint} has no {OPTIMIZER_FOLDER}, as a run with spread experts has", ONLY_MODEL)
    from transformers.distributed.checkpoint import load_optimizer_distributed  # as above

    load_optimizer_distributed(model, optimizer, folder)


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
