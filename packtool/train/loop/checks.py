"""Refuse a run that cannot train, and estimate its memory, before any weights are loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, TrainingArguments

from packtool.attention.choose import check_dtype, choose
from packtool.attention.parallel.blocks import choose_blocks
from packtool.attention.support import refuse_unsupported
from packtool.batch.spec import InputSpec
from packtool.config.train import TrainConfig
from packtool.encode.families import MediaLimits
from packtool.encode.model_files import place_of
from packtool.errors import ConfigError, MismatchError, raise_together
from packtool.launch.world import World, all_gather_objects
from packtool.train.loop.arguments import check_optimizer_of, training_arguments
from packtool.train.loop.loader import input_spec
from packtool.train.model.compiled import check_backend, refuse_without_liger
from packtool.train.model.load import has_gpu, quiet_transformers, resolve_dtype
from packtool.train.model.memory import MemoryEstimate, estimate_memory, model_without_weights
from packtool.train.model.precision import checkpoint_dtype, precision_lines
from packtool.train.model.quantize import quantization_line, quantization_of
from packtool.train.model.router import RouterBalance
from packtool.train.model.sharding import (
    is_zero3,
    refuse_other_experts,
)
from packtool.train.model.towers import PartRates
from packtool.train.prepare.checkpoint import RunState
from packtool.train.prepare.run import Run

_MANY_STEPS = 1_000_000


def load_spec(run: Run) -> InputSpec:
    """The model as collation sees it.

    Raises:
        ConfigError: for a multimodal model of an unknown family, or --quant-bits without bitsandbytes.
        UnsupportedModelError: for a model whose packed samples could not be kept apart, or that Liger fails to patch.
    """
    spec = input_spec(run)
    raise_together(_model_checks(run.config, spec.config))
    return spec


def checks_without_rows(config: TrainConfig) -> list[Callable[[], object]]:
    """What training would refuse whatever its rows are: calls that raise, which read the model's configuration.

    Raises:
        ConfigError: for a model that cannot be trained at all, or a precision that this machine lacks.
    """
    model = InputSpec.load(place_of(config.model), MediaLimits()).config
    return [*_model_checks(config, model), partial(_check_trainable, config, model)]


def _model_checks(config: TrainConfig, model: PreTrainedConfig) -> list[Callable[[], object]]:
    dtype = resolve_dtype(model, config, on_gpu=has_gpu(config))
    checks: list[Callable[[], object]] = [partial(quantization_of, config, model, dtype)]
    if config.torch_compile and is_zero3(config):
        checks.append(partial(_refuse_compiled_zero3, config))
    if config.use_liger_kernel or config.shares_experts:
        checks.append(partial(_check_layers, config, model))
    if config.removes_padding:
        checks += [partial(refuse_unsupported, model), partial(_check_kernel, config, dtype)]
    return checks


def _refuse_compiled_zero3(config: TrainConfig) -> None:
    raise ConfigError(
        f"--torch-compile true: with --deepspeed {config.deepspeed} weights are gathered inside of the layers "
        "that would be compiled",
        "Shard weights with --fsdp full_shard, which gathers them around a layer, or leave out --torch-compile.",
    )


def _check_layers(config: TrainConfig, model_config: PreTrainedConfig) -> None:
    with quiet_transformers():
        model = model_without_weights(config, model_config, torch.float32)
    refuse_other_experts(model, config)
    if config.use_liger_kernel:
        refuse_without_liger(model, model_config.model_type, on_gpu=has_gpu(config))


def _check_kernel(config: TrainConfig, dtype: torch.dtype) -> None:
    on_gpu = has_gpu(config)
    if on_gpu and not torch.cuda.is_available():
        check_dtype(config.attn_impl, dtype)
        return
    device = torch.device("cuda" if on_gpu else "cpu")
    choose(config.attn_impl, device, dtype)
    if config.torch_compile:
        check_backend(config.torch_compile_backend, device)
    if config.sequence_parallel_ranks > 1:
        choose_blocks(config.attn_impl, device, dtype, head_dims=(0, 0))


def _check_trainable(config: TrainConfig, model_config: PreTrainedConfig) -> None:
    num_steps = config.max_steps or _MANY_STEPS  # rows, which have not been counted, decide
    check_optimizer_of(*_trainable_without_weights(config, model_config, num_steps))


def _trainable_without_weights(
    config: TrainConfig, model_config: PreTrainedConfig, num_steps: int
) -> tuple[nn.Module, TrainingArguments]:
    """The model on the meta device, and what the Trainer is told, once all options of training are known to fit."""
    dtype = resolve_dtype(model_config, config, on_gpu=has_gpu(config))
    with quiet_transformers():
        args = training_arguments(config, num_steps=num_steps, dtype=dtype, on_gpu=torch.cuda.is_available())
        model = model_without_weights(config, model_config, dtype)
        PartRates.of(config, model)
        if config.router_aux_loss_coef:
            RouterBalance(model, config.router_aux_loss_coef)
    return model, args


def estimate_training(run: Run, spec: InputSpec) -> tuple[MemoryEstimate, list[str]]:
    """What training would need, without loading weights; everything that it would refuse is refused.

    Returns:
        the estimate, and what the run would say of its weights' precision.

    Raises:
        ConfigError, UnsupportedModelError: as training.
    """
    dtype = resolve_dtype(spec.config, run.config, on_gpu=has_gpu(run.config))
    model, args = _trainable_without_weights(run.config, spec.config, run.timeline.num_steps)
    estimate = estimate_run(run, model, spec, dtype)
    told = list(precision_lines(model, dtype, run.config, checkpoint_dtype(spec.config)))
    told += quantization_line(model, spec.config.model_type, run.config)
    check_optimizer_of(model, args)
    return estimate, told


def estimate_run(run: Run, model: nn.Module, spec: InputSpec, dtype: torch.dtype) -> MemoryEstimate:
    """Estimate the memory of the run's heaviest micro-batches; the largest estimate of its step configurations."""
    found = []
    for number, (config, axes) in enumerate(run.step_configs):
        heaviest, size = run.peak_memory_batches(number), run.world.size
        found.append(
            estimate_memory(config, model, spec.config, dtype=dtype, world_size=size, micro_batches=heaviest, axes=axes)
        )
    return max(found, key=lambda estimate: estimate.total or 0)


def check_ranks_agree(state: RunState, world: World, sequence_parallel: str = "") -> None:
    """Compare what all ranks have planned, by one exchange of hashes.

    The process group must be there.

    Args:
        sequence_parallel: how ranks share sequences, in words; each has worked it out, too.

    Raises:
        MismatchError: on every rank, naming what differs.
    """
    planned: dict[str, Any] = dataclasses.asdict(state) | {"sequence parallel": sequence_parallel}
    first, *_ = found = all_gather_objects(planned, world.size)
    for rank, other in enumerate(found):
        if other != first:
            differing = [name for name in first if other[name] != first[name]]
            lines = [f"  - {name}: {first[name]} on rank 0, {other[name]} there" for name in differing]
            raise MismatchError(
                f"rank {rank} would train something else than rank 0:\n" + "\n".join(lines),
                "All machines must see the same caches, the same options and the same version of packtool.",
            )
