"""Sequence parallelism of a run: decided before torch is imported, from heads and lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.attention.parallel.axes import Axes, Heads, choose_axes, refuse_unshareable_sequences
from packtool.config.packing import ParallelOptions
from packtool.config.train import TrainConfig
from packtool.encode.model_files import ModelFiles
from packtool.launch.world import World, processes_of_machine


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
    heads = Heads.of_config(files.config)
    nearby = processes_of_machine(otherwise=world.size)
    return choose_axes(config, heads, typical_length=typical, ranks_per_node=nearby)


def with_shares(config: TrainConfig, size: int) -> TrainConfig:
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
