"""Checks of a run and an estimate of its memory, before any weights are loaded."""

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
from packtool.encode.model_files import absolute_model
from packtool.errors import ConfigError, MismatchError, raise_together
from packtool.launch.world import World, all_gather_objects
from packtool.train.loop.arguments import check_optimizer_of, training_arguments
from packtool.train.loop.loader import input_spec
from packtool.train.model.compiled import check_backend, refuse_without_liger
from packtool.train.model.load import has_gpu, model_without_weights, quiet_transformers, resolve_dtype
from packtool.train.model.memory import MemoryEstimate, estimate_memory
from packtool.train.model.precision import checkpoint_dtype, precision_lines, quantization_config, quantization_line
from packtool.train.model.router import RouterBalance
from packtool.train.model.sharding import check_experts, zero_stage
from packtool.train.prepare.checkpoint import RunState
from packtool.train.prepare.run import Run

_MANY_STEPS = 1_000_000


def load_spec(run: Run) -> InputSpec:
    """Return the model's properties that collation needs, and check that the model can be trained."""
    spec = input_spec(run)
    raise_together(_model_checks(run.config, spec.config))
    return spec


def checks_without_rows(config: TrainConfig) -> list[Callable[[], object]]:
    """Return the checks that do not depend on rows: calls that raise."""
    model = InputSpec.load(absolute_model(config.model), MediaLimits()).config

    def check_trainable() -> None:
        num_steps = config.max_steps or _MANY_STEPS  # otherwise known only once rows are counted
        check_optimizer_of(*_empty_model(config, model, num_steps))

    return [*_model_checks(config, model), check_trainable]


def _model_checks(config: TrainConfig, model_config: PreTrainedConfig) -> list[Callable[[], object]]:
    on_gpu = has_gpu(config)
    dtype = resolve_dtype(model_config, config, on_gpu=on_gpu)

    def refuse_compilation() -> None:
        raise ConfigError(
            f"--torch-compile true: with --deepspeed {config.deepspeed} weights are gathered inside of the layers "
            "that would be compiled",
            "Shard weights with --fsdp full_shard, which gathers them around a layer, or leave out --torch-compile.",
        )

    def check_layers() -> None:
        with quiet_transformers():
            model = model_without_weights(config, model_config, torch.float32)
        check_experts(model, config)
        if config.use_liger_kernel:
            refuse_without_liger(model, model_config.model_type, on_gpu=on_gpu)

    def check_kernel() -> None:
        if on_gpu and not torch.cuda.is_available():
            check_dtype(config.attn_impl, dtype)
            return
        device = torch.device("cuda" if on_gpu else "cpu")
        choose(config.attn_impl, device, dtype)
        if config.torch_compile:
            check_backend(config.torch_compile_backend, device)
        if config.sequence_parallel_ranks > 1:
            choose_blocks(config.attn_impl, device, dtype, head_dims=(0, 0))

    checks: list[Callable[[], object]] = [partial(quantization_config, config, model_config, dtype)]
    if config.torch_compile and zero_stage(config) == 3:
        checks.append(refuse_compilation)
    if config.use_liger_kernel or config.shares_experts:
        checks.append(check_layers)
    if config.removes_padding:
        checks += [partial(refuse_unsupported, model_config), check_kernel]
    return checks


def _empty_model(
    config: TrainConfig, model_config: PreTrainedConfig, num_steps: int
) -> tuple[nn.Module, TrainingArguments]:
    """Return the model on the meta device and the Trainer's arguments; raise where training would."""
    dtype = resolve_dtype(model_config, config, on_gpu=has_gpu(config))
    with quiet_transformers():
        args = training_arguments(config, num_steps=num_steps, dtype=dtype, on_gpu=torch.cuda.is_available())
        model = model_without_weights(config, model_config, dtype)
        if config.router_aux_loss_coef:
            RouterBalance(model, config.router_aux_loss_coef)
    return model, args


def estimate_training(run: Run, spec: InputSpec) -> tuple[MemoryEstimate, list[str]]:
    """Estimate the memory of training without loading weights, and raise where training would.

    Returns:
        the estimate, and lines about the precision of weights.
    """
    dtype = resolve_dtype(spec.config, run.config, on_gpu=has_gpu(run.config))
    model, args = _empty_model(run.config, spec.config, run.timeline.num_steps)
    estimate = estimate_run(run, model, spec, dtype)
    lines = list(precision_lines(model, dtype, run.config, checkpoint_dtype(spec.config)))
    lines += quantization_line(model, spec.config.model_type, run.config)
    check_optimizer_of(model, args)
    return estimate, lines


def estimate_run(run: Run, model: nn.Module, spec: InputSpec, dtype: torch.dtype) -> MemoryEstimate:
    """Return the largest memory estimate of the run's step configurations, each for its peak-memory micro-batches."""
    estimates = [
        estimate_memory(
            config,
            model,
            spec.config,
            dtype=dtype,
            world_size=run.world.size,
            micro_batches=run.peak_memory_batches(number),
            axes=axes,
        )
        for number, (config, axes) in enumerate(run.step_configs)
    ]
    return max(estimates, key=lambda estimate: estimate.total or 0)


def check_ranks_agree(state: RunState, world: World, sequence_parallel: str = "") -> None:
    """Compare what all ranks have planned; needs the process group.

    Args:
        sequence_parallel: describes how ranks share sequences.

    Raises:
        MismatchError: on every rank, naming the differences.
    """
    mine: dict[str, Any] = dataclasses.asdict(state) | {"sequence parallel": sequence_parallel}
    first, *_ = planned = all_gather_objects(mine, world.size)
    for rank, other in enumerate(planned):
        if other != first:
            names = [name for name in first if other[name] != first[name]]
            lines = [f"  - {name}: {first[name]} on rank 0, {other[name]} there" for name in names]
            raise MismatchError(
                f"rank {rank} would train something else than rank 0:\n" + "\n".join(lines),
                "All machines must see the same caches, the same options and the same version of packtool.",
            )
