"""Parallelism of a run, decided without torch: how ranks share sequences, and DeepSpeed's settings."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.attention.parallel.axes import Axes, Heads, choose_axes, refuse_unshareable_sequences
from packtool.config.packing import ParallelOptions
from packtool.config.settings import load_json
from packtool.config.train import TrainConfig
from packtool.encode.model_files import ModelFiles
from packtool.errors import ConfigError
from packtool.launch.world import World, processes_of_machine
from packtool.planning.layers import language_config


def axes_of(
    config: ParallelOptions,
    world: World,
    files: ModelFiles,
    lengths: npt.NDArray[np.integer[Any]],
    *,
    trained: bool = False,
) -> Axes:
    """Choose how processes share sequences, by the ``lengths`` (N,) of known samples."""
    if world.sequence_parallel_size == 1:
        return Axes()
    refuse_unshareable_sequences(files.config, world.sequence_parallel_size, trained=trained)
    tokens = np.asarray(lengths, np.float64)
    typical = int(np.square(tokens).sum() / max(tokens.sum(), 1))
    heads = Heads.of_config(language_config(files.config))  # some models have other names for its settings
    nearby = processes_of_machine(otherwise=world.size)
    return choose_axes(config, heads, typical_length=typical, ranks_per_node=nearby)


def with_sequence_parallel_size(config: TrainConfig, size: int) -> TrainConfig:
    """The settings of the steps of a stage whose sequences ``size`` ranks share."""
    if size == config.sequence_parallel_ranks:
        return config
    kind = config.sequence_parallel_type if size > 1 else "auto"
    return dataclasses.replace(
        config, sequence_parallel_size=size, sequence_parallel_type=kind, ulysses_size=None, ring_size=None
    )


def sequence_parallel_lines(world: World, axes: Axes) -> Iterator[str]:
    """Describe how processes share sequences, if they do."""
    if world.sequence_parallel_size > 1:
        yield (
            f"sequence parallel: each sequence on {world.sequence_parallel_size} processes, {axes.name} "
            f"({axes.reason}); {world.data.size} data-parallel rank{'s' if world.data.size > 1 else ''}"
        )


def deepspeed_settings(name: str) -> dict[str, Any]:
    """Return the settings of DeepSpeed that ``--deepspeed`` names: ``zero2``, ``zero3_offload``, or a JSON file.

    The number is the stage of ZeRO, 0 to 3: what the ranks shard. From 1 on, these are optimizer states, from 2 on
    gradients, and with 3 weights. ``_offload`` keeps optimizer states, and with 3 weights, in the machine's memory.
    """
    preset = re.fullmatch(r"zero([0-3])(_offload)?", name)
    if preset is None:
        return _read_deepspeed_settings(name)
    stage = int(preset[1])
    offload = preset[2] is not None
    if offload and stage < 2:
        raise ConfigError(f"--deepspeed {name}: only zero2 and zero3 can be offloaded")
    return {
        "zero_optimization": _zero_settings(stage, offload=offload),
        "zero_allow_untested_optimizer": True,
        # transformers fills in the following from the options of the run.
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }


def _read_deepspeed_settings(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            return dict(load_json(file.read()))
    except (OSError, ValueError, TypeError) as error:
        remedy = "Give zero0, zero1, zero2, zero3, or a JSON file of DeepSpeed's settings."
        raise ConfigError(f"--deepspeed {path}: {error}", remedy) from error


def _zero_settings(stage: int, *, offload: bool) -> dict[str, Any]:
    """Return DeepSpeed's settings of a ZeRO stage; with ``offload``, its states are in the machine's memory."""
    settings: dict[str, Any] = {"stage": stage, "overlap_comm": False, "contiguous_gradients": True}
    if stage == 3:
        settings["reduce_bucket_size"] = "auto"
        settings["stage3_prefetch_bucket_size"] = "auto"
        settings["stage3_param_persistence_threshold"] = "auto"
        settings["stage3_gather_16bit_weights_on_model_save"] = True
    if offload:
        settings["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if stage == 3:
            settings["offload_param"] = {"device": "cpu", "pin_memory": True}
    return settings


def zero_stage(config: TrainConfig) -> int:
    """Return DeepSpeed's ZeRO stage, 0 to 3; 0 without DeepSpeed."""
    if config.deepspeed is None:
        return 0
    return int((deepspeed_settings(config.deepspeed).get("zero_optimization") or {}).get("stage") or 0)
