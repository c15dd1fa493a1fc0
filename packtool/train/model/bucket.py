"""``--bucket-size auto``: how many tokens a process can hold.

Memory is linear in tokens: weights, gradients and optimizer, which do not depend on them, and what a forward and
backward pass holds, which does. Two passes are traced without memory (``train.model.trace``), a third one proves the
number.
"""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import torch
from transformers import PreTrainedConfig

from packtool.attention.parallel.axes import Axes
from packtool.batch.spec import model_config
from packtool.config.train import TrainConfig
from packtool.encode.families import is_multimodal
from packtool.encode.model_files import ModelFiles
from packtool.errors import ConfigError
from packtool.launch.world import World, processes_of_machine
from packtool.progress import Progress
from packtool.simulate.cost import Constants
from packtool.simulate.run import read_hardware
from packtool.train.model.load import has_gpu, quiet_transformers, resolve_dtype
from packtool.train.model.memory import estimate_memory, model_without_weights, traced_bytes
from packtool.train.prepare.figures import RankTokens
from packtool.train.prepare.sequence_parallel import axes_of

_GIB = 2**30
_FEW, _MORE = 2048, 4096
_LONG = 1 << 17
_STEP = 128
"""Tokens of which every bucket is a multiple."""


def with_bucket(config: TrainConfig, world: World, progress: Progress) -> TrainConfig:
    """The run with a number in place of ``auto``.

    Raises:
        ConfigError: if the memory is used up before the first token, or what a picture needs would decide.
    """
    if config.bucket_size != "auto":
        return config
    on_gpu = has_gpu(config)
    model = model_config(config.model)
    if is_multimodal(model.to_dict()) and not config.freeze_vit:
        raise ConfigError(
            "--bucket-size auto measures tokens of text, and with --freeze-vit false the pictures' tower needs memory",
            "Give a number of tokens, as in --bucket-size 8192.",
        )
    dtype = resolve_dtype(model, config, on_gpu=on_gpu)
    if config.hardware is not None:
        memory = read_hardware(config.hardware).memory_gb * 1e9 * Constants().usable_memory
    else:
        memory = device_bytes(on_gpu=on_gpu) * Constants().usable_memory
    with quiet_transformers():
        empty = model_without_weights(config, model, dtype)
    few = dataclasses.replace(config, bucket_size=str(_FEW))
    # The samples that processes share are the long ones.
    lengths = np.array([config.max_length or _LONG])
    axes = axes_of(config, world, ModelFiles.load(config.model), lengths, trained=True)
    estimate = estimate_memory(few, empty, model, dtype=dtype, world_size=world.size, axes=axes)
    fixed = (estimate.total - (estimate.activations or 0.0)) * _GIB
    least, room = _traced(config, model, dtype, _STEP, axes), memory - fixed
    per_token = bytes_per_token(config, model, dtype, axes)
    size = max(int(_FEW + (room - (estimate.activations or 0.0) * _GIB) / per_token), _STEP) // _STEP * _STEP
    while size > _STEP and (over := _traced(config, model, dtype, size, axes) - room) > 0:
        size = max(size - _STEP - int(over / per_token) // _STEP * _STEP, _STEP)
    if least > room:
        raise ConfigError(
            f"--bucket-size auto: weights, gradients and optimizer need {fixed / _GIB:.1f} of {memory / _GIB:.1f} GiB",
            "Shard them with --fsdp full_shard, train adapters with --train-type lora, or give a number of tokens.",
        )
    progress.note(
        f"bucket size: {size:,} tokens a process; {fixed / _GIB:.2f} of {memory / _GIB:.2f} GiB are taken, and a token "
        f"needs {per_token / 1024:,.1f} KiB"
    )
    return dataclasses.replace(config, bucket_size=str(size))


def device_bytes(*, on_gpu: bool) -> int:
    """Memory of this process's GPU, or its share of the machine's."""
    if on_gpu:
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return pages * size // processes_of_machine()


def _traced(
    config: TrainConfig, model: PreTrainedConfig, dtype: torch.dtype, num_tokens: int, axes: Axes | None
) -> int:
    found = traced_bytes(config, model, dtype, RankTokens(computed=num_tokens), axes)
    if found is None:
        raise ConfigError(
            f"--bucket-size auto: what a {model.model_type} keeps of a token cannot be traced",
            "Give a number of tokens, as in --bucket-size 8192.",
        )
    return found


def bytes_per_token(
    config: TrainConfig, model: PreTrainedConfig, dtype: torch.dtype, axes: Axes | None = None
) -> float:
    """What one more token adds to the most that a process holds in a pass."""
    few, more = (_traced(config, model, dtype, number, axes) for number in (_FEW, _MORE))
    return (more - few) / (_MORE - _FEW)
