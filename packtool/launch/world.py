"""Ranks of a run, GPU names of this machine, and exchange of Python objects between processes."""

from __future__ import annotations

import dataclasses
import glob
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from packtool.config.train import TrainConfig
from packtool.errors import ConfigError


def is_launched() -> bool:
    """Return whether torchrun has started this process."""
    return any(os.environ.get(name) for name in ("LOCAL_RANK", "TORCHELASTIC_RUN_ID"))


@dataclass(frozen=True)
class World:
    """The rank of this process; ``sequence_parallel_size`` consecutive ranks share each sequence."""

    rank: int = 0
    size: int = 1
    sequence_parallel_size: int = 1

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> World:
        """Read ``RANK`` and ``WORLD_SIZE``, which torchrun sets, or raise a ConfigError; one process without them."""
        values = os.environ if environ is None else environ
        rank, size = values.get("RANK", "0"), values.get("WORLD_SIZE", "1")
        if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
            raise ConfigError(
                f"RANK={rank} and WORLD_SIZE={size} in the environment do not name a process of a run",
                "torchrun sets them; unset both, and give NPROC_PER_NODE to train in several processes.",
            )
        return cls(int(rank), int(size))

    def shared_by(self, sequence_parallel_size: int) -> World:
        """Return this with groups of ranks that share sequences; raise a ConfigError if the size is no multiple."""
        self._check_groups("--sequence-parallel-size", sequence_parallel_size)
        return dataclasses.replace(self, sequence_parallel_size=sequence_parallel_size)

    def check_shards(self, config: TrainConfig) -> None:
        """Raise a ConfigError if the weights cannot be sharded over this number of processes."""
        if config.fsdp and self.size == 1:
            raise ConfigError(
                f"--fsdp {' '.join(config.fsdp)} shards weights over processes, but there is only one",
                "Put NPROC_PER_NODE=8 before the command to start eight, or leave out --fsdp.",
            )
        self._check_groups("--expert-parallel-size", config.expert_parallel_size)

    def _check_groups(self, option: str, group_size: int) -> None:
        """Raise a ConfigError if the processes cannot be divided into groups of this size."""
        if self.size % group_size:
            raise ConfigError(
                f"{option} {group_size}: {self.size} process{'es' if self.size > 1 else ''} cannot be divided into "
                f"groups of {group_size}",
                f"Put NPROC_PER_NODE={group_size}, or a multiple of it, before the command.",
            )

    @property
    def data(self) -> World:
        """The data-parallel rank and size, where each group of processes that share sequences counts as one."""
        return World(self.rank // self.sequence_parallel_size, self.size // self.sequence_parallel_size)

    @property
    def share_rank(self) -> int:
        """0-based rank of this process in its group of processes that share sequences."""
        return self.rank % self.sequence_parallel_size

    @property
    def is_first(self) -> bool:
        """True for rank 0, which writes files and prints."""
        return self.rank == 0


def processes_of_machine(otherwise: int = 1) -> int:
    """Return the number of processes of the run on this machine; ``otherwise`` if the environment does not set it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("NPROC_PER_NODE") or otherwise)


def gpu_names(pattern: str = "/proc/driver/nvidia/gpus/*/information") -> tuple[str, ...]:
    """Return the names of the GPUs, without torch, from the driver's files that match ``pattern``."""
    names = []
    for path in sorted(glob.glob(pattern)):
        with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            if match := re.search(r"^Model:\s*(.+?)\s*$", file.read(), re.MULTILINE):
                names.append(match.group(1))
    return tuple(names)


T = TypeVar("T")

LOST_PEER = "another process of this run has ended, and so did this one; see the other one's message for the cause"
# Messages of gloo, NCCL and torch's store about a process that has ended.
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")


def leave_process_group() -> None:
    """Close the connections to other ranks; otherwise Gloo's threads may abort the process (SIGABRT)."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def is_lost_peer(error: Exception) -> bool:
    """Return whether an error was caused by the end of another process of the run."""
    return is_launched() and any(lost in str(error) for lost in _LOST)


def all_gather_objects(own: T, num_processes: int, group: Any = None) -> list[T]:
    """Gather a picklable object from each of ``num_processes``, by rank; all processes must call this."""
    if num_processes == 1:
        return [own]
    import torch.distributed as dist  # here, because a single process may do without torch

    objects: list[Any] = [None] * num_processes
    dist.all_gather_object(objects, own, group=group)
    return objects
